"""What `advise estimate`, `devices` and `corpus` print."""

from __future__ import annotations

import math
from collections import defaultdict

from rich.console import RenderableType
from rich.text import Text

from advisor.estimate_wording import probability
from advisor.job_facts import ConfigEstimate, EstimateResponse
from advisor.models.devices import DEVICES, Device
from advisor.models.families import FAMILIES, family_of
from advisor.models.plan import Plan
from advisor.profiler.errors import PlanError
from advisor.profiler.units import brief_duration, config_name, count, number_of, percent, ratio
from advisor.report import grid, print_plain


def print_estimate(response: EstimateResponse, plan: Plan | None) -> None:
    """Prints the verdict, the table, the reasons, and what the estimate does not know."""
    parts: list[RenderableType] = []
    if plan is not None:
        parts += [Text(_verdict(response, plan), style="bold"), Text()]
    parts.append(_table(response))
    parts.append(Text())
    parts += [Text(f"- {reason}.") for reason in response.reasons]
    if response.beyond:
        parts.append(Text())
        parts.append(Text("Beyond what was seen, so the intervals are wider:"))
        parts += [Text(f"- {what}.") for what in response.beyond]
    own = response.outcomes
    learnt = f" and {number_of(own, 'own outcome')}" if own else ""
    parts.append(Text())
    parts.append(Text(f"Estimated from the corpus{learnt}, not measured: `advise run` measures."))
    print_plain(*parts)


def devices_table() -> RenderableType:
    """Returns the devices with their figures as a table."""
    table = grid()
    table.add_column("Device", no_wrap=True)
    for name in ("GiB", "fp32 TFLOP/s", "16 bit", "GB/s"):
        table.add_column(name, justify="right")
    table.add_column("Source", overflow="fold")
    for device in DEVICES.values():
        table.add_row(
            device.name,
            f"{device.memory_bytes / 2**30:.0f}",
            f"{device.float32_flops / 1e12:.3g}",
            f"{device.flops('fp16') / 1e12:.4g}",
            f"{device.bandwidth_bytes_per_s / 1e9:.0f}",
            device.source,
        )
    return table


def corpus_table(family: str | None, device: str | None) -> RenderableType:
    """Returns how many rows there are of each device, task and mode, and what they gained.

    Raises `PlanError` when there is none.
    """
    from advisor.models import corpus

    rows = [row for row in corpus.all_rows() if row.fit and row.speedup]
    if family is not None:
        wanted = family_of(family)
        rows = [row for row in rows if wanted and row.family == wanted]
    if device is not None:
        name = Device.from_name(device).name
        rows = [row for row in rows if row.device == name]
    if not rows:
        raise PlanError("no row of the corpus matches", mend=f"families are {', '.join(FAMILIES)}")
    groups: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for row in rows:
        groups[row.device, row.task, row.mode].append(row.speedup or math.nan)
    table = grid()
    for name, justify in (
        ("Device", "left"), ("Task", "left"), ("Mode", "left"), ("Rows", "right"),
        ("Speedup", "right"), ("90 % of the rows", "right"),
    ):  # fmt: skip
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for key, values in sorted(groups.items(), key=lambda each: -len(each[1])):
        ordered = sorted(values)
        at = [ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.05, 0.95)]
        middle = ordered[len(ordered) // 2]
        table.add_row(*key, count(len(values)), f"{middle:.2f}x", f"{at[0]:.2f}-{at[1]:.2f}")
    return table


def _verdict(response: EstimateResponse, plan: Plan) -> str:
    if response.eager_total_s is None:
        return "NO VERDICT: the time of an eager step is not known."
    if response.enable and response.config is not None:
        best = response.estimates[0]
        return (
            f"WOULD ENABLE torch.compile, {config_name(response.config)}: saves time with"
            f" a probability of {probability(best.p_saves or 0)}."
        )
    best = max(response.estimates, key=lambda each: each.p_saves or 0.0)
    return (
        f"WOULD STAY EAGER: the most likely gain, {config_name(best.config)}, saves time with"
        f" a probability of {probability(best.p_saves or 0)}, {percent(plan.confidence)} are asked"
        " for."
    )


def _table(response: EstimateResponse) -> RenderableType:
    table = grid()
    table.add_column("Configuration", overflow="fold", min_width=16)
    for name in ("Speedup (90 %)", "Compile", "Pays after", "Total", "P(saves)"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in response.estimates:
        table.add_row(*_cells(each))
    return table


def _cells(each: ConfigEstimate) -> tuple[str, ...]:
    return (
        config_name(each.config),
        ratio(each.speedup),
        brief_duration(each.compile_s.median),
        "" if each.break_even_step is None else count(math.ceil(each.break_even_step)),
        "" if each.total_s is None else brief_duration(each.total_s.median),
        "" if each.p_saves is None else probability(each.p_saves),
    )
