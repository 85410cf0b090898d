"""The advice: what is enabled, what is not, and that the reason that matters most comes first."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.decision import decide
from advisor.models.plan import Plan
from advisor.profiler.errors import AdvisorError
from advisor.profiler.records import (
    Advice,
    Blocks,
    Config,
    Dynamic,
    Failure,
    GraphBreak,
    GraphBreakCause,
    Interval,
    Mode,
    Pair,
    Scope,
    Timing,
    Trial,
    TrialKind,
    TrialStatus,
    WorkloadFacts,
    WorkloadSpec,
    decode,
    encode,
)
from advisor.request import AdviceRequest, Limits

REGIONAL = Config(scope=Scope.REGIONAL)
WHOLE = Config(scope=Scope.MODEL)
STEP_S = 0.06
FACTS = WorkloadFacts(
    fingerprint="f",
    model_class="BertForTokenClassification",
    parameters=10**6,
    trainable_parameters=10**6,
    optimizer="AdamW",
    dtype="float32",
    shapes=(),
    blocks=(
        Blocks(
            module_class="modeling_bert.BertLayer",
            paths=("bert.encoder.layer.0", "bert.encoder.layer.1"),
            container="bert.encoder.layer",
        ),
    ),
)


def eager(step_s: float = STEP_S, **changes: object) -> Trial:
    figure = Interval(median=step_s, low=step_s * 0.97, high=step_s * 1.03)
    trial = Trial(
        trial_id="eager",
        kind=TrialKind.EAGER,
        status=TrialStatus.OK,
        eager=Timing(step_s=figure, data_wait_s=0.0),
        workload=FACTS,
    )
    return replace(trial, **changes)  # type: ignore[arg-type]


def quads(
    ratio: float, step_s: float = STEP_S, noise: float = 0.01, seed: int = 0
) -> tuple[Pair, ...]:
    spread = np.exp(noise * np.random.default_rng(seed).standard_normal((20, 2)))
    return tuple(
        Pair(eager_s=step_s * float(a), compiled_s=step_s / ratio * float(b)) for a, b in spread
    )


def compiled(config: Config, ratio: float = 1.2, cold_s: float = 24.0, **changes: object) -> Trial:
    trial = Trial(
        trial_id=f"{config.scope}-{config.mode}",
        kind=TrialKind.COMPILE,
        status=TrialStatus.OK,
        config=config,
        pairs=quads(ratio),
        cold_start_s=cold_s,
        graphs=3,
        coverage=0.97,
        cache_folder=f"/cache/{config.scope}",
        cache_bytes=5_000_000,
    )
    return replace(trial, **changes)  # type: ignore[arg-type]


def warm(config: Config, warm_s: float = 3.0, ratio: float = 1.2) -> Trial:
    return Trial(
        trial_id="warm",
        kind=TrialKind.WARM,
        status=TrialStatus.OK,
        config=config,
        pairs=quads(ratio, seed=7),
        warm_start_s=warm_s,
        graphs=3,
        coverage=0.97,
    )


def failed(config: Config, status: TrialStatus, message: str) -> Trial:
    return Trial(
        trial_id=f"failed-{config.scope}",
        kind=TrialKind.COMPILE,
        status=status,
        config=config,
        failure=Failure(kind="compile", message=message),
    )


def advise(
    *trials: Trial, plan: Plan | None = None, campaign_s: float = 60.0, **options: object
) -> Advice:
    request = AdviceRequest(
        workload=WorkloadSpec(target="train.py:build", cwd="/"),
        plan=plan or Plan(steps=20_000),
        limits=Limits(**{k: v for k, v in options.items() if k != "use_hand_over"}),  # type: ignore[arg-type]
    )
    return decide(
        request,
        trials,
        campaign_s,
        "advice-1",
        "2026-01-01T00:00:00Z",
        use_hand_over=bool(options.get("use_hand_over")),
    )


def why_not(advice: Advice, config: Config) -> str:
    return next(a.why_not for a in advice.alternatives if a.config == config)


def kept_whole(config: Config) -> Config:
    """Returns a configuration as it is advised where nothing broke a graph."""
    return replace(config, fullgraph=True)


def test_graph_breaks_and_limits_forbid_fullgraph() -> None:
    met = GraphBreak(cause=GraphBreakCause.PRINT_OR_LOGGING, reason="print")
    for broken in ({"graph_breaks": (met,)}, {"skipped_frames": 1}, {"recompile_limit_hit": True}):
        advice = advise(eager(), compiled(REGIONAL, coverage=0.9, **broken))
        assert advice.config == REGIONAL
        assert "fullgraph" not in advice.code
        assert not any("fullgraph" in reason for reason in advice.reasons)


def test_configuration_that_pays_is_enabled_with_code_figures_and_reasons() -> None:
    advice = advise(eager(), compiled(REGIONAL))
    assert advice.enable
    assert advice.config == kept_whole(REGIONAL)
    assert advice.code == (
        "for block in model.bert.encoder.layer:\n    block.compile(fullgraph=True)"
    )
    assert advice.speedup is not None
    assert advice.speedup.low > 1.1
    assert advice.break_even_step == pytest.approx(2400, rel=0.1)
    assert advice.p_saves > 0.99
    assert advice.hand_over is not None
    assert advice.hand_over.path == "/cache/regional"
    assert "50.1 ms instead of 59.8 ms: 1.19x" in advice.reasons[0]
    assert "24 s of compiling are paid back after step 2," in advice.reasons[1]
    assert advice.eager_total_s.median == pytest.approx(1200, rel=0.02)
    assert advice.advised_total_s.median == pytest.approx(1024, rel=0.02)


def test_lowest_expected_total_wins_and_not_the_highest_speedup() -> None:
    slow_to_compile = compiled(WHOLE, 1.30, cold_s=400.0)
    quick = compiled(REGIONAL, 1.20, cold_s=24.0)
    short = advise(eager(), quick, slow_to_compile, plan=Plan(steps=30_000))
    long = advise(eager(), quick, slow_to_compile, plan=Plan(steps=300_000))
    assert short.config == kept_whole(REGIONAL)
    assert long.config == kept_whole(WHOLE)
    assert "more than model default" in why_not(long, REGIONAL)
    assert long.alternatives[0].total_s is not None


def test_machine_that_was_slow_during_one_trial_does_not_decide() -> None:
    """Whole model: better ratio, but measured while the machine ran at half its speed."""
    slow = compiled(WHOLE, pairs=quads(1.3, step_s=2 * STEP_S), cold_s=24.0)
    advice = advise(eager(), compiled(REGIONAL, 1.2), slow)
    assert advice.config == kept_whole(WHOLE)


def test_plan_too_short_stays_eager_and_names_the_break_even_step() -> None:
    advice = advise(eager(), compiled(REGIONAL), plan=Plan(steps=1000))
    assert not advice.enable
    assert advice.code == ""
    assert advice.config is advice.speedup is advice.saved_s is advice.hand_over is None
    assert advice.advised_total_s == advice.eager_total_s
    assert "paid back after step 2," in advice.reasons[0]
    assert "the plan has 1,000" in advice.reasons[0]
    assert advice.break_even_step == pytest.approx(2400, rel=0.1)


def test_slower_configuration_stays_eager() -> None:
    advice = advise(eager(), compiled(REGIONAL, 0.9), plan=Plan(steps=10**7))
    assert not advice.enable
    assert "slower than eager: 0.90x" in advice.reasons[0]
    assert advice.break_even_step is None


def test_gain_within_the_noise_stays_eager() -> None:
    advice = advise(
        eager(), compiled(REGIONAL, pairs=quads(1.01, noise=0.15)), plan=Plan(steps=10**7)
    )
    assert not advice.enable
    assert 0.02 < advice.p_saves < 0.9
    assert any("known only to" in warning for warning in advice.warnings)


def test_asked_for_confidence_decides() -> None:
    trials = (eager(), compiled(REGIONAL, pairs=quads(1.03, noise=0.05)))
    cautious = advise(*trials, plan=Plan(steps=10**6, confidence=0.99))
    bold = advise(*trials, plan=Plan(steps=10**6, confidence=0.5))
    assert 0.5 < cautious.p_saves < 0.99
    assert not cautious.enable
    assert bold.enable
    assert "below the 99 % asked for" in cautious.reasons[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"graphs": 0, "coverage": 0.0}, "captured no graph"),
        ({"graphs": None, "coverage": None}, "captured no graph"),
        ({"graphs": 0, "coverage": None, "skipped_frames": 12}, "12 frames were skipped"),
        ({"coverage": 0.03}, "only 3 % of the operator calls"),
        ({"recompile_limit_hit": True, "coverage": 0.2}, "recompile limit was hit"),
        ({"recompile_limit_hit": True, "coverage": None}, "recompile limit was hit"),
    ],
)
def test_silent_no_op_is_never_called_compiled(changes: dict, words: str) -> None:
    """However fast it looks: nothing was compiled, so the difference is not the compiler's."""
    advice = advise(eager(), compiled(WHOLE, 3.0, cold_s=0.1, **changes))
    assert not advice.enable
    assert words in advice.reasons[0]
    assert words in why_not(advice, WHOLE)


