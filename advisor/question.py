"""What was typed, checked, and made into a request, before any process is started.

Everything that can be said without torch is said here, at once: whether the file is there, how a
workload is named, which modes, presets and devices there are. The rest is the profiler's.
"""

from __future__ import annotations

import difflib
import enum
import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from advisor.models.plan import Plan
from advisor.profiler.errors import PlanError, WorkloadError
from advisor.profiler.preset_table import PRESETS
from advisor.profiler.records import (
    MOST_RANKS,
    Config,
    Dynamic,
    Lengths,
    Mode,
    Scope,
    WorkloadSpec,
    Wrapper,
)
from advisor.profiler.units import parse_duration, parse_size, printable
from advisor.request import AdviceRequest, Limits

_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,4})?")
_ADVICE_ID = re.compile(r"[A-Za-z0-9_-]+")
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_PADDING = re.compile(r"(?P<multiple>multiple:)?(?P<number>[0-9]{1,18})")
_FORMS = "path/to/file.py:function, package.module:function, hf:NAME or hf:DIR expected"
# CUDA graphs need a CUDA device.
CUDA_GRAPH_MODES = (Mode.REDUCE_OVERHEAD, Mode.MAX_AUTOTUNE)
# What can be tried on every device, for when no mode was asked for.
_MODES_ANYWHERE = (Mode.DEFAULT, Mode.MAX_AUTOTUNE_NO_CUDAGRAPHS)
# A plan is not asked for when only causes are: any that is long does.
EXPLAINED_STEPS = 1e6

E = TypeVar("E", bound=enum.StrEnum)


@dataclass(frozen=True, slots=True, kw_only=True)
class Typed:
    """The options of `advise run`, `explain` and `check` as they were typed."""

    target: str
    steps: float | None = None
    epochs: float | None = None
    steps_per_epoch: float | None = None
    hours: float | None = None
    restarts: int = 0
    eval_every: float | None = None
    eval_steps: float | None = None
    price_per_hour: float | None = None
    confidence: float = 0.9
    budget: str | None = None
    memory_limit: str | None = None
    device: str = "auto"
    modes: Sequence[str] = ()
    scopes: Sequence[str] = ()
    dynamics: Sequence[str] = ()
    task: str | None = None
    batch_size: int | None = None
    length: int | None = None
    precision: str | None = None
    scale: str | None = None
    seed: int = 0
    measure_anyway: bool = False
    exhaustive: bool = False
    fresh: bool = False
    lengths: Path | None = None
    lengths_column: str | None = None
    tokens_per_batch: int | None = None
    padding: str | None = None
    sorted_by_length: bool = False
    ranks: int = 1
    wrap: str | None = None
    checkpointing: bool = False
    world_size: int | None = None
    network: str | None = None
    port: int = 0


def plan_of(typed: Typed) -> Plan:
    """Returns the plan that was typed. Raises `PlanError` for a network that is no size."""
    return Plan(
        steps=typed.steps,
        epochs=typed.epochs,
        steps_per_epoch=typed.steps_per_epoch,
        hours=typed.hours,
        restarts=typed.restarts,
        eval_every=typed.eval_every,
        eval_steps=typed.eval_steps,
        price_per_hour=typed.price_per_hour,
        confidence=typed.confidence,
        world_size=typed.world_size,
        network_bytes_per_s=None
        if typed.network is None
        else float(parse_size(typed.network.removesuffix("/s"), "--network")),
    )


def request_of(typed: Typed) -> AdviceRequest:
    """Returns the request that was typed.

    Raises `PlanError` or `WorkloadError` for the first thing that makes no sense.
    """
    plan = plan_of(typed)
    limits = Limits(
        budget_s=None if typed.budget is None else parse_duration(typed.budget, "--budget"),
        memory_limit_bytes=None
        if typed.memory_limit is None
        else parse_size(typed.memory_limit, "--memory-limit"),
        configs=configs_of(typed.modes, typed.scopes, typed.dynamics, typed.device),
        measure_anyway=typed.measure_anyway,
        exhaustive=typed.exhaustive,
        fresh=typed.fresh,
    )
    workload = WorkloadSpec(
        target=typed.target,
        cwd=_folder(),
        device=typed.device,
        task=typed.task,
        batch_size=typed.batch_size,
        length=typed.length,
        precision=typed.precision,
        scale=typed.scale,
        seed=typed.seed,
        ranks=typed.ranks,
        wrapper=_wrapper(typed),
        checkpointing=typed.checkpointing,
        port=typed.port,
    )
    request = AdviceRequest(workload=workload, plan=plan, limits=limits)
    request.validate()
    check_workload(workload)
    # Last, because a file may be long.
    lengths = _lengths(typed)
    if lengths is not None:
        request = replace(request, lengths=lengths)
        request.validate()
    return request


