"""Which trial comes next: order, prices, what rules out what, and that it ends."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.beliefs import Beliefs
from advisor.campaign import Campaign, Step
from advisor.models.best_case import Seen, best_case
from advisor.models.features import Facts
from advisor.models.learning import NO_SHIFTS
from advisor.models.plan import Plan
from advisor.models.prior import LEVELS_OF_BELIEF, Belief, Estimate, normal_quantiles
from advisor.profiler.diagnosis import what_if_configs
from advisor.profiler.records import (
    Blocks,
    Config,
    Dynamic,
    Environment,
    Failure,
    Interval,
    Mode,
    Pair,
    Scope,
    Shape,
    Timing,
    Trial,
    TrialKind,
    TrialStatus,
    WhatIf,
    WorkloadFacts,
    WorkloadSpec,
)
from advisor.request import AdviceRequest, Limits

REGIONAL = Config(scope=Scope.REGIONAL)
WHOLE = Config(scope=Scope.MODEL)
BLOCKS = Blocks(
    module_class="modeling_bert.BertLayer",
    paths=tuple(f"bert.encoder.layer.{i}" for i in range(4)),
    container="bert.encoder.layer",
)


@dataclass(frozen=True)
class Truth:
    """What one configuration really does on the workload under test."""

    ratio: float = 1.2
    cold_start_s: float = 24.0
    warm_start_s: float = 3.0
    # What the second process measures instead, if that differs.
    warm_ratio: float | None = None
    status: TrialStatus = TrialStatus.OK
    message: str = ""
    graphs: int = 4
    limit_hit: bool = False
    coverage: float = 0.95
    what_ifs: tuple[WhatIf, ...] = ()


@dataclass(frozen=True)
class Job:
    """A workload whose true figures are known; answers the steps of a campaign."""

    truths: Mapping[Config, Truth]
    step_s: float = 0.06
    device: str = "cpu"
    blocks: tuple[Blocks, ...] = (BLOCKS,)
    shapes: int = 1
    default: Truth = Truth()

    def run(self, step: Step, number: int) -> Trial:
        """Returns the trial that a step would have."""
        name = f"trial-{number}"
        if step.kind is TrialKind.EAGER:
            return Trial(
                trial_id=name,
                kind=step.kind,
                status=TrialStatus.OK,
                eager=Timing(step_s=self._figure(self.step_s)),
                workload=self._facts(),
                environment=self._environment(),
                wall_s=10.0,
            )
        assert step.config is not None
        truth = self.truths.get(step.config, self.default)
        if truth.status is not TrialStatus.OK:
            failure = Failure(kind="compile", message=truth.message or "it went wrong")
            return Trial(
                trial_id=name,
                kind=step.kind,
                status=truth.status,
                config=step.config,
                failure=failure,
            )
        rng = np.random.default_rng(number)
        noise = np.exp(0.01 * rng.standard_normal((12, 2)))
        warm = step.kind is TrialKind.WARM
        ratio = truth.warm_ratio if warm and truth.warm_ratio else truth.ratio
        return Trial(
            trial_id=name,
            kind=step.kind,
            status=TrialStatus.OK,
            config=step.config,
            pairs=tuple(
                Pair(
                    eager_s=self.step_s * float(a),
                    compiled_s=self.step_s / ratio * float(b),
                    process=int(warm),
                )
                for a, b in noise
            ),
            cold_start_s=None if warm else truth.cold_start_s,
            warm_start_s=truth.warm_start_s if warm else None,
            graphs=truth.graphs,
            coverage=truth.coverage,
            what_ifs=truth.what_ifs,
            recompile_limit_hit=truth.limit_hit,
            cache_folder=f"/tmp/{name}",
            cache_bytes=1000,
        )

    def _figure(self, value: float) -> Interval:
        return Interval(median=value, low=value * 0.98, high=value * 1.02)

    def _facts(self) -> WorkloadFacts:
        return WorkloadFacts(
            fingerprint="f",
            model_class="BertForTokenClassification",
            parameters=10**6,
            trainable_parameters=10**6,
            optimizer="AdamW",
            dtype="float32",
            shapes=tuple(
                Shape(signature=str(i), share=1 / self.shapes) for i in range(self.shapes)
            ),
            blocks=self.blocks,
        )

    def _environment(self) -> Environment:
        return Environment(
            torch="2.13",
            python="3.11",
            device=self.device,
            device_name="test",
            cores=2,
            threads=2,
            memory_bytes=2**33,
        )


def request(plan: Plan | None = None, **limits: object) -> AdviceRequest:
    return AdviceRequest(
        workload=WorkloadSpec(target="train.py:build", cwd="/"),
        plan=plan or Plan(steps=20_000),
        limits=Limits(**limits),  # type: ignore[arg-type]
    )


def run(
    asked: AdviceRequest,
    job: Job,
    cost: Callable[[Step], float] = lambda step: 30.0,
    believe: Callable[[Trial], Beliefs | None] = lambda _: None,
) -> tuple[Campaign, list[Step]]:
    """Returns the finished campaign and its steps."""
    names = iter(range(1000))
    campaign = Campaign(asked, new_id=lambda: f"skipped-{next(names)}", believe=believe)
    steps: list[Step] = []
    while (step := campaign.next()) is not None:
        assert step == campaign.next(), "asking twice changes nothing"
        steps.append(step)
        campaign.add(job.run(step, len(steps)), cost(step))
        assert len(steps) < 30
    return campaign, steps


def skipped(campaign: Campaign) -> dict[Config, Failure]:
    return {
        t.config: t.failure
        for t in campaign.trials
        if t.status is TrialStatus.SKIPPED and t.config and t.failure
    }


def compiled(steps: list[Step]) -> list[Config | None]:
    return [step.config for step in steps if step.kind is TrialKind.COMPILE]


def test_eager_facts_come_first_then_regional_then_the_whole_model() -> None:
    _, steps = run(request(), Job({}))
    assert [s.kind for s in steps[:3]] == [TrialKind.EAGER, TrialKind.COMPILE, TrialKind.COMPILE]
    assert [s.config for s in steps[:3]] == [None, REGIONAL, WHOLE]
    assert steps[1].plan_steps == 20_000


def test_short_plan_ends_before_the_first_compile() -> None:
    campaign, steps = run(request(Plan(steps=50)), Job({}))
    assert [s.kind for s in steps] == [TrialKind.EAGER]
    reasons = skipped(campaign)
    assert {REGIONAL, WHOLE} <= set(reasons)
    for failure in reasons.values():
        assert failure.kind == "cannot_pay"
        assert re.search(r"even at 3\.05x and 5\.0 s of compiling", failure.message)
        assert "3.0 s that the plan takes with eager" in failure.message


def test_every_configuration_is_tried_or_skipped_with_a_reason() -> None:
    for device in ("cpu", "cuda"):
        campaign, steps = run(request(), Job({}, device=device, shapes=3))
        accounted = compiled(steps) + list(skipped(campaign))
        assert len(accounted) == len(set(accounted)) == campaign.total_configurations()
        assert all(failure.message for failure in skipped(campaign).values())


def test_modes_with_cuda_graphs_are_for_cuda_only() -> None:
    cpu, _ = run(request(), Job({}))
    cuda, _ = run(request(), Job({}, device="cuda:0"))
    modes = {t.config.mode for t in cpu.trials if t.config}
    assert modes == {Mode.DEFAULT, Mode.MAX_AUTOTUNE_NO_CUDAGRAPHS}
    assert {t.config.mode for t in cuda.trials if t.config} == set(Mode)


def test_asked_for_mode_that_the_device_lacks_is_skipped_with_the_reason() -> None:
    graphs = Config(mode=Mode.REDUCE_OVERHEAD)
    campaign, steps = run(request(configs=(graphs, WHOLE)), Job({}))
    assert compiled(steps) == [WHOLE]
    assert "CUDA graphs" in skipped(campaign)[graphs].message
    assert campaign.total_configurations() == 2


def test_dynamic_shapes_are_tried_only_where_several_were_seen() -> None:
    for shapes in (1, 5):
        campaign, _ = run(request(Plan(steps=10**6)), Job({}, shapes=shapes))
        known = {t.config.dynamic for t in campaign.trials if t.config}
        assert (Dynamic.TRUE in known) == (shapes > 1)


def test_model_without_repeated_blocks_skips_regional_with_that_reason() -> None:
    campaign, steps = run(request(), Job({}, blocks=()))
    assert REGIONAL not in compiled(steps)
    assert WHOLE in compiled(steps)
    assert "BertForTokenClassification has no repeated blocks" in (
        skipped(campaign)[REGIONAL].message
    )


def test_what_regional_showed_bounds_the_whole_model() -> None:
    """Regional at 1.2x in 24 s: the whole model cannot save enough of a plan of 200 s."""
    alone = best_case(WHOLE, "cpu")
    narrowed = best_case(WHOLE, "cpu", (Seen(REGIONAL, 1.2, 24.0),))
    assert narrowed.speedup == pytest.approx(1.2 * 1.55)
    assert narrowed.compile_s == pytest.approx(36.0)
    assert narrowed.speedup < alone.speedup
    campaign, steps = run(request(Plan(steps=2500)), Job({}))
    assert compiled(steps) == [REGIONAL]
    assert "own trials" in skipped(campaign)[WHOLE].message


@pytest.mark.parametrize(
    "message",
    [
        "No working C++ compiler found in torch._inductor.config.cpp.cxx: (None, 'g++')",
        "InvalidCxxCompiler: no compiler",
        "Cannot find a working triton installation",
    ],
)
def test_missing_tool_rules_out_all_that_need_it(message: str) -> None:
    broken = Truth(status=TrialStatus.FAILED_TO_COMPILE, message=message)
    campaign, steps = run(request(Plan(steps=10**6)), Job({REGIONAL: broken}, shapes=3))
    assert compiled(steps) == [REGIONAL]
    rest = skipped(campaign)
    assert len(rest) == campaign.total_configurations() - 1
    assert all(message in failure.message for failure in rest.values())


def test_failure_of_the_blocks_does_not_rule_out_the_whole_model() -> None:
    broken = Truth(status=TrialStatus.FAILED_TO_COMPILE, message="Unsupported: id() of a frame")
    _, steps = run(request(), Job({REGIONAL: broken}))
    assert compiled(steps)[:2] == [REGIONAL, WHOLE]


@pytest.mark.parametrize(
    "truth",
    [
        Truth(status=TrialStatus.FAILED_TO_COMPILE),
        Truth(status=TrialStatus.CUT_OFF),
        Truth(graphs=0),
        Truth(coverage=0.02),
    ],
)
def test_end_of_mode_default_rules_out_the_other_modes_of_its_scope(truth: Truth) -> None:
    job = Job({WHOLE: truth}, blocks=(), device="cuda")
    campaign, steps = run(request(Plan(steps=10**6)), job)
    assert compiled(steps) == [WHOLE]
    kinds = {c.mode: f.kind for c, f in skipped(campaign).items() if c.scope is Scope.MODEL}
    assert set(kinds) == set(Mode) - {Mode.DEFAULT}
    assert set(kinds.values()) == {"ruled_out"}


def test_out_of_memory_leaves_the_other_scope_and_modes_open() -> None:
    job = Job({WHOLE: Truth(status=TrialStatus.OUT_OF_MEMORY)}, blocks=())
    _, steps = run(request(Plan(steps=10**6)), job)
    assert Config(mode=Mode.MAX_AUTOTUNE_NO_CUDAGRAPHS) in compiled(steps)


def test_further_modes_are_tried_in_the_better_scope() -> None:
    for better, truths in (
        (Scope.REGIONAL, {REGIONAL: Truth(1.4), WHOLE: Truth(1.1)}),
        (Scope.MODEL, {REGIONAL: Truth(1.1), WHOLE: Truth(1.4)}),
    ):
        campaign, _ = run(request(Plan(steps=10**6)), Job(truths, device="cuda"))
        further = {
            t.config.scope for t in campaign.trials if t.config and t.config.mode in _FURTHER
        }
        assert further == {better}


_FURTHER = set(Mode) - {Mode.DEFAULT}


def test_cut_off_is_where_the_best_speedup_only_breaks_even() -> None:
    _, steps = run(request(), Job({}))
    eager_s = 20_000 * 0.06
    assert steps[1].cut_off_s == pytest.approx(eager_s * (1 - 1 / 3.05), rel=0.01)
    assert steps[0].cut_off_s is None
    _, often = run(request(Plan(steps=20_000, restarts=20)), Job({}))
    assert steps[1].cut_off_s is not None
    assert often[1].cut_off_s == pytest.approx(steps[1].cut_off_s / 2, rel=0.01)


def test_warm_start_of_the_winner_is_measured_from_its_folder() -> None:
    truths = {REGIONAL: Truth(1.3), WHOLE: Truth(1.1)}
    campaign, steps = run(request(Plan(steps=20_000, restarts=3)), Job(truths))
    last = steps[-1]
    assert (last.kind, last.config) == (TrialKind.WARM, REGIONAL)
    origin = next(t for t in campaign.trials if t.cache_folder == last.from_folder)
    assert (origin.kind, origin.config) == (TrialKind.COMPILE, REGIONAL)
    # Two processes beside the trial itself: one alone does not show how far processes differ.
    assert sum(s.kind is TrialKind.WARM for s in steps) == 2


def test_warm_start_is_not_measured_for_what_does_not_pay() -> None:
    slower = Truth(0.9)
    job = Job({}, default=slower)
    _, steps = run(request(Plan(steps=20_000, restarts=3)), job)
    assert TrialKind.WARM not in {s.kind for s in steps}


def test_warm_start_without_restarts_needs_a_start_longer_than_the_trial() -> None:
    for cold_start_s, wanted in ((14.0, False), (400.0, True)):
        job = Job({}, default=Truth(1.5, cold_start_s))
        _, steps = run(request(Plan(steps=200_000)), job)
        assert (TrialKind.WARM in {s.kind for s in steps}) is wanted


def test_restarts_that_only_a_warm_start_can_pay_lead_to_measuring_it() -> None:
    """Cold, 50 restarts cost 20 min, as much as the plan; warm they cost 2.5 min."""
    _, steps = run(request(Plan(steps=20_000, restarts=50)), Job({}, default=Truth(1.4)))
    assert steps[-1].kind is TrialKind.WARM


def test_budget_ends_the_campaign_with_the_reason() -> None:
    campaign, steps = run(request(budget_s=45.0), Job({}))
    assert compiled(steps) == []
    assert steps[0].budget_left_s == 45.0
    assert {f.kind for f in skipped(campaign).values()} == {"over_budget"}
    assert "of the budget of 45 s" in skipped(campaign)[REGIONAL].message
    _, unlimited = run(request(), Job({}))
    assert compiled(unlimited)[0] == REGIONAL


@given(
    st.floats(20.0, 1000.0),
    st.floats(0.5, 2.0),
    st.integers(100, 10**6),
    st.integers(0, 5),
    st.sampled_from(["cpu", "cuda"]),
)
@settings(max_examples=30, deadline=None)
def test_expected_time_of_trials_stays_within_the_budget(
    budget_s: float, ratio: float, steps_planned: int, restarts: int, device: str
) -> None:
    spent = 0.0

    def cost(step: Step) -> float:
        nonlocal spent
        if step.kind is not TrialKind.EAGER:
            assert step.budget_left_s is not None
            assert step.expected_s <= step.budget_left_s
            assert step.budget_left_s == pytest.approx(budget_s - spent)
        spent += step.expected_s
        return step.expected_s

    plan = Plan(steps=steps_planned, restarts=restarts)
    job = Job({}, default=Truth(ratio), device=device, shapes=2)
    campaign, steps = run(request(plan, budget_s=budget_s), job, cost)
    assert campaign.spent_s == pytest.approx(spent)
    assert spent <= max(budget_s, steps[0].expected_s)


@pytest.mark.parametrize("warm_ratio", [0.7, 2.0])
def test_surprise_in_the_warm_start_does_not_reopen_the_campaign(warm_ratio: float) -> None:
    truths = {
        WHOLE: Truth(1.30, warm_ratio=warm_ratio),
        REGIONAL: Truth(1.29, warm_ratio=warm_ratio),
    }
    campaign, steps = run(request(Plan(steps=200_000, restarts=3)), Job(truths, device="cuda"))
    assert steps[-1].kind is TrialKind.WARM
    accounted = compiled(steps) + list(skipped(campaign))
    assert len(accounted) == campaign.total_configurations() == 5


def test_failed_eager_trial_ends_the_campaign() -> None:
    campaign = Campaign(request())
    step = campaign.next()
    assert step is not None
    failure = Failure(kind="exit", message="no such file")
    failed = Trial(trial_id="t", kind=TrialKind.EAGER, status=TrialStatus.CRASHED, failure=failure)
    campaign.add(failed, 1.0)
    assert campaign.next() is None
    assert campaign.eager == failed


def test_only_asked_for_configurations_are_tried_in_their_order() -> None:
    asked = (WHOLE, REGIONAL, WHOLE)
    campaign, steps = run(request(configs=asked), Job({}))
    assert campaign.total_configurations() == 2
    accounted = compiled(steps) + list(skipped(campaign))
    assert set(accounted) == {WHOLE, REGIONAL}
    assert compiled(steps)[0] == WHOLE


def test_plan_in_hours_becomes_steps_by_the_eager_step_time() -> None:
    _, steps = run(request(Plan(hours=1.0)), Job({}, step_s=0.1))
    assert steps[1].plan_steps == pytest.approx(36_000, rel=0.02)


def test_every_step_says_why_and_for_how_long() -> None:
    plan = Plan(steps=10**6, restarts=2)
    _, steps = run(request(plan), Job({}, device="cuda", shapes=2))
    for step in steps:
        assert step.expected_s > 0
        assert len(step.why) > 20
        if step.kind is TrialKind.COMPILE:
            assert re.search(r"\d", step.why)


def test_unknown_device_is_never_excluded_by_a_tighter_bound_than_a_known_one() -> None:
    unknown = best_case(WHOLE, "mps")
    for device in ("cpu", "cuda"):
        for mode in (Mode.DEFAULT, Mode.MAX_AUTOTUNE_NO_CUDAGRAPHS):
            known = best_case(replace(WHOLE, mode=mode), device)
            assert unknown.speedup >= known.speedup
            assert unknown.compile_s <= known.compile_s


@given(
    st.sampled_from(list(Scope)),
    st.sampled_from(list(Mode)),
    st.sampled_from(list(Dynamic)),
    st.lists(
        st.builds(
            Seen,
            st.builds(
                Config,
                scope=st.sampled_from(list(Scope)),
                mode=st.sampled_from(list(Mode)),
                dynamic=st.sampled_from(list(Dynamic)),
            ),
            st.floats(0.3, 4.0),
            st.floats(0.5, 600.0),
        ),
        max_size=4,
    ),
)
@settings(max_examples=100, deadline=None)
def test_more_knowledge_only_narrows_the_best_case(
    scope: Scope, mode: Mode, dynamic: Dynamic, seen: list[Seen]
) -> None:
    config = Config(scope=scope, mode=mode, dynamic=dynamic)
    before = best_case(config, "cuda", tuple(seen[:-1]))
    after = best_case(config, "cuda", tuple(seen))
    assert after.speedup <= before.speedup
    assert after.compile_s >= before.compile_s
    assert after.usual_compile_s >= after.compile_s


SCALAR = (("torch._dynamo.config.capture_scalar_outputs", "True"),)
SHAPES = (("torch._dynamo.config.capture_dynamic_output_shape_ops", "True"),)
USELESS = (("torch._dynamo.config.allow_rnn", "True"),)


def test_settings_that_remove_a_cause_are_tried_right_after_the_scopes() -> None:
    what_ifs = (
        WhatIf(options=SHAPES, removes=("DYNAMIC_OUTPUT_SHAPE",), sites=1),
        WhatIf(options=SCALAR, removes=("SCALAR_READ",), sites=0),
        WhatIf(options=USELESS, removes=(), sites=2),
    )
    truths = {REGIONAL: Truth(1.1), WHOLE: Truth(1.05, what_ifs=what_ifs)}
    job = Job(truths, default=Truth(1.4))
    campaign, steps = run(request(Plan(steps=200_000)), job)
    scalar = replace(WHOLE, options=SCALAR)
    assert compiled(steps)[:4] == [REGIONAL, WHOLE, scalar, replace(WHOLE, options=SHAPES)]
    assert not any(t.config and t.config.options == USELESS for t in campaign.trials)


def test_a_setting_that_failed_to_trace_is_not_tried() -> None:
    broken = WhatIf(options=SCALAR, removes=("SCALAR_READ",), failure="it raised")
    trial = Trial(
        trial_id="t",
        kind=TrialKind.COMPILE,
        status=TrialStatus.OK,
        config=WHOLE,
        what_ifs=(broken,),
    )
    assert what_if_configs(trial) == ()


def test_settings_of_settings_are_not_tried() -> None:
    what_if = WhatIf(options=SCALAR, removes=("SCALAR_READ",))
    job = Job({}, default=Truth(1.4, what_ifs=(what_if,)))
    _, steps = run(request(Plan(steps=200_000), configs=(WHOLE,)), job)
    assert compiled(steps) == [WHOLE, replace(WHOLE, options=SCALAR)]


def test_to_learn_why_trials_run_that_cannot_pay() -> None:
    job = Job({WHOLE: Truth(0.9)})
    _, steps = run(request(Plan(steps=10), configs=(WHOLE,)), job)
    assert compiled(steps) == []
    _, steps = run(request(Plan(steps=10), configs=(WHOLE,), measure_anyway=True), job)
    assert [(s.kind, s.cut_off_s) for s in steps] == [
        (TrialKind.EAGER, None),
        (TrialKind.COMPILE, None),
    ]


# --- what is believed of the job


@dataclass(frozen=True)
class Believed:
    """A cost model that believes what a test says: speedup, compile seconds, log spread."""

    of: Mapping[Config, tuple[float, float]]
    spread: float = 0.15
    default: tuple[float, float] = (1.3, 30.0)

    def estimate(self, facts: Facts) -> Estimate:
        speedup, compile_s = self.of.get(facts.config, self.default)
        quantiles = normal_quantiles(LEVELS_OF_BELIEF)
        return Estimate(
            speedup=Belief(math.log(speedup) + self.spread * quantiles),
            compile_s=Belief(math.log(compile_s) + 0.3 * quantiles),
            memory_ratio=Belief(0.1 * quantiles),
        )

    def __call__(self, eager: Trial) -> Beliefs | None:
        return Beliefs.of(self, NO_SHIFTS, eager)  # type: ignore[arg-type]


def test_what_is_expected_to_bring_most_for_its_price_comes_first() -> None:
    likely = Believed({WHOLE: (1.6, 40.0), REGIONAL: (1.1, 25.0)})
    _, steps = run(request(), Job({WHOLE: Truth(ratio=1.6)}), believe=likely)
    assert compiled(steps)[0] == WHOLE
    other = Believed({WHOLE: (1.3, 400.0), REGIONAL: (1.3, 20.0)})
    _, steps = run(request(), Job({}), believe=other)
    assert compiled(steps)[0] == REGIONAL


def test_what_is_not_expected_to_bring_its_price_is_skipped_with_what_it_would_bring() -> None:
    sure = Believed({REGIONAL: (1.6, 25.0)}, spread=0.03, default=(1.5, 30.0))
    campaign, steps = run(
        request(Plan(steps=12_000)), Job({REGIONAL: Truth(ratio=1.6)}), believe=sure
    )
    assert compiled(steps) == [REGIONAL]
    reason = skipped(campaign)[WHOLE]
    assert reason.kind == "not_worth_it"
    assert re.search(r"1\.5\dx \(.*\) is expected of it", reason.message)


def test_a_disappointment_lowers_what_is_expected_of_the_others() -> None:
    hopeful = Believed({REGIONAL: (1.5, 15.0)}, spread=0.2, default=(1.5, 30.0))
    plan = Plan(steps=8_000)
    failed = Truth(status=TrialStatus.OUT_OF_MEMORY)
    _, without = run(request(plan), Job({REGIONAL: failed}), believe=hopeful)
    assert compiled(without)[:2] == [REGIONAL, WHOLE]
    campaign, after = run(request(plan), Job({REGIONAL: Truth(ratio=0.8)}), believe=hopeful)
    assert compiled(after) == [REGIONAL]
    assert skipped(campaign)[WHOLE].kind == "not_worth_it"


def test_exhaustive_tries_all_that_can_run_whatever_is_believed() -> None:
    hopeless = Believed({}, spread=0.02, default=(0.7, 300.0))
    _, few = run(request(), Job({}), believe=hopeless)
    campaign, all_of_them = run(request(exhaustive=True), Job({}), believe=hopeless)
    assert compiled(few) == []
    assert len(compiled(all_of_them)) == campaign.total_configurations() - len(skipped(campaign))
    assert {failure.kind for failure in skipped(campaign).values()} <= {"not_on_device"}


def test_a_short_plan_still_ends_before_the_first_compile() -> None:
    campaign, steps = run(request(Plan(steps=50)), Job({}), believe=Believed({}))
    assert compiled(steps) == []
    assert all(failure.kind == "cannot_pay" for failure in skipped(campaign).values())


def test_a_device_that_nothing_is_known_of_goes_by_best_cases() -> None:
    _, with_it = run(request(), Job({}, device="cuda:0"), believe=Believed({}))
    _, without = run(request(), Job({}, device="cuda:0"))
    assert compiled(with_it) == compiled(without)


def test_each_trial_knows_the_rival_and_what_compiling_usually_takes() -> None:
    likely = Believed({WHOLE: (1.6, 40.0), REGIONAL: (1.58, 25.0)})
    job = Job({WHOLE: Truth(ratio=1.25), REGIONAL: Truth(ratio=1.25)})
    _, steps = run(request(Plan(steps=100_000)), job, believe=likely)
    first, second = [step for step in steps if step.kind is TrialKind.COMPILE][:2]
    assert first.rival_share == pytest.approx(1.0)
    assert second.rival_share == pytest.approx(1 / 1.25, rel=0.03)
    assert first.compile_s is not None
    assert first.compile_s.low < first.compile_s.median < first.compile_s.high
