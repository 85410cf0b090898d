"""Figures as people read and write them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.profiler.errors import PlanError
from advisor.profiler.records import Config, Dynamic, Mode, Scope
from advisor.profiler.units import (
    config_name,
    count,
    duration,
    parameters,
    parse_duration,
    parse_size,
    printable,
    size,
)

UNIT_S = {"µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "days": 86_400.0}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("90s", 90),
        ("5m", 300),
        ("5 min", 300),
        ("1.5h", 5400),
        (".5H", 1800),
        ("1d", 86_400),
    ],
)
def test_duration_is_read(text: str, seconds: float) -> None:
    assert parse_duration(text, "--budget") == seconds


@pytest.mark.parametrize("text", ["", "5x", "-5", "nan", "inf", "1h30m", "m", "1e3"])
def test_no_duration_is_refused_by_its_option(text: str) -> None:
    with pytest.raises(PlanError, match=r"--budget .* is not a duration"):
        parse_duration(text, "--budget")


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("4G", 4 << 30),
        ("4GiB", 4 << 30),
        ("4gb", 4 << 30),
        ("800M", 800 << 20),
        ("0.5T", 1 << 39),
        ("7", 7),
    ],
)
def test_size_is_read(text: str, size_bytes: int) -> None:
    assert parse_size(text, "--memory-limit") == size_bytes


@pytest.mark.parametrize("text", ["", "4X", "-4G", "G", "1e9", "4 G B", "9999999T"])
def test_no_size_is_refused_by_its_option(text: str) -> None:
    with pytest.raises(PlanError, match="--memory-limit"):
        parse_size(text, "--memory-limit")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 µs"),
        (2.5e-5, "25 µs"),
        (0.0812, "81.2 ms"),
        (0.9996, "1.0 s"),
        (6.94, "6.9 s"),
        (9.96, "10 s"),
        (59.6, "1 min"),
        (370.0, "6 min 10 s"),
        (3599.8, "1 h"),
        (11_100.0, "3 h 5 min"),
        (200_000.0, "2 days 8 h"),
        (-90.0, "-1 min 30 s"),
    ],
)
def test_duration_is_written(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@given(st.floats(min_value=1e-6, max_value=1e9))
def test_written_duration_is_within_five_percent(seconds: float) -> None:
    parts = re.findall(r"([\d.,e+]+) (µs|ms|s|min|h|days)", duration(seconds))
    read = sum(float(number.replace(",", "")) * UNIT_S[unit] for number, unit in parts)
    assert read == pytest.approx(seconds, rel=0.05)
    assert all(float(number.replace(",", "")) < 1000 or unit == "days" for number, unit in parts)


def test_counts_sizes_and_parameters_are_written() -> None:
    assert count(20_000.4) == "20,000"
    assert count(1.5e13) == "1.5e+13"
    assert size(34_000_000) == "32.4 MiB"
    assert size(900) == "900 bytes"
    assert size(3 * 2**41) == "6 TiB"
    assert parameters(109_514_298) == "110 M"
    assert parameters(1_235_814_400) == "1.24 B"
    assert parameters(12) == "12"


def test_configuration_is_named_by_what_differs() -> None:
    assert config_name(None) == "eager"
    assert config_name(Config()) == "model default"
    config = Config(
        scope=Scope.REGIONAL,
        mode=Mode.MAX_AUTOTUNE,
        dynamic=Dynamic.FALSE,
        fullgraph=True,
        backend="cudagraphs",
        options=(("a", "1"),),
    )
    assert config_name(config) == "regional max-autotune dynamic=false fullgraph cudagraphs a=1"


@given(st.text())
def test_printable_text_cannot_steer_a_terminal(text: str) -> None:
    shown = printable(text)
    assert all(character in "\n\t" or character.isprintable() for character in shown)
    shown.encode()


def test_printable_text_keeps_what_can_be_read() -> None:
    assert printable("Größe 模型 é\n\tok") == "Größe 模型 é\n\tok"
    assert printable("\x1b[31m\u202e") == r"\x1b[31m\u202e"
