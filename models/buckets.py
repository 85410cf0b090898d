"""Where to cut lengths into buckets: exact dynamic programming over the distribution.

A batch that is padded to its bucket's boundary takes the time of that boundary. With `n` samples
between two boundaries and `c` seconds for each sample that is padded to the upper one, a bucket
costs `n * c`, and `K` buckets cost the sum of that and `K` compiles. The least sum over all choices
of boundaries obeys

    D[k][j] = min over i < j of D[k-1][i] + (N[j] - N[i]) * c[j]

with `N` the number of samples up to a length. `c` rises with the length (where it does not, the
longer and faster boundary is taken instead), so the best `i` rises with `j`, and a layer is solved
by divide and conquer over it (Yao, Efficient Dynamic Programming Using Quadrangle Inequalities,
STOC 1980), here one level of the recursion at a time as arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# Exact up to so many distinct lengths. Beyond it boundaries are first sought on a grid of as many
# lengths, then among all lengths next to those found.
MOST_CANDIDATES = 8192
MOST_BUCKETS = 64
# Lengths that are looked at next to a boundary that was found on the grid.
_MOST_NEAR = 128


@dataclass(frozen=True, slots=True)
class Cut:
    """Boundaries, ascending, the last one the longest length; `seconds` without compiling."""

    boundaries: tuple[int, ...]
    seconds: float


def optimal_cuts(
    lengths: npt.ArrayLike,
    counts: npt.ArrayLike,
    sample_s: npt.ArrayLike,
    *,
    most: int = MOST_BUCKETS,
    compile_s: float = 0.0,
) -> tuple[Cut, ...]:
    """Returns the best cut with at most 1, 2, ... `most` buckets, as far as more can pay.

    `lengths` are distinct and ascending, `counts` the samples of each, and `sample_s` the seconds
    that a sample takes when it is padded to that length: the batch's time over its rows. A further
    bucket is looked at only while all buckets that could follow save more than one `compile_s`.

    Raises ValueError for arrays of unequal length, an empty one, lengths out of order, or seconds
    that are not finite.
    """
    table = _Table.of(lengths, counts, sample_s)
    if len(table.lengths) <= MOST_CANDIDATES:
        return table.cuts(most, compile_s)
    grid = _grid(table)
    found: list[Cut] = []
    for cut in table.kept(grid).cuts(most, compile_s):
        choices = (cut, _refined(table, grid, cut), *found[-1:])
        # Each is refined on its own, so the one with fewer buckets may have come out better.
        found.append(min(choices, key=lambda choice: choice.seconds))
    return tuple(found)


def best_cut(cuts: Sequence[Cut], compile_s: float) -> Cut:
    """Returns the cut with the least seconds when each bucket costs one compile of `compile_s`."""
    return min(cuts, key=lambda cut: cut.seconds + compile_s * len(cut.boundaries))


def cost_of(
    boundaries: Sequence[int],
    lengths: npt.ArrayLike,
    counts: npt.ArrayLike,
    sample_s: npt.ArrayLike,
) -> float:
    """Returns the seconds of all samples, each padded to the first boundary that holds it.

    Every boundary is one of `lengths`, ascending, the last one the longest. Raises ValueError
    otherwise.
    """
    all_lengths = np.asarray(lengths, dtype=np.int64)
    edges = np.asarray(boundaries, dtype=np.int64)
    known = np.isin(edges, all_lengths).all() and (np.diff(edges) > 0).all()
    if not len(edges) or not known or edges[-1] != all_lengths[-1]:
        raise ValueError("boundaries are lengths of the data, ascending, the last one the longest")
    at = np.searchsorted(all_lengths, edges)
    held = np.searchsorted(edges, all_lengths)
    seconds = np.asarray(sample_s, dtype=np.float64)[at][held]
    return float((np.asarray(counts, dtype=np.float64) * seconds).sum())


def quantile_boundaries(lengths: npt.ArrayLike, counts: npt.ArrayLike, buckets: int) -> Ints:
    """Returns boundaries that hold equally many samples each: at most `buckets`, ascending."""
    all_lengths = np.asarray(lengths, dtype=np.int64)
    up_to = np.cumsum(np.asarray(counts, dtype=np.float64))
    wanted = up_to[-1] * np.arange(1, buckets + 1) / buckets
    at = np.minimum(np.searchsorted(up_to, wanted * (1 - 1e-12)), len(all_lengths) - 1)
    return np.unique(all_lengths[at])


def equal_width_boundaries(lengths: npt.ArrayLike, buckets: int) -> Ints:
    """Returns boundaries at equal distances, moved up to lengths that occur."""
    all_lengths = np.asarray(lengths, dtype=np.int64)
    low, high = int(all_lengths[0]), int(all_lengths[-1])
    wanted = low + (high - low) * np.arange(1, buckets + 1) / buckets
    at = np.minimum(np.searchsorted(all_lengths, wanted - 1e-9), len(all_lengths) - 1)
    return np.unique(all_lengths[at])


@dataclass(frozen=True, slots=True)
class _Table:
    """Candidate boundaries: `up_to[j]` samples are no longer than the first j of `lengths`.

    `cost[j]` is the cost of a sample padded to lengths[j] or, if that is faster, to a longer one:
    to lengths[target[j]].
    """

    lengths: Ints
    up_to: Floats
    cost: Floats
    target: Ints

    @classmethod
    def of(cls, lengths: npt.ArrayLike, counts: npt.ArrayLike, sample_s: npt.ArrayLike) -> _Table:
        known = np.asarray(lengths, dtype=np.int64)
        numbers = np.asarray(counts, dtype=np.float64)
        cost = np.asarray(sample_s, dtype=np.float64)
        if not len(known) == len(numbers) == len(cost) or not len(known):
            raise ValueError("lengths, counts and seconds are of one length, at least 1")
        if (np.diff(known) <= 0).any():
            raise ValueError("lengths are distinct and ascending")
        if not np.isfinite(cost).all():
            raise ValueError("the seconds of a sample are finite")
        least = np.minimum.accumulate(cost[::-1])[::-1]
        # The nearest length at which the cost is that of the fastest of all that follow.
        reached = np.where(cost == least, np.arange(len(cost)), len(cost))
        target = np.minimum.accumulate(reached[::-1])[::-1]
        return cls(known, np.concatenate(([0.0], np.cumsum(numbers))), least, target)

    def kept(self, chosen: Ints) -> _Table:
        """Returns the table with these candidates only; the last one stays."""
        up_to = np.concatenate(([0.0], self.up_to[chosen + 1]))
        place = np.searchsorted(chosen, self.target[chosen])
        return _Table(self.lengths[chosen], up_to, self.cost[chosen], place)

    def cuts(self, most: int, compile_s: float) -> tuple[Cut, ...]:
        size = len(self.lengths)
        # No cut is cheaper than every length in a bucket of its own.
        floor = float((np.diff(self.up_to) * self.cost).sum())
        total = np.concatenate(([0.0], self.up_to[1:] * self.cost))
        came_from: list[Ints] = [np.zeros(size + 1, dtype=np.int64)]
        found = [self._cut(came_from, total[size])]
        while len(found) < min(most, size) and total[size] - floor > max(compile_s, 0.0):
            total, back = self._layer(total)
            came_from.append(back)
            found.append(self._cut(came_from, total[size]))
        return tuple(found)

    def _layer(self, before: Floats) -> tuple[Floats, Ints]:
        """Returns the least totals with one more bucket, and where its lower boundary is.

        `before[0]` is 0, so a bucket may stay empty: "at most" so many.
        """
        size = len(self.lengths)
        total = np.zeros(size + 1)
        back = np.zeros(size + 1, dtype=np.int64)
        step = 1 << max(0, size.bit_length() - 1)
        while step:
            ends = np.arange(step, size + 1, 2 * step)
            low = back[ends - step]
            after = ends + step
            high = np.where(after <= size, back[np.minimum(after, size)], ends - 1)
            high = np.minimum(np.maximum(high, low), ends - 1)
            total[ends], back[ends] = self._least(before, ends, low, high)
            step >>= 1
        return total, back

    def _least(self, before: Floats, ends: Ints, low: Ints, high: Ints) -> tuple[Floats, Ints]:
        """Returns for each end the least total over starts from low to high, and that start."""
        widths = high - low + 1
        starts = np.concatenate(([0], np.cumsum(widths)[:-1]))
        owner = np.repeat(np.arange(len(ends)), widths)
        start = np.arange(int(widths.sum())) - starts[owner] + low[owner]
        cost = self.cost[ends - 1]
        totals = before[start] - self.up_to[start] * cost[owner]
        least = np.minimum.reduceat(totals, starts)
        at_least = np.flatnonzero(totals == least[owner])
        first = at_least[np.searchsorted(at_least, starts)]
        return least + self.up_to[ends] * cost, start[first]

    def _cut(self, came_from: Sequence[Ints], seconds: float) -> Cut:
        edges: list[int] = []
        end = len(self.lengths)
        for back in reversed(came_from):
            if end == 0:
                break
            edges.append(int(self.lengths[self.target[end - 1]]))
            end = int(back[end])
        return Cut(tuple(sorted(set(edges))), float(seconds))


def _grid(table: _Table) -> Ints:
    """Returns candidates spread evenly over samples and over cost, the last one among them."""
    half = MOST_CANDIDATES // 2
    size = len(table.lengths)
    samples = np.linspace(0, table.up_to[-1], half + 1)[1:]
    by_samples = np.searchsorted(table.up_to[1:], samples * (1 - 1e-12))
    by_cost = np.searchsorted(table.cost, np.linspace(table.cost[0], table.cost[-1], half))
    chosen = np.unique(np.concatenate((by_samples, by_cost, [size - 1])))
    chosen = chosen[chosen < size]
    # A boundary that is pushed up must stay a candidate.
    return np.unique(np.concatenate((chosen, table.target[chosen])))


def _refined(table: _Table, grid: Ints, cut: Cut) -> Cut:
    """Returns the best cut with one boundary next to each of `cut`, a grid it was found on."""
    size = len(table.lengths)
    at = np.searchsorted(grid, np.searchsorted(table.lengths, np.array(cut.boundaries)))
    # Numbers of lengths below a boundary, and the least totals up to there.
    starts, before = np.zeros(1, dtype=np.int64), np.zeros(1)
    steps: list[tuple[Ints, Ints]] = []
    for place in at.tolist():
        last = len(steps) == len(at) - 1
        ends = np.array([size]) if last else _near(grid, place) + 1
        samples = table.up_to[ends][:, None] - table.up_to[starts]
        totals = before + samples * table.cost[ends - 1][:, None]
        totals[ends[:, None] < starts] = np.inf
        back = totals.argmin(axis=1)
        steps.append((ends, back))
        starts, before = ends, totals[np.arange(len(ends)), back]
    edges: set[int] = set()
    chosen = 0
    for ends, back in reversed(steps):
        edges.add(int(table.lengths[table.target[ends[chosen] - 1]]))
        chosen = int(back[chosen])
    return Cut(tuple(sorted(edges)), float(before[0]))


def _near(grid: Ints, place: int) -> Ints:
    """Returns the candidates from one neighbour on the grid to the other, thinned out if many."""
    low, high = int(grid[max(0, place - 1)]), int(grid[min(len(grid) - 1, place + 1)])
    if high - low < _MOST_NEAR:
        return np.arange(low, high + 1)
    thinned = np.linspace(low, high, _MOST_NEAR).astype(np.int64)
    return np.union1d(thinned, grid[place])
