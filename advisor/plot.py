"""A picture of the advice: total time over steps, for eager and each measured configuration.

Lines start at the time that compiling takes and rise by the step time; bands are 90 % intervals.
Where a line crosses the eager one, compiling has paid back. Where shape policies were compared, the
panels of `shapes_plot` come below. `png` and `svg` are drawn by matplotlib, `html` by plotly; both
come with the extra `plot`.
"""

from __future__ import annotations

import html
import importlib.util
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from advisor.profiler.errors import PlanError
from advisor.profiler.records import Advice, Interval, TrialKind
from advisor.profiler.units import config_name, count, duration
from advisor.report import Row, rows, verdict
from advisor.shapes_plot import draw_image, html_figure, panels, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

_LIBRARIES = {".png": "matplotlib", ".svg": "matplotlib", ".html": "plotly"}

# Colour-blind safe (Okabe and Ito 2008); eager is grey, the advised configuration comes first.
_EAGER_COLOUR = "#555555"
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")

# A crossing within this share of the plan is too small to see in the whole picture.
_ZOOM_BELOW = 0.2
# The picture is drawn beyond the plan's end for a crossing up to so many plans away.
_LOOK_BEYOND = 4.0
# Inches of the picture, and of the panels below it.
_HEIGHT, _HEIGHT_BELOW = 5.6, 4.2


@dataclass(frozen=True, slots=True)
class Line:
    """Total seconds over steps: straight between its points, and on beyond the last one."""

    name: str
    steps: tuple[float, ...]
    median_s: tuple[float, ...]
    low_s: tuple[float, ...]
    high_s: tuple[float, ...]
    advised: bool = False
    # The step at which this line meets the eager one, if it does.
    crossing: float | None = None


def check_path(path: Path) -> None:
    """Raises `PlanError` when no picture can be written to `path`: suffix, library or folder."""
    library = _LIBRARIES.get(path.suffix.lower())
    if library is None:
        raise PlanError(
            f"--plot {path} has a suffix that is not known",
            mend=f"one of {', '.join(sorted(_LIBRARIES))}",
        )
    if importlib.util.find_spec(library) is None:
        raise PlanError(
            f"--plot needs {library}, which is not installed",
            mend="pip install 'compile-advisor[plot]'",
        )
    if path.is_dir() or not path.absolute().parent.is_dir():
        why = "it is a folder" if path.is_dir() else "its folder is missing"
        raise PlanError(f"--plot {path} cannot be written", why)


def plot(advice: Advice, path: Path) -> None:
    """Writes the picture of an advice to `path`; its suffix says as what.

    Raises `PlanError` for what `check_path` refuses, and when the file cannot be written.
    """
    check_path(path)
    drawn = lines(advice)
    try:
        if path.suffix.lower() == ".html":
            _draw_html(advice, drawn, path)
        else:
            _draw_image(advice, drawn, path)
    except OSError as error:
        raise PlanError(f"--plot {path} cannot be written", error.strerror or str(error)) from error


def lines(advice: Advice) -> list[Line]:
    """Returns the lines of the picture: eager first, then what was measured, best first.

    A configuration whose total is not known (it failed, or was not tried) has no line.
    """
    end = advice.steps
    total = advice.eager_total_s
    eager = Line(
        name="eager",
        steps=(0.0, end),
        median_s=(0.0, total.median),
        low_s=(0.0, total.low),
        high_s=(0.0, total.high),
    )
    drawn = [eager]
    for row in rows(advice):
        line = _line(advice, row, eager)
        if line is not None:
            drawn.append(line)
    return drawn


def _line(advice: Advice, row: Row, eager: Line) -> Line | None:
    trial = row.trial
    if row.config is None or trial is None or trial.kind is not TrialKind.COMPILE:
        return None
    start = _start(advice, row)
    if start is None:
        return None
    total = row.total_s
    if total is None:
        if trial.step_s is None:
            return None
        step, end = trial.step_s, advice.steps
        total = Interval(
            median=start.median + end * step.median,
            low=start.low + end * step.low,
            high=start.high + end * step.high,
        )
    line = Line(
        name=config_name(row.config),
        steps=(0.0, advice.steps),
        median_s=(start.median, total.median),
        low_s=(start.low, total.low),
        high_s=(start.high, total.high),
        advised=row.advised,
    )
    crossing = advice.break_even_step if row.advised else None
    if crossing is not None and 0 < crossing < advice.steps:
        line = _bent(line, eager, crossing)
    else:
        crossing = _crossing(line, eager)
    return Line(
        name=line.name,
        steps=line.steps,
        median_s=line.median_s,
        low_s=line.low_s,
        high_s=line.high_s,
        advised=line.advised,
        crossing=crossing,
    )


