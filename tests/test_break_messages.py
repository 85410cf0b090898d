"""From messages, guards and metrics of torch 2.13, as it prints them, to records."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from advisor.profiler.break_messages import Frame, graph_breaks
from advisor.profiler.compile_events import cudagraph_skips
from advisor.profiler.enclosing import enclosing
from advisor.profiler.guards import guard_of, readable
from advisor.profiler.recompile_events import recompiles
from advisor.profiler.records import CompileEvent, GraphBreak, GraphBreakCause, RecompileCause

LIBRARY = "/venv/lib/python3.11/site-packages"
MODULE = f"{LIBRARY}/torch/nn/modules/module.py"
SOURCE = """
class Clip(torch.autograd.Function):
    @staticmethod
    def backward(ctx, g):
        if g.max() > 1:
            g = g / 2
        return g

class Net(torch.nn.Module):
    def forward(self, x):
        for i in range(3):
            x = x + solve(x)
        try:
            if x.isnan().any():
                raise ValueError
        except ValueError:
            pass
        return x
"""
IN_BACKWARD, IN_LOOP, IN_TRY = 5, 12, 14
COUNTED = {"inductor": {"cudagraph_skips": 3}}


@pytest.fixture
def source(tmp_path: Path) -> str:
    file = tmp_path / "net.py"
    file.write_text(SOURCE)
    return str(file)


def message(file: str, line: int, title: str, preamble: str = "", called: str = "") -> str:
    below = called or f'  File "{file}", line {line}, in forward\n    x = x\n'
    return (
        f"Graph break in user code at {file}:{line}\nGraph Break Reason: {preamble}\n{title}\n"
        "  Explanation: It cannot be traced. More of it; and more.\n"
        "  Developer debug context: \n\nUser code traceback:\n"
        '  File "/home/me/train.py", line 3, in <lambda>\n    loss = m(x)\n'
        f'  File "{MODULE}", line 1776, in _wrapped_call_impl\n'
        f"    return self._compiled_call_impl(*args, **kwargs)\n{below}"
    )


def found(*texts: str) -> tuple[GraphBreak, ...]:
    return graph_breaks(texts, (), {})


def test_a_break_within_a_loop_says_that_the_whole_function_is_lost(source: str) -> None:
    text = message(
        source,
        IN_LOOP,
        "Data-dependent branching",
        "Failed to handle graph break gracefully. Skipping the function and falling back to eager.",
    )
    (met,) = found(text)
    assert (met.file, met.line, met.code) == (source, IN_LOOP, "x = x + solve(x)")
    assert met.reason == (
        "It cannot be traced.; as it lies in a loop, all of `forward` is left to Python"
    )


def test_a_break_within_a_try_says_that_the_rest_is_lost(source: str) -> None:
    preamble = (
        "Compiling up to the previous resumable state, then skipping the rest of the function"
    )
    (met,) = found(message(source, IN_TRY, "Data-dependent branching", preamble))
    assert met.reason.endswith("as it lies in a try block, the rest of `forward` is left to Python")


def test_a_branch_in_a_backward_is_the_functions_fault(source: str) -> None:
    (met,) = found(message(source, IN_BACKWARD, "Data-dependent branching"))
    assert met.cause is GraphBreakCause.AUTOGRAD_FUNCTION
    assert "`backward` of the autograd.Function `Clip`" in met.reason


def test_a_place_that_torch_tells_again_without_frames_is_the_same_place(source: str) -> None:
    library = f"{LIBRARY}/models/layers.py"
    called = (
        f'  File "{source}", line {IN_LOOP}, in forward\n    x = x + solve(x)\n'
        f'  File "{library}", line 7, in solve\n    logger.info(x)\n'
    )
    title = "logging.Logger method not supported for non-export cases"
    full = message(library, 7, title, called=called)
    again = full.split("User code traceback:")[0].replace("Graph break in", "Graph break (x) in")
    (met,) = found(again, full, again)
    assert met.count == 3
    assert (met.file, met.line) == (source, IN_LOOP)
    assert "in models/layers.py:7" in met.reason


def test_a_break_in_a_library_that_the_loop_calls_is_the_librarys_and_names_the_caller() -> None:
    library = f"{LIBRARY}/models/layers.py"
    called = f'  File "{library}", line 7, in forward\n    logger.info(x)\n'
    (met,) = found(message(library, 7, "logging.Logger method not supported", called=called))
    assert (met.file, met.line, met.code) == (library, 7, "logger.info(x)")
    assert "called from /home/me/train.py:3" in met.reason


def event(compile_id: str, reason: str = "", failure: str = "", file: str = "") -> CompileEvent:
    return CompileEvent(
        compile_id=compile_id,
        function="forward" if file else "",
        file=file,
        line=10 if file else 0,
        step=0,
        wall_s=1.5,
        recompile_reason=reason,
        failure=failure,
    )


def test_an_error_that_fell_back_is_a_break_with_its_place() -> None:
    failed = event("1/0", failure="boom in the backend\nmore", file="/home/me/net.py")
    (met,) = graph_breaks((), (failed,), {})
    assert (met.file, met.line) == ("/home/me/net.py", 10)
    assert (
        met.reason == "the compiler failed: boom in the backend; all of `forward` is left to Python"
    )
    (traced,) = graph_breaks((), (failed,), {"1/0": Frame("/home/me/net.py", 12)})
    assert traced.line == 12


def test_a_failure_that_a_message_tells_of_is_no_second_break(source: str) -> None:
    text = message(source, IN_LOOP, "Data-dependent branching")
    failed = event("1/0", failure="Data-dependent branching\n  Explanation: x", file=source)
    assert len(graph_breaks((text,), (failed,), {})) == 1


LIMIT = "Dynamo recompile limit exceeded"


def test_recompiles_of_one_value_are_one_wherever_the_compiler_saw_it() -> None:
    net = "/home/me/net.py"
    stack = (
        f'\nUser stack trace:\n  File "{net}", line 15, in forward\n    y = self.parts[level](x)'
    )
    events = (
        event("0/0", file=net),
        event("0/1", f"0/0: level == 5    # y = self.parts[level](x){stack}", file=net),
        event("0/2", "0/1: level == 6  # idx = index(idx)  # nn/modules/container.py:3 in f",
              file=net),
        event("0/3", "0/2: level == 7", failure=LIMIT),
    )  # fmt: skip
    (met,) = recompiles(events, {})
    assert met.cause is RecompileCause.PYTHON_NUMBER
    assert (met.reason, met.file, met.line) == ("level == 5", net, 15)
    assert (met.count, met.lost_s) == (3, 4.5)


def test_a_recompile_of_torchs_own_module_is_where_the_user_calls_it() -> None:
    inner = f"{LIBRARY}/torch/_dynamo/external_utils.py"
    events = (
        event("0/0", file=inner),
        event("0/1", "0/0: tensor 'args[0]' stride mismatch at index 1. expected 1", file=inner),
    )
    (met,) = recompiles(events, {"0/1": Frame("/home/me/train.py", 40, "<lambda>")})
    assert (met.file, met.line) == ("/home/me/train.py", 40)
    assert met.cause is RecompileCause.STRIDE


def test_two_arguments_are_two_recompiles_and_one_stage_after_the_other_is_one() -> None:
    net, other = "/home/me/net.py", "/home/me/other.py"

    def at(file: str, line: int) -> str:
        return f'\nUser stack trace:\n  File "{file}", line {line}, in forward\n    y'

    frozen = "tensor 'self._modules['a']._parameters['{}']' requires_grad mismatch. expected 0"
    events = (
        event("0/1", "0/0: step == 1" + at(net, 3), file=net),
        event("0/2", "0/1: kind == 'a'" + at(net, 4), file=net),
        event("1/1", "1/0: " + frozen.format("weight"), file=other),
        event("1/2", "1/1: " + frozen.format("bias"), file=other),
    )
    met = recompiles(events, {})
    assert [one.cause for one in met] == [
        RecompileCause.PYTHON_NUMBER,
        RecompileCause.OTHER,
        RecompileCause.GRAD_MODE,
    ]
    assert met[2].count == 2 and "self.a.weight" in met[2].reason


def test_a_guard_is_read_without_source_and_advice() -> None:
    text = (
        "0/0: tensor 'self._modules['blocks']._modules['5']._parameters['bias']' requires_grad"
        " mismatch. expected requires_grad=0. Guard failed on a parameter, consider using x."
    )
    assert readable(guard_of(text)) == (
        "tensor 'self.blocks.5.bias' requires_grad mismatch. expected requires_grad=0"
    )
    assert guard_of("2/1: t == 'a'      # y = f(t)  # net.py:3 in g") == "t == 'a'"


def test_what_a_line_lies_in(source: str) -> None:
    assert enclosing(source, IN_BACKWARD).function_class == "Clip"
    assert enclosing(source, IN_LOOP).block == "loop"
    assert enclosing(source, IN_TRY).block == "try block"
    assert enclosing(source, 10).block == "" and enclosing(source, 10).function == "forward"
    assert enclosing("/no/such/file.py", 3).function == ""


@pytest.mark.parametrize(
    ("reasons", "logged", "expected"),
    [
        (
            ["skipping cudagraphs due to cpu device (arg0_1)", None],
            ["skipping cudagraphs due to cpu device (arg0_1)"],
            ("skipping cudagraphs due to cpu device (arg0_1)",),
        ),
        (
            [None],
            ["skipping cudagraphs due to mutated inputs (1 instances). Found from :\n   File x"],
            ("skipping cudagraphs due to mutated inputs (1 instances). Found from : File x",),
        ),
        ([None], [], ("left out 3 times, for a reason that torch does not tell",)),
    ],
)
def test_cuda_graphs_left_out_are_told_once_each(
    reasons: list[str | None], logged: list[str], expected: tuple[str, ...]
) -> None:
    metrics = [SimpleNamespace(cudagraph_skip_reason=reason) for reason in reasons]
    assert cudagraph_skips(metrics, COUNTED, logged) == expected


def test_no_cuda_graph_left_out_is_nothing_to_tell() -> None:
    assert cudagraph_skips([SimpleNamespace()], {"inductor": {}}, []) == ()
