"""The report: verdict first, one screen, aligned, safe with any name that a file may have."""

from __future__ import annotations

import dataclasses
import io
import re

import pytest

from advisor.profiler.preset_table import PRESETS
from advisor.profiler.records import (
    Advice,
    Alternative,
    Config,
    Dynamic,
    Environment,
    Failure,
    Fix,
    HandOver,
    Interval,
    Mode,
    Scope,
    Trial,
    TrialKind,
    TrialStatus,
    WorkloadFacts,
)
from advisor.report import (
    presets_table,
    print_advice,
    print_plain,
    rows,
    trials_table,
    verdict,
)
from advisor.stored import StoredTrial

REGIONAL = Config(scope=Scope.REGIONAL)
MODEL = Config()
TUNED = Config(mode=Mode.MAX_AUTOTUNE_NO_CUDAGRAPHS)
DYNAMIC = Config(dynamic=Dynamic.TRUE)


def _interval(median: float, low: float, high: float) -> Interval:
    return Interval(median=median, low=low, high=high)


EAGER_STEP = _interval(0.081, 0.079, 0.084)
FACTS = WorkloadFacts(
    fingerprint="ab12",
    model_class="BertForTokenClassification",
    parameters=11_100_000,
    trainable_parameters=11_100_000,
    optimizer="AdamW",
    dtype="float32",
    shapes=(),
)
ENVIRONMENT = Environment(
    torch="2.13.0",
    python="3.11.9",
    device="cpu",
    device_name="Intel Xeon",
    cores=2,
    threads=2,
    memory_bytes=8 << 30,
)
TRIALS = (
    Trial(trial_id="t1", kind=TrialKind.EAGER, status=TrialStatus.OK, eager_step_s=EAGER_STEP),
    Trial(
        trial_id="t2",
        kind=TrialKind.COMPILE,
        config=REGIONAL,
        status=TrialStatus.OK,
        eager_step_s=EAGER_STEP,
        step_s=_interval(0.062, 0.0605, 0.0635),
        speedup=_interval(1.31, 1.28, 1.34),
        cold_start_s=24.1,
    ),
    Trial(
        trial_id="t3",
        kind=TrialKind.WARM,
        config=REGIONAL,
        status=TrialStatus.OK,
        warm_start_s=3.4,
    ),
    Trial(
        trial_id="t4",
        kind=TrialKind.COMPILE,
        config=MODEL,
        status=TrialStatus.OK,
        eager_step_s=EAGER_STEP,
        step_s=_interval(0.064, 0.062, 0.066),
        speedup=_interval(1.27, 1.24, 1.30),
        cold_start_s=43.0,
    ),
    Trial(
        trial_id="t5",
        kind=TrialKind.COMPILE,
        config=DYNAMIC,
        status=TrialStatus.FAILED_TO_COMPILE,
        failure=Failure(kind="InductorError", message="the compiler failed on [bold]mul_0[/bold]"),
    ),
)
ENABLE = Advice(
    advice_id="a1b2c3",
    created="2026-11-01T10:00:00Z",
    enable=True,
    target="examples/ner_bert.py:build",
    config=REGIONAL,
    code="for block in model.bert.encoder.layer:\n    block.compile()",
    speedup=_interval(1.31, 1.28, 1.34),
    compile_s=_interval(24.1, 22.0, 26.0),
    saved_s=_interval(370.0, 330.0, 410.0),
    eager_total_s=_interval(1620.0, 1580.0, 1680.0),
    advised_total_s=_interval(1250.0, 1220.0, 1290.0),
    break_even_step=1268.0,
    p_saves=0.999,
    steps=20_000.0,
    reasons=(
        "A step takes 62 ms instead of 81 ms, measured in 24 pairs on the same batches.",
        "Compiling costs 24 s once; that is earned back after 1,268 steps.",
        "97 % of the operator calls ran in 2 compiled graphs; losses agree within 2e-6.",
    ),
    fixes=(Fix(cause="SCALAR_READ", what="drop loss.item()", file="train.py", line=41),),
    alternatives=(
        Alternative(config=MODEL, why_not="compiles longer", total_s=_interval(1318, 1290, 1350)),
        Alternative(config=TUNED, why_not="cannot win", total_s=_interval(1300, 1100, 1500)),
    ),
    warnings=("Another process used 40 % of the CPU while measuring.",),
    trials=TRIALS,
    workload=FACTS,
    environment=ENVIRONMENT,
    hand_over=HandOver(path="/home/me/cache/ab", bytes=34_000_000, bundle_id="3f2a9c01de45"),
    gpu_hours_saved=0.1,
    campaign_s=201.0,
)
STAY = dataclasses.replace(
    ENABLE,
    enable=False,
    config=None,
    code="",
    speedup=None,
    compile_s=None,
    saved_s=None,
    eager_total_s=_interval(4.05, 3.9, 4.3),
    advised_total_s=_interval(4.05, 3.9, 4.3),
    break_even_step=None,
    p_saves=0.0,
    steps=50.0,
    reasons=("no compile can pay within 4.1 s.", "It would from about 1,200 steps on."),
    fixes=(),
    alternatives=tuple(
        Alternative(config=config, why_not="its compile costs more than the whole plan")
        for config in (REGIONAL, MODEL, TUNED)
    ),
    warnings=(),
    trials=TRIALS[:1],
    hand_over=None,
    gpu_hours_saved=None,
)


