"""What does it cost to let the loop decide? AutoCompile against who had known beforehand.

    python bench/autocompile.py [FOLDER]

Twelve architectures (those of bench/regret.py) are measured first, each in one trial: its cold
compile and its steps in pairs. FOLDER keeps the trials, so that an interrupted run goes on. Each
training of 100 to 100,000 steps is simulated from them: its steps are drawn from the pairs that
were measured (so they scatter as the machine does), its compile takes what it took. The loop's
policy is the one that trains: it is told what each step took and says in which arm the next one
runs. Its total is weighed against the better of always eager and always compiled, with what a loop
adds to a step measured beside.
The belief that it starts from is once the cost model's and once what a loop believes without one.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from campaigns import machine, verdict
from google.protobuf import json_format
from regret import ARCHITECTURES, PLANS

from advisor import prior_store
from advisor.autocompile import AutoCompile
from advisor.autocompile_beliefs import USUAL
from advisor.convert import message_json, trial_message, trial_record
from advisor.job_facts import JobFacts
from advisor.models.families import family_of
from advisor.models.loop_policy import Arm, Believe, LoopPolicy, Outlook
from advisor.profiler.launch import TrialHost
from advisor.profiler.records import (
    Config,
    Deadlines,
    Measuring,
    Pair,
    Trial,
    TrialKind,
    TrialSpec,
    TrialStatus,
    WorkloadSpec,
)
from advisor.v1 import advisor_pb2

SEEDS = 5
MOST_MEAN, MOST_WORST = 1.03, 1.10
OVERHEAD_STEPS = 2000


@dataclass(frozen=True)
class Job:
    """A training whose figures were measured."""

    name: str
    pairs: tuple[Pair, ...]
    compile_s: float
    parameters: float | None

    @property
    def eager_s(self) -> float:
        """Seconds of an eager step."""
        return statistics.fmean(pair.eager_s for pair in self.pairs)

    @property
    def compiled_s(self) -> float:
        """Seconds of a compiled step."""
        return statistics.fmean(pair.compiled_s for pair in self.pairs)

    def best_s(self, steps: float) -> float:
        """Returns the better of always eager and always compiled."""
        return min(steps * self.eager_s, self.compile_s + steps * self.compiled_s)


def job_of(name: str, folder: Path) -> Job:
    """Returns what was measured of an architecture with the whole model in mode default.

    Raises SystemExit when its trial did not end well: then there is nothing to simulate from.
    """
    kept = folder / f"{name}.trial.json"
    if not kept.exists():
        measured = asyncio.run(_measured(name, folder))
        kept.write_text(message_json(trial_message(measured)))
    trial = trial_record(json_format.Parse(kept.read_text(), advisor_pb2.Trial()))
    if trial.status is not TrialStatus.OK or not trial.pairs or trial.cold_start_s is None:
        raise SystemExit(f"{name}: the trial ended as {trial.status}: {trial.failure}")
    parameters = None if trial.workload is None else float(trial.workload.parameters)
    return Job(name, trial.pairs, trial.cold_start_s, parameters)


async def _measured(name: str, folder: Path) -> Trial:
    spec = WorkloadSpec(target=f"hf:{name}", cwd=str(folder), device="cpu", scale="tiny")
    trial_id = uuid.uuid4().hex
    async with TrialHost.start() as host:
        return await host.run(
            TrialSpec(
                trial_id=trial_id,
                kind=TrialKind.COMPILE,
                workload=spec,
                folder=str(folder / trial_id),
                config=Config(),
                deadlines=Deadlines(),
                measuring=Measuring(max_diagnose_s=0.0),
            ),
            lambda _: None,
        )


def usual(job: Job) -> Believe:
    """Returns what is believed of any job where no cost model is at hand."""
    return lambda _: USUAL


def modelled(job: Job) -> Believe:
    """Returns what the cost model believes of a job, by what a loop knows of it."""
    prior = prior_store.load()

    def believe(step_s: float) -> Outlook:
        facts = JobFacts(
            device="cpu-2",
            family=family_of(job.name),
            precision="fp32",
            parameters=job.parameters,
            eager_step_s=step_s,
        )
        said = prior.estimate(facts.facts(Config()))
        return Outlook(speedup=said.speedup, compile_s=said.compile_s)

    return believe


def trained_s(job: Job, steps: int, policy: LoopPolicy, seed: int) -> float:
    """Returns the seconds of a training whose arms the policy chooses."""
    drawn = random.Random(seed)
    total_s, cold = 0.0, True
    for done in range(steps):
        pair = job.pairs[drawn.randrange(len(job.pairs))]
        compiling = policy.arm is Arm.COMPILED and cold
        took_s = pair.compiled_s if policy.arm is Arm.COMPILED else pair.eager_s
        if compiling and job.compile_s > policy.most_saved_s:
            # The loop's deadline breaks it off, and the step runs eager.
            took_s, cold = pair.eager_s + policy.most_saved_s, False
            policy.gives_up("compiling took too long")
        elif compiling:
            took_s, cold = took_s + job.compile_s, False
        policy.took(took_s, compiling=compiling)
        total_s += took_s
        if policy.final:
            # From here on each step is the arm's mean: the rest needs no draw.
            left = steps - done - 1
            return total_s + left * (job.compiled_s if policy.arm is Arm.COMPILED else job.eager_s)
    return total_s


class _Small(torch.nn.Module):
    """A step of about a millisecond: what a loop adds to it shows at most here."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(given)
        return result


