"""What is promised of campaigns: one for a request, told without a gap, ended whatever dies."""

from __future__ import annotations

import asyncio
import socket as sockets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from served import Served, failure, recorded, request, served, until

from advisor.cli import main
from advisor.client import Client
from advisor.convert import event_record, request_message
from advisor.events import Accepted, TrialStarted
from advisor.places import data_folder
from advisor.profiler import records
from advisor.profiler.errors import HostError, Interrupted, NotFoundError, StoreError
from advisor.request import AdviceRequest, OnDisconnect
from advisor.service import jobs
from advisor.service.errors import AlreadyExists, NotFinished, Overloaded
from advisor.service.job import Job
from advisor.service.job_store import MOST_ATTEMPTS, JobStore, Row, State, Told, trials_of
from advisor.service.store import Store
from advisor.v1 import advisor_pb2 as pb
from advisor.v1 import advisor_pb2_grpc

SERVED = Path(__file__).resolve().parent / "support" / "served.py"


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ADVISOR_DATA_DIR", str(tmp_path / "data"))
    return data_folder()


@pytest.fixture
def socket() -> Iterator[Path]:
    # Not tmp_path, which may be longer than a socket's path can be.
    with tempfile.TemporaryDirectory(prefix="adv-") as folder:
        yield Path(folder, "s")


def named(request_id: str | None = None, **changes: Any) -> AdviceRequest:
    return replace(request(), request_id=request_id, **changes)


async def told_by(call: Any) -> list[pb.AdviseEvent]:
    return [event async for event in call]


async def rest_of(call: Any) -> list[pb.AdviseEvent]:
    """Returns what a call that `read` has begun still says."""
    told = []
    while (event := await call.read()) is not grpc.aio.EOF:
        told.append(event)
    return told


def name_of(told: list[pb.AdviseEvent]) -> str:
    return str(told[0].accepted.advice_id)


def without_progress(told: list[pb.AdviseEvent]) -> list[pb.AdviseEvent]:
    return [event for event in told if event.WhichOneof("event") != "progress"]


def test_same_name_is_the_same_campaign(data: Path, socket: Path) -> None:
    async def test(it: Served) -> None:
        message = request_message(named("job-1"))
        first, second = await asyncio.gather(
            told_by(it.stub.Advise(message)), told_by(it.stub.Advise(message))
        )
        assert without_progress(first) == without_progress(second)
        trials = len(it.host.specs)
        # Long after its end too.
        assert await told_by(it.stub.Advise(message)) == without_progress(first)
        assert len(it.host.specs) == trials

    served(test, data, socket)


def test_name_of_another_request_is_refused(data: Path, socket: Path) -> None:
    async def test(it: Served) -> None:
        await it.events(request_message(named("job-1")))
        other = replace(request(steps=30_000), request_id="job-1")
        code, error, _ = await failure(it.events(request_message(other)))
        assert (code, type(error)) == (grpc.StatusCode.ALREADY_EXISTS, AlreadyExists)
        assert "job-1" in str(error)

    served(test, data, socket)


def test_same_question_in_flight_is_one_campaign(data: Path, socket: Path) -> None:
    async def together(it: Served, messages: list[pb.AdviseRequest]) -> list[list[pb.AdviseEvent]]:
        """Returns what all calls were told; the campaign goes on once each has been answered."""
        go_on = asyncio.Event()

        async def play(spec: records.TrialSpec) -> records.Trial:
            await go_on.wait()
            return recorded(spec)

        it.host.play = play
        calls: list[Any] = [it.stub.Advise(message) for message in messages]
        first = [await call.read() for call in calls]
        go_on.set()
        rest = await asyncio.gather(*(rest_of(call) for call in calls))
        return [[event, *more] for event, more in zip(first, rest, strict=True)]

    async def test(it: Served) -> None:
        message = request_message(named())
        told = await together(it, [message] * 20)
        assert len({name_of(each) for each in told}) == 1
        assert all(without_progress(each) == without_progress(told[0]) for each in told)
        stored, _ = it.store.trials()
        assert len(stored) == len({one.trial.trial_id for one in stored}) == len(it.host.specs)
        # Under names of their own too, which then stand for it.
        names = [request_message(named(f"job-{number}")) for number in range(5)]
        again = await together(it, names)
        assert len({name_of(each) for each in again}) == 1
        assert name_of(await told_by(it.stub.Advise(names[3]))) == name_of(again[0])
        # The next one is a question of its own again.
        it.host.play = None
        assert name_of(await told_by(it.stub.Advise(message))) != name_of(told[0])

    served(test, data, socket)


