"""The parts of a profiled step: forward, backward, optimizer, matrix products, kernels."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from advisor.profiler.torch_internals import BACKWARD_EVENT, OPERATOR_EVENT, ProfilerEvent

# The range that whoever profiles lays around each step.
STEP_EVENT = "compile-advisor step"
# An optimizer's step, as torch names it (torch/optim/optimizer.py, profile_hook_step).
_OPTIMIZER = "Optimizer.step#"
_OF_INTEREST = (OPERATOR_EVENT, BACKWARD_EVENT, _OPTIMIZER, STEP_EVENT)
_PRODUCT = re.compile(
    r"aten::(mm|addmm|bmm|baddbmm|addbmm|mv|addmv|_?convolution\w*|\w*_convolution\w*|_slow_conv\w*"
    r"|thnn_conv\w*|mkldnn_linear\w*|_scaled_dot_product_\w+|_(efficient|flash)_attention\w*"
    r"|_cudnn_rnn\w*|mkldnn_rnn_layer\w*|_grouped_mm)"
)


@dataclass(slots=True)
class Part:
    """Seconds of one part of the steps: of the host's clock, and of the kernels it launched."""

    host_s: float = 0.0
    device_s: float = 0.0


@dataclass(slots=True)
class StepParts:
    """What the profiler saw of some steps, in sums over all of them."""

    steps: int = 0
    wall_s: float = 0.0
    # Operator calls that call no other operator.
    calls: int = 0
    # Seconds in which a device computed: kernels that run at once count once.
    kernels_s: float = 0.0
    forward: Part = field(default_factory=Part)
    backward: Part = field(default_factory=Part)
    optimizer: Part = field(default_factory=Part)
    products: Part = field(default_factory=Part)
    backward_nodes: int = 0
    optimizer_steps: int = 0
    # Outermost operator calls of the optimizer.
    optimizer_calls: int = 0
    # The optimizer itself calls forward and backward (LBFGS): the parts cannot be told apart.
    closure: bool = False

    def add(self, events: Iterable[ProfilerEvent]) -> int:
        """Adds the events of a profile that holds one step; returns how many there were.

        Each time is counted once, at the outermost event of its kind.
        """
        host: list[ProfilerEvent] = []
        kernels: list[tuple[int, int]] = []
        launched: Counter[int] = Counter()
        number = 0
        for event in events:
            number += 1
            if event.on_device:
                kernels.append((event.start_ns, event.end_ns))
                launched[event.correlation] += event.end_ns - event.start_ns
            elif event.name.startswith(_OF_INTEREST):
                host.append(event)
        for step in (event for event in host if event.name == STEP_EVENT):
            self.steps += 1
            self.wall_s += (step.end_ns - step.start_ns) / 1e9
            # By time: a GPU's backward runs in a thread of its own, in no range of this one.
            reader = _Reader(self, launched)
            reader.read([call for call in host if step.start_ns <= call.start_ns < step.end_ns])
            self._add_host_time(step.start_ns, sorted(reader.spans), sorted(reader.forward_ns))
            self.kernels_s += _union_s([span for span in kernels if span[0] >= step.start_ns])
        return number

    def _add_host_time(
        self, begun: int, spans: list[tuple[int, int, bool]], forward_ns: list[int]
    ) -> None:
        """Adds the host time of one step's parts; `spans` are (start, end, is backward) in order.

        What lies before a backward is its forward; between two nodes of a backward without an
        operator of its own lies the engine. What lies before the optimizer's step (clipping,
        unscaling) or after it is neither.
        """
        cursor, after_backward, optimizer_end = begun, False, begun
        for start, end, is_backward in spans:
            if is_backward:
                operators = bisect_left(forward_ns, start) > bisect_left(forward_ns, cursor)
                part = self.backward if after_backward and not operators else self.forward
                part.host_s += max(0, start - cursor) / 1e9
                self.backward.host_s += max(0, end - max(start, cursor)) / 1e9
                self.closure |= start < optimizer_end
            else:
                self.optimizer.host_s += (end - start) / 1e9
                # An optimizer that steps in a hook of the backward: its time is not the backward's.
                self.backward.host_s -= max(0, min(end, cursor) - start) / 1e9
                optimizer_end = end
            after_backward = is_backward or start < cursor
            cursor = max(cursor, end)


@dataclass(slots=True)
class _Open:
    """A call that is open while events are read in the order of time, and what it is part of."""

    end_ns: int
    operator: bool = False
    called_others: bool = False
    backward: bool = False
    optimizer: bool = False
    # Sums to which the kernels of a call, and of all that it calls, belong.
    product: Part | None = None
    part: Part | None = None


class _Reader:
    """Reads the host's events of one profile; parents are the calls that enclose one in time."""

    def __init__(self, sums: StepParts, launched: Counter[int]) -> None:
        self._sums = sums
        self._launched = launched
        self.spans: list[tuple[int, int, bool]] = []
        self.forward_ns: list[int] = []

    def read(self, events: list[ProfilerEvent]) -> None:
        """Adds all events to the sums, and keeps the spans of the parts."""
        events.sort(key=lambda event: (event.thread, event.start_ns, -event.end_ns))
        stack: list[_Open] = []
        thread = None
        for event in events:
            if event.thread != thread:
                self._close(stack, len(stack))
                thread = event.thread
            while stack and (event.start_ns >= stack[-1].end_ns or event.end_ns > stack[-1].end_ns):
                self._close(stack, 1)
            stack.append(self._open(event, stack[-1] if stack else _Open(event.end_ns)))
        self._close(stack, len(stack))

    def _close(self, stack: list[_Open], count: int) -> None:
        for _ in range(count):
            call = stack.pop()
            self._sums.calls += call.operator and not call.called_others

    def _open(self, event: ProfilerEvent, around: _Open) -> _Open:
        call = _Open(
            event.end_ns,
            backward=around.backward,
            optimizer=around.optimizer,
            product=around.product,
            part=around.part,
        )
        span = (event.start_ns, event.end_ns)
        if event.name.startswith(_OPTIMIZER):
            if not around.optimizer:
                self._sums.optimizer_steps += 1
                self.spans.append((*span, False))
            call.optimizer = True
        elif event.name.startswith(BACKWARD_EVENT):
            if not around.backward:
                self._sums.backward_nodes += 1
                self.spans.append((*span, True))
            call.backward = True
        elif event.name.startswith(OPERATOR_EVENT):
            around.called_others = call.operator = True
            self._operator(event, call)
        return call

    def _operator(self, event: ProfilerEvent, call: _Open) -> None:
        sums = self._sums
        if call.product is None and _PRODUCT.fullmatch(event.name):
            call.product = sums.products
            sums.products.host_s += (event.end_ns - event.start_ns) / 1e9
        if call.part is None:
            if call.optimizer:
                sums.optimizer_calls += 1
                call.part = sums.optimizer
            elif call.backward:
                call.part = sums.backward
            else:
                self.forward_ns.append(event.start_ns)
                call.part = sums.forward
        kernels_s = self._launched.get(event.correlation, 0) / 1e9
        for part in (call.part, call.product):
            if part is not None:
                part.device_s += kernels_s


def _union_s(spans: list[tuple[int, int]]) -> float:
    """Returns the seconds covered by spans in nanoseconds."""
    covered = reached = 0
    for start, end in sorted(spans):
        covered += max(0, end - max(start, reached))
        reached = max(reached, end)
    return covered / 1e9
