"""What batches a data set's lengths make: simulated, because a batch is as long as its longest.

The mean of the samples says little about padded batches: with 32 of them a batch is nearly always
long. So one epoch is composed as a loader would compose it, shuffled or sorted, by a number of
samples or by a token budget, in natural order or in buckets, and the batches are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from advisor.profiler.lengths import padded, rows_at
from advisor.profiler.records import Lengths

Ints = npt.NDArray[np.int64]

# A larger data set is drawn from: the shares of batch shapes hardly change beyond this.
MOST_SIMULATED = 1_000_000
# Filling batches up to a token budget goes sample by sample.
_MOST_ONE_BY_ONE = 100_000


@dataclass(frozen=True, slots=True)
class Epoch:
    """The batches of one epoch in their order: samples in each, and the padded length of each.

    `tokens` are the samples' own, `scale` is how many epochs' worth of samples were simulated.
    """

    rows: Ints
    lengths: Ints
    tokens: float
    scale: float = 1.0

    @property
    def padding_share(self) -> float:
        """Share of all tokens that is padding."""
        padded = float((self.rows * self.lengths).sum())
        return max(0.0, 1 - self.tokens / padded) if padded else 0.0

    def classes(self) -> tuple[Ints, Ints, Ints]:
        """Returns rows, length and number of batches of each shape, the longest last."""
        pairs, counts = np.unique(np.stack([self.lengths, self.rows]), axis=1, return_counts=True)
        return pairs[1], pairs[0], counts

    def first_step_with(self, shapes: int) -> int | None:
        """Returns the step (from 0) whose batch brings the `shapes`-th distinct shape, if any."""
        pairs = np.stack([self.lengths, self.rows])
        _, first = np.unique(pairs, axis=1, return_index=True)
        return int(np.sort(first)[shapes - 1]) if len(first) >= shapes else None


def natural(data: Lengths, seed: int = 0) -> Epoch:
    """Returns an epoch of the batches that the job makes now."""
    if data.batches:
        return _as_seen(data, seed)
    rng = np.random.default_rng(seed)
    samples, scale = _samples(data, rng)
    if data.shuffled:
        rng.shuffle(samples)
    if data.tokens_per_batch is not None:
        return _by_tokens(samples, data, scale)
    return _cut(samples, data.batch_size or 1, data, scale)


def bucketed(
    data: Lengths, boundaries: Sequence[int], *, to_boundary: bool, seed: int = 0
) -> Epoch:
    """Returns an epoch of batches that each hold samples of one bucket.

    With `to_boundary` they are padded to the boundary, else to their longest. What is left of a
    bucket joins the next longer one, so that one batch at most is smaller than the others (as
    `advisor.buckets.BucketBatchSampler` does it). Where only whole batches are known, they keep
    their composition and are padded up.

    Raises ValueError when the last boundary does not hold the longest length.
    """
    edges = np.asarray(boundaries, dtype=np.int64)
    if not len(edges) or edges[-1] < data.values[-1]:
        raise ValueError(f"the last boundary is at least the longest length, {data.values[-1]}")
    if data.whole_batches:
        now = _as_seen(data, seed)
        return Epoch(now.rows, edges[np.searchsorted(edges, now.lengths)], now.tokens, now.scale)
    rng = np.random.default_rng(seed)
    samples, scale = _samples(data, rng)
    held = np.searchsorted(edges, samples)
    rows: list[Ints] = []
    lengths: list[Ints] = []
    tokens = 0.0
    left = np.array([], dtype=np.int64)
    for bucket, edge in enumerate(edges):
        # Unlike the boundary, what a batch is padded to on its own is a multiple.
        fits = edge if to_boundary else _padded(edge, data, None)
        size = rows_at(data, int(fits))
        own = np.concatenate((left, samples[held == bucket]))
        rng.shuffle(own)
        full = len(own) // size * size
        left = own[full:]
        last = bucket == len(edges) - 1
        # A data set smaller than a batch still is one, as in `natural`.
        dropped = data.drop_last and (full or rows)
        used = own if last and not dropped else own[:full]
        if len(used):
            starts = np.arange(0, len(used), size)
            longest = np.maximum.reduceat(used, starts)
            rows.append(np.diff(np.append(starts, len(used))))
            lengths.append(
                np.full(len(starts), edge) if to_boundary else _padded(longest, data, None)
            )
            tokens += float(used.sum())
    return Epoch(np.concatenate(rows), np.concatenate(lengths), tokens, scale)


def longest(data: Lengths) -> int:
    """Returns the length that the longest sample is padded to."""
    return padded(data.values[-1], data)


def _as_seen(data: Lengths, seed: int) -> Epoch:
    """Returns the batches that were seen, in an order of chance."""
    counts = [each.count for each in data.batches]
    rows = np.repeat([each.rows for each in data.batches], counts)
    lengths = np.repeat([each.length for each in data.batches], counts)
    order = np.random.default_rng(seed).permutation(len(rows))
    rows, lengths = rows[order], lengths[order]
    if data.whole_batches:
        # What of them is padding is not known.
        return Epoch(rows, lengths, float((rows * lengths).sum()))
    mean = float(np.average(data.values, weights=data.counts))
    return Epoch(rows, lengths, min(mean * float(rows.sum()), float((rows * lengths).sum())))


def _samples(data: Lengths, rng: np.random.Generator) -> tuple[Ints, float]:
    """Returns the samples' lengths, ascending, and the share of the data set that they are."""
    values = np.array(data.values, dtype=np.int64)
    counts = np.array(data.counts, dtype=np.int64)
    total = int(counts.sum())
    most = _MOST_ONE_BY_ONE if data.tokens_per_batch is not None else MOST_SIMULATED
    if total <= most:
        return np.repeat(values, counts), 1.0
    # The same shares, by systematic sampling: every k-th sample of the sorted ones.
    places = (np.arange(most) + rng.random()) * (total / most)
    places = np.minimum(places.astype(np.int64), total - 1)
    held = np.searchsorted(np.cumsum(counts), places, side="right")
    return values[held], most / total


def _padded(lengths: Ints, data: Lengths, pad_to: int | None) -> Ints:
    if pad_to is not None:
        return np.maximum(lengths, pad_to)
    multiple = data.pad_multiple
    return -(-lengths // multiple) * multiple


def _cut(samples: Ints, rows: int, data: Lengths, scale: float) -> Epoch:
    used = samples[: len(samples) // rows * rows] if data.drop_last else samples
    if not len(used):
        used = samples
    starts = np.arange(0, len(used), rows)
    lengths = _padded(np.maximum.reduceat(used, starts), data, data.pad_to)
    return Epoch(np.diff(np.append(starts, len(used))), lengths, float(used.sum()), scale)


def _by_tokens(samples: Ints, data: Lengths, scale: float) -> Epoch:
    """Fills batches in order while rows times the padded length stay within the budget."""
    budget = data.tokens_per_batch or 1
    long = _padded(samples, data, data.pad_to)
    rows: list[int] = []
    lengths: list[int] = []
    held, most = 0, 0
    for length in long.tolist():
        if held and max(most, length) * (held + 1) > budget:
            rows.append(held)
            lengths.append(most)
            held, most = 0, 0
        held += 1
        most = max(most, length)
    if held and not (data.drop_last and rows):
        rows.append(held)
        lengths.append(most)
    used = samples[: sum(rows)]
    return Epoch(np.array(rows), np.array(lengths), float(used.sum()), scale)
