"""The command `advise`: options in, a report out, and exit codes that a script can act on.

Heavy modules are imported inside the commands: `advise --help` is for reading.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from advisor import estimate_commands as commands
from advisor import handover_commands, options, service_commands, train_commands
from advisor.exits import (
    GIVEN,
    INTERRUPTED,
    WORSE,
    say,
    say_inside,
    say_interrupted,
    say_wrong_options,
)

if TYPE_CHECKING:
    from advisor.client import Client
    from advisor.profiler.records import Advice
    from advisor.progress import ProgressView
    from advisor.question import Typed
    from advisor.request import AdviceRequest

# What typer raises for options that cannot be read, whether it brings its own click or not.
_ParseError: type[Exception] = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="advise",
    help="Says whether torch.compile pays for your training job, by measuring it.",
    epilog="Exit codes: 0 an advice was given, 1 check found something worse, 2 the request was "
    "wrong, 3 no trial could run, 130 interrupted.",
    # Rich help costs more than all else that --help does.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command(cls=train_commands.WithCommand)
def run(  # noqa: PLR0913 - one parameter for each option
    context: typer.Context,
    workload: options.WorkloadOrCommand = None,
    steps: Annotated[float | None, typer.Option(help="Optimizer steps planned.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Epochs planned.")] = None,
    steps_per_epoch: Annotated[float | None, typer.Option(help="Steps of one epoch.")] = None,
    hours: Annotated[float | None, typer.Option(help="Hours of eager training planned.")] = None,
    restarts: options.Restarts = 0,
    eval_every: Annotated[float | None, typer.Option(help="Steps between evaluations.")] = None,
    eval_steps: Annotated[float | None, typer.Option(help="Batches of one evaluation.")] = None,
    price_per_hour: options.PricePerHour = None,
    confidence: Annotated[float, typer.Option(help="Least P(saves) for advising it.")] = 0.9,
    budget: options.Budget = None,
    memory_limit: options.MemoryLimit = None,
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="Measure every configuration, worth it or not.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure anew what was measured of this very job.")
    ] = False,
    device: options.Device = "auto",
    mode: options.Modes = None,
    scope: options.Scopes = None,
    dynamic: options.Dynamics = None,
    task: options.Task = None,
    batch_size: options.BatchSize = None,
    length: options.Length = None,
    precision: options.Precision = None,
    scale: options.Scale = None,
    lengths: options.LengthsFile = None,
    lengths_column: options.LengthsColumn = None,
    tokens_per_batch: options.TokensPerBatch = None,
    padding: options.Padding = None,
    sorted_by_length: options.SortedByLength = False,
    ranks: options.Ranks = 1,
    wrap: options.Wrap = None,
    checkpointing: options.Checkpointing = False,
    world_size: options.WorldSize = None,
    network: options.Network = None,
    port: options.Port = 0,
    seed: options.Seed = 0,
    server: options.Server = None,
    as_json: options.Json = False,
    plot: options.PlotFile = None,
) -> int:
    """Measure a training job and say whether torch.compile pays for it.

    A script that nobody changed runs for its first steps: advise run --steps N -- python train.py
    """
    from advisor.question import Typed

    return _run(
        Typed(
            target=_target(workload, train_commands.command_of(context)),
            steps=steps,
            epochs=epochs,
            steps_per_epoch=steps_per_epoch,
            hours=hours,
            restarts=restarts,
            eval_every=eval_every,
            eval_steps=eval_steps,
            price_per_hour=price_per_hour,
            confidence=confidence,
            budget=budget,
            memory_limit=memory_limit,
            exhaustive=exhaustive,
            fresh=fresh,
            device=device,
            modes=mode or (),
            scopes=scope or (),
            dynamics=dynamic or (),
            task=task,
            batch_size=batch_size,
            length=length,
            precision=precision,
            scale=scale,
            seed=seed,
            lengths=lengths,
            lengths_column=lengths_column,
            tokens_per_batch=tokens_per_batch,
            padding=padding,
            sorted_by_length=sorted_by_length,
            ranks=ranks,
            wrap=wrap,
            checkpointing=checkpointing,
            world_size=world_size,
            network=network,
            port=port,
        ),
        train_commands.command_of(context),
        server,
        as_json,
        plot,
    )


@app.command()
def explain(  # noqa: PLR0913 - one parameter for each option
    subject: Annotated[
        str, typer.Argument(metavar="ID|WORKLOAD", help="The id of an advice, or a workload.")
    ],
    steps: Annotated[float | None, typer.Option(help="Optimizer steps, to weigh mends by.")] = None,
    restarts: options.Restarts = 0,
    price_per_hour: options.PricePerHour = None,
    budget: options.Budget = None,
    memory_limit: options.MemoryLimit = None,
    device: options.Device = "auto",
    mode: options.Modes = None,
    scope: options.Scopes = None,
    dynamic: options.Dynamics = None,
    task: options.Task = None,
    batch_size: options.BatchSize = None,
    length: options.Length = None,
    precision: options.Precision = None,
    scale: options.Scale = None,
    seed: options.Seed = 0,
    server: options.Server = None,
    as_json: options.Json = False,
    as_sarif: options.Sarif = False,
) -> int:
    """Show what keeps a compile from gaining more, at which line, and what each mend would bring.

    A workload is measured anew, compiled as a whole in mode default unless --mode, --scope or
    --dynamic say otherwise; the id of an advice shows what its campaign found.
    """
    from advisor.question import Typed

    typed = Typed(
        target=subject,
        steps=steps,
        restarts=restarts,
        price_per_hour=price_per_hour,
        budget=budget,
        memory_limit=memory_limit,
        device=device,
        modes=mode or (),
        scopes=scope or (),
        dynamics=dynamic or (),
        task=task,
        batch_size=batch_size,
        length=length,
        precision=precision,
        scale=scale,
        seed=seed,
    )
    _only_one_form(as_json, as_sarif)
    _print_diagnosis(_explained(typed, server), as_json, as_sarif)
    return GIVEN


@app.command()
def check(  # noqa: PLR0913 - one parameter for each option
    workload: options.Workload,
    baseline: Annotated[
        Path, typer.Option(metavar="FILE", help="What was agreed on, as --update wrote it.")
    ],
    update: Annotated[
        bool, typer.Option("--update", help="Write the baseline from what is measured now.")
    ] = False,
    budget: options.Budget = None,
    memory_limit: options.MemoryLimit = None,
    device: options.Device = "auto",
    mode: options.Modes = None,
    scope: options.Scopes = None,
    dynamic: options.Dynamics = None,
    task: options.Task = None,
    batch_size: options.BatchSize = None,
    length: options.Length = None,
    precision: options.Precision = None,
    scale: options.Scale = None,
    seed: options.Seed = 0,
    server: options.Server = None,
    as_json: options.Json = False,
    as_sarif: options.Sarif = False,
) -> int:
    """Measure a workload and end with 1 when it compiles worse than its baseline says.

    Worse is: a new graph break or recompile, nothing compiled any more, the recompile limit, or a
    smaller gain than the noise explains. Without --mode, --scope or --dynamic the configurations
    of the baseline are measured. --json and --sarif print the diagnosis on stdout.
    """
    from advisor.question import Typed

    typed = Typed(
        target=workload,
        budget=budget,
        memory_limit=memory_limit,
        device=device,
        modes=mode or (),
        scopes=scope or (),
        dynamics=dynamic or (),
        task=task,
        batch_size=batch_size,
        length=length,
        precision=precision,
        scale=scale,
        seed=seed,
    )
    _only_one_form(as_json, as_sarif)
    return _check(typed, baseline, update, server, as_json, as_sarif)


for _command in (commands.estimate, commands.report, commands.devices, commands.corpus):
    app.command()(_command)
handover_commands.add_to(app)
app.command(cls=train_commands.WithCommand)(train_commands.train)
app.command()(service_commands.serve)
app.command()(service_commands.token)
app.command()(service_commands.health)
app.command()(service_commands.gc)


@app.command()
def show(
    advice_id: Annotated[str, typer.Argument(metavar="ID", help="The id of an advice.")],
    server: options.Server = None,
    as_json: options.Json = False,
    plot: options.PlotFile = None,
) -> int:
    """Show an advice that was given before."""
    if plot is not None:
        from advisor.plot import check_path

        check_path(plot)
    with _client(server) as client:
        advice = client.get_advice(advice_id)
    _answer(advice, as_json, plot)
    return GIVEN


@app.command()
def trials(
    server: options.Server = None,
    advice_id: Annotated[
        str, typer.Option("--advice", metavar="ID", help="Only the trials of this advice.")
    ] = "",
    most: Annotated[int, typer.Option(min=1, max=1000, help="Most trials to list.")] = 20,
) -> int:
    """List the trials that were measured, newest first."""
    from advisor.report import print_plain, trials_table

    with _client(server) as client:
        found = client.list_trials(advice_id, most)
    if not found:
        print("No trial is stored yet.", file=sys.stderr)
        return GIVEN
    print_plain(trials_table(found))
    return GIVEN


@app.command()
def presets() -> int:
    """List the built-in training jobs."""
    from advisor.profiler.preset_table import PRESETS
    from advisor.report import presets_table, print_plain

    print_plain(presets_table(PRESETS))
    return GIVEN


@app.command()
def version() -> int:
    """Print the version."""
    from importlib.metadata import version as installed

    print(f"compile-advisor {installed('compile-advisor')}")
    return GIVEN


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code; every error is said in one sentence."""
    try:
        code = app(
            args=None if arguments is None else list(arguments),
            prog_name="advise",
            standalone_mode=False,
        )
        # Here, where a reader that has gone is no error; not when Python ends.
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        return say_interrupted()
    except _ParseError as error:
        return say_wrong_options(error)
    except BrokenPipeError:
        # Whoever read our output has gone; what is still buffered must not fail at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return GIVEN
    except Exception as error:  # noqa: BLE001 - said to the person, whatever it is
        from advisor.profiler.errors import AdvisorError

        return say(error) if isinstance(error, AdvisorError) else say_inside(error)
    return say_interrupted() if code == INTERRUPTED else int(code or GIVEN)