def _start(advice: Advice, row: Row) -> Interval | None:
    """Returns the seconds before the first step counts: the compile that this plan pays first."""
    if row.advised and advice.compile_s is not None:
        return advice.compile_s
    seconds = row.trial.cold_start_s if row.trial else None
    return None if seconds is None else Interval(median=seconds, low=seconds, high=seconds)


def _bent(line: Line, eager: Line, crossing: float) -> Line:
    """Returns the line led through the break-even step.

    Restarts come after it, so that the way to the break-even step is not the chord to the total.
    """
    meeting = eager.median_s[1] * crossing / eager.steps[1]
    shift = meeting - _at(line.steps, line.median_s, crossing)
    return Line(
        name=line.name,
        steps=(0.0, crossing, line.steps[1]),
        median_s=(line.median_s[0], meeting, line.median_s[1]),
        low_s=(line.low_s[0], _at(line.steps, line.low_s, crossing) + shift, line.low_s[1]),
        high_s=(line.high_s[0], _at(line.steps, line.high_s, crossing) + shift, line.high_s[1]),
        advised=line.advised,
    )


def _crossing(line: Line, eager: Line) -> float | None:
    """Returns the step at which two straight lines meet; None when compiled never catches up."""
    end = eager.steps[-1]
    gained_per_step = (eager.median_s[-1] - (line.median_s[-1] - line.median_s[0])) / end
    if gained_per_step <= 0:
        return None
    return line.median_s[0] / gained_per_step


def _at(steps: tuple[float, ...], seconds: tuple[float, ...], step: float) -> float:
    """Returns the seconds at a step, along the last piece beyond the last point."""
    piece = 1
    while piece < len(steps) - 1 and step > steps[piece]:
        piece += 1
    share = (step - steps[piece - 1]) / (steps[piece] - steps[piece - 1])
    return seconds[piece - 1] + share * (seconds[piece] - seconds[piece - 1])


def _last_step(drawn: list[Line], end: float) -> float:
    """Returns where the picture ends: after the plan, or after a crossing not far beyond."""
    beyond = [line.crossing for line in drawn if line.crossing and line.crossing > end]
    before = any(line.crossing and line.crossing <= end for line in drawn)
    if not before and beyond and min(beyond) <= _LOOK_BEYOND * end:
        return 1.15 * min(beyond)
    return 1.05 * end


def _zoom(drawn: list[Line], end: float) -> float | None:
    """Returns the last step of a second picture of the crossings, when the first is too coarse."""
    early = [line.crossing for line in drawn if line.crossing and line.crossing < _ZOOM_BELOW * end]
    return 2.2 * max(early) if early else None


def _colours(drawn: list[Line]) -> list[str]:
    return [_EAGER_COLOUR, *(_COLOURS[i % len(_COLOURS)] for i in range(len(drawn) - 1))]


def _label(line: Line, end: float) -> str:
    """Returns a legend entry: `regional default: 20 min, pays back after step 1,840`."""
    text = f"{line.name}: {duration(line.median_s[-1])}"
    if line.crossing is not None:
        pays = "would pay" if line.crossing > end else "pays"
        text += f", {pays} back after step {count(line.crossing)}"
    elif line.name != "eager":
        text += ", never pays back"
    return text


def _draw_image(advice: Advice, drawn: list[Line], path: Path) -> None:
    # Figure without pyplot: no window system is asked for, and no global state is left behind.
    from matplotlib.figure import Figure

    zoom = _zoom(drawn, advice.steps)
    below = panels(advice)
    size = (12.5 if zoom or below else 9.0, _HEIGHT + (_HEIGHT_BELOW if below else 0.0))
    figure = Figure(figsize=size, dpi=130, layout="constrained")
    place: FigureBase = figure
    if below:
        heights = (_HEIGHT, _HEIGHT_BELOW)
        (place,), (bottom,) = figure.subfigures(2, 1, squeeze=False, height_ratios=heights)
        draw_image(bottom, below)
    widths = (3, 2) if zoom else (1,)
    grid = place.subplots(1, len(widths), squeeze=False, width_ratios=widths)
    whole: Axes = grid[0][0]
    _draw_axes(whole, advice, drawn, _last_step(drawn, advice.steps))
    whole.legend(loc="upper left", framealpha=0.9, edgecolor="none", fontsize=9)
    if zoom:
        near: Axes = grid[0][1]
        _draw_axes(near, advice, drawn, zoom)
        near.set_title("where the lines cross", fontsize=10)
        whole.set_title("the whole plan", fontsize=10)
    title = _wrapped(verdict(advice), 120 if zoom or below else 85).replace("$", r"\$")
    figure.suptitle(title, fontsize=11, fontweight="bold", x=0.01, ha="left")
    figure.savefig(path)


