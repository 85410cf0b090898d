"""What a failed trial leaves: a script that shows the same again, and what was seen."""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import logging
import os
import runpy
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from advisor import report, wording
from advisor.events import Event
from advisor.models.plan import Plan
from advisor.places import data_folder
from advisor.profiler import records
from advisor.profiler.records import (
    Config,
    Failure,
    Phase,
    Scope,
    Trial,
    TrialKind,
    TrialSpec,
    TrialStatus,
    WorkloadSpec,
)
from advisor.profiler.reproduction import MOST_KEPT, SCRIPT, with_reproduction
from advisor.request import AdviceRequest, Limits
from advisor.service.jobs import Jobs
from advisor.service.store import Store

WORKLOADS = Path(__file__).parent / "workloads"
FILE = WORKLOADS / "compiling.py"
# Dynamo traces, and nothing is built: what is tested here is the script.
TRACED = Config(backend="aot_eager")


def spec_of(function: str, config: Config | None = TRACED, **changes: Any) -> TrialSpec:
    workload = WorkloadSpec(target=f"compiling.py:{function}", cwd=str(WORKLOADS), device="cpu")
    return TrialSpec(
        trial_id="a1-2",
        kind=TrialKind.EAGER if config is None else TrialKind.COMPILE,
        workload=replace(workload, **changes),
        folder="/nowhere",
        config=config,
    )


def ended(spec: TrialSpec, status: TrialStatus = TrialStatus.CRASHED, **changes: Any) -> Trial:
    failure = Failure(kind="exit", message="it ended", details="Traceback: x = 1", phase=Phase.COLD)
    trial = Trial(
        trial_id=spec.trial_id,
        kind=spec.kind,
        status=status,
        config=spec.config,
        failure=failure,
        phase_reached=Phase.COLD,
    )
    return replace(trial, **changes)


def left(spec: TrialSpec, parent: Path, trial: Trial | None = None, **more: Any) -> Path:
    found = with_reproduction(trial or ended(spec), spec, parent, **more)
    assert found.reproduction == str(parent / spec.trial_id)
    return Path(found.reproduction)


def run_script(folder: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT],
        cwd=folder,
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def names_in(folder: Path) -> dict[str, Any]:
    """Returns what the script defines, without running it."""
    return runpy.run_path(str(folder / SCRIPT))


@pytest.fixture
def in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undoes what a script that is read here does to the process."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.endswith("compiling"):
            del sys.modules[name]


@pytest.mark.trial
def test_the_script_shows_the_error_of_the_trial(tmp_path: Path) -> None:
    from advisor.profiler.api import profile

    trial = profile(f"{FILE}:double_backward", Config(), device="cpu", folder=tmp_path)
    assert trial.status is TrialStatus.FAILED_TO_COMPILE
    folder = Path(trial.reproduction)
    assert folder.parent == tmp_path / "reproductions"
    shown = run_script(folder, tmp_path / "inductor")
    assert shown.returncode != 0
    message = "torch.compile with aot_autograd does not currently support double backward"
    assert message in shown.stderr
    assert message in (folder / "log.txt").read_text()


@pytest.mark.trial
def test_the_script_of_a_disagreement_prints_both_columns(tmp_path: Path) -> None:
    spec = spec_of("wrong_when_compiled")
    folder = left(spec, tmp_path, ended(spec, TrialStatus.DISAGREES))
    shown = run_script(folder, tmp_path / "cache")
    assert shown.returncode == 0, shown.stderr
    head, *rows, gradients = shown.stdout.splitlines()
    assert head.split() == ["step", "eager", "compiled", "compiled", "again"]
    assert [int(row.split()[0]) for row in rows] == list(range(5))
    # The model gives 1.5 times as much when compiled, and its loss is a square.
    _, eager, compiled, again = map(float, rows[0].split())
    assert compiled == pytest.approx(2.25 * eager, rel=1e-4) == again
    assert float(gradients.rpartition(" ")[2]) == pytest.approx(1.25, rel=1e-2)


@pytest.mark.trial
def test_the_script_of_an_agreeing_model_shows_no_difference(tmp_path: Path) -> None:
    spec = spec_of("unfreezing")
    folder = left(spec, tmp_path, ended(spec, TrialStatus.DISAGREES))
    shown = run_script(folder, tmp_path / "cache")
    assert shown.returncode == 0, shown.stderr
    _, *rows, gradients = shown.stdout.splitlines()
    for row in rows:
        _, eager, compiled, _ = map(float, row.split())
        assert compiled == pytest.approx(eager, rel=1e-4)
    assert float(gradients.rpartition(" ")[2]) < 1e-4


