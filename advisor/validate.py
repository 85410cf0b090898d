"""What a request may hold: one table, one row for each field; all violations are told at once.

The rows bound single fields. What belongs together (exactly one length of the plan, ...) is
checked by `AdviceRequest.validate` afterwards.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from advisor.job_facts import PRECISIONS
from advisor.models.devices import Device
from advisor.models.plan import MOST_HOURS, MOST_NETWORK_BYTES_PER_S, MOST_STEPS, MOST_WORLD_SIZE
from advisor.profiler.bundle import MOST_BYTES
from advisor.profiler.errors import PlanError
from advisor.profiler.handover import NAME_PATTERN
from advisor.profiler.lengths import MOST_DISTINCT, MOST_LENGTH
from advisor.profiler.records import MOST_RANKS, Dynamic, LengthSource, Mode, Order, Scope, Wrapper
from advisor.profiler.step_counts import OperatorKind
from advisor.request import OnDisconnect

_MOST_SHOWN = 40


@dataclass(frozen=True, slots=True)
class Violation:
    """One field that is not sound; `field` is its path, such as `plan.steps`."""

    field: str
    why: str


class InvalidRequest(PlanError):
    """A request with fields that are not sound."""

    def __init__(self, violations: Sequence[Violation]) -> None:
        super().__init__(
            "the request is not sound", "; ".join(f"{it.field}: {it.why}" for it in violations)
        )
        self.violations = tuple(violations)


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A text without control characters, at most `most` characters long."""

    most: int = 100
    required: bool = False
    known: tuple[str, ...] = ()
    pattern: str = ""
    says: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A finite number from `least` (or above it, if `above`) to `most`."""

    least: float = 0.0
    most: float = 2.0**31 - 1
    above: bool = False
    whole: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A message within the message; its own fields have their own rows."""

    required: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """At most `most` messages."""

    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """At most `most` numbers."""

    most: int
    number: Number
    required: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """True or false: nothing to check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """At most `most` names with their texts."""

    most: int
    key: Text
    value: Text


Rule = Text | Number | Numbers | Part | Parts | Flag | Texts

_ID = r"[A-Za-z0-9_-]+"
_DOTTED = Text(pattern=r"[A-Za-z0-9_.-]+", says="a name of letters, digits, '_', '.' and '-'")
_COUNT = Number(above=True)
_STEPS = Number(above=True, most=MOST_STEPS, whole=True)
_LENGTH = Number(above=True, most=MOST_LENGTH)
_DAY_S = 86_400.0

RULES: dict[str, Rule] = {
    "AdviseRequest.workload": Part(required=True),
    "AdviseRequest.plan": Part(required=True),
    "AdviseRequest.limits": Part(),
    "AdviseRequest.measuring": Part(),
    "AdviseRequest.lengths": Part(),
    "AdviseRequest.request_id": Text(pattern=_ID, says="letters, digits, '_' and '-'"),
    "AdviseRequest.on_disconnect": Text(known=tuple(OnDisconnect)),
    "WorkloadSpec.target": Text(most=4096, required=True),
    "WorkloadSpec.cwd": Text(
        most=4096, required=True, pattern=r"/.*", says="the absolute path of a folder"
    ),
    "WorkloadSpec.device": Text(
        pattern=r"(auto|cpu|mps|(cuda|xpu)(:[0-9]{1,3})?)", says="auto, cpu, cuda, cuda:1, xpu, mps"
    ),
    "WorkloadSpec.task": Text(),
    "WorkloadSpec.batch_size": _COUNT,
    "WorkloadSpec.length": _COUNT,
    "WorkloadSpec.precision": Text(),
    "WorkloadSpec.scale": Text(),
    "WorkloadSpec.seed": Number(),
    "WorkloadSpec.ranks": Number(above=True, most=MOST_RANKS),
    "WorkloadSpec.wrapper": Text(known=tuple(Wrapper)),
    "WorkloadSpec.checkpointing": Flag(),
    "WorkloadSpec.port": Number(most=65_535),
    "Plan.steps": _STEPS,
    "Plan.epochs": Number(above=True, most=MOST_STEPS),
    "Plan.steps_per_epoch": _STEPS,
    "Plan.hours": Number(above=True, most=MOST_HOURS),
    "Plan.restarts": Number(most=1_000_000),
    "Plan.eval_every": _STEPS,
    "Plan.eval_steps": _STEPS,
    "Plan.price_per_hour": Number(most=1e9),
    "Plan.world_size": Number(least=2, most=MOST_WORLD_SIZE),
    "Plan.network_bytes_per_s": Number(above=True, most=MOST_NETWORK_BYTES_PER_S),
    "Plan.confidence": Number(least=0.5, most=math.nextafter(1.0, 0.0)),
    "Limits.budget_s": Number(above=True, most=30 * _DAY_S),
    "Limits.memory_limit_bytes": Number(least=512 * 2.0**20, most=2.0**53, whole=True),
    "Limits.configs": Parts(most=100),
    "Limits.measure_anyway": Flag(),
    "Limits.exhaustive": Flag(),
    "Limits.fresh": Flag(),
    "Measuring.half_width": Number(least=0.001, most=0.5),
    "Measuring.min_quads": Number(least=2, most=10_000),
    "Measuring.max_steady_s": Number(above=True, most=_DAY_S),
    "Measuring.max_warm_steady_s": Number(above=True, most=_DAY_S),
    "Measuring.max_warm_up_s": Number(above=True, most=_DAY_S),
    "Measuring.quiet_steps": Number(least=1, most=10_000),
    "Measuring.numerics_steps": Number(most=10_000),
    "Measuring.max_diagnose_s": Number(most=_DAY_S),
    "Lengths.values": Numbers(most=MOST_DISTINCT, number=_LENGTH, required=True),
    "Lengths.counts": Numbers(
        most=MOST_DISTINCT, number=Number(above=True, most=1e12, whole=True), required=True
    ),
    "Lengths.batch_size": _COUNT,
    "Lengths.tokens_per_batch": _COUNT,
    "Lengths.pad_to": _LENGTH,
    "Lengths.pad_multiple": _LENGTH,
    "Lengths.shuffled": Flag(),
    "Lengths.drop_last": Flag(),
    "Lengths.source": Text(known=tuple(LengthSource)),
    "Lengths.whole_batches": Flag(),
    "Lengths.batches": Parts(most=MOST_DISTINCT),
    "BatchClass.rows": _COUNT,
    "BatchClass.length": _LENGTH,
    "BatchClass.count": _COUNT,
    "Config.scope": Text(known=tuple(Scope)),
    "Config.mode": Text(known=tuple(Mode)),
    "Config.dynamic": Text(known=tuple(Dynamic)),
    "Config.order": Text(known=tuple(Order)),
    "Config.fullgraph": Flag(),
    "Config.backend": _DOTTED,
    "Config.options": Texts(most=100, key=_DOTTED, value=Text(most=1000)),
    "JobFacts.device": Text(required=True),
    "JobFacts.family": Text(),
    "JobFacts.precision": Text(known=PRECISIONS),
    "JobFacts.parameters": Number(above=True, most=1e14),
    "JobFacts.batch": Number(above=True, most=1e9),
    "JobFacts.length": Number(above=True, most=MOST_LENGTH),
    "JobFacts.image": Number(above=True, most=1e5),
    "JobFacts.eager_step_s": Number(above=True, most=_DAY_S),
    "JobFacts.operators": Number(above=True, most=1e8),
    "JobFacts.graph_breaks": Number(most=1e6),
    "JobFacts.counts": Part(),
    "JobFacts.fingerprint": Text(pattern=_ID, says="a name of letters, digits, '_' and '-'"),
    "StepCounts.parameters": Number(above=True, most=1e14),
    "StepCounts.tensors": Number(above=True, most=1e7),
    "StepCounts.layers": Number(most=1e7),
    "StepCounts.eager": Parts(most=1000),
    "StepCounts.fused": Parts(most=1000),
    "StepCounts.samples": Number(above=True, most=1e9),
    "StepCounts.parameter_bytes": Number(above=True, most=1e15),
    "Work.kind": Text(required=True, known=tuple(OperatorKind)),
    "Work.calls": Number(above=True, most=1e9),
    "Work.flops": Number(most=1e21),
    "Work.bytes": Number(most=1e18),
    "EstimateRequest.facts": Part(required=True),
    "EstimateRequest.plan": Part(),
    "EstimateRequest.configs": Parts(most=32),
    "ReportOutcomeRequest.facts": Part(required=True),
    "ReportOutcomeRequest.config": Part(),
    "ReportOutcomeRequest.speedup": Number(least=0.01, most=100),
    "ReportOutcomeRequest.compile_s": Number(above=True, most=_DAY_S),
    "ReportOutcomeRequest.memory_ratio": Number(least=0.01, most=100),
    "ReportOutcomeRequest.source": Text(most=300),
    "GetAdviceRequest.advice_id": Text(required=True, pattern=_ID, says="an advice id"),
    "WatchAdviceRequest.advice_id": Text(required=True, pattern=_ID, says="an advice id"),
    "WatchAdviceRequest.after_seq": Number(whole=True),
    "CancelAdviceRequest.advice_id": Text(required=True, pattern=_ID, says="an advice id"),
    "ListAdvicesRequest.page_size": Number(most=1000),
    "ListAdvicesRequest.page_token": Text(pattern=r"[0-9]{1,18}", says="a next_page_token"),
    "PutCacheRequest.sha256": Text(pattern=r"[0-9a-f]{64}", says="64 hexadecimal digits"),
    "PutCacheRequest.size_bytes": Number(most=MOST_BYTES, whole=True),
    "PutCacheRequest.offset": Number(most=MOST_BYTES, whole=True),
    "PutCacheRequest.data": Flag(),
    "GetCacheRequest.name": Text(pattern=NAME_PATTERN, says="an id", required=True),
    "GetCacheRequest.offset": Number(most=MOST_BYTES, whole=True),
    "ListTrialsRequest.advice_id": Text(pattern=_ID, says="an advice id"),
    "ListTrialsRequest.page_size": Number(most=1000),
    "ListTrialsRequest.page_token": Text(pattern=r"[0-9]{1,18}", says="a next_page_token"),
}


def check(message: Message) -> None:
    """Raises `InvalidRequest` with every violation in a request message; none: returns."""
    violations = tuple(_violations(message, ""))
    if violations:
        raise InvalidRequest(violations)


def check_device(name: str) -> None:
    """Raises `InvalidRequest` for a device that the cost model does not know."""
    try:
        Device.from_name(name)
    except PlanError as error:
        raise InvalidRequest((Violation("facts.device", str(error)),)) from error


def _violations(message: Message, prefix: str) -> Iterator[Violation]:
    # The stubs take a message's `__hash__ = None` for that of its class, which can be hashed.
    for name, has_presence, rule, required in _rows(type(message)):  # type: ignore[arg-type]
        if has_presence and not message.HasField(name):
            if required:
                yield Violation(prefix + name, "is required")
            continue
        value = getattr(message, name)
        if value or has_presence or required:
            yield from _value_violations(value, rule, prefix + name)


@functools.cache
def _rows(kind: type[Message]) -> tuple[tuple[str, bool, Rule, bool], ...]:
    """Returns name, presence, rule and whether it is required of each field of a message."""
    found = []
    for field in kind.DESCRIPTOR.fields:
        rule = RULES[f"{kind.DESCRIPTOR.name}.{field.name}"]
        required = bool(getattr(rule, "required", False))
        found.append((field.name, bool(field.has_presence), rule, required))
    return tuple(found)


def _value_violations(value: Any, rule: Rule, path: str) -> Iterator[Violation]:
    match rule:
        case Part():
            yield from _violations(value, path + ".")
        case Parts(most=most):
            if len(value) > most:
                yield Violation(path, f"has {len(value)} entries, at most {most} expected")
            for index, item in enumerate(value[:most]):
                yield from _violations(item, f"{path}[{index}].")
        case Texts():
            yield from _map_violations(value, rule, path)
        case Text():
            yield from _text_violations(value, rule, path)
        case Numbers():
            yield from _numbers_violations(value, rule, path)
        case Number():
            yield from _number_violations(value, rule, path)
        case Flag():
            pass


def _map_violations(value: Any, rule: Texts, path: str) -> Iterator[Violation]:
    if len(value) > rule.most:
        yield Violation(path, f"has {len(value)} entries, at most {rule.most} expected")
        return
    for name, text in sorted(value.items()):
        if tuple(_text_violations(name, rule.key, path)):
            yield from _text_violations(name, rule.key, f"{path}[{_shown(name)}]")
        else:
            yield from _text_violations(text, rule.value, f"{path}[{name!r}]")


def _text_violations(value: str, rule: Text, path: str) -> Iterator[Violation]:
    if len(value) > rule.most:
        yield Violation(path, f"has {len(value)} characters, at most {rule.most} expected")
    elif any(unicodedata.category(character) in ("Cc", "Cs") for character in value):
        yield Violation(path, f"{_shown(value)} has control characters")
    elif rule.required and not value:
        yield Violation(path, "is required")
    elif rule.known and value not in rule.known:
        yield Violation(path, f"{_shown(value)} is unknown, known are {', '.join(rule.known)}")
    elif rule.pattern and not re.fullmatch(rule.pattern, value):
        yield Violation(path, f"{_shown(value)} is not understood, expected is {rule.says}")


def _numbers_violations(value: Sequence[float], rule: Numbers, path: str) -> Iterator[Violation]:
    if rule.required and not value:
        yield Violation(path, "is required")
    elif len(value) > rule.most:
        yield Violation(path, f"has {len(value)} entries, at most {rule.most} expected")
    else:
        wrong = (
            found
            for index, number in enumerate(value)
            for found in _number_violations(number, rule.number, f"{path}[{index}]")
        )
        # One is enough: the others are usually wrong for the same reason.
        yield from itertools.islice(wrong, 1)


def _number_violations(value: float, rule: Number, path: str) -> Iterator[Violation]:
    if not math.isfinite(value):
        yield Violation(path, f"{value} is not a finite number")
    elif value < rule.least or (rule.above and value == rule.least) or value > rule.most:
        least = f"more than {rule.least:g}" if rule.above else f"{rule.least:g} or more"
        yield Violation(path, f"{value:g} is out of range: {least}, at most {rule.most:g} expected")
    elif rule.whole and value != int(value):
        yield Violation(path, f"{value:g} is not a whole number")


def _shown(text: str) -> str:
    """Returns `text` quoted, escaped and short: it goes into logs and terminals."""
    return ascii(text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "...")
