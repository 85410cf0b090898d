"""The column that holds lengths: which one it is, and each of its values checked."""

from __future__ import annotations

import difflib
from array import array
from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from advisor.profiler.errors import PlanError
from advisor.profiler.lengths import MOST_LENGTH, Ints
from advisor.profiler.units import printable

# What a column of lengths is usually named, the surest first.
_USUAL = ("length", "lengths", "n_tokens", "num_tokens", "input_ids", "input_values")
_MOST_NAMES = 10
_MOST_SAID = 160
NONE: Ints = np.array([], dtype=np.int64)
TOKENISE = "tokenise first, and give the column of token ids or their number"


class Column:
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
            refuse(value, self._what, place)
        if not 0 < number <= MOST_LENGTH:
            raise PlanError(
                f"{self._what} has {short(number)} {place}",
                f"the length of a sample is 1 to {MOST_LENGTH:,}",
                "leave empty samples out, and check the unit"
                if number < 1
                else "give lengths in tokens (or frames), not bytes or characters of a whole file",
            )
        self.lengths.append(number)

    def array(self) -> Ints:
        """Returns the lengths."""
        return np.frombuffer(self.lengths, dtype=np.int64) if self.lengths else NONE


def refuse(value: object, what: str, place: str) -> NoReturn:
    """Raises `PlanError` for a value that is no length."""
    if value is None or value == "":
        raise PlanError(
            f"{what} has no value {place}",
            "one length for each sample is needed",
            "leave out samples without one",
        )
    if isinstance(value, str):
        raise PlanError(
            f"{what} has text {place}",
            f"'{short(value)}' is no length",
            f"one whole number for each sample is expected: {TOKENISE}",
        )
    raise PlanError(
        f"{what} has {short(value)} {place}",
        "the length of a sample is a whole number",
        "give one whole number, or one list, for each sample",
    )


def chosen(names: Sequence[str], column: str | None, what: str) -> str:
    """Returns the column to read; raises `PlanError` naming those that there are."""
    if column is not None:
        if column in names:
            return column
        close = difflib.get_close_matches(column, names, n=1)
        raise PlanError(
            f"{what} has no column {column!r}",
            f"its columns are {listed(names)}" if names else "it has no columns",
            f"did you mean {close[0]}?" if close else "give one with --lengths-column NAME",
        )
    if len(names) == 1:
        return names[0]
    for usual in _USUAL:
        if usual in names:
            return usual
    raise PlanError(
        f"{what} does not say which column holds the lengths",
        f"its columns are {listed(names)}" if names else "it has no columns",
        "give one with --lengths-column NAME",
    )


def no_column(column: str | None, what: str, why: str) -> None:
    """Raises `PlanError` when a column was named where there are none."""
    if column is not None:
        raise PlanError(f"--lengths-column has no effect on {what}", why, "leave it out")


def listed(names: Sequence[str]) -> str:
    """Returns the first of some names, and how many more there are."""
    shown = ", ".join(short(name) for name in names[:_MOST_NAMES])
    return f"{shown} and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else shown


def short(value: object) -> str:
    """Returns a value as an error shows it: on one line, and not all of a document."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    if isinstance(value, bool):
        return str(value).lower()
    text = " ".join(printable(str(value)).split())
    return text if len(text) <= 40 else f"{text[:37]}..."


def sentence(error: BaseException) -> str:
    """Returns the first line of what a library says, which may be long."""
    said = printable(str(error).partition("\n")[0]).strip()[:_MOST_SAID].rstrip(".")
    return said or type(error).__name__
