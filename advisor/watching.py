"""Watches a campaign to its end, through lost connections and servers that start again."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import grpc

from advisor.convert import event_record, request_message
from advisor.events import Accepted, Event
from advisor.request import AdviceRequest, OnDisconnect
from advisor.service.errors import ShuttingDown, error_of
from advisor.v1 import advisor_pb2 as pb
from advisor.v1 import advisor_pb2_grpc

# How often in a row it is tried to come back, and how long is waited before each: 1 s, 2 s, ...
# Longer than a server takes to start again.
_ATTEMPTS, _PAUSE_S = 6, 1.0
_CANCEL_S = 30.0


def watched(
    stub: advisor_pb2_grpc.AdvisorStub, request: AdviceRequest, *, private: bool
) -> Generator[Event, None, None]:
    """Yields the events of a request's campaign; the last one is the `Advice`.

    Closing the iterator ends the campaign. One on a private server ends with its client in any
    case; one on another goes on without this client until it is back. Raises `grpc.RpcError`.
    """
    policy = OnDisconnect.CANCEL if private else OnDisconnect.CONTINUE
    asked = replace(
        request, request_id=request.request_id or uuid.uuid4().hex, on_disconnect=policy
    )
    advice_id, seq, failed = "", 0, 0
    ends = False
    call = stub.Advise(request_message(asked))
    try:
        while not ends:
            try:
                for message in call:
                    seq, failed = max(seq, message.seq), 0
                    event = event_record(message)
                    if isinstance(event, Accepted):
                        advice_id = event.advice_id
                    if event is not None:
                        yield event
                ends = True
            except grpc.RpcError as error:
                failed += 1
                if private or not _may_come_back(error) or failed > _ATTEMPTS:
                    ends = True
                    raise
                time.sleep(failed * _PAUSE_S)
                call = _again(stub, asked, advice_id, seq)
    finally:
        call.cancel()
        if not (ends or private) and advice_id:
            with contextlib.suppress(grpc.RpcError):
                stub.CancelAdvice(pb.CancelAdviceRequest(advice_id=advice_id), timeout=_CANCEL_S)


def _may_come_back(error: grpc.RpcError) -> bool:
    """Returns whether the server is gone, perhaps for a moment: nothing that it says by itself."""
    said = error_of(error)
    return error.code() is grpc.StatusCode.UNAVAILABLE and (
        said is None or isinstance(said, ShuttingDown)
    )


def _again(
    stub: advisor_pb2_grpc.AdvisorStub, asked: AdviceRequest, advice_id: str, seq: int
) -> Any:
    """Returns the call that goes on after an event; the request again where none has come yet."""
    if not advice_id:
        return stub.Advise(request_message(asked))
    return stub.WatchAdvice(pb.WatchAdviceRequest(advice_id=advice_id, after_seq=seq))
