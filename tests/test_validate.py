"""Requests with unsound fields: each is named, all at once."""

from __future__ import annotations

import math

import pytest
from google.protobuf.message import Message

from advisor import validate
from advisor.convert import request_message
from advisor.models.plan import Plan
from advisor.profiler import records
from advisor.request import AdviceRequest, Limits
from advisor.v1 import advisor_pb2 as pb

REQUESTS: tuple[type[Message], ...] = (
    pb.AdviseRequest,
    pb.EstimateRequest,
    pb.ReportOutcomeRequest,
    pb.GetAdviceRequest,
    pb.WatchAdviceRequest,
    pb.CancelAdviceRequest,
    pb.ListAdvicesRequest,
    pb.ListTrialsRequest,
    pb.PutCacheRequest,
    pb.GetCacheRequest,
)


def sound() -> pb.AdviseRequest:
    request = pb.AdviseRequest(
        workload=pb.WorkloadSpec(target="train.py:build", cwd="/work"), plan=pb.Plan(steps=20_000)
    )
    request.limits.configs.add(scope="regional", mode="max-autotune", options={"a.b": "1"})
    return request


def fields_of(request: Message) -> list[str]:
    with pytest.raises(validate.InvalidRequest) as caught:
        validate.check(request)
    return [violation.field for violation in caught.value.violations]


def test_sound_request_passes() -> None:
    validate.check(sound())
    validate.check(pb.GetAdviceRequest(advice_id="0a1b2c"))
    validate.check(pb.ListTrialsRequest())


def test_every_field_of_a_request_has_a_row() -> None:
    def walk(descriptor: object) -> set[str]:
        found = set()
        for field in descriptor.fields:  # type: ignore[attr-defined]
            found.add(f"{field.containing_type.name}.{field.name}")
            if field.message_type is not None and field.name != "options":
                found |= walk(field.message_type)
        return found

    rows = set().union(*(walk(request.DESCRIPTOR) for request in REQUESTS))
    assert rows == set(validate.RULES)


def test_all_violations_are_told_at_once() -> None:
    request = pb.AdviseRequest(
        workload=pb.WorkloadSpec(
            target="a\0b", cwd="relative", device="tpu", batch_size=0, seed=-1
        ),
        plan=pb.Plan(steps=math.nan, hours=math.inf, restarts=-1, confidence=1.0),
        limits=pb.Limits(budget_s=-0.0, memory_limit_bytes=1e9 + 0.5),
    )
    request.limits.configs.add(scope="blocks", mode="fast", dynamic="maybe", backend="a b")
    request.limits.configs[0].options["bad name"] = "1"
    request.limits.configs[0].options["good"] = "\x1b[2J"
    assert fields_of(request) == [
        "workload.target",
        "workload.cwd",
        "workload.device",
        "workload.batch_size",
        "workload.seed",
        "plan.steps",
        "plan.hours",
        "plan.restarts",
        "plan.confidence",
        "limits.budget_s",
        "limits.memory_limit_bytes",
        "limits.configs[0].scope",
        "limits.configs[0].mode",
        "limits.configs[0].dynamic",
        "limits.configs[0].backend",
        "limits.configs[0].options['bad name']",
        "limits.configs[0].options['good']",
    ]


def test_missing_parts_are_required() -> None:
    assert fields_of(pb.AdviseRequest()) == ["workload", "plan"]
    request = pb.AdviseRequest(workload=pb.WorkloadSpec(), plan=pb.Plan(steps=1))
    assert fields_of(request) == ["workload.target", "workload.cwd"]
    assert fields_of(pb.GetAdviceRequest()) == ["advice_id"]


@pytest.mark.parametrize(
    "steps", [0.0, -1.0, -0.0, 1.5, 5e-324, 1e30, math.inf, -math.inf, math.nan]
)
def test_steps_that_make_no_sense(steps: float) -> None:
    request = sound()
    request.plan.steps = steps
    assert fields_of(request) == ["plan.steps"]


@pytest.mark.parametrize("text", ["a\nb", "a\rb", "\x1b]0;x\x07", "\x00", "\x7f", "\x85"])
def test_control_characters_are_refused_and_not_echoed(text: str) -> None:
    request = sound()
    request.workload.target = text
    with pytest.raises(validate.InvalidRequest) as caught:
        validate.check(request)
    assert text not in str(caught.value)


@pytest.mark.parametrize("text", ["файл.py:fn", "a b/%s{}.py:fn", "e\u0301.py:fn", "'; DROP--:fn"])
def test_unusual_names_pass(text: str) -> None:
    request = sound()
    request.workload.target = text
    validate.check(request)


def test_too_many_and_too_long() -> None:
    request = sound()
    request.workload.target = "x" * 5000
    for _ in range(101):
        request.limits.configs.add()
    assert fields_of(request) == ["workload.target", "limits.configs"]


def test_defaults_of_the_records_pass() -> None:
    validate.check(
        request_message(
            AdviceRequest(
                workload=records.WorkloadSpec(target="hf:gpt2", cwd="/"),
                plan=Plan(epochs=3, steps_per_epoch=100, eval_every=100, eval_steps=10),
                limits=Limits(budget_s=60, memory_limit_bytes=2**30, configs=(records.Config(),)),
            )
        )
    )
