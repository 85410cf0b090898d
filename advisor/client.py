"""The asking side: a client of a running server, or of a private one that it starts itself.

There is one path: `advise run` without `--server` starts the same server on a Unix socket in a
folder that only this user can enter, and ends it afterwards. Uses the synchronous stack of gRPC:
an aio channel in a helper thread disturbs other loops of the process (grpc/grpc#25364).
"""

from __future__ import annotations

import contextlib
import os

# Both before grpc is imported: fork handlers crash children of processes that use gRPC
# (grpc/grpc#43055), and gRPC's own log would go into the person's terminal.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import hashlib
import itertools
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, NoReturn, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from advisor import channels
from advisor.convert import (
    advice_record,
    estimate_record,
    estimate_request_message,
    outcome_message,
    trial_record,
)
from advisor.events import Event
from advisor.job_facts import EstimateRequest, EstimateResponse, OutcomeReport
from advisor.profiler.errors import (
    AdvisorError,
    DamagedError,
    HostError,
    Interrupted,
    NotFoundError,
    PlanError,
    StoreError,
)
from advisor.profiler.records import Advice
from advisor.request import AdviceRequest
from advisor.service.errors import error_of
from advisor.stored import StoredTrial
from advisor.v1 import advisor_pb2 as pb
from advisor.v1 import advisor_pb2_grpc
from advisor.watching import watched

# The kernel's limit of a Unix socket's path is 107 bytes.
_LONGEST_SOCKET_PATH = 100
# A server that has to end a trial's whole tree first gets so long before it is killed; its trial
# host then ends that tree by itself.
_END_S = 20.0
_START_S = 60.0
_CONNECT_S = 3.0
_CALL_S = 30.0
SERVICE = pb.DESCRIPTOR.services_by_name["Advisor"].full_name
# The first estimate of a new corpus waits until the cost model is fitted.
_FIT_S = 300.0
# A cache of a gigabyte over a slow line; in parts, so that none is larger than a server takes.
_TRANSFER_S = 3600.0
_PART_BYTES = 256 << 10
_ATTEMPTS, _PAUSE_S = 5, 0.5
_LOG_LINES = 12
_CANNOT_START = 2

_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # Without it a frozen server is noticed after 60 s only.
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.max_receive_message_length", 16 * 2**20),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
)
_ADDRESS = re.compile(r"unix:.+|[^\s:/]+:\d{1,5}|\[[0-9a-fA-F:.%]+\]:\d{1,5}")


class PrivateServer:
    """A server of our own, on a Unix socket. A context manager; `address` is valid inside it."""

    def __init__(self) -> None:
        self._folder = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self.address = ""

    @property
    def pid(self) -> int | None:
        """Returns the server's process id, None before it was started."""
        return self._process.pid if self._process else None

    def __enter__(self) -> Self:
        try:
            self._start()
            self._wait_for_socket()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, HostError | StoreError) and not isinstance(error, NotFoundError):
            self._add_log(error)
        self._end()

    def _start(self) -> None:
        self._folder = _short_folder()
        path = str(Path(self._folder, "s"))
        self.address = f"unix:{path}"
        self._log = Path(self._folder, "log").open("wb")  # noqa: SIM115 - closed in _end
        self._process = subprocess.Popen(
            # -P: the person's folder may hold a package named like one of ours.
            [sys.executable, "-P", "-m", "advisor.service.server", "--private", "--unix", path],
            # Its end of file is what ends the server, also when we are killed.
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            # Out of the terminal's reach: a Ctrl-C there is for us, who then cancel in order.
            start_new_session=True,
            env={**os.environ, "GRPC_ENABLE_FORK_SUPPORT": "0"},
        )

    def _wait_for_socket(self) -> None:
        assert self._process is not None
        until = time.monotonic() + _START_S
        while not Path(self._folder, "s").exists():
            if self._process.poll() is not None:
                # It says in its last line why it cannot start, and ends with 2.
                lines = self._log_lines()
                if self._process.returncode == _CANNOT_START and lines:
                    raise HostError("the private server cannot start", lines[-1])
                error = HostError("the private server ended while it started")
                self._add_log(error)
                raise error
            if time.monotonic() > until:
                error = HostError("the private server did not start", f"not in {_START_S:.0f} s")
                self._add_log(error)
                raise error
            time.sleep(0.01)

    def _add_log(self, error: AdvisorError) -> None:
        """Adds the last lines that the server wrote to an error, as a note."""
        if lines := self._log_lines():
            error.add_note("\n".join(["the server's log:", *lines[-_LOG_LINES:]]))

    def _log_lines(self) -> list[str]:
        try:
            text = Path(self._folder, "log").read_text(errors="replace")
        except OSError:
            return []
        return [line for line in text.splitlines() if line.strip()]

    def _end(self) -> None:
        """Ends the server and waits for it; it waits for its trials. A second Ctrl-C kills it."""
        process = self._process
        try:
            if process is not None:
                if process.stdin is not None:
                    process.stdin.close()
                try:
                    process.wait(_END_S)
                except subprocess.TimeoutExpired:
                    process.kill()
        except BaseException:
            if process is not None:
                process.kill()
            raise
        finally:
            if process is not None:
                process.wait()
            if self._log is not None:
                self._log.close()
            shutil.rmtree(self._folder, ignore_errors=True)


