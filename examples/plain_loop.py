"""A training loop in plain PyTorch, which decides by itself whether to compile.

    python examples/plain_loop.py --steps 2000 --checkpoint /tmp/plain.pt
    python examples/plain_loop.py --steps 2000 --checkpoint /tmp/plain.pt --without

The change is one object and `auto.wrap` around the function that runs a whole optimizer step (or
`with auto.step():` around its lines). The model is compiled in place: a checkpoint has the names
and the contents of one that was written without, and the second command trains on from the first
one's. A short run like this one stays eager; `--always-try` compiles in any case.
"""

import argparse
import itertools
from pathlib import Path

import torch
from docstring_task import bert, samples

from advisor.autocompile import AutoCompile


class Training:
    """A model, its optimizer and its data: what a checkpoint holds, and a step of it."""

    def __init__(self) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = bert().to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-4)
        self.done = 0

    def batches(self):
        """Yields the batches that are still to come, epoch after epoch, each in its own order."""
        data = samples()
        for epoch in itertools.count():
            order = torch.Generator().manual_seed(epoch)
            loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True, generator=order)
            skipped = max(0, self.done - epoch * len(loader))
            yield from itertools.islice(loader, skipped, None)

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        """Takes one optimizer step; returns its loss."""
        self.optimizer.zero_grad()
        loss = self.model(**{name: value.to(self.device) for name, value in batch.items()}).loss
        loss.backward()
        self.optimizer.step()
        self.done += 1
        return float(loss.detach())

    def save(self, file: Path) -> None:
        """Writes a checkpoint."""
        kept = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({**kept, "done": self.done}, file)

    def load(self, file: Path) -> None:
        """Reads a checkpoint."""
        kept = torch.load(file, weights_only=True, map_location=self.device)
        self.model.load_state_dict(kept["model"])
        self.optimizer.load_state_dict(kept["optimizer"])
        self.done = kept["done"]


def train(training: Training, steps: int, auto: AutoCompile | None) -> list[float]:
    """Takes so many more steps; returns their losses."""
    step = training.step if auto is None else auto.wrap(training.step)
    return [step(batch) for batch in itertools.islice(training.batches(), steps)]


def main() -> None:
    """Trains, and prints what was decided and saved."""
    parser = argparse.ArgumentParser(description="Trains a tiny BERT with AutoCompile.")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--checkpoint", type=Path, help="train on from this file, and write it")
    parser.add_argument("--without", action="store_true", help="train without AutoCompile")
    parser.add_argument("--always-try", action="store_true", help="compile and measure in any case")
    options = parser.parse_args()
    training = Training()
    if options.checkpoint and options.checkpoint.exists():
        training.load(options.checkpoint)
    auto = None
    if not options.without:
        auto = AutoCompile(training.model, steps=options.steps, always_try=options.always_try)
    losses = train(training, options.steps, auto)
    print(f"The loss after {training.done} steps is {losses[-1]:.4f}.")
    if auto is not None:
        print(auto.report())
    if options.checkpoint:
        training.save(options.checkpoint)


if __name__ == "__main__":
    main()
