"""Live progress: what, for how long, at most how long; never silent."""

from __future__ import annotations

import io
import re
import time
from dataclasses import replace

from advisor.events import Accepted, TrialStarted, Waiting
from advisor.profiler.records import (
    Config,
    Failure,
    Interval,
    Phase,
    Progress,
    Scope,
    Trial,
    TrialKind,
    TrialStatus,
)
from advisor.progress import ProgressView, outcome

REGIONAL = Config(scope=Scope.REGIONAL)
STARTED = TrialStarted(
    trial_id="t1",
    kind=TrialKind.COMPILE,
    number=2,
    config=REGIONAL,
    why="it compiles fastest",
    at_most_s=960.0,
)


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def _compiling(detail: str, at_most_s: float = 880.0) -> Progress:
    return Progress(trial_id="t1", phase=Phase.COLD, detail=detail, at_most_s=at_most_s)


def _trial(status: TrialStatus, message: str = "") -> Trial:
    ok = status is TrialStatus.OK
    return Trial(
        trial_id="t1",
        kind=TrialKind.COMPILE,
        config=REGIONAL,
        status=status,
        failure=Failure(kind="x", message=message) if message else None,
        step_s=Interval(median=0.062, low=0.06, high=0.064) if ok else None,
        speedup=Interval(median=1.31, low=1.28, high=1.34) if ok else None,
        cold_start_s=24.1 if ok else None,
        wall_s=61.0,
    )


def test_piped_progress_says_what_for_how_long_and_at_most() -> None:
    file, clock = io.StringIO(), Clock()
    with ProgressView(file, live=False, clock=clock) as view:
        view.show(Accepted(advice_id="a1"))
        view.show(Waiting(device="cuda:0", message="cuda:0 is busy with another trial."))
        view.show(STARTED)
        clock.now += 41
        view.show(_compiling("inductor"))
        clock.now += 20
        view.show(_trial(TrialStatus.OK))
    assert file.getvalue().splitlines() == [
        "[00:00] cuda:0 is busy with another trial.",
        "[00:00] trial 2, regional default, at most 16 min: it compiles fastest",
        "[00:41] trial 2, regional default: compiling (inductor), 0 s, at most 14 min 40 s more",
        "[01:01] regional default: 62 ms a step, 1.31x (1.28-1.34), compiled in 24 s (1 min 1 s)",
    ]


def test_each_compile_phase_is_a_line_but_not_each_step_of_measuring() -> None:
    file = io.StringIO()
    clock = Clock()
    with ProgressView(file, live=False, clock=clock) as view:
        view.show(STARTED)
        for detail in ("dynamo", "dynamo", "inductor", "inductor"):
            view.show(_compiling(detail))
            clock.now += 6
        for step in range(20):
            view.show(
                Progress(trial_id="t1", phase=Phase.STEADY, detail=f"±{20 - step} %", step=step)
            )
    lines = file.getvalue().splitlines()
    assert [re.findall(r"dynamo|inductor|measuring", line) for line in lines[1:]] == [
        ["dynamo"],
        ["inductor"],
        ["measuring"],
    ]


def test_silence_is_broken_by_the_heartbeat() -> None:
    file = io.StringIO()
    with ProgressView(file, live=False, heartbeat_s=0.1) as view:
        view.show(STARTED)
        view.show(_compiling("inductor"))
        time.sleep(0.55)
    beats = [line for line in file.getvalue().splitlines() if "compiling (inductor)" in line]
    assert len(beats) >= 3


def test_heartbeat_counts_down_what_it_takes_at_most() -> None:
    file, clock = io.StringIO(), Clock()
    with ProgressView(file, live=False, heartbeat_s=15.0, clock=clock) as view:
        view.show(STARTED)
        view.show(_compiling("inductor", at_most_s=100.0))
        clock.now += 30
        assert view._state().endswith("compiling (inductor), 30 s, at most 1 min 10 s more")
        clock.now += 300
        assert view._state().endswith("at most 0 s more")


def test_a_compile_says_how_long_it_probably_still_takes() -> None:
    file, clock = io.StringIO(), Clock()
    believed = replace(STARTED, compile_s=Interval(median=40.0, low=20.0, high=80.0))
    with ProgressView(file, live=False, clock=clock) as view:
        view.show(believed)
        view.show(_compiling("dynamo"))
        clock.now += 20
        view.show(_compiling("inductor"))
        clock.now += 500
        view.show(_compiling("C++"))
        view.show(Progress(trial_id="t1", phase=Phase.STEADY))
    lines = file.getvalue().splitlines()
    assert "0 s, probably 40 s more, at most" in lines[1]
    assert re.search(r"20 s, probably 2\d s more, at most", lines[2])
    # Longer than it was believed to take at all: then nothing is promised.
    assert "probably" not in lines[3]
    assert "probably" not in lines[4]


def test_nothing_is_written_after_the_end() -> None:
    file = io.StringIO()
    with ProgressView(file, live=False, heartbeat_s=0.05) as view:
        view.show(STARTED)
    written = file.getvalue()
    time.sleep(0.2)
    assert file.getvalue() == written


def test_live_line_shows_the_trial_and_is_gone_at_the_end() -> None:
    file = io.StringIO()
    with ProgressView(file, live=True) as view:
        view.show(STARTED)
        view.show(_compiling("inductor"))
        time.sleep(0.4)
        view.show(_trial(TrialStatus.OK))
    text = file.getvalue()
    assert "regional default: 62 ms a step" in text


def test_failed_trial_says_why_without_control_characters() -> None:
    failed = _trial(TrialStatus.CRASHED, "the trial was ended by SIGSEGV \x1b[2J")
    assert outcome(failed) == r"crashed: the trial was ended by SIGSEGV \x1b[2J"


def test_every_status_and_phase_has_words() -> None:
    for status in TrialStatus:
        assert outcome(_trial(status))
    file = io.StringIO()
    with ProgressView(file, live=False, clock=Clock()) as view:
        view.show(STARTED)
        for phase in Phase:
            view.show(Progress(trial_id="t1", phase=phase))
    assert len(file.getvalue().splitlines()) == 1 + len(Phase)


def test_one_reason_for_many_skipped_configurations_is_said_once() -> None:
    file = io.StringIO()
    with ProgressView(file, live=False, clock=Clock()) as view:
        for _ in range(3):
            view.show(_trial(TrialStatus.SKIPPED, "even its best case cannot pay"))
    text = file.getvalue()
    assert text.count("even its best case cannot pay") == 1
    assert text.count("regional default: skipped for the same reason") == 2
