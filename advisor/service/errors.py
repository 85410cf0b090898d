"""Errors on the wire: one table from errors to status codes, and the way back for the client.

A status carries one sentence, an `ErrorInfo` with a stable reason, the fields of a request that
are not sound (`BadRequest`), and the person's own traceback (`DebugInfo.detail`); never one of
ours, never a path of the server, never SQL.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status  # type: ignore[import-untyped]

from advisor.profiler.errors import (
    AdvisorError,
    DamagedError,
    HostError,
    Interrupted,
    NotFoundError,
    PlanError,
    StoreError,
    WorkloadError,
)
from advisor.validate import InvalidRequest, Violation

DOMAIN = "compile-advisor"

# A status travels in trailing metadata, of which clients accept 8 KiB by default; the sentence
# travels twice, once percent-encoded.
_MOST_MESSAGE_BYTES = 800
_MOST_DETAIL_BYTES = 2500
_MOST_VIOLATION_BYTES = 150


class Undecodable(AdvisorError):
    """A request whose bytes are no message."""


class Overloaded(AdvisorError):
    """There is too much to do already; `retry_s` is when to ask again."""

    def __init__(self, what: str, why: str = "", mend: str = "", retry_s: float = 2.0) -> None:
        super().__init__(what, why, mend)
        self.retry_s = retry_s


class AlreadyExists(AdvisorError):
    """The name of a request stands for another one."""


class Unauthenticated(AdvisorError):
    """The caller has not said who they are, or not in a way that the server knows."""


class Denied(AdvisorError):
    """The server does not do that for this caller."""


class NotFinished(AdvisorError):
    """A campaign has no advice: not yet, or never."""


class ShuttingDown(AdvisorError):
    """The server takes no work any more."""


@dataclass(frozen=True, slots=True)
class _Row:
    error: type[AdvisorError]
    code: grpc.StatusCode
    reason: str


# From special to general: the first row that fits counts. What is not here is INTERNAL.
ROWS = (
    _Row(InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"),
    _Row(Undecodable, grpc.StatusCode.INVALID_ARGUMENT, "UNDECODABLE"),
    _Row(PlanError, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_PLAN"),
    _Row(AlreadyExists, grpc.StatusCode.ALREADY_EXISTS, "REQUEST_ID_TAKEN"),
    _Row(Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED"),
    _Row(Unauthenticated, grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED"),
    _Row(Denied, grpc.StatusCode.PERMISSION_DENIED, "DENIED"),
    _Row(NotFinished, grpc.StatusCode.FAILED_PRECONDITION, "NOT_FINISHED"),
    _Row(WorkloadError, grpc.StatusCode.FAILED_PRECONDITION, "WORKLOAD_UNUSABLE"),
    _Row(HostError, grpc.StatusCode.FAILED_PRECONDITION, "NO_TRIAL_CAN_RUN"),
    _Row(DamagedError, grpc.StatusCode.DATA_LOSS, "DAMAGED"),
    _Row(NotFoundError, grpc.StatusCode.NOT_FOUND, "NOT_FOUND"),
    _Row(StoreError, grpc.StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE"),
    _Row(ShuttingDown, grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN"),
    _Row(Interrupted, grpc.StatusCode.CANCELLED, "INTERRUPTED"),
)


def status_of(error: AdvisorError) -> status_pb2.Status | None:
    """Returns the status that tells `error` to a caller, or None when it is not for callers."""
    for row in ROWS:
        if isinstance(error, row.error):
            return _status(row.code, row.reason, str(error), *_details(error))
    return None


def internal_status(error_id: str) -> status_pb2.Status:
    """Returns the status of an error that is ours: its name in the server's log, nothing else."""
    return _status(
        grpc.StatusCode.INTERNAL,
        "INTERNAL",
        f"internal error {error_id}: the server's log says more under this name",
    )


def error_of(call: grpc.RpcError) -> AdvisorError | None:
    """Returns the error that a failed call tells of, or None when it is not one of this service.

    The client raises it as if it had happened at home.
    """
    status = rpc_status.from_call(call)
    if status is None:
        return None
    info = error_details_pb2.ErrorInfo()
    bad = error_details_pb2.BadRequest()
    debug = error_details_pb2.DebugInfo()
    for detail in status.details:
        for kind in (info, bad, debug):
            if detail.Is(kind.DESCRIPTOR):
                detail.Unpack(kind)
    if info.domain != DOMAIN:
        return None
    kinds = {row.reason: row.error for row in ROWS}
    kind = kinds.get(info.reason, AdvisorError)
    if kind is InvalidRequest:
        return InvalidRequest([Violation(it.field, it.description) for it in bad.field_violations])
    if kind is WorkloadError:
        return WorkloadError(status.message, user_traceback=debug.detail)
    return kind(status.message)


def reason_of(error: AdvisorError) -> str:
    """Returns the stable reason that a caller is told; "" for an error that is not for callers."""
    return next((row.reason for row in ROWS if isinstance(error, row.error)), "")


def error_for(
    reason: str, what: str, why: str, mend: str, user_traceback: str = ""
) -> AdvisorError:
    """Returns the error of a reason, as it was before it was stored."""
    kind = {row.reason: row.error for row in ROWS}.get(reason, AdvisorError)
    if kind is WorkloadError:
        return WorkloadError(what, why, mend, user_traceback)
    return kind(what, why, mend)


def _details(error: AdvisorError) -> list[Message]:
    if isinstance(error, InvalidRequest):
        return [_bad_request(error.violations)]
    if isinstance(error, Undecodable):
        return [_bad_request([Violation("request", error.what)])]
    if isinstance(error, Overloaded):
        delay = error_details_pb2.RetryInfo()
        delay.retry_delay.FromMilliseconds(round(error.retry_s * 1000))
        return [delay]
    if isinstance(error, WorkloadError) and error.user_traceback:
        text = _tail(error.user_traceback, _MOST_DETAIL_BYTES)
        return [error_details_pb2.DebugInfo(detail=text)]
    return []


def _bad_request(violations: Iterable[Violation]) -> Message:
    """Returns as many violations as a status has room for."""
    bad: Message = error_details_pb2.BadRequest()
    for violation in violations:
        more = error_details_pb2.BadRequest.FieldViolation(
            field=_head(violation.field, _MOST_VIOLATION_BYTES),
            description=_head(violation.why, _MOST_VIOLATION_BYTES),
        )
        if bad.ByteSize() + more.ByteSize() > _MOST_DETAIL_BYTES:
            break
        bad.field_violations.append(more)  # type: ignore[attr-defined]
    return bad


def _status(
    code: grpc.StatusCode, reason: str, message: str, *details: Message
) -> status_pb2.Status:
    status = status_pb2.Status(code=code.value[0], message=_head(message, _MOST_MESSAGE_BYTES))
    for detail in (error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN), *details):
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def _head(text: str, most: int) -> str:
    """Returns the first `most` bytes of `text`."""
    data = text.encode("utf-8", "backslashreplace")
    return data.decode() if len(data) <= most else data[:most].decode(errors="ignore") + " ..."


def _tail(text: str, most: int) -> str:
    """Returns the last `most` bytes of `text`: the end of a traceback names the error."""
    data = text.encode("utf-8", "backslashreplace")
    return data.decode() if len(data) <= most else "... " + data[-most:].decode(errors="ignore")