def _text(advice: Advice, width: int = 100) -> str:
    file = io.StringIO()
    print_advice(advice, file, width=width)
    return file.getvalue()


def test_verdict_comes_first_in_one_line() -> None:
    first = _text(ENABLE, width=120).splitlines()[0]
    assert first == (
        "ENABLE torch.compile: 1.31x faster (1.28-1.34), pays back after step 1,268 of 20,000, "
        "saves 6 min 10 s of 27 min."
    )


@pytest.mark.parametrize(
    ("trials", "break_even_step", "why"),
    [
        (TRIALS[:1], None, "no configuration was worth measuring."),
        (TRIALS[:2], 1268.0, "compiling pays back after step 1,268 only."),
        (TRIALS[:2], 40.0, "nothing that was tried saves time for sure."),
        (TRIALS[4:], None, "nothing that was tried can be used."),
    ],
)
def test_stay_eager_says_why_in_one_line(
    trials: tuple[Trial, ...], break_even_step: float | None, why: str
) -> None:
    text = _text(dataclasses.replace(STAY, trials=trials, break_even_step=break_even_step))
    assert text.splitlines()[0] == f"STAY EAGER for these 50 steps (4.0 s): {why}"
    assert "- It would from about 1,200 steps on." in text


def test_skipped_trial_is_named_with_its_reason_and_takes_no_line_of_the_table() -> None:
    skipped = Trial(
        trial_id="t9",
        kind=TrialKind.COMPILE,
        config=TUNED,
        status=TrialStatus.SKIPPED,
        failure=Failure(kind="cannot_pay", message="even its best case cannot pay"),
    )
    text = _text(dataclasses.replace(STAY, trials=(*TRIALS[:1], skipped), alternatives=()))
    assert "model max-autotune-no-cudagraphs: even its best case cannot pay" in text
    assert text.count("max-autotune") == 1


def test_measured_trial_is_not_hidden_by_a_later_skip() -> None:
    skip = dataclasses.replace(TRIALS[1], status=TrialStatus.SKIPPED, step_s=None)
    found = rows(dataclasses.replace(ENABLE, trials=(*TRIALS, skip)))
    assert found[1].trial == TRIALS[1]


def test_only_the_first_of_many_mends_are_shown() -> None:
    fixes = tuple(Fix(cause="OTHER", what=f"mend {i}") for i in range(60))
    text = _text(dataclasses.replace(ENABLE, fixes=fixes))
    assert "mend 3" in text
    assert "mend 4" not in text
    assert "and 56 more: advise explain a1b2c3" in text


def test_code_to_paste_is_copied_whole_however_narrow_the_terminal() -> None:
    code = "model.encoder.layers.compile(mode='default')  # " + "x" * 90
    text = _text(dataclasses.replace(ENABLE, code=code), width=60)
    assert f"    {code}" in text.splitlines()


def test_report_fits_one_screen() -> None:
    assert len(_text(ENABLE, width=80).splitlines()) <= 40


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    code = "model.compile()"
    lines = _text(dataclasses.replace(ENABLE, code=code), width).splitlines()
    assert max(len(line) for line in lines) <= width
    assert all(line == line.rstrip() for line in lines)


