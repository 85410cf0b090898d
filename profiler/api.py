"""Trials for pipelines: `profile` measures one configuration, `diagnose` says what holds it up."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from advisor.profiler.diagnosis import diagnosis, fixes, what_if_configs
from advisor.profiler.launch import TrialHost
from advisor.profiler.records import (
    Config,
    Deadlines,
    Diagnosis,
    Measuring,
    Progress,
    Trial,
    TrialKind,
    TrialSpec,
    WorkloadSpec,
)
from advisor.profiler.reproduction import with_reproduction


def profile(
    workload: str | WorkloadSpec,
    config: Config | None = None,
    *,
    device: str = "auto",
    folder: str | os.PathLike[str] | None = None,
    deadlines: Deadlines | None = None,
    measuring: Measuring | None = None,
    memory_limit_bytes: int | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Trial:
    """Measures one configuration (None: eager alone) in a process of its own.

    `workload` is named as on the command line, from the current folder. The compile cache stays in
    `folder` when one is given, and is deleted otherwise; `folder`/reproductions/TRIAL then holds
    what repeats a trial that went wrong. Returns the trial, whose status tells whatever went wrong
    in it. Raises `WorkloadError` when the workload cannot be used at all,
    `PlanError` for an unknown device, `HostError` when no trial can be started. Not for use within
    a running event loop: await `profile_async` there.
    """
    return asyncio.run(
        profile_async(
            workload,
            config,
            device=device,
            folder=folder,
            deadlines=deadlines,
            measuring=measuring,
            memory_limit_bytes=memory_limit_bytes,
            on_progress=on_progress,
        )
    )


async def profile_async(
    workload: str | WorkloadSpec,
    config: Config | None = None,
    *,
    device: str = "auto",
    folder: str | os.PathLike[str] | None = None,
    deadlines: Deadlines | None = None,
    measuring: Measuring | None = None,
    memory_limit_bytes: int | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Trial:
    """As `profile`, within an event loop. Cancelling it ends the trial's whole process tree."""
    with _folder(folder) as place:
        spec = TrialSpec(
            trial_id=uuid.uuid4().hex,
            kind=TrialKind.EAGER if config is None else TrialKind.COMPILE,
            workload=_spec_of(workload, device),
            folder=str(place),
            config=config,
            deadlines=deadlines or Deadlines(),
            measuring=measuring or Measuring(),
            memory_limit_bytes=memory_limit_bytes,
        )
        async with TrialHost.start() as host:
            trial = await host.run(spec, on_progress)
        return with_reproduction(trial, spec, place / "reproductions") if folder else trial


def count(workload: str | WorkloadSpec, *, deadlines: Deadlines | None = None) -> Trial:
    """Counts what a training step has to do, in a process of its own, without running it.

    The model is built from shapes alone: it needs neither its memory nor its device. Returns a
    trial with `counts` and `workload`. Raises `WorkloadError` when the workload cannot be used,
    `HostError` when no process can be started. Not for use within a running event loop.
    """
    return asyncio.run(_count(_spec_of(workload, "cpu"), deadlines or Deadlines()))


async def _count(workload: WorkloadSpec, deadlines: Deadlines) -> Trial:
    with _folder(None) as place:
        spec = TrialSpec(
            trial_id=uuid.uuid4().hex,
            kind=TrialKind.COUNT,
            workload=workload,
            folder=str(place),
            config=None,
            deadlines=deadlines,
        )
        async with TrialHost.start() as host:
            return await host.run(spec, lambda _: None)


def diagnose(
    workload: str | WorkloadSpec,
    config: Config | None = None,
    *,
    device: str = "auto",
    what_if: bool = True,
    folder: str | os.PathLike[str] | None = None,
    deadlines: Deadlines | None = None,
    measuring: Measuring | None = None,
    memory_limit_bytes: int | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Diagnosis:
    """Measures why compiling gains what it gains (the whole model in mode default, if None).

    Runs an eager trial, one of `config`, and with `what_if` one for each of the settings of the
    compiler that remove a cause of it (two at most). Returns the causes with their mends, the one
    that pays most first, weighed against an hour of training. Takes and raises what `profile`
    does.
    """
    return asyncio.run(
        diagnose_async(
            workload,
            config,
            device=device,
            what_if=what_if,
            folder=folder,
            deadlines=deadlines,
            measuring=measuring,
            memory_limit_bytes=memory_limit_bytes,
            on_progress=on_progress,
        )
    )


async def diagnose_async(
    workload: str | WorkloadSpec,
    config: Config | None = None,
    *,
    device: str = "auto",
    what_if: bool = True,
    folder: str | os.PathLike[str] | None = None,
    deadlines: Deadlines | None = None,
    measuring: Measuring | None = None,
    memory_limit_bytes: int | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Diagnosis:
    """As `diagnose`, within an event loop. Cancelling it ends the running trial's whole tree."""
    spec = _spec_of(workload, device)
    trials: list[Trial] = []

    async def measure(one: Config | None) -> Trial:
        trials.append(
            await profile_async(
                spec,
                one,
                # One that is given keeps what each trial leaves, apart from the others'.
                folder=None if folder is None else Path(folder) / f"trial-{len(trials) + 1}",
                deadlines=deadlines,
                measuring=measuring,
                memory_limit_bytes=memory_limit_bytes,
                on_progress=on_progress,
            )
        )
        return trials[-1]

    await measure(None)
    tried = await measure(config or Config())
    for changed in what_if_configs(tried) if what_if else ():
        await measure(changed)
    return diagnosis(spec.target, trials, fixes(trials))


def _spec_of(workload: str | WorkloadSpec, device: str) -> WorkloadSpec:
    if isinstance(workload, WorkloadSpec):
        return workload
    return WorkloadSpec(target=workload, cwd=str(Path.cwd()), device=device)


@contextlib.contextmanager
def _folder(kept: str | os.PathLike[str] | None) -> Iterator[Path]:
    if kept is not None:
        path = Path(kept).resolve()
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        yield path
        return
    path = Path(tempfile.mkdtemp(prefix="advisor-trial-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
