"""Compiled coverage: what of an eager step runs inside compiled graphs, and which break loses what.

Read by torch's profiler from steps that really run, compiled and eager, on the same batches.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from advisor.profiler import torch_internals
from advisor.profiler.break_messages import at_limit
from advisor.profiler.break_sites import RANGE, CompiledWatch, EagerWatch
from advisor.profiler.flip import Flip
from advisor.profiler.records import GraphBreak
from advisor.profiler.torch_internals import BACKWARD_EVENT, OPERATOR_EVENT, ProfilerEvent
from advisor.profiler.training import Trainer
from advisor.profiler.workload import Batch

_MOST_BATCHES = 2
# A step of more profiler events than this (about 1.5 kB each) is profiled on one batch only.
_MANY_EVENTS = 100_000
# A smaller step is profiled again, up to so often and for so long.
_MOST_REPEATS = 4
_REPEAT_S = 1.0

# What runs inside of these is no operator of the model.
_EXCLUDED = ("Optimizer.", "torch::autograd::AccumulateGrad")
_OF_INTEREST = (
    OPERATOR_EVENT,
    BACKWARD_EVENT,
    *_EXCLUDED,
    RANGE,
    torch_internals.COMPILED_GRAPH_EVENT,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Share of the eager operators' calls and of their time inside graphs; None: cannot be told.

    `breaks` are the breaks given, with how often a step hits each and the share that it loses.
    """

    calls: float | None
    time: float | None
    breaks: tuple[GraphBreak, ...]


@dataclass(slots=True)
class _Operator:
    """One top-level operator: its nanoseconds, and the breaks to blame when outside of graphs."""

    name: str
    in_graph: bool
    host_ns: int
    device_ns: int = 0
    breaks: frozenset[int] = frozenset()
    # Thread and number of the forward operator whose backward this is.
    forward: tuple[int, int] | None = None


@dataclass(slots=True)
class _Time:
    """Nanoseconds of operators, on the host and on the device."""

    host_ns: int = 0
    device_ns: int = 0

    def on(self, device: bool) -> int:
        return self.device_ns if device else self.host_ns


@dataclass(slots=True)
class _Operators:
    """Operators of some steps: all, those outside of graphs, and these by the breaks to blame."""

    calls: int = 0
    outside_calls: int = 0
    time: _Time = field(default_factory=_Time)
    outside: _Time = field(default_factory=_Time)
    lost: dict[frozenset[int], _Time] = field(default_factory=lambda: defaultdict(_Time))
    # Events of the largest step.
    events: int = 0

    def add(self, operators: Sequence[_Operator], events: int) -> None:
        """Adds the operators of one step."""
        self.events = max(self.events, events)
        self.calls += len(operators)
        for operator in operators:
            sums = [self.time]
            if not operator.in_graph:
                self.outside_calls += 1
                sums.append(self.outside)
                if operator.breaks:
                    sums.append(self.lost[operator.breaks])
            for total in sums:
                total.host_ns += operator.host_ns
                total.device_ns += operator.device_ns


def measure(
    trainer: Trainer, flip: Flip, batches: Sequence[Batch], breaks: Sequence[GraphBreak]
) -> Coverage:
    """Returns the coverage of the compiled step, and `breaks` with what each of them costs.

    Runs a few dozen steps at most, on the first two batches. The modules are left as they were
    found, compiled or eager. Raises what the workload's own step raises.
    """
    batches = list(batches[:_MOST_BATCHES])
    was_compiled = flip.compiled
    try:
        return _measure(trainer, flip, batches, tuple(breaks))
    finally:
        (flip.to_compiled if was_compiled else flip.to_eager)()


def operator_calls(run: Callable[[], object]) -> tuple[int, int]:
    """Returns (all, outside compiled graphs): eager operator calls of forward and backward.

    Counted by torch's profiler, which sees what really ran: top-level aten calls, without those
    of the optimizer. A call of a compiled graph counts as none of them. (0, 0) when this torch
    does not show its events.
    """
    operators, _ = _observe(run, torch.device("cpu"))
    return len(operators), sum(not operator.in_graph for operator in operators)


