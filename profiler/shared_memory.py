"""Segments that a killed trial leaves in /dev/shm, and their removal.

`multiprocessing.shared_memory` (psm_*) and torch's file_system sharing (torch_*) rely on a
resource tracker that dies with the trial; their segments would stay until the next boot.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

FOLDER = Path("/dev/shm")  # noqa: S108 - the kernel's own shared memory folder
_PREFIXES = ("psm_", "torch_", "sem.mp-", "sem.loky-", "loky-")


def segments() -> frozenset[str]:
    """Returns the names of all shared memory segments of this user."""
    try:
        return frozenset(
            entry.name for entry in os.scandir(FOLDER) if entry.stat().st_uid == os.getuid()
        )
    except OSError:
        return frozenset()


def sweep(before: frozenset[str]) -> int:
    """Removes known kinds of segments that came since `before` and that nobody holds.

    Returns how many were removed.
    """
    left = {name for name in segments() - before if name.startswith(_PREFIXES)}
    if not left:
        return 0
    left -= _held()
    for name in left:
        with contextlib.suppress(OSError):
            (FOLDER / name).unlink()
    return len(left)


def _held() -> set[str]:
    """Returns the names of segments that some process has mapped or open."""
    held: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for line in (process / "maps").read_text().splitlines():
                if str(FOLDER) in line:
                    held.add(line.rsplit("/", 1)[-1])
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    target = os.readlink(descriptor)
                    if target.startswith(str(FOLDER)):
                        held.add(target.rsplit("/", 1)[-1])
    return held
