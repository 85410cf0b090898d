"""The person's code may do anything: the trial says what happened, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from advisor.profiler.api import profile
from advisor.profiler.errors import PlanError, WorkloadError
from advisor.profiler.launch import TrialHost
from advisor.profiler.records import (
    Config,
    Deadlines,
    Measuring,
    Progress,
    Trial,
    TrialKind,
    TrialSpec,
    TrialStatus,
    WorkloadSpec,
)

FILE = Path(__file__).parent / "workloads" / "hostile.py"
QUICK = Measuring(max_warm_up_s=2.0, max_steady_s=2.0)


@pytest.fixture(autouse=True)
def nothing_left(data_dir: Path) -> Iterator[None]:
    """Fails a test that leaves a process or a shared memory segment behind.

    Other tests run trials at the same time: theirs have another data folder.
    """
    before = set(os.listdir("/dev/shm"))
    yield
    me = psutil.Process()
    assert [child.cmdline() for child in me.children(recursive=True)] == []
    strays = [
        process.pid
        for process in psutil.process_iter(["environ"])
        if "ADVISOR_TRIAL_ID" in (environment := process.info["environ"] or {})
        and environment.get("ADVISOR_DATA_DIR") == str(data_dir)
    ]
    assert strays == []
    assert [name for name in set(os.listdir("/dev/shm")) - before if "psm_" in name] == []


def run(function: str, **options: object) -> Trial:
    return profile(f"{FILE}:{function}", device="cpu", measuring=QUICK, **options)  # type: ignore[arg-type]


def refused(function: str) -> WorkloadError:
    with pytest.raises(WorkloadError) as caught:
        run(function)
    message = str(caught.value)
    assert "\n" not in message
    return caught.value


def test_a_good_workload_is_measured() -> None:
    trial = run("good")
    assert trial.status is TrialStatus.OK
    assert trial.eager_step_s is not None and 0 < trial.eager_step_s.median < 1
    assert trial.workload is not None and trial.workload.parameters == 36


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("nowhere", "has no function 'nowhere'"),
        ("goood", "did you mean good?"),
        ("not_callable", "is a int, not a function"),
        ("takes_nothing", "the device as its only argument"),
        ("returns_none", "returned a NoneType"),
        ("no_model", "the workload has no 'model'"),
        ("misspelt_optimizer", "did you mean 'optimizer'?"),
        ("empty_batches", "batches is empty"),
        ("vector_loss", "tensor of shape (16,)"),
        ("nan_loss", "the loss of the first step is nan"),
        ("no_gradient", "the loss has no gradient"),
        ("loss_without_model", "no parameter of the model gets a gradient"),
        ("tuple_without_loss", "add 'loss'"),
        ("parameter_elsewhere", "parameter 1.weight is on meta, not on cpu"),
        ("exits", "it calls sys.exit(3)"),
    ],
)
def test_a_mistake_is_one_sentence(function: str, words: str) -> None:
    assert words in str(refused(function))


@pytest.mark.parametrize(
    ("function", "line", "words"),
    [
        ("raises", "_helper_that_raises", "KeyError: 'no such column: tokens'"),
        ("step_raises", "model(batch[:, :5])", "mat1 and mat2 shapes cannot be multiplied"),
    ],
)
def test_the_persons_own_traceback_is_shown_without_our_frames(
    function: str, line: str, words: str
) -> None:
    error = refused(function)
    assert words in str(error)
    assert line in error.user_traceback and str(FILE) in error.user_traceback
    assert "advisor/profiler" not in error.user_traceback
    assert "importlib" not in error.user_traceback


def test_a_missing_file_is_named() -> None:
    with pytest.raises(WorkloadError, match=r"nowhere\.py cannot be read: there is no such file"):
        profile("nowhere.py:build", device="cpu")


def test_a_missing_module_is_named() -> None:
    with pytest.raises(WorkloadError, match=r"no_such_module cannot be imported"):
        profile("no_such_module:build", device="cpu")


def test_an_absent_device_is_named() -> None:
    with pytest.raises(PlanError, match="device 'cuda:7' is not there"):
        profile(f"{FILE}:good", device="cuda:7")
    with pytest.raises(PlanError, match="device 'gpu' is unknown"):
        profile(f"{FILE}:good", device="gpu")


def test_a_one_shot_iterator_goes_round() -> None:
    trial = run("one_shot_batches")
    assert trial.status is TrialStatus.OK
    assert trial.workload is not None and trial.workload.batches_seen > 5


@pytest.mark.parametrize(
    ("function", "status", "words"),
    [
        ("killed", TrialStatus.CRASHED, "ended by SIGKILL during eager steps"),
        ("segfaults", TrialStatus.CRASHED, "ended by SIGSEGV during eager steps"),
        ("exits_silently", TrialStatus.CRASHED, "ended its process with status 0"),
        ("prints_a_gigabyte", TrialStatus.CRASHED, "printed more than 64 MiB"),
        ("writes_junk", TrialStatus.CRASHED, "wrote on the trial's result pipe"),
    ],
)
def test_an_end_is_named(function: str, status: TrialStatus, words: str) -> None:
    trial = run(function)
    assert trial.failure is not None
    assert (trial.status, words in trial.failure.message) == (status, True), trial.failure


@pytest.mark.parametrize("function", ["hangs", "hangs_deaf"])
def test_a_hang_is_ended_and_its_place_shown(function: str) -> None:
    trial = run(function, deadlines=Deadlines(warm_up_s=3.0))
    assert trial.status is TrialStatus.TIMED_OUT
    assert trial.failure is not None and "longer than 3 s" in trial.failure.message
    assert "hostile.py" in trial.stderr_tail
    assert trial.wall_s < 15


def test_a_memory_limit_ends_the_trial() -> None:
    trial = run("allocates", memory_limit_bytes=1 << 30)
    assert trial.status is TrialStatus.OUT_OF_MEMORY
    assert trial.failure is not None and "more than its limit of 1.07 GB" in trial.failure.message


@pytest.mark.parametrize("function", ["leaves_a_daemon", "closes_descriptors"])
def test_a_trial_survives_its_users_habits(function: str) -> None:
    assert run(function).status is TrialStatus.OK


def test_shared_memory_of_a_killed_trial_is_removed() -> None:
    assert run("leaves_shared_memory").status is TrialStatus.CRASHED


def _spec(folder: Path, function: str) -> TrialSpec:
    return TrialSpec(
        trial_id="one",
        kind=TrialKind.EAGER,
        workload=WorkloadSpec(target=f"{FILE}:{function}", cwd="/", device="cpu"),
        folder=str(folder),
        measuring=QUICK,
    )


async def _cancelled_when(folder: Path, function: str, phase: str) -> None:
    async with TrialHost.start() as host:
        reached = asyncio.Event()

        def watch(progress: Progress) -> None:
            if progress.phase.value == phase:
                reached.set()

        task = asyncio.create_task(host.run(_spec(folder, function), watch))
        await asyncio.wait_for(reached.wait(), 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        left = psutil.Process().children(recursive=True)
        assert len(left) == 1, "only the host itself is left"
        again = await host.run(replace(_spec(folder, "good"), trial_id="two"))
        assert again.status is TrialStatus.OK


@pytest.mark.parametrize("phase", ["build", "warm_up"])
def test_a_cancelled_trial_leaves_nothing_and_the_host_goes_on(tmp_path: Path, phase: str) -> None:
    asyncio.run(_cancelled_when(tmp_path, "hangs_deaf", phase))


async def _host_killed(folder: Path) -> None:
    async with TrialHost.start() as host:
        started = asyncio.Event()
        task = asyncio.create_task(host.run(_spec(folder, "hangs"), lambda progress: started.set()))
        await asyncio.wait_for(started.wait(), 60)
        (process,) = psutil.Process().children()
        trials = process.children(recursive=True)
        process.kill()
        with pytest.raises(Exception, match="ended by itself"):
            await task
        _, alive = psutil.wait_procs(trials, timeout=5)
        assert alive == []


def test_a_killed_host_takes_its_trial_with_it(tmp_path: Path) -> None:
    asyncio.run(_host_killed(tmp_path))


@pytest.mark.trial
def test_no_cxx_compiler_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    monkeypatch.setenv("CXX", "no-such-compiler")
    trial = run("good", config=Config())
    assert trial.status is TrialStatus.FAILED_TO_COMPILE
    assert trial.failure is not None and trial.failure.kind == "no_cxx_compiler"
    assert "install g++" in trial.failure.message
