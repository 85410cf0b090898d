"""What compiling leaves in a process, kept and put back: settings, records, logs, compiled code.

For measuring within a process that goes on. Code that others have compiled stays, unless it was
compiled for the very functions that are measured.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch

from advisor.profiler import torch_internals
from advisor.profiler.process_state import Restore, keep_logging

_CONFIGS = (
    "torch._dynamo.config",
    "torch._inductor.config",
    "torch._functorch.config",
    "torch.compiler.config",
)
_CONTAINERS = (dict, list, set)
# What of torch it takes, and what is not as before without it.
NAMES = {
    "torch.compiler.set_stance": "another stance of the process is not left out",
    "torch._logging._internal._get_log_state": "which messages of the compiler are wanted is lost",
    "torch._logging._internal._set_log_state": "which messages of the compiler are wanted is lost",
    "torch._dynamo.utils": "the compiler's counters start anew",
    "torch._dynamo.callback.callback_handler": "others' callbacks at compiles are lost",
    "torch._dynamo.eval_frame.OptimizedModule": "a model that is compiled already is not refused",
    "torch._dynamo.eval_frame.reset_code": "what others have compiled is dropped",
    "torch._dynamo.convert_frame.input_codes": "what others have compiled is dropped",
    "torch._dynamo.convert_frame.output_codes": "what others have compiled is dropped",
    "torch._C._dynamo.eval_frame._debug_get_cache_entry_list": "compiled code of ours may stay",
}


def missing() -> tuple[str, ...]:
    """Returns a sentence for each name that this torch lacks, and what is therefore not kept."""
    return tuple(
        f"torch {torch.__version__} has no {name}: {what}"
        for name, what in NAMES.items()
        if torch_internals.find(name) is None
    )


@contextlib.contextmanager
def kept(model: torch.nn.Module) -> Iterator[bool]:
    """Puts the compiler back as it was when the block ends, and drops what was compiled within it.

    Gives whether others have compiled code in this process, which is left alone: all of it but
    that of the functions that are the forward of one of the model's modules. Within the block
    compiling is on, whatever stance the process has taken.
    """
    # What is imported now is not taken for something that the block has changed.
    torch_internals.missing()
    with contextlib.ExitStack() as stack:
        for keep in (keep_logging, _logs, _settings, _records, _sizes, _workers, _kernels):
            stack.callback(keep())
        codes = _Codes(model)
        stack.callback(codes.forget_new)
        stance = torch_internals.find("torch.compiler.set_stance")
        if stance is not None:
            stack.enter_context(stance("default"))
        yield codes.others


def is_compiled(value: object) -> bool:
    """Returns whether a module or a function was handed through `torch.compile` already."""
    wrapper = torch_internals.find("torch._dynamo.eval_frame.OptimizedModule")
    if wrapper is not None and isinstance(value, wrapper):
        return True
    if isinstance(value, torch.nn.Module):
        called = torch_internals.compiled_call(value)
        return called is not None or is_compiled(vars(value).get("forward"))
    # What torch.compile puts on the function that it returns (torch/_dynamo/eval_frame.py).
    return "_torchdynamo_orig_callable" in getattr(value, "__dict__", {})


class _Codes:
    """Which functions hold compiled code, and those that came since."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._reset = torch_internals.find("torch._dynamo.eval_frame.reset_code")
        seen = _seen_codes()
        own = {id(code) for code in _forwards(model)}
        if self._reset is not None:
            for code in seen:
                if id(code) in own:
                    self._reset(code)
        # Held themselves, so that no other gets the number of one that is gone.
        self._others = {id(code): code for code in seen if _holds_code(code)}
        self.others = bool(self._others)

    def forget_new(self) -> None:
        """Drops the compiled code of all but those that had some before."""
        if not self.others or self._reset is None:
            torch_internals.forget_compiled_code()
            return
        for code in _seen_codes():
            if id(code) not in self._others:
                self._reset(code)


def _seen_codes() -> list[CodeType]:
    """Returns the code of all functions that dynamo has met, and that it has made."""
    found = []
    for name in ("input_codes", "output_codes"):
        tracker = torch_internals.find(f"torch._dynamo.convert_frame.{name}")
        for reference in list(getattr(tracker, "seen", ())):
            code = reference()
            if code is not None:
                found.append(code)
    return found


def _holds_code(code: CodeType) -> bool:
    """Returns whether compiled code hangs on a function; yes where it cannot be told."""
    entries = torch_internals.find("torch._C._dynamo.eval_frame._debug_get_cache_entry_list")
    return entries is None or bool(entries(code))


