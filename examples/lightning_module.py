"""Training with Lightning, which decides by itself whether to compile.

    pip install "compile-advisor[lightning]"
    python examples/lightning_module.py --steps 2000

The whole change is `callbacks=[AdviseCallback()]`. Lightning calls `training_step`, and that calls
`self.model`: the first step is watched to see which module it is, and that one is compiled in place
(`AdviseCallback(module="model")` names it instead). Nothing in a checkpoint changes: train on with
`trainer.fit(module, ckpt_path=...)`, with or without the callback. With accumulated gradients a
step is all of its batches. A short run like this one stays eager; `--always-try` compiles in any
case.
"""

import argparse
from pathlib import Path

import lightning
import torch
from docstring_task import bert, samples

from advisor.integrations.lightning import AdviseCallback


class Classifier(lightning.LightningModule):
    """Tells which package a sentence comes from; remembers its losses."""

    def __init__(self) -> None:
        super().__init__()
        self.model = bert()
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, torch.Tensor], number: int) -> torch.Tensor:
        """Returns the loss of a batch."""
        loss: torch.Tensor = self.model(**batch).loss
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=2e-4)


def loader() -> torch.utils.data.DataLoader[dict[str, torch.Tensor]]:
    """Returns batches of 8 sentences, in the same order each time."""
    order = torch.Generator().manual_seed(0)
    data = samples()
    return torch.utils.data.DataLoader(data, batch_size=8, shuffle=True, generator=order)  # type: ignore[arg-type]


def trainer(
    steps: int, callbacks: list[lightning.Callback], folder: Path | None = None, **options: object
) -> lightning.Trainer:
    """Returns a Trainer as anyone would make it; checkpoints are kept where `folder` is given."""
    settings = {
        "max_steps": steps,
        "max_epochs": -1,
        "accelerator": "auto",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": folder is not None,
        "default_root_dir": folder,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **options,
    }
    return lightning.Trainer(callbacks=callbacks, **settings)


def main() -> None:
    """Trains, and prints what was decided and saved."""
    parser = argparse.ArgumentParser(description="Trains a tiny BERT with AdviseCallback.")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--always-try", action="store_true", help="compile and measure in any case")
    options = parser.parse_args()
    advise = AdviseCallback(always_try=options.always_try)  # prints its report at the end
    trainer(options.steps, [advise]).fit(Classifier(), loader())


if __name__ == "__main__":
    main()
