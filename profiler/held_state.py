"""What objects hold at a moment, and all of it put back later: bit by bit, in the same objects.

A model and its optimizer are more than their state dicts: gradients, flags, hooks, attributes that
a forward sets, the very tensors and lists that others refer to. These are what is filled again.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from advisor.profiler.workload import is_library

_CONTAINERS = (dict, list, set, deque)
_PLAIN = (int, float, complex, str, bytes, bool, type(None), type, types.ModuleType)


class Held:
    """The state of some objects and of what they consist of.

    Followed are attributes of the objects themselves, of modules, optimizers, schedulers and
    scalers; containers; tensors with their gradients; random generators; and of the person's own
    functions the variables that they use, with the object whose method one is. Objects of other
    classes within them are not looked into, nor are those that are to be `left` as they are.
    Tensors are held in the machine's memory.
    """

    def __init__(self, *objects: object, left: tuple[object, ...] = ()) -> None:
        self._seen: dict[int, object] = {id(value): value for value in left}
        self._restores: list[Callable[[], None]] = []
        self._waiting: list[object] = []
        self._roots = {id(value) for value in objects}
        self._waiting += objects
        while self._waiting:
            self._hold(self._waiting.pop())

    def restore(self) -> None:
        """Puts everything back. One thing that cannot be put back does not keep the others."""
        with contextlib.ExitStack() as stack, torch.no_grad():
            for restore in reversed(self._restores):
                stack.callback(restore)

    def _hold(self, value: object) -> None:
        if isinstance(value, _PLAIN) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            self._hold_tensor(value)
        elif isinstance(value, _CONTAINERS):
            self._hold_contents(value)
        elif isinstance(value, tuple):
            self._waiting.extend(value)
        elif isinstance(value, types.MethodType):
            self._roots.add(id(value.__self__))
            self._waiting += [value.__self__, value.__func__]
        elif isinstance(value, functools.partial):
            self._waiting += [value.func, value.args, value.keywords]
        elif isinstance(value, types.FunctionType):
            self._hold_variables(value)
        elif (restore := _random_source(value)) is not None:
            self._restores.append(restore)
        elif _is_stateful(value) or (id(value) in self._roots and hasattr(value, "__dict__")):
            self._hold_attributes(value)

    def _hold_attributes(self, value: object) -> None:
        before = dict(vars(value))
        self._waiting += before.values()

        def restore() -> None:
            if not _is_same(vars(value), before):
                vars(value).clear()
                vars(value).update(before)

        self._restores.append(restore)

    def _hold_contents(self, value: Any) -> None:
        before = list(value.items()) if isinstance(value, dict) else list(value)
        if isinstance(value, dict):
            self._waiting += [one for pair in before for one in pair]
        else:
            self._waiting += before
        self._restores.append(lambda: _refill(value, before))

    def _hold_tensor(self, tensor: torch.Tensor) -> None:
        # `data` shares the memory but not the counter of changes, on which autograd's own checks
        # rest.
        data, leaf, attributes = tensor.data, tensor.is_leaf, dict(vars(tensor))
        copy = data.to("cpu", copy=True)
        needs, gradient = tensor.requires_grad, tensor.grad if leaf else None
        if gradient is not None:
            self._waiting.append(gradient)

        def restore() -> None:
            if not _shares(tensor, data):
                tensor.data = data
            tensor.data.copy_(copy)
            if leaf and tensor.requires_grad != needs:
                tensor.requires_grad_(needs)
            if leaf and tensor.grad is not gradient:
                tensor.grad = gradient
            if not _is_same(vars(tensor), attributes):
                vars(tensor).clear()
                vars(tensor).update(attributes)

        self._restores.append(restore)

    def _hold_variables(self, function: types.FunctionType) -> None:
        """Holds what a function of the person's own uses from around it."""
        if is_library(function.__code__.co_filename):
            return
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # not filled yet
                self._hold_binding(cell, "cell_contents", cell.cell_contents)
        names = set(_names_used(function.__code__))
        for name in names & function.__globals__.keys():
            value = function.__globals__[name]
            self._waiting.append(value)
            self._restores.append(functools.partial(function.__globals__.__setitem__, name, value))

    def _hold_binding(self, holder: object, name: str, value: object) -> None:
        self._waiting.append(value)
        self._restores.append(lambda: setattr(holder, name, value))


def _is_stateful(value: object) -> bool:
    kinds: tuple[type, ...] = (
        torch.nn.Module,
        torch.optim.Optimizer,
        torch.optim.lr_scheduler.LRScheduler,
        torch.amp.GradScaler,
    )
    return isinstance(value, kinds)


def _random_source(value: Any) -> Callable[[], None] | None:
    """Returns what puts a random generator back; None where the value is none."""
    numpy = sys.modules.get("numpy")
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: void(value.set_state(state))
    if isinstance(value, random.Random):
        return functools.partial(value.setstate, value.getstate())
    if numpy is not None and isinstance(value, numpy.random.Generator):
        bits, kept = value.bit_generator, value.bit_generator.state
        return lambda: setattr(bits, "state", kept)
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        return functools.partial(value.set_state, value.get_state())
    return None


def void(_: object) -> None:
    """Drops a result."""


def _names_used(code: types.CodeType) -> Iterator[str]:
    """Yields the names of globals and attributes in a function and in those defined within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_used(constant)


def _is_same(now: dict[str, Any], before: dict[str, Any]) -> bool:
    """Returns whether both hold the very same objects under the same names in the same order."""
    return len(now) == len(before) and all(
        new == old and now[new] is before[old] for new, old in zip(now, before, strict=True)
    )


def _refill(value: Any, before: list[Any]) -> None:
    """Puts the contents of a container back into it, unless they are the same already."""
    now = list(value.items()) if isinstance(value, dict) else list(value)
    if len(now) == len(before) and all(map(_is_same_item, now, before)):
        return
    # The class's own methods may do more: what is put back has been through them already.
    if isinstance(value, OrderedDict):
        OrderedDict.clear(value)
        for key, item in before:
            OrderedDict.__setitem__(value, key, item)
    elif isinstance(value, dict):
        dict.clear(value)
        dict.update(value, before)
    elif isinstance(value, list):
        list.__setitem__(value, slice(None), before)
    else:
        value.clear()
        (value.update if isinstance(value, set) else value.extend)(before)


def _is_same_item(now: Any, before: Any) -> bool:
    if isinstance(now, tuple) and isinstance(before, tuple) and len(now) == len(before) == 2:
        return now[0] is before[0] and now[1] is before[1]
    return now is before


def _shares(tensor: torch.Tensor, data: torch.Tensor) -> bool:
    """Returns whether a tensor still lies in the memory that it lay in."""
    return (
        tensor.device == data.device
        and tensor.dtype == data.dtype
        and tensor.shape == data.shape
        and tensor.layout == data.layout
        and (
            tensor.layout is not torch.strided
            or (tensor.data_ptr() == data.data_ptr() and tensor.stride() == data.stride())
        )
    )
