"""The verdict on a script, from what its first steps have shown."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest

from advisor.models.loop_policy import Arm, LoopOutcome, Stage
from advisor.models.plan import Plan
from advisor.profiler.errors import AdvisorError
from advisor.profiler.records import Advice, Interval, TrialStatus, WorkloadFacts
from advisor.report import print_advice
from advisor.script_advice import advice_of
from advisor.script_run import ScriptRun
from advisor.watch_settings import Watched

FACTS = WorkloadFacts(
    fingerprint="",
    model_class="Net",
    parameters=1000,
    trainable_parameters=1000,
    optimizer="SGD",
    dtype="float32",
    shapes=(),
)
OUTCOME = LoopOutcome(
    stage=Stage.SETTLED,
    arm=Arm.COMPILED,
    steps_done=400,
    eager_step_s=0.1,
    speedup=Interval(median=1.25, low=1.2, high=1.3),
    compile_s=40.0,
    reason="compiled steps are faster",
)
SEEN = Watched(
    outcome=OUTCOME,
    settled=True,
    optimizer_steps=403,
    forwards=1,
    wait_s=0.01,
    graphs=2,
    facts=FACTS,
)


def advised(seen: Watched | None, plan: Plan, code: int | None = 0, reached: bool = True) -> Advice:
    run = ScriptRun(watched=seen, code=code, reached=reached, took_s=90.0)
    return advice_of(run, ["python", "train.py"], plan, "a1", "2026-12-02T00:00:00Z")


def with_outcome(**changes: object) -> Watched:
    return replace(SEEN, outcome=replace(OUTCOME, **changes))  # type: ignore[arg-type]


def test_long_training_compiles() -> None:
    advice = advised(SEEN, Plan(steps=20_000, price_per_hour=2.0))
    assert advice.enable
    assert advice.code == "model.compile()"
    assert advice.break_even_step == pytest.approx(40 / (0.1 - 0.08), rel=0.15)
    assert advice.eager_total_s.median == pytest.approx(20_000 * 0.11)
    assert advice.p_saves > 0.99
    assert advice.money_saved is not None
    assert advice.target == "python train.py"
    printed = io.StringIO()
    print_advice(advice, printed, width=80)
    text = printed.getvalue()
    assert text.startswith("ENABLE torch.compile: 1.25x faster")
    assert "within the first 400 steps of the script" in " ".join(text.split())
    assert "not tried" not in text


def test_short_training_stays_eager() -> None:
    advice = advised(SEEN, Plan(steps=500))
    assert not advice.enable
    assert advice.saved_s is None
    assert "and the plan has 500" in advice.reasons[0]


def test_plan_in_hours_counts_the_waiting() -> None:
    assert advised(SEEN, Plan(hours=1)).steps == pytest.approx(3600 / 0.11)


def test_speedup_keeps_its_interval() -> None:
    advice = advised(SEEN, Plan(steps=1e6))
    assert advice.speedup is not None
    assert advice.speedup.median == pytest.approx(1.25, rel=0.01)
    assert advice.speedup.low == pytest.approx(1.2, rel=0.02)
    assert advice.speedup.high == pytest.approx(1.3, rel=0.02)


@pytest.mark.parametrize(
    ("seen", "status", "why"),
    [
        (with_outcome(speedup=None, failure="it failed"), "FAILED_TO_COMPILE", "it failed"),
        (with_outcome(speedup=None, reason="too slow"), "CUT_OFF", "too slow"),
        (replace(SEEN, graphs=0), "OK", "graph"),
    ],
)
def test_compile_that_cannot_be_used_is_a_verdict(seen: Watched, status: str, why: str) -> None:
    advice = advised(seen, Plan(steps=1e6))
    assert not advice.enable
    assert advice.trials[-1].status is TrialStatus(status)
    assert why in advice.reasons[0]


def test_job_that_waits_for_data_is_warned() -> None:
    advice = advised(replace(SEEN, wait_s=0.1), Plan(steps=1e6))
    assert any("waits for data" in warning for warning in advice.warnings)


def test_what_was_seen_before_the_deadline_counts_with_a_warning() -> None:
    advice = advised(replace(SEEN, settled=False), Plan(steps=1e6), code=None)
    assert advice.enable
    assert any("cut short" in warning for warning in advice.warnings)


@pytest.mark.parametrize(
    ("seen", "code", "reached", "words"),
    [
        (None, 0, False, "no Python that has compile-advisor ran in it"),
        (None, 0, True, "no optimizer of torch has stepped"),
        (None, -9, True, "failed by itself by SIGKILL: after 0 optimizer steps"),
        (Watched(optimizer_steps=4), 1, True, "with exit code 1: after 4 optimizer steps"),
        (Watched(optimizer_steps=4), 0, True, "it took 4 optimizer steps"),
        (Watched(problem="two models"), None, True, "was not measured: two models"),
        (
            replace(SEEN, settled=False, outcome=replace(OUTCOME, speedup=None)),
            None,
            True,
            "within 1 min 30 s: it came to 403 optimizer steps and 40 s of compiling",
        ),
    ],
)
def test_nothing_measured_is_said(
    seen: Watched | None, code: int | None, reached: bool, words: str
) -> None:
    with pytest.raises(AdvisorError, match=words):
        advised(seen, Plan(steps=1e6), code, reached)
