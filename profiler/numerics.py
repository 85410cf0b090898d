"""Do compiled and eager compute the same? Losses of some steps from one restored snapshot."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from advisor.profiler.training import Trainer, loss_value
from advisor.profiler.workload import Batch, seed_everything

# What a reordering of sums may change over a few steps, relative to the loss, for the type in
# which the model computes. torch.testing's own tolerances for one operator are 1.3e-6 (float32)
# and 1.6e-2 (bfloat16); a training step is some thousand operators.
_TOLERANCE = {"float64": 1e-8, "float32": 1e-3, "bfloat16": 3e-2, "float16": 1e-2}
# Compiled may differ from eager by this many times what eager differs from itself.
_SPREADS = 3.0
_SEEDS = (0, 1, 2)


class Snapshot:
    """Weights, buffers and optimizer state of a moment, held in the machine's memory."""

    def __init__(self, trainer: Trainer) -> None:
        self._state = {
            name: value.detach().to("cpu", copy=True)
            for name, value in _tensors(trainer.model).items()
        }
        self._optimizer = copy.deepcopy(trainer.optimizer.state_dict())

    def restore(self, trainer: Trainer) -> None:
        """Puts everything back in place, so that compiled code still finds the same tensors."""
        with torch.no_grad():
            for name, value in _tensors(trainer.model).items():
                if name in self._state:
                    value.copy_(self._state[name])
        trainer.optimizer.load_state_dict(copy.deepcopy(self._optimizer))
        trainer.optimizer.zero_grad(set_to_none=True)


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Relative differences of losses: compiled to eager, and eager to itself."""

    agrees: bool
    drift: float | None
    scale: float
    stochastic: bool
    message: str = ""


def losses(
    trainer: Trainer, snapshot: Snapshot, batches: list[Batch], seed: int
) -> list[float | None]:
    """Returns the loss of a step for each batch, from the snapshot and a seed."""
    snapshot.restore(trainer)
    seed_everything(seed)
    found = [loss_value(trainer.step(batch)) for batch in batches]
    trainer.synchronize()
    return found


def compare(run: Callable[[bool, int], list[float | None]], dtype: str) -> Agreement:
    """Returns how well compiled and eager agree; `run(compiled, seed)` gives the losses.

    Eager against itself sets the scale: the same seed twice shows what the device leaves open,
    other seeds show what randomness (dropout) does. The compiler draws from another random stream
    than eager by design (pytorch/pytorch#158643), so with randomness the losses can only be held
    against eager's own spread over seeds; without it, against what the type of number explains.
    """
    eager = [run(False, seed) for seed in (*_SEEDS, _SEEDS[0])]
    compiled = run(True, _SEEDS[0])
    if any(value is None for value in compiled):
        return Agreement(
            agrees=True,
            drift=None,
            scale=0.0,
            stochastic=False,
            message="the step returns no loss, so losses could not be compared",
        )
    repeat = _difference(eager[0], eager[-1])
    over_seeds = max(_difference(eager[0], other) for other in eager[1:-1])
    stochastic = over_seeds > max(10 * repeat, 1e-12)
    drift = _difference(eager[0], compiled)
    tolerance = _TOLERANCE.get(dtype, _TOLERANCE["float32"])
    allowed = max(tolerance, _SPREADS * repeat, _SPREADS * over_seeds if stochastic else 0.0)
    eager_finite = all(value is not None and math.isfinite(value) for value in eager[0])
    broken = next(
        (i for i, value in enumerate(compiled) if value is None or not math.isfinite(value)), None
    )
    message = ""
    if broken is not None and eager_finite:
        message = f"the compiled loss is {compiled[broken]} at step {broken}, the eager one is not"
    elif drift > allowed:
        apart = [_difference_at(eager[0], compiled, i) > allowed for i in range(len(compiled))]
        first = apart.index(True)
        message = (
            f"the losses differ by {drift:.1%} of their size from step {first} on,"
            f" where {dtype} and eager's own spread explain {allowed:.2%}"
        )
    return Agreement(
        agrees=not message,
        drift=drift if math.isfinite(drift) else None,
        scale=max(repeat, over_seeds),
        stochastic=stochastic,
        message=message,
    )


def _difference(first: list[Any], second: list[Any]) -> float:
    return max((_difference_at(first, second, i) for i in range(len(first))), default=0.0)


def _difference_at(first: list[Any], second: list[Any], index: int) -> float:
    """Returns the relative difference of two losses.

    Relative to a hundredth of the run's first loss at least, so that a loss that falls to nearly
    nothing does not make rounding look like an error.
    """
    a, b, start = first[index], second[index], first[0]
    if a is None or b is None or not all(map(math.isfinite, (a, b, start))):
        same = a == b or (a != a and b != b)
        return 0.0 if same else math.inf
    return float(abs(a - b) / max(abs(a), 1e-2 * abs(start), 1e-12))
