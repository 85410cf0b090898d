"""Settings of the compiler: which are tried for what, put in place, and written down to paste."""

from __future__ import annotations

import ast
import builtins
import json
import logging
import pprint
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._dynamo.config as dynamo_config
import torch._inductor.config as inductor_config

from advisor.paste import code
from advisor.profiler import options, settings
from advisor.profiler.errors import PlanError
from advisor.profiler.records import (
    Config,
    GraphBreak,
    GraphBreakCause,
    Recompile,
    RecompileCause,
    WorkloadFacts,
)
from advisor.profiler.settings import DYNAMO, IGNORED, INDUCTOR, RECOMPILE_LIMIT, REORDERABLE

SCALARS = (f"{DYNAMO}capture_scalar_outputs", "true")
SHAPES = (f"{DYNAMO}capture_dynamic_output_shape_ops", "true")
INTEGERS = (f"{DYNAMO}allow_unspec_int_on_nn_module", "true")
FACTS = WorkloadFacts(
    fingerprint="f",
    model_class="net.Net",
    parameters=1,
    trainable_parameters=1,
    optimizer="SGD",
    dtype="float32",
    shapes=(),
)
# Changed by the tests that put settings in place for the life of the process.
TOUCHED = ("capture_scalar_outputs", "reorderable_logging_functions", "ignore_logging_functions")


@pytest.fixture
def as_before() -> Iterator[None]:
    saved = {name: getattr(dynamo_config, name) for name in TOUCHED}
    for name in TOUCHED[1:]:
        setattr(dynamo_config, name, set())
    yield
    for name, value in saved.items():
        setattr(dynamo_config, name, value)


def met(cause: GraphBreakCause, reason: str = "", line: str = "", count: int = 1) -> GraphBreak:
    return GraphBreak(cause=cause, reason=reason, code=line, count=count, file="m.py", line=count)


def again(cause: RecompileCause, reason: str, **known: object) -> Recompile:
    return Recompile(cause=cause, reason=reason, **known)  # type: ignore[arg-type]


# --- Names -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("capture_scalar_outputs", f"{DYNAMO}capture_scalar_outputs"),
        ("dynamo.verbose", f"{DYNAMO}verbose"),
        ("epilogue_fusion", f"{INDUCTOR}epilogue_fusion"),
        ("triton.cudagraphs", f"{INDUCTOR}triton.cudagraphs"),
        ("inductor.cpp.threads", f"{INDUCTOR}cpp.threads"),
        (f"{INDUCTOR}epilogue_fusion", f"{INDUCTOR}epilogue_fusion"),
        (f"{DYNAMO}allow_rnn", f"{DYNAMO}allow_rnn"),
    ],
)
def test_every_form_of_a_name_becomes_its_whole_path(name: str, whole: str) -> None:
    assert settings.canonical(name) == whole
    assert settings.canonical(whole) == whole


@pytest.mark.parametrize("name", ["", "a b", "x=1", "torch.backends.cudnn.benchmark", "a..b"])
def test_what_is_no_setting_is_refused(name: str) -> None:
    with pytest.raises(PlanError, match="is not a setting of torch"):
        settings.canonical(name)


def test_bare_names_go_to_the_module_that_has_them() -> None:
    """The list of names agrees with the torch that is installed, in both directions."""
    for module, room in ((dynamo_config, DYNAMO), (inductor_config, INDUCTOR)):
        names = [name for name in module._config if not name.startswith("_")]
        names = [name for name in names if name != "TYPE_CHECKING"]
        assert len(names) > 100
        assert [n for n in names if settings.canonical(n) != room + n] == []