def _run(
    typed: Typed, command: list[str] | None, server: str | None, as_json: bool, plot: Path | None
) -> int:
    from advisor.question import request_of

    request = request_of(typed) if command is None else None
    if plot is not None:
        from advisor.plot import check_path

        check_path(plot)
    if request is not None:
        advice = _measure(request, server)
    else:
        with _ended_by_signals():
            advice = train_commands.measure(typed, command or (), server)
    _answer(advice, as_json, plot)
    return GIVEN


def _target(workload: str | None, command: list[str] | None) -> str:
    from advisor.profiler.errors import PlanError

    if (workload is None) == (command is None):
        what = "Missing argument WORKLOAD" if workload is None else "two jobs were named"
        mend = "advise run train.py:build, or a script as it is: advise run -- python train.py"
        raise PlanError(what, mend=mend)
    return workload or ""


def _explained(typed: Typed, server: str | None) -> Advice:
    """Returns what is to be explained: a stored advice by its id, or a workload measured now."""
    from advisor.question import advice_id_of, explain_request

    advice_id = advice_id_of(typed)
    if advice_id is None:
        return _measure(explain_request(typed), server)
    with _client(server) as client:
        return client.get_advice(advice_id)


def _check(  # noqa: PLR0913 - what was typed
    typed: Typed, path: Path, update: bool, server: str | None, as_json: bool, as_sarif: bool
) -> int:
    from advisor import baseline, regressions
    from advisor.question import explain_request
    from advisor.report import print_plain

    request = explain_request(typed)
    before = baseline.agreed(path, request.workload, update=update)
    if before is not None:
        restricted = bool(typed.modes or typed.scopes or typed.dynamics)
        request = baseline.comparable(request, before, path, restricted=restricted, update=update)
    advice = _measure(request, server)
    folder, configs = path.resolve().parent, request.limits.configs
    now = baseline.baseline_of(advice, request.workload, configs, folder)
    found = regressions.Comparison()
    if before is not None:
        evidence = baseline.measured(advice, configs)
        found = regressions.compare(before, now, evidence, folder, Path(request.workload.cwd))
    if update:
        baseline.write(path, now)
    lines = regressions.parts(found, now, path, advice.advice_id, written=update)
    if as_json or as_sarif:
        _print_diagnosis(advice, as_json, as_sarif)
    # Beside a diagnosis for programs, the sentences are for whoever reads the log.
    print_plain(*lines, file=sys.stderr if as_json or as_sarif else None)
    return WORSE if found.worse and not update else GIVEN


