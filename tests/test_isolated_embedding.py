"""`profile` from any place in a person's process: loops, threads, scripts; and ended early."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from advisor.profiler import Trial, profile, profile_async
from advisor.profiler.records import Measuring, Phase, Progress, TrialStatus
from advisor.profiler.within_loop import run_now

QUICK = Measuring(max_warm_up_s=0.3)
WORKLOAD = f"{Path(__file__).parent / 'workloads' / 'compiling.py'}:gate"
SLEEPING = """
import time, torch

def build(device):
    def step(model, batch, optimizer):
        time.sleep(4)
        return model(batch).mean()
    return {"model": torch.nn.Linear(2, 2), "batches": [torch.ones(1, 2)], "step": step}
"""


def around() -> tuple[set[str], set[int], set[str]]:
    """Returns the threads, the child processes and the open descriptors of this process."""
    threads = {thread.name for thread in threading.enumerate() if not _ends(thread)}
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    files = set(os.listdir("/proc/self/fd"))
    return threads, children, files


def _ends(thread: threading.Thread) -> bool:
    # asyncio's thread that waits for a child ends a moment after the child.
    if thread.name.startswith("waitpid"):
        thread.join(2)
    return not thread.is_alive()


def test_a_coroutine_runs_within_a_loop_and_leaves_the_current_one() -> None:
    async def answer() -> str:
        await asyncio.sleep(0)
        return threading.current_thread().name

    async def cell() -> tuple[str, str]:
        return run_now(answer()), await answer()

    within, outside = asyncio.run(cell())
    assert within != outside
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        assert run_now(answer()) == threading.current_thread().name
        assert asyncio.get_event_loop_policy().get_event_loop() is loop
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def test_what_a_coroutine_raises_comes_out_of_the_thread() -> None:
    async def fail() -> None:
        raise ValueError("from within")

    async def cell() -> None:
        run_now(fail())

    with pytest.raises(ValueError, match="from within"):
        asyncio.run(cell())


@pytest.mark.trial
def test_profile_within_a_loop_and_in_two_threads_leaves_nothing() -> None:
    before, handler = around(), signal.getsignal(signal.SIGINT)
    environment, place = dict(os.environ), os.getcwd()

    def one(_: int) -> Trial:
        return profile(WORKLOAD, device="cpu", measuring=QUICK)

    async def cell() -> Trial:
        return one(0)

    async def task() -> Trial:
        return await profile_async(WORKLOAD, device="cpu", measuring=QUICK)

    with ThreadPoolExecutor(2) as pool:
        trials = [*pool.map(one, range(2))]
    trials += [asyncio.run(cell()), asyncio.run(task())]
    assert [trial.status for trial in trials] == [TrialStatus.OK] * 4
    assert around() == before
    assert signal.getsignal(signal.SIGINT) is handler
    assert (dict(os.environ), os.getcwd()) == (environment, place)


@pytest.mark.trial
def test_profile_ends_early_by_deadline_by_event_and_by_callback(tmp_path: Path) -> None:
    (tmp_path / "sleeping.py").write_text(SLEEPING)
    target = f"{tmp_path / 'sleeping.py'}:build"
    before, cancelled = around(), threading.Event()

    late = profile(target, device="cpu", deadline_s=8.0)
    assert late.status is TrialStatus.TIMED_OUT
    assert late.failure is not None
    assert late.failure.message == "the trial as a whole took longer than 8 s; it was ended"

    def cancel(progress: Progress) -> None:
        if progress.phase is Phase.WARM_UP:
            cancelled.set()

    off = profile(target, device="cpu", cancelled=cancelled, on_progress=cancel)
    assert off.status is TrialStatus.CUT_OFF
    assert off.failure is not None and off.failure.message == "the trial was cancelled"

    def refuse(progress: Progress) -> None:
        raise LookupError("not today")

    with pytest.raises(LookupError, match="not today"):
        profile(target, device="cpu", on_progress=refuse)
    assert around() == before


@pytest.mark.trial
def test_a_script_without_a_guard_is_not_run_again(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "from advisor.profiler import profile\n"
        "from advisor.profiler.records import Measuring\n"
        "print('once', flush=True)\n"
        f"trial = profile({WORKLOAD!r}, device='cpu', measuring=Measuring(max_warm_up_s=0.3))\n"
        "print(trial.status)\n"
    )
    done = _run(tmp_path / "script.py")
    assert (done.returncode, done.stdout.split()) == (0, ["once", "OK"]), done.stderr


@pytest.mark.trial
def test_a_script_that_holds_its_workload_is_told_to_guard_the_call(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        f"{SLEEPING}\n"
        "from advisor.profiler import WorkloadError, profile\n"
        "try:\n"
        "    profile('script.py:build', device='cpu')\n"
        "except WorkloadError as error:\n"
        "    import os\n"
        "    if 'ADVISOR_TRIAL_ID' in os.environ:\n"
        "        raise\n"
        "    print(error)\n"
    )
    done = _run(tmp_path / "script.py")
    assert done.stdout.startswith("the workload's file asks for a trial while a trial imports it")
    assert '(put the call under `if __name__ == "__main__":`' in done.stdout
    assert done.stderr == ""


def _run(script: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, script.name],
        cwd=script.parent,
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )
