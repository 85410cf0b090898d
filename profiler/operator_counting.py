"""Counts the operators of a training step without running it: shapes only, no memory, no device.

The step runs on fake tensors (torch.compiler docs, "Fake tensor"), which know shapes and dtypes
and hold nothing: a model of 8 billion parameters is counted on a laptop.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from advisor.profiler import torch_internals
from advisor.profiler.step_counts import FUSIBLE, OperatorKind, StepCounts, Work

# Size classes are powers of this many bytes.
_CLASS = 4.0
# Fused attention on the CPU has no FLOP formula of torch's own. Two products of queries, keys and
# values forward; five backward, where the scores are computed anew (Dao et al., FlashAttention).
_ATTENTION_PRODUCTS, _ATTENTION_BACKWARD_PRODUCTS = 2, 5

_MATRIX_PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm", "addmv", "mv", "dot", "_scaled_mm"})
_REDUCTIONS = (
    "sum mean amax amin max min argmax argmin std var var_mean prod norm linalg_vector_norm"
    " _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data logsumexp cumsum"
    " native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward"
    " native_batch_norm native_batch_norm_backward _native_batch_norm_legit"
    " _native_batch_norm_legit_functional _fused_rms_norm _fused_rms_norm_backward"
    " _batch_norm_with_update batch_norm_backward"
    " nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward"
    " any all avg_pool2d avg_pool2d_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward"
)
_REDUCING = frozenset(_REDUCTIONS.split())
_INDEXINGS = (
    "embedding embedding_dense_backward index index_put index_put_ index_select index_add gather"
    " scatter scatter_ scatter_add scatter_add_ masked_fill masked_fill_ select_backward"
    " slice_backward _embedding_bag max_pool2d_with_indices max_pool2d_with_indices_backward"
    " nonzero masked_select sort topk"
)
_INDEXING = frozenset(_INDEXINGS.split())
# They make no work for the device.
_FREE = frozenset({"_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "detach"})
_NO_WORK = frozenset({"prim", "prims", "profiler"})


@dataclass(slots=True)
class _Call:
    kind: OperatorKind
    flops: float
    # Storages by number, with the bytes that the call touches of each.
    reads: dict[int, int] = field(default_factory=dict)
    writes: dict[int, int] = field(default_factory=dict)

    @property
    def bytes(self) -> float:
        return float(sum(self.reads.values()) + sum(self.writes.values()))


class _Unknown(TorchDispatchMode):
    """Answers what a fake tensor, which has no values, cannot: how many, and how much.

    A value that is read is 0: it decides a branch or a rate (`linspace(0, rate, n)[i].item()`),
    seldom what a step costs. What a mask selects is all of it, the most that it can be.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except torch_internals.unknown_value_errors():
            answer = _ANSWERS.get(_name(func))
            if answer is None:
                raise
            return answer(func, *args, **(kwargs or {}))


def _value(func: Any, tensor: torch.Tensor) -> Any:
    dtype = tensor.dtype
    return False if dtype is torch.bool else 0.0 if dtype.is_floating_point else 0


