"""Step times on batches of chosen lengths: eager alone, or eager and compiled in turns.

All lengths take their turns within a round, so that what the machine does meanwhile falls on all of
them alike, and a round is an ABBA quad over all of them. Before each timed step runs one of another
length, drawn from the data: in a real run memory was last used for other sizes, and a step of 8
tokens took 33 ms after other lengths where it took 25 ms after its own kind (16 rows, 2-core CPU).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from advisor.profiler import statistics, timing, torch_internals
from advisor.profiler.batch_shapes import Layout, resized
from advisor.profiler.compile_events import CompileRecorder
from advisor.profiler.flip import Flip
from advisor.profiler.lengths import between, padded, quantile, rows_at
from advisor.profiler.records import Dynamic, Lengths, Pair, ShapeTime
from advisor.profiler.step_curve import fit
from advisor.profiler.training import Trainer, tensors_of
from advisor.profiler.workload import Batch

# Between measured lengths the model may miss by this share before more of them are measured.
MOST_RESIDUAL = 0.05
_MOST_LENGTHS = 9
# Lengths of the steps between those that are timed.
_OTHER_LENGTHS = 12
_LEAST_ROUNDS = 4
_MOST_ROUNDS = 60
# Steps without a compile event after which a length counts as compiled.
_QUIET_STEPS = 2
_MOST_COMPILE_STEPS = 12
# Narrow enough: a total is the sum over lengths, whose errors partly cancel.
_HALF_WIDTH = 0.03


def eager_times(
    trainer: Trainer, found: Layout, data: Lengths, lengths: Sequence[int], limit_s: float
) -> tuple[ShapeTime, ...]:
    """Returns eager step times at `lengths`, and at more of them while the curve is not known.

    Takes about `limit_s` seconds.
    """
    source = trainer.batches.next()
    known = [_Length.of(source, found, data, length) for length in lengths]
    others = _others(source, found, data)
    trainer.run([*others, *(each.batch for each in known)])
    order = random.Random(0)
    begun = time.perf_counter()
    while True:
        for _ in range(_LEAST_ROUNDS):
            for each in order.sample(known, len(known)):
                each.eager_s = _timed_after(trainer, order.choice(others), each)
                each.blocks.append(each.eager_s)
            if time.perf_counter() - begun > limit_s:
                return tuple(each.eager_time() for each in known)
        more = _one_more([each.eager_time() for each in known], compiled=False)
        if more is not None:
            known.append(_Length.of(source, found, data, more))
            trainer.run([known[-1].batch])


def _others(source: Batch, found: Layout, data: Lengths) -> list[Batch]:
    """Returns batches of lengths as samples have them, for the steps between those timed."""
    shares = [(number + 0.5) / _OTHER_LENGTHS for number in range(_OTHER_LENGTHS)]
    lengths = dict.fromkeys(max(2, padded(quantile(data, share), data)) for share in shares)
    return [resized(source, found, rows_at(data, length), length) for length in lengths]


def _timed_after(trainer: Trainer, other: Batch, each: _Length) -> float:
    """Returns the seconds of a step after one of another length.

    An accelerator is kept busy for several steps: waiting for each would add its own cost.
    """
    steps = 1 if trainer.device.type == "cpu" else timing.block_steps(each.eager_s or 1.0)
    trainer.run([other])
    return timing.timed(trainer, [each.batch] * steps) / steps


@dataclass(slots=True)
class _Length:
    """One length that is measured, with the batch for it and what was seen."""

    rows: int
    length: int
    batch: Batch
    eager_s: float = 0.0
    blocks: list[float] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    compile_s: float = 0.0
    compiles: int = 0

    @classmethod
    def of(cls, source: Batch, found: Layout, data: Lengths, length: int) -> _Length:
        rows = rows_at(data, length)
        made = resized(source, found, rows, length)
        return cls(rows=rows, length=length, batch=made)

    def eager_time(self) -> ShapeTime:
        return ShapeTime(
            rows=self.rows,
            length=self.length,
            eager_step_s=statistics.interval(self.blocks),
        )

    def both_times(self) -> ShapeTime:
        return ShapeTime(
            rows=self.rows,
            length=self.length,
            eager_step_s=statistics.interval([pair.eager_s for pair in self.pairs]),
            step_s=statistics.interval([pair.compiled_s for pair in self.pairs]),
            pairs=tuple(self.pairs),
            compile_s=self.compile_s,
            compiles=self.compiles,
        )


class CompiledTimes:
    """Measures a configuration at chosen lengths; each is compiled for when it is first met."""

    def __init__(
        self,
        trainer: Trainer,
        flip: Flip,
        recorder: CompileRecorder,
        found: Layout,
        data: Lengths,
        *,
        mark: bool,
    ) -> None:
        """Takes one batch to make those of all lengths of; compiles nothing."""
        self._trainer = trainer
        self._flip = flip
        self._recorder = recorder
        self._layout = found
        self._data = data
        self._source = trainer.batches.next()
        self._mark = mark
        self._known: list[_Length] = []
        self._others: list[Batch] = []
        self._order = random.Random(0)

    def compile_for(self, lengths: Sequence[int], tell: Callable[[str], None]) -> None:
        """Runs steps at each length until it is compiled.

        What the compiler took beyond the steps themselves is billed to the length.
        """
        for length in lengths:
            each = _Length.of(self._source, self._layout, self._data, length)
            if self._mark:
                self._mark_dynamic(each.batch)
            tell(f"length {length}")
            self._compile(each)
            self._known.append(each)
        self._meet_others()

    def _meet_others(self) -> None:
        """Runs the steps between once, so that none of them compiles later.

        Where each length has a graph of its own, only those measured can take that place.
        """
        if self._flip.config.dynamic is Dynamic.FALSE:
            self._others = [each.batch for each in self._known]
            return
        if self._others:
            return
        self._others = _others(self._source, self._layout, self._data)
        begun, events = time.perf_counter(), self._recorder.count()
        for batch in self._others:
            if self._mark:
                self._mark_dynamic(batch)
            self._trainer.run([batch])
        if self._recorder.count() != events:
            self._known[0].compile_s += time.perf_counter() - begun

    def measure(self, limit_s: float, *, more: bool, tell: Callable[[str], None]) -> None:
        """Measures all lengths in turns until each is known well, or for `limit_s`.

        With `more` further lengths are compiled for while the curve between them is not known.
        """
        begun = time.perf_counter()
        for number in range(_MOST_ROUNDS):
            self._round()
            over = time.perf_counter() - begun > limit_s
            if over and number + 1 >= _LEAST_ROUNDS // 2:
                return
            if number + 1 < _LEAST_ROUNDS:
                continue
            width = max(statistics.half_width(statistics.speedup(e.pairs)) for e in self._known)
            tell(f"{len(self._known)} lengths, ±{width:.1%}")
            if width > _HALF_WIDTH:
                continue
            wanted = _one_more(self.times(), compiled=True) if more else None
            if wanted is None:
                return
            self._flip.to_compiled()
            self.compile_for([wanted], tell)

    def _round(self) -> None:
        """Adds a pair to each length: an ABBA quad over all of them, in an order of chance."""
        order = self._order.sample(self._known, len(self._known))
        sums = {id(each): {True: 0.0, False: 0.0} for each in order}
        for compiled in (True, False, False, True):
            if compiled != self._flip.compiled:
                (self._flip.to_compiled if compiled else self._flip.to_eager)()
            for each in order:
                other = self._order.choice(self._others)
                sums[id(each)][compiled] += _timed_after(self._trainer, other, each)
        for each in order:
            took = sums[id(each)]
            each.pairs.append(Pair(eager_s=took[False] / 2, compiled_s=took[True] / 2))

    def times(self) -> tuple[ShapeTime, ...]:
        """Returns what was measured, one for each length that has pairs, ascending."""
        known = sorted(self._known, key=lambda each: each.length)
        return tuple(each.both_times() for each in known if each.pairs)

    def _compile(self, each: _Length) -> None:
        trainer, recorder = self._trainer, self._recorder
        begun = time.perf_counter()
        events, quiet, steps, last_s = recorder.count(), 0, 0, 0.0
        first = events
        while quiet < _QUIET_STEPS and steps < _MOST_COMPILE_STEPS:
            last_s = timing.timed(trainer, [each.batch])
            now = recorder.count()
            quiet = quiet + 1 if now == events else 0
            events = now
            steps += 1
        wall_s = time.perf_counter() - begun
        each.compiles = events - first
        each.compile_s = max(0.0, wall_s - steps * last_s) if each.compiles else 0.0
        self._flip.to_eager()
        trainer.run([each.batch])
        each.eager_s = timing.timed(trainer, [each.batch])
        self._flip.to_compiled()

    def _mark_dynamic(self, batch: Batch) -> None:
        # Sizes 0 and 1 are always compiled for on their own.
        low = max(2, self._data.values[0])
        high = max(self._data.values[-1], self._data.pad_to or 0)
        tensors: list[Any] = tensors_of(batch)
        for tensor, dim in self._layout.length:
            torch_internals.mark_dynamic(tensors[tensor], dim, low, high)
        if self._data.tokens_per_batch is not None:
            # Then the rows vary with the length.
            for tensor, dim in self._layout.rows:
                most = max(2, self._data.tokens_per_batch // low)
                torch_internals.mark_dynamic(tensors[tensor], dim, 2, most)


def _one_more(times: Sequence[ShapeTime], *, compiled: bool) -> int | None:
    """Returns a further length to measure, None where the curve is known or there are enough."""
    if len(times) >= _MOST_LENGTHS or fit(times, compiled=compiled).residual <= MOST_RESIDUAL:
        return None
    return between(sorted({each.length for each in times}))
