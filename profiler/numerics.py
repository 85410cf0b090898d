"""Do compiled and eager compute the same? Some steps from one restored snapshot, compared.

Eager against itself says how much may differ: the same step twice, in another order of sums and
another rounding, and under other seeds. What compiled differs by beyond that is an error.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from advisor.profiler.gradients import NO_GRADIENTS, Gradients

# What a reordering of sums may change over a few steps, relative to the loss, for the type in
# which the model computes. torch.testing's own tolerances for one operator are 1.3e-6 (float32)
# and 1.6e-2 (bfloat16); a training step is some thousand operators.
_LOSS_TOLERANCE = {"float64": 1e-8, "float32": 1e-3, "bfloat16": 3e-2, "float16": 1e-2}
# The same for the gradients of one step, as vectors. They scatter more than a loss: errors grow
# through the backward pass layer by layer, and positive and negative parts cancel in their sums
# while the rounding of the parts stays. A gradient that is wrong rather than rounded lacks a term
# or has one twice, which is tens of percent.
_GRADIENT_TOLERANCE = {"float64": 1e-6, "float32": 1e-2, "bfloat16": 0.15, "float16": 5e-2}
# Compiled may differ from eager by this many times what eager differs from itself.
_SPREADS = 3.0
# Losses that differ beyond their tolerance are an error from the step on in which they differ by
# this share of it: an error often begins small, and grows with the training.
_ONSET = 1e-2
_SEEDS = 3
# Runs that a comparison takes: each seed, the first once more, another order, and compiled.
RUNS = _SEEDS + 3
# Gradients shorter than this, for a loss of 1 or more, are rounding and nothing else.
_LEAST_GRADIENT = 1e-6
_STREAMS = "https://github.com/pytorch/pytorch/issues/158643"


class Arm(enum.Enum):
    """How the steps run: plain eager, eager in another order and rounding, or compiled."""

    EAGER = "eager"
    REORDERED = "reordered"
    COMPILED = "compiled"


@dataclass(frozen=True, slots=True)
class Course:
    """What some steps from the snapshot gave: their losses, and the first one's gradients.

    A loss is None when the step returned none.
    """

    losses: Sequence[float | None]
    gradients: Gradients = NO_GRADIENTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Relative differences of losses and gradients: compiled to eager, and eager to itself.

    `message` says in one sentence what does not agree; `warnings` what could not be judged, or
    differs by design.
    """

    agrees: bool = True
    loss_drift: float | None = None
    loss_scale: float | None = None
    gradient_drift: float | None = None
    gradient_scale: float | None = None
    stochastic: bool = False
    message: str = ""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """One course, its gradients replaced by how far they are from the reference's.

    `drift` is None where either holds NaN or infinity; `most_in` names the parameter that most of
    the difference lies in.
    """

    losses: list[float | None]
    left: bool
    finite: bool
    drift: float | None
    most_in: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Runs:
    """All runs. `own` are eager's under the same seed, `seeds` those under other seeds.

    `begun` are the losses that compiled gave when it was first compiled, as far as they are known.
    """

    eager: _Run
    begun: Sequence[float | None]
    compiled: _Run
    own: tuple[_Run, ...]
    seeds: tuple[_Run, ...]

    @property
    def overflow_differs(self) -> bool:
        """Whether the gradients of step 0 hold NaN or infinity in one arm only."""
        return self.eager.finite != self.compiled.finite


