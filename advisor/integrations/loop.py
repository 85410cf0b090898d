"""What every trainer's plug-in does between the borders of steps that its trainer tells it."""

from __future__ import annotations

import enum
import logging
import statistics as stdlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from advisor import prior_store
from advisor.autocompile import AutoCompile
from advisor.integrations import before, called
from advisor.models.loop_policy import Believe, LoopOutcome, Stage
from advisor.profiler.errors import AdvisorError, PlanError
from advisor.profiler.records import Advice, Config
from advisor.profiler.units import config_name, duration, number_of

log = logging.getLogger(__name__)

# For an estimate: steps that are timed, and those before them, which touch all for the first time.
_TIMED_STEPS, _FIRST_TOUCH_STEPS = 6, 2


class Within(enum.StrEnum):
    """How a training comes to its decision.

    `AUTO`: it compiles and measures while it trains. `ESTIMATE`: the cost model says after some
    steps whether and how to compile. `CAMPAIGN`: trials of a workload come before the first step.
    """

    AUTO = "auto"
    ESTIMATE = "estimate"
    CAMPAIGN = "campaign"


class _BrokenOff(Exception):
    """Ends a step of which the rest was never seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What a person wants of a plug-in; checked when made (`PlanError`).

    `config` is the only one to consider (None: the whole model in mode default, and for the other
    two ways all that suit the device). `workload` names the training for trials.
    """

    within: Within
    config: Config | None = None
    workload: str | None = None
    budget_s: float | None = None
    believe: Believe | None = None
    always_try: bool = False

    @classmethod
    def of(
        cls,
        within: str | None,
        config: Config | None,
        workload: str | None,
        budget_s: float | None,
        believe: Believe | None,
        always_try: bool,
    ) -> Wishes:
        """Returns checked wishes; `within` None is a campaign where a workload is named."""
        usual = Within.AUTO if workload is None else Within.CAMPAIGN
        names = ", ".join(Within)
        try:
            way = usual if within is None else Within(within)
        except ValueError as error:
            raise PlanError(f"within={within!r} is unknown", mend=f"one of {names}") from error
        if (way is Within.CAMPAIGN) != (workload is not None):
            raise PlanError(
                f"within={way.value!r} with workload={workload!r}",
                "trials build the training anew from a workload, and nothing else needs one",
                "give workload='train.py:build' for a campaign, or leave it out",
            )
        return cls(
            within=way,
            config=config,
            workload=workload,
            budget_s=budget_s,
            believe=believe,
            always_try=always_try,
        )


