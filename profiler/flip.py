"""Compiling in place, and the flip between compiled and plain eager.

Everything about applying a configuration stands here. `module.compile()` keeps names and state
dicts as they are (no `_orig_mod.` prefix, no second copy). A module whose class is torch's own
(`nn.TransformerEncoderLayer`, a bare `nn.Sequential`) captures no graph that way, without a word:
dynamo skips frames of torch.nn (seen with torch 2.13); compiling its `forward` works.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from advisor.profiler import settings, torch_internals
from advisor.profiler.errors import PlanError
from advisor.profiler.records import Blocks, Config, Scope

Call = Callable[..., Any]


def is_torch_class(module: torch.nn.Module) -> bool:
    """Returns whether a module's class is torch's own, whose call dynamo does not capture."""
    return type(module).__module__.startswith("torch.")


def targets(
    model: torch.nn.Module, config: Config, blocks: Sequence[Blocks]
) -> list[torch.nn.Module]:
    """Returns the modules that a configuration compiles.

    Raises `PlanError` for the regional scope when the model repeats no block.
    """
    if config.scope is Scope.MODEL:
        return [model]
    if not blocks:
        raise PlanError(
            "the model has no repeated blocks to compile regionally", mend="use --scope model"
        )
    return [model.get_submodule(path) for group in blocks for path in group.paths]


class Flip:
    """Compiles modules in place, and swaps the compiled calls out and in.

    Out means *plain* eager: the compiled call is gone, not told to stand aside.
    `torch.compiler.set_stance("force_eager")` would keep dynamo's wrapper, which costs 4-8 % of a
    1 ms step and makes a draw look like a gain.
    """

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        config: Config,
        guard: Callable[[Call, Call], Call] = lambda compiled, _: compiled,
    ) -> None:
        """`guard` is given the compiled and the eager call of a module and returns what is called
        while the modules are flipped to compiled."""
        self.config = config
        self._guard = guard
        self.compiled = False
        self._modules = tuple(modules)
        self._calls: list[tuple[torch.nn.Module, Any]] = []
        self._forwards: list[tuple[torch.nn.Module, Any]] = []
        # Forwards that instances had of their own before: autocast and adapters are put so.
        self._own_forwards: dict[torch.nn.Module, Any] = {}

    @property
    def modules(self) -> tuple[torch.nn.Module, ...]:
        """The modules that are compiled."""
        return self._modules

    @property
    def form(self) -> str:
        """Where the compiled call is put: "call", or "forward" for classes of torch's own."""
        return "forward" if all(map(is_torch_class, self._modules)) else "call"

    def apply(self) -> None:
        """Compiles the modules in place; the compiler itself starts with the first call."""
        arguments = settings.compile_arguments(self.config)
        for module in self._modules:
            if is_torch_class(module):
                if "forward" in vars(module):
                    self._own_forwards[module] = vars(module)["forward"]
                compiled = torch.compile(module.forward, **arguments)
                self._forwards.append((module, self._guard(compiled, module.forward)))
            else:
                module.compile(**arguments)
                compiled = torch_internals.compiled_call(module)
                eager = torch_internals.eager_call(module)
                self._calls.append((module, self._guard(compiled, eager)))
        self.to_compiled()

    def to_compiled(self) -> None:
        """Puts the compiled calls in place."""
        for module, call in self._calls:
            torch_internals.set_compiled_call(module, call)
        for module, forward in self._forwards:
            module.forward = forward
        self.compiled = True

    def to_eager(self) -> None:
        """Takes the compiled calls out: the modules run as if they had never been compiled."""
        for module, _ in self._calls:
            torch_internals.set_compiled_call(module, None)
        for module, _ in self._forwards:
            if module in self._own_forwards:
                module.forward = self._own_forwards[module]
                continue
            # The instance attribute hides the class's own method; without it that is back.
            with contextlib.suppress(AttributeError):
                del module.forward
        self.compiled = False
