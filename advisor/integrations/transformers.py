"""For the Trainer of transformers: a callback that decides while it trains.

    from advisor.integrations.transformers import AdviseCallback

    Trainer(model=model, args=args, train_dataset=data, callbacks=[AdviseCallback()]).train()

Checkpoints are those of a training without it: they resume with and without.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from advisor.autocompile import AutoCompile
from advisor.integrations import dynamo_plugin, prepared
from advisor.integrations.loop import TrainerLoop, Wishes
from advisor.integrations.required import required
from advisor.models.loop_policy import Believe, LoopOutcome
from advisor.profiler.errors import PlanError
from advisor.profiler.records import Advice, Config, Mode

_transformers = required("transformers", "transformers")
_TrainerCallback: Any = _transformers.TrainerCallback


class AdviseCallback(_TrainerCallback):  # type: ignore[misc]
    """Compiles the Trainer's model in place while it trains, if that pays.

    `within` says how it decides: "auto" compiles and measures in the training's own steps,
    "estimate" lets the cost model decide after the first ones, "campaign" runs trials of
    `workload` (as `advise run` names it) before the first, for `budget_s` seconds at most, and
    starts from their compile cache. `config` is the only configuration to consider, such as an
    advice's. `always_try` compiles and measures whatever is believed, `believe` replaces what the
    cost model believes. `tell` is given the sentences for the person.
    """

    def __init__(
        self,
        within: str | None = None,
        *,
        config: Config | None = None,
        workload: str | None = None,
        budget_s: float | None = None,
        believe: Believe | None = None,
        always_try: bool = False,
        tell: Callable[[str], object] = print,
    ) -> None:
        """Raises `PlanError` for wishes that do not go together."""
        wishes = Wishes.of(within, config, workload, budget_s, believe, always_try)
        self._loop = TrainerLoop(wishes, tell)

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

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Decides, or begins to measure. What is called in a step is the model inside of DDP."""
        why = _why_not(args)
        if why:
            self._loop.stand_aside(why)
            return
        self._loop.begin(
            kwargs["model"],
            max(0, state.max_steps - state.global_step),
            ranks=args.world_size,
            loud=state.is_world_process_zero,
            autocast=_accelerator_state().mixed_precision,
        )

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begins an optimizer step: all batches whose gradients are accumulated."""
        self._loop.begin_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ends it, before anything is logged, evaluated or saved."""
        self._loop.end_step()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Tells what was done, and leaves the model as it was built."""
        self._loop.end()


def training_arguments(advice: Advice | Config | None) -> dict[str, Any]:
    """Returns an advice as fields of `TrainingArguments`, for a training without the callback.

    They have none for a scope, `dynamic`, `fullgraph` or options. All but options can be said by
    `launch_environment`. Raises `PlanError` for what neither the fields nor the environment says:
    another configuration than the advised one is never compiled silently.
    """
    config = dynamo_plugin.config_of(advice)
    if config is None:
        return {"torch_compile": False}
    instead = "AdviseCallback(config=advice.config) takes all"
    if config.options:
        names = ", ".join(name for name, _ in config.options)
        raise PlanError(f"TrainingArguments has no field for the options {names}", mend=instead)
    unsaid = [
        f"{name}={value}"
        for name, value in dynamo_plugin.variables(config).items()
        if os.environ.get(name, "").lower() != value
    ]
    if unsaid:
        raise PlanError(
            "TrainingArguments has no field for a part of this advice",
            f"the environment must say {', '.join(unsaid)}",
            f"os.environ.update(launch_environment(advice)) before; or {instead}",
        )
    fields: dict[str, Any] = {"torch_compile": True, "torch_compile_backend": config.backend}
    if config.mode is not Mode.DEFAULT:
        fields["torch_compile_mode"] = config.mode.value
    return fields


def launch_environment(advice: Advice | Config | None) -> dict[str, str]:
    """Returns variables that say what `TrainingArguments` has no field for.

    Accelerate reads them when the Trainer is made.
    """
    return dynamo_plugin.variables(dynamo_plugin.config_of(advice))


def _why_not(args: Any) -> str:
    """Returns why the Trainer's model is left alone; "" when it is not."""
    if args.torch_compile:
        return "TrainingArguments(torch_compile=True) compiles the model already"
    if args.n_gpu > 1:
        return (
            f"the Trainer copies the model to {args.n_gpu} GPUs in each step (DataParallel):"
            " start one process for each with torchrun"
        )
    return prepared.why_not(_accelerator_state())


def _accelerator_state() -> Any:
    return required("accelerate", "accelerate.state").AcceleratorState()
