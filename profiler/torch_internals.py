"""Every name of torch that is private or changes between versions, behind one door.

Each function says what it gives when the name is gone; `missing()` lists what this torch no longer
has, and the trial passes that on as a warning, so that a gap is said and not taken for a zero.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from advisor.profiler.errors import AdvisorError

# More than any trial makes; the default of 64 forgets the first compiles of a job that recompiles.
_METRICS_KEPT = 4096
GRAPH_BREAK_LOGGER = "torch._dynamo.symbolic_convert.__graph_breaks"
CUDAGRAPH_LOGGER = "torch._inductor.cudagraph_utils.__cudagraphs"
# A call of a compiled graph, as torch's profiler names it.
COMPILED_GRAPH_EVENT = "## Call CompiledFxGraph"
# A call of an operator, and a node of the backward (torch/csrc/autograd/function.h, engine.cpp).
OPERATOR_EVENT = "aten::"
BACKWARD_EVENT = "autograd::engine::evaluate_function"

_COMPILER_MODULES = ("torch._functorch.", "torch._inductor.", "torch._dynamo.")

_NAMES = {
    "torch._foreach_norm": "whether gradients are finite, in one call",
    "torch.compiler.set_stance": "whether the job bears torch.compile(model) as a wrapper",
    "torch._dynamo.utils.get_compilation_metrics": "compile events",
    "torch._dynamo.utils.clear_compilation_metrics": "compile events",
    "torch._dynamo.utils.set_compilation_metrics_limit": "compile events beyond the 64th",
    "torch._dynamo.utils.counters": "counts of graphs and graph breaks",
    "torch._dynamo.exc.Unsupported": "the kind of a compile error",
    "torch._dynamo.exc.BackendCompilerFailed": "the kind of a compile error",
    "torch._logging.set_logs": "places of graph breaks",
    "torch._dynamo.callback.callback_handler": "where a recompile without a place was called",
    "torch.nested._internal.nested_tensor._tensor_id_counter": "use of jagged tensors",
    "torch.nn.Module.compile": "compiling in place",
    "torch._inductor.cpu_vec_isa.VecISA": "what a handed-over cache knows of vector instructions",
    "torch._dynamo.mark_dynamic": "what marking a length as dynamic brings",
    "torch._dynamo.reset": "what other settings of the compiler would bring",
    "torch._dynamo.config": "what other settings of the compiler would bring",
    "torch._inductor.config": "which settings of Inductor there are",
    "torch._dynamo.utils.reset_graph_break_dup_checker": "graph breaks met again when traced anew",
    "torch.optim.optimizer._default_to_fused_or_foreach": "how an optimizer steps by default",
    "torch.cpu._is_avx512_bf16_supported": "whether the CPU has bfloat16",
    "torch._subclasses.fake_tensor.FakeTensorMode": "what a step has to do, without running it",
    "torch._subclasses.fake_tensor.unset_fake_temporarily": "batches whose values decide a shape",
    "torch.utils.flop_counter.flop_registry": "FLOPs of matrix products and convolutions",
    "torch.optim.optimizer.register_optimizer_step_pre_hook": "the optimizer's own operators",
}


def find(name: str) -> Any:
    """Returns the object behind a dotted name, or None when nothing here has it."""
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
        if find(name) is None
    )


def start_compile_records() -> None:
    """Empties torch's compile metrics and counters and makes room for all of this trial."""
    for name, arguments in (
        ("set_compilation_metrics_limit", (_METRICS_KEPT,)),
        ("clear_compilation_metrics", ()),
    ):
        function = find(f"torch._dynamo.utils.{name}")
        if function is not None:
            function(*arguments)
    counters = find("torch._dynamo.utils.counters")
    if counters is not None:
        counters.clear()


def compile_metrics() -> list[Any]:
    """Returns torch's `CompilationMetrics` so far; empty when this torch keeps none."""
    function = find("torch._dynamo.utils.get_compilation_metrics")
    return list(function()) if function is not None else []


def counters() -> Mapping[str, Mapping[str, int]]:
    """Returns dynamo's counters as plain dictionaries; empty when this torch keeps none."""
    found = find("torch._dynamo.utils.counters")
    return {key: dict(value) for key, value in found.items()} if found is not None else {}


