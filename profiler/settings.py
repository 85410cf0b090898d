"""Settings of the compiler: how they are named and written, and which remove a cause.

Knows torch's settings by name only and does not import it, so that lines to paste can be written
where no torch is. What each row of the tables does was tried with torch 2.13; on another version
the probe (`probe.what_ifs`) shows whether it still does.
"""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from advisor.profiler.errors import PlanError
from advisor.profiler.records import Config, Dynamic, GraphBreak, Recompile
from advisor.profiler.records import GraphBreakCause as Break
from advisor.profiler.records import RecompileCause as Re

# Name and value of settings, sorted by name, as in `Config.options`.
Options = tuple[tuple[str, str], ...]

DYNAMO = "torch._dynamo.config."
INDUCTOR = "torch._inductor.config."
RECOMPILE_LIMIT = f"{DYNAMO}recompile_limit"
# torch's own recompile limit, and the most that is offered in its place.
USUAL_LIMIT = 8
HIGHEST_LIMIT = 64
# Settings that hold a set of functions; their value is a list of dotted names with commas.
REORDERABLE = f"{DYNAMO}reorderable_logging_functions"
IGNORED = f"{DYNAMO}ignore_logging_functions"
FUNCTION_SETS = frozenset({REORDERABLE, IGNORED, f"{DYNAMO}ignore_logger_methods"})

_MOST_CANDIDATES = 4
_CONSTANTS = {"true": "True", "false": "False", "none": "None"}
_DYNAMIC = {Dynamic.AUTO: None, Dynamic.TRUE: True, Dynamic.FALSE: False}
_NAME = re.compile(r"(?:torch\._(dynamo|inductor)\.config\.|(dynamo|inductor)\.)?(\w+(?:\.\w+)*)")
_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_ROOMS = {"dynamo": DYNAMO, "inductor": INDUCTOR}
# The settings of torch._dynamo.config (torch 2.13). A bare name that is none of them is
# torch._inductor.config's; the two modules share no name.
_DYNAMO_SETTINGS = """
accumulated_cache_size_limit accumulated_recompile_limit allow_empty_graphs
allow_ignore_mark_dynamic allow_rnn allow_unspec_int_on_nn_module
allowed_functions_module_string_ignorelist assume_dunder_attributes_remain_unchanged
assume_static_by_default automatic_dynamic_exclusion_guard automatic_dynamic_local_pgo
automatic_dynamic_remote_pgo automatic_dynamic_shapes automatic_dynamic_shapes_mark_as base_dir
cache_size_limit caching_precompile capture_autograd_function capture_dynamic_output_shape_ops
capture_func_transforms capture_profiler_record_function capture_scalar_outputs
capture_sparse_compute compiled_autograd compiled_autograd_kwargs_override
constant_fold_autograd_profiler_enabled cprofile cudagraph_backend_keep_input_mutation
cudagraph_backend_support_input_mutation dead_code_elimination debug_backend_override
debug_dir_root debug_disable_compile_counter debug_dynamo_config_override
debug_force_graph_break_on_leaf_return debug_force_nested_calls debug_inductor_config_override
disable do_not_emit_runtime_asserts dont_skip_tracing dynamic_shapes dynamo_profiler
enable_aot_compile enable_compiler_collectives enable_cpp_framelocals_guard_eval
enable_cpp_guard_manager enable_cpp_symbolic_shape_guards enable_dynamo_decompositions
enable_faithful_generator_behavior enable_invoke_subgraph_regional_compile
enable_p2p_compilation enable_trace_contextlib enable_trace_load_build_class
enable_trace_unittest error_on_dynamo_callback_in_fullgraph_compiled_code
error_on_nested_fx_trace error_on_nested_jit_trace error_on_recompile fail_on_cache_limit_hit
fail_on_recompile_limit_hit fake_tensor_cache_crosscheck_enabled fake_tensor_cache_enabled
fake_tensor_disable_inference_mode force_compile_during_fx_trace
force_nn_module_property_static_shapes force_parameter_static_shapes
force_unspec_int_unbacked_size_like_on_torchrec_kjt generate_pycode graph_break_on_nn_param_ctor
graph_deduplication_lint guard_nn_modules guard_nn_modules_using_dict_tags ignore_logger_methods
ignore_logging_functions inject_BUILD_SET_unimplemented_TESTING_ONLY inline_inbuilt_nn_modules
inline_invoke_subgraph inline_single_use_invoke_subgraph inline_torch_dispatch_torch_compile
install_free_tensors install_free_tensors_for_export invalidate_compile_context_weakrefs
issue_3_13_0_warning leaf_function_check_escaped_gradients leaf_function_validate_outputs
log_compilation_metrics log_file_name log_graph_in_out_metadata
max_saved_pointers_for_recursive_dict_tags_check minimum_call_count nested_graph_breaks
nontraceable_tensor_subclasses numpy_default_complex numpy_default_float numpy_default_int
only_allow_pt2_compliant_ops optimize_ddp optimize_ddp_lazy_compile
prefer_deferred_runtime_asserts_over_guards prepare_freezing pt2_compile_id_prefix
raise_on_ctx_manager_usage raise_on_unsafe_aot_autograd recompile_limit
record_compile_time_instruction_count record_runtime_overhead reorderable_logging_functions
replay_record_enabled replay_side_effects report_guard_failures repro_after repro_forward_only
repro_ignore_non_fp repro_level repro_tolerance rewrite_assert_with_torch_assert
run_gc_after_compile same_two_models_use_fp64 side_effect_replay_policy
skip_code_recursive_on_cache_limit_hit skip_code_recursive_on_recompile_limit_hit
skip_fsdp_guards skip_fwd_side_effects_in_bwd_under_checkpoint
skip_guards_on_constant_func_defaults skip_nnmodule_hook_guards
skip_no_tensor_aliasing_guards_on_parameters skip_tensor_guards_with_matching_dict_tags
skip_torchrec skipfiles_inline_module_allowlist specialize_float specialize_int
strict_precompile suppress_errors trace_autograd_ops trace_numpy traceable_tensor_subclasses
track_nodes_for_deduplication use_graph_deduplication use_lamba_guard_for_object_aliasing
use_lazy_graph_module use_numpy_random_stream use_recursive_dict_tags_for_guards verbose
verify_correctness wrap_top_frame
"""
_DYNAMO_NAMES = frozenset(_DYNAMO_SETTINGS.split())

