"""Which part of the compiler runs right now: what makes a long compile bearable to watch.

A thread looks at the main thread's stack once a second while compiling is expected, and at no
other time: it must not run beside steps that are measured.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

_INTERVAL_S = 1.0
# Files of torch and what runs in them. The innermost frame that is in the table says the phase.
_PHASES = (
    ("_inductor/cpp_builder", "compiling C++"),
    ("_inductor/async_compile", "waiting for compile workers"),
    ("_inductor/select_algorithm", "benchmarking kernels"),
    ("_inductor/autotune_process", "benchmarking kernels"),
    ("_inductor/codecache", "building kernels"),
    ("_inductor/codegen", "generating code"),
    ("_inductor/scheduler", "fusing operators"),
    ("_inductor/graph", "lowering the graph"),
    ("_inductor", "optimising the graph"),
    ("_functorch", "tracing the backward graph"),
    ("_dynamo/symbolic_convert", "tracing the model"),
    ("_dynamo", "tracing the model"),
)


def phase_of(frame: FrameType | None) -> str:
    """Returns the compile phase that a stack is in, or an empty string."""
    while frame is not None:
        file = frame.f_code.co_filename
        at = file.find("/torch/_")
        if at >= 0:
            inner = file[at + len("/torch/") :]
            for prefix, name in _PHASES:
                if inner.startswith(prefix):
                    return name
        frame = frame.f_back
    return ""


class PhaseTeller:
    """Calls `tell(phase)` once a second with what the main thread's compiler is doing."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._stop = threading.Event()
        self._main = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join(timeout=2 * _INTERVAL_S)

    def _watch(self) -> None:
        begun = time.monotonic()
        while not self._stop.wait(_INTERVAL_S):
            phase = phase_of(sys._current_frames().get(self._main))
            self._tell(phase or f"running, {time.monotonic() - begun:.0f} s")
