"""What share of a batch's tokens is padding, as far as the batch itself shows it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from advisor.profiler.training import tensors_of
from advisor.profiler.workload import Batch

_MOST_BATCHES = 16
_ATTENTION_MASK = "attention_mask"
_TOKEN_NAMES = ("input_ids", "tokens", "token_ids", "input_tokens", "src_tokens", "src", "x")
# Shorter rows end in two equal numbers by chance.
_LEAST_LENGTH = 4
# Padding of fewer rows than this, or in runs shorter than this, may be chance.
_LEAST_ROWS = 2
_LEAST_RUN = 2


@dataclass(frozen=True, slots=True)
class _Padding:
    """Padded positions of each row of a batch, shape (rows,), and the positions of a row."""

    of_rows: torch.Tensor
    length: int


def row_lengths(batch: Batch) -> list[int] | None:
    """Returns the samples' own lengths in a batch, None where it does not show what is padding."""
    found = _padding(batch)
    return None if found is None else (found.length - found.of_rows).tolist()


def padding_share(batches: Sequence[Batch]) -> float | None:
    """Returns the share of the tokens of some batches that is padding, None where none can tell.

    Told by an `attention_mask` (its zeros), else by a mask whose rows change once from kept to
    padded, else by token ids whose rows end, or begin, in runs of one number used nowhere else.
    """
    found = [_padding(batch) for batch in batches[:_MOST_BATCHES]]
    told = [padding for padding in found if padding is not None]
    # Batches that show no padding are no evidence when most others are silent as well.
    if not told or 2 * len(told) < len(found):
        return None
    total = sum(len(padding.of_rows) * padding.length for padding in told)
    return sum(int(padding.of_rows.sum()) for padding in told) / total if total else None


def _padding(batch: Batch) -> _Padding | None:
    named = list(_matrices(batch))
    for name, tensor in named:
        if name == _ATTENTION_MASK and _is_flags(tensor):
            return _Padding((tensor == 0).sum(1), tensor.shape[1])
    for name, tensor in named:
        named_so = "mask" in name or "pad" in name
        if named_so or tensor.dtype is torch.bool:
            found = _of_mask(name if named_so else "", tensor)
            if found is not None:
                return found
    for name, tensor in named:
        if name in ("", *_TOKEN_NAMES) and tensor.dtype in (torch.int64, torch.int32):
            for ids in (tensor, tensor.flip(1)):
                found = _of_token_ids(ids)
                if found is not None:
                    return found
    return None


def _matrices(batch: Batch) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of rows by positions, with their names in the batch ("": none)."""
    content: Any = getattr(batch, "data", batch)  # transformers' BatchEncoding
    named: list[tuple[str, Any]]
    if isinstance(content, Mapping):
        named = [(str(name).lower(), value) for name, value in content.items()]
    else:
        named = [("", tensor) for tensor in tensors_of(batch)]
    for name, value in named:
        if not isinstance(value, torch.Tensor) or value.is_nested:
            continue
        if value.layout is torch.strided and value.dim() == 2 and value.numel():
            yield name, value.detach()


def _is_flags(mask: torch.Tensor) -> bool:
    """Returns whether a mask says keep or drop, rather than what to add to a score."""
    return not mask.is_floating_point() or bool(((mask == 0) | (mask == 1)).all())


def _of_mask(name: str, mask: torch.Tensor) -> _Padding | None:
    """Returns the padding that a mask shows, None where it is no padding mask or cannot be read.

    Libraries disagree on what True means (torch's `key_padding_mask`: padding; transformers: a
    token). A row without a change is the longest one and kept whole, so it tells; else the name.
    """
    if not _is_flags(mask) or mask.shape[1] < 2:
        return None
    is_set = mask != 0
    changes = (is_set[:, 1:] != is_set[:, :-1]).sum(1)
    whole, changed = is_set[changes == 0], is_set[changes == 1]
    if len(whole) + len(changed) < len(is_set) or _is_causal(is_set):
        return None
    # Padding is on one side, and whole rows are alike.
    if any(bool((rows[:, 0] != rows[0, 0]).any()) for rows in (whole, changed) if len(rows)):
        return None
    # Without a name it is a mask only if both kinds of rows are there.
    if not name and not (len(whole) and len(changed)):
        return None
    kept = bool(whole[0, 0]) if len(whole) else "pad" not in name
    return _Padding((is_set != kept).sum(1), mask.shape[1])


def _is_causal(is_set: torch.Tensor) -> bool:
    """Returns whether a square mask lets each position see those before it."""
    rows, length = is_set.shape
    if rows != length:
        return False
    lower = torch.ones_like(is_set).tril()
    return bool((is_set == lower).all() or (is_set == ~lower).all())


def _of_token_ids(ids: torch.Tensor) -> _Padding | None:
    """Returns the padding at the ends of rows, None where no number is evidently padding."""
    rows, length = ids.shape
    if rows < _LEAST_ROWS or length < _LEAST_LENGTH:
        return None
    pad = ids[:, -1].mode().values
    is_pad = ids == pad
    runs = is_pad.flip(1).long().cumprod(1).sum(1)
    evident = (
        int((runs >= _LEAST_RUN).sum()) >= _LEAST_ROWS
        and int(runs.max()) < length
        and bool((runs != runs[0]).any())
        # The number stands nowhere but in those runs.
        and int(is_pad.sum()) == int(runs.sum())
    )
    return _Padding(runs, length) if evident else None
