"""A bundle: the compile cache of one trial as a list of files with their hashes. No torch.

In it is all that a trial's folder holds of Inductor (code, shared objects, FX graphs, AOTAutograd,
profile-guided state), Triton and the driver, and the precompiled header of the C++ kernels, which
torch keeps outside of its cache folder (`torch.compiler.save_cache_artifacts` leaves headers and
shared objects out: with it a start of 25 s still took 20 s). Locks and what is being written are
left out.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import msgspec

from advisor.profiler.errors import StoreError
from advisor.profiler.place import Place
from advisor.profiler.records import Config

FORMAT = 1
# The folders of a trial that hold compiled code (`trial._enter_folder` makes them), and the one
# of a bundle in which precompiled headers stand.
CACHES = ("inductor", "triton", "cuda")
HEADERS = "headers"
# More than any compile cache has, for what comes from elsewhere.
MOST_FILES = 200_000
MOST_BYTES = 64 << 30
_HEADERS_OF_TRIAL = "tmp/torchinductor_*/precompiled_headers/*"
_ID_DIGITS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleFacts:
    """Whose compiled code it is: the job, how it was compiled, and where."""

    fingerprint: str
    config: Config
    place: Place
    advice_id: str = ""
    created: str = ""


@dataclass(frozen=True, slots=True)
class BundleFile:
    """One file: its path within the bundle, its size, and the SHA-256 of what it holds."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Everything in one compile cache."""

    facts: BundleFacts
    files: tuple[BundleFile, ...]
    format: int = FORMAT

    @property
    def digest(self) -> str:
        """The SHA-256 that names what is in it: of its files and of where they may run."""
        listed = [self.facts.place, [(each.path, each.sha256) for each in self.files]]
        return hashlib.sha256(msgspec.json.encode(listed)).hexdigest()

    @property
    def bundle_id(self) -> str:
        """The name that a person types: the first digits of `digest`."""
        return self.digest[:_ID_DIGITS]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(each.size for each in self.files)

    @property
    def key(self) -> str:
        """Names the job, its configuration and its place, whatever the files are."""
        facts = self.facts
        return key_of(facts.fingerprint, facts.config, facts.place)

    def encoded(self) -> bytes:
        """Returns it as JSON."""
        return msgspec.json.encode(self)


def key_of(fingerprint: str, config: Config, place: Place) -> str:
    """Returns the name of a job compiled in one way at one place."""
    encoded = msgspec.json.encode([fingerprint, config, place])
    return hashlib.sha256(encoded).hexdigest()[:32]


def decoded(data: bytes) -> Bundle:
    """Returns the bundle behind a JSON text, every path and size checked.

    Raises `StoreError` when it is none, is of a later version, or names a path outside of itself.
    """
    try:
        bundle = msgspec.json.decode(data, type=Bundle)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise StoreError("the bundle's list of files cannot be read", str(error)) from error
    if bundle.format != FORMAT:
        raise StoreError(
            f"the bundle is of version {bundle.format}",
            f"{FORMAT} is known here",
            "upgrade compile-advisor",
        )
    if len(bundle.files) > MOST_FILES or not 0 <= bundle.size <= MOST_BYTES:
        raise StoreError(
            f"the bundle lists {len(bundle.files)} files of {bundle.size} bytes",
            f"at most {MOST_FILES} of {MOST_BYTES} bytes are taken",
        )
    for each in bundle.files:
        if each.size < 0 or len(each.sha256) != 64 or not set(each.sha256) <= _HEX:
            raise StoreError(f"the bundle lists {each.path!r} without a size and a hash")
        _check_inside(each.path)
    if len({each.path for each in bundle.files}) != len(bundle.files):
        raise StoreError("the bundle lists a file twice")
    return bundle


_HEX = frozenset("0123456789abcdef")


def _check_inside(path: str) -> None:
    """Raises `StoreError` for a path that would leave the folder it is unpacked into."""
    parts = PurePosixPath(path).parts
    plain = "\\" not in path and "\0" not in path and str(PurePosixPath(path)) == path
    inside = len(parts) >= 2 and ".." not in parts and parts[0] in (*CACHES, HEADERS)
    if not (plain and inside):
        raise StoreError(
            f"the bundle names a file outside of its folders, {path!r}", "it was not made here"
        )


def files_of(trials: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """Yields path within the bundle and place of each file that trial folders hold.

    Several folders (one for each rank) become one cache: their files are named by what is in them,
    so the first of a name stands for all.
    """
    taken: set[str] = set()
    for trial in trials:
        for path, place in _files(trial):
            if path not in taken:
                taken.add(path)
                yield path, place


def _files(trial: Path) -> Iterator[tuple[str, Path]]:
    for cache in CACHES:
        for place in sorted((trial / cache).rglob("*")):
            path = place.relative_to(trial)
            if "locks" not in path.parts and _finished(place):
                yield path.as_posix(), place
    for place in sorted(trial.glob(_HEADERS_OF_TRIAL)):
        if _finished(place):
            yield f"{HEADERS}/{place.name}", place


def _finished(place: Path) -> bool:
    """Returns whether it is a plain file that nobody is writing.

    torch writes beside the file, to `.PID.THREAD.tmp`, and renames (torch._inductor.codecache,
    write_atomic); Triton's folders are called `tmp.pid_...` until they are whole.
    """
    name = place.name
    if name.endswith((".tmp", ".lock")) or any(p.startswith("tmp.pid_") for p in place.parts):
        return False
    return stat.S_ISREG(os.lstat(place).st_mode)
