"""What NVML tells of a GPU that is shared or throttled, from facts as a driver gives them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from advisor.profiler.records import Phase, Progress
from advisor.service.accelerator import AcceleratorWatch

# As printed by nvidia-smi for an H200.
UUID = "GPU-3f2c7f0e-5f0e-7c6e-9d0b-1c2d3e4f5a6b"


class Driver:
    """A GPU with processes on it, as NVML shows it; the test moves them."""

    def __init__(self, *pids: int, reasons: int = 0x1) -> None:
        self.pids, self.reasons, self.asked = set(pids), reasons, 0

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        assert uuid == UUID
        return uuid

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        self.asked += 1
        return [SimpleNamespace(pid=pid, usedGpuMemory=1 << 30) for pid in self.pids]

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        return self.reasons


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def progress(phase: Phase) -> Progress:
    return Progress(trial_id="t", phase=phase)


def watch(driver: Driver, *own: int, clock: Clock | None = None) -> AcceleratorWatch:
    return AcceleratorWatch(driver, UUID, lambda: set(own), clock or Clock())


def test_a_device_of_ones_own_is_quiet() -> None:
    driver = Driver()
    seen = watch(driver, 100, 101)
    driver.pids = {101}
    seen.on_progress(progress(Phase.STEADY))
    assert seen.sentences() == ()


def test_another_process_is_named() -> None:
    driver = Driver(7)
    seen = watch(driver, 100, 101)
    driver.pids = {7, 101, 9}
    seen.on_progress(progress(Phase.STEADY))
    (sentence,) = seen.sentences()
    assert sentence.startswith("2 other processes used the GPU while it was measured (pid 7, 9)")


@pytest.mark.parametrize(
    ("before", "during", "foreign"),
    [((), {5001}, ()), ((4000,), {4000, 5001}, (4000,)), ((), {5001, 5002}, (5002,))],
)
def test_pids_of_another_namespace_are_told_apart_by_when_they_came(
    before: tuple[int, ...], during: set[int], foreign: tuple[int, ...]
) -> None:
    driver = Driver(*before)
    seen = watch(driver, 100, 101)
    driver.pids = during
    seen.on_progress(progress(Phase.STEADY))
    found = " ".join(seen.sentences())
    assert all(str(pid) in found for pid in foreign)
    assert bool(found) is bool(foreign)


def test_throttling_is_said_and_idling_is_not() -> None:
    driver = Driver(101, reasons=0x1 | 0x4 | 0x40)
    seen = watch(driver, 101)
    seen.on_progress(progress(Phase.STEADY))
    (sentence,) = seen.sentences()
    assert "held down by its power limit and its temperature (hardware)" in sentence


def test_it_is_asked_only_while_measuring_and_not_often() -> None:
    driver, clock = Driver(101), Clock()
    seen = watch(driver, 101, clock=clock)
    before = driver.asked
    for phase in (Phase.BUILD, Phase.COLD, Phase.NUMERICS):
        seen.on_progress(progress(phase))
    assert driver.asked == before
    for second in range(11):
        clock.now = float(second)
        seen.on_progress(progress(Phase.STEADY))
    assert driver.asked == before + 3


def test_without_a_driver_nothing_is_said() -> None:
    seen = AcceleratorWatch(None, UUID)
    seen.on_progress(progress(Phase.STEADY))
    assert seen.sentences() == ()


def test_a_drivers_error_does_not_fail_the_trial() -> None:
    class Broken(Driver):
        def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
            raise RuntimeError("GPU is lost")

    seen = watch(Broken(101), 101)
    seen.on_progress(progress(Phase.STEADY))
    assert seen.sentences() == ()
