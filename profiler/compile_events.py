"""What the compiler did in this process: events, graph breaks, recompiles, CUDA graphs left out.

Read from torch's own records of the very compiles that were timed: no second run explains them.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from advisor.profiler import torch_internals
from advisor.profiler.break_messages import Frame, at_limit, graph_breaks
from advisor.profiler.recompile_events import recompiles
from advisor.profiler.records import CompileEvent, GraphBreak, Recompile
from advisor.profiler.workload import is_library

# Frames of a result must stay below the cap of a message.
_MOST_EVENTS = 200
_MOST_TEXT = 500
_MOST_SKIPS = 20
_CUDAGRAPHS_LEFT_OUT = re.compile(r"(skipping|disabling|skip) cuda ?graph", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileFacts:
    """All that the compiler did since the recorder was started."""

    events: tuple[CompileEvent, ...]
    graphs: int
    graph_breaks: tuple[GraphBreak, ...]
    recompiles: tuple[Recompile, ...]
    recompile_limit_hit: bool
    skipped_frames: int
    # Why CUDA graphs were left out, in the compiler's words, each once.
    cudagraph_skips: tuple[str, ...] = ()


class CompileRecorder(logging.Handler):
    """Collects compile events from its creation on, and the step that each belongs to."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.step = 0
        self._steps: list[int] = []
        self._breaks: list[str] = []
        self._skips: list[str] = []
        # The user's frame that was running when a compile began, by the compile's id.
        self._callers: dict[str, Frame] = {}
        torch_internals.start_compile_records()
        torch_internals.listen_to_graph_breaks(self)
        torch_internals.listen_to_cudagraphs(self)
        torch_internals.on_compile_start(self._compile_starts)

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps one message of torch's log: a graph break, or why CUDA graphs were left out."""
        if record.name == torch_internals.CUDAGRAPH_LOGGER:
            if _CUDAGRAPHS_LEFT_OUT.search(record.getMessage()):
                self._skips.append(record.getMessage())
            return
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
        limit_hit = any(map(at_limit, (*(event.failure for event in events), *unimplemented)))
        graphs = counters.get("stats", {}).get("unique_graphs")
        return CompileFacts(
            events=events[:_MOST_EVENTS],
            graphs=sum(event.operators > 0 for event in events) if graphs is None else graphs,
            graph_breaks=graph_breaks(
                self._breaks or _restart_reasons(metrics), events, _failed_at(metrics)
            ),
            recompiles=recompiles(events, self._callers),
            recompile_limit_hit=limit_hit,
            skipped_frames=sum(
                bool(event.failure) and not at_limit(event.failure) for event in events
            ),
            cudagraph_skips=cudagraph_skips(metrics, counters, self._skips),
        )

    def _compile_starts(self, compile_id: str) -> None:
        frame = sys._getframe(1)
        while frame is not None:
            if not is_library(frame.f_code.co_filename):
                place = Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
                self._callers.setdefault(compile_id, place)
                return
            frame = frame.f_back  # type: ignore[assignment]


def cudagraph_skips(
    metrics: Sequence[Any], counters: Mapping[str, Mapping[str, int]], logged: Sequence[str]
) -> tuple[str, ...]:
    """Returns why CUDA graphs were left out, each reason once.

    The metrics keep the reason of a compile, the log also those of later steps. What torch only
    counted is said as that number.
    """
    found = [str(getattr(metric, "cudagraph_skip_reason", None) or "") for metric in metrics]
    reasons = dict.fromkeys(
        re.sub(r"\s+", " ", text).strip()[:_MOST_TEXT] for text in (*found, *logged) if text
    )
    counted = counters.get("inductor", {}).get("cudagraph_skips", 0)
    if counted and not reasons:
        return (f"left out {counted} times, for a reason that torch does not tell",)
    return tuple(reasons)[:_MOST_SKIPS]


def _failed_at(metrics: Sequence[Any]) -> dict[str, Frame]:
    """Returns the place that was being traced when a compile failed, by the compile's id."""
    return {
        str(metric.compile_id): Frame(str(metric.fail_user_frame_filename), line)
        for metric in metrics
        if (line := getattr(metric, "fail_user_frame_lineno", None)) is not None
    }


def _restart_reasons(metrics: Sequence[Any]) -> list[str]:
    """Returns the reasons of graph breaks where torch logs none: their places are not known."""
    return [
        str(reason)
        for metric in metrics
        for reason in getattr(metric, "restart_reasons", None) or ()
    ]


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
