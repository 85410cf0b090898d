"""What is worth mending in the job itself: hints from measured shares, and none without them."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.profiler.job_hints import hints
from advisor.profiler.records import (
    Config,
    Dynamic,
    Environment,
    Fix,
    FixKind,
    Interval,
    Recompile,
    RecompileCause,
    StepProfile,
    Timing,
    Trial,
    TrialKind,
    TrialStatus,
    WorkloadFacts,
)

STEP = Interval(median=0.1, low=0.095, high=0.105)
HEALTHY = StepProfile(
    operator_calls=900,
    forward_share=0.3,
    backward_share=0.6,
    optimizer_share=0.05,
    dispatch_share=0.02,
    device_busy_share=0.97,
    float32_matmul_share=None,
    padding_share=0.02,
    batch_size=64,
)


def _eager(
    wait_s: float = 0.001, *, optimizer: str = "AdamW", device: str = "cuda:0", **facts: Any
) -> Trial:
    return Trial(
        trial_id="eager",
        kind=TrialKind.EAGER,
        status=TrialStatus.OK,
        eager_step_s=STEP,
        eager=Timing(step_s=STEP, data_wait_s=wait_s, steps=50),
        step_profile=replace(HEALTHY, **facts),
        workload=WorkloadFacts(
            fingerprint="f",
            model_class="m.Model",
            parameters=1,
            trainable_parameters=1,
            optimizer=optimizer,
            dtype="float32",
            shapes=(),
            batches_per_epoch=200,
        ),
        environment=Environment(
            torch="2.13.0",
            python="3.11",
            device=device,
            device_name="H200",
            cores=16,
            threads=16,
            memory_bytes=1,
        ),
    )


def _compiled(*recompiles: Recompile, dynamic: Dynamic = Dynamic.AUTO) -> Trial:
    return Trial(
        trial_id="compiled",
        kind=TrialKind.COMPILE,
        status=TrialStatus.OK,
        config=Config(dynamic=dynamic),
        cold_start_s=42.0,
        recompiles=recompiles,
    )


def _hints(eager: Trial, best: Trial | None = None, *, evaluation: bool = False) -> list[Fix]:
    return list(hints(eager, plan_has_evaluation=evaluation, best_compiled=best))


def _only(eager: Trial, best: Trial | None = None, *, evaluation: bool = False) -> Fix:
    (fix,) = _hints(eager, best, evaluation=evaluation)
    assert fix.kind is FixKind.JOB and not fix.measured
    return fix


@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
def test_a_healthy_job_gets_no_hint(device: str) -> None:
    assert _hints(_eager(device=device), _compiled()) == []


def test_nothing_is_hinted_that_was_not_measured() -> None:
    unknown = replace(
        _eager(),
        step_profile=StepProfile(optimizer_loops=True, tf32_off=True, bfloat16_native=True),
    )
    assert _hints(unknown, evaluation=True) == []
    bare = Trial(trial_id="t", kind=TrialKind.EAGER, status=TrialStatus.CRASHED)
    assert _hints(bare, evaluation=True) == []
    assert _hints(replace(_eager(), eager=None, step_profile=None)) == []


def test_waiting_for_input() -> None:
    fix = _only(_eager(wait_s=0.1))
    assert fix.cause == "DATA_WAIT"
    assert "50%" in fix.what and "num_workers" in fix.what and "pin_memory" in fix.what
    assert fix.gain is not None
    assert fix.gain.low == 1 and fix.gain.high == pytest.approx(2)
    assert fix.gain.median == pytest.approx(1 / (1 - 0.5 * 0.9))
    assert "pin_memory" not in _only(_eager(wait_s=0.1, device="cpu")).what
    # The wait is all that was measured.
    assert _only(replace(_eager(wait_s=0.1), step_profile=None)).cause == "DATA_WAIT"


@pytest.mark.parametrize(
    ("facts", "cause", "share", "words"),
    [
        ({"device_busy_share": 0.4}, "DEVICE_IDLE", 0.6, ("60%", "reduce-overhead")),
        (
            {"float32_matmul_share": 0.7, "tf32_off": True},
            "TF32_OFF",
            0.7,
            ("70%", 'torch.set_float32_matmul_precision("high")'),
        ),
        (
            {"float32_matmul_share": 0.5, "bfloat16_native": True},
            "FLOAT32",
            0.5,
            ("50%", 'torch.autocast("cuda", torch.bfloat16)'),
        ),
        ({"dispatch_share": 0.8}, "SMALL_BATCH", 0.8, ("900 operators", "80%", "now 64 rows")),
        (
            {"optimizer_loops": True, "optimizer_share": 0.3},
            "OPTIMIZER_LOOP",
            0.3,
            ("30%", "AdamW(..., fused=True)"),
        ),
        # Of the 90 % of the step that tokens go through.
        ({"padding_share": 0.4}, "PADDING", 0.36, ("40%", "90%", "length")),
    ],
)
def test_each_share_of_the_step(
    facts: dict[str, Any], cause: str, share: float, words: tuple[str, ...]
) -> None:
    fix = _only(_eager(wait_s=0.0, **facts))
    assert fix.cause == cause
    assert all(word in fix.what for word in words), fix.what
    assert fix.gain is not None and fix.gain.low == 1
    if "float32_matmul_share" in facts:
        share *= 1 - (HEALTHY.dispatch_share or 0)
    assert fix.gain.high == pytest.approx(1 / (1 - share))
    assert 1 < fix.gain.median < fix.gain.high


def test_a_mend_of_the_step_does_not_shorten_the_wait() -> None:
    wait, idle = _hints(_eager(wait_s=0.1, device_busy_share=0.4))
    assert (wait.cause, idle.cause) == ("DATA_WAIT", "DEVICE_IDLE")
    assert idle.gain is not None and idle.gain.high == pytest.approx(1 / (1 - 0.6 / 2))


@pytest.mark.parametrize(
    ("optimizer", "mend"),
    [
        ("SGD", "SGD(..., fused=True)"),
        ("RMSprop", "RMSprop(..., foreach=True)"),
        ("Lamb", "torch.optim.AdamW(..., fused=True)"),
    ],
)
def test_the_mend_of_a_loop_is_one_that_the_optimizer_has(optimizer: str, mend: str) -> None:
    fix = _only(_eager(optimizer=optimizer, optimizer_loops=True, optimizer_share=0.3))
    assert mend in fix.what


def test_lists_of_tensors_are_no_mend_on_the_cpu() -> None:
    loop = {"optimizer_loops": True, "optimizer_share": 0.3}
    assert _hints(_eager(optimizer="RMSprop", device="cpu", **loop)) == []
    assert "fused=True" in _only(_eager(optimizer="SGD", device="cpu", **loop)).what


def test_a_large_optimizer_share_without_a_loop_is_no_mistake() -> None:
    assert _hints(_eager(optimizer_share=0.6)) == []
    assert _hints(_eager(float32_matmul_share=0.9)) == []


def test_small_products_are_calls_and_not_arithmetic() -> None:
    small = {"float32_matmul_share": 0.6, "dispatch_share": 0.7}
    assert _only(_eager(bfloat16_native=True, tf32_off=True, **small)).cause == "SMALL_BATCH"


def test_on_the_cpu_autocast_is_the_cpus() -> None:
    fix = _only(_eager(device="cpu", float32_matmul_share=0.5, bfloat16_native=True))
    assert 'torch.autocast("cpu", torch.bfloat16)' in fix.what


def test_a_short_last_batch_costs_a_graph_and_no_step_time() -> None:
    eager = _eager(last_batch_size=7)
    fix = _only(eager)
    assert fix.cause == "LAST_BATCH" and fix.gain is None and fix.lost_s is None
    assert "7 rows instead of 64 (0.5% of the steps)" in fix.what and "drop_last" in fix.what
    lost = Recompile(cause=RecompileCause.BATCH_SIZE, reason="size", lost_s=12.0)
    other = Recompile(cause=RecompileCause.PYTHON_NUMBER, reason="n", lost_s=99.0)
    fix = _only(eager, _compiled(lost, other))
    assert fix.lost_s == 12 and "12 s" in fix.what
    assert _hints(eager, _compiled(dynamic=Dynamic.TRUE)) == []


def test_validation_compiles_a_second_graph() -> None:
    fix = _only(_eager(), _compiled(), evaluation=True)
    assert fix.cause == "VALIDATION_GRAPH" and fix.gain is None and fix.lost_s is None
    assert "up to 42 s" in fix.what and "force_eager" in fix.what
    lost = Recompile(cause=RecompileCause.TRAIN_EVAL, reason="training", lost_s=9.0)
    assert _only(_eager(), _compiled(lost), evaluation=True).lost_s == 9
    # Eager validation costs nothing.
    assert _hints(_eager(), None, evaluation=True) == []
    assert _hints(_eager(), _compiled(), evaluation=False) == []


SHARES = st.none() | st.floats(0, 1)


@given(
    busy=SHARES,
    dispatch=SHARES,
    products=SHARES,
    optimizer=SHARES,
    padding=SHARES,
    wait_s=st.floats(0, 10),
)
def test_gains_are_ordered_finite_and_never_a_loss(
    busy: float | None,
    dispatch: float | None,
    products: float | None,
    optimizer: float | None,
    padding: float | None,
    wait_s: float,
) -> None:
    eager = _eager(
        wait_s,
        device_busy_share=busy,
        dispatch_share=dispatch,
        float32_matmul_share=products,
        optimizer_share=optimizer,
        padding_share=padding,
        optimizer_loops=True,
        tf32_off=True,
        bfloat16_native=True,
        last_batch_size=3,
    )
    found = _hints(eager, _compiled(), evaluation=True)
    medians = [fix.gain.median if fix.gain else 0.0 for fix in found]
    assert medians == sorted(medians, reverse=True)
    assert len({fix.cause for fix in found}) == len(found)
    for fix in found:
        assert "nan" not in fix.what and "None" not in fix.what
        if fix.gain is not None:
            assert 1 == fix.gain.low <= fix.gain.median <= fix.gain.high <= 20.01


def test_the_hints_need_no_torch(tmp_path: Path) -> None:
    code = "import sys, advisor.profiler.job_hints; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        # The folder of the repository would hide the installed package.
        cwd=tmp_path,
    )
    assert done.stdout.strip() == "False"
