"""One optimizer step after the other: where batches come from, and what a step is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from advisor.profiler.errors import AdvisorError, WorkloadError
from advisor.profiler.workload import Batch, Workload, user_error

# One-shot iterators cannot be restarted: this many of their batches are kept and gone round.
_KEPT_BATCHES = 256


class Batches:
    """Batches in the order of the steps, for ever, on the model's device.

    An iterable is restarted when it ends; a one-shot iterator goes round the batches it gave.
    """

    def __init__(self, source: Any, device: torch.device) -> None:
        self._source = source
        self._device = device
        self._step = 0
        self._iterator: Iterator[Batch] | None = None
        self._kept: list[Batch] = []
        self._given_in_epoch = 0
        self.per_epoch = _length_of(source)

    def next(self) -> Batch:
        """Returns the next batch. Raises `WorkloadError` when there is none at all."""
        try:
            batch = self._source(self._step) if callable(self._source) else self._from_iterable()
        except AdvisorError:
            raise
        except (Exception, SystemExit) as error:
            raise user_error(f"batches raised at step {self._step}", error) from error
        if batch is None:
            raise WorkloadError(f"batches gave None at step {self._step}", "a batch is needed")
        self._step += 1
        return to_device(batch, self._device)

    @property
    def loader(self) -> Any:
        """What batches come from when it is no function of the step; None when it is one."""
        return None if callable(self._source) else self._source

    def take(self, count: int) -> list[Batch]:
        """Returns the next `count` batches."""
        return [self.next() for _ in range(count)]

    def _from_iterable(self) -> Batch:
        if self._iterator is None:
            self._iterator = iter(self._source)
        try:
            batch = next(self._iterator)
        except StopIteration:
            if self._step == 0:
                raise WorkloadError(
                    "batches is empty", "it gave no batch at all", "give at least one batch"
                ) from None
            self.per_epoch = self.per_epoch or self._given_in_epoch
            self._iterator = iter(self._kept if self._one_shot() else self._source)
            self._given_in_epoch = 0
            batch = next(self._iterator, None)
            if batch is None:
                raise WorkloadError(
                    "batches cannot be restarted", "its second round gave no batch"
                ) from None
        if self._iterator is self._source and len(self._kept) < _KEPT_BATCHES:
            self._kept.append(batch)  # a one-shot iterator is its own iterator
        self._given_in_epoch += 1
        return batch

    def _one_shot(self) -> bool:
        return iter(self._source) is self._source


def _length_of(source: Any) -> int | None:
    if callable(source):
        return None
    try:
        return len(source)
    except TypeError:
        return None


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Returns the batch with all its tensors on `device`."""
    if device.type == "cpu":
        return batch
    return pytree.tree_map(
        lambda leaf: (
            leaf.to(device, non_blocking=True)
            if isinstance(leaf, torch.Tensor) and leaf.device != device
            else leaf
        ),
        batch,
    )


def tensors_of(batch: Batch) -> list[torch.Tensor]:
    """Returns the tensors of a batch, in a fixed order."""
    if hasattr(batch, "data") and isinstance(batch.data, Mapping):
        batch = dict(batch.data)  # transformers' BatchEncoding
    return [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]


def signature(batch: Batch) -> str:
    """Returns the shapes and dtypes of a batch's tensors, as `8x64:int64 8:float32`."""
    parts = []
    for tensor in tensors_of(batch):
        shape = "x".join(str(int(size)) for size in tensor.shape) if not tensor.is_nested else "?"
        parts.append(f"{shape or 'scalar'}:{str(tensor.dtype).removeprefix('torch.')}")
    return " ".join(parts)


def samples_of(batch: Batch) -> float | None:
    """Returns how many samples a batch seems to hold: the first size of its first tensor."""
    for tensor in tensors_of(batch):
        if tensor.dim() > 0:
            return float(tensor.shape[0])
    return None