def test_figures_are_aligned_to_the_right() -> None:
    lines = _text(ENABLE, width=120).splitlines()
    header = next(line for line in lines if line.startswith("Configuration"))
    end = header.index("Step") + len("Step")
    table = [line for line in lines if re.search(r"\d ms ", line) and "instead" not in line]
    assert len(table) == 3
    assert all(line[:end].endswith("ms") and line[end : end + 1] == " " for line in table)


def test_rows_begin_with_eager_and_the_advised_one() -> None:
    found = rows(ENABLE)
    assert [row.config for row in found] == [None, REGIONAL, MODEL, DYNAMIC, TUNED]
    assert [row.advised for row in found] == [False, True, False, False, False]
    assert found[1].warm_start_s == 3.4
    assert found[1].total_s == ENABLE.advised_total_s
    assert found[3].why_not == "the compiler failed on [bold]mul_0[/bold]"
    assert found[4].trial is None


def test_one_reason_for_many_configurations_is_said_once() -> None:
    text = " ".join(_text(STAY, width=200).split())
    assert text.count("costs more than the whole plan") == 1
    assert "regional default, model default, model max-autotune-no-cudagraphs: its" in text


def test_what_a_person_wrote_is_neither_markup_nor_a_terminal_command() -> None:
    nasty = "[red]\x1b[2Jgone\x07[/red]"
    text = _text(
        dataclasses.replace(
            ENABLE,
            target=nasty,
            code=nasty,
            workload=None,
            reasons=(nasty,),
            warnings=(nasty,),
            fixes=(Fix(cause="OTHER", what=nasty, file=nasty, line=1),),
            alternatives=(Alternative(config=MODEL, why_not=nasty),),
        )
    )
    assert "\x1b" not in text
    assert "\x07" not in text
    assert text.count(r"[red]\x1b[2Jgone\x07[/red]") == 7


def test_piped_report_has_no_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert "\x1b" not in _text(ENABLE)


def test_terminal_report_has_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: the same report on a terminal is coloured."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[1;32m" in _text(ENABLE)


def test_advice_that_lacks_every_optional_figure_is_shown() -> None:
    bare = dataclasses.replace(
        ENABLE,
        speedup=None,
        saved_s=None,
        break_even_step=None,
        reasons=(),
        fixes=(),
        alternatives=(),
        trials=(),
        warnings=(),
        workload=None,
        environment=None,
        hand_over=None,
        gpu_hours_saved=None,
    )
    assert verdict(bare) == "ENABLE torch.compile: it pays for this plan."
    assert "examples/ner_bert.py:build" in _text(bare)


def test_every_status_has_a_name_in_the_tables() -> None:
    stored = [
        StoredTrial(
            advice_id="a",
            created="2026-11-01T10:00:00Z",
            target="t.py:f",
            trial=Trial(trial_id="t", kind=TrialKind.COMPILE, config=MODEL, status=status),
        )
        for status in TrialStatus
    ]
    file = io.StringIO()
    print_plain(trials_table(stored), file=file, width=120)
    lines = file.getvalue().splitlines()
    assert len(lines) == 1 + len(TrialStatus)
    assert len({line.split("model default")[1].strip() for line in lines[1:]}) == len(TrialStatus)


def test_trials_are_listed_within_80_columns() -> None:
    trial = dataclasses.replace(
        TRIALS[1],
        config=Config(scope=Scope.REGIONAL, mode=Mode.MAX_AUTOTUNE_NO_CUDAGRAPHS),
        status=TrialStatus.OK,
        wall_s=83.0,
    )
    target = "/home/someone/projects/tagger/train_ner_bert.py:build"
    stored = [
        StoredTrial(advice_id="a", created="2026-01-02T03:04:05+00:00", target=target, trial=trial)
    ] * 3
    file = io.StringIO()
    print_plain(trials_table(stored), file=file, width=80)
    lines = file.getvalue().splitlines()
    assert len(lines) <= 1 + 3 * 3
    assert max(map(len, lines)) <= 80
    assert sum("01-02 03:04" in line and "83 s" in line for line in lines) == 3


def test_presets_table_names_every_preset() -> None:
    file = io.StringIO()
    print_plain(presets_table(PRESETS), file=file, width=120)
    names = {line.split()[0] for line in file.getvalue().splitlines()[1:] if line[0] != " "}
    assert names == {f"hf:{name}" for name in PRESETS}
