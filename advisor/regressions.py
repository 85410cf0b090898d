"""What has become worse than a baseline says, and what better: one sentence each.

Pure. A line that only moved, or was only rewritten, is no difference.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rich.console import RenderableType
from rich.text import Text

from advisor.baseline import (
    Baseline,
    BreakSites,
    Compiled,
    Machine,
    RecompileSeen,
    break_lines,
    config_of,
    normal_guard,
)
from advisor.cause_names import cause_name
from advisor.explain import place
from advisor.models.evidence import Evidence
from advisor.profiler.gains import ran_eager
from advisor.profiler.records import Config, FixKind, Interval, Recompile, TrialStatus
from advisor.profiler.units import config_name, count, duration, number_of, printable, ratio
from advisor.report import section

# A gain that fell by no more than this is not called worse, however sure it is: real runs differ
# by as much from process to process.
LEAST_LOSS = 0.03
# Coverage that fell by more than this is worth a look.
_LEAST_UNCOVERED = 0.05
# Two lines that are this alike are one line, rewritten (difflib's ratio).
_ALIKE = 0.6
_RAN = (TrialStatus.OK, TrialStatus.DISAGREES)
_ENDS = {
    TrialStatus.FAILED_TO_COMPILE: "does not compile",
    TrialStatus.CRASHED: "crashes",
    TrialStatus.OUT_OF_MEMORY: "runs out of memory",
    TrialStatus.TIMED_OUT: "takes too long",
    TrialStatus.CUT_OFF: "takes too long",
    TrialStatus.DISAGREES: "does not agree with eager",
}

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What is worse and better than the baseline, and what makes that less sure: sentences."""

    worse: tuple[str, ...] = ()
    better: tuple[str, ...] = ()
    beware: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """One configuration then and now; `root` and `folder` say how its files are named."""

    before: Compiled
    now: Compiled
    evidence: Evidence
    folder: Path
    root: Path


def compare(
    before: Baseline, now: Baseline, evidence: Sequence[Evidence], folder: Path, root: Path
) -> Comparison:
    """Returns how the configurations that both know differ.

    `evidence` is what `now` was made of; `folder` is that of the baseline, and files below `root`
    are named from there.
    """
    worse: list[str] = []
    better: list[str] = []
    beware = list(_elsewhere(before.environment, now.environment))
    known = {config_of(one): one for one in before.configurations}
    of_config = {one.config: one for one in evidence}
    for one in now.configurations:
        config = config_of(one)
        if config not in known or config not in of_config:
            continue
        pair = _Pair(
            before=known[config], now=one, evidence=of_config[config], folder=folder, root=root
        )
        named = _named(config, len(now.configurations) > 1)
        worse += map(named, _worse(pair, same_machine=not beware))
        better += map(named, _better(pair, same_machine=not beware))
    for one in now.configurations:
        if config_of(one) in known:
            beware += _less_covered(known[config_of(one)], one)
    return Comparison(worse=tuple(worse), better=tuple(better), beware=tuple(beware))


def parts(
    found: Comparison, now: Baseline, path: Path, advice_id: str, *, written: bool = False
) -> list[RenderableType]:
    """Returns a comparison as parts to print one below the other, the verdict first."""
    name = printable(str(path))
    if written:
        head = Text(f"Wrote {name}.", style="bold")
    elif found.worse:
        head = Text(
            f"WORSE than {name}: {number_of(len(found.worse), 'regression')}.", style="bold red"
        )
    else:
        head = Text(f"Nothing worse than {name}.", style="bold green")
    keep = () if written or not found.better else ("Run with --update to keep it so.",)
    return [
        head,
        *section("Worse", found.worse, "red"),
        *section("Better", (*found.better, *keep), "green"),
        *section("Beware", found.beware, "yellow"),
        *section("Measured", tuple(map(_state, now.configurations))),
        Text(),
        Text(f"What each mend would bring: advise explain {printable(advice_id)}", style="dim"),
    ]


