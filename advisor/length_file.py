"""The lengths of a data set's samples, read from a file: `advise run --lengths FILE`.

Plain text, JSON, CSV and NumPy arrays need nothing more; Parquet, Arrow and the folders of
Hugging Face `save_to_disk` are read by pyarrow. A column may hold numbers, or lists such as token
ids, whose lengths count then. Every mistake is one `PlanError` that names the file.
"""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

import numpy as np

from advisor.length_columns import Column, chosen, no_column, sentence, short
from advisor.length_tables import arrow, folder, parquet
from advisor.profiler.errors import PlanError
from advisor.profiler.lengths import Ints, counted
from advisor.profiler.records import Lengths, LengthSource

_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
# Text columns beside that of the lengths hold whole documents.
_MOST_FIELD = 1 << 30
_LONGEST_LINE = 1024
_SAVE = "save whole numbers, one for each sample, with numpy.save"


def read(path: Path, column: str | None = None) -> Lengths:
    """Returns the lengths in a file, or in a folder that `save_to_disk` wrote.

    `column` is needed where several could be meant. Raises `PlanError` for whatever is wrong.
    """
    what = f"--lengths {path}"
    if "\0" in str(path):
        raise PlanError(f"{what} cannot be read", "its name has a zero byte", "check the path")
    try:
        mode = path.stat().st_mode
        values = folder(path, column, what) if stat.S_ISDIR(mode) else _file(path, column, what)
        return counted(values, what, LengthSource.FILE)
    except FileNotFoundError:
        raise PlanError(
            f"{what} cannot be read", "there is no such file", "check the path"
        ) from None
    except OSError as error:
        why = error.strerror or str(error) or type(error).__name__
        raise PlanError(
            f"{what} cannot be read", " ".join(why.split()), "check the file and its permissions"
        ) from error
    except UnicodeError:
        raise PlanError(f"{what} is no text", "it is not UTF-8", "save it as UTF-8") from None
    except MemoryError:
        raise PlanError(
            f"{what} cannot be read", "it does not fit into memory", "give only the lengths"
        ) from None


# --- files, by their suffix


def _file(path: Path, column: str | None, what: str) -> Ints:
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        known = ", ".join(suffix for suffix in _READERS if suffix)
        raise PlanError(
            f"{what} has the suffix {path.suffix}, which is not known",
            mend=f"known are {known}, and folders saved by save_to_disk",
        )
    if path.is_file() and path.stat().st_size == 0:
        raise PlanError(
            f"{what} is empty", "one length for each sample is needed", "check how it was written"
        )
    values: Ints = reader(path, column, what)
    return values


@contextlib.contextmanager
def _text(path: Path, what: str, newline: str | None = None) -> Iterator[TextIO]:
    with path.open("rb") as raw:
        if b"\0" in raw.peek(8192):
            raise PlanError(
                f"{what} is no text",
                "it has zero bytes",
                "save it as UTF-8, or give it the suffix of its format",
            )
        with io.TextIOWrapper(raw, encoding="utf-8-sig", newline=newline) as text:
            yield text


def _lines(path: Path, column: str | None, what: str) -> Ints:
    no_column(column, what, "it has one number in each line")
    found = Column(what)
    with _text(path, what) as file:
        number = 0
        while line := file.readline(_LONGEST_LINE):
            number += 1
            if line := line.strip():
                found.add(_parsed(line), f"in line {number:,}")
    return found.array()


def _table(path: Path, column: str | None, what: str) -> Ints:
    limit = csv.field_size_limit(_MOST_FIELD)
    try:
        with _text(path, what, newline="") as file:
            return _cells(file, column, what, tabs=path.suffix.lower() == ".tsv")
    except csv.Error as error:
        raise PlanError(
            f"{what} is no table", str(error), "check the quotes and line ends"
        ) from error
    finally:
        csv.field_size_limit(limit)


