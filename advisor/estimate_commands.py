"""The commands of the cost model: `advise estimate`, `report`, `devices` and `corpus`.

Heavy modules are imported inside them, as in `cli`, which they are a part of.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from advisor import options
from advisor.exits import GIVEN


def estimate(  # noqa: PLR0913 - one parameter for each option
    workload: Annotated[
        str | None,
        typer.Argument(help="A workload to count; without it the options say what is known."),
    ] = None,
    device: Annotated[
        str, typer.Option(help="Device to train on: a name of `advise devices`, or cpu-CORES.")
    ] = "",
    steps: Annotated[float | None, typer.Option(help="Optimizer steps planned.")] = None,
    hours: Annotated[float | None, typer.Option(help="Hours of eager training planned.")] = None,
    restarts: options.Restarts = 0,
    confidence: Annotated[float, typer.Option(help="Least P(saves) for advising it.")] = 0.9,
    family: options.Family = None,
    parameters: options.Parameters = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples of a batch.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of a sample.")] = None,
    image: options.Image = None,
    precision: options.FactsPrecision = None,
    eager_step: options.EagerStep = None,
    operators: options.Operators = None,
    graph_breaks: options.GraphBreaks = None,
    mode: options.Modes = None,
    scope: options.Scopes = None,
    dynamic: options.Dynamics = None,
    task: options.Task = None,
    scale: options.Scale = None,
    server: options.Server = None,
    as_json: options.Json = False,
) -> int:
    """Say what compiling would bring without measuring, from what is known of the job.

    A workload is built from shapes alone, so it needs neither its memory nor its device. Learns
    from what `advise run` and `advise report` have shown here.
    """
    from advisor.estimate_cli import TypedFacts, estimated

    typed = TypedFacts(
        device=device,
        family=family,
        precision=precision,
        parameters=parameters,
        batch=batch_size,
        length=length,
        image=image,
        eager_step=eager_step,
        operators=operators,
        graph_breaks=graph_breaks,
    )
    from advisor.question import Typed

    asked = Typed(
        target=workload or "",
        steps=steps,
        hours=hours,
        restarts=restarts,
        confidence=confidence,
        modes=mode or (),
        scopes=scope or (),
        dynamics=dynamic or (),
        task=task,
        batch_size=batch_size,
        length=length,
        precision=precision,
        scale=scale,
    )
    estimated(asked, typed, server, as_json=as_json)
    return GIVEN


def report(  # noqa: PLR0913 - one parameter for each option
    file: Annotated[
        Path | None,
        typer.Argument(help="JSON lines, each an outcome as `ReportOutcome` takes it."),
    ] = None,
    device: Annotated[str, typer.Option(help="Device it trained on.")] = "",
    speedup: Annotated[float | None, typer.Option(help="Eager over compiled step time.")] = None,
    compile_time: Annotated[
        str | None, typer.Option(metavar="TIME", help="Seconds of compiling from cold.")
    ] = None,
    memory_ratio: Annotated[float | None, typer.Option(help="Eager over compiled peak.")] = None,
    mode: Annotated[str, typer.Option(help="Mode it trained with.")] = "default",
    scope: Annotated[str, typer.Option(help="Scope it trained with.")] = "model",
    family: options.Family = None,
    parameters: options.Parameters = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples of a batch.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of a sample.")] = None,
    image: options.Image = None,
    precision: options.FactsPrecision = None,
    eager_step: options.EagerStep = None,
    operators: options.Operators = None,
    graph_breaks: options.GraphBreaks = None,
    server: options.Server = None,
) -> int:
    """Tell the advisor what compiling really brought, so that its estimates learn from it."""
    from advisor.estimate_cli import TypedFacts, TypedOutcome, told

    typed = TypedFacts(
        device=device,
        family=family,
        precision=precision,
        parameters=parameters,
        batch=batch_size,
        length=length,
        image=image,
        eager_step=eager_step,
        operators=operators,
        graph_breaks=graph_breaks,
    )
    outcome = TypedOutcome(
        speedup=speedup,
        compile_time=compile_time,
        memory_ratio=memory_ratio,
        mode=mode,
        scope=scope,
    )
    print(told(file, typed, outcome, server))
    return GIVEN


def devices() -> int:
    """List the devices that estimates know, with the figures behind them."""
    from advisor.estimate_report import devices_table
    from advisor.report import print_plain

    print_plain(devices_table())
    return GIVEN


def corpus(
    family: Annotated[str | None, typer.Option(help="Only this family of models.")] = None,
    device: Annotated[str | None, typer.Option(help="Only this device.")] = None,
) -> int:
    """Summarise the measurements that estimates are fitted on."""
    from advisor.estimate_report import corpus_table
    from advisor.report import print_plain

    print_plain(corpus_table(family, device))
    return GIVEN
