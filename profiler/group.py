"""A trial on several ranks: started by torch's elastic launcher, watched, and ended for sure.

`run_group` runs in the trial's process, which leads: it starts one process for each rank
(`rank`), hears what they do (`group_watch`), and makes one trial of what they measured
(`group_outcome`). The trial host ends whatever is left, as for any trial.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from advisor.profiler.errors import PlanError
from advisor.profiler.group_outcome import Launched, merged, share_of_communication
from advisor.profiler.group_watch import GroupWatch
from advisor.profiler.rank import ALONE
from advisor.profiler.records import Trial, TrialKind, TrialSpec, TrialStatus, encode
from advisor.profiler.reporter import Reporter

_LOOPBACK = "127.0.0.1"
# How often torch's launcher looks whether a rank has died.
_MONITOR_S = 0.1
# Ranks that meet import torch first.
_MEETING_S = 120


def run_group(spec: TrialSpec, reporter: Reporter) -> Trial:
    """Returns the trial of all ranks together.

    Raises `WorkloadError` or `PlanError` when the workload cannot be used on them, or the port at
    which they are to meet is taken.
    """
    trial = merged(spec, _launched(spec, reporter))
    if spec.kind is TrialKind.EAGER and trial.status is TrialStatus.OK and trial.communication:
        reporter.tell("the same steps without communication", urgent=True)
        alone = _launched(spec, reporter, alone=True)
        trial = share_of_communication(trial, alone)
    return trial


def _launched(spec: TrialSpec, reporter: Reporter, *, alone: bool = False) -> Launched:
    """Runs the ranks to their end and returns what they said and how they ended.

    `alone`: their collectives return at once, without the others.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    workload, folder = spec.workload, Path(spec.folder)
    _check_port(workload.port)
    path = folder / "ranks.json"
    path.write_bytes(encode(spec))
    name = f"advisor-{spec.trial_id}{'-alone' if alone else ''}"
    watch = GroupWatch(name, workload.ranks, reporter, folder)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workload.ranks,
        run_id=name,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{_LOOPBACK}:{workload.port}",
        rdzv_configs={"timeout": _MEETING_S, "join_timeout": _MEETING_S},
        max_restarts=0,
        monitor_interval=_MONITOR_S,
        local_addr=_LOOPBACK,
    )
    # What is told of a rank that ends is told by us.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL + 1)
    failed: dict[int, tuple[float, int]] = {}
    watch.start()
    try:
        with _environment(name, workload.ranks, alone=alone):
            elastic_launch(config, sys.executable)("-P", "-m", "advisor.profiler.rank", str(path))
    except ChildFailedError as error:
        failed = {
            rank: (float(failure.timestamp), int(failure.exitcode))
            for rank, failure in error.failures.items()
        }
    finally:
        watch.stop()
    return Launched(members=watch.members, stalled=watch.stalled, failed=failed)


def _check_port(port: int) -> None:
    if not port:
        return
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((_LOOPBACK, port))
        except OSError as error:
            raise PlanError(
                f"port {port} cannot be used by the ranks to meet",
                error.strerror or str(error),
                "name a free one with --port, or none: then one is found",
            ) from error


@contextlib.contextmanager
def _environment(name: str, ranks: int, *, alone: bool) -> Iterator[None]:
    """Sets what the ranks inherit, and puts it back."""
    wanted = {
        "ADVISOR_RANKS_SOCKET": name,
        # All ranks are on this machine. Gloo would go by the host's name otherwise.
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        # torch's launcher would set it to 1, which the person may not want on many cores.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(_threads(ranks))),
    }
    if alone:
        wanted[ALONE] = "1"
    before = {key: os.environ.get(key) for key in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


def _threads(ranks: int) -> int:
    return max(1, len(os.sched_getaffinity(0)) // ranks)
