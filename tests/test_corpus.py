"""The corpus: every row has a source and numbers that make sense, and reads back as written."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest

from advisor.models.corpus import COLUMNS, NOT_FOR_FITS, CorpusRow, published, read, write

ROW = CorpusRow(
    source="here", date="2026-12-02", torch="2.13", device="cpu", model="m", family="bert-like",
    task="training", precision="fp32", mode="default", scope="model", dynamic="auto",
    speedup=1.25, compile_s=31.5,
)  # fmt: skip


def test_published_rows_are_sound() -> None:
    rows = published()
    assert len(rows) > 8000
    for row in rows:
        assert row.source
        assert row.task in ("training", "inference")
        assert row.scope in ("model", "regional")
        assert row.speedup is None or 0.01 < row.speedup < 100
        assert not (row.failed and row.speedup is not None)
        assert set(row.flags.split()) <= NOT_FOR_FITS
    fit = [row for row in rows if row.fit and row.training]
    assert len(fit) > 2000
    assert {row.mode for row in fit} >= {"default", "reduce-overhead"}


def test_rows_read_back_as_they_were_written() -> None:
    rows = (ROW, replace(ROW, speedup=None, failed=True, flags="SUSPECT", model='a "b", c'))
    file = io.StringIO()
    write(rows, file)
    file.seek(0)
    assert read(file) == rows


@pytest.mark.parametrize(
    ("text", "says"), [("source,date\n", "the columns are"), (None, "line 2: speedup is nan")]
)
def test_a_bad_file_is_named(text: str | None, says: str) -> None:
    if text is None:
        cells = {**dict.fromkeys(COLUMNS, ""), "speedup": "nan"}
        text = ",".join(COLUMNS) + "\n" + ",".join(cells.values()) + "\n"
    with pytest.raises(ValueError, match=says):
        read(io.StringIO(text))
