"""Intervals: they cover, they shrink, they see processes, and they are quick enough for a trial."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.profiler.records import Pair
from advisor.profiler.statistics import (
    MOST_BLOCKS,
    USUAL_BETWEEN,
    between_processes,
    half_width,
    interval,
    speedup,
    step_draws,
)


def quads(
    count: int, ratio: float = 1.2, noise: float = 0.03, seed: int = 0, process: int = 0
) -> list[Pair]:
    """Returns pairs with a true speedup, log-normal noise, and common drift of the machine."""
    rng = np.random.default_rng(seed)
    drift = 1 + 0.2 * np.sin(np.arange(count) / 3)
    eager = 0.06 * drift * np.exp(noise * rng.standard_normal(count))
    compiled = 0.06 * drift / ratio * np.exp(noise * rng.standard_normal(count))
    return [
        Pair(eager_s=float(e), compiled_s=float(c), process=process)
        for e, c in zip(eager, compiled, strict=True)
    ]


lists_of_pairs = st.lists(
    st.builds(
        Pair,
        eager_s=st.floats(1e-5, 1e2),
        compiled_s=st.floats(1e-5, 1e2),
        process=st.integers(0, 1),
    ),
    min_size=1,
    max_size=30,
)


def test_interval_is_5_50_95_quantiles() -> None:
    found = interval(range(101))
    assert (found.low, found.median, found.high) == (5, 50, 95)


def test_nothing_measured_is_an_error_and_not_a_number() -> None:
    with pytest.raises(ValueError, match="no samples"):
        interval([])
    with pytest.raises(ValueError, match="no pairs"):
        speedup([])


@given(lists_of_pairs)
@settings(max_examples=60, deadline=None)
def test_interval_is_ordered_positive_and_repeatable(pairs: list[Pair]) -> None:
    found = speedup(pairs, seed=3)
    assert 0 < found.low <= found.median <= found.high < math.inf
    assert found == speedup(pairs, seed=3)


@given(lists_of_pairs, st.floats(1e-3, 1e3))
@settings(max_examples=40, deadline=None)
def test_speedup_does_not_depend_on_the_unit_of_time(pairs: list[Pair], scale: float) -> None:
    scaled = [
        Pair(eager_s=p.eager_s * scale, compiled_s=p.compiled_s * scale, process=p.process)
        for p in pairs
    ]
    one, other = speedup(pairs), speedup(scaled)
    for name in ("low", "median", "high"):
        assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-6)


@pytest.mark.parametrize("count", [3, 8, 40, 150])
def test_interval_covers_the_truth_about_nine_times_in_ten(count: int) -> None:
    runs = 200
    hits = 0
    for seed in range(runs):
        found = speedup(quads(count, 1.2, seed=seed), seed)
        hits += found.low <= 1.2 <= found.high
    # Three standard errors of a share of 0.9 in 200 runs are 0.064.
    assert 0.83 <= hits / runs <= 0.97


def test_more_quads_narrow_the_interval() -> None:
    widths = [half_width(speedup(quads(count))) for count in (2, 8, 32, 128)]
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] < 0.01 < widths[0]


def test_drift_of_the_machine_cancels_in_the_ratio() -> None:
    steady, drifting = quads(40), quads(40)
    drifting = [
        Pair(eager_s=p.eager_s * (1 + i / 10), compiled_s=p.compiled_s * (1 + i / 10))
        for i, p in enumerate(steady)
    ]
    assert speedup(drifting).median == pytest.approx(speedup(steady).median, rel=0.02)
    assert half_width(speedup(drifting)) < 1.8 * half_width(speedup(steady))


def test_one_quad_is_never_trusted() -> None:
    found = speedup([Pair(eager_s=0.06, compiled_s=0.03)])
    assert found.low < 2 / 1.3
    assert found.high > 2 * 1.3


def test_processes_that_disagree_widen_the_interval_over_both() -> None:
    one, other = quads(40, 1.20, 0.01), quads(40, 1.30, 0.01, seed=1, process=1)
    pooled = speedup([*one, *(Pair(eager_s=p.eager_s, compiled_s=p.compiled_s) for p in other)])
    aware = speedup([*one, *other])
    assert between_processes([*one, *other]) > 0.04
    assert half_width(aware) > 2 * half_width(pooled)
    assert aware.low < speedup(one).median
    assert aware.high > speedup(other).median


def test_two_processes_that_agree_do_not_prove_that_all_do() -> None:
    both = [*quads(40, 1.2, seed=4), *quads(40, 1.2, seed=9, process=1)]
    assert USUAL_BETWEEN / 2 < between_processes(both) < USUAL_BETWEEN
    assert between_processes(both[:40]) == 0


def test_more_processes_that_agree_narrow_the_interval() -> None:
    pairs = [Pair(eager_s=0.06, compiled_s=0.05, process=process) for process in range(6)] * 10
    widths = []
    for most in (2, 4, 6):
        found = speedup([pair for pair in pairs if pair.process < most])
        assert found.median == pytest.approx(1.2, rel=2e-3)
        assert found.low < 1.2 < found.high
        widths.append(half_width(found))
    assert widths == sorted(widths, reverse=True)
    assert widths[0] < 1.7 * USUAL_BETWEEN


def test_identical_pairs_of_one_process_have_a_certain_ratio() -> None:
    found = speedup([Pair(eager_s=0.06, compiled_s=0.05)] * 10)
    assert found.low == pytest.approx(1.2)
    assert found.high == pytest.approx(1.2)


def test_draws_are_of_both_arms_jointly() -> None:
    pairs = [
        Pair(eager_s=p.eager_s * load, compiled_s=p.compiled_s * load)
        for p, load in zip(quads(40, noise=0.001), [1.0, 3.0] * 20, strict=True)
    ]
    draws = step_draws(pairs, count=500)
    assert len(draws.eager_s) == len(draws.compiled_s) == 500
    assert np.corrcoef(draws.eager_s, draws.compiled_s)[0, 1] > 0.99


def test_leftover_quads_of_a_block_are_not_dropped() -> None:
    count = 2 * MOST_BLOCKS + 5
    pairs = quads(count)
    exact = sum(p.eager_s for p in pairs) / sum(p.compiled_s for p in pairs)
    assert speedup(pairs).median == pytest.approx(exact, rel=2e-3)


def test_a_trial_can_call_it_while_it_measures() -> None:
    pairs = quads(200)
    speedup(pairs)
    best = math.inf
    for _ in range(20):
        begin = time.perf_counter()
        speedup(pairs)
        best = min(best, time.perf_counter() - begin)
    assert best < 2e-3
