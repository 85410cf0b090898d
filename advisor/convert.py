"""Converts between records and protobuf messages; no other module knows both.

Messages and records have the same field names, so one pair of functions serves all of them; a
test holds the two sides together. The rules, where the two differ:

* a message field with presence that is absent means the record's default, else None;
* an enum is matched by name; a cause that this version does not know reads as `OTHER`;
* `Config.options` is a map on the wire and a tuple of pairs, sorted by name, in the record;
* a number that is not finite is left out where absence is allowed (it was not measured);
* text that is not valid Unicode is written with backslash escapes.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import types
import typing
from typing import Any, TypeVar

from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from advisor import events, job_facts
from advisor.events import Event
from advisor.job_facts import EstimateRequest, EstimateResponse, OutcomeReport
from advisor.models.plan import Plan
from advisor.profiler import records, step_counts
from advisor.profiler.errors import AdvisorError, PlanError
from advisor.profiler.records import Advice, Diagnosis, Progress, Trial
from advisor.request import AdviceRequest, Limits
from advisor.stored import StoredTrial
from advisor.v1 import advisor_pb2 as pb

# Which message carries which record.
MESSAGES: dict[type[Any], type[Message]] = {
    AdviceRequest: pb.AdviseRequest,
    Plan: pb.Plan,
    Limits: pb.Limits,
    events.Accepted: pb.Accepted,
    events.Waiting: pb.Waiting,
    events.TrialStarted: pb.TrialStarted,
    records.WorkloadSpec: pb.WorkloadSpec,
    records.Measuring: pb.Measuring,
    records.Config: pb.Config,
    records.Progress: pb.Progress,
    records.Interval: pb.Interval,
    records.Failure: pb.Failure,
    records.GraphBreak: pb.GraphBreak,
    records.Recompile: pb.Recompile,
    records.WhatIf: pb.WhatIf,
    records.StepProfile: pb.StepProfile,
    records.CompileEvent: pb.CompileEvent,
    records.Shape: pb.Shape,
    records.Blocks: pb.Blocks,
    records.WorkloadFacts: pb.WorkloadFacts,
    records.Environment: pb.Environment,
    records.Timing: pb.Timing,
    records.Pair: pb.Pair,
    records.Trial: pb.Trial,
    records.RankFacts: pb.RankFacts,
    records.Collective: pb.Collective,
    records.Communication: pb.Communication,
    records.Fix: pb.Fix,
    records.Alternative: pb.Alternative,
    records.Shapes: pb.Shapes,
    records.PolicyTotal: pb.PolicyTotal,
    records.BucketTotal: pb.BucketTotal,
    records.Lengths: pb.Lengths,
    records.BatchClass: pb.BatchClass,
    records.ShapeTime: pb.ShapeTime,
    records.HandOver: pb.HandOver,
    records.Scaling: pb.Scaling,
    records.Advice: pb.Advice,
    records.Diagnosis: pb.Diagnosis,
    StoredTrial: pb.StoredTrial,
    job_facts.JobFacts: pb.JobFacts,
    step_counts.StepCounts: pb.StepCounts,
    step_counts.Work: pb.Work,
    job_facts.EstimateRequest: pb.EstimateRequest,
    job_facts.ConfigEstimate: pb.ConfigEstimate,
    job_facts.EstimateResponse: pb.EstimateResponse,
    job_facts.OutcomeReport: pb.ReportOutcomeRequest,
}

# Which field of `AdviseEvent.event` carries which record.
EVENT_FIELDS: dict[type[Any], str] = {
    events.Accepted: "accepted",
    events.Waiting: "waiting",
    events.TrialStarted: "trial_started",
    Progress: "progress",
    Trial: "trial_finished",
    Advice: "advice",
}

R = TypeVar("R")


def request_message(request: AdviceRequest) -> pb.AdviseRequest:
    """Returns the message of a request. Raises `AdvisorError` for what it cannot carry."""
    return typing.cast(pb.AdviseRequest, _message(request))


def request_record(message: pb.AdviseRequest) -> AdviceRequest:
    """Returns the request in a message. Raises `AdvisorError` naming a field that is not sound.

    The service asks `advisor.validate` first, which names all of them.
    """
    return _record(message, AdviceRequest)


def trial_message(trial: Trial) -> pb.Trial:
    """Returns the message of a trial."""
    return typing.cast(pb.Trial, _message(trial))


def trial_record(message: pb.Trial) -> Trial:
    """Returns the trial in a message. Raises `AdvisorError` when it is not complete."""
    return _record(message, Trial)


def advice_message(advice: Advice) -> pb.Advice:
    """Returns the message of an advice."""
    return typing.cast(pb.Advice, _message(advice))


def advice_record(message: pb.Advice) -> Advice:
    """Returns the advice in a message. Raises `AdvisorError` when it is not complete."""
    return _record(message, Advice)


def diagnosis_message(diagnosis: Diagnosis) -> pb.Diagnosis:
    """Returns the message of a diagnosis."""
    return typing.cast(pb.Diagnosis, _message(diagnosis))


def stored_trial_message(stored: StoredTrial) -> pb.StoredTrial:
    """Returns the message of a stored trial."""
    return typing.cast(pb.StoredTrial, _message(stored))


def stored_trial_record(message: pb.StoredTrial) -> StoredTrial:
    """Returns the stored trial in a message. Raises `AdvisorError` when it is not complete."""
    return _record(message, StoredTrial)


def estimate_request_message(request: EstimateRequest) -> pb.EstimateRequest:
    """Returns the message of a request. Raises `AdvisorError` for what it cannot carry."""
    return typing.cast(pb.EstimateRequest, _message(request))


def estimate_request_record(message: pb.EstimateRequest) -> EstimateRequest:
    """Returns the request in a message. Raises `AdvisorError` naming a field that is not sound."""
    return _record(message, EstimateRequest)


def estimate_message(response: EstimateResponse) -> pb.EstimateResponse:
    """Returns the message of an estimate."""
    return typing.cast(pb.EstimateResponse, _message(response))


def estimate_record(message: pb.EstimateResponse) -> EstimateResponse:
    """Returns the estimate in a message. Raises `AdvisorError` when it is not complete."""
    return _record(message, EstimateResponse)


def outcome_message(report: OutcomeReport) -> pb.ReportOutcomeRequest:
    """Returns the message of an outcome. Raises `AdvisorError` for what it cannot carry."""
    return typing.cast(pb.ReportOutcomeRequest, _message(report))


def outcome_record(message: pb.ReportOutcomeRequest) -> OutcomeReport:
    """Returns the outcome in a message. Raises `AdvisorError` naming a field that is not sound."""
    return _record(message, OutcomeReport)


def outcome_of_json(text: str, where: str) -> OutcomeReport:
    """Returns the outcome that a JSON object spells, checked like one from the wire.

    Raises `PlanError` naming `where` it stands when it is none.
    """
    from advisor.validate import check

    message = pb.ReportOutcomeRequest()
    try:
        json_format.Parse(text, message)
        check(message)
        return outcome_record(message)
    except json_format.ParseError as error:
        raise PlanError(f"{where} is no outcome", str(error)) from error
    except AdvisorError as error:
        raise PlanError(f"{where}: {error.what}", error.why, error.mend) from error


def event_message(event: Event, *, seq: int, elapsed_s: float) -> pb.AdviseEvent:
    """Returns the message of the `seq`-th event of a call, `elapsed_s` after its start."""
    message = pb.AdviseEvent(seq=seq, elapsed_s=elapsed_s)
    _put(message, EVENT_FIELDS[type(event)], _message(event))
    return message


def event_record(message: pb.AdviseEvent) -> Event | None:
    """Returns the event in a message, or None for a kind that this version does not know."""
    name = message.WhichOneof("event")
    for kind, field in EVENT_FIELDS.items():
        if field == name:
            return typing.cast(Event, _record(getattr(message, field), kind))
    return None


def message_json(message: Message, *, indent: int | None = 2) -> str:
    """Returns a message as JSON: the proto's field names, defaults included."""
    return json_format.MessageToJson(
        message,
        always_print_fields_with_no_presence=True,
        preserving_proto_field_name=True,
        indent=indent,
        ensure_ascii=False,
    )


