"""What `advise estimate`, `devices`, `corpus` and `report` do, once they were typed."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from advisor.job_facts import PRECISIONS, EstimateRequest, EstimateResponse, JobFacts, OutcomeReport
from advisor.models.devices import Device
from advisor.models.families import FAMILIES, family_of
from advisor.models.plan import Plan
from advisor.profiler.errors import PlanError
from advisor.profiler.records import Config, Trial, WorkloadSpec
from advisor.profiler.units import number_of, parse_count, parse_duration

if TYPE_CHECKING:
    from advisor.question import Typed

# How precisions are typed for presets, as the corpus names them.
_PRECISIONS = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "bf16": "amp-bf16",
    "fp16": "amp-fp16",
}
# And back: what a preset calls them.
_PRESET_PRECISIONS = {
    "fp32": "float32",
    "tf32": "float32",
    "amp-bf16": "bf16",
    "amp-fp16": "fp16",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TypedFacts:
    """The options of `advise estimate` and `report` that say what is known of the job."""

    device: str
    family: str | None = None
    precision: str | None = None
    parameters: str | None = None
    batch: float | None = None
    length: float | None = None
    image: float | None = None
    eager_step: str | None = None
    operators: float | None = None
    graph_breaks: float | None = None


def facts_of(typed: TypedFacts, counted: Trial | None = None) -> JobFacts:
    """Returns the facts that were typed, with what counting the workload showed beneath them.

    Raises `PlanError` for the first that makes no sense.
    """
    Device.from_name(typed.device)
    facts = JobFacts(device=typed.device)
    if counted is not None:
        from advisor.outcomes import job_facts

        seen = job_facts(counted)
        if seen is not None:
            facts = replace(seen, device=typed.device, eager_step_s=None)
    given: dict[str, Any] = {
        "family": _family(typed.family),
        "precision": _precision(typed.precision),
        "parameters": None
        if typed.parameters is None
        else parse_count(typed.parameters, "--parameters"),
        "batch": _positive(typed.batch, "--batch-size"),
        "length": _positive(typed.length, "--length"),
        "image": _positive(typed.image, "--image"),
        "eager_step_s": None
        if typed.eager_step is None
        else parse_duration(typed.eager_step, "--eager-step"),
        "operators": _positive(typed.operators, "--operators"),
        "graph_breaks": _at_least_zero(typed.graph_breaks, "--graph-breaks"),
    }
    return replace(facts, **{name: value for name, value in given.items() if value is not None})


def counted(spec: WorkloadSpec) -> Trial:
    """Returns what a step of a workload has to do, counted in a process of its own.

    Raises `WorkloadError` when it cannot be built, `HostError` when no process can be started.
    """
    from advisor.profiler.api import count

    return count(spec)


def answered(
    facts: JobFacts, plan: Plan | None, configs: Sequence[Config], server: str | None
) -> EstimateResponse:
    """Returns the estimate: from the server asked, else worked out here.

    Raises `PlanError` for what makes no sense, `StoreError` for the data folder.
    """
    request = EstimateRequest(facts=facts, plan=plan, configs=tuple(configs))
    if server is not None:
        from advisor.client import Client

        with Client(server) as client:
            return client.estimate(request)
    _tell_of_fitting()
    return asyncio.run(_here(request))


def reported(report: OutcomeReport, server: str | None) -> int:
    """Tells the server asked, else the own data folder, and returns the number of outcomes."""
    if server is not None:
        from advisor.client import Client

        with Client(server) as client:
            return client.report_outcome(report)
    _tell_of_fitting()
    return asyncio.run(_report_here(report))


def _tell_of_fitting() -> None:
    from advisor import prior_store

    if not prior_store.is_kept():
        sys.stderr.write("Fitting the cost model on the corpus, once: about 10 s.\n")


async def _here(request: EstimateRequest) -> EstimateResponse:
    from advisor.places import data_folder
    from advisor.service.estimator import Estimator
    from advisor.service.store import Store

    with Store(data_folder()) as store:
        return await Estimator(store).estimate(request)


async def _report_here(report: OutcomeReport) -> int:
    from advisor.places import data_folder
    from advisor.service.estimator import Estimator
    from advisor.service.store import Store

    with Store(data_folder()) as store:
        return await Estimator(store).report(report)


def _kind(device: str) -> str:
    """Returns `cpu` or `cuda`, as modes are told apart."""
    return "cpu" if Device.from_name(device).architecture == "cpu" else "cuda"


def _family(name: str | None) -> str | None:
    if name is None:
        return None
    found = family_of(name)
    if not found:
        known = ", ".join(FAMILIES)
        raise PlanError(
            f"--family {name!r} is none that the corpus has",
            mend=f"give the name of a model's class, or one of: {known}",
        )
    return found


def _precision(name: str | None) -> str | None:
    if name is None:
        return None
    found = _PRECISIONS.get(name, name)
    if found not in PRECISIONS:
        known = ", ".join((*PRECISIONS, *_PRECISIONS))
        raise PlanError(f"--precision {name!r} is unknown", mend=f"known are {known}")
    return found


def _positive(value: float | None, option: str) -> float | None:
    if value is not None and not (math.isfinite(value) and value > 0):
        raise PlanError(f"{option} {value:g} makes no sense", mend="a number above 0 is expected")
    return value


def _at_least_zero(value: float | None, option: str) -> float | None:
    if value is not None and not (math.isfinite(value) and value >= 0):
        raise PlanError(f"{option} {value:g} makes no sense", mend="0 or more is expected")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class TypedOutcome:
    """The options of `advise report` that say what compiling brought."""

    speedup: float | None
    compile_time: str | None
    memory_ratio: float | None
    mode: str
    scope: str


def estimated(asked: Typed, typed: TypedFacts, server: str | None, *, as_json: bool) -> None:
    """Prints the estimate of what was typed. Raises what `facts_of`, `counted`, `answered` do."""
    if not typed.device:
        raise PlanError(
            "--device is missing", mend="name what is trained on, such as a100-80gb or cpu-8"
        )
    Device.from_name(typed.device)
    plan = None
    if asked.steps is not None or asked.hours is not None:
        plan = Plan(
            steps=asked.steps,
            hours=asked.hours,
            restarts=asked.restarts,
            confidence=asked.confidence,
        )
        plan.validate()
    elif asked.restarts:
        raise PlanError("--restarts came without --steps or --hours", mend="give one of them")
    from advisor.question import check_workload, configs_of

    configs = configs_of(asked.modes, asked.scopes, asked.dynamics, _kind(typed.device))
    trial = None
    if asked.target:
        spec = WorkloadSpec(
            target=asked.target,
            cwd=str(Path.cwd()),
            device="cpu",
            task=asked.task,
            batch_size=asked.batch_size,
            length=asked.length,
            precision=_PRESET_PRECISIONS.get(asked.precision or "", asked.precision),
            scale=asked.scale,
        )
        check_workload(spec)
        trial = counted(spec)
    response = answered(facts_of(typed, trial), plan, configs, server)
    if as_json:
        from advisor.convert import estimate_message, message_json

        sys.stdout.write(message_json(estimate_message(response)) + "\n")
        return
    from advisor.estimate_report import print_estimate

    print_estimate(response, plan)


def told(file: Path | None, typed: TypedFacts, outcome: TypedOutcome, server: str | None) -> str:
    """Reports what was typed, or every line of a file, and returns what to say of it."""
    if file is not None:
        reports = read_outcomes(file)
    elif not typed.device:
        raise PlanError("--device is missing", mend="name what it trained on, or give a file")
    else:
        from advisor.question import configs_of

        (config,) = configs_of((outcome.mode,), (outcome.scope,), (), _kind(typed.device))
        reports = [
            OutcomeReport(
                facts=facts_of(typed),
                config=config,
                speedup=_positive(outcome.speedup, "--speedup"),
                compile_s=None
                if outcome.compile_time is None
                else parse_duration(outcome.compile_time, "--compile-time"),
                memory_ratio=_positive(outcome.memory_ratio, "--memory-ratio"),
                source="advise report",
            )
        ]
    known = 0
    for each in reports:
        known = reported(each, server)
    return f"{number_of(len(reports), 'outcome')} kept; estimates learn from {known} now."


def read_outcomes(path: Path) -> list[OutcomeReport]:
    """Returns the outcomes in a file of JSON lines, each as `ReportOutcomeRequest` spells it.

    Raises `PlanError` naming the first line that is none.
    """
    from advisor.convert import outcome_of_json

    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path} cannot be read", str(error)) from error
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            found.append(outcome_of_json(line, f"{path}, line {number}"))
    if not found:
        raise PlanError(f"{path} holds no outcome", mend="one JSON object a line is expected")
    return found
