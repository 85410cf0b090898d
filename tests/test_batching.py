"""Simulated epochs: no sample is lost, none is cut, and no batch is larger than the job's own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.models import batching
from advisor.models.batching import Epoch, bucketed, longest, natural
from advisor.profiler.records import BatchClass, Lengths


@st.composite
def data_sets(draw: st.DrawFn) -> Lengths:
    """Draws a data set with batches by number or by tokens, padded in one of the ways."""
    values = sorted(draw(st.sets(st.integers(1, 300), min_size=1, max_size=12)))
    size = len(values)
    by_tokens = draw(st.booleans())
    return Lengths(
        values=tuple(values),
        counts=tuple(draw(st.lists(st.integers(1, 30), min_size=size, max_size=size))),
        batch_size=None if by_tokens else draw(st.integers(1, 20)),
        tokens_per_batch=draw(st.integers(1, 2000)) if by_tokens else None,
        pad_to=draw(st.sampled_from([None, None, 64, 512])),
        pad_multiple=draw(st.sampled_from([1, 8, 64])),
        shuffled=draw(st.booleans()),
        drop_last=draw(st.booleans()),
    )


@st.composite
def in_buckets(draw: st.DrawFn) -> tuple[Lengths, list[int]]:
    """Draws a data set and boundaries, any lengths of it, the longest among them."""
    data = draw(data_sets())
    return data, sorted({*draw(st.sets(st.sampled_from(data.values))), data.values[-1]})


def samples(data: Lengths) -> int:
    return sum(data.counts)


def skewed(number: int = 20_000, **more: object) -> Lengths:
    """Returns a data set with many short samples and few long ones."""
    drawn = np.clip(np.rint(np.random.default_rng(1).lognormal(4, 0.7, number)), 4, 512)
    values, counts = np.unique(drawn.astype(int), return_counts=True)
    data = Lengths(values=tuple(values.tolist()), counts=tuple(counts.tolist()), batch_size=32)
    return replace(data, **more)  # type: ignore[arg-type]


def within_budget(epoch: Epoch, budget: int) -> bool:
    """Returns whether no batch holds more tokens, one sample longer than the budget aside."""
    return bool(((epoch.rows * epoch.lengths <= budget) | (epoch.rows == 1)).all())


@given(data_sets(), st.integers(0, 3))
@settings(max_examples=150, deadline=None)
def test_natural_batches_hold_every_sample_and_fit(data: Lengths, seed: int) -> None:
    epoch = natural(data, seed)
    assert 0 <= epoch.padding_share < 1
    assert epoch.scale == 1
    assert epoch.lengths.max() <= longest(data)
    if not data.drop_last:
        assert epoch.rows.sum() == samples(data)
        assert epoch.tokens == np.dot(data.values, data.counts)
        assert epoch.lengths.max() == longest(data)
    if data.tokens_per_batch is not None:
        assert within_budget(epoch, data.tokens_per_batch)
    elif not data.drop_last:
        assert (epoch.rows[:-1] == data.batch_size).all()
        assert 0 < epoch.rows[-1] <= (data.batch_size or 0)
    elif samples(data) >= (data.batch_size or 0):
        assert (epoch.rows == data.batch_size).all()
        assert epoch.rows.sum() > samples(data) - (data.batch_size or 0)


@given(in_buckets(), st.booleans(), st.integers(0, 3))
@settings(max_examples=200, deadline=None)
def test_bucketed_batches_hold_every_sample_and_fit(
    drawn: tuple[Lengths, list[int]], to_boundary: bool, seed: int
) -> None:
    data, edges = drawn
    epoch = bucketed(data, edges, to_boundary=to_boundary, seed=seed)
    assert 0 <= epoch.padding_share < 1
    if to_boundary:
        assert set(epoch.lengths.tolist()) <= set(edges)
    else:
        assert (epoch.lengths % data.pad_multiple == 0).all()
        assert epoch.lengths.max() < edges[-1] + data.pad_multiple
    if not data.drop_last:
        assert epoch.rows.sum() == samples(data)
        assert epoch.tokens == np.dot(data.values, data.counts)
    if data.tokens_per_batch is not None:
        assert within_budget(epoch, data.tokens_per_batch)
    else:
        smaller = epoch.rows[epoch.rows < (data.batch_size or 0)]
        assert len(smaller) <= 1
        assert epoch.rows.max() <= (data.batch_size or 0)
        assert len(smaller) == 0 or not data.drop_last or len(epoch.rows) == 1


@given(in_buckets())
@settings(max_examples=100, deadline=None)
def test_samples_are_at_most_as_long_as_their_boundary(drawn: tuple[Lengths, list[int]]) -> None:
    data, edges = drawn
    data = replace(data, drop_last=False)
    epoch = bucketed(data, edges, to_boundary=True)
    for edge in edges:
        # Samples may go to a longer bucket, never to a shorter one.
        fit = sum(n for value, n in zip(data.values, data.counts, strict=True) if value <= edge)
        assert epoch.rows[epoch.lengths <= edge].sum() <= fit


def test_single_samples_are_padded_to_the_first_boundary_that_holds_them() -> None:
    data = Lengths(values=(3, 5, 9), counts=(2, 1, 4), batch_size=1)
    epoch = bucketed(data, [5, 9], to_boundary=True)
    assert sorted(epoch.lengths.tolist()) == [5] * 3 + [9] * 4
    free = bucketed(data, [5, 9], to_boundary=False)
    assert free.padding_share == 0


def test_sorted_samples_make_less_padding_than_shuffled_ones() -> None:
    shuffled, ordered = natural(skewed()), natural(skewed(shuffled=False))
    assert ordered.padding_share < 0.05 < 0.3 < shuffled.padding_share


def test_buckets_make_less_padding_than_mixed_batches() -> None:
    data = skewed()
    edges = [32, 64, 128, 256, 512]
    tight = bucketed(data, edges, to_boundary=False).padding_share
    static = bucketed(data, edges, to_boundary=True).padding_share
    assert tight <= static < natural(data).padding_share


def test_more_samples_fit_into_a_bucket_of_short_ones_under_a_token_budget() -> None:
    data = skewed(batch_size=None, tokens_per_batch=4096)
    epoch = bucketed(data, [64, 512], to_boundary=True)
    assert epoch.rows[epoch.lengths == 64].max() == 64
    assert epoch.rows[epoch.lengths == 512].max() == 8


def test_a_sample_longer_than_the_budget_is_a_batch_of_its_own() -> None:
    data = Lengths(values=(10, 500), counts=(20, 3), tokens_per_batch=100)
    for epoch in (natural(data), bucketed(data, [10, 500], to_boundary=True)):
        assert (epoch.rows[epoch.lengths == 500] == 1).all()
        assert epoch.rows.sum() == 23


def test_fewer_samples_than_a_batch_make_one_batch() -> None:
    data = Lengths(values=(5, 7), counts=(2, 1), batch_size=8, drop_last=True)
    for epoch in (natural(data), bucketed(data, [5, 7], to_boundary=True)):
        assert epoch.rows.tolist() == [3]
        assert epoch.lengths.tolist() == [7]


def test_the_same_seed_makes_the_same_epoch() -> None:
    data = skewed(2_000)
    for make in (natural, lambda d, seed: bucketed(d, [64, 512], to_boundary=False, seed=seed)):
        one, same, other = make(data, 1), make(data, 1), make(data, 2)
        assert one.lengths.tolist() == same.lengths.tolist() != other.lengths.tolist()


def test_batches_that_were_seen_stay_as_they_were() -> None:
    seen = (BatchClass(rows=4, length=16, count=3), BatchClass(rows=2, length=32, count=1))
    data = Lengths(values=(10, 30), counts=(12, 2), batch_size=4, batches=seen)
    epoch = natural(data)
    rows, lengths, counts = epoch.classes()
    assert list(zip(rows, lengths, counts, strict=True)) == [(4, 16, 3), (2, 32, 1)]
    assert epoch.padding_share == pytest.approx(1 - 180 / 256)


def test_whole_batches_keep_their_composition_and_are_padded_up() -> None:
    seen = (BatchClass(rows=4, length=16, count=3), BatchClass(rows=4, length=32, count=2))
    data = Lengths(values=(16, 32), counts=(3, 2), batch_size=4, batches=seen, whole_batches=True)
    epoch = bucketed(data, [32], to_boundary=True)
    assert epoch.rows.tolist() == [4] * 5
    assert epoch.lengths.tolist() == [32] * 5
    assert natural(data).padding_share == 0
    assert epoch.padding_share == pytest.approx(1 - 448 / 640)
    two = bucketed(data, [16, 32], to_boundary=True)
    assert sorted(two.lengths.tolist()) == [16, 16, 16, 32, 32]


def test_boundaries_that_do_not_hold_the_longest_sample_are_refused() -> None:
    data = Lengths(values=(5, 9), counts=(2, 1), batch_size=2)
    seen = replace(data, batches=(BatchClass(rows=2, length=9, count=1),), whole_batches=True)
    for each in (data, seen):
        for edges in ([], [8]):
            with pytest.raises(ValueError, match="at least the longest length, 9"):
                bucketed(each, edges, to_boundary=True)


def test_shapes_are_counted_and_dated() -> None:
    epoch = Epoch(np.array([2, 2, 2, 1]), np.array([8, 4, 8, 8]), tokens=20.0)
    rows, lengths, counts = epoch.classes()
    assert list(zip(rows, lengths, counts, strict=True)) == [(2, 4, 1), (1, 8, 1), (2, 8, 2)]
    assert [epoch.first_step_with(n) for n in (1, 2, 3, 4)] == [0, 1, 3, None]


@pytest.mark.parametrize("tokens", [None, 2048])
def test_a_larger_data_set_is_drawn_from_and_scaled(
    tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_size = None if tokens else 16
    data = skewed(200_000, tokens_per_batch=tokens, batch_size=batch_size, shuffled=False)
    exact = natural(data)
    monkeypatch.setattr(batching, "MOST_SIMULATED", 20_000)
    monkeypatch.setattr(batching, "_MOST_ONE_BY_ONE", 20_000)
    for make in (natural, lambda d: bucketed(d, [64, 512], to_boundary=False)):
        drawn = make(data)
        assert drawn.scale == pytest.approx(0.1)
        assert drawn.rows.sum() == 20_000
        assert drawn.tokens / drawn.scale == pytest.approx(
            np.dot(data.values, data.counts), rel=0.01
        )
    if not tokens:
        assert len(natural(data).rows) / 0.1 == pytest.approx(len(exact.rows), rel=0.01)


def test_billions_of_samples_are_simulated_by_a_million() -> None:
    data = Lengths(values=(10, 20), counts=(3 * 10**9, 10**9), batch_size=32)
    epoch = natural(data)
    assert epoch.rows.sum() == batching.MOST_SIMULATED
    assert epoch.scale == pytest.approx(batching.MOST_SIMULATED / (4 * 10**9))
    assert epoch.tokens / epoch.rows.sum() == pytest.approx(12.5, rel=1e-3)
