"""The callback for Lightning, with the real library and a tiny BERT on real text."""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from advisor.profiler.records import Config

lightning = pytest.importorskip("lightning")
pytest.importorskip("transformers")

from advisor.integrations.lightning import (  # noqa: E402 - after the check that it is there
    AdviseCallback,
)

# Traces as any other and compiles no kernel.
QUICK = Config(backend="eager")
STEPS = 60

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def page(repository: Path) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(repository / "examples"))
        yield importlib.import_module("lightning_module")


def run(page: Any, callback: Any = None, steps: int = STEPS, **more: Any) -> Any:
    """Trains, and returns the module with its losses."""
    module = more.pop("module", None)
    if module is None:
        module = page.Classifier()
    resume = more.pop("resume", None)
    callbacks = [*more.pop("callbacks", []), *([callback] if callback is not None else [])]
    options = {"accelerator": "cpu", **more}
    page.trainer(steps, callbacks, **options).fit(module, page.loader(), ckpt_path=resume)
    return module


def quick(**more: Any) -> tuple[AdviseCallback, list[str]]:
    told: list[str] = []
    return AdviseCallback(config=QUICK, always_try=True, tell=told.append, **more), told


def test_losses_are_those_without_the_callback(page: Any) -> None:
    plain = run(page)
    callback, told = quick()
    advised = run(page, callback)
    assert advised.losses == pytest.approx(plain.losses, rel=1e-4)
    # The first step was watched for what it calls.
    assert callback.outcome().steps_done == STEPS - 1
    assert callback.outcome().compile_s > 0
    assert len(told) == 1
    assert "saved" in told[0] or "lost" in told[0]
    assert advised.model._compiled_call_impl is None


def test_checkpoints_go_on_without_the_callback_and_with_it(page: Any, tmp_path: Path) -> None:
    def keeping(name: str, callback: Any = None) -> Path:
        keeper = lightning.pytorch.callbacks.ModelCheckpoint(
            tmp_path, filename=name, every_n_train_steps=40, save_top_k=-1
        )
        run(page, callback, folder=tmp_path, callbacks=[keeper])
        return tmp_path / f"{name}.ckpt"

    plain, advised = keeping("plain"), keeping("advised", quick()[0])
    kept = torch.load(advised, weights_only=False)
    assert list(kept["state_dict"]) == list(page.Classifier().state_dict())
    assert not [name for name in kept["callbacks"] if "Advise" in name]
    expected = run(page, resume=plain).losses
    assert len(expected) == STEPS - 40
    assert run(page, resume=advised).losses == pytest.approx(expected, rel=1e-3)
    callback, _ = quick()
    assert run(page, callback, resume=advised).losses == pytest.approx(expected, rel=1e-3)
    assert callback.outcome().steps_done == STEPS - 40 - 1


def test_accumulated_batches_are_one_step(page: Any) -> None:
    plain = run(page, steps=30, accumulate_grad_batches=3)
    callback, _ = quick()
    advised = run(page, callback, steps=30, accumulate_grad_batches=3)
    assert advised.losses == pytest.approx(plain.losses, rel=1e-4)
    assert callback.outcome().steps_done == 29


def test_a_module_can_be_named(page: Any) -> None:
    callback, _ = quick(module="model.bert")
    run(page, callback)
    assert callback.outcome().steps_done == STEPS
    assert callback.outcome().compile_s > 0


def test_a_name_that_is_none_stops_no_training(page: Any, caplog: pytest.LogCaptureFixture) -> None:
    callback, told = quick(module="net")
    with caplog.at_level(logging.WARNING):
        module = run(page, callback, steps=3)
    assert told == [
        "AutoCompile stands aside, and the training runs as it is: Classifier has no module 'net'."
    ]
    assert told[0] in caplog.messages
    assert len(module.losses) == 3


def test_a_step_that_calls_several_modules_asks_for_a_name(page: Any) -> None:
    class Pair(page.Classifier):  # type: ignore[name-defined,misc]
        def training_step(self, batch: dict[str, torch.Tensor], number: int) -> torch.Tensor:
            hidden = self.model.bert.embeddings(batch["input_ids"])
            return self.model.bert.encoder(hidden)[0].pow(2).mean()

    callback, told = quick()
    run(page, callback, steps=3, module=Pair())
    assert "calls several modules with weights: BertEmbeddings, BertEncoder" in told[0]
    assert "(name the one to compile, as in module='model')" in told[0]


