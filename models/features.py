"""From facts of a job to the numbers that decide what compiling it brings.

Physics first: a roofline (Williams et al., CACM 2009) over the step's operators and the cost of
calling them give what eager and compiled steps would take at best. A prior is fitted on what is
left. A fact that is not known makes the features that need it NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from advisor.models.devices import Device
from advisor.profiler.records import Config, Dynamic, Mode, Scope
from advisor.profiler.step_counts import OperatorKind, StepCounts, Work, total

# Shares of the peak that well-tuned libraries reach on large operators; the fit corrects the rest.
_PRODUCT_EFFICIENCY = 0.6
_BANDWIDTH_EFFICIENCY = 0.75
# A kernel costs the device this much however small it is.
_LEAST_KERNEL_S = 2e-6
# Calls of generated kernels cost the host about what those of eager operators do.
_PRODUCTS = frozenset(
    {OperatorKind.MATRIX_PRODUCT, OperatorKind.CONVOLUTION, OperatorKind.ATTENTION}
)
# An optimizer on a GPU steps lists of tensors at once (torch.optim, `foreach`).
_TENSORS_PER_CALL = 30.0


# What a captured graph holds of a step's eager calls: the forward's, each backward call being
# about two of them (median over the architectures of the corpus that state both).
_CALLS_PER_OPERATOR = 2.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of a job before it is measured. None is what is not known.

    `graphs` counts the graphs of a step, `operators` the calls that the compiler captures in its
    forward; `counts` is all that a step does, from `advisor.profiler.operator_counting`.
    """

    device: Device
    family: str = ""
    precision: str = "fp32"
    config: Config = field(default_factory=Config)
    parameters: float | None = None
    batch: float | None = None
    length: float | None = None
    image: float | None = None
    eager_s: float | None = None
    operators: float | None = None
    graphs: float | None = None
    counts: StepCounts | None = None

    @property
    def level(self) -> int:
        """How much is known, as a number from 0 to `LEVELS` - 1."""
        return 2 * (self.counts is not None) + (self.eager_s is not None)

    def known_less(self, level: int) -> Facts:
        """Returns the facts as someone has them who knows no more than `level` says."""
        kept = self if level >= 2 else replace(self, counts=None)
        return kept if level % 2 else replace(kept, eager_s=None)


LEVELS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Seconds of a step by physics: what the device works, and what calling it takes."""

    device_s: float
    host_s: float

    def seconds(self, synchronous: bool) -> float:
        """Returns the step's seconds: calls and work overlap unless the device is the CPU."""
        return self.device_s + self.host_s if synchronous else max(self.device_s, self.host_s)


def roofline(work: Iterable[Work], device: Device, precision: str) -> Roofline:
    """Returns the least time of some work on a device in a precision such as `amp-bf16`."""
    bandwidth = device.bandwidth_bytes_per_s * _BANDWIDTH_EFFICIENCY
    device_s = host_s = 0.0
    for each in work:
        peak = device.flops(precision) if each.kind in _PRODUCTS else device.float32_flops
        busy_s = max(each.flops / (peak * _PRODUCT_EFFICIENCY), each.bytes / bandwidth)
        calls = each.calls
        if each.kind is OperatorKind.OPTIMIZER and device.architecture != "cpu":
            calls /= _TENSORS_PER_CALL
        device_s += max(busy_s, calls * (0.0 if device.architecture == "cpu" else _LEAST_KERNEL_S))
        host_s += calls * device.launch_s
    return Roofline(device_s=device_s, host_s=host_s)


def log(value: float | None) -> float:
    """Returns the logarithm; NaN for what is not known or not positive."""
    return math.log(value) if value is not None and value > 0 else math.nan


# The order of what `vector` returns.
NAMES = (
    "log parameters",
    "log batch",
    "log length",
    "log image",
    "cuda graphs",
    "max-autotune",
    "regional",
    "dynamic shapes",
    "mixed precision",
    "16 bit",
    "tf32",
    "log peak of products over float32",
    "log bandwidth",
    "cpu",
    "log eager",
    "log operators",
    "log eager by operator",
    "log graphs",
    "log parameters times batch by eager",
    "log eager by sample",
    "log device share of eager",
    "log host share of eager",
    "log fused device share of eager",
    "log fused host share of eager",
    "fusible share of eager",
    "log device gain",
    "log gain by physics",
    "share of convolutions",
    "log calls",
    "log calls by kernel",
    "log intensity",
    "share of reductions",
    "share of pointwise",
    "log fused over eager",
    "log tensors",
    "log layers",
)


