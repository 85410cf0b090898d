"""What the mend of each cause brings: the same training step before and after it.

Before and after are trials of their own, one after the other, each against plain eager in ABBA
blocks. The gain is the speedup over eager after the mend by that before it, so that the machine's
drift between the two trials cancels; what the edit changes of an eager step stands beside it. All
share one host, which has imported torch, and one compile cache, and with it the precompiled header:
what a recompile took is the time of kernels that no trial before had.

    python bench/mends.py            # all of them, a Markdown table
    python bench/mends.py branch     # those whose names begin so
"""

from __future__ import annotations

import asyncio
import linecache
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from campaigns import REPOSITORY, machine

from advisor.profiler.launch import TrialHost
from advisor.profiler.records import (
    Config,
    Dynamic,
    Measuring,
    Scope,
    Trial,
    TrialKind,
    TrialSpec,
    TrialStatus,
    WorkloadSpec,
)

WORKLOADS = REPOSITORY / "tests" / "workloads"
MEASURING = Measuring(max_warm_up_s=2.0, max_steady_s=6.0, max_diagnose_s=0.0)
DYNAMO = "torch._dynamo.config."
PLAIN = Config()
HEAD = (
    *("cause", "how it is met", "detected", "mend"),
    *("speedup before", "speedup after", "gain of the mend", "eager step, before / after"),
)


@dataclass(frozen=True)
class Mend:
    """A cause, and one mend of it: another function, or another configuration."""

    cause: str
    met: str
    workload: str
    mend: str
    edited: bool = True
    config: Config = PLAIN

    @property
    def name(self) -> str:
        """Its workload's own name."""
        return self.workload.partition(":")[2]


def _setting(**values: str) -> Config:
    return Config(options=tuple((f"{DYNAMO}{name}", text) for name, text in sorted(values.items())))


MENDS: tuple[Mend, ...] = (
    Mend("SCALAR_READ", ".item()", "causes:scalar_read", "keep it a tensor"),
    Mend(
        "SCALAR_READ",
        ".item()",
        "causes:scalar_read",
        "capture_scalar_outputs",
        edited=False,
        config=_setting(capture_scalar_outputs="true"),
    ),
    Mend("DATA_DEPENDENT_BRANCH", "an if", "causes:branch", "torch.where"),
    Mend("DATA_DEPENDENT_BRANCH", "an if in a loop", "causes:branch_in_loop", "torch.where"),
    Mend("DATA_DEPENDENT_BRANCH", "an if in try", "causes:branch_in_try", "torch.where"),
    Mend("DYNAMIC_OUTPUT_SHAPE", "a boolean mask", "causes:masked", "multiply by the mask"),
    Mend(
        "DYNAMIC_OUTPUT_SHAPE",
        "a boolean mask",
        "causes:masked",
        "capture_dynamic_output_shape_ops",
        edited=False,
        config=_setting(capture_dynamic_output_shape_ops="true", capture_scalar_outputs="true"),
    ),
    Mend("PRINT_OR_LOGGING", "print of a tensor", "causes:printing", "after the step"),
    Mend(
        "PRINT_OR_LOGGING",
        "print of a tensor",
        "causes:printing",
        "reorderable_logging_functions",
        edited=False,
        config=_setting(reorderable_logging_functions="builtins.print"),
    ),
    Mend(
        "PRINT_OR_LOGGING",
        "a logger",
        "causes:logs",
        "ignore_logging_functions",
        edited=False,
        config=_setting(ignore_logging_functions="logging.Logger.info"),
    ),
    Mend("UNREGISTERED_OPERATOR", "no fake", "causes:unregistered", "custom_op, register_fake"),
    Mend("FOREIGN_CALL", "SciPy", "causes:by_scipy", "torch.erf"),
    Mend("UNSUPPORTED_PYTHON", "nn.LSTM", "python_breaks:recurrent", "written in torch"),
    Mend(
        "UNSUPPORTED_PYTHON",
        "nn.LSTM",
        "python_breaks:recurrent",
        "allow_rnn",
        edited=False,
        config=_setting(allow_rnn="true"),
    ),
    Mend("AUTOGRAD_FUNCTION", "an if", "python_breaks:autograd_function", "torch.where"),
    Mend("HOOK", "a backward hook", "python_breaks:hooked", "a hook of the tensor"),
    Mend("DISABLED_FUNCTION", "compiler.disable", "python_breaks:disabled", "without the mark"),
    Mend("SKIPPED_FRAME", "skip_frame()", "python_breaks:skipped_frame", "without it"),
    Mend(
        "DISTRIBUTED_WRAPPER",
        "fully_shard",
        "python_breaks:sharded",
        "compile block by block",
        edited=False,
        config=Config(scope=Scope.REGIONAL),
    ),
    Mend("BATCH_SIZE", "a small last batch", "recompiling:batch_size", "drop_last=True"),
    Mend("SHAPE", "lengths", "recompiling:lengths", "mark_dynamic"),
    Mend(
        "SHAPE",
        "lengths",
        "recompiling:lengths",
        "dynamic=True",
        edited=False,
        config=Config(dynamic=Dynamic.TRUE),
    ),
    Mend("PYTHON_NUMBER", "a step number", "recompiling:number", "a tensor"),
    Mend("PYTHON_NUMBER", "picks a module", "recompiling:picking", "stacked weights, a tensor"),
    Mend(
        "PYTHON_NUMBER",
        "picks a module",
        "recompiling:picking",
        "recompile_limit = 16",
        edited=False,
        config=_setting(recompile_limit="16"),
    ),
    Mend("MODULE_ATTRIBUTE", "a counter", "recompiling:counting", "a buffer, advanced outside"),
    Mend(
        "MODULE_ATTRIBUTE",
        "a counter",
        "recompiling:counting",
        "allow_unspec_int_on_nn_module",
        edited=False,
        config=_setting(allow_unspec_int_on_nn_module="true"),
    ),
    Mend("DTYPE_OR_DEVICE", "float64 at times", "recompiling:dtype", "float() before"),
    Mend("STRIDE", "channels_last at times", "recompiling:stride", "contiguous() before"),
    Mend("OPTIMIZER_STATE", "the rate", "recompiling:optimizer_state", "a tensor"),
    Mend("OBJECT_IDENTITY", "an enum argument", "recompiling:identity", "a tensor"),
    Mend("OTHER", "a string argument", "recompiling:text", "a tensor"),
)


