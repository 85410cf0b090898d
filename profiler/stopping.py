"""When a trial is to stop before its end: a deadline for all of it, or somebody who cancels it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from advisor.profiler.frames import CANCELLED, EndReason

# An event that is set, or a function that says so.
Cancelled = threading.Event | Callable[[], bool]


class Limits:
    """The deadline of a trial as a whole, and who may cancel it."""

    def __init__(self, deadline_s: float | None, cancelled: Cancelled | None) -> None:
        self.deadline_s = deadline_s
        self._until = None if deadline_s is None else time.monotonic() + deadline_s
        self._asked = cancelled.is_set if isinstance(cancelled, threading.Event) else cancelled

    @property
    def left_s(self) -> float | None:
        """Seconds until the deadline; None without one."""
        return None if self._until is None else max(0.0, self._until - time.monotonic())

    @property
    def can_be_cancelled(self) -> bool:
        """Whether anybody has to be asked."""
        return self._asked is not None

    def reason(self) -> EndReason | None:
        """Returns why the trial is to end now; None while it may go on.

        Raises what the person's own function raises.
        """
        if self._asked is not None and self._asked():
            return CANCELLED
        if self._until is not None and time.monotonic() >= self._until:
            text = f"the trial as a whole took longer than {self.deadline_s:g} s"
            return EndReason(kind="deadline", message=text)
        return None
