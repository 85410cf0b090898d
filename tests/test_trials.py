"""Real compiles of tiny models: what a trial must see, and what it must never call compiled.

All trials share one folder, and so one compile cache: coldness is not the point here.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from advisor.profiler.api import profile
from advisor.profiler.launch import TrialHost
from advisor.profiler.records import (
    Config,
    Dynamic,
    GraphBreakCause,
    Measuring,
    Progress,
    RecompileCause,
    Scope,
    Trial,
    TrialKind,
    TrialSpec,
    TrialStatus,
    WorkloadSpec,
)

pytestmark = pytest.mark.trial

FILE = Path(__file__).parent / "workloads" / "compiling.py"
QUICK = Measuring(max_warm_up_s=2.0, max_steady_s=2.0, min_quads=4, max_diagnose_s=2.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trials")


def run(function: str, folder: Path, config: Config | None = None, **options: object) -> Trial:
    return profile(
        f"{FILE}:{function}",
        config or Config(),
        device="cpu",
        folder=folder,
        **{"measuring": QUICK, **options},  # type: ignore[arg-type]
    )


def test_a_trial_measures_everything_of_a_compiled_step(folder: Path) -> None:
    told: list[Progress] = []
    # Long enough for some quads where other tests run meanwhile.
    measuring = replace(QUICK, max_steady_s=10.0)
    trial = run("gate", folder, on_progress=told.append, measuring=measuring)
    assert trial.status is TrialStatus.OK, trial.failure
    assert trial.form == "call"
    assert (trial.graphs, trial.recompiles, trial.graph_breaks) == (1, (), ())
    assert trial.coverage is not None and trial.coverage > 0.8
    assert trial.speedup is not None
    assert trial.speedup.low <= trial.speedup.median <= trial.speedup.high
    assert len(trial.pairs) >= 2
    assert trial.cold_start_s is not None and trial.cold_start_s > 0
    assert trial.eager_peak_bytes and trial.compile_peak_bytes and trial.peak_bytes
    assert trial.loss_drift is not None and trial.loss_drift < 1e-3
    assert trial.cache_bytes > 0
    (event,) = trial.compile_events
    assert event.function == "forward" and event.file == str(FILE)
    assert event.backward_s is not None and event.inductor_s is not None
    phases = [progress.phase.value for progress in told]
    assert sorted(set(phases), key=phases.index) == [
        "build", "warm_up", "cold", "steady", "numerics", "diagnose",
    ]  # fmt: skip
    assert any("tracing" in p.detail or "C++" in p.detail or "graph" in p.detail for p in told)
    assert all(p.at_most_s is not None for p in told)


def test_equal_blocks_are_compiled_once(folder: Path) -> None:
    trial = run("stack", folder, Config(scope=Scope.REGIONAL))
    assert trial.status is TrialStatus.OK, trial.failure
    assert trial.workload is not None
    assert [(b.container, len(b.paths)) for b in trial.workload.blocks] == [("layers", 4)]
    # One more for the first block, whose input needs no gradient.
    assert trial.graphs == 2
    assert [found.cause for found in trial.recompiles] == [RecompileCause.GRAD_MODE]
    assert trial.coverage is not None and trial.coverage > 0.8


def test_a_model_of_torchs_own_class_is_compiled_by_its_forward(folder: Path) -> None:
    trial = run("torch_class", folder)
    assert trial.form == "forward"
    assert trial.graphs == 1
    # The loss, which is not the model's, is a good part of so small a step.
    assert trial.coverage is not None and trial.coverage > 0.5


def test_a_bypassed_call_is_no_graph(folder: Path) -> None:
    trial = run("bypassed", folder)
    assert (trial.status, trial.graphs, trial.coverage) == (TrialStatus.OK, 0, 0.0)


def test_a_skipped_frame_is_no_graph(folder: Path) -> None:
    trial = run("skipped", folder)
    assert trial.graphs == 0
    assert trial.coverage is not None and trial.coverage < 0.05
    assert trial.skipped_frames >= 1
    (found,) = trial.graph_breaks
    assert found.cause is GraphBreakCause.DATA_DEPENDENT_BRANCH
    assert (found.file, found.code) == (str(FILE), "if x.sum() > 1e9:")


def test_a_recompile_limit_is_seen(folder: Path) -> None:
    trial = run("counting", folder)
    assert trial.recompile_limit_hit
    assert trial.coverage is not None and trial.coverage < 0.05
    (found,) = trial.recompiles
    assert found.cause is RecompileCause.MODULE_ATTRIBUTE
    # Seven compiled, and the eighth was refused: eager since then.
    assert found.count == 8 and found.lost_s > 0


def test_a_scalar_read_is_placed(folder: Path) -> None:
    trial = run("item", folder)
    (found,) = trial.graph_breaks
    assert found.cause is GraphBreakCause.SCALAR_READ
    assert found.code == "peak = x.abs().max().item()"
    assert "https://" in found.hint


def test_changing_lengths_compile_twice(folder: Path) -> None:
    trial = run("lengths", folder)
    assert not trial.recompile_limit_hit
    assert [found.cause for found in trial.recompiles] == [RecompileCause.SHAPE]
    assert trial.coverage is not None and trial.coverage > 0.8
    assert run("lengths", folder, Config(dynamic=Dynamic.TRUE)).recompiles == ()


def test_static_shapes_run_into_the_limit(folder: Path) -> None:
    assert run("lengths", folder, Config(dynamic=Dynamic.FALSE)).recompile_limit_hit


def test_dropout_is_no_disagreement(folder: Path) -> None:
    trial = run("dropping", folder)
    assert trial.status is TrialStatus.OK
    assert trial.workload is not None and trial.workload.stochastic
    assert trial.loss_scale is not None and trial.loss_scale > 0


def test_wrong_numbers_are_a_disagreement(folder: Path) -> None:
    trial = run("wrong_when_compiled", folder)
    assert trial.status is TrialStatus.DISAGREES
    assert trial.failure is not None and "losses differ" in trial.failure.message


def test_a_step_that_cannot_be_compiled_fails_with_the_reason(folder: Path) -> None:
    trial = run("double_backward", folder)
    assert trial.status is TrialStatus.FAILED_TO_COMPILE
    assert trial.failure is not None and "differentiates twice" in trial.failure.message


def test_regional_without_blocks_is_refused(folder: Path) -> None:
    with pytest.raises(Exception, match="no repeated blocks"):
        run("gate", folder, Config(scope=Scope.REGIONAL))


def test_a_compile_that_can_only_lose_is_cut_off(tmp_path: Path) -> None:
    from advisor.profiler.records import Deadlines

    trial = run("gate", tmp_path, deadlines=Deadlines(cold_s=1.0))
    assert trial.status is TrialStatus.TIMED_OUT
    assert trial.failure is not None and "cold took longer than 1 s" in trial.failure.message


def test_a_foreign_call_leaves_all_to_python(folder: Path) -> None:
    trial = run("matching", folder)
    assert trial.graphs == 0
    assert trial.coverage is not None and trial.coverage < 0.05
    (found,) = trial.graph_breaks
    assert found.cause is GraphBreakCause.FOREIGN_CALL
    assert "linear_sum_assignment" in found.code


def test_compiling_starts_where_training_starts(folder: Path) -> None:
    """Each stage of unfreezing is seen: eager steps before compiling do not use them up."""
    trial = run("unfreezing", folder)
    assert trial.graphs == 4
    assert {found.cause for found in trial.recompiles} == {RecompileCause.GRAD_MODE}
    assert sum(found.count for found in trial.recompiles) == 3


def test_a_warm_start_runs_from_the_kept_folder_and_is_not_profiled_again(folder: Path) -> None:
    workload = WorkloadSpec(target=f"{FILE}:gate", cwd=str(FILE.parent), device="cpu")

    async def warm() -> Trial:
        async with TrialHost.start() as host:
            return await host.run(
                TrialSpec(
                    trial_id="warm",
                    kind=TrialKind.WARM,
                    workload=workload,
                    folder=str(folder),
                    config=Config(),
                    measuring=QUICK,
                )
            )

    # Fills the folder, unless another test has done so already.
    cold = run("gate", folder)
    trial = asyncio.run(warm())
    assert trial.status is TrialStatus.OK, trial.failure
    assert trial.warm_start_s is not None and trial.cold_start_s is None
    assert trial.graphs == cold.graphs == 1
    assert trial.speedup is not None
    assert {pair.process for pair in trial.pairs} == {1}
    # Known from the trial whose graphs it runs.
    assert (trial.coverage, trial.time_coverage, trial.loss_drift) == (None, None, None)
