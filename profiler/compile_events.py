"""What the compiler did in this process: events, graph breaks, recompiles, coverage.

Read from torch's own records of the very compiles that were timed: no second run explains them.
"""

from __future__ import annotations

import linecache
import logging
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from advisor.profiler import torch_internals
from advisor.profiler.causes import break_cause, recompile_cause
from advisor.profiler.records import CompileEvent, GraphBreak, Recompile
from advisor.profiler.workload import is_library

# Frames of a result must stay below the cap of a message.
_MOST_EVENTS = 200
_MOST_TEXT = 500
_LIMIT_WORDS = "recompile limit"
_LINK = re.compile(r"https://\S*compile-graph-break-site\S*")
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_PLACE = re.compile(r"in user code at (.+?):(\d+)")
_GUARD_PLACE = re.compile(r"#.*# (\S+?):(\d+) in ")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileFacts:
    """All that the compiler did since the recorder was started."""

    events: tuple[CompileEvent, ...]
    graphs: int
    graph_breaks: tuple[GraphBreak, ...]
    recompiles: tuple[Recompile, ...]
    recompile_limit_hit: bool
    skipped_frames: int


class CompileRecorder(logging.Handler):
    """Collects compile events from its creation on, and the step that each belongs to."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.step = 0
        self._steps: list[int] = []
        self._breaks: list[str] = []
        torch_internals.start_compile_records()
        torch_internals.listen_to_graph_breaks(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps one graph-break message of torch's log."""
        self._breaks.append(record.getMessage())

    def count(self) -> int:
        """Returns the number of compile attempts so far, and stamps new ones with the step."""
        count = len(torch_internals.compile_metrics())
        self._steps += [self.step] * (count - len(self._steps))
        return count

    def facts(self) -> CompileFacts:
        """Returns everything recorded so far."""
        self.count()
        metrics = torch_internals.compile_metrics()
        counters = torch_internals.counters()
        events = _events(metrics, self._steps)
        unimplemented = counters.get("unimplemented", {})
        limit_hit = any(_LIMIT_WORDS in event.failure.lower() for event in events) or any(
            _LIMIT_WORDS in text.lower() for text in unimplemented
        )
        graphs = counters.get("stats", {}).get("unique_graphs")
        return CompileFacts(
            events=events[:_MOST_EVENTS],
            graphs=sum(event.operators > 0 for event in events) if graphs is None else graphs,
            graph_breaks=_graph_breaks(self._breaks, metrics),
            recompiles=_recompiles(events),
            recompile_limit_hit=limit_hit,
            skipped_frames=sum(
                bool(event.failure) and _LIMIT_WORDS not in event.failure.lower()
                for event in events
            ),
        )


def _events(metrics: Sequence[Any], steps: Sequence[int]) -> tuple[CompileEvent, ...]:
    """Returns one event for each frame compiled; its backward graph is made part of it."""
    events: dict[str, CompileEvent] = {}
    for index, metric in enumerate(metrics):
        identity = str(getattr(metric, "compile_id", "") or index)
        known = events.get(identity)
        if getattr(metric, "is_forward", None) is False and known is not None:
            backward_s = (getattr(metric, "duration_us", None) or 0) / 1e6
            events[identity] = replace(
                known,
                backward_s=(known.backward_s or 0.0) + backward_s,
                wall_s=known.wall_s + backward_s,
            )
            continue
        step = steps[index] if index < len(steps) else 0
        event = _event(metric, identity, step)
        if known is not None:  # a frame that was started again counts once, with its last outcome
            event = replace(event, wall_s=event.wall_s + known.wall_s)
        events[identity] = event
    return tuple(events.values())


def _event(metric: Any, identity: str, step: int) -> CompileEvent:
    def seconds(name: str) -> float | None:
        value = getattr(metric, name, None)
        return None if value is None else float(value)

    failed = getattr(metric, "fail_type", None) is not None
    reason = str(getattr(metric, "fail_reason", "") or "") if failed else ""
    duration_us = getattr(metric, "duration_us", None)
    whole = seconds("entire_frame_compile_time_s")
    backend, inductor = seconds("backend_compile_time_s"), seconds("inductor_compile_time_s")
    return CompileEvent(
        compile_id=identity,
        function=str(getattr(metric, "co_name", "") or ""),
        file=str(getattr(metric, "co_filename", "") or ""),
        line=int(getattr(metric, "co_firstlineno", 0) or 0),
        step=step,
        wall_s=whole if whole is not None else (duration_us or 0) / 1e6,
        dynamo_s=None if whole is None else max(0.0, whole - (backend or 0.0)),
        aot_autograd_s=None if backend is None else max(0.0, backend - (inductor or 0.0)),
        inductor_s=inductor,
        code_generation_s=seconds("code_gen_time_s"),
        operators=int(getattr(metric, "graph_op_count", 0) or 0),
        recompile_reason=str(getattr(metric, "recompile_reason", "") or "")[:_MOST_TEXT],
        failure=reason[:_MOST_TEXT],
    )


