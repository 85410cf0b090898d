"""The arrows of docs/architecture.md: who may import whom, and who stays free of torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

# Importing any of these must not import torch: they answer while a training runs beside them, or
# where no torch is installed. The modules of advisor.models are added below, all of them.
FREE_OF_TORCH = (
    "advisor.profiler.records",
    "advisor.profiler.errors",
    "advisor.client",
    "advisor.cli",
)
HEAVY = ("torch", "transformers", "sklearn")
ROOMS = {"advisor": "advisor", "models": "advisor.models", "profiler": "advisor.profiler"}


def _run(arguments: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments, cwd=cwd, capture_output=True, text=True, timeout=120, check=False
    )


def _modules_of_models(repository: Path) -> list[str]:
    folder = repository / "models"
    names = []
    for file in sorted(folder.rglob("*.py")):
        parts = file.relative_to(folder).with_suffix("").parts
        names.append(".".join(["advisor.models", *(part for part in parts if part != "__init__")]))
    return names


def _heavy_modules_after(statement: str, cwd: Path) -> list[str]:
    """Returns which of `HEAVY` a fresh interpreter holds after `statement`."""
    report = f"print(json.dumps([name for name in {HEAVY} if name in sys.modules]))"
    code = f"import json, sys\n{statement}\n{report}"
    done = _run([sys.executable, "-c", code], cwd)
    assert done.returncode == 0, done.stderr
    heavy: list[str] = json.loads(done.stdout)
    return heavy


def _lint_imports(folder: Path, config: Path) -> subprocess.CompletedProcess[str]:
    # The command puts its working folder in front of sys.path: run in the root of the repository
    # it would see the folder advisor/ instead of the installed package.
    command = Path(sys.executable).with_name("lint-imports")
    return _run([str(command), "--no-logo", "--no-cache", str(config)], folder)


def test_imports_point_down(repository: Path, tmp_path: Path) -> None:
    done = _lint_imports(tmp_path, repository / "pyproject.toml")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("file", "line", "complaint"),
    [
        ("advisor/profiler/errors.py", "import advisor.request", "errors -> advisor.request"),
        ("advisor/models/plan.py", "import torch", "advisor.models.plan -> torch"),
        ("advisor/request.py", "import torch", "advisor.request -> torch"),
        ("advisor/request.py", "import google.protobuf", "advisor.request -> google"),
        ("advisor/request.py", "import advisor.v1", "advisor.request -> advisor.v1"),
        ("advisor/unplaced.py", "", "advisor.unplaced"),
    ],
)
def test_wrong_arrow_is_reported(
    repository: Path, tmp_path: Path, file: str, line: str, complaint: str
) -> None:
    """The contracts can fail: each is broken once, in a copy of the sources."""
    for room, package in ROOMS.items():
        for source in (repository / room).rglob("*.py"):
            target = tmp_path.joinpath(*package.split("."), source.relative_to(repository / room))
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(source.read_text())
    with (tmp_path / file).open("a") as sources:
        sources.write(f"\n{line}\n")
    done = _lint_imports(tmp_path, repository / "pyproject.toml")
    assert done.returncode != 0
    assert complaint in done.stdout


@pytest.mark.parametrize("module", FREE_OF_TORCH)
def test_module_imports_no_torch(module: str, tmp_path: Path) -> None:
    assert _heavy_modules_after(f"import {module}", tmp_path) == []


def test_models_import_no_torch(repository: Path, tmp_path: Path) -> None:
    modules = _modules_of_models(repository)
    assert "advisor.models.plan" in modules
    assert _heavy_modules_after(f"import {', '.join(modules)}", tmp_path) == []


def test_check_for_torch_sees_torch(tmp_path: Path) -> None:
    """The check above can fail: a module named torch that was imported is found."""
    (tmp_path / "torch.py").touch()
    assert _heavy_modules_after("import torch", tmp_path) == ["torch"]


def test_every_folder_of_sources_is_packaged(repository: Path) -> None:
    """A folder that pyproject.toml does not list would be missing from every installation."""
    project = tomllib.loads((repository / "pyproject.toml").read_text())
    found = set()
    for room, package in ROOMS.items():
        for file in (repository / room).rglob("*.py"):
            parts = file.parent.relative_to(repository / room).parts
            found.add(".".join([package, *parts]))
    assert found == set(project["tool"]["setuptools"]["packages"])


def test_installed_package_is_these_sources(repository: Path, tmp_path: Path) -> None:
    """`advisor.models` and `advisor.profiler` come from this repository's own folders."""
    code = (
        "import json, advisor, advisor.models.plan as m, advisor.profiler.records as p\n"
        "print(json.dumps([advisor.__file__, m.__file__, p.__file__]))"
    )
    done = _run([sys.executable, "-c", code], tmp_path)
    assert done.returncode == 0, done.stderr
    found = [os.path.realpath(file) for file in json.loads(done.stdout)]
    wanted = ["advisor/__init__.py", "models/plan.py", "profiler/records.py"]
    assert found == [str(repository / file) for file in wanted]