def vector(facts: Facts) -> NDArray[np.float64]:
    """Returns the features of a job, in the order of `NAMES`; NaN where a fact is missing."""
    device, config = facts.device, facts.config
    mixed = facts.precision.startswith("amp")
    operators = facts.operators
    if operators is None and facts.counts is not None:
        operators = facts.counts.operators / _CALLS_PER_OPERATOR
    eager_s, batch = facts.eager_s, facts.batch
    plain = (
        log(facts.parameters),
        log(batch),
        log(facts.length),
        log(facts.image),
        float(config.mode in (Mode.REDUCE_OVERHEAD, Mode.MAX_AUTOTUNE)),
        float(config.mode in (Mode.MAX_AUTOTUNE, Mode.MAX_AUTOTUNE_NO_CUDAGRAPHS)),
        float(config.scope is Scope.REGIONAL),
        float(config.dynamic is Dynamic.TRUE),
        float(mixed),
        float(facts.precision in ("fp16", "bf16")),
        float(facts.precision == "tf32"),
        log(device.flops(facts.precision) / device.float32_flops),
        log(device.bandwidth_bytes_per_s),
        float(device.architecture == "cpu"),
        log(eager_s),
        log(operators),
        log(_ratio(eager_s, operators)),
        log(None if facts.graphs is None else facts.graphs + 1),
        log(_ratio(_product(facts.parameters, batch), eager_s)),
        log(_ratio(eager_s, batch)),
    )
    if facts.counts is None:
        return np.asarray((*plain, *(math.nan,) * (len(NAMES) - len(plain))))
    return np.asarray((*plain, *_of_counts(facts, facts.counts)))


def gain_by_physics(facts: Facts) -> float:
    """Returns the speedup that the roofline and the cost of calls allow; NaN without counts."""
    if facts.counts is None:
        return math.nan
    eager, fused = rooflines(facts, facts.counts)
    cpu = facts.device.architecture == "cpu"
    return eager.seconds(cpu) / fused.seconds(cpu)


def rooflines(facts: Facts, counts: StepCounts) -> tuple[Roofline, Roofline]:
    """Returns the least times of the eager step and of the fused one, as configured."""
    eager = roofline(counts.eager, facts.device, facts.precision)
    fused = roofline(counts.fused, facts.device, facts.precision)
    if facts.config.mode in (Mode.REDUCE_OVERHEAD, Mode.MAX_AUTOTUNE):
        # One launch for the whole graph.
        fused = Roofline(device_s=fused.device_s, host_s=facts.device.launch_s)
    return eager, fused


def _of_counts(facts: Facts, counts: StepCounts) -> tuple[float, ...]:
    eager = roofline(counts.eager, facts.device, facts.precision)
    fused = roofline(counts.fused, facts.device, facts.precision)
    bandwidth = facts.device.bandwidth_bytes_per_s * _BANDWIDTH_EFFICIENCY
    products = total(counts.eager, "flops", _PRODUCTS)
    at_best_s = max(eager.device_s, eager.host_s)
    measured_s = facts.eager_s if facts.eager_s is not None else math.nan
    return (
        log(_ratio(eager.device_s, facts.eager_s)),
        log(_ratio(eager.host_s, facts.eager_s)),
        log(_ratio(fused.device_s, facts.eager_s)),
        log(_ratio(fused.host_s, facts.eager_s)),
        counts.fusible_bytes / bandwidth / measured_s,
        log(_ratio(eager.device_s, fused.device_s)),
        log(_ratio(at_best_s, max(fused.device_s, fused.host_s))),
        total(counts.eager, "flops", (OperatorKind.CONVOLUTION,)) / (products + 1.0),
        log(counts.operators),
        log(_ratio(counts.operators, total(counts.fused, "calls"))),
        log(_ratio(counts.flops, counts.bytes)),
        total(counts.eager, "bytes", (OperatorKind.REDUCTION,)) / (counts.bytes + 1.0),
        total(counts.eager, "bytes", (OperatorKind.POINTWISE,)) / (counts.bytes + 1.0),
        log(_ratio(fused.device_s, at_best_s)),
        log(counts.tensors),
        log(counts.layers),
    )


def _ratio(of: float | None, to: float | None) -> float | None:
    return of / to if of is not None and to is not None and to > 0 else None


def _product(one: float | None, other: float | None) -> float | None:
    return one * other if one is not None and other is not None else None
