"""Two more panels of the picture, where shape policies were compared for lengths that vary.

A histogram of the lengths with the boundaries advised, and total time over the number of static
buckets against the other policies. What they show is gathered first, then drawn by either library.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from advisor.profiler.records import Advice, BucketTotal, Lengths, ShapePolicy, Shapes
from advisor.profiler.units import brief_duration, count, number_of, percent
from advisor.shapes_report import is_advised, policy_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

_MOST_BARS = 60
# More boundaries than these are drawn without their numbers.
_MOST_NUMBERS = 16
# A policy that takes so many times what the others do would press their lines together.
_BEYOND = 1.5
# Distance of two labels, as a share of the panel's height.
_LABEL_GAP = 0.052

_BARS = "#A9B7C6"
_BOUNDARIES = "#D55E00"
_CURVE = "#0072B2"
_RIVALS = "#555555"
_ADVISED = "#009E73"


@dataclass(frozen=True, slots=True)
class Histogram:
    """Bar `i` counts the lengths above `edges[i]` up to `edges[i + 1]`, as buckets do."""

    edges: tuple[int, ...]
    heights: tuple[int, ...]
    boundaries: tuple[int, ...]
    title: str
    # What is counted: samples, or batches where the lengths of samples are not known.
    counted: str = "samples"


@dataclass(frozen=True, slots=True)
class Rival:
    """The total of a policy that has no number of static buckets to choose."""

    name: str
    total_s: float
    advised: bool = False


@dataclass(frozen=True, slots=True)
class Totals:
    """Seconds of the plan over the number of static buckets, and those of the other policies."""

    curve: tuple[BucketTotal, ...]
    rivals: tuple[Rival, ...]

    @property
    def least(self) -> BucketTotal:
        """The number of buckets with the smallest total."""
        return min(self.curve, key=total_s)

    def view(self) -> tuple[float, float]:
        """Returns the least and the most seconds to show."""
        low = min(one.steps_s for one in self.curve)
        most = _BEYOND * max(map(total_s, self.curve))
        seen = [rival.total_s for rival in self.rivals if rival.total_s <= most]
        low, high = min([low, *seen]), max([*map(total_s, self.curve), *seen])
        margin = 0.08 * (high - low) or 0.08 * high or 1.0
        return max(0.0, low - margin), high + margin


@dataclass(frozen=True, slots=True)
class Panels:
    """What the panels below the picture show; at least one of them."""

    histogram: Histogram | None
    totals: Totals | None


def total_s(one: BucketTotal) -> float:
    """Returns the seconds of steps and compiles together."""
    return one.steps_s + one.compile_s


def time_unit(seconds: float) -> tuple[float, str]:
    """Returns the divisor and name of the unit that an axis up to `seconds` reads best in."""
    for limit, divisor, name in ((180, 1.0, "seconds"), (10_800, 60.0, "minutes")):
        if seconds < limit:
            return divisor, name
    return (3600.0, "hours") if seconds < 3 * 86_400 else (86_400.0, "days")


def panels(advice: Advice) -> Panels | None:
    """Returns what to draw below the picture; None where no policies were compared."""
    shapes = advice.shapes
    if shapes is None or not shapes.policies:
        return None
    lengths = advice.workload.lengths if advice.workload else None
    shown = Panels(
        histogram=_histogram(lengths, shapes) if lengths is not None and lengths.values else None,
        totals=_totals(shapes) if shapes.bucket_totals else None,
    )
    return shown if shown.histogram or shown.totals else None


def _histogram(lengths: Lengths, shapes: Shapes) -> Histogram:
    first, last = lengths.values[0], lengths.values[-1]
    # Lengths that are all multiples of 8 would leave gaps between bars of another width.
    unit = math.gcd(*(value - first for value in lengths.values)) or 1
    width = unit * math.ceil(((last - first) // unit + 1) / _MOST_BARS)
    heights = [0] * ((last - first) // width + 1)
    for value, number in zip(lengths.values, lengths.counts, strict=True):
        heights[(value - first) // width] += number
    # The first bar ends at its longest length, so that a boundary is drawn after what it holds.
    start = first - unit
    counted = "batches" if lengths.whole_batches else "samples"
    title = f"Lengths of {count(sum(heights))} {counted}"
    return Histogram(
        edges=tuple(start + width * i for i in range(len(heights) + 1)),
        heights=tuple(heights),
        boundaries=shapes.boundaries,
        title=title + _padding(shapes),
        counted=counted,
    )


def _padding(shapes: Shapes) -> str:
    """Returns the end of a title: `: padding 38 % before, 12 % after`."""
    shares = ((shapes.padding_share_now, "before"), (shapes.padding_share, "after"))
    told = ", ".join(f"{percent(share)} {when}" for share, when in shares if share is not None)
    return f": padding {told}" if told else ""


def _totals(shapes: Shapes) -> Totals:
    rivals = [
        Rival(
            name=policy_name(row, shapes),
            total_s=row.total_s.median,
            advised=is_advised(row, shapes),
        )
        for row in shapes.policies
        # Static buckets are the curve itself.
        if row.total_s is not None and row.policy is not ShapePolicy.BUCKETS
    ]
    curve = sorted(shapes.bucket_totals, key=lambda one: one.buckets)
    return Totals(curve=tuple(curve), rivals=tuple(rivals))


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Returns places from 0 to 1 moved apart to at least `gap`, in their order."""
    order = sorted(range(len(places)), key=places.__getitem__)
    found = list(places)
    for lower, upper in pairwise(order):
        found[upper] = max(found[upper], found[lower] + gap)
    if found:
        found[order[-1]] = min(found[order[-1]], 1.0)
    for upper, lower in pairwise(reversed(order)):
        found[lower] = min(found[lower], found[upper] - gap)
    return found


