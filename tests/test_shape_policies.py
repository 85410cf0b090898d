"""Shape policies: their totals from step times along the lengths, and which one is advised.

The step times here follow a known law, so that every total can be worked out by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from advisor.campaign import Campaign
from advisor.decision import decide
from advisor.models.plan import Plan
from advisor.models.shape_policies import base_of, options, padding_gain
from advisor.profiler.records import (
    Advice,
    BatchClass,
    BatchShapes,
    Config,
    Dynamic,
    Interval,
    Lengths,
    LengthSource,
    Pair,
    ShapePolicy,
    ShapeTime,
    Timing,
    Trial,
    TrialKind,
    TrialStatus,
    WorkloadFacts,
    WorkloadSpec,
)
from advisor.request import AdviceRequest

ROWS = 16
# Short and long sentences, half of each: nearly every shuffled batch holds a long one.
TWO_KINDS = Lengths(
    values=(16, 128), counts=(500, 500), batch_size=ROWS, source=LengthSource.WORKLOAD
)
MEASURED = (8, 16, 64, 128)


def eager_s(rows: float, length: float) -> float:
    return 0.004 + 1e-5 * rows * length


def figure(seconds: float) -> Interval:
    return Interval(median=seconds, low=seconds * 0.995, high=seconds * 1.005)


def times(gain: float | None, compile_s: Sequence[float] = (0.0,)) -> tuple[ShapeTime, ...]:
    """Returns step times along the lengths; compiled ones are `gain` times as fast."""
    found = []
    for number, length in enumerate(MEASURED):
        slow = eager_s(ROWS, length)
        noise = np.exp(0.004 * np.random.default_rng(number).standard_normal(10))
        took = compile_s[number] if number < len(compile_s) else 0.0
        found.append(
            ShapeTime(
                rows=ROWS,
                length=length,
                eager_step_s=figure(slow),
                step_s=figure(slow / gain) if gain else None,
                pairs=tuple(
                    Pair(eager_s=slow * float(e), compiled_s=slow / gain * float(e)) for e in noise
                )
                if gain
                else (),
                compile_s=took,
                compiles=int(took > 0),
            )
        )
    return tuple(found)


def eager_trial(data: Lengths | None = TWO_KINDS, **changes: object) -> Trial:
    step_s = eager_s(ROWS, 128)
    facts = WorkloadFacts(
        fingerprint="f",
        model_class="Tagger",
        parameters=10**6,
        trainable_parameters=10**6,
        optimizer="AdamW",
        dtype="float32",
        shapes=(),
        batches_seen=40,
        batch_shapes=BatchShapes.LENGTH if data else BatchShapes.CONSTANT,
        lengths=data,
    )
    trial = Trial(
        trial_id="eager",
        kind=TrialKind.EAGER,
        status=TrialStatus.OK,
        eager=Timing(step_s=figure(step_s), data_wait_s=0.0),
        workload=facts,
        shape_times=times(None) if data else (),
    )
    return replace(trial, **changes)  # type: ignore[arg-type]


def along(dynamic: Dynamic, gain: float, compile_s: Sequence[float], **changes: object) -> Trial:
    trial = Trial(
        trial_id=f"along-{dynamic.value}",
        kind=TrialKind.SHAPES,
        status=TrialStatus.OK,
        config=Config(dynamic=dynamic),
        shape_times=times(gain, compile_s),
        cold_start_s=sum(compile_s),
        graphs=4,
        coverage=1.0,
        cache_folder="/cache",
    )
    return replace(trial, **changes)  # type: ignore[arg-type]


def advised(trials: Sequence[Trial], steps: float = 50_000) -> Advice:
    request = AdviceRequest(
        workload=WorkloadSpec(target="a.py:build", cwd="/"), plan=Plan(steps=steps)
    )
    return decide(request, trials, 60.0, "id", "2026-12-02T00:00:00Z")


def policy(advice: Advice) -> ShapePolicy:
    assert advice.shapes is not None
    return advice.shapes.policy


def test_totals_are_the_sum_over_the_batches() -> None:
    trials = [eager_trial(), along(Dynamic.FALSE, 2.0, (30.0, 10.0, 10.0, 10.0))]
    common = base_of(trials, Plan(steps=10_000))
    assert common is not None
    steps = 10_000
    found = {o.policy: o for o in options(TWO_KINDS, trials, common, Plan(steps=steps))}
    # All batches of 16 shuffled samples hold a long one: padded to 128.
    slow, fast = eager_s(ROWS, 128), eager_s(ROWS, 128) / 2
    assert found[ShapePolicy.EAGER].bill.expected_total_s == pytest.approx(steps * slow, rel=0.01)
    # 1,000 samples leave a smaller last batch, which is one more shape.
    one = found[ShapePolicy.PAD_TO_LONGEST]
    assert (one.compiles, one.compile_s) == (2, 40.0)
    assert one.bill.expected_total_s == pytest.approx(steps * fast + 40, rel=0.02)
    two = found[ShapePolicy.BUCKETS]
    assert two.boundaries == (16, 128)
    mixed = (eager_s(ROWS, 16) + eager_s(ROWS, 128)) / 4
    assert two.compiles == 3
    assert two.bill.expected_total_s == pytest.approx(steps * mixed + 50, rel=0.03)
    assert found[ShapePolicy.EAGER_BUCKETS].bill.expected_total_s == pytest.approx(
        2 * steps * mixed, rel=0.03
    )


def test_buckets_are_advised_when_they_pay() -> None:
    static = along(Dynamic.FALSE, 2.0, (30.0, 10.0, 10.0, 10.0))
    advice = advised([eager_trial(), static, along(Dynamic.TRUE, 1.3, (40.0,))])
    assert advice.enable
    assert policy(advice) is ShapePolicy.BUCKETS
    assert advice.shapes is not None
    assert advice.shapes.boundaries == (16, 128)
    assert advice.config is not None
    assert advice.config.dynamic is Dynamic.FALSE
    assert "BucketBatchSampler(lengths, boundaries, batch_size=16)" in advice.code
    assert "dynamic=False" in advice.code
    assert (advice.shapes.padding_share or 0) < 0.05 < (advice.shapes.padding_share_now or 0)
    assert [p.why_not == "" for p in advice.shapes.policies].count(True) == 1
    assert advice.shapes.policies[0].why_not == ""
    assert any("padding falls from" in reason for reason in advice.reasons)


def test_a_plan_too_short_for_compiling_still_gets_buckets() -> None:
    advice = advised([eager_trial(), along(Dynamic.TRUE, 1.3, (400.0,))], steps=2_000)
    assert not advice.enable
    assert advice.config is None
    assert policy(advice) is ShapePolicy.EAGER_BUCKETS
    assert "BucketBatchSampler" in advice.code
    assert "compile(" not in advice.code


def test_buckets_have_to_save_more_than_a_rounding_error() -> None:
    alike = replace(TWO_KINDS, values=(126, 128))
    trials = [eager_trial(alike), along(Dynamic.TRUE, 1.5, (30.0,))]
    assert policy(advised(trials)) is ShapePolicy.DYNAMIC


def test_many_static_buckets_raise_the_recompile_limit() -> None:
    spread = Lengths(
        values=tuple(range(8, 129, 8)),
        counts=(1000,) * 16,
        batch_size=ROWS,
        source=LengthSource.WORKLOAD,
    )
    static = along(Dynamic.FALSE, 2.0, (3.0, 0.5, 0.5, 0.5))
    advice = advised([eager_trial(spread), static], steps=1_000_000)
    assert policy(advice) is ShapePolicy.BUCKETS
    assert advice.shapes is not None
    assert len(advice.shapes.boundaries) > 8
    assert "torch._dynamo.config.recompile_limit = " in advice.code
    assert any("recompile limit" in reason for reason in advice.reasons)


def test_a_graph_for_each_length_is_told_to_hit_the_limit() -> None:
    spread = replace(TWO_KINDS, values=tuple(range(20, 129, 4)), counts=(40,) * 28, batch_size=2)
    static = along(Dynamic.FALSE, 1.5, (30.0, 10.0, 10.0, 10.0))
    advice = advised([eager_trial(spread), static, along(Dynamic.TRUE, 1.5, (40.0,))])
    told = [w for w in advice.warnings if "recompile limit" in w]
    assert len(told) == 1
    assert "at step" in told[0]
    # Seven further ones after the first: 30 + 7 * 10 s.
    assert "8 compiles take 1 min 40 s" in told[0]


def test_constant_shapes_have_nothing_to_decide() -> None:
    advice = advised([eager_trial(None)])
    assert advice.shapes is not None
    assert advice.shapes.policy is ShapePolicy.STATIC
    assert "same shapes" in advice.shapes.reason
    assert advice.shapes.policies == ()


def test_whole_batches_are_not_sorted_into_buckets() -> None:
    lengths = tuple(range(20, 129, 4))
    batches = tuple(BatchClass(rows=ROWS, length=n, count=10) for n in lengths)
    data = Lengths(
        values=lengths,
        counts=(10,) * len(lengths),
        batch_size=ROWS,
        source=LengthSource.BATCHES,
        whole_batches=True,
        batches=batches,
    )
    trials = [eager_trial(data), along(Dynamic.FALSE, 2.0, (30.0, 10.0, 10.0, 10.0))]
    advice = advised(trials)
    assert advice.shapes is not None
    names = {p.policy for p in advice.shapes.policies}
    assert ShapePolicy.EAGER_BUCKETS not in names
    # Batches keep their samples and are padded up to a boundary.
    assert policy(advice) is ShapePolicy.BUCKETS
    assert "BucketBatchSampler" not in advice.code
    assert "PadToBoundary" in advice.code
    assert advice.shapes.padding_share is None


def test_a_trial_that_ran_eager_speaks_for_no_policy() -> None:
    silent = along(Dynamic.TRUE, 1.5, (30.0,), graphs=0, coverage=0.0)
    advice = advised([eager_trial(), silent])
    assert not advice.enable
    assert policy(advice) is ShapePolicy.EAGER_BUCKETS


def test_a_smaller_last_batch_is_one_more_graph_where_only_the_length_is_dynamic() -> None:
    trials = [eager_trial(), along(Dynamic.AUTO, 1.5, (30.0,), mark_dynamic=True)]
    common = base_of(trials, Plan(steps=10_000))
    assert common is not None
    found = {o.policy: o for o in options(TWO_KINDS, trials, common, Plan(steps=10_000))}
    assert found[ShapePolicy.MARK_DYNAMIC].compiles == 2
    assert found[ShapePolicy.MARK_DYNAMIC].compile_s == 60.0
    whole = replace(TWO_KINDS, drop_last=True)
    found = {o.policy: o for o in options(whole, trials, common, Plan(steps=10_000))}
    assert found[ShapePolicy.MARK_DYNAMIC].compiles == 1


def test_padding_gain_is_what_no_padding_would_bring() -> None:
    whole = (eager_s(ROWS, 16) + eager_s(ROWS, 128)) / 2
    assert padding_gain(TWO_KINDS, eager_trial()) == pytest.approx(
        eager_s(ROWS, 128) / whole, rel=0.02
    )


class TestCampaign:
    """Which trials along the lengths a campaign asks for."""

    def campaign(self, steps: float = 1_000_000) -> Campaign:
        request = AdviceRequest(
            workload=WorkloadSpec(target="a.py:build", cwd="/"), plan=Plan(steps=steps)
        )
        return Campaign(request)

    def kinds(self, campaign: Campaign, first: Trial) -> list[tuple[TrialKind, Dynamic | None]]:
        """Returns the trials that it asks for, when all configurations gain alike."""
        found: list[tuple[TrialKind, Dynamic | None]] = []
        campaign.add(first, 8.0)
        while (step := campaign.next()) is not None and len(found) < 20:
            found.append((step.kind, step.config.dynamic if step.config else None))
            if step.kind is TrialKind.SHAPES:
                assert step.config is not None
                assert [rows for rows, _ in step.shapes] == [ROWS] * len(step.shapes)
                trial = along(
                    step.config.dynamic, 1.4, (30.0, 10.0), mark_dynamic=step.mark_dynamic
                )
                campaign.add(replace(trial, config=step.config), 90.0)
                continue
            slow = eager_s(ROWS, 128)
            pairs = tuple(Pair(eager_s=slow, compiled_s=slow / 1.4) for _ in range(12))
            campaign.add(
                Trial(
                    trial_id=str(len(found)),
                    kind=step.kind,
                    status=TrialStatus.OK,
                    config=step.config,
                    pairs=pairs,
                    cold_start_s=30.0,
                    warm_start_s=3.0 if step.kind is TrialKind.WARM else None,
                    graphs=2,
                    coverage=1.0,
                ),
                90.0,
            )
        return found

    def test_lengths_that_vary_are_measured_in_every_way(self) -> None:
        asked = self.kinds(self.campaign(), eager_trial())
        ways = [dynamic for kind, dynamic in asked if kind is TrialKind.SHAPES]
        assert ways == [Dynamic.TRUE, Dynamic.FALSE, Dynamic.AUTO]

    def test_constant_shapes_are_not(self) -> None:
        asked = self.kinds(self.campaign(), eager_trial(None))
        assert TrialKind.SHAPES not in [kind for kind, _ in asked]

    def test_a_short_plan_is_not(self) -> None:
        asked = self.kinds(self.campaign(steps=500), eager_trial())
        assert asked == []
