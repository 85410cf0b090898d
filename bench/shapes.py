"""Are the shape policies' totals true? Every policy trains one epoch for real.

A campaign on real text of varying length (bench/shapes_job.py) measures steps along the lengths.
From its trials the totals of one epoch are predicted for every policy. Then each policy trains that
epoch in a fresh process with an empty cache; they take turns in short slices, so that a machine
that gets slower hits all of them, and only their own time counts. The claims: each total lies
within 10 % of the predicted one, as it stands and relative to the eager run beside it (what a
machine's own level has to do with it), and the policy advised is the fastest or within 2 %.

    python bench/shapes.py [ADVICE_ID]

With the id of an advice on this job that was given before, that one is checked.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from campaigns import REPOSITORY, advise, machine, stored, verdict

JOB = "bench/shapes_job.py:build"
PLANNED_STEPS = "6000"
TOLERANCE = 0.10
NEARLY = 0.02
SLICE_STEPS = 25


def run_policy(policy: str, boundaries: tuple[int, ...], code: str) -> None:
    """Trains as the person would under a policy; reads numbers of steps, prints seconds."""
    import shapes_job
    import torch

    from advisor.buckets import BucketBatchSampler, PadToBoundary
    from advisor.profiler.torch_internals import mark_dynamic

    data = shapes_job.samples()
    lengths = [len(row["input_ids"]) for row in data]
    collate = shapes_job.collate
    if policy == "pad-to-longest":
        boundaries = (max(lengths),)
    if policy in ("pad-to-longest", "buckets"):
        collate = PadToBoundary(boundaries)
    if policy.endswith("buckets"):
        sampler = BucketBatchSampler(lengths, boundaries, shapes_job.BATCH_SIZE)
        loader = torch.utils.data.DataLoader(data, batch_sampler=sampler, collate_fn=collate)
    else:
        loader = torch.utils.data.DataLoader(
            data, batch_size=shapes_job.BATCH_SIZE, shuffle=True, collate_fn=collate
        )
    model = shapes_job.model(torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    if code:
        exec(code, {"model": model, "torch": torch})  # noqa: S102 - what the person pastes
    batches = iter(loader)
    print(json.dumps(len(loader)), flush=True)
    for line in sys.stdin:
        begun = time.perf_counter()
        for _ in range(int(line)):
            batch = next(batches)
            if policy.startswith("mark"):
                for tensor in batch.values():
                    mark_dynamic(tensor, 1, 2, max(lengths))
            optimizer.zero_grad(set_to_none=True)
            model(**batch).loss.backward()
            optimizer.step()
        print(json.dumps(time.perf_counter() - begun), flush=True)


def start(policy: str, boundaries: tuple[int, ...], code: str, cache: str) -> subprocess.Popen[str]:
    """Starts a policy's process; its first line is the number of its steps."""
    return subprocess.Popen(
        [sys.executable, __file__, "--policy", policy, json.dumps(boundaries), code],
        cwd=Path(__file__).parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache},
    )


def measured(runs: dict[str, subprocess.Popen[str]]) -> dict[str, float]:
    """Returns the seconds of each policy's epoch; they train in turns of `SLICE_STEPS` steps."""
    left = {}
    for name, run in runs.items():
        assert run.stdout is not None
        left[name] = int(json.loads(run.stdout.readline()))
    taken = dict.fromkeys(runs, 0.0)
    while any(left.values()):
        for name, run in runs.items():
            steps = min(SLICE_STEPS, left[name])
            if not steps:
                continue
            assert run.stdin is not None
            assert run.stdout is not None
            run.stdin.write(f"{steps}\n")
            run.stdin.flush()
            taken[name] += float(json.loads(run.stdout.readline()))
            left[name] -= steps
    return taken


def main() -> None:
    """Runs the campaign, predicts an epoch, trains it under every policy and compares."""
    from google.protobuf import json_format

    from advisor import convert, paste
    from advisor.decision import decide
    from advisor.models.batching import natural
    from advisor.models.plan import Plan
    from advisor.profiler.records import WorkloadSpec
    from advisor.request import AdviceRequest
    from advisor.v1 import advisor_pb2

    print(machine())
    given = stored(sys.argv[1]) if len(sys.argv) > 1 else advise(JOB, "--steps", PLANNED_STEPS)[0]
    advice = convert.advice_record(json_format.ParseDict(given, advisor_pb2.Advice()))
    if advice.workload is None or advice.workload.lengths is None:
        raise SystemExit("the advice knows no lengths")
    steps = len(natural(advice.workload.lengths).rows)
    request = AdviceRequest(
        workload=WorkloadSpec(target=JOB, cwd=str(REPOSITORY)), plan=Plan(steps=steps)
    )
    epoch = decide(request, advice.trials, 0.0, "epoch", advice.created)
    if epoch.shapes is None:
        raise SystemExit("no shape policies were compared")
    told = advice.shapes.policy.value if advice.shapes else "none"
    print(f"{PLANNED_STEPS} steps: {told}; one epoch of {steps}: {epoch.shapes.policy.value}")
    policies = [found for found in epoch.shapes.policies if found.total_s is not None]
    with tempfile.TemporaryDirectory() as caches:
        runs = {}
        for found in policies:
            config = found.config and replace(found.config, fullgraph=False)
            runs[found.policy.value] = start(
                found.policy.value,
                found.boundaries,
                paste.code(config, advice.workload),
                f"{caches}/{found.policy.value}",
            )
        taken = measured(runs)
        for run in runs.values():
            run.communicate()
    print(f"{'policy':24}{'predicted':>12}{'measured':>12}{'error':>8}{'to eager':>10}")
    totals = {p.policy.value: p.total_s.median for p in policies if p.total_s is not None}
    errors = {name: totals[name] / taken[name] - 1 for name in totals}
    level = totals["eager"] / taken["eager"]
    relative = {name: (1 + error) / level - 1 for name, error in errors.items()}
    for name, predicted_s in totals.items():
        line = f"{name:24}{predicted_s:>10.1f} s{taken[name]:>10.1f} s{errors[name]:>+8.1%}"
        print(f"{line}{relative[name]:>+10.1%}")
    fastest_s = min(taken.values())
    advised_s = taken[epoch.shapes.policy.value]
    verdict(
        f"the advised policy is the fastest or within {NEARLY:.0%} of it",
        ok=advised_s <= fastest_s * (1 + NEARLY),
    )
    for what, found_errors in (("relative to eager", relative), ("as it stands", errors)):
        verdict(
            f"each total lies within {TOLERANCE:.0%} of the predicted one, {what}",
            ok=all(abs(error) <= TOLERANCE for error in found_errors.values()),
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--policy"]:
        run_policy(sys.argv[2], tuple(json.loads(sys.argv[3])), sys.argv[4])
    else:
        main()
