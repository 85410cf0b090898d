"""Lengths read from files of each format, and one clear sentence for each mistake in them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from advisor.length_file import read
from advisor.profiler.errors import PlanError
from advisor.profiler.records import Lengths, LengthSource

LENGTHS = [5, 3, 5, 128]
TOKENS = [[7] * n for n in LENGTHS]
FORMATS = (".txt", ".json", ".jsonl", ".npy", ".csv", ".tsv", ".parquet", ".arrow", ".feather")


def _file(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def _counts(path: Path, column: str | None = None) -> dict[int, int]:
    found = read(path, column)
    assert found.source is LengthSource.FILE
    return dict(zip(found.values, found.counts, strict=True))


def _error(path: Path, column: str | None = None) -> str:
    with pytest.raises(PlanError) as caught:
        read(path, column)
    text = str(caught.value)
    assert f"--lengths {path}" in text
    assert "\n" not in text
    assert len(text) - len(str(path)) < 500
    return text


def _read_or_said(path: Path, column: str | None = None) -> Lengths | None:
    """Returns the lengths, or None for a file that is refused in one sentence."""
    said = ""
    found = None
    try:
        found = read(path, column)
    except PlanError as error:
        said = str(error)
    assert found is not None or f"--lengths {path}" in said
    assert "\n" not in said
    return found


EXPECTED = {3: 1, 5: 2, 128: 1}


# --- formats


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", "5\n3\n5\n128\n"),
        ("a", "5\n3\n\n  5 \r\n\t128"),
        ("bom.txt", "\ufeff5\n3\n5\n128\n"),
        ("A.TXT", "5\n3\n5.0\n+128\n"),
        ("a.json", "[5, 3, 5.0, 128]"),
        ("column.json", '{"name": "x", "length": [5, 3, 5, 128]}'),
        ("only.json", '{"mine": [5, 3, 5, 128]}'),
        ("pandas.json", '{"length": {"0": 5, "1": 3, "2": 5, "3": 128}}'),
        ("objects.json", json.dumps([{"id": "a", "length": n} for n in LENGTHS])),
        ("tokens.json", json.dumps(TOKENS)),
        ("tokens_column.json", json.dumps({"input_ids": TOKENS, "labels": [0] * 4})),
        ("lines.json", '{"length": 5}\n{"length": 3}\n{"length": 5}\n{"length": 128}\n'),
        ("a.jsonl", "5\n3\n\n5\n128\n"),
        ("a.jsonl", "\n".join(json.dumps({"text": "x", "input_ids": t}) for t in TOKENS)),
        ("a.csv", "length\n5\n3\n5\n128\n"),
        ("bare.csv", "5\n3\n5\n128\n"),
        ("two.csv", 'text,n_tokens\n"a\nb",5\n"c,d",3\n,5\n\ne,128\n'),
        ("semicolons.csv", "text;length\na;5\nb;3.0\nc;5\nd;128\n"),
        ("lists.csv", "input_ids\n" + "\n".join(f'"{tokens}"' for tokens in TOKENS)),
        ("long.csv", f"text,length\n{'x' * 200_000},5\n,3\n,5\n,128\n"),
        ("a.tsv", "text\tlength\na\t5\nb, c\t3\nd\t5\ne\t128\n"),
    ],
)
def test_text_formats(tmp_path: Path, name: str, content: str) -> None:
    assert _counts(_file(tmp_path, name, content)) == EXPECTED


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint16", "float32", ">i4"])
def test_numpy_arrays(tmp_path: Path, dtype: str) -> None:
    np.save(tmp_path / "a.npy", np.array(LENGTHS, dtype=dtype))
    assert _counts(tmp_path / "a.npy") == EXPECTED


def _columns() -> dict[str, Any]:
    pa = pytest.importorskip("pyarrow")
    return {
        "numbers": pa.array(LENGTHS, pa.int32()),
        "floats": pa.array(LENGTHS, pa.float64()),
        "lists": pa.array(TOKENS),
        "large_lists": pa.array(TOKENS, pa.large_list(pa.int32())),
        "views": pa.array(TOKENS, pa.list_view(pa.int32())),
        "words": pa.array([["a"] * n for n in LENGTHS]),
        "coded": pa.array(LENGTHS).dictionary_encode(),
        "text": pa.array(["a", "b", "c", "d"]),
        "flags": pa.array([True, False, True, True]),
        "gaps": pa.array([5, None, 5, 128]),
        "records": pa.array([{"bytes": b"x"}] * 4),
    }


def _table(*names: str) -> Any:
    pa = pytest.importorskip("pyarrow")
    columns = _columns()
    return pa.table({name: columns[name] for name in names or columns})


def _write_parquet(table: Any, path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    pq.write_table(table, path, row_group_size=3)


def _write_file(table: Any, path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    with pa.ipc.new_file(path, table.schema) as sink:
        sink.write_table(table, max_chunksize=3)


def _write_stream(table: Any, path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    with pa.ipc.new_stream(path, table.schema) as sink:
        sink.write_table(table, max_chunksize=3)


def _write_feather(table: Any, path: Path) -> None:
    feather = pytest.importorskip("pyarrow.feather")
    feather.write_feather(table, path, compression="zstd")


WRITERS = {
    "a.parquet": _write_parquet,
    "a.arrow": _write_file,
    "stream.arrow": _write_stream,
    "a.feather": _write_feather,
}
Written = Callable[..., Path]


@pytest.fixture(params=list(WRITERS))
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Written:
    """Returns a function that writes the named columns in one of the formats of pyarrow."""

    def write(*names: str) -> Path:
        path: Path = tmp_path / request.param
        table = _table(*names)
        if request.param == "a.parquet":  # has no such type
            table = table.drop_columns([n for n in ("views",) if n in table.column_names])
        WRITERS[request.param](table, path)
        return path

    return write


@pytest.mark.parametrize("column", ["numbers", "floats", "lists", "large_lists", "words", "coded"])
def test_columns_of_numbers_and_of_lists(written: Written, column: str) -> None:
    assert _counts(written(), column) == EXPECTED


def test_list_views(tmp_path: Path) -> None:
    _write_stream(_table("views"), tmp_path / "a.arrow")
    assert _counts(tmp_path / "a.arrow") == EXPECTED


def test_only_column_and_usual_names_need_no_option(written: Written, tmp_path: Path) -> None:
    assert _counts(written("lists")) == EXPECTED
    table = _table("text", "numbers", "lists").rename_columns(["text", "n_tokens", "input_ids"])
    for name, write in WRITERS.items():
        write(table, tmp_path / name)
        assert _counts(tmp_path / name) == EXPECTED


@pytest.mark.parametrize(
    ("column", "said"),
    [
        ("text", "holds text: the length of a sample is a whole number, or that of a list (token"),
        ("flags", "'flags' of --lengths"),
        ("records", "struct<bytes: binary>"),
        ("gaps", "has no value in row 2"),
        ("number", "did you mean numbers?"),
        (None, "its columns are numbers, floats, lists"),
    ],
)
def test_columns_that_are_no_lengths(written: Written, column: str | None, said: str) -> None:
    assert said in _error(written(), column)


# --- folders of save_to_disk


def _save(folder: Path, *names: str, shards: int = 1) -> None:
    """Writes what `Dataset.save_to_disk` writes."""
    folder.mkdir(parents=True)
    files = [f"data-{i:05}-of-{shards:05}.arrow" for i in range(shards)]
    table = _table(*names)
    each = -(-len(table) // shards)
    for i, file in enumerate(files):
        _write_stream(table.slice(i * each, each), folder / file)
    state = {"_data_files": [{"filename": file} for file in files], "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")


def test_saved_data_set(tmp_path: Path) -> None:
    _save(tmp_path / "data", "lists", "text", shards=2)
    # What `map` leaves beside it is not the data.
    _write_stream(_table("numbers"), tmp_path / "data" / "cache-0123.arrow")
    assert _counts(tmp_path / "data", "lists") == EXPECTED


def test_folder_of_arrow_files_without_a_state(tmp_path: Path) -> None:
    _save(tmp_path / "data", "numbers", shards=2)
    (tmp_path / "data" / "state.json").unlink()
    _write_stream(_table("lists"), tmp_path / "data" / "cache-0123.arrow")
    assert _counts(tmp_path / "data") == EXPECTED


def test_broken_state_is_passed_over(tmp_path: Path) -> None:
    _save(tmp_path / "data", "numbers")
    (tmp_path / "data" / "state.json").write_text("{")
    assert _counts(tmp_path / "data") == EXPECTED


def test_split_train_is_read(tmp_path: Path) -> None:
    _save(tmp_path / "all" / "train", "numbers")
    _save(tmp_path / "all" / "test", "text")
    (tmp_path / "all" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert _counts(tmp_path / "all") == EXPECTED


def test_only_split_is_read(tmp_path: Path) -> None:
    _save(tmp_path / "all" / "validation", "numbers")
    assert _counts(tmp_path / "all") == EXPECTED


def test_splits_are_named_where_none_is_train(tmp_path: Path) -> None:
    _save(tmp_path / "all" / "validation", "numbers")
    _save(tmp_path / "all" / "test", "numbers")
    text = _error(tmp_path / "all")
    assert "there are test, validation" in text
    assert f"--lengths {tmp_path / 'all' / 'test'}" in text


def test_folder_that_lacks_a_shard(tmp_path: Path) -> None:
    _save(tmp_path / "data", "numbers", shards=2)
    (tmp_path / "data" / "data-00001-of-00002.arrow").unlink()
    assert "data-00001-of-00002.arrow is missing" in _error(tmp_path / "data")


def test_place_in_a_shard_is_named(tmp_path: Path) -> None:
    _save(tmp_path / "data", "gaps", shards=2)
    assert "data-00000-of-00002.arrow has no value in row 2" in _error(tmp_path / "data")


def test_folder_without_arrow_files(tmp_path: Path) -> None:
    assert "is a folder without Arrow files" in _error(tmp_path)


# --- mistakes


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", "", "is empty"),
        ("a.txt", "\n \n", "has no lengths"),
        ("a.txt", "5\n\n0\n", "has 0 in line 3: the length of a sample is 1 to 16,777,216"),
        ("a.txt", "5\n-3\n", "has -3 in line 2"),
        ("a.txt", "5\nabc\n", "has text in line 2: 'abc' is no length"),
        ("a.txt", "5\n1000000000\n", "has 1000000000 in line 2"),
        ("a.txt", "9" * 5000, "line 1"),
        ("a.txt", "5\n" + "x" * 100_000, "has text in line 2"),
        ("a.txt", "5\n2.5\n", "has 2.5 in line 2: the length of a sample is a whole number"),
        ("a.txt", "5\nnan\n", "has nan in line 2"),
        ("a.txt", "5\ninf\n", "has inf in line 2"),
        ("a.txt", "1, 2, 3\n", "has text in line 1"),
        ("a.txt", "5\nx\x1b[2Jy\n", r"x\x1b[2Jy"),
        ("a.txt", b"5\n\xff\xfe\n", "it is not UTF-8"),
        ("a.txt", "5\n".encode("utf-16"), "it has zero bytes"),
        ("a.txt", b"\x7fELF\0\0\0", "it has zero bytes"),
        ("a.pt", "x", "has the suffix .pt, which is not known (known are .txt, .json"),
        ("a.json", "", "is empty"),
        ("a.json", "[]", "has no lengths"),
        ("a.json", "[5,\n3,,]", "is no valid JSON: Expecting value in line 2, column 3"),
        ("a.json", "[5, 0]", "has 0 as number 2"),
        ("a.json", "[5, -1]", "has -1 as number 2"),
        ("a.json", "[5, 1000000000]", "has 1000000000 as number 2"),
        ("a.json", "[5, true]", "has true as number 2"),
        ("a.json", "[5, null]", "has no value as number 2"),
        ("a.json", "[5, NaN]", "has nan as number 2"),
        ("a.json", "[5, [1, 2]]", "mixes numbers and lists"),
        ("a.json", "[[1], []]", "has 0 as number 2"),
        ("a.json", '["a b c"]', "tokenise first"),
        ("a.json", '"abc"', "is no list of lengths: it holds abc"),
        ("a.json", "5", "is no list of lengths"),
        ("a.json", '{"length": 5}', "is no list of lengths: it holds 5"),
        ("a.json", "{}", "it has no columns"),
        ("a.json", '[{"length": 5}, {"text": "x"}]', "has no value as number 2"),
        ("a.json", '[{"length": 5}, 5]', "has no object as number 2"),
        ("a.json", '[{"a": 5, "b": 5}]', "its columns are a, b (give one with --lengths-column"),
        ("a.json", "[" * 100_000, "nested too deep"),
        ("a.json", "[" + "9" * 5000 + "]", "has a number too long"),
        ("a.jsonl", '{"length": 5}\n{"length": }\n', "is no valid JSON: Expecting value in line 2"),
        ("a.jsonl", '{"length": 5}\n\n{"length": 0}\n', "has 0 in line 3"),
        ("a.jsonl", '{"length": 5}\n{"n": 5}\n', "has no value in line 2"),
        ("a.jsonl", '5\n{"n": 5}\n', "has an object in line 2"),
        ("a.csv", "length\n", "has no lengths"),
        ("a.csv", "length,text\n5,a\n0,b\n", "has 0 in line 3"),
        ("a.csv", 'text,length\n"a\nb",5\nc,-1\n', "has -1 in line 4"),
        ("a.csv", "text,length\na,5\nb\n", "has no value in line 3"),
        ("a.csv", "text\nhello world\n", "tokenise first"),
        ("a.csv", "5,a\n", "its columns are 5, a"),
        ("a.csv", "5,6\n7,8\n", "has no names of columns"),
        ("a.csv", 'text,length\n"a,5\n', "has no value in line 2"),
        ("a.tsv", "a\tb\n1\t2\n", "its columns are a, b"),
        ("a.npy", "", "is empty"),
        ("a.npy", b"PK\x03\x04abcdefgh", "is no array of NumPy"),
        ("a.npy", b"\x93NUMPY\x01\x00", "cannot be read"),
        ("a.npy", b"\x93NUMPY\x01\x00\x05\x00{'a'}", "cannot be read"),
        ("a.npy", b"\x93NUMPY\x01\x00\x10\x00{'descr': '<i8'(\n", "cannot be read"),
    ],
)
def test_mistake_in_a_file_is_one_sentence(
    tmp_path: Path, name: str, content: str | bytes, said: str
) -> None:
    assert said in _error(_file(tmp_path, name, content))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([], "has no lengths"),
        ([5, 0], "has 0 as length number 2"),
        ([5, -2], "has -2 as length number 2"),
        ([5, 10**9], "has 1000000000 as length number 2"),
        ([5, 2.5], "has 2.5 as length number 2"),
        ([5, np.nan], "nan"),
        ([[1, 2], [3, 4]], "of shape (2, 2)"),
        (["a", "b"], "it is text"),
        ([True, False], "is no list of lengths"),
        ([{}, None], "numpy.save"),
        (7, "is no list of lengths"),
    ],
)
def test_mistake_in_an_array(tmp_path: Path, values: Any, said: str) -> None:
    np.save(tmp_path / "a.npy", np.array(values))
    assert said in _error(tmp_path / "a.npy")


def test_header_that_promises_too_much_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.arange(1, 11))
    path.write_bytes(path.read_bytes().replace(b"(10,)", b"(9999999999999,)")[:-20])
    assert "cannot be read" in _error(path)


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".feather"])
@pytest.mark.parametrize("content", [b"x", b"PAR1abcdPAR1", b"ARROW1\0\0abc", b"\xff" * 100])
def test_what_pyarrow_cannot_read(tmp_path: Path, suffix: str, content: bytes) -> None:
    pytest.importorskip("pyarrow")
    assert "cannot be read as" in _error(_file(tmp_path, f"a{suffix}", content))


def test_truncated_files_never_end_in_a_traceback(written: Written) -> None:
    path = written("lists", "numbers")
    whole = path.read_bytes()
    for size in range(1, len(whole), max(1, len(whole) // 40)):
        path.write_bytes(whole[:size])
        found = _read_or_said(path, "lists")
        assert found is None or sum(found.counts) <= 4


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(content=st.binary(max_size=200), suffix=st.sampled_from(FORMATS[:6]))
def test_any_bytes_are_read_or_refused_in_a_sentence(
    tmp_path: Path, content: bytes, suffix: str
) -> None:
    path = _file(tmp_path, f"fuzz{suffix}", content)
    _read_or_said(path)


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
        ),
    )
)
def test_any_json_is_read_or_refused_in_a_sentence(tmp_path: Path, value: object) -> None:
    for suffix in (".json", ".jsonl"):
        _read_or_said(_file(tmp_path, f"fuzz{suffix}", json.dumps(value)))


@pytest.mark.parametrize("suffix", FORMATS)
def test_missing_file(tmp_path: Path, suffix: str) -> None:
    assert "there is no such file" in _error(tmp_path / f"no{suffix}")


@pytest.mark.parametrize("suffix", FORMATS)
def test_empty_file(tmp_path: Path, suffix: str) -> None:
    assert "is empty" in _error(_file(tmp_path, f"a{suffix}", ""))


@pytest.mark.parametrize("suffix", [".txt", ".npy"])
def test_column_of_a_file_without_columns(tmp_path: Path, suffix: str) -> None:
    assert "--lengths-column has no effect on" in _error(
        _file(tmp_path, f"a{suffix}", "5\n"), "length"
    )


def test_unknown_column_of_a_wide_table(tmp_path: Path) -> None:
    path = _file(tmp_path, "a.csv", ",".join(f"c{i}" for i in range(500)) + "\n")
    assert "c9 and 490 more" in _error(path, "nothing like it")
    assert "did you mean c12?" in _error(path, "cc12")


def test_missing_pyarrow_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for suffix in (".parquet", ".arrow", ".feather"):
        text = _error(_file(tmp_path, f"a{suffix}", "x"))
        assert "pip install 'compile-advisor[lengths]'" in text


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[Path]:
    """Returns a folder that this test's user may not look into, even if it is root."""
    folder = tmp_path / "locked"
    folder.mkdir()
    (folder / "a.txt").write_text("5\n")
    folder.chmod(0)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield folder
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(0o700)


def test_folder_without_permission(locked: Path) -> None:
    assert "cannot be read: Permission denied" in _error(locked)
    assert "cannot be read: Permission denied" in _error(locked / "a.txt")


def test_names_that_no_file_can_have(tmp_path: Path) -> None:
    assert "File name too long" in _error(tmp_path / ("x" * 5000))
    (tmp_path / "a.txt").write_text("5\n")
    assert "Not a directory" in _error(tmp_path / "a.txt" / "b.txt")
    assert "cannot be read" in _error(tmp_path / "a\0.txt")


def test_pipe_is_read(tmp_path: Path) -> None:
    ends = os.pipe()
    os.write(ends[1], b"5\n3\n5\n128\n")
    os.close(ends[1])
    try:
        assert _counts(Path(f"/dev/fd/{ends[0]}")) == EXPECTED
    finally:
        os.close(ends[0])


def test_many_distinct_lengths_keep_every_sample(tmp_path: Path) -> None:
    path = _file(tmp_path, "a.txt", "\n".join(map(str, range(1, 20_001))))
    assert sum(read(path).counts) == 20_000