# Methods of logging.Logger that only tell something; the last three are transformers' own, which
# hangs them on logging.Logger when it is imported (transformers/utils/logging.py).
_LOGGER_METHODS = ("critical", "debug", "error", "exception", "info", "log", "warn", "warning")
_TRANSFORMERS_METHODS = ("info_once", "warning_advice", "warning_once")
_METHOD = re.compile(rf"\.({'|'.join((*_LOGGER_METHODS, *_TRANSFORMERS_METHODS))})\s*\(")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Remedy:
    """Settings to try for a cause; `instead` where the first do not carry far enough."""

    causes: frozenset[Break] = frozenset()
    # Searched in the reason and the source line; a row without causes goes by its words alone.
    words: str = ""
    options: Options
    instead: Options = ()


_SCALARS = (f"{DYNAMO}capture_scalar_outputs", "true")
# Read from the top: the first row that fits a break wins. Tried and left out: nested_graph_breaks
# (fewer graphs, but the same breaks), dont_skip_tracing (raises inside torch 2.13 on built-ins).
_BREAKS = (
    _Remedy(words=r"\b(RNN|LSTM|GRU)\b", options=((f"{DYNAMO}allow_rnn", "true"),)),
    _Remedy(
        words=r"trace_autograd_ops|torch\.autograd\.grad\b",
        options=((f"{DYNAMO}trace_autograd_ops", "true"),),
    ),
    _Remedy(
        words=r"graph_break_on_nn_param_ctor|\bParameter\(",
        options=((f"{DYNAMO}graph_break_on_nn_param_ctor", "false"),),
    ),
    _Remedy(
        words=r"trace class definition|__build_class__",
        options=((f"{DYNAMO}enable_trace_load_build_class", "true"),),
    ),
    # Printed and warned after the graph, where the arguments are tensors, constants and formatted
    # strings (torch/_dynamo/variables/misc.py, can_reorder_logs); else not at all.
    _Remedy(
        words=r"`print`|\bprint\(",
        options=((REORDERABLE, "builtins.print"),),
        instead=((IGNORED, "builtins.print"),),
    ),
    _Remedy(
        words=r"_warnings\.warn\b|\bwarnings\.warn\(",
        options=((REORDERABLE, "warnings.warn"),),
        instead=((IGNORED, "warnings.warn"),),
    ),
    _Remedy(causes=frozenset({Break.SCALAR_READ}), options=(_SCALARS,)),
    _Remedy(
        causes=frozenset({Break.DYNAMIC_OUTPUT_SHAPE}),
        options=((f"{DYNAMO}capture_dynamic_output_shape_ops", "true"), _SCALARS),
    ),
)
# An integer attribute of a module that is compiled in: `self.global_step == 0`. What indexes into
# a container (`L['t'] == 3`) is no attribute, and a float no integer.
_MODULE_INTEGER = re.compile(r"\.[A-Za-z_]\w*[\])'\"]*\s*==\s*-?\d+(?![\d.e])")
_INTEGERS: Options = ((f"{DYNAMO}allow_unspec_int_on_nn_module", "true"),)

