"""Bucket boundaries: the least cost of all choices, never worse than simple rules, and quick."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.models import buckets
from advisor.models.buckets import (
    Cut,
    best_cut,
    cost_of,
    equal_width_boundaries,
    optimal_cuts,
    quantile_boundaries,
)

Table = tuple[list[int], list[int], list[float]]
LENGTHS, COUNTS, SAMPLE_S = [10, 20, 30], [5, 1, 4], [1.0, 2.0, 3.0]


@st.composite
def tables(draw: st.DrawFn, most: int = 9, *, rising: bool = False) -> Table:
    """Draws lengths, counts and seconds; unless `rising`, a longer boundary may be faster."""
    lengths = sorted(draw(st.sets(st.integers(1, 1000), min_size=1, max_size=most)))
    size = len(lengths)
    counts = draw(st.lists(st.integers(1, 50), min_size=size, max_size=size))
    seconds = draw(st.lists(st.floats(1e-4, 10.0), min_size=size, max_size=size))
    return lengths, counts, sorted(seconds) if rising else seconds


def least_by_trying(table: Table, number: int) -> float:
    """Returns the least cost over all choices of at most `number` boundaries."""
    lengths = table[0]
    return min(
        cost_of([*some, lengths[-1]], *table)
        for size in range(number)
        for some in itertools.combinations(lengths[:-1], size)
    )


def curved(lengths: np.ndarray) -> np.ndarray:
    """Returns the seconds of samples as a model with attention takes them."""
    return 1e-3 + 1e-5 * lengths + 1e-8 * lengths.astype(float) ** 2


@given(tables())
@settings(max_examples=150, deadline=None)
def test_each_cut_costs_the_least_of_all_choices(table: Table) -> None:
    cuts = optimal_cuts(*table)
    for number in range(1, len(table[0]) + 1):
        cut = cuts[min(number, len(cuts)) - 1]
        assert len(cut.boundaries) <= number
        assert cut.seconds == pytest.approx(least_by_trying(table, number), rel=1e-9)


@given(tables(most=40))
@settings(max_examples=150, deadline=None)
def test_each_cut_costs_what_its_boundaries_cost(table: Table) -> None:
    cuts = optimal_cuts(*table)
    for cut in cuts:
        assert cut.boundaries[-1] == table[0][-1]
        assert list(cut.boundaries) == sorted(set(cut.boundaries))
        assert cut.seconds == pytest.approx(cost_of(cut.boundaries, *table), rel=1e-9)
    for fewer, more in itertools.pairwise(cuts):
        assert more.seconds <= fewer.seconds * (1 + 1e-12)


@given(tables(most=40), st.integers(1, 12))
@settings(max_examples=150, deadline=None)
def test_never_worse_than_quantiles_or_equal_widths(table: Table, number: int) -> None:
    cuts = optimal_cuts(*table, most=number)
    for rule in (
        quantile_boundaries(table[0], table[1], number),
        equal_width_boundaries(table[0], number),
    ):
        assert 1 <= len(rule) <= number
        assert rule[-1] == table[0][-1]
        assert cuts[-1].seconds <= cost_of(rule.tolist(), *table) * (1 + 1e-9)


@given(tables(most=30), st.floats(0, 100))
@settings(max_examples=150, deadline=None)
def test_stopping_early_never_loses_the_best_total(table: Table, compile_s: float) -> None:
    def total(cuts: tuple[Cut, ...]) -> float:
        best = best_cut(cuts, compile_s)
        return best.seconds + compile_s * len(best.boundaries)

    early = optimal_cuts(*table, compile_s=compile_s)
    everything = optimal_cuts(*table)
    assert len(early) <= len(everything)
    assert total(early) == pytest.approx(total(everything), rel=1e-9)


@given(tables(most=40, rising=True))
@settings(max_examples=50, deadline=None)
def test_enough_buckets_leave_no_padding(table: Table) -> None:
    floor = float(np.dot(table[1], table[2]))
    assert optimal_cuts(*table)[-1].seconds == pytest.approx(floor, rel=1e-9)


def test_cuts_of_a_small_example() -> None:
    cuts = optimal_cuts(LENGTHS, COUNTS, SAMPLE_S)
    assert [cut.boundaries for cut in cuts] == [(30,), (10, 30), (10, 20, 30)]
    assert [cut.seconds for cut in cuts] == [30.0, 20.0, 19.0]
    assert best_cut(cuts, 0.0).boundaries == (10, 20, 30)
    assert best_cut(cuts, 5.0).boundaries == (10, 30)
    assert best_cut(cuts, 50.0).boundaries == (30,)


def test_a_longer_and_faster_boundary_is_taken() -> None:
    cuts = optimal_cuts([7, 8, 16], [5, 5, 5], [3.0, 1.0, 2.0])
    assert [cut.boundaries for cut in cuts] == [(16,), (8, 16)]


def test_expensive_compiles_end_the_search_at_one_bucket() -> None:
    assert len(optimal_cuts(LENGTHS, COUNTS, SAMPLE_S, compile_s=1e6)) == 1


def test_one_length_is_one_bucket() -> None:
    assert optimal_cuts([128], [1000], [0.5]) == (Cut((128,), 500.0),)


@pytest.mark.parametrize("kind", ["lognormal", "uniform", "two humps"])
def test_many_distinct_lengths_cost_hardly_more_than_exactly(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(5)
    drawn = {
        "lognormal": rng.lognormal(8.5, 0.8, 300_000),
        "uniform": rng.uniform(1, 11_000, 100_000),
        "two humps": np.concatenate(
            [rng.normal(2_000, 600, 100_000), rng.normal(40_000, 3_000, 100_000)]
        ),
    }[kind]
    lengths, counts = np.unique(np.clip(np.rint(drawn), 1, 60_000), return_counts=True)
    assert len(lengths) > buckets.MOST_CANDIDATES
    # Multiples of 8 are faster, so boundaries are also moved.
    sample_s = curved(lengths) * np.where(lengths % 8 == 0, 1.0, 1.05)
    nearly = optimal_cuts(lengths, counts, sample_s, most=32)
    monkeypatch.setattr(buckets, "MOST_CANDIDATES", len(lengths))
    exactly = optimal_cuts(lengths, counts, sample_s, most=32)
    assert len(nearly) == len(exactly)
    for near, exact in zip(nearly, exactly, strict=True):
        assert near.seconds == pytest.approx(
            cost_of(near.boundaries, lengths, counts, sample_s), rel=1e-9
        )
        assert near.boundaries[-1] == lengths[-1]
        assert exact.seconds * (1 - 1e-9) <= near.seconds <= exact.seconds * 1.001
    for fewer, more in itertools.pairwise(nearly):
        assert more.seconds <= fewer.seconds


@pytest.mark.parametrize(
    "boundaries", [[], [30, 10], [10, 10, 30], [15, 30], [10, 20], [10, 31], [40], [0, 30], [30, 9]]
)
def test_cost_of_refuses_what_are_no_boundaries(boundaries: list[int]) -> None:
    with pytest.raises(ValueError, match="boundaries are lengths of the data"):
        cost_of(boundaries, LENGTHS, COUNTS, SAMPLE_S)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (([], [], []), "of one length"),
        (([1, 2], [1], [1.0, 2.0]), "of one length"),
        (([2, 1], [1, 1], [1.0, 2.0]), "ascending"),
        (([1, 1], [1, 1], [1.0, 2.0]), "ascending"),
        (([1, 2], [1, 1], [1.0, float("nan")]), "finite"),
    ],
)
def test_tables_that_make_no_sense_are_refused(table: Table, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        optimal_cuts(*table)
