"""From rows of the corpus to examples that a prior is fitted on."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from advisor.models import architectures
from advisor.models.corpus import CorpusRow
from advisor.models.devices import Device
from advisor.models.features import Facts
from advisor.profiler.errors import PlanError
from advisor.profiler.records import Config, Dynamic, Mode, Scope
from advisor.profiler.step_counts import StepCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One job and what compiling it brought; `rows` is how many rows say so.

    The targets are logarithms, NaN where no row states them.
    """

    facts: Facts
    log_speedup: float
    log_compile_s: float
    log_memory_ratio: float
    rows: int
    source: str


def examples(rows: Iterable[CorpusRow]) -> tuple[Example, ...]:
    """Returns an example for each job among the training rows that can be fitted to.

    Rows of one job on one device, from several days or versions, are one example: their median.
    """
    usable = [row for row in rows if row.training and row.fit and row.speedup]
    operators, graphs = _by_model(usable, "operators"), _by_model(usable, "graphs")
    groups: dict[tuple[object, ...], list[tuple[CorpusRow, Facts]]] = defaultdict(list)
    for row in usable:
        facts = facts_of(row)
        if facts is None:
            continue
        facts = replace(
            facts,
            operators=facts.operators or operators.get(row.model),
            graphs=facts.graphs if facts.graphs is not None else graphs.get(row.model),
        )
        few = facts.graphs is None or facts.graphs < _FEW_GRAPHS
        # One benchmark keeps its name over the revisions that its source cites.
        whose = row.source.partition("@")[0]
        key = (whose, row.device, architectures.key_of(row), facts.config, few, row.precision)
        groups[key].append((row, facts))
    return tuple(_example(found) for found in groups.values())


_FEW_GRAPHS = 8.0


def facts_of(row: CorpusRow, counts: StepCounts | None = None) -> Facts | None:
    """Returns what a row states of its job, or None where its device or mode is none we know.

    `counts` are those of the row's step, if the corpus does not hold them.
    """
    device = _device(row.device)
    if device is None:
        return None
    if row.mode not in set(Mode) or row.scope not in set(Scope):
        return None
    return Facts(
        device=device,
        family=row.family,
        precision=row.precision or "fp32",
        config=Config(
            mode=Mode(row.mode),
            scope=Scope(row.scope),
            dynamic=Dynamic(row.dynamic) if row.dynamic in set(Dynamic) else Dynamic.AUTO,
        ),
        parameters=row.parameters,
        batch=row.batch,
        length=row.length,
        image=row.image,
        eager_s=row.eager_s,
        operators=row.operators,
        graphs=row.graphs if row.graphs is not None else _plus_one(row.graph_breaks),
        counts=counts or architectures.of_row(row),
    )


def _device(text: str) -> Device | None:
    """Returns the device that a source names, if only in passing: `8x H100`, `H100 class`."""
    try:
        return Device.from_name(text)
    except PlanError:
        pass
    words = re.findall(r"[A-Za-z]*\d+[A-Za-z0-9]*", text)
    for word in words:
        try:
            return Device.from_name(word)
        except PlanError:
            continue
    # So the sources put what is an A100 or an H100 in their place; of the two, the slower.
    return Device.from_name("a100-80gb") if "80gb" in text.lower() else None


def _example(found: Sequence[tuple[CorpusRow, Facts]]) -> Example:
    rows = [row for row, _ in found]
    facts = found[0][1]
    eager = [f.eager_s for _, f in found if f.eager_s]
    if eager:
        facts = replace(facts, eager_s=median(eager))
    return Example(
        facts=facts,
        log_speedup=_log_median([row.speedup for row in rows]),
        log_compile_s=_log_median([row.compile_s for row in rows]),
        log_memory_ratio=_log_median([row.memory_ratio for row in rows]),
        rows=len(rows),
        source=rows[0].source,
    )


def _by_model(rows: Iterable[CorpusRow], name: str) -> dict[str, float]:
    found = defaultdict(list)
    for row in rows:
        value = getattr(row, name)
        if value is not None:
            found[row.model].append(value)
    return {model: median(values) for model, values in found.items()}


def _log_median(values: Iterable[float | None]) -> float:
    known = [value for value in values if value]
    return math.log(median(known)) if known else math.nan


def _plus_one(breaks: float | None) -> float | None:
    return None if breaks is None else breaks + 1
