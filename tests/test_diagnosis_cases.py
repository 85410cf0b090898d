"""A workload for each cause: what ends its graph or compiles it again is found at its line.

And mended, by an edit or by a setting, it is found no more (`test_mended_workloads` shows that both
compute the same). Most trials take the backend "eager": what Dynamo captures is the same, and no
C++ is compiled. They share one host, which has imported torch, and one folder, and run on one
thread: nothing here depends on how fast a step is.
"""

from __future__ import annotations

import asyncio
import contextlib
import linecache
import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from advisor.profiler.launch import TrialHost
from advisor.profiler.records import (
    Config,
    Dynamic,
    Measuring,
    Scope,
    Trial,
    TrialKind,
    TrialSpec,
    TrialStatus,
    WorkloadSpec,
)
from advisor.profiler.records import GraphBreakCause as Break
from advisor.profiler.records import RecompileCause as Re

pytestmark = pytest.mark.trial

WORKLOADS = Path(__file__).parent / "workloads"
# No time for other settings: `MENDED_BY_A_SETTING` tries them in trials of their own.
QUICK = Measuring(
    max_warm_up_s=0.5, max_steady_s=0.5, min_quads=4, numerics_steps=3, max_diagnose_s=0.0
)
EAGER = Config(backend="eager")
DYNAMO = "torch._dynamo.config."
AN_IF = "if x.abs().max() > HUGE:"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Trial]]:
    """Returns a function that runs a workload of `tests/workloads/` as a trial."""
    folder = tmp_path_factory.mktemp("causes")
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        patch.setenv("OMP_NUM_THREADS", "1")
        stack = contextlib.AsyncExitStack()
        host = runner.run(stack.enter_async_context(TrialHost.start()))

        def run(workload: str, config: Config = EAGER) -> Trial:
            file, _, name = workload.partition(":")
            # Code is shared, but not which sizes of the workloads before turned out dynamic.
            shutil.rmtree(folder / "inductor" / "dynamo", ignore_errors=True)
            spec = TrialSpec(
                trial_id=uuid.uuid4().hex,
                kind=TrialKind.COMPILE,
                workload=WorkloadSpec(
                    target=f"{WORKLOADS / file}.py:{name}", cwd=str(WORKLOADS), device="cpu"
                ),
                folder=str(folder),
                config=config,
                measuring=QUICK,
            )
            return runner.run(host.run(spec))

        try:
            yield run
        finally:
            runner.run(stack.aclose())


@dataclass(frozen=True)
class Case:
    """What must be found: places of breaks or recompiles, as (cause, file, code of the line)."""

    workload: str
    breaks: tuple[tuple[Break, str, str], ...] = ()
    graphs: int | None = None
    recompiles: tuple[tuple[Re, str, str, int], ...] = ()
    limit_hit: bool = False
    # Nothing or nearly nothing is compiled.
    all_eager: bool = False
    config: Config = field(default=EAGER)

    def __str__(self) -> str:
        return self.workload.replace(":", "-")


