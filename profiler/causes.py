"""The kinds of graph breaks and recompiles: from the compiler's words to a cause.

Tables, read from the top: the first row whose words occur wins. To add a cause, add a row here,
a name to the enum in `records` and the proto, and a test with a real message of the compiler.
"""

from __future__ import annotations

import re
import sys

from advisor.profiler.records import GraphBreakCause as Break
from advisor.profiler.records import RecompileCause as Re

# Titles as in torch 2.13's torch/_dynamo/graph_break_registry.json; what is searched is the title
# of the break and the compiler's own context of it (a name, a type), not its explanation, which
# tells of other functions as examples.
_BREAKS: tuple[tuple[str, Break], ...] = (
    (
        r"fsdp|distributeddataparallel|\bddp\b|torch\.distributed|distributed collectives|p2p",
        Break.DISTRIBUTED_WRAPPER,
    ),
    (
        r"data-dependent (branching|assert|control flow|jump)|data pointer comparison|"
        r"__bool__|aten\.(equal|allclose|is_nonzero)\b|guard_scalar branch|"
        r"assertion failed on symbolic",
        Break.DATA_DEPENDENT_BRANCH,
    ),
    (
        r"tensor\.item\(\)|_local_scalar_dense|tensor\.tolist|data dependent operator|"
        r"indexing \S+ with non-scalar tensor",
        Break.SCALAR_READ,
    ),
    (
        r"dynamic shape operator|dynamic slicing|data-dependent output shape|unbacked symint|"
        r"aten\.(nonzero|masked_select|_unique|unique)",
        Break.DYNAMIC_OUTPUT_SHAPE,
    ),
    (
        r"\bprint\b|\blogg(er|ing)\b|\b_?warnings\b|warn_once|debugging function|"
        r"\b(tqdm|wandb|tensorboard|loguru|structlog|mlflow|neptune|comet_ml|clearml)\b|"
        r"textiowrapper|\bsummarywriter\b",
        Break.PRINT_OR_LOGGING,
    ),
    (
        r"autograd\.function|autograd function|autogradfunction|autograd_function|"
        r"custom [jv][vj]p",
        Break.AUTOGRAD_FUNCTION,
    ),
    (r"hook|removablehandle", Break.HOOK),
    (
        r"torch\.compiler\.disable|_dynamo\.disable|marked .*disable|_dynamo\.graph_break\(",
        Break.DISABLED_FUNCTION,
    ),
    (
        r"non-pt2-compliant|fake tensor|faketensor|no meta kernel|torchscript|"
        r"operator does not support|torch\.ops\.|resolve op packet|torch\.jit",
        Break.UNREGISTERED_OPERATOR,
    ),
    (
        r"numpy|ndarray|\bufunc\b|_funcptr|ctypes|cffi|pybind|"
        r"\b(scipy|cv2|pil|pandas|sklearn|numba|jax|cupy|skimage|torchaudio\._|shapely)\b",
        Break.FOREIGN_CALL,
    ),
    (r"skip_frame|skipped frame|skip frame|skipfiles", Break.SKIPPED_FRAME),
    (
        r"marked as skipped|c/c\+\+|untraceable c|c-level",
        Break.FOREIGN_CALL,
    ),
    (
        r"unsupported|context manager|generator|exception|bytecode|reconstruct|failed to|"
        r"attempted to|cannot |comprehension|not (a |implemented)|missing|unimplemented|"
        r"non-constant|user-defined|super\(\)|mutat|opaque|itertools|hash|\brepr\b|build_|"
        r"closure|variadic|iterat|__\w+__|triton|cell|enum|dataclass|attribute|higher.order|"
        r"\bhop\b|side effect|aliasing|nested function|\btype\b|typeerror|compar|autograd\.grad",
        Break.UNSUPPORTED_PYTHON,
    ),
)
# Whose code the place of the break lies in decides before its words do: the wrapper's anywhere
# among the frames, a logger's only as the innermost of them.
_WRAPPER_FILES = re.compile(r"torch/distributed/(fsdp|_composable)/|nn/parallel/distributed\.py")
_LOGGER_FILES = re.compile(
    r"/(logging/__init__|warnings|torch/utils/tensorboard/\w+)\.py$|"
    r"/(loguru|tqdm|wandb|tensorboardX|structlog|absl/logging|rich|mlflow|neptune|comet_ml|aim)/"
)
# What is called, in the compiler's context of a function that it skips.
_CALLED = re.compile(r"\bmodule: (\w+)")
_OWN_FILES = re.compile(r"filename: `\S*(/site-packages/torch/|/lib/python3\.\d+/(?!\w+-packages))")
# What an autograd.Function cannot hold is the function's fault, as a graph cannot end within it.
_OF_FUNCTION = {
    Break.DATA_DEPENDENT_BRANCH,
    Break.SCALAR_READ,
    Break.DYNAMIC_OUTPUT_SHAPE,
    Break.UNSUPPORTED_PYTHON,
    Break.SKIPPED_FRAME,
    Break.OTHER,
}