def is_compile_error(error: BaseException) -> bool:
    """Returns whether an error was raised by the compiler rather than by the code compiled."""
    return any(kind.__module__.startswith("torch._") for kind in type(error).__mro__)


def listen_to_graph_breaks(handler: logging.Handler) -> None:
    """Has torch report each graph break to `handler`, with its place, and nowhere else."""
    set_logs = find("torch._logging.set_logs")
    if set_logs is None:
        return
    set_logs(graph_breaks=True)
    logger = logging.getLogger(GRAPH_BREAK_LOGGER)
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(logging.DEBUG)


def listen_to_cudagraphs(handler: logging.Handler) -> None:
    """Has torch's words about CUDA graphs that it leaves out go to `handler` too.

    The logger speaks at WARNING by itself, at compile time and from steps that run.
    """
    logger = logging.getLogger(CUDAGRAPH_LOGGER)
    if handler not in logger.handlers:
        logger.addHandler(handler)


def on_compile_start(tell: Callable[[str], None]) -> Callable[[], None]:
    """Has `tell(compile_id)` called as each compile begins; never when this torch cannot.

    Returns a function that ends it.
    """
    return _on_compile("start", tell)


def on_compile_end(tell: Callable[[str], None]) -> Callable[[], None]:
    """Has `tell(compile_id)` called as each compile ends; never when this torch cannot.

    Returns a function that ends it.
    """
    return _on_compile("end", tell)


def _on_compile(moment: str, tell: Callable[[str], None]) -> Callable[[], None]:
    handler = find("torch._dynamo.callback.callback_handler")
    register = getattr(handler, f"register_{moment}_callback", None)
    remove = getattr(handler, f"remove_{moment}_callback", None)
    if register is None or remove is None:
        return lambda: None

    def call(arguments: object) -> None:
        tell(str(getattr(arguments, "compile_id", "")))

    def end() -> None:
        # Emptied by others: then it is gone already.
        with contextlib.suppress(ValueError):
            remove(call)

    register(call)
    return end


def set_job_id(name: str) -> None:
    """Names the job whose profile-guided state is kept; torch 2.5 and older keep none.

    torch reads the variable TORCH_COMPILE_JOB_ID when it is imported (torch/compiler/config.py).
    """
    config = find("torch.compiler.config")
    if hasattr(config, "job_id"):
        config.job_id = name


def in_compiled_code(error: BaseException) -> bool:
    """Returns whether an error came out of the compiler or of the code that it made.

    Also what a graph raises as it runs: its frames, or those of torch that call it, are in the
    traceback.
    """
    if is_compile_error(error):
        return True
    frame = error.__traceback__
    while frame is not None:
        name, code = frame.tb_frame.f_globals.get("__name__", ""), frame.tb_frame.f_code
        if name.startswith(_COMPILER_MODULES) or "torchinductor" in code.co_filename:
            return True
        frame = frame.tb_next
    return False


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error says that a device's memory, or the machine's, was not enough.

    The allocator of the CPU raises a plain RuntimeError (c10/core/impl/alloc_cpu.cpp).
    """
    kinds = tuple(
        filter(None, (find("torch.OutOfMemoryError"), find("torch.cuda.OutOfMemoryError")))
    )
    return isinstance(error, (MemoryError, *kinds)) or "can't allocate memory" in str(error)


def largest(tensors: list[torch.Tensor]) -> float:
    """Returns the largest magnitude in tensors of floats: infinite or NaN where one of them is."""
    together = find("torch._foreach_norm")
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    norms = [
        norm.double()
        for each in kinds.values()
        for norm in (
            together(each, math.inf)
            if together is not None
            else [tensor.abs().max() for tensor in each]
        )
    ]
    return float(torch.stack([norm.to(norms[0].device) for norm in norms]).max()) if norms else 0.0


@contextlib.contextmanager
def backward_compiled_at_once() -> Iterator[None]:
    """Has a backward graph compiled together with its forward, where its failure can be met.

    Otherwise it is compiled when the backward runs (torch._functorch.config). Does nothing where
    torch has no such setting.
    """
    name = "force_non_lazy_backward_lowering"
    config = find("torch._functorch.config")
    if config is None or not hasattr(config, name):
        yield
        return
    with config.patch({name: True}):
        yield


def load_vector_libraries_here(known: Callable[[str], bool]) -> None:
    """Has the compiler load the `known` libraries that try vector instructions in this process.

    All others are loaded in a process of their own, as torch does it. Does nothing where this torch
    has no such place.
    """
    kind = find("torch._inductor.cpu_vec_isa.VecISA")
    probe = getattr(kind, "_probe_load", None)
    if probe is None:
        return

    def load(self: object, path: str) -> bool:
        if not known(path):
            return bool(probe(self, path))
        try:
            ctypes.CDLL(path)
        except OSError:
            return False
        return True

    kind._probe_load = load


def mark_dynamic(tensor: torch.Tensor, dim: int, low: int, high: int) -> bool:
    """Marks a dimension as varying from `low` to `high`; False when this torch cannot.

    As in PyTorch's "Dynamic shapes" page: the next compile makes one graph for all those sizes.
    """
    mark = find("torch._dynamo.mark_dynamic")
    if mark is None:
        return False
    mark(tensor, dim, min=low, max=high)
    return True


def jagged_tensors_made() -> bool:
    """Returns whether this process has made jagged nested tensors; False when it cannot be told."""
    return bool(find("torch.nested._internal.nested_tensor._tensor_id_counter"))


def compiled_call(module: torch.nn.Module) -> Any:
    """Returns what `module.compile()` put in place of the call, or None."""
    return getattr(module, "_compiled_call_impl", None)


def eager_call(module: torch.nn.Module) -> Callable[..., Any]:
    """Returns what a module's call does when it was never compiled, hooks included."""
    return getattr(module, "_call_impl", module.forward)


