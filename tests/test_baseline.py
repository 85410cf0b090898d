"""The gate: what is worse than the baseline, what is not, and a file that is never half written."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from advisor import baseline
from advisor.baseline import Baseline, baseline_json, baseline_of, normal_guard
from advisor.models.plan import Plan
from advisor.profiler.errors import AdvisorError, PlanError
from advisor.profiler.records import (
    Advice,
    Config,
    Dynamic,
    Environment,
    Failure,
    GraphBreak,
    GraphBreakCause,
    Interval,
    Pair,
    Recompile,
    RecompileCause,
    Scope,
    Trial,
    TrialKind,
    TrialStatus,
    WorkloadSpec,
)
from advisor.regressions import Comparison, compare, parts
from advisor.report import print_plain
from advisor.request import AdviceRequest, Limits

ROOT = Path("/home/ann/job")
MODEL = Config()
REGIONAL = Config(scope=Scope.REGIONAL)
WORKLOAD = WorkloadSpec(target="package.train:build", cwd=str(ROOT))
ENVIRONMENT = Environment(
    torch="2.13.0",
    python="3.11.9",
    device="cpu",
    device_name="AMD EPYC",
    cores=2,
    threads=2,
    memory_bytes=8 << 30,
)
PRINT = GraphBreak(
    cause=GraphBreakCause.PRINT_OR_LOGGING,
    reason="print",
    file="/home/ann/job/net.py",
    line=14,
    code='print("mean", h.mean())',
)
SCALAR = GraphBreak(
    cause=GraphBreakCause.SCALAR_READ,
    reason="item",
    file="/home/ann/job/net.py",
    line=20,
    code="peak = x.max().item()",
)
NUMBER = Recompile(
    cause=RecompileCause.PYTHON_NUMBER,
    reason="L['step'] == 3",
    file="/home/ann/job/train.py",
    line=31,
    count=7,
    lost_s=92.0,
)
GOOD = Trial(
    trial_id="t2",
    kind=TrialKind.COMPILE,
    status=TrialStatus.OK,
    config=MODEL,
    speedup=Interval(median=1.31, low=1.28, high=1.34),
    graphs=2,
    coverage=0.95,
    graph_breaks=(PRINT,),
)
EAGER = Trial(trial_id="t1", kind=TrialKind.EAGER, status=TrialStatus.OK)


def _advice(*trials: Trial, environment: Environment = ENVIRONMENT) -> Advice:
    total_s = Interval(median=100.0, low=90.0, high=110.0)
    return Advice(
        advice_id="a1b2c3d4e5",
        created="2026-12-01T10:00:00Z",
        enable=False,
        target=WORKLOAD.target,
        config=None,
        code="",
        speedup=None,
        compile_s=None,
        saved_s=None,
        eager_total_s=total_s,
        advised_total_s=total_s,
        break_even_step=None,
        p_saves=0.0,
        reasons=(),
        steps=1e6,
        trials=(EAGER, *trials),
        environment=environment,
    )


def _baseline(*trials: Trial, environment: Environment = ENVIRONMENT) -> Baseline:
    configs = [trial.config for trial in trials if trial.config]
    return baseline_of(_advice(*trials, environment=environment), WORKLOAD, configs, ROOT)


def _compared(
    before: Trial, now: Trial, environment: Environment = ENVIRONMENT, root: Path = ROOT
) -> Comparison:
    advice = _advice(now, environment=environment)
    configs = [now.config] if now.config else []
    return compare(
        _baseline(before),
        baseline_of(advice, WORKLOAD, configs, ROOT),
        baseline.measured(advice, configs),
        ROOT,
        root,
    )


# --- nothing worse


def _moved(trial: Trial) -> Trial:
    return replace(trial, graph_breaks=(replace(PRINT, line=99, count=9),))


def _reindented(trial: Trial) -> Trial:
    return replace(trial, graph_breaks=(replace(PRINT, code='print("mean",  h.mean())'),))


def _rewritten(trial: Trial) -> Trial:
    return replace(trial, graph_breaks=(replace(PRINT, code='print("average", h.mean())'),))


def _in_another_file(trial: Trial) -> Trial:
    return replace(trial, graph_breaks=(replace(PRINT, file="/home/ann/job/models/net.py"),))


def _within_the_noise(trial: Trial) -> Trial:
    return replace(trial, speedup=Interval(median=1.27, low=1.24, high=1.30))


def _surely_but_hardly_slower(trial: Trial) -> Trial:
    return replace(trial, speedup=Interval(median=1.275, low=1.272, high=1.279))


@pytest.mark.parametrize(
    "change",
    [
        lambda trial: trial,
        _moved,
        _reindented,
        _rewritten,
        _in_another_file,
        _within_the_noise,
        _surely_but_hardly_slower,
    ],
)
def test_change_that_makes_nothing_worse_is_no_difference(
    change: Callable[[Trial], Trial],
) -> None:
    assert _compared(GOOD, change(GOOD)) == Comparison()


def test_same_recompile_with_other_numbers_is_no_difference() -> None:
    before = replace(GOOD, recompiles=(NUMBER,))
    for reason in ("L['step'] == 8", "L['step'] == -1.5e3"):
        now = replace(GOOD, recompiles=(replace(NUMBER, reason=reason, line=1, count=2),))
        assert _compared(before, now) == Comparison()


# --- worse


def test_new_break_is_told_with_its_line_and_source() -> None:
    found = _compared(GOOD, replace(GOOD, graph_breaks=(PRINT, SCALAR)))
    assert found.better == found.beware == ()
    assert found.worse == (
        "A new graph break at net.py:20, `peak = x.max().item()`: a tensor's value is read into "
        "Python.",
    )


def test_same_line_written_once_more_is_a_new_break() -> None:
    now = replace(GOOD, graph_breaks=(PRINT, replace(PRINT, line=17)))
    (sentence,) = _compared(GOOD, now).worse
    assert "one of net.py:14, net.py:17" in sentence
    met_twice = replace(GOOD, graph_breaks=(PRINT, PRINT))
    assert _compared(GOOD, met_twice).worse == (), "one place that a compile met twice"


def test_unlike_line_does_not_make_up_for_one_that_is_gone() -> None:
    other = replace(PRINT, code="logger.warning(x)", line=40)
    found = _compared(GOOD, replace(GOOD, graph_breaks=(other,)))
    assert len(found.worse) == len(found.better) == 1
    assert "net.py:40" in found.worse[0]
    assert 'print("mean"' in found.better[0]


def test_new_recompile_is_told_with_its_guard_and_cost() -> None:
    (sentence,) = _compared(GOOD, replace(GOOD, recompiles=(NUMBER,))).worse
    assert sentence == (
        "A new recompile at train.py:31, a Python number changes: `L['step'] == 3` no longer "
        "holds (7 times, 1 min 32 s)."
    )


@pytest.mark.parametrize("change", [{"graphs": 0}, {"coverage": 0.04}])
def test_compile_that_silently_does_nothing_any_more_is_worse(change: dict[str, float]) -> None:
    now = replace(GOOD, speedup=Interval(median=1.0, low=0.99, high=1.01), **change)  # type: ignore[arg-type]
    (sentence,) = _compared(GOOD, now).worse
    assert "silently" in sentence, "and its gain is not told besides: it is all noise"
    assert _compared(now, now).worse == (), "known before"
    assert "really runs compiled" in _compared(now, GOOD).better[0]


def test_recompile_limit_is_told_where_it_comes_from() -> None:
    before = replace(GOOD, recompiles=(NUMBER,))
    now = replace(before, recompile_limit_hit=True)
    assert _compared(before, now).worse == (
        "It hits the recompile limit at train.py:31: from then on it runs eager, silently.",
    )
    assert _compared(now, now).worse == ()
    assert _compared(now, before).better == ("It no longer hits the recompile limit.",)


def test_gain_that_is_lost_beyond_the_noise_is_worse() -> None:
    slower = replace(GOOD, speedup=Interval(median=1.10, low=1.07, high=1.13))
    (sentence,) = _compared(GOOD, slower).worse
    assert "1.10x (1.07-1.13), 1.31x (1.28-1.34) before" in sentence
    assert _compared(slower, GOOD).better == (
        "It gains more: 1.31x (1.28-1.34), 1.10x (1.07-1.13) before.",
    )


def _pairs(ratio: float, processes: int = 1) -> tuple[Pair, ...]:
    return tuple(
        Pair(eager_s=0.1 * ratio, compiled_s=0.1, process=process)
        for process in range(processes)
        for _ in range(20)
    )


def test_processes_differ_by_some_percent_and_that_is_no_loss() -> None:
    before = replace(GOOD, pairs=_pairs(1.30))
    assert _compared(before, replace(GOOD, pairs=_pairs(1.25))) == Comparison()
    assert len(_compared(before, replace(GOOD, pairs=_pairs(1.18))).worse) == 1
    (one,) = _baseline(before).configurations
    (several,) = _baseline(replace(GOOD, pairs=_pairs(1.30, processes=6))).configurations
    assert one.speedup is not None
    assert several.speedup is not None
    assert one.speedup.low < several.speedup.low < 1.30 < several.speedup.high < one.speedup.high


def test_compile_that_fails_now_is_worse_whatever_it_did_before_failing() -> None:
    failed = replace(
        GOOD,
        status=TrialStatus.FAILED_TO_COMPILE,
        failure=Failure(kind="compile", message="no C++ compiler"),
        graph_breaks=(),
        graphs=None,
        coverage=None,
        speedup=None,
    )
    found = _compared(GOOD, failed)
    assert found == Comparison(worse=("It does not compile: no C++ compiler.",))
    assert _compared(failed, failed) == Comparison()
    assert _compared(failed, GOOD) == Comparison(better=("It works now, compiled.",))


def test_numbers_that_differ_from_eager_are_worse() -> None:
    now = replace(GOOD, status=TrialStatus.DISAGREES, graph_breaks=(PRINT, SCALAR))
    found = _compared(GOOD, now)
    assert found.worse[0] == "It does not agree with eager."
    assert "net.py:20" in found.worse[1]


def test_mend_is_told_and_can_be_kept() -> None:
    found = _compared(GOOD, replace(GOOD, graph_breaks=()))
    assert found.worse == ()
    assert found.better == ('A graph break is gone: net.py, `print("mean", h.mean())`.',)


@pytest.mark.parametrize("change", [{"torch": "2.12.0"}, {"device_name": "Xeon"}, {"threads": 8}])
def test_gain_is_not_compared_with_another_torch_or_machine(change: dict[str, str]) -> None:
    now = replace(
        GOOD, speedup=Interval(median=1.0, low=0.9, high=1.1), graph_breaks=(PRINT, SCALAR)
    )
    found = _compared(GOOD, now, replace(ENVIRONMENT, **change))  # type: ignore[arg-type]
    assert len(found.worse) == 1
    assert "net.py:20" in found.worse[0], "breaks are compared all the same"
    (sentence,) = found.beware
    assert "the gain is not compared" in sentence
    assert str(next(iter(change.values()))) in sentence


def test_less_coverage_without_a_cause_is_only_told() -> None:
    found = _compared(GOOD, replace(GOOD, coverage=0.6))
    assert found.worse == ()
    assert found.beware == ("60% of the operator calls run inside compiled graphs, 95% before.",)


def test_sentence_names_the_configuration_where_there_are_several() -> None:
    regional = replace(GOOD, config=REGIONAL)
    worse = replace(regional, graph_breaks=(PRINT, SCALAR))
    advice = _advice(GOOD, worse)
    configs = [MODEL, REGIONAL]
    found = compare(
        _baseline(GOOD, regional),
        baseline_of(advice, WORKLOAD, configs, ROOT),
        baseline.measured(advice, configs),
        ROOT,
        ROOT,
    )
    (sentence,) = found.worse
    assert sentence.startswith("regional default: A new graph break at net.py:20")


def test_verdict_comes_first_and_holds_no_control_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    hostile = replace(SCALAR, code="x.item()\x1b[2J", file="/home/ann/job/a\x1b.py")
    now = replace(GOOD, graph_breaks=(PRINT, hostile), recompiles=(NUMBER,))
    found = _compared(GOOD, now)
    print_plain(*parts(found, _baseline(now), Path("base.json"), "a1b2"), width=80)
    out = capsys.readouterr().out
    assert out.startswith("WORSE than base.json: 2 regressions.\n")
    assert "\x1b" not in out
    assert r"a\x1b.py:20" in out
    print_plain(*parts(Comparison(better=("x",)), _baseline(GOOD), Path("base.json"), "a1b2"))
    out = capsys.readouterr().out
    assert out.startswith("Nothing worse than base.json.\n")
    assert "Run with --update to keep it so." in out


# --- what was measured


def test_configuration_that_did_not_run_is_no_regression_but_an_error() -> None:
    skipped = replace(
        GOOD,
        status=TrialStatus.SKIPPED,
        failure=Failure(kind="over_budget", message="10 s are left of the budget"),
    )
    with pytest.raises(AdvisorError, match="model default was not measured: 10 s are left"):
        _baseline(skipped)
    with pytest.raises(AdvisorError, match="regional default was not measured"):
        baseline_of(_advice(GOOD), WORKLOAD, [REGIONAL], ROOT)


def test_trials_with_settings_of_their_own_are_not_part_of_the_baseline() -> None:
    what_if = replace(GOOD, config=Config(options=(("capture_scalar_outputs", "True"),)))
    found = baseline_of(_advice(GOOD, what_if), WORKLOAD, [MODEL], ROOT)
    assert len(found.configurations) == 1


@pytest.mark.parametrize(
    ("guard", "normal"),
    [
        ("L['step'] == 3", "L['step'] == N"),
        ("L['step']   ==\n -3.5e-2", "L['step'] == N"),
        ("___check_obj_id(L['f'], 139900456)", "___check_obj_id(L['f'], N)"),
        ("<function f at 0x7f1c22>", "<function f at ADDRESS>"),
        (
            "tensor 'L['x']' size mismatch at index 1. expected 16, actual 24",
            "tensor 'L['x']' size mismatch at index N. expected N, actual N",
        ),
        ("2 <= L['x'].size()[0] <= s17", "N <= L['x'].size()[0] <= sN"),
        ("L['self']._modules['3'].layer1.step == 4", "L['self']._modules['3'].layer1.step == N"),
    ],
)
def test_guard_keeps_what_says_which_and_loses_what_changes(guard: str, normal: str) -> None:
    assert normal_guard(guard) == normal
    assert normal_guard(normal) == normal


def test_files_of_libraries_have_the_same_name_in_every_environment() -> None:
    names = {
        baseline.file_name(f"/{place}/site-packages/transformers/x.py", ROOT)
        for place in ("opt/venv/lib/python3.11", "usr/lib/python3.13")
    }
    assert names == {"site-packages/transformers/x.py"}
    assert baseline.file_name("/home/ann/lib/x.py", ROOT) == "../lib/x.py"


def test_workload_has_the_same_name_from_every_folder(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").touch()
    (tmp_path / "ci").mkdir()
    names = {
        baseline.target_name(WorkloadSpec(target=target, cwd=str(cwd)), tmp_path / "ci")
        for target, cwd in (
            ("src/train.py:build", tmp_path),
            ("./train.py:build", tmp_path / "src"),
            (f"{tmp_path}/src/train.py:build", tmp_path / "ci"),
        )
    }
    assert names == {"../src/train.py:build"}
    for target in ("package.module:build", "hf:bert-base"):
        spec = WorkloadSpec(target=target, cwd=str(tmp_path))
        assert baseline.target_name(spec, tmp_path) == target


# --- the file


def test_file_reads_back_and_is_the_same_text_for_the_same_facts(tmp_path: Path) -> None:
    again = replace(GOOD, graph_breaks=(SCALAR, PRINT), recompiles=(NUMBER,), trial_id="other")
    one = _baseline(replace(again, graph_breaks=(PRINT, SCALAR)))
    path = tmp_path / "base.json"
    baseline.write(path, one)
    assert baseline.read(path) == one
    assert path.read_text() == baseline_json(_baseline(again))
    text = path.read_text()
    assert text.endswith("}\n")
    assert '"line"' not in text
    assert str(ROOT) not in text
    content = json.loads(text)
    assert list(content) == sorted(content)
    assert content["schema_version"] == 1
    assert content["configurations"][0]["speedup"] == {"high": 1.34, "low": 1.28, "median": 1.31}


def test_file_is_replaced_whole_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "base.json"
    link = tmp_path / "link.json"
    link.symlink_to(path)
    baseline.write(path, _baseline(GOOD))
    before = path.stat().st_ino
    baseline.write(link, _baseline(replace(GOOD, graphs=7)))
    assert link.is_symlink()
    assert path.stat().st_ino != before
    assert baseline.read(path).configurations[0].graphs == 7
    assert sorted(file.name for file in tmp_path.iterdir()) == ["base.json", "link.json"]
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask


def test_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "base.json"
    baseline.write(path, _baseline(GOOD))
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(PlanError, match="cannot be written: No space left"):
        baseline.write(path, _baseline(replace(GOOD, graphs=7)))
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["base.json"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "it is not JSON"),
        (b"<<<<<<< ours\n", "it is not JSON"),
        (b"\xff\xfe", "it is not JSON"),
        (b"[" * 100_000, "it is not JSON"),
        (b"[]", "is not a baseline of advise check"),
        (b'{"dependencies": {}}', "is not a baseline of advise check"),
        (b'{"kind": "compile-advisor baseline"}', "is broken"),
        (b'{"kind": "compile-advisor baseline", "schema_version": 2}', "by a newer"),
    ],
)
@pytest.mark.parametrize("update", [False, True])
def test_file_that_is_no_baseline_is_said_and_left_alone(
    tmp_path: Path, content: bytes, sentence: str, update: bool
) -> None:
    path = tmp_path / "base.json"
    path.write_bytes(content)
    with pytest.raises(PlanError, match=sentence) as error:
        baseline.agreed(path, WORKLOAD, update=update)
    assert "\n" not in str(error.value)
    assert path.read_bytes() == content


def test_configuration_that_no_version_knows_is_a_broken_file(tmp_path: Path) -> None:
    path = tmp_path / "base.json"
    text = baseline_json(_baseline(GOOD))
    for broken in (text.replace('"default"', '"fastest"'), text.replace('"OK"', '"FINE"')):
        path.write_text(broken)
        with pytest.raises(PlanError, match="is broken"):
            baseline.read(path)
    path.write_text(baseline_json(replace(_baseline(GOOD), configurations=())))
    with pytest.raises(PlanError, match="holds no configuration"):
        baseline.read(path)


def test_missing_file_is_written_only_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "base.json"
    with pytest.raises(PlanError, match="run once with --update to write it"):
        baseline.agreed(path, WORKLOAD, update=False)
    assert baseline.agreed(path, WORKLOAD, update=True) is None
    with pytest.raises(PlanError, match="its folder is missing"):
        baseline.agreed(tmp_path / "no" / "base.json", WORKLOAD, update=True)
    with pytest.raises(PlanError, match="it is a folder"):
        baseline.agreed(tmp_path, WORKLOAD, update=True)


def test_baseline_of_another_workload_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "base.json"
    baseline.write(path, _baseline(GOOD))
    assert baseline.agreed(path, WORKLOAD, update=False) == _baseline(GOOD)
    for other in (
        replace(WORKLOAD, target="package.train:other"),
        replace(WORKLOAD, scale="tiny"),
    ):
        for update in (False, True):
            with pytest.raises(PlanError, match=r"is one of package\.train:build"):
                baseline.agreed(path, other, update=update)


def test_configurations_of_the_baseline_are_measured_unless_others_are_asked_for() -> None:
    before, path = _baseline(replace(GOOD, config=REGIONAL)), Path("base.json")
    request = AdviceRequest(
        workload=WORKLOAD, plan=Plan(steps=1e6), limits=Limits(configs=(MODEL,))
    )

    def configs(*, restricted: bool, update: bool) -> tuple[Config, ...]:
        found = baseline.comparable(request, before, path, restricted=restricted, update=update)
        return found.limits.configs

    assert configs(restricted=False, update=False) == (REGIONAL,)
    assert configs(restricted=False, update=True) == (REGIONAL,)
    assert configs(restricted=True, update=True) == (MODEL,)
    with pytest.raises(PlanError, match="does not hold model default: it holds regional default"):
        configs(restricted=True, update=False)


def test_every_part_of_a_configuration_survives_the_file() -> None:
    for config in (MODEL, REGIONAL, Config(dynamic=Dynamic.TRUE)):
        (one,) = _baseline(replace(GOOD, config=config)).configurations
        assert baseline.config_of(one) == config
