"""What the plug-ins share: which module is called, what cannot be compiled, what is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from advisor.integrations import called, dynamo_plugin
from advisor.integrations.loop import TrainerLoop, Wishes, Within
from advisor.profiler.errors import PlanError
from advisor.profiler.records import Config, Dynamic, Mode, Scope


class Two(torch.nn.Module):
    def __init__(self, second: int = 64) -> None:
        super().__init__()
        self.first = torch.nn.Linear(64, 64)
        self.second = torch.nn.Linear(64, second)
        self.loss = torch.nn.MSELoss()

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(given))
        return out


def wishes(within: str | None = None, workload: str | None = None) -> Wishes:
    return Wishes.of(within, None, workload, None, None, False)


def test_what_a_step_calls_from_outside_is_found() -> None:
    model, calls = Two(), called.Calls()
    calls.begin()
    model.loss(model(torch.ones(2, 64)), torch.ones(2, 64)).backward()
    calls.end()
    assert calls.most() is model


def test_a_wrapper_and_what_it_stands_for_are_looked_through() -> None:
    model = Two()
    calls = called.Calls([model])
    calls.begin()
    model(torch.ones(2, 64))
    calls.end()
    with pytest.raises(PlanError, match="several modules with weights: Linear"):
        calls.most()


def test_a_small_module_beside_a_large_one_does_not_count() -> None:
    model, calls = Two(second=2), called.Calls()
    calls.begin()
    model.second(model.first(torch.ones(2, 64)))
    calls.end()
    assert calls.most() is model.first


def test_a_step_that_calls_nothing_is_told_so() -> None:
    calls = called.Calls()
    calls.begin()
    Two().loss(torch.ones(2), torch.ones(2))
    calls.end()
    with pytest.raises(PlanError, match="calls no module with weights"):
        calls.most()


def test_a_call_that_raises_leaves_nothing_open() -> None:
    model, calls = Two(), called.Calls()
    calls.begin()
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 3))
    model.second(torch.ones(2, 64))
    calls.end()
    with pytest.raises(PlanError, match="Linear, Two"):
        calls.most()


def test_wrapped_and_compiled_models_are_left_alone() -> None:
    assert called.why_not(Two()) == ""
    assert "copies the model" in called.why_not(torch.nn.DataParallel(Two()))
    assert "torch.compile" in called.why_not(torch.compile(Two(), backend="eager"))  # type: ignore[arg-type]
    inner = Two()
    inner.first.compile(backend="eager")
    assert called.why_not(inner) == "its Linear is compiled already"


def test_wishes_that_do_not_go_together_are_refused() -> None:
    assert wishes().within is Within.AUTO
    assert wishes(workload="train.py:build").within is Within.CAMPAIGN
    with pytest.raises(PlanError, match=r"within='never' is unknown \(one of auto, estimate"):
        wishes("never")
    with pytest.raises(PlanError, match=r"give workload='train\.py:build' for"):
        wishes("campaign")
    with pytest.raises(PlanError, match="leave it out"):
        wishes("auto", "train.py:build")


def test_several_processes_are_not_for_a_decision_of_one() -> None:
    loop = TrainerLoop(wishes("estimate"), print)
    loop.begin(Two(), 100, ranks=2)
    assert "is for one process, and 2 train this model" in loop.report()
    loop.begin(Two(), None)
    assert "needs the number of steps" in loop.report()
    loop.begin(Two(), 0)
    assert "no step of this training is left" in loop.report()


def test_a_training_that_was_broken_off_leaves_its_model_eager() -> None:
    loop = TrainerLoop(Wishes(within=Within.AUTO, config=Config(backend="eager")), print)
    first, second = Two(), Two()
    loop.begin(first, 1000)
    loop.begin_step()
    loop.begin(second, 1000)
    assert not loop.stepping
    loop.begin_step()
    second(torch.ones(2, 64))
    loop.end_step()
    assert loop.outcome().steps_done == 1
    loop.drop()


def test_an_advice_becomes_the_fields_of_a_plugin() -> None:
    config = Config(
        scope=Scope.REGIONAL,
        dynamic=Dynamic.FALSE,
        options=(("torch._inductor.config.epilogue_fusion", "false"),),
    )
    assert dynamo_plugin.plugin_fields(config) == {
        "backend": "inductor",
        "mode": "default",
        "fullgraph": False,
        "dynamic": False,
        "options": {"epilogue_fusion": False},
        "use_regional_compilation": True,
    }
    assert dynamo_plugin.plugin_fields(None) == {"backend": "no"}


@pytest.mark.parametrize(
    "config",
    [
        Config(options=(("torch._dynamo.config.recompile_limit", "64"),)),
        Config(mode=Mode.MAX_AUTOTUNE, options=(("max_fusion_size", "8"),)),
    ],
)
def test_what_a_plugin_cannot_say_is_refused(config: Config) -> None:
    with pytest.raises(PlanError, match="cannot say torch"):
        dynamo_plugin.plugin_fields(config)


@pytest.mark.parametrize(
    ("extra", "libraries"),
    [
        ("transformers", ["transformers"]),
        ("lightning", ["lightning", "pytorch_lightning"]),
        ("accelerate", ["accelerate"]),
    ],
)
def test_a_missing_library_is_asked_for_in_one_sentence(
    extra: str, libraries: list[str], tmp_path: Path
) -> None:
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({libraries}))\n"
        "import advisor, advisor.integrations\n"
        f"try: import advisor.integrations.{extra}\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == (
        f"advisor.integrations.{extra} needs the library {extra}: it is not installed"
        f' (pip install "compile-advisor[{extra}]")\n'
    )
