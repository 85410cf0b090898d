"""What the README tells people to type and to write is what there is."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from advisor.profiler.preset_table import PRESETS


@pytest.fixture(scope="module")
def readme(repository: Path) -> str:
    return (repository / "README.md").read_text()


def _help(*command: str) -> str:
    advise = Path(sys.executable).with_name("advise")
    done = subprocess.run(
        [str(advise), *command, "--help"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, f"advise {' '.join(command)} is not there: {done.stderr}"
    return done.stdout


def test_example_workload_trains(readme: str, tmp_path: Path) -> None:
    """The README's workload is found, built, and takes a step as the advisor would take it."""
    import torch

    from advisor.profiler import workload
    from advisor.profiler.records import WorkloadSpec

    (source,) = re.findall(r"```python\n(# train\.py\n.*?)```", readme, flags=re.DOTALL)
    (tmp_path / "train.py").write_text(source)
    spec = WorkloadSpec(target="train.py:build", cwd=str(tmp_path), device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        # Loading a file changes these, as it does in the process of a trial.
        patch.setattr(sys, "path", [*sys.path])
        patch.setattr(sys, "argv", [*sys.argv])
        job = workload.build(spec, torch.device("cpu"))
    sys.modules.pop("train", None)
    assert callable(job.batches)
    assert job.loss is not None
    loss = job.loss(job.model, job.batches(0))
    loss.backward()
    assert loss.ndim == 0
    assert all(parameter.grad is not None for parameter in job.model.parameters())


def test_commands_exist(readme: str) -> None:
    named = set(re.findall(r"\badvise ([a-z]+)", readme))
    assert {"run", "serve", "show", "trials"} <= named
    for command in sorted(named):
        _help(command)


def test_options_exist(readme: str) -> None:
    named = set(re.findall(r"--[a-z][a-z-]+", readme))
    assert {"--steps", "--restarts", "--json"} <= named
    commands = ("run", "explain", "check", "estimate", "report", "train", "serve", "token")
    helps = "".join(_help(command) for command in commands)
    known = set(re.findall(r"--[a-z-]+", helps))
    assert named <= known


def test_presets_exist(readme: str) -> None:
    for name in PRESETS:
        family = name.split("-")[0]
        assert f"`{name}`" in readme or family == "gpt2", f"{name} is missing"
    named = set(re.findall(r"hf:([a-z0-9.-]+[a-z0-9])", readme))
    assert named <= set(PRESETS)


def test_make_targets_exist(repository: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (repository / "Makefile").read_text(), re.MULTILINE))
    pages = ("architecture", "ranks", "service")
    for page in ("README.md", "CONTRIBUTING.md", *(f"docs/{name}.md" for name in pages)):
        text = (repository / page).read_text()
        named = set(re.findall(r"(?:`|^\$ )make ([a-z]+)", text, re.MULTILINE))
        assert named <= targets, page


def test_constraints_pin_all_that_is_asked_for(repository: Path) -> None:
    """Each dependency, of each extra that `make` installs, has one exact version."""
    project = tomllib.loads((repository / "pyproject.toml").read_text())
    wanted = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    for extra in project["project"]["optional-dependencies"].values():
        wanted += extra
    lines = (repository / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0] for line in lines if "==" in line}
    names = {re.split(r"[<>=!~; \[]", requirement)[0].lower() for requirement in wanted}
    assert names <= pinned
