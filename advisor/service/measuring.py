"""One campaign, measured: trial after trial on one device, each stored as it ends, then the advice.

However it ends, no process of a trial is alive afterwards. One that a server has left behind is
taken up where it was: trials that had ended are not run again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from advisor import earlier, handover, wording
from advisor.beliefs import Beliefs
from advisor.campaign import Campaign, Step
from advisor.decision import decide
from advisor.events import Event, TrialStarted
from advisor.outcomes import outcomes_of
from advisor.profiler.errors import AdvisorError, HostError
from advisor.profiler.launch import TrialHost
from advisor.profiler.records import (
    Advice,
    Config,
    Failure,
    Phase,
    Progress,
    Trial,
    TrialKind,
    TrialSpec,
    TrialStatus,
)
from advisor.profiler.reproduction import with_reproduction
from advisor.request import AdviceRequest
from advisor.service import store as stores
from advisor.service.accelerator import AcceleratorWatch, open_nvml
from advisor.service.estimator import Estimator
from advisor.service.folders import CampaignFolder, reproductions_folder
from advisor.service.job import Job
from advisor.service.job_store import trials_of
from advisor.service.metrics import Metrics
from advisor.service.store import Store

log = logging.getLogger(__name__)

_EAGER_PHASES = (Phase.IMPORT, Phase.BUILD, Phase.WARM_UP)
# The phases that each kind of trial goes through.
PHASES = {
    TrialKind.EAGER: _EAGER_PHASES,
    TrialKind.COMPILE: (
        *_EAGER_PHASES,
        Phase.COLD,
        Phase.STEADY,
        Phase.NUMERICS,
        Phase.DIAGNOSE,
    ),
    TrialKind.WARM: (*_EAGER_PHASES, Phase.COLD, Phase.STEADY),
    TrialKind.ONE_FIRST: (*_EAGER_PHASES, Phase.COLD, Phase.STEADY),
    TrialKind.SHAPES: (*_EAGER_PHASES, Phase.COLD, Phase.STEADY, Phase.NUMERICS),
    TrialKind.COUNT: (Phase.IMPORT, Phase.BUILD),
}


class Host(Protocol):
    """Runs trials, one at a time: `profiler.launch.TrialHost`."""

    async def run(self, spec: TrialSpec, on_progress: Callable[[Progress], None]) -> Trial:
        """Returns the result of a trial."""
        ...


Emit = Callable[[Event], None]
StartHost = Callable[[], AbstractAsyncContextManager[Host]]


class Measuring:
    """Measures campaigns of one server."""

    def __init__(
        self,
        store: Store,
        data: Path,
        start_host: StartHost = TrialHost.start,
        estimator: Estimator | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self._metrics = metrics or Metrics()
        self._store = store
        self._data = data
        self._start_host = start_host
        self._estimator = estimator

    async def run(self, job: Job, folder: CampaignFolder) -> None:
        """Runs a campaign to its advice, which is the last that it tells."""
        request, before_s = job.request, job.elapsed_s
        began = time.monotonic()
        names = _Names(job)
        campaign = Campaign(request, new_id=names.next, believe=await self._believing())
        async with contextlib.AsyncExitStack() as stack:
            host: Host | None = None
            before = await self._earlier(request)
            known: Advice | None = None
            if before:
                host = await stack.enter_async_context(self._start_host())
                known = await _same_job(before, request, folder, host, names, job)
            if known is not None:
                for trial in earlier.trials_of(known, request):
                    campaign.add(trial, 0.0)
            skipped_before = _take_up(job, campaign)
            told = len(campaign.trials)
            while True:
                step = campaign.next()
                for skipped in campaign.trials[told:]:
                    # A campaign that was taken up skips again what it had skipped.
                    if (skipped.kind, skipped.config) not in skipped_before:
                        await job.tell(skipped)
                if step is None:
                    break
                spec = _spec(step, request, folder, names.next())
                await job.tell(_started(step, spec, names.number))
                if host is None:
                    host = await stack.enter_async_context(self._start_host())
                trial_began = time.monotonic()
                trial = await _run_watched(host, spec, step, _uuid(campaign), job.progress)
                trial = await asyncio.to_thread(
                    _repeatable, trial, spec, campaign, reproductions_folder(self._data)
                )
                await job.tell(trial)
                self._metrics.tried(trial)
                campaign.add(trial, time.monotonic() - trial_began)
                told = len(campaign.trials)
        campaign_s = time.monotonic() - began + (before_s if trials_of(job.told) else 0.0)
        advice = _decided(request, campaign, campaign_s, job.advice_id)
        if known is not None:
            again = wording.measured_before(known, len(earlier.trials_of(known, request)))
            advice = replace(advice, reasons=(*advice.reasons, again))
        advice = await asyncio.to_thread(self._handing_over, advice, request, campaign)
        await job.tell(advice)
        await self._learn(advice)

    def _handing_over(self, advice: Advice, request: AdviceRequest, campaign: Campaign) -> Advice:
        """Returns the advice with its compile cache kept; or, if that fails, without one."""
        try:
            return handover.with_cache_kept(advice, handover.store(self._data))
        except AdvisorError as error:
            log.warning("a compile cache is not kept", extra={"why": str(error)})
            trials = [replace(trial, cache_folder="") for trial in campaign.trials]
            again = decide(request, trials, advice.campaign_s, advice.advice_id, advice.created)
            return replace(again, warnings=(*again.warnings, wording.not_kept(str(error))))

    async def _earlier(self, request: AdviceRequest) -> tuple[Advice, ...]:
        """Returns earlier campaigns on a workload of that name, for the job may be the same."""
        found = await asyncio.to_thread(
            self._store.latest_advices, request.workload.target, earlier.MOST_EARLIER
        )
        return earlier.usable(found, request)

    async def _believing(self) -> Callable[[Trial], Beliefs | None]:
        """Returns what a campaign asks for its beliefs; nothing is believed without a prior."""
        if self._estimator is None:
            return lambda _: None
        try:
            prior, learnt = await self._estimator.prior()
        except AdvisorError as error:
            log.warning("campaigns go by best cases alone", extra={"why": str(error)})
            return lambda _: None
        return lambda eager: Beliefs.of(prior, learnt, eager)

    async def _learn(self, advice: Advice) -> None:
        """Has the cost model learn what each configuration of a campaign brought."""
        if self._estimator is None:
            return
        for trial_id, report in outcomes_of(advice):
            try:
                await self._estimator.report(report, trial_id=trial_id)
            except AdvisorError as error:
                # The advice stands without it.
                log.warning("an outcome is not learnt from", extra={"why": str(error)})
                return


async def _same_job(
    before: tuple[Advice, ...],
    request: AdviceRequest,
    folder: CampaignFolder,
    host: Host,
    names: _Names,
    job: Job,
) -> Advice | None:
    """Returns the earlier campaign on the very same job: its shapes and its source tell."""
    name = names.next()
    spec = TrialSpec(
        trial_id=name,
        kind=TrialKind.COUNT,
        workload=request.workload,
        folder=str(folder.trial(name)),
        config=None,
    )
    await job.tell(
        TrialStarted(
            trial_id=name,
            kind=TrialKind.COUNT,
            config=None,
            number=names.number,
            why=wording.LOOKING_BACK,
        )
    )
    trial = await _run_within(host, spec, request.limits.budget_s, job.progress)
    return earlier.same_job(before, trial) if trial.status is TrialStatus.OK else None


def _take_up(job: Job, campaign: Campaign) -> set[tuple[TrialKind, Config | None]]:
    """Gives a campaign what it had measured before; returns what it had skipped."""
    skipped = set()
    for trial in trials_of(job.told):
        if trial.status is TrialStatus.SKIPPED:
            skipped.add((trial.kind, trial.config))
        else:
            kept = trial.cache_folder if Path(trial.cache_folder).is_dir() else ""
            campaign.add(replace(trial, cache_folder=kept), trial.wall_s)
    return skipped


class _Names:
    """Names the trials of a campaign, and counts them on from those that it has named."""

    def __init__(self, job: Job) -> None:
        self._advice_id = job.advice_id
        told = [each.event for each in job.told]
        names = [event.trial_id for event in told if isinstance(event, Trial | TrialStarted)]
        self.number = max((int(name.rpartition("-")[2]) for name in names), default=0)

    def next(self) -> str:
        """Returns the next name."""
        self.number += 1
        return f"{self._advice_id}-{self.number}"


def _spec(step: Step, request: AdviceRequest, folder: CampaignFolder, trial_id: str) -> TrialSpec:
    """Returns the spec of a step; a warm start runs in the folder of the trial that it repeats.

    That may be a folder of an earlier campaign, whose trials stand for this one's.
    """
    return TrialSpec(
        trial_id=trial_id,
        kind=step.kind,
        workload=request.workload,
        folder=step.from_folder or str(folder.trial(trial_id)),
        config=step.config,
        measuring=request.measuring,
        memory_limit_bytes=request.limits.memory_limit_bytes,
        plan_steps=step.plan_steps,
        rival_share=step.rival_share,
        budget_s=step.budget_left_s,
        cut_off_s=step.cut_off_s,
        lengths=request.lengths,
        shapes=step.shapes,
        mark_dynamic=step.mark_dynamic,
    )


def _started(step: Step, spec: TrialSpec, number: int) -> TrialStarted:
    return TrialStarted(
        trial_id=spec.trial_id,
        kind=spec.kind,
        config=spec.config,
        number=number,
        why=step.why,
        at_most_s=_at_most_s(step, spec),
        compile_s=step.compile_s,
    )


def _at_most_s(step: Step, spec: TrialSpec) -> float:
    """Returns the longest that a trial may take: all its deadlines, or what the budget leaves."""
    limits = {phase: spec.deadlines.of(phase) or 0.0 for phase in PHASES[spec.kind]}
    if spec.cut_off_s is not None and Phase.COLD in limits:
        limits[Phase.COLD] = min(limits[Phase.COLD], spec.cut_off_s)
    total_s = sum(limits.values())
    return total_s if step.budget_left_s is None else min(total_s, step.budget_left_s)


def _uuid(campaign: Campaign) -> str:
    """Returns the name of the GPU that the campaign measures on, once a trial has told it."""
    environment = campaign.eager.environment if campaign.eager else None
    return environment.device_uuid if environment else ""


def _repeatable(trial: Trial, spec: TrialSpec, campaign: Campaign, folder: Path) -> Trial:
    """Returns the trial with the folder that repeats it, if it went wrong."""
    facts = campaign.eager.workload if campaign.eager else None
    return with_reproduction(
        trial,
        spec,
        folder,
        environment=campaign.eager.environment if campaign.eager else None,
        blocks=facts.blocks if facts else (),
    )


async def _run_watched(host: Host, spec: TrialSpec, step: Step, uuid: str, emit: Emit) -> Trial:
    """Runs a trial, and adds to it what disturbed its GPU meanwhile."""
    watch = AcceleratorWatch(open_nvml() if uuid else None, uuid)

    def tell(event: Event) -> None:
        if isinstance(event, Progress):
            watch.on_progress(event)
        emit(event)

    trial = await _run_within(host, spec, step.budget_left_s, tell)
    return replace(trial, warnings=trial.warnings + watch.sentences())


async def _run_within(host: Host, spec: TrialSpec, budget_s: float | None, emit: Emit) -> Trial:
    """Runs a trial; one that outlasts the campaign's budget is ended and counts as timed out."""
    began = time.monotonic()
    try:
        async with asyncio.timeout(budget_s):
            return await host.run(spec, on_progress=emit)
    except TimeoutError:
        return Trial(
            trial_id=spec.trial_id,
            kind=spec.kind,
            status=TrialStatus.TIMED_OUT,
            config=spec.config,
            failure=Failure(
                kind="budget",
                message=f"the budget left {budget_s:.0f} s for this trial, and they have passed",
            ),
            wall_s=time.monotonic() - began,
        )


def _decided(
    request: AdviceRequest, campaign: Campaign, campaign_s: float, advice_id: str
) -> Advice:
    try:
        return decide(request, campaign.trials, campaign_s, advice_id, stores.now())
    except AdvisorError as error:
        # Without even an eager step time there is nothing to advise on.
        raise HostError(error.what, error.why, error.mend) from error
