"""What happens during a campaign, as the service tells it and the client reads it."""

from __future__ import annotations

from dataclasses import dataclass

from advisor.profiler.records import Advice, Config, Interval, Progress, Trial, TrialKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The request is sound and its campaign begins. Always the first event."""

    advice_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """The campaign waits for a busy device. `message` is one sentence for a person."""

    device: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialStarted:
    """A trial starts: the `number`-th of its campaign, counted from 1.

    `why` says in one sentence why this trial comes next; `at_most_s` is the longest it may take.
    """

    trial_id: str
    kind: TrialKind
    number: int
    config: Config | None = None
    why: str = ""
    at_most_s: float | None = None
    # What compiling is believed to take: median and 90 %.
    compile_s: Interval | None = None


# `Trial` is the event "this trial ended and is stored", `Advice` the answer and the last event.
Event = Accepted | Waiting | TrialStarted | Progress | Trial | Advice
