"""Watches the training of a script that nobody changed, and has it compile if that pays.

Optimizers tell when a step ends (torch's global hooks of optimizer steps), modules tell during the
first steps which of them is the model (global hooks of forwards, which are then taken away again),
and `AutoCompile` does the rest. Where the loop cannot be made out, that is said in one sentence and
the training goes on as it is. Runs in the person's own process: nothing that goes wrong in it is
their concern.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics as stdlib
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from advisor.injection import when_imported
from advisor.loop_entry import Entry
from advisor.loop_facts import (
    COMPILES_ITSELF,
    compiles_itself,
    facts_of,
    stranger_to,
    to_compile,
)
from advisor.loop_finder import CannotTell, Found, LoopFinder, names_of
from advisor.loop_voice import Voice
from advisor.models.loop_policy import LoopOutcome, Stage
from advisor.profiler import torch_internals
from advisor.profiler.units import count, duration, number_of, ratio
from advisor.watch_settings import TOP, Watched, WatchSettings, write

if TYPE_CHECKING:
    from advisor.autocompile import AutoCompile

# A result is written so often while it changes.
_WRITE_S = 1.0
_WAITS_KEPT = 200
_EXTRA_CALL = "Using `torch.compile\\(module\\)` when there are global hooks"


class LoopWatch:
    """Watches the process that it is made in, until its training is settled or it steps aside."""

    def __init__(self, settings: WatchSettings) -> None:
        self._settings = settings
        self._pid = os.getpid()
        self._voice = Voice()
        self._finder: LoopFinder | None = LoopFinder()
        self._found: Found | None = None
        self._auto: AutoCompile | None = None
        self._entry: Entry | None = None
        self._endings: list[Callable[[], object]] = []
        self._watched = Watched(config=settings.config)
        self._steps = 0
        # Within a step, from its first forward on; before the first border nothing is.
        self._open, self._at_border = False, False
        self._called_since, self._ends = True, 0
        self._forwards = 0
        self._border_s = 0.0
        self._waits: deque[float] = deque(maxlen=_WAITS_KEPT)
        # Whether it was last said to run compiled.
        self._told: bool | None = None
        self._claimed = False
        self._written_s = 0.0

    def start(self) -> None:
        """Begins to look at modules and optimizers."""
        hook = torch.nn.modules.module.register_module_forward_pre_hook(self._on_forward)
        self._endings.append(hook.remove)
        hooks = torch_internals.on_optimizer_step(_nothing, self._after_optimizer)
        self._endings += [handle.remove for handle in hooks]
        # torch warns of hooks that the person knows nothing about.
        warnings.filterwarnings("ignore", message=_EXTRA_CALL)
        when_imported("torch._dynamo", self._listen_to_compiles)

    # --- looking for the loop

    def _on_forward(self, module: torch.nn.Module, _: object) -> None:
        if torch.compiler.is_compiling() or self._finder is None:
            return
        try:
            if compiles_itself(module):
                self._step_aside(COMPILES_ITSELF)
            elif torch.is_grad_enabled():
                answer = self._finder.called(module)
                if isinstance(answer, Found):
                    self._begin(answer)
                elif isinstance(answer, CannotTell):
                    self._step_aside(answer.why)
        except Exception as error:  # noqa: BLE001 - the training goes on
            self._failed(error)

    def _listen_to_compiles(self) -> None:
        if self._finder is not None:
            with contextlib.suppress(Exception):
                self._endings.append(torch_internals.on_compile_start(self._on_compile))

    def _on_compile(self, _: str) -> None:
        if self._finder is not None:
            self._step_aside(COMPILES_ITSELF)

    def _begin(self, found: Found) -> None:
        self._end_looking()
        why = next(filter(None, map(stranger_to, found.root.modules())), "")
        if why:
            self._step_aside(why)
            return
        if not self._claims() and self._settings.measure and self._voice.speaks:
            self._step_aside("another process of the script is being measured")
            return
        # Only here: most processes that import torch train nothing.
        from advisor.autocompile import AutoCompile
        from advisor.profiler.machine import environment

        inner = to_compile(found.root)
        self._auto = AutoCompile(
            inner,
            plan=self._settings.plan,
            config=self._settings.config,
            always_try=self._settings.measure,
        )
        self._found = found
        self._entry = Entry(found.root, self._on_call)
        hooks = torch_internals.on_optimizer_step(_nothing, self._after_optimizer)
        self._endings = [handle.remove for handle in hooks]
        device = next((p.device for p in inner.parameters()), torch.device("cpu"))
        self._watched = Watched(
            config=self._settings.config,
            forwards=found.forwards,
            ranks=self._voice.ranks,
            facts=facts_of(inner, found.optimizers),
            environment=environment(device),
        )

    # --- the steps of the loop

    def _after_optimizer(self, optimizer: Any, *_: object) -> None:
        self._steps += 1
        if self._finder is not None:
            if self._steps == 1 and not self._is_top:
                self._settings.stepped()
            self._finder.stepped(optimizer)
            if self._settings.measure and self._claims():
                self._write(settled=False, now=False)
            return
        try:
            self._on_step(optimizer)
        except Exception as error:  # noqa: BLE001 - the training goes on
            self._failed(error)

    def _on_step(self, optimizer: Any) -> None:
        found = self._found
        if found is None:
            return
        known = any(optimizer is each for each in found.optimizers)
        if not known and not self._watched.problem:
            self._step_aside(
                f"after {number_of(self._steps - 1, 'optimizer step')} another optimizer"
                f" ({names_of([optimizer])}) began to step"
            )
        elif optimizer is found.last and self._called_since:
            # One that calls its parent class's step is told twice.
            self._called_since = False
            self._ends += 1
            if self._ends % found.times == 0:
                self._border()

    def _border(self) -> None:
        self._at_border = True
        if self._open:
            self._end_step()
        self._border_s = time.perf_counter()

    def _end_step(self) -> None:
        assert self._auto is not None
        self._open = False
        self._auto.end_step()
        if self._entry is not None:
            self._entry.stay()
        self._after_step()

    def _on_call(self) -> None:
        """The model is called with gradients."""
        try:
            self._called()
        except Exception as error:  # noqa: BLE001 - the training goes on
            self._failed(error)

    def _called(self) -> None:
        found, auto = self._found, self._auto
        self._called_since = True
        if found is None or auto is None or not self._at_border:
            return
        if found.in_training and not found.root.training:
            return
        if self._open and self._forwards == found.forwards:
            # More forwards than a step has: a gradient scaler has skipped its optimizer.
            self._border()
        if not self._open and self._auto is not None:
            self._open, self._forwards = True, 0
            self._waits.append(time.perf_counter() - self._border_s)
            self._auto.begin_step()
        self._forwards += 1

    def _after_step(self) -> None:
        auto = self._auto
        assert auto is not None
        self._tell_of(auto)
        settled = auto.stage is Stage.SETTLED
        if self._settings.measure:
            until_s = self._settings.until_s
            over = until_s is not None and time.time() > until_s
            self._write(settled=settled, now=settled or over)
            if settled or over:
                self._end_watching()
                raise SystemExit(0)
        elif auto.final and not auto.compiled and self._voice.ranks == 1:
            # Other ranks would wait for this one.
            self._end_watching()

    def _tell_of(self, auto: AutoCompile) -> None:
        if auto.stage is not Stage.SETTLED or auto.compiled == self._told or self._watched.problem:
            return
        self._told = auto.compiled
        outcome = auto.outcome()
        if self._settings.measure or outcome.failure:
            # What failed has been said by the voice already.
            return
        arm = "runs compiled" if auto.compiled else "stays eager"
        self._voice.say(
            f"from step {count(self._steps)} on the training {arm}: {_one_sentence(outcome.reason)}"
        )

    # --- the end

    def _step_aside(self, why: str) -> None:
        said, self._watched = bool(self._watched.problem), replace(self._watched, problem=why)
        self._claims()
        self._write(settled=True, now=True)
        if not self._settings.measure and not said:
            self._voice.say(f"the training goes on as it is: {why}")
        if self._auto is not None and self._voice.ranks > 1:
            # Other ranks wait for what this one says of its steps: it says that it gave up.
            self._auto.close()
        else:
            self._end_watching()

    def _failed(self, error: Exception) -> None:
        if os.environ.get("ADVISOR_DEBUG"):
            raise error
        text = str(error).strip().splitlines()
        what = f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__
        try:
            self._step_aside(f"watching it failed ({what})")
        except Exception:  # noqa: BLE001 - the training goes on
            self._end_watching()

    def _end_looking(self) -> None:
        self._finder = None
        while self._endings:
            self._endings.pop()()

    def _end_watching(self) -> None:
        """Leaves the script as if nobody had ever watched it."""
        self._end_looking()
        entry, auto = self._entry, self._auto
        self._watched = self._seen()
        self._entry, self._auto, self._found = None, None, None
        if auto is not None:
            auto.close()
        if entry is not None:
            entry.remove()

    def at_exit(self) -> None:
        """Says how it went, as far as it was not said."""
        if os.getpid() != self._pid:
            # A copy of the process that was watched.
            return
        if self._steps:
            self._claims()
        self._write(settled=self._watched.settled, now=True)
        if self._settings.measure:
            return
        sentence = self._last_words()
        if sentence:
            self._voice.say(sentence)
        if self._is_top:
            shutil.rmtree(self._settings.folder, ignore_errors=True)

    def _last_words(self) -> str:
        if self._finder is not None:
            if self._steps:
                steps = number_of(self._steps, "optimizer step")
                return f"the training ended after {steps}, too few to look at"
            if self._is_top and not self._settings.any_stepped:
                return "no optimizer of torch has stepped, so there was nothing to compile"
            return ""
        auto = self._auto
        if auto is None or self._watched.problem:
            return ""
        outcome = auto.outcome()
        if auto.stage is not Stage.SETTLED and outcome.speedup is None:
            return (
                f"the training ended after {number_of(self._steps, 'optimizer step')}, before it"
                f" was clear whether compiling pays"
            )
        return _saved(outcome) if auto.compiled else ""

    @property
    def _is_top(self) -> bool:
        return os.environ.get(TOP) == str(self._pid)

    def _claims(self) -> bool:
        """Returns whether the result is this process's to write."""
        self._claimed = self._claimed or (self._voice.speaks and self._settings.claim())
        return self._claimed

    def _seen(self) -> Watched:
        graphs = self._watched.graphs
        if "torch._dynamo" in sys.modules:
            graphs = torch_internals.counters().get("stats", {}).get("unique_graphs", 0)
        return replace(
            self._watched,
            outcome=self._auto.outcome() if self._auto is not None else self._watched.outcome,
            optimizer_steps=self._steps,
            wait_s=stdlib.median(self._waits) if self._waits else None,
            graphs=graphs,
        )

    def _write(self, *, settled: bool, now: bool) -> None:
        if not self._claimed or os.getpid() != self._pid:
            return
        if not now and time.perf_counter() - self._written_s < _WRITE_S:
            return
        self._written_s = time.perf_counter()
        self._watched = replace(self._seen(), settled=settled)
        try:
            write(self._settings.result, self._watched)
        except OSError as error:
            self._claimed = False
            self._voice.say(f"{self._settings.result} cannot be written: {error.strerror}")


def _saved(outcome: LoopOutcome) -> str:
    speed = f" ({ratio(outcome.speedup)})" if outcome.speedup else ""
    word = "saved" if outcome.saved_s >= 0 else "lost"
    return (
        f"compiled steps{speed} have {word} {duration(abs(outcome.saved_s))} against eager ones in"
        f" {number_of(outcome.steps_done, 'step')}, the {duration(outcome.compile_s)} of compiling"
        " counted"
    )


def _one_sentence(text: str) -> str:
    return text.strip().rstrip(".")


def _nothing(*_: object) -> None:
    pass
