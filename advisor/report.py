"""The advice on one screen: the verdict first, then the code to paste, the reasons, the figures.

Everything that a person wrote (names, paths, messages) is set as plain text, never as markup, and
without control characters. There is no colour when the output is piped: rich sees to that.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from advisor import shapes_report, wording
from advisor.profiler.preset_table import Preset
from advisor.profiler.records import (
    Advice,
    Config,
    Fix,
    Interval,
    Shapes,
    Trial,
    TrialKind,
    TrialStatus,
)
from advisor.profiler.units import (
    brief_duration,
    config_name,
    count,
    duration,
    parameters,
    printable,
    ratio,
    size,
)
from advisor.stored import StoredTrial

# What a status is called in the table, and its colour.
_STATUS = {
    TrialStatus.OK: ("ok", "green"),
    TrialStatus.FAILED_TO_COMPILE: ("failed", "red"),
    TrialStatus.CRASHED: ("crashed", "red"),
    TrialStatus.OUT_OF_MEMORY: ("no memory", "red"),
    TrialStatus.TIMED_OUT: ("timed out", "red"),
    TrialStatus.CUT_OFF: ("cut off", "yellow"),
    TrialStatus.DISAGREES: ("disagrees", "red"),
    TrialStatus.SKIPPED: ("skipped", "dim"),
}
_NOT_TRIED = ("not tried", "dim")
_MOST_FIXES = 4


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: a configuration (None is eager), its trial, and what became of it."""

    config: Config | None
    trial: Trial | None
    warm_start_s: float | None
    total_s: Interval | None
    why_not: str
    advised: bool


def verdict(advice: Advice) -> str:
    """Returns the verdict in one line of plain text."""
    planned = count(advice.steps)
    if not advice.enable:
        total = duration(advice.eager_total_s.median)
        steps = "step" if advice.steps == 1 else "steps"
        return f"STAY EAGER for these {planned} {steps} ({total}): {_why_stay(advice)}."
    parts = []
    if advice.speedup is not None:
        parts.append(
            f"{advice.speedup.median:.2f}x faster "
            f"({advice.speedup.low:.2f}-{advice.speedup.high:.2f})"
            + (f" on {advice.scaling.world_size:,} ranks" if advice.scaling else "")
        )
    if advice.break_even_step is not None:
        parts.append(f"pays back after step {count(advice.break_even_step)} of {planned}")
    if advice.saved_s is not None:
        whole = duration(advice.eager_total_s.median)
        parts.append(f"saves {duration(advice.saved_s.median)} of {whole}")
    return "ENABLE torch.compile: " + ", ".join(parts or ["it pays for this plan"]) + "."


def _why_stay(advice: Advice) -> str:
    """Returns in a few words why eager is best; the reasons say it with all numbers."""
    tried = [trial for trial in advice.trials if trial.kind is TrialKind.COMPILE]
    tried = [trial for trial in tried if trial.status is not TrialStatus.SKIPPED]
    if not tried:
        return "no configuration was worth measuring"
    if advice.break_even_step is not None and advice.break_even_step > advice.steps:
        return f"compiling pays back after step {count(advice.break_even_step)} only"
    if any(trial.status is TrialStatus.OK for trial in tried):
        return "nothing that was tried saves time for sure"
    return "nothing that was tried can be used"


def rows(advice: Advice) -> list[Row]:
    """Returns the table's lines: eager, the advised configuration, the others by their total."""
    measured: dict[Config | None, Trial] = {}
    warm: dict[Config | None, float] = {}
    for one in advice.trials:
        if one.kind is TrialKind.WARM:
            if one.warm_start_s is not None:
                warm[one.config] = one.warm_start_s
        elif one.kind is TrialKind.ONE_FIRST:
            continue
        elif one.status is not TrialStatus.SKIPPED or one.config not in measured:
            measured[None if one.kind is TrialKind.EAGER else one.config] = one
    rejected = {alternative.config: alternative for alternative in advice.alternatives}
    advised = _as_measured(advice, measured) if advice.enable else None
    others = [config for config in (*measured, *rejected) if config not in (None, advised)]
    found = []
    for config in dict.fromkeys((None, advised, *others)):
        trial = measured.get(config)
        alternative = rejected.get(config)
        total = alternative.total_s if alternative else None
        if config is None:
            total = advice.eager_total_s
        elif config == advised:
            total = advice.advised_total_s
        why_not = alternative.why_not if alternative else ""
        if not why_not and trial is not None and trial.failure is not None:
            why_not = trial.failure.message
        own_warm = trial.warm_start_s if trial else None
        found.append(
            Row(
                config=config,
                trial=trial,
                warm_start_s=own_warm if own_warm is not None else warm.get(config),
                total_s=total,
                why_not=why_not,
                advised=config == advised,
            )
        )
    return sorted(found, key=_place)


def _as_measured(advice: Advice, measured: Container[Config | None]) -> Config | None:
    """Returns the advised configuration as its trial knew it: `fullgraph` is only advised."""
    if advice.config is None or advice.config in measured:
        return advice.config
    return replace(advice.config, fullgraph=False)


