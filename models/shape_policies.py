"""What the plan takes under each shape policy, composed of step times along the lengths.

A trial gives the step time as a curve over length, eager and compiled in one process; the lengths
of the data set give how many batches of each length a policy makes (`batching`), and where to cut
them into buckets (`buckets`). The sum over both is the policy's step time, against that of the
eager batches as they are now. Compiles are billed at what each shape took in the trial.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from advisor.models import batching, buckets
from advisor.models.batching import Epoch, Ints
from advisor.models.best_case import USUAL_WARM_SHARE
from advisor.models.economics import (
    DRAWS,
    EVALUATION_COMPILE_SHARE,
    Bill,
    Measured,
    bill,
)
from advisor.models.evidence import Base, Evidence, base, doubt
from advisor.models.plan import Plan
from advisor.models.scaling import spread_of
from advisor.profiler import statistics
from advisor.profiler.lengths import padded, rows_at
from advisor.profiler.records import (
    BatchShapes,
    BucketTotal,
    Config,
    Dynamic,
    Lengths,
    LengthSource,
    ShapePolicy,
    ShapeTime,
    Trial,
    TrialKind,
    TrialStatus,
)
from advisor.profiler.statistics import Array, StepDraws
from advisor.profiler.step_curve import StepCurve, fit

# torch._dynamo.config.recompile_limit, its default: so many graphs of one function, then eager.
RECOMPILE_LIMIT = 8
# Numbers of buckets that are tried where a further one costs no compile.
_FREE_BUCKETS = (2, 4, 8, 16, 32)
# Fewer buckets mix samples better: the fewest within this share of the fastest are taken.
_AS_GOOD = 0.01
# Lengths of an epoch that are drawn apart; more are joined to neighbours.
_MOST_DRAWN = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One policy with its bill. `limit_step` is where Dynamo's recompile limit would be hit."""

    policy: ShapePolicy
    bill: Bill
    epoch: Epoch
    compiles: int
    compile_s: float
    config: Config | None = None
    trial: Trial | None = None
    boundaries: tuple[int, ...] = ()
    # Eager steps now over eager steps under the policy's batches: what less padding alone brings.
    padding_speedup: float = 1.0
    limit_step: int | None = None

    @property
    def bucketed(self) -> bool:
        """Whether samples are sorted into buckets: batches of another composition."""
        return bool(self.boundaries)


class Along:
    """A trial's step times along the lengths: two curves, and draws of their errors."""

    def __init__(self, times: Sequence[ShapeTime], seed: int = 0) -> None:
        """Fits the curves. Raises ValueError without times."""
        self.eager = fit(times, compiled=False)
        self.compiled = fit(times, compiled=True) if any(t.step_s for t in times) else None
        known = {t.length: _draws(t, seed + i) for i, t in enumerate(times)}
        self._eager_errors = _errors(self.eager, {n: d[0] for n, d in known.items()})
        self._compiled_errors = (
            _errors(self.compiled, {n: d[1] for n, d in known.items()}) if self.compiled else None
        )

    def sample_draws(self, epoch: Epoch, *, compiled: bool) -> Array:
        """Returns draws of the mean seconds of a sample under the batches of an epoch."""
        curve, errors = self.eager, self._eager_errors
        if compiled and self.compiled is not None and self._compiled_errors is not None:
            curve, errors = self.compiled, self._compiled_errors
        rows, lengths, counts = epoch.classes()
        seconds = curve.seconds(rows, lengths) * counts
        places, of_length = np.unique(_joined(lengths), return_inverse=True)
        summed = np.bincount(of_length, weights=seconds)
        total = summed @ np.exp(curve.weights(places) @ errors)
        return np.asarray(total / float((rows * counts).sum()))

    def sample_s(self, data: Lengths, lengths: Sequence[int], *, compiled: bool) -> Array:
        """Returns the seconds of one sample in full batches padded to each of `lengths`."""
        curve = self.compiled if compiled and self.compiled else self.eager
        rows = np.array([rows_at(data, length) for length in lengths])
        return np.asarray(curve.seconds(rows, np.asarray(lengths)) / rows)