def compare(
    run: Callable[[Arm, int], Course],
    dtype: str,
    *,
    seed: int = 0,
    begun: Sequence[float | None] = (),
    random_source: str = "random numbers",
) -> Agreement:
    """Returns how well compiled and eager agree; `run(arm, seed)` runs the steps of one arm.

    `dtype` is the coarsest type in which the model computes. `begun` are the losses of the steps
    in which the compiler was at work, from the same snapshot and `seed`: they tell from which step
    on a training with these numbers goes wrong. `random_source` names what draws random numbers in
    the model, should its losses turn out to depend on the seed.

    Plain eager with the same seed runs first and last, around the compiled steps: state that the
    person's code keeps out of our reach (a counter, a loss scale) then shows as eager's own
    difference, and not as the compiler's. With randomness the losses can only be held against
    eager's spread over seeds, because the compiler draws from another random stream by design
    (pytorch/pytorch#158643).
    """
    runs = _run_all(run, seed, begun)
    stochastic = _depends_on_seed(runs)
    losses = _judge_losses(runs, dtype, stochastic, random_source)
    gradients = _judge_gradients(runs, dtype, stochastic)
    messages = [part.message for part in (losses, gradients) if part.message]
    return replace(
        losses,
        agrees=not messages,
        gradient_drift=gradients.gradient_drift,
        gradient_scale=gradients.gradient_scale,
        message="; ".join(messages),
        warnings=losses.warnings + gradients.warnings,
    )


def _run_all(run: Callable[[Arm, int], Course], seed: int, begun: Sequence[float | None]) -> _Runs:
    """Runs every arm, and holds no more than two vectors of gradients at a time."""
    first = run(Arm.EAGER, seed)
    reference = first.gradients
    norm = reference.norm() if reference.finite else math.inf
    start = first.losses[0] if first.losses else None
    floor = _LEAST_GRADIENT * min(1.0, abs(start)) if start else _LEAST_GRADIENT

    def against(course: Course) -> _Run:
        gradients = course.gradients
        drift, most_in = None, ""
        own_norm = gradients.norm() if gradients.finite else math.inf
        if reference.finite and gradients.finite:
            distance, most_in = reference.distance(gradients)
            drift = distance / max(norm, floor) if max(norm, own_norm) > floor else 0.0
        return _Run(
            losses=list(course.losses),
            left=own_norm > 0,
            finite=gradients.finite,
            drift=drift,
            most_in=most_in,
        )

    others = tuple(against(run(Arm.EAGER, seed + more)) for more in range(1, _SEEDS))
    reordered = against(run(Arm.REORDERED, seed))
    compiled = against(run(Arm.COMPILED, seed))
    repeat = against(run(Arm.EAGER, seed))
    return _Runs(
        eager=against(first),
        begun=begun,
        compiled=compiled,
        own=(repeat, reordered),
        seeds=others,
    )


def _depends_on_seed(runs: _Runs) -> bool:
    """Returns whether eager differs from seed to seed by far more than from run to run."""
    eager, repeat = runs.eager.losses, runs.own[0]
    own = max(_differences(eager, repeat.losses), default=0.0)
    spread = max(max(_differences(eager, run.losses), default=0.0) for run in runs.seeds)
    if spread > max(10 * own, 1e-12):
        return True
    drifts = [run.drift for run in runs.seeds if run.drift is not None]
    return max(drifts, default=0.0) > max(10 * (repeat.drift or 0.0), 1e-9)


