"""The one server interceptor: requests are decoded safely, every error becomes a status.

Without it grpc.aio answers undecodable bytes and any exception with UNKNOWN and the exception's
own text, which may hold a path or worse.
"""

from __future__ import annotations

import functools
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import grpc
import grpc.aio
from grpc_status import rpc_status  # type: ignore[import-untyped]

from advisor.profiler.errors import AdvisorError
from advisor.service.access import CALLER, Access
from advisor.service.errors import Undecodable, internal_status, status_of
from advisor.service.metrics import Metrics

log = logging.getLogger(__name__)

_SERVICE = "/compile_advisor.v1.Advisor/"
_UNDECODABLE = object()
_NO_MESSAGE = "the request's bytes are not a message of this method"


# Quoted: generic in the stubs only.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class ErrorsInterceptor(grpc.aio.ServerInterceptor):
    """Asks who calls, decodes safely and maps errors, for this service's methods.

    Health and reflection pass.
    """

    def __init__(self, access: Access, metrics: Metrics | None = None) -> None:
        self._access = access
        self._metrics = metrics or Metrics()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Returns the handler of a call, wrapped; None for a method that there is not."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(_SERVICE):
            return handler
        wrap: Callable[..., Handler] = grpc.unary_unary_rpc_method_handler
        inner: Any = handler.unary_unary
        if handler.response_streaming:
            wrap, inner = grpc.unary_stream_rpc_method_handler, handler.unary_stream
        elif handler.request_streaming:
            wrap, inner = grpc.stream_unary_rpc_method_handler, handler.stream_unary
        return wrap(
            functools.partial(self._call, inner, method.removeprefix(_SERVICE)),
            request_deserializer=functools.partial(_decode, handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )

    async def _call(
        self,
        inner: Callable[[Any, Any], Awaitable[Any]],
        method: str,
        request: Any,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> Any:
        began, code = time.monotonic(), grpc.StatusCode.CANCELLED.name
        try:
            answer = await _answer(inner, method, request, context, self._access)
            code = grpc.StatusCode.OK.name
        except _Refused as error:
            code = _CODES.get(error.status.code, code)
            return await context.abort_with_status(rpc_status.to_status(error.status))
        finally:
            self._metrics.called(method, code, time.monotonic() - began)
        return answer


class _Refused(Exception):
    """A call is answered with a status."""

    def __init__(self, status: Any) -> None:
        super().__init__(status)
        self.status = status


_CODES = {code.value[0]: code.name for code in grpc.StatusCode}


def _decode(deserializer: Any, data: bytes) -> Any:
    try:
        return deserializer(data)
    except Exception:  # noqa: BLE001 - whatever a decoder raises, the bytes are no message
        return _UNDECODABLE


async def _decoded(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        if request is _UNDECODABLE:
            raise Undecodable(_NO_MESSAGE)
        yield request


async def _answer(
    inner: Callable[[Any, Any], Awaitable[Any]],
    method: str,
    request: Any,
    context: grpc.aio.ServicerContext[Any, Any],
    access: Access,
) -> Any:
    try:
        CALLER.set(access.check(method, context).name)
        if hasattr(request, "__aiter__"):
            request = _decoded(request)
        elif request is _UNDECODABLE:
            raise Undecodable(_NO_MESSAGE)
        return await inner(request, context)
    except grpc.aio.AbortError:
        raise
    except AdvisorError as error:
        raise _Refused(status_of(error) or _internal(method, error)) from error
    except Exception as error:
        raise _Refused(_internal(method, error)) from error


def _internal(method: str, error: Exception) -> Any:
    """Returns the status of an error that is ours; the error goes to the log, under a name."""
    error_id = secrets.token_hex(6)
    log.error("internal error %s in %s", error_id, method, exc_info=error)
    return internal_status(error_id)
