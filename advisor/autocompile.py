"""A training loop that decides by itself whether to compile, while it trains.

    auto = AutoCompile(model, steps=20_000)
    for batch in loader:
        with auto.step():
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    print(auto.report())

Every step that is measured is a step of the training: eager ones first, then, if it can pay,
compiled ones, then both in turns until it is clear which are faster (`models.loop_policy`).
Weights, optimizer, order of data and names in a state dict are those of the loop without it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch

from advisor.autocompile_beliefs import beliefs_of
from advisor.models.loop_policy import Arm, Believe, LoopPolicy, Stage
from advisor.models.plan import Plan
from advisor.profiler import torch_internals
from advisor.profiler.blocks import repeated_blocks
from advisor.profiler.errors import PlanError
from advisor.profiler.flip import Flip, targets
from advisor.profiler.records import Config
from advisor.profiler.units import config_name, duration

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


class AutoCompile:
    """Compiles a model in place while it trains, if that pays; see the module."""

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        steps: float | None = None,
        plan: Plan | None = None,
        config: Config | None = None,
        believe: Believe | None = None,
    ) -> None:
        """Takes the model that is called in the loop, moved to its device.

        `steps` or `plan` says how long the training is; without either it tries once the training
        has gone on for long. Raises `PlanError` for a plan that makes no sense or a model that is
        compiled already.
        """
        if torch_internals.compiled_call(model) is not None:
            raise PlanError(
                "the model is compiled already", mend="give AutoCompile the model as it was built"
            )
        if plan is not None:
            plan.validate()
        self._model = model
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._config = config or Config()
        self._plan, self._steps = plan, steps if plan is None else plan.steps
        self._given_beliefs = believe
        self._policy: LoopPolicy | None = None
        self._flip: Flip | None = None
        self._compiles = 0
        self._depth = 0
        self._thread: int | None = None
        self._told = ""
        self._failure = ""
        torch_internals.on_compile_start(self._on_compile)

    @property
    def stage(self) -> Stage:
        """What it is doing beside training."""
        return self._policy.stage if self._policy is not None else Stage.LOOK

    @property
    def compiled(self) -> bool:
        """Whether the next step runs compiled."""
        return self._flip is not None and self._flip.compiled

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Surrounds one optimizer step, from the forward to the optimizer.

        What is raised inside goes through; a compiled forward that fails runs eager instead.
        """
        if self._depth or (self._thread or threading.get_ident()) != threading.get_ident():
            # Within a step, or a loop in another thread: not ours to measure.
            yield
            return
        self._thread = threading.get_ident()
        self._depth += 1
        try:
            self._begin()
            begun, compiles = time.perf_counter(), self._compiles
            with self._compiling():
                yield
            self._synchronize()
            self._end(time.perf_counter() - begun, compiling=self._compiles > compiles)
        finally:
            self._depth -= 1

    def wrap(self, step: Callable[P, R]) -> Callable[P, R]:
        """Returns the function that runs a whole optimizer step, as within `auto.step()`."""

        def stepping(*args: P.args, **kwargs: P.kwargs) -> R:
            with self.step():
                return step(*args, **kwargs)

        return stepping

    def report(self) -> str:
        """Returns in some sentences what was done, why, and what it has saved so far."""
        policy = self._policy
        if policy is None or policy.eager_step_s is None:
            return "AutoCompile is still looking at eager steps."
        lines = [f"AutoCompile after {policy.done} steps: {self._doing(policy)}."]
        if policy.cold_s:
            lines.append(f"Compiling has taken {duration(policy.cold_s)}.")
        if policy.stage is Stage.SETTLED and policy.cold_s:
            word = "saved" if policy.saved_s >= 0 else "lost"
            lines.append(f"{duration(abs(policy.saved_s))} were {word} against eager steps so far.")
        if self._failure:
            lines.append(self._failure)
        return " ".join(lines)

    def close(self) -> None:
        """Leaves the model eager, as if it had never been compiled."""
        if self._flip is not None:
            self._flip.to_eager()
        if self._policy is not None:
            self._policy.gives_up("closed")

    def _doing(self, policy: LoopPolicy) -> str:
        at = duration(policy.eager_step_s or 0.0)
        if policy.stage is Stage.SETTLED:
            arm = f"compiled ({config_name(self._config)})" if self.compiled else "eager"
            return f"it stays {arm}, an eager step takes {at}: {policy.reason}"
        doing = {
            Stage.LOOK: "it runs eager and waits",
            Stage.COLD: f"it compiles {config_name(self._config)}",
            Stage.MEASURE: "compiled and eager steps take turns",
        }
        return doing[policy.stage]

    # --- one step

    def _begin(self) -> None:
        if self._policy is None:
            believe = self._given_beliefs or beliefs_of(self._model, self._device, self._config)
            self._policy = LoopPolicy(self._steps, believe)
        wanted = self._policy.arm is Arm.COMPILED
        if wanted and self._flip is None:
            self._compile()
        elif self._flip is not None and self._flip.compiled != wanted:
            (self._flip.to_compiled if wanted else self._flip.to_eager)()

    def _compile(self) -> None:
        try:
            modules = targets(self._model, self._config, repeated_blocks(self._model))
            self._flip = Flip(modules, self._config, self._guarded)
            self._flip.apply()
        except Exception as error:  # noqa: BLE001 - the training goes on
            self._give_up("compiling could not begin", error)

    def _end(self, took_s: float, *, compiling: bool) -> None:
        policy = self._policy
        assert policy is not None
        if policy.stage is Stage.LOOK and self._plan is not None and self._plan.steps is None:
            # A plan in hours is one of steps once a step's time is known.
            policy.plan_steps(self._plan.steps_planned(max(took_s, 1e-9)))
        policy.took(took_s, compiling=compiling)
        if self._flip is not None and policy.stage is Stage.SETTLED and policy.reason != self._told:
            self._told = policy.reason
            log.info("AutoCompile: %s", self._doing(policy))
            if policy.arm is Arm.EAGER:
                self._flip.to_eager()

    def _synchronize(self) -> None:
        """Waits for the device as long as steps are measured, and never after that."""
        if self.stage is not Stage.SETTLED and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _compiling(self) -> contextlib.AbstractContextManager[None]:
        """Has backward graphs compiled in the forward, where a failure loses nothing."""
        if not self.compiled:
            return contextlib.nullcontext()
        return torch_internals.backward_compiled_at_once()

    def _on_compile(self, _: str) -> None:
        self._compiles += 1

    # --- what goes wrong

    def _guarded(self, compiled: Callable[..., Any], eager: Callable[..., Any]) -> Any:
        """Returns the compiled call, which runs eager instead when it fails."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled() and not self._depth:
                # An evaluation: it would compile anew, and nobody measures what that brings.
                return eager(*args, **kwargs)
            state = torch.get_rng_state()
            try:
                return compiled(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - if it is the model's own, eager raises it
                torch.set_rng_state(state)
                result = eager(*args, **kwargs)
                self._give_up("the compiled step failed", error)
                return result

        return call

    def _give_up(self, what: str, error: BaseException) -> None:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        self._failure = f"{what}, so the training went on eager: {first[:300]}"
        log.warning("AutoCompile: %s", self._failure)
        if self._policy is not None:
            self._policy.gives_up(self._failure)
        if self._flip is not None:
            self._flip.to_eager()
