"""How much sooner is the first compiled step of a run that starts from its trial's cache?

    python bench/handover.py [WORKLOAD] [STEPS] [ADVICE_ID]

Advice is asked for; then new processes paste its code and take one training step, in turns from an
empty cache and from the one that was handed over (`advise exec`). The claim: at least 8 times
faster, and torch counts every graph as found. With the id of an advice, that one is used.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from campaigns import ADVISE, EXAMPLE, REPOSITORY, advise, machine, stored, verdict

LEAST_RATIO = 8.0
TURNS = 3


def run(workload: str, code: str) -> None:
    """Takes the first step as the person would, and prints its seconds and torch's counts."""
    import time

    import torch

    from advisor.profiler.cache_proof import cache_proof
    from advisor.profiler.records import WorkloadSpec
    from advisor.profiler.training import Trainer
    from advisor.profiler.workload import build, seed_everything

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    seed_everything(0)
    made = build(WorkloadSpec(target=workload, cwd=str(REPOSITORY)), device)
    trainer = Trainer(made, device)
    batch = trainer.batches.next()
    begun = time.perf_counter()
    exec(code, {"model": made.model, "torch": torch})  # noqa: S102 - what the person pastes
    trainer.run([batch])
    took_s = time.perf_counter() - begun
    proof = cache_proof()
    print(json.dumps([took_s, proof.hits, proof.misses + proof.bypassed]))


def first_step(workload: str, code: str, advice_id: str) -> tuple[float, int, int]:
    """Returns seconds, graphs found and graphs compiled of a new process; cold without an id."""
    command = [sys.executable, __file__, "--run", workload, code]
    if advice_id:
        command = [str(ADVISE), "exec", advice_id, "--", *command]
    with tempfile.TemporaryDirectory() as folder:
        # A temporary folder of its own: torch keeps the precompiled header in it.
        own = {"TMPDIR": folder}
        if not advice_id:
            own["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder, "cache"))
        done = subprocess.run(
            command,
            cwd=Path(__file__).parent,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            env={**os.environ, **own},
        )
    took_s, hits, misses = json.loads(done.stdout.splitlines()[-1])
    return float(took_s), int(hits), int(misses)


def main() -> None:
    """Prints the figures and ends with 1 when a claim does not hold."""
    arguments = sys.argv[1:]
    workload = arguments[0] if arguments else EXAMPLE
    steps = arguments[1] if len(arguments) > 1 else "20000"
    if len(arguments) > 2:
        advice = stored(arguments[2])
    else:
        advice, _ = advise(workload, "--steps", steps)
    if not advice.get("hand_over"):
        raise SystemExit("the advice hands over no cache: nothing to compare")
    code, advice_id = advice["code"], advice["advice_id"]
    cold, warm = [], []
    for _ in range(TURNS):
        cold.append(first_step(workload, code, ""))
        warm.append(first_step(workload, code, advice_id))
        print(f"cold {cold[-1][0]:.1f} s, handed over {warm[-1][0]:.2f} s", flush=True)
    middle = [statistics.median(each[0] for each in arm) for arm in (cold, warm)]
    ratio = middle[0] / middle[1]
    print(f"first compiled step: {middle[0]:.1f} s cold, {middle[1]:.2f} s handed over")
    print(f"{ratio:.1f} times faster; {warm[0][1]} graphs found, {warm[0][2]} compiled anew")
    print(machine())
    served = all(found and not anew for _, found, anew in warm)
    verdict("hand-over", ok=ratio >= LEAST_RATIO and served)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        run(*sys.argv[2:])
    else:
        main()
