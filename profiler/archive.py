"""A bundle as one file, to carry to other machines: a gzipped tar of its list and its blobs.

    bundle.json, then for each different file its content under its SHA-256

Nothing in an archive is trusted: the list is checked before anything is written, names are hashes
that the list holds, and what is in a file must hash to its name before a bundle is kept.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import shutil
import tarfile
import tempfile
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from advisor.profiler.bundle import Bundle, decoded
from advisor.profiler.errors import DamagedError, PlanError, StoreError
from advisor.profiler.handover import HandoverStore

_LIST = "bundle.json"
_MOST_LIST_BYTES = 64 << 20
# Headers shrink to a fifth at the fastest level; shared objects hardly at any.
_LEVEL = 1


def pack(store: HandoverStore, bundle: Bundle, target: Path) -> int:
    """Writes a bundle as an archive and returns its bytes; an existing file is replaced at the end.

    Raises `PlanError` where it cannot be written, `StoreError` where a file of it is gone.
    """
    part = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        with (
            part.open("xb") as file,
            # Without a time: the same bundle gives the same archive, which a transfer goes on with.
            gzip.GzipFile("", "wb", _LEVEL, file, mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w") as archive,
        ):
            listed = bundle.encoded()
            _add(archive, _LIST, len(listed), io.BytesIO(listed))
            for each in {file.sha256: file for file in bundle.files}.values():
                try:
                    content = store.blob(each).open("rb")
                except FileNotFoundError:
                    raise StoreError(f"{each.path} of the compile cache is gone") from None
                with content:
                    _add(archive, each.sha256, each.size, content)
        os.replace(part, target)
        return target.stat().st_size
    except OSError as error:
        raise PlanError(f"{target} cannot be written", error.strerror or str(error)) from error
    finally:
        part.unlink(missing_ok=True)


def unpack(store: HandoverStore, source: Path) -> Bundle:
    """Keeps the bundle of an archive and returns it.

    Raises `PlanError` when the file cannot be read, `StoreError` for an archive that is damaged,
    cut off or holds what it does not list: then nothing of it is kept.
    """
    folder = Path(tempfile.mkdtemp(prefix="advisor-unpack-"))
    try:
        with _read_errors(source), tarfile.open(source, "r|gz") as archive:
            return _unpacked(store, archive, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _unpacked(store: HandoverStore, archive: tarfile.TarFile, folder: Path) -> Bundle:
    first = archive.next()
    if first is None or first.name != _LIST or not first.isreg() or first.size > _MOST_LIST_BYTES:
        raise StoreError("the archive does not begin with a list of files", "it is no bundle")
    bundle = decoded(_content(archive, first).read())
    sizes = {each.sha256: each.size for each in bundle.files}
    while (member := archive.next()) is not None:
        if not member.isreg() or sizes.pop(member.name, None) != member.size:
            raise StoreError(
                f"the archive holds {member.name!r}", "its list of files does not, or otherwise"
            )
        with (folder / member.name).open("xb") as target:
            shutil.copyfileobj(_content(archive, member), target)
    return store.add(bundle, folder)


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    content = archive.extractfile(member)
    if content is None:
        raise StoreError(f"the archive holds {member.name!r} without content")
    return content


def _add(archive: tarfile.TarFile, name: str, size: int, content: IO[bytes]) -> None:
    member = tarfile.TarInfo(name)
    member.size = size
    archive.addfile(member, content)


@contextlib.contextmanager
def _read_errors(source: Path) -> Iterator[None]:
    try:
        yield
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise DamagedError(
            f"the archive {source.name} is damaged or cut off", str(error)
        ) from error
    except FileNotFoundError:
        raise PlanError(f"there is no archive {source}") from None
    except OSError as error:
        # gzip's own errors, a bad checksum among them, are of this kind too.
        what = "is damaged or cut off" if error.errno is None else "cannot be read"
        raise StoreError(
            f"the archive {source.name} {what}", error.strerror or str(error)
        ) from error
