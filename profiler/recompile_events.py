"""Recompiles from the compile events: cause, the guard that failed, place, time lost."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from advisor.profiler.break_messages import Frame, at_limit
from advisor.profiler.causes import recompile_cause
from advisor.profiler.guards import guard_of, readable, subject
from advisor.profiler.records import CompileEvent, Recompile, RecompileCause

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_TORCH_FILE = re.compile(r"/torch/(_dynamo|nn|utils|_higher_order_ops)/")
# Causes that one thing in the training brings about, whichever tensor shows it first.
_OF_ALL = {
    RecompileCause.GRAD_MODE,
    RecompileCause.TRAIN_EVAL,
    RecompileCause.BATCH_SIZE,
    RecompileCause.SHAPE,
    RecompileCause.STRIDE,
    RecompileCause.DTYPE_OR_DEVICE,
}


@dataclass(slots=True)
class _Group:
    """Recompiles of one function for one cause and one thing that changes."""

    guard: str
    places: list[tuple[int, Frame]] = field(default_factory=list)
    count: int = 0
    lost_s: float = 0.0


def recompiles(
    events: Sequence[CompileEvent], callers: Mapping[str, Frame]
) -> tuple[Recompile, ...]:
    """Returns the recompiles, those of one function for the same cause taken together.

    `callers` are the user's frames that were running when each compile began, by its id. The place
    is the user's line that made the guard, else the user's function, else the user's caller.
    """
    functions = _functions(events)
    groups: dict[tuple[RecompileCause, str, str], _Group] = {}
    for event in events:
        if not event.recompile_reason or (event.failure and not at_limit(event.failure)):
            continue
        guard = guard_of(event.recompile_reason)
        cause = recompile_cause(guard)
        frame = event.compile_id.split("/", 1)[0]
        about = "" if cause in _OF_ALL else subject(readable(guard))
        group = groups.setdefault((cause, about, frame), _Group(readable(guard)))
        group.places += _places(event, functions.get(frame), callers.get(event.compile_id))
        group.count += 1
        group.lost_s += event.wall_s
    return _records(groups)


def _functions(events: Sequence[CompileEvent]) -> dict[str, Frame]:
    """Returns the function of each frame; a compile that was refused does not name its own."""
    return {
        event.compile_id.split("/", 1)[0]: Frame(event.file, event.line, event.function)
        for event in reversed(events)
        if event.file
    }


def _places(
    event: CompileEvent, function: Frame | None, caller: Frame | None
) -> list[tuple[int, Frame]]:
    """Returns where an event may be said to happen, with a rank: the lower the better."""
    guarded = [Frame(file, int(line)) for file, line in _FRAME.findall(event.recompile_reason)]
    mine = [frame for frame in guarded if frame.mine]
    found = [(0, mine[-1])] if mine else []
    if function is not None:
        found.append((1 if function.mine else 4, function))
    if caller is not None:
        found.append((2, caller))
    # A line of torch's own tells less than which function of a library was compiled.
    found += [(5 if _TORCH_FILE.search(frame.file) else 3, frame) for frame in guarded[-1:]]
    return found


def _records(groups: Mapping[tuple[RecompileCause, str, str], _Group]) -> tuple[Recompile, ...]:
    """Returns a record for each group; those with one cause in one place become one."""
    found: dict[tuple[str, str, int], Recompile] = {}
    for (cause, _, _), group in groups.items():
        place = min(group.places, key=lambda one: one[0])[1] if group.places else Frame("", 0)
        key = (cause.value, place.file, place.line)
        known = found.get(key)
        found[key] = Recompile(
            cause=cause,
            reason=known.reason if known else group.guard,
            file=place.file,
            line=place.line,
            count=group.count + (known.count if known else 0),
            lost_s=group.lost_s + (known.lost_s if known else 0.0),
        )
    return tuple(found.values())
