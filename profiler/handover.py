"""Compile caches that outlive their trials: kept by content, handed to the runs they fit. No torch.

    blobs/ab/ab12...      what is in a file, named by its SHA-256, once for all bundles
    bundles/ID.json       a bundle: its facts and its list of files; there when all of it is
    names/NAME            the id of the bundle that a name stands for: an advice, a job's key
    runs/ID/              the cache that runs of the job use and add to

Only whole bundles are seen: blobs first, the list last, each written beside and renamed. What is
taken out is hashed again. The least recently used bundles go when the store is full, but never the
cache of a run that is alive.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import getpass
import hashlib
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import filelock

from advisor.profiler.bundle import (
    CACHES,
    HEADERS,
    Bundle,
    BundleFacts,
    BundleFile,
    decoded,
    files_of,
)
from advisor.profiler.errors import DamagedError, NotFoundError, PlanError, StoreError
from advisor.profiler.place import Place, difference

# A BERT's cache on a CPU takes 160 MB, most of it the precompiled header, which bundles share.
USUAL_LIMIT_BYTES = 20 << 30
# A store that another process holds for longer is stuck: nothing takes minutes in it.
_LOCK_S = 120.0
_CHUNK_BYTES = 1 << 20
NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"
_NAME = re.compile(NAME_PATTERN)
_VARIABLES = {
    "inductor": "TORCHINDUCTOR_CACHE_DIR",
    "triton": "TRITON_CACHE_DIR",
    "cuda": "CUDA_CACHE_PATH",
}
# Profile-guided state (which sizes turned out dynamic) is kept under a job's name. A cache folder
# holds one job only, so all jobs can have the same.
JOB_ID = "compile-advisor"
# Set in the environment of a run that was handed a cache, and read by what looks whether it served.
HANDED = "ADVISOR_HANDOVER"


@dataclass(frozen=True, slots=True, kw_only=True)
class Handed:
    """A cache that a run can start from: its bundle, its folder, and the variables to set."""

    bundle: Bundle
    folder: Path
    variables: Mapping[str, str]


class HandoverStore:
    """The bundles of one machine, in one folder that several processes may use at once."""

    def __init__(self, folder: Path, limit_bytes: int = USUAL_LIMIT_BYTES) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes

    def put(self, trials: Sequence[Path], facts: BundleFacts, names: Sequence[str] = ()) -> Bundle:
        """Keeps the compile cache of a trial (of all its ranks) and returns the bundle.

        It is found by its id, by `names` and by its job's key. Raises `StoreError` when there is
        nothing compiled in it, it is larger than the store, or the disk is full: then nothing of
        it is left.
        """
        with self._locked():
            files = []
            for path, place in files_of(trials):
                size, sha256 = self._put_blob(place)
                files.append(BundleFile(path, size, sha256))
            bundle = Bundle(facts=facts, files=tuple(files))
            if not any(each.path.startswith("inductor/") for each in bundle.files):
                self._sweep()
                raise StoreError("the trial left no compile cache", "no graph was compiled")
            return self._keep(bundle, names)

    def add(self, bundle: Bundle, blobs: Path, names: Sequence[str] = ()) -> Bundle:
        """Keeps a bundle whose files lie in `blobs`, each named by its hash; they are moved.

        Raises `StoreError` when one is missing or does not hold what its name says.
        """
        with self._locked():
            for each in bundle.files:
                if not self._blob(each.sha256).exists():
                    self._take_in(blobs / each.sha256, each)
            return self._keep(bundle, names)

    def find(self, name: str) -> Bundle:
        """Returns the bundle of an id, an advice or a job's key.

        Raises `NotFoundError` when there is none, `PlanError` for what is no name at all.
        """
        if not _NAME.fullmatch(name):
            raise PlanError(f"{name!r} is no id of a compile cache or an advice")
        for bundle_id in (name, self._named(name)):
            if bundle_id and (bundle := self._read(self._bundle(bundle_id))) is not None:
                return bundle
        raise NotFoundError(
            f"there is no compile cache of {name}",
            "it was never kept, or has made room for later ones",
            "advise run measures the job anew",
        )

    def bundles(self) -> tuple[Bundle, ...]:
        """Returns all bundles, the latest used first."""
        paths = sorted(self._folder.glob("bundles/*.json"), key=_used_at, reverse=True)
        return tuple(bundle for path in paths if (bundle := self._read(path)) is not None)

    def hand_over(self, bundle: Bundle, now: Place) -> Handed:
        """Returns the cache of a bundle, ready for a run at this place.

        The first run of a job checks every file's hash. Raises `PlanError` when the place is
        another, `StoreError` when a file is damaged; the bundle is then forgotten.
        """
        other = difference(bundle.facts.place, now)
        if other:
            raise PlanError(
                f"the compile cache {bundle.bundle_id} was made elsewhere",
                other,
                "advise run makes one here",
            )
        folder = self._folder / "runs" / bundle.bundle_id
        with self._locked():
            if not folder.exists():
                self._check_out(bundle, folder)
            self._install_headers(bundle)
            for path in (self._bundle(bundle.bundle_id), folder):
                with contextlib.suppress(OSError):
                    os.utime(path)
        variables = {variable: str(folder / name) for name, variable in _VARIABLES.items()}
        variables["TORCH_COMPILE_JOB_ID"] = JOB_ID
        variables[HANDED] = bundle.bundle_id
        return Handed(bundle=bundle, folder=folder, variables=variables)

    @contextlib.contextmanager
    def in_use(self, bundle: Bundle) -> Iterator[int]:
        """Keeps the cache of a run in place within the block; gives the descriptor that does.

        A process that inherits the descriptor keeps it, too.
        """
        descriptor = self._hold(bundle.bundle_id)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def hold(self, bundle: Bundle) -> None:
        """Keeps the cache of a run in place as long as this process lives."""
        self._hold(bundle.bundle_id)

    def blob(self, each: BundleFile) -> Path:
        """Returns the place of what is in a file."""
        return self._blob(each.sha256)

    # --- below: within the lock

    def _keep(self, bundle: Bundle, names: Sequence[str]) -> Bundle:
        if bundle.size > self._limit_bytes:
            self._sweep()
            raise StoreError(
                f"the compile cache of {bundle.size} bytes is not kept",
                f"the store takes {self._limit_bytes} bytes",
                "ADVISOR_HANDOVER_LIMIT sets another limit",
            )
        self._make_room(bundle)
        self._write(self._bundle(bundle.bundle_id), bundle.encoded())
        for name in (*names, bundle.key):
            if not _NAME.fullmatch(name):
                raise PlanError(f"{name!r} cannot name a compile cache")
            self._write(self._folder / "names" / name, bundle.bundle_id.encode())
        return bundle

    def _put_blob(self, source: Path) -> tuple[int, str]:
        """Returns size and hash of a file, of which a copy is kept."""
        part = self._part()
        digest, size = hashlib.sha256(), 0
        with _storing(self._folder, part):
            before = source.stat()
            with source.open("rb") as file, part.open("xb") as copy:
                while chunk := file.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    size += len(chunk)
                    copy.write(chunk)
            after = source.stat()
            if (before.st_mtime_ns, before.st_size) != (after.st_mtime_ns, size):
                raise StoreError(f"{source.name} is still being written")
            shutil.copymode(source, part)
            self._settle(part, digest.hexdigest())
        return size, digest.hexdigest()

    def _take_in(self, source: Path, each: BundleFile) -> None:
        if not source.is_file():
            raise DamagedError(f"{each.path} is missing in the bundle")
        if source.stat().st_size != each.size or _sha256(source) != each.sha256:
            raise DamagedError(f"{each.path} is damaged", "its hash is another than listed")
        part = self._part()
        with _storing(self._folder, part):
            shutil.move(source, part)
            part.chmod(0o700 if each.path.endswith(".so") else 0o600)
            self._settle(part, each.sha256)

    def _settle(self, part: Path, sha256: str) -> None:
        target = self._blob(sha256)
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.replace(part, target)

    def _check_out(self, bundle: Bundle, folder: Path) -> None:
        part = self._part()
        try:
            with _storing(self._folder):
                for cache in CACHES:
                    (part / cache).mkdir(mode=0o700, parents=True)
                for each in bundle.files:
                    self._copy_out(each, part / _path_in_run(each))
                folder.parent.mkdir(mode=0o700, exist_ok=True)
                os.rename(part, folder)
        except StoreError as error:
            if isinstance(error, DamagedError):
                self._bundle(bundle.bundle_id).unlink(missing_ok=True)
                self._sweep()
            raise
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def _install_headers(self, bundle: Bundle) -> None:
        """Puts the precompiled headers where torch looks for them, beside those of other torches.

        Their names say what is in them, and torch takes what is there (codecache, _HEADER_DIR).
        """
        folder = header_folder()
        for each in bundle.files:
            target = folder / each.path.removeprefix(f"{HEADERS}/")
            if each.path.startswith(f"{HEADERS}/") and not target.exists():
                part = target.with_name(f".{uuid.uuid4().hex}.tmp")
                with _storing(folder, part):
                    self._copy_out(each, part)
                    os.replace(part, target)

    def _copy_out(self, each: BundleFile, target: Path) -> None:
        """Copies what a file holds to its place. Raises `StoreError` when it is damaged."""
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            shutil.copy(self._blob(each.sha256), target)
        except FileNotFoundError:
            raise DamagedError(f"{each.path} of the compile cache is gone") from None
        if target.stat().st_size != each.size or _sha256(target) != each.sha256:
            target.unlink()
            # Not to be found again by another bundle.
            self._blob(each.sha256).unlink(missing_ok=True)
            raise DamagedError(
                f"{each.path} of the compile cache is damaged",
                "its hash is another than when it was kept",
                "the run compiles anew",
            )

    def _make_room(self, wanted: Bundle) -> None:
        """Forgets the least recently used bundles until `wanted` fits beside the others."""
        paths = sorted(self._folder.glob("bundles/*.json"), key=_used_at)
        found = {path.stem: self._read(path) for path in paths}
        kept = {bundle_id: bundle for bundle_id, bundle in found.items() if bundle is not None}
        kept.pop(wanted.bundle_id, None)
        for bundle_id in list(kept):
            if self._held_bytes([*kept.values(), wanted]) <= self._limit_bytes:
                break
            if self._forget(bundle_id):
                del kept[bundle_id]
        self._sweep([*kept.values(), wanted])

    def _held_bytes(self, bundles: Sequence[Bundle]) -> int:
        sizes = {each.sha256: each.size for bundle in bundles for each in bundle.files}
        runs = [self._folder / "runs" / bundle.bundle_id for bundle in bundles]
        return sum(sizes.values()) + sum(_folder_bytes(run) for run in runs)

    def _forget(self, bundle_id: str) -> bool:
        """Deletes a bundle and its run's cache; False when a run uses it."""
        try:
            descriptor = self._hold(bundle_id, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        try:
            self._bundle(bundle_id).unlink(missing_ok=True)
            shutil.rmtree(self._folder / "runs" / bundle_id, ignore_errors=True)
        finally:
            os.close(descriptor)
        return True

    def _sweep(self, kept: Sequence[Bundle] | None = None) -> None:
        """Deletes the blobs that no bundle lists, names without a bundle and unfinished parts."""
        bundles = self.bundles() if kept is None else kept
        listed = {each.sha256 for bundle in bundles for each in bundle.files}
        ids = {bundle.bundle_id for bundle in bundles}
        for blob in self._folder.glob("blobs/*/*"):
            if blob.name not in listed:
                blob.unlink(missing_ok=True)
        for name in self._folder.glob("names/*"):
            if name.read_text() not in ids:
                name.unlink(missing_ok=True)
        for part in self._folder.glob("parts/*"):
            shutil.rmtree(part, ignore_errors=True) if part.is_dir() else part.unlink()

    def _hold(self, bundle_id: str, how: int = fcntl.LOCK_SH) -> int:
        """Returns a locked descriptor; shared: a run uses the cache."""
        folder = self._folder / "in-use"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(folder / bundle_id, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, how)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = filelock.FileLock(self._folder / "lock", timeout=_LOCK_S)
            with lock:
                yield
        except filelock.Timeout as error:
            raise StoreError(
                f"the compile caches in {self._folder} are locked",
                f"another process has held them for {_LOCK_S:.0f} s",
            ) from error
        except OSError as error:
            raise _store_error(self._folder, error) from error

    def _write(self, target: Path, data: bytes) -> None:
        part = self._part()
        with _storing(self._folder, part):
            with part.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.replace(part, target)

    def _part(self) -> Path:
        folder = self._folder / "parts"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder / uuid.uuid4().hex

    def _blob(self, sha256: str) -> Path:
        return self._folder / "blobs" / sha256[:2] / sha256

    def _bundle(self, bundle_id: str) -> Path:
        return self._folder / "bundles" / f"{bundle_id}.json"

    def _read(self, path: Path) -> Bundle | None:
        """Returns the bundle behind a list of files; None when it is gone or not whole."""
        try:
            bundle = decoded(path.read_bytes())
        except (FileNotFoundError, StoreError):
            return None
        return bundle if bundle.bundle_id == path.stem else None

    def _named(self, name: str) -> str:
        with contextlib.suppress(OSError):
            return (self._folder / "names" / name).read_text()
        return ""


def header_folder() -> Path:
    """Returns the folder of precompiled headers that torch uses (runtime/cache_dir_utils.py)."""
    return Path(tempfile.gettempdir(), _header_path())


def _header_path() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        user = f"uid_{os.getuid()}"
    user = re.sub(r'[\\/:*?"<>|]', "_", user)
    return f"torchinductor_{user}/precompiled_headers"


def _path_in_run(each: BundleFile) -> str:
    """Returns where a file stands in the folder of a run: as in that of a trial."""
    name = each.path.removeprefix(f"{HEADERS}/")
    return each.path if name == each.path else f"tmp/{_header_path()}/{name}"


@contextlib.contextmanager
def _storing(folder: Path, part: Path | None = None) -> Iterator[None]:
    """Says what goes wrong with a disk in a sentence, and leaves no unfinished file."""
    try:
        if part is not None:
            part.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise _store_error(folder, error) from error
    finally:
        if part is not None:
            part.unlink(missing_ok=True)


def _store_error(folder: Path, error: OSError) -> StoreError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return StoreError(
        f"the compile cache cannot be kept in {folder}",
        "the disk is full" if full else (error.strerror or str(error)),
        "the job runs all the same, and compiles anew" if full else "",
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _used_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _folder_bytes(folder: Path) -> int:
    total = 0
    for place in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += os.lstat(place).st_size
    return total