def overheads() -> tuple[float, float]:
    """Returns what a settled loop adds to a step, eager and compiled, in seconds."""
    return _added(compiled=False), _added(compiled=True)


def _added(*, compiled: bool) -> float:
    torch.manual_seed(0)
    model = _Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.ones(8, 64)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).pow(2).mean().backward()
        optimizer.step()

    config = Config(backend="eager")
    auto = AutoCompile(model, steps=1e9 if compiled else 1, config=config, always_try=compiled)
    for _ in range(40):
        with auto.step():
            step()
    policy = auto._policy
    assert policy is not None
    policy._settle(Arm.COMPILED if compiled else Arm.EAGER, "this is what is measured")
    for _ in range(10):
        with auto.step():
            step()
    differences = []
    for _ in range(OVERHEAD_STEPS // 100):
        # The same calls with and without: with, through the loop and its guard.
        begun = time.perf_counter()
        for _ in range(50):
            with auto.step():
                step()
        within_s = time.perf_counter() - begun
        flip = auto._flip
        calls = [] if flip is None or not compiled else flip._calls
        for module, call in calls:
            module._compiled_call_impl = call.__closure__ and _innermost(call)
        begun = time.perf_counter()
        for _ in range(50):
            step()
        differences.append((within_s - (time.perf_counter() - begun)) / 50)
        for module, call in calls:
            module._compiled_call_impl = call
    auto.close()
    return statistics.median(differences)


def _innermost(call: object) -> object:
    """Returns the compiled call within a guarded one."""
    names = call.__code__.co_freevars  # type: ignore[attr-defined]
    cells = dict(zip(names, call.__closure__, strict=True))  # type: ignore[attr-defined]
    return cells["compiled"].cell_contents


def main() -> None:
    """Simulates all trainings and prints a table and whether the claim holds."""
    torch.set_num_threads(1)
    print(machine())
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    eager_added_s, compiled_added_s = overheads()
    print(f"a settled loop adds {eager_added_s * 1e6:.0f} us to an eager step and"
          f" {compiled_added_s * 1e6:.0f} us to a compiled one")  # fmt: skip
    jobs = [job_of(name, folder) for name in ARCHITECTURES]
    fine = True
    for title, believing in (("the cost model's belief", modelled), ("the usual belief", usual)):
        ratios = table(title, jobs, believing, (eager_added_s, compiled_added_s))
        mean, worst = statistics.fmean(ratios), max(ratios)
        print(
            f"{title}: mean {mean:.4f} x the better of always eager and always compiled,"
            f" worst {worst:.3f} x ({len(ratios)} trainings)"
        )
        fine = fine and mean <= MOST_MEAN and worst <= MOST_WORST
    verdict("letting the loop decide costs next to nothing", ok=fine)


def table(
    title: str,
    jobs: Sequence[Job],
    believing: Callable[[Job], Believe],
    added_s: tuple[float, float],
) -> list[float]:
    """Prints the mean ratio of each job and plan, and returns all ratios."""
    print(f"{title:26}{'eager':>9}{'gain':>7}{'compile':>9}" + "".join(f"{p:>9.0f}" for p in PLANS))
    ratios = []
    for job in jobs:
        row = []
        for steps in PLANS:
            for seed in range(SEEDS):
                policy = LoopPolicy(steps, believing(job))
                total_s = trained_s(job, int(steps), policy, seed)
                total_s += steps * added_s[policy.arm is Arm.COMPILED]
                row.append(total_s / job.best_s(steps))
        ratios += row
        means = [statistics.fmean(row[i : i + SEEDS]) for i in range(0, len(row), SEEDS)]
        print(f"{job.name:26}{job.eager_s * 1e3:>6.1f} ms{job.eager_s / job.compiled_s:>6.2f}x"
              f"{job.compile_s:>7.0f} s" + "".join(f"{mean:>9.3f}" for mean in means))  # fmt: skip
    return ratios


if __name__ == "__main__":
    main()
