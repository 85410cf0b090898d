"""The trials along the lengths of a job: in which ways it is compiled, and at which lengths."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from advisor.profiler.lengths import measured_lengths
from advisor.profiler.records import Config, Dynamic, Lengths, Mode, Scope, Trial, TrialKind
from advisor.profiler.step_curve import fit

# Lengths at which a trial measures first.
_STATIC_LENGTHS = 4
_DYNAMIC_LENGTHS = 5


@dataclass(frozen=True, slots=True)
class ShapeTrial:
    """A trial along the lengths: how it is compiled, and whether the length is marked."""

    config: Config
    mark_dynamic: bool = False

    def is_of(self, trial: Trial) -> bool:
        """Returns whether `trial` is this one, run or skipped."""
        same = (trial.config, trial.mark_dynamic) == (self.config, self.mark_dynamic)
        return trial.kind is TrialKind.SHAPES and same

    def lengths(self, data: Lengths, eager: Trial) -> tuple[int, ...]:
        """Returns the lengths to measure first. A static graph for each of them costs a compile."""
        static = self.config.dynamic is Dynamic.FALSE
        aligned = fit(eager.shape_times, compiled=False).surcharge > 0
        most = _STATIC_LENGTHS if static else _DYNAMIC_LENGTHS
        return measured_lengths(data, most, probe=aligned or not static)


def shape_trials(scope: Scope, device: str) -> Iterator[ShapeTrial]:
    """Yields the trials along the lengths that a device ("cpu", "cuda") can run, in their order."""
    yield ShapeTrial(Config(scope=scope, dynamic=Dynamic.TRUE))
    yield ShapeTrial(Config(scope=scope, dynamic=Dynamic.FALSE))
    if device == "cuda":
        # A CUDA graph is recorded for one shape: it takes a bucket for each.
        yield ShapeTrial(Config(scope=scope, mode=Mode.REDUCE_OVERHEAD, dynamic=Dynamic.FALSE))
    # Blocks compiled on their own see tensors made in between, which nobody has marked.
    if scope is Scope.MODEL:
        yield ShapeTrial(Config(scope=scope), mark_dynamic=True)
