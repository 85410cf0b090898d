"""What to do about a graph break or a recompile: one row for each cause.

The sentence names what was met, so that it can be read without the compiler's own words, and a
setting of torch where one removes the cause.
"""

from __future__ import annotations

import re

from advisor.profiler.guards import subject
from advisor.profiler.records import (
    GraphBreak,
    GraphBreakCause,
    Recompile,
    RecompileCause,
)
from advisor.profiler.units import count, duration

_BREAKS = {
    GraphBreakCause.SCALAR_READ: "a tensor's value is read into Python (item, tolist, int, float): "
    "keep it a tensor, read it after the step, or set "
    "torch._dynamo.config.capture_scalar_outputs = True",
    GraphBreakCause.DATA_DEPENDENT_BRANCH: "Python branches on a tensor's value, which is "
    "data-dependent: use torch.where, or move the check out of the model",
    GraphBreakCause.DYNAMIC_OUTPUT_SHAPE: "the size of a result depends on the data: multiply by "
    "the mask instead, or set torch._dynamo.config.capture_dynamic_output_shape_ops = True",
    GraphBreakCause.PRINT_OR_LOGGING: "it prints, logs or warns: remove it or do it after the "
    "step; where a setting of the model brings the message about, change that",
    GraphBreakCause.UNREGISTERED_OPERATOR: "the compiler knows nothing of this operator: register "
    "it with torch.library.custom_op and a fake implementation",
    GraphBreakCause.FOREIGN_CALL: "it calls code that is not torch's (NumPy, SciPy, a C function): "
    "use torch operators, or compile only the part around it: the blocks (regional scope), or all "
    "but one function that makes the call, marked with @torch.compiler.disable",
    GraphBreakCause.UNSUPPORTED_PYTHON: "the compiler cannot trace this piece of Python: write it "
    "more plainly, or move it out of what is compiled",
    GraphBreakCause.AUTOGRAD_FUNCTION: "the compiler cannot trace this autograd.Function: write "
    "its forward and backward without branches on tensors and without reading their values",
    GraphBreakCause.HOOK: "a hook is registered or runs here: remove it, or register it before "
    "compiling",
    GraphBreakCause.DISABLED_FUNCTION: "this function is marked as not to be compiled: remove the "
    "mark, or move the call out of what is compiled",
    GraphBreakCause.SKIPPED_FRAME: "the compiler skips this frame as a whole: call what is inside "
    "it directly",
    GraphBreakCause.DISTRIBUTED_WRAPPER: "a distributed wrapper (FSDP, DDP) runs its hooks here: "
    "compile each block (regional scope), after activation checkpointing and before fully_shard",
    GraphBreakCause.OTHER: "the compiler gave up here",
}
# Causes of which the compiler's own sentence names the function, the type or the operator.
_NAMED = {
    GraphBreakCause.FOREIGN_CALL,
    GraphBreakCause.UNSUPPORTED_PYTHON,
    GraphBreakCause.UNREGISTERED_OPERATOR,
    GraphBreakCause.DISABLED_FUNCTION,
    GraphBreakCause.AUTOGRAD_FUNCTION,
    GraphBreakCause.HOOK,
    GraphBreakCause.OTHER,
}
_RECOMPILES = {
    RecompileCause.BATCH_SIZE: "batches come in several sizes: set drop_last=True, or mark the "
    "batch dimension with torch._dynamo.mark_dynamic",
    RecompileCause.SHAPE: "sizes or lengths change from batch to batch: use dynamic=True, or pad "
    "to a few lengths",
    RecompileCause.PYTHON_NUMBER: "{what}, a Python int or float, changes from step to step and is "
    "compiled in: pass it as a tensor; where it picks a layer or a weight, index stacked weights "
    "with a tensor of shape (1,), as one without dimensions is read as a number again",
    RecompileCause.MODULE_ATTRIBUTE: "{what}, an attribute of a module, changes from step to step: "
    # A buffer that forward changes in place gives wrong gradients (pytorch/pytorch#197039).
    "keep it outside the model, or in a buffer that the training loop advances and not forward; "
    "for an integer torch._dynamo.config.allow_unspec_int_on_nn_module = True helps too",
    RecompileCause.TRAIN_EVAL: "the model changes between train() and eval(): each is "
    "compiled once",
    RecompileCause.GRAD_MODE: "whether a tensor requires a gradient changes (requires_grad of "
    "frozen parameters that are unfrozen, no_grad, the first of several blocks): each state is "
    "compiled once, so change it in few stages",
    RecompileCause.DTYPE_OR_DEVICE: "the dtype or device of an input, or autocast, changes: "
    "convert it before the model",
    RecompileCause.STRIDE: "the memory format (strides) of an input changes: make all batches "
    "contiguous, or all channels_last",
    RecompileCause.OPTIMIZER_STATE: "a number of the optimizer changes from step to step: keep the "
    "learning rate in a tensor",
    RecompileCause.OBJECT_IDENTITY: "{what} is another object for one caller than for the other, "
    "or is replaced from step to step (a second set of parameters, a swapped module, a new "
    "function): each is compiled once; keep one and change its contents",
    RecompileCause.OTHER: "{what} changes from step to step and is compiled in: keep it out of the "
    "compiled call's arguments",
}
# What a guard of cause OTHER is about, by how it reads: its name, and what to do.
_VALUES = (
    (
        r"list\(dict\.keys\(|dict_contains|\bin dict\b",
        "the keys of a dict change from step to step ({what}): give the same keys each time",
    ),
    (
        r"[=!]= *['\"]",
        "{what}, a string, changes from step to step and is compiled in: choose what depends on it "
        "outside the model, and pass that as a tensor",
    ),
    (
        r"\bis (not )?None\b",
        "{what} is None in some steps and not in others: each is compiled once; always pass a "
        "tensor (zeros, ones) to have one",
    ),
    (
        r"[=!]= *(True|False)\b|^(not )?[\w.\[\]']+$",
        "{what}, a flag, changes from step to step: each of its values is compiled once; use "
        "torch.where with a tensor to have one",
    ),
    (
        r"GLOBAL_STATE",
        "a global setting of torch changes from step to step ({what}): set it once, before "
        "compiling",
    ),
)
_LEFT_AT_BREAK = "the value that was left at the graph break before it"


