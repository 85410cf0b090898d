"""The private folder of a trial: kept where the person names one, gone with the trial otherwise."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def trial_folder(kept: str | os.PathLike[str] | None) -> Iterator[Path]:
    """Gives the folder `kept`, made if need be, or a temporary one that the block ends."""
    if kept is not None:
        path = Path(kept).resolve()
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        yield path
        return
    path = Path(tempfile.mkdtemp(prefix="advisor-trial-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
