"""Which module of a training is called, and what wraps it: what can be compiled in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from advisor.profiler import torch_internals
from advisor.profiler.errors import PlanError

# What is called beside a module with this share of the weights is too little to ask about.
_MOST_SHARE = 0.9

# Wrappers by their class, which need not be installed. Replicas of a compiled module would all call
# the first one's weights; shards are gathered by hooks around what would be compiled (the trials of
# design §9 saw FSDP capture no graph at all).
_WRAPPERS = {
    "DataParallel": "torch.nn.DataParallel copies the model in each step",
    "FullyShardedDataParallel": "its weights are sharded (FSDP)",
    "DeepSpeedEngine": "DeepSpeed runs it",
    "OptimizedModule": "torch.compile is applied to it already",
}


def why_not(model: torch.nn.Module) -> str:
    """Returns why a model cannot be compiled in place, as a clause; "" when it can."""
    for module in model.modules():
        said = _WRAPPERS.get(type(module).__name__)
        if said is not None:
            return said
        if torch_internals.compiled_call(module) is not None:
            return f"its {type(module).__name__} is compiled already"
    if any(type(parameter).__name__ == "DTensor" for parameter in model.parameters()):
        return "its weights are sharded (DTensor)"
    return ""


class Calls:
    """Sees which modules with weights a step calls, not counting what those call themselves.

    `transparent` modules are looked through: wrappers, and what they call in their own place.
    """

    def __init__(self, transparent: Sequence[torch.nn.Module] = ()) -> None:
        """Sees nothing before `begin`."""
        self._transparent = tuple(transparent)
        self._inside = 0
        self._seen: list[torch.nn.Module] = []
        self._handles: list[Any] = []

    def begin(self) -> None:
        """Watches the modules of this process from now on."""
        module = torch.nn.modules.module
        self._handles = [
            module.register_module_forward_pre_hook(self._enter),
            module.register_module_forward_hook(self._leave, always_call=True),
        ]

    def end(self) -> None:
        """Watches no longer: no hook is left."""
        while self._handles:
            self._handles.pop().remove()

    def most(self) -> torch.nn.Module:
        """Returns the module that holds (nearly) all weights of those that were called.

        Raises `PlanError` when there is no such one.
        """
        held = {id(module): _weights(module) for module in self._seen}
        for module in self._seen:
            if held[id(module)] >= _MOST_SHARE * sum(held.values()):
                return module
        if not self._seen:
            raise PlanError(
                "a step of this training calls no module with weights",
                mend="name the one to compile, as in module='model'",
            )
        names = ", ".join(sorted({type(module).__name__ for module in self._seen}))
        raise PlanError(
            f"a step of this training calls several modules with weights: {names}",
            mend="name the one to compile, as in module='model'",
        )

    def _enter(self, module: torch.nn.Module, _: object) -> None:
        if self._is_transparent(module):
            return
        if not self._inside and _weights(module) and module not in self._seen:
            self._seen.append(module)
        self._inside += 1

    def _leave(self, module: torch.nn.Module, *_: object) -> None:
        if not self._is_transparent(module):
            self._inside = max(0, self._inside - 1)

    def _is_transparent(self, module: torch.nn.Module) -> bool:
        return any(module is each for each in self._transparent)


def _weights(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
