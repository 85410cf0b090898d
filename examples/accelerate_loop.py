"""A loop with Accelerate and accumulated gradients, which decides by itself whether to compile.

    pip install "compile-advisor[accelerate]"
    accelerate launch examples/accelerate_loop.py --steps 2000

`AdviseLoop` takes the prepared model and compiles it in place, if that pays; `advise.batch()`
surrounds what is done with a batch, of which several may make a step. What `accelerator.save_state`
writes is what it writes without it.

Decided already, by `advise run`? `Accelerator(dynamo_plugin=plugin(advice))` compiles as advised,
also blocks alone (`scope` regional), without an `AdviseLoop`. A short run like this one stays
eager; `--always-try` compiles in any case.
"""

import argparse
import itertools

import torch
from accelerate import Accelerator
from docstring_task import bert, samples

from advisor.integrations.accelerate import AdviseLoop

ACCUMULATED = 2


def train(steps: int, folder: str = "", accelerator: Accelerator | None = None, **options) -> list:
    """Trains for optimizer steps, keeps the state in `folder`; returns the losses of all batches.

    `options` are those of `AdviseLoop`; `advised=False` leaves that out.
    """
    advised = options.pop("advised", True)
    accelerator = accelerator or Accelerator(gradient_accumulation_steps=ACCUMULATED)
    model = bert()
    order = torch.Generator().manual_seed(0)
    loader = torch.utils.data.DataLoader(samples(), batch_size=8, shuffle=True, generator=order)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if not advised:
        losses = [step(accelerator, model, optimizer, batch) for batch in batches(loader, steps)]
    else:
        with AdviseLoop(accelerator, model, steps=steps, **options) as advise:
            losses = []
            for batch in batches(loader, steps):
                with advise.batch():
                    losses.append(step(accelerator, model, optimizer, batch))
    if folder:
        accelerator.save_state(folder)
    return losses


def batches(loader, steps: int):
    """Returns as many batches as the steps take, epoch after epoch."""
    endless = itertools.chain.from_iterable(itertools.repeat(loader))
    return itertools.islice(endless, steps * ACCUMULATED)


def step(accelerator: Accelerator, model, optimizer, batch: dict[str, torch.Tensor]) -> float:
    """Returns the loss of a batch; every second one updates the weights."""
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


def main() -> None:
    """Trains, and prints what was decided and saved."""
    parser = argparse.ArgumentParser(description="Trains a tiny BERT with AdviseLoop.")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--always-try", action="store_true", help="compile and measure in any case")
    options = parser.parse_args()
    train(options.steps, always_try=options.always_try)  # prints the report at the end


if __name__ == "__main__":
    main()
