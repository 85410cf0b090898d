"""What to do about a graph break or a recompile: one row for each cause.

The sentence names what was met, so that it can be read without the compiler's own words, and a
setting of torch where one removes the cause.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from advisor.profiler.records import (
    Fix,
    GraphBreak,
    GraphBreakCause,
    Recompile,
    RecompileCause,
    Trial,
)
from advisor.profiler.units import count, duration

_BREAKS = {
    GraphBreakCause.SCALAR_READ: "a tensor's value is read into Python: keep it a tensor, read it "
    "after the step, or set torch._dynamo.config.capture_scalar_outputs = True",
    GraphBreakCause.DATA_DEPENDENT_BRANCH: "Python branches on a tensor's value: use torch.where, "
    "or move the check out of the model",
    GraphBreakCause.DYNAMIC_OUTPUT_SHAPE: "the size of a result depends on the data: multiply by "
    "the mask instead, or set torch._dynamo.config.capture_dynamic_output_shape_ops = True",
    GraphBreakCause.PRINT_OR_LOGGING: "it prints, logs or warns: remove it or do it after the step",
    GraphBreakCause.UNREGISTERED_OPERATOR: "the compiler knows nothing of this operator: register "
    "it with torch.library.custom_op and a fake implementation",
    GraphBreakCause.FOREIGN_CALL: "it calls code that is not torch (NumPy, SciPy, a C extension): "
    "use torch operators, or move the call out of what is compiled",
    GraphBreakCause.UNSUPPORTED_PYTHON: "the compiler cannot trace this piece of Python: write it "
    "more plainly, or move it out of what is compiled",
    GraphBreakCause.AUTOGRAD_FUNCTION: "the compiler cannot trace this autograd.Function: write "
    "its forward and backward without branches on tensors",
    GraphBreakCause.HOOK: "a hook runs here: remove it, or register it before compiling",
    GraphBreakCause.DISABLED_FUNCTION: "this function is marked as not to be compiled: remove the "
    "mark, or move the call out of what is compiled",
    GraphBreakCause.SKIPPED_FRAME: "the compiler skips this frame as a whole: call what is inside "
    "it directly",
    GraphBreakCause.DISTRIBUTED_WRAPPER: "a distributed wrapper (FSDP, DDP) runs its hooks here: "
    "compile each block first, then wrap with fully_shard",
    GraphBreakCause.OTHER: "the compiler gave up here",
}
_RECOMPILES = {
    RecompileCause.BATCH_SIZE: "batches come in several sizes: set drop_last=True, or mark the "
    "batch dimension with torch._dynamo.mark_dynamic",
    RecompileCause.SHAPE: "shapes change from batch to batch: use dynamic=True, or pad to a few "
    "lengths",
    RecompileCause.PYTHON_NUMBER: "a Python number changes from step to step and is compiled in: "
    "pass it as a tensor",
    RecompileCause.MODULE_ATTRIBUTE: "an attribute of a module changes from step to step: keep it "
    "outside the model or in a buffer; for an integer "
    "torch._dynamo.config.allow_unspec_int_on_nn_module = True helps too",
    RecompileCause.TRAIN_EVAL: "the model changes between train() and eval(): each is "
    "compiled once",
    RecompileCause.GRAD_MODE: "whether a tensor requires a gradient changes (unfreezing, no_grad, "
    "the first of several blocks): each state is compiled once",
    RecompileCause.DTYPE_OR_DEVICE: "the dtype or device of an input changes: convert it before "
    "the model",
    RecompileCause.STRIDE: "the memory layout (strides) of an input changes: make all batches "
    "contiguous or channels_last alike",
    RecompileCause.OPTIMIZER_STATE: "a number of the optimizer changes from step to step: keep the "
    "learning rate in a tensor",
    RecompileCause.OBJECT_IDENTITY: "an object is replaced by another from step to step: keep one "
    "and change its contents",
    RecompileCause.OTHER: "a value that the compiled code relies on changes from step to step: "
    "keep it out of the compiled call's arguments",
}


def mends(trials: Iterable[Trial]) -> tuple[Fix, ...]:
    """Returns a mend for each place at which a graph ended or was compiled again, each once.

    Those of graph breaks come first, in the order of the trials; recompiles by the time they took.
    """
    found: dict[tuple[str, int, str], Fix] = {}
    for trial in trials:
        for fix in (*_of_breaks(trial), *_of_recompiles(trial)):
            found.setdefault((fix.file, fix.line, fix.cause), fix)
    return tuple(found.values())


def _of_breaks(trial: Trial) -> Iterator[Fix]:
    for met in trial.graph_breaks:
        yield Fix(cause=met.cause.value, what=break_mend(met), file=met.file, line=met.line)


def _of_recompiles(trial: Trial) -> Iterator[Fix]:
    for met in sorted(trial.recompiles, key=lambda one: -one.lost_s):
        what = recompile_mend(met, limit_hit=trial.recompile_limit_hit)
        yield Fix(cause=met.cause.value, what=what, file=met.file, line=met.line)


def break_mend(met: GraphBreak) -> str:
    """Returns what to do about a graph break, with the source line and torch's page of it."""
    code = f"`{met.code}`: " if met.code else ""
    other = f" ({met.reason})" if met.cause is GraphBreakCause.OTHER and met.reason else ""
    hint = f"; {met.hint}" if met.hint else ""
    return f"{code}a graph ends here, {_BREAKS[met.cause]}{other}{hint}"


def recompile_mend(met: Recompile, *, limit_hit: bool) -> str:
    """Returns what to do about a recompile, with the guard that failed and what it cost."""
    times = "once more" if met.count == 1 else f"{count(met.count)} times more"
    then = ", then not at all: the recompile limit was hit" if limit_hit else ""
    return (
        f"compiled {times} in {duration(met.lost_s)}{then} because `{met.reason}` no longer held: "
        f"{_RECOMPILES[met.cause]}"
    )
