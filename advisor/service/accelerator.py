"""Who else uses the GPU while a trial measures, and whether its clocks are held down.

Asked of NVML in the server, never in the trial host: a process that is to fork must not have
touched the driver. Asked only when a trial starts and while it measures, at most every few seconds.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, Protocol

import psutil

from advisor.profiler.records import Phase, Progress

_LEAST_PAUSE_S = 5.0
# NVML's reasons for lower clocks that slow a measurement down; idling and a limit that the person
# has set (nvidia-smi -lgc) are none (nvml.h, nvmlClocksEventReason*).
_SLOWING = {
    0x4: "its power limit",
    0x8: "hardware slowdown",
    0x20: "its temperature (software)",
    0x40: "its temperature (hardware)",
    0x80: "the power brake",
}


class Nvml(Protocol):
    """The part of NVML that is asked, as `pynvml` spells it."""

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:
        """Returns the handle of a device."""
        ...

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> list[Any]:
        """Returns the processes that have a context on the device, each with its `pid`."""
        ...

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Any) -> int:
        """Returns why the clocks are what they are, as bits."""
        ...


def open_nvml() -> Nvml | None:
    """Returns NVML, or None where its package (nvidia-ml-py) or driver is missing."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml  # type: ignore[no-any-return]


def own_processes() -> set[int]:
    """Returns the pids of this server and of everything below it."""
    me = psutil.Process()
    return {me.pid, *(child.pid for child in me.children(recursive=True))}


class AcceleratorWatch:
    """Samples one GPU around a trial. Make it before the trial starts.

    In a container NVML may name pids of the host, which match none of ours. Then what was on the
    device before the trial counts as foreign, and so does more than one newcomer.
    """

    def __init__(
        self,
        nvml: Nvml | None,
        uuid: str,
        own: Callable[[], set[int]] = own_processes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._nvml = nvml
        self._own = own
        self._clock = clock
        self._handle: Any = None
        self._foreign: set[int] = set()
        self._reasons = 0
        self._sampled_at = -_LEAST_PAUSE_S
        if nvml is not None and uuid:
            with contextlib.suppress(Exception):  # a driver's error is no reason to fail a trial
                self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        self._before = self._processes()

    def on_progress(self, progress: Progress) -> None:
        """Looks at the device when the trial measures and some seconds have passed."""
        now = self._clock()
        if progress.phase is Phase.STEADY and now - self._sampled_at >= _LEAST_PAUSE_S:
            self._sampled_at = now
            self._sample()

    def sentences(self) -> tuple[str, ...]:
        """Returns what disturbed the trial, each as a sentence; empty when nothing was seen."""
        found = []
        if self._foreign:
            count = len(self._foreign)
            found.append(
                f"{count} other process{'es' if count > 1 else ''} used the GPU while it was"
                f" measured (pid {', '.join(map(str, sorted(self._foreign)))}): step times are less"
                " certain than they look"
            )
        slowing = [words for bit, words in _SLOWING.items() if self._reasons & bit]
        if slowing:
            found.append(
                f"the GPU's clocks were held down by {' and '.join(slowing)} while it was measured"
            )
        return tuple(found)

    def _sample(self) -> None:
        if self._nvml is None or self._handle is None:
            return
        there, own = self._processes(), self._own()
        if there & own:
            self._foreign |= there - own
        else:
            newcomers = there - self._before
            self._foreign |= there & self._before
            if len(newcomers) > 1:  # one of them is the trial
                self._foreign |= set(sorted(newcomers)[1:])
        with contextlib.suppress(Exception):
            self._reasons |= self._nvml.nvmlDeviceGetCurrentClocksEventReasons(self._handle)

    def _processes(self) -> set[int]:
        if self._nvml is None or self._handle is None:
            return set()
        with contextlib.suppress(Exception):
            found = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
            return {int(process.pid) for process in found}
        return set()
