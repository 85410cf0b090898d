"""The gradients of one step as one vector, and how far two such vectors are apart."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

# Two such vectors are held in the machine's memory at a time. Of a larger model every k-th element
# is taken, which leaves the relative difference what it is, but for the sampling.
_MOST_ELEMENTS = 1 << 27
# Elements that are turned to float64 at a time.
_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class Gradients:
    """The gradients that a step left, by the parameter's name, held in the machine's memory.

    A parameter without a gradient is left out: it counts as zeros. `finite` is false when any
    element is NaN or infinite.
    """

    tensors: dict[str, torch.Tensor]
    finite: bool
    # Of dense gradients, every `stride`-th element is held.
    stride: int = 1

    def norm(self) -> float:
        """Returns the length of the vector."""
        return math.sqrt(sum(_squares(tensor) for tensor in self.tensors.values()))

    def distance(self, other: Gradients) -> tuple[float, str]:
        """Returns |self - other|, and the parameter that most of it lies in ("" when it is 0)."""
        squares = {
            name: _squares_between(self.tensors.get(name), other.tensors.get(name), self.stride)
            for name in (*self.tensors, *(other.tensors.keys() - self.tensors.keys()))
        }
        whole = sum(squares.values())
        return math.sqrt(whole), max(squares, key=squares.__getitem__) if whole else ""


NO_GRADIENTS = Gradients({}, finite=True)


def gradients_of(model: torch.nn.Module, most_elements: int = _MOST_ELEMENTS) -> Gradients:
    """Returns the gradients that lie on a model's parameters now.

    A step of the person's own may have cleared them: then there are none, or zeros.
    """
    found = {
        name: _plain(parameter.grad)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    # Of all parameters, so that it is the same for compiled and eager whatever they left out.
    whole = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    # Odd, so that it shares no factor with the usual widths and meets every column.
    stride = 1 if whole <= most_elements else -(-whole // most_elements) | 1
    finite = all(bool(torch.isfinite(_values(gradient)).all()) for gradient in found.values())
    return Gradients(
        tensors={name: _kept(gradient, stride) for name, gradient in found.items()},
        finite=finite,
        stride=stride,
    )


def _plain(gradient: torch.Tensor) -> torch.Tensor:
    """Returns a gradient as a plain tensor: of one that is spread over ranks, this rank's part."""
    gradient = gradient.detach()
    if hasattr(gradient, "to_local"):
        gradient = gradient.to_local()
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient)
    return gradient.coalesce() if gradient.is_sparse else gradient


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.values() if gradient.is_sparse else gradient


def _kept(gradient: torch.Tensor, stride: int) -> torch.Tensor:
    if not gradient.is_sparse:
        gradient = gradient.reshape(-1)[::stride]
    return gradient.to("cpu", copy=True)


def _squares_between(first: torch.Tensor | None, second: torch.Tensor | None, stride: int) -> float:
    if first is None or second is None:
        present = first if second is None else second
        return 0.0 if present is None else _squares(present)
    if first.is_sparse and second.is_sparse:
        return _squares((first - second).coalesce())
    # The compiler may give a dense gradient where eager gives a sparse one.
    first, second = _flat(first, stride), _flat(second, stride)
    return sum(_squares(a.double() - b.double()) for a, b in _chunks(first, second))


def _flat(gradient: torch.Tensor, stride: int) -> torch.Tensor:
    return gradient.to_dense().reshape(-1)[::stride] if gradient.is_sparse else gradient


def _chunks(
    first: torch.Tensor, second: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    yield from zip(first.split(_CHUNK), second.split(_CHUNK), strict=True)


def _squares(gradient: torch.Tensor) -> float:
    """Returns the sum of squares, in float64."""
    values = _values(gradient).reshape(-1)
    return sum(float(chunk.double().square().sum()) for chunk in values.split(_CHUNK))
