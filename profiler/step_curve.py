"""The time of a training step as a function of its batch's rows and length, fitted to measurements.

Model: `constant + a * rows * length + b * rows * length**2`, none of them negative. The constant
holds what no size changes (launching operators, the optimizer), the linear term all that works
token by token, the quadratic one attention (Kaplan et al., Scaling Laws for Neural Language Models,
2020, section 2.1, counts them so). Between measured lengths the curve also follows what the model
left over, so it goes through every point. Free of torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from advisor.profiler.records import Interval, ShapeTime

Floats = npt.NDArray[np.float64]

# Multiples that hardware and kernels are known to like: looked for, never assumed. Coarse first.
ALIGNMENTS = (64, 8)
# A surcharge below this is noise of neighbours, whatever their intervals say.
_LEAST_SURCHARGE = 0.02
# A step takes longer than this; the model alone may fall below it where data are wild.
_LEAST_S = 1e-12


@dataclass(frozen=True, slots=True)
class StepCurve:
    """Seconds of a step. `residual` is the largest share by which the model misses a point.

    `lengths` and `corrections` are what is left between measured lengths, as logarithms.
    `surcharge` is what a length takes more that is no multiple of `multiple`.
    """

    constant_s: float
    token_s: float
    square_s: float
    residual: float
    lengths: tuple[int, ...]
    corrections: tuple[float, ...]
    multiple: int = 1
    surcharge: float = 0.0

    def seconds(self, rows: npt.ArrayLike, lengths: npt.ArrayLike) -> Floats:
        """Returns the seconds of steps on batches of `rows` samples padded to `lengths`."""
        long = np.asarray(lengths, dtype=np.float64)
        smooth = _features(rows, long) @ np.array([self.constant_s, self.token_s, self.square_s])
        left = np.interp(long, self.lengths, self.corrections)
        times = np.maximum(smooth, _LEAST_S) * np.exp(left)
        if self.surcharge:
            times = times * np.where(long % self.multiple == 0, 1.0, 1.0 + self.surcharge)
        return np.asarray(times)

    def weights(self, lengths: npt.ArrayLike) -> Floats:
        """Returns how much each measured length says of each of `lengths`: shape (n, measured)."""
        long = np.asarray(lengths, dtype=np.float64)
        unit = np.eye(len(self.lengths))
        return np.stack([np.interp(long, self.lengths, row) for row in unit], axis=-1)


def fit(points: Sequence[ShapeTime], *, compiled: bool) -> StepCurve:
    """Returns the curve through the points of the compiled arm, or of the eager one.

    Raises ValueError without points. With fewer than 3 lengths the higher terms are 0.
    """
    known = [p for p in points if (p.step_s if compiled else p.eager_step_s) is not None]
    if not known:
        raise ValueError("no points, no curve")
    multiple, surcharge = _alignment(known, compiled)
    times = _times(known, compiled)
    # What is no multiple tells of the curve too, once its surcharge is taken off.
    times[[p.length % multiple != 0 for p in known]] /= 1 + surcharge
    coefficients, residuals = _solve(known, times)
    lengths, left = _by_length(known, residuals)
    return StepCurve(
        constant_s=float(coefficients[0]),
        token_s=float(coefficients[1]),
        square_s=float(coefficients[2]),
        residual=_left_out([p for p in known if p.length % multiple == 0], compiled),
        lengths=tuple(int(n) for n in lengths),
        corrections=tuple(float(r) for r in left),
        multiple=multiple,
        surcharge=surcharge,
    )


def scaled(curve: StepCurve, factor: float) -> StepCurve:
    """Returns the curve of steps that all take `factor` times as long."""
    return replace(
        curve,
        constant_s=curve.constant_s * factor,
        token_s=curve.token_s * factor,
        square_s=curve.square_s * factor,
    )


def _figure(point: ShapeTime, compiled: bool) -> Interval:
    figure = point.step_s if compiled else point.eager_step_s
    if figure is None:
        raise ValueError("a point without its time is no point of the curve")
    return figure


def _features(rows: npt.ArrayLike, lengths: npt.ArrayLike) -> Floats:
    number, long = np.broadcast_arrays(
        np.asarray(rows, dtype=np.float64), np.asarray(lengths, dtype=np.float64)
    )
    return np.stack([np.ones_like(long), number * long, number * long**2], axis=-1)


def _times(points: Sequence[ShapeTime], compiled: bool) -> Floats:
    return np.array([_figure(p, compiled).median for p in points], dtype=np.float64)


def _by_length(points: Sequence[ShapeTime], values: Floats) -> tuple[Floats, Floats]:
    """Returns the distinct lengths, ascending, and the mean of the points' values at each."""
    lengths, places = np.unique([p.length for p in points], return_inverse=True)
    means = np.bincount(places, weights=values) / np.bincount(places)
    return lengths.astype(np.float64), means


