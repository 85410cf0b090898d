"""What `advise train` and `advise run -- ...` tell the script's process, and what comes back.

Both are JSON: the settings in a variable of the environment, which every process of the script
inherits, the result in a file that the first process to train claims for itself.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from advisor.models.loop_policy import LoopOutcome
from advisor.models.plan import Plan
from advisor.profiler.errors import AdvisorError
from advisor.profiler.records import Config, Environment, WorkloadFacts, decode, encode

VARIABLE = "ADVISOR_WATCH"
# The first Python process of a script, by its number: the others are below it.
TOP = "ADVISOR_WATCH_TOP"
# Left in the folder by a process that was reached, and by one in which an optimizer has stepped.
_REACHED, _STEPPED = "reached", "stepped"


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSettings:
    """How a script's processes watch its training.

    With `measure` both arms are measured, whatever is believed, and then the script ends; it ends
    at `until_s` (as `time.time()` counts) too. `folder` is private to this run; made by whoever
    needs it first, and taken away by the first process. `result` is where the outcome is written
    (empty: nowhere).
    """

    folder: str
    measure: bool = False
    plan: Plan | None = None
    config: Config = field(default_factory=Config)
    result: str = ""
    until_s: float | None = None

    def variables(self) -> dict[str, str]:
        """Returns the variables with which a script's processes find these settings."""
        return {VARIABLE: encode(self).decode()}

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> WatchSettings | None:
        """Returns the settings of an environment; None where nothing is to be watched."""
        text = environment.get(VARIABLE, "")
        try:
            return decode(text.encode(), cls) if text else None
        except AdvisorError:
            return None

    # --- what the processes of one script let each other know

    def reached(self) -> None:
        """Leaves word that Python has begun with these settings."""
        self._leave(_REACHED)

    def stepped(self) -> None:
        """Leaves word that a training has begun."""
        self._leave(_STEPPED)

    @property
    def any_reached(self) -> bool:
        """Whether Python has begun in any process."""
        return Path(self.folder, _REACHED).exists()

    @property
    def any_stepped(self) -> bool:
        """Whether an optimizer has stepped in any process that has left word."""
        return Path(self.folder, _STEPPED).exists()

    def claim(self) -> bool:
        """Returns whether the result is this process's to write: it is the first one's."""
        if not self.result:
            return False
        with contextlib.suppress(OSError):
            os.close(os.open(self.result, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            return True
        return False

    def _leave(self, word: str) -> None:
        with contextlib.suppress(OSError):
            folder = Path(self.folder)
            folder.mkdir(mode=0o700, exist_ok=True)
            (folder / word).touch()


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """What was seen of a script's training.

    `settled` says that nothing more will be found out. `problem` is why the watching stepped aside
    (empty: it did not). `wait_s` is the usual time between two steps, mostly for data. `graphs`
    were compiled; None where torch does not count them.
    """

    outcome: LoopOutcome = field(default_factory=LoopOutcome)
    settled: bool = False
    problem: str = ""
    optimizer_steps: int = 0
    forwards: int | None = None
    wait_s: float | None = None
    graphs: int | None = None
    ranks: int = 1
    config: Config = field(default_factory=Config)
    facts: WorkloadFacts | None = None
    environment: Environment | None = None


def write(path: str, watched: Watched) -> None:
    """Writes a result, whole or not at all. Raises OSError."""
    part = f"{path}.part"
    Path(part).write_bytes(encode(watched) + b"\n")
    os.replace(part, path)


def read(path: str) -> Watched | None:
    """Returns the result that was written; None where there is none."""
    try:
        data = Path(path).read_bytes()
        return decode(data, Watched) if data else None
    except (OSError, AdvisorError):
        return None
