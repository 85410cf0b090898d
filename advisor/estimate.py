"""What compiling a job would bring, from what is known of it: milliseconds, and no device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from advisor import estimate_wording
from advisor.job_facts import ConfigEstimate, EstimateRequest, EstimateResponse, OutcomeReport
from advisor.models.best_case import USUAL_WARM_SHARE
from advisor.models.features import Facts, rooflines
from advisor.models.learning import NO_SHIFTS, Outcome, Shifts
from advisor.models.plan import Plan
from advisor.models.prior import (
    LEVELS_OF_BELIEF,
    Belief,
    Estimate,
    Prior,
    normal_quantiles,
)
from advisor.profiler.errors import PlanError
from advisor.profiler.records import Config, Interval, Mode, Scope

_GPU_CONFIGS = tuple(
    Config(scope=Scope.MODEL, mode=mode)
    for mode in (Mode.DEFAULT, Mode.REDUCE_OVERHEAD, Mode.MAX_AUTOTUNE)
)
_CPU_CONFIGS = (Config(scope=Scope.MODEL), Config(scope=Scope.REGIONAL))
# An eager step that was not measured is that of the roofline, slower by what the training rows of
# the corpus take longer than it, at the median, and scatter around that (611 jobs, bench/prior.py).
_EAGER_LOG_FACTOR, _EAGER_LOG_SPREAD = 0.41, 0.49
# Stratified draws of each quantity, paired at random once: few are enough for a 90 % interval.
_DRAWS = 64
_SHARES = (np.arange(_DRAWS) + 0.5) / _DRAWS
_ORDERS = [np.random.default_rng(seed).permutation(_DRAWS) for seed in range(3)]
# Interpolating between the quantiles of a belief at fixed shares is linear in them: the draws of
# each order are its logarithms times a matrix.
_DRAWN = [
    np.asarray(
        [np.interp(_SHARES, LEVELS_OF_BELIEF, one) for one in np.eye(len(LEVELS_OF_BELIEF))]
    )[:, order]
    for order in _ORDERS
]


@dataclass(frozen=True, slots=True)
class _Priced:
    """The totals of a plan with one configuration, drawn together with the eager ones."""

    total_s: NDArray[np.float64]
    saved_s: NDArray[np.float64]


def estimate(
    request: EstimateRequest, prior: Prior, shifts: Shifts = NO_SHIFTS
) -> EstimateResponse:
    """Returns what each configuration is believed to bring, and the verdict under the plan.

    Raises `PlanError` for a device that is unknown or a plan that makes no sense.
    """
    if request.plan is not None:
        request.plan.validate()
    configs = request.configs or _configs(request)
    made: list[tuple[Facts, Estimate]] = []
    for config in configs:
        facts = request.facts.facts(config)
        job = request.facts.fingerprint
        made.append((facts, shifts.applied(prior.estimate(facts), facts, job)))
    eager = _eager_step(made[0][0])
    priced: list[_Priced | None] = [None] * len(made)
    if request.plan is not None and eager is not None:
        priced = [_priced(request.plan, eager, found) for _, found in made]
    estimates = [
        _config_estimate(facts.config, found, price, eager)
        for (facts, found), price in zip(made, priced, strict=True)
    ]
    estimates.sort(
        key=lambda each: (each.total_s or each.speedup).median * (1 if each.total_s else -1)
    )
    return _response(request, estimates, eager, made, shifts)


def outcome_of(report: OutcomeReport) -> Outcome:
    """Returns a report as the cost model learns from it. Raises `PlanError` for the device."""
    return Outcome(
        facts=report.facts.facts(report.config),
        job=report.facts.fingerprint,
        speedup=report.speedup,
        compile_s=report.compile_s,
        memory_ratio=report.memory_ratio,
    )


def _configs(request: EstimateRequest) -> tuple[Config, ...]:
    device = request.facts.facts(Config()).device
    return _CPU_CONFIGS if device.architecture == "cpu" else _GPU_CONFIGS


def _eager_step(facts: Facts) -> Belief | None:
    """Returns the eager step's seconds: as given, or by physics, or None."""
    if facts.eager_s is not None:
        return Belief(np.full(9, math.log(facts.eager_s)))
    if facts.counts is None:
        return None
    eager, _ = rooflines(facts, facts.counts)
    seconds = eager.seconds(facts.device.architecture == "cpu")
    middle = math.log(seconds) + _EAGER_LOG_FACTOR
    return Belief(middle + _EAGER_LOG_SPREAD * normal_quantiles(LEVELS_OF_BELIEF))