def test_names_are_known_without_torch(tmp_path: Path) -> None:
    script = (
        "import json, sys, advisor.paste, advisor.profiler.settings\n"
        "print(json.dumps('torch' in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) is False


# --- Candidates ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (met(GraphBreakCause.SCALAR_READ), (SCALARS,)),
        (met(GraphBreakCause.DYNAMIC_OUTPUT_SHAPE), (SHAPES, SCALARS)),
        (
            met(GraphBreakCause.PRINT_OR_LOGGING, "builtin operator `print` with", "print(x)"),
            ((REORDERABLE, "builtins.print"),),
        ),
        (
            met(GraphBreakCause.PRINT_OR_LOGGING, "the Python builtin `_warnings.warn`."),
            ((REORDERABLE, "warnings.warn"),),
        ),
        (
            met(
                GraphBreakCause.PRINT_OR_LOGGING,
                "logging.Logger methods are not supported",
                "self.log.warning_once('x')",
            ),
            ((IGNORED, "logging.Logger.warning_once"),),
        ),
        (
            met(GraphBreakCause.UNSUPPORTED_PYTHON, "python_type()", "logging.info('x')"),
            ((IGNORED, "logging.info"),),
        ),
        (
            met(GraphBreakCause.UNSUPPORTED_PYTHON, "does not support RNN, GRU, or LSTM."),
            ((f"{DYNAMO}allow_rnn", "true"),),
        ),
        (
            met(GraphBreakCause.OTHER, "Attempted to call `torch.autograd.grad` with config"),
            ((f"{DYNAMO}trace_autograd_ops", "true"),),
        ),
        (
            met(GraphBreakCause.UNSUPPORTED_PYTHON, "not supported", "p = nn.Parameter(x)"),
            ((f"{DYNAMO}graph_break_on_nn_param_ctor", "false"),),
        ),
        (
            met(GraphBreakCause.UNSUPPORTED_PYTHON, "Cannot trace class definition: the"),
            ((f"{DYNAMO}enable_trace_load_build_class", "true"),),
        ),
    ],
)
def test_a_break_has_its_setting(found: GraphBreak, wanted: settings.Options) -> None:
    assert settings.candidates([found], [])[0] == wanted


@pytest.mark.parametrize(
    "found",
    [
        met(GraphBreakCause.DATA_DEPENDENT_BRANCH, "data-dependent branching", "if x.sum() > 0:"),
        met(GraphBreakCause.FOREIGN_CALL, "third-party C extension", "linear_sum_assignment(c)"),
        met(GraphBreakCause.UNSUPPORTED_PYTHON, "no tracing", "self.catalog.info(x)"),
        met(GraphBreakCause.UNSUPPORTED_PYTHON, "no tracing", "pprint(x)"),
    ],
)
def test_what_only_an_edit_removes_has_none(found: GraphBreak) -> None:
    assert settings.candidates([found], []) == ()


def test_a_logging_call_over_several_lines_ignores_the_standard_methods() -> None:
    found = met(GraphBreakCause.PRINT_OR_LOGGING, "logging.Logger methods are not", "'x',")
    ((name, value),) = settings.candidates([found], [])[0]
    assert name == IGNORED
    methods = [function.rpartition(".")[2] for function in settings.functions(name, value)]
    assert "warning" in methods
    assert all(hasattr(logging.Logger, method) for method in methods)


def test_all_together_comes_first_then_what_to_try_instead_then_each_alone() -> None:
    breaks = [
        met(GraphBreakCause.PRINT_OR_LOGGING, "builtin operator `print` with", count=2),
        met(GraphBreakCause.SCALAR_READ, count=9),
        met(GraphBreakCause.DYNAMIC_OUTPUT_SHAPE),
    ]
    found = settings.candidates(breaks, [])
    assert found == (
        (SHAPES, SCALARS, (REORDERABLE, "builtins.print")),
        (SHAPES, SCALARS, (IGNORED, "builtins.print")),
        (SCALARS,),
        ((REORDERABLE, "builtins.print"),),
    )


def test_loggers_are_one_experiment() -> None:
    reason = "logging.Logger methods are not supported"
    breaks = [
        met(GraphBreakCause.PRINT_OR_LOGGING, reason, "log.info(x)"),
        met(GraphBreakCause.PRINT_OR_LOGGING, reason, "log.debug(x)"),
    ]
    assert settings.candidates(breaks, []) == (
        ((IGNORED, "logging.Logger.debug,logging.Logger.info"),),
    )


