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
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import ParamSpec, TypeVar

import torch

from advisor.autocompile_beliefs import beliefs_of
from advisor.loop_deadline import Overdue
from advisor.loop_guard import Guard, Moment, Seldom
from advisor.loop_ranks import Ranks, Said
from advisor.models.loop_policy import AGREE_STEPS, Arm, Believe, LoopOutcome, LoopPolicy, Stage
from advisor.models.plan import Plan
from advisor.profiler import torch_internals
from advisor.profiler.blocks import repeated_blocks
from advisor.profiler.errors import PlanError
from advisor.profiler.flip import Flip, targets
from advisor.profiler.options import applied, check_options
from advisor.profiler.records import Config
from advisor.profiler.units import config_name, duration

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

# A compile is given what it could save at best, but never less and never more than this.
_LEAST_LIMIT_S, _MOST_LIMIT_S = 10.0, 1800.0


class _NotFinite(BaseException):
    """Ends a wrapped step whose compiled gradients are not finite, before the optimizer takes them.

    No `Exception`, which a person's own step may catch.
    """


@dataclass(slots=True)
class _Step:
    """The step that is running."""

    begun_s: float
    compiles: int
    contexts: contextlib.ExitStack
    # Whether it can be run again, as within `wrap`, and whether an optimizer has taken its step.
    wrapped: bool = False
    optimized: bool = False
    # Whether it runs again, eager, and whether its gradients were finite then.
    again: bool = False
    eager_finite: bool | None = None