BROKEN = (
    Case(
        "causes:three_reads",
        (
            (Break.SCALAR_READ, "causes", "size = float(x.detach().abs().mean())"),
            (Break.SCALAR_READ, "causes", "most = int(x.detach().argmax())"),
            (
                Break.SCALAR_READ,
                "causes",
                "return self.after(x) + sum(torch.stack([low, high]).tolist()) * 1e-9",
            ),
        ),
    ),
    Case(
        "python_breaks:values",
        (
            (Break.DATA_DEPENDENT_BRANCH, "causes", AN_IF),
            (Break.DYNAMIC_OUTPUT_SHAPE, "causes", "kept = x[x > 0]"),
            (Break.UNREGISTERED_OPERATOR, "causes", "gate = torch.ops.causes.soften(x.detach())"),
        ),
        # What is kept differs in size from step to step: compiled once more, then for any size.
        recompiles=((Re.SHAPE, "causes", "kept = x[x > 0]", 1),),
    ),
    Case(
        "python_breaks:given_up",
        (
            (Break.DATA_DEPENDENT_BRANCH, "causes", AN_IF),
            (Break.DATA_DEPENDENT_BRANCH, "causes", "if not torch.isfinite(x).all():"),
            (Break.SKIPPED_FRAME, "python_breaks", 'torch._dynamo.skip_frame("not this one")'),
        ),
        graphs=0,
        all_eager=True,
    ),
    Case(
        "python_breaks:telling",
        (
            (Break.PRINT_OR_LOGGING, "causes", 'print("mean feature", x.mean())'),
            (Break.PRINT_OR_LOGGING, "causes", 'logger.info("features of %d rows", x.shape[0])'),
            (
                Break.PRINT_OR_LOGGING,
                "causes",
                'warnings.warn("features are not normalised", stacklevel=1)',
            ),
        ),
    ),
    Case(
        "python_breaks:foreign",
        (
            (Break.FOREIGN_CALL, "causes", "gate = scipy.special.erf(x.detach().numpy())"),
            (
                Break.FOREIGN_CALL,
                "causes",
                "gate = np.interp(x.detach().numpy(), [-2.0, 0.0, 2.0], [0.0, 1.0, 0.0])",
            ),
            (Break.UNSUPPORTED_PYTHON, "python_breaks", "with self.lock:"),
        ),
    ),
    Case(
        "python_breaks:marked",
        (
            (Break.HOOK, "python_breaks", "return self.after(x)"),
            (Break.DISABLED_FUNCTION, "python_breaks", "x = left_alone(x)"),
            (Break.AUTOGRAD_FUNCTION, "python_breaks", "if gradient.abs().max() > HUGE:"),
        ),
    ),
    Case(
        "python_breaks:recurrent",
        (
            (
                Break.UNSUPPORTED_PYTHON,
                "python_breaks",
                "states, _ = self.lstm(x.view(-1, 4, WIDTH))",
            ),
        ),
        graphs=2,
    ),
    Case(
        "python_breaks:sharded",
        ((Break.DISTRIBUTED_WRAPPER, "python_breaks", "x = block(x)"),),
        graphs=2,
        # The first block's input needs no gradient, those of the others do.
        recompiles=((Re.GRAD_MODE, "python_breaks", "def forward(self, x):", 1),),
    ),
)
RECOMPILED = (
    Case(
        "recompiling:batch_size",
        graphs=2,
        recompiles=((Re.BATCH_SIZE, "causes", "def forward(self, x):", 1),),
    ),
    Case(
        "recompiling:lengths",
        graphs=2,
        recompiles=((Re.SHAPE, "causes", "def forward(self, x):", 1),),
    ),
    Case(
        "recompiling:number",
        graphs=2,
        recompiles=(
            (Re.PYTHON_NUMBER, "recompiling", "return self.after(x * (0.5 + 1 / (step + 2)))", 1),
        ),
    ),
    Case(
        "recompiling:picking",
        graphs=8,
        recompiles=(
            (Re.PYTHON_NUMBER, "recompiling", "return self.after(self.adapters[which](x))", 8),
        ),
        limit_hit=True,
    ),
    Case(
        "recompiling:counting",
        graphs=8,
        recompiles=((Re.MODULE_ATTRIBUTE, "recompiling", "self.steps += 1", 8),),
        limit_hit=True,
    ),
    Case(
        "recompiling:train_eval",
        graphs=2,
        recompiles=((Re.TRAIN_EVAL, "recompiling", "return self.after(self.norm(x))", 1),),
    ),
    Case(
        "recompiling:unfreezing",
        graphs=3,
        recompiles=((Re.GRAD_MODE, "causes", "def forward(self, x):", 2),),
    ),
    Case(
        "recompiling:dtype",
        graphs=2,
        recompiles=((Re.DTYPE_OR_DEVICE, "causes", "def forward(self, x):", 1),),
    ),
    Case(
        "recompiling:stride",
        graphs=2,
        recompiles=((Re.STRIDE, "recompiling", "def forward(self, x):", 1),),
    ),
    Case(
        "recompiling:optimizer_state",
        graphs=2,
        recompiles=(
            (
                Re.OPTIMIZER_STATE,
                "recompiling",
                'return self.after(x * (1.0 + 100 * self.optimizer.param_groups[0]["lr"]))',
                1,
            ),
        ),
    ),
    Case(
        "recompiling:identity",
        graphs=8,
        recompiles=(
            (
                Re.OBJECT_IDENTITY,
                "recompiling",
                "return x * 2.0 if source in SOURCES[:4] else x",
                8,
            ),
        ),
        limit_hit=True,
    ),
    Case(
        "recompiling:text",
        graphs=8,
        recompiles=(
            (Re.OTHER, "recompiling", 'return x * 2.0 if name.startswith("web") else x', 8),
        ),
        limit_hit=True,
    ),
)
MENDED_BY_AN_EDIT = (
    "python_breaks:all_mended",
    "recompiling:all_mended",
    "recompiling:lengths_mended",
    "recompiling:stride_mended",
    "recompiling:optimizer_state_mended",
)


