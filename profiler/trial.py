"""One trial in its own process: from the spec to exactly one answer.

`run_trial` runs in the child that the host has forked. It never returns a half result: a `Result`
goes out, or an `Unusable`, or the process ends otherwise and the host says how.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path

from advisor.profiler import torch_internals
from advisor.profiler.compile_failure import failed_trial
from advisor.profiler.count_measurement import CountMeasurement
from advisor.profiler.errors import PlanError, WorkloadError
from advisor.profiler.frames import Result, Unusable
from advisor.profiler.handover import JOB_ID
from advisor.profiler.measurement import Measurement
from advisor.profiler.records import Trial, TrialKind, TrialSpec
from advisor.profiler.reporter import Reporter
from advisor.profiler.shape_measurement import ShapeMeasurement

_MOST_TRACEBACK = 20_000
_KINDS: dict[TrialKind, type[Measurement] | type[CountMeasurement]] = {
    TrialKind.SHAPES: ShapeMeasurement,
    TrialKind.COUNT: CountMeasurement,
}


def run_trial(spec: TrialSpec, descriptor: int) -> None:
    """Runs a trial in this process and sends its result to `descriptor`."""
    faulthandler.enable()
    # The host asks for the place of a hang with this signal before it ends the trial.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    reporter = Reporter(descriptor, spec)
    _enter_folder(spec)
    try:
        trial = _measured(spec, reporter)
    except WorkloadError as error:
        reporter.send(
            Unusable(
                what=error.what,
                why=error.why,
                mend=error.mend,
                user_traceback=error.user_traceback[-_MOST_TRACEBACK:],
            )
        )
        return
    except PlanError as error:
        reporter.send(Unusable(what=error.what, why=error.why, mend=error.mend, plan=True))
        return
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the person's code may raise anything
        trial = failed_trial(spec, reporter.phase, error)
    reporter.send(Result(trial=trial))


def _measured(spec: TrialSpec, reporter: Reporter) -> Trial:
    if spec.workload.ranks > 1:
        # Only where it is asked for: torch's launcher is imported with it.
        from advisor.profiler.group import run_group

        return run_group(spec, reporter)
    kind = _KINDS.get(spec.kind, Measurement)
    return kind(spec, reporter).run()


def _enter_folder(spec: TrialSpec) -> None:
    """Gives the trial caches of its own, so that cold is cold, and the person's folder to run in.

    All below one private folder: Inductor's and Triton's caches, the driver's JIT cache, which
    would warm "cold" runs otherwise, and temporary files.
    """
    folder = Path(spec.folder)
    for name, variable in (
        ("inductor", "TORCHINDUCTOR_CACHE_DIR"),
        ("triton", "TRITON_CACHE_DIR"),
        ("cuda", "CUDA_CACHE_PATH"),
        ("tmp", "TMPDIR"),
    ):
        (folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        os.environ[variable] = str(folder / name)
    os.environ["ADVISOR_TRIAL_ID"] = spec.trial_id
    # A run that starts from this cache also knows which sizes turned out dynamic.
    os.environ.setdefault("TORCH_COMPILE_JOB_ID", JOB_ID)
    torch_internals.set_job_id(os.environ["TORCH_COMPILE_JOB_ID"])
    os.chdir(spec.workload.cwd)
