"""A small training, plain or with AutoCompile, that tests compare number by number."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from advisor.autocompile import AutoCompile
from advisor.models.loop_policy import Outlook
from advisor.models.prior import LEVELS_OF_BELIEF, Belief, normal_quantiles
from advisor.profiler.records import Config

# Traces as any other and compiles no kernel: what is tested here is the loop.
QUICK = Config(backend="eager")


def around(middle: float) -> Belief:
    return Belief(math.log(middle) + 0.1 * normal_quantiles(LEVELS_OF_BELIEF))


def hopeful(_: float) -> Outlook:
    return Outlook(speedup=around(2.0), compile_s=around(0.001))


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(16, 32)
        self.norm = torch.nn.BatchNorm1d(32)
        self.drop = torch.nn.Dropout(0.1)
        self.last = torch.nn.Linear(32, 4)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.drop(self.norm(self.first(given)).relu()))
        return out


class Loop:
    """A plain training, with what it leaves: losses, weights, optimizer, random numbers."""

    def __init__(self, model: Callable[[], torch.nn.Module] = Net) -> None:
        torch.manual_seed(0)
        self.model = model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.losses: list[float] = []

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.model(batch).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        self.losses.append(float(loss.detach()))
        return loss.detach()

    def run(self, steps: int, auto: AutoCompile | None = None) -> Loop:
        for number in range(steps):
            batch = torch.full((8, 16), 0.1) + number / 100
            if auto is None:
                self.step(batch)
            else:
                with auto.step():
                    self.step(batch)
        return self

    def state(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def run_until_compiled(loop: Loop, auto: AutoCompile) -> int:
    """Trains until compiling has begun; returns the number of steps."""
    for number in range(100):
        if auto.compiled:
            return number
        with auto.step():
            loop.step(torch.full((8, 16), 0.1) + number / 100)
    raise AssertionError("nothing was compiled")


def same(one: Loop, other: Loop) -> None:
    assert one.losses == other.losses
    states = one.state(), other.state()
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name
