"""Length-capped JSON frames between trial, trial host and whoever asked for the trial.

A frame is four bytes of big-endian length and that many bytes of UTF-8 JSON. Both ends know the
closed set of messages; anything else on the wire is an error of the sender, never a guess of ours.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from advisor.profiler.errors import HostError
from advisor.profiler.records import Phase, Progress, Trial, TrialSpec

MOST_FRAME_BYTES = 1 << 20
_HEADER = struct.Struct(">I")


class PhaseBegun(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The trial entered a phase: its deadline starts now."""

    phase: Phase


class Reported(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The trial tells what it is doing."""

    progress: Progress


class Result(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The trial ended well enough to say so itself.

    One that is not `final` holds all measurements; what is still looked for is only their causes,
    and it stands if that does not end well.
    """

    trial: Trial
    final: bool = True


class Unusable(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The person's workload cannot be used (`errors.WorkloadError`, or `PlanError`)."""

    what: str
    why: str = ""
    mend: str = ""
    user_traceback: str = ""
    # True when an option was wrong rather than the workload.
    plan: bool = False


FromTrial = PhaseBegun | Reported | Result | Unusable


class Hello(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A rank has come up: the first that it says to its trial's leader."""

    rank: int
    pid: int


class Compiling(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The compiler begins or ends on a rank, during which it may be silent for long."""

    begins: bool


FromRank = FromTrial | Hello | Compiling


class EndReason(msgspec.Struct, frozen=True, kw_only=True):
    """Why the host ended a trial: `kind` is deadline, cut_off, memory, output or cancelled."""

    kind: str
    message: str


CANCELLED = EndReason(kind="cancelled", message="the trial was cancelled")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How the trial's process ended, in the host's eyes."""

    code: int | None = None
    signal: int | None = None
    ended: EndReason | None = None
    phase: Phase = Phase.IMPORT
    wall_s: float = 0.0
    peak_bytes: int = 0
    # Protocol error on the result pipe, if any.
    junk: str = ""
    stdout_tail: str = ""
    stderr_tail: str = ""


class Ready(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The host has imported torch and waits for trials."""

    pid: int


class Started(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A trial's process runs."""

    trial_id: str
    pid: int


class Ended(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A trial and every process it left are gone."""

    trial_id: str
    exit: Exit
    trial: Trial | None = None
    unusable: Unusable | None = None


class Refused(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The host cannot run trials, and why."""

    message: str


FromHost = Ready | Started | Reported | Ended | Refused


class Run(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Run this trial."""

    spec: TrialSpec


class End(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """End the running trial now; without a reason it was cancelled."""

    trial_id: str
    reason: EndReason | None = None


ToHost = Run | End

M = TypeVar("M")


def pack(message: object) -> bytes:
    """Returns a message as one frame. Raises `HostError` when it is longer than the cap."""
    body = msgspec.json.encode(message)
    if len(body) > MOST_FRAME_BYTES:
        raise HostError(
            f"a message of {len(body)} bytes is longer than the cap of {MOST_FRAME_BYTES}"
        )
    return _HEADER.pack(len(body)) + body


class Unpacker:
    """Collects bytes and hands out whole messages of one closed set."""

    def __init__(self, kinds: object) -> None:
        self._decoder: msgspec.json.Decoder[object] = msgspec.json.Decoder(kinds)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[object]:
        """Returns the messages that are complete now.

        Raises `HostError` for a frame over the cap and for anything that is not a known message.
        """
        self._buffer += data
        messages = []
        while len(self._buffer) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._buffer)
            if length > MOST_FRAME_BYTES:
                raise HostError(f"a frame announces {length} bytes, more than {MOST_FRAME_BYTES}")
            end = _HEADER.size + length
            if len(self._buffer) < end:
                break
            body = bytes(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            try:
                messages.append(self._decoder.decode(body))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise HostError("a frame is not a known message", str(error)) from error
        return messages
