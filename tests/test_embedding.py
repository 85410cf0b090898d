"""Trials within a person's own process and from any place in it: nothing is left changed."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from advisor.profiler import Config, PlanError, Trial, Workload, WorkloadError, profile_here
from advisor.profiler import compiler_state as compiler
from advisor.profiler.records import Deadlines, Measuring, Phase, Progress, TrialKind, TrialStatus

QUICK = Measuring(
    max_warm_up_s=0.1, max_steady_s=0.1, min_quads=4, numerics_steps=2, max_diagnose_s=0.0
)
EAGER_BACKEND = Config(backend="eager")


class Net(nn.Module):
    """All that a training step may change: buffers, counters, lists, tensors, flags, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.norm = nn.BatchNorm1d(32)
        self.drop = nn.Dropout(0.1)
        self.last = nn.Linear(32, 4)
        self.calls = 0
        self.seen: list[int] = []
        self.running = torch.zeros(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(self.norm(self.first(x)).relu()))


class Job:
    """A live training, stepped `steps` times; what happens in its step can be chosen."""

    def __init__(self, steps: int = 3) -> None:
        torch.manual_seed(1)
        self.model = Net()
        self.model.first.bias.requires_grad_(False)
        self.model.last.register_forward_hook(lambda *_: None)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.batches = [torch.randn(8, 16) for _ in range(4)]
        self.losses: list[float] = []
        self.inside: Callable[[], None] = lambda: None
        for step in range(steps):
            self.step(self.model, self.batches[step % 4], self.optimizer)

    def step(self, model: nn.Module, batch: torch.Tensor, optimizer: Any) -> torch.Tensor:
        self.inside()
        optimizer.zero_grad()
        loss: torch.Tensor = model(batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        self.scheduler.step()
        batch.mul_(1.01)  # a step that spoils its own batch
        net: Any = model
        net.calls += 1
        net.seen.append(net.calls)
        net.running.add_(1.0)
        random.random(), np.random.rand(), torch.rand(1)
        return loss.detach()

    def workload(self) -> Workload:
        return Workload(
            model=self.model, batches=self.batches, optimizer=self.optimizer, step=self.step
        )

    def measure(self, config: Config | None = EAGER_BACKEND, **options: Any) -> Trial:
        options = {"measuring": QUICK, "also": [self], **options}
        return profile_here(self.workload(), config, **options)


def bits(value: object) -> object:
    """Returns what tells two values apart, for tensors also where they lie."""
    if isinstance(value, torch.Tensor):
        grad = value.grad if value.is_leaf else None
        return (
            id(value),
            value.data_ptr(),
            value.requires_grad,
            value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes(),
            None if grad is None else bits(grad),
            dict(vars(value)),
        )
    if isinstance(value, dict):
        return (id(value), [(id(key), bits(one)) for key, one in value.items()])
    if isinstance(value, list | tuple):
        return (id(value), [bits(one) for one in value])
    return value if isinstance(value, int | float | str | bool | None) else id(value)


def picture(job: Job) -> dict[str, object]:
    """Returns all of a live training, bit by bit."""
    found: dict[str, object] = {}
    for name, module in job.model.named_modules():
        found[f"module {name}"] = [(key, bits(value)) for key, value in vars(module).items()]
    found["optimizer"] = [(key, bits(value)) for key, value in vars(job.optimizer).items()]
    found["scheduler"] = [(key, bits(value)) for key, value in vars(job.scheduler).items()]
    found["batches"] = bits(job.batches)
    return found


def surroundings() -> dict[str, object]:
    """Returns all of the process that a trial may touch."""
    state = np.random.get_state()
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    configs = (torch._dynamo.config, torch._inductor.config, torch._functorch.config)
    utils = torch._dynamo.utils
    return {
        "random": random.getstate(),
        "numpy": (state[0], state[1].tobytes(), *state[2:]),
        "torch": torch.get_rng_state().numpy().tobytes(),
        "environment": dict(os.environ),
        "configs": [config.get_config_copy() for config in configs],
        "switches": (
            torch.get_default_dtype(),
            torch.get_default_device(),
            torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_num_threads(),
            torch.get_float32_matmul_precision(),
        ),
        "stance": torch._dynamo.eval_frame._stance,
        "records": (
            utils.get_compilation_metrics(),
            {key: dict(value) for key, value in utils.counters.items()},
            list(torch._dynamo.callback.callback_handler.start_callbacks),
        ),
        "compiled": sorted(
            code.co_name for code in compiler._seen_codes() if compiler._holds_code(code)
        ),
        "sizes": torch._dynamo.pgo._CODE_STATE,
        "garbage": (gc.isenabled(), gc.get_threshold()),
        "places": (os.getcwd(), list(sys.path), list(sys.argv)),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "loggers": {
            one.name: (one.level, one.propagate, one.disabled, list(one.handlers))
            for one in loggers
            if isinstance(one, logging.Logger)
        },
        "logs": (
            dict(torch._logging._internal.log_state.log_qname_to_level),
            set(torch._logging._internal.log_state.artifact_names),
        ),
        "warnings": list(warnings.filters),
        "threads": {thread.name for thread in threading.enumerate()},
        "children": [child.pid for child in psutil.Process().children(recursive=True)],
    }


@pytest.fixture(scope="module", autouse=True)
def torch_imported() -> None:
    """Has torch's lazy parts imported before anything is compared."""
    profile_here(Job(0).workload(), measuring=QUICK)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Has nothing compiled before and after a test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def assert_unchanged(before: dict[str, object], after: dict[str, object]) -> None:
    """Compares two pictures part by part; loggers that an import has brought are no change."""
    for name, value in after.items():
        if name == "loggers":
            known: Any = before[name]
            assert isinstance(value, dict)
            for logger, state in value.items():
                ours = [one for one in state[-1] if type(one).__module__.startswith("advisor.")]
                assert (state == known[logger]) if logger in known else not ours, logger
        else:
            assert value == before[name], name


class Boom(Exception):
    """What the training code, or a callback, raises."""


def ends_well(job: Job) -> None:
    told: list[Progress] = []
    trial = job.measure(on_progress=told.append)
    assert trial.status is TrialStatus.OK, trial.failure
    assert (trial.kind, trial.graphs) == (TrialKind.COMPILE, 1)
    assert trial.speedup is not None and trial.pairs
    assert {one.phase for one in told} >= {Phase.BUILD, Phase.COLD, Phase.STEADY, Phase.NUMERICS}


def ends_well_eager(job: Job) -> None:
    trial = job.measure(None)
    assert (trial.status, trial.kind) == (TrialStatus.OK, TrialKind.EAGER), trial.failure
    assert trial.step_profile is not None and trial.eager_step_s is not None


def raises_in_a_step(job: Job) -> None:
    steps = iter(range(9))

    def inside() -> None:
        if next(steps, None) == 8:
            raise Boom("at step 8")

    job.inside = inside
    trial = job.measure(also=[])
    assert trial.status is TrialStatus.FAILED_TO_COMPILE
    assert trial.failure is not None and "at step 8" in trial.failure.message
    job.inside = lambda: None


def cannot_be_used(job: Job) -> None:
    with pytest.raises(WorkloadError, match="raised: ZeroDivisionError"):
        profile_here(
            Workload(
                model=job.model,
                batches=job.batches,
                optimizer=job.optimizer,
                loss=lambda model, batch: model(batch).sum() / (1 // 0),
            ),
            EAGER_BACKEND,
            measuring=QUICK,
        )


def is_cancelled(job: Job) -> None:
    cancelled = threading.Event()

    def tell(progress: Progress) -> None:
        if progress.phase is Phase.COLD:
            cancelled.set()

    trial = job.measure(cancelled=cancelled, on_progress=tell)
    assert trial.status is TrialStatus.CUT_OFF
    assert trial.failure is not None and trial.failure.message == "the trial was cancelled"
    assert trial.phase_reached is Phase.COLD


def runs_out_of_time(job: Job) -> None:
    job.inside = lambda: time.sleep(0.02)
    trial = job.measure(deadline_s=0.2, also=[])
    assert trial.status is TrialStatus.TIMED_OUT
    assert trial.failure is not None
    assert trial.failure.message == "the trial as a whole took longer than 0.2 s; it was ended"
    assert trial.wall_s < 2.0


def runs_out_of_time_in_a_phase(job: Job) -> None:
    job.inside = lambda: time.sleep(0.02)
    trial = job.measure(deadlines=Deadlines(cold_s=0.1), also=[])
    assert trial.status is TrialStatus.TIMED_OUT
    assert trial.failure is not None and trial.failure.message.startswith("cold took longer")


def has_a_callback_that_raises(job: Job) -> None:
    def tell(progress: Progress) -> None:
        if progress.phase is Phase.STEADY:
            raise Boom("enough")

    with pytest.raises(Boom, match="enough"):
        job.measure(on_progress=tell)


def is_interrupted_in_a_step(job: Job) -> None:
    steps = iter(range(9))

    def inside() -> None:
        if next(steps, None) == 8:
            signal.raise_signal(signal.SIGINT)

    job.inside = inside
    with pytest.raises(KeyboardInterrupt):
        job.measure(also=[])
    job.inside = lambda: None


ENDS = (
    ends_well,
    ends_well_eager,
    raises_in_a_step,
    cannot_be_used,
    is_cancelled,
    runs_out_of_time,
    runs_out_of_time_in_a_phase,
    has_a_callback_that_raises,
    is_interrupted_in_a_step,
)


@pytest.mark.parametrize("steps", [0, 3], ids=["untrained", "trained"])
@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
def test_all_is_as_before_when_it(end: Callable[[Job], None], steps: int) -> None:
    job = Job(steps)
    before, around = picture(job), surroundings()
    assert bool(job.optimizer.state) == bool(steps)
    end(job)
    assert_unchanged(before, picture(job))
    assert_unchanged(around, surroundings())


def test_training_goes_on_bit_by_bit_as_without_it() -> None:
    def losses(measured: bool) -> list[float]:
        job = Job()
        torch.manual_seed(7)
        found = []
        for step in range(8):
            if measured and step in (2, 5):
                job.measure(EAGER_BACKEND if step == 2 else None)
            found.append(float(job.step(job.model, job.batches[step % 4], job.optimizer)))
        return found

    assert losses(measured=True) == losses(measured=False)


def test_settings_of_the_process_are_put_back() -> None:
    job = Job()

    def meddle() -> None:
        os.environ["MEDDLED"] = "1"
        os.chdir("/")
        sys.path.insert(0, "/meddled")
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch._dynamo.config.recompile_limit = 99
        torch._dynamo.config.traceable_tensor_subclasses.add(int)
        logging.getLogger("meddled").setLevel(5)
        warnings.simplefilter("error", FutureWarning)
        signal.signal(signal.SIGUSR2, lambda *_: None)
        gc.disable()
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(1)

    logging.getLogger("meddled")
    around = surroundings()
    job.inside = meddle
    config = Config(backend="eager", options=(("recompile_limit", "3"),))
    assert job.measure(config, also=[]).status is TrialStatus.OK
    assert_unchanged(around, surroundings())


def test_it_measures_within_no_grad_and_under_another_stance() -> None:
    job = Job()
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        stance = torch._dynamo.eval_frame._stance
        trial = job.measure()
        assert not torch.is_grad_enabled()
        assert torch._dynamo.eval_frame._stance is stance
    assert (trial.status, trial.graphs) == (TrialStatus.OK, 1), trial.failure


def test_compiled_code_of_others_stays() -> None:
    compiled = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Any:
        compiled.append(graph)
        return graph.forward

    @torch.compile(backend=backend)
    def other(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    other(torch.ones(3))
    around = surroundings()
    assert "other" in around["compiled"]  # type: ignore[operator]
    trial = Job().measure()
    assert trial.status is TrialStatus.OK
    assert surroundings()["compiled"] == around["compiled"]
    other(torch.ones(3))
    assert len(compiled) == 1


@pytest.mark.parametrize("name", sorted(compiler.NAMES))
def test_this_torch_has_what_putting_back_takes(name: str) -> None:
    assert compiler.torch_internals.find(name) is not None


def test_a_loader_gives_what_it_would_have_given() -> None:
    def order(measured: bool) -> list[float]:
        data = TensorDataset(torch.arange(32.0).reshape(32, 1))
        generator = torch.Generator().manual_seed(3)
        loader = DataLoader(data, batch_size=4, shuffle=True, generator=generator)
        model = nn.Linear(1, 1)
        if measured:
            profile_here(
                {"model": model, "batches": loader, "loss": lambda m, b: m(b[0]).mean()},
                measuring=QUICK,
            )
        return [float(x) for (batch,) in loader for x in batch]

    assert order(measured=True) == order(measured=False)


def test_what_a_step_uses_from_around_it_is_put_back() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    count, losses = 0, [1.0]
    noise = torch.Generator().manual_seed(5)

    def step(model: nn.Module, batch: torch.Tensor, optimizer: Any) -> torch.Tensor:
        nonlocal count
        count += 1
        loss: torch.Tensor = model(batch + torch.randn(4, generator=noise)).mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(float(loss.detach()))
        return loss

    made = {
        "model": model,
        "batches": lambda step: torch.ones(2, 4),
        "optimizer": optimizer,
        "step": step,
    }
    state = noise.get_state()
    assert profile_here(made, EAGER_BACKEND, measuring=QUICK).status is TrialStatus.OK
    assert (count, losses, scheduler.last_epoch, optimizer.param_groups[0]["lr"]) == (
        0, [1.0], 0, 0.1,
    )  # fmt: skip
    assert torch.equal(noise.get_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_function_builds_the_workload_and_nothing_of_it_stays() -> None:
    def build(device: torch.device) -> dict[str, object]:
        torch.manual_seed(0)
        return {
            "model": nn.Linear(4, 1).to(device),
            "batches": [torch.ones(2, 4, device=device)],
            "loss": lambda model, batch: model(batch).mean(),
        }

    around = surroundings()
    assert profile_here(build, EAGER_BACKEND, device="cpu", measuring=QUICK).form == "forward"
    assert_unchanged(around, surroundings())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda made: made["model"].compile(backend="eager"), "the model is compiled already"),
        (
            lambda made: made.update(model=torch.compile(made["model"], backend="eager")),
            "the model is compiled already",
        ),
        (
            lambda made: made.update(loss=torch.compile(made["loss"], backend="eager")),
            "the loss or step is compiled already",
        ),
        (lambda made: made.update(batches=iter(made["batches"])), "batches is an iterator"),
        (lambda made: made.update(model=nn.LazyLinear(2)), "lazy parameters"),
        (lambda made: made.pop("batches"), "no 'batches'"),
    ],
)
def test_what_cannot_be_put_back_is_refused(
    change: Callable[[dict[str, Any]], object], sentence: str
) -> None:
    made: dict[str, Any] = {
        "model": nn.Linear(4, 2),
        "batches": [torch.ones(2, 4)],
        "loss": lambda model, batch: model(batch).mean(),
    }
    change(made)
    with pytest.raises(WorkloadError, match=sentence):
        profile_here(made, EAGER_BACKEND, measuring=QUICK)


def test_names_and_bare_models_are_refused() -> None:
    with pytest.raises(WorkloadError, match="use profile, which builds it"):
        profile_here("train.py:build")  # type: ignore[arg-type]
    with pytest.raises(WorkloadError, match="the workload is a model"):
        profile_here(nn.Linear(1, 1))


def test_a_second_one_at_a_time_is_refused() -> None:
    job = Job()
    refused: list[str] = []

    def tell(progress: Progress) -> None:
        if not refused:
            with pytest.raises(PlanError) as info:
                profile_here(job.workload(), measuring=QUICK)
            refused.append(str(info.value))

    assert job.measure(None, on_progress=tell).status is TrialStatus.OK
    assert refused[0].startswith("profile_here is running in this process already")
    assert job.measure(None).status is TrialStatus.OK  # and it is free again


def test_it_runs_in_another_thread() -> None:
    job = Job()
    before, around = picture(job), surroundings()
    found: list[Trial] = []
    thread = threading.Thread(target=lambda: found.append(job.measure()))
    thread.start()
    thread.join()
    assert found[0].status is TrialStatus.OK, found[0].failure
    assert_unchanged(before, picture(job))
    assert_unchanged(around, surroundings())


def test_it_runs_within_a_loop() -> None:
    async def cell() -> Trial:
        return Job().measure()

    assert asyncio.run(cell()).status is TrialStatus.OK


@pytest.mark.trial
def test_inductor_leaves_no_files_modules_processes_or_threads(compile_cache: Path) -> None:
    job = Job()
    before, around, files = picture(job), surroundings(), set(compile_cache.rglob("*"))
    trial = job.measure(Config())
    assert trial.status is TrialStatus.OK, trial.failure
    assert trial.graphs == 1 and trial.cache_bytes > 0
    assert not Path(trial.cache_folder).exists()
    assert set(compile_cache.rglob("*")) == files
    assert_unchanged(before, picture(job))
    assert_unchanged(around, surroundings())
    own = [
        name
        for name, module in list(sys.modules.items())
        if "advisor-trial-" in str(getattr(module, "__file__", ""))
    ]
    assert own == []