def _state(one: Compiled) -> str:
    """Returns how a configuration stands now, in one line."""
    name = config_name(config_of(one))
    if one.status not in _RAN:
        return f"{name} {_ENDS.get(one.status, one.status.value.lower())}"
    places = sum(site.sites for site in one.graph_breaks)
    figures = [
        f"{_ratio(one.speedup)} as fast as eager" if one.speedup else "",
        "" if one.graphs is None else number_of(one.graphs, "graph"),
        "" if one.coverage is None else f"{one.coverage:.0%} of the calls covered",
        number_of(places, "graph break"),
        number_of(len(one.recompiles), "recompile cause"),
        "recompile limit hit" if one.recompile_limit_hit else "",
    ]
    return f"{name}: {', '.join(filter(None, figures))}"


def _named(config: Config, several: bool) -> Callable[[str], str]:
    """Returns what puts the configuration's name before a sentence, where there are several."""
    return (lambda sentence: f"{config_name(config)}: {sentence}") if several else str


def _worse(pair: _Pair, *, same_machine: bool) -> Iterator[str]:
    before, now = pair.before, pair.now
    if now.status is not TrialStatus.OK and before.status is not now.status:
        yield _no_longer(pair)
    if before.status not in _RAN or now.status not in _RAN:
        return
    if _silent(now) and not _silent(before):
        yield _nothing_compiled(now)
    if now.recompile_limit_hit and not before.recompile_limit_hit:
        yield _limit(pair)
    added, _ = _breaks(pair)
    lines = break_lines(pair.evidence.trial.graph_breaks, pair.folder)
    for site, number in added.items():
        places = lines.get((site.cause, site.file, site.code), [])
        where = ", ".join(place(file, line, pair.root) for file, line in places) or site.file
        yield _new_break(site, number, where, more=number < len(places))
    for again in _recompiles(pair)[0]:
        yield _new_recompile(again, pair)
    if same_machine and not _silent(now) and _lower(now.speedup, before.speedup):
        yield (
            f"It gains less, and by more than the noise explains: {_ratio(now.speedup)}, "
            f"{_ratio(before.speedup)} before."
        )


def _better(pair: _Pair, *, same_machine: bool) -> Iterator[str]:
    before, now = pair.before, pair.now
    if before.status is not TrialStatus.OK and now.status is TrialStatus.OK:
        yield "It works now, compiled."
    if before.status not in _RAN or now.status not in _RAN:
        return
    if _silent(before) and not _silent(now):
        yield "It really runs compiled now."
    if before.recompile_limit_hit and not now.recompile_limit_hit:
        yield "It no longer hits the recompile limit."
    for site, number in _breaks(pair)[1].items():
        times = "A graph break is" if number == 1 else f"{count(number)} graph breaks are"
        code = f", `{printable(site.code)}`" if site.code else ""
        yield f"{times} gone: {printable(site.file)}{code}."
    for again in _recompiles(pair)[1]:
        yield f"A recompile is gone: `{printable(again.guard)}`."
    if same_machine and not _silent(before) and _lower(before.speedup, now.speedup):
        yield f"It gains more: {_ratio(now.speedup)}, {_ratio(before.speedup)} before."


def _breaks(pair: _Pair) -> tuple[Counter[BreakSites], Counter[BreakSites]]:
    """Returns the break sites that were added and those that are gone, with their numbers."""

    def counted(sites: Iterable[BreakSites]) -> Counter[BreakSites]:
        return Counter(
            {
                BreakSites(cause=one.cause, file=one.file, code=one.code, sites=1): one.sites
                for one in sites
            }
        )

    def same(one: BreakSites, other: BreakSites) -> bool:
        if one.cause is not other.cause:
            return False
        if one.file != other.file:  # moved to another file as it was
            return bool(one.code) and one.code == other.code
        return _alike(one.code, other.code)

    return _differences(counted(pair.before.graph_breaks), counted(pair.now.graph_breaks), same)


def _recompiles(pair: _Pair) -> tuple[Counter[RecompileSeen], Counter[RecompileSeen]]:
    """Returns the reasons for compiling again that were added, and those that are gone."""

    def same(one: RecompileSeen, other: RecompileSeen) -> bool:
        return one.cause is other.cause and _alike(one.guard, other.guard)

    return _differences(Counter(pair.before.recompiles), Counter(pair.now.recompiles), same)


def _differences(
    before: Counter[K], now: Counter[K], same: Callable[[K, K], bool]
) -> tuple[Counter[K], Counter[K]]:
    """Returns what is only in `now` and only in `before`, without what is `same` in both."""
    added, gone = now - before, before - now
    for one in list(added):
        for other in list(gone):
            both = min(added[one], gone[other])
            if both > 0 and same(one, other):
                added[one] -= both
                gone[other] -= both
    return +added, +gone


