"""Training jobs for several ranks, and how they go wrong, chosen by an environment variable."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

WIDTH = 16


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, 2 * WIDTH)
        self.down = torch.nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
        self.head = torch.nn.Linear(WIDTH, 1)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if os.environ.get("RANK") == "1" and os.environ.get("RANKS_DIFFER"):
            x = x * 2 - x
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.head(x)
        return result


def batches(step: int) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))


def _loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = model(batch).pow(2).mean()
    return result


def build(device: torch.device) -> dict[str, Any]:
    model = Net().to(device)
    return {
        "model": model,
        "batches": batches,
        "loss": _loss,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3),
    }


def sleeping(device: torch.device) -> dict[str, Any]:
    """Rank 1 sleeps for ever in its fourth step."""
    steps = iter(range(10**9))

    def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if next(steps) == 3 and os.environ["RANK"] == "1":
            time.sleep(1e6)
        return _loss(model, batch)

    return {**build(device), "loss": loss}


def failing(device: torch.device) -> dict[str, Any]:
    """Rank 1 raises in its fourth step."""
    steps = iter(range(10**9))

    def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if next(steps) == 3 and os.environ["RANK"] == "1":
            raise KeyError("no such batch")
        return _loss(model, batch)

    return {**build(device), "loss": loss}


def unusable(device: torch.device) -> dict[str, Any]:
    """The function raises on rank 1 only."""
    if os.environ["RANK"] == "1":
        raise FileNotFoundError("shard 1 is not there")
    return build(device)


def hooked(device: torch.device, wrap: Any) -> dict[str, Any]:
    """Wraps where it wants and makes its optimizer of what it was given back."""
    model = wrap(Net().to(device))
    return {
        "model": model,
        "batches": batches,
        "loss": _loss,
        "optimizer": torch.optim.SGD(model.parameters(), lr=1e-2),
    }


def meshed(device: torch.device, mesh: Any) -> dict[str, Any]:
    """Spreads its model by itself."""
    from torch.distributed.fsdp import fully_shard

    model = Net().to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return {
        "model": model,
        "batches": batches,
        "loss": _loss,
        "optimizer": torch.optim.SGD(model.parameters(), lr=1e-2),
    }


def flat(device: torch.device, mesh: Any) -> dict[str, Any]:
    """Shards its model by FSDP1 with flat parameters, of which dynamo compiles nothing."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(Net().to(device), device_id=device, use_orig_params=False)
    return {
        "model": model,
        "batches": batches,
        "loss": _loss,
        "optimizer": torch.optim.SGD(model.parameters(), lr=1e-2),
    }
