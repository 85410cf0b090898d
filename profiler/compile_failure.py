"""From an exception within a trial to a status with a reason in one sentence."""

from __future__ import annotations

import re
import traceback

import torch

from advisor.profiler import torch_internals
from advisor.profiler.records import Failure, Phase, Trial, TrialSpec, TrialStatus
from advisor.profiler.training import is_out_of_host_memory
from advisor.profiler.workload import first_line, user_traceback

# What the compiler says, the kind that the campaign knows it by, and the sentence for people.
_KNOWN = (
    (
        r"InvalidCxxCompiler|No working C\+\+ compiler",
        "no_cxx_compiler",
        "no working C++ compiler was found: install g++ or clang++, or set CXX",
    ),
    (
        r"Cannot find a working triton|TritonMissing|triton is not installed",
        "no_triton",
        "no working Triton was found: install the triton that belongs to this torch",
    ),
    (
        r"Python\.h",
        "no_python_headers",
        "Python's headers were not found: install python3-dev",
    ),
    (
        r"double backward",
        "double_backward",
        "the step differentiates twice, which compiled code does not support: it cannot be"
        " compiled",
    ),
)
_MOST_DETAILS = 8_000


def failed_trial(spec: TrialSpec, phase: Phase, error: BaseException) -> Trial:
    """Returns the trial that ended with `error` in `phase`, its status and one sentence why."""
    status, kind, message = _classify(phase, error)
    return Trial(
        trial_id=spec.trial_id,
        kind=spec.kind,
        status=status,
        config=spec.config,
        phase_reached=phase,
        failure=Failure(
            kind=kind, message=message, details=_details(error)[-_MOST_DETAILS:], phase=phase
        ),
    )


def _classify(phase: Phase, error: BaseException) -> tuple[TrialStatus, str, str]:
    if isinstance(error, torch.OutOfMemoryError):
        return (
            TrialStatus.OUT_OF_MEMORY,
            "device_memory",
            f"the device ran out of memory: {first_line(error)}",
        )
    if is_out_of_host_memory(error):
        return (
            TrialStatus.OUT_OF_MEMORY,
            "memory",
            f"the machine ran out of memory: {first_line(error)}",
        )
    if isinstance(error, SystemExit):
        return TrialStatus.CRASHED, "exit", f"the training code called sys.exit({error.code!r})"
    if phase in (Phase.COLD, Phase.STEADY, Phase.NUMERICS):
        text = f"{type(error).__name__}: {error}"
        for words, kind, sentence in _KNOWN:
            if re.search(words, text):
                return TrialStatus.FAILED_TO_COMPILE, kind, sentence
        who = "the compiler" if torch_internals.is_compile_error(error) else "the compiled step"
        return (
            TrialStatus.FAILED_TO_COMPILE,
            type(error).__name__,
            f"{who} raised {type(error).__name__}: {_most_telling(error)}",
        )
    return (
        TrialStatus.CRASHED,
        type(error).__name__,
        f"the training code raised {type(error).__name__}: {first_line(error)}",
    )


def _most_telling(error: BaseException) -> str:
    """Returns the line of a compiler's error that names the cause rather than the wrapper."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    for line in lines:
        explanation = re.match(r"Explanation:\s*(.+)", line)
        if explanation:
            return explanation.group(1)
    return lines[0][:500] if lines else type(error).__name__


def _details(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)) + "\nin your code:\n" + user_traceback(error)
