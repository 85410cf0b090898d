"""The results database: finished trials and advices, in SQLite.

A row is one record as JSON beside the columns that are asked for. Each trial and each advice is
one transaction, begun as `BEGIN IMMEDIATE`: a deferred one that reads before it writes fails at
once with SQLITE_BUSY_SNAPSHOT when somebody else wrote in between. Several servers may share one
database. A file that is not ours, or of a newer version, is refused and never touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import struct
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import sqlalchemy as sa
from sqlalchemy import event, exc

from advisor.job_facts import OutcomeReport
from advisor.profiler.errors import NotFoundError, StoreError
from advisor.profiler.records import Advice, Trial, decode, encode
from advisor.service.tables import ADVICES, METADATA, OUTCOMES, SCHEMA, TRIALS
from advisor.stored import StoredTrial

APPLICATION_ID = 0x61647669  # "advi"
FILE_NAME = "results.sqlite3"

_BUSY_TIMEOUT_S = 10.0
# A page of records stays well below what a message may hold.
_PAGE_BYTES = 8 << 20
_DEFAULT_PAGE = 50
# Up to this size the whole file is checked when it is opened.
_CHECKED_BYTES = 64 << 20

R = TypeVar("R")


class Store:
    """The results database in a folder. Every method may raise `StoreError`."""

    def __init__(self, folder: Path) -> None:
        """Opens the database in `folder`, or makes it there. The folder must exist."""
        self.path = folder / FILE_NAME
        with _told(), _lock(folder):
            if not self.path.exists():
                _create(self.path)
            _refuse_foreign(self.path)
            _upgrade(self.path)
        self._engine = _engine(self.path)
        try:
            self._check()
        except BaseException:
            self._engine.dispose()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the database."""
        self._engine.dispose()

    def add_trial(self, trial: Trial, *, advice_id: str, target: str) -> None:
        """Stores a finished trial of the campaign `advice_id`."""
        row = trial_row(trial, advice_id=advice_id, target=target)
        with self.writing() as connection:
            connection.execute(sa.insert(TRIALS), row)

    def add_advice(self, advice: Advice) -> None:
        """Stores a finished advice."""
        row = advice_row(advice)
        with self.writing() as connection:
            connection.execute(sa.insert(ADVICES), row)

    def add_outcome(self, outcome: OutcomeReport, *, trial_id: str = "") -> int:
        """Stores what compiling brought, and returns how many outcomes there are now."""
        row = {"created": now(), "trial_id": trial_id, "record": json_of(outcome)}
        with self.writing() as connection:
            connection.execute(sa.insert(OUTCOMES), row)
            return int(
                connection.execute(sa.select(sa.func.count()).select_from(OUTCOMES)).scalar_one()
            )

    def outcomes(self, most: int) -> list[OutcomeReport]:
        """Returns the newest outcomes, at most `most`, the oldest of them first."""
        query = sa.select(OUTCOMES.c.record).order_by(OUTCOMES.c.number.desc()).limit(most)
        with self.reading() as connection:
            records = connection.execute(query).scalars().all()
        return [decode(record.encode(), OutcomeReport) for record in reversed(records)]

    def advice(self, advice_id: str) -> Advice:
        """Returns an advice. Raises `NotFoundError`."""
        query = sa.select(ADVICES.c.record).where(ADVICES.c.advice_id == advice_id)
        with self.reading() as connection:
            record = connection.execute(query).scalar()
        if record is None:
            raise NotFoundError(f"there is no advice {advice_id}")
        return decode(record.encode(), Advice)

    def latest_advices(self, target: str, most: int) -> list[Advice]:
        """Returns the newest advices on a workload, at most `most`."""
        query = sa.select(ADVICES.c.record).where(ADVICES.c.target == target)
        query = query.order_by(ADVICES.c.number.desc()).limit(most)
        with self.reading() as connection:
            records = connection.execute(query).scalars().all()
        return [decode(record.encode(), Advice) for record in records]

    def advices(
        self, *, most: int = 0, before: int | None = None
    ) -> tuple[list[Advice], int | None]:
        """Returns a page of at most `most` advices, newest first, and where the next one begins."""
        query = _page(ADVICES, most, before)
        with self.reading() as connection:
            rows, more = _read_page(connection.execute(query), most)
        return [decode(row.record.encode(), Advice) for row in rows], more

    def trials(
        self, *, advice_id: str = "", most: int = 0, before: int | None = None
    ) -> tuple[list[StoredTrial], int | None]:
        """Returns a page of trials, newest first, and where the next one begins."""
        query = _page(TRIALS, most, before)
        if advice_id:
            query = query.where(TRIALS.c.advice_id == advice_id)
        with self.reading() as connection:
            rows, more = _read_page(connection.execute(query), most)
        found = [
            StoredTrial(
                advice_id=row.advice_id,
                created=row.created,
                target=row.target,
                trial=decode(row.record.encode(), Trial),
            )
            for row in rows
        ]
        return found, more

    @contextlib.contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        """One transaction that writes: whole, or not at all. Raises `StoreError`."""
        with _told(), self._engine.execution_options(immediate=True).begin() as connection:
            yield connection

    @contextlib.contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """A connection that reads. Raises `StoreError`."""
        with _told(), self._engine.connect() as connection:
            yield connection

    def _check(self) -> None:
        """Raises `StoreError` for a damaged file, before anything builds on it."""
        with self.reading() as connection:
            for table in METADATA.sorted_tables:
                connection.execute(sa.select(table).limit(1)).all()
            if self.path.stat().st_size <= _CHECKED_BYTES:
                verdict = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
                if verdict != "ok":
                    raise _damaged()


