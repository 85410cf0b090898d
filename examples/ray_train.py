"""Training with Ray Train: while they train, the workers decide together whether to compile.

    pip install "ray[train]"
    python examples/ray_train.py --workers 2 --steps 2000
    python examples/ray_train.py --local --steps 200       # the same loop, in this process, no Ray

The change is in the function that each worker runs. `AutoCompile` is given the model as
`prepare_model` returns it, and surrounds a step; the workers measure each for themselves and choose
alike. When an advice was made before (`advise run`), its compile cache lets every worker start
warm: give its name, `--advice ID`, and a folder that all of them see, `ADVISOR_DATA_DIR`.

Ray opens ports on all addresses of the machine: run it where that is meant.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

from advisor import handover
from advisor.autocompile import AutoCompile

try:
    import ray
    import ray.train
    import ray.train.torch
except ImportError:
    ray = None

MISSING = 'ray is not installed: pip install "ray[train]", or try the loop without it with --local'


class Regressor(torch.nn.Module):
    """A small multilayer perceptron."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns a number for each row."""
        return self.layers(x)


def train_loop_per_worker(config: dict[str, Any]) -> None:
    """Trains on one worker; reports the loss and what was decided."""
    if config.get("advice"):
        # Before anything is compiled: the worker then compiles from the cache of that advice.
        handover.activate(config["advice"])
    torch.manual_seed(0)
    model = prepared(Regressor())
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    auto = AutoCompile(model, steps=config["steps"], always_try=config.get("always_try", False))
    data = torch.Generator().manual_seed(rank())
    for _ in range(config["steps"]):
        batch = torch.randn(32, 64, generator=data).to(device)
        with auto.step():
            optimizer.zero_grad()
            loss = (model(batch) - batch.mean(dim=1, keepdim=True)).pow(2).mean()
            loss.backward()
            optimizer.step()
    found = {"loss": float(loss.detach()), "compiled": auto.compiled, "decision": auto.report()}
    report(found, model)


def within_ray() -> bool:
    """Returns whether this process is a worker of Ray Train."""
    return ray is not None and ray.is_initialized()


def prepared(model: torch.nn.Module) -> torch.nn.Module:
    """Returns the model on the worker's device, with gradients shared where there are several."""
    return ray.train.torch.prepare_model(model) if within_ray() else model


def rank() -> int:
    """Returns the number of this worker."""
    return int(ray.train.get_context().get_world_rank()) if within_ray() else 0


def report(metrics: dict[str, Any], model: torch.nn.Module) -> None:
    """Hands the metrics and a checkpoint to Ray Train; prints the metrics without it.

    The names in the checkpoint are those of a training that never compiled.
    """
    if not within_ray():
        print(metrics)
        return
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if rank() == 0:
            torch.save(model.state_dict(), Path(folder, "model.pt"))
            checkpoint = ray.train.Checkpoint.from_directory(folder)
        # Metrics that come without a checkpoint are not in the result of `fit`.
        ray.train.report(metrics, checkpoint=checkpoint)


def fit(workers: int, gpu: bool, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the metrics that the first of so many workers reports last."""
    if ray is None:
        raise SystemExit(MISSING)
    trainer = ray.train.torch.TorchTrainer(
        train_loop_per_worker,
        train_loop_config=config,
        scaling_config=ray.train.ScalingConfig(num_workers=workers, use_gpu=gpu),
    )
    return dict(trainer.fit().metrics or {})


def main() -> None:
    """Trains with so many workers, or here, and prints what they report."""
    parser = argparse.ArgumentParser(description="Trains with Ray Train and AutoCompile.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--advice", help="an advice whose compile cache the workers start from")
    parser.add_argument("--always-try", action="store_true", help="compile and measure in any case")
    parser.add_argument("--local", action="store_true", help="one worker, in this process")
    options = parser.parse_args()
    config = {
        "steps": options.steps,
        "advice": options.advice,
        "always_try": options.always_try,
    }
    if options.local:
        train_loop_per_worker(config)
    else:
        print(fit(options.workers, torch.cuda.is_available(), config))


if __name__ == "__main__":
    main()