def test_recompile_limit_with_most_of_the_step_compiled_is_a_warning_only() -> None:
    advice = advise(eager(), compiled(WHOLE, recompile_limit_hit=True, coverage=0.9))
    assert advice.enable
    assert any("recompile limit" in warning for warning in advice.warnings)


def test_all_failed_stays_eager_with_their_reasons() -> None:
    advice = advise(
        eager(),
        failed(REGIONAL, TrialStatus.FAILED_TO_COMPILE, "Unsupported: a generator"),
        failed(WHOLE, TrialStatus.CRASHED, "ended by SIGSEGV while compiling"),
    )
    assert not advice.enable
    assert "does not compile: Unsupported: a generator" in advice.reasons[0]
    assert "SIGSEGV" in advice.reasons[1]
    assert advice.p_saves == 0
    assert advice.eager_total_s.low < advice.eager_total_s.median < advice.eager_total_s.high
    assert {a.config for a in advice.alternatives} == {REGIONAL, WHOLE}


def test_silent_no_op_matters_more_than_a_failure_that_was_said() -> None:
    advice = advise(
        eager(),
        failed(REGIONAL, TrialStatus.CRASHED, "ended by SIGSEGV"),
        compiled(WHOLE, 2.0, graphs=0),
    )
    assert "captured no graph" in advice.reasons[0]


