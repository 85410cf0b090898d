"""A job that was measured before is answered from those trials, if it is the very same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from advisor import earlier
from advisor.models.plan import Plan
from advisor.profiler.records import (
    Advice,
    Config,
    Environment,
    Interval,
    Lengths,
    Mode,
    Trial,
    TrialKind,
    TrialStatus,
    WorkloadFacts,
    WorkloadSpec,
)
from advisor.request import AdviceRequest, Limits

ONE = Interval(median=1.0, low=1.0, high=1.0)
PLACE = Environment(
    torch="2.13", python="3.11", device="cpu", device_name="a CPU", cores=2, threads=2,
    memory_bytes=2**33,
)  # fmt: skip
FACTS = WorkloadFacts(
    fingerprint="ab12", model_class="m.M", parameters=1, trainable_parameters=1, optimizer="SGD",
    dtype="float32", shapes=(),
)  # fmt: skip


def trial(kind: TrialKind, **changes: object) -> Trial:
    made = Trial(
        trial_id=f"{kind}", kind=kind, status=TrialStatus.OK, workload=FACTS, environment=PLACE
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def advice(*trials: Trial, name: str = "old") -> Advice:
    return Advice(
        advice_id=name, created="2026-12-01", enable=False, target="t.py:build", config=None,
        code="", speedup=None, compile_s=None, saved_s=None, eager_total_s=ONE,
        advised_total_s=ONE, break_even_step=None, p_saves=0.0, reasons=(), steps=10.0,
        trials=trials, workload=FACTS,
    )  # fmt: skip


def request(**limits: object) -> AdviceRequest:
    return AdviceRequest(
        workload=WorkloadSpec(target="t.py:build", cwd="/"),
        plan=Plan(steps=10),
        limits=Limits(**limits),  # type: ignore[arg-type]
    )


EAGER = trial(TrialKind.EAGER)
COUNTED = trial(TrialKind.COUNT)


def test_the_latest_campaign_on_the_same_job_and_place_is_found() -> None:
    old, new = advice(EAGER, name="old"), advice(EAGER, name="new")
    found = earlier.same_job((new, old), COUNTED)
    assert found is new


@pytest.mark.parametrize(
    "changed",
    [
        {"workload": replace(FACTS, fingerprint="other")},
        {"environment": replace(PLACE, torch="2.14")},
        {"environment": replace(PLACE, device_name="another CPU")},
        {"environment": replace(PLACE, threads=1)},
        {"environment": replace(PLACE, driver="999")},
    ],
)
def test_another_job_or_another_place_is_not_the_same(changed: dict[str, object]) -> None:
    counted = replace(COUNTED, **changed)  # type: ignore[arg-type]
    assert earlier.same_job((advice(EAGER),), counted) is None


def test_the_memory_that_is_free_today_makes_no_other_place() -> None:
    counted = replace(COUNTED, environment=replace(PLACE, memory_bytes=2**34))
    assert earlier.same_job((advice(EAGER),), counted) is not None


@pytest.mark.parametrize(
    "limits", [{"fresh": True}, {"exhaustive": True}, {"measure_anyway": True}]
)
def test_who_wants_to_measure_anew_does(limits: dict[str, object]) -> None:
    assert earlier.usable((advice(EAGER),), request()) != ()
    assert earlier.usable((advice(EAGER),), request(**limits)) == ()


def test_lengths_of_a_file_are_no_part_of_the_fingerprint() -> None:
    asked = replace(request(), lengths=Lengths(values=(8,), counts=(1,), batch_size=4))
    assert earlier.usable((advice(EAGER),), asked) == ()


def test_a_campaign_whose_eager_trial_failed_is_of_no_use() -> None:
    failed = replace(EAGER, status=TrialStatus.CRASHED)
    assert earlier.usable((advice(failed), advice()), request()) == ()


def test_only_what_was_measured_is_taken_over(tmp_path: Path) -> None:
    config, other = Config(), Config(mode=Mode.REDUCE_OVERHEAD)
    there = trial(TrialKind.COMPILE, config=config, cache_folder=str(tmp_path))
    gone = trial(TrialKind.COMPILE, config=other, cache_folder=str(tmp_path / "gone"))
    left_out = [
        trial(TrialKind.COMPILE, status=status)
        for status in (TrialStatus.SKIPPED, TrialStatus.TIMED_OUT, TrialStatus.CUT_OFF)
    ]
    crashed = trial(TrialKind.COMPILE, config=config, status=TrialStatus.CRASHED)
    old = advice(EAGER, there, gone, *left_out, crashed)
    taken = earlier.trials_of(old, request())
    assert [each.kind for each in taken] == [TrialKind.EAGER, *[TrialKind.COMPILE] * 3]
    assert taken[1].cache_folder == str(tmp_path)
    assert taken[2].cache_folder == ""
    assert crashed in taken
    restricted = earlier.trials_of(old, request(configs=(config,)))
    assert {each.config for each in restricted} == {None, config}
