"""The workloads of `test_diagnosis_cases` compute the same mended as before, in plain eager."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

WORKLOADS = Path(__file__).parent / "workloads"
# Pairs that train on the same batches.
PAIRS = tuple(
    f"{file}:{name}"
    for file, names in {
        "causes": "scalar_read three_reads branch branch_in_loop branch_in_try masked printing logs"
        " warns unregistered half_registered by_scipy by_numpy",
        "python_breaks": "locked recurrent autograd_function hooked disabled skipped_frame",
        "recompiling": "lengths number picking counting dtype stride optimizer_state identity text"
        " stale",
    }.items()
    for name in names.split()
)


@pytest.fixture(scope="module")
def built() -> Iterator[Callable[[str], dict[str, Any]]]:
    """Returns a function that builds a workload in this process."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(WORKLOADS))
        before = set(sys.modules)
        torch.set_num_threads(1)

        def build(workload: str) -> dict[str, Any]:
            file, _, name = workload.partition(":")
            found = getattr(importlib.import_module(file), name)(torch.device("cpu"))
            assert isinstance(found, dict)
            return found

        yield build
        torch.set_num_threads(threads)
        for name in {"causes", "python_breaks", "recompiling"} - before:
            sys.modules.pop(name, None)


@pytest.mark.filterwarnings("ignore:features are not normalised")
@pytest.mark.parametrize("workload", PAIRS)
def test_a_mend_changes_no_number(workload: str, built: Callable[[str], dict[str, Any]]) -> None:
    """Plain eager losses of three steps are those of the model that was not mended."""
    assert _losses(built(f"{workload}_mended")) == pytest.approx(_losses(built(workload)), rel=1e-5)


def _losses(job: dict[str, Any]) -> list[float]:
    found = []
    for step in range(3):
        batch, model, optimizer = job["batches"](step), job["model"], job["optimizer"]
        if "step" in job:
            found.append(float(job["step"](model, batch, optimizer).detach()))
            continue
        optimizer.zero_grad(set_to_none=True)
        loss = job["loss"](model, batch)
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found
