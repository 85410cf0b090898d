"""A mend for every cause, said with what was met."""

from __future__ import annotations

import pytest

from advisor.profiler.mends import break_mend, mends, recompile_mend
from advisor.profiler.records import (
    GraphBreak,
    GraphBreakCause,
    Recompile,
    RecompileCause,
    Trial,
    TrialKind,
    TrialStatus,
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


def test_a_place_is_mended_once_and_the_dearest_recompile_comes_first() -> None:
    met = GraphBreak(cause=GraphBreakCause.SCALAR_READ, reason="", file="a.py", line=3)
    cheap = Recompile(cause=RecompileCause.SHAPE, reason="s0", file="a.py", line=5, lost_s=1.0)
    dear = Recompile(cause=RecompileCause.STRIDE, reason="s1", file="a.py", line=6, lost_s=9.0)
    trial = Trial(
        trial_id="t",
        kind=TrialKind.COMPILE,
        status=TrialStatus.OK,
        graph_breaks=(met,),
        recompiles=(cheap, dear),
    )
    assert [fix.line for fix in mends([trial, trial])] == [3, 6, 5]