class TrainerLoop:
    """One plug-in's training at a time: decides, counts its steps, and tells the end.

    Whatever goes wrong on our side, the training goes on as it would have without.
    """

    def __init__(self, wishes: Wishes, tell: Callable[[str], object]) -> None:
        """`tell` is given each sentence for the person, on the first rank."""
        self._wishes = wishes
        self._tell = tell
        self._loud = True
        self._told = ""
        self._model: torch.nn.Module | None = None
        self._steps: float | None = None
        self._autocast = ""
        self._auto: AutoCompile | None = None
        self._timed: list[float] | None = None
        self._begun_s: float | None = None
        self._report = "The training has not begun."
        self._outcome = LoopOutcome()
        self.advice: Advice | None = None

    @property
    def auto(self) -> AutoCompile | None:
        """What measures while training; None before a decision, and where it stays eager."""
        return self._auto

    def begin(
        self,
        model: torch.nn.Module,
        steps: float | None,
        *,
        ranks: int = 1,
        loud: bool = True,
        autocast: str = "",
    ) -> None:
        """Begins a training that has `steps` left (None: nobody knows), with the model it calls.

        `ranks` is how many processes train it together, `loud` whether this one may speak.
        """
        self.drop()
        self._model, self._steps, self._loud, self._autocast = model, steps, loud, autocast
        self._outcome, self.advice, self._told = LoopOutcome(), None, ""
        if steps is not None and steps < 1:
            self._report = "AutoCompile: no step of this training is left."
            return
        try:
            self._decide(model, steps, ranks)
        except AdvisorError as error:
            self.stand_aside(str(error))

    @property
    def stepping(self) -> bool:
        """Whether a step is running."""
        return self._begun_s is not None

    def begin_step(self) -> None:
        """Begins an optimizer step, unless one is running."""
        if self._begun_s is not None:
            return
        self._begun_s = time.perf_counter()
        if self._auto is not None:
            self._auto.begin_step()

    def end_step(self, error: BaseException | None = None) -> None:
        """Ends an optimizer step; one that raised `error` counts for nothing."""
        begun_s, self._begun_s = self._begun_s, None
        if begun_s is None:
            return
        if self._auto is not None:
            self._auto.end_step(error)
        elif self._timed is not None and error is None:
            self._synchronize()
            self._look(self._timed, time.perf_counter() - begun_s)

    def drop_step(self) -> None:
        """Ends a step within which something else is done, which is not to be measured."""
        self.end_step(_BrokenOff())

    def end(self) -> None:
        """Ends the training: tells what was done, and leaves the model as it was built."""
        if self._auto is not None:
            self._outcome, self._report = self._auto.outcome(), self._said(self._auto)
            if self._outcome.eager_step_s is None:
                steps = number_of(self._outcome.steps_done, "step")
                self._report = f"AutoCompile: {steps} were too few to decide; 0 s were saved."
        elif self._timed is not None:
            self._report = "AutoCompile: the training ended before there was an estimate."
        self.drop()
        self._say(self._report)

    def drop(self) -> None:
        """Leaves a training that will not go on, and its model as it was built; says nothing."""
        self.drop_step()
        auto, self._auto, self._timed = self._auto, None, None
        if auto is not None:
            auto.close()

    def stand_aside(self, why: str) -> None:
        """Leaves this training alone, for a reason that is said at once."""
        self.drop()
        self._report = f"AutoCompile stands aside, and the training runs as it is: {why}."
        self._outcome = LoopOutcome(stage=Stage.SETTLED, reason=self._report)
        if self._loud:
            log.warning("%s", self._report)

    def report(self) -> str:
        """Returns in some sentences what was done, why, and what it has saved."""
        return self._report if self._auto is None else self._said(self._auto)

    def outcome(self) -> LoopOutcome:
        """Returns the same as numbers."""
        return self._outcome if self._auto is None else self._auto.outcome()

    # --- deciding

    def _decide(self, model: torch.nn.Module, steps: float | None, ranks: int) -> None:
        why = called.why_not(model)
        if why:
            raise PlanError(
                "the model cannot be compiled in place", why, "give it as it was built, eager"
            )
        within = self._wishes.within
        if within is Within.AUTO:
            self._compile_by(self._wishes.config, sure=self._wishes.always_try)
            return
        if ranks > 1:
            raise PlanError(
                f"within={within.value!r} is for one process, and {ranks} train this model",
                mend="decide before, with `advise run`, and give config=advice.config",
            )
        if steps is None:
            raise PlanError(
                f"within={within.value!r} needs the number of steps",
                mend="give the trainer a number of steps or epochs",
            )
        if within is Within.CAMPAIGN:
            self._run_campaign(model, steps)
        else:
            # What has to be fitted is fitted before the first step.
            prior_store.load()
            self._timed = []

    def _compile_by(self, config: Config | None, *, sure: bool) -> None:
        """Hands the rest of the training to AutoCompile; `sure`: whatever is believed."""
        assert self._model is not None
        self._auto = AutoCompile(
            self._model,
            steps=self._steps,
            config=config,
            believe=self._wishes.believe,
            always_try=sure,
        )

    def _run_campaign(self, model: torch.nn.Module, steps: float) -> None:
        workload = self._wishes.workload
        assert workload is not None
        self._say(f"AutoCompile runs trials of {workload} before the first step.")
        device = next(model.parameters()).device
        self.advice = advice = before.campaigned(
            workload, device=device, steps=steps, budget_s=self._wishes.budget_s
        )
        why = _clause(advice.reasons[0]) if advice.reasons else ""
        if not advice.enable or advice.config is None:
            self._stay_eager(f"The trials say to stay eager: {why}.")
            return
        self._say(f"The trials say to compile ({config_name(advice.config)}): {why}.")
        before.cache_taken_over(advice, self._say)
        self._compile_by(advice.config, sure=True)

    def _look(self, timed: list[float], took_s: float) -> None:
        timed.append(took_s)
        if len(timed) < _FIRST_TOUCH_STEPS + _TIMED_STEPS or self._model is None:
            return
        self._timed = None
        assert self._steps is not None
        self._steps = max(1.0, self._steps - len(timed))
        step_s = stdlib.median(timed[_FIRST_TOUCH_STEPS:])
        try:
            found = before.estimated(
                self._model,
                steps=self._steps,
                step_s=step_s,
                config=self._wishes.config,
                autocast=self._autocast,
            )
        except AdvisorError as error:
            self.stand_aside(str(error))
            return
        why = "; ".join(found.reasons)
        if found.enable:
            self._say(f"The cost model says to compile: {why}.")
            self._compile_by(found.config, sure=True)
        else:
            self._stay_eager(f"The cost model says to stay eager: {why}.")

    def _stay_eager(self, sentence: str) -> None:
        self._report = sentence
        self._outcome = LoopOutcome(stage=Stage.SETTLED, reason=sentence)
        self._say(sentence)

    def _synchronize(self) -> None:
        assert self._model is not None
        device = next(self._model.parameters()).device
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    # --- telling

    def _said(self, auto: AutoCompile) -> str:
        """Returns AutoCompile's report, and what was saved where that leaves it out."""
        outcome, report = auto.outcome(), auto.report()
        if not outcome.compile_s:
            return f"{report} Nothing was compiled, and 0 s were saved."
        if outcome.speedup or outcome.stage is Stage.SETTLED:
            return report
        return (
            f"{report} {duration(outcome.compile_s)} were lost to it so far, and nothing saved yet."
        )

    def _say(self, sentence: str) -> None:
        """Tells a sentence; not one that was told last, as when a training ends as it began."""
        if self._loud and sentence != self._told:
            self._told = sentence
            self._tell(sentence)


def _clause(sentence: str) -> str:
    """Returns a sentence as it stands after a colon."""
    return sentence[:1].lower() + sentence[1:].removesuffix(".")