class Trainer:
    """Runs optimizer steps of a workload; the model may be compiled in place meanwhile."""

    def __init__(self, workload: Workload, device: torch.device) -> None:
        self.model = workload.model
        self.device = device
        if workload.optimizer is None:
            raise WorkloadError("the workload has no optimizer")
        self.optimizer = workload.optimizer
        self.batches = Batches(workload.batches, device)
        self.loss = workload.loss or _default_loss
        self.own_step = workload.step

    def step(self, batch: Batch) -> Any:
        """Runs one optimizer step and returns its loss, not synchronised with the device."""
        if self.own_step is not None:
            return self.own_step(self.model, batch, self.optimizer)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(self.model, batch)
        loss.backward()
        self.optimizer.step()
        return loss

    def run(self, batches: Iterable[Batch]) -> Any:
        """Runs a step for each batch, waits for the device and returns the last step's loss."""
        loss = None
        for batch in batches:
            loss = self.step(batch)
        self.synchronize()
        return loss

    def synchronize(self) -> None:
        """Waits until the device has done all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def first_step(self) -> Batch:
        """Runs the first step with every check, and returns its batch.

        Raises `WorkloadError` when the step raises, or its loss is no finite scalar with a
        gradient.
        """
        batch = self.batches.next()
        try:
            if self.own_step is not None:
                loss = self.step(batch)
            else:
                loss = self._checked_step(batch)
            self.synchronize()
        except AdvisorError:
            raise
        except torch.OutOfMemoryError:
            raise
        except (Exception, SystemExit) as error:
            if is_out_of_host_memory(error):
                raise
            raise user_error("the first training step raised", error) from error
        value = loss_value(loss)
        if value is not None and not math.isfinite(value):
            raise WorkloadError(
                f"the loss of the first step is {value}",
                "nothing can be compared with it",
                "check the inputs, the initialisation and the learning rate",
            )
        return batch

    def _checked_step(self, batch: Batch) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(self.model, batch)
        if not isinstance(loss, torch.Tensor):
            raise WorkloadError(
                f"loss returned a {type(loss).__name__}", "a scalar tensor is needed"
            )
        if loss.numel() != 1:
            raise WorkloadError(
                f"loss returned a tensor of shape {tuple(loss.shape)}",
                "a scalar tensor is needed",
                "reduce it, for instance with .mean()",
            )
        if not loss.requires_grad:
            raise WorkloadError(
                "the loss has no gradient",
                "it does not depend on a parameter that requires one",
                "check for detach(), no_grad() and frozen parameters",
            )
        loss.backward()
        if not any(parameter.grad is not None for parameter in self.model.parameters()):
            raise WorkloadError(
                "no parameter of the model gets a gradient",
                "the loss does not depend on the model",
                "compute the loss from what the model returns",
            )
        self.optimizer.step()
        return loss


def _default_loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    if not isinstance(batch, Mapping) and not hasattr(batch, "keys"):
        raise WorkloadError(
            f"the batch is a {type(batch).__name__}",
            "without a loss of its own the workload is called as model(**batch).loss",
            "add 'loss': a function of model and batch",
        )
    output = model(**batch)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None:
        raise WorkloadError(
            f"model(**batch) returned a {type(output).__name__} without a loss",
            mend="add labels to the batch, or 'loss': a function of model and batch",
        )
    return loss  # type: ignore[no-any-return]


def loss_value(loss: Any) -> float | None:
    """Returns a loss as a number, or None when a step of the person's own returns none."""
    if isinstance(loss, torch.Tensor):
        return float(loss.detach()) if loss.numel() == 1 else None
    return float(loss) if isinstance(loss, int | float) else None


def is_out_of_host_memory(error: BaseException) -> bool:
    """Returns whether an error says that the machine's own memory ran out."""
    text = str(error)
    return isinstance(error, MemoryError) or "can't allocate memory" in text
