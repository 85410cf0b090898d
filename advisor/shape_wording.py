"""All sentences about lengths that vary: which shape policy, how many buckets, what they bring."""

from __future__ import annotations

from collections.abc import Sequence

from advisor.models.shape_policies import Option
from advisor.profiler.records import BatchShapes, Config, Dynamic
from advisor.profiler.units import config_name, count, duration, number_of, percent, ratio


def along_lengths(config: Config, lengths: Sequence[int], *, mark_dynamic: bool) -> str:
    """Returns why a configuration is measured at several lengths."""
    how = {Dynamic.TRUE: "one graph for all lengths", Dynamic.FALSE: "a graph for each length"}
    what = how.get(config.dynamic, "one graph once lengths vary")
    if mark_dynamic:
        what = "one graph for a length that is marked as dynamic"
    listed = ", ".join(map(str, lengths))
    return f"{config_name(config)} at lengths {listed}: what {what} takes, with and without buckets"


def no_policy(kind: BatchShapes, batches: int) -> str:
    """Returns why shape policies were not compared."""
    if kind is BatchShapes.CONSTANT:
        return (
            f"All {count(batches)} batches that were seen have the same shapes, so there is no "
            "shape policy to choose, and none was measured."
        )
    if kind is BatchShapes.ROWS:
        return (
            f"Of {count(batches)} batches that were seen only the last of an epoch has fewer "
            "rows: one more compile at most, so there is no shape policy to choose."
        )
    if kind is BatchShapes.SEVERAL:
        return (
            "Several sizes of the batches vary on their own, so there is no one length to sort or "
            "pad by: only dynamic shapes can serve them all."
        )
    return "The plan is too short for any shape policy to pay, so none was measured."


def policy_faster(option: Option) -> str:
    """Returns the reason that speaks of the step time under a shape policy."""
    bill = option.bill
    parts = ""
    if option.bucketed and option.config is not None:
        rest = bill.speedup.median / option.padding_speedup
        parts = f": {option.padding_speedup:.2f}x by less padding, {rest:.2f}x by compiling"
    return (
        f"Over the lengths of the data a step takes {duration(bill.step_s.median)} instead of "
        f"{duration(bill.eager_step_s.median)}, {ratio(bill.speedup)} faster{parts}."
    )


def buckets(option: Option, now: Option) -> str:
    """Returns the reason that speaks of the boundaries and of padding."""
    edges = ", ".join(map(str, option.boundaries))
    return (
        f"{number_of(len(option.boundaries), 'bucket')} up to {edges}: padding falls from "
        f"{percent(now.epoch.padding_share)} to {percent(option.epoch.padding_share)} of the "
        "tokens."
    )


def limit_raised(compiles: int, limit: int) -> str:
    """Returns why the advice raises the recompile limit."""
    return (
        f"It makes {count(compiles)} graphs, more than the recompile limit of {limit} allows: the "
        "lines above raise it, or the rest would silently run eager."
    )


def per_length_limit(option: Option, limit: int, *, measured: bool) -> str:
    """Returns what happens when each length of the batches as they are is compiled for."""
    how = "take" if measured else "would take about"
    step = count((option.limit_step or 0) + 1)
    return (
        f"Compiling for each length alone would hit the recompile limit at step {step}: its "
        f"{limit} compiles {how} {duration(option.compile_s)}, and every further length runs "
        "eager from then on, silently."
    )


def policy_slower(total_s: float, winner_s: float) -> str:
    """Returns by how much a policy is slower than the advised one."""
    return f"takes {duration(max(0.0, total_s - winner_s))} more"


def buckets_save_little(saves_s: float, total_s: float) -> str:
    """Returns why buckets that would be faster are not advised."""
    return (
        f"would save {duration(saves_s)} more, {percent(saves_s / total_s)}: too little for "
        "changing which samples meet in a batch"
    )


GENERATION = (
    "Generating text meets a new length with each token: keep the uncompiled model for it, or its "
    "lengths recompile on top of those of training."
)
