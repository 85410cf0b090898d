"""Live progress on standard error: what is being tried, for how long, and how long at most.

On a terminal it is one live line under the list of finished trials. Elsewhere (a pipe, a log of a
pipeline) it is one line for each change of phase and one every 15 s, because silence while the
compiler works is what people complain of most.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import IO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from advisor.events import Event, TrialStarted, Waiting
from advisor.models.remaining import remaining_s
from advisor.profiler.records import (
    Config,
    Interval,
    Phase,
    Progress,
    Trial,
    TrialKind,
    TrialStatus,
)
from advisor.profiler.units import config_name, duration, number_of, printable, ratio

# The longest silence where there is no live line.
HEARTBEAT_S = 15.0
# Piped, a change within a phase is written at most this often.
_LEAST_PAUSE_S = 5.0

_PHASES = {
    Phase.IMPORT: "starting",
    Phase.BUILD: "building the model",
    Phase.WARM_UP: "eager steps until they are steady",
    Phase.COLD: "compiling",
    Phase.STEADY: "measuring",
    Phase.NUMERICS: "comparing the losses",
    Phase.DIAGNOSE: "looking for the causes",
    Phase.DONE: "finishing",
}

_ENDS = {
    TrialStatus.OK: "done",
    TrialStatus.FAILED_TO_COMPILE: "failed to compile",
    TrialStatus.CRASHED: "crashed",
    TrialStatus.OUT_OF_MEMORY: "out of memory",
    TrialStatus.TIMED_OUT: "timed out",
    TrialStatus.CUT_OFF: "cut off",
    TrialStatus.DISAGREES: "does not agree with eager",
    TrialStatus.SKIPPED: "skipped",
}


_OF_KIND = {
    TrialKind.WARM: ", warm start",
    TrialKind.ONE_FIRST: ", one rank first",
    TrialKind.SHAPES: ", along the lengths",
}


def trial_name(kind: TrialKind, config: Config | None) -> str:
    """Returns the name of a trial: `eager`, `regional default`, `regional default, warm start`."""
    if kind is TrialKind.EAGER:
        return "eager"
    if kind is TrialKind.COUNT:
        return "looking back"
    return printable(config_name(config)) + _OF_KIND.get(kind, "")


def outcome(trial: Trial) -> str:
    """Returns how a trial ended, in a few words with its figures."""
    if trial.status is not TrialStatus.OK:
        words = _ENDS[trial.status]
        return f"{words}: {printable(trial.failure.message)}" if trial.failure else words
    parts = []
    if trial.kind is TrialKind.EAGER and trial.eager_step_s is not None:
        parts.append(f"{duration(trial.eager_step_s.median)} a step")
    elif trial.kind is TrialKind.WARM and trial.warm_start_s is not None:
        parts.append(f"starts in {duration(trial.warm_start_s)} from the kept cache")
    elif trial.kind is TrialKind.ONE_FIRST and trial.one_first_start_s is not None:
        parts.append(f"starts in {duration(trial.one_first_start_s)} when one rank compiles first")
    elif trial.shape_times:
        parts += _along_lengths(trial)
    elif trial.step_s is not None:
        parts.append(f"{duration(trial.step_s.median)} a step")
        if trial.speedup is not None:
            parts.append(ratio(trial.speedup))
        if trial.cold_start_s is not None:
            parts.append(f"compiled in {duration(trial.cold_start_s)}")
    return ", ".join(parts) or "done"


def _along_lengths(trial: Trial) -> Iterator[str]:
    known = [(t.length, t.eager_step_s, t.step_s) for t in trial.shape_times]
    gains = [(n, eager.median / step.median) for n, eager, step in known if eager and step]
    if gains:
        (short, first), (long, last) = gains[0], gains[-1]
        yield f"{first:.2f}x at length {short} to {last:.2f}x at {long}"
    if trial.cold_start_s is not None:
        compiles = sum(time.compiles > 0 for time in trial.shape_times)
        yield f"compiled in {duration(trial.cold_start_s)}, {number_of(compiles, 'time')}"


class ProgressView:
    """Shows a campaign while it runs. A context manager: leaving it ends the live line.

    Its methods may be called from one thread; the display itself is refreshed by another.
    """

    def __init__(
        self,
        file: IO[str] | None = None,
        *,
        live: bool | None = None,
        heartbeat_s: float = HEARTBEAT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`file` None is standard error; `live` None asks whether that is a terminal."""
        self._console = Console(
            file=file, stderr=file is None, highlight=False, markup=False, emoji=False
        )
        self._live_wanted = self._console.is_terminal if live is None else live
        self._live: Live | None = None
        self._spinner = Spinner("dots")
        self._heartbeat_s = heartbeat_s
        self._clock = clock
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._beat: threading.Thread | None = None
        now = clock()
        self._began = self._trial_began = self._phase_began = self._last_line = now
        self._title = "starting the advisor"
        self._trial_at_most_s: float | None = None
        self._compile_s: Interval | None = None
        self._latest: Progress | None = None
        self._latest_at = now
        self._skipped = ""

    def __enter__(self) -> ProgressView:
        if self._live_wanted:
            self._live = Live(
                console=self._console,
                get_renderable=self._render,
                refresh_per_second=4,
                transient=True,
            )
            self._live.start()
        else:
            self._beat = threading.Thread(target=self._beats, name="progress", daemon=True)
            self._beat.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        if self._live is not None:
            self._live.stop()
        if self._beat is not None:
            self._beat.join()

    def show(self, event: Event) -> None:
        """Shows what happened: any event of a campaign but the advice, which is the report's."""
        match event:
            case Waiting():
                self.note(event.message)
            case TrialStarted():
                self.trial_started(
                    event.kind,
                    event.config,
                    event.number,
                    why=event.why,
                    at_most_s=event.at_most_s,
                    compile_s=event.compile_s,
                )
            case Progress():
                self.progress(event)
            case Trial():
                self.trial_finished(event)

    def note(self, text: str) -> None:
        """Shows a sentence that stays: what was skipped and why, what comes next."""
        with self._lock:
            self._line(printable(text))

    def trial_started(
        self,
        kind: TrialKind,
        config: Config | None,
        number: int = 0,
        *,
        why: str = "",
        at_most_s: float | None = None,
        compile_s: Interval | None = None,
    ) -> None:
        """Shows that trial `number` begins, why it comes next and how long it may take at most.

        `compile_s` is what compiling is believed to take.
        """
        with self._lock:
            self._title = f"trial {number}, " if number else ""
            self._title += trial_name(kind, config)
            self._latest = None
            self._trial_at_most_s = at_most_s
            self._compile_s = compile_s
            self._trial_began = self._phase_began = self._clock()
            if self._live is None:
                limit = "" if at_most_s is None else f", at most {_whole(at_most_s)}"
                reason = f": {printable(why)}" if why else ""
                self._line(f"{self._title}{limit}{reason}")

    def progress(self, progress: Progress) -> None:
        """Shows what the running trial does now; a change of phase or detail is a new line."""
        with self._lock:
            before = self._latest
            self._latest, self._latest_at = progress, self._clock()
            if before is None or before.phase is not progress.phase:
                self._phase_began = self._clock()
            elif _compile_phase(before) == _compile_phase(progress):
                return
            elif self._clock() - self._last_line < _LEAST_PAUSE_S:
                return  # the compiler flickers between its phases
            if self._live is None:
                self._line(self._state())

    def trial_finished(self, trial: Trial) -> None:
        """Shows how a trial ended, in a line that stays."""
        with self._lock:
            if trial.status is TrialStatus.SKIPPED:  # it never started
                words = outcome(trial)
                same = "skipped for the same reason" if words == self._skipped else words
                self._skipped = words
                self._line(f"{trial_name(trial.kind, trial.config)}: {same}")
                return
            self._latest = None
            taken = duration(trial.wall_s or self._clock() - self._trial_began)
            self._line(f"{trial_name(trial.kind, trial.config)}: {outcome(trial)} ({taken})")
            self._title, self._trial_at_most_s = "deciding what to try next", None
            self._trial_began = self._phase_began = self._clock()

    def _line(self, text: str) -> None:
        """Prints a line that stays; under the lock. Piped lines carry the time since the start."""
        self._last_line = self._clock()
        if self._live is None:
            minutes, seconds = divmod(int(self._last_line - self._began), 60)
            text = f"[{minutes:02}:{seconds:02}] {text}"
        self._console.print(Text(text), soft_wrap=self._live is None)

    def _state(self) -> str:
        """Returns what is being done, for how long, and how long that may still take."""
        now, latest = self._clock(), self._latest
        text = self._title
        if latest is not None:
            text += f": {_PHASES[latest.phase]}"
            if latest.detail:
                text += f" ({printable(latest.detail)})"
        text += f", {_whole(now - self._phase_began)}"
        if latest is not None and latest.phase is Phase.COLD and self._compile_s is not None:
            usual_s = remaining_s(self._compile_s, now - self._phase_began)
            text += "" if usual_s is None else f", probably {_whole(usual_s)} more"
        if latest is not None and latest.at_most_s is not None:
            left = latest.at_most_s - (now - self._latest_at)
            text += f", at most {_whole(max(0.0, left))} more"
        return text

    def _render(self) -> RenderableType:
        # No lock: called from a print that may hold it. Strings are replaced whole, never changed.
        now = self._clock()
        second = f"  {_whole(now - self._began)} in all"
        if self._trial_at_most_s is not None:
            left = max(0.0, self._trial_at_most_s - (now - self._trial_began))
            second += f"; this trial at most {_whole(left)} more"
        text = Text.assemble(self._state(), ("\n" + second + "; Ctrl-C ends it", "dim"))
        self._spinner.update(text=text)
        return self._spinner

    def _beats(self) -> None:
        """Repeats the state whenever nothing was written for `heartbeat_s` seconds."""
        while not self._stop.wait(self._until_beat()):
            with self._lock:
                if self._clock() - self._last_line >= self._heartbeat_s:
                    self._line(self._state())

    def _until_beat(self) -> float:
        with self._lock:
            return max(0.01, self._last_line + self._heartbeat_s - self._clock())


def _compile_phase(progress: Progress) -> str:
    """Returns the part of a detail that makes a new line: others change with each step."""
    return progress.detail if progress.phase is Phase.COLD else ""


def _whole(seconds: float) -> str:
    """Returns a running time in whole seconds: it changes while it is read."""
    return "0 s" if seconds < 1 else duration(float(int(seconds)) if seconds >= 10 else seconds)
