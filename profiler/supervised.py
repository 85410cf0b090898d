"""A measurement within the person's own process: it can be stopped between any two steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from advisor.profiler.frames import EndReason, Reported, Result
from advisor.profiler.measurement import Measurement
from advisor.profiler.records import Progress, Trial, TrialSpec
from advisor.profiler.reporter import Reporter
from advisor.profiler.stopping import Limits
from advisor.profiler.training import Batches, Trainer
from advisor.profiler.workload import Batch, Workload


class Stopped(BaseException):
    """Ends a measurement from within. No `Exception`: those of the training code are caught."""

    def __init__(self, reason: EndReason) -> None:
        self.reason = reason
        super().__init__(reason.message)


class CallbackRaised(BaseException):
    """Carries what the person's own callback has raised past all that catches such errors."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        super().__init__(str(error))


class Supervisor(Reporter):
    """Tells of the progress within the process, and says between steps when to stop."""

    def __init__(
        self, spec: TrialSpec, on_progress: Callable[[Progress], None], limits: Limits
    ) -> None:
        super().__init__(-1, spec)
        self._on_progress, self._limits = on_progress, limits
        self._thread = threading.get_ident()
        # What the callback has raised in the thread that watches a compile.
        self._raised: Exception | None = None
        # What was measured before causes were looked for.
        self.measured: Trial | None = None

    def send(self, message: object) -> None:
        """Hands on progress, and keeps what was measured so far."""
        if isinstance(message, Reported):
            self._hand_on(message.progress)
        elif isinstance(message, Result):
            self.measured = message.trial

    def check(self) -> None:
        """Raises `Stopped` when the measurement is to end, `CallbackRaised` when a callback did."""
        if self._raised is not None:
            raise CallbackRaised(self._raised)
        try:
            reason = self._limits.reason()
        except Exception as error:
            raise CallbackRaised(error) from error
        limit_s = self._spec.deadlines.of(self.phase)
        if reason is None and limit_s is not None and time.monotonic() - self._begun >= limit_s:
            text = f"{self.phase.value} took longer than {limit_s:.0f} s"
            reason = EndReason(kind="deadline", message=text)
        if reason is not None:
            raise Stopped(reason)

    def _hand_on(self, progress: Progress) -> None:
        # Only one of both threads is at work at a time: the other one compiles.
        with self._lock:
            try:
                self._on_progress(progress)
            except Exception as error:
                if threading.get_ident() == self._thread:
                    raise CallbackRaised(error) from error
                self._raised = error


class SupervisedMeasurement(Measurement):
    """As a measurement of a trial, on a workload that is there already."""

    def __init__(self, spec: TrialSpec, supervisor: Supervisor, workload: Workload) -> None:
        super().__init__(spec, supervisor)
        self._supervisor = supervisor
        self._workload = workload

    def _build(self, device: torch.device) -> Workload:
        return self._workload

    def _trainer(self, workload: Workload, device: torch.device) -> Trainer:
        return _SupervisedTrainer(workload, device, self._supervisor)


class _SupervisedTrainer(Trainer):
    """Asks before each step whether to go on, and never gives away the person's own batches."""

    def __init__(self, workload: Workload, device: torch.device, supervisor: Supervisor) -> None:
        super().__init__(workload, device)
        self.batches = _CopiedBatches(workload.batches, device, supervisor)
        self._supervisor = supervisor

    def step(self, batch: Batch) -> Any:
        self._supervisor.check()
        return super().step(batch)

    def run(self, batches: Iterable[Batch]) -> Any:
        self._supervisor.check()
        return super().run(batches)


class _CopiedBatches(Batches):
    """Gives copies, so that a step which changes its batch in place does not change the data."""

    def __init__(self, source: Any, device: torch.device, supervisor: Supervisor) -> None:
        super().__init__(source, device)
        self._supervisor = supervisor

    def next(self) -> Batch:
        self._supervisor.check()
        return pytree.tree_map_only(torch.Tensor, _copied, super().next())


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    # Marks for the compiler, such as a dynamic dimension, are attributes.
    vars(copy).update(vars(tensor))
    return copy