def _judge_losses(runs: _Runs, dtype: str, stochastic: bool, random_source: str) -> Agreement:
    """Returns the drift and the scale of the losses, and what is wrong or unlike in them."""
    eager, compiled = runs.eager.losses, runs.compiled.losses
    if not eager or any(value is None for value in (*eager, *compiled)):
        warning = "the step returns no loss, so losses could not be compared"
        return Agreement(stochastic=stochastic, warnings=(warning,))
    if dtype == "float16" and runs.overflow_differs:
        # A loss scaler then leaves the step out in one arm only: what follows cannot be equal.
        eager, compiled = eager[:1], compiled[:1]
    drifts = _differences(eager, compiled)
    begun = _differences(eager[: len(runs.begun)], runs.begun[: len(eager)])
    scales = _scales(runs, len(eager))
    over_seeds = _spread_over_seeds(runs, len(eager)) if stochastic else 0.0
    tolerance = _LOSS_TOLERANCE.get(dtype, _LOSS_TOLERANCE["float32"])
    plain = [max(tolerance, _SPREADS * scale) for scale in scales]
    allowed = [max(one, _SPREADS * over_seeds) for one in plain]
    drift, scale = max(drifts), max(scales[-1], over_seeds)
    wrong = _first_beyond(drifts, allowed)
    message, warnings = "", []
    if not math.isfinite(allowed[-1]):
        warnings.append(_UNSTABLE)
    elif not math.isfinite(drift):
        message = _unlike_losses(eager, compiled)
    elif wrong is not None:
        onset = [max(_ONSET * tolerance, _SPREADS * max(scale, over_seeds)) for scale in scales]
        message = _wrong_losses(drifts, begun, onset, f"{dtype} and eager's own spread explain")
        message += f" {allowed[wrong]:.2%}" + _stale(drifts, begun, onset)
    elif (step := _first_beyond(begun, allowed)) is not None:
        warnings.append(_only_at_first(step, begun[step]))
    elif _first_beyond(drifts, plain) is not None:
        warnings.append(_other_stream(random_source, drift, over_seeds))
    return Agreement(
        loss_drift=drift if math.isfinite(drift) else None,
        loss_scale=scale if math.isfinite(scale) else None,
        stochastic=stochastic,
        message=message,
        warnings=tuple(warnings),
    )


_UNSTABLE = (
    "eager's own losses turn NaN or infinite in some runs and not in others, so they say nothing"
    " about the compiled ones"
)


def _wrong_losses(
    drifts: Sequence[float], begun: Sequence[float], onset: Sequence[float], explained: str
) -> str:
    """Returns from which step on losses differ: as they were first compiled, if they did then."""
    first = _first_beyond(begun, onset)
    step = _first_beyond(drifts, onset) if first is None else first
    return (
        f"the losses differ from step {step} on, by up to {max(drifts):.2%} of their size, where"
        f" {explained}"
    )


def _stale(drifts: Sequence[float], begun: Sequence[float], onset: Sequence[float]) -> str:
    """Returns what losses mean that were right at first and are wrong in the same steps later."""
    first, again = _first_beyond(begun, onset), _first_beyond(drifts, onset)
    if first is None or again is None or first <= again:
        return ""
    return (
        "; the same steps were right before, as when compiled code keeps a Python number (a float"
        " or an int) of another step"
    )


def _only_at_first(step: int, drift: float) -> str:
    """Returns the warning that losses differ in the first compiled steps, and not once more.

    No error for sure: a learning rate schedule in the person's own step looks the same.
    """
    much = f"by {drift:.2%}" if math.isfinite(drift) else "one of them being no finite number"
    return (
        f"the losses of the first compiled steps differ from eager's from step {step} on, {much},"
        " and agree when the steps are run again: either they depend on something outside the"
        " model and the optimizer, such as a counter, or the compiled code was wrong then"
    )


def _first_beyond(differences: Sequence[float], allowed: Sequence[float]) -> int | None:
    pairs = enumerate(zip(differences, allowed, strict=False))
    return next((i for i, (difference, limit) in pairs if difference > limit), None)


def _unlike_losses(eager: Sequence[float | None], compiled: Sequence[float | None]) -> str:
    """Returns what is to be said when one arm's loss is finite and the other's is not."""
    pairs = enumerate(zip(eager, compiled, strict=True))
    step, (e, c) = next((i, pair) for i, pair in pairs if _finite(pair[0]) != _finite(pair[1]))
    if _finite(e):
        return f"the compiled loss is {c} at step {step}, where the eager one is {e:.6g}"
    return f"the eager loss is {e} at step {step}, where the compiled one is {c:.6g}"


