"""Measures a matrix of jobs on this machine and appends the rows to models/corpus/measured.csv.

    python bench/collect.py [--most ROWS] [--device DEVICE]
    python bench/collect.py --answers FOLDER

Presets (`hf:`), as tiny and as small models on a CPU, as published on a GPU; batch, length,
precision, scope and mode vary. Each row is one trial in a process of its own, cold. Rows that are
there already are not measured again, so an interrupted run goes on. Run it alone on the machine:
a row that other processes disturbed is not kept.
With --answers nothing is measured: the rows are those of the exhaustive campaigns on tiny presets
that bench/regret.py has kept in a folder.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from campaigns import machine
from google.protobuf import json_format

from advisor.convert import advice_record
from advisor.models import architectures, corpus
from advisor.models.families import family_of
from advisor.profiler import operator_counting
from advisor.profiler.errors import PlanError
from advisor.profiler.launch import TrialHost
from advisor.profiler.preset_configs import decided_job
from advisor.profiler.preset_table import PRESETS
from advisor.profiler.records import (
    Config,
    Deadlines,
    Dynamic,
    Measuring,
    Mode,
    Scope,
    Trial,
    TrialKind,
    TrialSpec,
    TrialStatus,
    WorkloadSpec,
)
from advisor.profiler.step_counts import StepCounts
from advisor.profiler.training import Trainer
from advisor.profiler.workload import build, device_of
from advisor.v1 import advisor_pb2

FOLDER = Path(__file__).resolve().parent.parent / "models" / "corpus"
ROWS, COUNTS = FOLDER / "measured.csv", FOLDER / "architectures.jsonl"
QUICK = Measuring(max_steady_s=5.0, max_warm_up_s=4.0, max_diagnose_s=0.0, numerics_steps=3)
PRECISIONS = {"float32": "fp32", "bf16": "amp-bf16", "fp16": "amp-fp16", "bfloat16": "bf16"}
# What a small model has instead of a tiny one's sizes; names differ between architectures.
SMALL = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "n_embd": 256,
    "n_layer": 4,
    "n_head": 4,
    "d_model": 256,
    "d_kv": 64,
    "d_ff": 1024,
    "num_layers": 4,
    "num_heads": 4,
    "dim": 256,
    "hidden_dim": 1024,
    "n_layers": 4,
    "n_heads": 4,
}
WIDE = ("bert-base", "distilbert-base", "gpt2", "llama-1b", "t5-base", "vit-base", "roberta-base")
DEFAULT, REGIONAL = Config(), Config(scope=Scope.REGIONAL)
AUTOTUNE = Config(mode=Mode.MAX_AUTOTUNE_NO_CUDAGRAPHS)
GRAPHED, ALL_OUT = Config(mode=Mode.REDUCE_OVERHEAD), Config(mode=Mode.MAX_AUTOTUNE)
DYNAMIC = Config(dynamic=Dynamic.TRUE)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One workload of the matrix, as its rows name it, and the configurations to measure."""

    name: str
    preset: str
    spec: WorkloadSpec
    configs: tuple[Config, ...]


