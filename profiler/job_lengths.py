"""What is known of a job's lengths: given by the person, told by the workload, or seen in batches.

The person's figures come first; what they leave out (samples of a batch, padding rule, shuffling)
is taken from the loader and from the batches themselves.
"""

from __future__ import annotations

import difflib
import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from advisor.profiler.batch_shapes import Layout, Sizes, layout, sizes_of
from advisor.profiler.errors import PlanError, WorkloadError
from advisor.profiler.lengths import counted
from advisor.profiler.padding import row_lengths
from advisor.profiler.records import BatchClass, BatchShapes, Lengths, LengthSource
from advisor.profiler.training import Trainer

_MOST_BATCHES = 512
_MOST_CLASSES = 2000
# A gap of this size between lengths is no chance but a rule.
_MOST_MULTIPLE = 1024
_LEAST_DISTINCT = 3
_KEYS = (
    "lengths",
    "batch_size",
    "tokens_per_batch",
    "pad_to",
    "pad_multiple",
    "shuffled",
    "drop_last",
)
# Attributes of a model's configuration that say how many positions it takes.
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "block_size")


def of_workload(given: Any) -> Lengths | None:
    """Returns the `lengths` of a workload: a sequence, or a mapping with how batches are made.

    Raises `WorkloadError` naming what is wrong with them.
    """
    if given is None:
        return None
    rules: dict[str, Any] = {}
    values = given
    if isinstance(given, Mapping):
        rules = {str(key): value for key, value in given.items() if value is not None}
        values = rules.pop("lengths", ())
        for key in rules:
            if key not in _KEYS:
                close = difflib.get_close_matches(key, _KEYS, n=1)
                mend = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(_KEYS)}"
                raise WorkloadError(
                    f"the workload's lengths have the unknown key {key!r}", mend=mend
                )
    try:
        found = counted(values, "the workload's lengths", LengthSource.WORKLOAD)
        return replace(found, **{key: _rule(key, value) for key, value in rules.items()})
    except PlanError as error:
        raise WorkloadError(error.what, error.why, error.mend) from error


def _rule(key: str, value: Any) -> Any:
    if key in ("shuffled", "drop_last"):
        return bool(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise WorkloadError(f"{key} of the workload's lengths is {value!r}", "at least 1 expected")
    return value


def find(
    trainer: Trainer, seen: Mapping[Sizes, int], given: Lengths | None, limit_s: float
) -> tuple[Layout, Lengths | None]:
    """Returns how batches vary and what is known of their lengths; None where there is no length.

    Looks at further batches for up to `limit_s` seconds. Raises `WorkloadError` when a sample is
    longer than the model takes.
    """
    sizes = Counter(seen)
    batches, own = _look(trainer, sizes, limit_s)
    found = layout(sizes, constant_length=given is not None)
    if not found.length:
        return found, None
    shapes: Counter[tuple[int, int]] = Counter()
    for each, count in sizes.items():
        shapes[found.size(each)] += count
    data = given or _seen_lengths(shapes, own, batches)
    data = _completed(data, found, shapes, trainer)
    most = most_positions(trainer.model)
    if most is not None and data.values[-1] > most:
        raise WorkloadError(
            f"a sample has length {data.values[-1]:,}",
            f"the model takes {most:,} positions",
            "truncate the samples, and give the lengths after that",
        )
    return found, data


def most_positions(model: torch.nn.Module) -> int | None:
    """Returns how many positions a model takes, None where its configuration does not say."""
    config = getattr(model, "config", None)
    for place in (config, getattr(config, "text_config", None)):
        for name in _POSITIONS:
            value = getattr(place, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def generates(model: torch.nn.Module) -> bool:
    """Returns whether a model also makes sequences token by token, as transformers' do."""
    able = getattr(model, "can_generate", None)
    try:
        return bool(able()) if callable(able) else False
    except Exception:  # noqa: BLE001 - a method of the person's own may want arguments
        return False


def _look(
    trainer: Trainer, sizes: Counter[Sizes], limit_s: float
) -> tuple[int, list[list[int] | None]]:
    """Adds further batches to `sizes`; returns how many, and the samples' own lengths in each."""
    begun = time.perf_counter()
    most = min(_MOST_BATCHES, trainer.batches.per_epoch or _MOST_BATCHES)
    own: list[list[int] | None] = []
    while len(own) < most and time.perf_counter() - begun < limit_s:
        batch = trainer.batches.next()
        each = sizes_of(batch)
        if each is None:
            break
        sizes[each] += 1
        try:
            own.append(row_lengths(batch))
        except Exception:  # noqa: BLE001 - tensors of a person's own class may refuse anything
            own.append(None)
    return len(own), own


def _seen_lengths(
    shapes: Counter[tuple[int, int]], own: list[list[int] | None], batches: int
) -> Lengths:
    """Returns the lengths of the samples seen, or of whole batches where those are not shown."""
    known = [length for rows in own if rows is not None for length in rows if length > 0]
    told = sum(rows is not None for rows in own)
    if known and 10 * told >= 9 * batches:
        return counted(np.array(known), "the batches", LengthSource.BATCHES)
    lengths = np.array([length for (_, length), count in shapes.items() for _ in range(count)])
    return replace(counted(lengths, "the batches", LengthSource.BATCHES), whole_batches=True)


def _completed(
    data: Lengths, found: Layout, shapes: Counter[tuple[int, int]], trainer: Trainer
) -> Lengths:
    """Returns the lengths with the rules that the person left out."""
    rows = Counter[int]()
    for (number, _), count in shapes.items():
        rows[number] += count
    usual = rows.most_common(1)[0][0]
    tokens = data.tokens_per_batch or (found.tokens if data.batch_size is None else None)
    padded_to = sorted({length for _, length in shapes})
    pad_to = data.pad_to
    if pad_to is None and data.pad_multiple == 1 and found.kind is BatchShapes.CONSTANT:
        pad_to = padded_to[0]
    if pad_to is not None and data.values[-1] > pad_to:
        raise WorkloadError(
            f"a sample has length {data.values[-1]:,}",
            f"batches are padded to {pad_to:,}",
            "give the lengths after truncation",
        )
    multiple = data.pad_multiple
    if multiple == 1 and pad_to is None and len(padded_to) >= _LEAST_DISTINCT:
        common = math.gcd(*padded_to)
        multiple = common if common <= _MOST_MULTIPLE else 1
    loader = trainer.batches.loader
    given = data.source is not LengthSource.BATCHES
    return replace(
        data,
        batch_size=None if tokens else (data.batch_size or usual),
        tokens_per_batch=tokens,
        pad_to=pad_to,
        pad_multiple=multiple,
        drop_last=data.drop_last or bool(getattr(loader, "drop_last", False)),
        batches=()
        if given
        else tuple(
            BatchClass(rows=number, length=length, count=count)
            for (number, length), count in shapes.most_common(_MOST_CLASSES)
        ),
    )
