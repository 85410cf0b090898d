"""The bill of a planned training, eager and compiled, with its uncertainty (design §6).

    T(c) = first_start(c) + R * restart(c) + N * t(c) + waiting for data + E * eval(c)
    T(0) =                                   N * t(0) + waiting for data + E * eval(0)

Step times come from paired quads, so `t` is the mean over the plan's mix of shapes. All terms are
drawn jointly (`DRAWS` times, fixed seed): step times by bootstrap, the effect of yet another
process and the compile time from named models below, whose spreads are published ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from advisor.models.plan import Plan
from advisor.profiler import statistics
from advisor.profiler.records import Interval, Pair
from advisor.profiler.statistics import Array, StepDraws

DRAWS = 2000

# One cold start is one sample: other starts of the same job scatter around it log-normally. Sigma
# is log(p95/p05)/3.29 of one model's compile seconds from day to day. Over the 269 models with
# backend inductor_no_cudagraphs and 10 runs or more in dashboard_a100_noise.csv (PyTorch's A100
# training dashboard, March to April 2023) it is 0.041 at the median, 0.071 at p75, 0.104 at p95:
# p95 is taken, because the machine of a real run is less quiet than a benchmark's.
COMPILE_SIGMA = 0.10
# The real run is one more process, and its ratio differs from the measured one even if that is
# known exactly. Same file and rows: rel_half_68pct_spread_recent of the speedup, median 0.016.
RUN_SIGMA = 0.016
# Model: an evaluation step is a forward pass, and backward costs twice a forward (Kaplan et al.,
# Scaling Laws for Neural Language Models, 2020, section 2.1), so it is a third of a training step
# and gains by the same ratio. A measured share takes precedence (`Measured.forward_share`).
FORWARD_SHARE = 1 / 3
# Model: the first evaluation of a process compiles the forward pass once more, for no_grad. Share
# of the compile time that is not backward's: 1 - bw_compiler / _compile, the median over 505 rows
# of dashboard_a100_compile_phases.csv.
EVALUATION_COMPILE_SHARE = 0.55


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What trials say of one configuration.

    `data_wait_s` is waited for each batch outside the step, in both arms. `level_sigma` is the
    log standard deviation of the machine's eager step time from trial to trial: it scales both
    arms alike, so it moves the totals but not the ratio.
    """

    pairs: tuple[Pair, ...]
    cold_start_s: float
    warm_start_s: float | None = None
    data_wait_s: float = 0.0
    level_sigma: float = 0.0
    forward_share: float = FORWARD_SHARE
    # Joint draws that stand in for `pairs` where the plan's mix was not run but composed.
    draws: StepDraws | None = None
    # Draws of what each step takes more on the plan's ranks than on those that were tried.
    added_s: Array | None = None
    # Machines that train together: each compiles, and each is paid for.
    machines: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """What the plan takes with one configuration against eager. The campaign is not in it.

    `compile_s` is the first start; `all_compiles_s` adds the restarts' and the evaluations'.
    `break_even_step` is the length of a plan with these restarts and this share of evaluations at
    which it pays back `all_compiles_s`; without restarts that is the first step at which compiled
    is ahead. It and its bounds are None where compiling never pays back. P(saves) and the
    break-even step are two views of the same draws: P is above a half just when the break-even
    step lies within the plan.
    """

    steps: float
    speedup: Interval
    eager_step_s: Interval
    step_s: Interval
    compile_s: Interval
    all_compiles_s: Interval
    total_s: Interval
    eager_total_s: Interval
    saved_s: Interval
    expected_total_s: float
    break_even_step: float | None
    break_even_low: float | None
    break_even_high: float | None
    p_saves: float
    # Share of the eager total that waits for data, which no compiler makes faster.
    data_wait_share: float
    # Hours and money that `saved_s.median` is worth; negative when it is a loss.
    hours_saved: float
    money_saved: float | None


