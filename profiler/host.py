"""The trial host: forks trials, watches them, and ends their whole process tree for sure.

`python -P -m advisor.profiler.host FD` speaks `frames` over the inherited socket FD. It has
imported torch, so that a trial is ready in milliseconds, but never touched an accelerator; it runs
one thread and no gRPC, so that forking is safe (grpc's doc/fork_support.md: forking a process that
serves gRPC is not supported); and it is a child subreaper, so that no descendant of a trial can
get away. When its socket closes, it ends everything, itself last.

The host sleeps in `select` whenever nothing happens: it shares the cores that are being measured.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from advisor.profiler import process_tree, shared_memory
from advisor.profiler.errors import HostError
from advisor.profiler.frames import (
    CANCELLED,
    End,
    Ended,
    EndReason,
    Exit,
    FromTrial,
    PhaseBegun,
    Ready,
    Refused,
    Reported,
    Result,
    Run,
    Started,
    ToHost,
    Unpacker,
    Unusable,
    pack,
)
from advisor.profiler.records import Phase, TrialSpec

# How long a trial has between SIGTERM and SIGKILL.
GRACE_S = 1.0
# A trial that talks more than this is ended: its output would be measured as slowness.
MOST_OUTPUT_BYTES = 64 << 20
_KEPT_OUTPUT_BYTES = 16 << 10
_MEMORY_CHECK_S = 0.25
_READ_BYTES = 1 << 16


@dataclass(slots=True)
class _Running:
    """The one trial that runs: its process, its pipes, its clocks."""

    spec: TrialSpec
    pid: int
    pidfd: int
    frames_fd: int
    shared_before: frozenset[str]
    unpacker: Unpacker = field(default_factory=lambda: Unpacker(FromTrial))
    begun: float = field(default_factory=time.monotonic)
    phase: Phase = Phase.IMPORT
    phase_begun: float = field(default_factory=time.monotonic)
    tails: dict[int, bytearray] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    output_bytes: int = 0
    peak_bytes: int = 0
    ended: EndReason | None = None
    kill_at: float | None = None
    result: Result | None = None
    unusable: Unusable | None = None
    junk: str = ""

    def deadline(self) -> tuple[float | None, str]:
        """Returns the monotonic time at which this phase must be over, and the kind of end."""
        limit, kind = self.spec.deadlines.of(self.phase), "deadline"
        cut_off = self.spec.cut_off_s
        if self.phase is Phase.COLD and cut_off is not None and (limit is None or cut_off < limit):
            limit, kind = cut_off, "cut_off"
        return (None if limit is None else self.phase_begun + limit), kind


class Host:
    """Runs one trial at a time for the peer at the other end of `peer`."""

    def __init__(self, peer: socket.socket, run_trial: Callable[[TrialSpec, int], None]) -> None:
        self._peer = peer
        self._run_trial = run_trial
        self._selector = selectors.DefaultSelector()
        self._selector.register(peer, selectors.EVENT_READ)
        self._unpacker = Unpacker(ToHost)
        self._running: _Running | None = None

    def serve(self) -> None:
        """Serves until the peer closes the socket; then every trial process is gone."""
        self._send(Ready(pid=os.getpid()))
        try:
            while self._turn():
                pass
        finally:
            process_tree.kill_children()
            if self._running is not None:
                shared_memory.sweep(self._running.shared_before)

    def _turn(self) -> bool:
        for key, _ in self._selector.select(self._patience_s()):
            if key.fileobj is self._peer:
                data = self._peer.recv(_READ_BYTES)
                if not data:
                    return False
                for message in self._unpacker.feed(data):
                    self._obey(message)
            elif self._running is not None:
                self._hear(self._running, int(key.fd))
            if self._running is None:
                # The events left are of descriptors that are closed, or may be anew.
                break
        if self._running is not None:
            self._watch(self._running)
        return True

    def _patience_s(self) -> float | None:
        running = self._running
        if running is None:
            return None
        now = time.monotonic()
        moments = [running.kill_at if running.ended else running.deadline()[0]]
        if running.spec.memory_limit_bytes is not None and not running.ended:
            moments.append(now + _MEMORY_CHECK_S)
        known = [moment for moment in moments if moment is not None]
        return max(0.0, min(known) - now) if known else None

    def _obey(self, message: object) -> None:
        running = self._running
        if isinstance(message, Run):
            if running is not None:
                raise HostError("a trial is running already", mend="end it first")
            self._start(message.spec)
        elif (
            isinstance(message, End)
            and running is not None
            and running.spec.trial_id == message.trial_id
        ):
            self._end(running, message.reason or CANCELLED)

    def _start(self, spec: TrialSpec) -> None:
        threads = len(os.listdir("/proc/self/task"))
        if threads > 1:
            self._send(Refused(message=f"the trial host runs {threads} threads: it cannot fork"))
            return
        frames_read, frames_write = os.pipe()
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        shared_before = shared_memory.segments()
        host_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_trial(spec, host_pid, frames_write, out_write, err_write)
        for descriptor in (frames_write, out_write, err_write):
            os.close(descriptor)
        running = _Running(
            spec=spec,
            pid=pid,
            pidfd=os.pidfd_open(pid),
            frames_fd=frames_read,
            shared_before=shared_before,
            tails={out_read: bytearray(), err_read: bytearray()},
            names={out_read: "stdout", err_read: "stderr"},
        )
        for descriptor in (frames_read, out_read, err_read, running.pidfd):
            self._selector.register(descriptor, selectors.EVENT_READ)
        self._running = running
        self._send(Started(trial_id=spec.trial_id, pid=pid))

    def _become_trial(
        self, spec: TrialSpec, host_pid: int, frames_fd: int, out_fd: int, err_fd: int
    ) -> None:
        """Turns the forked child into the trial. Never returns."""
        code = 70
        try:
            os.setsid()
            process_tree.die_with_parent(host_pid)
            _limit_resources()
            null = os.open(os.devnull, os.O_RDONLY)
            for source, target in ((null, 0), (out_fd, 1), (err_fd, 2)):
                os.dup2(source, target)
            # High, so that user code which closes the usual low numbers does not hit it.
            frames_fd = _move_high(frames_fd)
            os.closerange(3, frames_fd)
            os.closerange(frames_fd + 1, frames_fd + 4096)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._run_trial(spec, frames_fd)
            code = 0
        except BaseException:  # noqa: BLE001 - the traceback must reach stderr whatever it was
            import traceback

            traceback.print_exc()
        finally:
            # Not sys.exit: torch's exit handlers may wait minutes for compile workers
            # (pytorch/pytorch#162199), and the host's own handlers are none of the trial's.
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _hear(self, running: _Running, descriptor: int) -> None:
        if descriptor == running.pidfd:
            self._finish(running)
            return
        try:
            data = os.read(descriptor, _READ_BYTES)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(descriptor)
            os.close(descriptor)
            running.tails.setdefault(descriptor, bytearray())
            running.names.setdefault(descriptor, "")
            if descriptor == running.frames_fd:
                running.frames_fd = -1
        elif descriptor == running.frames_fd:
            self._hear_frames(running, data)
        else:
            self._hear_output(running, descriptor, data)

    def _hear_frames(self, running: _Running, data: bytes) -> None:
        if running.junk:
            return
        try:
            messages = running.unpacker.feed(data)
        except HostError as error:
            running.junk = str(error)
            self._end(running, EndReason(kind="junk", message=running.junk))
            return
        for message in messages:
            if isinstance(message, PhaseBegun):
                running.phase, running.phase_begun = message.phase, time.monotonic()
            elif isinstance(message, Reported):
                self._send(message)
            elif isinstance(message, Result):
                if running.result is None or not running.result.final:
                    running.result = message
            elif isinstance(message, Unusable):
                running.unusable = message

    def _hear_output(self, running: _Running, descriptor: int, data: bytes) -> None:
        tail = running.tails[descriptor]
        tail += data
        del tail[:-_KEPT_OUTPUT_BYTES]
        running.output_bytes += len(data)
        if running.output_bytes > MOST_OUTPUT_BYTES:
            megabytes = MOST_OUTPUT_BYTES >> 20
            self._end(
                running,
                EndReason(
                    kind="output", message=f"the training code printed more than {megabytes} MiB"
                ),
            )

    def _watch(self, running: _Running) -> None:
        now = time.monotonic()
        if running.ended is not None:
            if running.kill_at is not None and now >= running.kill_at:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(running.pid, signal.SIGKILL)
                running.kill_at = None
            return
        moment, kind = running.deadline()
        if moment is not None and now >= moment:
            limit_s = now - running.phase_begun
            self._end(
                running,
                EndReason(
                    kind=kind, message=f"{running.phase.value} took longer than {limit_s:.0f} s"
                ),
            )
        elif running.spec.memory_limit_bytes is not None:
            self._watch_memory(running, running.spec.memory_limit_bytes)

    def _watch_memory(self, running: _Running, limit_bytes: int) -> None:
        pids = list(process_tree.descendants(os.getpid()))
        held = process_tree.resident_bytes(pids)
        if held > limit_bytes:
            held = process_tree.proportional_bytes(pids)
        running.peak_bytes = max(running.peak_bytes, held)
        if held > limit_bytes:
            self._end(
                running,
                EndReason(
                    kind="memory",
                    message=f"the trial held {held / 1e9:.2f} GB of memory,"
                    f" more than its limit of {limit_bytes / 1e9:.2f} GB",
                ),
            )

    def _end(self, running: _Running, reason: EndReason) -> None:
        if running.ended is not None:
            return
        running.ended = reason
        if reason.kind == "deadline":
            # faulthandler is registered for SIGUSR1 in the trial: where it hangs goes to stderr.
            with contextlib.suppress(ProcessLookupError):
                os.kill(running.pid, signal.SIGUSR1)
            time.sleep(0.05)
        urgent = reason.kind == "memory"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL if urgent else signal.SIGTERM)
        running.kill_at = time.monotonic() + GRACE_S

    def _finish(self, running: _Running) -> None:
        """The trial's leader has ended: end the rest, drain the pipes, report."""
        _, status = os.waitpid(running.pid, 0)
        process_tree.kill_children()
        descriptors = [int(key.fd) for key in self._selector.get_map().values()]
        for descriptor in descriptors:
            if descriptor in (self._peer.fileno(), running.pidfd):
                continue
            os.set_blocking(descriptor, False)
            while descriptor in self._selector.get_map():
                ready, _, _ = select.select([descriptor], [], [], 0)
                if not ready:
                    self._selector.unregister(descriptor)
                    os.close(descriptor)
                    break
                self._hear(running, descriptor)
        self._selector.unregister(running.pidfd)
        os.close(running.pidfd)
        shared_memory.sweep(running.shared_before)
        self._running = None
        self._send(
            Ended(
                trial_id=running.spec.trial_id,
                exit=self._exit(running, status),
                trial=running.result.trial if running.result else None,
                unusable=running.unusable,
            )
        )

    def _exit(self, running: _Running, status: int) -> Exit:
        tails = {
            name: running.tails[descriptor].decode("utf-8", "replace")
            for descriptor, name in running.names.items()
        }
        return Exit(
            code=os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
            signal=os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
            ended=running.ended,
            phase=running.phase,
            wall_s=time.monotonic() - running.begun,
            peak_bytes=running.peak_bytes,
            junk=running.junk,
            stdout_tail=tails.get("stdout", ""),
            stderr_tail=tails.get("stderr", ""),
        )

    def _send(self, message: object) -> None:
        self._peer.sendall(pack(message))