def _labels(totals: Totals) -> list[tuple[Rival, float, str]]:
    """Returns each of the other policies with the height and the text of its label."""
    low, high = totals.view()
    places = [min(1.0, (rival.total_s - low) / (high - low)) for rival in totals.rivals]
    texts = [
        f"{rival.name}: {brief_duration(rival.total_s)}"
        + (", not in view" if rival.total_s > high else "")
        for rival in totals.rivals
    ]
    return list(zip(totals.rivals, spread(places, _LABEL_GAP), texts, strict=True))


def _least(totals: Totals) -> str:
    least = totals.least
    return f"least: {number_of(least.buckets, 'bucket')}, {brief_duration(total_s(least))}"


_TOTALS_TITLE = "Total time by number of static buckets"
_CURVES = ("steps and compiles", "steps alone")


def draw_image(figure: FigureBase, shown: Panels) -> None:
    """Draws the panels side by side with matplotlib."""
    both = shown.histogram is not None and shown.totals is not None
    axes = figure.subplots(1, 2 if both else 1, squeeze=False)[0]
    if shown.histogram is not None:
        _draw_histogram(axes[0], shown.histogram)
    if shown.totals is not None:
        _draw_totals(axes[-1], shown.totals)


def _draw_histogram(axes: Axes, shown: Histogram) -> None:
    from matplotlib.ticker import FuncFormatter

    widths = [end - start for start, end in pairwise(shown.edges)]
    axes.bar(shown.edges[:-1], shown.heights, widths, align="edge", color=_BARS, linewidth=0)
    numbered = len(shown.boundaries) <= _MOST_NUMBERS
    for i, boundary in enumerate(shown.boundaries):
        label = "boundaries advised" if i == 0 else None
        axes.axvline(boundary, color=_BOUNDARIES, linewidth=1.2, label=label)
        if numbered:
            axes.annotate(
                str(boundary),
                (boundary, 0.98),
                xycoords=("data", "axes fraction"),
                xytext=(-2, 0),
                textcoords="offset points",
                rotation=90,
                ha="right",
                va="top",
                fontsize=7,
                color=_BOUNDARIES,
            )
    axes.set_ylim(0, 1.3 * max(shown.heights))
    axes.set_title(_plain(shown.title), fontsize=10)
    axes.set_xlabel("length")
    axes.set_ylabel(shown.counted)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    if shown.boundaries:
        axes.legend(loc="center right", framealpha=0.9, edgecolor="none", fontsize=8)
    axes.grid(alpha=0.25, axis="y")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_totals(axes: Axes, shown: Totals) -> None:
    from matplotlib.ticker import MaxNLocator

    low, high = shown.view()
    divisor, unit = time_unit(high)
    numbers = [one.buckets for one in shown.curve]
    totals = [total_s(one) / divisor for one in shown.curve]
    steps = [one.steps_s / divisor for one in shown.curve]
    axes.plot(numbers, totals, "o-", color=_CURVE, linewidth=2.4, markersize=3.5, label=_CURVES[0])
    axes.plot(numbers, steps, ".-", color=_CURVE, linewidth=1, markersize=3, label=_CURVES[1])
    least = ([shown.least.buckets], [total_s(shown.least) / divisor])
    axes.plot(*least, "o", color=_CURVE, markersize=9, zorder=5, label=_least(shown))
    for rival, height, text in _labels(shown):
        colour = _ADVISED if rival.advised else _RIVALS
        axes.axhline(rival.total_s / divisor, color=colour, linewidth=1, linestyle="--", zorder=1)
        axes.text(
            1.01,
            height,
            _plain(text),
            transform=axes.transAxes,
            va="center",
            fontsize=8,
            color=colour,
            fontweight="bold" if rival.advised else "normal",
        )
    axes.set_ylim(low / divisor, high / divisor)
    axes.set_title(_TOTALS_TITLE, fontsize=10)
    axes.set_xlabel("static buckets")
    axes.set_ylabel(f"total time in {unit}")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    axes.legend(loc="best", framealpha=0.9, edgecolor="none", fontsize=8)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _plain(text: str) -> str:
    """Returns a text that matplotlib does not take for mathematics."""
    return text.replace("$", r"\$")