def _places(func: Any, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty((tensor.numel(), tensor.dim()), dtype=torch.int64)


def _selected(func: Any, tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty(tensor.numel())


def _distinct(func: Any, tensor: torch.Tensor, *_: object, **__: object) -> Any:
    flat = tensor.new_empty(tensor.numel())
    places = tensor.new_empty(tensor.shape, dtype=torch.int64)
    return flat, places, tensor.new_empty(tensor.numel(), dtype=torch.int64)


def _indexed(func: Any, tensor: torch.Tensor, indices: Any, *rest: Any, **more: Any) -> Any:
    """Indexes with numbers instead of masks: one for each of a mask's dimensions."""
    numbers: list[torch.Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            made = index.new_empty(index.numel(), dtype=torch.int64)
            numbers += [made] * index.dim()
        else:
            numbers.append(index)
    return func(tensor, numbers, *rest, **more)


_ANSWERS: dict[str, Callable[..., Any]] = {
    "_local_scalar_dense": _value,
    "nonzero": _places,
    "masked_select": _selected,
    "_unique2": _distinct,
    "index": _indexed,
    "index_put": _indexed,
    "index_put_": _indexed,
}


class OperatorCounter(TorchDispatchMode):
    """Records each operator that would give a device something to do, while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[_Call] = []
        self._stepping = False
        # Storages are kept, so that no number is given twice; those of fake tensors hold nothing.
        self._numbers: dict[int, tuple[int, Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs the operator and records it."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = _name(func)
        if getattr(func, "is_view", False) or name in _FREE or func.namespace in _NO_WORK:
            return out
        kind = self._kind(name)
        call = _Call(kind, _flops(func, name, kind, args, kwargs, out))
        self._touch(call.reads, (args, kwargs))
        self._touch(call.writes, out)
        for number in call.writes:
            # Written in place: read and written again.
            if number in call.reads and not name.endswith("_"):
                call.reads.pop(number)
        self._calls.append(call)
        return out

    @contextlib.contextmanager
    def optimizers(self) -> Iterator[None]:
        """Has what optimizers do inside their `step` counted as that."""
        before = torch_internals.on_optimizer_step(self._begin_step, self._end_step)
        try:
            yield
        finally:
            for hook in before:
                hook.remove()

    def eager(self) -> tuple[Work, ...]:
        """Returns the recorded calls as plain eager makes them."""
        return _classed((each.kind, each.flops, each.bytes) for each in self._calls)

    def fused(self) -> tuple[Work, ...]:
        """Returns them with each run of neighbouring fusible calls as one kernel.

        A kernel reads once what comes from outside and writes what is read by a later one, or by
        nobody in this step (gradients, statistics). The order is the eager one: what a compiler
        could still move together is not.
        """
        last_read: dict[int, int] = {}
        for index, call in enumerate(self._calls):
            for number in call.reads:
                last_read[number] = index
        found: list[tuple[OperatorKind, float, float]] = []
        begun = 0
        for index in range(len(self._calls) + 1):
            if index < len(self._calls) and self._calls[index].kind in FUSIBLE:
                continue
            if index > begun:
                found.append(self._kernel(begun, index, last_read))
            if index < len(self._calls):
                call = self._calls[index]
                found.append((call.kind, call.flops, call.bytes))
            begun = index + 1
        return _classed(found)

    def _kernel(
        self, begun: int, ended: int, last_read: dict[int, int]
    ) -> tuple[OperatorKind, float, float]:
        made: dict[int, int] = {}
        outside: dict[int, int] = {}
        flops = 0.0
        for call in self._calls[begun:ended]:
            flops += call.flops
            for number, size in call.reads.items():
                if number not in made:
                    outside[number] = max(size, outside.get(number, 0))
            for number, size in call.writes.items():
                made[number] = max(size, made.get(number, 0))
        written = sum(
            size
            for number, size in made.items()
            if number not in last_read or last_read[number] >= ended
        )
        return OperatorKind.FUSED, flops, float(sum(outside.values()) + written)

    def _touch(self, into: dict[int, int], tree: Any) -> None:
        for leaf in pytree.tree_leaves(tree):
            if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
                continue
            storage = leaf.untyped_storage()
            key = id(storage)
            number, _ = self._numbers.setdefault(key, (len(self._numbers), storage))
            # One that was expanded is no larger than what it was expanded from.
            size = min(leaf.numel() * leaf.element_size(), storage.nbytes())
            into[number] = max(size, into.get(number, 0))

    def _kind(self, name: str) -> OperatorKind:
        if self._stepping:
            return OperatorKind.OPTIMIZER
        kinds = (
            (OperatorKind.MATRIX_PRODUCT, name in _MATRIX_PRODUCTS),
            (OperatorKind.CONVOLUTION, "convolution" in name),
            (OperatorKind.ATTENTION, "attention" in name),
            (OperatorKind.REDUCTION, name in _REDUCING),
            (OperatorKind.INDEXING, name in _INDEXING or "upsample" in name),
        )
        return next((kind for kind, applies in kinds if applies), OperatorKind.POINTWISE)

    def _begin_step(self, *_: object) -> None:
        self._stepping = True

    def _end_step(self, *_: object) -> None:
        self._stepping = False


@contextlib.contextmanager
def without_memory() -> Iterator[None]:
    """Has all tensors made meanwhile be fake: they have shapes and hold nothing.

    Raises `AdvisorError` where this torch has no fake tensors.
    """
    moved: dict[int, tuple[torch.nn.Parameter, torch.nn.Parameter]] = {}
    before = torch.nn.Module._apply

    def apply(module: torch.nn.Module, function: Any, recurse: bool = True) -> torch.nn.Module:
        """As torch's own, which cannot swap a fake parameter that something else refers to."""
        if recurse:
            for child in module.children():
                apply(child, function)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = _moved(parameter, function, moved)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = function(buffer)
        return module

    torch.nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        with torch_internals.fake_tensors(), _Unknown():  # type: ignore[no-untyped-call]
            yield
    finally:
        torch.nn.Module._apply = before  # type: ignore[method-assign]


def _moved(
    parameter: torch.nn.Parameter,
    function: Callable[[torch.Tensor], torch.Tensor],
    moved: dict[int, tuple[torch.nn.Parameter, torch.nn.Parameter]],
) -> torch.nn.Parameter:
    """Returns a parameter as it is after `.to()`; tied ones stay tied."""
    with torch.no_grad():
        value = function(parameter)
    if value is parameter:
        return parameter
    _, made = moved.setdefault(
        id(parameter), (parameter, torch.nn.Parameter(value, parameter.requires_grad))
    )
    return made


def count(
    model: torch.nn.Module,
    step: Callable[[], object],
    samples: float | None = None,
    *,
    stepped: bool = False,
) -> StepCounts:
    """Returns what `step`, one whole training step of `model`, does.

    Run it under `without_memory` where it need not run. A first call makes gradients and the
    optimizer's state, unless it was `stepped` before; the second is counted. Raises what `step`
    raises, such as torch's `DynamicOutputShapeException` where a value decides a shape.
    """
    if not stepped:
        step()
    counter = OperatorCounter()
    with counter, counter.optimizers():
        step()
    parameters = list(model.parameters())
    return StepCounts(
        parameters=float(sum(each.numel() for each in parameters)),
        tensors=float(len(parameters)),
        layers=float(
            sum(
                1
                for each in model.modules()
                if next(each.parameters(recurse=False), None) is not None
            )
        ),
        eager=counter.eager(),
        fused=counter.fused(),
        samples=samples,
        parameter_bytes=float(sum(each.numel() * each.element_size() for each in parameters)),
    )


def _name(func: Any) -> str:
    return str(func).split(".")[1] if str(func).count(".") else str(func)


def _flops(
    func: Any, name: str, kind: OperatorKind, args: tuple[Any, ...], kwargs: Any, out: Any
) -> float:
    formula = torch_internals.flop_formula(func)
    if formula is not None:
        return float(formula(*args, **kwargs, out_val=out))
    if kind is OperatorKind.ATTENTION:
        return _attention_flops(name, args)
    if kind is OperatorKind.MATRIX_PRODUCT:
        return 2.0 * math.prod(args[0].shape) if isinstance(args[0], torch.Tensor) else 0.0
    return float(
        sum(leaf.numel() for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor))
    )


def _attention_flops(name: str, args: tuple[Any, ...]) -> float:
    backward = "backward" in name
    query, key = args[1 if backward else 0], args[2 if backward else 1]
    products = _ATTENTION_BACKWARD_PRODUCTS if backward else _ATTENTION_PRODUCTS
    return float(products * 2.0 * math.prod(query.shape) * key.shape[-2])


def _classed(calls: Any) -> tuple[Work, ...]:
    sums: dict[tuple[OperatorKind, int], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for kind, flops, size in calls:
        of_class = sums[kind, int(math.log(max(size, 1.0), _CLASS))]
        of_class[0] += 1
        of_class[1] += flops
        of_class[2] += size
    return tuple(
        Work(kind=kind, calls=calls_, flops=flops, bytes=size)
        for (kind, _), (calls_, flops, size) in sorted(sums.items())
    )
