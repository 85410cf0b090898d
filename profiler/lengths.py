"""The lengths of a data set's samples: checked, counted, and where to measure along them.

Free of torch: the command reads files with it, the trial takes a workload's own lengths.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from advisor.profiler.errors import PlanError
from advisor.profiler.records import Lengths, LengthSource

Ints = npt.NDArray[np.int64]

# Ten minutes of audio at 16 kHz are 9.6 million samples; beyond this a number is no length.
MOST_LENGTH = 1 << 24
# More distinct lengths are rounded up to so many: what that pads is less than steps can tell.
MOST_DISTINCT = 8192
# Lengths are aligned to this where they are long enough for it not to matter otherwise.
_ALIGNED, _LEAST_ALIGNED = 8, 64
_COARSE, _LEAST_COARSE = 64, 192
# Two measured lengths differ by at least this factor.
_LEAST_APART = 1.15
_QUANTILES = (0.05, 0.5, 0.9)


def counted(values: Any, what: str, source: LengthSource) -> Lengths:
    """Returns the counts of `values`, one length for each sample; `what` names them in errors.

    Raises `PlanError` for no values, and for the first that is no whole number from 1 to
    `MOST_LENGTH`.
    """
    array = _numbers(values, what)
    if array.size == 0:
        raise PlanError(f"{what} has no lengths", "one for each sample is needed")
    # Before any cast: what does not fit into 64 bits is named as it was given.
    bad = np.flatnonzero((array < 1) | (array > MOST_LENGTH))
    if bad.size:
        place = int(bad[0])
        raise PlanError(
            f"{what} has {array[place]} as length number {place + 1:,}",
            f"the length of a sample is 1 to {MOST_LENGTH:,}",
            "leave empty samples out, and check the unit"
            if array[place] < 1
            else "give lengths in tokens (or frames), not bytes or characters of a whole file",
        )
    distinct, counts = np.unique(array.astype(np.int64), return_counts=True)
    if len(distinct) > MOST_DISTINCT:
        distinct, counts = _coarsened(distinct, counts)
    return Lengths(values=tuple(distinct.tolist()), counts=tuple(counts.tolist()), source=source)


def quantile(data: Lengths, share: float) -> int:
    """Returns the length that `share` of the samples do not exceed."""
    up_to = np.cumsum(np.asarray(data.counts, dtype=np.float64))
    at = int(np.searchsorted(up_to, share * up_to[-1] * (1 - 1e-12)))
    return data.values[min(at, len(data.values) - 1)]


def padded(length: int, data: Lengths) -> int:
    """Returns what a batch is padded to whose longest sample has `length`."""
    if data.pad_to is not None:
        return max(length, data.pad_to)
    return math.ceil(length / data.pad_multiple) * data.pad_multiple


def rows_at(data: Lengths, length: int) -> int:
    """Returns how many samples a batch holds that is padded to `length`."""
    if data.tokens_per_batch is not None:
        return max(1, data.tokens_per_batch // length)
    return data.batch_size or 1


def measured_lengths(data: Lengths, most: int, *, probe: bool) -> tuple[int, ...]:
    """Returns the lengths to measure first, ascending: at most `most`, and one more as a probe.

    The ends of what batches are padded to, the middle, and where most padded batches lie: samples
    at the 90 % quantile and between it and the longest. With `probe` a neighbour that is no
    multiple of 8 shows whether alignment matters.
    """
    top = padded(data.values[-1], data)
    # A bucket may be shorter than what all batches are padded to now, but never no multiple.
    unpadded = replace(data, pad_to=None)
    low, middle, upper = (padded(quantile(data, share), unpadded) for share in _QUANTILES)
    wanted = [top, low, upper, middle, (upper + top) // 2]
    chosen: list[int] = []
    for length in wanted:
        aligned = min(_aligned(length), top)
        apart = all(max(aligned, other) >= _LEAST_APART * min(aligned, other) for other in chosen)
        if apart and len(chosen) < most:
            chosen.append(aligned)
    if probe and len(chosen) > 1:
        # The second longest: interpolated from both sides, and long enough for a step to tell.
        neighbour = sorted(chosen)[-2] - _ALIGNED // 2 + 1
        new = neighbour not in chosen and neighbour > max(min(chosen), _ALIGNED)
        if new and neighbour % _ALIGNED:
            chosen.append(neighbour)
    return tuple(sorted(chosen))


def between(lengths: Sequence[int]) -> int | None:
    """Returns the length in the middle of the widest gap, by ratio; None where all are close."""
    gaps = [(after / before, before, after) for before, after in itertools.pairwise(lengths)]
    ratio, before, after = max(gaps, default=(1.0, 0, 0))
    middle = _aligned(round(math.sqrt(before * after))) if before else 0
    return middle if ratio > _LEAST_APART**2 and before < middle < after else None


def _aligned(length: int) -> int:
    step = 1
    if length >= _LEAST_ALIGNED:
        step = _ALIGNED
    if length >= _LEAST_COARSE:
        step = _COARSE
    return math.ceil(length / step) * step


def _numbers(values: Any, what: str) -> npt.NDArray[Any]:
    """Returns whole numbers in an array of one dimension; of Python's own where they are huge."""
    no_list = f"{what} is no list of lengths"
    mend = "give one whole number for each sample"
    try:
        if hasattr(values, "detach"):  # a tensor, without importing torch
            values = values.detach().cpu().numpy()
        array = np.asarray(values if isinstance(values, np.ndarray) else list(values))
    except (TypeError, ValueError, RuntimeError) as error:
        ragged = "inhomogeneous" in str(error)
        why = "its items are lists of unequal length" if ragged else str(error)
        raise PlanError(no_list, why, mend) from error
    if array.ndim == 1 and array.size == 0:
        return array
    huge = array.dtype.kind == "O" and all(type(item) is int for item in array.flat)
    if array.ndim != 1 or not (huge or array.dtype.kind in "iuf"):
        raise PlanError(no_list, f"it is {_kind(array)}", mend)
    if array.dtype.kind == "f":
        bad = np.flatnonzero(~np.isfinite(array) | (array != np.floor(array)))
        if bad.size:
            place = int(bad[0])
            raise PlanError(
                f"{what} has {array[place]} as length number {place + 1:,}",
                "the length of a sample is a whole number",
            )
    return array


def _kind(array: npt.NDArray[Any]) -> str:
    if array.dtype.kind in "US":
        return "text"
    if array.ndim != 1:
        return f"an array of shape {array.shape}"
    return "a list of mixed items" if array.dtype.kind == "O" else f"a list of {array.dtype}"


def _coarsened(distinct: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """Returns the lengths rounded up to a grid: finer where more samples are."""
    up_to = np.cumsum(counts)
    half = MOST_DISTINCT // 2
    by_samples = np.searchsorted(up_to, np.linspace(0, up_to[-1], half + 1)[1:])
    by_length = np.searchsorted(distinct, np.linspace(distinct[0], distinct[-1], half))
    kept = np.unique(np.minimum(np.concatenate((by_samples, by_length)), len(distinct) - 1))
    ends = up_to[kept]
    return distinct[kept], np.diff(np.concatenate(([0], ends)))
