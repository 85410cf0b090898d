"""Compiled coverage by calls and by time, and what each graph break costs, from real compiles.

Everything here compiles in this process: the models are tiny and share one compile cache.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

from advisor.profiler.break_sites import EagerWatch  # noqa: E402
from advisor.profiler.compile_events import CompileRecorder  # noqa: E402
from advisor.profiler.coverage import Coverage, measure, operator_calls  # noqa: E402
from advisor.profiler.flip import Flip  # noqa: E402
from advisor.profiler.records import Config, GraphBreak, GraphBreakCause  # noqa: E402
from advisor.profiler.source_lines import statements  # noqa: E402
from advisor.profiler.training import Trainer  # noqa: E402
from advisor.profiler.workload import Workload  # noqa: E402

pytestmark = [
    pytest.mark.trial,
    pytest.mark.usefixtures("compile_cache", "fresh_compiler"),
]


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Forgets what other tests compiled, and the listener to graph breaks.

    One thread: two that wait for each other on a busy machine make operators 1000 times slower.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield
    torch.set_num_threads(threads)
    torch._dynamo.reset()
    torch._logging.set_logs()


def squared(model: Any, batch: Any) -> Any:
    return model(batch).pow(2).mean()


class Run:
    """A model that has been compiled and has trained some steps, and the breaks that came."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Any] = squared,
        rows: int = 64,
        width: int = 128,
        steps: int = 3,
        **config: Any,
    ) -> None:
        torch.manual_seed(0)
        self.batches = [torch.randn(rows, width) for _ in range(3)]
        workload = Workload(
            model=model,
            batches=self.batches,
            loss=loss,
            optimizer=torch.optim.SGD(model.parameters(), lr=1e-4),
        )
        self.trainer = Trainer(workload, torch.device("cpu"))
        self.recorder = CompileRecorder()
        self.flip = Flip([model], Config(**config))
        self.flip.apply()
        for _ in range(steps):
            self.trainer.run(self.batches)
        self.breaks = self.recorder.facts().graph_breaks

    def measure(self, breaks: Sequence[GraphBreak] | None = None) -> Coverage:
        before = self.recorder.count()
        found = measure(
            self.trainer, self.flip, self.batches, self.breaks if breaks is None else breaks
        )
        assert self.recorder.count() == before, "measuring made the compiler work again"
        return found


def lost(found: Coverage) -> dict[str, float | None]:
    """Returns the share that each break loses, by its source line."""
    return {each.code: each.lost_share for each in found.breaks}


def check_shares(found: Coverage) -> None:
    assert found.time is not None
    shares = [each.lost_share for each in found.breaks if each.lost_share is not None]
    assert all(share >= 0 for share in shares)
    assert sum(shares) <= 1 - found.time + 1e-9


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(128))

    def forward(self, x: Any) -> Any:
        for _ in range(12):
            x = x * torch.sigmoid(x * self.scale) + 0.1 * torch.tanh(x)
        return x


def test_a_model_without_breaks_is_covered_by_calls_and_by_time() -> None:
    run = Run(Plain())
    found = run.measure()
    assert found.breaks == ()
    assert found.calls is not None and found.calls > 0.8
    assert found.time is not None and 0.8 < found.time <= 1


class Printing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(128, 128), nn.Linear(128, 8)

    def forward(self, x: Any) -> Any:
        h = F.gelu(self.first(x))
        print("mean", h.mean(), file=sys.stderr)
        return self.second(F.gelu(h) * 2)


def test_a_print_loses_its_own_line_only() -> None:
    run = Run(Printing())
    found = run.measure()
    (printed,) = found.breaks
    assert printed.cause is GraphBreakCause.PRINT_OR_LOGGING
    assert printed.hits_per_step == 1
    assert found.time is not None and printed.lost_share is not None
    assert 0 < printed.lost_share <= 1 - found.time
    check_shares(found)


