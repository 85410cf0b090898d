"""The section about lengths: aligned, narrow enough, one reason where nothing was compared."""

from __future__ import annotations

import dataclasses
import io

import pytest

from advisor.profiler.records import (
    Advice,
    Config,
    Dynamic,
    Interval,
    PolicyTotal,
    Scope,
    ShapePolicy,
    Shapes,
)
from advisor.report import print_advice

STATIC = Config(scope=Scope.REGIONAL, dynamic=Dynamic.FALSE)


def _around(median: float) -> Interval:
    return Interval(median=median, low=0.97 * median, high=1.03 * median)


BUCKETS = PolicyTotal(
    policy=ShapePolicy.BUCKETS,
    total_s=_around(1200.0),
    compile_s=90.0,
    compiles=4,
    boundaries=(32, 64, 128, 512),
    padding_share=0.118,
    config=STATIC,
)
LONGEST_NAME = PolicyTotal(
    policy=ShapePolicy.MARK_DYNAMIC_BUCKETS,
    total_s=_around(1_330_000.0),
    compile_s=40.0,
    compiles=1,
    boundaries=tuple(range(8, 264, 8)),
    padding_share=0.004,
    config=Config(dynamic=Dynamic.TRUE),
    why_not="takes 3 min more",
)
EAGER = PolicyTotal(
    policy=ShapePolicy.EAGER,
    total_s=_around(1800.0),
    compile_s=0.0,
    compiles=0,
    padding_share=0.384,
    why_not="takes 10 min more",
)
AUTOMATIC = dataclasses.replace(EAGER, policy=ShapePolicy.AUTOMATIC, compiles=2)
FAILED = PolicyTotal(
    policy=ShapePolicy.MARK_DYNAMIC,
    total_s=None,
    compile_s=0.0,
    compiles=0,
    config=Config(dynamic=Dynamic.TRUE),
    why_not="the compiler failed on [bold]\x1b[2Jmul_0[/bold]",
)
SHAPES = Shapes(
    policy=ShapePolicy.BUCKETS,
    boundaries=BUCKETS.boundaries,
    padding_share=0.118,
    padding_share_now=0.384,
    policies=(BUCKETS, LONGEST_NAME, EAGER, AUTOMATIC, FAILED),
)


def _text(shapes: Shapes | None, width: int = 80) -> str:
    advice = Advice(
        advice_id="a1",
        created="2026-11-01T10:00:00Z",
        enable=True,
        target="train.py:build",
        config=STATIC,
        code="model.compile()",
        speedup=_around(1.5),
        compile_s=_around(90.0),
        saved_s=_around(600.0),
        eager_total_s=_around(1800.0),
        advised_total_s=_around(1200.0),
        break_even_step=2000.0,
        p_saves=0.99,
        reasons=(),
        steps=20_000,
        shapes=shapes,
    )
    file = io.StringIO()
    print_advice(advice, file, width=width)
    return file.getvalue()


def _section(shapes: Shapes, width: int = 80) -> list[str]:
    """Returns the lines below the title, up to the blank line before the footer."""
    lines = _text(shapes, width).splitlines()
    start = lines.index("Lengths") + 1
    return lines[start : lines.index("", start)]


def test_policies_are_a_table_aligned_at_80_columns() -> None:
    assert _section(SHAPES)[:5] == [
        "Policy                Buckets        Padding  Compiles      Total",
        "buckets, best               4           12 %         4   20.0 min",
        "mark-dynamic-buckets       32  less than 1 %         1  15.4 days",
        "eager                                   38 %         0   30.0 min",
        "automatic                               38 %         2   30.0 min",
    ]


def test_a_reason_is_said_once_with_every_policy_that_it_holds_for() -> None:
    assert _section(SHAPES)[5:] == [
        "  - mark-dynamic-buckets: takes 3 min more",
        "  - eager, automatic: takes 10 min more",
        r"  - mark-dynamic: the compiler failed on [bold]\x1b[2Jmul_0[/bold]",
    ]


def test_policy_that_failed_in_one_configuration_and_not_in_another_is_told_apart() -> None:
    failed = dataclasses.replace(BUCKETS, config=Config(), total_s=None, why_not="out of memory")
    lines = _section(dataclasses.replace(SHAPES, policies=(BUCKETS, EAGER, failed)), 100)
    assert lines[1].startswith("buckets (regional default dynamic=false), best  ")
    assert "  - buckets (model default): out of memory" in lines
    assert sum("best" in line for line in lines) == 1


def test_eager_is_best_where_no_policy_pays() -> None:
    eager = dataclasses.replace(EAGER, why_not="")
    beaten = dataclasses.replace(BUCKETS, why_not="saves time with 40 % confidence only")
    shapes = dataclasses.replace(SHAPES, policy=ShapePolicy.EAGER, policies=(eager, beaten))
    lines = _section(shapes)
    assert lines[1].startswith("eager, best ")
    assert lines[2].startswith("buckets  ")


def test_padding_that_is_not_known_is_left_blank() -> None:
    unknown = dataclasses.replace(BUCKETS, padding_share=None)
    lines = _section(dataclasses.replace(SHAPES, policies=(unknown,)))
    assert lines[1].split() == ["buckets,", "best", "4", "4", "20.0", "min"]


def test_reason_alone_is_said_where_nothing_was_compared() -> None:
    reason = "All 50 batches that were seen have the same shapes, so there is nothing to choose."
    lines = _section(Shapes(policy=ShapePolicy.STATIC, reason=reason))
    assert " ".join(" ".join(lines).split()) == f"- {reason}"
    assert "Policy" not in _text(Shapes(policy=ShapePolicy.STATIC, reason=reason))


@pytest.mark.parametrize("shapes", [None, Shapes(policy=ShapePolicy.STATIC)])
def test_nothing_is_said_where_nothing_is_known(shapes: Shapes | None) -> None:
    assert "Lengths" not in _text(shapes)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_is_wider_than_the_terminal_nor_coloured(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    long = dataclasses.replace(EAGER, why_not="Compiling for each length " + "takes long " * 20)
    lines = _section(dataclasses.replace(SHAPES, policies=(BUCKETS, LONGEST_NAME, long)), width)
    assert max(map(len, lines)) <= width
    assert "\x1b" not in "".join(lines)
