"""How much longer something takes that has taken so long already, from what is believed of it."""

from __future__ import annotations

import math
from statistics import NormalDist

from advisor.profiler.records import Interval

_NORMAL = NormalDist()
# The share of a normal distribution below the upper end of a 90 % interval.
_UPPER = _NORMAL.inv_cdf(0.95)
_SURELY = 1 - 1e-6


def remaining_s(believed: Interval, elapsed_s: float) -> float | None:
    """Returns the median of what is left, given that `elapsed_s` were not enough.

    `believed` is taken as log-normal with that median and that upper end. None once it has taken
    longer than is believed possible: then nothing is known of it.
    """
    if believed.median <= 0 or believed.high <= believed.median:
        return None
    spread = math.log(believed.high / believed.median) / _UPPER
    past = 0.0
    if elapsed_s > 0:
        past = _NORMAL.cdf(math.log(elapsed_s / believed.median) / spread)
    if past >= _SURELY:
        return None
    middle = _NORMAL.inv_cdf(past + (1 - past) / 2)
    return max(0.0, believed.median * math.exp(spread * middle) - elapsed_s)