def bill(
    plan: Plan, steps: float, measured: Measured, *, hand_over: bool = False, seed: int = 0
) -> Bill:
    """Returns the bill of `steps` optimizer steps under `plan`.

    With `hand_over` the first start is the warm one, if that was measured. Restarts pay the warm
    start, or the cold one while the warm is unknown. Raises ValueError without pairs.
    """
    rng = np.random.default_rng([seed, 1])
    draws = measured.draws or statistics.step_draws(measured.pairs, seed, DRAWS)
    if measured.added_s is not None:
        # Communication waits the same whether what is between it was compiled or not.
        draws = StepDraws(draws.eager_s + measured.added_s, draws.compiled_s + measured.added_s)
    between = statistics.between_processes(measured.pairs, seed)
    run_sigma = max(RUN_SIGMA, statistics.USUAL_BETWEEN if measured.draws else between)
    normal = rng.standard_normal((3, DRAWS))
    level = np.exp(measured.level_sigma * normal[0])
    eager_s = draws.eager_s * level
    step_s = draws.compiled_s * level * np.exp(run_sigma * normal[1])
    compile_spread = np.exp(COMPILE_SIGMA * normal[2])
    cold, warm = _starts(measured)
    first = (warm if hand_over else cold) * compile_spread
    all_compiles = first + plan.restarts * warm * compile_spread
    step_equivalents, waiting_s = steps, steps * measured.data_wait_s
    evaluations = plan.evaluations(steps)
    if evaluations and plan.eval_steps:
        step_equivalents += evaluations * plan.eval_steps * measured.forward_share
        all_compiles = all_compiles * (1 + EVALUATION_COMPILE_SHARE)
    eager_total = step_equivalents * eager_s + waiting_s
    saved = step_equivalents * (eager_s - step_s) - all_compiles
    total = eager_total - saved
    low, median, high = _break_even(all_compiles, step_equivalents / steps * (eager_s - step_s))
    saved_s = statistics.interval(saved)
    hours = measured.machines * saved_s.median / 3600
    price = plan.price_per_hour
    return Bill(
        steps=steps,
        speedup=statistics.interval(draws.eager_s / draws.compiled_s),
        eager_step_s=statistics.interval(eager_s),
        step_s=statistics.interval(step_s),
        compile_s=statistics.interval(first),
        all_compiles_s=statistics.interval(all_compiles),
        total_s=statistics.interval(total),
        eager_total_s=statistics.interval(eager_total),
        saved_s=saved_s,
        expected_total_s=float(total.mean()),
        break_even_step=median,
        break_even_low=low,
        break_even_high=high,
        p_saves=float(np.mean(saved > 0)),
        data_wait_share=waiting_s / float(np.median(eager_total)),
        hours_saved=hours,
        money_saved=None if price is None else hours * price,
    )


def point_total_s(
    plan: Plan, steps: float, step_s: float, first_s: float, restart_s: float
) -> float:
    """Returns the seconds of a plan for given step and start times, without waiting for data."""
    evaluations = plan.evaluations(steps)
    compiles = first_s + plan.restarts * restart_s
    if evaluations and plan.eval_steps:
        compiles *= 1 + EVALUATION_COMPILE_SHARE
        steps += evaluations * plan.eval_steps * FORWARD_SHARE
    return steps * step_s + compiles


def affordable_compile_s(
    plan: Plan, steps: float, step_s: float, limit_s: float, warm_share: float
) -> float:
    """Returns the first start at which the plan takes just `limit_s`; 0 when none is so short.

    `warm_share` is what a restart takes of the first start.
    """
    work = point_total_s(plan, steps, step_s, 0.0, 0.0)
    of_one_second = point_total_s(plan, steps, step_s, 1.0, warm_share) - work
    return max(0.0, (limit_s - work) / of_one_second)


def _starts(measured: Measured) -> tuple[float, float]:
    """Returns the cold and the warm start, of the slowest of the machines."""
    slowest = slowest_of(measured.machines)
    cold = measured.cold_start_s * slowest
    warm = measured.warm_start_s
    return cold, cold if warm is None else warm * slowest


def slowest_of(machines: int) -> float:
    """Returns how much longer the last of so many machines compiles than the middle one.

    All compile at the same time and wait for the last; `COMPILE_SIGMA` is how they scatter. The
    middle of the largest of m normal draws, by their quantile m / (m + 1).
    """
    return math.exp(COMPILE_SIGMA * NormalDist().inv_cdf(machines / (machines + 1)))


def _break_even(compiles: Array, gain: Array) -> tuple[float | None, float | None, float | None]:
    """Returns low, median and high of compiles / gain; None where that is never."""
    with np.errstate(divide="ignore", invalid="ignore"):
        steps = np.where(gain > 0, compiles / gain, np.inf)
    # Not interpolated: infinity next to a number has no middle.
    quantiles = np.quantile(steps, statistics.QUANTILES, method="higher")
    low, median, high = (float(q) if math.isfinite(q) else None for q in quantiles)
    return low, median, high
