"""How the sizes of batches vary, which dimension is their length, and batches of another length.

Told from the shapes of batches that were seen: dimensions that always change together are one size.
A batch of a wanted length is made of a real one by repeating or cutting what it holds, so that
values stay valid (token ids, positions, labels) whatever they mean.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from advisor.profiler.records import BatchShapes
from advisor.profiler.training import tensors_of
from advisor.profiler.workload import Batch

# The shape of each tensor of a batch, in the order of `tensors_of`.
Sizes = tuple[tuple[int, ...], ...]
# Index of a tensor and one of its dimensions.
Place = tuple[int, int]
# A token budget is filled at least so far by all batches but for the longest samples.
_LEAST_FILLED = 0.5


@dataclass(frozen=True, slots=True)
class Layout:
    """How batches vary, with the places of their rows and of their length where there is one.

    `tokens` is the most rows times length when the rows shrink as the length grows; else None.
    """

    kind: BatchShapes
    rows: tuple[Place, ...] = ()
    length: tuple[Place, ...] = ()
    tokens: int | None = None

    def size(self, sizes: Sizes) -> tuple[int, int]:
        """Returns rows and length of a batch with these sizes."""
        (row_tensor, row_dim), (tensor, dim) = self.rows[0], self.length[0]
        return sizes[row_tensor][row_dim], sizes[tensor][dim]


def sizes_of(batch: Batch) -> Sizes | None:
    """Returns the shapes of a batch's tensors, None where one has no plain shape."""
    tensors = tensors_of(batch)
    if any(tensor.is_nested for tensor in tensors):
        return None
    return tuple(tuple(int(size) for size in tensor.shape) for tensor in tensors)


def layout(seen: Mapping[Sizes, int], *, constant_length: bool = False) -> Layout:
    """Returns how the batches vary that were seen, each shape with its number of batches.

    With `constant_length` a length is looked for even where all batches have the same shape: the
    second dimension of the first tensor that has one, wherever else it occurs.
    """
    first = next(iter(seen), ())
    if len({tuple(len(shape) for shape in sizes) for sizes in seen}) > 1:
        return Layout(BatchShapes.SEVERAL)
    groups = _varying(seen)
    if not groups:
        found = _constant(first) if constant_length else None
        return found or Layout(BatchShapes.CONSTANT)
    rows = [places for places in groups if all(dim == 0 for _, dim in places)]
    lengths = [places for places in groups if places not in rows]
    if len(groups) == 1 and rows and _is_last_batch(seen, rows[0]):
        return Layout(BatchShapes.ROWS, rows=rows[0])
    if len(rows) <= 1 and len(lengths) == 1:
        return _with_length(seen, rows[0] if rows else (), lengths[0])
    return Layout(BatchShapes.SEVERAL)


def _with_length(
    seen: Mapping[Sizes, int], rows: tuple[Place, ...], length: tuple[Place, ...]
) -> Layout:
    """Returns the layout of batches that vary in length, and in rows if `rows` is not empty."""
    of_rows = rows or _rows_beside(next(iter(seen)), length)
    told = Layout(BatchShapes.LENGTH, rows=of_rows, length=length)
    if not of_rows:
        return Layout(BatchShapes.SEVERAL)
    if not rows or _is_last_batch(seen, rows):
        return told
    tokens = _budget(seen, told)
    return Layout(BatchShapes.SEVERAL) if tokens is None else replace(told, tokens=tokens)


def resized(batch: Batch, found: Layout, rows: int, length: int) -> Batch:
    """Returns a batch of `rows` and `length` made of what `batch` holds."""
    wanted: dict[Place, int] = dict.fromkeys(found.rows, rows)
    wanted.update(dict.fromkeys(found.length, length))
    number = iter(range(len(tensors_of(batch))))

    def change(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        tensor = next(number)
        for dim in range(leaf.dim()):
            size = wanted.get((tensor, dim), leaf.shape[dim])
            if size != leaf.shape[dim]:
                kept = torch.arange(size, device=leaf.device) % leaf.shape[dim]
                leaf = leaf.index_select(dim, kept)
        return leaf

    if hasattr(batch, "data") and isinstance(batch.data, Mapping):
        # transformers' BatchEncoding: its own class, because loss functions use its attributes.
        made = copy.copy(batch)
        made.data = pytree.tree_map(change, dict(batch.data))
        return made
    return pytree.tree_map(change, batch)


def _varying(seen: Mapping[Sizes, int]) -> list[tuple[Place, ...]]:
    """Returns the places whose sizes vary, those together that have the same size in each batch."""
    first = next(iter(seen), ())
    groups: dict[tuple[int, ...], list[Place]] = {}
    for tensor, shape in enumerate(first):
        for dim in range(len(shape)):
            column = tuple(sizes[tensor][dim] for sizes in seen)
            if len(set(column)) > 1:
                groups.setdefault(column, []).append((tensor, dim))
    return [tuple(places) for places in groups.values()]


def _constant(sizes: Sizes) -> Layout | None:
    tensor = next((i for i, shape in enumerate(sizes) if len(shape) > 1), None)
    if tensor is None:
        return None
    length = sizes[tensor][1]
    places = tuple(
        (i, dim)
        for i, shape in enumerate(sizes)
        for dim in range(1, len(shape))
        if shape[dim] == length
    )
    return Layout(BatchShapes.CONSTANT, rows=_rows_beside(sizes, places), length=places)


def _rows_beside(sizes: Sizes, length: tuple[Place, ...]) -> tuple[Place, ...]:
    """Returns the first dimensions that are as large as that of a tensor with a length."""
    tensor = next((tensor for tensor, dim in length if dim > 0), None)
    if tensor is None:
        return ()
    rows = sizes[tensor][0]
    return tuple(
        (i, 0)
        for i, shape in enumerate(sizes)
        if shape and shape[0] == rows and (i, 0) not in length
    )


def _is_last_batch(seen: Mapping[Sizes, int], rows: tuple[Place, ...]) -> bool:
    """Returns whether there are two numbers of rows, the smaller one in the minority."""
    tensor, dim = rows[0]
    numbers: Counter[int] = Counter()
    for sizes, count in seen.items():
        numbers[sizes[tensor][dim]] += count
    if len(numbers) != 2:
        return False
    few, many = sorted(numbers)
    return 2 * numbers[few] <= numbers[many]


def _budget(seen: Mapping[Sizes, int], found: Layout) -> int | None:
    """Returns the token budget that batches are filled up to, None where there seems to be none."""
    pairs = [found.size(sizes) for sizes in seen]
    most = max(rows * length for rows, length in pairs)
    filled = sum(rows * length >= _LEAST_FILLED * most for rows, length in pairs)
    return most if 2 * filled > len(pairs) else None