def advice_json(advice: Advice) -> str:
    """Returns an advice as JSON: what `advise run --json` prints (design §8)."""
    return message_json(advice_message(advice))


# --- one pair of functions for all records


@dataclasses.dataclass(frozen=True, slots=True)
class _Slot:
    """A field of a record; `kind` is the type of its value, or of each element if repeated."""

    name: str
    kind: Any
    optional: bool
    repeated: bool
    has_default: bool
    # The field of the message that carries it, and the name of the field in errors.
    descriptor: Any
    where: str


def _slots(record: type[Any]) -> tuple[_Slot, ...]:
    hints = typing.get_type_hints(record)
    found = []
    for field in dataclasses.fields(record):
        kind, optional, repeated = hints[field.name], False, False
        if isinstance(kind, types.UnionType):
            (kind,) = (part for part in typing.get_args(kind) if part is not types.NoneType)
            optional = True
        if typing.get_origin(kind) is tuple:
            kind, repeated = typing.get_args(kind)[0], True
        has_default = not (
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        descriptor = MESSAGES[record].DESCRIPTOR.fields_by_name.get(field.name)
        where = f"{record.__name__}.{field.name}"
        found.append(_Slot(field.name, kind, optional, repeated, has_default, descriptor, where))
    return tuple(found)


SLOTS: dict[type[Any], tuple[_Slot, ...]] = {record: _slots(record) for record in MESSAGES}


def _message(record: Any) -> Message:
    message = MESSAGES[type(record)]()
    for slot in SLOTS[type(record)]:
        value = getattr(record, slot.name)
        if value is None or (slot.repeated and not value):
            continue
        descriptor, where = slot.descriptor, slot.where
        if slot.name == "options":
            getattr(message, slot.name).update({_text(key): _text(val) for key, val in value})
        elif slot.repeated:
            getattr(message, slot.name).extend(
                [_wire(item, slot, descriptor, where) for item in value]
            )
        elif descriptor.message_type is not None:
            _put(message, slot.name, _message(value))
        elif not (isinstance(value, float) and slot.optional and not math.isfinite(value)):
            _set(message, slot.name, _wire(value, slot, descriptor, where), where)
    return message


def _put(message: Message, name: str, value: Message) -> None:
    field = getattr(message, name)
    field.CopyFrom(value)
    field.SetInParent()  # a message of defaults alone is present all the same


def _set(message: Message, name: str, value: Any, where: str) -> None:
    try:
        setattr(message, name, value)
    except (ValueError, TypeError) as error:
        raise AdvisorError(f"{where} cannot be sent", str(error)) from error


def _wire(value: Any, slot: _Slot, descriptor: Any, where: str) -> Any:
    if dataclasses.is_dataclass(value):
        return _message(value)
    if descriptor.enum_type is not None:
        return descriptor.enum_type.values_by_name[value.name].number
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, (int, float)) and not math.isfinite(value):
        raise AdvisorError(f"{where} cannot be sent", "it is not a finite number")
    if descriptor.cpp_type == FieldDescriptor.CPPTYPE_INT32 and not -(2**31) <= value < 2**31:
        raise AdvisorError(f"{where} cannot be sent", f"{value} does not fit 32 bits")
    return value