def test_campaign_goes_on_without_its_caller_and_is_joined_again(data: Path, socket: Path) -> None:
    async def test(it: Served) -> None:
        go_on = asyncio.Event()

        async def play(spec: records.TrialSpec) -> records.Trial:
            if spec.kind is not records.TrialKind.EAGER:
                await go_on.wait()
            return recorded(spec)

        it.host.play = play
        call: Any = it.stub.Advise(request_message(named()))
        told = []
        async for event in call:
            told.append(event)
            if event.WhichOneof("event") == "trial_finished":
                break
        call.cancel()
        await asyncio.sleep(0.2)
        assert it.host.alive == 1
        advice_id = name_of(told)
        code, error, _ = await failure(it.stub.GetAdvice(pb.GetAdviceRequest(advice_id=advice_id)))
        assert (code, type(error)) == (grpc.StatusCode.FAILED_PRECONDITION, NotFinished)
        assert "running" in str(error)
        asked = pb.WatchAdviceRequest(advice_id=advice_id, after_seq=told[-1].seq)
        rest = asyncio.ensure_future(told_by(it.stub.WatchAdvice(asked)))
        await asyncio.sleep(0.1)
        go_on.set()
        whole = without_progress(told + await rest)
        assert [event.seq for event in whole] == list(range(1, len(whole) + 1))
        assert isinstance(event_record(whole[-1]), records.Advice)
        again = await told_by(it.stub.WatchAdvice(pb.WatchAdviceRequest(advice_id=advice_id)))
        assert again == whole

    served(test, data, socket)


def test_cancelled_campaign_ends_with_every_process(data: Path, socket: Path) -> None:
    async def test(it: Served) -> None:
        it.host.play = it.host.hang
        call: Any = it.stub.Advise(request_message(named()))
        reader = asyncio.ensure_future(failure(told_by(call)))
        await until(lambda: len(it.host.specs) == 2)
        (row,) = JobStore(it.store).live()
        asked = pb.CancelAdviceRequest(advice_id=row.advice_id)
        assert (await it.stub.CancelAdvice(asked)).state == "cancelled"
        assert it.host.alive == 0 and it.campaign_folders() == []
        code, error, _ = await reader
        assert (code, type(error)) == (grpc.StatusCode.CANCELLED, Interrupted)
        # Said again, and of what does not exist.
        assert (await it.stub.CancelAdvice(asked)).state == "cancelled"
        code, error, _ = await failure(
            it.stub.GetAdvice(pb.GetAdviceRequest(advice_id=row.advice_id))
        )
        assert "cancelled" in str(error)
        code, error, _ = await failure(
            it.stub.CancelAdvice(pb.CancelAdviceRequest(advice_id="none"))
        )
        assert (code, type(error)) == (grpc.StatusCode.NOT_FOUND, NotFoundError)
        code, error, _ = await failure(
            told_by(it.stub.WatchAdvice(pb.WatchAdviceRequest(advice_id="none")))
        )
        assert (code, type(error)) == (grpc.StatusCode.NOT_FOUND, NotFoundError)

    served(test, data, socket)


