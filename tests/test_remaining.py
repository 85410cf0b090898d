"""How much longer a compile probably takes."""

from __future__ import annotations

import pytest

from advisor.models.remaining import remaining_s
from advisor.profiler.records import Interval

BELIEVED = Interval(median=40.0, low=20.0, high=80.0)


def test_before_it_begins_the_median_is_left() -> None:
    assert remaining_s(BELIEVED, 0.0) == pytest.approx(40.0)


def test_less_is_left_at_first_and_never_nothing() -> None:
    left = [remaining_s(BELIEVED, elapsed) for elapsed in (0, 10, 20, 30, 40, 60, 90)]
    assert all(each is not None and each > 0 for each in left)
    assert left[0] > left[1] > left[2] > left[3]  # type: ignore[operator]


def test_what_was_never_believed_possible_is_not_guessed() -> None:
    assert remaining_s(BELIEVED, 1e5) is None
    assert remaining_s(Interval(median=40.0, low=40.0, high=40.0), 10.0) is None