def break_mend(met: GraphBreak) -> str:
    """Returns what to do about a graph break, with the source line and torch's page of it.

    It ends with what else is known of the place: what the rest of its reason says.
    """
    code = f"`{met.code}`: " if met.code else ""
    words, _, more = met.reason.partition("; ")
    named = f" ({words.rstrip('.')})" if met.cause in _NAMED and words else ""
    rest = "".join(f"; {part}" for part in (more, met.hint) if part)
    return f"{code}a graph ends here, {_BREAKS[met.cause]}{named}{rest}"


def recompile_mend(met: Recompile, *, limit_hit: bool) -> str:
    """Returns what to do about a recompile, with the guard that failed and what it cost."""
    times = "once more" if met.count == 1 else f"{count(met.count)} times more"
    then = ", then not at all: the recompile limit was hit" if limit_hit else ""
    return (
        f"compiled {times} in {duration(met.lost_s)}{then} because `{met.reason}` no longer held: "
        f"{_changed(met)}{_ends(met)}"
    )


def _ends(met: Recompile) -> str:
    """Returns whether it comes to an end by itself, as far as that was seen."""
    if met.settles is None:
        return ""
    if not met.settles:
        return "; it goes on for as long as the job runs, or until the recompile limit"
    variants = f" after {count(met.variants)} variants" if met.variants else ""
    return f"; it settles{variants}, and costs no more than that at each start"


def _changed(met: Recompile) -> str:
    """Returns what changes, by its name in the person's code, and what to do about it."""
    about = subject(met.reason)
    what = f"`{about}`" if about else "a value that the compiled code relies on"
    if "___stack" in about:
        what = _LEFT_AT_BREAK
    sentence = _RECOMPILES[met.cause]
    if met.cause is RecompileCause.OTHER:
        sentence = next((said for words, said in _VALUES if re.search(words, met.reason)), sentence)
    return sentence.format(what=what)
