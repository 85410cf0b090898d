"""The loop of a script that nobody changed: which module it trains, and where its steps end."""

from __future__ import annotations

import copy
import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import QUICK

from advisor.loop_finder import CannotTell, Found, LoopFinder
from advisor.loop_watch import LoopWatch
from advisor.models.loop_policy import Arm, Stage
from advisor.models.plan import Plan
from advisor.profiler import torch_internals
from advisor.watch_settings import TOP, WatchSettings, read

# --- finding it


class Linear(torch.nn.Module):
    """Calls one layer; `Net` calls two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(given)
        return out


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Linear(), Linear()

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.two(self.one(given).relu())
        return out


def sgd(*modules: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.01)


def found(events: list[Any], times: int = 12) -> Found | CannotTell | None:
    """Returns what is told of a cycle of calls and optimizer steps that repeats."""
    finder = LoopFinder()
    for _ in range(times):
        for each in events:
            if isinstance(each, torch.optim.Optimizer):
                finder.stepped(each)
            else:
                for module in each.modules():
                    answer = finder.called(module)
                    if answer is not None:
                        return answer
    return None


def test_plain_loop_is_found_after_three_steps() -> None:
    net = Net()
    optimizer = sgd(net)
    finder, steps = LoopFinder(), 0
    while (answer := finder.called(net)) is None:
        finder.stepped(optimizer)
        steps += 1
    assert steps == 3
    assert answer == Found(net, optimizer, (optimizer,), forwards=1, in_training=True)


def test_accumulated_forwards_are_counted() -> None:
    net = Net()
    answer = found([net, net, net, net, sgd(net)])
    assert isinstance(answer, Found)
    assert answer.forwards == 4


def test_loss_and_frozen_teacher_are_not_the_model() -> None:
    net, teacher, loss = Net(), Net(), torch.nn.MSELoss()
    answer = found([teacher, net, loss, sgd(net)])
    assert isinstance(answer, Found)
    assert answer.root is net


def test_several_optimizers_of_one_model_make_one_step() -> None:
    net = Net()
    first, second = sgd(net.one), sgd(net.two)
    answer = found([net, first, second])
    assert isinstance(answer, Found)
    assert (answer.root, answer.last, answer.forwards) == (net, second, 1)
    assert answer.optimizers == (first, second)


def test_optimizers_that_take_turns_make_one_step_of_a_cycle() -> None:
    net = Net()
    first, second = sgd(net.one), sgd(net.two)
    answer = found([net, first, net, second])
    assert isinstance(answer, Found)
    assert answer.last in (first, second)
    assert answer.forwards == 2
    uneven = found([net, second, net, first, second])
    assert isinstance(uneven, Found)
    assert (uneven.last, uneven.times, uneven.forwards) == (second, 2, 2)


def test_subclass_that_calls_its_parents_step_is_one_optimizer() -> None:
    net = Net()
    optimizer = sgd(net)
    answer = found([net, optimizer, optimizer])
    assert isinstance(answer, Found)
    assert answer.optimizers == (optimizer,)


def test_steps_that_a_scaler_skips_do_not_hide_the_loop() -> None:
    net = Net()
    optimizer = sgd(net)
    finder = LoopFinder()
    answer: Any = None
    for skipped in (True, True, False, False, False, False):
        answer = answer or finder.called(net)
        if not skipped:
            finder.stepped(optimizer)
    assert isinstance(answer, Found)
    assert answer.forwards == 1


def test_two_models_in_turns_are_told_apart_from_one() -> None:
    generator, discriminator = Net(), Linear()
    events = [generator, discriminator, sgd(discriminator), generator, discriminator]
    answer = found([*events, sgd(generator)])
    assert isinstance(answer, CannotTell)
    assert "2 modules are trained side by side" in answer.why


def test_small_trained_criterion_beside_the_model_is_no_second_model() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(40, 40))
    scale = torch.nn.Linear(1, 1)
    answer = found([net, scale, sgd(net, scale)])
    assert isinstance(answer, Found)
    assert answer.root is net


def test_blocks_recomputed_in_the_backward_are_within_the_model() -> None:
    net = Net()
    answer = found([net, net.two, net.one, sgd(net)])
    assert isinstance(answer, Found)
    assert answer.root is net


def test_parameters_without_a_module_are_told() -> None:
    image = torch.zeros(3, requires_grad=True)
    answer = found([Net(), torch.optim.Adam([image])])
    assert isinstance(answer, CannotTell)
    assert "no module that was called holds what Adam trains" in answer.why


def test_optimizers_without_an_order_are_told() -> None:
    net = Net()
    choices = [sgd(net), sgd(net), sgd(net)]
    # Differences of the Thue-Morse sequence: nothing in it comes twice in a row.
    thue_morse = [number.bit_count() % 2 for number in range(100)]
    finder = LoopFinder()
    answer: Any = None
    for one, next_one in itertools.pairwise(thue_morse):
        answer = answer or finder.called(net)
        finder.stepped(choices[next_one - one])
    assert isinstance(answer, CannotTell)
    assert "no order that repeats" in answer.why


# --- watching it


@pytest.fixture(autouse=True)
def left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(TOP, str(os.getpid()))
    monkeypatch.setenv("ADVISOR_DEBUG", "1")
    logger = logging.getLogger("advisor")
    handlers = list(logger.handlers)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    logger.handlers[:] = handlers
    logger.propagate = True


class Job:
    """A training watched in this process, with what it leaves."""

    def __init__(
        self, folder: Path, *, measure: bool = False, watched: bool = True, steps: float = 0
    ) -> None:
        self.settings = WatchSettings(
            folder=str(folder / "watch"),
            measure=measure,
            plan=Plan(steps=steps) if steps else None,
            config=QUICK,
            result=str(folder / "result.json"),
        )
        self.watch = LoopWatch(self.settings)
        if watched:
            self.watch.start()
        torch.manual_seed(0)
        self.net = Net()
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-3)
        self.losses: list[float] = []

    def run(self, steps: int, forwards: int = 1) -> Job:
        for number in range(steps):
            for _ in range(forwards):
                loss = self.net(torch.full((8, 4), 0.1 + number / 100)).pow(2).mean()
                loss.backward()
                self.losses.append(float(loss.detach()))
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    @property
    def hooks(self) -> int:
        return len(torch.nn.modules.module._global_forward_pre_hooks)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def make(**options: Any) -> Job:
        made.append(Job(tmp_path, **options))
        return made[-1]

    yield make
    for each in made:
        each.watch._end_watching()


def test_losses_are_those_of_the_plain_loop(job: Callable[..., Job]) -> None:
    plain = job(watched=False).run(60)
    seen = job().run(60)
    assert seen.losses == plain.losses
    assert seen.watch._steps == 60


def test_the_hooks_of_modules_are_gone_once_the_loop_is_found(job: Callable[..., Job]) -> None:
    one = job()
    assert one.hooks == 1
    one.run(4)
    assert one.hooks == 0
    assert one.watch._auto is not None


def test_each_border_is_a_step_of_the_loop(job: Callable[..., Job]) -> None:
    one = job().run(40, forwards=3)
    assert one.watch._auto is not None
    # Three are needed to find it, and the fourth has begun when it is found.
    assert one.watch._auto.outcome().steps_done == 36
    assert one.watch._watched.forwards == 3


def test_measuring_ends_the_script_with_an_outcome(job: Callable[..., Job]) -> None:
    # Of this process: those of the tests before are none of this job's.
    torch._dynamo.utils.counters.clear()
    one = job(measure=True)
    with pytest.raises(SystemExit) as ended:
        one.run(100_000)
    assert ended.value.code == 0
    result = read(one.settings.result)
    assert result is not None
    assert result.settled
    assert result.outcome.stage is Stage.SETTLED
    assert result.outcome.speedup is not None
    assert result.graphs == 1
    assert result.facts is not None
    assert (result.facts.model_class, result.facts.parameters) == ("Net", 40)
    assert one.net._compiled_call_impl is None
    one.run(3)


def test_measured_steps_compute_what_plain_ones_do(job: Callable[..., Job]) -> None:
    one = job(measure=True)
    with pytest.raises(SystemExit):
        one.run(100_000)
    # The last step's loss is there only if the optimizer came after it.
    plain = job(watched=False).run(len(one.losses))
    assert one.losses == plain.losses


def test_training_that_is_long_enough_compiles(
    job: Callable[..., Job], capsys: pytest.CaptureFixture[str]
) -> None:
    one = job(steps=1e12)
    while one.watch._auto is None or one.watch._auto.stage is not Stage.MEASURE:
        one.run(1)
        assert len(one.losses) < 300
    alone = len(one.losses)
    one.run(20)
    assert capsys.readouterr().err == ""
    one.watch.at_exit()
    assert "before it was clear whether compiling pays" in capsys.readouterr().err
    one.watch._end_watching()
    plain = job(watched=False)
    for _ in range(alone):
        plain.run(1)
    assert one.losses == plain.run(20).losses


def test_evaluations_and_copies_between_steps_are_no_steps(job: Callable[..., Job]) -> None:
    one = job(measure=True)

    def train_and_evaluate() -> None:
        for _ in range(10_000):
            one.run(1)
            auto: Any = one.watch._auto
            done = auto.outcome().steps_done if auto else 0
            other = copy.deepcopy(one.net)
            assert torch.equal(other.one.layer.weight, one.net.one.layer.weight)
            other(torch.ones(2, 4))
            one.net.eval()
            one.net(torch.ones(3, 4))
            with torch.no_grad():
                one.net(torch.ones(5, 4))
            one.net.train()
            assert not auto or auto.outcome().steps_done == done

    with pytest.raises(SystemExit):
        train_and_evaluate()


def test_copy_of_a_watched_model_calls_itself(job: Callable[..., Job]) -> None:
    one = job().run(6)
    other = copy.deepcopy(one.net)
    assert other._compiled_call_impl is None
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert not other(torch.ones(2, 4)).any()


def test_optimizers_in_uneven_turns_make_one_step_of_a_cycle(job: Callable[..., Job]) -> None:
    one = job()
    other = torch.optim.SGD(one.net.one.parameters(), lr=0.1)
    for number in range(30):
        one.net(torch.ones(8, 4)).sum().backward()
        if number % 2:
            other.step()
        one.optimizer.step()
    auto: Any = one.watch._auto
    assert auto is not None
    # Five cycles are needed to find it, at most, and the next has begun when it is found.
    assert 10 <= auto.outcome().steps_done <= 12


def test_steps_that_a_scaler_skips_are_steps(job: Callable[..., Job]) -> None:
    one = job()
    for number in range(30):
        one.net(torch.ones(8, 4)).sum().backward()
        if number % 5:
            one.optimizer.step()
        one.optimizer.zero_grad()
    auto: Any = one.watch._auto
    assert auto is not None
    assert auto.outcome().steps_done >= 23


def test_script_that_compiles_is_left_alone(
    job: Callable[..., Job], capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    for compiled in (torch.compile(Net(), backend="eager"), Net()):
        one = job()
        if isinstance(compiled, Net):
            compiled.compile(backend="eager", fullgraph=True)
        for _ in range(3):
            compiled(torch.ones(2, 4)).sum().backward()
        assert one.hooks == 0
        assert one.watch._auto is None
        assert capsys.readouterr().err == (
            "advise: the training goes on as it is: the script compiles by itself\n"
        )
    assert not [each for each in recwarn if "global hooks" in str(each.message)]


def test_another_optimizer_ends_the_watching(
    job: Callable[..., Job], capsys: pytest.CaptureFixture[str]
) -> None:
    one = job().run(10)
    other = Net()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(3):
        other(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert one.watch._auto is None
    assert one.net._compiled_call_impl is None
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "after 10 optimizer steps another optimizer (SGD) began to step" in err
    one.run(3)


def test_mistake_of_ours_costs_one_sentence(
    job: Callable[..., Job], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ADVISOR_DEBUG")
    plain = job(watched=False).run(30)
    one = job().run(10)

    def broken() -> None:
        raise KeyError("lost")

    monkeypatch.setattr(one.watch._auto, "begin_step", broken)
    one.run(20)
    # The batches of the second run begin anew.
    assert one.losses[:10] == plain.losses[:10]
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "watching it failed (KeyError: 'lost')" in err
    assert one.net._compiled_call_impl is None


def test_forwards_in_other_threads_pass(job: Callable[..., Job]) -> None:
    one = job().run(10)
    auto: Any = one.watch._auto
    thread = threading.Thread(target=lambda: one.net(torch.ones(2, 4)).sum().backward())
    thread.start()
    thread.join()
    assert not one.watch._open
    one.run(2)
    assert auto.outcome().steps_done == 8


def test_mistakes_of_the_model_go_through(job: Callable[..., Job]) -> None:
    one = job(measure=True).run(12)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        one.net(torch.ones(8, 5))
    with pytest.raises(SystemExit):
        one.run(100_000)


def test_first_process_to_train_is_the_one_that_is_measured(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    (tmp_path / "result.json").touch()
    one = job(measure=True).run(50)
    assert one.watch._auto is None
    assert "another process" in one.watch._watched.problem
    assert read(one.settings.result) is None


def test_last_words(job: Callable[..., Job], capsys: pytest.CaptureFixture[str]) -> None:
    def ended(one: Job) -> Job:
        one.watch.at_exit()
        one.watch._end_watching()
        Path(one.settings.result).unlink(missing_ok=True)
        return one

    ended(job())
    assert "no optimizer of torch has stepped" in capsys.readouterr().err
    ended(job().run(2))
    assert "ended after 2 optimizer steps, too few to look at" in capsys.readouterr().err
    one = job().run(8)
    one.watch.at_exit()
    assert "before it was clear whether compiling pays" in capsys.readouterr().err
    result = read(one.settings.result)
    assert result is not None
    assert (result.optimizer_steps, result.outcome.arm) == (8, Arm.EAGER)


def test_other_ranks_say_nothing(
    job: Callable[..., Job],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "1")
    one = job().run(8)
    one.watch.at_exit()
    assert capsys.readouterr().err == ""
    assert not Path(one.settings.result).exists()


def test_optimizer_hooks_may_go_while_they_are_called() -> None:
    told: list[int] = []
    handles: list[Any] = []

    def first(*_: object) -> None:
        told.append(1)
        for handle in handles:
            handle.remove()

    def second(*_: object) -> None:
        told.append(2)

    handles += torch_internals.on_optimizer_step(first, first)
    handles += torch_internals.on_optimizer_step(second, second)
    net = Net()
    optimizer = sgd(net)
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.step()
    assert told == [1, 2]


def test_settings_that_cannot_be_read_watch_nothing() -> None:
    assert WatchSettings.of({}) is None
    assert WatchSettings.of({"ADVISOR_WATCH": "{"}) is None
    settings = WatchSettings(folder="/tmp/x", config=QUICK)
    assert WatchSettings.of(settings.variables()) == settings
