"""Compile caches on their way between machines, in parts; a broken transfer goes on where it was.

    DATA/handover/transfers/SHA256.part      an archive that is being sent here
    DATA/handover/transfers/BUNDLE.tgz       one that is being fetched: the same bytes each time

Nothing of an archive is looked at before all of it is there and hashes to what was announced.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import IO

from advisor import handover
from advisor.profiler import archive
from advisor.profiler.errors import DamagedError, StoreError
from advisor.profiler.handover import HandoverStore
from advisor.v1 import advisor_pb2 as pb
from advisor.validate import InvalidRequest, Violation, check

PART_BYTES = 256 << 10
# A transfer that nobody went on with for so long is given up.
_FORGOTTEN_S = 24 * 3600.0


class CacheTransfers:
    """Takes archives of compile caches into the store of a data folder, and gives them."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self._folder = data / "handover" / "transfers"
        self._packing = asyncio.Lock()

    async def put(self, requests: AsyncIterator[pb.PutCacheRequest]) -> pb.PutCacheResponse:
        """Takes what a call sends, and keeps the cache once all of its archive is there.

        Raises `InvalidRequest` when the first message does not say where it belongs,
        `DamagedError` for content that is not what was announced, `StoreError` when the disk is
        full or another call sends the same archive.
        """
        first = await anext(aiter(requests), None)
        if first is None:
            raise InvalidRequest([Violation("sha256", "is required")])
        check(first)
        size = _announced(first)
        path = self._folder / f"{first.sha256}.part"
        with self._part(path) as part:
            held = part.seek(0, os.SEEK_END)
            if first.offset > held:
                why = f"{first.offset:.0f} is beyond the {held} bytes that are held"
                raise InvalidRequest([Violation("offset", why)])
            if first.data:
                held = part.truncate(int(first.offset))
                part.seek(held)
            held = await self._append(part, first, held, size)
            async for more in requests:
                held = await self._append(part, more, held, size)
            if held < size:
                return pb.PutCacheResponse(held_bytes=held)
            bundle_id = await asyncio.to_thread(self._keep, path, first.sha256)
        return pb.PutCacheResponse(held_bytes=held, complete=True, bundle_id=bundle_id)

    async def get(self, request: pb.GetCacheRequest) -> AsyncIterator[pb.GetCacheResponse]:
        """Gives the archive of a cache from a byte on, the facts of it first.

        Raises `NotFoundError` when there is none of that name, `InvalidRequest` for a byte beyond
        its end.
        """
        async with self._packing:
            bundle_id, path = await asyncio.to_thread(self._packed, request.name)
        sha256, size = await asyncio.to_thread(_hashed, path)
        if request.offset > size:
            raise InvalidRequest([Violation("offset", f"is beyond the archive's {size} bytes")])
        yield pb.GetCacheResponse(bundle_id=bundle_id, sha256=sha256, size_bytes=size)
        with path.open("rb") as file:
            file.seek(int(request.offset))
            while data := await asyncio.to_thread(file.read, PART_BYTES):
                yield pb.GetCacheResponse(data=data)

    async def _append(
        self, part: IO[bytes], message: pb.PutCacheRequest, held: int, size: int
    ) -> int:
        if held + len(message.data) > size:
            raise InvalidRequest([Violation("data", f"goes beyond the {size} bytes announced")])
        if message.data:
            await asyncio.to_thread(_write, part, message.data)
        return held + len(message.data)

    def _keep(self, path: Path, sha256: str) -> str:
        """Keeps the cache of a whole archive, whose file is then gone; returns its id."""
        try:
            if _hashed(path)[0] != sha256:
                raise DamagedError("the archive is not the one announced", "its hash is another")
            return archive.unpack(self._store(), path).bundle_id
        finally:
            path.unlink(missing_ok=True)

    def _packed(self, name: str) -> tuple[str, Path]:
        """Returns id and archive of a cache, packed once."""
        store = self._store()
        bundle = store.find(name)
        self._make_folder()
        path = self._folder / f"{bundle.bundle_id}.tgz"
        if path.exists():
            os.utime(path)
        else:
            archive.pack(store, bundle, path)
        return bundle.bundle_id, path

    @contextlib.contextmanager
    def _part(self, path: Path) -> Iterator[IO[bytes]]:
        """Gives the file of an archive that is being sent, which no other call writes meanwhile."""
        self._make_folder()
        with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b") as part:
            try:
                fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StoreError("this archive is being sent by another call") from None
            yield part

    def _make_folder(self) -> None:
        """Makes the folder, and gives up transfers that nobody goes on with."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in self._folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > _FORGOTTEN_S:
                    path.unlink()

    def _store(self) -> HandoverStore:
        return handover.store(self._data)


def _announced(first: pb.PutCacheRequest) -> int:
    """Returns the bytes of the archive that a first message announces."""
    missing = [
        Violation(name, "is required in the first message")
        for name in ("sha256", "size_bytes")
        if not getattr(first, name)
    ]
    if missing:
        raise InvalidRequest(missing)
    return int(first.size_bytes)


def _write(part: IO[bytes], data: bytes) -> None:
    try:
        part.write(data)
        part.flush()
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        why = "the disk is full" if full else error.strerror or ""
        raise StoreError("the compile cache cannot be kept", why) from error


def _hashed(path: Path) -> tuple[str, int]:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest(), path.stat().st_size