def _text(text: str) -> str:
    """Returns `text` with lone surrogates escaped: protobuf refuses them, file names have them."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _record(message: Message, kind: type[R]) -> R:
    values: dict[str, Any] = {}
    for slot in SLOTS[kind]:
        descriptor, where = slot.descriptor, f"{message.DESCRIPTOR.name}.{slot.name}"
        if slot.name == "options":
            values[slot.name] = tuple(sorted(getattr(message, slot.name).items()))
        elif slot.repeated:
            values[slot.name] = tuple(
                _value(item, slot, descriptor, where) for item in getattr(message, slot.name)
            )
        elif not descriptor.has_presence or message.HasField(slot.name):
            values[slot.name] = _value(getattr(message, slot.name), slot, descriptor, where)
        elif not slot.has_default:
            if not slot.optional:
                raise AdvisorError(f"{where} is missing")
            values[slot.name] = None
    return kind(**values)


def _value(value: Any, slot: _Slot, descriptor: Any, where: str) -> Any:
    if isinstance(value, Message):
        return _record(value, slot.kind)
    if descriptor.enum_type is not None:
        return _enum_of(value, slot.kind, descriptor, where)
    if issubclass(slot.kind, enum.Enum):
        try:
            return slot.kind(value)
        except ValueError:
            known = ", ".join(member.value for member in slot.kind)
            raise AdvisorError(f"{where} {value!r} is unknown", f"known are {known}") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise AdvisorError(f"{where} is not a finite number")
    if slot.kind is int:
        if value != int(value):
            raise AdvisorError(f"{where} {value:g} is not a whole number")
        return int(value)
    return value


def _enum_of(number: int, kind: Any, descriptor: Any, where: str) -> Any:
    known = descriptor.enum_type.values_by_number.get(number)
    if known is not None and known.name in kind.__members__:
        return kind[known.name]
    if "OTHER" in kind.__members__:
        return kind["OTHER"]
    raise AdvisorError(
        f"{where} {number} is unknown", "the other side is newer", "upgrade compile-advisor here"
    )
