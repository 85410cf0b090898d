"""A deadline for a call within this thread that may never return: a compile that hangs."""

from __future__ import annotations

import ctypes
import signal
import threading
from types import FrameType

# Nobody's by convention; where there are no real-time signals, threads are told by the interpreter.
_SIGNAL = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else None


class Overdue(BaseException):
    """Raised in a thread whose call has gone past its deadline.

    No `Exception`: the compiler catches those, and goes on.
    """


class Deadline:
    """Raises `Overdue` in the thread that armed it, unless it is disarmed in time.

    In the main thread a signal does that, which also ends the wait for a compiler's process or a
    lock; in any other the interpreter does, between two of its instructions. Code in C that waits
    for ever without either is out of reach.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._thread = 0
        self._by_signal = False
        self._before: object = None

    @property
    def armed(self) -> bool:
        """Whether a deadline is running."""
        return self._timer is not None

    def arm(self, seconds: float) -> None:
        """Has `Overdue` raised in this thread after so many seconds; nothing if one is running."""
        if self._timer is not None:
            return
        self._thread = threading.get_ident()
        self._by_signal = self._takes_signals()
        if self._by_signal:
            assert _SIGNAL is not None
            self._before = signal.signal(_SIGNAL, self._on_signal)
        self._timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), self._overdue)
        self._timer.daemon = True
        self._timer.start()

    def disarm(self) -> None:
        """Has nothing raised any more, and leaves signals as they were."""
        with self._lock:
            timer, self._timer = self._timer, None
        if timer is None:
            return
        timer.cancel()
        # What it sent has arrived when it has ended: only then may the handler go.
        timer.join()
        if self._by_signal:
            assert _SIGNAL is not None
            signal.signal(_SIGNAL, self._before)  # type: ignore[arg-type]
        else:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), None)

    def _overdue(self) -> None:
        with self._lock:
            if self._timer is None:
                return
            if self._by_signal:
                assert _SIGNAL is not None
                signal.pthread_kill(self._thread, _SIGNAL)
            else:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread), ctypes.py_object(Overdue)
                )

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._timer is not None:
            raise Overdue

    @staticmethod
    def _takes_signals() -> bool:
        """Returns whether this is the main thread, and nobody else has taken the signal."""
        if _SIGNAL is None or threading.current_thread() is not threading.main_thread():
            return False
        return signal.getsignal(_SIGNAL) in (signal.SIG_DFL, signal.SIG_IGN)
