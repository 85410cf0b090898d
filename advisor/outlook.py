"""What an untried configuration could bring to a plan at best, and whether it is worth a trial."""

from __future__ import annotations

from dataclasses import dataclass

from advisor import wording
from advisor.beliefs import Worth
from advisor.models.best_case import WARM_SHARE, BestCase
from advisor.models.economics import affordable_compile_s, point_total_s
from advisor.models.plan import Plan
from advisor.profiler.records import Config


@dataclass(frozen=True, slots=True)
class Skip:
    """Why a configuration is not tried: the kind of reason, and a sentence."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What an untried configuration could bring to the plan at best, and what finding out costs.

    `now_s` is the shortest total so far, without waiting for data, and `now` what reaches it.
    """

    config: Config
    plan: Plan
    steps: float
    eager_step_s: float
    best: BestCase
    now_s: float
    now: str
    # What a trial takes beside compiling: at the very least while only eager is known to win; as
    # usual once a configuration pays, since then only the time left to save is at stake.
    measuring_s: float
    # What the trial is believed to be worth; None: only the best case is known.
    worth: Worth | None = None

    @property
    def usual_compile_s(self) -> float:
        """What compiling usually takes, as far as it is known."""
        return self.worth.compile_s.median if self.worth else self.best.usual_compile_s

    @property
    def gain_over_price(self) -> float:
        """What the trial is believed to bring for each second that it takes; 0 if nobody knows."""
        return self.worth.gain_s / max(self.worth.price_s, 1.0) if self.worth else 0.0

    @property
    def rival_share(self) -> float:
        """The shortest total so far, as a share of eager's."""
        eager_s = point_total_s(self.plan, self.steps, self.eager_step_s, 0.0, 0.0)
        return min(1.0, self.now_s / eager_s) if eager_s > 0 else 1.0

    @property
    def best_s(self) -> float:
        """The plan's seconds in the best case."""
        start_s = self.best.compile_s
        return point_total_s(self.plan, self.steps, self._step_s, start_s, start_s * WARM_SHARE)

    @property
    def price_s(self) -> float:
        """What the trial takes."""
        return self.best.compile_s + self.measuring_s

    @property
    def cut_off_s(self) -> float:
        """The compile time beyond which it can only lose, fast as it may be."""
        return affordable_compile_s(self.plan, self.steps, self._step_s, self.now_s, WARM_SHARE)

    @property
    def _step_s(self) -> float:
        return self.eager_step_s / self.best.speedup

    def not_worth_it(self) -> Skip | None:
        """Returns why it does not bring the price of the trial back: not at best, or not likely."""
        saves_s = self.now_s - self.best_s
        if saves_s <= self.price_s:
            sentence = wording.cannot_pay(self.best, saves_s, self.now_s, self.now, self.price_s)
            return Skip("cannot_pay", sentence)
        if self.worth is None or self.worth.pays:
            return None
        sentence = wording.not_worth_a_trial(
            self.worth.speedup, self.worth.gain_s, self.now, self.worth.price_s
        )
        return Skip("not_worth_it", sentence)