def _draw_axes(axes: Axes, advice: Advice, drawn: list[Line], last: float) -> None:
    """Draws all lines from step 0 to `last`, with their bands, crossings and the plan's end."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    top = max(_at(line.steps, line.high_s, last) for line in drawn)
    divisor, unit = time_unit(top)
    for line, colour in zip(drawn, _colours(drawn), strict=True):
        steps = [step for step in line.steps if step < last] + [last]
        median, low, high = (
            [_at(line.steps, seconds, step) / divisor for step in steps]
            for seconds in (line.median_s, line.low_s, line.high_s)
        )
        axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.plot(
            steps,
            median,
            color=colour,
            linewidth=2.4 if line.advised else 1.6,
            linestyle="--" if line.name == "eager" else "-",
            label=_label(line, advice.steps),
        )
        if line.crossing is not None and line.crossing <= last:
            at = _at(line.steps, line.median_s, line.crossing) / divisor
            axes.plot([line.crossing], [at], "o", color=colour, markersize=7, zorder=5)
            axes.vlines(line.crossing, 0, at, color=colour, linewidth=0.8, linestyle=":")
    if advice.steps <= last:
        axes.axvline(advice.steps, color="black", linewidth=1)
        axes.annotate(
            f"end of the plan: step {count(advice.steps)}",
            (advice.steps, 0.02),
            xycoords=("data", "axes fraction"),
            xytext=(-4, 0),
            textcoords="offset points",
            rotation=90,
            ha="right",
            va="bottom",
            fontsize=8,
            bbox={"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 1},
        )
    axes.set_xlim(0, last)
    axes.set_ylim(0, top / divisor * 1.04)
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel(f"total time in {unit}")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: count(value)))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _wrapped(text: str, width: int) -> str:
    return "\n".join(textwrap.wrap(text, width))


def _draw_html(advice: Advice, drawn: list[Line], path: Path) -> None:
    import plotly.graph_objects as go

    last = _last_step(drawn, advice.steps)
    divisor, unit = time_unit(max(_at(line.steps, line.high_s, last) for line in drawn))
    below = panels(advice)
    figure: Any = html_figure(below) if below else go.Figure()
    for line, colour in zip(drawn, _colours(drawn), strict=True):
        _draw_html_line(figure, line, colour, advice.steps, last, divisor)
    figure.add_vline(
        x=advice.steps,
        line={"color": "black", "width": 1},
        annotation_text=f"end of the plan: step {count(advice.steps)}",
        annotation_position="top left",
        **({"row": 1, "col": 1} if below else {}),
    )
    figure.update_layout(
        title="<br>".join(_html(line) for line in _wrapped(verdict(advice), 110).splitlines()),
        xaxis={"title": "optimizer steps", "range": [0, last], "tickformat": ",d"},
        yaxis={"title": f"total time in {unit}", "rangemode": "tozero"},
        template="plotly_white",
        legend={"x": 0.01, "y": 0.99},
        hovermode="closest",
    )
    # The script is put into the file: it opens on machines without a network.
    figure.write_html(path, include_plotlyjs=True)


def _draw_html_line(
    figure: Any, line: Line, colour: str, end: float, last: float, divisor: float
) -> None:
    import plotly.graph_objects as go

    steps = sorted({*(step for step in line.steps if step < last), last, *_even(last)})
    median, low, high = (
        [_at(line.steps, seconds, step) for step in steps]
        for seconds in (line.median_s, line.low_s, line.high_s)
    )
    figure.add_scatter(
        x=steps + steps[::-1],
        y=[value / divisor for value in high + low[::-1]],
        fill="toself",
        fillcolor=colour,
        opacity=0.15,
        line={"width": 0},
        hoverinfo="skip",
        showlegend=False,
        legendgroup=line.name,
    )
    figure.add_trace(
        go.Scatter(
            x=steps,
            y=[value / divisor for value in median],
            mode="lines",
            name=_html(_label(line, end)),
            legendgroup=line.name,
            line={
                "color": colour,
                "width": 3 if line.advised else 2,
                "dash": "dash" if line.name == "eager" else "solid",
            },
            text=[
                f"{_html(line.name)}<br>step {count(step)}: {duration(value)}"
                for step, value in zip(steps, median, strict=True)
            ],
            hoverinfo="text",
        )
    )
    if line.crossing is not None and line.crossing <= last:
        figure.add_scatter(
            x=[line.crossing],
            y=[_at(line.steps, line.median_s, line.crossing) / divisor],
            mode="markers",
            marker={"color": colour, "size": 11},
            text=[f"{_html(line.name)} pays back after step {count(line.crossing)}"],
            hoverinfo="text",
            showlegend=False,
            legendgroup=line.name,
        )


def _even(last: float) -> list[float]:
    """Returns points along the axis that a mouse can find."""
    return [last * i / 40 for i in range(41)]


def _html(text: str) -> str:
    return html.escape(text)
