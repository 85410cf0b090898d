"""A run that was handed a cache tries vector instructions in its own process, and only these."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from torch._inductor import cpu_vec_isa

from advisor import quick_start


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Gives the libraries that were tried in a process of their own."""
    tried: list[str] = []

    def probe(self: object, path: str) -> bool:
        tried.append(path)
        return True

    monkeypatch.setattr(cpu_vec_isa.VecISA, "_probe_load", probe)
    return tried


def library(folder: Path) -> Path:
    """Makes a library that can be loaded."""
    folder.mkdir()
    source = folder / "code.c"
    source.write_text("int one(void) { return 1; }")
    made = folder / "code.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", made, source], check=True)
    return made


def instructions() -> Any:
    return cpu_vec_isa.VecAVX2()


def test_what_the_cache_holds_is_loaded_here(tmp_path: Path, probes: list[str]) -> None:
    inside, outside = library(tmp_path / "cache"), library(tmp_path / "other")
    quick_start.start(tmp_path / "cache")
    assert instructions()._probe_load(str(inside))
    assert probes == []
    assert instructions()._probe_load(str(outside))
    assert probes == [str(outside)]


def test_a_library_that_cannot_be_loaded_is_no_vector_instruction(
    tmp_path: Path, probes: list[str]
) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"\x7fELF")
    quick_start.start(tmp_path)
    assert not instructions()._probe_load(str(broken))
    assert not instructions()._probe_load(str(tmp_path / "none.so"))
    assert probes == []


def test_a_run_without_a_cache_is_left_alone(probes: list[str]) -> None:
    before = cpu_vec_isa.VecISA._probe_load
    quick_start.start("")
    assert cpu_vec_isa.VecISA._probe_load is before