def test_numerical_disagreement_is_never_enabled() -> None:
    wrong = replace(
        compiled(WHOLE, 2.0),
        status=TrialStatus.DISAGREES,
        failure=Failure(kind="numerics", message="losses differ by 12 %"),
    )
    advice = advise(eager(), wrong, plan=Plan(steps=10**7))
    assert not advice.enable
    assert "losses differ by 12 %" in advice.reasons[0]


def test_configuration_above_the_memory_limit_is_not_advised() -> None:
    big = compiled(WHOLE, 1.5, peak_bytes=3 * 2**30)
    assert advise(eager(), big).config == kept_whole(WHOLE)
    advice = advise(eager(), big, compiled(REGIONAL, 1.1), memory_limit_bytes=2 * 2**30)
    assert advice.config == kept_whole(REGIONAL)
    assert "3 GiB is above the memory limit" in why_not(advice, WHOLE)


def test_nothing_tried_gives_the_reason_of_the_skipped() -> None:
    message = "even at 3.05x and 5.0 s of compiling it would take 6.0 s"
    skipped = Trial(
        trial_id="s",
        kind=TrialKind.COMPILE,
        status=TrialStatus.SKIPPED,
        config=WHOLE,
        failure=Failure(kind="cannot_pay", message=message),
    )
    no_blocks = replace(
        skipped, trial_id="r", config=REGIONAL, failure=Failure(kind="no_blocks", message="none")
    )
    advice = advise(eager(), no_blocks, skipped, plan=Plan(steps=50))
    assert not advice.enable
    assert message in advice.reasons[0]
    assert why_not(advice, WHOLE) == message
    assert advice.eager_total_s.median == pytest.approx(3.0)


