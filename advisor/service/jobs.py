"""Runs campaigns: waits for the device, runs trial after trial, stores what they found, decides.

A campaign lives as long as the call that asked for it. However it ends, no process of a trial is
alive afterwards, and what is in the database is whole: each trial is one transaction, made once it
finished; the advice is another.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
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
from advisor.events import Accepted, Event, TrialStarted, Waiting
from advisor.outcomes import outcomes_of
from advisor.profiler.errors import AdvisorError, HostError
from advisor.profiler.launch import TrialHost, to_the_end
from advisor.profiler.records import (
    Advice,
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
from advisor.service.errors import ShuttingDown
from advisor.service.estimator import Estimator
from advisor.service.folders import CampaignFolder, Devices, device_of, reproductions_folder
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


class Jobs:
    """The campaigns of one server."""

    def __init__(
        self,
        store: Store,
        data: Path,
        start_host: StartHost = TrialHost.start,
        estimator: Estimator | None = None,
    ) -> None:
        self._store = store
        self._estimator = estimator
        self._data = data
        self._start_host = start_host
        self._devices = Devices(data)
        self._running: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def data(self) -> Path:
        """The data folder."""
        return self._data

    def start(self, request: AdviceRequest, emit: Emit) -> asyncio.Task[None]:
        """Starts a campaign and returns its task; `emit` gets its events, the advice last.

        Cancelling the task ends the campaign, and the task ends when all of it has ended. Raises
        `ShuttingDown` when the server ends; the task, too, if it ends then.
        """
        if self._closed:
            raise ShuttingDown("the server is shutting down")
        task = asyncio.create_task(self._run(request, emit))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def close(self) -> None:
        """Ends all campaigns and takes no new ones."""
        self._closed = True
        for task in self._running:
            # A task that is ending already must not be interrupted in its clean-up.
            if not task.cancelling():
                task.cancel()
        if self._running:
            await asyncio.wait(self._running)

    async def _run(self, request: AdviceRequest, emit: Emit) -> None:
        advice_id = secrets.token_hex(5)
        named = {"advice_id": advice_id, "target": request.workload.target}
        emit(Accepted(advice_id=advice_id))
        device = device_of(request.workload.device)

        def on_wait() -> None:
            emit(Waiting(device=device, message=f"waiting for another campaign on {device}"))

        try:
            async with self._devices.hold(device, on_wait):
                log.info("campaign begins", extra=named)
                emit(await self._measure(request, advice_id, emit))
        except asyncio.CancelledError:
            log.info("campaign cancelled", extra=named)
            if self._closed:
                raise ShuttingDown("the server is shutting down") from None
            raise
        log.info("campaign ended", extra=named)

    async def _measure(self, request: AdviceRequest, advice_id: str, emit: Emit) -> Advice:
        began = time.monotonic()
        async with CampaignFolder(self._data, advice_id) as folder:
            names = _Names(advice_id)
            campaign = Campaign(request, new_id=names.next, believe=await self._believing())
            async with contextlib.AsyncExitStack() as stack:
                host: Host | None = None
                before = await self._earlier(request)
                known: Advice | None = None
                if before:
                    host = await stack.enter_async_context(self._start_host())
                    known = await _same_job(before, request, folder, host, names, emit)
                if known is not None:
                    for trial in earlier.trials_of(known, request):
                        campaign.add(trial, 0.0)
                told = len(campaign.trials)
                while True:
                    step = campaign.next()
                    for skipped in campaign.trials[told:]:
                        await self._keep(skipped, request, advice_id, emit)
                    if step is None:
                        break
                    spec = _spec(step, request, folder, names.next())
                    emit(_started(step, spec, names.number))
                    if host is None:
                        host = await stack.enter_async_context(self._start_host())
                    trial_began = time.monotonic()
                    trial = await _run_watched(host, spec, step, _uuid(campaign), emit)
                    trial = await asyncio.to_thread(
                        _repeatable, trial, spec, campaign, reproductions_folder(self._data)
                    )
                    await self._keep(trial, request, advice_id, emit)
                    campaign.add(trial, time.monotonic() - trial_began)
                    told = len(campaign.trials)
            advice = _decided(request, campaign, time.monotonic() - began, advice_id)
            if known is not None:
                again = wording.measured_before(known, len(earlier.trials_of(known, request)))
                advice = replace(advice, reasons=(*advice.reasons, again))
            advice = await asyncio.to_thread(self._handing_over, advice, request, campaign)
            await to_the_end(asyncio.to_thread(self._store.add_advice, advice))
        await self._learn(advice)
        return advice

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

    async def _keep(self, trial: Trial, request: AdviceRequest, advice_id: str, emit: Emit) -> None:
        """Stores a trial and tells of it, in this order."""
        target = request.workload.target
        await to_the_end(
            asyncio.to_thread(self._store.add_trial, trial, advice_id=advice_id, target=target)
        )
        emit(trial)


async def _same_job(
    before: tuple[Advice, ...],
    request: AdviceRequest,
    folder: CampaignFolder,
    host: Host,
    names: _Names,
    emit: Emit,
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
    emit(
        TrialStarted(
            trial_id=name,
            kind=TrialKind.COUNT,
            config=None,
            number=names.number,
            why=wording.LOOKING_BACK,
        )
    )
    trial = await _run_within(host, spec, request.limits.budget_s, emit)
    return earlier.same_job(before, trial) if trial.status is TrialStatus.OK else None


class _Names:
    """Names the trials of a campaign, and counts them."""

    def __init__(self, advice_id: str) -> None:
        self._advice_id = advice_id
        self.number = 0

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
