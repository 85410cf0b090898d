"""The call of a model, seen from outside of what is compiled.

A hook of a module is compiled with it, and runs too late to choose between compiled and eager. What
`module.compile()` puts in place of the call is looked at first (torch/nn/modules/module.py), so
this stands there, in both arms alike, and passes on to what would have been called without it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from advisor.profiler import torch_internals


class Entry:
    """Tells of each call of a model with gradients, in the thread that trains, before it."""

    def __init__(self, model: torch.nn.Module, tell: Callable[[], None]) -> None:
        """`tell` must not raise; it may compile the model, or flip it."""
        self._model = model
        self._tell = tell
        self._inner: Any = None
        self._thread = threading.get_ident()
        self._in_place = True
        torch_internals.set_compiled_call(model, self)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Calls the model."""
        if torch.is_grad_enabled() and threading.get_ident() == self._thread:
            self._tell()
            self.stay()
        inner = self._inner if self._in_place else torch_internals.compiled_call(self._model)
        inner = inner or torch_internals.eager_call(self._model)
        try:
            return inner(*args, **kwargs)
        finally:
            self.stay()

    def stay(self) -> None:
        """Takes its place again, in front of what was put there meanwhile."""
        if not self._in_place:
            return
        call = torch_internals.compiled_call(self._model)
        if call is not self:
            self._inner = call
            torch_internals.set_compiled_call(self._model, self)

    def remove(self) -> None:
        """Leaves the model with what would be called without it."""
        self.stay()
        self._in_place = False
        torch_internals.set_compiled_call(self._model, self._inner)
