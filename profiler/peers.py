"""What the ranks of one trial tell each other, so that all of them take the same steps.

Every rank measures; whether to measure on is decided by all together, on the slowest rank's
figures: one that took a step more would wait for ever in its collective. Alone, nothing is said.
"""

from __future__ import annotations

import torch


class Peers:
    """One process that measures alone."""

    rank = 0
    count = 1

    def most(self, value: float) -> float:
        """Returns the largest value of all ranks. Each rank must make each call."""
        return value

    def each(self, value: float) -> list[float]:
        """Returns the value of each rank, in their order."""
        return [value]

    def any(self, flag: bool) -> bool:
        """Returns whether the flag is set on at least one rank."""
        return self.most(float(flag)) > 0


class Ranks(Peers):
    """The ranks of the default process group, which talk through a group of their own.

    A group apart, and over the machine's memory: what is told must not stand in the queue of the
    collectives that are measured, nor need the accelerator.
    """

    def __init__(self) -> None:
        self.rank = torch.distributed.get_rank()
        self.count = torch.distributed.get_world_size()
        self._group = torch.distributed.new_group(backend="gloo")

    def most(self, value: float) -> float:
        tensor = torch.tensor([value], dtype=torch.float64)
        torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX, group=self._group)
        return float(tensor)

    def each(self, value: float) -> list[float]:
        values = torch.zeros(self.count, dtype=torch.float64)
        values[self.rank] = value
        torch.distributed.all_reduce(values, group=self._group)
        return [float(one) for one in values]