def _measure(
    trainer: Trainer, flip: Flip, batches: list[Batch], breaks: tuple[GraphBreak, ...]
) -> Coverage:
    roots = _compiled_modules(trainer, flip)
    flip.to_eager()
    trainer.run(batches[:1])
    eager = _Operators()
    _observe_steps(trainer, batches[:1], eager)
    if eager.events > _MANY_EVENTS:
        batches = batches[:1]
    _observe_steps(trainer, batches[1:], eager)
    if not eager.calls:
        return Coverage(calls=None, time=None, breaks=breaks)
    flip.to_compiled()
    trainer.run(batches)
    compiled = _observe_steps(trainer, batches, _Operators())
    calls = max(0.0, 1.0 - compiled.outside_calls / eager.calls)
    # Kernels are what takes the time, where there are any.
    device = eager.time.device_ns > 0
    whole = eager.time.on(device)
    outside = min(1.0, compiled.outside.on(device) / whole) if whole else None
    if breaks:
        watch = EagerWatch(breaks, roots)
        flip.to_eager()
        with watch:
            trainer.run(batches)
        breaks = tuple(_with_hits(found, watch, len(batches)) for found in breaks)
        if outside is not None:
            flip.to_compiled()
            trainer.run(batches[:1])
            lost = CompiledWatch(watch.functions(), roots, _refused())
            shares = _lost_shares(trainer, batches, lost, outside, device)
            breaks = tuple(
                found if found.hits_per_step is None else replace(found, lost_share=shares[index])
                for index, found in enumerate(breaks)
            )
    return Coverage(calls=calls, time=None if outside is None else 1.0 - outside, breaks=breaks)


def _with_hits(found: GraphBreak, watch: EagerWatch, steps: int) -> GraphBreak:
    hits = watch.hits(found)
    return found if hits is None else replace(found, hits_per_step=hits / steps)


def _lost_shares(
    trainer: Trainer, batches: list[Batch], watch: CompiledWatch, outside: float, device: bool
) -> dict[int, float]:
    """Returns the share of the eager step's operator time that each break loses.

    `outside` is the share that all lose together, taken without the watch: it is dealt out as
    the watched time is.
    """
    found = _observe_steps(trainer, batches, _Operators(), watch)
    whole = found.outside.on(device)
    shares: dict[int, float] = defaultdict(float)
    for breaks, lost in found.lost.items() if whole else ():
        for index in breaks:
            shares[index] += outside * lost.on(device) / whole / len(breaks)
    return shares


def _compiled_modules(trainer: Trainer, flip: Flip) -> list[torch.nn.Module]:
    """Returns the modules that the flip compiles: those whose call or forward it changes."""

    def state(module: torch.nn.Module) -> tuple[int, int]:
        return id(torch_internals.compiled_call(module)), id(vars(module).get("forward"))

    modules = list(trainer.model.modules())
    flip.to_eager()
    eager = list(map(state, modules))
    flip.to_compiled()
    return [
        module for module, before in zip(modules, eager, strict=True) if state(module) != before
    ]


def _refused() -> frozenset[tuple[str, int]]:
    """Returns file and first line of the code at which the compiler met its recompile limit."""
    places: dict[str, tuple[str, int]] = {}
    limited = set()
    for metric in torch_internals.compile_metrics():
        # "0/8": the ninth compile of the frame 0. The one refused does not tell its place.
        frame = str(getattr(metric, "compile_id", "")).split("/", 1)[0]
        if getattr(metric, "co_filename", None):
            places[frame] = (metric.co_filename, int(metric.co_firstlineno or 0))
        if at_limit(str(getattr(metric, "fail_reason", "") or "")):
            limited.add(frame)
    return frozenset(places[frame] for frame in limited if frame in places)


def _observe_steps(
    trainer: Trainer,
    batches: list[Batch],
    found: _Operators,
    watch: CompiledWatch | None = None,
) -> _Operators:
    """Adds the operators of a step for each batch to `found`, and returns it.

    Steps are profiled one by one, to save memory, and small ones repeatedly: of each operator the
    quickest call counts, because other programs and the profiler's own first steps make single
    calls a hundred times slower.
    """
    for batch in batches:

        def run(batch: Batch = batch) -> None:
            with watch or contextlib.nullcontext():
                trainer.run([batch])

        operators, events = _observe(run, trainer.device)
        begun = time.perf_counter()
        for _ in range(_MOST_REPEATS if events <= _MANY_EVENTS else 0):
            again, _ = _observe(run, trainer.device)
            operators = _quickest(operators, again)
            if time.perf_counter() - begun > _REPEAT_S:
                break
        found.add(operators, events)
        gc.collect()
    return found


