"""The callback for the Trainer of transformers, with the real one and a tiny BERT on real text."""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from advisor.models.loop_policy import Stage
from advisor.models.prior import Prior
from advisor.profiler.errors import PlanError
from advisor.profiler.records import Config, Dynamic, Mode, Scope

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from advisor.integrations.transformers import (
    AdviseCallback,
    launch_environment,
    training_arguments,
)

# Traces as any other and compiles no kernel.
QUICK = Config(backend="eager")
STEPS = 60

Run = Callable[..., Any]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def page(repository: Path) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(repository / "examples"))
        yield importlib.import_module("trainer_bert")


@pytest.fixture
def run(page: Any, tmp_path: Path) -> Run:
    """Returns a function that trains, logging each loss, and returns the Trainer."""

    def training(callback: Any = None, steps: int = STEPS, resume: Any = None, **more: Any) -> Any:
        # A name of its own for each: checkpoints of one are not looked up by another.
        folder = more.pop("folder", tmp_path / f"run{len(list(tmp_path.iterdir()))}")
        arguments = {"logging_steps": 1, "use_cpu": True, **more}
        callbacks = [callback] if callback is not None else []
        trainer = page.trainer(str(folder), steps, callbacks, **arguments)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    return training


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def quick(**more: Any) -> tuple[AdviseCallback, list[str]]:
    told: list[str] = []
    return AdviseCallback(config=QUICK, always_try=True, tell=told.append, **more), told


def test_losses_are_those_without_the_callback(run: Run) -> None:
    plain = run()
    callback, told = quick()
    advised = run(callback)
    assert losses(advised) == pytest.approx(losses(plain), rel=1e-4)
    assert len(losses(plain)) == STEPS
    outcome = callback.outcome()
    assert outcome.steps_done == STEPS
    assert outcome.compile_s > 0
    assert len(told) == 1
    assert told[0].startswith(f"AutoCompile after {STEPS} steps")
    assert "saved" in told[0] or "lost" in told[0]


def test_a_checkpoint_goes_on_without_the_callback(run: Run, tmp_path: Path) -> None:
    plain = run()
    callback, _ = quick()
    run(callback, folder=tmp_path / "kept", save_strategy="steps", save_steps=40)
    kept = tmp_path / "kept" / "checkpoint-40"
    names = safetensors.torch.load_file(kept / "model.safetensors")
    assert sorted(names) == sorted(plain.model.state_dict())
    assert "AdviseCallback" not in (kept / "trainer_state.json").read_text()
    resumed = run(resume=str(kept), folder=tmp_path / "kept")
    assert losses(resumed)[-20:] == pytest.approx(losses(plain)[-20:], rel=1e-3)


def test_a_checkpoint_without_the_callback_goes_on_with_it(run: Run, tmp_path: Path) -> None:
    plain = run(folder=tmp_path / "kept", save_strategy="steps", save_steps=20)
    callback, _ = quick()
    kept = tmp_path / "kept" / "checkpoint-20"
    resumed = run(callback, resume=str(kept), folder=tmp_path / "kept")
    assert losses(resumed)[-40:] == pytest.approx(losses(plain)[-40:], rel=1e-3)
    assert callback.outcome().steps_done == STEPS - 20


def test_accumulated_batches_are_one_step(run: Run) -> None:
    callback, _ = quick()
    advised = run(callback, steps=30, gradient_accumulation_steps=2)
    assert callback.outcome().steps_done == 30
    plain = run(steps=30, gradient_accumulation_steps=2)
    assert losses(advised) == pytest.approx(losses(plain), rel=1e-4)


def test_evaluations_and_a_second_training_go_as_they_would(run: Run, page: Any) -> None:
    callback, told = quick()
    data = page.samples()[:16]
    first = run(callback, steps=40)
    assert first.evaluate(data)["eval_loss"] > 0
    assert first.model._compiled_call_impl is None
    first.train()
    assert len(told) == 2


def test_a_short_training_stays_eager_and_says_why(run: Run) -> None:
    told: list[str] = []
    callback = AdviseCallback(tell=told.append)
    run(callback, steps=40)
    assert callback.outcome().stage is Stage.SETTLED
    assert "it stays eager" in told[0]
    assert "0 s were saved" in told[0]