def _cells(file: TextIO, column: str | None, what: str, *, tabs: bool) -> Ints:
    first = file.readline()
    # Spreadsheets of many countries separate columns by semicolons.
    comma = ";" if ";" in first and "," not in first else ","
    rows = csv.reader(itertools.chain((first,), file), delimiter="\t" if tabs else comma)
    filled = (row for row in rows if any(cell.strip() for cell in row))
    head = next(filled, [])
    found = Column(what)
    at = 0
    if head and all(_WHOLE.fullmatch(cell.strip()) for cell in head):
        if column is not None or len(head) > 1:
            raise PlanError(
                f"{what} has no names of columns",
                "its first line holds numbers",
                "name the columns in the first line",
            )
        found.add(_cell(head[0]), f"in line {rows.line_num:,}")
    elif head:
        names = [cell.strip() for cell in head]
        at = names.index(chosen(names, column, what))
    for row in filled:
        found.add(_cell(row[at] if at < len(row) else ""), f"in line {rows.line_num:,}")
    return found.array()


def _cell(text: str) -> object:
    """Returns what a cell holds: a number, a list as pandas writes one, or its text."""
    text = text.strip()
    if text.startswith("["):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(text)
    return _parsed(text)


def _parsed(text: str) -> object:
    if _WHOLE.fullmatch(text):
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text


def _json(path: Path, column: str | None, what: str) -> Ints:
    with _text(path, what) as file:
        text = file.read()
    try:
        content = _decoded(text, what)
    except json.JSONDecodeError as error:
        # The method `to_json` of a Hugging Face data set writes an object in each line.
        if error.msg == "Extra data" and error.lineno > 1:
            return _json_lines(path, column, what)
        raise _bad_json(error, what, error.lineno) from error
    if isinstance(content, dict):
        name = chosen(list(content), column, what)
        content = content[name]
        # The method `to_json` of a table of pandas writes {name: {row: value}}.
        content = list(content.values()) if isinstance(content, dict) else content
        column = None
    if not isinstance(content, list):
        raise PlanError(
            f"{what} is no list of lengths",
            f"it holds {short(content)}",
            "give a list of whole numbers, or an object with the list as a column",
        )
    places = (f"as number {number:,}" for number in itertools.count(1))
    return _json_values(zip(content, places, strict=False), column, what)


def _json_lines(path: Path, column: str | None, what: str) -> Ints:
    def values(file: TextIO) -> Iterator[tuple[object, str]]:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield _decoded(line, what, number), f"in line {number:,}"
                except json.JSONDecodeError as error:
                    raise _bad_json(error, what, number) from error

    with _text(path, what) as file:
        return _json_values(values(file), column, what)


def _json_values(values: Iterable[tuple[object, str]], column: str | None, what: str) -> Ints:
    """Returns the lengths of values, or of objects, each with its place."""
    found = Column(what)
    name: str | None = None
    for number, (value, place) in enumerate(values):
        if number == 0 and isinstance(value, dict):
            name = chosen(list(value), column, what)
        elif number == 0:
            no_column(column, what, "its values have no names")
        if name is not None:
            if not isinstance(value, dict):
                raise PlanError(
                    f"{what} has no object {place}", f"{short(value)} has no column {name!r}"
                )
            value = value.get(name)
        found.add(value, place)
    return found.array()


def _decoded(text: str, what: str, line: int | None = None) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        where = "" if line is None else f" in line {line:,}"
        raise PlanError(f"{what} is no list of lengths", f"it is nested too deep{where}") from None
    except ValueError as error:  # a number of thousands of digits
        where = "it" if line is None else f"line {line:,}"
        raise PlanError(f"{what} cannot be read", f"{where} has a number too long") from error


def _bad_json(error: json.JSONDecodeError, what: str, line: int) -> PlanError:
    return PlanError(
        f"{what} is no valid JSON",
        f"{error.msg} in line {line:,}, column {error.colno:,}",
        "check how it was written",
    )


def _numpy(path: Path, column: str | None, what: str) -> Ints:
    no_column(column, what, "an array has no columns")
    with path.open("rb") as file:
        if file.read(6) != b"\x93NUMPY":
            raise PlanError(f"{what} is no array of NumPy", "it does not start as one", _SAVE)
    try:
        # Mapped, so that a broken header cannot ask for more memory than the file is long.
        found: Ints = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError:
        raise
    except Exception as error:  # numpy's parser of the header lets its own errors through
        raise PlanError(f"{what} cannot be read", sentence(error), _SAVE) from error
    return found


_READERS = {
    "": _lines,
    ".txt": _lines,
    ".json": _json,
    ".jsonl": _json_lines,
    ".npy": _numpy,
    ".csv": _table,
    ".tsv": _table,
    ".parquet": parquet,
    ".arrow": arrow,
    ".feather": arrow,
}
