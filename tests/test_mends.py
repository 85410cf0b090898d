"""A mend for every cause, said with what was met."""

from __future__ import annotations

import pytest

from advisor.profiler.mends import break_mend, recompile_mend
from advisor.profiler.records import (
    GraphBreak,
    GraphBreakCause,
    Recompile,
    RecompileCause,
)


@pytest.mark.parametrize("cause", GraphBreakCause)
def test_every_break_has_a_mend(cause: GraphBreakCause) -> None:
    met = GraphBreak(cause=cause, reason="words", file="a.py", line=3, code="x.item()", hint="URL")
    assert break_mend(met).startswith("`x.item()`: a graph ends here, ")
    assert break_mend(met).endswith("; URL")


@pytest.mark.parametrize("cause", RecompileCause)
def test_every_recompile_has_a_mend(cause: RecompileCause) -> None:
    met = Recompile(cause=cause, reason="self.step == 7", count=8, lost_s=12.0)
    text = recompile_mend(met, limit_hit=True)
    assert text.startswith("compiled 8 times more in 12 s, then not at all: the recompile limit")
    assert "`self.step == 7` no longer held" in text


@pytest.mark.parametrize(
    ("cause", "reason", "words"),
    [
        (RecompileCause.OTHER, "domain == 'news'", "`domain`, a string, changes"),
        (RecompileCause.OTHER, "batch['source'] == \"a 'b'\"", "`batch['source']`, a string"),
        (RecompileCause.OTHER, "mask is None", "`mask` is None in some steps"),
        (RecompileCause.OTHER, "last == True", "`last`, a flag"),
        (RecompileCause.OTHER, "list(dict.keys(extra))[0] == 'a'", "the keys of a dict"),
        (RecompileCause.OTHER, "GLOBAL_STATE changed: num_threads", "a global setting of torch"),
        (RecompileCause.OTHER, "no word known", "a value that the compiled code relies on"),
        (RecompileCause.PYTHON_NUMBER, "level == 3", "`level`, a Python int or float"),
        (RecompileCause.PYTHON_NUMBER, "___stack0 == 2.5", "left at the graph break"),
        (RecompileCause.MODULE_ATTRIBUTE, "self.net.seen == 4", "`self.net.seen`, an attribute"),
        (RecompileCause.MODULE_ATTRIBUTE, "len(self.log) == 4", "`len(self.log)`, an attribute"),
        (
            RecompileCause.OBJECT_IDENTITY,
            "___check_type_id(self.act), type=<class 'torch.nn.GELU'>",
            "`self.act` is another object",
        ),
    ],
)
def test_a_recompile_names_what_changes(cause: RecompileCause, reason: str, words: str) -> None:
    met = Recompile(cause=cause, reason=reason, count=1, lost_s=1.0)
    assert words in recompile_mend(met, limit_hit=False)


def test_a_break_names_what_was_called_and_what_is_lost() -> None:
    met = GraphBreak(
        cause=GraphBreakCause.FOREIGN_CALL,
        reason="Dynamo does not know how to trace the builtin `lib.solve`; as it lies in a loop,"
        " all of `forward` is left to Python",
        code="x = solve(c)",
    )
    text = break_mend(met)
    assert "`lib.solve`" in text
    assert text.endswith("; as it lies in a loop, all of `forward` is left to Python")


@pytest.mark.parametrize(
    ("settles", "variants", "words"),
    [
        (True, 12, "; it settles after 12 variants, and costs no more than that at each start"),
        (True, None, "; it settles, and costs no more than that at each start"),
        (False, None, "; it goes on for as long as the job runs, or until the recompile limit"),
    ],
)
def test_whether_it_comes_to_an_end_is_said(
    settles: bool, variants: int | None, words: str
) -> None:
    met = Recompile(
        cause=RecompileCause.PYTHON_NUMBER, reason="n == 3", settles=settles, variants=variants
    )
    assert recompile_mend(met, limit_hit=False).endswith(words)