# What a setting changes besides the cause: has to be said wherever it is advised.
_EFFECTS = {
    REORDERABLE: "{functions} then run after the graph instead of where they stand",
    IGNORED: "{functions} then do nothing inside compiled code: what they tell is lost",
    f"{DYNAMO}allow_rnn": "torch calls its tracing of recurrent layers experimental",
    RECOMPILE_LIMIT: "all {value} variants are compiled, each at the price of one",
}


def canonical(name: str) -> str:
    """Returns a setting's whole path: `torch._dynamo.config.verbose` for `verbose`.

    Raises `PlanError` for what cannot be the name of a setting.
    """
    match = _NAME.fullmatch(name)
    if match is None or match[3].startswith("torch."):
        raise _no_setting(name)
    room = match[1] or match[2] or ("dynamo" if match[3] in _DYNAMO_NAMES else "inductor")
    return _ROOMS[room] + match[3]


def functions(name: str, value: str) -> tuple[str, ...]:
    """Returns the dotted names of the functions in the value of a setting that holds a set.

    Raises `PlanError` for what is no such list.
    """
    names = [part.strip() for part in value.split(",") if part.strip()]
    for part in names:
        if _FUNCTION.fullmatch(part) is None:
            raise PlanError(
                f"option {name}={value} is not a list of functions",
                f"{part!r} is no dotted name",
                "write them as builtins.print,warnings.warn",
            )
    return tuple(dict.fromkeys(names))


def literal(text: str) -> object:
    """Returns the Python value that the text of an option stands for, the text itself for none."""
    try:
        value: object = ast.literal_eval(_CONSTANTS.get(text.lower(), text))
    except (ValueError, SyntaxError):
        return text
    return value


