"""Where the advisor keeps what it has learnt."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

from advisor.profiler.errors import StoreError


def data_folder() -> Path:
    """Returns the data folder, made if missing: ADVISOR_DATA_DIR, else the user's own.

    Raises `StoreError` when it cannot be made or written.
    """
    named = os.environ.get("ADVISOR_DATA_DIR")
    folder = Path(named) if named else platformdirs.user_data_path("compile-advisor")
    try:
        for part in (folder, folder / "campaigns", folder / "devices"):
            part.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"the data folder {folder} cannot be made", error.strerror or ""
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise StoreError(f"the data folder {folder} cannot be written", "permission denied")
    return folder.resolve()
