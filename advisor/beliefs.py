"""What is believed of the configurations of one campaign, and what finding out is worth.

The prior says what a job like this gains, own outcomes move it, and what this campaign measured
moves and narrows the rest: the default mode's gain says much of the other modes', one block's
compile time of the whole model's (design §7).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from advisor.job_facts import JobFacts
from advisor.models.best_case import USUAL_WARM_SHARE
from advisor.models.economics import point_total_s
from advisor.models.learning import Shifts, conditioned
from advisor.models.plan import Plan
from advisor.models.prior import LEVELS_OF_BELIEF, Belief, Estimate, Prior
from advisor.outcomes import job_facts
from advisor.profiler.errors import PlanError
from advisor.profiler.records import Config, Interval, Trial

# Where the belief is looked at: midpoints of equal shares, in speed and in compile time.
_SPEED_SHARES = (np.arange(24) + 0.5) / 24
_COMPILE_SHARES = (1 / 6, 1 / 2, 5 / 6)
# Half-width (log) of a ratio that one trial measured, and of a compile time, as far as it speaks
# for other configurations.
_MEASURED_SPREAD = 0.02


@dataclass(frozen=True, slots=True)
class Known:
    """What a configuration showed in this campaign."""

    config: Config
    speedup: float
    compile_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """What a trial of one configuration is expected to bring to the plan, and to cost.

    `gain_s` is E[max(0, best so far - total)], `price_s` what the trial takes less what the
    hand-over of its cache gives back if it wins.
    """

    speedup: Interval
    compile_s: Interval
    gain_s: float
    price_s: float

    @property
    def pays(self) -> bool:
        """Whether it is expected to bring more than it costs."""
        return self.gain_s > self.price_s


class Beliefs:
    """The beliefs of one campaign: asked for each configuration after each trial."""

    def __init__(self, prior: Prior, shifts: Shifts, facts: JobFacts) -> None:
        """Raises `PlanError` when the prior knows nothing of the device."""
        self._prior = prior
        self._shifts = shifts
        self._facts = facts
        # Fails here rather than in the middle of a campaign.
        facts.facts(Config())
        self._made: dict[Config, Estimate] = {}

    @classmethod
    def of(cls, prior: Prior, shifts: Shifts, eager: Trial) -> Beliefs | None:
        """Returns what is believed after an eager trial; None where its device is none we know."""
        facts = job_facts(eager)
        try:
            return None if facts is None else cls(prior, shifts, facts)
        except PlanError:
            return None

    def of_config(self, config: Config, known: Sequence[Known]) -> tuple[Belief, Belief]:
        """Returns what is believed of a configuration's speedup and of its compile time."""
        own = self._estimate(config)
        others = [each for each in known if each.config != config]
        return (
            conditioned(
                own.speedup,
                "speedup",
                [(self._estimate(each.config).speedup, each.speedup) for each in others],
                _MEASURED_SPREAD,
            ),
            conditioned(
                own.compile_s,
                "compile_s",
                [
                    (self._estimate(each.config).compile_s, each.compile_s)
                    for each in others
                    if each.compile_s > 0
                ],
                _MEASURED_SPREAD,
            ),
        )

    def worth(
        self,
        config: Config,
        known: Sequence[Known],
        *,
        plan: Plan,
        steps: float,
        eager_step_s: float,
        now_s: float,
        measuring_s: float,
        most_speedup: float,
        least_compile_s: float,
    ) -> Worth:
        """Returns what a trial of the configuration is worth to the plan.

        `now_s` is the shortest total so far, `measuring_s` what a trial takes beside compiling;
        nothing beyond `most_speedup` and `least_compile_s`, the best case, is believed.
        """
        speedup, compile_s = self.of_config(config, known)
        speeds = _values(speedup, _SPEED_SHARES, most=most_speedup)
        starts = _values(compile_s, _COMPILE_SHARES, least=least_compile_s)
        totals = np.asarray(
            [
                [
                    point_total_s(
                        plan, steps, eager_step_s / speed, start, start * USUAL_WARM_SHARE
                    )
                    for speed in speeds
                ]
                for start in starts
            ]
        )
        gains = np.maximum(0.0, now_s - totals)
        # The real run starts from the trial's cache: compiling was paid once.
        given_back = (gains > 0) * (1.0 - USUAL_WARM_SHARE) * np.asarray(starts)[:, None]
        return Worth(
            speedup=speedup.interval(),
            compile_s=compile_s.interval(),
            gain_s=float(gains.mean()),
            price_s=max(0.0, float(np.mean(starts)) + measuring_s - float(given_back.mean())),
        )

    def _estimate(self, config: Config) -> Estimate:
        if config not in self._made:
            facts = self._facts.facts(config)
            said = self._prior.estimate(facts)
            self._made[config] = self._shifts.applied(said, facts, self._facts.fingerprint)
        return self._made[config]


def _values(
    belief: Belief, shares: Sequence[float] | NDArray[np.float64], *, most: float = math.inf,
    least: float = 0.0,
) -> list[float]:  # fmt: skip
    values = np.exp(np.interp(shares, LEVELS_OF_BELIEF, belief.logs))
    return [float(min(max(value, least), most)) for value in values]
