"""What the report says about lengths that vary: shape policies as lines of a table, and why not.

The table's looks come from the report, so that all of its tables are alike.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from advisor.profiler.records import PolicyTotal, Shapes
from advisor.profiler.units import brief_duration, config_name, count, percent, printable


def policy_name(row: PolicyTotal, shapes: Shapes) -> str:
    """Returns a policy's name, with its configuration where several lines have the same policy."""
    name = row.policy.value
    if sum(other.policy is row.policy for other in shapes.policies) > 1:
        name += f" ({config_name(row.config)})"
    return printable(name)


def is_advised(row: PolicyTotal, shapes: Shapes) -> bool:
    """Returns whether a line is the policy that is advised, and not a failed try of it."""
    return row.policy is shapes.policy and row.total_s is not None and not row.why_not


def fill(table: Table, shapes: Shapes) -> Table:
    """Returns the empty `table` with a line for each policy, in the order given.

    A policy without a total has no figures: that it failed, and why, is said by `why_not` alone.
    """
    table.add_column("Policy", overflow="fold", min_width=16)
    for title in ("Buckets", "Padding", "Compiles", "Total"):
        table.add_column(title, no_wrap=True, justify="right")
    for row in shapes.policies:
        if row.total_s is None and row.why_not:
            continue
        name = Text(policy_name(row, shapes))
        if is_advised(row, shapes):
            name.stylize("bold")
            name.append(", best", style="bold green")
        table.add_row(
            name,
            count(len(row.boundaries)) if row.boundaries else "",
            "" if row.padding_share is None else percent(row.padding_share),
            "" if row.total_s is None else count(row.compiles),
            "" if row.total_s is None else brief_duration(row.total_s.median),
        )
    return table


def why_not(shapes: Shapes) -> Iterator[tuple[str, str]]:
    """Yields the name of each policy that is not advised, and why it is not."""
    for row in shapes.policies:
        if row.why_not:
            yield policy_name(row, shapes), row.why_not