def _solve(points: Sequence[ShapeTime], times: Floats) -> tuple[Floats, Floats]:
    """Returns the coefficients and each point's log residual; relative errors count alike."""
    table = _features([p.rows for p in points], [p.length for p in points])
    terms = min(3, len({p.length for p in points}))
    best = _nonnegative(table[:, :terms] / times[:, None], np.ones(len(points)))
    coefficients = np.concatenate((best, np.zeros(3 - terms)))
    return coefficients, np.log(times / np.maximum(table @ coefficients, _LEAST_S))


def _nonnegative(table: Floats, wanted: Floats) -> Floats:
    """Returns the least squares solution without negative terms, by trying all sets of terms.

    Of at most 3 terms there are 7 sets; an active-set method would be a library more to import in
    every trial.
    """
    columns = table.shape[1]
    # A squared length is up to 10^14 times the constant: terms of one size keep all digits.
    sizes = np.linalg.norm(table, axis=0)
    table = table / sizes
    best, least = np.zeros(columns), math.inf
    for chosen in range(1, 2**columns):
        terms = [i for i in range(columns) if chosen >> i & 1]
        found = np.linalg.lstsq(table[:, terms], wanted, rcond=None)[0]
        if (found < 0).any():
            continue
        error = float(((table[:, terms] @ found - wanted) ** 2).sum())
        if error < least * (1 - 1e-9):
            least = error
            best = np.zeros(columns)
            best[terms] = found
    return np.asarray(best / sizes)


def _predicted(points: Sequence[ShapeTime], times: Floats, wanted: Sequence[ShapeTime]) -> Floats:
    """Returns the seconds of `wanted` by the curve through `points` alone."""
    coefficients, residuals = _solve(points, times)
    rows, lengths = [p.rows for p in wanted], [p.length for p in wanted]
    left = np.interp(lengths, *_by_length(points, residuals))
    return np.asarray(_features(rows, lengths) @ coefficients * np.exp(left))


def _left_out(points: Sequence[ShapeTime], compiled: bool) -> float:
    """Returns the largest relative error of a point between others when only they are fitted."""
    lengths = sorted({p.length for p in points})
    errors = [0.0]
    for length in lengths[1:-1]:
        others = [p for p in points if p.length != length]
        own = [p for p in points if p.length == length]
        foretold = _predicted(others, _times(others, compiled), own)
        errors += np.abs(foretold / _times(own, compiled) - 1).tolist()
    return max(errors)


def _alignment(points: Sequence[ShapeTime], compiled: bool) -> tuple[int, float]:
    """Returns the multiple that lengths should be of and what others take more; (1, 0): none."""
    for multiple, finer in zip(ALIGNMENTS, (*ALIGNMENTS[1:], 1), strict=True):
        on = [p for p in points if p.length % multiple == 0]
        known = sorted({p.length for p in on})
        if len(known) < 2:
            continue
        off = [p for p in points if p.length % multiple and known[0] < p.length < known[-1]]
        # What is no multiple of 8 says nothing of 64.
        if not any(p.length % finer == 0 for p in off):
            continue
        times, off_times = _times(on, compiled), _times(off, compiled)
        rows, lengths = [p.rows for p in off], [p.length for p in off]
        smooth = _predicted(on, times, off)
        # A curve of terms that are not negative stays below its chords: bent is not yet slow.
        chord = np.interp(lengths, *_by_length(on, times / [p.rows for p in on])) * rows
        # Slower beyond the noise of both: the low end against the high ends of the neighbours.
        noise = np.log([_figure(p, compiled).high for p in on]) - np.log(times)
        most = np.maximum(smooth, chord) * np.exp(np.interp(lengths, *_by_length(on, noise)))
        lows = np.minimum([_figure(p, compiled).low for p in off], off_times)
        if (lows > most * (1 + _LEAST_SURCHARGE)).all():
            return multiple, float(np.median(off_times / smooth)) - 1
    return 1, 0.0
