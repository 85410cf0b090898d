"""The person's numbers: what is refused, in which words, and what a plan's length is."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.models.plan import MOST_STEPS, Plan
from advisor.profiler.errors import PlanError
from advisor.profiler.records import WorkloadSpec
from advisor.request import AdviceRequest, Limits

WORKLOAD = WorkloadSpec(target="train.py:build", cwd="/")

REFUSED = [
    ({"steps": 0}, "--steps 0 is too small"),
    ({"steps": -1}, "--steps -1 is too small"),
    ({"steps": 1e30}, "--steps 1e+30 is too large"),
    ({"steps": math.nan}, "--steps is not a number"),
    ({"steps": math.inf}, "--steps inf is too large"),
    ({"steps": 1.5}, "--steps 1.5 is not whole"),
    ({}, "the plan has no length"),
    ({"steps": 10, "hours": 1}, "--steps and --hours"),
    ({"steps": 0, "epochs": 0}, "--steps and --epochs"),
    ({"steps": 10, "steps_per_epoch": 10}, "--steps-per-epoch came alone"),
    ({"epochs": 3}, "--epochs came alone"),
    ({"steps_per_epoch": 3}, "--steps-per-epoch came alone"),
    ({"epochs": 1e9, "steps_per_epoch": 1e9}, "--epochs times --steps-per-epoch"),
    ({"hours": -2}, "--hours -2 is too small"),
    ({"hours": math.nan}, "--hours is not a number"),
    ({"steps": 10, "eval_every": 5}, "--eval-every came alone"),
    ({"steps": 10, "eval_steps": 5}, "--eval-steps came alone"),
    ({"steps": 10, "eval_every": 0, "eval_steps": 1}, "--eval-every 0 is too small"),
    ({"steps": 10, "restarts": -1}, "--restarts -1 is out of range"),
    ({"steps": 10, "restarts": 10**9}, "--restarts 1e+09 is out of range"),
    ({"steps": 10, "price_per_hour": -1.0}, "--price-per-hour -1 is out of range"),
    ({"steps": 10, "price_per_hour": math.nan}, "--price-per-hour is not a number"),
    ({"steps": 10, "confidence": 1.0}, "--confidence 1 is out of range"),
    ({"steps": 10, "confidence": math.nan}, "--confidence nan is out of range"),
]


@pytest.mark.parametrize(("numbers", "words"), REFUSED)
def test_nonsense_is_refused_in_one_clear_sentence(numbers: dict, words: str) -> None:
    with pytest.raises(PlanError) as raised:
        Plan(**numbers).validate()
    message = str(raised.value)
    assert words in message
    assert "\n" not in message
    assert len(message) < 200
    assert raised.value.why or raised.value.mend, "a refusal says what was expected"


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (Limits(budget_s=0), "--budget 0"),
        (Limits(budget_s=-5), "--budget -5"),
        (Limits(budget_s=math.nan), "--budget nan"),
        (Limits(budget_s=1e30), "--budget 1e+30"),
        (Limits(memory_limit_bytes=1000), "--memory-limit 1000 bytes is too small"),
        (Limits(memory_limit_bytes=-1), "--memory-limit"),
    ],
)
def test_limits_that_make_no_sense_are_refused(limits: Limits, words: str) -> None:
    request = AdviceRequest(workload=WORKLOAD, plan=Plan(steps=10), limits=limits)
    with pytest.raises(PlanError, match=words.replace("+", r"\+")):
        request.validate()


def test_sound_requests_pass() -> None:
    for plan in (
        Plan(steps=1),
        Plan(steps=MOST_STEPS),
        Plan(epochs=0.5, steps_per_epoch=100),
        Plan(hours=1e-3, restarts=3, eval_every=100, eval_steps=7, price_per_hour=0.0),
    ):
        AdviceRequest(workload=WORKLOAD, plan=plan, limits=Limits(budget_s=60.0)).validate()


def test_three_lengths_name_the_same_steps() -> None:
    assert Plan(steps=3600).steps_planned(0.5) == 3600
    assert Plan(epochs=3, steps_per_epoch=1200).steps_planned(0.5) == 3600
    assert Plan(hours=0.5).steps_planned(0.5) == 3600


def test_evaluations_are_those_that_come_within_the_plan() -> None:
    plan = Plan(steps=1000, eval_every=300, eval_steps=5)
    assert plan.evaluations(1000) == 3
    assert plan.evaluations(299) == 0
    assert Plan(steps=1000).evaluations(1000) == 0


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_any_number_of_steps_is_a_plan_or_a_plan_error(steps: float) -> None:
    plan = Plan(steps=steps)
    sound = 1 <= steps <= MOST_STEPS and steps == math.floor(steps)
    if sound:
        plan.validate()
        assert plan.steps_planned(1.0) == steps
    else:
        with pytest.raises(PlanError):
            plan.validate()


def test_a_plan_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Plan(steps=1).steps = 2  # type: ignore[misc]
