"""The lengths of a data set's samples, read from a file: `advise run --lengths FILE`.

Plain text, JSON, CSV and NumPy arrays need nothing more; Parquet, Arrow and the folders of
Hugging Face `save_to_disk` are read by pyarrow. A column may hold numbers, or lists such as token
ids, whose lengths count then. Every mistake is one `PlanError` that names the file.
"""

from __future__ import annotations

import contextlib
import csv
import difflib
import io
import itertools
import json
import os
import re
import stat
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

import numpy as np

from advisor.profiler.errors import PlanError
from advisor.profiler.lengths import MOST_LENGTH, Ints, counted
from advisor.profiler.records import Lengths, LengthSource
from advisor.profiler.units import printable

# What a column of lengths is usually named, the surest first.
_USUAL = ("length", "lengths", "n_tokens", "num_tokens", "input_ids", "input_values")
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
# Text columns beside that of the lengths hold whole documents.
_MOST_FIELD = 1 << 30
_LONGEST_LINE = 1024
_MOST_NAMES = 10
_MOST_SAID = 160
_NONE: Ints = np.array([], dtype=np.int64)
_SAVE = "save whole numbers, one for each sample, with numpy.save"
_TOKENISE = "tokenise first, and give the column of token ids or their number"


def read(path: Path, column: str | None = None) -> Lengths:
    """Returns the lengths in a file, or in a folder that `save_to_disk` wrote.

    `column` is needed where several could be meant. Raises `PlanError` for whatever is wrong.
    """
    what = f"--lengths {path}"
    if "\0" in str(path):
        raise PlanError(f"{what} cannot be read", "its name has a zero byte", "check the path")
    try:
        mode = path.stat().st_mode
        values = _folder(path, column, what) if stat.S_ISDIR(mode) else _file(path, column, what)
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


class _Column:
    """The lengths of one column, checked value by value."""

    def __init__(self, what: str) -> None:
        self.lengths = array("q")
        self._what = what
        self._lists: bool | None = None

    def add(self, value: object, place: str) -> None:
        """Adds a number, or the length of a list; `place` says where it stands, for errors."""
        lists = isinstance(value, list)
        if lists is not self._lists:
            if self._lists is not None and isinstance(value, list | int | float):
                raise PlanError(
                    f"{self._what} mixes numbers and lists",
                    f"the first of the other kind is {place}",
                    "give one whole number, or one list, for each sample",
                )
            self._lists = lists
        number = len(value) if isinstance(value, list) else value
        if type(number) is float and number.is_integer():
            number = int(number)
        if type(number) is not int:
            _refuse(value, self._what, place)
        if not 0 < number <= MOST_LENGTH:
            raise PlanError(
                f"{self._what} has {_short(number)} {place}",
                f"the length of a sample is 1 to {MOST_LENGTH:,}",
                "leave empty samples out, and check the unit"
                if number < 1
                else "give lengths in tokens (or frames), not bytes or characters of a whole file",
            )
        self.lengths.append(number)

    def array(self) -> Ints:
        """Returns the lengths."""
        return np.frombuffer(self.lengths, dtype=np.int64) if self.lengths else _NONE