_RECOMPILES: tuple[tuple[str, Re], ...] = (
    (r"grad_mode|is_grad_enabled|requires_grad mismatch|inference_mode", Re.GRAD_MODE),
    (r"\.training\b|\['training'\]", Re.TRAIN_EVAL),
    (r"stride mismatch", Re.STRIDE),
    (
        r"dtype mismatch|device mismatch|dispatch key|autocast|default_dtype|default device",
        Re.DTYPE_OR_DEVICE,
    ),
    # What a graph break left behind (`___stack0`) has the size of a result, not of a batch.
    (r"___stack\d+.*(size mismatch|\.size\(\))", Re.SHAPE),
    (r"size mismatch at index 0", Re.BATCH_SIZE),
    (r"size mismatch|\.size\(\)|ndim|rank mismatch|shape|\bs\d+\b", Re.SHAPE),
    (r"optimizer|param_groups|\['step'\]|\['lr'\]", Re.OPTIMIZER_STATE),
    # Whether something is there at all: neither a number nor another object in its place.
    (r"\bis (not )?none\b", Re.OTHER),
    (
        r"___check_obj_id|___check_type_id|is not|object identity|id match|expected type of|"
        r"duplicate tensor",
        Re.OBJECT_IDENTITY,
    ),
    (
        r"(\bself\b|__self__|\['self'\]|_modules|\bmod\b)[\w\[\]'.)]*\s*[=<>!]=",
        Re.MODULE_ATTRIBUTE,
    ),
    (r"^len\(", Re.SHAPE),
    (r"[=<>!]=\s*-?(\d|inf|nan)", Re.PYTHON_NUMBER),
)
_COMPARED_TEXT = re.compile(r"""([=!]=\s*)(?:'[^']*'|"[^"]*")""")


def break_cause(message: str, *, innermost_file: str = "", in_function: bool = False) -> Break:
    """Returns the cause that the compiler's message of a graph break stands for.

    `message` may hold the frames of the place too; those of a wrapper (FSDP, DDP) name the cause,
    and so does a logger's code as the `innermost_file`. `in_function` says that the place lies in
    a method of an autograd.Function.
    """
    if _WRAPPER_FILES.search(message):
        return Break.DISTRIBUTED_WRAPPER
    if _LOGGER_FILES.search(innermost_file):
        return Break.PRINT_OR_LOGGING
    words = telling_words(message)
    cause = next(
        (cause for pattern, cause in _BREAKS if re.search(pattern, words.lower())), Break.OTHER
    )
    if cause is Break.FOREIGN_CALL and _is_pythons_or_torchs(words):
        cause = Break.UNSUPPORTED_PYTHON
    return Break.AUTOGRAD_FUNCTION if in_function and cause in _OF_FUNCTION else cause


def _is_pythons_or_torchs(words: str) -> bool:
    """Returns whether what is called comes with Python or torch: no foreign library."""
    called = _CALLED.search(words)
    if called and called.group(1) in sys.stdlib_module_names - {"_ctypes", "ctypes"}:
        return True
    return _OWN_FILES.search(words) is not None


def telling_words(message: str) -> str:
    """Returns the title of a break and the compiler's own context of it.

    The title is the line above its explanation; what the compiler was about to do comes before.
    """
    reason = message.split("Graph Break Reason:", 1)[-1]
    context = re.search(r"Developer debug context:[ \t]*(.*)", reason)
    return f"{break_title(message)} {context.group(1) if context else ''}"


def break_title(message: str) -> str:
    """Returns the title that torch's registry of graph breaks has for this one."""
    reason = message.split("Graph Break Reason:", 1)[-1]
    before, explained, _ = reason.partition("Explanation:")
    # Between title and explanation torch may name the higher-order operator that it is in.
    lines = [line for line in before.splitlines() if line.strip()]
    titles = [line for line in lines if not line.startswith(" ")] or lines
    if not titles:
        return ""
    return (titles[-1] if explained else titles[0]).strip()


def recompile_cause(guard: str) -> Re:
    """Returns the cause that the compiler's words for a failed guard stand for."""
    # A string that is compared may hold any word.
    text = _COMPARED_TEXT.sub(r"\1''", guard).lower()
    return next((cause for words, cause in _RECOMPILES if re.search(words, text)), Re.OTHER)
