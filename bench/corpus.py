"""Rewrites models/corpus/published.csv from a folder of published tables.

    python bench/corpus.py FOLDER

The folder holds published_speedups.csv, in the columns of its own README. Words are brought to the
schema's (precisions, modes, devices); numbers are taken as they are printed.
"""

from __future__ import annotations

import csv
import re
import sys
from collections import Counter
from pathlib import Path

from advisor.models.corpus import CorpusRow, write
from advisor.models.devices import Device
from advisor.profiler.errors import PlanError

TARGET = Path(__file__).resolve().parent.parent / "models" / "corpus" / "published.csv"
FLAGS = {
    "AGGREGATE": "AGGREGATE",
    "CONFOUNDED": "CONFOUNDED",
    "RANGE ENDPOINT": "RANGE",
    "MODE DELTA": "MODE_DELTA",
    "IMPLIED": "IMPLIED",
    "EXCERPT": "EXCERPT",
    "SUSPECT": "SUSPECT",
}
PRECISIONS = (
    (r"tf32", "tf32"),
    (r"(amp|autocast).*bf16|bf16.*(autocast|amp|mixed)", "amp-bf16"),
    (r"amp", "amp-fp16"),
    (r"int8", "int8"),
    (r"fp16/bf16", "bf16"),
    (r"bf16|bfloat16", "bf16"),
    (r"fp16|float16", "fp16"),
    (r"fp32|float32", "fp32"),
)
SECONDS = {"ms/iter": 1e-3, "ms": 1e-3, "ms/step": 1e-3, "s/iter": 1.0, "s": 1.0}


def precision(text: str) -> str:
    """Returns a precision by the schema's name; "" where it is not stated."""
    return next((name for pattern, name in PRECISIONS if re.search(pattern, text)), "")


def mode(text: str) -> tuple[str, str]:
    """Returns mode and scope; a mode that is none of the compiler's own is `other`."""
    scope = "regional" if re.search(r"regional|per block|per layer", text) else "model"
    if re.search(r" vs |^backend=cudagraphs|manual CUDA graphs|cudagraphs=True", text):
        return "other", scope
    for name in ("max-autotune-no-cudagraphs", "max-autotune", "reduce-overhead"):
        if text.startswith(name):
            return name, scope
    return ("default" if text.startswith(("default", "inductor")) else "other"), scope


def device(text: str) -> str:
    """Returns a device by the table's name, or as it was written."""
    if text.startswith("CPU"):
        return "cpu"
    several = re.match(r"\d+x ", text)
    try:
        name = Device.from_name(re.sub(r"\(.*?\)", "", text)).name
    except PlanError:
        return text
    return f"{several.group()}{name}" if several else name


def number(text: str, pattern: str = r"([\d.]+)") -> float | None:
    """Returns the number that a pattern finds, None without one."""
    found = re.search(pattern, text)
    return float(found.group(1)) if found else None


def row(old: dict[str, str]) -> CorpusRow:
    """Returns one published row in the schema."""
    notes, size = old["notes"], old["seq_len_or_image"]
    how, scope = mode(old["mode"])
    parameters = number(old["params_m"])
    speedup = number(old["speedup"])
    eager = number(old["baseline_value"])
    compiled = number(old["compiled_value"])
    scale = SECONDS.get(old["unit"])
    if eager is None and compiled is not None and speedup:
        eager = compiled * speedup
    failed = old["unit"] in ("FAILED", "OOM", "FAILED/OOM")
    return CorpusRow(
        source=old["source"],
        date=old["date"],
        torch=old["torch_version"],
        device=device(old["device"]),
        model=old["model"],
        family=old["family"],
        task="training" if old["task"].startswith("training") else "inference",
        precision=precision(old["precision"].lower()),
        mode=how,
        scope=scope,
        dynamic={"True": "true", "False": "false"}.get(old["dynamic"], "auto"),
        parameters=None if parameters is None else parameters * 1e6,
        batch=number(old["batch"]),
        length=number(size, r"(?:seq|tokens) (\d+)"),
        image=number(size, r"img (\d+)"),
        eager_s=None if eager is None or scale is None else eager * scale,
        speedup=None if failed else speedup,
        compile_s=number(old["compile_time_s"]),
        memory_ratio=number(old["memory_ratio"]),
        graphs=number(notes, r"unique_graphs=(\d+)"),
        graph_breaks=number(notes, r"unique_graph_breaks=(\d+)"),
        operators=number(notes, r"ops_captured=(\d+)"),
        failed=failed,
        flags=" ".join(flag for words, flag in FLAGS.items() if words in notes),
    )


def main() -> None:
    """Converts the table and says what is in it."""
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    with Path(sys.argv[1], "published_speedups.csv").open(encoding="utf-8") as file:
        rows = [row(old) for old in csv.DictReader(file)]
    with TARGET.open("w", encoding="utf-8") as file:
        write(rows, file)
    fit = [one for one in rows if one.fit]
    print(f"{len(rows)} rows, {len(fit)} for fits, {sum(r.training for r in fit)} of training")
    for name in ("device", "precision", "mode", "family"):
        counts = Counter(getattr(one, name) for one in fit if one.training)
        print(name, dict(counts.most_common(12)))


if __name__ == "__main__":
    main()