def has_hooks(model: torch.nn.Module) -> bool:
    """Returns whether something is called beside a model's own forward."""
    return any(
        getattr(module, name, None)
        for module in model.modules()
        for name in ("_forward_hooks", "_forward_pre_hooks")
    )


def set_compiled_call(module: torch.nn.Module, call: Any) -> None:
    """Puts a compiled call in place (`None`: plain eager, as if never compiled).

    `nn.Module.__call__` looks at this attribute first (torch/nn/modules/module.py).
    """
    module._compiled_call_impl = call


def steps_foreach_by_default(parameters: list[torch.Tensor]) -> bool:
    """Returns whether torch's optimizers step these together when neither foreach nor fused is set.

    The rule is torch/optim/optimizer.py's own: all of them on an accelerator, none of a foreign
    class. Without that function: whether all are on a GPU.
    """
    function = find("torch.optim.optimizer._default_to_fused_or_foreach")
    if function is None:
        return all(parameter.device.type == "cuda" for parameter in parameters)
    _, foreach = function(parameters, differentiable=False, use_fused=False)
    return bool(foreach)


def fake_tensors() -> contextlib.AbstractContextManager[object]:
    """Returns a context in which tensors have shapes but no memory.

    Raises `AdvisorError` where this torch has none.
    """
    mode = find("torch._subclasses.fake_tensor.FakeTensorMode")
    if mode is None:
        raise AdvisorError(f"torch {torch.__version__} cannot run a step on shapes alone")
    return mode(allow_non_fake_inputs=True)  # type: ignore[no-any-return]


def unknown_value_errors() -> tuple[type[BaseException], ...]:
    """Returns what is raised where a fake tensor's value would be needed; empty when it is gone."""
    return tuple(
        found
        for name in ("DataDependentOutputException", "DynamicOutputShapeException")
        if (found := find(f"torch._subclasses.fake_tensor.{name}")) is not None
    )


def real_tensors() -> contextlib.AbstractContextManager[object]:
    """Returns a context in which new tensors hold values, also within `fake_tensors()`."""
    unset = find("torch._subclasses.fake_tensor.unset_fake_temporarily")
    return unset() if unset is not None else contextlib.nullcontext()


def flop_formula(operator: Any) -> Callable[..., int] | None:
    """Returns torch's formula for the FLOPs of an operator; None where it has none."""
    formulas = find("torch.utils.flop_counter.flop_registry") or {}
    found: Callable[..., int] | None = formulas.get(getattr(operator, "_overloadpacket", None))
    return found


# Who is told of optimizers' steps. torch goes over its own dictionaries while it calls, so that a
# hook which takes one away, itself or another, ends the person's step with a RuntimeError (2.13).
_BEFORE_STEP: OrderedDict[int, Callable[..., None]] = OrderedDict()
_AFTER_STEP: OrderedDict[int, Callable[..., None]] = OrderedDict()
_dispatched: list[torch.utils.hooks.RemovableHandle] = []


