"""Is the break-even step true? Both variants are run for real, past the predicted crossing.

Advice is asked for, then an eager and a compiled run, each in a fresh process, train for 1.5 x the
predicted break-even step. They take turns in short slices, so that a machine that gets slower hits
both; only their own time counts. The compiled run starts with an empty cache and pastes the
advice's own code. The claim: the true crossing lies within 25 % of the predicted one.

    python bench/truth.py [WORKLOAD] [STEPS] [ADVICE_ID]

With the id of an advice that was given before, that one is checked.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from itertools import accumulate
from pathlib import Path
from typing import Any

from campaigns import EXAMPLE, REPOSITORY, advise, machine, stored, verdict

TOLERANCE = 0.25
PAST = 1.5
SLICE_STEPS = 25


def run_variant(workload: str, code: str) -> None:
    """Trains as the person would; reads numbers of steps from stdin, prints seconds as JSON."""
    import time

    import torch

    from advisor.profiler.records import WorkloadSpec
    from advisor.profiler.training import Trainer
    from advisor.profiler.workload import build, seed_everything

    device = torch.device("cpu" if not torch.cuda.is_available() else "cuda")
    seed_everything(0)
    made = build(WorkloadSpec(target=workload, cwd=str(REPOSITORY)), device)
    trainer = Trainer(made, device)
    start_s = 0.0
    if code:
        begun = time.perf_counter()
        exec(code, {"model": made.model, "torch": torch})  # noqa: S102 - what the person pastes
        start_s = time.perf_counter() - begun
    print(json.dumps([start_s]), flush=True)
    for line in sys.stdin:
        times = []
        for _ in range(int(line)):
            batch = trainer.batches.next()
            begun = time.perf_counter()
            trainer.run([batch])
            times.append(time.perf_counter() - begun)
        print(json.dumps(times), flush=True)


def start(workload: str, code: str, cache: str) -> subprocess.Popen[str]:
    """Starts one variant; its first line is the seconds that applying the code took."""
    return subprocess.Popen(
        [sys.executable, __file__, "--variant", workload, code],
        cwd=Path(__file__).parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache},
    )


def take(variant: subprocess.Popen[str], steps: int) -> list[float]:
    """Has a variant run some steps while the other waits; returns the seconds of each."""
    assert variant.stdin is not None
    assert variant.stdout is not None
    if steps:
        variant.stdin.write(f"{steps}\n")
        variant.stdin.flush()
    return [float(value) for value in json.loads(variant.stdout.readline())]


def crossing(eager: list[float], compiled: list[float]) -> int | None:
    """Returns the first step from which on the compiled total stays below the eager one."""
    behind = [
        step
        for step, (e, c) in enumerate(zip(accumulate(eager), accumulate(compiled), strict=True))
        if c > e
    ]
    last = behind[-1] + 1 if behind else 0
    return last if last < len(eager) else None


def measure(workload: str, advice: dict[str, Any], steps: int) -> int | None:
    """Returns the true crossing of the two variants within `steps` steps."""
    with tempfile.TemporaryDirectory() as cache:
        arms = {
            name: start(workload, code, cache)
            for name, code in (("eager", ""), ("compiled", advice["code"]))
        }
        times = {name: take(arm, 0) for name, arm in arms.items()}
        overhead = {name: found.pop() for name, found in times.items()}
        order = ["eager", "compiled"]
        while len(times["eager"]) < steps:
            for name in order:
                times[name] += take(arms[name], SLICE_STEPS)
            order.reverse()
        for arm in arms.values():
            arm.communicate()
    times["compiled"][0] += overhead["compiled"]
    for name, found in times.items():
        print(f"{name}: {sum(found):.1f} s for {len(found)} steps, first step {found[0]:.1f} s")
    return crossing(times["eager"], times["compiled"])


def main() -> None:
    """Asks, runs both variants, compares."""
    workload = sys.argv[1] if len(sys.argv) > 1 else EXAMPLE
    steps = sys.argv[2] if len(sys.argv) > 2 else "20000"
    print(machine())
    if len(sys.argv) > 3:
        advice = stored(sys.argv[3])
    else:
        advice, _ = advise(workload, "--steps", steps)
    print(f"enable {advice['enable']}, speedup {advice.get('speedup')}")
    if not advice["enable"]:
        raise SystemExit("the advice is to stay eager: there is no crossing to check")
    predicted = advice["break_even_step"]
    print(f"predicted break-even step {predicted:.0f}")
    true = measure(workload, advice, int(PAST * predicted))
    print(f"true break-even step {true}")
    ok = true is not None and abs(true / predicted - 1) <= TOLERANCE
    verdict(f"the true crossing lies within {TOLERANCE:.0%} of the predicted one", ok=ok)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--variant"]:
        run_variant(sys.argv[2], sys.argv[3])
    else:
        main()
