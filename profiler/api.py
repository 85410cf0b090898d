"""Trials for pipelines: `profile` measures one configuration, `diagnose` says what holds it up."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Callable
from pathlib import Path

from advisor.profiler.diagnosis import diagnosis, fixes, what_if_configs
from advisor.profiler.errors import WorkloadError
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
from advisor.profiler.stopping import Cancelled, Limits
from advisor.profiler.trial_folder import trial_folder
from advisor.profiler.within_loop import run_now

# How often somebody who may cancel is asked: seldom enough to cost what is measured nothing.
_ASKING_S = 0.2
# In the environment of a trial's process (`trial.py`).
TRIAL_ID = "ADVISOR_TRIAL_ID"


def profile(
    workload: str | WorkloadSpec,
    config: Config | None = None,
    *,
    device: str = "auto",
    folder: str | os.PathLike[str] | None = None,
    deadlines: Deadlines | None = None,
    deadline_s: float | None = None,
    measuring: Measuring | None = None,
    memory_limit_bytes: int | None = None,
    cancelled: Cancelled | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Trial:
    """Measures one configuration (None: eager alone) in a process of its own.

    `workload` is named as on the command line, from the current folder. The compile cache stays in
    `folder` when one is given, and is deleted otherwise; `folder`/reproductions/TRIAL then holds
    what repeats a trial that went wrong. Returns the trial, whose status tells whatever went wrong
    in it: once `deadlines` of a phase or `deadline_s` in all have passed, that is `TIMED_OUT`, and
    `CUT_OFF` when `cancelled` is set or returns true. What `on_progress` raises ends it and comes
    out here, as does Ctrl-C. Raises `WorkloadError` when the workload cannot be used at all,
    `PlanError` for an unknown device, `HostError` when no trial can be started.

    Leaves nothing in this process, and no other process. From any thread, several at a time, and
    within a running event loop, as in a notebook, where it blocks the loop and calls `on_progress`
    from another thread: `await profile_async` does neither. For live objects there is
    `profile_here`.
    """
    return run_now(
        profile_async(
            workload,
            config,
            device=device,
            folder=folder,
            deadlines=deadlines,
            deadline_s=deadline_s,
            measuring=measuring,
            memory_limit_bytes=memory_limit_bytes,
            cancelled=cancelled,
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
    deadline_s: float | None = None,
    measuring: Measuring | None = None,
    memory_limit_bytes: int | None = None,
    cancelled: Cancelled | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Trial:
    """As `profile`, within an event loop. Cancelling it ends the trial's whole process tree."""
    _refuse_nesting()
    return await _trial(
        _spec_of(workload, device),
        config,
        folder=folder,
        deadlines=deadlines,
        measuring=measuring,
        memory_limit_bytes=memory_limit_bytes,
        limits=Limits(deadline_s, cancelled),
        on_progress=on_progress,
    )


async def _trial(
    workload: WorkloadSpec,
    config: Config | None,
    *,
    folder: str | os.PathLike[str] | None,
    deadlines: Deadlines | None,
    measuring: Measuring | None,
    memory_limit_bytes: int | None,
    limits: Limits,
    on_progress: Callable[[Progress], None],
) -> Trial:
    with trial_folder(folder) as place:
        spec = TrialSpec(
            trial_id=uuid.uuid4().hex,
            kind=TrialKind.EAGER if config is None else TrialKind.COMPILE,
            workload=workload,
            folder=str(place),
            config=config,
            deadlines=deadlines or Deadlines(),
            measuring=measuring or Measuring(),
            memory_limit_bytes=memory_limit_bytes,
            budget_s=limits.left_s,
        )
        async with TrialHost.start() as host:
            trial = await _within(limits, host, spec, on_progress)
        return with_reproduction(trial, spec, place / "reproductions") if folder else trial


