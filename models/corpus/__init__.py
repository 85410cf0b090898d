"""What has been measured of torch.compile, here and by others: one schema, a source for each row.

`published.csv` holds published figures, `measured.csv` this project's own (README.md beside them is
the data card). Rows are read once and kept; nothing is computed from them here.
"""

from __future__ import annotations

import csv
import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from importlib import resources
from typing import IO

# Rows whose figure is no plain ratio of two runs of one job: kept as facts, left out of fits.
NOT_FOR_FITS = frozenset(
    {"AGGREGATE", "CONFOUNDED", "RANGE", "MODE_DELTA", "IMPLIED", "EXCERPT", "SUSPECT"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusRow:
    """One run, compiled against eager. `None` is what the source does not state.

    `speedup` is eager over compiled time of a step; None with `failed` set when it did not run.
    """

    source: str
    date: str
    torch: str
    device: str
    model: str
    family: str
    task: str
    precision: str
    mode: str
    scope: str
    dynamic: str
    parameters: float | None = None
    batch: float | None = None
    length: float | None = None
    image: float | None = None
    eager_s: float | None = None
    speedup: float | None = None
    compile_s: float | None = None
    memory_ratio: float | None = None
    graphs: float | None = None
    graph_breaks: float | None = None
    operators: float | None = None
    failed: bool = False
    # Words of `NOT_FOR_FITS`, separated by blanks.
    flags: str = ""

    @property
    def training(self) -> bool:
        """Whether a step has a backward."""
        return self.task == "training"

    @property
    def fit(self) -> bool:
        """Whether the row is a plain measurement that a model may be fitted to."""
        return not self.failed and self.speedup is not None and not self.flags


_TEXTS = frozenset(
    {"source", "date", "torch", "device", "model", "family", "task", "precision", "mode"}
    | {"scope", "dynamic", "flags"}
)
COLUMNS = tuple(field.name for field in fields(CorpusRow))


def read(file: IO[str]) -> tuple[CorpusRow, ...]:
    """Returns the rows of a CSV file with `COLUMNS`. Raises ValueError naming a bad row."""
    reader = csv.DictReader(file)
    if tuple(reader.fieldnames or ()) != COLUMNS:
        raise ValueError(f"the columns are {reader.fieldnames}, not {', '.join(COLUMNS)}")
    return tuple(_row(values, number) for number, values in enumerate(reader, 2))


def write(rows: Iterable[CorpusRow], file: IO[str]) -> None:
    """Writes rows as `read` reads them, numbers in six figures."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        writer.writerow([_cell(getattr(row, name)) for name in COLUMNS])


@functools.cache
def published() -> tuple[CorpusRow, ...]:
    """Returns the published rows."""
    return _held("published.csv")


@functools.cache
def measured() -> tuple[CorpusRow, ...]:
    """Returns the rows that this project measured itself (bench/collect.py); empty without any."""
    return _held("measured.csv")


def all_rows() -> tuple[CorpusRow, ...]:
    """Returns all rows, the published first."""
    return published() + measured()


def _held(name: str) -> tuple[CorpusRow, ...]:
    path = resources.files(__name__).joinpath(name)
    if not path.is_file():
        return ()
    with path.open(encoding="utf-8") as file:
        return read(file)


def _row(values: dict[str, str], number: int) -> CorpusRow:
    made: dict[str, object] = {}
    for name, text in values.items():
        if name in _TEXTS:
            made[name] = text
        elif name == "failed":
            made[name] = text == "1"
        elif text:
            value = float(text)
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"line {number}: {name} is {text}")
            made[name] = value
    return CorpusRow(**made)  # type: ignore[arg-type]


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(int(value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)
