"""Ending a whole process tree for sure, and what it holds, on Linux.

`killpg` and a walk over parents both miss a daemon that forked twice. A child subreaper inherits
such orphans, so killing and reaping its own children until none is left ends every one of them
(prctl(2), PR_SET_CHILD_SUBREAPER).
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), f"prctl({option})")


def become_subreaper() -> None:
    """Makes orphaned descendants children of this process. Raises OSError if refused."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent_pid: int) -> None:
    """Has the kernel kill this process when its parent ends; ends it now if that was already so."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def children(pid: int) -> list[int]:
    """Returns the pids of the direct children of `pid`, zombies included."""
    found: list[int] = []
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return found
    for task in tasks:
        try:
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
        except OSError:
            continue
    return found


def descendants(pid: int) -> Iterator[int]:
    """Yields the pids below `pid`, children before grandchildren."""
    queue = children(pid)
    while queue:
        child = queue.pop()
        yield child
        queue += children(child)


def kill_children(patience_s: float = 10.0) -> int:
    """Kills and reaps children of this subreaper until none is left.

    Returns how many were killed. Raises TimeoutError when some cannot be ended (a process in
    uninterruptible sleep inside a driver).
    """
    killed = 0
    give_up = time.monotonic() + patience_s
    while True:
        for child in children(os.getpid()):
            try:
                os.kill(child, signal.SIGKILL)
                killed += 1
            except ProcessLookupError:
                pass
        try:
            while os.waitpid(-1, os.WNOHANG)[0] != 0:
                pass
        except ChildProcessError:
            return killed
        if time.monotonic() > give_up:
            raise TimeoutError(f"processes {children(os.getpid())} cannot be ended")
        time.sleep(0.001)


def resident_bytes(pids: list[int]) -> int:
    """Returns the sum of resident memory; pages shared between processes count for each."""
    total = 0
    for pid in pids:
        try:
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
        except (OSError, IndexError, ValueError):
            continue
    return total


def proportional_bytes(pids: list[int]) -> int:
    """Returns the sum of proportional set sizes: each shared page counts once in total.

    Dearer than `resident_bytes` (the kernel walks the page tables), so it is asked only when the
    cheap figure is over a limit.
    """
    total = 0
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            total += resident_bytes([pid])
            continue
        for line in text.splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total
