"""The folder that a failed trial leaves: a script that repeats it, and what was seen.

Imports no torch: it is written by whoever asked for the trial, whose process may be gone.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
import shlex
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from advisor.profiler.errors import AdvisorError
from advisor.profiler.records import (
    Blocks,
    Environment,
    Trial,
    TrialSpec,
    TrialStatus,
    encode,
)
from advisor.profiler.reproduction_script import script
from advisor.profiler.units import config_name, printable

log = logging.getLogger(__name__)

MOST_KEPT = 20
SCRIPT = "reproduce.py"
# Cut off and skipped are decisions of the campaign, not errors.
_WORTH_REPEATING = (
    TrialStatus.FAILED_TO_COMPILE,
    TrialStatus.CRASHED,
    TrialStatus.OUT_OF_MEMORY,
    TrialStatus.TIMED_OUT,
    TrialStatus.DISAGREES,
)
_README = """\
reproduce.py repeats the trial of {config} that ended with {status}; config.json is the trial's \
specification, versions.txt where it ran, and log.txt what it said. The script, the logs and the \
tracebacks hold pieces of the model's code: nothing was sent anywhere, so look through them before \
you give them to someone.
"""
_COLLECT = """\

All versions of this machine, as PyTorch's issue form asks for them:
    python -m torch.utils.collect_env
"""


def with_reproduction(
    trial: Trial,
    spec: TrialSpec,
    parent: Path,
    *,
    environment: Environment | None = None,
    blocks: Sequence[Blocks] = (),
) -> Trial:
    """Returns the trial with the folder below `parent` that repeats it, when it went wrong.

    `environment` and `blocks` are what other trials of the job found, for a trial that ended
    before it could tell. The newest folders stay, `MOST_KEPT` of them. A folder that cannot be
    written is a warning in the log: the trial's result is worth more.
    """
    if trial.status not in _WORTH_REPEATING or _budget_ended(trial):
        return trial
    if trial.workload is not None:
        blocks = trial.workload.blocks
    folder = parent / trial.trial_id
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write(folder, _files(trial, spec, trial.environment or environment, blocks))
        _keep_newest(parent)
    except (OSError, ValueError, AdvisorError) as error:
        # ValueError: a path or a text that cannot be written, such as one with a NUL in it;
        # AdvisorError: an option that is none, of a trial that ended before it was set.
        log.warning("no reproduction of trial %s: %s", trial.trial_id, error)
        return trial
    return replace(trial, reproduction=str(folder))


def _budget_ended(trial: Trial) -> bool:
    return trial.failure is not None and trial.failure.kind == "budget"


def command(folder: str) -> str:
    """Returns the line that runs the script of a reproduction folder."""
    return f"python {shlex.quote(os.path.join(folder, SCRIPT))}"


def _files(
    trial: Trial, spec: TrialSpec, environment: Environment | None, blocks: Sequence[Blocks]
) -> dict[str, str]:
    return {
        SCRIPT: script(trial, spec, blocks),
        "config.json": msgspec.json.format(encode(spec), indent=2).decode() + "\n",
        "versions.txt": _versions(spec, environment),
        "log.txt": _log(trial),
        "README.txt": _README.format(config=config_name(spec.config), status=trial.status.value),
    }


def _versions(spec: TrialSpec, environment: Environment | None) -> str:
    if environment is not None:
        found = {
            "torch": environment.torch,
            "python": environment.python,
            "platform": environment.platform,
            "device": f"{environment.device} ({environment.device_name})",
            "cuda": environment.cuda,
            "driver": environment.driver,
            "transformers": environment.transformers,
            "threads": str(environment.threads),
        }
    else:
        # The trial ended before it told: it ran in the same environment as this process.
        found = {
            "torch": _installed("torch"),
            "python": platform.python_version(),
            "platform": platform.platform(),
            "device": spec.workload.device,
            "transformers": _installed("transformers"),
        }
    return "".join(f"{name}: {value}\n" for name, value in found.items() if value) + _COLLECT


def _installed(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _log(trial: Trial) -> str:
    failure = trial.failure
    parts = [f"{trial.status.value}\n"]
    if failure is not None:
        where = f" in phase {failure.phase.value}" if failure.phase else ""
        parts = [f"{trial.status.value}{where}: {failure.message}\n", failure.details]
    parts += [f"warning: {warning}\n" for warning in trial.warnings]
    for name, tail in (("stdout", trial.stdout_tail), ("stderr", trial.stderr_tail)):
        if tail:
            parts.append(f"\n--- end of {name} ---\n{tail}\n")
    return printable("\n".join(part for part in parts if part))


def _write(folder: Path, files: dict[str, str]) -> None:
    """Writes the whole folder or none of it, readable by nobody else."""
    unfinished = Path(tempfile.mkdtemp(prefix=".", dir=folder.parent))
    try:
        for name, text in files.items():
            # A person's source may hold what is no text: shown as an escape, not an error.
            (unfinished / name).write_text(text, encoding="utf-8", errors="backslashreplace")
        unfinished.rename(folder)
    except OSError:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _keep_newest(parent: Path) -> None:
    with os.scandir(parent) as entries:
        folders = [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
    folders.sort(key=_age_ns)
    for folder in folders[:-MOST_KEPT]:
        shutil.rmtree(folder.path, ignore_errors=True)


def _age_ns(folder: os.DirEntry[str]) -> int:
    """Returns when a folder was written; 0 when another process has just deleted it."""
    try:
        return folder.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