def _forwards(model: torch.nn.Module) -> Iterator[CodeType]:
    for kind in {type(module) for module in model.modules()}:
        code = getattr(getattr(kind, "forward", None), "__code__", None)
        if code is not None:
            yield code


def _logs() -> Restore:
    """Keeps which of the compiler's messages are wanted."""
    get = torch_internals.find("torch._logging._internal._get_log_state")
    put = torch_internals.find("torch._logging._internal._set_log_state")
    if get is None or put is None:
        return _nothing
    before = copy.deepcopy(get())
    return lambda: put(before)


def _settings() -> Restore:
    """Keeps the compiler's settings: the values themselves, and what containers among them hold."""
    before: list[tuple[Any, str, Any, Any]] = []
    for module in filter(None, map(torch_internals.find, _CONFIGS)):
        for name, entry in list(getattr(module, "_config", {}).items()):
            # An alias is kept where it leads to; reading a deprecated one would warn.
            if getattr(entry, "alias", None) or getattr(entry, "deprecated", False):
                continue
            with contextlib.suppress(AttributeError):
                value = getattr(module, name)
                contents = copy.copy(value) if isinstance(value, _CONTAINERS) else None
                before.append((module, name, value, contents))

    def restore() -> None:
        for module, name, value, contents in before:
            if isinstance(value, _CONTAINERS) and value != contents:
                _refill(value, contents)
            now = getattr(module, name, None)
            if now is not value and (type(now) is not type(value) or now != value):
                setattr(module, name, value)

    return restore


def _refill(value: Any, contents: Any) -> None:
    value.clear()
    (value.extend if isinstance(value, list) else value.update)(contents)


def _records() -> Restore:
    """Keeps the compiler's metrics, counters and callbacks: measuring empties and fills them."""
    utils = torch_internals.find("torch._dynamo.utils")
    metrics = copy.copy(getattr(utils, "_compilation_metrics", None))
    counters = getattr(utils, "counters", None)
    counted = {key: copy.copy(value) for key, value in (counters or {}).items()}
    handler = torch_internals.find("torch._dynamo.callback.callback_handler")
    lists = [
        (found, list(found))
        for name in ("start_callbacks", "end_callbacks")
        if isinstance(found := getattr(handler, name, None), list)
    ]

    def restore() -> None:
        if metrics is not None:
            utils._compilation_metrics = metrics
        if counters is not None:
            counters.clear()
            counters.update(counted)
        for found, contents in lists:
            found[:] = contents

    return restore


def _sizes() -> Restore:
    """Keeps which sizes the compiler takes for dynamic."""
    module = torch_internals.find("torch._dynamo.pgo")
    before = {
        name: copy.deepcopy(getattr(module, name))
        for name in ("_CODE_STATE", "_INIT_CODE_STATE")
        if hasattr(module, name)
    }

    def restore() -> None:
        for name, value in before.items():
            setattr(module, name, value)

    return restore


def _workers() -> Restore:
    """Has processes and threads that compile end again, unless there were some before."""
    processes, threads = _pools()

    def restore() -> None:
        module: Any = sys.modules.get(_POOLS)
        new_processes, new_threads = _pools()
        if new_processes and not processes:
            module.shutdown_compile_workers()
        if new_threads and not threads:
            module.AsyncCompile.pool().shutdown()
            module.AsyncCompile.pool.cache_clear()

    return restore


_POOLS = "torch._inductor.async_compile"


def _pools() -> tuple[bool, bool]:
    """Returns whether there are processes and threads that compile, as far as it can be told."""
    module = sys.modules.get(_POOLS)
    pool = getattr(getattr(module, "AsyncCompile", None), "pool", None)
    made = getattr(pool, "cache_info", None)
    return bool(getattr(module, "_pool_set", None)), made is not None and made().currsize > 0


def _kernels() -> Restore:
    """Forgets kernels in memory now and afterwards: their files come and go with the trial.

    Compiled code that runs holds its own; what is compiled anew is loaded from disk again.
    """
    _clear_kernels()
    return _clear_kernels


def _clear_kernels() -> None:
    # Asked for only where it is there: Inductor takes seconds to import.
    clear: Callable[[], None] | None = getattr(
        sys.modules.get("torch._inductor.utils"), "clear_caches", None
    )
    if clear is not None:
        clear()


def _nothing() -> None:
    pass