def test_eager_facts_alone_stay_eager() -> None:
    advice = advise(eager())
    assert not advice.enable
    assert advice.reasons


def test_no_eager_step_time_is_an_error_with_the_trial_s_reason() -> None:
    broken = eager(
        eager=None, status=TrialStatus.CRASHED, failure=Failure(kind="exit", message="it exited")
    )
    with pytest.raises(AdvisorError, match="no trial could run: it exited"):
        advise(broken)
    with pytest.raises(AdvisorError, match="no trial could run"):
        advise()


def test_restarts_are_billed_warm_where_that_was_measured() -> None:
    plan = Plan(steps=20_000, restarts=5)
    cold = advise(eager(), compiled(REGIONAL), plan=plan)
    known = advise(eager(), compiled(REGIONAL), warm(REGIONAL), plan=plan)
    assert cold.saved_s is not None
    assert known.saved_s is not None
    assert known.saved_s.median - cold.saved_s.median == pytest.approx(5 * 21, rel=0.25)
    assert any("as its warm start was not measured" in reason for reason in cold.reasons)
    assert any("a warm start of 3.0 s" in reason for reason in known.reasons)
    assert any("in 2 processes" in reason for reason in known.reasons)


def test_second_process_that_disagrees_is_a_warning_and_a_wider_interval() -> None:
    one = advise(eager(), compiled(REGIONAL, 1.3))
    two = advise(eager(), compiled(REGIONAL, 1.3), warm(REGIONAL, ratio=1.15))
    assert one.speedup is not None
    assert two.speedup is not None
    assert two.speedup.high - two.speedup.low > 3 * (one.speedup.high - one.speedup.low)
    assert any("from process to process" in warning for warning in two.warnings)


def test_hand_over_makes_a_plan_pay_that_is_too_short_for_a_cold_start() -> None:
    trials = (eager(), compiled(REGIONAL), warm(REGIONAL))
    cold = advise(*trials, plan=Plan(steps=1500))
    handed = advise(*trials, plan=Plan(steps=1500), use_hand_over=True)
    assert not cold.enable
    said = next(reason for reason in cold.reasons if "save" in reason)
    assert f"`advise exec {cold.advice_id} -- python train.py`" in said
    assert cold.hand_over is not None
    assert cold.hand_over.path == "/cache/regional"
    assert handed.enable
    assert handed.compile_s is not None
    assert handed.compile_s.median == pytest.approx(3, rel=0.05)


def test_campaign_time_never_changes_the_choice_but_is_told() -> None:
    trials = (eager(), compiled(REGIONAL, 1.2), compiled(WHOLE, 1.25, cold_s=43.0))
    cheap = advise(*trials, campaign_s=10.0)
    dear = advise(*trials, campaign_s=5000.0)
    assert (cheap.config, cheap.saved_s, cheap.p_saves) == (dear.config, dear.saved_s, dear.p_saves)
    assert any("remain saved" in reason for reason in cheap.reasons)
    assert any("pays only if the job is run again" in reason for reason in dear.reasons)
    assert dear.campaign_s == 5000.0


def test_job_that_waits_for_its_data_is_told_so() -> None:
    figure = Interval(median=STEP_S, low=STEP_S, high=STEP_S)
    waiting = eager(eager=Timing(step_s=figure, data_wait_s=0.12))
    advice = advise(waiting, compiled(REGIONAL))
    assert any("67 % of the eager training waits for data" in w for w in advice.warnings)
    assert advice.eager_total_s.median == pytest.approx(20_000 * 0.18, rel=0.02)