class Client:
    """Asks an advisor. A context manager: leaving it cancels what runs, and waits for the end.

    `server` is HOST:PORT or `unix:PATH` of a running one; None starts a private one.
    """

    def __init__(self, server: str | None = None) -> None:
        """Raises `PlanError` for an address that is none."""
        if server is not None:
            check_address(server)
        self._server = server
        self._stack = contextlib.ExitStack()
        self.private: PrivateServer | None = None
        self._stub: advisor_pb2_grpc.AdvisorStub
        self._health: health_pb2_grpc.HealthStub

    def __enter__(self) -> Self:
        """Raises `HostError` when no advisor answers."""
        with contextlib.ExitStack() as stack:
            address = self._server
            if address is None:
                self.private = stack.enter_context(PrivateServer())
                address = self.private.address
            channel = stack.enter_context(channels.opened(address, _OPTIONS))
            try:
                grpc.channel_ready_future(channel).result(timeout=_CONNECT_S)
            except grpc.FutureTimeoutError:
                what = f"no advisor answers at {address}"
                raise HostError(what, mend="advise serve starts one") from None
            self._stub = advisor_pb2_grpc.AdvisorStub(channel)
            self._health = health_pb2_grpc.HealthStub(channel)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def advise(self, request: AdviceRequest) -> Generator[Event, None, None]:
        """Yields what happens during a campaign; the last event is the `Advice`.

        Closing the iterator ends the campaign. A connection that is lost, and a server that starts
        again, are waited for. Raises `WorkloadError`, `PlanError`, `HostError`, or what else the
        server says.
        """
        try:
            yield from watched(self._stub, request, private=self.private is not None)
        except grpc.RpcError as error:
            _raise(error, self._server)

    def get_advice(self, advice_id: str) -> Advice:
        """Returns a finished advice. Raises `NotFoundError` when there is none of that id."""
        try:
            return advice_record(
                self._stub.GetAdvice(pb.GetAdviceRequest(advice_id=advice_id), timeout=_CALL_S)
            )
        except grpc.RpcError as error:
            _raise(error, self._server)

    def health(self) -> str:
        """Returns what the server says of itself: SERVING, or why it takes no work."""
        asked = health_pb2.HealthCheckRequest(service=SERVICE)
        try:
            answer = self._health.Check(asked, timeout=_CALL_S)
        except grpc.RpcError as error:
            _raise(error, self._server)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

    def estimate(self, request: EstimateRequest) -> EstimateResponse:
        """Returns what compiling is believed to bring. Raises `PlanError` for unsound facts."""
        try:
            return estimate_record(
                self._stub.Estimate(estimate_request_message(request), timeout=_FIT_S)
            )
        except grpc.RpcError as error:
            _raise(error, self._server)

    def report_outcome(self, report: OutcomeReport) -> int:
        """Tells the advisor what compiling brought; returns how many outcomes it has now."""
        try:
            answer = self._stub.ReportOutcome(outcome_message(report), timeout=_FIT_S)
        except grpc.RpcError as error:
            _raise(error, self._server)
        return int(answer.outcomes)

    def put_cache(self, file: Path) -> str:
        """Sends the archive of a compile cache; returns the cache's id there.

        A transfer that breaks off goes on where it was, a few times. Raises what the server says.
        """
        with file.open("rb") as content:
            sha256 = hashlib.file_digest(content, "sha256").hexdigest()
            size = content.seek(0, os.SEEK_END)
            first = pb.PutCacheRequest(sha256=sha256, size_bytes=size)
            for attempt in itertools.count(1):
                try:
                    held = int(self._stub.PutCache(iter([first]), timeout=_CALL_S).held_bytes)
                    parts = _parts(content, sha256, size, held)
                    answer = self._stub.PutCache(parts, timeout=_TRANSFER_S)
                    return str(answer.bundle_id)
                except grpc.RpcError as error:
                    self._again(error, attempt)
        raise AssertionError("count() never ends")

    def get_cache(self, name: str, file: Path) -> str:
        """Fetches the archive of a compile cache into a file; returns the cache's id.

        `name` is the id of a cache or of an advice, or the key of a job. A transfer that breaks
        off goes on where it was. Raises `NotFoundError`, `DamagedError` or what the server says.
        """
        sha256 = bundle_id = ""
        with file.open("w+b") as content:
            for attempt in itertools.count(1):
                try:
                    request = pb.GetCacheRequest(name=name, offset=content.tell())
                    parts = self._stub.GetCache(request, timeout=_TRANSFER_S)
                    told = next(parts)
                    if sha256 not in ("", told.sha256):
                        # Another archive than before: what is there is of no use.
                        sha256 = ""
                        content.truncate(content.seek(0))
                        continue
                    sha256, bundle_id = told.sha256, told.bundle_id
                    for part in parts:
                        content.write(part.data)
                    break
                except grpc.RpcError as error:
                    self._again(error, attempt)
            content.flush()
            content.seek(0)
            if hashlib.file_digest(content, "sha256").hexdigest() != sha256:
                raise DamagedError(f"the compile cache {name} came damaged", mend="fetch it again")
        return bundle_id

    def _again(self, error: grpc.RpcError, attempt: int) -> None:
        """Returns when a transfer is worth another attempt; else raises what the error means."""
        gone = error_of(error) is None and error.code() is grpc.StatusCode.UNAVAILABLE
        if not gone or attempt >= _ATTEMPTS:
            _raise(error, self._server)
        time.sleep(attempt * _PAUSE_S)

    def list_trials(self, advice_id: str = "", most: int = 50) -> list[StoredTrial]:
        """Returns stored trials, newest first; those of one advice when its id is given."""
        found: list[StoredTrial] = []
        token = ""
        try:
            while len(found) < most:
                page = self._stub.ListTrials(
                    pb.ListTrialsRequest(
                        advice_id=advice_id, page_size=most - len(found), page_token=token
                    ),
                    timeout=_CALL_S,
                )
                found.extend(
                    StoredTrial(
                        advice_id=stored.advice_id,
                        created=stored.created,
                        target=stored.target,
                        trial=trial_record(stored.trial),
                    )
                    for stored in page.trials
                )
                token = page.next_page_token
                if not token:
                    break
        except grpc.RpcError as error:
            _raise(error, self._server)
        return found


