"""The diagnosis as text: what is wrong first, one block for each mend, 80 columns, no colour."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest

from advisor.cause_names import cause_name, cause_page, plain_mend
from advisor.explain import place, print_diagnosis
from advisor.profiler.mends import break_mend
from advisor.profiler.records import (
    Config,
    Diagnosis,
    Environment,
    Failure,
    Fix,
    FixKind,
    GraphBreak,
    GraphBreakCause,
    Interval,
    Recompile,
    RecompileCause,
    Trial,
    TrialKind,
    TrialStatus,
    WorkloadFacts,
)

ROOT = Path("/home/ann/job")
FACTS = WorkloadFacts(
    fingerprint="ab12",
    model_class="net.Net",
    parameters=6_500,
    trainable_parameters=6_500,
    optimizer="SGD",
    dtype="float32",
    shapes=(),
)
ENVIRONMENT = Environment(
    torch="2.13.0",
    python="3.11.9",
    device="cpu",
    device_name="AMD EPYC",
    cores=2,
    threads=2,
    memory_bytes=8 << 30,
)
LINK = "https://meta-pytorch.github.io/compile-graph-break-site/gb/gb0059.html"
PRINT = GraphBreak(
    cause=GraphBreakCause.PRINT_OR_LOGGING,
    reason="Dynamo does not know how to trace print",
    file="/home/ann/job/models/net.py",
    line=14,
    code='print("mean", h.mean())',
    hint=LINK,
    count=2,
)
BREAK = Fix(
    cause=PRINT.cause.value,
    what=break_mend(PRINT),
    file=PRINT.file,
    line=PRINT.line,
    code=PRINT.code,
    link=LINK,
    count=2,
    hits_per_step=1.0,
    gain=Interval(median=1.21, low=1.10, high=1.35),
)
SCALAR = Fix(
    cause="SCALAR_READ",
    what="a graph ends here: keep it a tensor",
    file="/usr/lib/python3/site-packages/lib/scale.py",
    line=7,
    gain=Interval(median=1.10, low=1.05, high=1.15),
    measured=True,
    options=(("torch._dynamo.config.capture_scalar_outputs", "true"),),
)
AGAIN = Fix(
    kind=FixKind.RECOMPILE,
    cause="PYTHON_NUMBER",
    what="compiled 7 times more: pass it as a tensor",
    file="/home/ann/job/train.py",
    line=31,
    count=7,
    lost_s=92.0,
    money_lost=0.128,
)
TRIAL = Trial(
    trial_id="t1",
    kind=TrialKind.COMPILE,
    status=TrialStatus.OK,
    config=Config(),
    speedup=Interval(median=1.05, low=1.03, high=1.07),
    graphs=2,
    coverage=0.71,
    graph_breaks=(PRINT,),
    recompiles=(
        Recompile(cause=RecompileCause.PYTHON_NUMBER, reason="L['n'] == 3", count=7, lost_s=92.0),
    ),
)
FOUND = Diagnosis(
    target="train.py:build",
    summary=("model default captured 2 graphs.", "1 place ends a graph, 7 recompiles."),
    advice_id="a1b2c3d4e5",
    config=Config(),
    speedup=TRIAL.speedup,
    fixes=(BREAK, SCALAR, AGAIN),
    warnings=("Other work used this machine.",),
    trials=(TRIAL,),
    workload=FACTS,
    environment=ENVIRONMENT,
)


def _text(diagnosis: Diagnosis = FOUND, width: int = 80) -> str:
    file = io.StringIO()
    print_diagnosis(diagnosis, ROOT, file, width=width)
    return file.getvalue()


def test_summary_comes_first_and_fits_one_screen_with_the_first_mend() -> None:
    lines = _text().splitlines()
    assert lines[0] == "train.py:build"
    assert lines[1] == "  - model default captured 2 graphs."
    assert lines[2] == "  - 1 place ends a graph, 7 recompiles."
    assert lines.index("1. It prints, logs or warns") < 8


def test_mends_come_in_the_order_of_the_diagnosis() -> None:
    text = _text()
    titles = [line for line in text.splitlines() if line[:2] in ("1.", "2.", "3.")]
    assert titles == [
        "1. It prints, logs or warns",
        "2. A tensor's value is read into Python",
        "3. Compiled again: a Python number changes",
    ]
    again = _text(replace(FOUND, fixes=FOUND.fixes[::-1]))
    assert again.index("a Python number changes") < again.index("It prints, logs or warns")


def test_block_says_where_how_often_what_it_costs_and_what_to_do() -> None:
    text = _text()
    first, rest = text.split("2. A tensor's")
    second, third = rest.split("3. Compiled")
    assert "\n   models/net.py:14\n" in first, "named from the folder of the workload"
    assert '\n       print("mean", h.mean())\n' in first
    assert "once a step, 2 times while compiling" in first
    assert "1.21x (1.10-1.35) as fast, an estimate" in first
    assert LINK in first
    assert first.count('print("mean"') == 1, "the source line is not said twice"
    assert "/usr/lib/python3/site-packages/lib/scale.py:7" in second
    assert "measured with the setting below" in second
    assert "Or set torch._dynamo.config.capture_scalar_outputs = True" in second
    assert "7 times in the trial" in third
    assert "92 s of compiling" in third or "1 min 32 s of compiling" in third
    assert "0.13 at the price given" in third
    assert "Gain" not in third, "a gain that is not known is not made up"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_of_prose_is_wider_than_the_terminal(width: int) -> None:
    what = "a graph ends here, " + "because of this and that, " * 20
    long = replace(BREAK, what=what, code="", link="", file="")
    text = _text(replace(FOUND, fixes=(long,), summary=(what,)), width)
    assert max(map(len, text.splitlines())) <= width
    assert text.count("because") == 40


def test_piped_text_has_no_colour_and_nothing_that_steers_a_terminal() -> None:
    hostile = replace(BREAK, code="print('\x1b[2J')", file="/home/ann/job/[bold]\x1b]0;x.py")
    text = _text(replace(FOUND, fixes=(hostile,)))
    assert "\x1b" not in text
    assert r"print('\x1b[2J')" in text
    assert r"[bold]\x1b]0;x.py:14" in text


def test_nothing_to_mend_is_only_the_summary() -> None:
    text = _text(replace(FOUND, fixes=(), warnings=()))
    assert "1." not in text.replace("1.05", "")
    assert "Beware" not in text
    assert "advise explain a1b2c3d4e5" in text


def test_gain_that_no_decimal_shows_is_called_none() -> None:
    none = replace(BREAK, gain=Interval(median=1.0, low=0.999, high=1.002))
    assert "none to speak of, an estimate" in _text(replace(FOUND, fixes=(none,)))


def test_setting_that_this_version_does_not_know_is_shown_as_it_is() -> None:
    odd = replace(SCALAR, options=(("a-name", "on"),))
    assert "Or set a-name = on" in _text(replace(FOUND, fixes=(odd,)))


def test_hundreds_of_mends_end_in_a_count() -> None:
    many = tuple(replace(BREAK, line=line) for line in range(1, 301))
    text = _text(replace(FOUND, fixes=many))
    assert "20. It prints" in text
    assert "21. It prints" not in text
    assert "And 280 more: advise explain a1b2c3d4e5 --json" in text


def test_settings_that_were_tried_stand_side_by_side() -> None:
    tried = replace(
        TRIAL,
        config=Config(options=(("capture_scalar_outputs", "True"),)),
        graphs=1,
        graph_breaks=(),
        recompiles=(),
    )
    failed = replace(
        TRIAL,
        config=Config(backend="other"),
        status=TrialStatus.FAILED_TO_COMPILE,
        failure=Failure(kind="compile", message="no"),
    )
    lines = _text(replace(FOUND, trials=(TRIAL, tried, failed))).splitlines()
    (head,) = [line for line in lines if line.startswith("Measured ")]
    assert head.split() == ["Measured", "Speedup", "Graphs", "Covered", "Breaks", "Again"]
    plain, with_setting = [line for line in lines if line.startswith("model default  ")][:2]
    assert plain.split()[2:] == ["1.05x", "(1.03-1.07)", "2", "71%", "1", "7"]
    assert with_setting.split()[2:] == ["1.05x", "(1.03-1.07)", "1", "71%", "0", "0"]
    assert "capture_scalar_outputs=True" in "".join(lines)
    assert any("failed to compile" in line for line in lines)
    assert not any(line.startswith("Measured ") for line in _text().splitlines()[:-3])


@pytest.mark.parametrize(
    ("hits", "words"),
    [
        (1.0, "once a step"),
        (12.0, "12 times a step"),
        (2.5, "2.5 times a step"),
        (0.97, "once a step"),
        (0.7, "0.7 times a step"),
        (0.25, "once in 4 steps"),
        (0.0, "in no step after compiling"),
    ],
)
def test_how_often_a_step_comes_by_is_said_in_words(hits: float, words: str) -> None:
    assert words in _text(replace(FOUND, fixes=(replace(BREAK, hits_per_step=hits),)))


def test_places_without_line_or_file_are_not_made_up() -> None:
    assert place("/home/ann/job/net.py", 0, ROOT) == "net.py"
    assert place("", 3, ROOT) == ""
    assert place("/elsewhere/net.py", 3, ROOT) == "/elsewhere/net.py:3"


def test_every_cause_has_a_name_of_its_own() -> None:
    names = [cause_name(FixKind.GRAPH_BREAK, cause.value) for cause in GraphBreakCause]
    names += [cause_name(FixKind.RECOMPILE, cause.value) for cause in RecompileCause]
    assert len(set(names)) == len(GraphBreakCause) + len(RecompileCause)
    shouted = {cause.value.replace("_", " ").capitalize() for cause in GraphBreakCause}
    assert not shouted & set(names), "no cause is left with its bare name"
    assert cause_name(FixKind.JOB, "A_NEW_ONE") == "A new one"
    assert len({cause_page(kind) for kind in FixKind}) == len(FixKind)


def test_mend_is_shown_without_what_stands_beside_it() -> None:
    text = plain_mend(BREAK)
    assert PRINT.code not in text
    assert LINK not in text
    assert text.startswith("a graph ends here")
    assert plain_mend(AGAIN) == AGAIN.what
