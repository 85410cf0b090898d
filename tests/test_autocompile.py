"""A training loop that decides by itself: the same numbers, whatever the compiler does."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from loops import QUICK, Loop, Net, hopeful, run_until_compiled, same

from advisor.autocompile import AutoCompile
from advisor.models.loop_policy import Stage
from advisor.models.plan import Plan
from advisor.profiler.errors import PlanError
from advisor.profiler.records import Config, Scope


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    threads = torch.get_num_threads()
    # Steps of a millisecond: with more threads than free cores they wait for each other.
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch._dynamo.reset()


def test_eager_training_is_bitwise_that_of_the_plain_loop() -> None:
    plain = Loop().run(60)
    drawn = torch.rand(3)
    auto_loop = Loop()
    auto = AutoCompile(auto_loop.model, steps=60, config=QUICK)
    auto_loop.run(60, auto)
    assert torch.equal(torch.rand(3), drawn)
    same(plain, auto_loop)
    assert auto.stage is Stage.SETTLED
    assert not auto.compiled
    assert "it stays eager" in auto.report()


def test_compiling_changes_no_number_where_the_compiler_does_not() -> None:
    plain = Loop().run(400)
    auto_loop = Loop()
    auto = AutoCompile(auto_loop.model, steps=1e6, config=QUICK, believe=hopeful)
    auto_loop.run(400, auto)
    same(plain, auto_loop)
    assert auto.stage in (Stage.MEASURE, Stage.SETTLED)
    assert "Compiling has taken" in auto.report()


def test_a_wrapped_step_returns_what_it_returns() -> None:
    loop = Loop()
    auto = AutoCompile(loop.model, steps=1e6, config=QUICK, believe=hopeful)
    step = auto.wrap(loop.step)
    losses = [float(step(torch.ones(8, 16))) for _ in range(20)]
    assert losses == loop.losses


def _cannot(graph: torch.fx.GraphModule, examples: list[torch.Tensor]) -> Callable[..., Any]:
    raise RuntimeError("no code for this")


@pytest.mark.fault
def test_a_compile_that_fails_costs_no_step(caplog: pytest.LogCaptureFixture) -> None:
    plain = Loop().run(60)
    loop = Loop()
    torch._dynamo.register_backend(_cannot, name="cannot")
    config = Config(backend="cannot")
    auto = AutoCompile(loop.model, steps=1e6, config=config, believe=hopeful)
    with caplog.at_level(logging.WARNING):
        loop.run(60, auto)
    same(plain, loop)
    assert not auto.compiled
    warned = [record for record in caplog.records if record.levelno >= logging.WARNING]
    (said,) = [record.message for record in warned if "AutoCompile" in record.message]
    assert "the training went on eager: " in said
    assert "went on eager" in auto.report()


@pytest.mark.fault
def test_a_compiled_step_that_fails_later_runs_eager_in_the_same_step() -> None:
    plain = Loop().run(300)
    loop = Loop()
    auto = AutoCompile(loop.model, steps=1e6, config=QUICK, believe=hopeful)
    begun = run_until_compiled(loop, auto)
    flip: Any = auto._flip

    def out_of_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    # From here on the compiled call has no memory.
    failing = auto._guard.guarded(out_of_memory, loop.model._call_impl)
    flip._calls[0] = (loop.model, failing)
    flip.to_compiled()
    for number in range(begun, 300):
        with auto.step():
            loop.step(torch.full((8, 16), 0.1) + number / 100)
    same(plain, loop)
    assert not auto.compiled
    assert "CUDA out of memory" in auto.report()


class _Faulty(Net):
    def forward(self, given: torch.Tensor) -> torch.Tensor:
        if given.shape[0] == 3:
            raise ValueError("three rows are too few")
        return super().forward(given)


def test_a_mistake_of_the_persons_own_is_raised_as_it_is() -> None:
    loop = Loop(_Faulty)
    auto = AutoCompile(loop.model, steps=1e6, config=QUICK, believe=hopeful)
    run_until_compiled(loop, auto)
    with pytest.raises(ValueError, match="three rows are too few"), auto.step():
        loop.step(torch.ones(3, 16))
    loop.run(3, auto)


def test_a_model_that_is_compiled_already_is_refused() -> None:
    model = Net()
    model.compile(backend="eager")
    with pytest.raises(PlanError, match="compiled already"):
        AutoCompile(model, steps=100)


def test_a_plan_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(PlanError):
        AutoCompile(Net(), plan=Plan(steps=-1))


def test_a_model_without_blocks_stays_eager_where_blocks_were_wanted() -> None:
    loop = Loop()
    config = Config(scope=Scope.REGIONAL, backend="eager")
    auto = AutoCompile(loop.model, steps=1e6, config=config, believe=hopeful)
    loop.run(40, auto)
    assert not auto.compiled
    assert "no repeated blocks" in auto.report()


def test_evaluations_between_steps_are_left_alone() -> None:
    loop = Loop()
    auto = AutoCompile(loop.model, steps=1e6, config=QUICK, believe=hopeful)
    run_until_compiled(loop, auto)
    compiles = auto._compiles
    loop.model.eval()
    with torch.no_grad():
        loop.model(torch.ones(5, 16))
    loop.model.train()
    assert auto._compiles == compiles


def test_closing_leaves_the_model_as_it_was() -> None:
    loop = Loop()
    keys = list(loop.model.state_dict())
    auto = AutoCompile(loop.model, steps=1e6, config=QUICK, believe=hopeful)
    run_until_compiled(loop, auto)
    auto.close()
    assert loop.model._compiled_call_impl is None
    assert list(loop.model.state_dict()) == keys
    loop.run(3, auto)
    assert not auto.compiled


def test_steps_within_steps_and_in_other_threads_pass_through() -> None:
    loop = Loop()
    auto = AutoCompile(loop.model, steps=1e6, config=QUICK, believe=hopeful)
    with auto.step(), auto.step():
        loop.step(torch.ones(8, 16))
    assert auto._policy is not None
    assert auto._policy.done == 1


def test_a_plan_in_hours_becomes_one_in_steps() -> None:
    loop = Loop()
    auto = AutoCompile(loop.model, plan=Plan(hours=1e-6), config=QUICK, believe=hopeful)
    loop.run(40, auto)
    assert auto.stage is Stage.SETTLED


@pytest.mark.fault
def test_a_slow_compile_is_counted_and_not_repeated() -> None:
    loop = Loop()
    auto = AutoCompile(loop.model, steps=300, config=QUICK, believe=hopeful)
    loop.run(10, auto)
    assert auto._policy is not None
    before = time.perf_counter()
    while not auto.compiled and time.perf_counter() - before < 5:
        loop.run(1, auto)
    auto._policy.took(1000.0, compiling=True)
    loop.run(2, auto)
    assert not auto.compiled
    assert "more than it is worth here" in auto.report()


def test_options_of_the_configuration_hold_as_long_as_it_trains() -> None:
    was = torch._dynamo.config.recompile_limit
    options = (("torch._dynamo.config.recompile_limit", str(was + 5)),)
    loop = Loop()
    config = Config(backend="eager", options=options)
    auto = AutoCompile(loop.model, steps=1e6, config=config, believe=hopeful)
    assert torch._dynamo.config.recompile_limit == was
    run_until_compiled(loop, auto)
    assert torch._dynamo.config.recompile_limit == was + 5
    auto.close()
    assert torch._dynamo.config.recompile_limit == was
    unknown = Config(options=(("torch._dynamo.config.no_such_thing", "1"),))
    with pytest.raises(PlanError, match="no_such_thing"):
        AutoCompile(Loop().model, steps=1e6, config=unknown)
