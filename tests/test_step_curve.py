"""The curve of step times along the lengths: it finds the terms, and what alignment is worth."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from advisor.profiler.records import Interval, ShapeTime
from advisor.profiler.statistics import Z_95
from advisor.profiler.step_curve import StepCurve, fit, scaled

CONSTANT, TOKEN, SQUARE = 8e-3, 2e-6, 3e-9
ALIGNED = (64, 128, 256, 384, 512)


def true_s(rows: int, length: int) -> float:
    return CONSTANT + TOKEN * rows * length + SQUARE * rows * length**2


def point(rows: int, length: int, seconds: float, noise: float = 0.005) -> ShapeTime:
    """Returns a point of both arms; compiled steps take half as long."""

    def figure(median: float) -> Interval:
        half = math.exp(Z_95 * noise)
        return Interval(median=median, low=median / half, high=median * half)

    return ShapeTime(
        rows=rows, length=length, eager_step_s=figure(seconds), step_s=figure(seconds / 2)
    )


def exact(lengths: Sequence[int], rows: Callable[[int], int] = lambda _: 16) -> list[ShapeTime]:
    return [point(rows(n), n, true_s(rows(n), n)) for n in lengths]


def misses(curve: StepCurve, points: Sequence[ShapeTime]) -> float:
    """Returns the largest relative error of the curve at the points."""
    times = np.array([p.eager_step_s.median for p in points if p.eager_step_s])
    found = curve.seconds([p.rows for p in points], [p.length for p in points])
    return float(np.abs(found / times - 1).max())


@pytest.mark.parametrize(
    ("rows", "residual"),
    # Under a token budget all batches have about as many tokens: hard to tell from the constant.
    [(lambda _: 16, 1e-6), (lambda n: max(1, 8192 // n), 0.01)],
)
def test_the_true_terms_are_recovered(rows: Callable[[int], int], residual: float) -> None:
    curve = fit(exact(ALIGNED, rows), compiled=False)
    assert curve.constant_s == pytest.approx(CONSTANT, rel=0.01)
    assert curve.token_s == pytest.approx(TOKEN, rel=0.01)
    assert curve.square_s == pytest.approx(SQUARE, rel=0.01)
    assert curve.residual < residual
    assert curve.surcharge == 0
    for length in (64, 100, 333, 512, 1024):
        assert curve.seconds(4, length) == pytest.approx(true_s(4, length), rel=0.01)


@given(
    st.floats(1e-5, 1.0),
    st.floats(0, 1e-4),
    st.floats(0, 1e-6),
    st.sets(st.integers(1, 2**24), min_size=3, max_size=9),
)
@settings(max_examples=100, deadline=None)
def test_any_true_curve_is_followed(
    constant: float, token: float, square: float, lengths: set[int]
) -> None:
    known = sorted(lengths)
    points = [point(2, n, constant + token * 2 * n + square * 2 * n * n) for n in known]
    curve = fit(points, compiled=False)
    assert misses(curve, points) < 1e-6
    assert min(curve.constant_s, curve.token_s, curve.square_s) >= 0
    middle = (known[0] + known[-1]) // 2
    assert curve.seconds(2, middle) == pytest.approx(
        constant + token * 2 * middle + square * 2 * middle**2, rel=0.01
    )


@given(st.dictionaries(st.integers(1, 5000), st.floats(1e-4, 10), min_size=1, max_size=9))
@example({1: 1.0, 317: 1e-4, 449: 1.0})
@settings(max_examples=150, deadline=None)
def test_the_curve_goes_through_every_point_whatever_they_are(times: dict[int, float]) -> None:
    points = [point(8, length, seconds) for length, seconds in times.items()]
    curve = fit(points, compiled=False)
    assert misses(curve, points) < 1e-6
    assert min(curve.constant_s, curve.token_s, curve.square_s) >= 0
    assert curve.lengths == tuple(sorted(times))
    assert (curve.seconds(8, np.arange(1, 6000, 37)) > 0).all()


def test_each_arm_has_its_own_curve() -> None:
    points = exact(ALIGNED)
    eager, compiled = fit(points, compiled=False), fit(points, compiled=True)
    assert compiled.seconds(16, 300) == pytest.approx(eager.seconds(16, 300) / 2, rel=1e-6)


def test_one_point_is_a_constant() -> None:
    curve = fit(exact([128]), compiled=False)
    assert (curve.token_s, curve.square_s, curve.residual) == (0, 0, 0)
    assert curve.seconds([16, 16], [64, 128]) == pytest.approx(true_s(16, 128))


def test_two_points_are_a_line() -> None:
    points = exact([128, 256])
    curve = fit(points, compiled=False)
    assert curve.square_s == 0
    assert misses(curve, points) < 1e-9
    between = (true_s(16, 128) + true_s(16, 256)) / 2
    assert curve.seconds(16, 192) == pytest.approx(between, rel=0.01)


@pytest.mark.parametrize("compiled", [False, True])
def test_no_points_are_an_error_and_not_a_curve(compiled: bool) -> None:
    for points in ([], [ShapeTime(rows=1, length=8)]):
        with pytest.raises(ValueError, match="no points"):
            fit(points, compiled=compiled)


def test_times_that_fall_with_the_length_make_no_negative_terms() -> None:
    points = [point(8, n, s) for n, s in ((64, 3.0), (128, 2.0), (256, 1.0))]
    curve = fit(points, compiled=False)
    assert min(curve.constant_s, curve.token_s, curve.square_s) >= 0
    assert misses(curve, points) < 1e-9


def test_what_the_model_misses_shows_in_the_residual() -> None:
    bumped = [
        point(16, p.length, true_s(16, p.length) * (1.3 if p.length == 256 else 1))
        for p in exact(ALIGNED)
    ]
    assert fit(bumped, compiled=False).residual > 0.1


@pytest.mark.parametrize("extra", [0.05, 0.12, 0.5])
@pytest.mark.parametrize("off", [(381,), (100, 381), (77, 189, 300, 509)])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_surcharge_of_lengths_that_are_no_multiple_of_8_is_found(
    extra: float, off: tuple[int, ...], compiled: bool
) -> None:
    slow = [point(16, n, true_s(16, n) * (1 + extra)) for n in off]
    points = [*exact((72, 200, *ALIGNED)), *slow]
    curve = fit(points, compiled=compiled)
    assert curve.multiple == 8
    assert curve.surcharge == pytest.approx(extra, rel=0.01)
    if not compiled:
        assert misses(curve, points) < 1e-6
    arm = 2 if compiled else 1
    for length in (131, 200, 256, 300, 450):
        factor = 1 if length % 8 == 0 else 1 + extra
        assert curve.seconds(16, length) * arm == pytest.approx(
            true_s(16, length) * factor, rel=0.01
        )


def test_the_surcharge_of_lengths_that_are_no_multiple_of_64_is_found() -> None:
    slow = [point(16, n, true_s(16, n) * 1.2) for n in (72, 200, 381)]
    curve = fit([*exact(ALIGNED), *slow], compiled=False)
    assert curve.multiple == 64
    assert curve.surcharge == pytest.approx(0.2, rel=0.01)


@pytest.mark.parametrize(("noise", "true_extra"), [(0.005, 0.0), (0.02, 0.0), (0.02, -0.1)])
def test_noise_is_no_surcharge(noise: float, true_extra: float) -> None:
    found = 0
    for seed in range(200):
        drawn = np.random.default_rng(seed).standard_normal(6) * noise
        lengths = (72, 128, 256, 381, 384, 512)
        extra = [true_extra if n % 8 else 0.0 for n in lengths]
        points = [
            point(16, n, true_s(16, n) * math.exp(e) * (1 + more), noise)
            for n, e, more in zip(lengths, drawn, extra, strict=True)
        ]
        found += fit(points, compiled=False).surcharge != 0
    assert found <= 2


@pytest.mark.parametrize("power", [2, 3])
def test_a_bent_curve_is_no_surcharge(power: int) -> None:
    points = [point(1, n, 1e-7 * n**power) for n in (64, 200, 381, 512)]
    assert fit(points, compiled=False).surcharge == 0


def test_a_scaled_curve_takes_that_many_times_as_long() -> None:
    curve = fit(exact(ALIGNED), compiled=False)
    twice = scaled(curve, 2.0)
    assert twice.seconds(8, [70, 300]) == pytest.approx(2 * curve.seconds(8, [70, 300]))


def test_weights_say_which_measured_lengths_speak() -> None:
    curve = fit(exact([64, 128, 256]), compiled=False)
    weights = curve.weights([32, 64, 96, 256, 999])
    assert weights.tolist() == [[1, 0, 0], [1, 0, 0], [0.5, 0.5, 0], [0, 0, 1], [0, 0, 1]]