def _distribution(data: Lengths) -> tuple[Ints, Array]:
    """Returns what single samples are padded to, ascending, and how many of them the data has."""
    long = np.array([padded(n, replace(data, pad_to=None)) for n in data.values])
    distinct, place = np.unique(long, return_inverse=True)
    lengths = np.asarray(distinct, dtype=np.int64)
    counts = np.bincount(place, weights=np.asarray(data.counts, dtype=float))
    return lengths, counts.astype(np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """What all policies of one job share."""

    data: Lengths
    now: Epoch
    plan: Plan
    steps: float
    common: Base

    @classmethod
    def of(cls, data: Lengths, common: Base, plan: Plan) -> _Job:
        now = batching.natural(data)
        steps = plan.steps_planned(common.planned_step_s)
        return cls(data=data, now=now, plan=plan, steps=steps, common=common)

    @property
    def samples(self) -> float:
        """Samples that the whole plan trains on."""
        return self.steps * float(self.now.rows.mean())

    def per_compile(self, compile_s: float) -> float:
        """Returns what a compile costs the plan with its restarts and evaluations."""
        total = compile_s * (1 + self.plan.restarts * USUAL_WARM_SHARE)
        evaluates = self.plan.eval_every and self.plan.eval_steps
        return total * (1 + EVALUATION_COMPILE_SHARE) if evaluates else total

    def bill(self, ratio: Array, compile_s: float) -> Bill:
        """Returns the bill of steps that are `ratio` times as fast as eager ones are now."""
        base_s = self.common.step_s
        measured = Measured(
            pairs=(),
            cold_start_s=compile_s,
            warm_start_s=compile_s * USUAL_WARM_SHARE,
            data_wait_s=self.common.data_wait_s,
            level_sigma=self.common.sigma,
            draws=StepDraws(np.full(len(ratio), base_s), base_s / ratio),
            added_s=self.common.added_s,
            machines=self.common.machines,
        )
        return bill(self.plan, self.steps, measured)

    def distribution(self) -> tuple[Ints, Array]:
        """Returns what single samples are padded to, and how many of them the plan has."""
        lengths, counts = _distribution(self.data)
        return lengths, counts * (self.samples / counts.sum())


def options(data: Lengths, trials: Sequence[Trial], common: Base, plan: Plan) -> tuple[Option, ...]:
    """Returns every policy that the trials can speak for, eager as it is now the first.

    Empty where no step times along the lengths were measured.
    """
    measured = [t for t in trials if t.shape_times and t.status is TrialStatus.OK]
    eager = next((t for t in measured if t.kind is TrialKind.EAGER), None)
    if not measured:
        return ()
    job = _Job.of(data, common, plan)
    found = list(_eager(job, Along((eager or measured[0]).shape_times)))
    for trial in measured:
        if trial.kind is TrialKind.SHAPES and _sound(trial):
            along = Along(trial.shape_times)
            own = _static if _is_static(trial) else _dynamic
            found += own(job, trial, along)
    found += _automatic(job, found)
    return tuple(found)


def _automatic(job: _Job, found: Sequence[Option]) -> Iterator[Option]:
    """Yields automatic dynamic shapes, composed of the two kinds of graphs that it makes.

    The first length is compiled for alone, the second one for all: the compiles of both, and the
    steps of the latter. The second graph is dynamic in what has changed alone, as where the length
    is marked (PyTorch, "Dynamic shapes", on automatic dynamic), not in all that could change.
    """
    one = _first(found, ShapePolicy.MARK_DYNAMIC) or _first(found, ShapePolicy.DYNAMIC)
    if one is None or one.trial is None or one.config is None:
        return
    static = _first(found, ShapePolicy.PAD_TO_LONGEST)
    first_s = one.compile_s
    if static is not None and static.trial is not None:
        # What a process pays once, its first compile pays; the dynamic one was measured with it.
        _, first_s = _compile_times(static.trial)
    along = Along(one.trial.shape_times)
    ratio = along.sample_draws(job.now, compiled=False) / along.sample_draws(job.now, compiled=True)
    compile_s = one.compile_s + first_s
    yield replace(
        one,
        policy=ShapePolicy.AUTOMATIC,
        bill=job.bill(ratio, compile_s),
        compiles=one.compiles + 1,
        compile_s=compile_s,
        config=replace(one.config, dynamic=Dynamic.AUTO),
    )


def _first(found: Sequence[Option], policy: ShapePolicy) -> Option | None:
    return next((option for option in found if option.policy is policy), None)


def lengths_of(trials: Sequence[Trial]) -> Lengths | None:
    """Returns the job's lengths where shape policies can be compared, else None.

    That is where eager steps were measured along them, and batches vary in length or the lengths
    were given: batches that all have one shape are not second-guessed by what they hold.
    """
    eager = next((t for t in trials if t.kind is TrialKind.EAGER), None)
    facts = eager.workload if eager else None
    if eager is None or facts is None or facts.lengths is None or not eager.shape_times:
        return None
    given = facts.lengths.source is not LengthSource.BATCHES
    return facts.lengths if given or facts.batch_shapes is BatchShapes.LENGTH else None


def base_of(trials: Sequence[Trial], plan: Plan) -> Base | None:
    """Returns the eager step time that all is billed with, None if none was seen.

    As `evidence.base`, but the eager arms along the lengths count too, each process once: at what
    their step times make of the batches as they are. With what the plan's ranks add to a step.
    """
    found = _tried_base(trials)
    return None if found is None else replace(found, spread=spread_of(trials, plan))


def _tried_base(trials: Sequence[Trial]) -> Base | None:
    data = lengths_of(trials)
    if data is None:
        return base(trials)
    now = batching.natural(data)
    rows = float(now.rows.mean())
    further_s = []
    for trial in trials:
        if trial.kind is TrialKind.SHAPES and any(each.pairs for each in trial.shape_times):
            mean = Along(trial.shape_times).sample_draws(now, compiled=False).mean()
            further_s.append(float(mean) * rows)
    return base(trials, further_s)


def padding_gain(data: Lengths, eager: Trial) -> float:
    """Returns how many times as fast eager steps could be at best without any padding, >= 1.

    By the eager trial's own step times along the lengths; 1 where there are none.
    """
    if not eager.shape_times or data.whole_batches:
        return 1.0
    along = Along(eager.shape_times)
    now = along.sample_draws(batching.natural(data), compiled=False).mean()
    lengths, counts = _distribution(data)
    least = np.average(along.sample_s(data, lengths.tolist(), compiled=False), weights=counts)
    return max(1.0, float(now / least))


def bucket_totals(
    data: Lengths, trials: Sequence[Trial], common: Base, plan: Plan
) -> tuple[BucketTotal, ...]:
    """Returns the plan's seconds for each number of static buckets that can pay, for a chart."""
    trial = next((t for t in trials if t.kind is TrialKind.SHAPES and _is_static(t)), None)
    if trial is None or not trial.shape_times:
        return ()
    job = _Job.of(data, common, plan)
    first, extra = _compile_times(trial)
    along = Along(trial.shape_times)
    level = _level(job, along)
    return tuple(
        BucketTotal(
            buckets=len(cut.boundaries),
            steps_s=cut.seconds * level,
            compile_s=job.per_compile(first + extra * (len(cut.boundaries) - 1)),
        )
        for cut in _cuts(job, along, job.per_compile(extra))
    )


def _eager(job: _Job, along: Along) -> Iterator[Option]:
    now = along.sample_draws(job.now, compiled=False)
    yield Option(
        policy=ShapePolicy.EAGER,
        bill=job.bill(np.ones(DRAWS), 0.0),
        epoch=job.now,
        compiles=0,
        compile_s=0.0,
    )
    if job.data.whole_batches:
        return
    edges, epoch = _free_buckets(job, along, compiled=False)
    if len(edges) > 1:
        ratio = now / along.sample_draws(epoch, compiled=False)
        yield Option(
            policy=ShapePolicy.EAGER_BUCKETS,
            bill=job.bill(ratio, 0.0),
            epoch=epoch,
            padding_speedup=float(np.median(ratio)),
            compiles=0,
            compile_s=0.0,
            boundaries=edges,
        )


def _dynamic(job: _Job, trial: Trial, along: Along) -> Iterator[Option]:
    """Yields the policies of a trial that compiles once for all lengths."""
    names = (ShapePolicy.DYNAMIC, ShapePolicy.DYNAMIC_BUCKETS)
    if trial.mark_dynamic:
        names = (ShapePolicy.MARK_DYNAMIC, ShapePolicy.MARK_DYNAMIC_BUCKETS)
    now = along.sample_draws(job.now, compiled=False)
    compile_s = sum(each.compile_s for each in trial.shape_times)
    compiles = sum(each.compiles > 0 for each in trial.shape_times)
    choices: list[tuple[ShapePolicy, tuple[int, ...], Epoch]] = [(names[0], (), job.now)]
    if not job.data.whole_batches:
        edges, epoch = _free_buckets(job, along, compiled=True)
        if len(edges) > 1:
            choices.append((names[1], edges, epoch))
    for policy, edges, epoch in choices:
        ratio = now / along.sample_draws(epoch, compiled=True)
        # A smaller last batch is one more graph where only the length is dynamic.
        one_more = trial.mark_dynamic and not job.data.tokens_per_batch and _two_sizes(epoch)
        total_s = compile_s * (2 if one_more else 1)
        yield Option(
            policy=policy,
            bill=job.bill(ratio, total_s),
            epoch=epoch,
            compiles=compiles + one_more,
            compile_s=total_s,
            config=trial.config,
            trial=trial,
            boundaries=edges,
            padding_speedup=_padding_speedup(along, now, epoch),
        )


def _two_sizes(epoch: Epoch) -> bool:
    return len(np.unique(epoch.rows)) > 1


def _padding_speedup(along: Along, now: Array, epoch: Epoch) -> float:
    return float(np.median(now / along.sample_draws(epoch, compiled=False)))


def _static(job: _Job, trial: Trial, along: Along) -> Iterator[Option]:
    """Yields the policies of a trial that compiles anew for each length."""
    first, extra = _compile_times(trial)
    now = along.sample_draws(job.now, compiled=False)

    def option(
        policy: ShapePolicy, epoch: Epoch, shapes: int, edges: tuple[int, ...] = ()
    ) -> Option:
        compile_s = first + extra * (shapes - 1)
        return Option(
            policy=policy,
            bill=job.bill(now / along.sample_draws(epoch, compiled=True), compile_s),
            epoch=epoch,
            compiles=shapes,
            compile_s=compile_s,
            config=trial.config,
            trial=trial,
            boundaries=edges,
            padding_speedup=_padding_speedup(along, now, epoch),
        )

    top = batching.longest(job.data)
    one = replace(job.now, lengths=np.full(len(job.now.rows), top))
    if job.data.tokens_per_batch is None:
        yield option(ShapePolicy.PAD_TO_LONGEST, one, len(np.unique(one.rows)))
    cut = buckets.best_cut(_cuts(job, along, job.per_compile(extra)), job.per_compile(extra))
    epoch = batching.bucketed(job.data, cut.boundaries, to_boundary=True)
    shapes = len(epoch.classes()[0])
    if len(cut.boundaries) > 1:
        yield option(ShapePolicy.BUCKETS, epoch, shapes, cut.boundaries)
    yield _per_length(job, trial, along, now)


def _per_length(job: _Job, trial: Trial, along: Along, now: Array) -> Option:
    """Returns what happens when each length of the batches as they are is compiled for.

    The lengths met first are compiled until the limit; all others run eager for ever.
    """
    first, extra = _compile_times(trial)
    epoch = job.now
    pairs = np.stack([epoch.lengths, epoch.rows])
    _, met_at, of_class = np.unique(pairs, axis=1, return_index=True, return_inverse=True)
    order = np.argsort(np.argsort(met_at))
    compiled = order[of_class.reshape(-1)] < RECOMPILE_LIMIT
    shapes = min(RECOMPILE_LIMIT, len(met_at))
    compile_s = first + extra * (shapes - 1)
    total = np.zeros(DRAWS)
    for some, fast in ((compiled, True), (~compiled, False)):
        if some.any():
            part = replace(epoch, rows=epoch.rows[some], lengths=epoch.lengths[some])
            total += along.sample_draws(part, compiled=fast) * float(part.rows.sum())
    mean = total / float(epoch.rows.sum())
    return Option(
        policy=ShapePolicy.STATIC_PER_LENGTH,
        bill=job.bill(now / mean, compile_s),
        epoch=epoch,
        compiles=shapes,
        compile_s=compile_s,
        config=trial.config,
        trial=trial,
        limit_step=epoch.first_step_with(RECOMPILE_LIMIT + 1),
    )


def _cuts(job: _Job, along: Along, compile_s: float) -> tuple[buckets.Cut, ...]:
    if job.data.whole_batches:
        rows, long, batches = job.now.classes()
        distinct, place = np.unique(long, return_inverse=True)
        lengths = np.asarray(distinct, dtype=np.int64)
        counts = np.bincount(place, weights=rows * batches).astype(np.float64)
        counts = counts * (job.samples / float(counts.sum()))
    else:
        lengths, counts = job.distribution()
    cost = along.sample_s(job.data, lengths.tolist(), compiled=True)
    # At the level of all trials, so that seconds compare with those of a compile.
    return buckets.optimal_cuts(lengths, counts, cost, compile_s=compile_s)


def _level(job: _Job, along: Along) -> float:
    """Returns by how much the machine's usual step is longer than in this trial."""
    now = float(along.sample_draws(job.now, compiled=False).mean()) * float(job.now.rows.mean())
    return job.common.step_s / now


def _free_buckets(job: _Job, along: Along, *, compiled: bool) -> tuple[tuple[int, ...], Epoch]:
    """Returns boundaries and batches where a bucket costs no compile: few, and nearly the best."""
    lengths, counts = job.distribution()
    cost = along.sample_s(job.data, lengths.tolist(), compiled=compiled)
    cuts = buckets.optimal_cuts(lengths, counts, cost, most=max(_FREE_BUCKETS))
    tried: list[tuple[float, tuple[int, ...], Epoch]] = []
    for number in _FREE_BUCKETS:
        edges = cuts[min(number, len(cuts)) - 1].boundaries
        epoch = batching.bucketed(job.data, edges, to_boundary=False)
        mean = float(along.sample_draws(epoch, compiled=compiled).mean())
        tried.append((mean, edges, epoch))
    least = min(mean for mean, _, _ in tried)
    return next((e, epoch) for mean, e, epoch in tried if mean <= least * (1 + _AS_GOOD))


def _compile_times(trial: Trial) -> tuple[float, float]:
    """Returns what the first shape took to compile, and what each further one takes."""
    times = [each.compile_s for each in trial.shape_times if each.compiles]
    if not times:
        return 0.0, 0.0
    # The first one also starts the compiler's own processes and builds its header.
    first = max(times)
    rest = sorted(times)[:-1]
    return first, float(np.mean(rest)) if rest else first


def _is_static(trial: Trial) -> bool:
    return trial.config is not None and trial.config.dynamic is Dynamic.FALSE


def _sound(trial: Trial) -> bool:
    if trial.config is None:
        return False
    pairs = tuple(pair for each in trial.shape_times for pair in each.pairs)
    return doubt(Evidence(trial.config, trial, pairs)) is None


def _draws(time_: ShapeTime, seed: int) -> tuple[Array, Array]:
    """Returns draws of the log error of the eager and the compiled step time at one length."""
    if time_.pairs:
        drawn = statistics.step_draws(time_.pairs, seed, DRAWS)
        return (
            np.log(drawn.eager_s / float(np.median(drawn.eager_s))),
            np.log(drawn.compiled_s / float(np.median(drawn.compiled_s))),
        )
    figure = time_.eager_step_s
    width = math.log(figure.high / figure.low) / (2 * statistics.Z_95) if figure else 0.0
    noise = np.random.default_rng(seed).standard_normal(DRAWS) * width
    return noise, noise


def _errors(curve: StepCurve, known: dict[int, Array]) -> Array:
    """Returns the errors at the curve's own lengths: shape (lengths, draws)."""
    return np.stack([known[length] for length in curve.lengths])


def _joined(lengths: Ints) -> Ints:
    """Returns the lengths with neighbours made one where there are too many to draw apart."""
    distinct = np.unique(lengths)
    if len(distinct) <= _MOST_DRAWN:
        return lengths
    kept = distinct[np.linspace(0, len(distinct) - 1, _MOST_DRAWN).astype(int)]
    return np.asarray(kept[np.searchsorted(kept, lengths)])
