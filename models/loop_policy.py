"""When a training loop compiles, measures and settles: each step is a step of the training.

First some eager steps say what a step takes; what is believed of the job then says whether trying
can pay. The compile is paid for in real steps, compiled and eager blocks take turns on the
training's own batches (ABBA, as a trial does it), and the better arm is kept. After that,
recompiles are weighed against what compiling brings. Pure: told what each step took, it says in
which arm the next one runs.

Deciding when to stop paying rent and buy is the ski-rental problem (Karlin et al., Competitive
snoopy caching, 1988); what is known of the price and the gain beforehand makes it better than twice
the optimum (Purohit et al., Improving online algorithms via ML predictions, 2018).
"""

from __future__ import annotations

import enum
import math
import statistics as stdlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from advisor.models.prior import LEVELS_OF_BELIEF, Belief
from advisor.profiler.records import Interval, Pair
from advisor.profiler.statistics import half_width, speedup
from advisor.profiler.units import duration

# What is touched for the first time takes longer; steps from then on are looked at.
_FIRST_TOUCH_STEPS = 2
_LEAST_LOOKED, _MOST_LOOKED = 6, 30
# Looked at are steady: the middle half lies within this share of the median.
_STEADY = 0.05
# Believed of speed and compile time at midpoints of equal shares.
_SPEED_SHARES = (np.arange(24) + 0.5) / 24
_START_SHARES = (np.arange(6) + 0.5) / 6
# Shares of the eager time that is left at which a compile may be broken off: what is then lost is
# little. A higher limit would be a bet on a quick compile.
_LIMIT_SHARES = np.asarray([0.04, 0.06, 0.08])
# What the ratio to the best that is exceeded in one of twenty cases weighs against the mean.
_WORST_WEIGHT = 0.5
# Steps without a compile after which the cold phase is over.
_QUIET_STEPS = 3
# A block is about so long, and the steps after a change of arm are not counted in it.
_BLOCK_S, _LEAST_BLOCK, _MOST_BLOCK = 0.25, 3, 50
_SETTLE_STEPS = 1
_ABBA = (True, False, False, True)
_LEAST_QUADS, _MOST_QUADS = 5, 30
_NARROW = 0.01
# What was measured in a few seconds is looked at again, each time after twice as many steps: a
# machine that was disturbed then is not disturbed for ever. Not where less than so many times what
# looking takes is left. Done in whole multiples of steps, so that ranks which agree then agree.
_LOOKS_AGAIN, _LEAST_LEFT = 3, 20
AGREE_STEPS = 50
# Recompiles are a storm when they have cost more than compiling has brought, and so many at least.
_STORM_COMPILES = 4


class Arm(enum.Enum):
    """How a step runs."""

    EAGER = "eager"
    COMPILED = "compiled"


