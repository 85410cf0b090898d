"""A real server on a Unix socket. Only the trial host is a fake: it plays recorded trials."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import (  # type: ignore[import-untyped]
    reflection_pb2,
    reflection_pb2_grpc,
)
from served import REGIONAL, Served, failure, recorded, request, served, until

from advisor import events, handover
from advisor.convert import advice_record, request_message, stored_trial_record
from advisor.models.plan import Plan
from advisor.places import data_folder
from advisor.profiler import records
from advisor.profiler.errors import (
    HostError,
    NotFoundError,
    PlanError,
    StoreError,
    WorkloadError,
)
from advisor.profiler.handover import HandoverStore
from advisor.request import AdviceRequest, OnDisconnect
from advisor.service import folders
from advisor.service import server as servers
from advisor.service.errors import ShuttingDown, Undecodable, status_of
from advisor.v1 import advisor_pb2 as pb
from advisor.v1 import advisor_pb2_grpc
from advisor.validate import InvalidRequest, Violation


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ADVISOR_DATA_DIR", str(tmp_path / "data"))
    return data_folder()


@pytest.fixture
def socket() -> Iterator[Path]:
    # Not tmp_path, which may be longer than a socket's path can be.
    with tempfile.TemporaryDirectory(prefix="adv-") as folder:
        yield Path(folder, "s")


def test_the_very_same_job_is_not_measured_twice(data: Path, socket: Path) -> None:
    async def test(it: Served) -> None:
        first = (await it.events(request_message(request())))[-1]
        assert isinstance(first, records.Advice)
        ran = len(it.host.specs)
        told = await it.events(request_message(request(steps=30_000)))
        again = told[-1]
        assert isinstance(again, records.Advice)
        kinds = [spec.kind for spec in it.host.specs[ran:]]
        assert kinds == [records.TrialKind.COUNT]
        assert again.enable
        assert again.advice_id != first.advice_id
        assert {trial.trial_id for trial in again.trials} <= {t.trial_id for t in first.trials}
        assert any(first.advice_id in reason for reason in again.reasons)
        # What was taken over is stored once, under the campaign that measured it.
        page = await it.stub.ListTrials(pb.ListTrialsRequest(advice_id=again.advice_id))
        assert len(page.trials) == 0
        fresh = await it.events(request_message(request(fresh=True)))
        assert isinstance(fresh[-1], records.Advice)
        assert records.TrialKind.EAGER in [spec.kind for spec in it.host.specs[ran + 1 :]]

    served(test, data, socket)


def test_a_job_that_changed_is_measured_anew(data: Path, socket: Path) -> None:
    async def test(it: Served) -> None:
        await it.events(request_message(request()))
        ran = len(it.host.specs)

        async def changed(spec: records.TrialSpec) -> records.Trial:
            trial = recorded(spec)
            assert trial.workload is not None
            return replace(trial, workload=replace(trial.workload, fingerprint="another"))

        it.host.play = changed
        advice = (await it.events(request_message(request())))[-1]
        assert isinstance(advice, records.Advice)
        kinds = [spec.kind for spec in it.host.specs[ran:]]
        assert kinds[:2] == [records.TrialKind.COUNT, records.TrialKind.EAGER]
        assert not any("--fresh" in reason for reason in advice.reasons)

    served(test, data, socket)


def test_campaign_ends_in_an_advice_that_is_stored(data: Path, socket: Path) -> None:
    async def test(it: Served) -> None:
        told = await it.events(request_message(request()))
        accepted, advice = told[0], told[-1]
        assert isinstance(accepted, events.Accepted)
        assert isinstance(advice, records.Advice)
        assert advice.advice_id == accepted.advice_id
        assert advice.enable
        assert advice.config == replace(REGIONAL, fullgraph=True)
        started = [event for event in told if isinstance(event, events.TrialStarted)]
        assert [event.kind for event in started[:2]] == [
            records.TrialKind.EAGER,
            records.TrialKind.COMPILE,
        ]
        assert started[1].at_most_s is not None
        assert any(isinstance(event, records.Progress) for event in told)
        ended = [event for event in told if isinstance(event, records.Trial)]
        # The cache of the winner has moved into the store meanwhile, the others' are gone.
        assert [replace(each, cache_folder="") for each in ended] == [
            replace(each, cache_folder="") for each in advice.trials
        ]
        again = await it.stub.GetAdvice(pb.GetAdviceRequest(advice_id=advice.advice_id))
        assert advice_record(again) == advice
        page = await it.stub.ListTrials(pb.ListTrialsRequest(advice_id=advice.advice_id))
        stored = [stored_trial_record(message) for message in page.trials]
        assert [entry.trial for entry in reversed(stored)] == ended
        listed = await it.stub.ListAdvices(pb.ListAdvicesRequest())
        assert [entry.advice_id for entry in listed.advices] == [advice.advice_id]
        assert not listed.advices[0].trials

    served(test, data, socket)


def test_only_the_cache_that_is_handed_over_stays(data: Path, socket: Path) -> None:
    async def test(it: Served) -> None:
        *_, advice = await it.events(request_message(request()))
        assert isinstance(advice, records.Advice)
        assert advice.hand_over is not None
        assert it.campaign_folders() == []
        kept = Path(advice.hand_over.path)
        assert (kept / "inductor" / "kernel.so").exists()
        assert {trial.cache_folder for trial in advice.trials} <= {str(kept), ""}
        bundle = handover.store(data).find(advice.advice_id)
        assert bundle.bundle_id == advice.hand_over.bundle_id
        assert bundle.facts.config == REGIONAL

    served(test, data, socket)


def test_a_cache_that_cannot_be_kept_is_no_promise(
    data: Path, socket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise StoreError("the compile cache cannot be kept", "the disk is full")

    monkeypatch.setattr(HandoverStore, "put", full)

    async def test(it: Served) -> None:
        *_, advice = await it.events(request_message(request()))
        assert isinstance(advice, records.Advice)
        assert advice.enable
        assert advice.hand_over is None
        assert not any("advise exec" in reason for reason in advice.reasons)
        assert [text for text in advice.warnings if "the disk is full" in text]
        assert it.campaign_folders() == []

    served(test, data, socket)


def test_warm_start_runs_in_the_folder_of_its_cold_one(data: Path, socket: Path) -> None:
    async def test(it: Served) -> None:
        asked = request()
        plan = Plan(steps=20_000, restarts=20)
        await it.events(
            request_message(AdviceRequest(workload=asked.workload, plan=plan, limits=asked.limits))
        )
        by_kind = {spec.kind: spec for spec in it.host.specs}
        warm, cold = by_kind[records.TrialKind.WARM], by_kind[records.TrialKind.COMPILE]
        assert warm.folder == cold.folder
        assert warm.trial_id != cold.trial_id

    served(test, data, socket)


def test_short_plan_tells_what_was_skipped_and_keeps_no_folder(data: Path, socket: Path) -> None:
    async def test(it: Served) -> None:
        told = await it.events(request_message(request(steps=50)))
        assert [spec.kind for spec in it.host.specs] == [records.TrialKind.EAGER]
        skipped = [
            event
            for event in told
            if isinstance(event, records.Trial) and event.status is records.TrialStatus.SKIPPED
        ]
        assert [trial.config for trial in skipped] == [REGIONAL]
        assert isinstance(told[-1], records.Advice)
        assert not told[-1].enable
        assert it.campaign_folders() == []

    served(test, data, socket)


def test_trial_that_outlasts_the_budget_is_ended(data: Path, socket: Path) -> None:
    async def test(it: Served) -> None:
        async def slow(spec: records.TrialSpec) -> records.Trial:
            await asyncio.sleep(3600)
            raise AssertionError("never reached")

        it.host.play = slow
        call = it.events(request_message(request(budget_s=0.2)))
        code, error, _ = await failure(call)
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert isinstance(error, HostError)
        (stored,), _ = it.store.trials()
        assert stored.trial.status is records.TrialStatus.TIMED_OUT
        assert it.host.cancelled == 1

    served(test, data, socket)


@pytest.mark.parametrize("way", ["cancel", "deadline", "disconnect"])
def test_end_of_the_call_ends_the_campaign(
    data: Path, socket: Path, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(it: Served) -> None:
        it.host.play = it.host.hang
        channel = grpc.aio.insecure_channel(it.address)
        stub = advisor_pb2_grpc.AdvisorStub(channel)
        asked = replace(request(), on_disconnect=OnDisconnect.CANCEL)
        call: Any = stub.Advise(request_message(asked), timeout=0.7 if way == "deadline" else None)
        await until_compiling(call, it)
        if way == "cancel":
            call.cancel()
        elif way == "disconnect":
            await channel.close()
        await until(lambda: it.host.alive == 0)
        await until(lambda: it.campaign_folders() == [])
        assert it.host.cancelled == 1
        # What had finished is whole; of the rest there is nothing.
        (stored,), _ = it.store.trials()
        assert stored.trial.kind is records.TrialKind.EAGER
        assert it.store.advices() == ([], None)
        assert [record.getMessage() for record in caplog.records] == []
        await channel.close()
        # The device is free again.
        it.host.play = None
        assert isinstance((await it.events(request_message(request())))[-1], records.Advice)

    served(test, data, socket)


async def until_compiling(call: Any, it: Served) -> None:
    """Reads a call's events until its second trial runs."""
    reader = asyncio.ensure_future(_drain(call))
    await until(lambda: len(it.host.specs) == 2)
    reader.add_done_callback(lambda done: done.cancelled() or done.exception())


