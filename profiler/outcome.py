"""From what a trial said and how its process ended to one honest `Trial`.

A process is never believed to have ended well because it exited with 0: only a result frame says
so, and a result that comes with an end by the host keeps the host's reason.
"""

from __future__ import annotations

import signal
from dataclasses import replace

from advisor.profiler.errors import AdvisorError, PlanError, WorkloadError
from advisor.profiler.frames import Ended, Exit, Unusable
from advisor.profiler.records import Failure, Phase, Trial, TrialSpec, TrialStatus

_STATUS_OF_END = {
    "deadline": TrialStatus.TIMED_OUT,
    "cut_off": TrialStatus.CUT_OFF,
    "memory": TrialStatus.OUT_OF_MEMORY,
    "output": TrialStatus.CRASHED,
    "junk": TrialStatus.CRASHED,
    "cancelled": TrialStatus.CUT_OFF,
}
_MORE_OF_END = {
    "cut_off": "; compiling for longer could only lose, so it was cut off",
    "deadline": "; it was ended",
}
IN_PHASE = {
    Phase.IMPORT: "while importing the training code",
    Phase.BUILD: "while building the model",
    Phase.WARM_UP: "during eager steps",
    Phase.COLD: "while compiling",
    Phase.STEADY: "during measured steps",
    Phase.NUMERICS: "while comparing losses",
    Phase.DIAGNOSE: "while tracing under other settings",
    Phase.DONE: "at the end",
}
# The kernel's out-of-memory killer leaves no other trace than SIGKILL; a trial that held this
# share of its limit when it was killed is taken to be its victim.
_NEAR_LIMIT = 0.8


def unusable_error(unusable: Unusable) -> AdvisorError:
    """Returns the error that a trial's complaint about the workload stands for."""
    if unusable.plan:
        return PlanError(unusable.what, unusable.why, unusable.mend)
    return WorkloadError(
        unusable.what, unusable.why, unusable.mend, user_traceback=unusable.user_traceback
    )


def trial_of(spec: TrialSpec, ended: Ended) -> Trial:
    """Returns the trial's result, with a status and a reason whatever happened to its process."""
    exit_ = ended.exit
    status, failure = _failure(spec, exit_)
    trial = ended.trial
    unfinished = trial is not None and trial.phase_reached is Phase.DIAGNOSE
    cancelled = exit_.ended is not None and exit_.ended.kind == "cancelled"
    if trial is not None and (exit_.ended is None or (unfinished and not cancelled)):
        lost = (f"not all causes were looked for: {failure.message}",) if unfinished else ()
        return replace(
            trial,
            warnings=trial.warnings + lost,
            wall_s=exit_.wall_s,
            stdout_tail=exit_.stdout_tail,
            stderr_tail=exit_.stderr_tail,
        )
    return Trial(
        trial_id=spec.trial_id,
        kind=spec.kind,
        status=status,
        config=spec.config,
        failure=failure,
        phase_reached=exit_.phase,
        peak_bytes=exit_.peak_bytes or None,
        wall_s=exit_.wall_s,
        stdout_tail=exit_.stdout_tail,
        stderr_tail=exit_.stderr_tail,
    )


def _failure(spec: TrialSpec, exit_: Exit) -> tuple[TrialStatus, Failure]:
    where = IN_PHASE[exit_.phase]
    if exit_.ended is not None:
        kind = exit_.ended.kind
        message = exit_.ended.message + _MORE_OF_END.get(kind, "")
        if kind == "junk":
            message = f"the training code wrote on the trial's result pipe ({message})"
        status = _STATUS_OF_END[kind]
    elif exit_.signal is not None:
        name = signal.Signals(exit_.signal).name
        limit = spec.memory_limit_bytes
        if name == "SIGKILL" and limit and exit_.peak_bytes > _NEAR_LIMIT * limit:
            status, kind = TrialStatus.OUT_OF_MEMORY, "memory"
            message = (
                f"the kernel killed the trial {where}, which held {exit_.peak_bytes / 1e9:.2f} GB"
            )
        else:
            status, kind = TrialStatus.CRASHED, name
            message = f"the trial was ended by {name} {where}"
    else:
        status, kind = TrialStatus.CRASHED, "exit"
        message = f"the training code ended its process with status {exit_.code} {where}"
    details = exit_.stderr_tail or exit_.stdout_tail
    return status, Failure(kind=kind, message=message, details=details, phase=exit_.phase)