class AutoCompile:
    """Compiles a model in place while it trains, if that pays; see the module.

    Compiled steps that fail run eager instead: a forward always, with `wrap` also a backward, as
    long as the step takes its gradients from none (`zero_grad` before the forward) and no optimizer
    has stepped. With several ranks each makes its own, and all choose alike.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        steps: float | None = None,
        plan: Plan | None = None,
        config: Config | None = None,
        believe: Believe | None = None,
        always_try: bool = False,
        compile_limit_s: float | None = None,
    ) -> None:
        """Takes the model that is called in the loop, moved to its device.

        `steps` or `plan` says how long the training is; without either it tries once the training
        has gone on for long. `always_try` compiles and measures whatever is believed. A compile
        that takes longer than `compile_limit_s` is broken off (absent: what it could save at best).
        Raises `PlanError` for a plan that makes no sense, an option that this torch does not have,
        or a model that is compiled already.
        """
        if torch_internals.compiled_call(model) is not None:
            raise PlanError(
                "the model is compiled already", mend="give AutoCompile the model as it was built"
            )
        if plan is not None:
            plan.validate()
        elif steps is not None:
            Plan(steps=steps).validate()
        self._model = model
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._config = config or Config()
        check_options(self._config)
        self._steps = plan.steps_planned if plan is not None else steps
        self._believe, self._always_try, self._limit_s = believe, always_try, compile_limit_s
        self._guard = Guard(model, self._device, self._give_up)
        self._policy: LoopPolicy | None = None
        self._ranks: Ranks | None = None
        self._flip: Flip | None = None
        self._running: _Step | None = None
        self._compiles, self._depth = 0, 0
        self._thread: int | None = None
        self._told, self._failure = "", ""
        self._gave_up = False
        self._gradients = Seldom()
        # Whether all ranks have settled, as far as they have told each other.
        self._all_settled = False
        # Nothing is left to do: eager for good, and alone.
        self._idle = False
        self._endings: list[Callable[[], object]] = []

    @property
    def stage(self) -> Stage:
        """What it is doing beside training."""
        return self._policy.stage if self._policy is not None else Stage.LOOK

    @property
    def compiled(self) -> bool:
        """Whether the next step runs compiled."""
        return self._flip is not None and self._flip.compiled

    @property
    def final(self) -> bool:
        """Whether that is settled for good: what was measured early is looked at again later."""
        return self._policy is not None and self._policy.final

    @property
    def config(self) -> Config:
        """What it compiles with."""
        return self._config

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Surrounds one optimizer step, from the forward to the optimizer.

        What is raised inside goes through; a compiled forward that fails runs eager instead.
        """
        self.begin_step()
        try:
            yield
        except BaseException as error:
            self.end_step(error)
            raise
        self.end_step()

    def begin_step(self) -> None:
        """Begins a step, for those who see its borders only; `end_step` must follow.

        Within a step, and in another thread than the first that stepped, it does nothing.
        """
        if not self._ours():
            return
        self._depth += 1
        if self._depth > 1 or self._idle:
            return
        self._prepare()
        contexts = contextlib.ExitStack()
        if self.compiled and self.stage is not Stage.SETTLED:
            # A failure in a backward graph is met while it can be made good: in the forward.
            contexts.enter_context(torch_internals.backward_compiled_at_once())
        self._guard.in_step, self._guard.began_clear = True, None
        self._running = _Step(time.perf_counter(), self._compiles, contexts)

    def end_step(self, error: BaseException | None = None) -> None:
        """Ends a step; one that has raised `error` counts for nothing."""
        if not self._ours() or not self._depth:
            return
        self._depth -= 1
        running = self._running
        if self._idle and not self._depth and self._policy is not None:
            self._policy.done += 1
        if self._depth or running is None:
            return
        self._running = None
        self._guard.in_step = self._guard.asks_clear = False
        running.contexts.close()
        if error is None:
            self._synchronize()
            took_s = time.perf_counter() - running.begun_s
            self._take(took_s, compiling=self._compiles > running.compiles)

    def wrap(self, step: Callable[P, R]) -> Callable[P, R]:
        """Returns the function that runs a whole optimizer step, as within `auto.step()`.

        A compiled step whose backward fails, or gives gradients that are not finite, runs again
        eager: `step` must be given its batch, not fetch it.
        """

        def stepping(*args: P.args, **kwargs: P.kwargs) -> R:
            with self.step():
                running = self._running
                if not self.compiled or running is None or self._depth > 1:
                    return step(*args, **kwargs)
                running.wrapped = self._guard.asks_clear = True
                before = self._guard.moment()
                try:
                    return step(*args, **kwargs)
                except (Exception, _NotFinite) as error:
                    if not self._can_run_again(error):
                        raise
                    failed = error if isinstance(error, Exception) else None
                if failed is not None:
                    failed.__traceback__ = None
                return self._again(lambda: step(*args, **kwargs), before, failed)

        return stepping

    def report(self) -> str:
        """Returns in some sentences what was done, why, and what it has saved so far."""
        policy = self._policy
        if policy is None or policy.eager_step_s is None:
            return "AutoCompile is still looking at eager steps."
        lines = [f"AutoCompile after {policy.done} steps: {self._doing(policy)}."]
        if policy.cold_s:
            lines.append(f"Compiling has taken {duration(policy.cold_s)}.")
        if (policy.speedup or policy.stage is Stage.SETTLED) and policy.cold_s:
            word = "saved" if policy.saved_s >= 0 else "lost"
            lines.append(f"{duration(abs(policy.saved_s))} were {word} against eager steps so far.")
        if self._failure and self._failure not in lines[0]:
            lines.append(f"{self._failure}.")
        return " ".join(lines)

    def outcome(self) -> LoopOutcome:
        """Returns what was done so far, and found."""
        if self._policy is None:
            return LoopOutcome()
        return replace(self._policy.outcome, failure=self._failure)

    def close(self) -> None:
        """Leaves the model eager, as if it had never been compiled."""
        if self._flip is not None:
            self._flip.to_eager()
        if self._policy is not None:
            self._policy.gives_up("closed")
        self._end_watching()

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

    def _ours(self) -> bool:
        """Returns whether this thread is the one that trains: the first that has stepped."""
        if self._thread is None:
            self._thread = threading.get_ident()
        return self._thread == threading.get_ident()

    def _prepare(self) -> None:
        if self._policy is None:
            self._ranks = Ranks.here(self._device)
            believe = self._believe or beliefs_of(self._model, self._device, self._config)
            if self._ranks is not None:
                believe = self._ranks.believing(believe)
            self._policy = LoopPolicy(self._steps, believe, always_try=self._always_try)
        policy = self._policy
        if policy.stage is Stage.LOOK:
            self._guard.changing.begin()
        wanted = policy.arm is Arm.COMPILED
        if wanted and self._flip is None:
            self._compile()
        elif self._flip is not None and self._flip.compiled != wanted:
            (self._flip.to_compiled if wanted else self._flip.to_eager)()
        if self.compiled and policy.stage is not Stage.SETTLED:
            most_s = min(max(policy.most_saved_s, _LEAST_LIMIT_S), _MOST_LIMIT_S)
            limit_s = most_s if self._limit_s is None else self._limit_s
            self._guard.limit_s = max(0.0, limit_s - policy.cold_s)

    def _compile(self) -> None:
        policy = self._policy
        assert policy is not None
        self._guard.step_s = policy.eager_step_s or 0.0
        self._endings.append(torch_internals.on_compile_start(self._on_compile))
        settings = contextlib.ExitStack()
        self._endings.append(settings.close)
        try:
            settings.enter_context(applied(self._config.options))
            modules = targets(self._model, self._config, repeated_blocks(self._model))
            self._flip = Flip(modules, self._config, self._guard.guarded)
            self._flip.apply()
        except Exception as error:  # noqa: BLE001 - the training goes on
            self._give_up("compiling could not begin", error)
            return
        handles = torch_internals.on_optimizer_step(self._before_optimizer, _nothing)
        self._endings += [handle.remove for handle in handles]

    def _take(self, took_s: float, *, compiling: bool) -> None:
        policy = self._policy
        assert policy is not None
        if policy.stage is Stage.LOOK:
            self._guard.changing.end()
        said = self._agreed(Said(took_s, compiling, self._gave_up))
        policy.took(said.took_s, compiling=said.compiling)
        self._all_settled = policy.stage is Stage.SETTLED
        eager = policy.final and policy.arm is Arm.EAGER
        self._idle = eager and self._ranks is None
        if not self._all_settled or self._flip is None:
            return
        if policy.reason != self._told:
            self._told = policy.reason
            log.info("AutoCompile: %s", self._doing(policy))
        if eager and (self.compiled or self._endings):
            self._flip.to_eager()
            self._end_watching()

    def _agreed(self, said: Said) -> Said:
        """Returns what a step was on the rank on which it was worst, as often as that matters."""
        policy = self._policy
        assert policy is not None
        if self._ranks is None or (self._all_settled and policy.done % AGREE_STEPS):
            return said
        eager = policy.final and policy.arm is Arm.EAGER
        worst = self._ranks.worst(replace(said, failed=said.failed or eager))
        if worst.failed and not self._gave_up and not eager:
            self._give_up("another rank has gone back to eager", None)
        return worst

    def _end_watching(self) -> None:
        while self._endings:
            self._endings.pop()()

    def _synchronize(self) -> None:
        """Waits for the device as long as steps are measured, and never after that."""
        if self.stage is not Stage.SETTLED and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _on_compile(self, _: str) -> None:
        self._compiles += 1
        self._guard.compiling()

    # --- what goes wrong

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Looks at the gradients before an optimizer takes them."""
        running = self._running
        if running is None:
            return
        if running.again and running.eager_finite is None:
            running.eager_finite = self._finite()
        elif self.compiled and self._gradients.due() and not _scaled(optimizer):
            begun = time.perf_counter()
            finite = self._finite()
            self._gradients.took(time.perf_counter() - begun, self._guard.step_s)
            if not finite:
                self._not_finite(running)
        running.optimized = True

    def _not_finite(self, running: _Step) -> None:
        if running.wrapped and self._guard.began_clear and not running.optimized:
            raise _NotFinite
        for parameter in self._model.parameters():
            parameter.grad = None
        self._give_up(
            "compiled gradients were NaN or infinite, so this step left the weights as they were",
            None,
        )

    def _finite(self) -> bool:
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        return math.isfinite(torch_internals.largest(gradients))

    def _can_run_again(self, error: BaseException) -> bool:
        """Returns whether a wrapped step is as good as not begun, and failed by being compiled."""
        running = self._running
        if running is None or running.optimized or not self._guard.began_clear:
            return False
        compiler = torch_internals.in_compiled_code(error)
        memory = torch_internals.is_out_of_memory(error)
        return isinstance(error, (_NotFinite, Overdue)) or compiler or memory

    def _again(self, step: Callable[[], R], before: Moment, error: Exception | None) -> R:
        assert self._flip is not None
        assert self._running is not None
        running = self._running
        self._flip.to_eager()
        for parameter in self._model.parameters():
            parameter.grad = None
        self._guard.back_to(before)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        running.again = True
        result = step()
        if error is not None:
            self._give_up("the compiled backward failed", error)
        elif running.eager_finite:
            self._give_up("compiled gradients were NaN or infinite where eager ones are not", None)
        else:
            log.warning("AutoCompile: gradients are NaN or infinite, eager as well as compiled")
            self._gradients.never()
        return result

    def _give_up(self, what: str, error: BaseException | None) -> None:
        self._gave_up = True
        because = ""
        if error is not None:
            text = str(error).strip()
            because = f": {(text.splitlines()[0] if text else type(error).__name__)[:300]}"
        self._failure = f"{what}, and the training went on eager{because}"
        log.warning("AutoCompile: %s", self._failure)
        if self._policy is not None:
            self._policy.gives_up(self._failure)
        if self._flip is not None:
            self._flip.to_eager()


def _scaled(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether a gradient scaler lets this optimizer see gradients that overflow."""
    return getattr(optimizer, "found_inf", None) is not None


def _nothing(*_: object) -> None:
    pass
