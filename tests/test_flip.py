"""The flip leaves plain eager: what a never-compiled twin runs, function by function."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn

from advisor.profiler.errors import PlanError
from advisor.profiler.flip import Flip, targets
from advisor.profiler.options import apply_options
from advisor.profiler.records import Config, Mode, Scope
from advisor.profiler.training import Trainer
from advisor.profiler.twin import flip_check, twin_of
from advisor.profiler.workload import Workload

BACKEND = Config(backend="aot_eager")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


MODELS = {
    "own class": Model,
    "torch's class": lambda: nn.Sequential(nn.Linear(16, 16), nn.Tanh()),
    "torch's encoder": lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True),
}


def called(model: nn.Module, x: torch.Tensor) -> list[tuple[str, str]]:
    """Returns every Python function that a forward and backward call, in order."""
    calls: list[tuple[str, str]] = []

    def look(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            calls.append((Path(frame.f_code.co_filename).name, frame.f_code.co_name))

    sys.setprofile(look)
    try:
        model(x).sum().backward()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("name", MODELS)
def test_flipped_eager_calls_what_a_twin_calls(name: str) -> None:
    torch._dynamo.reset()
    model = MODELS[name]()
    twin = copy.deepcopy(model)
    x = torch.randn(4, 5, 16)
    flip = Flip([model], BACKEND)
    flip.apply()
    for _ in range(2):
        model(x).sum().backward()
    compiled = called(model, x)
    flip.to_eager()
    assert called(model, x) == called(twin, x)
    assert not any("eval_frame" in file for file, _ in called(model, x))
    assert any("eval_frame" in file for file, _ in compiled)
    flip.to_compiled()
    assert called(model, x) == compiled
    flip.to_eager()
    assert "forward" not in vars(model) and model.state_dict().keys() == twin.state_dict().keys()


def test_a_forward_that_an_instance_had_of_its_own_comes_back() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    plain = model.forward

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return plain(x) * 2  # type: ignore[no-any-return]

    model.forward = doubled
    x = torch.randn(4, 16)
    wanted = model(x)
    flip = Flip([model], BACKEND)
    flip.apply()
    assert torch.allclose(model(x), wanted)
    flip.to_eager()
    assert model.forward is doubled and torch.equal(model(x), wanted)


def test_names_of_parameters_stay() -> None:
    model = Model()
    before = list(model.state_dict())
    Flip([model], BACKEND).apply()
    assert list(model.state_dict()) == before


def _trainer(model: nn.Module) -> Trainer:
    return Trainer(
        Workload(
            model=model,
            batches=lambda step: torch.randn(8, 16),
            loss=lambda model, batch: model(batch).pow(2).mean(),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        ),
        torch.device("cpu"),
    )


def test_a_twin_is_never_compiled_and_trains_apart() -> None:
    trainer = _trainer(Model())
    flip = Flip([trainer.model], BACKEND)
    flip.apply()
    trainer.run(trainer.batches.take(2))
    flip.to_eager()
    twin = twin_of(trainer)
    assert twin is not None and twin.model is not trainer.model
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    twin.run(trainer.batches.take(3))
    assert all(map(torch.equal, before, trainer.model.parameters()))
    assert not any("eval_frame" in file for file, _ in called(twin.model, torch.randn(2, 16)))


class Slow(nn.Module):
    """Slower than its own copies: what a flip that leaves something behind looks like."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.slow = True

    def __deepcopy__(self, memo: dict[int, object]) -> Slow:
        other = Slow()
        other.slow = False
        memo.update({id(p): q for p, q in zip(self.parameters(), other.parameters(), strict=True)})
        return other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(200 if self.slow else 50):
            x = torch.tanh(x)
        return self.linear(x)


def test_a_flip_that_leaves_something_behind_is_noticed() -> None:
    # A busy machine can hide it from one look, as the interval then holds 1, but not from many.
    found = (flip_check(_trainer(Slow()), step_s=0.005) or 0.0 for _ in range(12))
    assert any(ratio > 1.2 for ratio in found)


def test_a_model_that_cannot_be_copied_has_no_twin() -> None:
    model = Model()
    model.handle = open(__file__)  # noqa: SIM115 - what cannot be copied
    assert flip_check(_trainer(model), step_s=0.001) is None
    model.handle.close()


def test_regional_targets_are_the_blocks() -> None:
    from advisor.profiler.blocks import repeated_blocks

    model = Model()
    found = targets(model, Config(scope=Scope.REGIONAL), repeated_blocks(model))
    assert found == list(model.blocks)


def test_options_are_checked_and_set() -> None:
    with pytest.raises(PlanError, match="option 'no_such_option' is unknown"):
        apply_options(Config(options=(("no_such_option", "1"),)))
    with pytest.raises(PlanError, match="is not true or false"):
        apply_options(Config(options=(("capture_scalar_outputs", "maybe"),)))
    before = torch._dynamo.config.capture_scalar_outputs
    try:
        apply_options(Config(options=(("capture_scalar_outputs", "true"),), mode=Mode.DEFAULT))
        assert torch._dynamo.config.capture_scalar_outputs is True
    finally:
        torch._dynamo.config.capture_scalar_outputs = before
