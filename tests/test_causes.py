"""The compiler's own words, as torch 2.13 prints them, and the causes that they stand for."""

from __future__ import annotations

import json
from importlib.resources import files

import pytest

from advisor.profiler.causes import break_cause, recompile_cause
from advisor.profiler.records import GraphBreakCause as Break
from advisor.profiler.records import RecompileCause as Re

# What torch 2.13 puts in front of the title: nothing, what it was doing, or that it gave up.
PREAMBLES = (
    "",
    "Encountered graph break when attempting to trace CALL: a function call, e.g. f(x, y):\n\n",
    "Failed to handle graph break gracefully. Skipping the function and falling back to eager."
    " Graph break encountered:\n\n",
)


def message(
    title: str, context: str = "", explanation: str = "It cannot be traced.", preamble: str = ""
) -> str:
    return (
        f"Graph break in user code at /home/me/train.py:9\nGraph Break Reason: {preamble}{title}\n"
        f"  Explanation: {explanation}\n  Hint: Mend it.\n\n"
        f"  Developer debug context: {context}\n\n"
        " For more details about this graph break, please visit: https://example.org/gb0124.html\n"
        'User code traceback:\n  File "/home/me/train.py", line 9, in forward\n    y = f(x)\n'
    )


SKIPPED = "Attempted to call function marked as skipped"
# The compiler's explanation of a skipped builtin tells of warnings and pybind whatever it was.
EXAMPLES = (
    "This function is either a Python builtin (e.g. _warnings.warn) or a third-party C/C++ Python"
    " extension (perhaps created with pybind)."
)


@pytest.mark.parametrize(
    ("title", "context", "cause"),
    [
        (
            "Unsupported Tensor.item() call with capture_scalar_outputs=False",
            "call_method TensorVariable() item () {}",
            Break.SCALAR_READ,
        ),
        ("Tensor.tolist() with non-integer tensor", "", Break.SCALAR_READ),
        ("Data dependent operator", "aten._local_scalar_dense.default", Break.SCALAR_READ),
        ("Data-dependent branching", "attempted to jump with TensorVariable()",
         Break.DATA_DEPENDENT_BRANCH),
        ("Dynamic shape operator", "aten.nonzero.default", Break.DYNAMIC_OUTPUT_SHAPE),
        (
            "Failed to trace builtin operator",
            "builtin print [<class 'ConstantVariable'>, <class 'TensorVariable'>] False",
            Break.PRINT_OR_LOGGING,
        ),
        (SKIPPED, "module: _warnings, qualname: warn, skip reason: <missing reason>",
         Break.PRINT_OR_LOGGING),
        (
            SKIPPED,
            "module: scipy.optimize._lsap, qualname: linear_sum_assignment, skip reason: x",
            Break.FOREIGN_CALL,
        ),
        (SKIPPED, "module: time, qualname: perf_counter, skip reason: x",
         Break.UNSUPPORTED_PYTHON),
        ("Attempted to inline function marked as skipped",
         "qualname: guard.__init__, name: __init__,"
         " filename: `/v/lib/python3.11/site-packages/torch/autograd/mode.py`, skip reason: x",
         Break.UNSUPPORTED_PYTHON),
        (SKIPPED, "module: my_extension, qualname: fused_step, skip reason: x",
         Break.FOREIGN_CALL),
        ("Tensor.numpy() with trace_numpy=False", "", Break.FOREIGN_CALL),
        ("Skip calling `torch.compiler.disable()`d function", "<function f>",
         Break.DISABLED_FUNCTION),
        ("Unsupported autograd.Function context `mark_dirty`", "", Break.AUTOGRAD_FUNCTION),
        ("Attempted to represent unregistered RemovableHandle", "", Break.HOOK),
        ("Operator does not support running with fake tensors", "unsupported operator: my.op",
         Break.UNREGISTERED_OPERATOR),
        ("Unsupported context manager", "Attempted to enter ctx", Break.UNSUPPORTED_PYTHON),
        ("Call to `torch._dynamo.skip_frame()`", "", Break.SKIPPED_FRAME),
        ("Data dependent operator", "aten.equal.default", Break.DATA_DEPENDENT_BRANCH),
        ("Unsupported method call", "call_method UserDefinedObjectVariable(TextIOWrapper) write",
         Break.PRINT_OR_LOGGING),
        ("Unsupported method call", "call_method UserDefinedObjectVariable(_FuncPtr) __call__",
         Break.FOREIGN_CALL),
        ("Call to `torch._dynamo.graph_break()`", "", Break.DISABLED_FUNCTION),
        ("Something that no version says yet", "", Break.OTHER),
    ],
)  # fmt: skip
def test_a_break_has_the_cause_that_its_title_and_context_say(
    title: str, context: str, cause: Break
) -> None:
    for preamble in PREAMBLES:
        assert break_cause(message(title, context, EXAMPLES, preamble)) is cause


