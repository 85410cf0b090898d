"""For Accelerate: an advice as its plugin, and AutoCompile in a loop that accumulates gradients.

    accelerator = Accelerator(dynamo_plugin=plugin(advice))       # decided before, or:

    with AdviseLoop(accelerator, model, steps=20_000) as advise:  # decides while it trains
        for batch in loader:
            with advise.batch(), accelerator.accumulate(model):
                ...

Through the plugin, Accelerate wraps the model, and the names in `model.state_dict()` begin with
`_orig_mod.`; those in `accelerator.save_state` and of `accelerator.unwrap_model(model)` do not.
`AdviseLoop` compiles in place, and no name changes anywhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

import torch

from advisor.autocompile import AutoCompile
from advisor.integrations import dynamo_plugin, prepared
from advisor.integrations.loop import TrainerLoop, Wishes
from advisor.integrations.required import required
from advisor.models.loop_policy import Believe, LoopOutcome
from advisor.profiler.errors import PlanError
from advisor.profiler.records import Advice, Config

_accelerate = required("accelerate", "accelerate")


def plugin(advice: Advice | Config | None) -> Any:
    """Returns the `TorchDynamoPlugin` that compiles as advised; None or eager: not at all.

    Raises `PlanError` for a backend that Accelerate does not know, and for options that
    `torch.compile` does not take.
    """
    config = dynamo_plugin.config_of(advice)
    fields = dynamo_plugin.plugin_fields(config)
    try:
        return _accelerate.utils.TorchDynamoPlugin(**fields)
    except ValueError as error:
        raise PlanError(
            f"Accelerate does not know the backend {fields['backend']!r}",
            mend="give AutoCompile config=advice.config",
        ) from error


class AdviseLoop:
    """Compiles a prepared model in place while it trains, if that pays; see the module.

    A context manager: leaving it tells what was done. `model` is what `accelerator.prepare`
    returned, `steps` the optimizer steps planned (None: nobody knows). The other arguments are
    those of the callback for transformers.
    """

    def __init__(
        self,
        accelerator: Any,
        model: torch.nn.Module,
        *,
        steps: float | None = None,
        within: str | None = None,
        config: Config | None = None,
        workload: str | None = None,
        budget_s: float | None = None,
        believe: Believe | None = None,
        always_try: bool = False,
        tell: Callable[[str], object] = print,
    ) -> None:
        """Decides, or begins to measure. Raises `PlanError` for wishes that do not go together."""
        wishes = Wishes.of(within, config, workload, budget_s, believe, always_try)
        self._accelerator = accelerator
        self._loop = TrainerLoop(wishes, tell)
        why = prepared.why_not(accelerator.state)
        if why:
            self._loop.stand_aside(why)
            return
        self._loop.begin(
            accelerator.unwrap_model(model),
            steps,
            ranks=accelerator.num_processes,
            loud=accelerator.is_main_process,
            autocast=accelerator.mixed_precision,
        )

    @property
    def auto(self) -> AutoCompile | None:
        """What measures while training; None after it, and where nothing is compiled."""
        return self._loop.auto

    @property
    def advice(self) -> Advice | None:
        """What the trials advised; None without a campaign."""
        return self._loop.advice

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Surrounds what is done with one batch: an optimizer step, or a part of one."""
        self._loop.begin_step()
        try:
            yield
        except BaseException as error:
            self._loop.end_step(error)
            raise
        # Accelerate says so while the last of the accumulated batches is under way.
        if self._accelerator.sync_gradients:
            self._loop.end_step()

    def report(self) -> str:
        """Returns in some sentences what was done, why, and what it has saved."""
        return self._loop.report()

    def outcome(self) -> LoopOutcome:
        """Returns the same as numbers."""
        return self._loop.outcome()

    def close(self) -> None:
        """Tells what was done, and leaves the model as it was built."""
        self._loop.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self._loop.drop()
