"""Where a server listens: a Unix socket, a loopback address, or further where it is secured."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from advisor.profiler.errors import PlanError

# The kernel's limit for the path of a Unix socket.
LONGEST_SOCKET_PATH = 107


@dataclass(frozen=True, slots=True)
class Secured:
    """TLS for a port. `asks`: callers have to say who they are."""

    credentials: Any
    asks: bool

    @classmethod
    def by(cls, cert: Path, key: Path, client_ca: Path | None, *, asks: bool) -> Secured:
        """Returns TLS by a certificate and its key; with `client_ca` clients show one of its.

        Raises `PlanError` for a file that cannot be read.
        """
        credentials = grpc.ssl_server_credentials(
            [(_bytes(key, "--tls-key"), _bytes(cert, "--tls-cert"))],
            root_certificates=_bytes(client_ca, "--client-ca") if client_ca else None,
            require_client_auth=client_ca is not None,
        )
        return cls(credentials, asks)


def _bytes(path: Path, option: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise PlanError(f"{option} {path} cannot be read", error.strerror or "") from error


@contextlib.contextmanager
def bound(server: grpc.aio.Server, address: str, secured: Secured | None = None) -> Iterator[None]:
    """Binds a server to `unix:PATH` or HOST:PORT, and holds the socket's lock.

    Beyond the loopback address only where it is `secured`. Raises `PlanError` for an address that
    cannot be, or is taken.
    """
    if not address.startswith("unix:"):
        _check_address(address, secured)
        _add_port(server, address, secured)
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
            _add_port(server, f"unix:{path.absolute()}", None)
        finally:
            os.umask(umask)
        yield


def _check_address(address: str, secured: Secured | None) -> None:
    """Raises `PlanError` for what is no address, or reaches further than the server is secured."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65_535:
        raise PlanError(f"{address!r} is not an address", mend="HOST:PORT or unix:PATH expected")
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        loopback = False
    if not (loopback or (secured is not None and secured.asks)):
        raise PlanError(
            f"{host} is not a loopback address",
            "whoever can connect runs code here",
            "use 127.0.0.1, [::1] or unix:PATH; or give --tls-cert and --tls-key, with --token-file"
            " or --client-ca",
        )


def _add_port(server: grpc.aio.Server, address: str, secured: Secured | None) -> None:
    try:
        if secured is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, secured.credentials)
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