def test_one_who_leaves_does_not_end_it_for_others(data: Path, socket: Path) -> None:
    async def test(it: Served) -> None:
        it.host.play = it.host.hang
        message = request_message(named(on_disconnect=OnDisconnect.CANCEL))
        calls: list[Any] = [it.stub.Advise(message) for _ in range(2)]
        readers = [asyncio.ensure_future(told_by(call)) for call in calls]
        await until(lambda: len(it.host.specs) == 2)
        calls[0].cancel()
        await asyncio.sleep(0.2)
        assert it.host.alive == 1
        calls[1].cancel()
        await until(lambda: it.host.alive == 0)
        await asyncio.gather(*readers, return_exceptions=True)
        assert JobStore(it.store).live() == []

    served(test, data, socket)


def test_too_many_campaigns_are_refused_with_a_time_to_ask_again(
    data: Path, socket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "MOST_LIVE", 2)

    async def test(it: Served) -> None:
        it.host.play = it.host.hang
        calls: list[Any] = [it.stub.Advise(request_message(request(1e6 + n))) for n in range(2)]
        readers = [asyncio.ensure_future(told_by(call)) for call in calls]
        await until(lambda: len(JobStore(it.store).live()) == 2)
        code, error, status = await failure(it.events(request_message(request(2e6))))
        assert (code, type(error)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, Overloaded)
        delay = error_details_pb2.RetryInfo()
        assert any(
            detail.Is(delay.DESCRIPTOR) and detail.Unpack(delay) for detail in status.details
        )
        assert delay.retry_delay.ToMilliseconds() > 0
        for call in calls:
            call.cancel()
        await asyncio.gather(*readers, return_exceptions=True)

    served(test, data, socket)


def killed_server(data: Path, socket: Path, asked: AdviceRequest | None) -> str:
    """Has a server accept a campaign, or take it up, and kills it amid its second trial."""
    with subprocess.Popen([sys.executable, "-P", str(SERVED), str(data), str(socket)]) as process:
        try:

            async def reach() -> str:
                async with (
                    asyncio.timeout(60),
                    grpc.aio.insecure_channel(f"unix:{socket}") as channel,
                ):
                    await channel.channel_ready()
                    stub: Any = advisor_pb2_grpc.AdvisorStub(channel)
                    with Store(data) as store:
                        if asked is not None:
                            call = stub.Advise(request_message(asked))
                            await call.read()
                        while not _in_second_trial(store):
                            await asyncio.sleep(0.02)
                        return JobStore(store).live()[0].advice_id

            return asyncio.run(reach())
        finally:
            process.kill()


def _in_second_trial(store: Store) -> bool:
    rows = JobStore(store).live()
    if not rows or rows[0].state is not State.RUNNING:
        return False
    events = [told.event for told in JobStore(store).events(rows[0].advice_id)]
    started = [event for event in events if isinstance(event, TrialStarted)]
    return len(started) > max(1, rows[0].attempt) and isinstance(events[-1], TrialStarted)


@pytest.mark.fault
def test_killed_server_goes_on_where_the_campaign_was(data: Path, socket: Path) -> None:
    advice_id = killed_server(data, socket, named("job-1"))

    async def test(it: Served) -> None:
        await it.jobs.take_up(adopts=True)
        told = await told_by(it.stub.Advise(request_message(named("job-1"))))
        assert name_of(told) == advice_id
        kept = without_progress(told)
        assert [event.seq for event in kept] == list(range(1, len(kept) + 1))
        assert isinstance(event_record(told[-1]), records.Advice)
        # What had ended is not run again, and counts once.
        assert it.host.specs[0].kind is not records.TrialKind.EAGER
        stored, _ = it.store.trials(advice_id=advice_id)
        kinds = [one.trial.kind for one in stored]
        assert kinds.count(records.TrialKind.EAGER) == 1
        assert len({one.trial.trial_id for one in stored}) == len(stored)
        assert it.campaign_folders() == []

    served(test, data, socket)


