"""Weights and optimizer state of a moment, and the courses of steps that start from it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import torch

from advisor.profiler.gradients import gradients_of
from advisor.profiler.numerics import Arm, Course
from advisor.profiler.training import Trainer, loss_value
from advisor.profiler.workload import Batch, seed_everything

_DROPOUTS = (
    torch.nn.Dropout,
    torch.nn.Dropout1d,
    torch.nn.Dropout2d,
    torch.nn.Dropout3d,
    torch.nn.AlphaDropout,
    torch.nn.FeatureAlphaDropout,
)


class Snapshot:
    """Weights, buffers, optimizer state and counters of a moment, held in the machine's memory."""

    def __init__(self, trainer: Trainer) -> None:
        self._state = {
            name: value.detach().to("cpu", copy=True)
            for name, value in _tensors(trainer.model).items()
        }
        self._optimizer = copy.deepcopy(trainer.optimizer.state_dict())
        self._numbers = [(module, numbers_of(module)) for module in trainer.model.modules()]
        self._flags = _flags(trainer.model)

    def restore(self, trainer: Trainer) -> None:
        """Puts everything back in place, so that compiled code still finds the same tensors."""
        with torch.no_grad():
            for name, value in _tensors(trainer.model).items():
                if name in self._state:
                    value.copy_(self._state[name])
        trainer.optimizer.load_state_dict(copy.deepcopy(self._optimizer))
        trainer.optimizer.zero_grad(set_to_none=True)
        for module, numbers in self._numbers:
            vars(module).update(numbers)

    def holds(self, trainer: Trainer) -> bool:
        """Returns whether the same is trained, in the same mode, as when this was taken.

        Flags are left as they are: who unfreezes layers as the batches come would not do it again.
        """
        return self._flags == _flags(trainer.model)


def numbers_of(module: torch.nn.Module) -> dict[str, int | float]:
    """Returns the plain numbers on a module: a counter of calls belongs to the state, too."""
    return {
        name: value
        for name, value in vars(module).items()
        if type(value) in (int, float) and not name.startswith("_")
    }


def _flags(model: torch.nn.Module) -> tuple[list[bool], list[bool]]:
    trained = [parameter.requires_grad for parameter in model.parameters()]
    return trained, [module.training for module in model.modules()]


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def course(
    trainer: Trainer, snapshot: Snapshot, batches: list[Batch], arm: Arm, seed: int, dtype: str
) -> Course:
    """Returns what a step on each batch gives, from the snapshot and a seed.

    The model is compiled or plain as the caller has flipped it. `Arm.REORDERED` sums in another
    order and rounds the weights anew, as coarsely as `dtype`.
    """
    snapshot.restore(trainer)
    if arm is Arm.REORDERED:
        _round_weights(trainer.model, dtype)
    seed_everything(seed)
    losses, gradients = [], None
    with _other_order(trainer.device) if arm is Arm.REORDERED else contextlib.nullcontext():
        for batch in batches:
            loss = trainer.step(batch)
            if gradients is None:
                gradients = gradients_of(trainer.model)
            losses.append(loss_value(loss))
        trainer.synchronize()
    return Course(losses, gradients) if gradients is not None else Course(losses)


def _round_weights(model: torch.nn.Module, dtype: str) -> None:
    """Moves each weight by one rounding of `dtype`, up or down.

    That is what rounding may do to any number in the step, and so shows how much of a difference
    the step makes of it: little for most, much where gradients cancel or a threshold is near.
    """
    rounding = torch.finfo(_dtype_of(dtype)).eps / 2
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            # Tensors with a layout of their own (spread over ranks, packed) are left alone.
            if type(parameter) is torch.nn.Parameter and parameter.is_floating_point():
                signs = torch.randint(0, 2, parameter.shape, generator=random, dtype=torch.int8)
                signs = signs.mul_(2).sub_(1).to(parameter.device)
                parameter.addcmul_(parameter, signs.to(parameter.dtype), value=rounding)


def _dtype_of(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if isinstance(found, torch.dtype) and found.is_floating_point:
        return found
    return torch.float32


@contextlib.contextmanager
def _other_order(device: torch.device) -> Iterator[None]:
    """Has sums made in another order: other threads on the CPU, no TF32 on a GPU that uses it."""
    if device.type == "cpu":
        threads = torch.get_num_threads()
        torch.set_num_threads(1 if threads > 1 else 2)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
        return
    precision = torch.get_float32_matmul_precision()
    with contextlib.ExitStack() as stack:
        if precision != "highest":
            torch.set_float32_matmul_precision("highest")
            stack.callback(torch.set_float32_matmul_precision, precision)
        try:
            convolutions = torch.backends.cudnn.allow_tf32
        except RuntimeError:
            # Set by `fp32_precision`, which torch 2.9 and later do not let one read as this flag.
            convolutions = False
        if convolutions:
            torch.backends.cudnn.allow_tf32 = False
            stack.callback(setattr, torch.backends.cudnn, "allow_tf32", True)
        yield


def coarsest_dtype(trainer: Trainer, snapshot: Snapshot, batch: Batch, known: str) -> str:
    """Returns the coarsest type in which a step computes: `known`, or one that is coarser.

    Looks at what a step keeps for its backward pass: under autocast, or within the person's own
    step, that is not the weights' type.
    """
    seen = {_dtype_of(known)}

    def look(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            seen.add(tensor.dtype)
        return tensor

    snapshot.restore(trainer)
    with torch.autograd.graph.saved_tensors_hooks(look, lambda tensor: tensor):
        trainer.step(batch)
    trainer.synchronize()
    coarsest = max(seen, key=lambda dtype: torch.finfo(dtype).eps)
    return str(coarsest).removeprefix("torch.")


def random_source(model: torch.nn.Module) -> str:
    """Returns what draws random numbers in a model, as far as its modules tell."""
    found = any(isinstance(module, _DROPOUTS) and module.p > 0 for module in model.modules())
    return "dropout" if found else "dropout or other random numbers"
