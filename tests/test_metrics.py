"""What a server counts, as Prometheus reads it; and the command that asks for its health."""

from __future__ import annotations

import asyncio
import socket as sockets
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from served import Served, failure, request

from advisor.cli import main
from advisor.convert import request_message
from advisor.places import data_folder
from advisor.profiler.errors import PlanError
from advisor.service.metrics import Prometheus
from advisor.v1 import advisor_pb2 as pb


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ADVISOR_DATA_DIR", str(tmp_path / "data"))
    return data_folder()


@pytest.fixture
def socket() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="adv-") as folder:
        yield Path(folder, "s")


def free_port() -> int:
    with sockets.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_calls_campaigns_and_trials_are_counted(data: Path, socket: Path) -> None:
    port = free_port()
    metrics = Prometheus(f"127.0.0.1:{port}")

    def read() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            return str(answer.read().decode())

    async def test() -> None:
        async with Served(data, socket, metrics=metrics) as it:
            with metrics.exported(lambda: it.jobs.live):
                await it.events(request_message(request()))
                code, _, _ = await failure(it.stub.GetAdvice(pb.GetAdviceRequest(advice_id="none")))
                assert code is grpc.StatusCode.NOT_FOUND
                text = await asyncio.to_thread(read)
        assert 'advisor_calls_total{code="OK",method="Advise"} 1.0' in text
        assert 'advisor_calls_total{code="NOT_FOUND",method="GetAdvice"} 1.0' in text
        assert 'advisor_call_seconds_count{method="Advise"} 1.0' in text
        assert 'advisor_trials_total{kind="eager",status="ok"} 1.0' in text.lower()
        assert "advisor_campaigns 0.0" in text

    asyncio.run(test())


def test_address_that_is_none_or_taken(data: Path) -> None:
    for address in ("0.0.0.0:9464", "localhost", "127.0.0.1", "127.0.0.1:99999", "10.0.0.1:9464"):
        with pytest.raises(PlanError, match="is not a loopback address"):
            Prometheus(address)
    with sockets.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        metrics = Prometheus(f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(PlanError, match="cannot listen on"), metrics.exported(lambda: 0):
            pass


def test_health_of_a_server_that_is_there_and_of_none(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("advisor.client._CONNECT_S", 2.0)

    async def test() -> None:
        async with Served(data, None) as it:
            address = ["health", "--server", f"127.0.0.1:{it.port}"]
            assert await asyncio.to_thread(main, address) == 0
            assert capsys.readouterr().out == "SERVING\n"

    asyncio.run(test())
    assert main(["health", "--server", f"127.0.0.1:{free_port()}"]) == 3
    assert "no advisor answers" in capsys.readouterr().err