@pytest.mark.parametrize(
    ("reason", "helps"),
    [
        ("self.global_step == 0", True),
        ("s.n == 12", True),
        ("self.inner['n'].steps == -1", True),
        ("self.rate == 0.25", False),
        ("self.rate == 1e-05", False),
        ("t == 3", False),
        ("L['t'] == 3", False),
        ("self.name == 'web'", False),
    ],
)
def test_an_integer_of_a_module_has_its_setting(reason: str, helps: bool) -> None:
    for cause in (RecompileCause.MODULE_ATTRIBUTE, RecompileCause.PYTHON_NUMBER):
        found = settings.candidates([], [again(cause, reason, settles=False)])
        assert found == (((INTEGERS,),) if helps else ())


@pytest.mark.parametrize(
    ("variants", "settles", "limit"),
    [(12, True, "16"), (16, True, "32"), (40, True, "64"), (500, True, "64"), (12, False, None)],
)
def test_a_higher_limit_is_offered_for_a_known_number_of_variants(
    variants: int, settles: bool, limit: str | None
) -> None:
    one = again(RecompileCause.PYTHON_NUMBER, "t == 3", settles=settles, variants=variants)
    wanted = (((RECOMPILE_LIMIT, limit),),) if limit else ()
    assert settings.candidates([], [one]) == wanted


def test_a_counter_beside_finite_variants_gets_no_higher_limit() -> None:
    finite = again(RecompileCause.PYTHON_NUMBER, "t == 3", settles=True, variants=12)
    endless = again(RecompileCause.OTHER, "name == 'a'", settles=False)
    few = again(RecompileCause.TRAIN_EVAL, "self.training", settles=True, variants=2)
    assert settings.candidates([], [finite, endless]) == ()
    assert settings.candidates([], [few]) == ()


def test_variants_of_one_cause_are_counted_once() -> None:
    """Each place of a cause tells the variants of all of them."""
    places = [
        again(RecompileCause.PYTHON_NUMBER, f"t == {n}", line=n, settles=True, variants=12)
        for n in (1, 2)
    ]
    other = again(RecompileCause.TRAIN_EVAL, "self.training", settles=True, variants=2)
    assert settings.variants([*places, other]) == 14
    assert settings.candidates([], [*places, other]) == (((RECOMPILE_LIMIT, "16"),),)


def test_sets_are_united_and_other_settings_replaced() -> None:
    first = ((REORDERABLE, "builtins.print"), (RECOMPILE_LIMIT, "16"))
    second = ((RECOMPILE_LIMIT, "32"), (REORDERABLE, "warnings.warn"))
    both = settings.merged(first, second)
    assert both == ((RECOMPILE_LIMIT, "32"), (REORDERABLE, "builtins.print,warnings.warn"))
    assert settings.size(both) == 3


def test_what_is_lost_with_a_setting_is_said() -> None:
    said = settings.effects(((IGNORED, "builtins.print,logging.info"), SCALARS))
    assert said == (
        "print, logging.info then do nothing inside compiled code: what they tell is lost",
    )


# --- Put in place ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["capture_scalar_outputs", "dynamo.capture_scalar_outputs"])
def test_every_form_of_a_name_is_set(name: str, as_before: None) -> None:
    for text, value in (("True", True), ("false", False)):
        options.apply_options(Config(options=((name, text),)))
        assert dynamo_config.capture_scalar_outputs is value


def test_sets_hold_the_very_functions_and_keep_what_was_there(as_before: None) -> None:
    dynamo_config.ignore_logging_functions = {repr}
    names = "builtins.print, warnings.warn,logging.Logger.info"
    options.apply_options(Config(options=((IGNORED, names),)))
    assert dynamo_config.ignore_logging_functions == {
        repr,
        print,
        warnings.warn,
        logging.Logger.info,
    }


