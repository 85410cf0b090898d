"""The gRPC server. Command lines:

    python -P -m advisor.service.server --private --unix PATH
        What `advise run` starts: ends when its stdin reaches end of file (its client died).
        PATH appears once calls are accepted.
    python -P -m advisor.service.server --unix PATH
    python -P -m advisor.service.server --listen HOST:PORT
        A server of the folder it is started in, until SIGTERM or SIGINT; `advise serve` has more
        to say, through `serve(settings)`.

It ends with 0; with 2 and one sentence on stderr when it cannot start.
"""

from __future__ import annotations

import os

# Before grpc is imported: with its fork handlers, 7 to 25 % of the children that a serving process
# starts crash before exec (grpc/grpc#43055, grpcio 1.81 to 1.85).
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_health.v1.health import SERVICE_NAME as HEALTH  # type: ignore[import-untyped]
from grpc_health.v1.health import aio as aio_health
from grpc_reflection.v1alpha import reflection  # type: ignore[import-untyped]

from advisor.places import data_folder
from advisor.profiler.errors import AdvisorError, PlanError, StoreError
from advisor.service.access import Access
from advisor.service.admission import Admission
from advisor.service.binding import Secured, bound
from advisor.service.estimator import Estimator
from advisor.service.interceptor import ErrorsInterceptor
from advisor.service.jobs import Jobs
from advisor.service.log import log_to_stderr
from advisor.service.metrics import Metrics
from advisor.service.servicer import AdvisorServicer
from advisor.service.store import Store
from advisor.v1 import advisor_pb2 as pb
from advisor.v1 import advisor_pb2_grpc

log = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["Advisor"].full_name
# For calls to end after their campaigns were ended.
_GRACE_S = 2.0

OPTIONS: tuple[tuple[str, int], ...] = (
    # Else a second server on the same port silently shares it.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", 1 << 20),
    ("grpc.max_send_message_length", 16 << 20),
    ("grpc.max_metadata_size", 8192),
    ("grpc.max_concurrent_streams", 256),
    # A frozen client is noticed after 15 s; without ping_timeout_ms it takes 70 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.max_connection_idle_ms", 300_000),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a server is started with.

    A `private` one ends when its stdin does, and does not go on with what servers that died have
    left. `secured` is TLS; None: none.
    """

    address: str
    admission: Admission
    access: Access = field(default_factory=Access)
    metrics: Metrics = field(default_factory=Metrics)
    secured: Secured | None = None
    private: bool = False


async def run(settings: Settings, *, data: Path, until: asyncio.Event) -> None:
    """Serves until `until` is set, then ends campaigns and calls in order."""
    with Store(data) as store:
        estimator = Estimator(store)
        jobs = Jobs(store, data, estimator=estimator, metrics=settings.metrics)
        health = aio_health.HealthServicer()
        server = await make_server(
            store,
            jobs,
            estimator,
            health,
            settings.admission,
            settings.access,
            settings.metrics,
        )
        with (
            bound(server, settings.address, settings.secured),
            settings.metrics.exported(lambda: jobs.live),
        ):
            await jobs.take_up(adopts=not settings.private)
            await server.start()
            log.info("serving", extra={"address": settings.address, "data": str(data)})
            try:
                await until.wait()
            finally:
                await health.enter_graceful_shutdown()
                await jobs.close()
                await server.stop(_GRACE_S)
                log.info("ended")


async def make_server(
    store: Store,
    jobs: Jobs,
    estimator: Estimator,
    health: aio_health.HealthServicer,
    admission: Admission | None = None,
    access: Access | None = None,
    metrics: Metrics | None = None,
) -> grpc.aio.Server:
    """Returns a server with the service, health and reflection, bound to nothing yet.

    It runs whatever is named, for whoever asks, where `admission` and `access` say nothing else.
    """
    admission = admission or Admission.everything(jobs.data)
    interceptor = ErrorsInterceptor(access or Access(), metrics)
    server = grpc.aio.server(interceptors=[interceptor], options=OPTIONS)
    advisor_pb2_grpc.add_AdvisorServicer_to_server(
        AdvisorServicer(store, jobs, estimator, admission), server
    )
    await health.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    reflection.enable_server_reflection((SERVICE, HEALTH, reflection.SERVICE_NAME), server)
    return server


def check_settings(settings: Settings, data: Path) -> None:
    """Raises what a server with these settings could not start for; it listens nowhere after."""

    async def bind() -> None:
        server = grpc.aio.server(options=OPTIONS)
        with (
            bound(server, settings.address, settings.secured),
            settings.metrics.exported(lambda: 0),
        ):
            pass

    with Store(data):
        asyncio.run(bind())


def serve(settings: Settings) -> None:
    """Serves until a signal; a private server also until stdin ends.

    Raises `PlanError` for the address, `StoreError` for the data folder. Must run in the main
    thread: trial hosts are children of the thread that starts them.
    """
    asyncio.run(_serve(settings, data_folder()))


async def _serve(settings: Settings, data: Path) -> None:
    loop = asyncio.get_running_loop()
    until = asyncio.Event()

    def end() -> None:
        if until.is_set():
            # The second signal: at once. Trial hosts end everything when their sockets close.
            os._exit(128 + signal.SIGTERM)
        until.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    with contextlib.ExitStack() as stack:
        if settings.private:
            stack.enter_context(_stdin_end(loop, until.set))
        await run(settings, data=data, until=until)


@contextlib.contextmanager
def _stdin_end(loop: asyncio.AbstractEventLoop, then: Callable[[], None]) -> Iterator[None]:
    """Calls `then` when stdin reaches its end."""

    def read() -> None:
        if not os.read(0, 4096):
            loop.remove_reader(0)
            then()

    try:
        loop.add_reader(0, read)
    except OSError as error:  # a file or /dev/null never tells of an end
        raise PlanError("--private needs a pipe as its standard input") from error
    try:
        yield
    finally:
        loop.remove_reader(0)


def main(arguments: list[str] | None = None) -> int:
    """Runs the server as the module's docstring says; returns the exit code."""
    parser = argparse.ArgumentParser(prog="advisor.service.server")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--unix", metavar="PATH", help="serve on a Unix socket")
    where.add_argument("--listen", metavar="HOST:PORT", help="serve on a loopback address")
    parser.add_argument("--private", action="store_true", help="end when stdin ends")
    options = parser.parse_args(arguments)
    # A private server tells its client what happened; its log is for what went wrong in itself.
    log_to_stderr(logging.WARNING if options.private else logging.INFO)
    try:
        data = data_folder()
        admission = Admission.everything(data)
        if not options.private:
            admission = Admission.of((Path.cwd(),), (), data)
        address = options.listen or f"unix:{options.unix}"
        serve(Settings(address=address, admission=admission, private=options.private))
    except (PlanError, StoreError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except AdvisorError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