def _quickest(one: list[_Operator], other: list[_Operator]) -> list[_Operator]:
    """Returns the operators of two runs of a step, each with the shorter of its two times."""
    if [each.name for each in one] != [each.name for each in other]:
        return min(one, other, key=lambda each: sum(operator.host_ns for operator in each))
    for mine, again in zip(one, other, strict=True):
        mine.host_ns = min(mine.host_ns, again.host_ns)
        mine.device_ns = min(mine.device_ns, again.device_ns)
    return one


def _observe(run: Callable[[], object], device: torch.device) -> tuple[list[_Operator], int]:
    """Returns the operators that `run` calls, and the number of the profiler's events.

    None when this torch does not show its events.
    """
    with torch_internals.profiler(device) as profile:
        run()
    return _Reader().read(torch_internals.profiler_events(profile))


@dataclass(slots=True)
class _Range:
    """A range that is open while events are read in the order of time, and what holds in it."""

    end_ns: int
    excluded: bool = False
    in_graph: bool = False
    breaks: frozenset[int] = frozenset()
    forward: tuple[int, int] | None = None
    # The top-level operator that all within it belongs to.
    operator: _Operator | None = None


class _Reader:
    """Reads the events of one profile: which operator is top-level, and under what it ran."""

    def __init__(self) -> None:
        self._found: list[_Operator] = []
        self._device_ns: Counter[int] = Counter()
        # Breaks to blame for a forward operator, by its thread and number.
        self._forward: dict[tuple[int, int], frozenset[int]] = {}

    def read(self, events: Iterable[ProfilerEvent]) -> tuple[list[_Operator], int]:
        """Returns the operators, and the number of all events.

        The parents of an event are those that enclose it in time.
        """
        host: list[ProfilerEvent] = []
        number = 0
        for event in events:
            number += 1
            if event.on_device:
                self._device_ns[event.correlation] += event.end_ns - event.start_ns
            elif event.name.startswith(_OF_INTEREST):
                host.append(event)
        host.sort(key=lambda event: (event.thread, event.start_ns, -event.end_ns, event.name))
        stack: list[_Range] = []
        thread = None
        for event in host:
            if event.thread != thread:
                thread, stack = event.thread, []
            while stack and (event.start_ns >= stack[-1].end_ns or event.end_ns > stack[-1].end_ns):
                stack.pop()
            stack.append(self._range(event, stack[-1] if stack else _Range(event.end_ns)))
        for operator in self._found:
            if not operator.breaks and operator.forward is not None:
                operator.breaks = self._forward.get(operator.forward, operator.breaks)
        return self._found, number

    def _range(self, event: ProfilerEvent, around: _Range) -> _Range:
        inner = replace(around, end_ns=event.end_ns)
        if event.name.startswith(OPERATOR_EVENT):
            self._operator(event, inner)
        elif event.name.startswith(BACKWARD_EVENT):
            inner.forward = (event.forward_thread, event.sequence)
        elif event.name.startswith(RANGE):
            indexes = event.name.removeprefix(RANGE)
            inner.breaks = frozenset(map(int, indexes.split(","))) if indexes else frozenset()
        elif event.name.startswith(torch_internals.COMPILED_GRAPH_EVENT):
            inner.in_graph = True
        else:
            inner.excluded = True
        return inner

    def _operator(self, event: ProfilerEvent, inner: _Range) -> None:
        if event.sequence >= 0:
            # Operators that need no gradient bear the number of the next one that does.
            self._forward[event.thread, event.sequence] = inner.breaks
        if inner.operator is None and not inner.excluded:
            inner.operator = _Operator(
                name=event.name,
                in_graph=inner.in_graph,
                host_ns=event.end_ns - event.start_ns,
                breaks=inner.breaks,
                forward=inner.forward,
            )
            self._found.append(inner.operator)
        if inner.operator is not None:
            inner.operator.device_ns += self._device_ns.get(event.correlation, 0)
