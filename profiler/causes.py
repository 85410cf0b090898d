"""The kinds of graph breaks and recompiles: from the compiler's words to a cause.

Two tables, read from the top: the first row whose words occur wins. To add a cause, add a row here,
a name to the enum in `records` and the proto, and a test with a real message of the compiler.
"""

from __future__ import annotations

import re

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
        r"__bool__",
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
        r"\b(tqdm|wandb|tensorboard|loguru)\b",
        Break.PRINT_OR_LOGGING,
    ),
    (
        r"autograd\.function|autograd function|autogradfunction|custom [jv][vj]p",
        Break.AUTOGRAD_FUNCTION,
    ),
    (r"hook|removablehandle", Break.HOOK),
    (r"torch\.compiler\.disable|_dynamo\.disable|marked .*disable", Break.DISABLED_FUNCTION),
    (
        r"non-pt2-compliant|fake tensor|faketensor|no meta kernel|torchscript|"
        r"operator does not support|torch\.ops\.|resolve op packet",
        Break.UNREGISTERED_OPERATOR,
    ),
    (r"numpy|ndarray|\b(scipy|cv2|pil|pandas|sklearn|numba|jax|cupy)\b", Break.FOREIGN_CALL),
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
        r"\bhop\b|side effect|aliasing|nested function|\btype\b|typeerror|compar",
        Break.UNSUPPORTED_PYTHON,
    ),
)
# Whose frames lie around the place of the break decides before its words do.
_WRAPPER_FILES = re.compile(r"torch/distributed/(fsdp|_composable)/|nn/parallel/distributed\.py")

_RECOMPILES: tuple[tuple[str, Re], ...] = (
    (r"grad_mode|is_grad_enabled|requires_grad mismatch", Re.GRAD_MODE),
    (r"\.training\b|\['training'\]", Re.TRAIN_EVAL),
    (r"stride mismatch", Re.STRIDE),
    (r"dtype mismatch|device mismatch|dispatch key", Re.DTYPE_OR_DEVICE),
    (r"size mismatch at index 0", Re.BATCH_SIZE),
    (r"size mismatch|\.size\(\)|ndim|rank mismatch|shape|^len\(|\bs\d+\b", Re.SHAPE),
    (r"optimizer|param_groups|\['step'\]|\['lr'\]", Re.OPTIMIZER_STATE),
    (
        r"___check_obj_id|___check_type_id|is not|object identity|id match|expected type of",
        Re.OBJECT_IDENTITY,
    ),
    (r"(\bself\b|\['self'\]|_modules|\bmod\b)[\w\[\]'.]*\s*[=<>!]=", Re.MODULE_ATTRIBUTE),
    (r"[=<>!]=\s*-?(\d|inf|nan)", Re.PYTHON_NUMBER),
)


def break_cause(message: str) -> Break:
    """Returns the cause that the compiler's message of a graph break stands for.

    `message` may hold the frames of the place too; those of a wrapper (FSDP, DDP) name the cause.
    """
    if _WRAPPER_FILES.search(message):
        return Break.DISTRIBUTED_WRAPPER
    text = telling_words(message).lower()
    return next((cause for words, cause in _BREAKS if re.search(words, text)), Break.OTHER)


def telling_words(message: str) -> str:
    """Returns the title of a break and the compiler's own context of it.

    The title is the line above its explanation; what the compiler was about to do comes before.
    """
    reason = message.split("Graph Break Reason:", 1)[-1]
    lines = [
        line for line in re.split(r"\n\s*Explanation:", reason)[0].splitlines() if line.strip()
    ]
    explained = re.search(r"\n\s*Explanation:", reason) is not None
    title = (lines[-1] if explained else lines[0]) if lines else ""
    context = re.search(r"Developer debug context:\s*(.*)", reason)
    return f"{title} {context.group(1) if context else ''}"


def recompile_cause(guard: str) -> Re:
    """Returns the cause that the compiler's words for a failed guard stand for."""
    text = guard.lower()
    return next((cause for words, cause in _RECOMPILES if re.search(words, text)), Re.OTHER)
