"""A compiled call that runs eager in its own place when it fails, and is looked at now and then.

What a forward changes beside its result are random numbers and buffers (running statistics): they
are put back before the eager call, so that it computes what it would have without a compiler.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from advisor.loop_deadline import Deadline, Overdue
from advisor.profiler import torch_internals
from advisor.profiler.snapshot import numbers_of
from advisor.profiler.units import duration

log = logging.getLogger(__name__)

Call = Callable[..., Any]

# Looking at results takes this share of the time of steps, at most.
_LOOK_SHARE = 0.005
# Of each tensor so much is looked at: one that is not finite hardly ever is so in one place.
_MOST_VALUES = 4096
# Steps of compiled training between two comparisons with eager, at least.
_COMPARE_STEPS = 200
_BY_VALUE_STEPS = 3
# How far a compiled result may lie from the eager one, by norm, before it is the compiler's fault:
# far more than the order of sums changes, far less than what a training would bear.
_DRIFT = {torch.float64: 1e-6, torch.float32: 1e-2, torch.float16: 0.1, torch.bfloat16: 0.1}


class Seldom:
    """Says when something is due that shall take only a share of the time of steps."""

    def __init__(self, share: float = _LOOK_SHARE, least_steps: int = 1) -> None:
        self._share, self._least = share, least_steps
        self._left = 0

    def due(self) -> bool:
        """Returns whether it is due in this step; to be asked once a step."""
        self._left -= 1
        return self._left < 0

    def took(self, seconds: float, step_s: float) -> None:
        """Takes what it took this time, beside what a step takes."""
        wanted = seconds / (self._share * step_s) if step_s > 0 else 1.0
        self._left = max(self._least, math.ceil(wanted)) - 1

    def never(self) -> None:
        """Makes it never due again."""
        self._left = 1 << 62


@dataclass(frozen=True, slots=True)
class Moment:
    """What a forward changes beside its result."""

    random: torch.Tensor
    device_random: torch.Tensor | None
    # None where no step was seen to draw from them: reading them takes 40 us.
    python_random: object
    numpy_random: dict[str, Any] | None
    buffers: tuple[tuple[torch.nn.Module, str, torch.Tensor, torch.Tensor], ...]


class Changing:
    """Finds which buffers of a model a step changes, and whether it draws outside of torch.

    By their values in the first steps, since batch norm's statistics change without a new version
    (torch 2.13, `torch.batch_norm`); by their versions after that, which cost nothing.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._by_value = _BY_VALUE_STEPS
        self._seen: dict[tuple[int, str], tuple[torch.Tensor, int, torch.Tensor | None]] = {}
        self.found: dict[tuple[int, str], torch.nn.Module] = {}
        self._random: tuple[object, dict[str, Any]] | None = None
        self.draws = False

    def begin(self) -> None:
        """Takes the buffers before a step."""
        self._by_value -= 1
        if self._by_value >= 0:
            self._random = _python_random()
        self._seen = {
            (id(module), name): (
                buffer,
                buffer._version,
                buffer.detach().clone() if self._by_value >= 0 else None,
            )
            for module, name, buffer in _buffers(self._model)
        }

    def end(self) -> None:
        """Takes them after it."""
        for module, name, buffer in _buffers(self._model):
            before, version, value = self._seen.get((id(module), name), (None, 0, None))
            same = before is buffer and version == buffer._version
            if not same or (value is not None and not torch.equal(value, buffer)):
                self.found[id(module), name] = module
        if self._random is not None:
            self.draws = self.draws or not _same_draws(self._random, _python_random())
        self._seen, self._random = {}, None


