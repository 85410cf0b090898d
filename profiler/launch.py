"""The asking side of the trial host: starts it, hands it trials, ends it. Imports no torch."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeVar

import psutil

from advisor.profiler.errors import HostError
from advisor.profiler.frames import (
    End,
    Ended,
    EndReason,
    FromHost,
    Ready,
    Refused,
    Reported,
    Run,
    Unpacker,
    pack,
)
from advisor.profiler.outcome import trial_of, unusable_error
from advisor.profiler.records import Progress, Trial, TrialSpec

T = TypeVar("T")

# Of the memory that is free when a trial starts, the share that it may take when nobody says.
_MEMORY_SHARE = 0.9
_READY_TIMEOUT_S = 120.0
# Longer than the host's own grace, after which the host itself is killed.
_END_TIMEOUT_S = 15.0
_READ_BYTES = 1 << 16


class TrialHost:
    """A running trial host. `async with TrialHost.start() as host: await host.run(spec, ...)`.

    One trial at a time. When the block is left, for whatever reason, neither the host nor any
    process of a trial is alive.
    """

    def __init__(self, python: str) -> None:
        self._python = python
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._unpacker = Unpacker(FromHost)
        self._waiting: list[object] = []
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __aexit__

    @classmethod
    def start(cls, *, python: str = sys.executable) -> TrialHost:
        """Returns a host that starts when its block is entered."""
        return cls(python)

    async def __aenter__(self) -> Self:
        ours, theirs = socket.socketpair()
        try:
            # Cancelled half-way it would leave a process that nobody knows of.
            await to_the_end(self._spawn(theirs))
        except asyncio.CancelledError:
            ours.close()
            await to_the_end(self._kill())
            raise
        finally:
            theirs.close()
        try:
            self._reader, self._writer = await asyncio.open_connection(sock=ours)
            async with asyncio.timeout(_READY_TIMEOUT_S):
                message = await self._next()
            if isinstance(message, Refused):
                raise HostError("no trial can run", message.message)
            if not isinstance(message, Ready):
                raise HostError("the trial host did not start", str(message))
        except BaseException as error:
            # It imports torch, during which it hears nothing.
            await to_the_end(self._kill())
            await self._stop()
            if isinstance(error, TimeoutError):
                raise HostError(
                    f"the trial host was not ready after {_READY_TIMEOUT_S:.0f} s", self.log()
                ) from error
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await to_the_end(self._stop())
        self._log.close()

    async def _spawn(self, theirs: socket.socket) -> None:
        self._process = await asyncio.create_subprocess_exec(
            self._python,
            "-P",
            "-m",
            "advisor.profiler.host",
            str(theirs.fileno()),
            pass_fds=[theirs.fileno()],
            stdin=asyncio.subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            # Out of the terminal's reach: Ctrl-C is for whoever asked, who then ends us.
            start_new_session=True,
        )

    async def run(
        self, spec: TrialSpec, on_progress: Callable[[Progress], None] = lambda _: None
    ) -> Trial:
        """Runs one trial and returns its result; whatever goes wrong in it is a status.

        Raises `WorkloadError` or `PlanError` when the workload cannot be used at all, `HostError`
        when the host ended by itself. When cancelled, every process of the trial has ended before
        the cancellation goes on.
        """
        if spec.memory_limit_bytes is None:
            limit = int(psutil.virtual_memory().available * _MEMORY_SHARE)
            spec = replace(spec, memory_limit_bytes=limit)
        self._send(Run(spec=spec))
        try:
            ended = await self._until_ended(spec, on_progress)
        except asyncio.CancelledError:
            await to_the_end(self._end(spec))
            raise
        if ended.unusable is not None:
            raise unusable_error(ended.unusable)
        return trial_of(spec, ended)

    def end(self, spec: TrialSpec, reason: EndReason) -> None:
        """Has a trial that runs end now; `run` then returns what there is of it, and the reason."""
        self._send(End(trial_id=spec.trial_id, reason=reason))

    async def _until_ended(self, spec: TrialSpec, on_progress: Callable[[Progress], None]) -> Ended:
        while True:
            message = await self._next()
            if isinstance(message, Reported):
                on_progress(message.progress)
            elif isinstance(message, Ended) and message.trial_id == spec.trial_id:
                return message
            elif isinstance(message, Refused):
                raise HostError("no trial can run", message.message)

    async def _end(self, spec: TrialSpec) -> None:
        try:
            self._send(End(trial_id=spec.trial_id))
            async with asyncio.timeout(_END_TIMEOUT_S):
                await self._until_ended(spec, lambda _: None)
        except (TimeoutError, HostError, OSError):
            await self._stop()

    async def _next(self) -> object:
        if self._reader is None:
            raise HostError("the trial host is not running")
        while not self._waiting:
            data = await self._reader.read(_READ_BYTES)
            if not data:
                raise HostError("the trial host ended by itself", self.log())
            self._waiting += self._unpacker.feed(data)
        return self._waiting.pop(0)

    def _send(self, message: object) -> None:
        if self._writer is None or self._writer.is_closing():
            raise HostError("the trial host is not running")
        self._writer.write(pack(message))

    async def _stop(self) -> None:
        """Closes the socket, at which the host ends everything; kills it if it does not."""
        if self._writer is not None:
            self._writer.close()
        process = self._process
        if process is None or process.returncode is not None:
            return
        try:
            async with asyncio.timeout(_END_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    async def _kill(self) -> None:
        """Kills a host that has not begun: there is no trial that it would have to end."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()

    def log(self) -> str:
        """Returns the last lines that the host itself printed."""
        # pread leaves the offset alone, which the host's own writes share.
        descriptor = self._log.fileno()
        size = os.fstat(descriptor).st_size
        tail = os.pread(descriptor, 4096, max(0, size - 4096))
        return tail.decode("utf-8", "replace").strip()


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Returns what `work` does, however often the waiting task is cancelled meanwhile.

    Then it lets it be so.

    Ending processes must not be interrupted: what it leaves would outlive everyone. Nor must a
    transaction: the store may be closed next.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise
            cancelled = error
    result = task.result()
    if cancelled is not None:
        raise cancelled
    return result