def _move_high(descriptor: int) -> int:
    import fcntl

    high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 512)
    os.close(descriptor)
    return high


def _limit_resources() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else min(65_536, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    # When memory runs out, the kernel is to take the trial, not the one who asked for it.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def _import_torch() -> None:
    """Imports torch with a single thread: a second one would make forking unsafe.

    OpenBLAS starts its threads when numpy loads it; torch starts its own on first use only. The
    variable is put back, so that what the trial starts sees what the person has set.
    """
    name = "OPENBLAS_NUM_THREADS"
    before = os.environ.get(name)
    os.environ[name] = "1"
    # torch.cuda.is_available() asks NVML rather than starting CUDA, which no fork survives.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    try:
        import torch  # noqa: F401
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def main() -> None:
    """Runs the host on the socket whose descriptor is the first argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    peer = socket.socket(fileno=int(sys.argv[1]))
    peer.set_inheritable(False)
    process_tree.become_subreaper()
    try:
        _import_torch()
    except ImportError as error:
        peer.sendall(
            pack(
                Refused(
                    message=f"torch cannot be imported: {error}"
                    " (install it, or compile-advisor[profiler])"
                )
            )
        )
        return
    from advisor.profiler.trial import run_trial

    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        Host(peer, run_trial).serve()


if __name__ == "__main__":
    main()
