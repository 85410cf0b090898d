"""Where a trial runs, what it held, and what else the machine was doing meanwhile."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from advisor.profiler import process_tree
from advisor.profiler.place import cpu_name
from advisor.profiler.records import Environment

# Others that take more than this share of one core disturb what is measured.
_FOREIGN_CORES = 0.15
_STOLEN_SHARE = 0.02
_SHORTEST_WATCH_S = 0.5
# A clock below this share of its highest under full load is throttled.
_THROTTLED_SHARE = 0.7


def environment(device: torch.device) -> Environment:
    """Returns the versions, the device and the machine that this process sees."""
    cuda = device.type == "cuda"
    properties = torch.cuda.get_device_properties(device) if cuda else None
    # Since torch 2.4; without it the GPU cannot be watched from outside.
    uuid = getattr(properties, "uuid", None)
    return Environment(
        torch=str(torch.__version__),
        python=platform.python_version(),
        device=str(device),
        device_name=properties.name if properties is not None else cpu_name(),
        cores=len(os.sched_getaffinity(0)),
        threads=torch.get_num_threads(),
        memory_bytes=(
            properties.total_memory if properties is not None else psutil.virtual_memory().total
        ),
        transformers=_version("transformers"),
        cuda=torch.version.cuda or "",
        driver=_nvidia_driver() if cuda else "",
        platform=sys.platform,
        device_uuid=f"GPU-{uuid}" if uuid else "",
        capability=f"{properties.major}.{properties.minor}" if properties is not None else "",
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _nvidia_driver() -> str:
    with contextlib.suppress(OSError, IndexError):
        text = Path("/proc/driver/nvidia/version").read_text()
        return text.split("Kernel Module", 1)[1].split()[0]
    return ""


class PeakMemory:
    """Peak memory since the last `restart`: of the CUDA allocator, or resident on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.restart()

    def restart(self) -> None:
        """Forgets the peak so far."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            # Writing 5 resets the peak resident size (proc(5), clear_refs). Refused in some
            # containers: then the peak is of the process's whole life, an upper bound.
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")

    def peak_bytes(self) -> int | None:
        """Returns the peak in bytes, or None where the system does not tell."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        with contextlib.suppress(OSError, ValueError, IndexError):
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        return None


@dataclass(slots=True)
class _Reading:
    at_s: float
    busy_s: float
    stolen_s: float
    own_s: float


class Watch:
    """What else ran on the machine between its start and `sentences()`."""

    def __init__(self, leader: int | None = None) -> None:
        """`leader` is the process whose tree is measured; absent, it is this one."""
        self._leader = os.getpid() if leader is None else leader
        self._begun = _read(self._leader)

    def sentences(self) -> list[str]:
        """Returns what disturbed the measurement, each as a sentence; empty when nothing did."""
        now = _read(self._leader)
        wall_s = now.at_s - self._begun.at_s
        if wall_s < _SHORTEST_WATCH_S:
            return []
        found = []
        own_s = now.own_s - self._begun.own_s
        foreign = max(0.0, now.busy_s - self._begun.busy_s - own_s) / wall_s
        if foreign > _FOREIGN_CORES:
            found.append(
                f"other processes used {foreign:.1f} of {psutil.cpu_count()} cores while it was"
                " measured: step times are less certain than they look"
            )
        stolen = (now.stolen_s - self._begun.stolen_s) / wall_s / (psutil.cpu_count() or 1)
        if stolen > _STOLEN_SHARE:
            found.append(
                f"the hypervisor took {stolen:.0%} of the CPU time away while it was measured"
            )
        clock: object = psutil.cpu_freq()  # None where the system does not tell
        highest, now_mhz = getattr(clock, "max", 0.0), getattr(clock, "current", 0.0)
        if highest and now_mhz < _THROTTLED_SHARE * highest:
            found.append(f"the CPU ran at {now_mhz:.0f} of {highest:.0f} MHz: it may be throttled")
        return found


def _read(leader: int) -> _Reading:
    times = psutil.cpu_times()
    stolen_s = getattr(times, "steal", 0.0)
    busy_s = times.user + times.nice + times.system + getattr(times, "irq", 0.0)
    busy_s += getattr(times, "softirq", 0.0)
    own_s = 0.0
    for pid in (leader, *process_tree.descendants(leader)):
        with contextlib.suppress(psutil.Error):
            used = psutil.Process(pid).cpu_times()
            own_s += used.user + used.system
            if pid == leader:
                # What it has started and what has ended since.
                own_s += used.children_user + used.children_system
    return _Reading(at_s=time.monotonic(), busy_s=busy_s, stolen_s=stolen_s, own_s=own_s)
