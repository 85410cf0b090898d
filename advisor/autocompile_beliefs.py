"""What a training loop believes of compiling its model before it has tried."""

from __future__ import annotations

import logging
import math

import torch

from advisor import prior_store
from advisor.job_facts import JobFacts
from advisor.models.loop_policy import Believe, Outlook
from advisor.models.prior import LEVELS_OF_BELIEF, Belief, normal_quantiles
from advisor.outcomes import device_name
from advisor.profiler.errors import AdvisorError
from advisor.profiler.machine import environment
from advisor.profiler.records import Config

log = logging.getLogger(__name__)

# Without a fitted cost model, which a loop does not wait for: the training rows of the corpus. The
# median of 2,207 speedups is 1.28 and of 2,113 cold starts 43 s; the spreads are log(p95/p05)/3.29.
USUAL = Outlook(
    speedup=Belief(math.log(1.28) + 0.23 * normal_quantiles(LEVELS_OF_BELIEF)),
    compile_s=Belief(math.log(43.0) + 0.91 * normal_quantiles(LEVELS_OF_BELIEF)),
)
_PRECISIONS = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def beliefs_of(model: torch.nn.Module, device: torch.device, config: Config) -> Believe:
    """Returns what is believed of compiling a model, given the seconds of an eager step.

    From the fitted cost model where it is at hand, else from what most trainings showed.
    """
    if not prior_store.is_kept():
        return lambda _: USUAL
    prior = prior_store.load()
    dtype = next((p.dtype for p in model.parameters()), torch.float32)

    def believe(step_s: float) -> Outlook:
        facts = JobFacts(
            device=device_name(environment(device)),
            family=type(model).__name__,
            precision=_PRECISIONS.get(dtype, "fp32"),
            parameters=float(sum(p.numel() for p in model.parameters())),
            eager_step_s=step_s,
        )
        try:
            said = prior.estimate(facts.facts(config))
        except AdvisorError as error:
            log.info("the cost model does not know this device: %s", error)
            return USUAL
        return Outlook(speedup=said.speedup, compile_s=said.compile_s)

    return believe
