"""What the ranks of one training tell each other, so that all of them choose alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from advisor.models.loop_policy import Believe, Outlook
from advisor.models.prior import Belief


@dataclass(frozen=True, slots=True)
class Said:
    """What a step was on the rank on which it was worst."""

    took_s: float
    compiling: bool
    failed: bool


class Ranks:
    """The ranks of the default process group; each must make every call that the others make."""

    def __init__(self, device: torch.device) -> None:
        # NCCL takes tensors of its own device only, Gloo takes any.
        on_gpu = "nccl" in str(torch.distributed.get_backend()).lower()
        self._device = device if on_gpu else torch.device("cpu")
        self.rank = torch.distributed.get_rank()

    @classmethod
    def here(cls, device: torch.device) -> Ranks | None:
        """Returns the ranks of this training; None where it has one."""
        distributed = torch.distributed
        if not (distributed.is_available() and distributed.is_initialized()):
            return None
        return cls(device) if distributed.get_world_size() > 1 else None

    def worst(self, said: Said) -> Said:
        """Returns the slowest rank's step, and whether any compiled or failed in it."""
        values = [said.took_s, float(said.compiling), float(said.failed)]
        took_s, compiling, failed = self._shared(values, torch.distributed.ReduceOp.MAX)
        return Said(took_s, bool(compiling), bool(failed))

    def believing(self, believe: Believe) -> Believe:
        """Returns the belief of rank 0, which all ranks then have."""

        def shared(step_s: float) -> Outlook:
            own = believe(step_s)
            both = [*own.speedup.logs.tolist(), *own.compile_s.logs.tolist()]
            mine = both if self.rank == 0 else [0.0] * len(both)
            logs = self._shared(mine, torch.distributed.ReduceOp.SUM)
            half = len(logs) // 2
            return Outlook(
                speedup=Belief(torch.tensor(logs[:half], dtype=torch.float64).numpy()),
                compile_s=Belief(torch.tensor(logs[half:], dtype=torch.float64).numpy()),
            )

        return shared

    def _shared(
        self, values: list[float], how: torch.distributed.ReduceOp.RedOpType
    ) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device=self._device)
        torch.distributed.all_reduce(tensor, op=how)
        return [float(value) for value in tensor.tolist()]
