"""What a step of the corpus's models has to do: counted once, joined to the published rows."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from typing import IO

import msgspec

from advisor.models.corpus import CorpusRow
from advisor.profiler.step_counts import StepCounts

_FIGURES = 4
# Model, batch, length, image side, and whether under autocast.
Key = tuple[str, float | None, float | None, float | None, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One model at one batch, one length and one kind of precision, without its optimizer."""

    key: Key
    counts: StepCounts


def key_of(row: CorpusRow) -> Key:
    """Returns what decides the counts of a row's step: model, batch, length, image, autocast."""
    return (row.model, row.batch, row.length, row.image, row.precision.startswith("amp"))


@functools.cache
def known() -> dict[Key, StepCounts]:
    """Returns the counts by key (README.md beside the file is its data card)."""
    text = resources.files("advisor.models.corpus").joinpath("architectures.jsonl").read_bytes()
    rows = [msgspec.json.decode(line, type=Architecture) for line in text.splitlines()]
    return {row.key: row.counts for row in rows}


def of_row(row: CorpusRow) -> StepCounts | None:
    """Returns what a step of the row's model has to do; None where its model was not counted."""
    return known().get(key_of(row))


def write(architectures: Iterable[Architecture], file: IO[str]) -> None:
    """Writes one architecture in a line, numbers in four figures."""
    for each in architectures:
        made = msgspec.to_builtins(each)
        file.write(msgspec.json.encode(_rounded(made)).decode() + "\n")


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.{_FIGURES}g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return value
