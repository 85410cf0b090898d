"""The last phase of a trial: it may learn nothing, but it never costs the trial."""

from __future__ import annotations

import torch
from torch import nn

from advisor.profiler.diagnose_phase import diagnose, worthwhile
from advisor.profiler.frames import Ended, EndReason, Exit
from advisor.profiler.outcome import trial_of
from advisor.profiler.records import (
    Config,
    GraphBreak,
    GraphBreakCause,
    Phase,
    Scope,
    Trial,
    TrialKind,
    TrialSpec,
    TrialStatus,
    WorkloadSpec,
)
from advisor.profiler.training import Trainer
from advisor.profiler.workload import Workload

BREAK = GraphBreak(cause=GraphBreakCause.OTHER, reason="")


def trial(**fields: object) -> Trial:
    return Trial(
        trial_id="t",
        kind=TrialKind.COMPILE,
        status=TrialStatus.OK,
        **fields,  # type: ignore[arg-type]
    )


def trainer(by_name: bool, error: Exception | None = None) -> Trainer:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    averages = {name: p.detach().clone() for name, p in model.named_parameters()}

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if error is not None:
            raise error
        if by_name:
            for name, parameter in model.named_parameters():
                averages[name].lerp_(parameter.detach(), 0.1)
        return model(batch).pow(2).mean()

    return Trainer(
        Workload(
            model=model,
            batches=lambda step: torch.ones(2, 4),
            loss=loss,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        ),
        torch.device("cpu"),
    )


def diagnosed(job: Trainer) -> Trial:
    return diagnose(
        trial(config=Config()),
        job,
        [job.model],
        Config(),
        limit_s=10.0,
        still_compiling=False,
    )


def test_a_job_that_goes_by_parameter_names_is_told_of_the_wrapper() -> None:
    job = trainer(by_name=True)
    model = job.model
    (warning,) = diagnosed(job).warnings
    assert "KeyError: '_orig_mod.0.weight'" in warning
    assert "model.compile()" in warning
    assert job.model is model


def test_a_job_that_bears_the_wrapper_is_not() -> None:
    assert diagnosed(trainer(by_name=False)).warnings == ()


def test_what_the_step_raises_for_other_reasons_is_not_the_wrappers() -> None:
    assert diagnosed(trainer(by_name=False, error=ValueError("no"))).warnings == ()


def test_blocks_without_breaks_need_no_look() -> None:
    regional = Config(scope=Scope.REGIONAL)
    assert not worthwhile(trial(config=regional), 30.0)
    assert worthwhile(trial(config=regional, graph_breaks=(BREAK,)), 30.0)
    assert worthwhile(trial(config=Config()), 30.0)
    assert not worthwhile(trial(config=Config()), 0.0)


SPEC = TrialSpec(
    trial_id="t",
    kind=TrialKind.COMPILE,
    workload=WorkloadSpec(target="train.py:build", cwd="/"),
    folder="/tmp/t",
    config=Config(),
)


def ended(exit_: Exit) -> Trial:
    measured = trial(config=Config(), phase_reached=Phase.DIAGNOSE)
    return trial_of(SPEC, Ended(trial_id="t", exit=exit_, trial=measured))


def test_a_crash_in_it_leaves_the_measured_trial() -> None:
    found = ended(Exit(signal=11, phase=Phase.DIAGNOSE))
    assert found.status is TrialStatus.OK
    assert "SIGSEGV" in found.warnings[0]


def test_a_deadline_in_it_leaves_the_measured_trial() -> None:
    late = EndReason(kind="deadline", message="diagnose took longer than 120 s")
    found = ended(Exit(signal=15, ended=late, phase=Phase.DIAGNOSE))
    assert found.status is TrialStatus.OK
    assert "diagnose took longer than 120 s" in found.warnings[0]


def test_cancelled_in_it_is_cancelled() -> None:
    reason = EndReason(kind="cancelled", message="the trial was cancelled")
    found = ended(Exit(signal=15, ended=reason, phase=Phase.DIAGNOSE))
    assert found.status is TrialStatus.CUT_OFF
