"""A campaign that runs, as its listeners see it: numbered events, and how it ended.

What it tells is stored before anybody hears of it. A listener who reads slowly misses progress,
never a result, and holds nobody up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from advisor.events import Event
from advisor.profiler.launch import to_the_end
from advisor.profiler.records import Advice, Progress
from advisor.request import AdviceRequest, OnDisconnect
from advisor.service.job_store import JobStore, Row, Told, content_of

# A listener misses progress beyond this many events that wait for it.
_MOST_WAITING = 256


class Watch:
    """What one listener of a campaign is told."""

    def __init__(self, told: Iterable[Told], failure: BaseException | None = None) -> None:
        self.queue: asyncio.Queue[Told | None] = asyncio.Queue()
        self.failure = failure
        for each in told:
            self.queue.put_nowait(each)

    async def next(self) -> Told | None:
        """Returns the next event; None at the end, when `failure` says how it ended."""
        return await self.queue.get()

    def tell(self, told: Told) -> None:
        """Has the listener hear of an event."""
        if not (isinstance(told.event, Progress) and self.queue.qsize() >= _MOST_WAITING):
            self.queue.put_nowait(told)

    def end(self, failure: BaseException | None = None) -> None:
        """Tells the listener that there is nothing more."""
        self.failure = failure
        self.queue.put_nowait(None)


class Job:
    """One campaign of this server that has still to end."""

    def __init__(
        self, store: JobStore, row: Row, told: Iterable[Told] = (), caller: str = ""
    ) -> None:
        """`told` is what it told before, the first event among it; `caller` who asked, if known."""
        self.row = row
        self.caller = caller
        self.told = list(told)
        self.goes_on = row.request.on_disconnect is OnDisconnect.CONTINUE
        self.content = content_of(row.request)
        self.task: asyncio.Task[None] | None = None
        self._store = store
        self._watches: set[Watch] = set()
        # Counted on by this process's own clock, whatever the wall's does.
        before_s = self.told[-1].elapsed_s if self.told else 0.0
        self._began = time.monotonic() - before_s

    @property
    def request(self) -> AdviceRequest:
        """What is asked."""
        return self.row.request

    @property
    def advice_id(self) -> str:
        """Name of the advice that it will end in."""
        return self.row.advice_id

    @property
    def elapsed_s(self) -> float:
        """Seconds since it was accepted in which a server was at it."""
        return time.monotonic() - self._began

    @property
    def cancelling(self) -> bool:
        """Whether its end has been asked for."""
        return self.task is not None and self.task.cancelling() > 0

    @property
    def heard(self) -> bool:
        """Whether anybody listens."""
        return bool(self._watches)

    def watch(self, after_seq: int = 0) -> Watch:
        """Returns a listener who has heard of nothing after `after_seq`."""
        watch = Watch(told for told in self.told if told.seq > after_seq)
        self._watches.add(watch)
        return watch

    def leave(self, watch: Watch) -> None:
        """Forgets a listener."""
        self._watches.discard(watch)

    def progress(self, event: Event) -> None:
        """Tells what the running trial does, to whoever listens; it is not kept."""
        self._spread(Told(seq=self._last, elapsed_s=self.elapsed_s, event=event))

    async def tell(self, event: Event) -> None:
        """Stores an event, the advice as the end of the campaign, and tells it."""
        told = Told(seq=self._last + 1, elapsed_s=self.elapsed_s, event=event)
        keep = self._store.end if isinstance(event, Advice) else self._store.tell
        await to_the_end(asyncio.to_thread(keep, self.row, told))
        self.told.append(told)
        self._spread(told)

    def end(self, failure: BaseException | None) -> None:
        """Tells all listeners that it has ended."""
        for watch in self._watches:
            watch.end(failure)
        self._watches.clear()

    @property
    def _last(self) -> int:
        return self.told[-1].seq if self.told else 0

    def _spread(self, told: Told) -> None:
        for watch in self._watches:
            watch.tell(told)
