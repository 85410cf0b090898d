"""The command `advise`: options in, a report out, and exit codes that a script can act on.

0: an advice was given, either way; 2: the request was wrong; 3: no trial could run;
130: interrupted. Heavy modules are imported inside the commands: `advise --help` is for reading.
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

if TYPE_CHECKING:
    from advisor.client import Client
    from advisor.profiler.errors import AdvisorError
    from advisor.profiler.records import Advice
    from advisor.progress import ProgressView
    from advisor.question import Typed
    from advisor.request import AdviceRequest

GIVEN, WRONG_REQUEST, NO_TRIAL, INTERRUPTED = 0, 2, 3, 130

# What typer raises for options that cannot be read, whether it brings its own click or not.
_ParseError: type[Exception] = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="advise",
    help="Says whether torch.compile pays for your training job, by measuring it.",
    epilog="Exit codes: 0 an advice was given, 2 the request was wrong, 3 no trial could run, "
    "130 interrupted.",
    # Rich help costs more than all else that --help does.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Server = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Ask a running advisor. Without it: a private one."),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print the answer as JSON, and nothing else on stdout.")
]
PlotFile = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", help="Draw total time over steps: .png, .svg or .html."),
]


@app.command()
def run(  # noqa: PLR0913 - one parameter for each option
    workload: Annotated[
        str,
        typer.Argument(help="file.py:function, package.module:function, hf:NAME or hf:DIR."),
    ],
    steps: Annotated[float | None, typer.Option(help="Optimizer steps planned.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Epochs planned.")] = None,
    steps_per_epoch: Annotated[float | None, typer.Option(help="Steps of one epoch.")] = None,
    hours: Annotated[float | None, typer.Option(help="Hours of eager training planned.")] = None,
    restarts: Annotated[int, typer.Option(help="How often the job is started again.")] = 0,
    eval_every: Annotated[float | None, typer.Option(help="Steps between evaluations.")] = None,
    eval_steps: Annotated[float | None, typer.Option(help="Batches of one evaluation.")] = None,
    price_per_hour: Annotated[float | None, typer.Option(help="Price of a machine hour.")] = None,
    confidence: Annotated[float, typer.Option(help="Least P(saves) for advising it.")] = 0.9,
    budget: Annotated[
        str | None, typer.Option(metavar="TIME", help="Longest to measure: 300, 5m, 1h.")
    ] = None,
    memory_limit: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Most that a trial may hold: 4G.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    mode: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this mode (repeatable): default, reduce-overhead, "
            "max-autotune-no-cudagraphs, max-autotune."
        ),
    ] = None,
    scope: Annotated[
        list[str] | None, typer.Option(help="Only this scope (repeatable): model, regional.")
    ] = None,
    dynamic: Annotated[
        list[str] | None, typer.Option(help="Only this (repeatable): auto, true, false.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="Preset: its task.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Preset: samples of a batch.")] = None,
    length: Annotated[int | None, typer.Option(help="Preset: length of a sample.")] = None,
    precision: Annotated[str | None, typer.Option(help="Preset: its precision.")] = None,
    scale: Annotated[str | None, typer.Option(help="Preset: its size, such as tiny.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of all random generators.")] = 0,
    server: Server = None,
    as_json: Json = False,
    plot: PlotFile = None,
) -> int:
    """Measure a training job and say whether torch.compile pays for it."""
    from advisor.question import Typed

    return _run(
        Typed(
            target=workload,
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
        ),
        server,
        as_json,
        plot,
    )


@app.command()
def serve(
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Loopback address to listen on.")
    ] = "127.0.0.1:50551",
    unix: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Listen on a Unix socket instead.")
    ] = None,
) -> int:
    """Run the advisor as a gRPC server, until Ctrl-C or SIGTERM."""
    from advisor.service.log import log_to_stderr
    from advisor.service.server import serve as run_server

    log_to_stderr()
    run_server(listen if unix is None else f"unix:{unix}")
    return GIVEN


@app.command()
def show(
    advice_id: Annotated[str, typer.Argument(metavar="ID", help="The id of an advice.")],
    server: Server = None,
    as_json: Json = False,
    plot: PlotFile = None,
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
    server: Server = None,
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
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted()
    except _ParseError as error:
        return _wrong_options(error)
    except BrokenPipeError:
        # Whoever read our output has gone; what is still buffered must not fail at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return GIVEN
    except Exception as error:  # noqa: BLE001 - said to the person, whatever it is
        from advisor.profiler.errors import AdvisorError

        return _fail(error) if isinstance(error, AdvisorError) else _fail_inside(error)
    return _interrupted() if code == INTERRUPTED else int(code or GIVEN)


def _run(typed: Typed, server: str | None, as_json: bool, plot: Path | None) -> int:
    from advisor.question import request_of

    request = request_of(typed)
    if plot is not None:
        from advisor.plot import check_path

        check_path(plot)
    from advisor.progress import ProgressView

    # The view comes first: the import of grpc and the start of the server are shown, too.
    with _ended_by_signals(), ProgressView() as view, _client(server) as client:
        advice = _advice(client, request, view)
    _answer(advice, as_json, plot)
    return GIVEN


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


def _fail(error: AdvisorError) -> int:
    """Says an error, after the person's own traceback and what the server logged."""
    from advisor.profiler.errors import Interrupted, NotFoundError, PlanError, WorkloadError
    from advisor.profiler.units import printable

    for note in getattr(error, "__notes__", ()):
        print(printable(note), file=sys.stderr)
    if isinstance(error, WorkloadError) and error.user_traceback:
        print(printable(error.user_traceback).rstrip(), file=sys.stderr)
    print(f"advise: {printable(str(error))}", file=sys.stderr)
    if isinstance(error, Interrupted):
        return INTERRUPTED
    wrong = isinstance(error, WorkloadError | PlanError | NotFoundError)
    return WRONG_REQUEST if wrong else NO_TRIAL


def _wrong_options(error: Exception) -> int:
    # The message of "no command was given" is the whole help; it says so itself.
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    if type(error).__name__ == "NoArgsIsHelpError":
        print(message, file=sys.stderr)
    else:
        print(f"advise: {' '.join(message.split())} (see advise --help)", file=sys.stderr)
    return WRONG_REQUEST


def _interrupted() -> int:
    print("advise: interrupted", file=sys.stderr)
    return INTERRUPTED


def _fail_inside(error: Exception) -> int:
    """Says that a mistake of ours ended the command, and keeps its traceback for a report."""
    import tempfile
    import traceback

    if os.environ.get("ADVISOR_DEBUG"):
        raise error
    with tempfile.NamedTemporaryFile(
        "w", prefix="advise-error-", suffix=".txt", delete=False
    ) as file:
        file.writelines(traceback.format_exception(error))
    print(
        f"advise: internal error, {type(error).__name__} (please report it with {file.name})",
        file=sys.stderr,
    )
    return NO_TRIAL


if __name__ == "__main__":
    sys.exit(main())
