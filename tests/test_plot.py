"""The picture: right lines, right crossings, files that are what their suffix says."""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from advisor import plot as plotting
from advisor.plot import check_path, lines, plot
from advisor.profiler.errors import PlanError
from advisor.profiler.records import (
    Advice,
    Alternative,
    Config,
    Interval,
    Scope,
    Trial,
    TrialKind,
    TrialStatus,
)

REGIONAL, MODEL, TUNED = Config(scope=Scope.REGIONAL), Config(), Config(fullgraph=True)


def _around(median: float) -> Interval:
    return Interval(median=median, low=0.97 * median, high=1.03 * median)


def _compiled(config: Config, cold_start_s: float, step_s: float) -> Trial:
    return Trial(
        trial_id=f"{cold_start_s}",
        kind=TrialKind.COMPILE,
        config=config,
        status=TrialStatus.OK,
        step_s=_around(step_s),
        cold_start_s=cold_start_s,
    )


def _advice(*, steps: float, enable: bool) -> Advice:
    """Returns an advice for eager steps of 80 ms, regional 60 ms + 20 s, model 50 ms + 60 s."""
    totals = {REGIONAL: 20 + 0.06 * steps, MODEL: 60 + 0.05 * steps}
    return Advice(
        advice_id="a1",
        created="2026-11-01T10:00:00Z",
        enable=enable,
        target="train.py:build",
        config=REGIONAL if enable else None,
        code="model.compile()" if enable else "",
        speedup=_around(80 / 60) if enable else None,
        compile_s=_around(20.0) if enable else None,
        saved_s=_around(0.08 * steps - totals[REGIONAL]) if enable else None,
        eager_total_s=_around(0.08 * steps),
        advised_total_s=_around(totals[REGIONAL] if enable else 0.08 * steps),
        break_even_step=1000.0 if enable else None,
        p_saves=0.99 if enable else 0.0,
        reasons=("it costs <b>$5</b> & $6 per step.",),
        steps=steps,
        alternatives=tuple(
            Alternative(config=config, why_not="slower", total_s=_around(total))
            for config, total in totals.items()
            if not (enable and config == REGIONAL)
        ),
        trials=(
            Trial(
                trial_id="e",
                kind=TrialKind.EAGER,
                status=TrialStatus.OK,
                eager_step_s=_around(0.08),
            ),
            _compiled(REGIONAL, 20.0, 0.06),
            _compiled(MODEL, 60.0, 0.05),
            Trial(trial_id="f", kind=TrialKind.COMPILE, config=TUNED, status=TrialStatus.TIMED_OUT),
        ),
    )


def test_lines_start_at_the_compile_and_end_at_the_total() -> None:
    eager, advised, other = lines(_advice(steps=20_000, enable=True))
    assert eager.median_s == (0.0, 1600.0)
    assert advised.advised
    assert (advised.median_s[0], advised.median_s[-1]) == pytest.approx((20.0, 1220.0))
    assert (other.median_s[0], other.median_s[-1]) == pytest.approx((60.0, 1060.0))
    assert (other.low_s[-1], other.high_s[-1]) == pytest.approx((1028.2, 1091.8))


def test_crossings_are_where_compiled_gets_ahead() -> None:
    _, advised, other = lines(_advice(steps=20_000, enable=True))
    assert advised.crossing == 1000.0
    assert other.crossing == pytest.approx(2000.0)


def test_line_passes_through_the_break_even_step_when_restarts_follow() -> None:
    advice = _advice(steps=20_000, enable=True)
    late = dataclasses.replace(advice, advised_total_s=_around(1320.0))  # five restarts of 20 s
    _, advised, _ = lines(late)
    assert advised.steps == (0.0, 1000.0, 20_000.0)
    assert advised.median_s == pytest.approx((20.0, 80.0, 1320.0))


def test_crossing_beyond_the_plan_is_found_for_short_plans() -> None:
    eager, regional, model = lines(_advice(steps=500, enable=False))
    assert [eager.advised, regional.advised, model.advised] == [False, False, False]
    assert regional.crossing == pytest.approx(1000.0)


def test_slower_configuration_never_crosses() -> None:
    advice = _advice(steps=500, enable=False)
    slow = Alternative(config=REGIONAL, why_not="slower", total_s=_around(70.0))
    found = lines(dataclasses.replace(advice, alternatives=(slow,)))
    assert next(line for line in found if line.name == "regional default").crossing is None


def test_configuration_without_a_stored_total_is_drawn_from_its_steps() -> None:
    advice = dataclasses.replace(_advice(steps=500, enable=False), alternatives=())
    found = {line.name: line for line in lines(advice)}
    assert found["model default"].median_s[-1] == pytest.approx(60 + 0.05 * 500)
    assert "model default fullgraph" not in found


@pytest.mark.parametrize(("steps", "enable"), [(20_000, True), (500, False), (10, False)])
@pytest.mark.parametrize(
    ("suffix", "magic"), [(".png", b"\x89PNG\r\n"), (".svg", b"<?xml"), (".PNG", b"\x89PNG\r\n")]
)
def test_image_is_written(
    tmp_path: Path, steps: float, enable: bool, suffix: str, magic: bytes
) -> None:
    path = tmp_path / f"advice{suffix}"
    plot(_advice(steps=steps, enable=enable), path)
    data = path.read_bytes()
    assert data.startswith(magic)
    assert len(data) > 10_000


def test_page_escapes_what_a_person_wrote_and_needs_no_network(tmp_path: Path) -> None:
    path = tmp_path / "advice.html"
    plot(_advice(steps=500, enable=False), path)
    page = path.read_text()
    assert "<b>$5</b>" not in page
    assert 'src="http' not in page
    assert "would pay back after step 1,000" in page


def test_early_crossings_get_a_second_picture() -> None:
    late = lines(_advice(steps=20_000, enable=True))
    assert plotting._zoom(late, 20_000) == pytest.approx(2.2 * 2000)
    assert plotting._zoom(lines(_advice(steps=3000, enable=True)), 3000) is None


@pytest.mark.parametrize("name", ["advice.pdf", "advice", "advice.txt"])
def test_unknown_suffix_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(PlanError, match=r"suffix .*\.html, \.png, \.svg"):
        check_path(tmp_path / name)


def test_missing_folder_and_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="its folder is missing"):
        check_path(tmp_path / "no" / "advice.png")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(PlanError, match="it is a folder"):
        check_path(tmp_path / "folder.png")


def test_missing_library_is_said_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PlanError, match=r"plotly.*pip install 'compile-advisor\[plot\]'"):
        check_path(tmp_path / "advice.html")


def test_module_loads_no_library_before_it_draws(tmp_path: Path) -> None:
    code = (
        "import sys, advisor.plot\n"
        "print([name for name in ('matplotlib', 'plotly', 'torch') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True, text=True, cwd=tmp_path, check=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.strip() == "[]"
