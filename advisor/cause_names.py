"""What each cause is called: a short name in plain words, and the page that explains its kind.

One row for each cause; one that has no row here is named by its own words.
"""

from __future__ import annotations

from advisor.profiler import settings
from advisor.profiler.errors import PlanError
from advisor.profiler.records import Fix, FixKind, GraphBreakCause, RecompileCause

_NAMES: dict[tuple[FixKind, str], str] = {
    **{
        (FixKind.GRAPH_BREAK, cause.value): name
        for cause, name in (
            (GraphBreakCause.SCALAR_READ, "A tensor's value is read into Python"),
            (GraphBreakCause.DATA_DEPENDENT_BRANCH, "Python branches on a tensor's value"),
            (GraphBreakCause.DYNAMIC_OUTPUT_SHAPE, "The size of a result depends on the data"),
            (GraphBreakCause.PRINT_OR_LOGGING, "It prints, logs or warns"),
            (GraphBreakCause.UNREGISTERED_OPERATOR, "The compiler does not know an operator"),
            (GraphBreakCause.FOREIGN_CALL, "It calls code that is not torch"),
            (GraphBreakCause.UNSUPPORTED_PYTHON, "The compiler cannot trace this Python"),
            (GraphBreakCause.AUTOGRAD_FUNCTION, "An autograd.Function cannot be traced"),
            (GraphBreakCause.HOOK, "A hook runs here"),
            (GraphBreakCause.DISABLED_FUNCTION, "A function is marked as not to be compiled"),
            (GraphBreakCause.SKIPPED_FRAME, "The compiler skips a whole function"),
            (GraphBreakCause.DISTRIBUTED_WRAPPER, "A distributed wrapper runs its hooks here"),
            (GraphBreakCause.OTHER, "The compiler gave up here"),
        )
    },
    **{
        (FixKind.RECOMPILE, cause.value): f"Compiled again: {name}"
        for cause, name in (
            (RecompileCause.BATCH_SIZE, "batches come in several sizes"),
            (RecompileCause.SHAPE, "shapes change from batch to batch"),
            (RecompileCause.PYTHON_NUMBER, "a Python number changes"),
            (RecompileCause.MODULE_ATTRIBUTE, "an attribute of a module changes"),
            (RecompileCause.TRAIN_EVAL, "train() and eval() take turns"),
            (RecompileCause.GRAD_MODE, "what requires a gradient changes"),
            (RecompileCause.DTYPE_OR_DEVICE, "the dtype or device of an input changes"),
            (RecompileCause.STRIDE, "the memory layout of an input changes"),
            (RecompileCause.OPTIMIZER_STATE, "a number of the optimizer changes"),
            (RecompileCause.OBJECT_IDENTITY, "an object is replaced by another"),
            (RecompileCause.OTHER, "a value that was compiled in changes"),
        )
    },
    (FixKind.COMPILER, "NOTHING_COMPILED"): "Nothing was compiled, and nothing was said",
    (FixKind.COMPILER, "CUDA_GRAPHS_SKIPPED"): "CUDA graphs were left out",
    (FixKind.COMPILER, "NUMBERS_DIFFER"): "Compiled and eager numbers differ",
    (FixKind.COMPILER, "FAILED_TO_COMPILE"): "It cannot be compiled",
    (FixKind.COMPILER, "OUT_OF_MEMORY"): "It runs out of memory",
    (FixKind.JOB, "DATA_WAIT"): "The training waits for its data",
    (FixKind.JOB, "DEVICE_IDLE"): "The device waits for the next operator",
    (FixKind.JOB, "SMALL_BATCH"): "The batch is small",
    (FixKind.JOB, "OPTIMIZER_LOOP"): "The optimizer steps parameter by parameter",
    (FixKind.JOB, "PADDING"): "Padding is computed",
    (FixKind.JOB, "LAST_BATCH"): "The last batch of an epoch is smaller",
    (FixKind.JOB, "VALIDATION_GRAPH"): "Validation compiles a second graph",
    (FixKind.JOB, "TF32_OFF"): "TF32 is off",
    (FixKind.JOB, "FLOAT32"): "Matrix products are computed in float32",
}

# PyTorch's own pages. A graph break has a page of its own besides (`Fix.link`).
_PAGES = {
    FixKind.GRAPH_BREAK: "https://docs.pytorch.org/docs/stable/compile/"
    "programming_model.graph_breaks_index.html",
    FixKind.RECOMPILE: "https://docs.pytorch.org/docs/stable/compile/"
    "programming_model.recompilation.html",
    FixKind.COMPILER: "https://docs.pytorch.org/docs/stable/torch.compiler_troubleshooting.html",
    FixKind.JOB: "https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html",
}


def cause_name(kind: FixKind, cause: str) -> str:
    """Returns what a cause is called in plain words, without a full stop."""
    words = cause.replace("_", " ").strip().lower() or "no cause known"
    return _NAMES.get((kind, cause), words[0].upper() + words[1:])


def cause_page(kind: FixKind) -> str:
    """Returns the address of PyTorch's page on causes of this kind."""
    return _PAGES[kind]


def plain_mend(fix: Fix) -> str:
    """Returns what to do, without the source line and the link, which are shown beside it."""
    text = fix.what
    if fix.code:
        text = text.removeprefix(f"`{fix.code}`: ")
    if fix.link:
        text = text.removesuffix(f"; {fix.link}")
    return text.strip()


def settings_instead(fix: Fix) -> tuple[str, ...]:
    """Returns the lines that remove the cause by settings of the compiler; none where none do."""
    try:
        return settings.lines(fix.options)
    except PlanError:  # a name that only the advisor that stored it knew
        return tuple(f"{name} = {value}" for name, value in fix.options)
