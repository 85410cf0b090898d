"""What ranks say to each other in a step, and how fast they can: calls, bytes, latency, speed."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from advisor.profiler.peers import Peers
from advisor.profiler.records import Collective

# Sizes of the all-reduces that are timed, in bytes, and how often each is.
_SIZES_BYTES = (1 << 10, 1 << 16, 1 << 20, 1 << 22, 1 << 24)
_TIMES = 5
# Events of torch's profiler by the collective that they are, whatever the backend.
_NAMES = {
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "broadcast": "broadcast",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
}


def of_step(run: Callable[[], object]) -> tuple[Collective, ...]:
    """Returns the collectives of what `run` runs, by kind, as torch's profiler records them.

    Each rank must run it at the same time. Empty when this torch records none.
    """
    calls: Counter[str] = Counter()
    sizes: defaultdict[str, float] = defaultdict(float)
    with torch.profiler.profile(record_shapes=True) as profile:
        run()
    for event in profile.events() or ():
        kind = _kind(str(event.name))
        if kind is None:
            continue
        calls[kind] += 1
        sizes[kind] += _bytes_of(event)
    return tuple(
        Collective(name=name, calls=float(calls[name]), part_bytes=sizes[name])
        for name in sorted(calls)
    )


def _kind(name: str) -> str | None:
    """Returns which collective an event of the profiler is; None for any other event.

    `c10d::allreduce_` is the operator that a job calls, whatever runs it.
    """
    if not name.startswith("c10d::"):
        return None
    called = name.removeprefix("c10d::").strip("_").removesuffix("_base").removesuffix("_coalesced")
    called = called.removesuffix("_tensor_into").replace("_base", "")
    return next((kind for begin, kind in _NAMES.items() if called.startswith(begin)), None)


def _bytes_of(event: Any) -> float:
    """Returns the bytes of the largest tensor that a collective was given on this rank."""
    shapes = [shape for shape in event.input_shapes or () if shape]
    return max((float(np.prod(_flat(shape))) for shape in shapes), default=0.0) * 4.0


def _flat(shape: Any) -> list[float]:
    """Returns the sizes in a shape; of a list of tensors, the sum of their elements."""
    if shape and isinstance(shape[0], list | tuple):
        return [sum(float(np.prod(one)) if one else 1.0 for one in shape)]
    return [float(size) for size in shape]


def speed(device: torch.device, peers: Peers) -> tuple[float | None, float | None]:
    """Returns the latency in seconds and the bytes a second of an all-reduce between the ranks.

    A line through the quickest times of several sizes, the slowest rank's; of a ring, each byte
    travels 2 (n - 1) / n times (Thakur, Rabenseifner, Gropp 2005, and NCCL's busbw), which the
    bytes a second count.
    """
    if peers.count < 2:
        return None, None
    times = []
    for size in _SIZES_BYTES:
        tensor = torch.ones(size // 4, device=device)
        best_s = float("inf")
        for _ in range(_TIMES):
            _wait(device)
            torch.distributed.barrier()
            begun = time.perf_counter()
            torch.distributed.all_reduce(tensor)
            _wait(device)
            best_s = min(best_s, peers.most(time.perf_counter() - begun))
        times.append(best_s)
    travelled = np.asarray(_SIZES_BYTES) * 2 * (peers.count - 1) / peers.count
    # Relative errors: a line by absolute ones would be that of the largest size alone.
    weights = 1 / np.asarray(times)
    slope, latency_s = np.polyfit(travelled, times, 1, w=weights)
    if slope <= 0:
        return max(float(latency_s), min(times)), None
    return max(float(latency_s), 0.0), 1.0 / float(slope)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
