"""What a workload's compile looked like when it was last agreed on, and what has become worse.

The file is for people, too: it lies in a repository and is read in reviews. It holds no line
numbers, no ids and no times, so that it changes only when something that matters does.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec

from advisor.models.evidence import Evidence, gather
from advisor.profiler import statistics
from advisor.profiler.errors import AdvisorError, PlanError
from advisor.profiler.records import (
    Advice,
    Config,
    GraphBreak,
    GraphBreakCause,
    Interval,
    RecompileCause,
    TrialKind,
    TrialStatus,
    WorkloadSpec,
)
from advisor.profiler.units import config_name
from advisor.request import AdviceRequest

# Raised by one with each change that an older reader would misunderstand.
SCHEMA_VERSION = 1
_KIND = "compile-advisor baseline"
_MOST_BYTES = 16 << 20

_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+\b")
# Not a digit of a name (`layer1`, but the symbol s17 is counted up) and not an index in brackets,
# which says which argument or which dimension it is.
_NUMBER = re.compile(r"(?<![\w\[.'])-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?(?![\w\]])")
_SYMBOL = re.compile(r"\b([su])\d+\b")
_LIBRARIES = ("site-packages", "dist-packages")


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakSites:
    """Places that end a graph: one source text in one file, at so many lines of it."""

    cause: GraphBreakCause
    file: str
    code: str
    sites: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecompileSeen:
    """A reason for compiling again: the guard that failed, without what differs in each run."""

    cause: RecompileCause
    guard: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What one configuration showed."""

    scope: str
    mode: str
    dynamic: str
    status: TrialStatus
    graphs: int | None
    coverage: float | None
    recompile_limit_hit: bool
    speedup: Interval | None
    graph_breaks: tuple[BreakSites, ...]
    recompiles: tuple[RecompileSeen, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where it was measured."""

    torch: str
    device: str
    device_name: str
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The content of a baseline file. `options` are those of a preset, by name."""

    schema_version: int
    target: str
    options: dict[str, str | int]
    environment: Machine
    configurations: tuple[Compiled, ...]
    kind: str = _KIND


def baseline_of(
    advice: Advice, workload: WorkloadSpec, configs: Sequence[Config], folder: Path
) -> Baseline:
    """Returns what the trials of `configs` in an advice showed; files are named from `folder`.

    Raises `AdvisorError` when one of them did not run at all: there is nothing to compare.
    """
    found = tuple(compiled(evidence, folder) for evidence in measured(advice, configs))
    env = advice.environment
    return Baseline(
        schema_version=SCHEMA_VERSION,
        target=target_name(workload, folder),
        options=preset_options(workload),
        environment=Machine(
            torch=env.torch if env else "",
            device=env.device if env else "",
            device_name=env.device_name if env else "",
            threads=env.threads if env else 0,
        ),
        configurations=tuple(sorted(found, key=lambda one: (one.scope, one.mode, one.dynamic))),
    )


def measured(advice: Advice, configs: Sequence[Config]) -> tuple[Evidence, ...]:
    """Returns the evidence of each of `configs`. Raises `AdvisorError` when one did not run."""
    by_config = {evidence.config: evidence for evidence in gather(advice.trials)}
    for config in configs:
        if config not in by_config:
            raise AdvisorError(f"{config_name(config)} was not measured", _why_not(advice, config))
    return tuple(by_config[config] for config in configs)


def _why_not(advice: Advice, config: Config) -> str:
    for trial in advice.trials:
        if trial.failure is not None and (trial.config == config or trial.kind is TrialKind.EAGER):
            return trial.failure.message
    return "the campaign ended before it"


def compiled(evidence: Evidence, folder: Path) -> Compiled:
    """Returns what a baseline keeps of a configuration's evidence."""
    trial = evidence.trial
    sites = Counter(
        {key: len(lines) for key, lines in break_lines(trial.graph_breaks, folder).items()}
    )
    guards = {(met.cause, normal_guard(met.reason)) for met in trial.recompiles}
    return Compiled(
        scope=evidence.config.scope.value,
        mode=evidence.config.mode.value,
        dynamic=evidence.config.dynamic.value,
        status=trial.status,
        graphs=trial.graphs,
        coverage=None if trial.coverage is None else round(trial.coverage, 2),
        recompile_limit_hit=trial.recompile_limit_hit,
        speedup=_figure(evidence),
        graph_breaks=tuple(
            BreakSites(cause=cause, file=file, code=code, sites=sites[cause, file, code])
            for cause, file, code in sorted(sites, key=lambda key: (key[1], key[0], key[2]))
        ),
        recompiles=tuple(
            RecompileSeen(cause=cause, guard=guard) for cause, guard in sorted(guards)
        ),
    )


def break_lines(
    breaks: Sequence[GraphBreak], folder: Path
) -> dict[tuple[GraphBreakCause, str, str], list[tuple[str, int]]]:
    """Returns the places (file, line) of graph breaks by cause, file from `folder` and source."""
    found: dict[tuple[GraphBreakCause, str, str], list[tuple[str, int]]] = {}
    for met in breaks:
        key = (met.cause, file_name(met.file, folder), " ".join(met.code.split()))
        places = found.setdefault(key, [])
        if (met.file, met.line) not in places:
            places.append((met.file, met.line))
    return found


def _figure(evidence: Evidence) -> Interval | None:
    """Returns the speedup with the interval in which another run of the same code would lie.

    Rounded to what a person reads.
    """
    figure: Interval | None = evidence.trial.speedup
    if evidence.pairs:
        figure = statistics.speedup(evidence.pairs)
        if len({pair.process for pair in evidence.pairs}) == 1:
            figure = _of_any_process(figure)
    if figure is None:
        return None
    return Interval(
        median=round(figure.median, 3), low=round(figure.low, 3), high=round(figure.high, 3)
    )


def _of_any_process(figure: Interval) -> Interval:
    """Returns the interval that one process measured, widened by what processes differ by.

    Without it two runs of the same code would differ "beyond the noise" in one case out of six.
    """
    between = statistics.Z_95 * statistics.USUAL_BETWEEN
    down, up = (
        math.exp(math.hypot(math.log(one / other), between))
        for one, other in ((figure.median, figure.low), (figure.high, figure.median))
    )
    return Interval(median=figure.median, low=figure.median / down, high=figure.median * up)


def normal_guard(guard: str) -> str:
    """Returns a guard without ids, addresses and numbers that are others in the next run."""
    text = _ADDRESS.sub("ADDRESS", " ".join(guard.split()))
    text = _SYMBOL.sub(r"\1N", text)
    return _NUMBER.sub("N", text)


def file_name(file: str, folder: Path) -> str:
    """Returns a file's name from `folder`; one of an installed library from its own folder."""
    if not file or not os.path.isabs(file):
        return file
    parts = Path(file).parts
    for library in _LIBRARIES:
        if library in parts:
            last = len(parts) - 1 - parts[::-1].index(library)
            return "/".join(parts[last:])
    return Path(os.path.relpath(file, folder)).as_posix()


def target_name(workload: WorkloadSpec, folder: Path) -> str:
    """Returns a workload's name; a file or folder is named from `folder`, wherever one stands."""
    place, separator, function = workload.target.rpartition(":")
    if workload.target.startswith("hf:"):
        path = Path(workload.cwd, workload.target.removeprefix("hf:"))
        return f"hf:{_from(folder, path)}" if path.is_dir() else workload.target
    path = Path(workload.cwd, place)
    return f"{_from(folder, path)}{separator}{function}" if path.is_file() else workload.target


def _from(folder: Path, path: Path) -> str:
    return Path(os.path.relpath(path.resolve(), folder)).as_posix()


def preset_options(workload: WorkloadSpec) -> dict[str, str | int]:
    """Returns the options of a preset that were given, by name."""
    given = {
        "batch_size": workload.batch_size,
        "length": workload.length,
        "precision": workload.precision,
        "scale": workload.scale,
        "task": workload.task,
    }
    return {name: value for name, value in given.items() if value is not None}


def config_of(one: Compiled) -> Config:
    """Returns the configuration that an entry of a baseline is about."""
    return msgspec.convert(
        {"scope": one.scope, "mode": one.mode, "dynamic": one.dynamic}, type=Config
    )


# --- the file


def baseline_json(baseline: Baseline) -> str:
    """Returns the text of a baseline file: sorted names, one figure in a line."""
    content = json.dumps(asdict(baseline), indent=2, sort_keys=True, ensure_ascii=False)
    return content.encode("utf-8", "backslashreplace").decode("utf-8") + "\n"


def read(path: Path) -> Baseline:
    """Returns the baseline in a file.

    Raises `PlanError` when there is none, or what is there is not one that this version reads.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        raise PlanError(
            f"there is no baseline {path}", mend="run once with --update to write it"
        ) from None
    except OSError as error:
        raise PlanError(f"the baseline {path} cannot be read", error.strerror or "") from error
    mend = "it was left as it is: name another file, or delete it and run with --update"
    try:
        head = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PlanError(f"{path} is not a baseline: it is not JSON", str(error), mend) from error
    if not isinstance(head, dict) or head.get("kind") != _KIND:
        raise PlanError(f"{path} is not a baseline of advise check", "other JSON", mend)
    version = head.get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise PlanError(
            f"the baseline {path} was written by a newer compile-advisor",
            f"its schema is {version}, this one reads up to {SCHEMA_VERSION}",
            "upgrade compile-advisor here",
        )
    try:
        found = msgspec.json.decode(data, type=Baseline)
        for one in found.configurations:
            config_of(one)
    except msgspec.DecodeError as error:
        raise PlanError(f"the baseline {path} is broken", str(error), mend) from error
    if not found.configurations:
        raise PlanError(f"the baseline {path} is broken", "it holds no configuration", mend)
    return found


def check_writable(path: Path) -> None:
    """Raises `PlanError` when a baseline could not be written to `path`."""
    folder = path.resolve().parent
    if path.is_dir():
        raise PlanError(f"the baseline {path} cannot be written", "it is a folder")
    if not folder.is_dir():
        raise PlanError(f"the baseline {path} cannot be written", "its folder is missing")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PlanError(f"the baseline {path} cannot be written", "its folder is not writable")


def write(path: Path, baseline: Baseline) -> None:
    """Writes a baseline whole or not at all. Raises `PlanError` when it cannot be written."""
    # The file that a link points to is replaced, not the link.
    real = path.resolve()
    new = real.with_name(f".{real.name}.{os.getpid()}.new")
    try:
        with new.open("x", encoding="utf-8") as file:
            file.write(baseline_json(baseline))
            file.flush()
            os.fsync(file.fileno())
        new.replace(real)
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink()
        raise PlanError(
            f"the baseline {path} cannot be written", error.strerror or str(error)
        ) from error


def agreed(path: Path, workload: WorkloadSpec, *, update: bool) -> Baseline | None:
    """Returns the baseline of a workload, None when one is only to be written.

    Raises `PlanError`, before anything is measured, when it is missing, not one, one of another
    workload, or could not be written.
    """
    if update:
        check_writable(path)
        if not path.exists():
            return None
    found = read(path)
    folder = path.resolve().parent
    asked = replace(found, target=target_name(workload, folder), options=preset_options(workload))
    if (asked.target, asked.options) != (found.target, found.options):
        raise PlanError(
            f"the baseline {path} is one of {_described(found)}",
            f"not of {_described(asked)}",
            "name another file, or delete it and run with --update",
        )
    return found


def comparable(
    request: AdviceRequest, before: Baseline, path: Path, *, restricted: bool, update: bool
) -> AdviceRequest:
    """Returns the request for what a baseline holds, or as it is when it was `restricted`.

    Raises `PlanError` for a configuration that the baseline does not hold, unless it is to be
    updated.
    """
    known = tuple(config_of(one) for one in before.configurations)
    if not restricted:
        return replace(request, limits=replace(request.limits, configs=known))
    missing = [config for config in request.limits.configs if config not in known]
    if missing and not update:
        raise PlanError(
            f"the baseline {path} does not hold {config_name(missing[0])}",
            f"it holds {', '.join(map(config_name, known))}",
            "leave --mode, --scope and --dynamic out, or run with --update",
        )
    return request


def _described(baseline: Baseline) -> str:
    options = "".join(f" {name}={value}" for name, value in sorted(baseline.options.items()))
    return baseline.target + options
