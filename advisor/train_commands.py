"""`advise train -- python train.py`, and `advise run -- python train.py`: a script as it is.

Heavy modules are imported inside the commands, as in `cli`, which they are a part of.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from advisor.profiler.records import Advice, Config
    from advisor.question import Typed

_COMMAND = "command after --"
# How long a script is measured when nobody says.
_USUAL_BUDGET_S = 600.0
# What `advise run` takes for a script too; all else is about workloads.
_FOR_SCRIPTS = frozenset(
    (
        "target", "steps", "epochs", "steps_per_epoch", "hours", "restarts", "eval_every",
        "eval_steps", "price_per_hour", "confidence", "budget", "modes", "scopes", "dynamics",
    )
)  # fmt: skip


class WithCommand(TyperCommand):
    """A command that keeps what stands behind `--` as it is: it belongs to a script."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Takes the script's command out of the arguments, and reads the others."""
        if "--" in args:
            at = args.index("--")
            ctx.meta[_COMMAND] = args[at + 1 :]
            args = args[:at]
        return super().parse_args(ctx, args)


def command_of(context: typer.Context) -> list[str] | None:
    """Returns the command that was given behind `--`; None where there was none."""
    found: list[str] | None = context.meta.get(_COMMAND)
    return found


def train(
    context: typer.Context,
    steps: Annotated[float | None, typer.Option(help="Optimizer steps planned.")] = None,
    hours: Annotated[float | None, typer.Option(help="Hours of eager training planned.")] = None,
    name: Annotated[
        str, typer.Option("--id", metavar="ID", help="Start from this compile cache or advice.")
    ] = "",
    result: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write there how it went.")
    ] = None,
) -> NoReturn:
    """Run a training script as it is, and compile its model while it trains if that pays.

    advise train --steps 20000 -- python train.py
    """
    from advisor.injection import injected
    from advisor.models.plan import Plan
    from advisor.watch_settings import TOP, WatchSettings

    command = _checked(command_of(context), "advise train -- python train.py")
    plan = None
    if steps is not None or hours is not None:
        plan = Plan(steps=steps, hours=hours)
        plan.validate()
    folder = Path(tempfile.gettempdir(), f"advise-{secrets.token_hex(8)}")
    settings = WatchSettings(
        folder=str(folder), plan=plan, result=_free(result) if result is not None else ""
    )
    inherited = {key: value for key, value in os.environ.items() if key != TOP}
    _execute(command, injected({**inherited, **settings.variables()}), name)


def measure(typed: Typed, command: Sequence[str], server: str | None) -> Advice:
    """Returns the advice for a script, which runs for its first steps, and stores it."""
    from advisor.profiler.units import duration, parse_duration, printable
    from advisor.question import plan_of
    from advisor.script_advice import advice_of
    from advisor.script_run import measure as measured
    from advisor.service.store import now

    _refuse_what_is_for_workloads(typed, server)
    plan = plan_of(typed)
    plan.validate()
    config = _config(typed)
    budget_s = parse_duration(typed.budget, "--budget") if typed.budget else _USUAL_BUDGET_S
    _check_budget(budget_s)
    command = _checked(list(command), "advise run --steps N -- python train.py")
    print(
        f"advise: {printable(' '.join(command))} runs for its first steps,"
        f" at most {duration(budget_s)}",
        file=sys.stderr,
    )
    run = measured(command, plan, config, budget_s)
    advice = advice_of(run, command, plan, secrets.token_hex(5), now())
    _store(advice)
    return advice


def _execute(command: list[str], environment: dict[str, str], name: str) -> NoReturn:
    if not name:
        os.execvpe(command[0], command, environment)
    from advisor import handover
    from advisor.handover_commands import handed_over

    handed = handed_over(name)
    with handover.store().in_use(handed.bundle) as descriptor:
        # Inherited by the command, which thereby keeps the cache in place as long as it lives.
        os.set_inheritable(descriptor, True)
        os.execvpe(command[0], command, {**environment, **handover.variables(handed)})


def _checked(command: list[str] | None, example: str) -> list[str]:
    from advisor.profiler.errors import PlanError

    if not command:
        raise PlanError("there is no command to run", mend=example)
    if shutil.which(command[0]) is None:
        raise PlanError(f"{command[0]!r} cannot be run", "there is no such command")
    return command


def _free(result: Path) -> str:
    """Returns the path of a result that the script will write; what was there is gone."""
    from advisor.profiler.errors import PlanError

    try:
        result.unlink(missing_ok=True)
        # Only a process that trains claims the file; that it could is seen here.
        result.touch(exist_ok=False)
        result.unlink()
    except OSError as error:
        raise PlanError(f"--json {result} cannot be written", error.strerror or "") from error
    return str(result.resolve())


def _refuse_what_is_for_workloads(typed: Typed, server: str | None) -> None:
    from advisor.profiler.errors import PlanError

    given = [
        field.name
        for field in fields(typed)
        if field.name not in _FOR_SCRIPTS and getattr(typed, field.name) != field.default
    ]
    for name in [*given, *(["server"] if server else [])]:
        raise PlanError(
            f"--{name.replace('_', '-')} is about workloads",
            "a script is measured as it is",
            "leave it out, or name a workload as in train.py:build",
        )


def _config(typed: Typed) -> Config:
    from advisor.profiler.errors import PlanError
    from advisor.profiler.records import Config
    from advisor.question import configs_of

    if not (typed.modes or typed.scopes or typed.dynamics):
        return Config()
    scopes = typed.scopes or ("model",)
    modes = typed.modes or ("default",)
    found = configs_of(modes, scopes, typed.dynamics, "auto")
    if len(found) != 1:
        raise PlanError(
            f"{len(found)} configurations were asked for",
            "a script is measured with one",
            "give one of each of --mode, --scope and --dynamic",
        )
    return found[0]


def _check_budget(budget_s: float) -> None:
    from advisor.request import Limits

    Limits(budget_s=budget_s).validate()


def _store(advice: Advice) -> None:
    """Keeps an advice for `advise show`; one that cannot be kept is printed all the same."""
    from advisor.places import data_folder
    from advisor.profiler.errors import StoreError
    from advisor.service.store import Store

    try:
        with contextlib.closing(Store(data_folder())) as store:
            for trial in advice.trials:
                store.add_trial(trial, advice_id=advice.advice_id, target=advice.target)
            store.add_advice(advice)
    except StoreError as error:
        print(f"advise: the advice was not kept: {error}", file=sys.stderr)
