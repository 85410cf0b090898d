"""What one training step has to do, counted by kind of operator: FLOPs, bytes, calls.

Plain numbers that need no torch, so that a service can hold them and a model of speed can read
them. `advisor.profiler.operator_counting` fills them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class OperatorKind(enum.StrEnum):
    """What an operator does, as far as its speed and the compiler are concerned."""

    MATRIX_PRODUCT = "matrix_product"
    CONVOLUTION = "convolution"
    ATTENTION = "attention"
    REDUCTION = "reduction"
    POINTWISE = "pointwise"
    INDEXING = "indexing"
    OPTIMIZER = "optimizer"
    # Pointwise, reduction and indexing operators that one generated kernel does together.
    FUSED = "fused"


# What the compiler makes kernels of itself, rather than calling a library.
FUSIBLE = frozenset({OperatorKind.REDUCTION, OperatorKind.POINTWISE, OperatorKind.INDEXING})


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Calls of one kind and of about one size; `flops` and `bytes` are those of all together.

    `bytes` counts each tensor that a call reads or writes once. Sizes are classed by powers of 4,
    so that calls too small to fill a device can be told from large ones.
    """

    kind: OperatorKind
    calls: float
    flops: float
    bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """One training step on one batch.

    `eager` is what plain eager calls, `fused` what is left of it when neighbouring pointwise,
    reduction and indexing operators run as one kernel and their results between stay in registers.
    `layers` counts modules with parameters of their own, `saved_bytes` what the forward leaves for
    the backward.
    """

    parameters: float
    tensors: float
    layers: float
    eager: tuple[Work, ...]
    fused: tuple[Work, ...]
    samples: float | None = None
    parameter_bytes: float | None = None

    @property
    def operators(self) -> float:
        """Calls that give the device something to do, in a step."""
        return total(self.eager, "calls")

    @property
    def flops(self) -> float:
        """Floating-point operations of a step, a multiply-add being two."""
        return total(self.eager, "flops")

    @property
    def bytes(self) -> float:
        """Bytes that eager reads and writes in a step."""
        return total(self.eager, "bytes")

    @property
    def fusible_bytes(self) -> float:
        """Bytes that fusing keeps off the memory, in a step."""
        return max(0.0, self.bytes - total(self.fused, "bytes"))


def total(work: Sequence[Work], what: str, kinds: Iterable[OperatorKind] | None = None) -> float:
    """Returns the sum of `calls`, `flops` or `bytes` over work of some kinds (None: of all)."""
    wanted = frozenset(OperatorKind if kinds is None else kinds)
    return float(sum(getattr(each, what) for each in work if each.kind in wanted))
