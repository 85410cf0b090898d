"""Folders and locks of the service on disk, each owned by a context manager.

    DATA/results.sqlite3                  the results database (`store`)
    DATA/campaigns/ADVICE/TRIAL/          private folder of a trial, with its compile cache
    DATA/devices/DEVICE.lock              held while a campaign measures on a device
    DATA/servers/NAME.lock                held while a server lives
    DATA/reproductions/TRIAL/             what repeats a trial that went wrong; the newest stay

    DATA/handover/                        compile caches for real runs (`profiler.handover`)

Of a finished campaign nothing stays here: the cache that its advice hands over is kept by content.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import shutil
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from pathlib import Path

from advisor.profiler.errors import StoreError

# Who waits for a device of another process looks this often: flock has no queue to sleep in that
# could be cancelled.
_LOOK_S = 0.5


def reproductions_folder(data: Path) -> Path:
    """Returns the folder of what repeats failed trials; `reproduction` makes and cleans it."""
    return data / "reproductions"


class CampaignFolder:
    """The folders of one campaign's trials, deleted at the end.

    Use as `async with`. The lock inside tells other servers that the campaign is alive.
    """

    def __init__(self, data: Path, advice_id: str) -> None:
        self._parent = data / "campaigns"
        self.path = self._parent / advice_id
        self._lock: int | None = None
        # Whether the folder stays at the end, for a server that takes the campaign up.
        self.keeps = False

    async def __aenter__(self) -> CampaignFolder:
        with _storing(), _creating(self._parent):
            self.path.mkdir(mode=0o700, exist_ok=True)
            self._lock = _open_lock(self.path / ".lock")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            if not self.keeps:
                await asyncio.to_thread(self._clean)
        finally:
            if self._lock is not None:
                os.close(self._lock)

    def trial(self, name: str) -> Path:
        """Returns the private folder of the trial `name`, made if missing."""
        folder = self.path / name
        with _storing():
            folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def _clean(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def sweep(data: Path, kept: Collection[str] = ()) -> list[str]:
    """Deletes what campaigns left that died, but for those `kept`; returns their names."""
    parent = data / "campaigns"
    with _storing(), _creating(parent):
        gone = sorted(
            folder
            for folder in parent.iterdir()
            if folder.is_dir() and folder.name not in kept and not _alive(folder)
        )
        for folder in gone:
            shutil.rmtree(folder, ignore_errors=True)
    return [folder.name for folder in gone]


class ServerLock:
    """A lock that a server holds while it lives, under a name of its own.

    The system lets go of it when the process ends, however it does.
    """

    def __init__(self, data: Path) -> None:
        self.name = secrets.token_hex(6)
        self._path = _server_lock(data, self.name)
        with _storing():
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            self._descriptor = _open_lock(self._path)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def close(self) -> None:
        """Lets go of the lock: the server takes nothing any more."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)

    @staticmethod
    def lives(data: Path, name: str) -> bool:
        """Returns whether the server of that name lives; the lock of a dead one is deleted."""
        if not name:
            return False
        path = _server_lock(data, name)
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                if not _take(descriptor):
                    return True
                path.unlink(missing_ok=True)
            finally:
                os.close(descriptor)
        return False


def _server_lock(data: Path, name: str) -> Path:
    return data / "servers" / f"{name}.lock"


class Devices:
    """One campaign at a time on each device: first come, first served within this process."""

    def __init__(self, data: Path) -> None:
        self._folder = data / "devices"
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @contextlib.asynccontextmanager
    async def hold(
        self, device: str, on_wait: Callable[[], Awaitable[None]]
    ) -> AsyncIterator[None]:
        """Holds `device` within the block; calls `on_wait` once if it has to wait for it."""
        said = self._locks[device].locked()
        if said:
            await on_wait()
        async with self._locks[device]:
            with _storing():
                descriptor = _open_lock(self._folder / f"{device.replace(':', '-')}.lock")
            try:
                while not _take(descriptor):
                    if not said:
                        await on_wait()
                        said = True
                    await asyncio.sleep(_LOOK_S)
                yield
            finally:
                os.close(descriptor)


def device_of(name: str) -> str:
    """Returns the device that a request's `auto`, `cuda`, ... means, found without torch."""
    if name == "auto":
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        name = "cuda" if Path("/dev/nvidia0").exists() and not hidden else "cpu"
    return f"{name}:0" if name in ("cuda", "xpu") else name


def _alive(folder: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CLOEXEC)
        try:
            return not _take(descriptor)
        finally:
            os.close(descriptor)
    return False


def _take(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _open_lock(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


@contextlib.contextmanager
def _creating(parent: Path) -> Iterator[None]:
    """Keeps `sweep` from seeing a folder between its creation and its lock."""
    descriptor = _open_lock(parent / ".lock")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _storing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError("the data folder cannot be used", error.strerror or "") from error
