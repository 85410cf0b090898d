"""A training loop that decides by itself: never much worse than who had known beforehand."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import numpy as np
import pytest

from advisor.models.loop_policy import Arm, LoopPolicy, Outlook, Stage
from advisor.models.prior import LEVELS_OF_BELIEF, Belief, normal_quantiles


def around(middle: float, spread_log: float) -> Belief:
    return Belief(math.log(middle) + spread_log * normal_quantiles(LEVELS_OF_BELIEF))


def outlook(speedup: float = 1.3, compile_s: float = 30.0, spread: float = 0.15) -> Outlook:
    return Outlook(speedup=around(speedup, spread), compile_s=around(compile_s, 0.3))


class Training:
    """A job whose true figures are known: it adds up what its steps take."""

    def __init__(
        self, step_s: float, speedup: float, compile_s: float, noise: float = 0.03, seed: int = 0
    ) -> None:
        self.step_s, self.speedup, self.compile_s = step_s, speedup, compile_s
        self._random, self._noise = random.Random(seed), noise
        self.total_s, self._compiled = 0.0, False

    def run(self, policy: LoopPolicy, steps: int, recompile_every: int = 0) -> float:
        """Trains, and returns the seconds of all steps."""
        for number in range(steps):
            took = self.step_s * math.exp(self._random.gauss(0, self._noise))
            compiling = False
            if policy.arm is Arm.COMPILED:
                took /= self.speedup
                again = recompile_every and number % recompile_every == 0
                compiling = bool(not self._compiled or again)
                took += self.compile_s if compiling else 0.0
                self._compiled = True
            self.total_s += took
            policy.took(took, compiling=compiling)
        return self.total_s

    def best_s(self, steps: int) -> float:
        """Returns the better of always eager and always compiled."""
        return min(steps * self.step_s, self.compile_s + steps * self.step_s / self.speedup)


def test_a_long_training_that_gains_is_compiled() -> None:
    training = Training(step_s=0.1, speedup=1.4, compile_s=30.0)
    policy = LoopPolicy(20_000, lambda _: outlook())
    total_s = training.run(policy, 20_000)
    assert (policy.stage, policy.arm) == (Stage.SETTLED, Arm.COMPILED)
    assert policy.speedup is not None
    assert policy.speedup.median == pytest.approx(1.4, rel=0.05)
    assert total_s <= 1.01 * training.best_s(20_000)
    assert policy.saved_s == pytest.approx(20_000 * 0.1 - total_s, rel=0.05)


def test_a_short_training_is_left_alone_and_says_why() -> None:
    policy = LoopPolicy(100, lambda _: outlook())
    training = Training(step_s=0.1, speedup=1.4, compile_s=30.0)
    total_s = training.run(policy, 100)
    assert (policy.stage, policy.arm) == (Stage.SETTLED, Arm.EAGER)
    assert total_s == pytest.approx(10.0, rel=0.02)
    assert "compiling takes about 30 s" in policy.reason


def test_a_slower_compiled_step_goes_back_to_eager() -> None:
    policy = LoopPolicy(20_000, lambda _: outlook())
    training = Training(step_s=0.1, speedup=0.9, compile_s=30.0)
    total_s = training.run(policy, 20_000)
    assert (policy.stage, policy.arm) == (Stage.SETTLED, Arm.EAGER)
    assert "no faster" in policy.reason
    assert total_s <= 1.03 * 2000


def test_what_was_not_expected_to_take_so_long_is_cut_off() -> None:
    policy = LoopPolicy(5_000, lambda _: outlook(compile_s=10.0))
    for _ in range(40):
        policy.took(0.1 if policy.arm is Arm.EAGER else 500.0, compiling=True)
    assert (policy.stage, policy.arm) == (Stage.SETTLED, Arm.EAGER)
    assert "more than it is worth here" in policy.reason


def test_a_storm_of_recompiles_ends_it() -> None:
    policy = LoopPolicy(20_000, lambda _: outlook())
    training = Training(step_s=0.1, speedup=1.4, compile_s=30.0)
    training.run(policy, 2_000)
    assert policy.arm is Arm.COMPILED
    storm = Training(step_s=0.1, speedup=1.4, compile_s=30.0)
    storm.run(policy, 400, recompile_every=20)
    assert policy.arm is Arm.EAGER
    assert "recompiles took" in policy.reason


def test_one_late_shape_is_no_storm() -> None:
    policy = LoopPolicy(20_000, lambda _: outlook())
    Training(step_s=0.1, speedup=1.4, compile_s=30.0).run(policy, 2_000)
    policy.took(25.0, compiling=True)
    assert policy.arm is Arm.COMPILED


def test_a_training_of_unknown_length_tries_once_it_has_gone_on_for_long() -> None:
    training = Training(step_s=0.1, speedup=1.4, compile_s=30.0)
    policy = LoopPolicy(None, lambda _: outlook())
    training.run(policy, 500)
    assert policy.stage is Stage.LOOK
    total_s = training.run(policy, 19_500)
    assert policy.arm is Arm.COMPILED
    assert total_s <= 1.1 * training.best_s(20_000)


def test_giving_up_is_for_good() -> None:
    policy = LoopPolicy(20_000, lambda _: outlook())
    training = Training(step_s=0.1, speedup=1.4, compile_s=30.0)
    training.run(policy, 60)
    assert policy.arm is Arm.COMPILED or policy.stage is Stage.MEASURE
    policy.gives_up("the compiler failed")
    training.run(policy, 1_000)
    assert (policy.stage, policy.arm) == (Stage.SETTLED, Arm.EAGER)
    assert policy.reason == "the compiler failed"


def jobs() -> Iterator[tuple[float, float, float]]:
    """True step, speedup and compile seconds of jobs as the prior believes them."""
    chance = np.random.default_rng(0)
    for _ in range(60):
        step_s = float(np.exp(chance.uniform(np.log(0.005), np.log(1.0))))
        yield (
            step_s,
            float(np.exp(chance.normal(np.log(1.3), 0.15))),
            float(np.exp(chance.normal(np.log(30.0), 0.3))),
        )


def test_regret_is_bounded_where_the_belief_is_right() -> None:
    ratios = []
    for step_s, speedup, compile_s in jobs():
        for steps in (100, 1_000, 10_000):
            training = Training(step_s, speedup, compile_s)
            policy = LoopPolicy(steps, lambda _: outlook())
            ratios.append(training.run(policy, steps) / training.best_s(steps))
    assert np.mean(ratios) <= 1.03
    # A gain far beyond what is believed cannot be known beforehand.
    assert np.quantile(ratios, 0.98) <= 1.10
    assert max(ratios) <= 1.20