def _parts(content: IO[bytes], sha256: str, size: int, held: int) -> Iterator[pb.PutCacheRequest]:
    """Yields the messages that send a file from a byte on."""
    content.seek(held)
    yield pb.PutCacheRequest(
        sha256=sha256, size_bytes=size, offset=held, data=content.read(_PART_BYTES)
    )
    while data := content.read(_PART_BYTES):
        yield pb.PutCacheRequest(data=data)


def check_address(address: str) -> None:
    """Raises `PlanError` unless `address` is HOST:PORT or `unix:PATH`."""
    match = _ADDRESS.fullmatch(address)
    port = address.rpartition(":")[2]
    if match is None or (port.isdigit() and not address.startswith("unix:") and int(port) > 65_535):
        raise PlanError(
            f"--server {address!r} is not an address", mend="HOST:PORT or unix:PATH expected"
        )


def _short_folder() -> str:
    """Returns a new folder that only this user can enter, short enough for a socket's path."""
    folder = tempfile.mkdtemp(prefix="advise-")
    if len(os.fsencode(folder)) <= _LONGEST_SOCKET_PATH:
        return folder
    shutil.rmtree(folder)
    return tempfile.mkdtemp(prefix="advise-", dir="/tmp")


def _raise(call: grpc.RpcError, server: str | None) -> NoReturn:
    """Raises the error that the server meant, or says that it is gone."""
    error = error_of(call)
    if error is None:
        where = f"the advisor at {server}" if server else "the private server"
        if call.code() is grpc.StatusCode.CANCELLED:
            error = Interrupted(f"{where} cancelled the campaign")
        elif call.code() is grpc.StatusCode.UNAVAILABLE:
            error = HostError(f"{where} went away", call.details() or "")
        else:
            error = HostError(f"{where} answers {call.code().name}", call.details() or "")
    raise error from call
