"""A pipeline that measures before it trains: tasks with retries and timeouts, JSON between them.

    python examples/airflow_like.py --steps 20000

Airflow itself is not needed here, so that the page runs anywhere. In a DAG each function below is a
`@task(retries=..., execution_timeout=...)`, and the JSON that it returns is its XCom:

    @dag(schedule=None)
    def training():
        train(decide(measure("train.py:build"), steps=20_000))

`profile` runs the trial in a process of its own. Whatever happens there (a crash, no memory left, a
hang) is the status of the trial and not an error of the task, and when the task is stopped no
process stays behind. So the deadline is given to `profile`, a little within the task's own.
"""

import argparse
import functools
import json
from collections.abc import Callable
from typing import Any

import torch

from advisor.profiler import Config, HostError, Trial, Workload, profile
from advisor.profiler.records import Measuring, TrialStatus
from advisor.profiler.units import duration

TINY = f"{__file__}:tiny"
# Worth another try: the machine was busy, or the host of the trial could not be started.
AGAIN = (TrialStatus.TIMED_OUT, TrialStatus.CRASHED)


class TryAgain(Exception):
    """Says that a task has failed for a reason that may be gone the next time."""


def task(*, retries: int = 0) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a task of a function: it is tried again, and what it returns passes as JSON."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **options: Any) -> Any:
            for attempt in range(1, retries + 2):
                print(f"[{function.__name__}] attempt {attempt}")
                try:
                    return json.loads(json.dumps(function(*args, **options)))
                except (TryAgain, HostError) as error:
                    print(f"[{function.__name__}] {error}")
                    if attempt > retries:
                        raise
            return None

        return run

    return decorate


@task(retries=1)
def measure(
    target: str, *, backend: str, timeout_s: float, measuring: Measuring | None = None
) -> dict[str, Any]:
    """Measures compiled against eager, and returns the figures that the next tasks need."""
    trial = profile(
        target,
        Config(backend=backend),
        # Time to end the trial and report, before the task's own timeout would end the task.
        deadline_s=0.9 * timeout_s,
        measuring=measuring,
        on_progress=lambda progress: print(f"  {progress.phase} {progress.detail}"),
    )
    if trial.status in AGAIN:
        raise TryAgain(_reason(trial))
    return {
        "target": target,
        "backend": backend,
        "status": trial.status.value,
        "reason": _reason(trial),
        "eager_step_s": trial.eager_step_s.median if trial.eager_step_s else None,
        "step_s": trial.step_s.median if trial.step_s else None,
        "cold_start_s": trial.cold_start_s,
    }


@task()
def decide(measured: dict[str, Any], *, steps: int) -> dict[str, Any]:
    """Returns whether compiling pays for so many steps, and what it saves."""
    if measured["status"] != "OK":
        return {**measured, "compile": False, "saved_s": 0.0}
    gained_s = steps * (measured["eager_step_s"] - measured["step_s"])
    saved_s = gained_s - measured["cold_start_s"]
    return {**measured, "compile": saved_s > 0, "saved_s": saved_s}


@task()
def train(verdict: dict[str, Any], *, steps: int) -> dict[str, Any]:
    """Trains as was decided."""
    made = tiny(torch.device("cpu"))
    if verdict["compile"]:
        made.model.compile(backend=verdict["backend"])
    for step in range(steps):
        loss = made.model(made.batches(step)).pow(2).mean()
        made.optimizer.zero_grad()
        loss.backward()
        made.optimizer.step()
    return {"loss": float(loss.detach()), "compiled": verdict["compile"]}


class Gate(torch.nn.Module):
    """Some elementwise operators: what a fusing compiler gains from."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the gated input."""
        return x * torch.sigmoid(x * self.scale) + torch.tanh(x)


def tiny(device: torch.device) -> Workload:
    """Returns the workload that is measured and trained unless another one is named."""
    model = torch.nn.Sequential(Gate(64), Gate(64)).to(device)
    return Workload(
        model=model,
        batches=lambda step: torch.randn(32, 64, generator=torch.Generator().manual_seed(step)),
        loss=lambda model, batch: model(batch).pow(2).mean(),
        optimizer=torch.optim.AdamW(model.parameters()),
    )


def _reason(trial: Trial) -> str:
    return trial.failure.message if trial.failure else ""


def main() -> None:
    """Runs the tasks in their order, and prints what each hands on."""
    parser = argparse.ArgumentParser(description="Measures, decides and trains.")
    parser.add_argument("--target", default=TINY, help="the workload to measure: FILE:FUNCTION")
    parser.add_argument("--steps", type=int, default=20_000, help="steps that the job will take")
    parser.add_argument("--train-steps", type=int, default=20, help="steps to take here")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds of the first task")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--quick", action="store_true", help="measure for seconds only")
    options = parser.parse_args()
    measuring = (
        Measuring(max_warm_up_s=0.5, max_steady_s=0.5, min_quads=4) if options.quick else None
    )
    found = measure(
        options.target, backend=options.backend, timeout_s=options.timeout, measuring=measuring
    )
    verdict = decide(found, steps=options.steps)
    print(json.dumps(verdict))
    word = "saves" if verdict["compile"] else "would not pay: it saves"
    print(f"Compiling {word} {duration(verdict['saved_s'])} over {options.steps} steps.")
    print(json.dumps(train(verdict, steps=options.train_steps)))


if __name__ == "__main__":
    main()
