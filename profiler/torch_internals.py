"""Every name of torch that is private or changes between versions, behind one door.

Each function says what it gives when the name is gone; `missing()` lists what this torch no longer
has, and the trial passes that on as a warning, so that a gap is said and not taken for a zero.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from typing import Any

import torch

# More than any trial makes; the default of 64 forgets the first compiles of a job that recompiles.
_METRICS_KEPT = 4096
GRAPH_BREAK_LOGGER = "torch._dynamo.symbolic_convert.__graph_breaks"
# A call of a compiled graph, as torch's profiler names it.
COMPILED_GRAPH_EVENT = "## Call CompiledFxGraph"

_NAMES = {
    "torch._dynamo.utils.get_compilation_metrics": "compile events",
    "torch._dynamo.utils.clear_compilation_metrics": "compile events",
    "torch._dynamo.utils.set_compilation_metrics_limit": "compile events beyond the 64th",
    "torch._dynamo.utils.counters": "counts of graphs and graph breaks",
    "torch._dynamo.exc.Unsupported": "the kind of a compile error",
    "torch._dynamo.exc.BackendCompilerFailed": "the kind of a compile error",
    "torch._logging.set_logs": "places of graph breaks",
    "torch.nn.Module.compile": "compiling in place",
}


def _find(name: str) -> Any:
    """Returns the object behind a dotted name, or None when this torch does not have it."""
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part, None)
        return found
    return None


def missing() -> tuple[str, ...]:
    """Returns a sentence for each name that this torch lacks, and what is therefore not known."""
    return tuple(
        f"torch {torch.__version__} has no {name}: {what} cannot be told"
        for name, what in _NAMES.items()
        if _find(name) is None
    )


def start_compile_records() -> None:
    """Empties torch's compile metrics and counters and makes room for all of this trial."""
    for name, arguments in (
        ("set_compilation_metrics_limit", (_METRICS_KEPT,)),
        ("clear_compilation_metrics", ()),
    ):
        function = _find(f"torch._dynamo.utils.{name}")
        if function is not None:
            function(*arguments)
    counters = _find("torch._dynamo.utils.counters")
    if counters is not None:
        counters.clear()


def compile_metrics() -> list[Any]:
    """Returns torch's `CompilationMetrics` so far; empty when this torch keeps none."""
    function = _find("torch._dynamo.utils.get_compilation_metrics")
    return list(function()) if function is not None else []


def counters() -> Mapping[str, Mapping[str, int]]:
    """Returns dynamo's counters as plain dictionaries; empty when this torch keeps none."""
    found = _find("torch._dynamo.utils.counters")
    return {key: dict(value) for key, value in found.items()} if found is not None else {}


def is_compile_error(error: BaseException) -> bool:
    """Returns whether an error was raised by the compiler rather than by the code compiled."""
    return any(kind.__module__.startswith("torch._") for kind in type(error).__mro__)


def listen_to_graph_breaks(handler: logging.Handler) -> None:
    """Has torch report each graph break to `handler`, with its place, and nowhere else."""
    set_logs = _find("torch._logging.set_logs")
    if set_logs is None:
        return
    set_logs(graph_breaks=True)
    logger = logging.getLogger(GRAPH_BREAK_LOGGER)
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(logging.DEBUG)


def compiled_call(module: torch.nn.Module) -> Any:
    """Returns what `module.compile()` put in place of the call, or None."""
    return getattr(module, "_compiled_call_impl", None)


def set_compiled_call(module: torch.nn.Module, call: Any) -> None:
    """Puts a compiled call in place (`None`: plain eager, as if never compiled).

    `nn.Module.__call__` looks at this attribute first (torch/nn/modules/module.py).
    """
    module._compiled_call_impl = call