class Looping(nn.Module):
    """A branch inside a loop: nothing of `forward` is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(4))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = x + F.gelu(layer(x))
            if x.abs().max() > 1e9:
                x = x / 2
        return x


def test_a_break_in_a_loop_loses_the_whole_function() -> None:
    run = Run(Looping())
    # Other work on the machine may stretch the loss alone; it never stretches the break alone.
    found = max((run.measure() for _ in range(3)), key=lambda each: each.breaks[0].lost_share or 0)
    (branch,) = found.breaks
    assert branch.code == "if x.abs().max() > 1e9:"
    assert branch.hits_per_step == 4
    assert found.calls is not None and found.calls < 0.1
    # All but the loss, which is computed outside the model and belongs to no break.
    assert branch.lost_share is not None and 0.8 < branch.lost_share < 1
    check_shares(found)


def light(x: Any) -> Any:
    if x[0, 0].item() > 1e9:
        x = x + 1
    return x


def heavy(x: Any) -> Any:
    for _ in range(60):
        x = torch.sin(x) + torch.cos(x)
        if x[0, 0].item() > 1e9:
            break
    return x


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(128, 128), nn.Linear(128, 128)

    def forward(self, x: Any) -> Any:
        x = light(self.first(x))
        x = heavy(x)
        return self.second(x)


def test_the_heavy_break_comes_before_the_light_one() -> None:
    run = Run(Two(), rows=512)
    found = run.measure()
    light_one, heavy_one = sorted(found.breaks, key=lambda each: each.line)
    assert (light_one.hits_per_step, heavy_one.hits_per_step) == (1, 60)
    assert light_one.lost_share is not None and heavy_one.lost_share is not None
    assert heavy_one.lost_share > 10 * light_one.lost_share
    assert heavy_one.lost_share > 0.5
    check_shares(found)


class Peak(nn.Module):
    def forward(self, x: Any) -> Any:
        return x / (1.0 + x.abs().max().item())


class Thrice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(128, 128) for _ in range(3))
        self.peak = Peak()

    def forward(self, x: Any) -> Any:
        x = self.peak(F.gelu(self.first(x)))
        x = self.peak(F.gelu(self.second(x)))
        return self.peak(F.gelu(self.third(x)))


def test_a_break_in_a_submodule_called_three_times_is_hit_three_times() -> None:
    run = Run(Thrice())
    found = run.measure()
    (read,) = found.breaks
    assert read.hits_per_step == 3
    assert read.lost_share is not None and read.lost_share < 0.5
    check_shares(found)


class Listed(nn.Module):
    """A container of torch's own, whose frame dynamo leaves to Python once something breaks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128), Peak(), nn.Linear(128, 128)
        )

    def forward(self, x: Any) -> Any:
        return self.layers(x)


def test_a_break_in_a_sequential_loses_its_neighbours_too() -> None:
    run = Run(Listed())
    found = run.measure()
    (read,) = found.breaks
    assert read.hits_per_step == 1
    assert found.time is not None and read.lost_share is not None
    # Whatever was left to Python inside the model is this break's, and the rest is the loss.
    assert read.lost_share > 0.6 * (1 - found.time)
    check_shares(found)


class Guarded(nn.Module):
    """Two breaks: one in passing, and one in a loop that the rest of the function is lost to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(128, 128), nn.Linear(128, 128)

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        scale = x[0, 0].item()
        x = x * min(1.0, 1.0 + abs(scale))
        for _ in range(10):
            x = torch.sin(self.second(x))
        for _ in range(2):
            if torch.isnan(x).any():
                x = torch.nan_to_num(x)
        return x


def test_a_break_in_a_loop_bears_the_rest_of_its_function() -> None:
    run = Run(Guarded())
    found = run.measure()
    shares = lost(found)
    whole, passing = shares["if torch.isnan(x).any():"], shares["scale = x[0, 0].item()"]
    assert whole is not None and passing is not None
    assert whole > 5 * passing
    check_shares(found)


def test_time_outside_the_model_belongs_to_no_break() -> None:
    def loss(model: Any, batch: Any) -> Any:
        out = model(batch)
        for _ in range(60):
            out = torch.sin(out) + torch.cos(out)
        return out.mean()

    run = Run(Thrice(), loss=loss)
    found = run.measure()
    (read,) = found.breaks
    assert found.time is not None and found.time < 0.8
    assert read.lost_share is not None
    assert read.lost_share < (1 - found.time) / 2


class Counting(nn.Module):
    """A counter in the module: compiled anew in each step, until the compiler refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.layer = nn.Linear(128, 128)

    def forward(self, x: Any) -> Any:
        self.calls += 1
        for _ in range(10):
            x = torch.sin(self.layer(x)) * (self.calls % 100_000)
        print("sum", x.sum(), file=sys.stderr)
        return x


def test_what_the_recompile_limit_lost_is_no_breaks() -> None:
    run = Run(Counting(), steps=8)
    assert run.recorder.facts().recompile_limit_hit
    found = run.measure()
    assert found.time is not None and found.time < 0.5
    printed = next(each for each in found.breaks if "print" in each.code)
    assert printed.lost_share is not None and printed.lost_share < 0.3
    check_shares(found)


def test_breaks_that_cannot_be_placed_cost_nothing_known() -> None:
    run = Run(Printing())
    place = replace(run.breaks[0], file="/nowhere/train.py", line=3)
    breaks = (
        place,
        replace(place, file="", line=0),
        replace(place, file=__file__, line=10**6),
        replace(place, file=str(Path(__file__).parent), line=1),
    )
    found = run.measure(breaks)
    assert found.breaks == breaks
    assert found.time is not None


