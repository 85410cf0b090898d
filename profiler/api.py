"""Trials for pipelines: `profile` measures one configuration and returns a `Trial`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from advisor.profiler.launch import TrialHost
from advisor.profiler.records import (
    Config,
    Deadlines,
    Measuring,
    Progress,
    Trial,
    TrialKind,
    TrialSpec,
    WorkloadSpec,
)


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
    `folder` when one is given, and is deleted otherwise. Returns the trial, whose status tells
    whatever went wrong in it. Raises `WorkloadError` when the workload cannot be used at all,
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
    if isinstance(workload, str):
        workload = WorkloadSpec(target=workload, cwd=str(Path.cwd()), device=device)
    with _folder(folder) as place:
        spec = TrialSpec(
            trial_id=uuid.uuid4().hex,
            kind=TrialKind.EAGER if config is None else TrialKind.COMPILE,
            workload=workload,
            folder=str(place),
            config=config,
            deadlines=deadlines or Deadlines(),
            measuring=measuring or Measuring(),
            memory_limit_bytes=memory_limit_bytes,
        )
        async with TrialHost.start() as host:
            return await host.run(spec, on_progress)


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