@pytest.mark.fault
def test_campaign_that_kills_its_server_each_time_is_given_up(data: Path, socket: Path) -> None:
    killed_server(data, socket, named("job-1"))
    for _ in range(MOST_ATTEMPTS - 1):
        killed_server(data, socket, None)

    async def test(it: Served) -> None:
        await it.jobs.take_up(adopts=True)
        code, error, _ = await failure(told_by(it.stub.Advise(request_message(named("job-1")))))
        assert (code, type(error)) == (grpc.StatusCode.FAILED_PRECONDITION, HostError)
        assert f"died {MOST_ATTEMPTS} times" in str(error)
        assert it.campaign_folders() == []

    served(test, data, socket)


@pytest.mark.fault
def test_campaign_that_nobody_was_to_go_on_with_is_cancelled(data: Path, socket: Path) -> None:
    advice_id = killed_server(data, socket, named("job-1", on_disconnect=OnDisconnect.CANCEL))

    async def test(it: Served) -> None:
        # A private server, which lives for its own client only, settles that too.
        await it.jobs.take_up(adopts=False)
        assert JobStore(it.store).find(advice_id).state is State.CANCELLED
        assert it.campaign_folders() == [] and it.host.specs == []

    served(test, data, socket)


def test_ended_server_leaves_campaigns_to_the_next_without_counting(
    data: Path, socket: Path
) -> None:
    async def first(it: Served) -> None:
        it.host.play = it.host.hang
        call: Any = it.stub.Advise(request_message(named("job-1")))
        reader = asyncio.ensure_future(failure(told_by(call)))
        await until(lambda: len(it.host.specs) == 2)
        await it.jobs.close()
        code, _, _ = await reader
        assert code is grpc.StatusCode.UNAVAILABLE

    served(first, data, socket)
    with Store(data) as store:
        (row,) = JobStore(store).live()
        assert (row.state, row.attempt, row.owner) == (State.WAITING, 0, "")

    async def second(it: Served) -> None:
        await it.jobs.take_up(adopts=True)
        told = await told_by(it.stub.Advise(request_message(named("job-1"))))
        assert isinstance(event_record(told[-1]), records.Advice)

    served(second, data, socket)


def test_living_server_keeps_its_campaigns(data: Path, socket: Path) -> None:
    async def test(it: Served) -> None:
        it.host.play = it.host.hang
        call: Any = it.stub.Advise(request_message(named()))
        reader = asyncio.ensure_future(told_by(call))
        await until(lambda: len(it.host.specs) == 2)
        with Store(data) as store:
            other = jobs.Jobs(store, data, it.host.start)
            await other.take_up(adopts=True)
            await other.close()
        assert it.host.alive == 1 and len(it.campaign_folders()) == 1
        call.cancel()
        await asyncio.gather(reader, return_exceptions=True)

    served(test, data, socket)


def row_in(store: Store) -> Row:
    row = Row(advice_id="a1", request=named(), state=State.WAITING, owner="one")
    JobStore(store).accept(row, Accepted(advice_id="a1"))
    return row


def test_what_an_earlier_attempt_still_says_is_refused(data: Path) -> None:
    with Store(data) as store:
        rows = JobStore(store)
        stale = rows.begin(row_in(store))
        rows.begin(rows.claim(stale, "two"))
        event = TrialStarted(trial_id="a1-1", kind=records.TrialKind.EAGER, number=1)
        with pytest.raises(StoreError, match="not this server's any more"):
            rows.tell(stale, Told(seq=2, elapsed_s=1.0, event=event))
        with pytest.raises(StoreError):
            rows.fail(stale, HostError("gone"))
        assert [told.seq for told in rows.events("a1")] == [1]
        assert trials_of(rows.events("a1")) == []


