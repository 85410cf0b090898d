"""Every sentence about an estimate."""

from __future__ import annotations

from collections.abc import Sequence

from advisor.job_facts import ConfigEstimate, EstimateRequest
from advisor.models.plan import Plan
from advisor.profiler.records import Interval
from advisor.profiler.units import config_name, duration, percent

# What a few draws cannot tell from certainty.
_SURE = 0.99


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
    else:
        said.append(_whether_it_pays(plan, first, best, eager_total))
    return tuple(said)


def _whether_it_pays(
    plan: Plan, first: ConfigEstimate, best: ConfigEstimate | None, eager_total: Interval
) -> str:
    chosen = best or first
    likely = f"it saves time with a probability of {probability(chosen.p_saves or 0.0)}"
    total_s = chosen.total_s.median if chosen.total_s else 0.0
    totals = (
        f"the plan takes about {duration(total_s)} with it, {duration(eager_total.median)} eager"
    )
    if best is not None or (first.p_saves or 0.0) < 1 - plan.confidence:
        return f"{likely}: {totals}"
    return (
        f"{likely}, less than the {percent(plan.confidence)} asked for: {totals}; measuring"
        " (`advise run`) tells"
    )


def probability(share: float) -> str:
    """Returns a probability as far as draws can tell it: `94 %`, `more than 99 %`."""
    if share > _SURE:
        return f"more than {percent(_SURE)}"
    return f"less than {percent(1 - _SURE)}" if share < 1 - _SURE else percent(share)


def _between(interval: Interval) -> str:
    """Returns an interval of factors, such as `1.21 (0.98 to 1.50)`."""
    return f"{interval.median:.2f} ({interval.low:.2f} to {interval.high:.2f})"
