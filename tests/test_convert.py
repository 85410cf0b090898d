"""Records survive the way through messages; what cannot be carried is said."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from advisor import convert, events
from advisor.models.plan import Plan
from advisor.profiler import records
from advisor.profiler.errors import AdvisorError
from advisor.request import AdviceRequest
from advisor.v1 import advisor_pb2 as pb

# Text that protobuf can carry: no lone surrogates.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
INT32 = st.integers(-(2**31), 2**31 - 1)
EXACT = st.integers(0, 2**53)  # what a double carries exactly
OPTIONS = st.dictionaries(TEXT, TEXT, max_size=3).map(lambda pairs: tuple(sorted(pairs.items())))


def strategy(record: type[Any]) -> st.SearchStrategy[Any]:
    """Returns records of a class with any value that its fields allow."""
    return st.builds(record, **{slot.name: _field(record, slot) for slot in convert.SLOTS[record]})


def _field(record: type[Any], slot: Any) -> st.SearchStrategy[Any]:
    if slot.name == "options":
        return OPTIONS
    value = _value(record, slot)
    if slot.repeated:
        return st.lists(value, max_size=2).map(tuple)
    return st.none() | value if slot.optional else value


def _value(record: type[Any], slot: Any) -> st.SearchStrategy[Any]:
    if dataclasses.is_dataclass(slot.kind):
        return st.deferred(lambda: strategy(slot.kind))
    if issubclass(slot.kind, enum.Enum):
        return st.sampled_from(slot.kind)
    if slot.kind is int:
        field = convert.MESSAGES[record].DESCRIPTOR.fields_by_name[slot.name]
        return INT32 if field.cpp_type == field.CPPTYPE_INT32 else EXACT
    return {bool: st.booleans(), float: FLOATS, str: TEXT}[slot.kind]


relaxed = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@relaxed
@given(strategy(AdviceRequest))
def test_request_survives(request: AdviceRequest) -> None:
    wire = convert.request_message(request).SerializeToString()
    message = pb.AdviseRequest.FromString(wire)
    # limits and measuring of defaults alone are present all the same
    assert convert.request_record(message) == request


@relaxed
@given(strategy(records.Trial))
def test_trial_survives(trial: records.Trial) -> None:
    wire = convert.trial_message(trial).SerializeToString()
    assert convert.trial_record(pb.Trial.FromString(wire)) == trial


@relaxed
@given(strategy(records.Advice))
def test_advice_survives(advice: records.Advice) -> None:
    wire = convert.advice_message(advice).SerializeToString()
    assert convert.advice_record(pb.Advice.FromString(wire)) == advice


@relaxed
@given(st.one_of([strategy(kind) for kind in convert.EVENT_FIELDS]), INT32)
def test_event_survives(event: events.Event, seq: int) -> None:
    wire = convert.event_message(event, seq=seq, elapsed_s=1.5).SerializeToString()
    message = pb.AdviseEvent.FromString(wire)
    assert (message.seq, message.elapsed_s) == (seq, 1.5)
    assert convert.event_record(message) == event


def test_every_kind_of_event_has_its_field() -> None:
    fields = {field.name for field in pb.AdviseEvent.DESCRIPTOR.oneofs_by_name["event"].fields}
    assert fields == set(convert.EVENT_FIELDS.values())


def test_absent_fields_of_a_request_are_the_defaults() -> None:
    message = pb.AdviseRequest(
        workload=pb.WorkloadSpec(target="hf:gpt2", cwd="/x"), plan=pb.Plan(steps=5)
    )
    message.limits.configs.add(scope="regional")
    request = convert.request_record(message)
    assert request.workload == records.WorkloadSpec(target="hf:gpt2", cwd="/x")
    assert request.plan == Plan(steps=5)
    assert request.measuring == records.Measuring()
    assert request.limits.configs == (records.Config(scope=records.Scope.REGIONAL),)


def test_unknown_kind_of_event_is_skipped() -> None:
    assert convert.event_record(pb.AdviseEvent(seq=3)) is None


def test_cause_of_a_newer_server_reads_as_other() -> None:
    message = pb.GraphBreak(reason="new", count=1)
    message.cause = 99  # type: ignore[assignment]
    trial = pb.Trial(kind=pb.Trial.COMPILE, status=pb.Trial.OK, graph_breaks=[message])
    assert convert.trial_record(trial).graph_breaks[0].cause is records.GraphBreakCause.OTHER


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (pb.AdviseRequest(plan=pb.Plan(steps=5)), "AdviseRequest.workload is missing"),
        (
            pb.AdviseRequest(
                workload=pb.WorkloadSpec(),
                plan=pb.Plan(),
                limits=pb.Limits(configs=[pb.Config(mode="fast")]),
            ),
            "Config.mode 'fast' is unknown",
        ),
        (
            pb.AdviseRequest(
                workload=pb.WorkloadSpec(),
                plan=pb.Plan(),
                limits=pb.Limits(memory_limit_bytes=1.5),
            ),
            "Limits.memory_limit_bytes 1.5 is not a whole number",
        ),
        (
            pb.AdviseRequest(workload=pb.WorkloadSpec(), plan=pb.Plan(steps=float("nan"))),
            "Plan.steps is not a finite number",
        ),
    ],
)
def test_unsound_request_is_named(message: pb.AdviseRequest, sentence: str) -> None:
    with pytest.raises(AdvisorError, match=sentence):
        convert.request_record(message)


def test_trial_without_status_is_not_read() -> None:
    with pytest.raises(AdvisorError, match=r"Trial\.status"):
        convert.trial_record(pb.Trial(kind=pb.Trial.EAGER))


def test_number_that_fits_no_field_is_named() -> None:
    spec = records.WorkloadSpec(target="x", cwd="/", seed=2**40)
    with pytest.raises(AdvisorError, match=r"WorkloadSpec\.seed"):
        convert.request_message(AdviceRequest(workload=spec, plan=Plan(steps=1)))


def test_required_number_that_is_not_finite_is_refused() -> None:
    trial = records.Trial(
        trial_id="t",
        kind=records.TrialKind.EAGER,
        status=records.TrialStatus.OK,
        wall_s=float("inf"),
    )
    with pytest.raises(AdvisorError, match=r"Trial\.wall_s"):
        convert.trial_message(trial)
