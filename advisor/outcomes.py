"""What the trials of a campaign say of a job, as the cost model takes it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from advisor.job_facts import JobFacts, OutcomeReport
from advisor.profiler.records import Advice, Environment, Trial, TrialKind, TrialStatus

# Sizes as `training.signature` writes the first tensor of a batch: `8x64:int64`.
_FIRST_TENSOR = re.compile(r"(?P<rows>\d+)x(?P<length>\d+):(?P<dtype>int64|int32)")
# Bytes of a parameter, above which most are float32.
_MIXED_BYTES = 3.0


def outcomes_of(advice: Advice) -> Iterator[tuple[str, OutcomeReport]]:
    """Yields trial id and outcome of each configuration that was measured and agreed."""
    eager = next((trial for trial in advice.trials if trial.kind is TrialKind.EAGER), None)
    if eager is None:
        return
    for trial in advice.trials:
        if trial.kind is not TrialKind.COMPILE or trial.status is not TrialStatus.OK:
            continue
        facts = job_facts(eager, trial)
        if facts is None or trial.config is None or trial.config.options or not trial.speedup:
            continue
        ratio = None
        if _is_cuda(eager.environment) and trial.eager_peak_bytes and trial.peak_bytes:
            # On a CPU the peak is the whole process's: libraries and compiler included.
            ratio = trial.eager_peak_bytes / trial.peak_bytes
        yield (
            trial.trial_id,
            OutcomeReport(
                facts=facts,
                config=trial.config,
                speedup=trial.speedup.median,
                compile_s=trial.cold_start_s or None,
                memory_ratio=ratio,
                source=f"campaign {advice.advice_id}",
            ),
        )


def job_facts(eager: Trial, trial: Trial | None = None) -> JobFacts | None:
    """Returns what an eager trial shows of its job, and `trial` of its graphs; None without any."""
    workload, environment = eager.workload, eager.environment
    if workload is None or environment is None:
        return None
    sizes = _FIRST_TENSOR.match(workload.shapes[0].signature) if workload.shapes else None
    breaks = None
    if trial is not None and trial.graphs is not None:
        breaks = max(0.0, trial.graphs - 1.0)
    return JobFacts(
        device=device_name(environment),
        family=workload.model_class.rpartition(".")[2],
        precision=precision_of(eager),
        parameters=float(workload.parameters),
        batch=float(sizes["rows"]) if sizes else None,
        length=float(sizes["length"]) if sizes else None,
        eager_step_s=eager.eager_step_s.median if eager.eager_step_s else None,
        graph_breaks=breaks,
        counts=eager.counts,
        fingerprint=workload.fingerprint,
    )


def device_name(environment: Environment) -> str:
    """Returns what the cost model calls the device of an environment."""
    return environment.device_name if _is_cuda(environment) else f"cpu-{environment.cores}"


def precision_of(eager: Trial) -> str:
    """Returns the precision as the corpus names it, from what the model computes and holds."""
    dtype = eager.workload.dtype if eager.workload else ""
    short = {"float16": "fp16", "bfloat16": "bf16"}.get(dtype)
    if short is None:
        return "fp32"
    counts = eager.counts
    if counts is None or counts.parameter_bytes is None:
        return f"amp-{short}"
    # Weights of four bytes that are computed with in two: autocast.
    mixed = counts.parameter_bytes > _MIXED_BYTES * counts.parameters
    return f"amp-{short}" if mixed else short


def _is_cuda(environment: Environment | None) -> bool:
    return environment is not None and environment.device.startswith("cuda")