def _options(**values: str) -> Config:
    return Config(
        backend="eager",
        options=tuple((f"{DYNAMO}{name}", value) for name, value in sorted(values.items())),
    )


MENDED_BY_A_SETTING = (
    (
        "python_breaks:settable",
        _options(
            allow_rnn="true",
            capture_dynamic_output_shape_ops="true",
            capture_scalar_outputs="true",
        ),
    ),
    (
        "python_breaks:telling",
        _options(
            reorderable_logging_functions="builtins.print,warnings.warn",
            ignore_logging_functions="logging.Logger.info",
        ),
    ),
    ("python_breaks:sharded", Config(backend="eager", scope=Scope.REGIONAL)),
    ("recompiling:batch_size", Config(backend="eager", dynamic=Dynamic.TRUE)),
)


def _places(trial: Trial) -> set[tuple[str, str, str]]:
    return {(met.cause.value, _room(met.file), met.code) for met in trial.graph_breaks}


def _recompiled(trial: Trial) -> set[tuple[str, str, str, int]]:
    return {
        (
            met.cause.value,
            _room(met.file),
            linecache.getline(met.file, met.line).strip(),
            met.count,
        )
        for met in trial.recompiles
    }


def _room(file: str) -> str:
    """Returns the name of a file of ours, or the whole path of any other."""
    path = Path(file)
    return path.stem if path.parent == WORKLOADS else file


@pytest.mark.parametrize("case", [*BROKEN, *RECOMPILED], ids=str)
def test_a_cause_is_found_at_its_line(case: Case, run: Callable[..., Trial]) -> None:
    # Where nothing is compiled, coverage is known without C++ too.
    trial = run(case.workload, Config() if case.all_eager else case.config)
    assert trial.status is TrialStatus.OK, trial.failure
    assert _places(trial) == {(cause.value, file, code) for cause, file, code in case.breaks}
    assert len(trial.graph_breaks) == len(case.breaks), "a place is told once"
    if case.recompiles or not case.breaks:
        found = {(cause.value, file, code, times) for cause, file, code, times in case.recompiles}
        assert _recompiled(trial) == found
        assert len(trial.recompiles) == len(case.recompiles), "a cause is told once"
    assert trial.recompile_limit_hit is case.limit_hit
    if case.graphs is not None:
        assert trial.graphs == case.graphs
    if case.all_eager:
        assert trial.coverage is not None and trial.coverage < 0.05
        assert trial.skipped_frames >= 1
    for met in trial.graph_breaks:
        assert met.reason and met.hint.startswith("https://")
        assert linecache.getline(met.file, met.line).strip() == met.code


