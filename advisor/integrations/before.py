"""What is decided before a training, or after its first steps: by the cost model, or by trials."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from advisor import estimate, handover, prior_store
from advisor.job_facts import EstimateRequest, EstimateResponse, JobFacts
from advisor.models.plan import Plan
from advisor.outcomes import device_name
from advisor.profiler.errors import AdvisorError, HostError
from advisor.profiler.machine import environment
from advisor.profiler.records import Advice, Config, WorkloadSpec
from advisor.request import AdviceRequest, Limits

_PRECISIONS = {torch.float16: "fp16", torch.bfloat16: "bf16"}
# As accelerate and Lightning spell what autocast computes in.
_AUTOCAST = {
    "fp16": "amp-fp16",
    "16-mixed": "amp-fp16",
    "bf16": "amp-bf16",
    "bf16-mixed": "amp-bf16",
}


def estimated(
    model: torch.nn.Module,
    *,
    steps: float,
    step_s: float,
    config: Config | None = None,
    autocast: str = "",
) -> EstimateResponse:
    """Returns what the cost model says of compiling for `steps` that take `step_s` eager.

    The cost model is fitted in some seconds if it never was. Raises `PlanError` for a device that
    it does not know, `StoreError` where it cannot be fitted.
    """
    first = next(model.parameters())
    facts = JobFacts(
        device=device_name(environment(first.device)),
        family=type(model).__name__,
        precision=_AUTOCAST.get(autocast) or _PRECISIONS.get(first.dtype, "fp32"),
        parameters=float(sum(p.numel() for p in model.parameters())),
        eager_step_s=step_s,
    )
    configs = () if config is None else (config,)
    request = EstimateRequest(facts=facts, plan=Plan(steps=steps), configs=configs)
    return estimate.estimate(request, prior_store.load())


def campaigned(
    workload: str, *, device: torch.device, steps: float, budget_s: float | None = None
) -> Advice:
    """Returns the advice of a campaign for a workload: trials, in child processes, now.

    Raises `WorkloadError`, `PlanError`, or what else stops a campaign.
    """
    # gRPC enters a training only here.
    from advisor.client import Client

    request = AdviceRequest(
        workload=WorkloadSpec(target=workload, cwd=str(Path.cwd()), device=str(device)),
        plan=Plan(steps=steps),
        limits=Limits(budget_s=budget_s),
    )
    with Client() as client:
        for event in client.advise(request):
            if isinstance(event, Advice):
                return event
    raise HostError("the campaign ended without advice")


def cache_taken_over(advice: Advice, tell: Callable[[str], object]) -> None:
    """Lets this process compile from the cache of the trials, or tells why it compiles anew."""
    if advice.hand_over is None:
        return
    try:
        handover.activate(advice.advice_id)
    except AdvisorError as error:
        tell(f"It compiles without the cache of the trials: {error}.")
