"""A diagnosis as text: what is wrong, then one block for each mend, the one that pays most first.

As the report of an advice, everything that a person wrote is set as plain text without control
characters, and there is no colour when the output is piped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from advisor.cause_names import cause_name, plain_mend, settings_instead
from advisor.profiler.records import (
    Diagnosis,
    Fix,
    FixKind,
    Interval,
    Trial,
    TrialKind,
    TrialStatus,
)
from advisor.profiler.units import (
    config_name,
    count,
    duration,
    parameters,
    printable,
    ratio,
)
from advisor.report import Verbatim, grid, print_plain, section, sentences

# A model can break a graph in hundreds of places; the JSON holds all of them.
_MOST_BLOCKS = 20
# What two decimals cannot show.
_VISIBLE = 0.005
_COLOURS = {
    FixKind.GRAPH_BREAK: "yellow",
    FixKind.RECOMPILE: "yellow",
    FixKind.COMPILER: "red",
    FixKind.JOB: "cyan",
}


def print_diagnosis(
    diagnosis: Diagnosis, root: Path, file: IO[str] | None = None, *, width: int | None = None
) -> None:
    """Writes a diagnosis to `file` (standard output when None), as wide as the terminal.

    Files below `root` are named from there.
    """
    print_plain(*parts(diagnosis, root), file=file, width=width)


def parts(diagnosis: Diagnosis, root: Path) -> list[RenderableType]:
    """Returns the text as parts to print one below the other."""
    found: list[RenderableType] = [Text(printable(diagnosis.target), style="bold")]
    found += sentences(diagnosis.summary)
    found += _measured_settings(diagnosis)
    shown = diagnosis.fixes[:_MOST_BLOCKS]
    for number, fix in enumerate(shown, 1):
        found += _block(number, fix, root)
    more = len(diagnosis.fixes) - len(shown)
    if more:
        found += [Text(), Text(f"And {count(more)} more: {_again(diagnosis)} --json")]
    found += section("Beware", diagnosis.warnings, "yellow")
    found += [Text(), Text("\n".join(_footer(diagnosis)), style="dim")]
    return found


def short_path(file: str, root: Path) -> str:
    """Returns a file's name from `root` when it lies below it, else as it is."""
    path = Path(file)
    return str(path.relative_to(root)) if path.is_relative_to(root) else file


def place(file: str, line: int, root: Path) -> str:
    """Returns `file:line`, without the line when it is not known; "" without a file."""
    if not file:
        return ""
    return printable(short_path(file, root)) + (f":{line}" if line > 0 else "")


def _measured_settings(diagnosis: Diagnosis) -> Iterator[RenderableType]:
    """Yields the table of the trials, where more than one configuration was measured."""
    tried = [trial for trial in diagnosis.trials if trial.kind is TrialKind.COMPILE]
    tried = [trial for trial in tried if trial.status is not TrialStatus.SKIPPED]
    if len(tried) < 2:
        return
    table = grid()
    table.add_column("Measured", overflow="fold", min_width=27)
    table.add_column("Speedup", no_wrap=True, justify="right")
    for title in ("Graphs", "Covered", "Breaks", "Again"):
        table.add_column(title, no_wrap=True, justify="right")
    for trial in tried:
        table.add_row(*(Text(cell) for cell in _cells(trial)))
    yield Text()
    yield table


def _cells(trial: Trial) -> Iterator[str]:
    yield printable(config_name(trial.config))
    if trial.status is not TrialStatus.OK:
        yield trial.status.value.replace("_", " ").lower()
        return
    yield ratio(trial.speedup) if trial.speedup else ""
    yield "" if trial.graphs is None else count(trial.graphs)
    yield "" if trial.coverage is None else f"{trial.coverage:.0%}"
    yield count(len(trial.graph_breaks))
    yield count(sum(met.count for met in trial.recompiles))


def _block(number: int, fix: Fix, root: Path) -> Iterator[RenderableType]:
    """Yields one mend: what is wrong and where, how often, what it costs, what to do about it."""
    yield Text()
    title = f"{number}. {printable(cause_name(fix.kind, fix.cause))}"
    yield Text(title, style=f"bold {_COLOURS[fix.kind]}")
    where = place(fix.file, fix.line, root)
    if where:
        # Not wrapped: a terminal makes the whole of it a link.
        yield Verbatim(f"   {where}", style="bold")
    if fix.code:
        yield Verbatim(f"       {printable(fix.code)}")
    facts = Table.grid(padding=(0, 1), expand=False)
    facts.add_column(no_wrap=True, min_width=9)
    facts.add_column(overflow="fold")
    for name, text in _lines(fix):
        facts.add_row(Text(f"   {name}", style="dim"), Text(printable(text)))
    yield facts
    if fix.link:
        yield Verbatim(f"   Page   {printable(fix.link)}", style="dim")


def _lines(fix: Fix) -> Iterator[tuple[str, str]]:
    often = _how_often(fix)
    if often:
        yield "Met", often
    costs = _costs(fix)
    if costs:
        yield "Costs", costs
    if fix.gain is not None:
        yield "Gain", _gain(fix, fix.gain)
    yield "Mend", plain_mend(fix)
    for line in settings_instead(fix):
        yield "Or set", line


def _gain(fix: Fix, gain: Interval) -> str:
    how = "measured with the setting below" if fix.options else "measured"
    kind = how if fix.measured else "an estimate"
    if max(abs(gain.low - 1), abs(gain.high - 1)) < _VISIBLE:
        return f"none to speak of, {kind}"
    return f"{ratio(gain)} as fast, {kind}"


def _how_often(fix: Fix) -> str:
    words = []
    if fix.hits_per_step is not None and math.isfinite(fix.hits_per_step):
        words.append(_each_step(fix.hits_per_step))
    if fix.count is not None:
        times = "once" if fix.count == 1 else f"{count(fix.count)} times"
        if fix.kind is FixKind.RECOMPILE:
            words.append(f"{times} in the trial")
        else:
            words.append(f"{times} while compiling")
    return ", ".join(words)


def _each_step(hits: float) -> str:
    """Returns how often a step comes by; a figure well below one is turned round."""
    if hits >= 0.55:
        whole = abs(hits - round(hits)) < 0.05
        times = count(hits) if whole or hits >= 10 else f"{hits:.1f}"
        return "once a step" if times == "1" else f"{times} times a step"
    return f"once in {count(1 / hits)} steps" if hits > 0 else "in no step after compiling"


def _costs(fix: Fix) -> str:
    words = []
    if fix.lost_s is not None:
        words.append(f"{duration(fix.lost_s)} of compiling")
    if fix.money_lost is not None:
        words.append(f"{fix.money_lost:,.2f} at the price given")
    return ", ".join(words)


def _again(diagnosis: Diagnosis) -> str:
    return f"advise explain {printable(diagnosis.advice_id or diagnosis.target)}"


def _footer(diagnosis: Diagnosis) -> Iterator[str]:
    """Yields what was measured and where, and how to see it again."""
    facts, env = diagnosis.workload, diagnosis.environment
    subject = []
    if facts is not None:
        subject.append(f"{printable(facts.model_class)}, {parameters(facts.parameters)} parameters")
    if env is not None:
        where = printable(env.device_name or env.device)
        subject.append(f"on {where}, torch {printable(env.torch)}")
    if subject:
        yield f"Measured: {', '.join(subject)}."
    if diagnosis.advice_id:
        yield f"See it again: {_again(diagnosis)} (--json, --sarif)"
