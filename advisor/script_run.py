"""Runs a person's script until its training is measured, and ends whatever it has started."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from advisor.injection import injected
from advisor.models.plan import Plan
from advisor.profiler import process_tree
from advisor.profiler.records import Config
from advisor.watch_settings import TOP, Watched, WatchSettings, read

_POLL_S = 0.1
_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")
# How long a script may take to end after it was told to, or once it is measured.
_GRACE_S = 10.0
_TERM_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptRun:
    """What a script showed while it ran. `code` is None where it did not end by itself.

    `reached` says whether any Python that has this package ran in it.
    """

    watched: Watched | None
    code: int | None
    reached: bool
    took_s: float


def measure(command: Sequence[str], plan: Plan, config: Config, budget_s: float) -> ScriptRun:
    """Runs a command until its training is measured, or for `budget_s`; its output is on stderr.

    None of its processes is alive afterwards. Raises OSError when it cannot be started.
    """
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="advise-") as folder:
        settings = WatchSettings(
            folder=folder,
            measure=True,
            plan=plan,
            config=config,
            result=str(Path(folder, "result.json")),
            until_s=time.time() + budget_s,
        )
        with _running(command, settings) as process:
            code = _wait(process, settings.result, begun + budget_s)
        return ScriptRun(
            watched=read(settings.result),
            code=code,
            reached=settings.any_reached,
            took_s=time.monotonic() - begun,
        )


def _wait(process: subprocess.Popen[bytes], result: str, deadline: float) -> int | None:
    """Returns the exit code of a script that ended by itself; None once it need not go on."""
    ends_at, settled = deadline + _TERM_S, False
    while (code := process.poll()) is None and time.monotonic() < ends_at:
        watched = None if settled else read(result)
        if watched is not None and watched.settled:
            settled = True
            # One that is measured ends by itself; one that cannot be would go on to its end.
            grace_s = 0.0 if watched.problem else _GRACE_S
            ends_at = min(ends_at, time.monotonic() + grace_s)
        time.sleep(_POLL_S)
    return code


@contextmanager
def _running(command: Sequence[str], settings: WatchSettings) -> Iterator[subprocess.Popen[bytes]]:
    inherited = {name: value for name, value in os.environ.items() if name != TOP}
    # Compiling begins with empty caches: what an earlier run left there would make it look cheap.
    caches = {name: str(Path(settings.folder, name.lower())) for name in _CACHES}
    before = set(process_tree.children(os.getpid()))
    # Daemons of the script become children of this process, which ends them.
    process_tree.become_subreaper()
    process = subprocess.Popen(
        command,
        env=injected({**inherited, **caches, **settings.variables()}),
        stdout=2,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        _end(process, before)


def _end(process: subprocess.Popen[bytes], before: set[int]) -> None:
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_TERM_S)
    give_up = time.monotonic() + _GRACE_S
    while time.monotonic() < give_up:
        left = set(process_tree.children(os.getpid())) - before
        if not left:
            break
        for pid in [*left, *(below for one in left for below in process_tree.descendants(one))]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in left - {process.pid}:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        process.poll()
        time.sleep(0.01)
