"""The gRPC server. Command lines:

    python -P -m advisor.service.server --private --unix PATH
        What `advise run` starts: ends when its stdin reaches end of file (its client died).
        PATH appears once calls are accepted.
    python -P -m advisor.service.server --unix PATH
    python -P -m advisor.service.server --listen HOST:PORT
        What `advise serve` runs, through `serve(address)`: until SIGTERM or SIGINT.

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
import fcntl
import ipaddress
import logging
import signal
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_health.v1.health import SERVICE_NAME as HEALTH  # type: ignore[import-untyped]
from grpc_health.v1.health import aio as aio_health
from grpc_reflection.v1alpha import reflection  # type: ignore[import-untyped]

from advisor.places import data_folder
from advisor.profiler.errors import AdvisorError, PlanError, StoreError
from advisor.service.admission import Admission
from advisor.service.estimator import Estimator
from advisor.service.interceptor import ErrorsInterceptor
from advisor.service.jobs import Jobs
from advisor.service.log import log_to_stderr
from advisor.service.servicer import AdvisorServicer
from advisor.service.store import Store
from advisor.v1 import advisor_pb2 as pb
from advisor.v1 import advisor_pb2_grpc

log = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["Advisor"].full_name
# The kernel's limit for the path of a Unix socket.
LONGEST_SOCKET_PATH = 107
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


@contextlib.contextmanager
def bound(server: grpc.aio.Server, address: str) -> Iterator[None]:
    """Binds a server to `unix:PATH` or a loopback HOST:PORT, and holds the socket's lock.

    Raises `PlanError` for an address that cannot be, or is taken.
    """
    if not address.startswith("unix:"):
        _refuse_beyond_loopback(address)
        _add_port(server, address)
        yield
        return
    path = Path(address.removeprefix("unix:"))
    if len(os.fsencode(path.absolute())) > LONGEST_SOCKET_PATH:
        raise PlanError(
            f"the path of the socket has {len(os.fsencode(path.absolute()))} bytes",
            f"the system allows {LONGEST_SOCKET_PATH}",
            "choose a shorter one",
        )
    with _socket_lock(path):
        # Nobody else may connect: whoever can runs code as this user.
        umask = os.umask(0o077)
        try:
            _add_port(server, f"unix:{path.absolute()}")
        finally:
            os.umask(umask)
        yield


async def run(
    address: str,
    *,
    data: Path,
    until: asyncio.Event,
    admission: Admission,
    private: bool = False,
) -> None:
    """Serves on `address` until `until` is set, then ends campaigns and calls in order.

    Only a server that is not `private` goes on with what servers that died have left.
    """
    with Store(data) as store:
        estimator = Estimator(store)
        jobs = Jobs(store, data, estimator=estimator)
        health = aio_health.HealthServicer()
        server = await make_server(store, jobs, estimator, health, admission)
        with bound(server, address):
            await jobs.take_up(adopts=not private)
            await server.start()
            log.info("serving", extra={"address": address, "data": str(data)})
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
) -> grpc.aio.Server:
    """Returns a server with the service, health and reflection, bound to nothing yet.

    It runs whatever is named where no `admission` says otherwise.
    """
    admission = admission or Admission.everything(jobs.data)
    server = grpc.aio.server(interceptors=[ErrorsInterceptor()], options=OPTIONS)
    advisor_pb2_grpc.add_AdvisorServicer_to_server(
        AdvisorServicer(store, jobs, estimator, admission), server
    )
    await health.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    reflection.enable_server_reflection((SERVICE, HEALTH, reflection.SERVICE_NAME), server)
    return server


def serve(
    address: str,
    *,
    private: bool = False,
    roots: Sequence[Path] = (),
    modules: Sequence[str] = (),
) -> None:
    """Serves on `unix:PATH` or HOST:PORT until a signal; a private server also until stdin ends.

    It runs workloads below `roots` (none: below the folder it was started in) and of `modules`; a
    private one whatever its client names. Raises `PlanError` for the address or a folder,
    `StoreError` for the data folder. Must run in the main thread: trial hosts are children of the
    thread that starts them.
    """
    data = data_folder()
    admission = Admission.everything(data)
    if not private:
        admission = Admission.of(roots or (Path.cwd(),), modules, data)
    asyncio.run(_serve(address, data, private, admission))


async def _serve(address: str, data: Path, private: bool, admission: Admission) -> None:
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
        if private:
            stack.enter_context(_stdin_end(loop, until.set))
        await run(address, data=data, until=until, private=private, admission=admission)


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


def _refuse_beyond_loopback(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65_535:
        raise PlanError(f"{address!r} is not an address", mend="HOST:PORT or unix:PATH expected")
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise PlanError(
            f"{host} is not a loopback address",
            "whoever can connect runs code here, and there is no access control yet",
            "use 127.0.0.1, [::1] or unix:PATH",
        )


def _add_port(server: grpc.aio.Server, address: str) -> None:
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise PlanError(f"cannot listen on {address}", "it is in use, or not ours") from error
    if port == 0:
        raise PlanError(f"cannot listen on {address}", "it is in use, or not ours")


@contextlib.contextmanager
def _socket_lock(path: Path) -> Iterator[None]:
    """Holds the lock beside a socket: gRPC itself would silently take over a living one."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise PlanError(f"cannot listen on {path}", error.strerror or "") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PlanError(f"another server listens on {path}", mend="use that one") from None
        if path.exists() and not stat.S_ISSOCK(path.stat().st_mode):
            raise PlanError(f"cannot listen on {path}", "it is there and no socket")
        yield
    finally:
        os.close(lock)


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
        serve(options.listen or f"unix:{options.unix}", private=options.private)
    except (PlanError, StoreError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except AdvisorError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
