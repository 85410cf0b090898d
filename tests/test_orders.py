"""Which orders of wrapping and compiling are tried, what is pasted, and whose failure is told."""

from __future__ import annotations

import ast
from dataclasses import replace

import pytest

from advisor import orders, paste
from advisor.models.plan import Plan
from advisor.profiler.errors import PlanError, WorkloadError
from advisor.profiler.frames import FromRank, Result, Unpacker, Unusable
from advisor.profiler.group_outcome import Launched, merged
from advisor.profiler.group_watch import Member
from advisor.profiler.records import (
    Blocks,
    Config,
    Failure,
    Interval,
    Order,
    Phase,
    RankFacts,
    Scope,
    Shape,
    Trial,
    TrialKind,
    TrialSpec,
    TrialStatus,
    WorkloadFacts,
    WorkloadSpec,
    Wrapper,
)
from advisor.question import Typed, request_of

FACTS = WorkloadFacts(
    fingerprint="f",
    model_class="train.Net",
    parameters=10,
    trainable_parameters=10,
    optimizer="AdamW",
    dtype="float32",
    shapes=(Shape(signature="8x16:float32", share=1.0),),
    blocks=(
        Blocks(
            module_class="train.Block",
            paths=("layers.0", "layers.1"),
            container="layers",
            parameters=8,
        ),
    ),
)
WHOLE = Config(order=Order.COMPILE_FIRST)


@pytest.mark.parametrize(
    ("wrapper", "wanted"),
    [
        (Wrapper.OWN, {("regional", "wrap-first"), ("model", "wrap-first")}),
        (Wrapper.FSDP2, {("regional", "wrap-first"), ("model", "wrap-first")}),
        (
            Wrapper.DDP,
            {("regional", "wrap-first"), ("model", "wrap-first"), ("model", "compile-first")},
        ),
        (
            Wrapper.FSDP1,
            {
                ("regional", "wrap-first"),
                ("regional", "compile-first"),
                ("model", "wrap-first"),
                ("model", "compile-first"),
            },
        ),
    ],
)
def test_each_order_that_differs_is_tried_once(
    wrapper: Wrapper, wanted: set[tuple[str, str]]
) -> None:
    found = orders.candidates(wrapper)
    assert len(found) == len(wanted)
    assert {(c.scope.value, str(c.order)) for c in found} == wanted


@pytest.mark.parametrize("wrapper", [Wrapper.DDP, Wrapper.FSDP1, Wrapper.FSDP2])
@pytest.mark.parametrize("order", list(Order))
@pytest.mark.parametrize("scope", list(Scope))
def test_pasted_lines_are_in_the_order_advised(
    wrapper: Wrapper, order: Order, scope: Scope
) -> None:
    workload = WorkloadSpec(target="t.py:build", cwd="/", ranks=2, wrapper=wrapper)
    code = paste.spread(Config(scope=scope, order=order), workload, FACTS)
    ast.parse(code)
    wrapping = {
        Wrapper.DDP: "DistributedDataParallel(model)",
        Wrapper.FSDP1: "FullyShardedDataParallel(model",
        Wrapper.FSDP2: "fully_shard(model)",
    }[wrapper]
    compiled_first = code.index(".compile(") < code.index(wrapping)
    ddp_blocks = wrapper is Wrapper.DDP and scope is Scope.REGIONAL
    assert compiled_first == (order is Order.COMPILE_FIRST or ddp_blocks)


def test_own_wrapping_is_left_alone() -> None:
    workload = WorkloadSpec(target="t.py:build", cwd="/", ranks=2)
    assert paste.spread(WHOLE, workload, FACTS) == "model.compile()"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ranks": 0}, "--ranks 0 is out of range"),
        ({"ranks": 1000}, "--ranks 1000 is out of range"),
        ({"ranks": 2, "wrap": "ddq"}, "ddq"),
        ({"wrap": "ddp"}, "--wrap has no effect on a single rank"),
        ({"port": 29500}, "--port has no effect on a single rank"),
        ({"ranks": 2, "port": 70000}, "--port 70000 is out of range"),
    ],
)
def test_options_that_make_no_sense(given: dict[str, object], words: str) -> None:
    typed = replace(Typed(target="hf:gpt2", steps=100), **given)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=words):
        request_of(typed)


