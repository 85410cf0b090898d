"""The methods of the service `compile_advisor.v1.Advisor`.

What they raise becomes a status in `interceptor`. Messages end here: everything below speaks
records.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from typing import Any, TypeAlias

import grpc
import grpc.aio

from advisor.convert import (
    advice_message,
    estimate_message,
    estimate_request_record,
    event_message,
    outcome_record,
    request_record,
    stored_trial_message,
)
from advisor.profiler.errors import NotFoundError
from advisor.service.access import CALLER
from advisor.service.admission import Admission
from advisor.service.errors import NotFinished
from advisor.service.estimator import Estimator
from advisor.service.job import Watch
from advisor.service.jobs import Jobs
from advisor.service.store import Store
from advisor.service.transfers import CacheTransfers
from advisor.v1 import advisor_pb2 as pb
from advisor.v1 import advisor_pb2_grpc
from advisor.validate import check, check_device

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class AdvisorServicer(advisor_pb2_grpc.AdvisorServicer):
    """Answers calls from the store and the jobs."""

    def __init__(
        self, store: Store, jobs: Jobs, estimator: Estimator, admission: Admission
    ) -> None:
        self._store = store
        self._admission = admission
        self._jobs = jobs
        self._estimator = estimator
        self._transfers = CacheTransfers(jobs.data)

    # Writes to the context instead of yielding: a generator that is cancelled while a message is
    # being sent never runs its `finally`.
    async def Advise(  # type: ignore[override]
        self, request: pb.AdviseRequest, context: Context
    ) -> None:
        """Runs a campaign, or joins it, and sends its events."""
        check(request)
        asked = request_record(request)
        asked.validate()
        workload = await asyncio.to_thread(self._admission.admitted, asked.workload)
        asked = dataclasses.replace(asked, workload=workload)
        advice_id, watch = await self._jobs.submit(asked, CALLER.get())
        await self._send(advice_id, watch, context)

    async def WatchAdvice(  # type: ignore[override]
        self, request: pb.WatchAdviceRequest, context: Context
    ) -> None:
        """Sends the events of a campaign."""
        check(request)
        watch = await self._jobs.watch(request.advice_id, request.after_seq)
        await self._send(request.advice_id, watch, context)

    async def CancelAdvice(
        self, request: pb.CancelAdviceRequest, context: Context
    ) -> pb.CancelAdviceResponse:
        """Ends a campaign."""
        check(request)
        state = await asyncio.shield(self._jobs.cancel(request.advice_id))
        return pb.CancelAdviceResponse(state=state.value)

    async def _send(self, advice_id: str, watch: Watch, context: Context) -> None:
        """Sends what a listener hears; raises what the campaign ended with, if without advice."""
        try:
            while (told := await watch.next()) is not None:
                message = event_message(told.event, seq=told.seq, elapsed_s=told.elapsed_s)
                await context.write(message)
        finally:
            # Also when the caller has gone: then whoever does not go on alone ends with it.
            await asyncio.shield(self._jobs.leave(advice_id, watch))
        if watch.failure is not None:
            raise watch.failure

    async def GetAdvice(self, request: pb.GetAdviceRequest, context: Context) -> pb.Advice:
        """Returns a finished advice."""
        check(request)
        try:
            return advice_message(await asyncio.to_thread(self._store.advice, request.advice_id))
        except NotFoundError:
            why = await self._jobs.unfinished(request.advice_id)
            if why is not None:
                raise NotFinished(f"there is no advice {request.advice_id}", str(why)) from None
            raise

    async def ListAdvices(
        self, request: pb.ListAdvicesRequest, context: Context
    ) -> pb.ListAdvicesResponse:
        """Returns a page of advices without their trials."""
        check(request)
        page, more = await asyncio.to_thread(
            self._store.advices, most=request.page_size, before=_before(request.page_token)
        )
        return pb.ListAdvicesResponse(
            advices=[advice_message(dataclasses.replace(advice, trials=())) for advice in page],
            next_page_token=_token(more),
        )

    async def ListTrials(
        self, request: pb.ListTrialsRequest, context: Context
    ) -> pb.ListTrialsResponse:
        """Returns a page of trials."""
        check(request)
        page, more = await asyncio.to_thread(
            self._store.trials,
            advice_id=request.advice_id,
            most=request.page_size,
            before=_before(request.page_token),
        )
        return pb.ListTrialsResponse(
            trials=[stored_trial_message(stored) for stored in page],
            next_page_token=_token(more),
        )

    async def Estimate(self, request: pb.EstimateRequest, context: Context) -> pb.EstimateResponse:
        """Returns what compiling is believed to bring."""
        check(request)
        check_device(request.facts.device)
        return estimate_message(await self._estimator.estimate(estimate_request_record(request)))

    async def ReportOutcome(
        self, request: pb.ReportOutcomeRequest, context: Context
    ) -> pb.ReportOutcomeResponse:
        """Keeps what compiling brought, and learns from it."""
        check(request)
        check_device(request.facts.device)
        outcomes = await self._estimator.report(outcome_record(request))
        return pb.ReportOutcomeResponse(outcomes=outcomes)

    async def PutCache(
        self, request_iterator: AsyncIterator[pb.PutCacheRequest], context: Context
    ) -> pb.PutCacheResponse:
        """Takes a compile cache in parts."""
        return await self._transfers.put(request_iterator)

    # Writes to the context, as `Advise` does.
    async def GetCache(  # type: ignore[override]
        self, request: pb.GetCacheRequest, context: Context
    ) -> None:
        """Gives a compile cache in parts."""
        check(request)
        async for part in self._transfers.get(request):
            await context.write(part)


def _before(token: str) -> int | None:
    return int(token) if token else None


def _token(more: int | None) -> str:
    return "" if more is None else str(more)