def test_failure_is_raised_again_as_it_was(data: Path) -> None:
    with Store(data) as store:
        rows = JobStore(store)
        row = rows.begin(row_in(store))
        rows.fail(row, HostError("no trial could run", "why", "mend"))
        found = rows.find("a1")
        assert found.state is State.FAILED and found.ended is not None
        error = found.ended.error()
        assert (type(error), str(error)) == (HostError, "no trial could run: why (mend)")
        # Of an error of ours nothing is kept but that it was one.
        assert rows.live() == []


def test_what_is_old_is_forgotten_and_what_lives_is_not(
    data: Path, socket: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def test(it: Served) -> None:
        await it.events(request_message(named("job-1")))

    served(test, data, socket)
    with Store(data) as store:
        living = row_in(store)
        rows = JobStore(store)
        assert main(["gc"]) == 0
        assert "Deleted 0 advices, 0 trials" in capsys.readouterr().out
        gone = rows.forget("9999-01-01T00:00:00+00:00")
        assert gone.advices == 1 and gone.campaigns == 1 and gone.trials >= 2
        assert store.trials() == ([], None) and store.advices() == ([], None)
        assert rows.find(living.advice_id).live and rows.events(living.advice_id)
    for wrong in ("soon", "9" * 30 + "d"):
        assert main(["gc", "--older-than", wrong]) == 2
        assert "--older-than" in capsys.readouterr().err


def test_slow_listener_misses_progress_only(data: Path) -> None:
    async def test(store: Store) -> None:
        rows = JobStore(store)
        row = rows.begin(row_in(store))
        job = Job(rows, row, rows.events("a1"))
        watch = job.watch()
        for _ in range(1000):
            job.progress(records.Progress(trial_id="a1-1", phase=records.Phase.COLD))
        await job.tell(TrialStarted(trial_id="a1-1", kind=records.TrialKind.EAGER, number=1))
        job.end(None)
        got = []
        while (told := await watch.next()) is not None:
            got.append(told)
        kept = [told for told in got if not isinstance(told.event, records.Progress)]
        assert [told.seq for told in kept] == [1, 2]
        assert 0 < len(got) - len(kept) < 300

    with Store(data) as store:
        asyncio.run(test(store))


@pytest.mark.fault
def test_client_comes_back_to_a_server_that_starts_again(data: Path, tmp_path: Path) -> None:
    """The server is killed amid a campaign; the client sees one campaign, without a gap."""
    with sockets.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])

    def serve(*more: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-P", str(SERVED), str(data), port, *more])

    first = serve()
    second: subprocess.Popen[bytes] | None = None
    try:
        with waiting_client(f"127.0.0.1:{port}") as client:
            told: list[Any] = []
            for event in client.advise(request()):
                told.append(event)
                started = [each for each in told if isinstance(each, TrialStarted)]
                if second is None and len(started) == 2:
                    first.kill()
                    first.wait()
                    second = serve("--ends")
        assert isinstance(told[-1], records.Advice)
        assert sum(isinstance(event, Accepted) for event in told) == 1
        trials = [event.trial_id for event in told if isinstance(event, records.Trial)]
        assert len(trials) == len(set(trials)) >= 2
    finally:
        for process in (first, second):
            if process is not None:
                process.kill()
                process.wait()


def waiting_client(address: str) -> Client:
    """Returns a client of a server that is there, or starts."""
    with grpc.insecure_channel(address) as channel:
        grpc.channel_ready_future(channel).result(timeout=60)
    return Client(address)


def test_iterator_that_is_closed_ends_the_campaign(data: Path) -> None:
    def ask(address: str) -> None:
        with Client(address) as client:
            events = client.advise(request())
            for event in events:
                if isinstance(event, TrialStarted) and event.number == 2:
                    break
            events.close()

    async def test() -> None:
        async with Served(data, None) as it:
            it.host.play = it.host.hang
            await asyncio.to_thread(ask, it.address)
            assert it.host.alive == 0
            assert JobStore(it.store).live() == []

    asyncio.run(test())