class Verbatim(Text):
    """Lines to copy from the terminal: `print_plain` neither wraps nor cuts them."""


def parts(advice: Advice) -> list[RenderableType]:
    """Returns the report as parts to print one below the other."""
    head = Text(verdict(advice), style="bold green" if advice.enable else "bold yellow")
    found: list[RenderableType] = [head]
    if advice.enable and advice.code.strip():
        code = textwrap.indent(printable(advice.code.strip("\n")), "    ")
        found += [Text(), Verbatim(code, style="bold")]
    found += section("Why", advice.reasons)
    lines = rows(advice)
    found += [Text(), _table([row for row in lines if _has_figures(row) or not row.why_not])]
    found += section("Why not", _why_not(lines[advice.enable :]))
    found += _lengths(advice.shapes)
    found += section("Could be better", _fixes(advice))
    found += section("Beware", advice.warnings, "yellow")
    found += _reproductions(advice)
    found += [Text(), Text("\n".join(_footer(advice)), style="dim")]
    return found


def print_advice(advice: Advice, file: IO[str] | None = None, *, width: int | None = None) -> None:
    """Writes the report to `file` (standard output when None), as wide as the terminal."""
    print_plain(*parts(advice), file=file, width=width)


def print_plain(
    *content: RenderableType, file: IO[str] | None = None, width: int | None = None
) -> None:
    """Writes `content` without the blanks that fill lines up to the width of the terminal."""
    console = Console(file=file, width=width, highlight=False, markup=False, emoji=False)
    with console.capture() as captured:
        for part in content:
            console.print(part, soft_wrap=isinstance(part, Verbatim))
    console.file.write(re.sub(r" +$", "", captured.get(), flags=re.MULTILINE))


def trials_table(stored: Iterable[StoredTrial]) -> RenderableType:
    """Returns stored trials as a table, one line each, in the order given.

    Short enough for 80 columns: the file without its folder, the speedup without its interval.
    """
    table = grid()
    table.add_column("When", no_wrap=True)
    for title in ("Job", "Measured"):
        table.add_column(title, overflow="fold")
    table.add_column("Status", no_wrap=True)
    for title in ("Step", "Speedup", "Cold", "Wall"):
        table.add_column(title, no_wrap=True, justify="right")
    for one in stored:
        trial = one.trial
        name = config_name(trial.config)
        if trial.kind is TrialKind.WARM:
            name += ", warm"
        text, colour = _STATUS[trial.status]
        table.add_row(
            Text(printable(one.created[5:16].replace("T", " "))),
            Text(printable(one.target.rpartition("/")[2])),
            Text(printable(name)),
            Text(text, style=colour),
            _median(trial.step_s or trial.eager_step_s),
            f"{trial.speedup.median:.2f}x" if trial.speedup else "",
            _seconds(trial.cold_start_s),
            _seconds(trial.wall_s or None),
        )
    return table


def presets_table(presets: Mapping[str, Preset]) -> RenderableType:
    """Returns the built-in training jobs as a table, in the order given."""
    table = grid()
    table.add_column("Preset", no_wrap=True)
    table.add_column("Parameters", justify="right")
    table.add_column("Batch", justify="right")
    table.add_column("Length", justify="right")
    table.add_column("Tasks, the default first", overflow="fold")
    for name, preset in presets.items():
        table.add_row(
            f"hf:{name}",
            parameters(preset.parameters_m * 1e6),
            count(preset.size.batch_size),
            count(preset.size.length),
            ", ".join(preset.tasks),
        )
    return table


def _untried(row: Row) -> bool:
    return row.trial is None or row.trial.status is TrialStatus.SKIPPED


def _has_figures(row: Row) -> bool:
    """Returns whether a row of the table says more than "skipped", which "Why not" says too."""
    return not _untried(row) or row.total_s is not None


def _place(row: Row) -> tuple[bool, bool, bool, float]:
    total = row.total_s.median if row.total_s else float("inf")
    return (row.config is not None, not row.advised, _untried(row), total)


def section(title: str, lines: Iterable[str], style: str = "") -> Iterator[RenderableType]:
    """Yields sentences as a list under a title; nothing where there are none."""
    found = tuple(lines)
    if found:
        yield Text()
        yield Text(title, style="bold")
        yield from sentences(found, style)


def sentences(lines: Iterable[str], style: str = "") -> Iterator[RenderableType]:
    """Yields sentences as a list; nothing where there are none."""
    listed = Table.grid(padding=(0, 1), expand=False)
    listed.add_column(no_wrap=True)
    listed.add_column(overflow="fold")
    for line in lines:
        listed.add_row(Text("  -", style=style), Text(printable(line), style=style))
    if listed.row_count:
        yield listed


def grid() -> Table:
    """Returns an empty table as all of ours look."""
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")