def test_ddp_where_nothing_else_is_said() -> None:
    request = request_of(Typed(target="hf:gpt2", steps=100, ranks=2))
    assert (request.workload.ranks, request.workload.wrapper) == (2, Wrapper.DDP)
    assert request.plan == Plan(steps=100)


# --- one trial of all ranks


def spec() -> TrialSpec:
    workload = WorkloadSpec(target="t.py:build", cwd="/", ranks=2, wrapper=Wrapper.DDP)
    return TrialSpec(trial_id="t", kind=TrialKind.COMPILE, workload=workload, folder="/x")


def trial(rank: int, **more: object) -> Trial:
    facts = RankFacts(rank=rank, graphs=1)
    values = {"status": TrialStatus.OK, "ranks": (facts,), **more}
    return Trial(trial_id="t", kind=TrialKind.COMPILE, **values)  # type: ignore[arg-type]


def member(rank: int, heard: float, **more: object) -> Member:
    known = {"pid": rank + 100, "unpacker": Unpacker(FromRank), "heard": heard, **more}
    return Member(rank=rank, **known)  # type: ignore[arg-type]


def of(*members: Member, stalled: str = "") -> Launched:
    failed = {m.rank: (float(m.rank), -9) for m in members if m.lost}
    return Launched(members={m.rank: m for m in members}, stalled=stalled, failed=failed)


def test_slowest_rank_counts() -> None:
    steps = [Interval(median=m, low=m, high=m) for m in (0.1, 0.2)]
    trials = [
        trial(0, step_s=steps[0], cold_start_s=9.0, graphs=2, coverage=0.9, loss_drift=1e-7),
        trial(1, step_s=steps[1], cold_start_s=8.0, graphs=1, coverage=0.5, loss_drift=1e-6),
    ]
    members = [member(i, i, result=Result(trial=trial)) for i, trial in enumerate(trials)]
    found = merged(spec(), of(*members))
    assert found.step_s == steps[1]
    assert (found.cold_start_s, found.graphs, found.coverage) == (9.0, 1, 0.5)
    assert found.loss_drift == 1e-6
    assert [facts.rank for facts in found.ranks] == [0, 1]


def test_rank_that_died_is_the_cause_of_what_others_met() -> None:
    failure = Failure(kind="RuntimeError", message="Connection closed by peer")
    other = trial(0, status=TrialStatus.CRASHED, failure=failure)
    members = (
        member(0, 2.0, result=Result(trial=other)),
        member(1, 1.0, lost=True, gone=True, phase=Phase.COLD),
    )
    found = merged(spec(), of(*members))
    assert found.status is TrialStatus.CRASHED and found.failure is not None
    assert found.failure.message == "rank 1 of 2 was ended by SIGKILL while compiling"


def test_first_that_failed_is_the_cause() -> None:
    later = Failure(kind="RuntimeError", message="no answer")
    members = (
        member(0, 5.0, result=Result(trial=trial(0, status=TrialStatus.CRASHED, failure=later))),
        member(1, 1.0, unusable=Unusable(what="batches raised", why="KeyError: 3")),
    )
    with pytest.raises(WorkloadError, match="batches raised"):
        merged(spec(), of(*members))


def test_hang_is_told_as_it_was_found() -> None:
    members = (member(0, 1.0, gone=True), member(1, 1.0, gone=True))
    found = merged(spec(), of(*members, stalled="rank 1 hangs: it sleeps"))
    assert found.status is TrialStatus.TIMED_OUT and found.failure is not None
    assert (found.failure.kind, found.failure.message) == ("stalled", "rank 1 hangs: it sleeps")


def test_numbers_have_to_agree_on_every_rank() -> None:
    failure = Failure(kind="loss", message="the losses differ by 3 %")
    wrong = trial(1, status=TrialStatus.DISAGREES, failure=failure)
    members = [member(i, i, result=Result(trial=t)) for i, t in enumerate((trial(0), wrong))]
    found = merged(spec(), of(*members))
    assert found.status is TrialStatus.DISAGREES and found.failure is not None
    assert found.failure.message == "on rank 1: the losses differ by 3 %"