@pytest.mark.parametrize("workload", MENDED_BY_AN_EDIT)
def test_an_edit_mends(workload: str, run: Callable[..., Trial]) -> None:
    trial = run(workload)
    assert trial.status is TrialStatus.OK, trial.failure
    assert (trial.graph_breaks, trial.recompiles, trial.graphs) == ((), (), 1)


@pytest.mark.parametrize(
    ("workload", "config"), MENDED_BY_A_SETTING, ids=[name for name, _ in MENDED_BY_A_SETTING]
)
def test_a_setting_mends(workload: str, config: Config, run: Callable[..., Trial]) -> None:
    trial = run(workload, config)
    assert trial.status is TrialStatus.OK, trial.failure
    assert trial.graph_breaks == ()
    if config.scope is Scope.REGIONAL:
        assert [met.cause for met in trial.recompiles] == [Re.GRAD_MODE]
    else:
        assert (trial.recompiles, trial.graphs) == ((), 1)


def test_a_limit_as_high_as_the_variants_is_not_hit(run: Callable[..., Trial]) -> None:
    trial = run("recompiling:picking", _options(recompile_limit="16"))
    assert not trial.recompile_limit_hit
    (met,) = trial.recompiles
    assert (met.cause, met.count, trial.graphs) == (Re.PYTHON_NUMBER, 11, 12)


def test_a_break_between_two_graphs_leaves_most_compiled(run: Callable[..., Trial]) -> None:
    trial = run("causes:scalar_read", Config())
    assert trial.status is TrialStatus.OK, trial.failure
    code = "peak = x.detach().abs().max().item()"
    assert _places(trial) == {("SCALAR_READ", "causes", code)}
    (met,) = trial.graph_breaks
    assert met.hits_per_step == pytest.approx(1.0)
    assert trial.graphs == 3
    assert trial.coverage is not None and 0.6 < trial.coverage < 1.0
    # The value that was read is compiled in, then becomes a variable.
    (again,) = trial.recompiles
    assert (again.cause, again.count) == (Re.PYTHON_NUMBER, 1)


def test_an_operator_without_a_fake_cannot_be_compiled(run: Callable[..., Trial]) -> None:
    trial = run("causes:half_registered")
    assert trial.status is TrialStatus.FAILED_TO_COMPILE
    assert trial.failure is not None
    told = f"{trial.failure.message} {trial.failure.details}"
    assert "soften_half_known" in told and "register_fake" in told


def test_a_second_derivative_cannot_be_compiled(run: Callable[..., Trial]) -> None:
    trial = run("recompiling:penalty", Config(backend="aot_eager"))
    assert trial.status is TrialStatus.FAILED_TO_COMPILE
    assert trial.failure is not None and "differentiates twice" in trial.failure.message


def test_dropout_alone_is_no_disagreement(run: Callable[..., Trial]) -> None:
    trial = run("recompiling:dropping", Config())
    assert trial.status is TrialStatus.OK, trial.failure
    assert trial.workload is not None and trial.workload.stochastic
    assert (trial.graph_breaks, trial.recompiles, trial.graphs) == ((), (), 1)


def test_a_stale_constant_is_a_disagreement(run: Callable[..., Trial]) -> None:
    trial = run("recompiling:stale", Config())
    assert trial.status is TrialStatus.DISAGREES
    assert trial.failure is not None and "losses differ" in trial.failure.message
    assert {met.cause for met in trial.recompiles} == {Re.PYTHON_NUMBER}


def test_gradients_of_another_step_are_a_disagreement(run: Callable[..., Trial]) -> None:
    trial = run("recompiling:counting_in_place", Config())
    assert trial.status is TrialStatus.DISAGREES
    assert trial.failure is not None and "gradients of step 0 differ" in trial.failure.message
    assert trial.loss_drift is not None and trial.loss_drift < 1e-3
