"""What a training step may change in the process around it, kept and put back.

Random generators, torch's own switches, environment, folder, paths, signals, warnings, loggers,
the garbage collector. Each row of the table keeps one thing and returns what puts it back.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, Self

import torch

from advisor.profiler import torch_internals

Restore = Callable[[], object]
# What torch seeds a CUDA generator with that nobody seeds (c10/core/GeneratorImpl.h).
_USUAL_SEED = 67280421310721


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Puts back when the block ends whatever it has changed of the process's own state."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        for keep in _KEEPERS:
            stack.callback(keep())
        yield


def keep_logging() -> Restore:
    """Keeps handlers, filters and levels of all loggers that there are."""
    before = {
        id(logger): (
            logger,
            logger.level,
            logger.propagate,
            logger.disabled,
            list(logger.handlers),
            list(logger.filters),
        )
        for logger in _loggers()
    }
    disabled = logging.root.manager.disable

    def restore() -> None:
        for logger in _loggers():
            if id(logger) not in before:
                # Made meanwhile by what was imported: only what listens for us goes.
                logger.handlers[:] = [one for one in logger.handlers if not _is_ours(one)]
        for logger, level, propagate, off, handlers, filters in before.values():
            logger.handlers[:], logger.filters[:] = handlers, filters
            logger.propagate, logger.disabled = propagate, off
            if logger.level != level:
                logger.setLevel(level)
        logging.disable(disabled)

    return restore


def _loggers() -> list[logging.Logger]:
    known = list(logging.root.manager.loggerDict.values())
    return [logging.root, *(one for one in known if isinstance(one, logging.Logger))]


def _is_ours(handler: logging.Handler) -> bool:
    return type(handler).__module__.startswith("advisor.")


def _random() -> Restore:
    return functools.partial(random.setstate, random.getstate())


def _numpy_random() -> Restore:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return _nothing
    return functools.partial(numpy.random.set_state, numpy.random.get_state())


def _torch_random() -> Restore:
    return functools.partial(torch.set_rng_state, torch.get_rng_state())


def _cuda_random() -> Restore:
    if not torch.cuda.is_available():
        return _nothing
    if torch.cuda.is_initialized():
        return functools.partial(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
    # Seeds wait until CUDA starts: those of a trial must not be the last ones in the queue.
    queue = torch_internals.find("torch.cuda._lazy_seed_tracker")
    if queue is None:
        return _nothing
    before = {
        name: list(value) if isinstance(value, list) else value
        for name, value in vars(queue).items()
    }

    def restore() -> None:
        vars(queue).update(before)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(_USUAL_SEED)
            for call in queue.get_calls():
                if call:
                    call[0]()

    return restore


def _grad_mode() -> Restore:
    return functools.partial(torch.set_grad_enabled, torch.is_grad_enabled())


def _default_device() -> Restore:
    before = torch.get_default_device()

    def restore() -> None:
        if torch.get_default_device() != before:
            torch.set_default_device(None if before.type == "cpu" else before)

    return restore


def _switches() -> Restore:
    """Keeps those of torch's switches that can be read and set."""
    before: list[tuple[Callable[[Any], object], Callable[[], object], object]] = []
    switches: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.get_num_threads, torch.set_num_threads),
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        (_determinism, _set_determinism),
        *(_attribute(torch.backends.cudnn, name) for name in _CUDNN),
        _attribute(torch.backends.cuda.matmul, "allow_tf32"),
    )
    for get, put in switches:
        # What `fp32_precision` has set, torch 2.9 and later do not let one read by the older names.
        with contextlib.suppress(RuntimeError):
            before.append((put, get, get()))

    def restore() -> None:
        for put, get, value in before:
            with contextlib.suppress(RuntimeError):
                if get() != value:
                    put(value)

    return restore


_CUDNN = ("enabled", "benchmark", "deterministic", "allow_tf32")


def _attribute(holder: object, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return functools.partial(getattr, holder, name), functools.partial(setattr, holder, name)


def _determinism() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _set_determinism(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _environment() -> Restore:
    before = dict(os.environ)

    def restore() -> None:
        for name in [name for name in os.environ if name not in before]:
            del os.environ[name]
        for name, value in before.items():
            if os.environ.get(name) != value:
                os.environ[name] = value

    return restore


def _folder() -> Restore:
    try:
        return functools.partial(os.chdir, os.getcwd())
    except FileNotFoundError:  # removed under the process
        return _nothing


def _paths() -> Restore:
    before = [(paths, list(paths)) for paths in (sys.path, sys.argv)]

    def restore() -> None:
        sys.path, sys.argv = before[0][0], before[1][0]
        for paths, contents in before:
            paths[:] = contents

    return restore


def _signals() -> Restore:
    if threading.current_thread() is not threading.main_thread():
        return _nothing  # only the main thread sets handlers
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}

    def restore() -> None:
        for number, handler in before.items():
            # None: not set from Python, and so nothing that Python code has changed.
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)

    return restore


def _garbage() -> Restore:
    enabled, thresholds = gc.isenabled(), gc.get_threshold()

    def restore() -> None:
        (gc.enable if enabled else gc.disable)()
        gc.set_threshold(*thresholds)

    return restore


def _progress_bars() -> Restore:
    """Has the thread end that watches progress bars, unless there was one: Inductor shows one."""
    bars = _bars()
    if getattr(bars, "monitor", None) is not None:
        return _nothing

    def restore() -> None:
        shown: Any = _bars()
        monitor = getattr(shown, "monitor", None)
        if monitor is not None:
            monitor.exit()
            shown.monitor = None

    return restore


def _bars() -> object:
    return getattr(sys.modules.get("tqdm.std"), "tqdm", None)


def _nothing() -> None:
    pass


_KEEPERS: tuple[Callable[[], Restore], ...] = (
    _random,
    _numpy_random,
    _torch_random,
    _cuda_random,
    _grad_mode,
    _default_device,
    _switches,
    _environment,
    _folder,
    _paths,
    _signals,
    _garbage,
    _progress_bars,
    keep_logging,
)


class Interrupts:
    """Within its block Ctrl-C works as before until `hold()`; from then on it waits for the end.

    What is being put back must not be left half done. Does nothing outside of the main thread,
    which no signal reaches.
    """

    def __init__(self) -> None:
        self._handler: Any = None
        self._held = self._waiting = False

    def hold(self) -> None:
        """Has an interrupt wait until the block ends."""
        self._held = True

    def __enter__(self) -> Self:
        main = threading.current_thread() is threading.main_thread()
        handler = signal.getsignal(signal.SIGINT) if main else None
        if callable(handler):
            self._handler = handler
            signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._handler is None:
            return
        signal.signal(signal.SIGINT, self._handler)
        if self._waiting:
            signal.raise_signal(signal.SIGINT)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._held:
            self._waiting = True
        else:
            self._handler(number, frame)