def _alike(one: str, other: str) -> bool:
    return difflib.SequenceMatcher(None, one, other, autojunk=False).ratio() >= _ALIKE


def _lower(one: Interval | None, other: Interval | None) -> bool:
    """Returns whether a gain is below another by more than their noise, and by a relevant share."""
    if one is None or other is None:
        return False
    return one.high < other.low and one.median < other.median * (1 - LEAST_LOSS)


def _silent(one: Compiled) -> bool:
    """Returns whether a configuration ran eager although it was compiled, without saying so."""
    return ran_eager(one.graphs, one.coverage)


def _no_longer(pair: _Pair) -> str:
    failure = pair.evidence.trial.failure
    words = _ENDS.get(pair.now.status, pair.now.status.value.lower())
    why = f": {printable(failure.message)}" if failure and failure.message else ""
    return f"It {words}{why}."


def _nothing_compiled(now: Compiled) -> str:
    if now.graphs == 0:
        return "Nothing is compiled any more, silently: torch.compile captured no graph."
    return (
        f"Hardly anything is compiled any more, silently: {now.coverage or 0.0:.0%} of the "
        "operator calls run inside compiled graphs."
    )


def _limit(pair: _Pair) -> str:
    most = max(pair.evidence.trial.recompiles, key=lambda met: met.count, default=None)
    where = place(most.file, most.line, pair.root) if most else ""
    at = f" at {where}" if where else ""
    return f"It hits the recompile limit{at}: from then on it runs eager, silently."


def _new_break(site: BreakSites, number: int, where: str, *, more: bool) -> str:
    what = "A new graph break" if number == 1 else f"{count(number)} new graph breaks"
    why = cause_name(FixKind.GRAPH_BREAK, site.cause.value)
    code = f", `{printable(site.code)}`" if site.code else ""
    at = f"one of {where}" if more and number == 1 else where
    return f"{what} at {printable(at) or 'a place not known'}{code}: {_lowered(why)}."


def _new_recompile(again: RecompileSeen, pair: _Pair) -> str:
    met = _met(again, pair.evidence.trial.recompiles)
    where = place(met.file, met.line, pair.root) if met else ""
    why = cause_name(FixKind.RECOMPILE, again.cause.value).rpartition(": ")[2]
    guard = printable(met.reason if met else again.guard)
    cost = ""
    if met is not None:
        times = "once" if met.count == 1 else f"{count(met.count)} times"
        cost = f" ({times}, {duration(met.lost_s)})"
    at = f" at {where}" if where else ""
    return f"A new recompile{at}, {why}: `{guard}` no longer holds{cost}."


def _met(again: RecompileSeen, recompiles: Iterable[Recompile]) -> Recompile | None:
    for met in recompiles:
        if met.cause is again.cause and normal_guard(met.reason) == again.guard:
            return met
    return None


def _elsewhere(before: Machine, now: Machine) -> Iterator[str]:
    """Yields why the gains cannot be compared: another torch, device or number of threads."""
    then, today = [], []
    for name, one, other in (
        ("torch", before.torch, now.torch),
        ("", before.device_name or before.device, now.device_name or now.device),
        ("threads", before.threads, now.threads),
    ):
        if one != other:
            then.append(f"{name} {one}".strip())
            today.append(f"{name} {other}".strip())
    if then:
        yield (
            f"The baseline was measured with {printable(', '.join(then))}, this with "
            f"{printable(', '.join(today))}: the gain is not compared, breaks and recompiles are."
        )


def _less_covered(before: Compiled, now: Compiled) -> Iterator[str]:
    if before.coverage is None or now.coverage is None or _silent(now):
        return
    if now.coverage < before.coverage - _LEAST_UNCOVERED:
        yield (
            f"{now.coverage:.0%} of the operator calls run inside compiled graphs, "
            f"{before.coverage:.0%} before."
        )


def _ratio(figure: Interval | None) -> str:
    return ratio(figure) if figure else "none"


def _lowered(text: str) -> str:
    return text if text[1:2].isupper() else text[:1].lower() + text[1:]