async def measured(host: TrialHost, workload: str, config: Config, folder: str) -> Trial:
    """Returns the trial of a workload."""
    file, _, name = workload.partition(":")
    place = WorkloadSpec(target=f"{WORKLOADS / file}.py:{name}", cwd=folder, device="cpu")
    trial = await host.run(
        TrialSpec(
            trial_id=uuid.uuid4().hex,
            kind=TrialKind.COMPILE,
            workload=place,
            folder=folder,
            config=config,
            measuring=MEASURING,
        )
    )
    for warning in trial.warnings:
        print(f"  {warning}", file=sys.stderr)
    return trial


def detected(mend: Mend, trial: Trial) -> str:
    """Returns whether the trial names the cause, and the source line that it names."""
    met = next((one for one in trial.graph_breaks if one.cause.value == mend.cause), None)
    again = next((one for one in trial.recompiles if one.cause.value == mend.cause), None)
    if met is not None:
        return f"yes: `{met.code}`"
    if again is not None:
        return f"yes: `{linecache.getline(again.file, again.line).strip()}`"
    return "no"


def told(trial: Trial) -> str:
    """Returns the speedup over eager, the graphs, and what compiling again took; or what failed."""
    if trial.speedup is None or trial.status is not TrialStatus.OK:
        return f"{trial.status}: {trial.failure.message if trial.failure else ''}"
    lost_s = sum(met.lost_s for met in trial.recompiles)
    again = f", {lost_s:.0f} s recompiling" if trial.recompiles else ""
    limit = ", limit hit" if trial.recompile_limit_hit else ""
    graphs = f"{trial.graphs} graph{'' if trial.graphs == 1 else 's'}"
    return f"{trial.speedup.median:.2f} x, {graphs}{again}{limit}"


def gains(before: Trial, after: Trial) -> tuple[str, str]:
    """Returns the gain of a mend, with the widest interval that both allow, and eager's own."""
    first, then = before.speedup, after.speedup
    eager, eager_then = before.eager_step_s, after.eager_step_s
    if first is None or then is None or eager is None or eager_then is None:
        return "", ""
    gain = f"{then.median / first.median:.2f} x"
    gain += f" ({then.low / first.high:.2f}-{then.high / first.low:.2f})"
    return gain, f"{eager.median / eager_then.median:.2f}"


def row(mend: Mend, before: Trial, after: Trial) -> tuple[str, ...]:
    """Returns the cells of a mend's row."""
    return (
        mend.cause,
        mend.met,
        detected(mend, before),
        mend.mend if mend.edited else f"`{mend.mend}`",
        told(before),
        told(after),
        *gains(before, after),
    )


async def rows_of(wanted: Sequence[Mend]) -> list[tuple[str, ...]]:
    """Returns a row for each mend; what several are measured against is measured once."""
    rows = []
    known: dict[tuple[str, Config], Trial] = {}
    with tempfile.TemporaryDirectory(prefix="mends-") as folder:
        async with TrialHost.start() as host:
            for mend in wanted:
                print(f"{mend.name}: {mend.mend}", file=sys.stderr)
                mended = f"{mend.workload}_mended" if mend.edited else mend.workload
                both = ((mend.workload, PLAIN), (mended, mend.config))
                for workload, config in both:
                    if (workload, config) not in known:
                        trial = await measured(host, workload, config, folder)
                        known[workload, config] = trial
                rows.append(row(mend, *(known[key] for key in both)))
    return rows


def main(names: Sequence[str]) -> None:
    """Measures the mends whose workloads' names begin so (none: all), and prints the table."""
    wanted = [
        mend for mend in MENDS if not names or any(mend.name.startswith(name) for name in names)
    ]
    if not wanted:
        raise SystemExit(f"no mend of that name: {', '.join(sorted({m.name for m in MENDS}))}")
    begun = time.perf_counter()
    rows = asyncio.run(rows_of(wanted))
    print(f"\n{machine()}, {time.perf_counter() - begun:.0f} s\n")
    for cells in (HEAD, ("---",) * len(HEAD), *rows):
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main(sys.argv[1:])
