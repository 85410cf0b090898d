"""Channels to an advisor: plain on this machine, TLS beyond it, and who calls.

What proves who calls never stands in a command line. Environment variables name files:
ADVISOR_CA_FILE (whom to trust; without it the system's), ADVISOR_CLIENT_CERT and its
ADVISOR_CLIENT_KEY, ADVISOR_TOKEN_FILE; or ADVISOR_TOKEN holds the token itself.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc

from advisor.profiler.errors import PlanError

_FIELDS = ("method", "timeout", "credentials", "wait_for_ready", "compression")


def opened(address: str, options: Sequence[tuple[str, Any]]) -> grpc.Channel:
    """Returns a channel to HOST:PORT or `unix:PATH`.

    TLS wherever a CA file is named, and beyond the loopback address. Raises `PlanError` for a file
    that cannot be read.
    """
    ca = _file("ADVISOR_CA_FILE")
    if ca is None and _local(address):
        channel = grpc.insecure_channel(address, options)
    else:
        key, cert = _file("ADVISOR_CLIENT_KEY"), _file("ADVISOR_CLIENT_CERT")
        channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(ca, key, cert), options)
    token = os.environ.get("ADVISOR_TOKEN") or (_file("ADVISOR_TOKEN_FILE") or b"").decode().strip()
    return grpc.intercept_channel(channel, _Bearer(token)) if token else channel


def _local(address: str) -> bool:
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _file(variable: str) -> bytes | None:
    """Returns what is in the file that a variable names; None where it names none."""
    name = os.environ.get(variable)
    if not name:
        return None
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise PlanError(f"{variable}={name} cannot be read", error.strerror or "") from error


class _Details(grpc.ClientCallDetails):
    """A call as gRPC describes it, with other metadata."""

    def __init__(self, known: Any, metadata: Sequence[tuple[str, str | bytes]]) -> None:
        for name in _FIELDS:
            setattr(self, name, getattr(known, name, None))
        self.metadata = tuple(metadata)


class _Bearer(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
):
    """Shows a token with each call."""

    def __init__(self, token: str) -> None:
        self._shown = ("authorization", f"Bearer {token}")

    def intercept_unary_unary(self, call: Callable[..., Any], details: Any, request: Any) -> Any:
        """Calls with the token."""
        return call(self._with_token(details), request)

    def intercept_unary_stream(self, call: Callable[..., Any], details: Any, request: Any) -> Any:
        """Calls with the token."""
        return call(self._with_token(details), request)

    def intercept_stream_unary(self, call: Callable[..., Any], details: Any, requests: Any) -> Any:
        """Calls with the token."""
        return call(self._with_token(details), requests)

    def _with_token(self, details: Any) -> _Details:
        return _Details(details, (*(details.metadata or ()), self._shown))
