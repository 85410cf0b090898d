"""Figures as people read and write them: durations, sizes, counts, intervals.

Printing never says more digits than were measured, and reading gives one clear sentence for what
is not understood.
"""

from __future__ import annotations

import math
import re

from advisor.profiler.errors import PlanError
from advisor.profiler.records import Config, Dynamic, Interval

_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_BYTES = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(ms|s|min|m|h|d)?", re.IGNORECASE)
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}
_COUNT = re.compile(r"(\d+(?:\.\d*)?(?:e\d{1,2})?|\.\d+)\s*([kmgbt]?)", re.IGNORECASE)
_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([kmgt]?)i?b?", re.IGNORECASE)


def parse_duration(text: str, option: str) -> float:
    """Returns the seconds that `text` names: `90`, `90s`, `5m`, `1.5h`.

    Raises `PlanError` naming the option when it is no duration.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise PlanError(
            f"{option} {text!r} is not a duration", mend="seconds as in 90, or 90s, 5m, 1h"
        )
    return float(match[1]) * _SECONDS[(match[2] or "s").lower()]


def parse_count(text: str, option: str) -> float:
    """Returns the number that `text` names: `110M`, `1.3B`, `8e9`, `350000`.

    Raises `PlanError` naming the option when it is none, or not above 0.
    """
    match = _COUNT.fullmatch(text.strip())
    value = float(match[1]) * _COUNTS[match[2].lower()] if match else 0.0
    if value <= 0 or value > 1e14:
        raise PlanError(f"{option} {text!r} is not a number", mend="a number as in 110M or 1.3B")
    return value


def parse_size(text: str, option: str) -> int:
    """Returns the bytes that `text` names: `800M`, `4G`, `4GiB`, or a plain number of bytes.

    Units are powers of 1,024. Raises `PlanError` naming the option when it is no size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise PlanError(f"{option} {text!r} is not a size", mend="a size as in 800M or 4G")
    size = float(match[1]) * _BYTES[match[2].lower()]
    if size > 2**60:
        raise PlanError(f"{option} {text!r} is out of range", "more memory than any machine has")
    return int(size)


def duration(seconds: float) -> str:
    """Returns a duration in two units at most: `81.2 ms`, `6.9 s`, `6 min 10 s`, `3 h 5 min`."""
    if seconds < 0:
        return "-" + duration(-seconds)
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} µs"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    for limit, unit, name, sub, sub_name in (
        (3600 - 0.5, 60, "min", 1, "s"),
        (2 * 86_400 - 30, 3600, "h", 60, "min"),
        (math.inf, 86_400, "days", 3600, "h"),
    ):
        if seconds < limit:
            whole, rest = divmod(round(seconds / sub), unit // sub)
            return f"{count(whole)} {name}" + (f" {rest} {sub_name}" if rest else "")
    raise AssertionError("no number is beyond infinity")


def brief_duration(seconds: float) -> str:
    """Returns a duration in one unit, for tables: `81.2 ms`, `62 s`, `30.6 min`, `3.1 h`."""
    if abs(seconds) < 99.5:
        return duration(seconds) if abs(seconds) < 59.5 else f"{seconds:.0f} s"
    for limit, unit, name in ((100 * 60, 60, "min"), (100 * 3600, 3600, "h")):
        if abs(seconds) < limit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds / 86_400:,.1f} days"


def count(number: float) -> str:
    """Returns a number of steps or the like with thousands marked: `20,000`; `1.5e+13` beyond."""
    return f"{round(number):,}" if abs(number) < 1e13 else f"{number:.3g}"


def number_of(amount: int, noun: str) -> str:
    """Returns a number of things with their noun: `1 graph`, `2,000 graphs`."""
    return f"{count(amount)} {noun}" + ("" if amount == 1 else "s")


def percent(share: float) -> str:
    """Returns a share as whole percent: `8 %`; what is not nothing never reads as 0 %."""
    found = 100 * share
    return "less than 1 %" if 0 < found < 0.5 else f"{found:.0f} %"


def size(number: float) -> str:
    """Returns bytes in the largest unit that keeps a figure before the point: `3.2 GiB`."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(number) < 1024:
            return f"{number:.0f} {unit}" if unit == "bytes" else f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.3g} TiB"


def parameters(number: float) -> str:
    """Returns a number of parameters as the field writes it: `110 M`, `1.24 B`."""
    for limit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g} {name}"
    return f"{number:.0f}"


def ratio(interval: Interval) -> str:
    """Returns a speedup with its interval: `1.31x (1.28-1.34)`."""
    return f"{interval.median:.2f}x ({interval.low:.2f}-{interval.high:.2f})"


def config_name(config: Config | None) -> str:
    """Returns the short name of a configuration: `regional default dynamic=true`, or `eager`."""
    if config is None:
        return "eager"
    parts = [config.scope.value, config.mode.value]
    if config.order is not None:
        parts.append(config.order.value)
    if config.dynamic is not Dynamic.AUTO:
        parts.append(f"dynamic={config.dynamic.value}")
    if config.fullgraph:
        parts.append("fullgraph")
    if config.backend != "inductor":
        parts.append(config.backend)
    # The setting alone tells: no two modules of torch have one of the same name.
    parts.extend(f"{name.rpartition('.')[2]}={value}" for name, value in config.options)
    return " ".join(parts)


def printable(text: str) -> str:
    """Returns a person's text without the control characters that would steer a terminal.

    Line ends and tabs stay; every other control character is shown as `\\x1b` and the like.
    """
    return "".join(
        character
        if character in "\n\t" or character.isprintable()
        else character.encode("unicode_escape").decode("ascii")
        for character in text.replace("\r\n", "\n")
    )