def _refuse(value: object, what: str, place: str) -> NoReturn:
    if value is None or value == "":
        raise PlanError(
            f"{what} has no value {place}",
            "one length for each sample is needed",
            "leave out samples without one",
        )
    if isinstance(value, str):
        raise PlanError(
            f"{what} has text {place}",
            f"'{_short(value)}' is no length",
            f"one whole number for each sample is expected: {_TOKENISE}",
        )
    raise PlanError(
        f"{what} has {_short(value)} {place}",
        "the length of a sample is a whole number",
        "give one whole number, or one list, for each sample",
    )


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
    _no_column(column, what, "it has one number in each line")
    found = _Column(what)
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
    found = _Column(what)
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
        at = names.index(_chosen(names, column, what))
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
        name = _chosen(list(content), column, what)
        content = content[name]
        # The method `to_json` of a table of pandas writes {name: {row: value}}.
        content = list(content.values()) if isinstance(content, dict) else content
        column = None
    if not isinstance(content, list):
        raise PlanError(
            f"{what} is no list of lengths",
            f"it holds {_short(content)}",
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
    found = _Column(what)
    name: str | None = None
    for number, (value, place) in enumerate(values):
        if number == 0 and isinstance(value, dict):
            name = _chosen(list(value), column, what)
        elif number == 0:
            _no_column(column, what, "its values have no names")
        if name is not None:
            if not isinstance(value, dict):
                raise PlanError(
                    f"{what} has no object {place}", f"{_short(value)} has no column {name!r}"
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
    _no_column(column, what, "an array has no columns")
    with path.open("rb") as file:
        if file.read(6) != b"\x93NUMPY":
            raise PlanError(f"{what} is no array of NumPy", "it does not start as one", _SAVE)
    try:
        # Mapped, so that a broken header cannot ask for more memory than the file is long.
        found: Ints = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError:
        raise
    except Exception as error:  # numpy's parser of the header lets its own errors through
        raise PlanError(f"{what} cannot be read", _sentence(error), _SAVE) from error
    return found


# --- what pyarrow reads


def _pyarrow(what: str) -> Any:
    try:
        import pyarrow as pa
    except ImportError:
        raise PlanError(
            f"{what} is read by pyarrow",
            "which is not installed",
            "pip install 'compile-advisor[lengths]', or give the lengths as text",
        ) from None
    return pa


@contextlib.contextmanager
def _told(pa: Any, what: str, kind: str) -> Iterator[None]:
    """Says what pyarrow found wrong with a file in one sentence."""
    try:
        yield
    except (pa.ArrowException, pa.ArrowInvalid, ValueError, OSError) as error:
        if getattr(error, "errno", None) is not None:
            raise
        raise PlanError(
            f"{what} cannot be read as {kind}", _sentence(error), "check how it was written"
        ) from error


def _parquet(path: Path, column: str | None, what: str) -> Ints:
    pa = _pyarrow(what)
    import pyarrow.parquet as pq

    with _told(pa, what, "Parquet"), pq.ParquetFile(path, memory_map=True) as file:
        schema = file.schema_arrow
        name = _chosen(schema.names, column, what)
        _check_type(pa, schema.field(name).type, name, what)
        batches = file.iter_batches(columns=[name])
        return _joined((batch.column(0) for batch in batches), name, what)


def _arrow(path: Path, column: str | None, what: str) -> Ints:
    pa = _pyarrow(what)
    with _told(pa, what, "Arrow"), pa.memory_map(str(path)) as source:
        magic = source.read(6)
        source.seek(0)
        is_file = magic == b"ARROW1"
        opened = pa.ipc.open_file if is_file else pa.ipc.open_stream
        schema = opened(source).schema
        name = _chosen(schema.names, column, what)
        _check_type(pa, schema.field(name).type, name, what)
        source.seek(0)
        # The other columns are not even decompressed.
        only = pa.ipc.IpcReadOptions(included_fields=[schema.names.index(name)])
        reader = opened(source, options=only)
        batches = (
            (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else reader
        )
        return _joined((batch.column(0) for batch in batches), name, what)


def _folder(path: Path, column: str | None, what: str) -> Ints:
    """Reads what `save_to_disk` wrote, or a folder of Arrow files."""
    names = sorted(os.listdir(path))
    shards = [name for name in names if name.endswith(".arrow")]
    if not shards:
        return _split(path, names, column, what)
    state = path / "state.json"
    if state.is_file():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            saved = json.loads(state.read_text(encoding="utf-8"))["_data_files"]
            shards = [Path(each["filename"]).name for each in saved]
    else:
        # Results of `map` that lie beside the data.
        shards = [name for name in shards if not name.startswith("cache-")] or shards
    parts: list[Ints] = []
    for shard in shards:
        if not (path / shard).is_file():
            raise PlanError(f"{what} is not complete", f"{shard} is missing", "save it again")
        parts.append(_arrow(path / shard, column, f"{what}{os.sep}{shard}"))
    return np.concatenate(parts) if parts else _NONE


def _split(path: Path, names: Sequence[str], column: str | None, what: str) -> Ints:
    """Reads the split `train` of a folder of splits, or the only one."""
    splits = [
        name for name in names if (path / name).is_dir() and any((path / name).glob("*.arrow"))
    ]
    if "train" in splits or len(splits) == 1:
        split = "train" if "train" in splits else splits[0]
        return _folder(path / split, column, f"{what}{os.sep}{split}")
    if splits:
        raise PlanError(
            f"{what} holds several splits, and none named train",
            f"there are {_listed(splits)}",
            f"name one of them: --lengths {path / splits[0]}",
        )
    raise PlanError(
        f"{what} is a folder without Arrow files",
        mend="give a file, or a folder that save_to_disk wrote",
    )


def _check_type(pa: Any, kind: Any, name: str, what: str) -> None:
    """Raises `PlanError` for a column that holds neither numbers nor lists."""
    kind = _stored(pa, kind)
    if _is_list(pa, kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return
    text = any(
        getattr(pa.types, f"is_{each}", lambda _: False)(kind)
        for each in ("string", "large_string", "string_view")
    )
    raise PlanError(
        f"the column {name!r} of {what} holds {'text' if text else _short(kind)}",
        "the length of a sample is a whole number, or that of a list",
        _TOKENISE if text else "give another column with --lengths-column NAME",
    )


def _stored(pa: Any, kind: Any) -> Any:
    """Returns the type that a column's values are stored in."""
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _is_list(pa: Any, kind: Any) -> bool:
    return any(
        getattr(pa.types, f"is_{each}", lambda _: False)(kind)
        for each in ("list", "large_list", "fixed_size_list", "list_view", "large_list_view")
    )


def _joined(columns: Iterable[Any], name: str, what: str) -> Ints:
    import pyarrow as pa
    import pyarrow.compute as pc

    parts: list[Ints] = []
    before = 0
    for values in columns:
        values.validate()
        if isinstance(values.type, pa.BaseExtensionType):
            values = values.storage
        if pa.types.is_dictionary(values.type):
            values = values.dictionary_decode()
        if values.null_count:
            place = before + pc.index(values.is_null(), True).as_py() + 1
            raise PlanError(
                f"the column {name!r} of {what} has no value in row {place:,}",
                "one length for each sample is needed",
                "leave out samples without one",
            )
        if _is_list(pa, values.type):
            values = pc.list_value_length(values)
        parts.append(values.to_numpy(zero_copy_only=False))
        before += len(values)
    return np.concatenate(parts) if parts else _NONE


# --- columns


def _chosen(names: Sequence[str], column: str | None, what: str) -> str:
    """Returns the column to read; raises `PlanError` naming those that there are."""
    if column is not None:
        if column in names:
            return column
        close = difflib.get_close_matches(column, names, n=1)
        raise PlanError(
            f"{what} has no column {column!r}",
            f"its columns are {_listed(names)}" if names else "it has no columns",
            f"did you mean {close[0]}?" if close else "give one with --lengths-column NAME",
        )
    if len(names) == 1:
        return names[0]
    for usual in _USUAL:
        if usual in names:
            return usual
    raise PlanError(
        f"{what} does not say which column holds the lengths",
        f"its columns are {_listed(names)}" if names else "it has no columns",
        "give one with --lengths-column NAME",
    )


def _no_column(column: str | None, what: str, why: str) -> None:
    if column is not None:
        raise PlanError(f"--lengths-column has no effect on {what}", why, "leave it out")


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(_short(name) for name in names[:_MOST_NAMES])
    return f"{shown} and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else shown


def _short(value: object) -> str:
    """Returns a value as an error shows it: on one line, and not all of a document."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    if isinstance(value, bool):
        return str(value).lower()
    text = " ".join(printable(str(value)).split())
    return text if len(text) <= 40 else f"{text[:37]}..."


def _sentence(error: BaseException) -> str:
    """Returns the first line of what a library says, which may be long."""
    said = printable(str(error).partition("\n")[0]).strip()[:_MOST_SAID].rstrip(".")
    return said or type(error).__name__


_READERS = {
    "": _lines,
    ".txt": _lines,
    ".json": _json,
    ".jsonl": _json_lines,
    ".npy": _numpy,
    ".csv": _table,
    ".tsv": _table,
    ".parquet": _parquet,
    ".arrow": _arrow,
    ".feather": _arrow,
}