def first_sentence(text: str) -> str:
    """Returns the first sentence of the compiler's explanation, without its layout."""
    explanation = re.search(r"Explanation:\s*(.+)", text)
    title = re.sub(r"\s+", " ", text.strip().splitlines()[0]) if text.strip() else ""
    return (explanation.group(1).strip() if explanation else title)[:_MOST_TEXT]


def _user_place(text: str) -> tuple[str, int]:
    """Returns file and line of the innermost frame that is the user's, else the innermost."""
    frames = [(file, int(line)) for file, line in _FRAME.findall(text)]
    mine = [frame for frame in frames if not is_library(frame[0])]
    if mine or frames:
        return (mine or frames)[-1]
    place = _PLACE.search(text)
    return (place.group(1), int(place.group(2))) if place else ("", 0)


def _graph_breaks(messages: Sequence[str], metrics: Sequence[Any]) -> tuple[GraphBreak, ...]:
    """Returns each place that ended a graph once, with how often a compile met it."""
    texts = list(messages)
    if not texts:  # no log on this torch: the reasons are known, the places are not
        for metric in metrics:
            texts += map(str, getattr(metric, "restart_reasons", None) or ())
    found: Counter[tuple[str, int, str]] = Counter()
    wholes: dict[tuple[str, int, str], str] = {}
    for text in texts:
        reason = text.split("Graph Break Reason:", 1)[-1]
        file, line = _user_place(text)
        key = (file, line, first_sentence(reason))
        found[key] += 1
        # A repeated message is shortened by torch; the longest tells most.
        wholes[key] = max(wholes.get(key, ""), text, key=len)
    return tuple(
        _graph_break(key, wholes[key], count) for key, count in found.most_common(_MOST_EVENTS)
    )


def _graph_break(key: tuple[str, int, str], text: str, count: int) -> GraphBreak:
    file, line, reason = key
    link = _LINK.search(text)
    return GraphBreak(
        cause=break_cause(text),
        reason=reason,
        file=file,
        line=line,
        code=linecache.getline(file, line).strip()[:_MOST_TEXT],
        hint=link.group(0) if link else "",
        count=count,
    )


def _recompiles(events: Sequence[CompileEvent]) -> tuple[Recompile, ...]:
    """Returns the recompiles, those with the same guard in the same place taken together."""
    grouped: dict[tuple[str, str, int], list[CompileEvent]] = {}
    reasons: dict[tuple[str, str, int], str] = {}
    for event in events:
        refused = _LIMIT_WORDS in event.failure.lower()
        if not event.recompile_reason or (event.failure and not refused):
            continue
        reason = event.recompile_reason.split("\n", 1)[0]
        reason = re.sub(r"^\d+/\d+:\s*", "", reason)
        guard = re.sub(r"\s+", " ", reason.split("#", 1)[0]).strip()
        cause = recompile_cause(guard)
        place = _user_place(event.recompile_reason)
        file, line = place if place[0] else (event.file, event.line)
        key = (cause.value, file, line)
        grouped.setdefault(key, []).append(event)
        reasons.setdefault(key, guard)
    return tuple(
        Recompile(
            cause=recompile_cause(reasons[key]),
            reason=reasons[key],
            file=key[1],
            line=key[2],
            count=len(group),
            lost_s=sum(event.wall_s for event in group),
        )
        for key, group in grouped.items()
    )


def operator_calls(run: Callable[[], object]) -> tuple[int, int]:
    """Returns (all, outside compiled graphs): eager operator calls of forward and backward.

    Counted by torch's profiler, which sees what really ran: top-level aten calls, without those
    of the optimizer. A call of a compiled graph counts as none of them.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    total = outside = 0
    for event in profile.events() or ():
        if not event.name.startswith("aten::"):
            continue
        parents = []
        parent = event.cpu_parent
        while parent is not None:
            parents.append(parent.name)
            parent = parent.cpu_parent
        if any(
            name.startswith(("aten::", "Optimizer.", "torch::autograd::AccumulateGrad"))
            for name in parents
        ):
            continue
        total += 1
        outside += not any(
            name.startswith(torch_internals.COMPILED_GRAPH_EVENT) for name in parents
        )
    return total, outside
