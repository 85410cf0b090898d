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
# How backends name their work in torch's profiler, after "gloo:" or "nccl:".
_NAMES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
_BACKENDS = ("gloo:", "nccl:", "ucc:", "xccl:")


def of_step(run: Callable[[], object], element_bytes: int) -> tuple[Collective, ...]:
    """Returns the collectives of what `run` runs, by kind, as torch's profiler records them.

    Each rank must run it at the same time. The backend's own work is counted, which may not be
    what was called: Gloo reduces and scatters by an all-reduce. Sizes are those of the tensor that
    each is given, `element_bytes` an element. Empty when this torch records none.
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
        sizes[kind] += element_bytes * max(map(_elements, event.input_shapes or ()), default=0.0)
    return tuple(
        Collective(name=name, calls=float(calls[name]), part_bytes=sizes[name])
        for name in sorted(calls)
    )


def _kind(name: str) -> str | None:
    """Returns which collective an event of the profiler is; None for any other event."""
    if not name.startswith(_BACKENDS):
        return None
    called = name.partition(":")[2].lstrip("_").replace("allgather", "all_gather")
    return next((kind for kind in _NAMES if called.startswith(kind)), None)


def _elements(shape: Any) -> float:
    """Returns how many elements a shape has; of a list of shapes, all together."""
    if shape and isinstance(shape[0], list | tuple):
        return sum(map(_elements, shape))
    return float(np.prod(shape)) if shape else 0.0


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