def trial_row(trial: Trial, *, advice_id: str, target: str) -> dict[str, Any]:
    """Returns the row of a finished trial."""
    return {
        "advice_id": advice_id,
        "trial_id": trial.trial_id,
        "created": now(),
        "target": target,
        "kind": trial.kind.value,
        "status": trial.status.value,
        "record": json_of(trial),
    }


def advice_row(advice: Advice) -> dict[str, Any]:
    """Returns the row of a finished advice."""
    return {
        "advice_id": advice.advice_id,
        "created": advice.created,
        "target": advice.target,
        "enable": advice.enable,
        "record": json_of(advice),
    }


def now() -> str:
    """Returns the time as the database writes it: ISO 8601, UTC, seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def json_of(record: object) -> str:
    """Returns a record as JSON. Raises `AdvisorError` for what could not be read again."""
    data = encode(record)
    decode(data, type(record))  # what could not be read again is not written
    return data.decode()


def _page(table: sa.Table, most: int, before: int | None) -> sa.Select[Any]:
    query = sa.select(table).order_by(table.c.number.desc()).limit((most or _DEFAULT_PAGE) + 1)
    return query if before is None else query.where(table.c.number < before)


def _read_page(rows: Iterable[Any], most: int) -> tuple[list[Any], int | None]:
    """Returns the rows of one page, and the `before` of the next one or None."""
    page: list[Any] = []
    size = 0
    for row in rows:
        size += len(row.record)
        if page and (len(page) == (most or _DEFAULT_PAGE) or size > _PAGE_BYTES):
            return page, page[-1].number
        page.append(row)
    return page, None


def _engine(path: Path) -> sa.Engine:
    engine = sa.create_engine(
        sa.URL.create("sqlite", database=str(path)),
        connect_args={"timeout": _BUSY_TIMEOUT_S, "isolation_level": None},
    )

    @event.listens_for(engine, "connect")
    def _(connection: Any, _record: Any) -> None:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")

    @event.listens_for(engine, "begin")
    def _(connection: sa.Connection) -> None:
        immediate = connection.get_execution_options().get("immediate", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")

    return engine


def _create(path: Path) -> None:
    """Makes an empty database; under its name there is never a half-made one."""
    unfinished = path.with_suffix(".new")
    unfinished.unlink(missing_ok=True)
    with contextlib.closing(sqlite3.connect(unfinished)) as connection:
        connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version={SCHEMA}")
    engine = sa.create_engine(sa.URL.create("sqlite", database=str(unfinished)))
    METADATA.create_all(engine)
    engine.dispose()
    unfinished.chmod(0o600)  # its log files get the same mode
    unfinished.rename(path)


def _upgrade(path: Path) -> None:
    """Brings a database of an older version to this one; what it holds stays as it is."""
    if _version(path) >= SCHEMA:
        return
    engine = sa.create_engine(sa.URL.create("sqlite", database=str(path)))
    try:
        with engine.begin() as connection:
            METADATA.create_all(connection)
            connection.exec_driver_sql(f"PRAGMA user_version={SCHEMA}")
    finally:
        engine.dispose()


def _refuse_foreign(path: Path) -> None:
    """Raises `StoreError` for a file that is not ours, judged by its header alone.

    https://www.sqlite.org/fileformat.html: user_version at 60, application_id at 68.
    """
    with path.open("rb") as file:
        header = file.read(100)
    if len(header) < 100 or not header.startswith(b"SQLite format 3\0"):
        raise _damaged()
    (application_id,) = struct.unpack_from(">I", header, 68)
    version = _version(path)
    if application_id != APPLICATION_ID:
        raise StoreError(
            f"{path.name} in the data folder belongs to another program",
            mend="move it away, or point ADVISOR_DATA_DIR to another folder",
        )
    if version > SCHEMA:
        raise StoreError(
            f"{path.name} in the data folder was written by a newer compile-advisor",
            f"its version is {version}, this one reads up to {SCHEMA}",
            "upgrade, or point ADVISOR_DATA_DIR to another folder",
        )


def _version(path: Path) -> int:
    with path.open("rb") as file:
        (version,) = struct.unpack_from(">I", file.read(100), 60)
    return int(version)


def _damaged() -> StoreError:
    return StoreError(
        f"{FILE_NAME} in the data folder is not a sound database",
        mend="restore it or move it away; a new one is made then",
    )


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder / f"{FILE_NAME}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Turns what SQLite and the system say into `StoreError`, without SQL and without paths."""
    try:
        yield
    except exc.DBAPIError as error:
        if "malformed" in str(error.orig) or "not a database" in str(error.orig):
            raise _damaged() from error
        raise StoreError("the results database cannot be used", str(error.orig)) from error
    except (exc.SQLAlchemyError, sqlite3.Error) as error:
        raise StoreError("the results database cannot be used", type(error).__name__) from error
    except OSError as error:
        raise StoreError("the data folder cannot be used", error.strerror or "") from error
