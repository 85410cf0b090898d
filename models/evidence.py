"""What the trials of one campaign say together: one piece of evidence for each configuration.

Warm starts are joined to the configurations they belong to, all eager arms give one base step time,
and a trial that did not show that it really ran compiled is told apart from one that did.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from advisor.models.economics import Bill, Measured, bill
from advisor.models.plan import Plan
from advisor.models.scaling import Spread
from advisor.profiler.gains import LEAST_COVERAGE
from advisor.profiler.records import Config, Pair, Trial, TrialKind, TrialStatus
from advisor.profiler.statistics import Array

# After a recompile limit Dynamo runs eager for ever (design §2). If most calls did, the steps
# measured are not those of a compiled model, and further shapes will only add to it.
LEAST_COVERAGE_AFTER_LIMIT = 0.5


class Doubt(enum.StrEnum):
    """Why a configuration that was tried cannot be advised, whatever it would save."""

    FAILED = "failed"
    NO_GRAPH = "no_graph"
    NOT_COVERED = "not_covered"
    LIMIT_HIT = "limit_hit"
    NOT_MEASURED = "not_measured"
    TOO_LARGE = "too_large"


@dataclass(frozen=True, slots=True)
class Evidence:
    """One configuration's trial with its warm starts: pairs of all processes, the start times."""

    config: Config
    trial: Trial
    pairs: tuple[Pair, ...]
    warm_start_s: float | None = None
    warm: tuple[Trial, ...] = ()


@dataclass(frozen=True, slots=True)
class Base:
    """The eager step time over all trials of a campaign, and its log spread between them."""

    step_s: float
    sigma: float
    data_wait_s: float
    # To more ranks than were tried; None where those are the plan's.
    spread: Spread | None = None

    @property
    def added_s(self) -> Array | None:
        """Draws of what a step takes more on the ranks of the plan."""
        return self.spread.added_s if self.spread is not None else None

    @property
    def machines(self) -> int:
        """Machines that train together."""
        return self.spread.machines if self.spread is not None else 1

    @property
    def planned_step_s(self) -> float:
        """Seconds of an eager step on the ranks of the plan."""
        return self.step_s + (float(np.median(self.added_s)) if self.added_s is not None else 0.0)


def gather(trials: Sequence[Trial]) -> tuple[Evidence, ...]:
    """Returns the evidence of every configuration that was tried, in the order of the trials.

    Of two trials of one configuration the later counts. Skipped ones are no evidence.
    """
    found: dict[Config, Evidence] = {}
    for trial in trials:
        if trial.config is None or trial.status is TrialStatus.SKIPPED:
            continue
        if trial.kind is TrialKind.COMPILE:
            found[trial.config] = Evidence(
                trial.config, trial, trial.pairs, warm_start_s=trial.warm_start_s
            )
        elif trial.kind is TrialKind.WARM and trial.status is TrialStatus.OK:
            known = found.get(trial.config)
            if known is not None:
                found[trial.config] = _with_warm(known, trial)
    return tuple(found.values())


def base(trials: Sequence[Trial], further_s: Sequence[float] = ()) -> Base | None:
    """Returns the eager step time that all configurations are billed with, None if none was seen.

    `further_s` are eager step times of processes that measured no pairs on the job's own mix. Each
    process counts once: the median of their means. Machines drift between trials by more than
    configurations differ, so a configuration is judged by its paired ratio and this one base.
    """
    levels = [sum(p.eager_s for p in t.pairs) / len(t.pairs) for t in trials if t.pairs]
    levels += further_s
    alone = [t.eager.step_s.median for t in trials if t.eager is not None and not t.pairs]
    alone += [t.eager_step_s.median for t in trials if t.eager_step_s and not (t.eager or t.pairs)]
    levels = [level for level in (levels or alone) if math.isfinite(level) and level > 0]
    if not levels:
        return None
    waits = [t.eager.data_wait_s for t in trials if t.eager and t.eager.data_wait_s is not None]
    sigma = float(np.std(np.log(levels), ddof=1)) if len(levels) > 1 else 0.0
    return Base(float(np.median(levels)), sigma, float(np.median(waits)) if waits else 0.0)


def doubt(evidence: Evidence, memory_limit_bytes: int | None = None) -> Doubt | None:
    """Returns why this configuration cannot be advised, or None when it really ran compiled.

    What could not be seen is doubted: a trial has to show graphs or coverage.
    """
    trial = evidence.trial
    coverage = trial.coverage
    after_limit = trial.recompile_limit_hit and (coverage or 0.0) < LEAST_COVERAGE_AFTER_LIMIT
    peak = max(trial.peak_bytes or 0, trial.compile_peak_bytes or 0)
    checks = (
        (Doubt.FAILED, trial.status is not TrialStatus.OK),
        (Doubt.NOT_MEASURED, not evidence.pairs or trial.cold_start_s is None),
        (Doubt.NO_GRAPH, trial.graphs == 0 or (trial.graphs is None and coverage is None)),
        (Doubt.LIMIT_HIT, after_limit),
        (Doubt.NOT_COVERED, coverage is not None and coverage < LEAST_COVERAGE),
        (Doubt.TOO_LARGE, memory_limit_bytes is not None and peak > memory_limit_bytes),
    )
    return next((found for found, applies in checks if applies), None)


def bill_of(
    evidence: Evidence,
    common: Base,
    plan: Plan,
    *,
    hand_over: bool = False,
    warm_share: float | None = None,
) -> Bill:
    """Returns the plan's bill with this configuration, its steps scaled to the common base.

    `warm_share` stands in for a warm start that was not measured, as a share of the cold one.
    Raises ValueError when there are no pairs.
    """
    cold = evidence.trial.cold_start_s or 0.0
    warm = evidence.warm_start_s
    if warm is None and warm_share is not None:
        warm = cold * warm_share
    measured = Measured(
        pairs=_scaled(evidence.pairs, common.step_s),
        cold_start_s=cold,
        warm_start_s=warm,
        data_wait_s=common.data_wait_s,
        level_sigma=common.sigma,
        added_s=common.added_s,
        machines=common.machines,
    )
    return bill(plan, plan.steps_planned(common.planned_step_s), measured, hand_over=hand_over)


def _with_warm(known: Evidence, warm: Trial) -> Evidence:
    # Each warm start is a process of its own, which the trial itself cannot number.
    process = len(known.warm) + 1
    pairs = tuple(replace(pair, process=process) for pair in warm.pairs)
    warms = (*known.warm, warm)
    starts = [trial.warm_start_s for trial in warms if trial.warm_start_s is not None]
    start = float(np.median(starts)) if starts else known.warm_start_s
    return replace(known, pairs=known.pairs + pairs, warm_start_s=start, warm=warms)


def _scaled(pairs: Sequence[Pair], step_s: float) -> tuple[Pair, ...]:
    """Returns the pairs with the mean eager time of each process brought to `step_s`."""
    scaled = []
    for process in sorted({pair.process for pair in pairs}):
        own = [pair for pair in pairs if pair.process == process]
        factor = step_s * len(own) / sum(pair.eager_s for pair in own)
        scaled += [
            replace(pair, eager_s=pair.eager_s * factor, compiled_s=pair.compiled_s * factor)
            for pair in own
        ]
    return tuple(scaled)
