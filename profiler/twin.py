"""The flip's self-test: a model flipped to eager against a twin that was never compiled."""

from __future__ import annotations

import copy

import psutil
import torch

from advisor.profiler import statistics
from advisor.profiler.records import Pair
from advisor.profiler.timing import block_steps, timed
from advisor.profiler.training import Trainer
from advisor.profiler.workload import Workload

_QUADS = 4
# A twin doubles weights, gradients and optimizer state: no more than this share of what is free.
_MOST_MEMORY_SHARE = 0.25
_COPIES = 5


def twin_of(trainer: Trainer) -> Trainer | None:
    """Returns a trainer of a copy of the model, never compiled; None where none can be made.

    `nn.Module` leaves its compiled call out of copies (`__getstate__`). The model must be flipped
    to eager. None when memory is short, or when model or optimizer cannot be copied.
    """
    held = sum(p.numel() * p.element_size() for p in trainer.model.parameters())
    if trainer.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(trainer.device)
    else:
        free = psutil.virtual_memory().available
    if _COPIES * held > _MOST_MEMORY_SHARE * free:
        return None
    try:
        model, optimizer = copy.deepcopy((trainer.model, trainer.optimizer))
    except Exception:  # noqa: BLE001 - the person's own classes decide how they copy, or refuse to
        return None
    workload = Workload(
        model=model,
        batches=[],
        loss=trainer.loss,
        optimizer=optimizer,
        step=trainer.own_step,
    )
    return Trainer(workload, trainer.device)


def flip_check(trainer: Trainer, step_s: float) -> float | None:
    """Returns how many times as long a step of flipped eager takes as one of its twin.

    Measured in ABBA quads; of the ratio's 90 % interval the bound nearest to 1 is returned, and 1
    when 1 lies within: what is left is what noise does not explain. None without a twin.
    """
    twin = twin_of(trainer)
    if twin is None:
        return None
    pairs = []
    for _ in range(_QUADS):
        batches = trainer.batches.take(block_steps(step_s))
        twin.run(batches[:1])
        times = [timed(arm, batches) for arm in (trainer, twin, twin, trainer)]
        pairs.append(Pair(eager_s=times[0] + times[3], compiled_s=times[1] + times[2]))
    ratio = statistics.speedup(pairs)
    if ratio.low <= 1.0 <= ratio.high:
        return 1.0
    return ratio.low if ratio.low > 1.0 else ratio.high