def test_settings_come_back_even_when_the_block_raises() -> None:
    wanted = (
        SCALARS,
        (RECOMPILE_LIMIT, "16"),
        (REORDERABLE, "builtins.print"),
        ("cpp.threads", "3"),
        ("cpp.cxx", "(None, 'g++')"),
    )

    def now() -> tuple[object, ...]:
        return (
            dynamo_config.capture_scalar_outputs,
            dynamo_config.recompile_limit,
            set(dynamo_config.reorderable_logging_functions),
            inductor_config.cpp.threads,
            inductor_config.cpp.cxx,
        )

    before = now()
    seen: list[object] = []

    def block() -> None:
        with options.applied(wanted):
            seen.append(now())
            raise KeyError

    with pytest.raises(KeyError):
        block()
    assert seen == [(True, 16, {print}, 3, (None, "g++"))]
    assert now() == before


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("no_such_option", "1", "option 'no_such_option' is unknown to torch"),
        (f"{INDUCTOR}capture_scalar_outputs", "true", "is unknown to torch"),
        ("inductor.capture_scalar_outputs", "true", "is unknown to torch"),
        ("capture_scalar_outputs", "maybe", "is not true or false"),
        ("recompile_limit", "many", "is not a number"),
        (IGNORED, "print", "'print' is no dotted name"),
        (IGNORED, "builtins.prnt", "'builtins.prnt', which is no function here"),
        (IGNORED, "no_such_module.f", "which is no function here"),
        (IGNORED, "builtins.__name__", "which is no function here"),
        ("cpp.cxx", "g++", "is not a tuple"),
        ("a b", "1", "is not a setting of torch"),
    ],
)
def test_a_wrong_option_is_one_sentence_and_sets_nothing(
    name: str, text: str, words: str, as_before: None
) -> None:
    config = Config(options=(SCALARS, (name, text)))
    with pytest.raises(PlanError, match=words) as raised:
        options.apply_options(config)
    assert "\n" not in str(raised.value)
    assert dynamo_config.capture_scalar_outputs is False


# --- Written down ----------------------------------------------------------------------------


def test_pasted_lines_set_what_the_trial_set(as_before: None) -> None:
    class Net(torch.nn.Module):
        pass

    dynamo_config.reorderable_logging_functions = {pprint.pp}
    config = Config(
        options=(
            SCALARS,
            (IGNORED, "logging.Logger.info,logging.warning"),
            (REORDERABLE, "builtins.print,warnings.warn"),
        )
    )
    lines = code(config, FACTS)
    model = Net()
    exec(lines, {"model": model})
    assert dynamo_config.capture_scalar_outputs is True
    assert dynamo_config.reorderable_logging_functions == {
        pprint.pp,
        print,
        warnings.warn,
    }
    assert dynamo_config.ignore_logging_functions == {logging.Logger.info, logging.warning}
    assert model._compiled_call_impl is not None
    assert lines.splitlines() == [
        "import logging",
        "import warnings",
        "import torch._dynamo.config",
        "",
        "torch._dynamo.config.capture_scalar_outputs = True",
        "torch._dynamo.config.ignore_logging_functions.update("
        "{logging.Logger.info, logging.warning})",
        "torch._dynamo.config.reorderable_logging_functions.update({print, warnings.warn})",
        "model.compile()",
    ]


def test_pasted_bare_names_reach_the_module_that_has_them() -> None:
    lines = code(Config(options=(("epilogue_fusion", "True"), ("recompile_limit", "16"))), FACTS)
    assert "torch._inductor.config.epilogue_fusion = True" in lines
    assert "torch._dynamo.config.recompile_limit = 16" in lines
    before = dynamo_config.recompile_limit, inductor_config.epilogue_fusion
    try:
        exec("\n".join(lines.splitlines()[:-1]))
        assert dynamo_config.recompile_limit == 16
    finally:
        dynamo_config.recompile_limit, inductor_config.epilogue_fusion = before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (REORDERABLE, "os.system('x')"),
        (IGNORED, "a.if"),
        (REORDERABLE, "print"),
        ("x.class", "1"),
        ("torch.x", "1"),
    ],
)
def test_what_cannot_be_pasted_is_refused(name: str, value: str) -> None:
    with pytest.raises(PlanError):
        code(Config(options=((name, value),)), FACTS)


def test_every_candidate_can_be_applied_and_pasted() -> None:
    """No row of the tables names a setting that this torch does not have."""
    rows = [row.options for row in settings._BREAKS]
    rows += [row.instead for row in settings._BREAKS if row.instead]
    rows += [(INTEGERS,), ((RECOMPILE_LIMIT, "16"),)]
    methods = ",".join(f"logging.Logger.{name}" for name in settings._LOGGER_METHODS)
    rows.append(((IGNORED, methods),))
    for row in rows:
        with options.applied(row):
            pass
        ast.parse(code(Config(options=row), FACTS))
    assert builtins.print not in dynamo_config.reorderable_logging_functions
