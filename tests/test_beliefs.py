"""What a trial is worth: its expected gain against its price."""

from __future__ import annotations

import math

import pytest

from advisor.beliefs import Beliefs, Known
from advisor.job_facts import JobFacts
from advisor.models.features import Facts
from advisor.models.learning import NO_SHIFTS
from advisor.models.plan import Plan
from advisor.models.prior import LEVELS_OF_BELIEF, Belief, Estimate, normal_quantiles
from advisor.profiler.errors import PlanError
from advisor.profiler.records import Config, Scope

QUANTILES = normal_quantiles(LEVELS_OF_BELIEF)
MODEL, REGIONAL = Config(), Config(scope=Scope.REGIONAL)
EAGER_STEP_S, STEPS = 0.1, 20_000.0


class Believed:
    def __init__(self, speedup: float, spread: float, compile_s: float = 30.0) -> None:
        self.said = Estimate(
            speedup=Belief(math.log(speedup) + spread * QUANTILES),
            compile_s=Belief(math.log(compile_s) + 0.01 * QUANTILES),
            memory_ratio=Belief(0.1 * QUANTILES),
        )

    def estimate(self, facts: Facts) -> Estimate:
        return self.said


def beliefs(speedup: float, spread: float, compile_s: float = 30.0) -> Beliefs:
    believed = Believed(speedup, spread, compile_s)
    return Beliefs(believed, NO_SHIFTS, JobFacts(device="cpu-2"))  # type: ignore[arg-type]


def worth(of: Beliefs, known: tuple[Known, ...] = (), now_s: float = 2000.0, **changes: float):  # type: ignore[no-untyped-def]
    given = {"most_speedup": 3.0, "least_compile_s": 1.0, "measuring_s": 40.0} | changes
    return of.worth(
        MODEL, known, plan=Plan(steps=STEPS), steps=STEPS, eager_step_s=EAGER_STEP_S, now_s=now_s,
        **given,
    )  # fmt: skip


def test_a_sure_gain_is_worth_what_it_saves() -> None:
    found = worth(beliefs(1.25, 0.001))
    # 2,000 s of eager steps become 1,600 s, with 30 s of compiling.
    assert found.gain_s == pytest.approx(370, rel=0.01)
    # The compile is given back by the hand-over, but for a warm start of a tenth.
    assert found.price_s == pytest.approx(40 + 30 - 27, rel=0.02)
    assert found.pays


def test_a_sure_loss_is_worth_nothing() -> None:
    found = worth(beliefs(0.9, 0.001))
    assert found.gain_s == 0
    assert found.price_s == pytest.approx(70, rel=0.02)
    assert not found.pays


def test_a_long_shot_may_be_worth_a_trial() -> None:
    sure, unsure = worth(beliefs(0.99, 0.001)), worth(beliefs(0.99, 0.3))
    assert sure.gain_s == 0
    assert unsure.gain_s > 100
    assert unsure.pays


def test_a_better_rival_lowers_the_gain() -> None:
    alone = worth(beliefs(1.3, 0.1))
    against = worth(beliefs(1.3, 0.1), now_s=1500.0)
    assert 0 < against.gain_s < 0.3 * alone.gain_s


def test_nothing_beyond_the_best_case_is_believed() -> None:
    free = worth(beliefs(2.0, 0.5))
    bounded = worth(beliefs(2.0, 0.5), most_speedup=1.1)
    assert bounded.gain_s < 0.3 * free.gain_s
    slow = worth(beliefs(1.25, 0.001), least_compile_s=300.0)
    assert slow.gain_s == pytest.approx(100, rel=0.02)


def test_what_another_configuration_showed_moves_it() -> None:
    of = beliefs(1.3, 0.2)
    good = worth(of, (Known(REGIONAL, 1.6, 20.0),))
    bad = worth(of, (Known(REGIONAL, 0.8, 20.0),))
    assert bad.speedup.median < 1.1 < 1.4 < good.speedup.median
    assert not bad.pays
    assert good.pays
    own = worth(of, (Known(MODEL, 0.8, 20.0),))
    assert own.speedup.median == pytest.approx(1.3)


def test_a_device_that_is_not_known_is_said_at_once() -> None:
    with pytest.raises(PlanError, match="quux"):
        Beliefs(Believed(1.3, 0.1), NO_SHIFTS, JobFacts(device="quux"))  # type: ignore[arg-type]