def _varies(eager: Belief) -> bool:
    """Returns whether an eager step time was estimated rather than given."""
    return bool(eager.logs[0] != eager.logs[-1])


def _drawn(belief: Belief, order: int) -> NDArray[np.float64]:
    drawn: NDArray[np.float64] = np.exp(belief.logs @ _DRAWN[order])
    return drawn


def _priced(plan: Plan, eager: Belief, found: Estimate) -> _Priced:
    # What was given is no belief: it does not vary.
    step_s: NDArray[np.float64] | float = _drawn(eager, 0) if _varies(eager) else eager.median
    steps = plan.steps_planned(eager.median)
    gain, start_s = _drawn(found.speedup, 1), _drawn(found.compile_s, 2)
    eager_s = steps * step_s
    total_s = eager_s / gain + start_s * (1.0 + plan.restarts * USUAL_WARM_SHARE)
    return _Priced(total_s=total_s, saved_s=eager_s - total_s)


def _config_estimate(
    config: Config, found: Estimate, priced: _Priced | None, eager: Belief | None
) -> ConfigEstimate:
    speedup = found.speedup.interval()
    break_even = None
    if eager is not None and speedup.median > 1:
        saved_s = eager.median * (1 - 1 / speedup.median)
        break_even = found.compile_s.median / saved_s
    return ConfigEstimate(
        config=config,
        speedup=speedup,
        compile_s=found.compile_s.interval(),
        memory_ratio=found.memory_ratio.interval(),
        total_s=None if priced is None else _interval(priced.total_s),
        p_saves=None if priced is None else float((priced.saved_s > 0).mean()),
        break_even_step=break_even,
    )


def _response(
    request: EstimateRequest,
    estimates: Sequence[ConfigEstimate],
    eager: Belief | None,
    made: Sequence[tuple[Facts, Estimate]],
    shifts: Shifts,
) -> EstimateResponse:
    plan, beyond = request.plan, made[0][1].beyond
    eager_total = best = None
    if plan is not None and eager is not None:
        steps = plan.steps_planned(eager.median)
        at = eager.interval()
        eager_total = Interval(median=at.median * steps, low=at.low * steps, high=at.high * steps)
        paying = [each for each in estimates if (each.p_saves or 0.0) >= plan.confidence]
        best = paying[0] if paying else None
    return EstimateResponse(
        estimates=tuple(estimates),
        enable=best is not None,
        config=best.config if best else None,
        eager_step_s=None if eager is None else eager.interval(),
        eager_estimated=eager is not None and request.facts.eager_step_s is None,
        eager_total_s=eager_total,
        reasons=estimate_wording.reasons(request, estimates, best, eager_total),
        beyond=beyond,
        outcomes=shifts.outcomes,
    )


def _interval(values: NDArray[np.float64]) -> Interval:
    ordered = np.sort(values)
    low, median, high = (float(ordered[round(share * _DRAWS)]) for share in (0.05, 0.5, 0.95))
    return Interval(median=median, low=low, high=high)


def checked(request: EstimateRequest) -> EstimateRequest:
    """Returns the request. Raises `PlanError` where facts contradict each other."""
    facts = request.facts
    if facts.counts is not None and not facts.counts.eager:
        raise PlanError("facts.counts holds no work", mend="leave counts out, or give its work")
    return request