def lines(options: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Returns the lines that set options, without the imports that they need (`modules`).

    Raises `PlanError` for a name that is no setting of torch.
    """
    return tuple(_line(name, value) for name, value in options)


def modules(options: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Returns the modules that the lines which set options need, each once."""
    found: dict[str, None] = {}
    for name, value in options:
        whole = canonical(name)
        found[whole.partition(".config.")[0] + ".config"] = None
        for function in functions(name, value) if whole in FUNCTION_SETS else ():
            # A class is no module: `logging.Logger.info` is found in `logging`.
            named = [part for part in function.split(".")[:-1] if not part[:1].isupper()]
            if named != ["builtins"]:
                found[".".join(named)] = None
    return tuple(found)


def is_dotted_name(text: str) -> bool:
    """Returns whether text can stand in Python as names with dots between them."""
    return all(part.isidentifier() and not keyword.iskeyword(part) for part in text.split("."))


def compile_arguments(config: Config) -> dict[str, Any]:
    """Returns the arguments of `torch.compile` for a configuration."""
    arguments: dict[str, Any] = {
        "dynamic": _DYNAMIC[config.dynamic],
        "fullgraph": config.fullgraph,
        "backend": config.backend,
    }
    if config.backend == "inductor":
        arguments["mode"] = config.mode.value
    return arguments


def _line(name: str, value: str) -> str:
    """Returns the line that sets an option; `mode` and `options` exclude each other in torch."""
    whole = canonical(name)
    if not is_dotted_name(whole):
        raise _no_setting(name)
    if whole not in FUNCTION_SETS:
        return f"{whole} = {literal(value)!r}"
    named = functions(name, value)
    if not all(map(is_dotted_name, named)):
        raise PlanError(f"option {name}={value} is not a list of functions")
    members = ", ".join(function.removeprefix("builtins.") for function in named)
    # Into the set rather than in its place: what stands in it already stays.
    return f"{whole}.update({{{members}}})" if members else f"{whole}.update(())"


def _no_setting(name: str) -> PlanError:
    return PlanError(
        f"the option {name!r} is not a setting of torch",
        "a name of torch._dynamo.config or torch._inductor.config is expected",
    )


def merged(*parts: Options) -> Options:
    """Returns options taken together, sorted by name; sets of functions are united."""
    found: dict[str, str] = {}
    for name, value in (pair for options in parts for pair in options):
        known = found.get(name)
        if known is not None and name in FUNCTION_SETS:
            both = {*functions(name, known), *functions(name, value)}
            found[name] = ",".join(sorted(both))
        else:
            found[name] = value
    return tuple(sorted(found.items()))


def size(options: Options) -> int:
    """Returns how much options ask for: settings, and for sets each function."""
    return sum(
        len(functions(name, value)) if name in FUNCTION_SETS else 1 for name, value in options
    )


def effects(options: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Returns a clause for each setting that changes more than what is compiled."""
    return tuple(
        _EFFECTS[name].format(
            value=value, functions=value.replace("builtins.", "").replace(",", ", ")
        )
        for name, value in options
        if name in _EFFECTS
    )


def variants(recompiles: Iterable[Recompile]) -> int:
    """Returns how many compiled variants recompiles come to, as far as they were counted.

    Those of one cause are told at several places, each with the variants of all of them.
    """
    most: dict[Re, int] = {}
    for one in recompiles:
        most[one.cause] = max(most.get(one.cause, 0), one.variants or 0)
    return sum(most.values())


def candidates(
    breaks: Sequence[GraphBreak], recompiles: Sequence[Recompile]
) -> tuple[Options, ...]:
    """Returns settings that may remove these causes: at most four, all together first.

    Then all with what to try instead, then each alone, those for what was met most first.
    """
    remedies: dict[Options, Options] = {}
    logged: list[Options] = []
    for met in sorted(breaks, key=lambda one: -one.count):
        found = _for_break(met)
        if found is not None:
            remedies[found.options] = found.instead
        elif names := _logging_functions(met):
            logged.append(((IGNORED, ",".join(names)),))
    if logged:  # all loggers are one experiment
        remedies[merged(*logged)] = ()
    remedies.update(dict.fromkeys(_for_recompiles(recompiles), ()))
    together = merged(*remedies)
    others = merged(*(instead or first for first, instead in remedies.items()))
    alone = (merged(first) for first in remedies)
    return tuple(dict.fromkeys(o for o in (together, others, *alone) if o))[:_MOST_CANDIDATES]


def _for_break(met: GraphBreak) -> _Remedy | None:
    text = f"{met.reason} {met.code}"
    for row in _BREAKS:
        known = not row.causes or met.cause in row.causes
        if known and (not row.words or re.search(row.words, text)):
            return row
    return None


def _logging_functions(met: GraphBreak) -> tuple[str, ...]:
    """Returns what logs here, in the form that Dynamo looks up.

    That is the function of the class for a method, whoever the logger is, also for a cached one
    (`logging.Logger.warning_once`), and the function itself for one of a module (`logging.info`);
    see torch/_dynamo/variables/misc.py, LoggingLoggerVariable.
    """
    called = _METHOD.search(met.code)
    if called and re.search(r"\blogging\.$", met.code[: called.start() + 1]):
        return (f"logging.{called[1]}",)
    told = met.cause is Break.PRINT_OR_LOGGING and re.search(r"\blogg", met.reason)
    if told and called:
        return (f"logging.Logger.{called[1]}",)
    # The call spans several lines, or stands in the library: any of the standard ones.
    return tuple(f"logging.Logger.{name}" for name in _LOGGER_METHODS) if told else ()


def _for_recompiles(recompiles: Sequence[Recompile]) -> list[Options]:
    found: list[Options] = []
    integers = (Re.MODULE_ATTRIBUTE, Re.PYTHON_NUMBER)
    if any(one.cause in integers and _MODULE_INTEGER.search(one.reason) for one in recompiles):
        found.append(_INTEGERS)
    # A higher limit pays where the variants come to an end; a counter would fill any limit.
    if recompiles and all(one.settles and one.variants for one in recompiles):
        count = variants(recompiles)
        if count > USUAL_LIMIT:
            limit = min(HIGHEST_LIMIT, 1 << count.bit_length())
            found.append(((RECOMPILE_LIMIT, str(limit)),))
    return found
