"""The plug-in for Accelerate, with the real library and a tiny BERT on real text; a plain loop."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from advisor.autocompile import AutoCompile
from advisor.profiler.errors import PlanError
from advisor.profiler.records import Config, Dynamic, Scope

accelerate = pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from accelerate.state import AcceleratorState  # noqa: E402 - after the check that it is there

from advisor.integrations.accelerate import AdviseLoop, plugin  # noqa: E402 - as above

# Traces as any other and compiles no kernel.
QUICK = Config(backend="eager")
TRY: dict[str, Any] = {"config": QUICK, "always_try": True}
STEPS = 40


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Each test has an Accelerator of its own: the library keeps one state for the process."""
    torch._dynamo.reset()
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def pages(repository: Path) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(repository / "examples"))
        yield importlib.import_module


@pytest.fixture(scope="module")
def page(pages: Any) -> Any:
    return pages("accelerate_loop")


def accelerator(**more: Any) -> Any:
    AcceleratorState._reset_state(reset_partial_state=True)
    return accelerate.Accelerator(cpu=True, **{"gradient_accumulation_steps": 2, **more})


def test_losses_and_states_are_those_without_it(page: Any, tmp_path: Path) -> None:
    plain = page.train(STEPS, str(tmp_path / "plain"), accelerator(), advised=False)
    told: list[str] = []
    advised = page.train(STEPS, str(tmp_path / "advised"), accelerator(), tell=told.append, **TRY)
    assert advised == pytest.approx(plain, rel=1e-4)
    assert f"AutoCompile after {STEPS} steps" in told[0]
    assert "Compiling has taken" in told[0]
    states = [
        safetensors.torch.load_file(tmp_path / name / "model.safetensors")
        for name in ("plain", "advised")
    ]
    assert list(states[0]) == list(states[1])
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=1e-3, atol=5e-4)


def test_a_state_goes_on_without_it(page: Any, tmp_path: Path) -> None:
    page.train(STEPS, str(tmp_path), accelerator(), tell=lambda _: None, **TRY)
    fresh_one = accelerator()
    model = fresh_one.prepare(page.bert(seed=1))
    optimizer = fresh_one.prepare(torch.optim.AdamW(model.parameters(), lr=2e-4))
    batch = {name: value[None] for name, value in page.samples(3)[0].items()}
    before = float(model(**batch).loss.detach())
    fresh_one.load_state(str(tmp_path), strict=True)
    assert float(model(**batch).loss.detach()) != before
    assert page.step(fresh_one, model, optimizer, batch) > 0


@pytest.mark.parametrize("scope", list(Scope))
def test_an_advice_trains_through_the_plugin(page: Any, tmp_path: Path, scope: Scope) -> None:
    plain = page.train(6, "", accelerator(), advised=False)
    config = Config(scope=scope, backend="eager", dynamic=Dynamic.FALSE)
    prepared = accelerator(dynamo_plugin=plugin(config))
    losses = page.train(6, str(tmp_path), prepared, advised=False)
    assert losses == pytest.approx(plain, rel=1e-4)
    kept = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert sorted(kept) == sorted(page.bert().state_dict())


def test_what_is_advised_becomes_the_plugin() -> None:
    made = plugin(Config(scope=Scope.REGIONAL, dynamic=Dynamic.TRUE, fullgraph=True))
    assert made.use_regional_compilation
    assert made.to_kwargs() == {"backend": "inductor", "dynamic": True, "fullgraph": True}
    options = plugin(Config(options=(("max_fusion_size", "8"),))).to_kwargs()
    assert options == {"backend": "inductor", "options": {"max_fusion_size": 8}}
    assert plugin(None).backend.value == "NO"
    with pytest.raises(PlanError, match="does not know the backend 'mine'"):
        plugin(Config(backend="mine"))


def test_a_model_that_accelerate_compiles_is_left_alone(page: Any) -> None:
    told: list[str] = []
    prepared = accelerator(dynamo_plugin=plugin(QUICK))
    page.train(3, "", prepared, tell=told.append, **TRY)
    assert "Accelerate compiles the model already, with the backend eager" in told[0]


def test_mixed_precision_trains_as_without(page: Any) -> None:
    plain = page.train(STEPS, "", accelerator(mixed_precision="bf16"), advised=False)
    told: list[str] = []
    advised = page.train(STEPS, "", accelerator(mixed_precision="bf16"), tell=told.append, **TRY)
    assert advised == pytest.approx(plain, rel=5e-2)
    assert "Compiling has taken" in told[0]
    assert "went on eager" not in told[0]


def test_an_error_leaves_the_model_as_it_was(page: Any) -> None:
    made = accelerator()
    model = made.prepare(page.bert())
    advise = AdviseLoop(made, model, **TRY)

    def failing() -> None:
        with advise, advise.batch():
            raise ValueError("my own")

    with pytest.raises(ValueError, match="my own"):
        failing()
    assert advise.auto is None
    assert model._compiled_call_impl is None


@pytest.mark.trial
def test_compiled_kernels_give_the_same_losses(compile_cache: Path) -> None:
    def losses(advised: bool) -> list[float]:
        torch.manual_seed(0)
        made, found = accelerator(), []
        net = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
        model, optimizer = made.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
        advise = AdviseLoop(made, model, steps=STEPS, always_try=True, tell=told.append)
        if not advised:
            advise.close()
        for number in range(2 * STEPS):
            with advise.batch(), made.accumulate(model):
                loss = (model(torch.full((8, 32), number / 80)) - 1).pow(2).mean()
                made.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                found.append(float(loss.detach()))
        advise.close()
        return found

    told: list[str] = []
    assert losses(True) == pytest.approx(losses(False), rel=1e-3)
    assert "Compiling has taken" in told[0]
    assert "went on eager" not in told[0]


def test_a_plain_loop_goes_on_from_either_checkpoint(pages: Any, tmp_path: Path) -> None:
    page = pages("plain_loop")
    plain = page.Training()
    losses = page.train(plain, 60, None)
    first = page.Training()
    auto = AutoCompile(first.model, steps=40, **TRY)
    assert page.train(first, 40, auto) == pytest.approx(losses[:40], rel=1e-4)
    assert auto.outcome().compile_s > 0
    first.save(tmp_path / "kept.pt")
    kept = torch.load(tmp_path / "kept.pt", weights_only=True)
    assert list(kept["model"]) == list(plain.model.state_dict())
    for advised in (False, True):
        second = page.Training()
        second.load(tmp_path / "kept.pt")
        auto = AutoCompile(second.model, steps=20, **TRY) if advised else None
        assert page.train(second, 20, auto) == pytest.approx(losses[40:], rel=1e-3)


def _run_page(repository: Path, name: str, folder: Path, *options: str) -> str:
    done = subprocess.run(
        [sys.executable, str(repository / "examples" / name), *options],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_page_runs(repository: Path, tmp_path: Path) -> None:
    said = _run_page(repository, "accelerate_loop.py", tmp_path, "--steps", "40")
    assert "AutoCompile after 40 steps" in said
    assert "saved" in said


def test_a_checkpoint_of_the_plain_page_goes_on_without(repository: Path, tmp_path: Path) -> None:
    options = ("--steps", "40", "--checkpoint", str(tmp_path / "plain.pt"))
    first = _run_page(repository, "plain_loop.py", tmp_path, *options)
    assert "The loss after 40 steps is" in first
    assert "AutoCompile after 40 steps" in first
    second = _run_page(repository, "plain_loop.py", tmp_path, *options, "--without")
    assert "The loss after 80 steps is" in second
    assert "AutoCompile" not in second
