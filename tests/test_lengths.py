"""Lengths: one clear sentence for each mistake, none lost or cut, and measured where they lie."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.profiler.errors import PlanError
from advisor.profiler.lengths import (
    MOST_DISTINCT,
    MOST_LENGTH,
    between,
    counted,
    measured_lengths,
    padded,
    quantile,
    rows_at,
)
from advisor.profiler.records import Lengths, LengthSource


def lengths_of(values: Any, **more: Any) -> Lengths:
    data = counted(values, "lengths", LengthSource.WORKLOAD)
    return Lengths(values=data.values, counts=data.counts, **more)


class Sized:
    """What a person may hand over by mistake: it has a length, but is none."""

    def __len__(self) -> int:
        return 3


# --- counting


@pytest.mark.parametrize(
    "values",
    [
        [5, 3, 5, 128],
        (5, 3, 5, 128),
        [5.0, 3.0, 5.0, 128.0],
        [np.int32(5), 3, np.uint8(5), 128],
        iter([5, 3, 5, 128]),
        {0: 5, 1: 3, 2: 5, 3: 128}.values(),
        np.array([5, 3, 5, 128], dtype=np.uint16),
        np.array([5, 3, 5, 128], dtype=np.float32),
        torch.tensor([5, 3, 5, 128]),
        torch.tensor([5, 3, 5, 128], dtype=torch.int32),
        torch.tensor([5.0, 3.0, 5.0, 128.0], requires_grad=True),
        [torch.tensor(5), torch.tensor(3), torch.tensor(5), torch.tensor(128)],
    ],
    ids=lambda values: type(values).__name__,
)
def test_lengths_of_all_kinds_are_counted(values: Any) -> None:
    data = counted(values, "lengths", LengthSource.WORKLOAD)
    assert data.values == (3, 5, 128)
    assert data.counts == (1, 2, 1)
    assert data.source is LengthSource.WORKLOAD
    assert all(type(n) is int for n in (*data.values, *data.counts))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([], "has no lengths"),
        (np.array([]), "has no lengths"),
        (torch.tensor([]), "has no lengths"),
        ([4, 0, 3], "has 0 as length number 2: the length of a sample is 1 to 16,777,216"),
        ([4, 3, -7], "has -7 as length number 3"),
        ([4.0, -7.0], "has -7.0 as length number 2"),
        ([10**9], "has 1000000000 as length number 1"),
        ([1, MOST_LENGTH + 1], "not bytes or characters of a whole file"),
        ([2**63 + 5], "has 9223372036854775813 as length number 1"),
        ([1, 10**30], f"has {10**30} as length number 2"),
        ([1.0, 1e30], "has 1e+30 as length number 2"),
        ([1, float("nan")], "has nan as length number 2: the length of a sample is a whole"),
        ([1, float("inf")], "has inf as length number 2"),
        ([2, 3.5], "has 3.5 as length number 2"),
        ("a text", "it is text"),
        (["12", "13"], "it is text"),
        ([1, "two"], "it is text"),
        ([True, False], "it is a list of bool"),
        ([1, None], "it is a list of mixed items"),
        ([1 + 2j], "it is a list of complex128"),
        ([[1, 2], [3, 4]], "it is an array of shape (2, 2)"),
        (np.ones((2, 3), dtype=int), "it is an array of shape (2, 3)"),
        (np.ones((0, 3), dtype=int), "it is an array of shape (0, 3)"),
        (np.array(7), "it is an array of shape ()"),
        (torch.ones(2, 2), "it is an array of shape (2, 2)"),
        (torch.ones(2, dtype=torch.bfloat16), "BFloat16"),
        (torch.ones(2, device="meta"), "is no list of lengths"),
        ([[1, 2], [3]], "its items are lists of unequal length"),
        (7, "'int' object is not iterable"),
        (None, "'NoneType' object is not iterable"),
        (Sized(), "'Sized' object is not iterable"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value[:30],
)
def test_each_mistake_is_one_clear_sentence(values: Any, words: str) -> None:
    with pytest.raises(PlanError) as caught:
        counted(values, "lengths.txt", LengthSource.FILE)
    text = str(caught.value)
    assert text.startswith("lengths.txt ")
    assert words in text
    assert "\n" not in text
    assert len(text) < 250


def test_the_longest_length_is_still_one() -> None:
    assert counted([MOST_LENGTH, 1], "lengths", LengthSource.FILE).values == (1, MOST_LENGTH)


@pytest.mark.parametrize("seed", range(3))
def test_many_distinct_lengths_are_rounded_up_a_little(seed: int) -> None:
    rng = np.random.default_rng(seed)
    drawn = np.rint(np.clip(rng.lognormal(10, 1, 100_000), 1, MOST_LENGTH)).astype(int)
    data = counted(drawn, "lengths", LengthSource.FILE)
    assert len(data.values) <= MOST_DISTINCT
    assert sum(data.counts) == len(drawn)
    assert data.values[-1] == drawn.max()
    assert all(count > 0 for count in data.counts)
    # Both in ascending order: each sample became as long or longer.
    rounded = np.repeat(data.values, data.counts)
    assert (rounded >= np.sort(drawn)).all()
    assert rounded.sum() <= drawn.sum() * 1.001


def test_up_to_the_limit_nothing_is_rounded() -> None:
    data = counted(range(1, MOST_DISTINCT + 1), "lengths", LengthSource.FILE)
    assert data.values == tuple(range(1, MOST_DISTINCT + 1))


# --- what follows from them


def test_quantiles_are_lengths_of_the_data() -> None:
    data = Lengths(values=(10, 20, 30), counts=(5, 4, 1))
    assert [quantile(data, share) for share in (0, 0.5, 0.51, 0.9, 0.91, 1)] == [
        10,
        10,
        20,
        20,
        30,
        30,
    ]


@pytest.mark.parametrize(
    ("more", "length", "expected"),
    [
        ({}, 5, 5),
        ({"pad_multiple": 8}, 5, 8),
        ({"pad_multiple": 8}, 16, 16),
        ({"pad_to": 64}, 5, 64),
    ],
)
def test_batches_are_padded_as_the_job_pads(
    more: dict[str, int], length: int, expected: int
) -> None:
    assert padded(length, Lengths(values=(1,), counts=(1,), **more)) == expected  # type: ignore[arg-type]


def test_rows_of_a_batch_follow_the_token_budget() -> None:
    by_rows = Lengths(values=(1,), counts=(1,), batch_size=16)
    by_tokens = Lengths(values=(1,), counts=(1,), tokens_per_batch=1000)
    assert [rows_at(by_rows, n) for n in (1, 512)] == [16, 16]
    assert [rows_at(by_tokens, n) for n in (1, 300, 1000, 4000)] == [1000, 3, 1, 1]


@given(
    st.lists(st.integers(1, MOST_LENGTH) | st.integers(1, 600), min_size=1, max_size=60),
    st.integers(1, 6),
    st.booleans(),
    st.sampled_from([1, 8, 64, 100]),
    st.sampled_from([None, 128, 4096]),
)
@settings(max_examples=400, deadline=None)
def test_measured_lengths_lie_among_what_batches_are_padded_to(
    values: list[int], most: int, probe: bool, multiple: int, pad_to: int | None
) -> None:
    data = lengths_of(values, pad_multiple=multiple, pad_to=pad_to, batch_size=8)
    found = measured_lengths(data, most, probe=probe)
    assert list(found) == sorted(set(found))
    assert 1 <= len(found) <= most + probe
    assert found[-1] == padded(data.values[-1], data)
    # Buckets may be shorter than `pad_to`, never shorter than the shortest sample padded.
    shortest = padded(data.values[0], replace(data, pad_to=None))
    assert found[0] >= min(shortest, found[-1])
    # Without the probe none is close to another, and only one is a probe.
    apart = measured_lengths(data, most, probe=False)
    assert all(b >= 1.15 * a for a, b in itertools.pairwise(apart))
    assert set(apart) <= set(found)
    assert len(found) <= len(apart) + probe


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([7], (7,)),
        ([128] * 50, (128,)),
        ([500] * 50, (500,)),
        ([1, 2, 3], (1, 2, 3)),
        ([1, 1, 1, 2], (1, 2)),
        ([MOST_LENGTH], (MOST_LENGTH,)),
    ],
)
def test_constant_and_tiny_and_huge_lengths_are_measured(
    values: list[int], expected: tuple[int, ...]
) -> None:
    assert measured_lengths(lengths_of(values), 5, probe=True) == expected


def test_a_usual_distribution_is_measured_at_its_ends_middle_and_a_probe() -> None:
    drawn = np.clip(np.random.default_rng(0).lognormal(4.5, 0.8, 10_000), 8, 512).astype(int)
    data = lengths_of(drawn)
    found = measured_lengths(data, 5, probe=True)
    aligned = [n for n in found if n % 8 == 0]
    probes = [n for n in found if n % 8 and n >= 64]
    assert len(probes) == 1
    assert probes[0] + 3 in aligned
    assert found[-1] == 512
    assert quantile(data, 0.05) <= found[0] <= quantile(data, 0.1)
    assert measured_lengths(data, 5, probe=False) == tuple(n for n in found if n not in probes)


def test_the_probe_is_never_one_of_the_others() -> None:
    # 12 and 9 are measured, and 12 - 3 would be the probe.
    data = lengths_of([6] * 10 + [9] * 50 + [12] * 40 + [20])
    found = measured_lengths(data, 6, probe=True)
    assert {9, 12} <= set(found)
    assert len(set(found)) == len(found)


def test_the_widest_gap_is_halved() -> None:
    assert between([64, 128, 512]) == 256
    assert between([100, 110, 120]) is None
    assert between([100]) is None
    assert between([]) is None
    assert between([1, 2, 3]) is None
