"""What own measurements say of the prior: shifts for a fleet, a family, a job, a campaign.

Residuals of own outcomes against the prior are split into effects of the device, of the family on
it and of the job, each a mean that is shrunk to zero as far as few outcomes speak for it (James and
Stein 1961; as random effects in Gelman et al., Bayesian Data Analysis, ch. 5). Within a campaign,
configurations of one job share most of their error: what the measured ones showed moves and
narrows the others (conditioning of a normal distribution with one common correlation).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from advisor.models.features import Facts
from advisor.models.prior import Belief, Estimate, Prior
from advisor.profiler.records import Config

# Outcomes that weigh as much as the prior does: a device is moved slowly, a job at once.
_DEVICE_WEIGHT, _FAMILY_WEIGHT, _JOB_WEIGHT = 6.0, 3.0, 0.5
# What a job itself showed before is known to this (log): day-to-day spread of one model's speedup
# is 1.6 to 1.9 % at the median and 4 to 8 % at p90 (the A100 dashboard), compile times vary more.
_KNOWN_SPREAD = {"speedup": 0.05, "compile_s": 0.2, "memory_ratio": 0.05}
# A single outcome may be nonsense: no more than this (log) is believed of it.
_MOST_RESIDUAL = 1.5
# How much of a configuration's error the others of the same job share: the correlation between the
# errors with and without CUDA graphs, over 282 jobs of families left out (bench/prior.py).
SHARED = {"speedup": 0.72, "compile_s": 0.93, "memory_ratio": 0.85}
_QUANTITIES = ("speedup", "compile_s", "memory_ratio")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one configuration really brought to one job; None is what was not measured.

    `job` names the job, equal for equal ones (a fingerprint); empty where it is not known.
    """

    facts: Facts
    job: str = ""
    speedup: float | None = None
    compile_s: float | None = None
    memory_ratio: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shifts:
    """Log shifts by what they belong to: a device, a family on it, a job and configuration."""

    by_key: dict[tuple[str, ...], dict[str, float]]
    outcomes: int = 0

    def applied(self, estimate: Estimate, facts: Facts, job: str = "") -> Estimate:
        """Returns the estimate as own outcomes move it; the job's own ones also narrow it."""
        if not self.by_key:
            return estimate
        known = _job_key(facts, job) in self.by_key and bool(job)
        moved = {}
        for name in _QUANTITIES:
            belief: Belief = getattr(estimate, name)
            by = sum(self.by_key.get(key, {}).get(name, 0.0) for key in _keys(facts, job))
            belief = belief.moved(by)
            if known and name in self.by_key[_job_key(facts, job)]:
                belief = narrowed_to(belief, _KNOWN_SPREAD[name])
            moved[name] = belief
        beyond = () if known else estimate.beyond
        return replace(estimate, beyond=beyond, **moved)


NO_SHIFTS = Shifts(by_key={})


@dataclass(frozen=True, slots=True)
class Residual:
    """How far one outcome lay from what the prior had said, as logarithms by quantity."""

    keys: tuple[tuple[str, ...], ...]
    logs: dict[str, float]


def residual(prior: Prior, outcome: Outcome) -> Residual:
    """Returns how far an outcome lies from what the prior says of it."""
    return Residual(_keys(outcome.facts, outcome.job), _residuals(prior, outcome))


def shifts(prior: Prior, outcomes: Sequence[Outcome]) -> Shifts:
    """Returns what own outcomes say of the prior."""
    return shifts_of([residual(prior, outcome) for outcome in outcomes])


def shifts_of(residuals: Sequence[Residual]) -> Shifts:
    """Returns the effects of devices, families and jobs behind some residuals."""
    by_key: dict[tuple[str, ...], dict[str, float]] = defaultdict(dict)
    weights = (_DEVICE_WEIGHT, _FAMILY_WEIGHT, _JOB_WEIGHT)
    for name in _QUANTITIES:
        left = [(each.keys, each.logs[name]) for each in residuals if name in each.logs]
        for place, weight in enumerate(weights):
            groups: dict[tuple[str, ...], list[float]] = defaultdict(list)
            for keys, residual in left:
                if place < len(keys):
                    groups[keys[place]].append(residual)
            effects = {key: sum(found) / (len(found) + weight) for key, found in groups.items()}
            for key, effect in effects.items():
                by_key[key][name] = effect
            left = [
                (keys, residual - (effects[keys[place]] if place < len(keys) else 0.0))
                for keys, residual in left
            ]
    return Shifts(by_key=dict(by_key), outcomes=len(residuals))


def conditioned(
    belief: Belief, quantity: str, seen: Iterable[tuple[Belief, float]], spread_log: float = 0.0
) -> Belief:
    """Returns what is believed of a configuration once others of the same job were measured.

    `seen` holds, for each, what was believed of it and the value it showed. `spread_log` is how
    uncertain those values themselves are.
    """
    found = list(seen)
    if not found:
        return belief
    shared, count = SHARED[quantity], len(found)
    # Residuals in spreads, noisier than the belief's own by what measuring leaves.
    noise = (spread_log / max(_spread(belief), 1e-6)) ** 2
    scores = [
        (math.log(value) - known.quantile_log(0.5)) / max(_spread(known), 1e-6)
        for known, value in found
    ]
    total = 1.0 + noise + (count - 1) * shared
    shift = shared * sum(scores) / total
    kept = max(0.0, 1.0 - count * shared**2 / total)
    spread = _spread(belief)
    return narrowed_to(belief.moved(shift * spread), math.sqrt(kept) * spread)


def narrowed_to(belief: Belief, spread_log: float) -> Belief:
    """Returns the belief with its (log) spread brought down to `spread_log`; never widened."""
    own = _spread(belief)
    if own <= spread_log or own <= 0:
        return belief
    middle = belief.quantile_log(0.5)
    return Belief(middle + (belief.logs - middle) * (spread_log / own))


def _spread(belief: Belief) -> float:
    return (belief.quantile_log(0.95) - belief.quantile_log(0.05)) / (2 * 1.645)


def _residuals(prior: Prior, outcome: Outcome) -> dict[str, float]:
    said = prior.estimate(outcome.facts)
    found = {}
    for name in _QUANTITIES:
        value = getattr(outcome, name)
        if value is not None and value > 0 and math.isfinite(value):
            residual = math.log(value) - getattr(said, name).quantile_log(0.5)
            found[name] = max(-_MOST_RESIDUAL, min(_MOST_RESIDUAL, residual))
    return found


def _keys(facts: Facts, job: str) -> tuple[tuple[str, ...], ...]:
    keys: tuple[tuple[str, ...], ...] = (
        ("device", facts.device.name),
        ("family", facts.device.name, facts.family),
    )
    return (*keys, _job_key(facts, job)) if job else keys


def _job_key(facts: Facts, job: str) -> tuple[str, ...]:
    return ("job", facts.device.name, job, *_config_key(facts.config))


def _config_key(config: Config) -> tuple[str, ...]:
    return (str(config.scope), str(config.mode), str(config.dynamic))
