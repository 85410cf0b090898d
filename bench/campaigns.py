"""What the benchmarks share: a campaign by the command itself, and how results are printed."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
ADVISE = Path(sys.executable).with_name("advise")
EXAMPLE = "examples/ner_bert.py:build"


def advise(*arguments: str) -> tuple[dict[str, Any], float]:
    """Returns the advice of `advise run ... --json` and the wall seconds of the whole command.

    Raises SystemExit with the command's own words when it gave no advice.
    """
    begun = time.perf_counter()
    done = subprocess.run(
        [ADVISE, "run", *arguments, "--fresh", "--json"],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"advise ended with {done.returncode}")
    return json.loads(done.stdout), time.perf_counter() - begun


def stored(advice_id: str) -> dict[str, Any]:
    """Returns an advice that was given before, as `advise show` has it."""
    done = subprocess.run(
        [ADVISE, "show", advice_id, "--json"], stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout)


def machine() -> str:
    """Returns the machine and the date, to stand beside a figure."""
    import torch

    cores = len(os.sched_getaffinity(0))
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    today = datetime.datetime.now(tz=datetime.UTC).date()
    return f"{model}, {cores} cores, torch {torch.__version__}, {today}"


def verdict(name: str, *, ok: bool) -> None:
    """Prints whether a benchmark's claim holds, and ends the process with 1 when it does not."""
    print(f"{'PASS' if ok else 'FAIL'}: {name}")
    if not ok:
        raise SystemExit(1)