@pytest.mark.parametrize("compiled", [True, False])
def test_modules_and_tracing_are_left_as_they_were(compiled: bool) -> None:
    def tracer(frame: Any, event: str, argument: Any) -> Any:
        return None

    run = Run(Printing())
    (run.flip.to_compiled if compiled else run.flip.to_eager)()
    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        run.measure()
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(before)
    assert run.flip.compiled is compiled

    def fails(batch: Any) -> Any:
        raise RuntimeError("the step of the person's own failed")

    run.trainer.step = fails  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="person's own"):
        run.measure()
    assert run.flip.compiled is compiled
    assert sys.gettrace() is before


def test_operator_calls_leave_out_the_optimizer() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def run() -> None:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    run()
    all_calls, outside = operator_calls(run)
    assert 0 < all_calls == outside
    with_optimizer, _ = operator_calls(lambda: [run(), optimizer.zero_grad()])
    assert with_optimizer == all_calls


# How often a line is come by, without any compile.


def lines_of(function: Callable[..., Any]) -> dict[str, int]:
    """Returns the lines of this file within a function that carry a `# name` mark."""
    import inspect

    source, first = inspect.getsourcelines(function)
    return {
        text.rsplit("# at ", 1)[1].strip(): first + offset
        for offset, text in enumerate(source)
        if "# at " in text
    }


def hits(function: Callable[[], Any]) -> dict[str, int | None]:
    marks = lines_of(function)
    breaks = {
        name: GraphBreak(
            cause=GraphBreakCause.OTHER, reason="", file=function.__code__.co_filename, line=line
        )
        for name, line in marks.items()
    }
    watch = EagerWatch(list(breaks.values()), [])
    with watch:
        function()
    return {name: watch.hits(found) for name, found in breaks.items()}


def item(*values: Any) -> float:
    return float(len(values))


def test_a_line_in_a_loop_is_hit_in_each_round_and_its_head_once() -> None:
    def loops() -> float:
        total = 0.0
        for each in range(int(item(1, 2, 3))):  # at for_head
            total += item(each)  # at for_body
        while item() + total < 6:  # at while_head
            total += 1  # at while_body
        # fmt: off
        for each in range(4): total += item(each)  # noqa: E701 # at one_line
        # fmt: on
        return total

    assert hits(loops) == {
        "for_head": 1, "for_body": 3, "while_head": 4, "while_body": 3, "one_line": 4,
    }  # fmt: skip


def test_a_statement_of_several_lines_is_hit_once() -> None:
    def spread() -> float:
        return (
            item(  # at opens
                1,
                item(2),  # at middle
                item(
                    3,
                ),
            )
            + 1
        )

    def twice() -> None:
        for _ in range(2):
            item(  # at call
                1,
                2,
            )

    assert hits(spread) == {"opens": 1, "middle": 1}
    assert hits(twice) == {"call": 2}


def test_a_comprehension_is_hit_for_each_of_its_elements() -> None:
    def comprehensions() -> Any:
        one = [item(each) for each in range(3)]  # at list_on_one_line
        many = [
            item(each)  # at element
            for each in range(4)
        ]
        block = [
            item(each) for each in range(5)  # at inner_line
        ]  # fmt: skip
        total = sum(item(each) for each in range(2))  # at generator
        keyed = {each: item(each) for each in range(6)}  # at dictionary
        return one, many, block, total, keyed

    assert hits(comprehensions) == {
        "list_on_one_line": 3, "element": 4, "inner_line": 5, "generator": 2, "dictionary": 6,
    }  # fmt: skip


def test_a_lambda_is_hit_when_it_is_called() -> None:
    def sorts() -> Any:
        return sorted([3, 1, 2], key=lambda each: item(each) + each)  # at key

    assert hits(sorts) == {"key": 3}


def test_a_line_that_is_never_reached_has_no_hits() -> None:
    def branches() -> float:
        if item() > 1:  # at test
            return item(1)  # at never
        return 0.0

    assert hits(branches) == {"test": 1, "never": None}


def test_statements_know_what_encloses_them(tmp_path: Path) -> None:
    file = tmp_path / "code.py"
    file.write_text(
        "def f(x):\n"  # 1
        "    with x:\n"
        "        a = 1\n"  # 3
        "    for i in range(\n"
        "        3\n"  # 5
        "    ):\n"
        "        b = i\n"  # 7
        "    else:\n"
        "        c = 1\n"  # 9
        "    try:\n"
        "        d = 1\n"  # 11
        "    except E:\n"
        "        e = 1\n"  # 13
        "    while x:\n"
        "        def g():\n"  # 15
        "            return 1\n"
    )
    of_line = statements(str(file))
    assert of_line[3].in_with and not of_line[3].in_loop_or_try
    assert of_line[5] == of_line[4] and (of_line[4].start, of_line[4].end) == (4, 6)
    looped = {line for line, statement in of_line.items() if statement.in_loop_or_try}
    assert looped == {7, 11, 14, 15}
    assert statements(str(tmp_path / "absent.py")) == {}
    (tmp_path / "broken.py").write_text("def f(:\n")
    assert statements(str(tmp_path / "broken.py")) == {}