def _table(lines: Sequence[Row]) -> Table:
    table = grid()
    eager_step_s = _eager_step_s(lines)
    table.add_column("Configuration", overflow="fold", min_width=16)
    table.add_column("Status", overflow="fold")
    for title in ("Step", "Speedup", "Cold", "Warm", "Total"):
        table.add_column(title, no_wrap=True, justify="right")
    for row in lines:
        trial = row.trial
        text, colour = _STATUS[trial.status] if trial else _NOT_TRIED
        if row.advised:
            text, colour = f"{text}, best", "bold green"
        compiled = row.config is not None and trial is not None
        table.add_row(
            Text(printable(config_name(row.config)), style="bold" if row.advised else ""),
            Text(text, style=colour),
            _median((trial.step_s if compiled else eager_step_s) if trial else None),
            ratio(trial.speedup) if trial and trial.speedup else "",
            _seconds(trial.cold_start_s if compiled and trial else None),
            _seconds(row.warm_start_s),
            ("~" if _untried(row) and row.total_s else "") + _median(row.total_s),
        )
    return table


def _eager_step_s(lines: Sequence[Row]) -> Interval | None:
    """Returns eager's step time as the first configuration shown was compared with.

    The eager trial's own was measured minutes earlier, when the machine may have been another.
    """
    found = [row.trial for row in lines if row.trial is not None]
    compiled = [trial for trial in found if trial.config is not None and trial.eager_step_s]
    return next((trial.eager_step_s for trial in (*compiled, *found)), None)


def _why_not(lines: Sequence[Row]) -> list[str]:
    return _said_once((config_name(row.config), row.why_not) for row in lines if not row.advised)


def _said_once(reasons: Iterable[tuple[str, str]]) -> list[str]:
    """Returns each reason once, with the names of all that it holds for."""
    groups: dict[str, list[str]] = {}
    for name, reason in reasons:
        if reason:
            groups.setdefault(reason, []).append(name)
    return [f"{', '.join(names)}: {reason}" for reason, names in groups.items()]


def _lengths(shapes: Shapes | None) -> Iterator[RenderableType]:
    """Yields what each shape policy would take, or the one reason why none was looked at."""
    if shapes is None:
        return
    if shapes.reason or not shapes.policies:
        yield from section("Lengths", filter(None, (shapes.reason,)))
        return
    yield Text()
    yield Text("Lengths", style="bold")
    yield shapes_report.fill(grid(), shapes)
    yield from sentences(_said_once(shapes_report.why_not(shapes)))


def _fixes(advice: Advice) -> list[str]:
    """Returns the first mends; a model can break a graph in hundreds of places."""
    shown = [_fix(fix) for fix in advice.fixes[:_MOST_FIXES]]
    more = len(advice.fixes) - len(shown)
    return [*shown, f"and {more} more: advise explain {advice.advice_id}"] if more else shown


def _fix(fix: Fix) -> str:
    place = f"{fix.file}:{fix.line}: " if fix.file else ""
    if fix.gain is None:
        return place + fix.what
    kind = "measured" if fix.measured else "estimated"
    return f"{place}{fix.what} ({kind}: {ratio(fix.gain)})"


def _reproductions(advice: Advice) -> Iterator[RenderableType]:
    """Yields the scripts that repeat what failed, in lines that can be copied."""
    failed = [trial for trial in advice.trials if trial.reproduction]
    if failed:
        yield Text()
        yield Text(f"What failed ({wording.REPRODUCTIONS})", style="bold")
    for trial in failed:
        yield Verbatim(printable(f"  - {wording.reproduce(trial)}"))


def _footer(advice: Advice) -> Iterator[str]:
    """Yields what was measured, where, for how long, and where to find it again."""
    subject = printable(advice.target)
    if advice.workload is not None:
        facts = advice.workload
        subject = (
            f"{printable(facts.model_class)}, {parameters(facts.parameters)} parameters, "
            f"{printable(facts.dtype)}"
        )
    place = ""
    if advice.environment is not None:
        env = advice.environment
        where = printable(env.device_name or env.device)
        if env.device == "cpu":
            where += f", {env.cores} cores"
        place = f", on {where}, torch {printable(env.torch)}"
    yield f"Measured in {duration(advice.campaign_s)}: {subject}{place}."
    if advice.money_saved is not None and advice.gpu_hours_saved is not None and advice.enable:
        hours = f"{advice.gpu_hours_saved:.3g} device hours"
        yield f"Saves {hours}, {advice.money_saved:,.2f} at the price given."
    if advice.hand_over is not None:
        yield (
            f"Compile cache {advice.hand_over.bundle_id}, {size(advice.hand_over.bytes)}:"
            f" advise exec {advice.advice_id} -- python train.py"
        )
    yield f"Advice {printable(advice.advice_id)}; see it again: advise show {advice.advice_id}"


def _seconds(value: float | None) -> str:
    return "" if value is None else brief_duration(value)


def _median(interval: Interval | None) -> str:
    return "" if interval is None else brief_duration(interval.median)