def on_optimizer_step(
    begin: Callable[..., None], end: Callable[..., None]
) -> list[torch.utils.hooks.RemovableHandle]:
    """Has functions called before and after each optimizer's step; never when this torch cannot.

    They may be taken away at any time, also while one of them is called.
    """
    if not _dispatched:
        for name, listeners in (
            ("register_optimizer_step_pre_hook", _BEFORE_STEP),
            ("register_optimizer_step_post_hook", _AFTER_STEP),
        ):
            register = find(f"torch.optim.optimizer.{name}")
            if register is not None:
                _dispatched.append(register(_dispatcher(listeners)))
    handles = []
    for listeners, function in ((_BEFORE_STEP, begin), (_AFTER_STEP, end)):
        handle = torch.utils.hooks.RemovableHandle(listeners)
        listeners[handle.id] = function
        handles.append(handle)
    return handles


def _dispatcher(listeners: OrderedDict[int, Callable[..., None]]) -> Callable[..., None]:
    def dispatch(*arguments: Any) -> None:
        for listener in tuple(listeners.values()):
            listener(*arguments)

    return dispatch


def cpu_has_bfloat16() -> bool:
    """Returns whether the CPU multiplies in bfloat16; False when this torch cannot tell."""
    return any(
        bool(function())
        for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        if (function := find(f"torch.cpu.{name}")) is not None
    )


def tf32_is_off() -> bool:
    """Returns whether float32 products on CUDA are kept from TF32; False when it cannot be told.

    torch 2.9 brought `fp32_precision` beside the older names, which raise once it was used.
    """
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", "none")
    if precision != "none":
        return bool(precision == "ieee")
    try:
        highest = torch.get_float32_matmul_precision() == "highest"
        return highest and not torch.backends.cuda.matmul.allow_tf32
    except RuntimeError:
        return False


class ProfilerEvent(NamedTuple):
    """A call on the host or a piece of a device's work, as torch's profiler saw it.

    `correlation` is the number of a host's call, and on the device that of the call it came from.
    `sequence` is the number of a forward operator in its thread, and in the backward that of the
    operator it belongs to, in `forward_thread`; -1 for others.
    """

    name: str
    thread: int
    start_ns: int
    end_ns: int
    on_device: bool
    correlation: int
    sequence: int = -1
    forward_thread: int = 0


def profiler(device: torch.device) -> torch.profiler.profile:
    """Returns a profiler of the host, and of the device where it is a GPU."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(activities=activities)


def profiler_events(profile: torch.profiler.profile) -> Iterator[ProfilerEvent]:
    """Gives the events of a profile that has ended, without labels laid over a device's work.

    None when this torch does not show them. Read as kineto holds them: for a step of 100k operators
    the objects of `profile.events()` took 3 GB and 47 s, these 1 GB and 12 s (torch 2.13).
    """
    results = getattr(getattr(profile, "profiler", None), "kineto_results", None)
    for event in results.events() if results is not None else ():
        on_device = event.device_type().name != "CPU"
        if on_device and getattr(event, "is_user_annotation", bool)():
            continue
        start_ns = event.start_ns()
        yield ProfilerEvent(
            name=event.name(),
            thread=event.start_thread_id(),
            start_ns=start_ns,
            end_ns=start_ns + event.duration_ns(),
            on_device=on_device,
            correlation=event.linked_correlation_id() if on_device else event.correlation_id(),
            sequence=event.sequence_nr(),
            forward_thread=event.fwd_thread_id(),
        )


def forget_compiled_code() -> None:
    """Has torch compile everything anew from the next call on, as a fresh process would.

    Breaks that were reported before are reported again with all their frames. Does nothing where
    torch has no such function: then what is traced anew cannot be told from what is there.
    """
    for name in ("torch._dynamo.reset", "torch._dynamo.utils.reset_graph_break_dup_checker"):
        function = find(name)
        if function is not None:
            function()


def plain_calls() -> contextlib.AbstractContextManager[object]:
    """Returns a context in which compiled callables run plain eager; one that compiles if gone."""
    stance = find("torch.compiler.set_stance")
    if stance is None:
        return contextlib.nullcontext()
    return stance("force_eager")  # type: ignore[no-any-return]
