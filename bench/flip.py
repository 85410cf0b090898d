"""Does the flip leave plain eager? A flipped model against a twin that was never compiled.

Both are run in ABBA turns on the same batches, in one process, on a step of about a millisecond,
where a wrapper left in place would show (the compiler's own `force_eager` stance is measured
beside it). The claim: flipped eager is within 2 % of the twin.

    python bench/flip.py
"""

from __future__ import annotations

import copy

import torch
from campaigns import machine, verdict
from torch import nn

from advisor.profiler.flip import Flip
from advisor.profiler.records import Config, Pair
from advisor.profiler.statistics import speedup
from advisor.profiler.timing import block_steps, timed
from advisor.profiler.training import Trainer
from advisor.profiler.workload import Workload

MOST_DIFFERENCE = 0.02
QUADS = 30


class Net(nn.Module):
    """Four small layers: a step that is nearly all call overhead."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the features."""
        return torch.tanh(self.layers(x))


def trainer_of(model: nn.Module) -> Trainer:
    """Returns a trainer of its own for a model."""
    batch = torch.randn(32, 64)
    return Trainer(
        Workload(
            model=model,
            batches=lambda _: batch,
            loss=lambda model, batch: model(batch).pow(2).mean(),
            optimizer=torch.optim.SGD(model.parameters(), lr=1e-4),
        ),
        torch.device("cpu"),
    )


def ratio(first: Trainer, second: Trainer, steps: int) -> float:
    """Returns how many times as long a step of `second` takes, by ABBA quads."""
    pairs = []
    for _ in range(QUADS):
        batches = first.batches.take(steps)
        times = [timed(arm, batches) for arm in (first, second, second, first)]
        pairs.append(Pair(eager_s=times[1] + times[2], compiled_s=times[0] + times[3]))
    found = speedup(pairs)
    print(f"  {found.median:.4f} ({found.low:.4f}-{found.high:.4f})")
    return found.median


def main() -> None:
    """Measures the twin against the flipped model, and against the stance."""
    print(machine())
    torch.set_num_threads(1)
    model = Net()
    twin = trainer_of(copy.deepcopy(model))
    flipped = trainer_of(model)
    flip = Flip([model], Config(backend="aot_eager"))
    flip.apply()
    flipped.run(flipped.batches.take(5))
    with torch.compiler.set_stance("force_eager"):
        steps = block_steps(timed(flipped, flipped.batches.take(50)) / 50)
        print("force_eager over the twin:")
        ratio(twin, flipped, steps)
    flip.to_eager()
    print("flipped eager over the twin:")
    difference = abs(ratio(twin, flipped, steps) - 1)
    verdict(
        f"the flip leaves plain eager, within {MOST_DIFFERENCE:.0%}",
        ok=difference <= MOST_DIFFERENCE,
    )


if __name__ == "__main__":
    main()
