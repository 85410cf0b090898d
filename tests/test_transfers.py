"""Compile caches over the wire: whole or not at all, and a broken transfer goes on where it was."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1.health import aio as aio_health  # type: ignore[import-untyped]

from advisor import handover
from advisor.client import Client
from advisor.profiler import archive, place
from advisor.profiler.bundle import Bundle, BundleFacts
from advisor.profiler.errors import DamagedError, NotFoundError, StoreError
from advisor.profiler.records import Config
from advisor.service import server as servers
from advisor.service import transfers
from advisor.service.errors import error_of
from advisor.service.estimator import Estimator
from advisor.service.jobs import Jobs
from advisor.service.store import Store
from advisor.v1 import advisor_pb2 as pb
from advisor.v1 import advisor_pb2_grpc
from advisor.validate import InvalidRequest


@contextlib.contextmanager
def serving(data: Path) -> Iterator[str]:
    """A real server in a thread of its own; gives its address."""
    folder = tempfile.mkdtemp(prefix="adv-")
    address = f"unix:{folder}/s"
    started, ended = threading.Event(), []

    async def serve() -> None:
        with Store(data) as store:
            server = await servers.make_server(
                store, Jobs(store, data), Estimator(store), aio_health.HealthServicer()
            )
            with servers.bound(server, address):
                await server.start()
                until = asyncio.Event()
                ended.append((asyncio.get_running_loop(), until))
                started.set()
                await until.wait()
                await server.stop(0)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert started.wait(30)
        yield address
    finally:
        loop, until = ended[0]
        loop.call_soon_threadsafe(until.set)
        thread.join()


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """The data folder of the server."""
    folder = tmp_path / "there"
    folder.mkdir()
    return folder


@pytest.fixture
def address(there: Path) -> Iterator[str]:
    with serving(there) as found:
        yield found


@pytest.fixture
def stub(address: str) -> Iterator[Any]:
    with grpc.insecure_channel(address) as channel:
        yield advisor_pb2_grpc.AdvisorStub(channel)


def kept(data: Path, tmp_path: Path) -> Bundle:
    """A compile cache of a megabyte that does not shrink, in the store of a data folder."""
    trial = tmp_path / "trial"
    (trial / "inductor").mkdir(parents=True, exist_ok=True)
    (trial / "inductor" / "c.so").write_bytes(os.urandom(1 << 20))
    facts = BundleFacts(fingerprint="f", config=Config(), place=place.here(torch="2.13.0"))
    return handover.store(data).put([trial], facts, names=["a1"])


@pytest.fixture
def packed(tmp_path: Path) -> tuple[Bundle, Path]:
    here = tmp_path / "here"
    bundle = kept(here, tmp_path)
    archive.pack(handover.store(here), bundle, tmp_path / "cache.tgz")
    return bundle, tmp_path / "cache.tgz"


def first(file: Path, offset: int = 0, data: bytes = b"") -> pb.PutCacheRequest:
    content = file.read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    return pb.PutCacheRequest(sha256=sha256, size_bytes=len(content), offset=offset, data=data)


def failure(call: Any) -> Any:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code(), error_of(caught.value)


def test_a_cache_goes_there_and_back(
    address: str, there: Path, packed: tuple[Bundle, Path], tmp_path: Path
) -> None:
    bundle, file = packed
    with Client(address) as client:
        assert client.put_cache(file) == bundle.bundle_id
        assert handover.store(there).find(bundle.key) == bundle
        for name in (bundle.bundle_id, bundle.key):
            assert client.get_cache(name, tmp_path / "back.tgz") == bundle.bundle_id
            assert (tmp_path / "back.tgz").read_bytes() == file.read_bytes()
        assert client.put_cache(file) == bundle.bundle_id
    assert not list((there / "handover" / "transfers").glob("*.part"))


def test_a_broken_transfer_goes_on_where_it_was(there: Path, packed: tuple[Bundle, Path]) -> None:
    bundle, file = packed
    content = file.read_bytes()
    half = len(content) // 2
    with serving(there) as address, grpc.insecure_channel(address) as channel:
        stub = advisor_pb2_grpc.AdvisorStub(channel)
        answer = stub.PutCache(iter([first(file, 0, content[:half])]))
        assert (answer.held_bytes, answer.complete, answer.bundle_id) == (half, False, "")
    # The server was started anew meanwhile.
    with serving(there) as address, grpc.insecure_channel(address) as channel:
        stub = advisor_pb2_grpc.AdvisorStub(channel)
        assert stub.PutCache(iter([first(file)])).held_bytes == half
        answer = stub.PutCache(iter([first(file, half, content[half:])]))
        assert (answer.complete, answer.bundle_id) == (True, bundle.bundle_id)


def test_a_fetch_begins_where_it_is_told(stub: Any, there: Path, tmp_path: Path) -> None:
    bundle = kept(there, tmp_path)
    whole = list(stub.GetCache(pb.GetCacheRequest(name="a1")))
    content = b"".join(part.data for part in whole)
    assert whole[0].bundle_id == bundle.bundle_id
    assert whole[0].size_bytes == len(content)
    assert hashlib.sha256(content).hexdigest() == whole[0].sha256
    assert len(whole) > 3
    rest = list(stub.GetCache(pb.GetCacheRequest(name="a1", offset=len(content) - 10)))
    assert b"".join(part.data for part in rest) == content[-10:]


def test_requests_that_make_no_sense(stub: Any, packed: tuple[Bundle, Path]) -> None:
    _, file = packed
    for message, field in (
        (pb.PutCacheRequest(size_bytes=1), "sha256"),
        (pb.PutCacheRequest(sha256="x", size_bytes=1), "sha256"),
        (pb.PutCacheRequest(sha256="a" * 64), "size_bytes"),
        (pb.PutCacheRequest(sha256="a" * 64, size_bytes=1e30), "size_bytes"),
        (pb.PutCacheRequest(sha256="a" * 64, size_bytes=float("nan")), "size_bytes"),
        (first(file, offset=5), "offset"),
        (pb.PutCacheRequest(sha256="a" * 64, size_bytes=3, data=b"four"), "data"),
    ):
        code, error = failure(lambda message=message: stub.PutCache(iter([message])))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert isinstance(error, InvalidRequest)
        assert [violation.field for violation in error.violations] == [field]
    code, error = failure(lambda: stub.PutCache(iter([])))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    code, error = failure(lambda: list(stub.GetCache(pb.GetCacheRequest(name="../x"))))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    code, error = failure(lambda: list(stub.GetCache(pb.GetCacheRequest(name="none"))))
    assert (code, type(error)) == (grpc.StatusCode.NOT_FOUND, NotFoundError)


@pytest.mark.fault
def test_bytes_that_are_no_message_in_the_middle(address: str, there: Path) -> None:
    with grpc.insecure_channel(address) as channel:
        call = channel.stream_unary("/compile_advisor.v1.Advisor/PutCache")
        code, _ = failure(lambda: call(iter([b"\xff" * 20])))
        assert code is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.fault
def test_what_is_not_what_was_announced_is_forgotten(
    stub: Any, there: Path, packed: tuple[Bundle, Path]
) -> None:
    _, file = packed
    content = bytearray(file.read_bytes())
    content[100] ^= 0xFF
    message = first(file, 0)
    message.data = bytes(content[: 200 << 10])
    more = [
        pb.PutCacheRequest(data=bytes(content[at : at + (200 << 10)]))
        for at in range(200 << 10, len(content), 200 << 10)
    ]
    code, error = failure(lambda: stub.PutCache(iter([message, *more])))
    assert (code, type(error)) == (grpc.StatusCode.DATA_LOSS, DamagedError)
    assert handover.store(there).bundles() == ()
    assert stub.PutCache(iter([first(file)])).held_bytes == 0


@pytest.mark.fault
def test_two_calls_do_not_write_one_archive(
    stub: Any, there: Path, packed: tuple[Bundle, Path]
) -> None:
    _, file = packed
    content = file.read_bytes()
    going = threading.Event()

    def slowly() -> Iterator[pb.PutCacheRequest]:
        yield first(file, 0, content[:1000])
        going.wait(10)

    running = stub.PutCache.future(slowly())
    parts = there / "handover" / "transfers"
    until = time.monotonic() + 10
    while time.monotonic() < until and not any(it.stat().st_size for it in parts.glob("*.part")):
        time.sleep(0.01)
    code, error = failure(lambda: stub.PutCache(iter([first(file)])))
    assert (code, type(error)) == (grpc.StatusCode.UNAVAILABLE, StoreError)
    assert "is being sent by another call" in str(error)
    going.set()
    assert running.result(10).held_bytes == 1000


def test_transfers_that_nobody_goes_on_with_are_given_up(
    stub: Any, there: Path, packed: tuple[Bundle, Path]
) -> None:
    _, file = packed
    stub.PutCache(iter([first(file, 0, b"abc")]))
    (part,) = (there / "handover" / "transfers").glob("*.part")
    old = time.time() - transfers._FORGOTTEN_S - 1
    os.utime(part, (old, old))
    assert stub.PutCache(iter([first(file)])).held_bytes == 0
