"""Every cause with its mend, ranked by what the mend brings to the plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from advisor.profiler.diagnosis import Stakes, diagnosis, fixes
from advisor.profiler.records import (
    Config,
    Failure,
    Fix,
    FixKind,
    GraphBreak,
    GraphBreakCause,
    Interval,
    Pair,
    Recompile,
    RecompileCause,
    Scope,
    Timing,
    Trial,
    TrialKind,
    TrialStatus,
    WhatIf,
)

MODEL = Config()
SCALAR = (("torch._dynamo.config.capture_scalar_outputs", "True"),)
READ = GraphBreak(
    cause=GraphBreakCause.SCALAR_READ,
    reason="item",
    file="a.py",
    line=3,
    code="x.item()",
    hint="https://page",
    hits_per_step=2.0,
    lost_share=0.05,
)
BRANCH = replace(READ, cause=GraphBreakCause.DATA_DEPENDENT_BRANCH, line=9, lost_share=0.4)


def pairs(ratio: float) -> tuple[Pair, ...]:
    return (Pair(eager_s=0.06, compiled_s=0.06 / ratio),) * 12


def trial(ratio: float = 1.2, **fields: object) -> Trial:
    known = {
        "trial_id": "t",
        "kind": TrialKind.COMPILE,
        "status": TrialStatus.OK,
        "config": MODEL,
        "pairs": pairs(ratio),
        "speedup": Interval(median=ratio, low=ratio, high=ratio),
        "graphs": 2,
        "coverage": 0.6,
        "time_coverage": 0.6,
    }
    return Trial(**{**known, **fields})  # type: ignore[arg-type]


def recompile(cause: RecompileCause, line: int, lost_s: float, **fields: object) -> Recompile:
    return Recompile(
        cause=cause,
        reason="s0",
        file="a.py",
        line=line,
        lost_s=lost_s,
        **fields,  # type: ignore[arg-type]
    )


def only(found: tuple[Fix, ...]) -> Fix:
    (fix,) = found
    return fix


def test_the_break_that_loses_most_comes_first() -> None:
    found = fixes([trial(graph_breaks=(READ, BRANCH))])
    assert [fix.line for fix in found] == [9, 3]
    assert all(fix.gain is not None and not fix.measured for fix in found)
    assert found[0].gain is not None and found[1].gain is not None
    assert found[0].gain.median > found[1].gain.median > 1


def test_what_is_known_of_a_break_is_told() -> None:
    fix = only(fixes([trial(graph_breaks=(READ,))]))
    assert (fix.kind, fix.cause, fix.file, fix.line) == (
        FixKind.GRAPH_BREAK, "SCALAR_READ", "a.py", 3,
    )  # fmt: skip
    assert (fix.code, fix.link, fix.hits_per_step) == ("x.item()", "https://page", 2.0)


def test_what_is_left_out_saves_all_its_time_even_where_compiling_gains_nothing() -> None:
    printed = replace(READ, cause=GraphBreakCause.PRINT_OR_LOGGING, lost_share=0.25)
    gain = only(fixes([trial(1.0, graph_breaks=(printed,))])).gain
    assert gain is not None
    assert gain.median == pytest.approx(1 / 0.75)
    assert gain.low == 1


def test_a_setting_that_was_tried_gives_the_measured_gain() -> None:
    what_if = WhatIf(options=SCALAR, removes=("SCALAR_READ",))
    plain = trial(1.2, graph_breaks=(READ,), what_ifs=(what_if,))
    tried = trial(1.5, config=replace(MODEL, options=SCALAR))
    fix = only(fixes([plain, tried]))
    assert fix.measured
    assert fix.gain is not None
    assert fix.gain.median == pytest.approx(1.25)
    assert fix.options == SCALAR


def test_a_setting_that_was_not_tried_is_named_with_an_estimate() -> None:
    what_if = WhatIf(options=SCALAR, removes=("SCALAR_READ",))
    fix = only(fixes([trial(graph_breaks=(READ,), what_ifs=(what_if,))]))
    assert fix.options == SCALAR
    assert not fix.measured
    assert fix.what.count("torch._dynamo.config.capture_scalar_outputs") == 1


def test_a_setting_that_the_mend_does_not_name_is_added() -> None:
    nested = (("torch._dynamo.config.nested_graph_breaks", "true"),)
    what_if = WhatIf(options=nested, removes=("SCALAR_READ",))
    fix = only(fixes([trial(graph_breaks=(READ,), what_ifs=(what_if,))]))
    assert fix.what.endswith("; or set torch._dynamo.config.nested_graph_breaks = True")


def test_a_setting_that_holds_functions_is_written_as_it_is_set() -> None:
    options = (("torch._dynamo.config.reorderable_logging_functions", "builtins.print"),)
    what_if = WhatIf(options=options, removes=("SCALAR_READ",))
    fix = only(fixes([trial(graph_breaks=(READ,), what_ifs=(what_if,))]))
    assert "or set torch._dynamo.config.reorderable_logging_functions.update({print})" in fix.what


def test_what_a_setting_changes_besides_is_said() -> None:
    ignored = (("torch._dynamo.config.ignore_logging_functions", "builtins.print"),)
    what_if = WhatIf(options=ignored, removes=("SCALAR_READ",))
    fix = only(fixes([trial(graph_breaks=(READ,), what_ifs=(what_if,))]))
    assert "what they tell is lost" in fix.what


def test_a_place_is_told_once_with_the_larger_gain() -> None:
    regional = trial(config=Config(scope=Scope.REGIONAL), graph_breaks=(READ,))
    whole = trial(graph_breaks=(replace(READ, lost_share=0.3),))
    assert only(fixes([regional, whole])) == only(fixes([whole]))


def test_recompiles_are_weighed_by_their_time_at_every_start() -> None:
    cheap = recompile(RecompileCause.SHAPE, 5, 1.0)
    dear = recompile(RecompileCause.STRIDE, 6, 9.0)
    stakes = Stakes(total_s=1000.0, starts=4, price_per_hour=3600.0)
    found = fixes([trial(recompiles=(cheap, dear))], stakes)
    assert [(fix.line, fix.lost_s, fix.money_lost) for fix in found] == [
        (6, 9.0, 36.0),
        (5, 1.0, 4.0),
    ]
    assert all(fix.gain is None for fix in found)


def test_without_a_price_no_money_is_lost() -> None:
    found = fixes([trial(recompiles=(recompile(RecompileCause.SHAPE, 5, 1.0),))])
    assert only(found).money_lost is None


def test_behind_the_recompile_limit_the_eager_steps_are_the_loss() -> None:
    again = recompile(RecompileCause.MODULE_ATTRIBUTE, 5, 8.0, settles=False)
    limited = trial(0.95, recompiles=(again,), recompile_limit_hit=True, time_coverage=0.0)
    gain = only(fixes([limited])).gain
    assert gain is not None
    # Published trainings gain 1.25x; this one has no compiled part to take a rate from.
    assert gain.median == pytest.approx(0.95**-1 / (0.95**-1 - 0.2), rel=1e-6)


def test_a_trial_that_failed_is_a_cause_before_all_others() -> None:
    failed = trial(
        status=TrialStatus.FAILED_TO_COMPILE,
        pairs=(),
        failure=Failure(
            kind="double_backward",
            message="the step differentiates twice",
            file="b.py",
            line=4,
        ),
        config=Config(scope=Scope.REGIONAL),
    )
    found = fixes([trial(graph_breaks=(BRANCH,)), failed])
    assert [(fix.kind, fix.cause) for fix in found] == [
        (FixKind.COMPILER, "DOUBLE_BACKWARD"),
        (FixKind.GRAPH_BREAK, "DATA_DEPENDENT_BRANCH"),
    ]
    assert "the step differentiates twice" in found[0].what
    assert (found[0].file, found[0].line) == ("b.py", 4)


def test_numbers_that_differ_are_a_cause() -> None:
    wrong = trial(
        status=TrialStatus.DISAGREES, failure=Failure(kind="numerics", message="differ by 3 %")
    )
    assert only(fixes([wrong])).cause == "NUMBERS_DIFFER"


def test_a_silent_no_op_is_a_cause() -> None:
    fix = only(fixes([trial(1.0, graphs=0, coverage=0.0, time_coverage=0.0)]))
    assert (fix.kind, fix.cause) == (FixKind.COMPILER, "NOTHING_COMPILED")


def test_cuda_graphs_that_were_left_out_are_told_with_the_reason() -> None:
    fix = only(fixes([trial(cudagraph_skips=("skipping cudagraphs due to mutated inputs",))]))
    assert fix.cause == "CUDA_GRAPHS_SKIPPED"
    assert "mutated inputs" in fix.what


def test_a_clean_trial_needs_no_mend() -> None:
    clean = trial(coverage=0.97, time_coverage=0.98)
    assert fixes([clean]) == ()
    said = diagnosis("a.py:build", [clean], ())
    assert "Nothing ends a graph, and nothing is compiled twice." in said.summary


def test_the_job_is_ranked_among_the_causes_of_the_compiler() -> None:
    waiting = Trial(
        trial_id="e",
        kind=TrialKind.EAGER,
        status=TrialStatus.OK,
        eager_step_s=Interval(median=0.06, low=0.06, high=0.06),
        eager=Timing(step_s=Interval(median=0.06, low=0.06, high=0.06), data_wait_s=0.06),
    )
    found = fixes([waiting, trial(graph_breaks=(READ,))])
    assert [(fix.kind, fix.cause) for fix in found] == [
        (FixKind.JOB, "DATA_WAIT"),
        (FixKind.GRAPH_BREAK, "SCALAR_READ"),
    ]


def test_the_summary_explains_the_whole_model_first() -> None:
    regional = trial(1.1, config=Config(scope=Scope.REGIONAL))
    whole = trial(1.3, graph_breaks=(BRANCH,))
    said = diagnosis("a.py:build", [regional, whole], fixes([regional, whole]))
    assert said.config == MODEL
    assert said.summary[0].startswith("model default captured 2 graphs that hold 60%")
    assert said.summary[-1].startswith("The mend that pays most: data dependent branch at a.py:9, ")


def test_nothing_tried_nothing_explained() -> None:
    skipped = trial(status=TrialStatus.SKIPPED)
    assert fixes([skipped]) == ()
    assert "nothing to explain" in diagnosis("a.py:build", [skipped], ()).summary[0]


def test_the_summary_counts_what_stands_in_the_way() -> None:
    again = recompile(RecompileCause.SHAPE, 5, 2.0, count=3)
    one = diagnosis("a.py:build", [trial(graph_breaks=(READ,))], ())
    assert "1 place ends a graph." in one.summary
    both = diagnosis("a.py:build", [trial(graph_breaks=(READ, BRANCH), recompiles=(again,))], ())
    assert "2 places end a graph; 3 recompiles took 2.0 s." in both.summary