def main() -> None:
    """Measures what is missing, cheap jobs first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=10**6, help="rows to add at most")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--answers", type=Path)
    given = parser.parse_args()
    if given.answers is not None:
        _take_answers(given.answers)
        return
    device = device_of(given.device)
    with tempfile.TemporaryDirectory(prefix="advisor-collect-") as folder:
        asyncio.run(_collect(Path(folder), device, given.most))


async def _collect(folder: Path, device: torch.device, most: int) -> None:
    there = list(_read())
    done = {_key(row) for row in there}
    added = 0
    # Python sorts stably: what compiles for long comes last, the rest in the order of the presets.
    for job in sorted(_jobs(folder, device), key=_dear):
        plain = _row(job, device, job.configs[0])
        missing = [c for c in job.configs if _key(_row(job, device, c)) not in done]
        if not missing or added >= most:
            continue
        # A host for each job: what its trials leave in the cache of files helps no other job.
        async with TrialHost.start() as host:
            for config in missing:
                if added >= most:
                    break
                begun = time.perf_counter()
                try:
                    trial = await host.run(_trial(job, config, folder), lambda _: None)
                except PlanError as error:
                    # Such as the regional scope for a model that repeats no block.
                    print(f"{job.name}: {error}", file=sys.stderr)
                    continue
                if any(warning.startswith("other processes") for warning in trial.warnings):
                    # Worth nothing; the next run measures it again.
                    print(f"{job.name}: not kept, {trial.warnings}", file=sys.stderr)
                    continue
                row = _measured(_row(job, device, config), trial)
                there.append(row)
                added += 1
                with ROWS.open("w", encoding="utf-8") as file:
                    corpus.write(there, file)
                gain = "failed" if row.speedup is None else f"{row.speedup:.2f}x"
                took_s = time.perf_counter() - begun
                print(f"{added} {row.model} {row.batch:.0f}x{row.length} {row.precision} "
                      f"{row.scope} {row.mode} {gain} compile {row.compile_s} {took_s:.0f} s",
                      flush=True)  # fmt: skip
        _count(job, plain)


def _dear(job: Job) -> bool:
    return job.name.endswith(" small") or job.configs == (DYNAMIC,)


def _take_answers(folder: Path) -> None:
    there = list(_read())
    done = {_key(row) for row in there}
    added = 0
    for path in sorted(folder.glob("*.json")):
        message = json_format.ParseDict(json.loads(path.read_text()), advisor_pb2.Advice())
        advice = advice_record(message)
        job = Job(
            name=f"{path.stem} tiny",
            preset=path.stem,
            spec=WorkloadSpec(target=f"hf:{path.stem}", cwd="/", device="cpu", scale="tiny"),
            configs=(),
        )
        eager = next(trial for trial in advice.trials if trial.kind is TrialKind.EAGER)
        for trial in advice.trials:
            if trial.kind is not TrialKind.COMPILE or trial.config is None:
                continue
            if trial.status is TrialStatus.SKIPPED or trial.config.options:
                continue
            row = _row(job, torch.device("cpu"), trial.config)
            row = replace(row, date=advice.created[:10])
            if _key(row) in done:
                continue
            there.append(_measured(row, trial))
            added += 1
            _keep_counts(architectures.key_of(row), eager.counts)
    with ROWS.open("w", encoding="utf-8") as file:
        corpus.write(there, file)
    print(f"{added} rows added, {len(there)} in all")


def _jobs(folder: Path, device: torch.device) -> Iterator[Job]:
    gpu = device.type == "cuda"
    modes = (GRAPHED, AUTOTUNE, ALL_OUT) if gpu else ()
    for name in PRESETS:
        spec = WorkloadSpec(
            target=f"hf:{name}", cwd=str(folder), device=str(device), scale=None if gpu else "tiny"
        )
        size = decided_job(spec).size
        label = name if gpu else f"{name} tiny"
        half, twice = max(1, size.batch_size // 2), size.batch_size * 2
        yield Job(name=label, preset=name, spec=spec, configs=(DEFAULT, REGIONAL, *modes))
        yield Job(
            name=label,
            preset=name,
            spec=replace(spec, batch_size=half if gpu else twice * 2),
            configs=(DEFAULT,),
        )
        yield Job(
            name=label,
            preset=name,
            spec=replace(spec, batch_size=half if gpu else twice * 2),
            configs=(DYNAMIC,),
        )
        yield Job(
            name=label, preset=name, spec=replace(spec, batch_size=twice), configs=(REGIONAL,)
        )
        yield Job(
            name=label,
            preset=name,
            spec=replace(spec, precision="bf16"),
            configs=(DEFAULT, REGIONAL, *modes),
        )
        if gpu or name not in WIDE:
            continue
        small = replace(spec, target=f"hf:{_small(name, folder)}", scale=None, batch_size=8)
        for batch, length in ((4, 64), (8, 128)):
            sized = replace(small, batch_size=batch, length=None if name == "vit-base" else length)
            yield Job(
                name=f"{name} small",
                preset=name,
                spec=sized,
                configs=(DEFAULT, REGIONAL, AUTOTUNE) if batch == 8 else (DEFAULT, REGIONAL),
            )


def _small(name: str, folder: Path) -> Path:
    row = PRESETS[name]
    place = folder / f"{name}-small"
    place.mkdir(exist_ok=True)
    import transformers

    config = getattr(transformers, row.config)
    values = {**row.values, **row.tiny}
    values |= {key: value for key, value in SMALL.items() if key in values}
    values["vocab_size"] = 8192 if "vocab_size" in values else None
    made = config(**{key: value for key, value in values.items() if value is not None})
    text = json.loads(made.to_json_string(use_diff=False))
    text["architectures"] = [next(iter(row.tasks.values()))]
    (place / "config.json").write_text(json.dumps(text))
    return place


def _trial(job: Job, config: Config, folder: Path) -> TrialSpec:
    name = uuid.uuid4().hex
    return TrialSpec(
        trial_id=name,
        kind=TrialKind.COMPILE,
        workload=job.spec,
        folder=str(folder / name),
        config=config,
        deadlines=Deadlines(),
        measuring=QUICK,
    )


def _row(job: Job, device: torch.device, config: Config) -> corpus.CorpusRow:
    decided = decided_job(job.spec)
    precision = PRECISIONS.get(job.spec.precision or decided.precision.weights, "fp32")
    shown = machine()
    image = hasattr(decided.config, "image_size") or job.preset in ("resnet-50", "convnext-tiny")
    return corpus.CorpusRow(
        source=f"bench/collect.py on {shown.rpartition(', torch')[0]}",
        date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        torch=str(torch.__version__),
        device=torch.cuda.get_device_name() if device.type == "cuda" else _cpu(),
        model=job.name,
        family=family_of(decided.config.model_type),
        task="training",
        precision=precision,
        mode=str(config.mode),
        scope=str(config.scope),
        dynamic=str(config.dynamic),
        batch=float(decided.size.batch_size),
        length=None if image else float(decided.size.length),
        image=float(decided.size.length) if image else None,
    )


def _cpu() -> str:
    import os

    return f"cpu-{len(os.sched_getaffinity(0))}"


def _measured(row: corpus.CorpusRow, trial: Trial) -> corpus.CorpusRow:
    if trial.status is not TrialStatus.OK or trial.speedup is None:
        words = trial.failure.message if trial.failure is not None else ""
        print(f"{row.model}: {trial.status} {words}", file=sys.stderr)
        return replace(row, failed=True)
    memory = None
    if row.device.startswith("cpu") is False and trial.eager_peak_bytes and trial.peak_bytes:
        memory = trial.eager_peak_bytes / trial.peak_bytes
    return replace(
        row,
        parameters=float(trial.workload.parameters) if trial.workload else None,
        eager_s=trial.eager_step_s.median if trial.eager_step_s else None,
        speedup=trial.speedup.median,
        compile_s=trial.cold_start_s,
        memory_ratio=memory,
        graphs=float(trial.graphs) if trial.graphs is not None else None,
        graph_breaks=float(len(trial.graph_breaks)),
        operators=float(sum(event.operators for event in trial.compile_events)) or None,
    )


def _count(job: Job, row: corpus.CorpusRow) -> None:
    """Adds what a step of the job has to do, where it is not there yet."""
    key = architectures.key_of(row)
    if key in architectures.known():
        return
    cpu = torch.device("cpu")
    try:
        with operator_counting.without_memory():
            trainer = Trainer(build(replace(job.spec, device="cpu"), cpu), cpu)
            batch = trainer.batches.next()
            counts = operator_counting.count(trainer.model, lambda: trainer.step(batch), row.batch)
    except Exception as error:  # noqa: BLE001 - a row without counts is still a row
        print(f"{row.model}: not counted: {error}", file=sys.stderr)
        return
    _keep_counts(key, counts)


def _keep_counts(key: architectures.Key, counts: StepCounts | None) -> None:
    if counts is None or key in architectures.known():
        return
    with COUNTS.open("a", encoding="utf-8") as file:
        architectures.write([architectures.Architecture(key=key, counts=counts)], file)
    architectures.known.cache_clear()


def _read() -> tuple[corpus.CorpusRow, ...]:
    if not ROWS.exists():
        return ()
    with ROWS.open(encoding="utf-8") as file:
        return corpus.read(file)


def _key(row: corpus.CorpusRow) -> tuple[object, ...]:
    return (row.device, row.model, row.batch, row.length, row.image, row.precision, row.mode,
            row.scope, row.dynamic)  # fmt: skip


if __name__ == "__main__":
    main()