def test_a_module_that_calls_itself_is_compiled_itself(page: Any) -> None:
    class Own(page.Classifier):  # type: ignore[name-defined,misc]
        def forward(self, **batch: torch.Tensor) -> Any:
            return self.model(**batch)

        def training_step(self, batch: dict[str, torch.Tensor], number: int) -> torch.Tensor:
            loss = self(**batch).loss
            self.losses.append(float(loss.detach()))
            return loss

    plain = run(page)
    callback, _ = quick()
    advised = run(page, callback, module=Own())
    assert advised.losses == pytest.approx(plain.losses, rel=1e-4)
    assert callback.outcome().compile_s > 0


def test_a_model_of_torchs_own_class_is_compiled(page: Any) -> None:
    class Dense(page.Classifier):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.nn.Sequential(torch.nn.Linear(48, 16), torch.nn.Linear(16, 3))

        def training_step(self, batch: dict[str, torch.Tensor], number: int) -> torch.Tensor:
            found = self.model(batch["input_ids"].float() / 1000)
            loss = torch.nn.functional.cross_entropy(found, batch["labels"])
            self.losses.append(float(loss.detach()))
            return loss

    torch.manual_seed(0)
    plain = run(page, module=Dense())
    torch.manual_seed(0)
    callback, _ = quick()
    advised = run(page, callback, module=Dense())
    assert advised.losses == pytest.approx(plain.losses, rel=1e-4)
    assert callback.outcome().compile_s > 0


def test_manual_optimization_has_steps_too(page: Any) -> None:
    class Manual(page.Classifier):  # type: ignore[name-defined,misc]
        automatic_optimization = False

        def training_step(self, batch: dict[str, torch.Tensor], number: int) -> None:
            optimizer = self.optimizers()
            self.manual_backward(self.model(**batch).loss)
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()

    callback, _ = quick()
    run(page, callback, steps=20, module=Manual())
    # Of the first step only one batch was seen; it is not counted, nor the one after it.
    assert callback.outcome().steps_done == 19


def test_what_is_validated_within_a_step_is_not_measured(page: Any) -> None:
    class Validated(page.Classifier):  # type: ignore[name-defined,misc]
        def validation_step(self, batch: dict[str, torch.Tensor], number: int) -> None:
            self.model(**batch)

        def val_dataloader(self) -> Any:
            return page.loader()

    plain = run(page, steps=20, accumulate_grad_batches=2)
    callback, _ = quick()
    options = {"val_check_interval": 5, "limit_val_batches": 1, "num_sanity_val_steps": 0}
    advised = run(
        page, callback, steps=20, module=Validated(), accumulate_grad_batches=2, **options
    )
    assert advised.losses == pytest.approx(plain.losses, rel=1e-4)
    # Of 40 batches the 5th, 15th, 25th and 35th end within a step.
    assert callback.outcome().steps_done == 19 - 4


def test_a_module_that_is_compiled_already_is_left_alone(page: Any) -> None:
    callback, told = quick()
    run(page, callback, steps=3, module=torch.compile(page.Classifier(), backend="eager"))
    assert "Classifier is compiled already: give the Trainer the plain module" in told[0]


def test_an_error_in_a_step_is_the_persons_own(page: Any) -> None:
    class Faulty(page.Classifier):  # type: ignore[name-defined,misc]
        def training_step(self, batch: dict[str, torch.Tensor], number: int) -> torch.Tensor:
            if number == 25:
                raise ValueError("batch 25 is no good")
            return super().training_step(batch, number)

    callback, _ = quick()
    module = Faulty()
    with pytest.raises(ValueError, match="batch 25 is no good"):
        run(page, callback, module=module)
    assert module.model._compiled_call_impl is None
    assert callback.auto is None


@pytest.mark.trial
def test_compiled_kernels_give_the_same_losses(page: Any, compile_cache: Path) -> None:
    plain = run(page)
    told: list[str] = []
    # A part that compiles in seconds; tests/test_integrations_transformers.py compiles layers.
    callback = AdviseCallback(module="model.classifier", always_try=True, tell=told.append)
    advised = run(page, callback)
    assert advised.losses == pytest.approx(plain.losses, rel=1e-3)
    assert callback.outcome().compile_s > 0
    assert not callback.outcome().failure
    assert "saved" in told[0] or "lost" in told[0]


def test_the_older_name_of_the_library_works_too(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning")
    code = (
        "import pytorch_lightning, sys\n"
        "from advisor.integrations.lightning import AdviseCallback\n"
        "assert issubclass(AdviseCallback, pytorch_lightning.Callback)\n"
        "assert 'lightning' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, timeout=60, check=True)


def test_the_page_runs(repository: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(repository / "examples" / "lightning_module.py"), "--steps", "40"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "AutoCompile after 39 steps" in done.stdout
    assert "saved" in done.stdout
