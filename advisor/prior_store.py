"""The fitted prior in the user's cache folder: fitted from the corpus at first use, then read.

Two files, without pickles: the arrays as `.npz`, what names them as JSON. Their name holds a digest
of all that they were made from, so that a new corpus or a new way of fitting makes new ones.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path

import numpy as np
import platformdirs

from advisor.models.prior import Prior
from advisor.profiler.errors import StoreError

# The files that decide what a fit gives.
_MADE_BY = ("features", "forest", "examples", "prior", "prior_fit", "devices", "families")
_CORPUS = ("published.csv", "measured.csv", "architectures.jsonl")


def cache_folder() -> Path:
    """Returns where the prior is kept: ADVISOR_CACHE_DIR, else the user's own cache folder."""
    named = os.environ.get("ADVISOR_CACHE_DIR")
    return Path(named) if named else platformdirs.user_cache_path("compile-advisor")


def is_kept(folder: Path | None = None) -> bool:
    """Returns whether the prior was fitted before, so that loading it takes no seconds."""
    return (folder or cache_folder()).joinpath(f"prior-{_digest()}.npz").is_file()


def load(folder: Path | None = None) -> Prior:
    """Returns the prior, from `folder` or, the first time, fitted in some seconds and kept there.

    None is `cache_folder()`. A kept file that cannot be read is made anew. Raises `StoreError`
    when scikit-learn is missing.
    """
    name, place = _digest(), folder or cache_folder()
    arrays, facts = place / f"prior-{name}.npz", place / f"prior-{name}.json"
    found = _read(arrays, facts)
    if found is None:
        found = fitted()
        # What cannot be kept is fitted again next time.
        with contextlib.suppress(OSError):
            _write(found, arrays, facts)
    return found


def fitted() -> Prior:
    """Returns the prior fitted on the whole corpus. Raises `StoreError` without scikit-learn."""
    from advisor.models import corpus
    from advisor.models.examples import examples

    try:
        from advisor.models import prior_fit

        return prior_fit.fit(examples(corpus.all_rows()))
    except ImportError as error:
        raise StoreError(
            "the cost model cannot be fitted", str(error), "pip install scikit-learn crepes"
        ) from error


def _read(arrays: Path, facts: Path) -> Prior | None:
    try:
        named = json.loads(facts.read_text(encoding="utf-8"))
        with np.load(arrays, allow_pickle=False) as held:
            return Prior.of_arrays({name: held[name] for name in held.files}, named)
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return None
    except Exception as error:  # zipfile.BadZipFile, and what else a damaged file brings
        if type(error).__module__ in ("zipfile", "zlib"):
            return None
        raise


def _write(prior: Prior, arrays: Path, facts: Path) -> None:
    arrays.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    named, words = prior.arrays()
    with _whole(arrays) as path, path.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **named)
    with _whole(facts) as path:
        path.write_text(json.dumps(words), encoding="utf-8")
    _forget_others(arrays.parent, arrays.stem)


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """Gives a file that takes the name `path` once it is whole."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".new")
    os.close(descriptor)
    try:
        yield Path(name)
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)


def _forget_others(folder: Path, stem: str) -> None:
    for path in folder.glob("prior-*"):
        if path.suffix in (".npz", ".json") and path.stem != stem:
            path.unlink(missing_ok=True)


@functools.cache
def _digest() -> str:
    digest = hashlib.sha256()
    for package, names in (
        ("advisor.models", [f"{name}.py" for name in _MADE_BY]),
        ("advisor.models.corpus", _CORPUS),
    ):
        for data in _files(package, names):
            digest.update(hashlib.sha256(data).digest())
    return digest.hexdigest()[:16]


def _files(package: str, names: Sequence[str]) -> list[bytes]:
    folder = resources.files(package)
    return [folder.joinpath(n).read_bytes() for n in names if folder.joinpath(n).is_file()]