def _only_one_form(as_json: bool, as_sarif: bool) -> None:
    if as_json and as_sarif:
        from advisor.profiler.errors import PlanError

        raise PlanError("--json and --sarif came together", mend="give one of them")


def _print_diagnosis(advice: Advice, as_json: bool, as_sarif: bool) -> None:
    from advisor.profiler.diagnosis import diagnosis_of

    found = diagnosis_of(advice)
    if as_json:
        from advisor.convert import diagnosis_message, message_json

        print(message_json(diagnosis_message(found)))
    elif as_sarif:
        from importlib.metadata import version as installed

        from advisor.sarif import sarif_json

        print(sarif_json(found, Path.cwd(), installed("compile-advisor")))
    else:
        from advisor.explain import print_diagnosis

        print_diagnosis(found, Path.cwd())
    sys.stdout.flush()


def _measure(request: AdviceRequest, server: str | None) -> Advice:
    """Returns the advice that a campaign ends in, from the advisor asked or a private one."""
    from advisor.progress import ProgressView

    # The view comes first: the import of grpc and the start of the server are shown, too.
    with _ended_by_signals(), ProgressView() as view, _client(server) as client:
        return _advice(client, request, view)


def _advice(client: Client, request: AdviceRequest, view: ProgressView) -> Advice:
    """Returns the advice that a campaign ends in, showing what happens meanwhile."""
    from advisor.profiler.errors import HostError
    from advisor.profiler.records import Advice

    # Closing cancels the campaign, also when what is shown here fails.
    with contextlib.closing(client.advise(request)) as events:
        for event in events:
            if isinstance(event, Advice):
                return event
            view.show(event)
    raise HostError("the advisor ended the campaign without an advice")


def _answer(advice: Advice, as_json: bool, plot: Path | None) -> None:
    """Prints the advice, then draws it: a picture that fails does not cost the answer."""
    if as_json:
        from advisor.convert import advice_json

        print(advice_json(advice))
    else:
        from advisor.report import print_advice

        print_advice(advice)
    sys.stdout.flush()
    if plot is not None:
        from advisor.plot import plot as draw

        draw(advice, plot)
        print(f"Picture: {plot}", file=sys.stderr)


def _client(server: str | None) -> Client:
    from advisor.client import Client

    return Client(server)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP end the command in order, as Ctrl-C does."""

    def leave(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