async def _drain(call: Any) -> None:
    async for _ in call:
        pass


def test_one_campaign_at_a_time_on_a_device(data: Path, socket: Path) -> None:
    async def test(it: Served) -> None:
        results = await asyncio.gather(
            *(it.events(request_message(request(20_000 + each))) for each in range(3))
        )
        assert it.host.most_alive == 1
        waited = [event for told in results for event in told if isinstance(event, events.Waiting)]
        assert [event.message for event in waited] == ["waiting for another campaign on cpu"] * 2

    served(test, data, socket)


def test_campaign_waits_for_another_process(data: Path, socket: Path) -> None:
    holder = (
        "import fcntl, os, sys; d = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT);"
        "fcntl.flock(d, fcntl.LOCK_EX); print('held', flush=True); sys.stdin.read()"
    )

    async def test(it: Served) -> None:
        lock = it.data / "devices" / "cpu.lock"
        with subprocess.Popen(
            [sys.executable, "-c", holder, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as other:
            assert other.stdin is not None
            assert other.stdout is not None
            other.stdout.readline()
            call = it.stub.Advise(request_message(request()))
            kinds = []
            async for event in call:
                kinds.append(event.WhichOneof("event"))
                if kinds[-1] == "waiting":
                    assert not it.host.specs
                    other.stdin.close()
        assert kinds[:3] == ["accepted", "waiting", "trial_started"]
        assert kinds[-1] == "advice"

    served(test, data, socket)


def test_shutdown_ends_campaigns_and_says_so(data: Path, socket: Path) -> None:
    async def test(it: Served) -> None:
        it.host.play = it.host.hang
        call = asyncio.ensure_future(failure(it.events(request_message(request()))))
        await until(lambda: len(it.host.specs) == 2)
        await it.jobs.close()
        assert it.host.alive == 0
        code, error, _ = await call
        assert (code, type(error)) == (grpc.StatusCode.UNAVAILABLE, ShuttingDown)
        code, error, _ = await failure(it.events(request_message(request())))
        assert (code, type(error)) == (grpc.StatusCode.UNAVAILABLE, ShuttingDown)

    served(test, data, socket)


def test_folders_of_campaigns_that_died_are_swept(data: Path, socket: Path) -> None:
    async def test(it: Served) -> None:
        dead = data / "campaigns" / "dead"
        (dead / "dead-1").mkdir(parents=True)
        (dead / ".lock").touch()
        it.host.play = it.host.hang
        call: Any = it.stub.Advise(request_message(request()))
        await until_compiling(call, it)
        assert folders.sweep(data) == ["dead"]
        assert Path(it.host.specs[-1].folder, "inductor", "kernel.so").exists()
        call.cancel()

    served(test, data, socket)


METHODS = ("Advise", "GetAdvice", "ListAdvices", "ListTrials")
JUNK = (b"\xff" * 20, b"\x0a\x05ab", b"\x0a\x02\xff\xfe")


@pytest.mark.parametrize(
    ("method", "junk"),
    [
        (method, junk)
        for method in METHODS
        for junk in JUNK
        # Well formed for ListAdvices, whose field 1 is a number: an unknown field.
        if (method, junk) != ("ListAdvices", JUNK[2])
    ],
)
def test_undecodable_bytes_are_the_callers_fault(
    data: Path, socket: Path, method: str, junk: bytes
) -> None:
    async def test(it: Served) -> None:
        path = f"/compile_advisor.v1.Advisor/{method}"
        channel: Any = it.channel
        if method == "Advise":
            stream = channel.unary_stream(path)(junk)
            code, error, status = await failure(_drain(stream))
        else:
            code, error, status = await failure(channel.unary_unary(path)(junk))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert isinstance(error, Undecodable)
        assert len(_bad_request(status).field_violations) == 1

    served(test, data, socket)


def _bad_request(status: Any) -> Any:
    bad = error_details_pb2.BadRequest()
    assert any(detail.Is(bad.DESCRIPTOR) and detail.Unpack(bad) for detail in status.details)
    return bad


def test_bad_request_names_every_field(data: Path, socket: Path) -> None:
    async def test(it: Served) -> None:
        message = request_message(request(steps=-1))
        message.plan.confidence = float("nan")
        message.limits.configs[0].mode = "fast"
        code, error, status = await failure(it.events(message))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        named = [violation.field for violation in _bad_request(status).field_violations]
        assert named == ["plan.steps", "plan.confidence", "limits.configs[0].mode"]
        assert isinstance(error, InvalidRequest)
        assert "-1 is out of range" in str(error)
        assert it.host.specs == []

    served(test, data, socket)


def test_plan_whose_parts_contradict_is_refused(data: Path, socket: Path) -> None:
    async def test(it: Served) -> None:
        message = request_message(request())
        message.plan.hours = 3.0
        code, error, _ = await failure(it.events(message))
        assert (code, type(error)) == (grpc.StatusCode.INVALID_ARGUMENT, PlanError)
        assert "--hours" in str(error)

    served(test, data, socket)


def test_unusable_workload_brings_the_persons_traceback(data: Path, socket: Path) -> None:
    trace = (
        "".join(f'  File "train.py", line {n}, in build\n' for n in range(400)) + "ValueError: ü"
    )

    async def test(it: Served) -> None:
        async def raising(spec: records.TrialSpec) -> records.Trial:
            raise WorkloadError("build() raised", "ValueError: ü " * 500, user_traceback=trace)

        it.host.play = raising
        code, error, _ = await failure(it.events(request_message(request())))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert isinstance(error, WorkloadError)
        assert str(error).startswith("build() raised")
        assert error.user_traceback.endswith("ValueError: ü")
        assert it.host.alive == 0
        assert it.campaign_folders() == []

    served(test, data, socket)


def test_bug_is_told_by_a_name_only(
    data: Path, socket: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(it: Served) -> None:
        async def raising(spec: records.TrialSpec) -> records.Trial:
            raise RuntimeError("secret path /etc/x")

        it.host.play = raising
        code, _, status = await failure(it.events(request_message(request())))
        assert code is grpc.StatusCode.INTERNAL
        assert "secret" not in str(status)
        (record,) = [it for it in caplog.records if it.levelname == "ERROR"]
        assert record.args[0] in status.message  # type: ignore[index]
        assert record.exc_info is not None

    served(test, data, socket)


def test_unknown_ids(data: Path, socket: Path) -> None:
    async def test(it: Served) -> None:
        call: Any = it.stub.GetAdvice(pb.GetAdviceRequest(advice_id="nope"))
        code, error, _ = await failure(call)
        assert (code, type(error)) == (grpc.StatusCode.NOT_FOUND, NotFoundError)
        call = it.stub.GetAdvice(pb.GetAdviceRequest(advice_id="../../etc/passwd"))
        code, error, _ = await failure(call)
        assert (code, type(error)) == (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequest)
        page = await it.stub.ListTrials(pb.ListTrialsRequest(advice_id="nope"))
        assert not page.trials

    served(test, data, socket)


def test_request_beyond_the_limit_is_refused(data: Path, socket: Path) -> None:
    async def test(it: Served) -> None:
        call: Any = it.stub.GetAdvice(pb.GetAdviceRequest(advice_id="x" * (2 << 20)))
        code, _, _ = await failure(call)
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED

    served(test, data, socket)


def test_health_and_reflection(data: Path, socket: Path) -> None:
    async def test(it: Served) -> None:
        health = health_pb2_grpc.HealthStub(it.channel)
        for service in ("", servers.SERVICE):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(it.channel)
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        async for answer in reflection.ServerReflectionInfo(asked):
            names = {service.name for service in answer.list_services_response.service}
            assert {"compile_advisor.v1.Advisor", "grpc.health.v1.Health"} <= names

    served(test, data, socket)


def test_second_server_on_a_socket_is_refused(data: Path, socket: Path) -> None:
    async def test(it: Served) -> None:
        second = grpc.aio.server()
        with (
            pytest.raises(PlanError, match="another server listens"),
            servers.bound(second, it.address),
        ):
            pass
        assert isinstance((await it.events(request_message(request())))[-1], records.Advice)

    served(test, data, socket)


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("0.0.0.0:0", "not a loopback address"),
        ("[::]:0", "not a loopback address"),
        ("example.org:80", "not a loopback address"),
        ("localhost", "not an address"),
        ("127.0.0.1:99999", "not an address"),
        ("unix:/tmp/" + "x" * 120, "bytes"),
        (f"unix:{__file__}", "no socket"),
    ],
)
def test_address_that_cannot_be(address: str, sentence: str) -> None:
    async def bind() -> None:
        with servers.bound(grpc.aio.server(), address):
            raise AssertionError("bound")

    with pytest.raises(PlanError, match=sentence):
        asyncio.run(bind())
    Path(f"{__file__}.lock").unlink(missing_ok=True)


def test_second_server_on_a_port_is_refused() -> None:
    async def bind() -> None:
        first = grpc.aio.server(options=servers.OPTIONS)
        port = first.add_insecure_port("127.0.0.1:0")
        await first.start()
        try:
            second = grpc.aio.server(options=servers.OPTIONS)
            with (
                pytest.raises(PlanError, match="in use"),
                servers.bound(second, f"127.0.0.1:{port}"),
            ):
                pass
        finally:
            await first.stop(0)

    asyncio.run(bind())


def test_largest_status_fits_the_metadata_that_clients_accept() -> None:
    violations = [Violation(f"plan.{'x' * 100}{n}", "ü" * 300) for n in range(100)]
    for error in (
        InvalidRequest(violations),
        WorkloadError("ü" * 5000, user_traceback="ü" * 50_000),
    ):
        status = status_of(error)
        assert status is not None
        encoded_message = len(status.message.encode()) * 3
        assert len(status.SerializeToString()) * 4 / 3 + encoded_message < 8192 - 300


# --- the server as a process of its own


@contextlib.contextmanager
def process(data: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    started = subprocess.Popen(
        [sys.executable, "-P", "-m", "advisor.service.server", *arguments],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "ADVISOR_DATA_DIR": str(data)},
        start_new_session=True,
    )
    try:
        yield started
    finally:
        started.kill()
        started.wait()
        for pipe in (started.stdin, started.stderr):
            assert pipe is not None
            pipe.close()


def wait_for(path: Path, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert server.poll() is None, server.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_private_server_ends_when_its_client_dies(data: Path, socket: Path) -> None:
    with process(data, "--private", "--unix", str(socket)) as server:
        wait_for(socket, server)
        assert stat.S_IMODE(socket.stat().st_mode) & 0o077 == 0
        assert server.stdin is not None
        server.stdin.close()
        assert server.wait(timeout=15) == 0
        assert not socket.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_server_ends_in_order_at_a_signal(data: Path, socket: Path, number: int) -> None:
    with process(data, "--unix", str(socket)) as server:
        wait_for(socket, server)
        server.send_signal(number)
        assert server.wait(timeout=15) == 0


def test_killed_server_leaves_no_obstacle(data: Path, socket: Path) -> None:
    with process(data, "--unix", str(socket)) as server:
        wait_for(socket, server)
        server.kill()
        server.wait()
    assert socket.exists()

    async def test(it: Served) -> None:
        assert isinstance((await it.events(request_message(request())))[-1], records.Advice)

    served(test, data, socket)


def test_server_that_cannot_start_says_why_in_one_sentence(data: Path, socket: Path) -> None:
    (data / "results.sqlite3").write_text("mine\n" * 100)
    with process(data, "--unix", str(socket)) as server:
        _, errors = server.communicate(timeout=30)
        assert server.returncode == 2
        assert b"not a sound database" in errors
        assert b"Traceback" not in errors
        assert errors.count(b"\n") == 1


def test_server_imports_no_torch_and_unpickles_nothing() -> None:
    code = (
        "import sys, advisor.service.server;"
        "print(*{'torch', 'transformers', 'joblib', 'cloudpickle'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, check=True)
    assert found.stdout.strip() == b""