def test_frames_of_a_wrapper_decide_before_words() -> None:
    text = message("Skip inlining `torch.compiler.disable()`d function", "<function disable>")
    text += '  File "/site-packages/torch/distributed/fsdp/_fully_shard/_fsdp_state.py", line 69\n'
    assert break_cause(text) is Break.DISTRIBUTED_WRAPPER


def test_most_breaks_that_torch_knows_have_a_cause() -> None:
    registry = json.loads((files("torch._dynamo") / "graph_break_registry.json").read_text())
    titles = {entry["Gb_type"] for entries in registry.values() for entry in entries}
    assert len(titles) > 300
    unknown = [title for title in titles if break_cause(title) is Break.OTHER]
    assert len(unknown) < 0.3 * len(titles), sorted(unknown)


@pytest.mark.parametrize(
    ("guard", "cause"),
    [
        ("tensor 'x' size mismatch at index 0. expected 16, actual 3", Re.BATCH_SIZE),
        ("tensor 'ids' size mismatch at index 1. expected 32, actual 48", Re.SHAPE),
        ("tensor 'args[0]' stride mismatch at index 1. expected 1, actual 1024", Re.STRIDE),
        ("tensor 'x' requires_grad mismatch. expected requires_grad=0", Re.GRAD_MODE),
        ("tensor 'x' dtype mismatch. expected Float, actual BFloat16", Re.DTYPE_OR_DEVICE),
        ("self.global_step == 7", Re.MODULE_ATTRIBUTE),
        ("self._modules['head'].scale == 2.0", Re.MODULE_ATTRIBUTE),
        ("self.training == True", Re.TRAIN_EVAL),
        ("limit == 0.8", Re.PYTHON_NUMBER),
        ("___stack0 == 238.38400268554688", Re.PYTHON_NUMBER),
        ("GLOBAL_STATE changed: grad_mode", Re.GRAD_MODE),
        ("___check_obj_id(fn, 140213)", Re.OBJECT_IDENTITY),
        ("expected type of 'self._parameters['bias']' to be a tensor type, but found Parameter",
         Re.OBJECT_IDENTITY),
        ("optimizer.param_groups[0]['lr'] == 0.1", Re.OPTIMIZER_STATE),
        ("name == 'book-01202'", Re.OTHER),
        ("name == 'shape of len(x) is 3'", Re.OTHER),
        ("mask is not None", Re.OTHER),
        ("flag == True", Re.OTHER),
        ("list(dict.keys(extra))[0] == 't1'", Re.OTHER),
        ("len(self.history) == 3", Re.MODULE_ATTRIBUTE),
        ("fn.__self__._modules['1'].n == 8", Re.MODULE_ATTRIBUTE),
        ("len(parts) == 3", Re.SHAPE),
        ("tensor '___stack0' size mismatch at index 0. expected 27, actual 36", Re.SHAPE),
        ("2 <= ___stack0[0].size()[0]", Re.SHAPE),
        ("GLOBAL_STATE changed: autocast(cpu)_enabled", Re.DTYPE_OR_DEVICE),
        ("___check_type_id(self._modules['act'], 94795), type=<class 'GELU'>",
         Re.OBJECT_IDENTITY),
    ],
)  # fmt: skip
def test_a_recompile_has_the_cause_that_its_guard_says(guard: str, cause: Re) -> None:
    assert recompile_cause(guard) is cause


def test_a_loggers_own_code_is_logging() -> None:
    text = message("Unsupported python_type() call", "user-defined")
    assert break_cause(text) is Break.UNSUPPORTED_PYTHON
    for file in ("/lib/python3.11/logging/__init__.py", "/site-packages/loguru/_logger.py"):
        assert break_cause(text, innermost_file=file) is Break.PRINT_OR_LOGGING


def test_what_an_autograd_function_cannot_hold_is_its_fault() -> None:
    branch = message("Data-dependent branching", "attempted to jump with TensorVariable()")
    assert break_cause(branch, in_function=True) is Break.AUTOGRAD_FUNCTION
    printed = message("Failed to trace builtin operator", "builtin print [] False")
    assert break_cause(printed, in_function=True) is Break.PRINT_OR_LOGGING
