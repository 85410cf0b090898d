"""What a mend brings: Amdahl's law with the workload's own rate, and ratios of two trials."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.profiler.gains import (
    USUAL_SPEEDUP,
    estimated_gain,
    measured_gain,
    own_rate,
    usual_rate,
)
from advisor.profiler.records import Config, Interval, Pair, Trial, TrialKind, TrialStatus


def pairs(ratio: float, eager_s: float = 0.06, count: int = 20) -> tuple[Pair, ...]:
    return (Pair(eager_s=eager_s, compiled_s=eager_s / ratio),) * count


def trial(ratio: float, covered: float | None) -> Trial:
    return Trial(
        trial_id="t",
        kind=TrialKind.COMPILE,
        status=TrialStatus.OK,
        config=Config(),
        pairs=pairs(ratio),
        time_coverage=covered,
    )


def test_a_measured_gain_is_the_ratio_of_two_speedups_on_machines_of_any_speed() -> None:
    gain = measured_gain(pairs(1.2, 0.06), pairs(1.5, 0.09))
    assert gain is not None
    assert gain.median == pytest.approx(1.25)


def test_no_pairs_no_gain() -> None:
    assert measured_gain((), pairs(1.5)) is None
    assert measured_gain(pairs(1.5), ()) is None


def test_the_rate_is_that_of_the_covered_part_alone() -> None:
    # Half of the step is compiled and takes half of its time: 0.5 + 0.25 of the eager step.
    rate = own_rate(trial(1 / 0.75, covered=0.5))
    assert rate is not None
    assert rate.median == pytest.approx(0.5)


@pytest.mark.parametrize("covered", [None, 0.0, 0.1])
def test_too_little_ran_compiled_to_have_a_rate(covered: float | None) -> None:
    assert own_rate(trial(1.0, covered)) is None


def test_the_usual_rate_is_the_published_one_turned_over() -> None:
    rate = usual_rate()
    assert (rate.low, rate.high) == (1 / USUAL_SPEEDUP.high, 1 / USUAL_SPEEDUP.low)


def test_bringing_the_other_half_into_graphs_gains_what_the_first_half_did() -> None:
    half = trial(1 / 0.75, covered=0.5)
    rate = own_rate(half)
    assert rate is not None
    gain = estimated_gain(half, 0.5, rate)
    assert gain is not None
    # 0.75 of the eager step before, 0.5 after.
    assert gain.median == pytest.approx(1.5)


def test_where_compiling_gains_nothing_a_mend_gains_nothing() -> None:
    rate = Interval(median=1.0, low=1.0, high=1.3)
    assert estimated_gain(trial(1.0, 0.5), 0.5, rate) == Interval(median=1.0, low=1.0, high=1.0)


@given(st.floats(0.3, 5.0), st.floats(0.0, 1.0), st.floats(0.2, 1.5), st.floats(0.0, 1.0))
def test_a_gain_is_ordered_and_never_a_loss(
    ratio: float, covered: float, rate: float, lost: float
) -> None:
    spread = Interval(median=rate, low=rate * 0.9, high=rate * 1.1)
    gain = estimated_gain(trial(ratio, covered), lost, spread)
    assert gain is not None
    assert 1 <= gain.low <= gain.median <= gain.high <= 5 + 1e-9
