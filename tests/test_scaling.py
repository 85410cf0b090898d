"""A step on more ranks than were tried: what the model of communication says, and how surely."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.decision import decide
from advisor.models import economics
from advisor.models.plan import Plan
from advisor.models.scaling import NETWORK_SHARE, Spread, scaling_of, spread
from advisor.profiler.errors import PlanError
from advisor.profiler.records import (
    Collective,
    Communication,
    Config,
    Interval,
    NetworkSource,
    Order,
    Pair,
    RankFacts,
    Timing,
    Trial,
    TrialKind,
    TrialStatus,
    WorkloadSpec,
    Wrapper,
)
from advisor.profiler.statistics import interval
from advisor.question import Typed, request_of
from advisor.report import verdict
from advisor.request import AdviceRequest

STEP = Interval(median=0.1, low=0.099, high=0.101)
# 100 MB by one all-reduce, 20 % of the step.
SAID = Communication(
    collectives=(Collective(name="all_reduce", calls=1, part_bytes=1e8),),
    alone_step_s=0.08,
    share=0.2,
    latency_s=1e-4,
    bytes_per_s=5e9,
)


def plan_of(size: int, **more: float) -> Plan:
    return Plan(steps=1000, world_size=size, **more)  # type: ignore[arg-type]


def spread_to(size: int, said: Communication = SAID, **more: float) -> Spread:
    found = spread(STEP, said, 2, plan_of(size, **more))
    assert found is not None
    return found


def test_same_ranks_take_the_same() -> None:
    found = spread_to(2)
    assert found.machines == 1 and found.network is NetworkSource.MEASURED
    assert np.allclose(found.added_s, 0)


def test_bandwidth_bound_step_on_a_network_as_fast_as_measured() -> None:
    said = replace(SAID, latency_s=0.0)
    found = spread_to(64, said, network_bytes_per_s=5e9)
    assert (found.machines, found.network) == (32, NetworkSource.GIVEN)
    # A ring of 64 sends 63/64 of the bytes twice, one of 2 half of them: 39.4 against 20 ms.
    more_s = 2 * 1e8 * (63 / 64 - 1 / 2) / 5e9
    added = interval(found.added_s)
    assert added.median == pytest.approx(more_s, rel=0.1)


def test_slower_network_is_waited_for() -> None:
    fast = interval(spread_to(64, network_bytes_per_s=5e9).added_s).median
    slow = interval(spread_to(64, network_bytes_per_s=1e9).added_s).median
    assert slow > 3 * fast


def test_unknown_network_is_a_range_that_holds_both_ends() -> None:
    found = interval(spread_to(64).added_s)
    assert spread_to(64).network is NetworkSource.ASSUMED
    best = interval(spread_to(64, network_bytes_per_s=5e9).added_s)
    worst = interval(spread_to(64, network_bytes_per_s=5e9 * NETWORK_SHARE).added_s)
    assert best.median < found.median < worst.median
    assert found.high - found.low > 2 * (best.high - best.low)


def test_one_rank_waits_for_nobody() -> None:
    found = spread(STEP, SAID, 2, replace(plan_of(2), world_size=1), machines=1)
    assert found is not None
    # What is left is the step whose collectives return at once.
    assert STEP.median + float(np.median(found.added_s)) == pytest.approx(0.08, rel=0.02)


@settings(deadline=None)
@given(
    ranks=st.sampled_from([2, 4, 8]),
    more=st.integers(1, 512),
    share=st.floats(0, 0.95),
    latency_s=st.floats(0, 1e-2),
    calls=st.floats(0, 1e4),
    part_bytes=st.floats(0, 1e12),
)
def test_more_ranks_never_wait_less(
    ranks: int, more: int, share: float, latency_s: float, calls: float, part_bytes: float
) -> None:
    said = Communication(
        collectives=(Collective(name="all_gather", calls=calls, part_bytes=part_bytes),),
        share=share,
        latency_s=latency_s,
        bytes_per_s=1e9,
    )
    found = spread(STEP, said, ranks, plan_of(ranks * more))
    assert found is not None
    assert np.isfinite(found.added_s).all()
    assert (found.added_s >= -1e-9).all() and (found.waits_s >= 0).all()


def test_nothing_is_said_where_the_share_is_not_known() -> None:
    assert spread(STEP, replace(SAID, share=None), 2, plan_of(64)) is None
    assert spread(STEP, SAID, 2, Plan(steps=1)) is None


def test_last_of_many_machines_compiles_longest() -> None:
    assert economics.slowest_of(1) == 1.0
    assert 1.15 < economics.slowest_of(32) < 1.25


def trials() -> tuple[Trial, ...]:
    ranks = (RankFacts(rank=0), RankFacts(rank=1))
    eager = Trial(
        trial_id="e",
        kind=TrialKind.EAGER,
        status=TrialStatus.OK,
        eager_step_s=STEP,
        eager=Timing(step_s=STEP, spread=0.01, steady=True, steps=100),
        communication=SAID,
        ranks=ranks,
    )
    compiled = Trial(
        trial_id="c",
        kind=TrialKind.COMPILE,
        status=TrialStatus.OK,
        config=Config(order=Order.COMPILE_FIRST),
        eager_step_s=STEP,
        step_s=Interval(median=0.05, low=0.0495, high=0.0505),
        pairs=tuple(Pair(eager_s=0.1, compiled_s=0.05) for _ in range(20)),
        cold_start_s=30.0,
        graphs=2,
        coverage=1.0,
        ranks=ranks,
    )
    return eager, compiled


def request(size: int | None, steps: int = 100_000) -> AdviceRequest:
    workload = WorkloadSpec(target="train.py:build", cwd="/", ranks=2, wrapper=Wrapper.DDP)
    return AdviceRequest(workload=workload, plan=Plan(steps=steps, world_size=size))


def test_advice_is_for_the_ranks_planned() -> None:
    tried = decide(request(None), trials(), 60.0, "a", "now")
    planned = decide(request(64), trials(), 60.0, "a", "now")
    assert tried.scaling is None and planned.scaling is not None
    assert planned.scaling.machines == 32
    # What is waited for is gained by nobody: 2.0x on 2 ranks is less on 64.
    assert tried.speedup is not None and planned.speedup is not None
    assert planned.speedup.median < tried.speedup.median - 0.1
    assert planned.eager_total_s.median > tried.eager_total_s.median
    assert planned.compile_s is not None and planned.compile_s.median > 33
    said = " ".join(planned.reasons)
    assert "On 64 ranks of 32 machines like this one" in said and "a model" in said
    assert "the last is done after" in said and "--network" in said
    assert "on 64 ranks" in verdict(planned)


def test_plan_that_pays_on_few_ranks_only_is_not_advised_for_many() -> None:
    slow = replace(request(2048, steps=700), plan=Plan(steps=700, world_size=2048))
    assert decide(request(None, steps=700), trials(), 60.0, "a", "now").enable
    assert not decide(slow, trials(), 60.0, "a", "now").enable


def test_more_ranks_without_a_measured_share_are_told_of() -> None:
    eager, compiled = trials()
    bare = replace(eager, communication=replace(SAID, share=None))
    found = decide(request(64), (bare, compiled), 60.0, "a", "now")
    assert found.scaling is None
    assert any("not of the 64 planned" in warning for warning in found.warnings)


def test_eager_alone_is_scaled_too() -> None:
    found = scaling_of(spread_to(64), 0.1, None)
    assert found.step_s is None and found.eager_step_s.median > 0.11
    assert 0.2 < found.communication_share.median < 1


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ({"world_size": 64}, "--world-size 64 needs more than one rank"),
        ({"world_size": 63, "ranks": 2}, "not a multiple of --ranks 2"),
        ({"world_size": 2, "ranks": 4}, "not a multiple of --ranks 4"),
        ({"world_size": 1, "ranks": 2}, "--world-size 1 is out of range"),
        ({"network": "25G", "ranks": 2}, "--network came without --world-size"),
        ({"network": "fast", "ranks": 2, "world_size": 4}, "--network 'fast' is not a size"),
        ({"network": "0", "ranks": 2, "world_size": 4}, "--network"),
    ],
)
def test_options_that_make_no_sense(typed: dict[str, object], words: str) -> None:
    with pytest.raises(PlanError) as found:
        request_of(Typed(target="hf:bert-base", steps=10, **typed))  # type: ignore[arg-type]
    assert words in str(found.value)
