"""Intervals of measured figures: bootstrap of paired ABBA quads, aware of processes.

Only numpy: a trial calls `speedup` on itself while it runs, to stop once it knows enough.

Method. Quads are resampled with replacement inside each process and the ratio is that of sums
(Efron and Tibshirani, An Introduction to the Bootstrap, 1993, ch. 6 and 25.4: a ratio of means is
less biased than a mean of ratios). A percentile interval of few samples is too narrow, so the draws
are spread by sqrt(n/(n-1)) * t/z (Hesterberg, What Teachers Should Know About the Bootstrap, The
American Statistician 69, 2015, section 4.1). Where two processes measured, what they disagree by
beyond their own noise is a random effect of the process (DerSimonian and Laird, Meta-Analysis in
Clinical Trials, 1986; processes as the outer level: Kalibera and Jones, Rigorous Benchmarking in
Reasonable Time, ISMM 2013), and the interval is widened by it instead of averaging it away.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from advisor.profiler.records import Interval, Pair

Array = npt.NDArray[np.float64]

DRAWS = 1000
# 90 % intervals.
QUANTILES = (0.05, 0.5, 0.95)
Z_95 = 1.6448536269514722
# 95 % quantiles of Student's t for 1 to 10 degrees of freedom.
_T_95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)
# More quads than this are joined to blocks of neighbours before they are drawn: that keeps a call
# short, and noise that lasts longer than one quad is not taken for independent (block bootstrap:
# Carlstein, Annals of Statistics 14, 1986).
MOST_BLOCKS = 64
# One quad has no spread of its own. Until there is a second one, its ratio is trusted to within
# this factor either way: single runs scattered by up to 50 % on a loaded machine (design §9).
SINGLE_QUAD_FACTOR = 1.5
# Standard deviation of the log ratio from process to process before any was compared: eight pairs
# of processes of examples/ner_bert.py differed by 1 to 4 % on a 2-core virtual machine. Two or
# three processes that happen to agree do not prove that all do, so this counts as one more.
USUAL_BETWEEN = 0.02


@dataclass(frozen=True, slots=True)
class StepDraws:
    """Bootstrap draws of the two mean step times, paired: one row of the two is one draw."""

    eager_s: Array
    compiled_s: Array


def interval(samples: Iterable[float] | Array) -> Interval:
    """Returns the 5 %, 50 % and 95 % quantiles of `samples`. Raises ValueError when empty."""
    values = np.asarray(samples if isinstance(samples, np.ndarray) else list(samples), dtype=float)
    if values.size == 0:
        raise ValueError("no samples, no interval")
    low, median, high = (float(value) for value in np.quantile(values, QUANTILES))
    return Interval(median=median, low=low, high=high)


def half_width(figure: Interval) -> float:
    """Returns half the width of an interval as a share of its median."""
    return (figure.high - figure.low) / (2 * figure.median) if figure.median else math.inf


def speedup(pairs: Sequence[Pair], seed: int = 0) -> Interval:
    """Returns sum(eager) / sum(compiled) with its 90 % interval. Raises ValueError without pairs.

    The same pairs and seed give the same interval. About 1 ms for 200 quads.
    """
    draws = step_draws(pairs, seed)
    return interval(draws.eager_s / draws.compiled_s)


def step_draws(pairs: Sequence[Pair], seed: int = 0, count: int = DRAWS) -> StepDraws:
    """Returns `count` joint draws of the eager and compiled mean step time in seconds.

    Raises ValueError without pairs.
    """
    clusters = _clusters(pairs)
    if not clusters:
        raise ValueError("no pairs, no step times")
    rng = np.random.default_rng(seed)
    log_eager, log_ratio = zip(*(_resample(*c, rng, count) for c in clusters), strict=True)
    sizes = np.array([len(eager) for eager, _ in clusters], dtype=float)
    eager_s: Array = np.exp(np.average(log_eager, axis=0, weights=sizes))
    if len(clusters) == 1:
        return StepDraws(eager_s, eager_s / np.exp(log_ratio[0]))
    within = np.array([np.var(draws) for draws in log_ratio])
    between = _between_variance(_log_ratios(clusters), within)
    weights = _weights(within + between)
    ratio = np.average(log_ratio, axis=0, weights=weights)
    # The processes seen are a sample of processes: their mean is unsure by this much.
    ratio = ratio + rng.standard_normal(count) * math.sqrt(between * float(np.sum(weights**2)))
    return StepDraws(eager_s, eager_s / np.exp(ratio))


def between_processes(pairs: Sequence[Pair], seed: int = 0) -> float:
    """Returns the standard deviation of the log ratio from process to process, 0 when unknown.

    It is what processes disagree by beyond the noise of each.
    """
    clusters = _clusters(pairs)
    if len(clusters) < 2:
        return 0.0
    rng = np.random.default_rng(seed)
    within = np.array([np.var(_resample(*c, rng, DRAWS)[1]) for c in clusters])
    return math.sqrt(_between_variance(_log_ratios(clusters), within))


def _clusters(pairs: Sequence[Pair]) -> list[tuple[Array, Array]]:
    """Returns the eager and compiled seconds of each process, in the order of processes."""
    table = np.array([(p.process, p.eager_s, p.compiled_s) for p in pairs], dtype=float)
    if table.size == 0:
        return []
    rows = (table[table[:, 0] == process] for process in np.unique(table[:, 0]))
    return [(row[:, 1], row[:, 2]) for row in rows]


def _log_ratios(clusters: list[tuple[Array, Array]]) -> Array:
    return np.array([math.log(eager.sum() / compiled.sum()) for eager, compiled in clusters])


def _resample(
    eager: Array, compiled: Array, rng: np.random.Generator, count: int
) -> tuple[Array, Array]:
    """Returns draws of log(mean eager) and log(mean eager / mean compiled) in one process."""
    n = len(eager)
    centre_eager = math.log(eager.mean())
    centre_ratio = math.log(eager.sum() / compiled.sum())
    if n == 1:
        noise = rng.standard_normal((2, count)) * math.log(SINGLE_QUAD_FACTOR) / Z_95
        return centre_eager + noise[0], centre_ratio + noise[1]
    blocks = min(n, MOST_BLOCKS)
    starts = np.arange(blocks) * n // blocks
    block_eager, block_compiled = np.add.reduceat(eager, starts), np.add.reduceat(compiled, starts)
    chosen = rng.integers(0, blocks, size=(count, blocks))
    drawn_eager = block_eager[chosen].sum(axis=1) / n
    drawn_ratio = drawn_eager * n / block_compiled[chosen].sum(axis=1)
    spread = _small_sample_factor(blocks)
    return (
        centre_eager + spread * (np.log(drawn_eager) - centre_eager),
        centre_ratio + spread * (np.log(drawn_ratio) - centre_ratio),
    )


def _small_sample_factor(n: int) -> float:
    """Returns by how much the bootstrap's deviations of n >= 2 samples must be spread."""
    freedom = n - 1
    # Cornish-Fisher expansion of Student's t (Abramowitz and Stegun 26.7.5), too rough below 10.
    expansion = Z_95 + (Z_95**3 + Z_95) / (4 * freedom)
    t = _T_95[freedom - 1] if freedom <= len(_T_95) else expansion
    return math.sqrt(n / freedom) * t / Z_95


def _weights(variances: Array) -> Array:
    """Returns inverse-variance weights that sum to 1; equal ones where all variances are 0."""
    inverse = _inverse(variances)
    return np.asarray(inverse / inverse.sum())


def _inverse(variances: Array) -> Array:
    """Returns 1 / variances, where 0 counts as a millionth of the largest."""
    largest = float(variances.max()) or 1e-12
    return np.asarray(1 / np.maximum(variances, largest * 1e-6))


def _between_variance(centres: Array, within: Array) -> float:
    """Returns DerSimonian and Laird's variance between the processes, shrunk towards the usual."""
    inverse = _inverse(within)
    mean = np.average(centres, weights=inverse)
    excess = float(np.sum(inverse * (centres - mean) ** 2)) - (len(centres) - 1)
    scale = float(np.sum(inverse * (inverse.sum() - inverse)) / inverse.sum())
    found = max(0.0, excess / scale)
    return (found * (len(centres) - 1) + USUAL_BETWEEN**2) / len(centres)
