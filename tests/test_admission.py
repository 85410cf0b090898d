"""Which workloads a server runs: below its folders, of its modules, presets; told no more."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from served import Served, failure, request

from advisor.convert import request_message
from advisor.places import data_folder
from advisor.profiler.errors import PlanError
from advisor.profiler.records import WorkloadSpec
from advisor.service.admission import Admission
from advisor.service.errors import Denied


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    (folder / "jobs").mkdir(parents=True)
    (folder / "jobs" / "train.py").write_text("def build(device): ...\n")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    (tmp_path / "outside.py").write_text("def build(device): ...\n")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "config.json").write_text("{}")
    return folder


@pytest.fixture
def admission(root: Path, tmp_path: Path) -> Admission:
    return Admission.of([root], ["package.jobs"], tmp_path)


def spec(target: str, cwd: Path) -> WorkloadSpec:
    return WorkloadSpec(target=target, cwd=str(cwd))


def test_what_is_below_is_passed_on_as_it_is(admission: Admission, root: Path) -> None:
    found = admission.admitted(spec("jobs/../jobs/train.py:build", root))
    assert found.target == f"{root}/jobs/train.py:build" and found.cwd == str(root)
    (root / "link.py").symlink_to("jobs/train.py")
    assert admission.admitted(spec("link.py:build", root)).target == found.target
    assert admission.admitted(spec("hf:model", root)).target == f"hf:{root}/model"


def test_what_needs_no_folder_runs_in_a_neutral_one(admission: Admission, tmp_path: Path) -> None:
    for target in ("hf:bert-base", "package.jobs:build", "package.jobs.large:build"):
        found = admission.admitted(spec(target, Path("/")))
        assert (found.target, found.cwd) == (target, str(tmp_path))


def _escapes(root: Path) -> Iterator[tuple[str, Path]]:
    outside = root.parent
    (root / "file.py").symlink_to(outside / "outside.py")
    (root / "folder").symlink_to(outside)
    (root / "loop.py").symlink_to("loop.py")
    (root / "fifo.py").parent.mkdir(exist_ok=True)
    os.mkfifo(root / "fifo.py")
    (root / "open.py").write_text("def build(device): ...\n")
    (root / "open.py").chmod(0o666)
    yield from (
        ("../outside.py:build", root),
        (f"{outside}/outside.py:build", root),
        ("file.py:build", root),
        ("folder/outside.py:build", root),
        ("loop.py:build", root),
        ("fifo.py:build", root),
        ("open.py:build", root),
        ("jobs:build", root),
        ("/proc/self/environ:build", root),
        ("/dev/null:build", root),
        ("nothing.py:build", root),
        ("outside.py:build", outside),
        ("a" * 300 + ".py:build", root),
        ("jobs/train.py", root),
        ("jobs/train.py:build", outside / "nowhere"),
        ("package:build", root),
        ("packages.jobs:build", root),
        ("os:system", root),
        ("builtins:exec", root),
        ("hf:../outside", root),
        (f"hf:{outside}/outside", root),
        ("hf:folder/outside", root),
        ("hf:", outside),
    )


def test_nothing_outside_is_run_and_nothing_is_learnt_of_it(
    admission: Admission, root: Path
) -> None:
    said = set()
    for target, cwd in _escapes(root):
        with pytest.raises(Denied) as caught:
            admission.admitted(spec(target, cwd))
        said.add(str(caught.value).replace(target, "X"))
    assert len(said) == 1


def test_server_whose_folders_make_no_sense_does_not_start(root: Path, tmp_path: Path) -> None:
    public = tmp_path / "public"
    public.mkdir()
    public.chmod(0o777)
    for folder, words in (
        (tmp_path / "none", "cannot be used"),
        (root / "jobs" / "train.py", "is not a folder"),
        (public, "everybody can write"),
    ):
        with pytest.raises(PlanError, match=words):
            Admission.of([folder], (), tmp_path)
    with pytest.raises(PlanError, match="--allow-module 'a b' is not a module's name"):
        Admission.of([root], ["a b"], tmp_path)


def test_private_server_runs_what_its_client_names(tmp_path: Path) -> None:
    named = spec("anything.py:build", Path("/somewhere"))
    assert Admission.everything(tmp_path).admitted(named) is named


def test_refused_over_the_wire_before_anything_runs(
    admission: Admission, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADVISOR_DATA_DIR", str(tmp_path / "data"))

    async def test(socket: Path) -> None:
        async with Served(data_folder(), socket, admission) as it:
            asked = replace(request(), workload=spec("../outside.py:build", root))
            code, error, _ = await failure(it.events(request_message(asked)))
            assert (code, type(error)) == (grpc.StatusCode.PERMISSION_DENIED, Denied)
            assert str(tmp_path) not in str(error)
            assert it.host.specs == []
            allowed = replace(request(), workload=spec("jobs/train.py:build", root))
            await it.events(request_message(allowed))
            assert it.host.specs[0].workload.target == f"{root}/jobs/train.py:build"

    with tempfile.TemporaryDirectory(prefix="adv-") as folder:
        asyncio.run(test(Path(folder, "s")))