@pytest.mark.trial
def test_a_module_that_fails_in_eager_steps_is_repeated(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.py").write_text(
        "import pathlib\n"
        "import torch\n"
        "def build(device):\n"
        "    assert pathlib.Path('here.txt').exists()\n"
        "    def loss(model, batch):\n"
        "        if batch.shape[0] == 3:\n"
        "            raise ValueError('three rows')\n"
        "        return model(batch).mean()\n"
        "    batches = [torch.ones(n, 2) for n in (1, 3)]\n"
        "    return {'model': torch.nn.Linear(2, 2), 'batches': batches, 'loss': loss}\n"
    )
    (tmp_path / "here.txt").touch()
    spec = spec_of("", None, target="mine.train:build", cwd=str(tmp_path))
    shown = run_script(left(spec, tmp_path / "kept"), tmp_path / "cache")
    assert "eager, step 0" in shown.stdout and "step 1" not in shown.stdout
    assert "ValueError: three rows" in shown.stderr


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("known", [True, False])
def test_the_same_blocks_are_compiled_as_in_the_trial(tmp_path: Path, known: bool) -> None:
    from advisor.profiler.blocks import repeated_blocks

    spec = spec_of("stack", replace(TRACED, scope=Scope.REGIONAL))
    model = runpy.run_path(str(FILE))["stack"]("cpu")["model"]
    blocks = repeated_blocks(model)
    folder = left(spec, tmp_path, blocks=blocks if known else ())
    assert ("BLOCKS" in names_in(folder)) is known
    wanted = [model.get_submodule(path) for group in blocks for path in group.paths]
    assert wanted
    assert names_in(folder)["modules_to_compile"](model) == wanted


@pytest.mark.usefixtures("in_this_process")
def test_blocks_within_blocks_are_found_as_in_the_trial(tmp_path: Path) -> None:
    import torch
    from torch import nn

    from advisor.profiler.blocks import repeated_blocks

    def block(width: int) -> nn.Module:
        inner = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(2)]
        return nn.Sequential(*inner, nn.LayerNorm(width))

    model = nn.Module()
    model.a = nn.ModuleList(block(8) for _ in range(3))
    model.b = nn.ModuleList(block(16) for _ in range(2))
    model.alone = block(4)
    model.weight = nn.Parameter(torch.zeros(10))
    names = names_in(left(spec_of("stack", replace(TRACED, scope=Scope.REGIONAL)), tmp_path))
    paths = [path for group in repeated_blocks(model) for path in group.paths]
    assert len(paths) == 5
    assert names["modules_to_compile"](model) == [model.get_submodule(path) for path in paths]


@pytest.mark.usefixtures("in_this_process")
def test_the_options_are_set_as_in_the_trial(tmp_path: Path) -> None:
    import torch._dynamo.config
    import torch._inductor.config

    options = (("capture_scalar_outputs", "true"), ("max_autotune_gemm_backends", "ATEN"))
    with (
        torch._dynamo.config.patch(capture_scalar_outputs=False),
        torch._inductor.config.patch(max_autotune_gemm_backends="TRITON"),
    ):
        folder = left(spec_of("item", replace(TRACED, options=options)), tmp_path)
        names_in(folder)["set_options"]()
        assert torch._dynamo.config.capture_scalar_outputs is True
        assert torch._inductor.config.max_autotune_gemm_backends == "ATEN"
    assert "    set_options()\n    compile_in_place" in (folder / SCRIPT).read_text()


@pytest.mark.usefixtures("in_this_process")
def test_settings_by_their_whole_names_and_sets_of_functions_are_set_too(tmp_path: Path) -> None:
    import torch._dynamo.config

    dynamo = torch._dynamo.config
    options = (
        ("torch._dynamo.config.capture_scalar_outputs", "true"),
        ("torch._dynamo.config.ignore_logging_functions", "builtins.print,logging.Logger.info"),
    )
    with dynamo.patch(capture_scalar_outputs=False, ignore_logging_functions={len}):
        folder = left(spec_of("item", replace(TRACED, options=options)), tmp_path)
        names_in(folder)["set_options"]()
        assert dynamo.capture_scalar_outputs is True
        assert dynamo.ignore_logging_functions == {len, print, logging.Logger.info}


