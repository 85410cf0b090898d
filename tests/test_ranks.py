"""Trials on several ranks: what each order of wrapping and compiling gives, and what goes wrong."""

from __future__ import annotations

import asyncio
import re
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from advisor import wording
from advisor.models.evidence import Doubt, doubt, gather
from advisor.profiler.errors import PlanError, WorkloadError
from advisor.profiler.launch import TrialHost
from advisor.profiler.records import (
    Config,
    Measuring,
    Order,
    Phase,
    Progress,
    Scope,
    Trial,
    TrialKind,
    TrialSpec,
    TrialStatus,
    WorkloadSpec,
    Wrapper,
)

pytestmark = pytest.mark.trial

JOBS = Path(__file__).resolve().parent / "support" / "ranks.py"
QUICK = Measuring(
    half_width=0.2, min_quads=2, max_steady_s=2.0, max_warm_up_s=1.0, max_warm_steady_s=1.0
)
Watch = Callable[[Progress], None]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Returns the trial's folder; no process of the trial may be left at the end."""
    yield tmp_path
    left = [process.pid for process in processes(tmp_path)]
    assert not left


def processes(folder: Path, rank: str = "") -> list[psutil.Process]:
    """Returns the ranks of the trial in a folder that live; of one rank, if it is named."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if str(folder) not in " ".join(process.info["cmdline"] or ()):
            continue
        try:
            if not rank or process.environ().get("RANK") == rank:
                found.append(process)
        except psutil.Error:
            continue
    return found


def spec_of(folder: Path, job: str, wrapper: Wrapper, **more: object) -> TrialSpec:
    port = int(str(more.pop("port", 0)))
    ranks = int(str(more.pop("ranks", 2)))
    checkpointing = bool(more.pop("checkpointing", False))
    workload = WorkloadSpec(
        target=f"{JOBS}:{job}",
        cwd=str(folder),
        device="cpu",
        ranks=ranks,
        wrapper=wrapper,
        port=port,
        checkpointing=checkpointing,
    )
    name = uuid.uuid4().hex
    return TrialSpec(
        trial_id=name,
        kind=more.pop("kind", TrialKind.COMPILE),  # type: ignore[arg-type]
        workload=workload,
        folder=str(folder / name),
        config=more.pop("config", Config(backend="eager", order=Order.WRAP_FIRST)),  # type: ignore[arg-type]
        measuring=QUICK,
    )


def run(spec: TrialSpec, watch: Watch = lambda _: None) -> Trial:
    async def running() -> Trial:
        async with TrialHost.start() as host:
            return await host.run(spec, watch)

    return asyncio.run(running())


ORDERS = [
    (Wrapper.DDP, Order.COMPILE_FIRST, Scope.MODEL, False),
    (Wrapper.FSDP1, Order.WRAP_FIRST, Scope.MODEL, False),
    (Wrapper.FSDP1, Order.COMPILE_FIRST, Scope.REGIONAL, False),
    (Wrapper.FSDP2, Order.WRAP_FIRST, Scope.REGIONAL, True),
]


@pytest.mark.parametrize(("wrapper", "order", "scope", "checkpointing"), ORDERS)
def test_orders_compile_and_agree(
    folder: Path, wrapper: Wrapper, order: Order, scope: Scope, checkpointing: bool
) -> None:
    config = Config(backend="aot_eager", order=order, scope=scope)
    trial = run(spec_of(folder, "build", wrapper, config=config, checkpointing=checkpointing))
    assert trial.status is TrialStatus.OK, trial.failure
    assert trial.graphs
    assert trial.loss_drift is not None and trial.loss_drift < 1e-5
    assert trial.cold_start_s is not None and trial.cold_start_s > 0
    assert [facts.rank for facts in trial.ranks] == [0, 1]
    assert trial.ranks[0].graph_names == trial.ranks[1].graph_names != ()
    # The person's own model, whatever it is wrapped in.
    assert trial.workload is not None
    assert trial.workload.model_class.endswith(".Net")
    assert trial.workload.parameters == 3 * (2 * 16 * 32 + 32 + 16) + 17
    assert trial.workload.blocks[0].container == "blocks"


def test_eager_trial_tells_what_ranks_say_to_each_other(folder: Path) -> None:
    trial = run(spec_of(folder, "build", Wrapper.DDP, kind=TrialKind.EAGER, config=None))
    assert trial.status is TrialStatus.OK, trial.failure
    said = trial.communication
    assert said is not None
    (reduced,) = said.collectives
    assert (reduced.name, reduced.calls) == ("all_reduce", 1.0)
    # Each gradient once, in float32.
    assert trial.workload is not None
    assert reduced.part_bytes == 4 * trial.workload.parameters
    assert said.share is not None and 0 <= said.share < 1
    assert said.latency_s is not None and 0 < said.latency_s < 0.1


def test_function_that_takes_wrap_wraps_where_it_wants(folder: Path) -> None:
    trial = run(spec_of(folder, "hooked", Wrapper.FSDP2))
    assert trial.status is TrialStatus.OK, trial.failure
    assert trial.workload is not None and trial.workload.optimizer == "SGD"


def test_function_that_takes_mesh_spreads_its_model_itself(folder: Path) -> None:
    trial = run(spec_of(folder, "meshed", Wrapper.OWN))
    assert trial.status is TrialStatus.OK, trial.failure
    assert trial.graphs


def test_order_that_compiles_nothing_is_told_with_its_cause(folder: Path) -> None:
    trial = run(spec_of(folder, "flat", Wrapper.OWN))
    assert trial.status is TrialStatus.OK, trial.failure
    (evidence,) = gather([trial])
    found = doubt(evidence)
    assert found is Doubt.NO_GRAPH
    why = wording.sentence_of_doubt(trial, found)
    assert "captured no graph" in why and "use_orig_params=True" in why
    assert re.search(r"ranks\.py:\d+", why)


@pytest.mark.fault
@pytest.mark.parametrize(
    "phase", [Phase.BUILD, Phase.WARM_UP, Phase.COLD, Phase.STEADY, Phase.NUMERICS]
)
def test_killed_rank_is_named_at_once(folder: Path, phase: Phase) -> None:
    killed: list[float] = []

    def watch(progress: Progress) -> None:
        if progress.phase is phase and not killed:
            for process in processes(folder, rank="1"):
                process.kill()
                killed.append(time.monotonic())

    trial = run(spec_of(folder, "build", Wrapper.DDP), watch)
    assert killed and time.monotonic() - killed[0] < 60
    assert trial.status is TrialStatus.CRASHED
    assert trial.failure is not None
    assert "rank 1 of 2 was ended by SIGKILL" in trial.failure.message


@pytest.mark.fault
def test_rank_that_sleeps_for_ever_is_named_with_its_place(folder: Path) -> None:
    begun = time.monotonic()
    trial = run(spec_of(folder, "sleeping", Wrapper.DDP))
    assert time.monotonic() - begun < 60
    assert trial.status is TrialStatus.TIMED_OUT
    assert trial.failure is not None
    assert re.search(r"rank 1 hangs: .*ranks\.py:\d+ in loss", trial.failure.message)


@pytest.mark.fault
def test_rank_that_raises_is_named(folder: Path) -> None:
    trial = run(spec_of(folder, "failing", Wrapper.DDP))
    assert trial.failure is not None
    assert "on rank 1 of 2" in trial.failure.message and "no such batch" in trial.failure.message


@pytest.mark.fault
def test_function_that_raises_on_one_rank_is_the_persons_mistake(folder: Path) -> None:
    with pytest.raises(WorkloadError, match="shard 1 is not there"):
        run(spec_of(folder, "unusable", Wrapper.DDP))


@pytest.mark.fault
def test_rank_that_compiles_another_graph_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKS_DIFFER", "1")
    trial = run(spec_of(folder, "build", Wrapper.DDP))
    assert trial.failure is not None
    assert "compiled other graphs than the other ranks" in trial.failure.message


@pytest.mark.fault
def test_port_that_is_taken_is_told_before_anything_runs(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PlanError, match=f"port {port} cannot be used"):
            run(spec_of(folder, "build", Wrapper.DDP, port=port))


@pytest.mark.fault
def test_ended_trial_leaves_no_rank(folder: Path) -> None:
    spec = spec_of(folder, "build", Wrapper.DDP)

    async def cancelled() -> None:
        async with TrialHost.start() as host:
            begun = asyncio.Event()
            loop = asyncio.get_running_loop()

            def watch(progress: Progress) -> None:
                if progress.phase is Phase.WARM_UP:
                    loop.call_soon(begun.set)

            task = asyncio.create_task(host.run(spec, watch))
            await asyncio.wait_for(begun.wait(), 60)
            assert len(processes(folder)) >= 2
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not processes(folder)

    asyncio.run(cancelled())