@dataclass(slots=True)
class Guard:
    """Guards the compiled calls of one model; `give_up` is told why, and the error if there is one.

    `in_step` says whether the loop is within a step, `step_s` what an eager one takes, `limit_s`
    how long a compile may take from now.
    """

    model: torch.nn.Module
    device: torch.device
    give_up: Callable[[str, BaseException | None], None]
    in_step: bool = False
    step_s: float = 0.0
    limit_s: float = math.inf
    changing: Changing = field(init=False)
    # Whether no gradient was left from before as the step's first forward began. None: not asked
    # for, or not there yet.
    began_clear: bool | None = None
    asks_clear: bool = False
    _deadline: Deadline = field(default_factory=Deadline)
    _running: bool = False
    _finite: Seldom = field(default_factory=Seldom)
    _compared: Seldom = field(default_factory=lambda: Seldom(least_steps=_COMPARE_STEPS))
    _limited_s: float = 0.0

    def __post_init__(self) -> None:
        self.changing = Changing(self.model)

    # --- what a forward changes

    def moment(self, *, whole: bool = False) -> Moment:
        """Returns what a forward changes, as it is now; `whole`: whatever it was seen to change."""
        on_gpu = self.device.type == "cuda"
        draws = _python_random() if whole or self.changing.draws else (None, None)
        return Moment(
            random=torch.get_rng_state(),
            device_random=torch.cuda.get_rng_state(self.device) if on_gpu else None,
            python_random=draws[0],
            numpy_random=draws[1],
            buffers=tuple(
                (module, name, buffer, buffer.detach().clone())
                for (_, name), module in self.changing.found.items()
                if isinstance(buffer := getattr(module, name, None), torch.Tensor)
            ),
        )

    def back_to(self, moment: Moment) -> None:
        """Puts back what a forward has changed since."""
        _set_random(moment, self.device)
        with torch.no_grad():
            for module, name, buffer, value in moment.buffers:
                buffer.copy_(value)
                setattr(module, name, buffer)

    # --- the call

    def guarded(self, compiled: Call, eager: Call) -> Call:
        """Returns the compiled call, which runs eager instead when it fails."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled() and not self.in_step:
                # An evaluation: it would compile anew, and nobody measures what that brings.
                return eager(*args, **kwargs)
            if self.asks_clear and self.began_clear is None:
                self.began_clear = all(p.grad is None for p in self.model.parameters())
            before = self.moment()
            why, error = "", None
            try:
                result = self._within_limit(compiled, args, kwargs)
            except (Exception, Overdue) as raised:  # noqa: BLE001 - the model's own, eager raises
                why, error = self._why(raised), _bare(raised)
                # Overdue may have come while the deadline was being taken away.
                self._deadline.disarm()
            if error is None:
                return self._looked_at(result, before, lambda: eager(*args, **kwargs))
            # Only out here: within `except` the traceback holds all that the failed call has made.
            self.back_to(before)
            if torch_internals.is_out_of_memory(error) and self.device.type == "cuda":
                torch.cuda.empty_cache()
            result = eager(*args, **kwargs)
            self.give_up(why, error)
            return result

        return call

    def _within_limit(self, compiled: Call, args: Any, kwargs: Any) -> Any:
        try:
            self._running = True
            return compiled(*args, **kwargs)
        finally:
            self._running = False
            self._deadline.disarm()

    def compiling(self) -> None:
        """Takes that a compile begins: within a guarded call it must end in time."""
        if self._running and self.limit_s < math.inf and not self._deadline.armed:
            self._limited_s = self.limit_s
            self._deadline.arm(max(0.0, self.limit_s))

    def _why(self, error: BaseException) -> str:
        if isinstance(error, Overdue):
            return f"compiling did not end within {duration(self._limited_s)}"
        if torch_internals.is_out_of_memory(error):
            return "the compiled step needs more memory than there is"
        return "the compiled step failed"

    # --- now and then a look at the result

    def _looked_at(self, result: Any, before: Moment, eager: Callable[[], Any]) -> Any:
        if not (self.in_step and torch.is_grad_enabled()):
            return result
        if self._finite.due():
            begun = time.perf_counter()
            finite = _finite(result)
            self._finite.took(time.perf_counter() - begun, self.step_s)
            if not finite:
                return self._not_finite(before, eager)
        if self._compared.due():
            begun = time.perf_counter()
            self._compare(result, before, eager)
            self._compared.took(time.perf_counter() - begun, self.step_s)
        return result

    def _not_finite(self, before: Moment, eager: Callable[[], Any]) -> Any:
        self.back_to(before)
        plain = eager()
        if _finite(plain):
            self.give_up(
                "the compiled step gave NaN or infinity where the eager one does not", None
            )
        else:
            log.warning("AutoCompile: the model gives NaN or infinity, eager as well as compiled")
            self._finite.never()
        return plain

    def _compare(self, result: Any, before: Moment, eager: Callable[[], Any]) -> None:
        if torch_internals.has_hooks(self.model):
            # They are the person's: called once more, they would see a forward that never was.
            self._compared.never()
            return
        numbers = [(module, numbers_of(module)) for module in self.model.modules()]
        after = self.moment(whole=True)
        # Others in their place: the backward of this step may want the buffers as they are, and
        # autograd raises when a tensor that it has kept was changed since.
        for module, name, _, value in before.buffers:
            setattr(module, name, value)
        _set_random(before, self.device)
        try:
            begun = self.moment(whole=True)
            with torch.no_grad():
                plain = eager()
            drawn = not _same_random(begun, self.moment(whole=True))
        finally:
            for module, name, buffer, _ in after.buffers:
                setattr(module, name, buffer)
            _set_random(after, self.device)
            for module, found in numbers:
                vars(module).update(found)
        if drawn:
            # The compiler draws its own random numbers: results differ by them.
            self._compared.never()
            return
        for one, other in zip(_looked(result), _looked(plain), strict=False):
            allowed = self._drift_allowed(other.dtype)
            scale = max(float(other.norm()), 1e-12)
            apart = float((one.to(other.dtype) - other).norm()) / scale
            if apart > allowed:
                self.give_up(
                    f"the compiled step's result is {apart:.1%} from the eager one's"
                    f" (allowed: {allowed:.1%})",
                    None,
                )
                return

    def _drift_allowed(self, dtype: torch.dtype) -> float:
        coarse = torch.is_autocast_enabled(self.device.type) or not torch_internals.tf32_is_off()
        allowed = _DRIFT.get(dtype, 0.1)
        return max(allowed, _DRIFT[torch.bfloat16]) if coarse else allowed


def _buffers(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, torch.Tensor]]:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            yield module, name, buffer


def _set_random(moment: Moment, device: torch.device) -> None:
    torch.set_rng_state(moment.random)
    if moment.device_random is not None:
        torch.cuda.set_rng_state(moment.device_random, device)
    if moment.numpy_random is not None:
        random.setstate(moment.python_random)  # type: ignore[arg-type]
        np.random.set_state(moment.numpy_random)


def _python_random() -> tuple[object, dict[str, Any]]:
    return random.getstate(), np.random.get_state(legacy=False)


def _same_draws(one: tuple[object, Any], other: tuple[object, Any]) -> bool:
    states = one[1]["state"], other[1]["state"]
    same = states[0]["pos"] == states[1]["pos"] and np.array_equal(
        states[0]["key"], states[1]["key"]
    )
    return one[0] == other[0] and bool(same)


def _same_random(one: Moment, other: Moment) -> bool:
    """Returns whether no random number was drawn between two whole moments."""
    devices = (one.device_random, other.device_random)
    return (
        torch.equal(one.random, other.random)
        and (devices[0] is None or devices[1] is None or torch.equal(devices[0], devices[1]))
        and _same_draws(
            (one.python_random, one.numpy_random), (other.python_random, other.numpy_random)
        )
    )


def _bare(error: BaseException) -> BaseException:
    """Returns an error without what its traceback and its causes hold in memory."""
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return error


def _finite(result: Any) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in _looked(result))


def _looked(result: Any) -> list[torch.Tensor]:
    """Returns the first values of each float tensor of a result, in a fixed order."""
    return [
        tensor.detach().reshape(-1)[:_MOST_VALUES]
        for tensor in _tensors(result)
        if tensor.is_floating_point() and tensor.numel() and not tensor.is_sparse
    ]


def _tensors(result: Any) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, dict):
        for value in result.values():
            yield from _tensors(value)
    elif isinstance(result, (list, tuple)):
        for value in result:
            yield from _tensors(value)
    elif dataclasses.is_dataclass(result):
        yield from _tensors(list(vars(result).values()))