def test_an_option_that_is_none_costs_the_folder_and_not_the_trial(tmp_path: Path) -> None:
    spec = spec_of("item", replace(TRACED, options=(("not-a-name", "1"),)))
    trial = Trial(
        trial_id="t1",
        kind=TrialKind.COMPILE,
        status=TrialStatus.CRASHED,
        config=spec.config,
    )
    assert with_reproduction(trial, spec, tmp_path) == trial


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    "batches",
    [
        lambda: lambda step: step,
        lambda: [0, 1, 2],
        lambda: iter([0, 1, 2]),
        lambda: (number for number in range(3)),
    ],
    ids=["function", "list", "iterator", "generator"],
)
def test_batches_come_in_the_trials_order(tmp_path: Path, batches: Callable[[], Any]) -> None:
    import torch
    from torch import nn

    from advisor.profiler.training import Batches

    names = names_in(left(spec_of("gate"), tmp_path))
    job = names["Job"]({"model": nn.Linear(1, 1), "batches": batches()})
    wanted = Batches(batches(), torch.device("cpu")).take(8)
    assert list(itertools.islice(job.batches(), 8)) == wanted
    assert isinstance(job.optimizer, torch.optim.AdamW)
    assert job.optimizer.defaults["lr"] == 1e-4


@pytest.mark.usefixtures("in_this_process")
def test_a_preset_is_built_by_the_advisor(tmp_path: Path) -> None:
    spec = spec_of("", target="hf:bert-base-uncased", task="ner", batch_size=2)
    names = names_in(left(spec, tmp_path))
    assert names["WORKLOAD"]["batch_size"] == 2
    assert callable(names["load"]())


def test_the_folder_says_what_is_in_it_and_is_private(tmp_path: Path) -> None:
    spec = spec_of("gate")
    environment = records.Environment(
        torch="2.9.9", python="3.11", device="cpu", device_name="Xeon", cores=2, threads=2,
        memory_bytes=1, platform="Linux-x", transformers="4.50",
    )  # fmt: skip
    trial = ended(spec, stdout_tail="printed\x1b[2J", stderr_tail="complained")
    folder = left(spec, tmp_path / "data" / "kept", trial, environment=environment)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {path.name for path in folder.iterdir()} == {
        SCRIPT, "config.json", "versions.txt", "log.txt", "README.txt",
    }  # fmt: skip
    assert records.decode((folder / "config.json").read_bytes(), TrialSpec) == spec
    versions = (folder / "versions.txt").read_text()
    for line in ("torch: 2.9.9", "platform: Linux-x", "transformers: 4.50", "collect_env"):
        assert line in versions
    log = (folder / "log.txt").read_text()
    for text in ("CRASHED in phase cold: it ended", "Traceback: x = 1", "printed", "complained"):
        assert text in log
    assert "\x1b" not in log
    readme = (folder / "README.txt").read_text()
    assert readme.count(". ") == 1 and "nothing was sent anywhere" in readme
    assert "pieces of the model's code" in readme


def test_versions_are_told_even_when_the_trial_could_not(tmp_path: Path) -> None:
    import importlib.metadata

    versions = (left(spec_of("gate"), tmp_path) / "versions.txt").read_text()
    assert f"torch: {importlib.metadata.version('torch')}\n" in versions


@pytest.mark.parametrize("status", list(TrialStatus))
def test_only_what_went_wrong_is_worth_repeating(status: TrialStatus, tmp_path: Path) -> None:
    spec = spec_of("gate")
    trial = ended(spec, status)
    right = {TrialStatus.OK, TrialStatus.SKIPPED, TrialStatus.CUT_OFF}
    found = with_reproduction(trial, spec, tmp_path / "kept")
    assert bool(found.reproduction) is (status not in right)
    assert (tmp_path / "kept").exists() is (status not in right)


def test_a_trial_that_the_budget_ended_is_not_repeated(tmp_path: Path) -> None:
    spec = spec_of("gate")
    over = Failure(kind="budget", message="the budget left 3 s")
    trial = ended(spec, TrialStatus.TIMED_OUT, failure=over)
    assert with_reproduction(trial, spec, tmp_path) is trial


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for number in range(MOST_KEPT + 3):
        spec = replace(spec_of("gate"), trial_id=f"t{number}")
        os.utime(left(spec, tmp_path), ns=(number, number))
    assert {path.name for path in tmp_path.iterdir()} == {
        f"t{number}" for number in range(3, MOST_KEPT + 3)
    }


