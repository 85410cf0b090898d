"""Step times: warm-up until steady, ABBA quads through the flip, waiting for data.

Clock: `perf_counter`. The device is waited for at the borders of blocks, never within.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from advisor.profiler.flip import Flip
from advisor.profiler.peers import Peers
from advisor.profiler.records import Pair
from advisor.profiler.training import Trainer
from advisor.profiler.workload import Batch

# A block is at least this long, so that the clock and the synchronisation do not count in it; and
# no longer, because the sooner the arms take turns, the more of the machine's drift cancels (with
# steps of 90 ms here, blocks of 1, 3 and 6 steps gave half-widths of 1.8, 2.8 and 4.4 % in 20 s).
_BLOCK_S = 0.06
_MOST_BLOCK_STEPS = 100
# Steps after a flip that are not timed: no real run flips, and the first steps of an arm meet the
# other arm's memory and caches. With one of them instead of two, a ratio of 1.52 read 1.55 here.
_SETTLE_STEPS = 2
# Windows of the warm-up are longer: they are compared with each other, not interleaved.
_WINDOW_S = 0.25
# Steady: the last three windows of eager steps lie within this ratio of each other.
_STEADY_RATIO = 1.10
_STEADY_WINDOWS = 3
_MOST_QUADS = 400


def timed(trainer: Trainer, batches: list[Batch]) -> float:
    """Returns the wall seconds of one step for each batch, the device's work included."""
    trainer.synchronize()
    begun = time.perf_counter()
    trainer.run(batches)
    return time.perf_counter() - begun


def block_steps(step_s: float, block_s: float = _BLOCK_S) -> int:
    """Returns how many steps make a block that is long enough to be timed."""
    return max(1, min(_MOST_BLOCK_STEPS, round(block_s / max(step_s, 1e-6))))


@dataclass(slots=True)
class Window:
    """Some steps in the natural loop: seconds of a step, and seconds waited for its batch."""

    steps: int
    step_s: float
    wait_s: float


@dataclass(slots=True)
class WarmUp:
    """Eager steps until they were steady, or until time was up."""

    windows: list[Window] = field(default_factory=list)
    steady: bool = False

    @property
    def step_s(self) -> float:
        """Mean seconds of a step over the last windows."""
        last = self.windows[-_STEADY_WINDOWS:]
        return sum(w.step_s * w.steps for w in last) / sum(w.steps for w in last)

    @property
    def wait_s(self) -> float:
        """Mean seconds that the loop waited for a batch over the last windows."""
        last = self.windows[-_STEADY_WINDOWS:]
        return sum(w.wait_s * w.steps for w in last) / sum(w.steps for w in last)

    @property
    def spread(self) -> float:
        """Coefficient of variation of the last windows' step times."""
        values = [w.step_s for w in self.windows[-2 * _STEADY_WINDOWS :]]
        mean = statistics.fmean(values)
        return statistics.pstdev(values) / mean


def warm_up(
    trainer: Trainer,
    seen: Callable[[Batch], None],
    limit_s: float,
    most_steps: float,
    tell: Callable[[str], None],
    peers: Peers | None = None,
) -> WarmUp:
    """Runs eager steps in the natural loop until they are steady, or for `limit_s`.

    A plan of fewer than `most_steps` steps never gets steadier than that. `seen` is handed each
    batch. With `peers` the slowest rank's steps count. Varying shapes make windows differ by
    nature: they are as long as it takes to even that out, or the time is up.
    """
    result = WarmUp()
    peers = peers or Peers()
    begun = time.perf_counter()
    steps = 1
    taken = 0
    while not result.steady:
        if taken >= most_steps or (taken and peers.most(time.perf_counter() - begun) > limit_s):
            break
        wait_s = run_s = 0.0
        for _ in range(steps):
            start = time.perf_counter()
            batch = trainer.batches.next()
            seen(batch)
            fetched = time.perf_counter()
            trainer.step(batch)
            trainer.synchronize()
            wait_s += fetched - start
            run_s += time.perf_counter() - fetched
        run_s = peers.most(run_s)
        result.windows.append(Window(steps, run_s / steps, wait_s / steps))
        taken += steps
        last = [window.step_s for window in result.windows[-_STEADY_WINDOWS:]]
        even = max(last) <= _STEADY_RATIO * min(last)
        result.steady = len(result.windows) > _STEADY_WINDOWS and even
        steps = block_steps(run_s / steps, _WINDOW_S)
        tell(f"eager step {_milliseconds(last[-1])}")
    return result


def quad(trainer: Trainer, flip: Flip, batches: list[Batch]) -> Pair:
    """Returns one ABBA quad: four blocks over the same `batches`, so that drift cancels.

    What follows a flip settles first, in steps that are not timed. A quad ends in the arm in which
    the next one begins: there is nothing to settle between them.
    """
    arms = {True: 0.0, False: 0.0}
    for compiled in (True, False, False, True):
        if compiled != flip.compiled:
            (flip.to_compiled if compiled else flip.to_eager)()
            trainer.run(batches[:1] * _SETTLE_STEPS)
        arms[compiled] += timed(trainer, batches)
    timed_steps = 2 * len(batches)
    return Pair(eager_s=arms[False] / timed_steps, compiled_s=arms[True] / timed_steps)


def measure_quads(
    trainer: Trainer,
    flip: Flip,
    steps: int,
    limit_s: float,
    enough: Callable[[], bool],
    peers: Peers | None = None,
) -> Iterator[Pair]:
    """Yields quads of blocks of `steps` steps until it is `enough`, or `limit_s` have passed.

    With `peers` a block takes as long as on the slowest rank.
    """
    peers = peers or Peers()
    begun = time.perf_counter()
    for _ in range(_MOST_QUADS):
        own = quad(trainer, flip, trainer.batches.take(steps))
        yield Pair(eager_s=peers.most(own.eager_s), compiled_s=peers.most(own.compiled_s))
        if enough() or peers.most(time.perf_counter() - begun) > limit_s:
            return


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