async def _within(
    limits: Limits, host: TrialHost, spec: TrialSpec, on_progress: Callable[[Progress], None]
) -> Trial:
    """Returns the trial, ended early when a limit says so."""
    running = asyncio.ensure_future(host.run(spec, on_progress))
    try:
        while not running.done():
            reason = limits.reason()
            if reason is not None:
                host.end(spec, reason)
                break
            await asyncio.wait([running], timeout=_patience_s(limits))
        return await running
    except BaseException:
        # Cancelled itself, or asked and been answered with an error: the trial ends first.
        running.cancel()
        await asyncio.wait([running])
        raise


def _patience_s(limits: Limits) -> float | None:
    """Returns how long to sleep before the limits are looked at again; None: until it is over."""
    left_s = limits.left_s
    if limits.can_be_cancelled:
        return _ASKING_S if left_s is None else min(_ASKING_S, left_s)
    return left_s


def count(workload: str | WorkloadSpec, *, deadlines: Deadlines | None = None) -> Trial:
    """Counts what a training step has to do, in a process of its own, without running it.

    The model is built from shapes alone: it needs neither its memory nor its device. Returns a
    trial with `counts` and `workload`. Raises `WorkloadError` when the workload cannot be used,
    `HostError` when no process can be started.
    """
    return run_now(_count(_spec_of(workload, "cpu"), deadlines or Deadlines()))


async def _count(workload: WorkloadSpec, deadlines: Deadlines) -> Trial:
    _refuse_nesting()
    with trial_folder(None) as place:
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
    deadline_s: float | None = None,
    measuring: Measuring | None = None,
    memory_limit_bytes: int | None = None,
    cancelled: Cancelled | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Diagnosis:
    """Measures why compiling gains what it gains (the whole model in mode default, if None).

    Runs an eager trial, one of `config`, and with `what_if` one for each of the settings of the
    compiler that remove a cause of it (two at most). Returns the causes with their mends, the one
    that pays most first, weighed against an hour of training. Takes and raises what `profile`
    does; `deadline_s` is for all trials together.
    """
    return run_now(
        diagnose_async(
            workload,
            config,
            device=device,
            what_if=what_if,
            folder=folder,
            deadlines=deadlines,
            deadline_s=deadline_s,
            measuring=measuring,
            memory_limit_bytes=memory_limit_bytes,
            cancelled=cancelled,
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
    deadline_s: float | None = None,
    measuring: Measuring | None = None,
    memory_limit_bytes: int | None = None,
    cancelled: Cancelled | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Diagnosis:
    """As `diagnose`, within an event loop. Cancelling it ends the running trial's whole tree."""
    _refuse_nesting()
    spec, limits = _spec_of(workload, device), Limits(deadline_s, cancelled)
    trials: list[Trial] = []

    async def measure(one: Config | None) -> Trial:
        trials.append(
            await _trial(
                spec,
                one,
                # One that is given keeps what each trial leaves, apart from the others'.
                folder=None if folder is None else Path(folder) / f"trial-{len(trials) + 1}",
                deadlines=deadlines,
                measuring=measuring,
                memory_limit_bytes=memory_limit_bytes,
                limits=limits,
                on_progress=on_progress,
            )
        )
        return trials[-1]

    await measure(None)
    tried = await measure(config or Config())
    for changed in what_if_configs(tried) if what_if else ():
        if limits.reason() is None:
            await measure(changed)
    return diagnosis(spec.target, trials, fixes(trials))


def _refuse_nesting() -> None:
    """Raises `WorkloadError` within a trial: a file that asks for one when it is imported."""
    if TRIAL_ID in os.environ:
        raise WorkloadError(
            "the workload's file asks for a trial while a trial imports it",
            "each would start the next one, without end",
            'put the call under `if __name__ == "__main__":`, or the workload into another file',
        )


def _spec_of(workload: str | WorkloadSpec, device: str) -> WorkloadSpec:
    if isinstance(workload, WorkloadSpec):
        return workload
    return WorkloadSpec(target=workload, cwd=str(Path.cwd()), device=device)
