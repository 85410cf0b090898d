"""One rank of a trial: `python -P -m advisor.profiler.rank SPEC`, started by torch's launcher.

It tells the trial's leader what it does over the leader's socket, in the frames of `frames`, the
first of which says which rank it is. SIGUSR1 has it write where it is, for when it hangs.
"""

from __future__ import annotations

import datetime
import faulthandler
import os
import signal
import socket
import sys
import threading
from pathlib import Path

import torch

from advisor.profiler import torch_internals
from advisor.profiler.compile_failure import failed_trial
from advisor.profiler.errors import PlanError, WorkloadError
from advisor.profiler.frames import Compiling, Hello, Result, Unusable
from advisor.profiler.peers import Peers
from advisor.profiler.rank_measurement import RankMeasurement
from advisor.profiler.records import TrialSpec, decode
from advisor.profiler.reporter import Reporter
from advisor.profiler.workload import device_of

STACK = "rank{}.stack"
# Longer than any phase: what hangs is found by the leader, which knows all ranks.
_COLLECTIVE_TIMEOUT = datetime.timedelta(hours=1)
_MOST_TRACEBACK = 20_000
ALONE = "ADVISOR_RANKS_ALONE"


def main() -> None:
    """Runs the trial of the spec in the file that is named, as the rank of the environment."""
    spec = decode(Path(sys.argv[1]).read_bytes(), TrialSpec)
    rank = int(os.environ["RANK"])
    stack = Path(spec.folder, STACK.format(rank)).open("w")  # noqa: SIM115 - for the signal's life
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
    leader = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # An abstract address: no path that could be too long for one.
    leader.connect("\0" + os.environ["ADVISOR_RANKS_SOCKET"])
    reporter = Reporter(leader.fileno(), spec)
    reporter.send(Hello(rank=rank, pid=os.getpid()))
    _run(spec, reporter)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: torch's exit handlers may wait minutes for compile workers
    # (pytorch/pytorch#162199). What ranks still had to say to each other they have said.
    os._exit(0)


def _run(spec: TrialSpec, reporter: Reporter) -> None:
    torch_internals.set_job_id(os.environ["TORCH_COMPILE_JOB_ID"])
    # Counted from both ends: a rank that compiles may be silent for long.
    torch_internals.on_compile_start(lambda _: reporter.send(Compiling(begins=True)))
    torch_internals.on_compile_end(lambda _: reporter.send(Compiling(begins=False)))
    os.chdir(spec.workload.cwd)
    try:
        peers = _join(_device(spec))
        trial = RankMeasurement(spec, reporter, peers).run()
    except WorkloadError as error:
        reporter.send(
            Unusable(
                what=error.what,
                why=error.why,
                mend=error.mend,
                user_traceback=error.user_traceback[-_MOST_TRACEBACK:],
            )
        )
        _wait_for_the_end()
        return
    except PlanError as error:
        reporter.send(Unusable(what=error.what, why=error.why, mend=error.mend, plan=True))
        _wait_for_the_end()
        return
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the person's code may raise anything
        reporter.send(Result(trial=failed_trial(spec, reporter.phase, error)))
        _wait_for_the_end()
        return
    reporter.send(Result(trial=trial))
    torch.distributed.destroy_process_group()


def _wait_for_the_end() -> None:
    """Stays until the leader ends the group: the others may be in a collective with this rank.

    Ending first would have them fail too, and tell of that instead.
    """
    threading.Event().wait(30)


def _device(spec: TrialSpec) -> torch.device:
    """Returns this rank's device. Raises `PlanError` when there are fewer GPUs than ranks."""
    device = device_of(spec.workload.device)
    if device.type != "cuda":
        threads = max(1, len(os.sched_getaffinity(0)) // spec.workload.ranks)
        torch.set_num_threads(threads)
        return device
    ranks, gpus = spec.workload.ranks, torch.cuda.device_count()
    if ranks > gpus:
        raise PlanError(
            f"--ranks {ranks} is more than there are GPUs",
            f"torch sees {gpus} here, and each rank takes one",
            f"give --ranks {gpus} or --device cpu",
        )
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def _join(device: torch.device) -> Peers | None:
    """Makes the default process group; returns who decides alone, None where all ranks do."""
    if os.environ.get(ALONE):
        # Collectives that return at once, without the others: what is left is the rank's own work.
        import torch.testing._internal.distributed.fake_pg as fake

        torch.distributed.init_process_group(
            "fake",
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            store=fake.FakeStore(),
        )
        return Peers()
    torch.distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        timeout=_COLLECTIVE_TIMEOUT,
        device_id=device if device.type == "cuda" else None,
    )
    return None


if __name__ == "__main__":
    main()
