"""Batches of samples that are about as long as each other: a sampler and a collator.

Works in plain PyTorch, and wherever a loader takes a `batch_sampler`. Imports torch only when a
batch is padded.

    sampler = BucketBatchSampler(lengths, boundaries=(32, 64, 128), batch_size=16)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=PadToBoundary((32, 64, 128)))
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

# What the fields of a tokenized sample are padded with. Loss functions of torch leave -100 out.
_PAD_VALUES = {"labels": -100, "label_ids": -100, "special_tokens_mask": 1}
# What collators of transformers make of these names, for the arguments of its models.
_RENAMED = {"label": "labels", "label_ids": "labels"}


class BucketBatchSampler:
    """Yields lists of indices, each of samples from one length bucket.

    What is left of a bucket joins the next longer one, so that at most one batch of an epoch is
    smaller than the others; with `drop_last` that one is left out. With several ranks each gets
    every `num_replicas`-th batch, all of them as many, and of the same boundary at the same step
    (unless fewer samples than ranks are that long). For as many samples on each rank, the last
    batch then holds some of them twice.

    `boundaries` are the longest lengths of the buckets, ascending; longer samples are an error.
    With `tokens_per_batch` instead of `batch_size` a batch holds as many samples as fit when padded
    to the boundary.

    Raises ValueError for lengths or boundaries that make no sense.
    """

    def __init__(
        self,
        lengths: Sequence[int] | Ints,
        boundaries: Sequence[int],
        batch_size: int | None = None,
        *,
        tokens_per_batch: int | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        num_replicas: int = 1,
        rank: int = 0,
    ) -> None:
        """Sorts the samples into buckets; nothing is drawn before the first iteration."""
        self._edges = _ascending(boundaries)
        own = _checked(lengths, self._edges)
        if (batch_size is None) == (tokens_per_batch is None):
            raise ValueError("give one of batch_size and tokens_per_batch")
        if any(size is not None and size < 1 for size in (batch_size, tokens_per_batch)):
            raise ValueError("batch_size and tokens_per_batch are at least 1")
        if not 0 <= rank < num_replicas:
            raise ValueError(f"rank {rank} is not one of {num_replicas}")
        # Named as torch's BatchSampler names them: Accelerate and Lightning look them up.
        self.batch_size = batch_size
        self.drop_last = drop_last
        self._tokens = tokens_per_batch
        self._shuffle = shuffle
        self._seed = seed
        self._replicas, self._rank = num_replicas, rank
        self._epoch = 0
        self._held = np.searchsorted(self._edges, own)
        self._number = len(self._batches(0))

    def set_epoch(self, epoch: int) -> None:
        """Shuffles differently from now on; the same epoch and seed give the same batches."""
        self._epoch = epoch

    def __len__(self) -> int:
        """Returns the number of batches of one epoch on this rank."""
        return self._number

    def __iter__(self) -> Iterator[list[int]]:
        """Yields the batches of this epoch."""
        yield from self._batches(self._epoch)
        if self._shuffle:
            # Loops that never call set_epoch still get another order next time.
            self._epoch += 1

    def _batches(self, epoch: int) -> list[list[int]]:
        rng = np.random.default_rng([self._seed, epoch])
        groups: list[list[list[int]]] = []
        left = np.array([], dtype=np.int64)
        for bucket, edge in enumerate(self._edges.tolist()):
            own = np.concatenate((left, np.flatnonzero(self._held == bucket)))
            if self._shuffle:
                rng.shuffle(own)
            size = self._rows(edge)
            # As many batches as there are ranks go together.
            whole = len(own) // (size * self._replicas) * size * self._replicas
            left = own[whole:]
            groups += self._groups(own[:whole], size)
        if len(left) and not self.drop_last:
            groups.append(self._rest(left))
        if self._shuffle:
            groups = [groups[at] for at in rng.permutation(len(groups))]
        return [group[self._rank] for group in groups]

    def _groups(self, own: Ints, size: int) -> list[list[list[int]]]:
        """Returns the batches that go together, one for each rank: whole ones of `size`."""
        step = size * self._replicas
        if self._replicas > 1:
            own = self._spread(own, step)
        return [
            [part.tolist() for part in self._shares(own[start : start + step])]
            for start in range(0, len(own), step)
        ]

    def _spread(self, own: Ints, step: int) -> Ints:
        """Returns samples so that each step gets some of the longest bucket, if there are some.

        Otherwise a rank whose batch holds only samples carried over would pad to less.
        """
        held = self._held[own]
        longest = int((held == held.max(initial=0)).sum())
        if longest == len(own):
            return own
        ordered = own[np.argsort(-held, kind="stable")]
        steps = len(own) // step
        if longest >= steps * self._replicas:
            return np.concatenate([ordered[at::steps] for at in range(steps)])
        return ordered

    def _shares(self, own: Ints) -> list[Ints]:
        """Returns the samples of one step for each rank, of the longest bucket to each of them."""
        if self._replicas > 1 and len(set(self._held[own].tolist())) > 1:
            ordered = own[np.argsort(-self._held[own], kind="stable")]
            return [ordered[rank :: self._replicas] for rank in range(self._replicas)]
        return np.split(own, self._replicas)

    def _rest(self, left: Ints) -> list[list[int]]:
        """Returns the last samples as one batch for each rank, some of them twice if need be."""
        # The longest come first: they are in each rank's batch, and twice where any are.
        ordered = left[np.argsort(-self._held[left], kind="stable")]
        rows = -(-len(left) // self._replicas)
        return [part.tolist() for part in self._shares(np.resize(ordered, rows * self._replicas))]

    def _rows(self, edge: int) -> int:
        if self._tokens is not None:
            return max(1, self._tokens // edge)
        return int(self.batch_size or 1)


class PadToBoundary:
    """Collates samples and pads every sequence of a batch to the first boundary that holds it.

    A sample is a mapping of fields, as tokenizers give them. A field is padded when its values are
    sequences as long as the sample: those of `length_of`, or the first of `input_ids` and what else
    is a sequence. All others are stacked. Without an `attention_mask` one is made for `input_ids`.

    `pad_values` says what a field is padded with; without it 0, and -100 for labels, which
    torch's losses leave out. `pad_token_id` is what `input_ids` are padded with. With `tokenizer`,
    its own padding token and side are used, and `label` becomes `labels`, as with transformers' own
    collators. Raises ValueError for a sample that is longer than the last boundary, and for fields
    that make no tensor.
    """

    def __init__(
        self,
        boundaries: Sequence[int],
        *,
        tokenizer: Any = None,
        pad_token_id: int = 0,
        pad_values: Mapping[str, int | float] | None = None,
        length_of: Callable[[Mapping[str, Any]], int] | None = None,
    ) -> None:
        """Keeps the boundaries; `tokenizer` is one of transformers' or None."""
        self._edges = _ascending(boundaries)
        own_pad = getattr(tokenizer, "pad_token_id", None)
        self._values: dict[str, int | float] = {
            "input_ids": pad_token_id if own_pad is None else own_pad,
            "token_type_ids": getattr(tokenizer, "pad_token_type_id", 0),
            **_PAD_VALUES,
            **(pad_values or {}),
        }
        self._renamed = {} if tokenizer is None else _RENAMED
        self._left = getattr(tokenizer, "padding_side", "right") == "left"
        self._length_of = length_of or _longest_field

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the batch: a tensor for each field, (rows, boundary) for sequences."""
        import torch

        own = [self._length_of(sample) for sample in samples]
        if min(own) < 1:
            raise ValueError("a sample is empty: leave such samples out")
        length = self.boundary(max(own))
        batch: dict[str, Any] = {}
        for name in samples[0]:
            rows = [_tensor(name, sample[name]) for sample in samples]
            sequence = all(row.dim() and len(row) == n for row, n in zip(rows, own, strict=True))
            if sequence:
                rows = [self._padded(name, row, length) for row in rows]
            shapes = {tuple(row.shape) for row in rows}
            if len(shapes) > 1:
                raise ValueError(
                    f"the field {name!r} has rows of the sizes {sorted(shapes)}, and is not as long"
                    " as the samples: make its rows alike, or leave it out"
                )
            batch[self._renamed.get(name, name)] = torch.stack(rows)
        if "input_ids" in batch and "attention_mask" not in batch:
            batch["attention_mask"] = torch.stack(
                [
                    self._padded("attention_mask", torch.ones(n, dtype=torch.long), length)
                    for n in own
                ]
            )
        return batch

    def boundary(self, length: int) -> int:
        """Returns what a batch is padded to whose longest sample has `length`."""
        at = int(np.searchsorted(self._edges, length))
        if at == len(self._edges):
            raise ValueError(
                f"a sample of length {length} is longer than the last boundary {self._edges[-1]}:"
                " truncate it, or add a boundary"
            )
        return int(self._edges[at])

    def _padded(self, name: str, row: Any, length: int) -> Any:
        missing = length - len(row)
        if not missing:
            return row
        filler = row.new_full((missing, *row.shape[1:]), self._values.get(name, 0))
        return _joined(row, filler, left=self._left)


def _tensor(name: str, value: Any) -> Any:
    import torch

    try:
        row = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"the field {name!r} makes no tensor: {error} (remove it from the samples)"
        ) from error
    if name == "input_ids" and row.dim() != 1:
        raise ValueError(
            f"the field 'input_ids' has the shape {tuple(row.shape)}: one dimension is expected"
        )
    return row


def _joined(row: Any, filler: Any, *, left: bool) -> Any:
    import torch

    return torch.cat((filler, row) if left else (row, filler))


def _longest_field(sample: Mapping[str, Any]) -> int:
    ids = sample.get("input_ids")
    if ids is not None:
        return len(ids)
    # A number in a tensor or an array has no length, though its class does.
    lengths = [
        len(value)
        for value in sample.values()
        if hasattr(value, "__len__") and getattr(value, "ndim", True) and not isinstance(value, str)
    ]
    if not lengths:
        raise ValueError(f"no field of the sample is a sequence: {', '.join(map(str, sample))}")
    return max(lengths)


def _ascending(boundaries: Sequence[int]) -> Ints:
    edges = _whole(boundaries)
    if edges is None or not len(edges) or (np.diff(edges) <= 0).any() or edges[0] < 1:
        raise ValueError("boundaries are lengths of at least 1, ascending")
    return edges


def _checked(lengths: Sequence[int] | Ints, edges: Ints) -> Ints:
    own = _whole(lengths)
    if own is None or not len(own) or own.min() < 1:
        raise ValueError("lengths are one whole number for each sample, each of at least 1")
    if own.max() > edges[-1]:
        raise ValueError(
            f"sample {own.argmax()} has length {own.max()}, the last boundary is {edges[-1]}:"
            " truncate it, or add a boundary"
        )
    return own


def _whole(values: Any) -> Ints | None:
    """Returns whole numbers as an array, None for anything else."""
    found = np.asarray(values)
    if found.ndim != 1 or (len(found) and found.dtype.kind not in "iu"):
        return None
    return found.astype(np.int64)
