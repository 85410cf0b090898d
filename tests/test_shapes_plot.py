"""The panels about lengths: right bars and lines, drawn in every kind of picture."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from advisor.plot import plot
from advisor.profiler.records import (
    Advice,
    BucketTotal,
    Interval,
    Lengths,
    PolicyTotal,
    ShapePolicy,
    Shapes,
    WorkloadFacts,
)
from advisor.shapes_plot import Panels, Rival, draw_image, html_figure, panels, spread

BOUNDARIES = (32, 64, 128, 512)
LENGTHS = Lengths(
    values=tuple(range(5, 500)), counts=tuple(1 + 200_000 // (n * n) for n in range(5, 500))
)


def _around(median: float) -> Interval:
    return Interval(median=median, low=0.97 * median, high=1.03 * median)


def _policy(policy: ShapePolicy, total_s: float | None, why_not: str = "slower") -> PolicyTotal:
    return PolicyTotal(
        policy=policy,
        total_s=None if total_s is None else _around(total_s),
        compile_s=20.0,
        compiles=1,
        why_not=why_not,
    )


SHAPES = Shapes(
    policy=ShapePolicy.BUCKETS,
    boundaries=BOUNDARIES,
    padding_share=0.118,
    padding_share_now=0.384,
    policies=(
        _policy(ShapePolicy.BUCKETS, 1170.0, ""),
        _policy(ShapePolicy.DYNAMIC_BUCKETS, 1290.0),
        _policy(ShapePolicy.DYNAMIC, 1500.0),
        _policy(ShapePolicy.AUTOMATIC, 1510.0),
        _policy(ShapePolicy.EAGER, 1800.0),
        _policy(ShapePolicy.STATIC_PER_LENGTH, 90_000.0),
        _policy(ShapePolicy.MARK_DYNAMIC, None),
    ),
    bucket_totals=tuple(
        BucketTotal(buckets=k, steps_s=950 + 500 / k, compile_s=10 + 20.0 * k) for k in range(1, 9)
    ),
)


def _advice(shapes: Shapes | None, lengths: Lengths | None = LENGTHS) -> Advice:
    return Advice(
        advice_id="a1",
        created="2026-11-01T10:00:00Z",
        enable=True,
        target="train.py:build",
        config=None,
        code="",
        speedup=_around(1.5),
        compile_s=_around(90.0),
        saved_s=_around(600.0),
        eager_total_s=_around(1800.0),
        advised_total_s=_around(1170.0),
        break_even_step=2000.0,
        p_saves=0.99,
        reasons=(),
        steps=20_000,
        shapes=shapes,
        workload=WorkloadFacts(
            fingerprint="ab12",
            model_class="Bert",
            parameters=1,
            trainable_parameters=1,
            optimizer="AdamW",
            dtype="float32",
            shapes=(),
            lengths=lengths,
        ),
    )


def _panels(shapes: Shapes = SHAPES, lengths: Lengths | None = LENGTHS) -> Panels:
    found = panels(_advice(shapes, lengths))
    assert found is not None
    return found


def test_histogram_has_at_most_60_bars_that_hold_every_sample() -> None:
    shown = _panels().histogram
    assert shown is not None
    assert len(shown.heights) <= 60
    assert sum(shown.heights) == sum(LENGTHS.counts)
    assert shown.edges[0] == 4
    assert shown.edges[-1] >= 499
    assert (
        shown.title
        == f"Lengths of {sum(LENGTHS.counts):,} samples: padding 38 % before, 12 % after"
    )


@pytest.mark.parametrize(
    ("values", "edges", "heights"),
    [
        ((7,), (6, 7), (1,)),
        ((8, 16, 32), (0, 8, 16, 24, 32), (1, 2, 0, 3)),
        ((1, 1 << 24), None, None),
    ],
)
def test_bars_end_at_lengths_so_that_boundaries_come_after_what_they_hold(
    values: tuple[int, ...], edges: tuple[int, ...] | None, heights: tuple[int, ...] | None
) -> None:
    lengths = Lengths(values=values, counts=tuple(range(1, len(values) + 1)))
    shown = _panels(lengths=lengths).histogram
    assert shown is not None
    assert len(shown.heights) <= 60
    if edges is not None:
        assert (shown.edges, shown.heights) == (edges, heights)


def test_batches_are_counted_where_lengths_of_samples_are_not_known() -> None:
    shapes = dataclasses.replace(SHAPES, padding_share=None, padding_share_now=None)
    shown = _panels(shapes, Lengths(values=(8, 16), counts=(3, 2), whole_batches=True)).histogram
    assert shown is not None
    assert (shown.title, shown.counted) == ("Lengths of 5 batches", "batches")


def test_totals_mark_the_least_and_leave_out_the_curve_and_what_was_not_measured() -> None:
    shown = _panels().totals
    assert shown is not None
    assert shown.least.buckets == 5
    assert [rival.name for rival in shown.rivals] == [
        "dynamic-buckets", "dynamic", "automatic", "eager", "static-per-length",
    ]  # fmt: skip
    low, high = shown.view()
    assert low < 950 + 500 / 8
    assert 1800 < high < 2500


def test_one_number_of_buckets_alone_is_shown() -> None:
    one = BucketTotal(buckets=1, steps_s=0.0, compile_s=0.0)
    shown = _panels(dataclasses.replace(SHAPES, bucket_totals=(one,), policies=SHAPES.policies[:1]))
    assert shown.totals is not None
    low, high = shown.totals.view()
    assert low < high


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([], []),
        ([0.5], [0.5]),
        ([0.2, 0.8], [0.2, 0.8]),
        ([0.5, 0.5, 0.1], [0.5, 0.6, 0.1]),
        ([1.0, 0.95, 0.9], [1.0, 0.9, 0.8]),
    ],
)
def test_labels_are_moved_apart(places: list[float], expected: list[float]) -> None:
    assert spread(places, 0.1) == pytest.approx(expected)


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG\r\n"), (".svg", b"<?xml")])
def test_image_with_all_panels_is_written(tmp_path: Path, suffix: str, magic: bytes) -> None:
    path = tmp_path / f"advice{suffix}"
    plot(_advice(SHAPES), path)
    assert path.read_bytes().startswith(magic)


TEXTS = (
    "padding 38 % before, 12 % after",
    "samples",
    "Total time by number of static buckets",
    "least: 5 buckets, 19.3 min",
    "steps alone",
    "dynamic-buckets: 21.5 min",
    "eager: 30.0 min",
    "static-per-length: 25.0 h, not in view",
)


@pytest.mark.parametrize("suffix", [".svg", ".html"])
def test_both_panels_have_their_labels(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"advice{suffix}"
    plot(_advice(SHAPES), path)
    written = path.read_text()
    assert [text for text in TEXTS if text not in written] == []
    assert "end of the plan: step 20,000" in written


@pytest.mark.parametrize("suffix", [".svg", ".html"])
@pytest.mark.parametrize(
    ("shapes", "lengths", "present", "absent"),
    [
        (dataclasses.replace(SHAPES, bucket_totals=()), LENGTHS, "Lengths of", "static buckets"),
        (SHAPES, None, "static buckets", "Lengths of"),
    ],
)
def test_one_panel_alone_is_drawn(
    tmp_path: Path,
    suffix: str,
    shapes: Shapes,
    lengths: Lengths | None,
    present: str,
    absent: str,
) -> None:
    path = tmp_path / f"advice{suffix}"
    plot(_advice(shapes, lengths), path)
    written = path.read_text()
    assert present in written
    assert absent not in written


@pytest.mark.parametrize(
    "shapes", [None, Shapes(policy=ShapePolicy.STATIC, reason="All batches have the same shapes.")]
)
def test_picture_is_as_before_where_no_policies_were_compared(
    tmp_path: Path, shapes: Shapes | None
) -> None:
    assert panels(_advice(shapes)) is None
    path = tmp_path / "advice.svg"
    plot(_advice(shapes), path)
    written = path.read_text()
    assert written.count('id="axes_') == 1
    assert "Lengths of" not in written


def test_page_escapes_every_text_of_the_panels() -> None:
    nasty = "<b>$5</b>"
    shown = _panels()
    assert shown.histogram is not None
    assert shown.totals is not None
    drawn = html_figure(
        Panels(
            histogram=dataclasses.replace(shown.histogram, title=nasty, counted=nasty),
            totals=dataclasses.replace(shown.totals, rivals=(Rival(name=nasty, total_s=1500.0),)),
        )
    )
    texts = str(drawn.to_dict())
    assert nasty not in texts
    assert texts.count("&lt;b&gt;$5&lt;/b&gt;") >= 3


def test_image_takes_no_name_for_mathematics(tmp_path: Path) -> None:
    """A formula that cannot be read would raise."""
    shown = _panels()
    assert shown.totals is not None
    rival = Rival(name=r"$\frac{$", total_s=1500.0)
    figure = Figure()
    draw_image(
        figure,
        dataclasses.replace(shown, totals=dataclasses.replace(shown.totals, rivals=(rival,))),
    )
    figure.savefig(tmp_path / "panels.svg")
