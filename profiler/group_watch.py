"""Watching the ranks of a trial: what each does, who died, who is waited for.

Ranks wait for each other in every collective, so that one that hangs or has died stops all of them
without a word. The leader hears of every phase, step and compile of each rank; when none of them
has said anything for long and none compiles, it asks each where it is (SIGUSR1) and names the one
that is not in a collective.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from advisor.profiler.errors import HostError
from advisor.profiler.frames import (
    Compiling,
    FromRank,
    Hello,
    PhaseBegun,
    Reported,
    Result,
    Unpacker,
    Unusable,
)
from advisor.profiler.records import Phase
from advisor.profiler.reporter import Reporter
from advisor.profiler.workload import is_library

# Silence of all ranks after which one of them is taken to hang: when all of them are idle, and
# when some are busy (which is also how a rank waits on a GPU). A rank that compiles is not silent.
IDLE_S, BUSY_S = 15.0, 40.0
# Steps may take long: the silence has to be this many times the longest that was heard of.
_LONGEST = 5.0
# A process that takes less than this share of a core is idle.
_IDLE_SHARE = 0.05
# How long the other ranks have to say what they know once one has failed.
_GRACE_S = 2.0
_TURN_S = 0.25
_READ_BYTES = 1 << 16
_CREDENTIALS = struct.Struct("3i")
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')


@dataclass(slots=True)
class Member:
    """One rank, as far as the leader has heard of it."""

    rank: int
    pid: int
    unpacker: Unpacker
    phase: Phase = Phase.IMPORT
    compiling: bool = False
    heard: float = field(default_factory=time.monotonic)
    longest_s: float = 0.0
    result: Result | None = None
    unusable: Unusable | None = None
    gone: bool = False
    # It ended by itself before it had said anything: what the others then meet follows from that.
    lost: bool = False

    @property
    def settled(self) -> bool:
        """Whether it has said all that it will say."""
        return self.result is not None or self.unusable is not None

    @property
    def failed(self) -> bool:
        """Whether it said that it cannot go on."""
        trial = self.result.trial if self.result is not None else None
        return self.unusable is not None or (trial is not None and trial.failure is not None)


class GroupWatch:
    """Listens to the ranks in a thread of its own, and ends them when they cannot go on."""

    def __init__(self, name: str, ranks: int, reporter: Reporter, folder: Path) -> None:
        """Listens at the abstract Unix address `name`; `folder` is where ranks write stacks."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("\0" + name)
        self._listener.listen(ranks)
        self._ranks, self._reporter, self._folder = ranks, reporter, folder
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._begun = time.monotonic()
        self._end_at: float | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._cpu: dict[int, float] = {}
        self._idle_since = time.monotonic()
        self.members: dict[int, Member] = {}
        # What hangs, in one sentence; empty as long as nothing does.
        self.stalled = ""

    def start(self) -> None:
        """Starts listening."""
        self._thread.start()

    def stop(self) -> None:
        """Stops listening, once everything that was said has been heard."""
        self._over.set()
        self._thread.join()
        self._selector.close()
        self._listener.close()

    def _listen(self) -> None:
        while not self._over.is_set():
            self._turn(_TURN_S)
        # What came before the end is still in the sockets.
        while self._turn(0.0):
            pass

    def _turn(self, patience_s: float) -> bool:
        heard = False
        for key, _ in self._selector.select(patience_s):
            heard = True
            if key.fileobj is self._listener:
                self._welcome()
            else:
                self._hear(key.fileobj, key.data)  # type: ignore[arg-type]
        if not self._over.is_set():
            self._judge(time.monotonic())
        return heard

    def _welcome(self) -> None:
        peer, _ = self._listener.accept()
        credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user, _ = _CREDENTIALS.unpack(credentials)
        # An abstract address has no permissions: anyone on the machine may knock.
        if user != os.getuid():
            peer.close()
            return
        member = Member(rank=-1, pid=-1, unpacker=Unpacker(FromRank))
        self._selector.register(peer, selectors.EVENT_READ, member)

    def _hear(self, peer: socket.socket, member: Member) -> None:
        try:
            data = peer.recv(_READ_BYTES)
            messages = member.unpacker.feed(data)
        except (OSError, HostError):
            data, messages = b"", []
        if not data:
            member.gone = True
            member.lost = not member.settled and self._end_at != float("inf")
            self._selector.unregister(peer)
            peer.close()
        for message in messages:
            self._take(member, message)

    def _take(self, member: Member, message: object) -> None:
        now = time.monotonic()
        if isinstance(message, Hello):
            member.rank, member.pid = message.rank, message.pid
            self.members[member.rank] = member
        elif isinstance(message, PhaseBegun):
            member.phase = message.phase
            if member.rank == 0:
                self._reporter.begin(message.phase)
        elif isinstance(message, Reported):
            if member.rank == 0 and message.progress.detail:
                self._reporter.tell(message.progress.detail)
        elif isinstance(message, Compiling):
            member.compiling = message.begins
        elif isinstance(message, Result):
            member.result = message
        elif isinstance(message, Unusable):
            member.unusable = message
        if not member.compiling:
            member.longest_s = max(member.longest_s, now - member.heard)
        member.heard = now

    def _judge(self, now: float) -> None:
        """Ends the group when a rank has failed or died, or when all wait for one that hangs."""
        members = list(self.members.values())
        if self._end_at is not None:
            if now >= self._end_at:
                self.end()
            return
        if any(member.failed or member.lost for member in members):
            self._end_at = now + _GRACE_S
            return
        waiting = [member for member in members if not member.settled]
        if not waiting or len(members) < self._ranks or any(m.compiling for m in waiting):
            self._idle_since = now
            return
        silent_s = now - max(member.heard for member in waiting)
        if silent_s < IDLE_S:
            self._idle_since = now
            self._cpu = {}
            return
        longest_s = _LONGEST * max(member.longest_s for member in waiting)
        if self._busy(waiting):
            self._idle_since = now
        idle = now - self._idle_since >= IDLE_S / 2
        if silent_s >= max(BUSY_S, longest_s) or (idle and silent_s >= min(BUSY_S, longest_s)):
            self.stalled = self._who_hangs(waiting, silent_s)
            self.end()

    def _busy(self, members: Sequence[Member]) -> bool:
        """Returns whether a rank has computed since it was last asked."""
        busy = False
        for member in members:
            used_s = _cpu_s(member.pid)
            busy |= used_s - self._cpu.get(member.pid, 0.0) > _IDLE_SHARE * _TURN_S
            self._cpu[member.pid] = used_s
        return busy

    def _who_hangs(self, members: Sequence[Member], silent_s: float) -> str:
        places = {member.rank: self._place(member) for member in members}
        # A rank that waits for the others is within torch; one that does not is in its own code.
        own = [rank for rank, place in places.items() if place is not None and not place.library]
        names = own or sorted(places)
        shown = "; ".join(
            f"rank {rank} is at {places[rank] or 'an unknown place'}" for rank in names
        )
        what = f"rank {own[0]} hangs" if len(own) == 1 else "the ranks hang"
        return f"{what}: nothing was heard of any rank for {silent_s:.0f} s ({shown})"

    def _place(self, member: Member) -> _Place | None:
        """Returns where a rank is now, by its own account."""
        path = self._folder / f"rank{member.rank}.stack"
        with contextlib.suppress(OSError):
            os.kill(member.pid, signal.SIGUSR1)
            for _ in range(20):
                time.sleep(0.05)
                found = _FRAME.findall(path.read_text(errors="replace"))
                if found:
                    frames = [_Place(file, int(line), function) for file, line, function in found]
                    # The innermost frame that is the person's, and whether torch is within it.
                    mine = next((frame for frame in frames if not frame.library), None)
                    if mine is None or frames[0].in_torch:
                        return frames[0]
                    return mine
        return None

    def end(self) -> None:
        """Kills every rank; the launcher then ends what they have left."""
        self._end_at = float("inf")
        for member in self.members.values():
            if not member.gone and member.pid > 0:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member.pid, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class _Place:
    file: str
    line: int
    function: str

    @property
    def library(self) -> bool:
        return is_library(self.file)

    @property
    def in_torch(self) -> bool:
        return f"{os.sep}torch{os.sep}" in self.file

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


def _cpu_s(pid: int) -> float:
    """Returns the seconds that a process and what it has started have computed."""
    try:
        process = psutil.Process(pid)
        used = [process.cpu_times(), *(c.cpu_times() for c in process.children(recursive=True))]
    except psutil.Error:
        return 0.0
    return sum(times.user + times.system for times in used)
