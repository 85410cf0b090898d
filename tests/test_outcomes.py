"""What a campaign's trials say to the cost model: facts, figures, and what is left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from advisor.outcomes import job_facts, outcomes_of
from advisor.profiler.records import (
    Advice,
    Config,
    Environment,
    Interval,
    Shape,
    Trial,
    TrialKind,
    TrialStatus,
    WorkloadFacts,
)
from advisor.profiler.step_counts import OperatorKind, StepCounts, Work

STEP = Interval(median=0.08, low=0.079, high=0.081)
GAIN = Interval(median=1.4, low=1.35, high=1.45)
COUNTS = StepCounts(
    parameters=1e6, tensors=10, layers=5, parameter_bytes=4e6,
    eager=(Work(kind=OperatorKind.POINTWISE, calls=400, flops=1e9, bytes=1e10),),
    fused=(Work(kind=OperatorKind.FUSED, calls=40, flops=1e9, bytes=2e9),),
)  # fmt: skip
EAGER = Trial(
    trial_id="e",
    kind=TrialKind.EAGER,
    status=TrialStatus.OK,
    eager_step_s=STEP,
    counts=COUNTS,
    workload=WorkloadFacts(
        fingerprint="ab12",
        model_class="transformers.models.bert.modeling_bert.BertForMaskedLM",
        parameters=10**6,
        trainable_parameters=10**6,
        optimizer="AdamW",
        dtype="float32",
        shapes=(Shape(signature="16x128:int64 16x128:int64", share=1.0),),
    ),
    environment=Environment(
        torch="2.13", python="3.11", device="cpu", device_name="a CPU", cores=4, threads=4,
        memory_bytes=2**33,
    ),
)  # fmt: skip
COMPILED = Trial(
    trial_id="c",
    kind=TrialKind.COMPILE,
    status=TrialStatus.OK,
    config=Config(),
    speedup=GAIN,
    cold_start_s=30.0,
    eager_peak_bytes=4 * 10**9,
    peak_bytes=2 * 10**9,
    graphs=3,
)


def advice(*trials: Trial) -> Advice:
    return Advice(
        advice_id="a1", created="2026-12-01", enable=False, target="t", config=None, code="",
        speedup=None, compile_s=None, saved_s=None, eager_total_s=STEP, advised_total_s=STEP,
        break_even_step=None, p_saves=0.0, reasons=(), steps=10.0, trials=trials,
    )  # fmt: skip


def on_gpu(trial: Trial, name: str = "NVIDIA A100-SXM4-80GB") -> Trial:
    assert trial.environment is not None
    there = replace(trial.environment, device="cuda:0", device_name=name)
    return replace(trial, environment=there)


def test_facts_of_a_job_are_those_that_its_eager_trial_saw() -> None:
    facts = job_facts(EAGER)
    assert facts is not None
    assert (facts.device, facts.family, facts.precision) == ("cpu-4", "BertForMaskedLM", "fp32")
    assert (facts.parameters, facts.batch, facts.length) == (1e6, 16.0, 128.0)
    assert facts.eager_step_s == STEP.median
    assert facts.counts is COUNTS
    assert facts.fingerprint == "ab12"
    assert facts.facts(Config()).family == "bert-like encoder"


def test_an_image_batch_has_no_length() -> None:
    assert EAGER.workload is not None
    images = replace(EAGER.workload, shapes=(Shape(signature="8x3x224x224:float32", share=1.0),))
    facts = job_facts(replace(EAGER, workload=images))
    assert facts is not None
    assert facts.length is None


@pytest.mark.parametrize(
    ("dtype", "parameter_bytes", "precision"),
    [
        ("float32", 4e6, "fp32"),
        ("bfloat16", 2e6, "bf16"),
        ("bfloat16", 4e6, "amp-bf16"),
        ("float16", 4e6, "amp-fp16"),
        ("bfloat16", None, "amp-bf16"),
    ],
)
def test_autocast_is_told_from_weights_of_two_bytes(
    dtype: str, parameter_bytes: float | None, precision: str
) -> None:
    assert EAGER.workload is not None
    workload = replace(EAGER.workload, dtype=dtype)
    counts = replace(COUNTS, parameter_bytes=parameter_bytes)
    facts = job_facts(replace(EAGER, workload=workload, counts=counts))
    assert facts is not None
    assert facts.precision == precision


def test_each_configuration_that_ran_is_an_outcome() -> None:
    failed = replace(COMPILED, trial_id="f", status=TrialStatus.CRASHED)
    wrong = replace(COMPILED, trial_id="d", status=TrialStatus.DISAGREES)
    with_settings = replace(COMPILED, trial_id="s", config=Config(options=(("a", "1"),)))
    warm = replace(COMPILED, trial_id="w", kind=TrialKind.WARM)
    told = list(outcomes_of(advice(EAGER, COMPILED, failed, wrong, with_settings, warm)))
    assert [name for name, _ in told] == ["c"]
    ((_, report),) = told
    assert (report.speedup, report.compile_s) == (1.4, 30.0)
    assert report.facts.graph_breaks == 2.0
    assert "a1" in report.source


def test_memory_of_a_whole_process_says_nothing_of_the_model() -> None:
    ((_, on_cpu),) = outcomes_of(advice(EAGER, COMPILED))
    ((_, there),) = outcomes_of(advice(on_gpu(EAGER), COMPILED))
    assert on_cpu.memory_ratio is None
    assert there.memory_ratio == 2.0
    assert there.facts.facts(Config()).device.name == "a100-80gb"


def test_without_an_eager_trial_there_is_nothing_to_learn() -> None:
    assert list(outcomes_of(advice(COMPILED))) == []
