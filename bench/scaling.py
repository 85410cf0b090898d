"""Does the model of more ranks hold? Predicted from 2 ranks, then measured: 4 ranks, and 1.

    python bench/scaling.py

The transformer of examples/ranks.py on Gloo ranks of this machine, under DDP and FSDP2. A machine
of the plan is a core here: 2 ranks on one core are tried, 4 ranks on two cores are the two machines
that were planned, and have the same share of a core each. Downwards, 2 ranks on two cores are
tried, and 1 rank on one core is what is left without communication. What is measured has to lie in
the interval that was predicted, or overlap it with its own.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from campaigns import machine, verdict

from advisor.models.economics import DRAWS
from advisor.models.plan import Plan
from advisor.models.scaling import Spread, spread
from advisor.profiler.launch import TrialHost
from advisor.profiler.records import (
    Config,
    Interval,
    Order,
    Scope,
    Trial,
    TrialKind,
    TrialSpec,
    TrialStatus,
    WorkloadSpec,
    Wrapper,
)
from advisor.profiler.statistics import Z_95, Array, interval

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "ranks.py"
WRAPPERS = (Wrapper.DDP, Wrapper.FSDP2)
COMPILED = Config(scope=Scope.MODEL, order=Order.WRAP_FIRST)
HEAD = ("wrapper", "tried", "planned", "step", "communication tried", "predicted", "measured")


def main() -> None:
    """Prints the table and ends with 1 when a prediction misses."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise SystemExit("two cores are needed: one stands for a machine of the plan")
    print(machine())
    print("| " + " | ".join(HEAD) + " |")
    print("|" + "---|" * len(HEAD))
    found = [asyncio.run(_rows(wrapper, cores)) for wrapper in WRAPPERS]
    verdict("what was measured lies in the interval predicted", ok=all(found))


async def _rows(wrapper: Wrapper, cores: list[int]) -> bool:
    """Prints the rows of one wrapper; returns whether all predictions hold."""
    with tempfile.TemporaryDirectory(prefix="advisor-scaling-") as folder:
        small = await _measured(Path(folder), wrapper, 2, cores[:1], compiles=True)
        large = await _measured(Path(folder), wrapper, 4, cores, compiles=True)
        wide = await _measured(Path(folder), wrapper, 2, cores, compiles=False)
        single = await _measured(Path(folder), wrapper, 1, cores[:1], compiles=False)
    upwards = _spread(small[0], 2, Plan(steps=1, world_size=4, network_bytes_per_s=1e15), 2)
    downwards = _spread(wide[0], 2, replace(Plan(steps=1, world_size=2), world_size=1), 1)
    found = [
        _row(wrapper, "2 on 1 core", "4 on 2", "eager", small, upwards, 0, large[0].eager_step_s),
        _row(wrapper, "2 on 1 core", "4 on 2", "compiled", small, upwards, 1, large[1].step_s),
        _row(wrapper, "2 on 2", "1 on 1", "eager", wide, downwards, 0, single[0].eager_step_s),
    ]
    return all(found)


def _spread(eager: Trial, ranks: int, plan: Plan, machines: int) -> Spread:
    assert eager.eager_step_s is not None and eager.communication is not None
    found = spread(eager.eager_step_s, eager.communication, ranks, plan, machines=machines)
    if found is None:
        raise SystemExit("the share of communication could not be measured")
    return found


def _row(  # noqa: PLR0913 - the cells of a row
    wrapper: Wrapper,
    tried: str,
    planned: str,
    step: str,
    trials: tuple[Trial, ...],
    added: Spread,
    which: int,
    measured: Interval | None,
) -> bool:
    trial = trials[which]
    now = trial.eager_step_s if which == 0 else trial.step_s
    assert now is not None and measured is not None
    predicted = interval(_draws(now) + added.added_s)
    said = trials[0].communication
    share = said.share if said is not None and said.share is not None else float("nan")
    cells = (wrapper, tried, planned, step, f"{share:.0%}", _ms(predicted), _ms(measured))
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    return predicted.low <= measured.high and measured.low <= predicted.high


def _draws(step_s: Interval) -> Array:
    """Returns draws of a step time that was measured: log-normal, by its interval."""
    sigma = np.log(step_s.high / step_s.low) / (2 * Z_95)
    noise = np.random.default_rng(3).standard_normal(DRAWS)
    return np.asarray(step_s.median * np.exp(sigma * noise))


def _ms(found: Interval) -> str:
    return f"{found.median * 1e3:.1f} ms ({found.low * 1e3:.1f}-{found.high * 1e3:.1f})"


async def _measured(
    folder: Path, wrapper: Wrapper, ranks: int, cores: list[int], *, compiles: bool
) -> tuple[Trial, ...]:
    """Returns the eager trial, and the compiled one, of so many ranks on these cores alone."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(cores))
    try:
        async with TrialHost.start() as host:
            return tuple(
                [
                    _fine(await host.run(spec, lambda _: None))
                    for spec in _specs(folder, wrapper, ranks, compiles)
                ]
            )
    finally:
        os.sched_setaffinity(0, before)


def _specs(folder: Path, wrapper: Wrapper, ranks: int, compiles: bool) -> Iterator[TrialSpec]:
    workload = WorkloadSpec(
        target=f"{EXAMPLE}:build",
        cwd=str(folder),
        device="cpu",
        ranks=ranks,
        wrapper=wrapper if ranks > 1 else Wrapper.OWN,
    )
    for config in (None, COMPILED) if compiles else (None,):
        name = uuid.uuid4().hex
        kind = TrialKind.EAGER if config is None else TrialKind.COMPILE
        yield TrialSpec(
            trial_id=name, kind=kind, workload=workload, folder=str(folder / name), config=config
        )


def _fine(trial: Trial) -> Trial:
    if trial.status is not TrialStatus.OK:
        raise SystemExit(trial.failure.message if trial.failure else str(trial.status))
    return trial


if __name__ == "__main__":
    main()
