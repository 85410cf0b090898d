"""From an exception within a trial to a status with a reason in one sentence."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import torch

from advisor.profiler import torch_internals
from advisor.profiler.break_messages import frames, source_line
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
        "the step differentiates twice (a double backward, create_graph=True), which compiled code"
        " does not support: it cannot be compiled",
    ),
)
_NO_FAKE = re.compile(
    r"no fake impl registered for (?:<CustomOpDef\((?P<custom>[^)]+)\)>|(?P<plain>\S+))|"
    r"(?P<meta>\S+): attempted to run this operator with Meta tensors"
)
# What the compiler was inlining when it failed, by the module of Python's library.
_TRACED_INTO = (
    (r"inspect\.py$", "looks at the signature of a function"),
    (r"(copy|copyreg|pickle)\.py$", "copies or pickles an object"),
    (r"(threading|queue|asyncio/\w+|concurrent/futures/\w+)\.py$", "works with threads"),
    (r"(traceback|linecache|sys)\.py$", "looks at the stack"),
    (r"(typing|dataclasses|abc|enum|functools)\.py$", "works with types and decorators"),
    (r"(logging/__init__|warnings)\.py$", "logs or warns"),
)
_COMPILER_FILES = re.compile(r"/torch/(_dynamo|_inductor|_functorch|_guards|fx)\b")
_MOST_DETAILS = 8_000


def failed_trial(spec: TrialSpec, phase: Phase, error: BaseException) -> Trial:
    """Returns the trial that ended with `error` in `phase`, its status and one sentence why."""
    status, kind, message = _classify(phase, error)
    mine = [frame for frame in frames(str(error)) if frame.mine]
    place = mine[-1] if mine else None
    return Trial(
        trial_id=spec.trial_id,
        kind=spec.kind,
        status=status,
        config=spec.config,
        phase_reached=phase,
        failure=Failure(
            kind=kind,
            message=message,
            details=_details(error)[-_MOST_DETAILS:],
            phase=phase,
            file=place.file if place else "",
            line=place.line if place else 0,
            code=source_line(place) if place else "",
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
        return TrialStatus.FAILED_TO_COMPILE, *_compile_failure(error)
    return (
        TrialStatus.CRASHED,
        type(error).__name__,
        f"the training code raised {type(error).__name__}: {first_line(error)}",
    )


def _compile_failure(error: BaseException) -> tuple[str, str]:
    """Returns kind and sentence of an error that has no sentence of its own yet."""
    name = type(error).__name__
    operator = _NO_FAKE.search(str(error))
    if operator:
        named = next(group for group in operator.groups() if group).removesuffix(".default")
        return "unregistered_operator", (
            f"the operator {named} has no fake implementation, which the compiler needs to know its"
            f" result's shape{_where(error)[0]}: register one with torch.library.register_fake"
        )
    within = torch_internals.is_compile_error(error) or _in_compiler(error)
    who = "the compiler" if within else "the compiled step"
    where, mend = _where(error)
    text = f"{who} raised {name}: {_most_telling(error)}{where}"
    if within and torch_internals.jagged_tensors_made():
        return "jagged_tensors", (
            f"{text}; the step uses jagged nested tensors, which torch {torch.__version__} does not"
            " compile here: pad or pack the batch instead, or keep that part eager"
        )
    return name, f"{text}; {mend}" if mend else text


def _where(error: BaseException) -> tuple[str, str]:
    """Returns the person's line that was being traced and what it led into, and a mend for it.

    Both are empty when the error does not say what was being traced.
    """
    traced = frames(str(error))
    mine = [index for index, frame in enumerate(traced) if frame.mine]
    if not mine:
        return "", ""
    place, below = traced[mine[-1]], traced[mine[-1] + 1 :]
    code = source_line(place)
    into = ""
    if below:
        module = Path(below[0].file).stem
        does = next((what for file, what in _TRACED_INTO if re.search(file, below[0].file)), "")
        into = f", within {module}.{below[0].function}{f', which {does}' if does else ''}"
    # The compiled function itself is not among them: with it disabled nothing would be compiled.
    inner = [traced[index].function for index in mine[1:] if traced[index].function]
    names = " or ".join(f"`{name}`" for name in dict.fromkeys(inner))
    mend = (
        f"mark {names} with @torch.compiler.disable"
        if names
        else "move that line out of what is compiled"
    )
    return f", while it traced {place.file}:{place.line} `{code}`{into}", mend


def _in_compiler(error: BaseException) -> bool:
    """Returns whether an error of Python's own kinds was raised in the compiler's code."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    return bool(last) and _COMPILER_FILES.search(last[0].filename) is not None


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
