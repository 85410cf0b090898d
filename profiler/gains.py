"""What a mend would bring: measured against a trial with it, or estimated from what ran eager.

The estimate is Amdahl's law with the rate that this workload itself showed: the part of the
operators' time that ran inside compiled graphs took `rate` of its eager time; a mend brings a
further part of it (`GraphBreak.lost_share`) into graphs, at the same rate. Where hardly anything
ran compiled there is no such rate, and published ones stand in for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from advisor.profiler import statistics
from advisor.profiler.records import Interval, Pair, Trial

Array = npt.NDArray[np.float64]

# Compiled time over eager time of what runs inside graphs.
Rate = Interval

# 5 %, 50 % and 95 % quantiles of the speedup of training with mode default: PyTorch's A100
# dashboard, 1,068 rows of inductor without CUDA graphs (published_speedups.csv; models/best_case
# names the same table as source A).
USUAL_SPEEDUP = Interval(median=1.25, low=0.96, high=1.81)
USUAL_SOURCE = "published A100 training runs"
# Below this share of the operator calls, what ran compiled could bring 1.11x at most if it took no
# time at all (Amdahl): a larger gain did not come from it, and a smaller one is within the noise
# of machines. Such a job is an eager one with a compiler's start-up cost.
LEAST_COVERAGE = 0.1
# Below this share of compiled operator time the workload's own rate says nothing.
_LEAST_COVERED = 0.25
# Compiled operators take between these shares of their eager time; outside lies noise.
_RATES = (0.2, 1.5)


def ran_eager(graphs: int | None, coverage: float | None) -> bool:
    """Returns whether what was to be compiled ran eager as good as whole, though nothing failed."""
    return graphs == 0 or (coverage is not None and coverage < LEAST_COVERAGE)


def measured_gain(before: Sequence[Pair], after: Sequence[Pair]) -> Interval | None:
    """Returns the speedup with a mend over the speedup without it, None where one is missing.

    Both are ratios to eager steps of their own process, so that the machine's drift between the
    two trials cancels.
    """
    if not before or not after:
        return None
    draws = [statistics.step_draws(pairs, seed) for seed, pairs in enumerate((before, after))]
    first, second = (draw.eager_s / draw.compiled_s for draw in draws)
    return statistics.interval(second / first)


def own_rate(trial: Trial) -> Rate | None:
    """Returns what share of its eager time the compiled part of a trial's operators took.

    None where too little ran compiled to tell.
    """
    covered = trial.time_coverage
    if covered is None or covered < _LEAST_COVERED or not trial.pairs:
        return None
    speedup = statistics.speedup(trial.pairs)

    def rate(ratio: float) -> float:
        return min(max((1 / ratio - (1 - covered)) / covered, _RATES[0]), _RATES[1])

    # The faster the step, the lower the rate.
    return Interval(median=rate(speedup.median), low=rate(speedup.high), high=rate(speedup.low))


def usual_rate() -> Rate:
    """Returns the published rate: what compiled training took of its eager time elsewhere."""
    usual = USUAL_SPEEDUP
    return Interval(median=1 / usual.median, low=1 / usual.high, high=1 / usual.low)


def estimated_gain(trial: Trial, lost_share: float, rate: Rate) -> Interval | None:
    """Returns what bringing `lost_share` of the eager operator time into graphs would gain.

    In steps per second relative to the trial's compiled step; never below 1, as nobody has to
    mend what brings nothing. None where the trial has no speedup.
    """
    if not trial.pairs or not math.isfinite(lost_share):
        return None
    now = 1 / statistics.speedup(trial.pairs).median

    def gain(share_of_eager: float) -> float:
        saved = max(0.0, lost_share * (1 - share_of_eager))
        # What is left cannot take less than the lost part itself will.
        return now / max(now - saved, now * _RATES[0], 1e-9)

    return Interval(median=gain(rate.median), low=gain(rate.high), high=gain(rate.low))
