"""The campaigns of a server: accepted, joined, cancelled, and taken up after a server that died.

A campaign that was accepted is on disk, and ends whatever dies: with an advice, with the reason
why there is none, or cancelled. Whose it is tells a lock that its server holds while it lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

from advisor.events import Accepted, Waiting
from advisor.profiler.errors import AdvisorError, HostError, Interrupted, StoreError
from advisor.profiler.launch import TrialHost, to_the_end
from advisor.request import AdviceRequest, OnDisconnect
from advisor.service import folders
from advisor.service.errors import NotFinished, Overloaded, ShuttingDown
from advisor.service.estimator import Estimator
from advisor.service.folders import CampaignFolder, Devices, ServerLock, device_of
from advisor.service.job import Job, Watch
from advisor.service.job_store import MOST_ATTEMPTS, JobStore, Row, State, content_of
from advisor.service.measuring import Measuring, StartHost
from advisor.service.metrics import Metrics
from advisor.service.store import Store

log = logging.getLogger(__name__)

# Campaigns that wait or run; one runs at a time on a device, so that more would wait for days.
MOST_LIVE = 100
# Those of one caller, where callers say who they are.
MOST_OF_ONE = 10


class Jobs:
    """The campaigns of one server."""

    def __init__(
        self,
        store: Store,
        data: Path,
        start_host: StartHost = TrialHost.start,
        estimator: Estimator | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        """Raises `StoreError` when the data folder cannot be used."""
        self._store = JobStore(store)
        self._data = data
        self._measuring = Measuring(store, data, start_host, estimator, metrics)
        self._devices = Devices(data)
        self._lock = ServerLock(data)
        self._live: dict[str, Job] = {}
        self._accepting = asyncio.Lock()
        self._closed = False

    @property
    def data(self) -> Path:
        """The data folder."""
        return self._data

    @property
    def live(self) -> int:
        """Campaigns that wait or run."""
        return len(self._live)

    async def submit(self, request: AdviceRequest, caller: str = "") -> tuple[str, Watch]:
        """Returns the name of a request's campaign and a listener who hears all of it.

        The campaign is a new one, that of the same `request_id`, or one that runs and was asked the
        same. Raises `ShuttingDown`, `Overloaded`, or `AlreadyExists` for a `request_id` of another.
        """
        found: list[tuple[str, Watch]] = []
        try:
            await to_the_end(self._accept(request, caller, found))
        except asyncio.CancelledError:
            # Who asked has gone already, but the campaign is there.
            for advice_id, watch in found:
                await asyncio.shield(self.leave(advice_id, watch))
            raise
        return found[0]

    async def watch(self, advice_id: str, after_seq: int = 0) -> Watch:
        """Returns a listener of a campaign who has heard of nothing after `after_seq`.

        Raises `NotFoundError` when there is no such campaign.
        """
        job = self._live.get(advice_id)
        if job is not None:
            return job.watch(after_seq)
        row = await asyncio.to_thread(self._store.find, advice_id)
        told = await asyncio.to_thread(self._store.events, advice_id, after_seq)
        watch = Watch(told)
        watch.end(_failure_of(row))
        return watch

    async def leave(self, advice_id: str, watch: Watch) -> None:
        """Forgets a listener; ends the campaign when none is left and it does not go on alone."""
        job = self._live.get(advice_id)
        if job is None:
            return
        job.leave(watch)
        if not (job.heard or job.goes_on):
            await self._cancel(job)

    async def cancel(self, advice_id: str) -> State:
        """Ends a campaign, and returns how it ended once it has.

        Raises `NotFoundError` when there is no such campaign.
        """
        job = self._live.get(advice_id)
        if job is not None:
            await self._cancel(job)
        return (await asyncio.to_thread(self._store.find, advice_id)).state

    async def unfinished(self, advice_id: str) -> AdvisorError | None:
        """Returns why there is no advice of that name yet, or ever; None: not known."""
        try:
            row = await asyncio.to_thread(self._store.find, advice_id)
        except StoreError:
            return None
        return None if row.state is State.ENDED else _failure_of(row)

    async def take_up(self, *, adopts: bool) -> None:
        """Goes on with the campaigns of servers that died, and sweeps what others left.

        Only a server that `adopts` runs them; what nobody was to go on with is cancelled.
        """
        alive = {self._lock.name}
        dead = []
        for row in await asyncio.to_thread(self._store.live):
            if row.owner not in alive and ServerLock.lives(self._data, row.owner):
                alive.add(row.owner)
            if row.owner not in alive:
                dead.append(row)
        kept = set()
        for row in dead:
            error = _why_not_again(row)
            if error is not None:
                with contextlib.suppress(StoreError):  # another server was quicker
                    await asyncio.to_thread(self._store.fail, row, error)
                continue
            kept.add(row.advice_id)
            if adopts:
                await self._take_up(row)
        for name in await asyncio.to_thread(folders.sweep, self._data, kept):
            log.warning("deleted what a campaign left that died", extra={"advice_id": name})

    async def close(self) -> None:
        """Ends all campaigns and takes no new ones; those that go on wait for the next server."""
        self._closed = True
        async with self._accepting:
            pass  # what was being accepted is there, or refused
        tasks = [job.task for job in self._live.values() if job.task is not None]
        for task in tasks:
            # A task that is ending already must not be interrupted in its clean-up.
            if not task.cancelling():
                task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._lock.close()

    async def _accept(
        self, request: AdviceRequest, caller: str, found: list[tuple[str, Watch]]
    ) -> None:
        """Adds the name of a request's campaign, and a listener of it, to `found`."""
        # One after the other: two that ask the same at the same time are one campaign.
        async with self._accepting:
            if self._closed:
                raise ShuttingDown("the server is shutting down")
            advice_id = await asyncio.to_thread(self._store.named, request)
            if advice_id is None:
                advice_id = await self._join_or_store(request, caller)
            found.append((advice_id, await self.watch(advice_id)))

    async def _join_or_store(self, request: AdviceRequest, caller: str) -> str:
        """Returns the campaign that runs for the same question, or a new one."""
        same = self._asked_the_same(request)
        if same is None:
            return await self._store_new(request, caller)
        await asyncio.to_thread(self._store.join, request, same.advice_id)
        same.goes_on |= request.on_disconnect is OnDisconnect.CONTINUE
        return same.advice_id

    async def _store_new(self, request: AdviceRequest, caller: str) -> str:
        """Returns a new campaign, which runs."""
        row = Row(
            advice_id=secrets.token_hex(5),
            request=request,
            state=State.WAITING,
            owner=self._lock.name,
        )
        if len(self._live) >= MOST_LIVE:
            raise Overloaded(
                f"{MOST_LIVE} campaigns wait or run already",
                "one at a time measures on a device",
                "ask again later, or another server",
            )
        theirs = sum(job.caller == caller for job in self._live.values())
        if caller and theirs >= MOST_OF_ONE:
            raise Overloaded(
                f"{theirs} campaigns of {caller} wait or run already",
                "so many may one caller have",
                "ask again when one has ended, or cancel one",
            )
        accepted = Accepted(advice_id=row.advice_id)
        await asyncio.to_thread(self._store.accept, row, accepted)
        told = await asyncio.to_thread(self._store.events, row.advice_id)
        self._start(Job(self._store, row, told, caller))
        return row.advice_id

    async def _take_up(self, row: Row) -> None:
        try:
            claimed = await asyncio.to_thread(self._store.claim, row, self._lock.name)
        except StoreError:  # another server was quicker
            return
        log.info("taking up a campaign", extra={"advice_id": row.advice_id})
        told = await asyncio.to_thread(self._store.events, row.advice_id)
        self._start(Job(self._store, claimed, told))

    def _asked_the_same(self, request: AdviceRequest) -> Job | None:
        """Returns the campaign that runs for the same question, unless one of its own is asked."""
        if request.limits.fresh:
            return None
        content = content_of(request)
        return next(
            (job for job in self._live.values() if job.content == content and not job.cancelling),
            None,
        )

    def _start(self, job: Job) -> None:
        self._live[job.advice_id] = job
        job.task = asyncio.create_task(self._run(job))

    async def _cancel(self, job: Job) -> None:
        assert job.task is not None
        if not job.cancelling:
            job.task.cancel()
        await asyncio.wait([job.task])

    async def _run(self, job: Job) -> None:
        """Runs a campaign to its end; what becomes of it is stored and told, not raised."""
        named = {"advice_id": job.advice_id, "target": job.request.workload.target}
        failure: BaseException | None = None
        try:
            async with self._held(job):
                log.info("campaign begins", extra=named)
                async with CampaignFolder(self._data, job.advice_id) as folder:
                    try:
                        await self._measuring.run(job, folder)
                    except asyncio.CancelledError:
                        # The next server finds what the trials that had ended left.
                        folder.keeps = self._closed and job.goes_on
                        raise
        except asyncio.CancelledError:
            failure = ShuttingDown("the server is shutting down") if self._closed else None
            failure = failure or Interrupted("the campaign was cancelled")
        except Exception as error:
            failure = error
            if not (isinstance(error, AdvisorError) or job.heard):
                log.error("internal error in a campaign", extra=named, exc_info=error)
        log.info("campaign ended", extra=named)
        try:
            if failure is not None:
                await to_the_end(asyncio.to_thread(self._keep_failure, job, failure))
        except StoreError as error:
            log.error("the end of a campaign cannot be stored", extra=named | {"why": str(error)})
        finally:
            del self._live[job.advice_id]
            job.end(failure)

    @contextlib.asynccontextmanager
    async def _held(self, job: Job) -> AsyncIterator[None]:
        """Holds the campaign's device within the block, where it is this server's."""
        device = device_of(job.request.workload.device)

        async def on_wait() -> None:
            message = f"waiting for another campaign on {device}"
            await job.tell(Waiting(device=device, message=message))

        async with self._devices.hold(device, on_wait):
            await to_the_end(asyncio.to_thread(self._begin, job))
            yield

    def _begin(self, job: Job) -> None:
        # Here, not by whoever waits for it and may be cancelled: the row has to be the one stored.
        job.row = self._store.begin(job.row)

    def _keep_failure(self, job: Job, failure: BaseException) -> None:
        if isinstance(failure, ShuttingDown) and job.goes_on:
            self._store.release(job.row)
        elif isinstance(failure, ShuttingDown):
            self._store.fail(job.row, Interrupted("the server was shut down"))
        else:
            self._store.fail(job.row, failure)


def _why_not_again(row: Row) -> AdvisorError | None:
    """Returns why a campaign of a server that died is not taken up; None where it is."""
    if row.request.on_disconnect is OnDisconnect.CANCEL:
        return Interrupted("the server ended", "nobody was to go on with the campaign")
    if row.attempt >= MOST_ATTEMPTS:
        return HostError(
            f"the server died {row.attempt} times in this campaign",
            "it is not begun again",
            "look into the server's log for what killed it",
        )
    return None


def _failure_of(row: Row) -> AdvisorError | None:
    """Returns why a campaign that does not run here has no advice; None where it has one."""
    if row.ended is not None:
        return row.ended.error()
    if row.live:
        return NotFinished(
            f"the campaign {row.advice_id} has no advice yet",
            f"it is {row.state.value}",
            "watch it, or ask again later",
        )
    return None
