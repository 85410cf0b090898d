"""The options that several commands of `advise` share, each described once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Workload = Annotated[
    str, typer.Argument(help="file.py:function, package.module:function, hf:NAME or hf:DIR.")
]
WorkloadOrCommand = Annotated[
    str | None,
    typer.Argument(
        metavar="WORKLOAD | -- COMMAND...",
        help="file.py:function, package.module:function, hf:NAME or hf:DIR; or a script as it is: "
        "-- python train.py",
    ),
]
Budget = Annotated[
    str | None, typer.Option(metavar="TIME", help="Longest to measure: 300, 5m, 1h.")
]
MemoryLimit = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Most that a trial may hold: 4G.")
]
Restarts = Annotated[int, typer.Option(help="How often the job is started again.")]
PricePerHour = Annotated[float | None, typer.Option(help="Price of a machine hour.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Modes = Annotated[
    list[str] | None,
    typer.Option(
        help="Only this mode (repeatable): default, reduce-overhead, "
        "max-autotune-no-cudagraphs, max-autotune."
    ),
]
Scopes = Annotated[
    list[str] | None, typer.Option(help="Only this scope (repeatable): model, regional.")
]
Dynamics = Annotated[
    list[str] | None, typer.Option(help="Only this (repeatable): auto, true, false.")
]
Task = Annotated[str | None, typer.Option(help="Preset: its task.")]
BatchSize = Annotated[int | None, typer.Option(help="Preset: samples of a batch.")]
Length = Annotated[int | None, typer.Option(help="Preset: length of a sample.")]
Precision = Annotated[str | None, typer.Option(help="Preset: its precision.")]
Scale = Annotated[str | None, typer.Option(help="Preset: its size, such as tiny.")]
LengthsFile = Annotated[
    Path | None,
    typer.Option(
        "--lengths",
        metavar="FILE",
        help="Lengths of the data set's samples: .txt (one a line), .json, .jsonl, .npy, .csv, "
        ".tsv, .parquet, .arrow, .feather, or a folder of save_to_disk.",
    ),
]
LengthsColumn = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Column of --lengths: numbers, or lists such as input_ids."),
]
TokensPerBatch = Annotated[
    int | None,
    typer.Option(metavar="N", help="A batch holds as many samples of --lengths as fit, padded."),
]
Padding = Annotated[
    str | None,
    typer.Option(
        metavar="RULE",
        help="What batches of --lengths are padded to: longest, a whole number, or multiple:K.",
    ),
]
SortedByLength = Annotated[
    bool,
    typer.Option(
        "--sorted-by-length", help="Samples of --lengths come sorted by length, not shuffled."
    ),
]
Ranks = Annotated[
    int, typer.Option(metavar="N", help="Processes that train together on this machine.")
]
Wrap = Annotated[
    str | None,
    typer.Option(
        help="How the ranks share the model: ddp, fsdp1, fsdp2, or own, as your function wraps it."
    ),
]
WorldSize = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="Ranks of the real run, on machines with --ranks each: totals for those."
    ),
]
Network = Annotated[
    str | None,
    typer.Option(
        metavar="SPEED", help="Bytes a second that each rank can send to other machines: 25G."
    ),
]
Checkpointing = Annotated[
    bool,
    typer.Option("--checkpointing", help="Ranks: repeated blocks compute activations anew."),
]
Port = Annotated[
    int, typer.Option(metavar="PORT", help="Port of 127.0.0.1 at which ranks meet; 0: a free one.")
]
Seed = Annotated[int, typer.Option(help="Seed of all random generators.")]
Family = Annotated[
    str | None, typer.Option(help="Family of the model, or its class: bert, BertForMaskedLM.")
]
Parameters = Annotated[
    str | None, typer.Option(metavar="COUNT", help="Number of parameters: 110M, 1.3B.")
]
Image = Annotated[int | None, typer.Option(help="Pixels of a side of an image.")]
FactsPrecision = Annotated[
    str | None,
    typer.Option(
        "--precision", help="fp32, tf32, fp16, bf16, amp-fp16, amp-bf16; a preset's own names too."
    ),
]
EagerStep = Annotated[
    str | None, typer.Option(metavar="TIME", help="Time of an eager step: 0.25, 110ms.")
]
Operators = Annotated[
    float | None, typer.Option(help="Operator calls that the compiler captures in the forward.")
]
GraphBreaks = Annotated[float | None, typer.Option(help="Graph breaks of a step.")]
Server = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Ask a running advisor. Without it: a private one."),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print the answer as JSON, and nothing else on stdout.")
]
Sarif = Annotated[
    bool, typer.Option("--sarif", help="Print the mends as SARIF 2.1.0, for editors and reviews.")
]
PlotFile = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", help="Draw total time over steps: .png, .svg or .html."),
]