class Stage(enum.Enum):
    """What the loop is doing beside training."""

    LOOK = "look"
    COLD = "cold"
    MEASURE = "measure"
    SETTLED = "settled"


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is believed of compiling a job: eager over compiled step time, and the cold start."""

    speedup: Belief
    compile_s: Belief


@dataclass(frozen=True, slots=True)
class LoopOutcome:
    """What a loop has done so far, and what it found; times in seconds.

    `speedup` is eager over compiled step time and None before both took turns, `saved_s` what the
    steps so far were spared, less what compiling took; `failure` is empty where nothing failed.
    """

    stage: Stage = Stage.LOOK
    arm: Arm = Arm.EAGER
    steps_done: int = 0
    eager_step_s: float | None = None
    speedup: Interval | None = None
    compile_s: float = 0.0
    saved_s: float = 0.0
    reason: str = ""
    failure: str = ""


Floats = NDArray[np.float64]
# From the seconds of an eager step to what is believed.
Believe = Callable[[float], Outlook]
# How many steps the training has, or that from the seconds of an eager step; None: nobody knows.
Steps = float | Callable[[float], float] | None


class LoopPolicy:
    """Decides for one training.

    `steps` is how many steps it has, or tells that from the seconds of an eager step; None: nobody
    knows. With `always_try` it compiles whatever is believed, to measure.
    """

    def __init__(self, steps: Steps, believe: Believe, *, always_try: bool = False) -> None:
        self._planned = steps
        self._steps = None if callable(steps) else steps
        self._believe = believe
        self._always_try = always_try
        self.stage = Stage.LOOK
        self.arm = Arm.EAGER
        self.done = 0
        self.reason = ""
        self.eager_step_s: float | None = None
        self.speedup: Interval | None = None
        self.cold_s = 0.0
        self.saved_s = 0.0
        self._looked: list[float] = []
        self._look_again_at = 0
        self._most_saved = 0.0
        self._quiet = 0
        self._block: list[float] = []
        self._blocks: list[float] = []
        self._pairs: list[Pair] = []
        self._settling = 0
        self._late_s, self._late = 0.0, 0
        self._gained_s = 0.0
        self._looks_left = 0
        self._measured_steps = self._seen_quads = 0

    def took(self, seconds: float, *, compiling: bool = False) -> None:
        """Takes what the last step, in `arm`, took, and whether the compiler was at work in it."""
        self.done += 1
        if self.stage is Stage.LOOK:
            self._look(seconds)
        elif self.stage is Stage.COLD:
            self._cold(seconds, compiling)
        elif self.stage is Stage.MEASURE:
            self._measured_steps += 1
            self._measure(seconds, compiling)
        else:
            if self.arm is Arm.COMPILED:
                self._watch(seconds, compiling)
            self._look_at_it_again()

    @property
    def final(self) -> bool:
        """Whether the arm is settled for good."""
        return self.stage is Stage.SETTLED and not self._looks_left

    @property
    def most_saved_s(self) -> float:
        """Returns the seconds that a compile may take: what it could save at best, or less.

        Less where that makes trying safe: a compile that is broken off early costs little.
        """
        return math.inf if self._always_try else self._most_saved

    @property
    def outcome(self) -> LoopOutcome:
        """What was done so far, and found."""
        return LoopOutcome(
            stage=self.stage,
            arm=self.arm,
            steps_done=self.done,
            eager_step_s=self.eager_step_s,
            speedup=self.speedup,
            compile_s=self.cold_s + self._late_s,
            saved_s=self.saved_s,
            reason=self.reason,
        )

    def gives_up(self, why: str) -> None:
        """Takes that the compiled arm cannot go on: eager from now on."""
        self._looks_left = 0
        self._settle(Arm.EAGER, why)

    # --- eager steps first

    def _look(self, seconds: float) -> None:
        if self.done > _FIRST_TOUCH_STEPS:
            self._looked.append(seconds)
        if self.done < self._look_again_at or not self._looked_enough():
            return
        self.eager_step_s = stdlib.median(self._looked[-_MOST_LOOKED:])
        if callable(self._planned):
            self._steps = self._planned(self.eager_step_s)
        left = self._left()
        if self._worth_trying(left, self.eager_step_s):
            self.stage, self.arm = Stage.COLD, Arm.COMPILED
        elif self._steps is not None:
            self._settle(Arm.EAGER, self.reason)
        else:
            # As long as nobody knows how long it goes on, it goes on as long again.
            self._look_again_at = 2 * self.done

    def _looked_enough(self) -> bool:
        if len(self._looked) < _LEAST_LOOKED:
            return False
        if len(self._looked) >= _MOST_LOOKED:
            return True
        low, middle, high = stdlib.quantiles(self._looked, n=4)
        return high - low <= 2 * _STEADY * middle

    def _left(self) -> float:
        return self.done if self._steps is None else max(0.0, self._steps - self.done)

    def _worth_trying(self, left: float, step_s: float) -> bool:
        """Returns whether compiling is expected to save time, at a risk that the plan can bear."""
        if self._always_try:
            return True
        outlook = self._believe(step_s)
        speeds = _at(outlook.speedup, _SPEED_SHARES)[:, None]
        starts = _at(outlook.compile_s, _START_SHARES)[None, :]
        eager_s, before_s = left * step_s, self.done * step_s
        compiled_s = starts + eager_s / np.maximum(1.0, speeds)
        best_s = before_s + np.minimum(eager_s, compiled_s)
        # How much longer either choice takes than who had known. A compile that takes too long is
        # broken off, so that trying never costs more than that: the best such limit is sought.
        staying = _badness((before_s + eager_s) / best_s)
        limits_s = eager_s * np.append(_LIMIT_SHARES, 1 - 1 / float(np.max(speeds)))
        trying = [
            _badness(
                (before_s + np.where(starts <= limit_s, compiled_s, limit_s + eager_s)) / best_s
            )
            for limit_s in limits_s
        ]
        self._most_saved = float(limits_s[int(np.argmin(trying))])
        if min(trying) < staying:
            return True
        certainty = float((compiled_s < eager_s).mean())
        self.reason = (
            f"{duration(eager_s)} of eager steps are left, and compiling takes about"
            f" {duration(outlook.compile_s.median)}:"
            f" it would save time with a probability of {certainty:.0%}"
        )
        return False

    # --- the compile, paid for in steps

    def _cold(self, seconds: float, compiling: bool) -> None:
        step_s = self.eager_step_s or 0.0
        if compiling:
            self.cold_s += max(0.0, seconds - step_s)
            self._quiet = 0
        else:
            self._quiet += 1
        if self.cold_s > self.most_saved_s:
            self._settle(
                Arm.EAGER,
                f"compiling has taken {duration(self.cold_s)}, more than it is worth here",
            )
        elif self._quiet >= _QUIET_STEPS:
            self.stage, self._settling = Stage.MEASURE, 0
            self._looks_left = _LOOKS_AGAIN

    # --- both arms in turns

    def _measure(self, seconds: float, compiling: bool) -> None:
        if compiling:
            # A shape that was not met before: its price is the compiler's, not the step's.
            self.cold_s += max(0.0, seconds - (self.eager_step_s or 0.0))
            return
        if self._settling:
            self._settling -= 1
            return
        self._block.append(seconds)
        if len(self._block) < self._block_steps():
            return
        self._blocks.append(stdlib.fmean(self._block))
        self._block = []
        if len(self._blocks) == len(_ABBA):
            first, *middle, last = self._blocks
            self._pairs.append(Pair(eager_s=stdlib.fmean(middle), compiled_s=(first + last) / 2))
            self._blocks = []
            if self._decided():
                return
        wanted = Arm.COMPILED if _ABBA[len(self._blocks)] else Arm.EAGER
        if wanted is not self.arm:
            self.arm, self._settling = wanted, _SETTLE_STEPS

    def _block_steps(self) -> int:
        wanted = round(_BLOCK_S / max(self.eager_step_s or 0.0, 1e-6))
        return max(_LEAST_BLOCK, min(_MOST_BLOCK, wanted))

    def _decided(self) -> bool:
        quads = len(self._pairs) - self._seen_quads
        if quads < _LEAST_QUADS:
            return False
        found = speedup(self._pairs)
        self.speedup = found
        clear = found.low > 1 or found.high < 1 or half_width(found) < _NARROW
        if not clear and quads % _MOST_QUADS:
            return False
        self.eager_step_s = stdlib.fmean(pair.eager_s for pair in self._pairs)
        at = f"{found.median:.2f}x ({found.low:.2f}-{found.high:.2f})"
        if found.median > 1:
            self._settle(Arm.COMPILED, f"compiled steps are faster: {at}")
        else:
            self._settle(Arm.EAGER, f"compiled steps are no faster: {at}")
        return True

    def _look_at_it_again(self) -> None:
        again = self._looks_left and self.done >= self._look_again_at
        # The step after whole multiples: those that ranks have told each other of.
        if not again or (self.done - 1) % AGREE_STEPS:
            return
        self._looks_left -= 1
        if self._left() < _LEAST_LEFT * self._measured_steps:
            self._looks_left = 0
            return
        self.stage, self.arm, self._settling = Stage.MEASURE, Arm.COMPILED, _SETTLE_STEPS
        self._measured_steps, self._seen_quads = 0, len(self._pairs)

    def _settle(self, arm: Arm, why: str) -> None:
        self._look_again_at = 2 * self.done
        self.stage, self.arm, self.reason = Stage.SETTLED, arm, why
        self.saved_s = self._gained_s - self.cold_s - self._late_s

    # --- compiled for good, as long as it is good

    def _watch(self, seconds: float, compiling: bool) -> None:
        eager_s, found = self.eager_step_s or 0.0, self.speedup
        usual_s = eager_s / found.median if found else eager_s
        if compiling:
            self._late += 1
            self._late_s += max(0.0, seconds - usual_s)
        else:
            self._gained_s += eager_s - usual_s
        self.saved_s = self._gained_s - self.cold_s - self._late_s
        spared = max(self._gained_s, self.cold_s)
        if self._late >= _STORM_COMPILES and self._late_s > spared:
            self._looks_left = 0
            self._settle(
                Arm.EAGER,
                f"{self._late} recompiles took {duration(self._late_s)}, more than compiled steps"
                f" have saved ({duration(self._gained_s)})",
            )


def _badness(ratios: Floats) -> float:
    """Returns what is minimised: the mean ratio to the best, and half of what the worst adds."""
    return float(ratios.mean()) + _WORST_WEIGHT * float(np.quantile(ratios, 0.95))


def _at(belief: Belief, shares: Floats) -> Floats:
    values: Floats = np.exp(np.interp(shares, LEVELS_OF_BELIEF, belief.logs))
    return values