def explain_request(typed: Typed) -> AdviceRequest:
    """Returns the request that measures a workload to explain it, whatever its plan.

    The whole model in mode default, where nothing else was asked for. Raises as `request_of`.
    """
    return request_of(
        replace(
            typed,
            steps=EXPLAINED_STEPS if typed.steps is None else typed.steps,
            modes=typed.modes or (Mode.DEFAULT,),
            scopes=typed.scopes or (Scope.MODEL,),
            dynamics=typed.dynamics or (Dynamic.AUTO,),
            measure_anyway=True,
        )
    )


def advice_id_of(typed: Typed) -> str | None:
    """Returns the id of an advice that was given instead of a workload, None for a workload.

    Raises `WorkloadError` for what is neither, and `PlanError` for options that say how to measure
    beside an id: nothing is measured then.
    """
    if ":" in typed.target:
        return None
    if _ADVICE_ID.fullmatch(typed.target) is None:
        raise WorkloadError(
            f"{printable(typed.target)!r} is neither the id of an advice nor a workload",
            mend=_FORMS,
        )
    if typed != Typed(target=typed.target):
        raise PlanError(
            f"the advice {typed.target} is only shown",
            "options that say how to measure have no effect on what was measured",
            "name the workload to measure it anew",
        )
    return typed.target


def configs_of(
    modes: Sequence[str], scopes: Sequence[str], dynamics: Sequence[str], device: str
) -> tuple[Config, ...]:
    """Returns the configurations that the options name; none when nothing was restricted.

    Raises `PlanError` for an unknown name, and for modes with CUDA graphs on the CPU.
    """
    found_modes = [_choice(Mode, name, "--mode") for name in modes]
    found_scopes = [_choice(Scope, name, "--scope") for name in scopes]
    found_dynamics = [_choice(Dynamic, name, "--dynamic") for name in dynamics]
    for mode in found_modes:
        if device == "cpu" and mode in CUDA_GRAPH_MODES:
            raise PlanError(
                f"--mode {mode} does not run on --device cpu",
                "it uses CUDA graphs",
                f"on the CPU: {', '.join(_MODES_ANYWHERE)}",
            )
    if not (found_modes or found_scopes or found_dynamics):
        return ()
    combinations = itertools.product(
        found_scopes or (Scope.REGIONAL, Scope.MODEL),
        found_modes or _MODES_ANYWHERE,
        found_dynamics or (Dynamic.AUTO,),
    )
    return tuple(
        dict.fromkeys(
            Config(scope=scope, mode=mode, dynamic=dynamic) for scope, mode, dynamic in combinations
        )
    )


def _wrapper(typed: Typed) -> Wrapper:
    """Returns how ranks share the model: DDP where nothing else was said.

    Raises `PlanError` for options about ranks beside a single one.
    """
    if not 0 < typed.ranks <= MOST_RANKS:
        raise PlanError(f"--ranks {typed.ranks} is out of range", f"1 to {MOST_RANKS} expected")
    if not 0 <= typed.port < 2**16:
        raise PlanError(f"--port {typed.port} is out of range", "0 to 65535 expected")
    if typed.ranks > 1:
        return Wrapper.DDP if typed.wrap is None else _choice(Wrapper, typed.wrap, "--wrap")
    for option, given in (
        ("--wrap", typed.wrap is not None),
        ("--checkpointing", typed.checkpointing),
        ("--port", typed.port != 0),
    ):
        if given:
            raise PlanError(
                f"{option} has no effect on a single rank",
                "it is about processes that train together",
                "give --ranks 2 or more",
            )
    return Wrapper.OWN


def _lengths(typed: Typed) -> Lengths | None:
    """Returns the lengths in the file that was named, and how batches are made of them."""
    if typed.lengths is None:
        for option, given in (
            ("--lengths-column", typed.lengths_column is not None),
            ("--tokens-per-batch", typed.tokens_per_batch is not None),
            ("--padding", typed.padding is not None),
            ("--sorted-by-length", typed.sorted_by_length),
        ):
            if given:
                raise PlanError(
                    f"{option} came without --lengths",
                    "it says how batches are made of the lengths of a file",
                    "give --lengths FILE",
                )
        return None
    tokens = typed.tokens_per_batch
    if tokens is not None and not 0 < tokens < 2**31:
        raise PlanError(f"--tokens-per-batch {tokens} is out of range", "at least 1 expected")
    pad_to, pad_multiple = _padding(typed.padding)
    if tokens is not None and pad_to is not None and pad_to > tokens:
        raise PlanError(
            f"--padding {pad_to} is more than --tokens-per-batch {tokens}",
            "not one padded sample fits into a batch",
            "give a larger budget, or pad to less",
        )
    from advisor import length_file
    from advisor.profiler.lengths import MOST_LENGTH

    if max(pad_to or 1, pad_multiple) > MOST_LENGTH:
        raise PlanError(
            f"--padding {printable(typed.padding or '')} is out of range",
            f"1 to {MOST_LENGTH:,} expected",
        )
    return replace(
        length_file.read(typed.lengths, typed.lengths_column),
        tokens_per_batch=tokens,
        pad_to=pad_to,
        pad_multiple=pad_multiple,
        shuffled=not typed.sorted_by_length,
    )


