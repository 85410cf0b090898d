"""Every sentence about an estimate."""

from __future__ import annotations

from collections.abc import Sequence

from advisor.job_facts import ConfigEstimate, EstimateRequest
from advisor.profiler.records import Interval
from advisor.profiler.units import config_name, duration


def reasons(
    request: EstimateRequest,
    estimates: Sequence[ConfigEstimate],
    best: ConfigEstimate | None,
    eager_total: Interval | None,
) -> tuple[str, ...]:
    """Returns why it would be advised or not, with numbers, the most important first."""
    plan, first = request.plan, estimates[0]
    said = [
        f"{config_name(first.config)} would make a step {_between(first.speedup)} times as fast"
        f" (90 %), after compiling for {duration(first.compile_s.median)}"
        f" ({duration(first.compile_s.low)} to {duration(first.compile_s.high)})"
    ]
    if plan is None:
        said.append("without a plan (--steps, --hours) nothing is said of whether it pays")
    elif eager_total is None:
        said.append(
            "the time of an eager step is not known, so totals are not: give --eager-step, or a"
            " workload whose step can be counted"
        )
    elif best is not None:
        said.append(
            f"it saves time with a probability of {best.p_saves:.0%}: the plan takes about"
            f" {duration(best.total_s.median if best.total_s else 0)} instead of"
            f" {duration(eager_total.median)}"
        )
    else:
        said.append(
            f"it saves time with a probability of {first.p_saves or 0:.0%} only, below the"
            f" {plan.confidence:.0%} asked for: measure it (`advise run`) before relying on it"
        )
    return tuple(said)


def _between(interval: Interval) -> str:
    """Returns an interval of factors, such as `1.21 (0.98 to 1.50)`."""
    return f"{interval.median:.2f} ({interval.low:.2f} to {interval.high:.2f})"
