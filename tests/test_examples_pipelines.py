"""The examples of pipelines run, and say what is missing where something is."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.trial

# Runs a notebook's code cells in their order within a running loop, as a kernel does: `await` may
# stand in a cell, and the settings of its first one are made quick.
RUN_CELLS = """
import ast, asyncio, inspect, json, sys
from advisor.profiler import Config
from advisor.profiler.records import Measuring

async def main():
    names = {"__name__": "__main__"}
    for number, cell in enumerate(json.load(open(sys.argv[1]))["cells"]):
        if cell["cell_type"] != "code":
            continue
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        code = compile("".join(cell["source"]), f"<cell {number}>", "exec", flags=flags)
        result = eval(code, names)
        if inspect.iscoroutine(result):
            await result
        if "measuring" in names:
            names["config"] = Config(backend="eager")
            names["measuring"] = Measuring(
                max_warm_up_s=0.3, max_steady_s=0.3, min_quads=4, max_diagnose_s=0.0
            )

asyncio.run(main())
"""


def run(*arguments: str, folder: Path, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        text=True,
        capture_output=True,
        timeout=timeout_s,
        check=False,
    )


def module_of(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pipeline_measures_decides_and_trains(repository: Path, tmp_path: Path) -> None:
    done = run(
        str(repository / "examples/airflow_like.py"),
        *("--quick", "--backend", "eager", "--steps", "1000", "--timeout", "100"),
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    verdict = json.loads(next(line for line in lines if line.startswith('{"target"')))
    assert verdict["status"] == "OK" and verdict["cold_start_s"] > 0
    assert json.loads(lines[-1])["compiled"] is verdict["compile"]
    assert any(line.startswith("Compiling ") for line in lines)
    assert list(tmp_path.iterdir()) == []


def test_a_task_that_runs_out_of_time_is_tried_again_and_fails(repository: Path) -> None:
    pipeline = module_of(repository / "examples/airflow_like.py")
    attempts = []

    @pipeline.task(retries=1)  # type: ignore[untyped-decorator]
    def flaky() -> dict[str, int]:
        attempts.append(1)
        raise pipeline.TryAgain("not yet")

    with pytest.raises(pipeline.TryAgain):
        flaky()
    assert len(attempts) == 2


def test_a_trial_that_fails_is_a_verdict_and_not_an_error(repository: Path) -> None:
    pipeline = module_of(repository / "examples/airflow_like.py")
    failed = {"status": "OUT_OF_MEMORY", "reason": "the machine ran out of memory"}
    assert pipeline.decide(failed, steps=1000) == {**failed, "compile": False, "saved_s": 0.0}


def test_the_loop_of_a_ray_worker_trains_without_ray(repository: Path, tmp_path: Path) -> None:
    done = run(
        str(repository / "examples/ray_train.py"), "--local", "--steps", "30", folder=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "'decision': 'AutoCompile" in done.stdout


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="ray is installed here")
def test_ray_that_is_missing_is_one_sentence(repository: Path, tmp_path: Path) -> None:
    done = run(str(repository / "examples/ray_train.py"), folder=tmp_path)
    assert done.returncode != 0
    assert done.stderr.strip().splitlines() == [
        'ray is not installed: pip install "ray[train]", or try the loop without it with --local'
    ]


def test_the_notebook_is_valid_and_runs_within_a_loop(repository: Path) -> None:
    file = repository / "examples/notebook.ipynb"
    notebook = json.loads(file.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    identities = [cell["id"] for cell in notebook["cells"]]
    assert len(set(identities)) == len(identities)
    for cell in notebook["cells"]:
        assert cell["cell_type"] in ("markdown", "code")
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
    done = run("-c", RUN_CELLS, str(file), folder=file.parent)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("OK") == 2, done.stdout
