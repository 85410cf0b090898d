"""The kinds of graph breaks and recompiles: from the compiler's words to a cause.

Two tables, read from the top: the first row whose words occur in the compiler's reason wins. To
add a cause, add a row here, a name to the enum in `records` and the proto, and a test.
"""

from __future__ import annotations

import re

from advisor.profiler.records import GraphBreakCause as Break
from advisor.profiler.records import RecompileCause as Re

# Words as in torch 2.13's torch/_dynamo/graph_break_registry.json and torch/_dynamo/variables.
_BREAKS: tuple[tuple[str, Break], ...] = (
    (r"data-dependent branching|data-dependent (control flow|jump)", Break.DATA_DEPENDENT_BRANCH),
    (r"data.dependent assertion|data-dependent assert", Break.DATA_DEPENDENT_BRANCH),
    (
        r"tensor\.item\(\)|_local_scalar_dense|tensor\.tolist|\.tolist\(\)|"
        r"scalar from tensor|data dependent operator",
        Break.SCALAR_READ,
    ),
    (r"dynamic (output )?shape operator|capture_dynamic_output_shape", Break.DYNAMIC_OUTPUT_SHAPE),
    (r"nonzero|masked_select|unique", Break.DYNAMIC_OUTPUT_SHAPE),
    (r"\bprint\b|logger|logging|warnings\.warn|warn_once", Break.PRINT_OR_LOGGING),
    (r"fsdp|distributeddataparallel|ddp", Break.DISTRIBUTED_WRAPPER),
    (r"autograd\.function|autograd function", Break.AUTOGRAD_FUNCTION),
    (r"hook", Break.HOOK),
    (r"torch\.compiler\.disable|torch\._dynamo\.disable|_dynamo\.disable", Break.DISABLED_FUNCTION),
    (
        r"numpy|c/c\+\+ (function|extension)|cython|pybind|non-python|"
        r"attempted to call function marked as skipped|foreign",
        Break.FOREIGN_CALL,
    ),
    (r"no (fake|meta) (impl|kernel)|unregistered|custom op", Break.UNREGISTERED_OPERATOR),
    (r"skipfiles|skipped frame|marked as skipped|inline.*skip", Break.SKIPPED_FRAME),
    (
        r"unsupported (built-?in|context manager|method|function)|context manager|generator|"
        r"exception|bytecode|reconstruct|unimplemented",
        Break.UNSUPPORTED_PYTHON,
    ),
)

_RECOMPILES: tuple[tuple[str, Re], ...] = (
    (r"grad_mode|is_grad_enabled|requires_grad mismatch", Re.GRAD_MODE),
    (r"\.training\b", Re.TRAIN_EVAL),
    (r"stride mismatch", Re.STRIDE),
    (r"dtype mismatch|device mismatch|dispatch key", Re.DTYPE_OR_DEVICE),
    (r"size mismatch at index 0", Re.BATCH_SIZE),
    (r"size mismatch|\.size\(\)|ndim|rank mismatch|shape", Re.SHAPE),
    (r"optimizer|param_groups|\['step'\]|\['lr'\]", Re.OPTIMIZER_STATE),
    (r"___check_obj_id|is not|object identity|id match", Re.OBJECT_IDENTITY),
    (r"(self|\['self'\]|_modules|mod)\.?[\w\[\]'.]*\s*==", Re.MODULE_ATTRIBUTE),
    (r"==\s*-?\d", Re.PYTHON_NUMBER),
)


def break_cause(reason: str) -> Break:
    """Returns the cause that the compiler's words for a graph break stand for."""
    text = reason.lower()
    return next((cause for words, cause in _BREAKS if re.search(words, text)), Break.OTHER)


def recompile_cause(reason: str) -> Re:
    """Returns the cause that the compiler's words for a failed guard stand for."""
    text = reason.lower()
    return next((cause for words, cause in _RECOMPILES if re.search(words, text)), Re.OTHER)
