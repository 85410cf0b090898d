"""What is kept of campaigns: what was asked, where they stand, what they have told.

Each change is one transaction, and what a campaign tells is in it with what it tells of: a trial's
row and its event are both there or neither is. A server that begins a campaign again raises its
`attempt`; what an earlier attempt still wants to write is refused.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa

from advisor.events import Accepted, Event, TrialStarted, Waiting
from advisor.profiler.errors import (
    AdvisorError,
    Interrupted,
    NotFoundError,
    StoreError,
    WorkloadError,
)
from advisor.profiler.records import Advice, Trial, decode, encode
from advisor.request import AdviceRequest, OnDisconnect
from advisor.service.errors import AlreadyExists, error_for, reason_of
from advisor.service.store import Store, advice_row, json_of, now, trial_row
from advisor.service.tables import ADVICES, EVENTS, JOBS, REQUESTS, TRIALS

# A campaign that was begun so often, and whose server always died, is not begun again.
MOST_ATTEMPTS = 3
_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (Accepted, Waiting, TrialStarted, Trial, Advice)
}


class State(enum.StrEnum):
    """Where a campaign stands."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"
    FAILED = "failed"
    CANCELLED = "cancelled"


_LIVE = (State.WAITING.value, State.RUNNING.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """An event of a campaign; `seq` of progress is that of the event before it."""

    seq: int
    elapsed_s: float
    event: Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Why a campaign ended without an advice, as it is stored."""

    reason: str
    what: str
    why: str = ""
    mend: str = ""
    user_traceback: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Ended:
        """Returns what is stored of an error; of one of ours nothing but that it was one."""
        if not isinstance(error, AdvisorError) or not reason_of(error):
            return cls(reason="INTERNAL", what="the campaign met an internal error")
        traceback = error.user_traceback if isinstance(error, WorkloadError) else ""
        return cls(
            reason=reason_of(error),
            what=error.what,
            why=error.why,
            mend=error.mend,
            user_traceback=traceback,
        )

    def error(self) -> AdvisorError:
        """Returns the error as it was raised."""
        return error_for(self.reason, self.what, self.why, self.mend, self.user_traceback)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A campaign as it is stored."""

    advice_id: str
    request: AdviceRequest
    state: State
    owner: str
    attempt: int = 0
    ended: Ended | None = None

    @property
    def live(self) -> bool:
        """Whether it has still to end."""
        return self.state.value in _LIVE


@dataclass(frozen=True, slots=True, kw_only=True)
class Forgotten:
    """How much was deleted."""

    campaigns: int
    trials: int
    advices: int


def content_of(request: AdviceRequest) -> str:
    """Returns what a request asks for, as a hash: not by which name, nor who listens."""
    asked = replace(request, request_id=None, on_disconnect=OnDisconnect.CONTINUE)
    return hashlib.sha256(encode(asked)).hexdigest()


class JobStore:
    """The campaigns in the results database. Every method may raise `StoreError`."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def accept(self, row: Row, event: Accepted) -> None:
        """Stores a campaign with its first event. Raises `AlreadyExists` as `named` does."""
        with self._store.writing() as connection:
            values = {
                "advice_id": row.advice_id,
                "created": now(),
                "state": row.state.value,
                "owner": row.owner,
                "attempt": row.attempt,
                "request": json_of(row.request),
                "failure": "",
            }
            connection.execute(sa.insert(JOBS), values)
            told = Told(seq=1, elapsed_s=0.0, event=event)
            connection.execute(sa.insert(EVENTS), _event(row.advice_id, told))
            _name(connection, row.request, row.advice_id)

    def named(self, request: AdviceRequest) -> str | None:
        """Returns the campaign that a request's own name stands for; None: for none yet.

        Raises `AlreadyExists` when it asked for something else.
        """
        if request.request_id is None:
            return None
        with self._store.reading() as connection:
            return _named(connection, request)

    def join(self, request: AdviceRequest, advice_id: str) -> None:
        """Has a request's own name, if it has one, stand for a campaign that answers it."""
        if request.request_id is not None:
            with self._store.writing() as connection:
                _name(connection, request, advice_id)

    def find(self, advice_id: str) -> Row:
        """Returns a campaign. Raises `NotFoundError`."""
        with self._store.reading() as connection:
            found = connection.execute(
                sa.select(JOBS).where(JOBS.c.advice_id == advice_id)
            ).one_or_none()
        if found is None:
            raise NotFoundError(f"there is no campaign {advice_id}")
        return _row(found)

    def live(self) -> list[Row]:
        """Returns the campaigns that have still to end, the oldest first."""
        query = sa.select(JOBS).where(JOBS.c.state.in_(_LIVE)).order_by(JOBS.c.number)
        with self._store.reading() as connection:
            return [_row(found) for found in connection.execute(query)]

    def claim(self, row: Row, owner: str) -> Row:
        """Returns the campaign of a server that died as one of another, where it waits.

        Raises `StoreError` when a third one was quicker.
        """
        claimed = replace(row, owner=owner, state=State.WAITING)
        with self._store.writing() as connection:
            self._update(connection, row, owner=owner, state=claimed.state)
        return claimed

    def begin(self, row: Row) -> Row:
        """Returns the campaign as begun once more. Raises `StoreError` when it is another's now."""
        begun = replace(row, attempt=row.attempt + 1, state=State.RUNNING)
        with self._store.writing() as connection:
            self._update(connection, row, attempt=begun.attempt, state=begun.state)
        return begun

    def release(self, row: Row) -> None:
        """Lets go of a campaign that nothing of its own has broken: that counts no attempt."""
        attempt = row.attempt - (row.state is State.RUNNING)
        with self._store.writing() as connection:
            self._update(connection, row, owner="", attempt=attempt, state=State.WAITING)

    def tell(self, row: Row, told: Told) -> None:
        """Stores an event; a trial with its own row."""
        with self._store.writing() as connection:
            self._update(connection, row)
            if isinstance(told.event, Trial):
                target = row.request.workload.target
                values = trial_row(told.event, advice_id=row.advice_id, target=target)
                connection.execute(sa.insert(TRIALS), values)
            connection.execute(sa.insert(EVENTS), _event(row.advice_id, told))

    def end(self, row: Row, told: Told) -> None:
        """Stores the advice that a campaign ended in."""
        assert isinstance(told.event, Advice)
        with self._store.writing() as connection:
            self._update(connection, row, state=State.ENDED)
            connection.execute(sa.insert(ADVICES), advice_row(told.event))
            connection.execute(sa.insert(EVENTS), _event(row.advice_id, told))

    def fail(self, row: Row, error: BaseException) -> None:
        """Stores why a campaign ended without an advice."""
        cancelled = isinstance(error, Interrupted)
        state = State.CANCELLED if cancelled else State.FAILED
        with self._store.writing() as connection:
            self._update(connection, row, state=state, failure=json_of(Ended.of(error)))

    def forget(self, before: str) -> Forgotten:
        """Deletes what was stored before a time (ISO 8601, UTC), but for campaigns that live.

        What was learnt of outcomes stays.
        """
        living = sa.select(JOBS.c.advice_id).where(JOBS.c.state.in_(_LIVE))
        counts = {}
        with self._store.writing() as connection:
            old = sa.select(JOBS.c.advice_id).where(JOBS.c.created < before)
            for table in (EVENTS, REQUESTS):
                gone = table.c.advice_id.in_(old) & table.c.advice_id.not_in(living)
                connection.execute(sa.delete(table).where(gone))
            for name, table in (("campaigns", JOBS), ("trials", TRIALS), ("advices", ADVICES)):
                gone = (table.c.created < before) & table.c.advice_id.not_in(living)
                counts[name] = connection.execute(sa.delete(table).where(gone)).rowcount
        return Forgotten(**counts)

    def events(self, advice_id: str, after_seq: int = 0) -> list[Told]:
        """Returns what a campaign told after an event, in order."""
        query = (
            sa.select(EVENTS, TRIALS.c.record.label("trial"), ADVICES.c.record.label("advice"))
            .outerjoin(
                TRIALS,
                (EVENTS.c.kind == Trial.__name__)
                & (TRIALS.c.advice_id == EVENTS.c.advice_id)
                & (TRIALS.c.trial_id == EVENTS.c.record),
            )
            .outerjoin(
                ADVICES,
                (EVENTS.c.kind == Advice.__name__) & (ADVICES.c.advice_id == EVENTS.c.advice_id),
            )
            .where(EVENTS.c.advice_id == advice_id, EVENTS.c.seq > after_seq)
            .order_by(EVENTS.c.seq)
        )
        with self._store.reading() as connection:
            rows = connection.execute(query).all()
        return [
            Told(
                seq=row.seq,
                elapsed_s=row.elapsed_s,
                event=decode((row.trial or row.advice or row.record).encode(), _KINDS[row.kind]),
            )
            for row in rows
        ]

    def _update(self, connection: sa.Connection, row: Row, **values: object) -> None:
        """Changes the row of a campaign that is still this attempt's. Raises `StoreError`."""
        here = (
            (JOBS.c.advice_id == row.advice_id)
            & (JOBS.c.owner == row.owner)
            & (JOBS.c.attempt == row.attempt)
            & JOBS.c.state.in_(_LIVE)
        )
        # Without a change too, the row is locked until the end of the transaction.
        done = connection.execute(
            sa.update(JOBS).where(here).values(values or {"owner": row.owner})
        )
        if done.rowcount != 1:
            raise StoreError(
                f"the campaign {row.advice_id} is not this server's any more",
                "another one has begun it again, or it has ended",
            )


def _named(connection: sa.Connection, request: AdviceRequest) -> str | None:
    query = sa.select(REQUESTS).where(REQUESTS.c.request_id == request.request_id)
    there = connection.execute(query).one_or_none()
    if there is None:
        return None
    if there.content != content_of(request):
        raise AlreadyExists(
            f"request_id {request.request_id} has asked for something else",
            "it stands for what was asked under it first",
            "choose another one for another request",
        )
    return str(there.advice_id)


def _name(connection: sa.Connection, request: AdviceRequest, advice_id: str) -> None:
    """Stores the name of a request; raises `AlreadyExists` when it stands for another campaign."""
    if request.request_id is None:
        return
    there = _named(connection, request)
    if there not in (None, advice_id):
        raise AlreadyExists(f"request_id {request.request_id} was asked at the same moment")
    if there is None:
        values = {
            "request_id": request.request_id,
            "advice_id": advice_id,
            "content": content_of(request),
        }
        connection.execute(sa.insert(REQUESTS), values)


def trials_of(told: Sequence[Told]) -> list[Trial]:
    """Returns the trials among events, in order."""
    return [each.event for each in told if isinstance(each.event, Trial)]


def _event(advice_id: str, told: Told) -> dict[str, Any]:
    event = told.event
    if isinstance(event, Trial):
        record = event.trial_id
    elif isinstance(event, Advice):
        record = ""
    else:
        record = json_of(event)
    return {
        "advice_id": advice_id,
        "seq": told.seq,
        "elapsed_s": told.elapsed_s,
        "kind": type(event).__name__,
        "record": record,
    }


def _row(found: Any) -> Row:
    ended = found.failure
    return Row(
        advice_id=found.advice_id,
        request=decode(found.request.encode(), AdviceRequest),
        state=State(found.state),
        owner=found.owner,
        attempt=found.attempt,
        ended=decode(ended.encode(), Ended) if ended else None,
    )
