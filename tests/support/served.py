"""A real server on a Unix socket, with a fake trial host that plays recorded trials."""

from __future__ import annotations

import asyncio
import contextlib
import socket as socket_module
import stat
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1.health import aio as aio_health  # type: ignore[import-untyped]
from grpc_status import rpc_status  # type: ignore[import-untyped]

from advisor import events
from advisor.convert import event_record
from advisor.models.plan import Plan
from advisor.profiler import records
from advisor.profiler.errors import AdvisorError
from advisor.request import AdviceRequest, Limits
from advisor.service import server as servers
from advisor.service.access import Access
from advisor.service.admission import Admission
from advisor.service.binding import Secured
from advisor.service.errors import error_of
from advisor.service.estimator import Estimator
from advisor.service.jobs import Jobs
from advisor.service.metrics import Metrics
from advisor.service.store import Store
from advisor.v1 import advisor_pb2 as pb
from advisor.v1 import advisor_pb2_grpc

REGIONAL = records.Config(scope=records.Scope.REGIONAL)
STEP_S = 0.5


def around(figure: float) -> records.Interval:
    return records.Interval(median=figure, low=figure * 0.99, high=figure * 1.01)


def recorded(spec: records.TrialSpec) -> records.Trial:
    """Returns what a trial of a small BERT on two cores gave, its names put in."""
    common: dict[str, Any] = {
        "trial_id": spec.trial_id,
        "kind": spec.kind,
        "status": records.TrialStatus.OK,
        "config": spec.config,
        "phase_reached": records.Phase.DONE,
        "eager_step_s": around(STEP_S),
        "eager": records.Timing(step_s=around(STEP_S), steps=20, spread=0.01),
        "workload": records.WorkloadFacts(
            fingerprint="f",
            model_class="BertForTokenClassification",
            parameters=11_000_000,
            trainable_parameters=11_000_000,
            optimizer="AdamW",
            dtype="float32",
            shapes=(records.Shape(signature="i64[8,64]", share=1.0),),
            blocks=(
                records.Blocks(
                    module_class="BertLayer",
                    paths=("bert.encoder.layer.0", "bert.encoder.layer.1"),
                    container="bert.encoder.layer",
                ),
            ),
        ),
        "environment": records.Environment(
            torch="2.13.0",
            python="3.11",
            device="cpu",
            device_name="Xeon",
            cores=2,
            threads=2,
            memory_bytes=8 << 30,
        ),
        "wall_s": 10.0,
    }
    if spec.kind is not records.TrialKind.EAGER:
        common |= {
            "step_s": around(STEP_S / 1.25),
            "speedup": around(1.25),
            "pairs": tuple(
                records.Pair(eager_s=STEP_S * f, compiled_s=STEP_S / 1.25 * f)
                for f in (0.99, 1.0, 1.01) * 4
            ),
            "cold_start_s": 24.0,
            "warm_start_s": 3.0 if spec.kind is records.TrialKind.WARM else None,
            "graphs": 2,
            "coverage": 0.98,
            "loss_drift": 1e-6,
            "loss_scale": 1e-6,
            "cache_folder": spec.folder,
            "cache_bytes": 1000,
        }
    return records.Trial(**common)


Play = Callable[[records.TrialSpec], Awaitable[records.Trial]]


class FakeHost:
    """Plays recorded trials instead of running them; notes what it was asked and how it ended."""

    def __init__(self) -> None:
        self.specs: list[records.TrialSpec] = []
        self.alive = 0
        self.most_alive = 0
        self.cancelled = 0
        self.play: Play | None = None

    @contextlib.asynccontextmanager
    async def start(self) -> AsyncIterator[FakeHost]:
        self.alive += 1
        self.most_alive = max(self.most_alive, self.alive)
        try:
            yield self
        finally:
            self.alive -= 1

    async def run(
        self, spec: records.TrialSpec, on_progress: Callable[[records.Progress], None]
    ) -> records.Trial:
        self.specs.append(spec)
        assert stat.S_IMODE(Path(spec.folder).stat().st_mode) == 0o700
        Path(spec.folder, "inductor").mkdir(exist_ok=True)
        Path(spec.folder, "inductor", "kernel.so").write_bytes(b"x")
        on_progress(records.Progress(trial_id=spec.trial_id, phase=records.Phase.WARM_UP))
        try:
            await asyncio.sleep(0)
            return await self.play(spec) if self.play else recorded(spec)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def hang(self, spec: records.TrialSpec) -> records.Trial:
        if spec.kind is records.TrialKind.EAGER:
            return recorded(spec)
        await asyncio.sleep(3600)
        raise AssertionError("never reached")