def html_figure(shown: Panels) -> Any:
    """Returns a plotly figure with the panels drawn, and its first place left to the picture."""
    from plotly.subplots import make_subplots

    both = shown.histogram is not None and shown.totals is not None
    second = [{}, {}] if both else [{"colspan": 2}, None]
    titles = [shown.histogram.title] if shown.histogram else []
    titles += [_TOTALS_TITLE] if shown.totals else []
    figure: Any = make_subplots(
        rows=2,
        cols=2,
        specs=[[{"colspan": 2}, None], second],
        row_heights=[0.58, 0.42],
        vertical_spacing=0.12,
        horizontal_spacing=0.08,
        subplot_titles=["", *map(html.escape, titles)],
    )
    if shown.histogram is not None:
        _html_histogram(figure, shown.histogram)
    if shown.totals is not None:
        _html_totals(figure, shown.totals, 2 if both else 1)
    figure.update_layout(height=1000, margin={"r": 230 if shown.totals else 80})
    return figure


def _html_histogram(figure: Any, shown: Histogram) -> None:
    place = {"row": 2, "col": 1}
    spans = list(pairwise(shown.edges))
    figure.add_bar(
        x=[(start + end) / 2 for start, end in spans],
        y=list(shown.heights),
        width=[end - start for start, end in spans],
        marker={"color": _BARS, "line": {"width": 0}},
        text=[
            f"{start + 1:,} to {end:,}: {count(number)} {html.escape(shown.counted)}"
            for (start, end), number in zip(spans, shown.heights, strict=True)
        ],
        textposition="none",
        hoverinfo="text",
        showlegend=False,
        **place,
    )
    numbered = len(shown.boundaries) <= _MOST_NUMBERS
    for boundary in shown.boundaries:
        figure.add_vline(
            x=boundary,
            line={"color": _BOUNDARIES, "width": 1.5},
            annotation_text=str(boundary) if numbered else "",
            annotation_position="top left",
            annotation_textangle=-90,
            annotation_font={"color": _BOUNDARIES, "size": 10},
            **place,
        )
    figure.update_xaxes(title="length", **place)
    figure.update_yaxes(
        title=html.escape(shown.counted), range=[0, 1.2 * max(shown.heights)], **place
    )


def _html_totals(figure: Any, shown: Totals, column: int) -> None:
    place = {"row": 2, "col": column}
    low, high = shown.view()
    divisor, unit = time_unit(high)
    numbers = [one.buckets for one in shown.curve]
    for name, seconds, width in (
        (_CURVES[0], [total_s(one) for one in shown.curve], 3),
        (_CURVES[1], [one.steps_s for one in shown.curve], 1),
    ):
        figure.add_scatter(
            x=numbers,
            y=[value / divisor for value in seconds],
            mode="lines+markers",
            name=name,
            line={"color": _CURVE, "width": width},
            text=[
                f"{number_of(number, 'bucket')}, {name}: {brief_duration(value)}"
                for number, value in zip(numbers, seconds, strict=True)
            ],
            hoverinfo="text",
            legend="legend2",
            **place,
        )
    figure.add_scatter(
        x=[shown.least.buckets],
        y=[total_s(shown.least) / divisor],
        mode="markers",
        name=_least(shown),
        marker={"color": _CURVE, "size": 13},
        text=[_least(shown)],
        hoverinfo="text",
        legend="legend2",
        **place,
    )
    for rival, height, text in _labels(shown):
        colour = _ADVISED if rival.advised else _RIVALS
        if rival.total_s <= high:
            figure.add_hline(
                y=rival.total_s / divisor,
                line={"color": colour, "width": 1, "dash": "dash"},
                **place,
            )
        figure.add_annotation(
            text=html.escape(text),
            x=1.01,
            xref="x domain",
            xanchor="left",
            y=height,
            yref="y domain",
            showarrow=False,
            font={"color": colour, "size": 11},
            **place,
        )
    every = math.ceil(numbers[-1] / 10)
    figure.update_xaxes(title="static buckets", tick0=0, dtick=every, **place)
    figure.update_yaxes(
        title=f"total time in {unit}", range=[low / divisor, high / divisor], **place
    )
    figure.update_layout(
        legend2={"x": 0.99, "y": 0.36, "xanchor": "right", "yanchor": "top", "font": {"size": 10}}
    )