def _other_stream(random_source: str, drift: float, over_seeds: float) -> str:
    """Returns the sentence that tells randomness apart from an error."""
    return (
        f"the losses depend on the seed ({random_source}): compiled draws from another random"
        f" stream than eager by design ({_STREAMS}), so its losses differ by {drift:.2%}, and"
        f" eager's own differ by {over_seeds:.2%} from seed to seed;"
        " torch._inductor.config.fallback_random = True makes the two comparable exactly"
    )


def _judge_gradients(runs: _Runs, dtype: str, stochastic: bool) -> Agreement:
    """Returns the drift and the scale of the gradients, and what is wrong with them."""
    eager, compiled = runs.eager, runs.compiled
    if not (eager.left or compiled.left):
        return Agreement()
    if runs.overflow_differs:
        return _unlike_gradients(runs, dtype)
    if compiled.drift is None:
        return Agreement()
    peers = runs.own + (runs.seeds if stochastic else ())
    # A peer that overflowed, where this run did not, allows anything.
    scale = max(math.inf if run.drift is None else run.drift for run in peers)
    tolerance = _GRADIENT_TOLERANCE.get(dtype, _GRADIENT_TOLERANCE["float32"])
    allowed = max(tolerance, _SPREADS * scale)
    message = ""
    if compiled.drift > allowed:
        message = (
            f"the gradients of step 0 differ by {compiled.drift:.1%} of their length, most in"
            f" {compiled.most_in}, where {dtype} and eager's own spread explain {allowed:.1%}"
        )
    return Agreement(
        gradient_drift=compiled.drift,
        gradient_scale=scale if math.isfinite(scale) else None,
        message=message,
    )


def _unlike_gradients(runs: _Runs, dtype: str) -> Agreement:
    """Returns what is to be said when the gradients of one arm alone hold NaN or infinity."""
    broken, whole = ("compiled", "eager") if runs.eager.finite else ("eager", "compiled")
    sentence = f"the {broken} gradients of step 0 hold NaN or infinity, the {whole} ones do not"
    if dtype == "float16":
        why = "float16 overflows by a hair, and a loss scaler leaves such steps out"
        return Agreement(warnings=(f"{sentence}: {why}",))
    if any(run.finite != runs.eager.finite for run in (*runs.own, *runs.seeds)):
        return Agreement(warnings=(f"{sentence}, nor do eager's own in every run",))
    return Agreement(message=sentence)


def _scales(runs: _Runs, steps: int) -> list[float]:
    """Returns for each step how far eager under one seed has been from itself so far.

    The largest so far, because once two trainings are apart they stay so.
    """
    worst = [0.0] * steps
    for run in runs.own:
        found = _differences(runs.eager.losses[:steps], run.losses[:steps])
        worst = [max(pair) for pair in zip(worst, found, strict=True)]
    return list(itertools.accumulate(worst, max))


def _spread_over_seeds(runs: _Runs, steps: int) -> float:
    """Returns the largest difference between two seeds, over all pairs and steps.

    Over all of them: the few draws of a single step may be close by chance.
    """
    all_seeds = [run.losses[:steps] for run in (runs.eager, *runs.seeds)]
    return max(
        difference
        for first, second in itertools.combinations(all_seeds, 2)
        for difference in _differences(first, second)
    )


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _differences(first: Sequence[float | None], second: Sequence[float | None]) -> list[float]:
    """Returns the relative differences of two courses' losses, step by step.

    Relative to a hundredth of the run's first loss at least, so that a loss that falls to nearly
    nothing does not make rounding look like an error. Infinite where one alone is no number.
    """
    if len(first) != len(second):
        raise ValueError(f"{len(first)} losses cannot be compared with {len(second)}")
    start = abs(first[0]) if first and first[0] is not None else 0.0
    found = []
    for a, b in zip(first, second, strict=True):
        if a is None or b is None or not (math.isfinite(a) and math.isfinite(b)):
            found.append(0.0 if _finite(a) == _finite(b) else math.inf)
        else:
            found.append(abs(a - b) / max(abs(a), 1e-2 * start, 1e-12))
    return found
