"""Lengths in Parquet and Arrow files and in folders of Hugging Face `save_to_disk`, by pyarrow."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from advisor.length_columns import NONE, TOKENISE, chosen, listed, sentence, short
from advisor.profiler.errors import PlanError
from advisor.profiler.lengths import Ints


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
            f"{what} cannot be read as {kind}", sentence(error), "check how it was written"
        ) from error


def parquet(path: Path, column: str | None, what: str) -> Ints:
    """Returns the lengths in a Parquet file. Raises `PlanError` for whatever is wrong with it."""
    pa = _pyarrow(what)
    import pyarrow.parquet as pq

    with _told(pa, what, "Parquet"), pq.ParquetFile(path, memory_map=True) as file:
        schema = file.schema_arrow
        name = chosen(schema.names, column, what)
        _check_type(pa, schema.field(name).type, name, what)
        batches = file.iter_batches(columns=[name])
        return _joined((batch.column(0) for batch in batches), name, what)


def arrow(path: Path, column: str | None, what: str) -> Ints:
    """Returns the lengths in an Arrow file or stream. Raises `PlanError` for what is wrong."""
    pa = _pyarrow(what)
    with _told(pa, what, "Arrow"), pa.memory_map(str(path)) as source:
        magic = source.read(6)
        source.seek(0)
        is_file = magic == b"ARROW1"
        opened = pa.ipc.open_file if is_file else pa.ipc.open_stream
        schema = opened(source).schema
        name = chosen(schema.names, column, what)
        _check_type(pa, schema.field(name).type, name, what)
        source.seek(0)
        # The other columns are not even decompressed.
        only = pa.ipc.IpcReadOptions(included_fields=[schema.names.index(name)])
        reader = opened(source, options=only)
        batches = (
            (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else reader
        )
        return _joined((batch.column(0) for batch in batches), name, what)


def folder(path: Path, column: str | None, what: str) -> Ints:
    """Returns the lengths in what `save_to_disk` wrote, or in a folder of Arrow files.

    Raises `PlanError` for whatever is wrong with it.
    """
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
        parts.append(arrow(path / shard, column, f"{what}{os.sep}{shard}"))
    return np.concatenate(parts) if parts else NONE


def _split(path: Path, names: Sequence[str], column: str | None, what: str) -> Ints:
    """Reads the split `train` of a folder of splits, or the only one."""
    splits = [
        name for name in names if (path / name).is_dir() and any((path / name).glob("*.arrow"))
    ]
    if "train" in splits or len(splits) == 1:
        split = "train" if "train" in splits else splits[0]
        return folder(path / split, column, f"{what}{os.sep}{split}")
    if splits:
        raise PlanError(
            f"{what} holds several splits, and none named train",
            f"there are {listed(splits)}",
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
        f"the column {name!r} of {what} holds {'text' if text else short(kind)}",
        "the length of a sample is a whole number, or that of a list",
        TOKENISE if text else "give another column with --lengths-column NAME",
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
    return np.concatenate(parts) if parts else NONE
