"""Which module a script trains and where its steps end, from calls and optimizer steps alone.

Told of each module that is called with gradients and of each optimizer that steps, it finds the
root: the outermost module called that holds what the optimizers train. Modules are told apart by
what holds what, not by which call is within which: a recomputed block is called from the backward.
Pure: it looks at `modules()`, `parameters()` and `param_groups`, and imports no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

# So many turns are looked at before their order counts as found, and so many at most.
_LEAST_TURNS, _MOST_TURNS = 3, 24
# The longest cycle of optimizers that is looked for.
_MOST_PERIOD = 8
# One of several roots is the model if it holds this share of what is trained, as numbers.
_MOST_OF_IT = 0.9
_NAMES_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Found:
    """The loop of a script: a step ends when `last` has stepped `times` times.

    `forwards` is how often a step calls the root; None where that varies. `in_training` says
    whether the root was in training mode in each of these calls.
    """

    root: Any
    last: Any
    optimizers: tuple[Any, ...]
    forwards: int | None
    in_training: bool
    times: int = 1


@dataclass(frozen=True, slots=True)
class CannotTell:
    """Why the loop of a script was not found, with what could be done instead."""

    why: str


@dataclass(slots=True)
class _Turn:
    """Forwards, then the optimizers that stepped before the next forward."""

    called: dict[int, Any] = field(default_factory=dict)
    calls: Counter[int] = field(default_factory=Counter)
    in_eval: set[int] = field(default_factory=set)
    optimizers: list[Any] = field(default_factory=list)

    @property
    def order(self) -> tuple[int, ...]:
        return tuple(id(optimizer) for optimizer in self.optimizers)


class LoopFinder:
    """Finds the loop of a script while it runs; holds on to what it saw only until then."""

    def __init__(self) -> None:
        self.steps = 0
        self._turns: list[_Turn] = []
        self._turn = _Turn()

    def stepped(self, optimizer: Any) -> None:
        """Takes that an optimizer has stepped."""
        self.steps += 1
        # One that calls its parent class's step is told twice.
        if not self._turn.optimizers or self._turn.optimizers[-1] is not optimizer:
            self._turn.optimizers.append(optimizer)

    def called(self, module: Any) -> Found | CannotTell | None:
        """Takes that a module is called with gradients, and returns what is known by now."""
        answer = None
        if self._turn.optimizers:
            self._turns.append(self._turn)
            self._turn = _Turn()
            answer = self._answer()
        self._turn.called[id(module)] = module
        self._turn.calls[id(module)] += 1
        if not getattr(module, "training", True):
            self._turn.in_eval.add(id(module))
        return answer

    def _answer(self) -> Found | CannotTell | None:
        period = _period([turn.order for turn in self._turns])
        if period is None:
            return _NO_ORDER if len(self._turns) >= _MOST_TURNS else None
        cycle = self._turns[-period:]
        last, times = _last_of(cycle)
        seen = self._turns[-max(_LEAST_TURNS, 2 * period) :]
        optimizers = tuple({id(o): o for turn in cycle for o in turn.optimizers}.values())
        root = _root(seen, optimizers, in_turns=period > 1)
        if isinstance(root, CannotTell):
            return root
        return Found(
            root=root,
            last=last,
            optimizers=optimizers,
            forwards=_forwards([turn.calls[id(root)] for turn in seen], period),
            in_training=not any(id(root) in turn.in_eval for turn in seen),
            times=times,
        )


_NO_ORDER = CannotTell(
    "its optimizers step in no order that repeats, so it cannot be told where a step ends"
    " (mark the steps with AutoCompile)"
)


def names_of(things: Iterable[Any]) -> str:
    """Returns the classes of some objects for a sentence: `Generator, Discriminator`."""
    names = list(dict.fromkeys(type(thing).__name__ for thing in things))
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _period(orders: Sequence[tuple[int, ...]]) -> int | None:
    """Returns after how many turns the optimizers repeat; None where that is not clear yet."""
    for period in range(1, _MOST_PERIOD + 1):
        turns = max(_LEAST_TURNS, 2 * period)
        if len(orders) < turns:
            return None
        seen = orders[-turns:]
        if all(one == other for one, other in zip(seen, seen[period:], strict=False)):
            return period
    return None


def _last_of(cycle: Sequence[_Turn]) -> tuple[Any, int]:
    """Returns the optimizer whose steps end a cycle, and how many of them: one if there is such."""
    times = Counter(number for turn in cycle for number in turn.order)
    ends = [turn.optimizers[-1] for turn in reversed(cycle)]
    last = next((one for one in ends if times[id(one)] == 1), ends[0])
    return last, times[id(last)]


def _root(turns: Sequence[_Turn], optimizers: Sequence[Any], *, in_turns: bool) -> Any:
    trained = {
        id(parameter): parameter
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    called = {number: module for turn in turns for number, module in turn.called.items()}
    within = {id(inner) for module in called.values() for inner in _below(module)}
    held = {
        number: sum(p.numel() for p in module.parameters() if id(p) in trained)
        for number, module in called.items()
        if number not in within
    }
    roots = [called[number] for number, numbers in held.items() if numbers]
    if not roots:
        return CannotTell(
            f"no module that was called holds what {names_of(optimizers)} trains"
            " (mark the steps with AutoCompile)"
        )
    largest = max(roots, key=lambda module: held[id(module)])
    whole = sum(parameter.numel() for parameter in trained.values())
    # A small criterion that is trained along is no second model; one that takes turns with it is.
    if len(roots) == 1 or (held[id(largest)] >= _MOST_OF_IT * whole and not in_turns):
        return largest
    return CannotTell(
        f"{len(roots)} modules are trained side by side ({names_of(roots)}), and it cannot be told"
        " which of them to compile (measure each as a workload, or mark the steps with AutoCompile)"
    )


def _below(module: Any) -> Iterator[Any]:
    return (inner for inner in module.modules() if inner is not module)


def _forwards(calls: Sequence[int], period: int) -> int | None:
    """Returns how often a whole cycle calls the root, if most cycles do it as often.

    A step that a gradient scaler has skipped shows as a cycle with the calls of two.
    """
    starts = range(len(calls) % period, len(calls), period)
    cycles = [sum(calls[start : start + period]) for start in starts]
    ((usual, times),) = Counter(sorted(cycles)).most_common(1)
    return usual if usual and times > len(cycles) / 2 else None