def _free_port() -> int:
    with socket_module.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Served:
    """A running server, its parts and a channel to it."""

    def __init__(
        self,
        data: Path,
        socket: Path | None,
        admission: Admission | None = None,
        access: Access | None = None,
        secured: Secured | None = None,
        metrics: Metrics | None = None,
        port: int = 0,
    ) -> None:
        """Without a socket it listens on a port of 127.0.0.1, a free one where none is given."""
        self.data = data
        self.admission = admission
        self.access = access
        self.secured = secured
        self.metrics = metrics
        self.port = port if port or socket is not None else _free_port()
        self.address = f"unix:{socket}" if socket is not None else f"127.0.0.1:{self.port}"
        self.host = FakeHost()

    async def __aenter__(self) -> Served:
        self.stack = contextlib.AsyncExitStack()
        self.store = self.stack.enter_context(Store(self.data))
        self.jobs = Jobs(self.store, self.data, self.host.start, metrics=self.metrics)
        self.server = await servers.make_server(
            self.store,
            self.jobs,
            Estimator(self.store),
            aio_health.HealthServicer(),
            self.admission,
            self.access,
            self.metrics,
        )
        self.stack.enter_context(servers.bound(self.server, self.address, self.secured))
        await self.server.start()
        self.channel = await self.stack.enter_async_context(grpc.aio.insecure_channel(self.address))
        stub: Any = advisor_pb2_grpc.AdvisorStub(self.channel)
        self.stub: advisor_pb2_grpc.AdvisorAsyncStub = stub
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.jobs.close()
        await self.server.stop(1)
        await self.stack.aclose()

    async def events(self, message: pb.AdviseRequest) -> list[events.Event]:
        call: Any = self.stub.Advise(message)
        got = [event async for event in call]
        kept = [event for event in got if event.WhichOneof("event") != "progress"]
        assert [event.seq for event in kept] == list(range(1, len(kept) + 1))
        found = [event_record(event) for event in got]
        return [event for event in found if event is not None]

    def campaign_folders(self) -> list[Path]:
        return [path for path in (self.data / "campaigns").iterdir() if path.is_dir()]


def request(steps: float = 20_000, **limits: Any) -> AdviceRequest:
    return AdviceRequest(
        workload=records.WorkloadSpec(target="train.py:build", cwd="/work", device="cpu"),
        plan=Plan(steps=steps),
        limits=Limits(**({"configs": (REGIONAL,)} | limits)),
    )


def served(test: Callable[[Served], Awaitable[None]], data: Path, socket: Path) -> None:
    async def run() -> None:
        async with asyncio.timeout(60), Served(data, socket) as it:
            await test(it)

    asyncio.run(run())


async def failure(call: Awaitable[Any]) -> tuple[grpc.StatusCode, AdvisorError | None, Any]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    error = caught.value
    return error.code(), error_of(error), rpc_status.from_call(error)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


async def main(data: Path, where: str, *, ends: bool) -> None:
    """Serves until it is killed; trials other than eager ones last for ever, or end at once."""
    port = int(where) if where.isdigit() else 0
    async with Served(data, None if port else Path(where), port=port) as it:
        it.host.play = None if ends else it.host.hang
        await it.jobs.take_up(adopts=True)
        await asyncio.sleep(3600)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], ends="--ends" in sys.argv))
