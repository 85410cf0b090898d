"""For the Trainer of Lightning: a callback that decides while it trains.

    from advisor.integrations.lightning import AdviseCallback

    lightning.Trainer(callbacks=[AdviseCallback()]).fit(module, loader)

Works with `lightning` and `pytorch_lightning`: with the one that is imported before this module.
Checkpoints are those of a training without it: they resume with and without.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from advisor.autocompile import AutoCompile
from advisor.integrations.called import Calls
from advisor.integrations.loop import TrainerLoop, Wishes
from advisor.integrations.required import required
from advisor.models.loop_policy import Believe, LoopOutcome
from advisor.profiler.errors import PlanError
from advisor.profiler.records import Advice, Config

_Callback: Any = required("lightning", "lightning.pytorch", "pytorch_lightning").Callback


class AdviseCallback(_Callback):  # type: ignore[misc]
    """Compiles what `training_step` calls in place while it trains, if that pays.

    Lightning calls `training_step`, and that some module: the first step is watched to see which.
    `module` names it instead (an attribute, as in "model" or "net.encoder"). The other arguments
    are those of the callback for transformers: `within` is "auto", "estimate" or "campaign".
    """

    def __init__(
        self,
        within: str | None = None,
        *,
        module: str | None = None,
        config: Config | None = None,
        workload: str | None = None,
        budget_s: float | None = None,
        believe: Believe | None = None,
        always_try: bool = False,
        tell: Callable[[str], object] = print,
    ) -> None:
        """Raises `PlanError` for wishes that do not go together."""
        super().__init__()
        wishes = Wishes.of(within, config, workload, budget_s, believe, always_try)
        self._loop = TrainerLoop(wishes, tell)
        self._module = module
        self._calls: Calls | None = None
        self._stepped = 0
        # Batches up to the next optimizer step belong to one whose beginning was not measured.
        self._waits = False

    @property
    def auto(self) -> AutoCompile | None:
        """What measures while training; None before and after, and where nothing is compiled."""
        return self._loop.auto

    @property
    def advice(self) -> Advice | None:
        """What the trials advised; None without a campaign."""
        return self._loop.advice

    def report(self) -> str:
        """Returns in some sentences what was done, why, and what it has saved."""
        return self._loop.report()

    def outcome(self) -> LoopOutcome:
        """Returns the same as numbers."""
        return self._loop.outcome()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Decides, or has the first step watched for what it calls."""
        self._stepped, self._waits, self._calls = trainer.global_step, False, None
        why = _why_not(trainer, pl_module)
        if why:
            self._loop.stand_aside(why)
        elif self._module is not None:
            try:
                named = pl_module.get_submodule(self._module)
            except AttributeError:
                self._loop.stand_aside(f"{type(pl_module).__name__} has no module {self._module!r}")
                return
            self._begin(trainer, named)
        else:
            wrapped = trainer.strategy.model is not pl_module
            # Within its wrapper, Lightning calls the module in place of `training_step`.
            self._calls = Calls((trainer.strategy.model, pl_module) if wrapped else ())

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Begins an optimizer step, unless this batch only adds to the gradients of one."""
        if self._calls is not None:
            self._calls.begin()
        elif not self._waits:
            self._loop.begin_step()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ends it once an optimizer has stepped, before checkpoints are written."""
        stepped = trainer.global_step != self._stepped
        self._stepped = trainer.global_step
        if self._calls is not None:
            self._begin_what_is_called(trainer)
            self._waits = not stepped
        elif stepped:
            self._waits = False
            self._loop.end_step()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Leaves out a step whose gradients are being accumulated while something is validated."""
        if self._loop.stepping:
            self._loop.drop_step()
            self._waits = True

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leaves the model as it was built."""
        if self._calls is not None:
            self._calls.end()
        self._loop.end_step(exception)
        self._loop.drop()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Tells what was done, and leaves the model as it was built."""
        if self._calls is not None:
            self._calls.end()
        self._loop.end()

    def _begin_what_is_called(self, trainer: Any) -> None:
        calls, self._calls = self._calls, None
        assert calls is not None
        calls.end()
        try:
            self._begin(trainer, calls.most())
        except PlanError as error:
            self._loop.stand_aside(str(error))

    def _begin(self, trainer: Any, module: torch.nn.Module) -> None:
        self._loop.begin(
            module,
            _steps_left(trainer),
            ranks=trainer.world_size,
            loud=trainer.is_global_zero,
            autocast=str(trainer.precision),
        )


def _why_not(trainer: Any, pl_module: Any) -> str:
    """Returns why a module is left alone; "" when it is not."""
    if getattr(pl_module, "_compiler_ctx", None) is not None:
        return f"{type(pl_module).__name__} is compiled already: give the Trainer the plain module"
    wrapper = trainer.strategy.model
    if wrapper is pl_module or isinstance(wrapper, torch.nn.parallel.DistributedDataParallel):
        return ""
    return f"{type(trainer.strategy).__name__} wraps the module in {type(wrapper).__name__}"


def _steps_left(trainer: Any) -> float | None:
    """Returns how many optimizer steps are left; None where nobody knows, as without an end."""
    steps = float(trainer.estimated_stepping_batches)
    if not math.isfinite(steps) or steps < 0:
        return None
    return max(0.0, steps - float(trainer.global_step))
