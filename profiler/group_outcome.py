"""From what the ranks of a trial said and how they ended to one trial, with the rank named."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from advisor.profiler.group_watch import Member
from advisor.profiler.outcome import IN_PHASE, unusable_error
from advisor.profiler.records import (
    Failure,
    GraphBreak,
    Interval,
    Phase,
    Trial,
    TrialSpec,
    TrialStatus,
)

N = TypeVar("N", int, float)


@dataclass(frozen=True, slots=True)
class Launched:
    """What the ranks said, which of them hung, and when and how those that failed ended."""

    members: Mapping[int, Member]
    stalled: str
    failed: Mapping[int, tuple[float, int]]


def merged(spec: TrialSpec, launched: Launched) -> Trial:
    """Returns one trial of all ranks.

    Raises what a rank says of the workload: it cannot be used. What one rank fails of fails all,
    and the sentence names it; else the slowest rank's times and the largest differences count.
    """
    members = [launched.members[rank] for rank in sorted(launched.members)]
    if any(member.lost for member in members):
        return _died(spec, launched, members)
    # The first that failed is the cause: the others fail of waiting for it.
    for member in sorted(members, key=lambda member: member.heard):
        if member.unusable is not None:
            raise unusable_error(member.unusable)
        trial = member.result.trial if member.result is not None else None
        failed = trial is not None and trial.status is not TrialStatus.DISAGREES
        if trial is not None and trial.failure is not None and failed:
            ranks = spec.workload.ranks
            message = f"on rank {member.rank} of {ranks}: {trial.failure.message}"
            return replace(trial, failure=replace(trial.failure, message=message))
    trials = {m.rank: m.result.trial for m in members if m.result is not None}
    if launched.stalled:
        return _failed(spec, TrialStatus.TIMED_OUT, "stalled", launched.stalled, members)
    if len(trials) < spec.workload.ranks:
        return _died(spec, launched, members)
    return _together([trials[rank] for rank in sorted(trials)])


def _died(spec: TrialSpec, launched: Launched, members: Sequence[Member]) -> Trial:
    """Returns the trial of which a rank ended before it had said anything."""
    lost = {member.rank for member in members if member.lost}
    silent = {
        rank: how
        for rank, how in launched.failed.items()
        if rank in lost or rank not in launched.members
    }
    if not silent:
        message = "the ranks ended before they had measured anything"
        return _failed(spec, TrialStatus.CRASHED, "rank_ended", message, members)
    # The first that ended is the cause; the launcher has ended the others.
    rank, (_, code) = min(silent.items(), key=lambda each: each[1][0])
    member = launched.members.get(rank)
    phase = member.phase if member is not None else Phase.IMPORT
    how = f"was ended by {_signal(-code)}" if code < 0 else f"ended with exit code {code}"
    message = f"rank {rank} of {spec.workload.ranks} {how} {IN_PHASE[phase]}"
    return _failed(spec, TrialStatus.CRASHED, "rank_ended", message, members, phase)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _failed(
    spec: TrialSpec,
    status: TrialStatus,
    kind: str,
    message: str,
    members: Sequence[Member],
    phase: Phase | None = None,
) -> Trial:
    if phase is None:
        phase = members[0].phase if members else Phase.IMPORT
    return Trial(
        trial_id=spec.trial_id,
        kind=spec.kind,
        status=status,
        config=spec.config,
        phase_reached=phase,
        failure=Failure(kind=kind, message=message, phase=phase),
    )


def _together(trials: Sequence[Trial]) -> Trial:
    """Returns rank 0's trial with what counts of all of them.

    Step times are the slowest rank's on every rank already. A start lasts until the last rank has
    compiled, numbers agree when they do on all, and a graph break on any is one.
    """
    first = trials[0]
    disagreeing = next((t for t in trials if t.status is TrialStatus.DISAGREES), None)
    failure = first.failure
    if disagreeing is not None and disagreeing.failure is not None:
        rank = disagreeing.ranks[0].rank
        message = f"on rank {rank}: {disagreeing.failure.message}"
        failure = replace(disagreeing.failure, message=message)
    warnings = dict.fromkeys(warning for trial in trials for warning in trial.warnings)
    return replace(
        first,
        status=first.status if disagreeing is None else disagreeing.status,
        failure=failure,
        eager_step_s=_slowest([t.eager_step_s for t in trials]),
        step_s=_slowest([t.step_s for t in trials]),
        cold_start_s=_most([t.cold_start_s for t in trials]),
        warm_start_s=_most([t.warm_start_s for t in trials]),
        one_first_start_s=_most([t.one_first_start_s for t in trials]),
        graphs=_least([t.graphs for t in trials]),
        coverage=_least([t.coverage for t in trials]),
        graph_breaks=_breaks(trials),
        recompile_limit_hit=any(t.recompile_limit_hit for t in trials),
        skipped_frames=max(t.skipped_frames for t in trials),
        peak_bytes=_most([t.peak_bytes for t in trials]),
        eager_peak_bytes=_most([t.eager_peak_bytes for t in trials]),
        compile_peak_bytes=_most([t.compile_peak_bytes for t in trials]),
        loss_drift=_most([t.loss_drift for t in trials]),
        loss_scale=_most([t.loss_scale for t in trials]),
        gradient_drift=_most([t.gradient_drift for t in trials]),
        gradient_scale=_most([t.gradient_scale for t in trials]),
        ranks=tuple(facts for trial in trials for facts in trial.ranks),
        warnings=tuple(warnings),
    )


def _slowest(intervals: Sequence[Interval | None]) -> Interval | None:
    known = [interval for interval in intervals if interval is not None]
    return max(known, key=lambda interval: interval.median) if known else None


def _most(values: Sequence[N | None]) -> N | None:
    return max((value for value in values if value is not None), default=None)


def _least(values: Sequence[N | None]) -> N | None:
    return min((value for value in values if value is not None), default=None)


def _breaks(trials: Sequence[Trial]) -> tuple[GraphBreak, ...]:
    """Returns the graph breaks of all ranks, each place once."""
    found: dict[tuple[object, ...], GraphBreak] = {}
    for trial in trials:
        for met in trial.graph_breaks:
            key = (met.cause, met.file, met.line)
            if key not in found or met.count > found[key].count:
                found[key] = met
    return tuple(found.values())


def share_of_communication(trial: Trial, alone: Launched) -> Trial:
    """Returns the eager trial with the share that its ranks spend on each other.

    `alone` ran the same steps with collectives that return at once; the slowest rank counts. Where
    it did not end well nothing is said.
    """
    steps = [
        member.result.trial.eager_step_s
        for member in alone.members.values()
        if member.result is not None
    ]
    slowest = _slowest(steps)
    found = trial.communication
    if (
        found is None
        or slowest is None
        or trial.eager_step_s is None
        or len(steps) < len(trial.ranks)
    ):
        return trial
    share = max(0.0, 1.0 - slowest.median / trial.eager_step_s.median)
    return replace(trial, communication=replace(found, alone_step_s=slowest.median, share=share))
