"""Whether an earlier campaign has measured the very same job, and what it leaves to a new one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from advisor.profiler.records import Advice, Environment, Trial, TrialKind, TrialStatus
from advisor.request import AdviceRequest

# How many of the latest campaigns on a workload are looked at.
MOST_EARLIER = 5
# What a measurement rests on beside the job itself.
_ENVIRONMENT = (
    "torch", "python", "device_name", "device_uuid", "cores", "threads", "transformers", "cuda",
    "driver",
)  # fmt: skip


def usable(advices: Sequence[Advice], request: AdviceRequest) -> tuple[Advice, ...]:
    """Returns the earlier campaigns that could stand for a new one, if the job is the same."""
    limits = request.limits
    if limits.fresh or limits.measure_anyway or limits.exhaustive or request.lengths is not None:
        return ()
    return tuple(advice for advice in advices if _eager(advice) is not None and advice.workload)


def same_job(advices: Sequence[Advice], counted: Trial) -> Advice | None:
    """Returns the latest campaign on the job that was counted just now; None when there is none."""
    if counted.workload is None or counted.environment is None:
        return None
    for advice in advices:
        eager = _eager(advice)
        if eager is None or eager.workload is None or eager.environment is None:
            continue
        same = eager.workload.fingerprint == counted.workload.fingerprint
        if same and _same_place(eager.environment, counted.environment):
            return advice
    return None


def trials_of(advice: Advice, request: AdviceRequest) -> tuple[Trial, ...]:
    """Returns the trials of an earlier campaign that a new one begins with.

    What was skipped is weighed anew, and what the new budget or device ended is not held against
    a configuration. A cache folder that has gone meanwhile is no hand-over.
    """
    wanted = request.limits.configs
    kept = []
    for trial in advice.trials:
        if trial.status in (TrialStatus.SKIPPED, TrialStatus.TIMED_OUT, TrialStatus.CUT_OFF):
            continue
        if wanted and trial.config is not None and trial.config not in wanted:
            continue
        folder = trial.cache_folder
        kept.append(replace(trial, cache_folder=folder if folder and Path(folder).is_dir() else ""))
    return tuple(kept)


def _eager(advice: Advice) -> Trial | None:
    return next(
        (
            trial
            for trial in advice.trials
            if trial.kind is TrialKind.EAGER and trial.status is TrialStatus.OK
        ),
        None,
    )


def _same_place(before: Environment, now: Environment) -> bool:
    return all(getattr(before, name) == getattr(now, name) for name in _ENVIRONMENT)