def test_warnings_of_trials_and_of_unsteady_steps_reach_the_advice_once() -> None:
    figure = Interval(median=STEP_S, low=STEP_S * 0.7, high=STEP_S * 1.5)
    noisy = eager(eager=Timing(step_s=figure, steady=False, spread=0.3), warnings=("load is 7.5",))
    advice = advise(noisy, compiled(REGIONAL, warnings=("load is 7.5",), flip_check=1.08))
    assert advice.warnings.count("load is 7.5") == 1
    assert any("scatter by 30 %" in warning for warning in advice.warnings)
    assert any("1.08x the time of a model that was never compiled" in w for w in advice.warnings)


def test_money_and_hours_follow_the_price() -> None:
    advice = advise(eager(), compiled(REGIONAL), plan=Plan(steps=10**6, price_per_hour=2.5))
    assert advice.gpu_hours_saved is not None
    assert advice.money_saved == pytest.approx(advice.gpu_hours_saved * 2.5)
    assert any("2.50 an hour" in reason for reason in advice.reasons)


def test_graph_breaks_are_listed_as_fixes_without_a_gain() -> None:
    found = GraphBreak(
        cause=GraphBreakCause.SCALAR_READ, reason="Tensor.item()", file="train.py", line=12
    )
    advice = advise(eager(), compiled(REGIONAL, graph_breaks=(found, found)))
    assert [(fix.file, fix.line, fix.gain, fix.measured) for fix in advice.fixes] == [
        ("train.py", 12, None, False)
    ]


def test_advice_survives_its_encoding() -> None:
    for plan in (Plan(steps=20_000, price_per_hour=1.0), Plan(steps=10)):
        advice = advise(eager(), compiled(REGIONAL), warm(REGIONAL), plan=plan)
        assert decode(encode(advice), Advice) == advice


configs = st.builds(
    Config,
    scope=st.sampled_from(list(Scope)),
    mode=st.sampled_from(list(Mode)),
    dynamic=st.sampled_from(list(Dynamic)),
)
tried = st.builds(
    lambda config, ratio, cold, graphs, coverage, status: replace(
        compiled(config, ratio, cold, graphs=graphs, coverage=coverage),
        status=status,
        failure=None if status is TrialStatus.OK else Failure(kind="k", message="m"),
    ),
    configs,
    st.floats(0.5, 3.0),
    st.floats(0.1, 300.0),
    st.sampled_from([0, 1, 5]),
    st.sampled_from([None, 0.01, 0.9]),
    st.sampled_from([TrialStatus.OK, TrialStatus.OK, TrialStatus.CRASHED, TrialStatus.SKIPPED]),
)


@given(
    st.lists(tried, max_size=5, unique_by=lambda t: t.config),
    st.integers(1, 10**6),
    st.integers(0, 5),
)
@settings(max_examples=60, deadline=None)
def test_advice_is_sound_whatever_the_trials(
    trials: list[Trial], steps: int, restarts: int
) -> None:
    advice = advise(eager(), *trials, plan=Plan(steps=steps, restarts=restarts))
    assert advice.reasons
    assert all(reason.strip() for reason in advice.reasons)
    assert advice.steps == steps
    told = {a.config for a in advice.alternatives}
    advised = replace(advice.config, fullgraph=False) if advice.config else None
    assert told | ({advised} if advice.enable else set()) == {t.config for t in trials}
    if not advice.enable:
        assert (advice.code, advice.config) == ("", None)
        return
    assert advised not in told
    assert advice.p_saves >= 0.9
    winner = next(t for t in trials if t.config == advised)
    assert winner.status is TrialStatus.OK
    assert winner.graphs
    assert winner.coverage != 0.01
    totals = [a.total_s.median for a in advice.alternatives if a.total_s]
    if advice.p_saves > 0.99:
        sure = [
            t for a, t in zip(advice.alternatives, totals, strict=False) if "pays too" in a.why_not
        ]
        assert all(advice.advised_total_s.median <= total * 1.001 for total in sure)