def test_a_trainer_that_compiles_by_itself_is_left_alone(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    callback, told = quick()
    with caplog.at_level(logging.WARNING):
        run(callback, steps=3, torch_compile_backend="eager")
    expected = (
        "AutoCompile stands aside, and the training runs as it is:"
        " TrainingArguments(torch_compile=True) compiles the model already."
    )
    assert told == [expected]
    assert expected in caplog.messages
    assert callback.auto is None


def test_an_environment_that_compiles_is_seen(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "eager")
    callback, told = quick()
    run(callback, steps=3)
    assert "Accelerate compiles the model already, with the backend eager" in told[0]


def test_mixed_precision_trains_as_without(run: Run) -> None:
    plain = run(bf16=True)
    callback, _ = quick()
    advised = run(callback, bf16=True)
    assert losses(advised) == pytest.approx(losses(plain), rel=2e-2)
    assert callback.outcome().compile_s > 0
    assert not callback.outcome().failure


def test_the_cost_model_decides_after_some_steps(run: Run, prior: Prior) -> None:
    told: list[str] = []
    callback = AdviseCallback("estimate", tell=told.append)
    run(callback, steps=20)
    assert told[-1].startswith("The cost model says to stay eager: ")
    assert "it saves time with a probability of" in told[-1]


@pytest.mark.trial
def test_trials_come_before_the_first_step(
    run: Run, page: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job.py").write_text(
        "import torch\n"
        "def build(device):\n"
        "    return {'model': torch.nn.Linear(8, 8), 'batches': lambda step: torch.ones(4, 8),\n"
        "            'loss': lambda model, batch: model(batch).pow(2).mean()}\n"
    )
    monkeypatch.chdir(tmp_path)
    told: list[str] = []
    callback = AdviseCallback(workload="job.py:build", tell=told.append)
    trainer = run(callback, steps=10)
    assert told[0] == "AutoCompile runs trials of job.py:build before the first step."
    assert told[1].startswith("The trials say to stay eager: ")
    assert callback.advice is not None
    assert callback.advice.steps == 10
    assert len(losses(trainer)) == 10


def test_a_workload_that_is_not_there_stops_no_training(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told: list[str] = []
    trainer = run(AdviseCallback(workload="gone.py:build", tell=told.append), steps=3)
    assert "gone.py cannot be read" in told[-1]
    assert len(losses(trainer)) == 3


def test_an_advice_becomes_training_arguments(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert training_arguments(None) == {"torch_compile": False}
    assert training_arguments(Config(mode=Mode.MAX_AUTOTUNE)) == {
        "torch_compile": True,
        "torch_compile_backend": "inductor",
        "torch_compile_mode": "max-autotune",
    }
    config = Config(scope=Scope.REGIONAL, dynamic=Dynamic.FALSE, backend="eager")
    with pytest.raises(PlanError, match="the environment must say ACCELERATE_DYNAMO_USE_DYNAMIC"):
        training_arguments(config)
    for name, value in launch_environment(config).items():
        monkeypatch.setenv(name, value)
    trainer = run(
        steps=4,
        save_strategy="steps",
        save_steps=4,
        folder=tmp_path / "own",
        **training_arguments(config),
    )
    plugin = trainer.accelerator.state.dynamo_plugin
    assert plugin.use_regional_compilation
    assert plugin.dynamic is False
    kept = tmp_path / "own" / "checkpoint-4"
    names = safetensors.torch.load_file(kept / "model.safetensors")
    assert sorted(names) == sorted(trainer.model.state_dict())


def test_options_are_more_than_training_arguments_say() -> None:
    with pytest.raises(PlanError, match=r"no field for the options max_fusion_size \(AdviseCall"):
        training_arguments(Config(options=(("max_fusion_size", "8"),)))


@pytest.mark.trial
def test_compiled_kernels_give_the_same_losses(run: Run, compile_cache: Path) -> None:
    plain = run(steps=STEPS)
    told: list[str] = []
    # One layer is compiled for both: that takes a third of the time of the whole.
    config = Config(scope=Scope.REGIONAL)
    callback = AdviseCallback(config=config, always_try=True, tell=told.append)
    advised = run(callback)
    assert losses(advised) == pytest.approx(losses(plain), rel=1e-3)
    assert callback.outcome().compile_s > 0
    assert not callback.outcome().failure
    assert "saved" in told[0] or "lost" in told[0]


def test_the_page_runs(repository: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(repository / "examples" / "trainer_bert.py"), "--steps", "40"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "AutoCompile after 40 steps" in done.stdout
    assert "saved" in done.stdout