def _padding(rule: str | None) -> tuple[int | None, int]:
    """Returns what all batches are padded to, if that was asked, and the multiple."""
    if rule is None or rule == "longest":
        return None, 1
    found = _PADDING.fullmatch(rule)
    if found is None or not int(found["number"]):
        raise PlanError(
            f"--padding {printable(rule)!r} is unknown",
            mend="longest, a whole number that all batches are padded to, or multiple:K expected",
        )
    number = int(found["number"])
    return (None, number) if found["multiple"] else (number, 1)


def check_workload(spec: WorkloadSpec) -> None:
    """Raises `WorkloadError` or `PlanError` for what can be seen without torch."""
    if _DEVICE.fullmatch(spec.device) is None:
        raise PlanError(
            f"--device {spec.device!r} is unknown", mend="auto, cpu, cuda or cuda:N expected"
        )
    for option, value in (("--batch-size", spec.batch_size), ("--length", spec.length)):
        if value is not None and not 0 < value < 2**31:
            raise PlanError(f"{option} {value} is out of range", "at least 1 expected")
    if not 0 <= spec.seed < 2**31:
        raise PlanError(f"--seed {spec.seed} is out of range", "0 to 2,147,483,647 expected")
    _check_text(spec.target, "the workload's name")
    _check_text(spec.cwd, "the name of this folder")
    if spec.target.startswith("hf:"):
        _check_preset(spec)
        return
    for option, asked in (
        ("--task", spec.task),
        ("--batch-size", spec.batch_size),
        ("--length", spec.length),
        ("--precision", spec.precision),
        ("--scale", spec.scale),
    ):
        if asked is not None:
            raise PlanError(
                f"{option} has no effect on {spec.target!r}",
                "it is an option of the presets",
                "change it in your workload function",
            )
    _check_entry_point(spec)


def _check_entry_point(spec: WorkloadSpec) -> None:
    place, separator, name = spec.target.rpartition(":")
    if not separator or not place or not name:
        raise WorkloadError(f"{spec.target!r} names no workload", mend=_FORMS)
    if not name.isidentifier():
        raise WorkloadError(f"{name!r} in {spec.target!r} is not a function's name", mend=_FORMS)
    path = Path(spec.cwd, place)
    if place.endswith(".py") or os.sep in place or path.exists():
        if not path.is_file():
            why = "it is not a file" if path.exists() else "there is no such file"
            raise WorkloadError(f"{place} cannot be read", why, "check the path before the colon")
        if not os.access(path, os.R_OK):
            raise WorkloadError(f"{place} cannot be read", "this user may not read it")
    elif _MODULE.fullmatch(place) is None:
        raise WorkloadError(f"{place!r} is neither a file nor a module's name", mend=_FORMS)


def _check_preset(spec: WorkloadSpec) -> None:
    name = spec.target.removeprefix("hf:")
    if name in PRESETS:
        return
    folder = Path(spec.cwd, name)
    if name and folder.is_dir():
        if not (folder / "config.json").is_file():
            raise WorkloadError(f"the folder {name} holds no config.json")
        return
    if os.sep in name:
        raise WorkloadError(
            f"there is no folder {name!r}",
            "hf:DIR names a folder with a config.json, and nothing is fetched from a hub",
        )
    close = difflib.get_close_matches(name, PRESETS, n=1)
    listed = f"did you mean hf:{close[0]}? " if close else ""
    raise WorkloadError(
        f"the preset {name!r} is unknown", mend=f"{listed}known are {', '.join(sorted(PRESETS))}"
    )


def _check_text(text: str, what: str) -> None:
    """Raises `WorkloadError` for text that neither a message nor a database can carry."""
    if any(ord(character) < 32 or ord(character) == 127 for character in text):
        raise WorkloadError(f"{what} has control characters", printable(text))
    try:
        text.encode()
    except UnicodeEncodeError:
        raise WorkloadError(f"{what} is not valid UTF-8", printable(text)) from None


def _choice(kind: type[E], name: str, option: str) -> E:
    try:
        return kind(name)
    except ValueError:
        known = ", ".join(kind)
        raise PlanError(f"{option} {name!r} is unknown", mend=f"known are {known}") from None


def _folder() -> str:
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        raise WorkloadError("this folder does not exist any more", mend="cd to another") from None