def test_a_folder_that_cannot_be_written_loses_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "kept").write_text("a file, not a folder")
    spec = spec_of("gate")
    trial = ended(spec)
    with caplog.at_level(logging.WARNING):
        assert with_reproduction(trial, spec, tmp_path / "kept") is trial
    assert "no reproduction of trial a1-2" in caplog.text


@pytest.mark.parametrize("text", ["a\nb", '"""', "'''", "\\", "\x1b", "{x} % $y", "é"])
def test_whatever_people_write_stays_a_text_in_the_script(text: str, tmp_path: Path) -> None:
    spec = spec_of("gate", cwd=f"/work/{text}", target=f"{text}.py:build")
    trial = ended(spec, failure=Failure(kind="exit", message=text, details=text))
    source = (left(spec, tmp_path, trial) / SCRIPT).read_text()
    namespace: dict[str, Any] = {}
    constants = [line for line in source.splitlines() if line.startswith("CWD = ")]
    exec(constants[0], namespace)
    assert namespace["CWD"] == f"/work/{text}"
    compile(source, SCRIPT, "exec")


# --- In a campaign -----------------------------------------------------------------------------


def played(spec: TrialSpec) -> Trial:
    """Returns eager steps that went well, and a configuration that crashed."""
    step_s = records.Interval(median=0.5, low=0.49, high=0.51)
    eager = Trial(
        trial_id=spec.trial_id,
        kind=spec.kind,
        status=TrialStatus.OK,
        phase_reached=Phase.DONE,
        eager_step_s=step_s,
        eager=records.Timing(step_s=step_s, steps=20, spread=0.01),
        workload=records.WorkloadFacts(
            fingerprint="f", model_class="M", parameters=10, trainable_parameters=10,
            optimizer="AdamW", dtype="float32", shapes=(),
            blocks=(records.Blocks(module_class="B", paths=("layers.0", "layers.1")),),
        ),
        environment=records.Environment(
            torch="2.13.0", python="3.11", device="cpu", device_name="Xeon", cores=2, threads=2,
            memory_bytes=1,
        ),
    )  # fmt: skip
    return eager if spec.config is None else ended(spec)


class PlayingHost:
    """Plays trials instead of running them."""

    async def run(self, spec: TrialSpec, on_progress: Callable[[records.Progress], None]) -> Trial:
        await asyncio.sleep(0)
        return played(spec)


@contextlib.asynccontextmanager
async def start() -> AsyncIterator[PlayingHost]:
    yield PlayingHost()


def campaign(data: Path) -> list[Event]:
    told: list[Event] = []
    request = AdviceRequest(
        workload=WorkloadSpec(target="compiling.py:stack", cwd=str(WORKLOADS), device="cpu"),
        plan=Plan(steps=1e6),
        limits=Limits(configs=(Config(scope=Scope.REGIONAL),)),
    )

    async def run() -> None:
        with Store(data) as store:
            jobs = Jobs(store, data, start)
            _, watch = await jobs.submit(request)
            while (each := await watch.next()) is not None:
                told.append(each.event)
            assert watch.failure is None
            stored, _ = store.trials()
            await jobs.close()
        assert [one.trial for one in reversed(stored)] == [
            event for event in told if isinstance(event, Trial)
        ]

    asyncio.run(run())
    return told


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ADVISOR_DATA_DIR", str(tmp_path / "data"))
    return data_folder()


def test_a_campaign_says_how_to_repeat_what_failed(data: Path) -> None:
    told = campaign(data)
    failed = [e for e in told if isinstance(e, Trial) and e.status is TrialStatus.CRASHED]
    assert failed
    for trial in failed:
        folder = Path(trial.reproduction)
        assert folder == data / "reproductions" / trial.trial_id
        # What the eager trial found: the versions and the blocks.
        assert "torch: 2.13.0" in (folder / "versions.txt").read_text()
        assert "BLOCKS = ['layers.0', 'layers.1']" in (folder / SCRIPT).read_text()
    advice = told[-1]
    assert isinstance(advice, records.Advice)
    shown = io.StringIO()
    report.print_advice(advice, shown, width=60)
    line = wording.reproduce(failed[0])
    assert line.endswith(f"reproduce it with python {failed[0].reproduction}/{SCRIPT}")
    assert line in shown.getvalue()
    assert "nothing was sent anywhere" in shown.getvalue()


def test_a_full_disk_does_not_end_the_campaign(data: Path) -> None:
    (data / "reproductions").write_text("no room here")
    told = campaign(data)
    assert isinstance(told[-1], records.Advice)
    assert not any(isinstance(event, Trial) and event.reproduction for event in told)
