"""`profiler.diagnose`: the causes of a workload, for pipelines."""

from __future__ import annotations

from pathlib import Path

import pytest

from advisor.profiler import Config, Diagnosis, diagnose
from advisor.profiler.records import FixKind, Measuring, TrialKind

pytestmark = pytest.mark.trial

WORKLOADS = Path(__file__).parent / "workloads"
QUICK = Measuring(max_warm_up_s=0.5, max_steady_s=0.5, min_quads=4, numerics_steps=3)


def test_a_setting_that_removes_the_cause_is_tried_and_its_gain_measured() -> None:
    # The backend "eager" captures the same graphs and compiles no C++.
    found = diagnose(
        f"{WORKLOADS / 'causes.py'}:scalar_read",
        Config(backend="eager"),
        device="cpu",
        measuring=QUICK,
    )
    assert isinstance(found, Diagnosis)
    assert [trial.kind for trial in found.trials] == [
        TrialKind.EAGER,
        TrialKind.COMPILE,
        TrialKind.COMPILE,
    ]
    broken, mended = found.trials[1:]
    assert len(broken.graph_breaks) == 1
    assert mended.graph_breaks == ()
    fix = next(fix for fix in found.fixes if fix.kind is FixKind.GRAPH_BREAK)
    assert (fix.cause, fix.measured, fix.hits_per_step) == ("SCALAR_READ", True, 1.0)
    assert fix.gain is not None
    assert mended.config is not None
    assert fix.options == mended.config.options
    assert ".item()" in fix.code
    assert found.config == Config(backend="eager")
    assert "1 place ends a graph" in " ".join(found.summary)
