"""What a trial tells while it runs: frames to its host."""

from __future__ import annotations

import os
import threading
import time

from advisor.profiler.frames import PhaseBegun, Reported, pack
from advisor.profiler.records import Phase, Progress, TrialSpec

_LEAST_PAUSE_S = 0.5


class Reporter:
    """Sends phases and progress to the host. Safe to call from several threads."""

    def __init__(self, descriptor: int, spec: TrialSpec) -> None:
        self._descriptor = descriptor
        self._spec = spec
        self._lock = threading.Lock()
        self._begun = time.monotonic()
        self._told = 0.0
        self.phase = Phase.IMPORT
        self.step = 0

    def send(self, message: object) -> None:
        """Writes one frame."""
        data = memoryview(pack(message))
        with self._lock:
            while data:
                data = data[os.write(self._descriptor, data) :]

    def begin(self, phase: Phase) -> None:
        """Enters a phase: its deadline starts."""
        self.phase, self._begun = phase, time.monotonic()
        self.send(PhaseBegun(phase=phase))
        self.tell("", urgent=True)

    def tell(self, detail: str, urgent: bool = False) -> None:
        """Reports what is being done, at most twice a second."""
        now = time.monotonic()
        if not urgent and now - self._told < _LEAST_PAUSE_S:
            return
        self._told = now
        progress = Progress(
            trial_id=self._spec.trial_id,
            phase=self.phase,
            detail=detail,
            step=self.step,
            elapsed_s=now - self._begun,
            at_most_s=self._at_most_s(),
        )
        self.send(Reported(progress=progress))

    def _at_most_s(self) -> float | None:
        limit = self._spec.deadlines.of(self.phase)
        if self.phase is Phase.STEADY:
            return self._spec.measuring.max_steady_s
        if self.phase is Phase.COLD and limit is not None and self._spec.cut_off_s is not None:
            return min(limit, self._spec.cut_off_s)
        return limit
