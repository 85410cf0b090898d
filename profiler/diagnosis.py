"""Why a compile gains what it gains: every cause that the trials met, ranked by what a mend brings.

Pure: reads trials, runs nothing. A gain is measured where a trial ran with a setting that removes
the cause, and an estimate (`gains`) where only an edit does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from advisor.profiler import gains, settings
from advisor.profiler.gains import Rate
from advisor.profiler.job_hints import hints
from advisor.profiler.mends import break_mend, recompile_mend
from advisor.profiler.records import (
    Advice,
    Config,
    Diagnosis,
    Dynamic,
    Fix,
    FixKind,
    GraphBreak,
    GraphBreakCause,
    Interval,
    Recompile,
    Scope,
    Trial,
    TrialKind,
    TrialStatus,
    WhatIf,
)
from advisor.profiler.units import config_name, duration, number_of, ratio

# Settings of the compiler that are tried after one trial.
_MOST_WHAT_IFS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Stakes:
    """What a mend is weighed against: the plan, as far as there is one.

    `total_s` are the seconds of all steps, `starts` how often the job starts, and so compiles.
    """

    total_s: float = 3600.0
    starts: int = 1
    price_per_hour: float | None = None
    evaluates: bool = False


def fixes(trials: Sequence[Trial], stakes: Stakes | None = None) -> tuple[Fix, ...]:
    """Returns every mend that the trials show, each place once, the one that pays most first.

    What keeps a configuration from running at all comes before what makes it slower.
    """
    stakes = stakes or Stakes()
    compiled = _tried(trials)
    rate = _rate(compiled)
    found: dict[tuple[str, str, int, str], Fix] = {}
    # Trials with settings of their own only show what those settings bring.
    for trial in (t for t in compiled if t.config is not None and not t.config.options):
        for fix in _of_trial(trial, compiled, rate, stakes):
            key = (fix.kind, fix.file, fix.line, fix.cause)
            known = found.get(key)
            if known is None or _better_known(fix, known):
                found[key] = fix
    eager = next((t for t in trials if t.kind is TrialKind.EAGER), None)
    best = _fastest(compiled)
    about_job = (
        hints(eager, plan_has_evaluation=stakes.evaluates, best_compiled=best) if eager else ()
    )
    order = sorted((*found.values(), *about_job), key=lambda fix: -_worth_s(fix, stakes))
    blocking = [fix for fix in order if fix.kind is FixKind.COMPILER and fix.gain is None]
    return (*blocking, *(fix for fix in order if fix not in blocking))


def diagnosis_of(advice: Advice) -> Diagnosis:
    """Returns the diagnosis alone of an advice."""
    found = diagnosis(advice.target, advice.trials, advice.fixes)
    return replace(
        found, advice_id=advice.advice_id, created=advice.created, warnings=advice.warnings
    )


def diagnosis(target: str, trials: Sequence[Trial], found: tuple[Fix, ...]) -> Diagnosis:
    """Returns what `trials` and the mends `found` in them say of a workload."""
    shown = explained(trials)
    warnings = dict.fromkeys(warning for trial in trials for warning in trial.warnings)
    return Diagnosis(
        target=target,
        summary=tuple(_summary(shown, found)),
        config=shown.config if shown else None,
        speedup=shown.speedup if shown else None,
        graphs=shown.graphs if shown else None,
        coverage=shown.coverage if shown else None,
        fixes=found,
        warnings=tuple(warnings),
        trials=tuple(trials),
        workload=next((t.workload for t in reversed(trials) if t.workload), None),
        environment=next((t.environment for t in reversed(trials) if t.environment), None),
    )


def what_if_configs(trial: Trial) -> tuple[Config, ...]:
    """Returns the configurations that a trial suggests: itself, with settings that remove a cause.

    The one that leaves the fewest graph breaks and recompiles comes first.
    """
    if trial.kind is not TrialKind.COMPILE or trial.config is None or trial.config.options:
        return ()
    usable = [found for found in trial.what_ifs if found.removes and not found.failure]
    order = sorted(usable, key=lambda found: (found.sites + found.recompiles, len(found.options)))
    chosen = order[:_MOST_WHAT_IFS]
    return tuple(replace(trial.config, options=found.options) for found in chosen)


def explained(trials: Sequence[Trial]) -> Trial | None:
    """Returns the trial that tells most of a workload: the whole model, without settings."""
    tried = [t for t in _tried(trials) if t.config is not None]
    plain = [t for t in tried if t.config is not None and not t.config.options]
    whole = [t for t in plain if t.config is not None and t.config.scope is Scope.MODEL]
    return next(iter((*whole, *plain, *tried)), None)


def _tried(trials: Iterable[Trial]) -> list[Trial]:
    """Returns the trials that show what keeps a model from running compiled.

    Those along the lengths do too, but for a graph that is static on purpose; they count where the
    job's own mix of batches was not worth a trial.
    """
    ran = [t for t in trials if t.status is not TrialStatus.SKIPPED]
    own = [t for t in ran if t.kind is TrialKind.COMPILE]
    along = [t for t in ran if t.kind is TrialKind.SHAPES]
    return own or [t for t in along if t.config and t.config.dynamic is not Dynamic.FALSE]


def _rate(trials: Sequence[Trial]) -> Rate:
    """Returns this workload's own rate from the trial that covers most, else the published one."""
    own = [(t.time_coverage or 0.0, rate) for t in trials if (rate := gains.own_rate(t))]
    return max(own, key=lambda pair: pair[0])[1] if own else gains.usual_rate()


def _fastest(trials: Sequence[Trial]) -> Trial | None:
    ran = [t for t in trials if t.status is TrialStatus.OK and t.speedup is not None]
    return max(ran, key=lambda t: t.speedup.median if t.speedup else 0.0, default=None)


def _better_known(one: Fix, other: Fix) -> bool:
    """Returns whether `one` tells more of the same place: measured, or the larger gain."""
    ranks = [(fix.measured, fix.gain.median if fix.gain else 0.0) for fix in (one, other)]
    return ranks[0] > ranks[1]


def _worth_s(fix: Fix, stakes: Stakes) -> float:
    """Returns the seconds that a mend saves over the plan, as far as figures are known."""
    steps_s = stakes.total_s * (1 - 1 / fix.gain.median) if fix.gain else 0.0
    return steps_s + (fix.lost_s or 0.0) * stakes.starts


def _of_trial(trial: Trial, trials: Sequence[Trial], rate: Rate, stakes: Stakes) -> Iterator[Fix]:
    yield from _of_compiler(trial)
    for met in trial.graph_breaks:
        yield _of_break(met, trial, trials, rate)
    for again in trial.recompiles:
        yield _of_recompile(again, trial, trials, rate, stakes)


def _of_break(met: GraphBreak, trial: Trial, trials: Sequence[Trial], rate: Rate) -> Fix:
    what_if, gain = _setting(met.cause.value, trial, trials)
    measured = gain is not None
    if gain is None and met.lost_share is not None:
        if met.cause is GraphBreakCause.PRINT_OR_LOGGING:
            # The mend does not compile this work, it leaves it out.
            rate = replace(rate, low=0.0, median=0.0)
        gain = gains.estimated_gain(trial, met.lost_share, rate)
    return Fix(
        kind=FixKind.GRAPH_BREAK,
        cause=met.cause.value,
        what=_with_setting(break_mend(met), what_if),
        file=met.file,
        line=met.line,
        code=met.code,
        link=met.hint,
        count=met.count,
        hits_per_step=met.hits_per_step,
        gain=gain,
        measured=measured,
        options=what_if.options if what_if else (),
    )


def _of_recompile(
    met: Recompile, trial: Trial, trials: Sequence[Trial], rate: Rate, stakes: Stakes
) -> Fix:
    what_if, gain = _setting(met.cause.value, trial, trials)
    measured = gain is not None
    covered = trial.time_coverage
    if (
        gain is None
        and trial.recompile_limit_hit
        and met.settles is not True
        and covered is not None
    ):
        # Since the limit was hit, what is not covered runs eager because of it.
        gain = gains.estimated_gain(trial, 1 - covered, rate)
    price = stakes.price_per_hour
    return Fix(
        kind=FixKind.RECOMPILE,
        cause=met.cause.value,
        what=_with_setting(recompile_mend(met, limit_hit=trial.recompile_limit_hit), what_if),
        file=met.file,
        line=met.line,
        count=met.count,
        lost_s=met.lost_s,
        money_lost=None if price is None else met.lost_s * stakes.starts * price / 3600,
        gain=gain,
        measured=measured,
        options=what_if.options if what_if else (),
    )


def _with_setting(mend: str, what_if: WhatIf | None) -> str:
    """Returns a mend with the settings that do the same without an edit, and what else they do."""
    if what_if is None:
        return mend
    # Many a mend names the setting already, as it can be known from the cause alone.
    new = [option for option in what_if.options if option[0] not in mend]
    also = (f"or set {' and '.join(settings.lines(new))}",) if new else ()
    return "; ".join((mend, *also, *settings.effects(what_if.options)))


def _setting(
    cause: str, trial: Trial, trials: Sequence[Trial]
) -> tuple[WhatIf | None, Interval | None]:
    """Returns the settings that remove a cause, with the gain that a trial with them measured."""
    removing = [w for w in trial.what_ifs if cause in w.removes and not w.failure]
    for what_if in removing:
        if trial.config is None:
            break
        wanted = replace(trial.config, options=what_if.options)
        tried = next((t for t in trials if t.config == wanted and t.pairs), None)
        if tried is not None and tried.status is TrialStatus.OK:
            return what_if, gains.measured_gain(trial.pairs, tried.pairs)
    return (removing[0] if removing else None), None


def _of_compiler(trial: Trial) -> Iterator[Fix]:
    """Yields what the compiler failed to do as a whole, without any gain: nothing runs yet."""
    name = config_name(trial.config)
    if trial.status is not TrialStatus.OK and trial.failure is not None:
        yield Fix(
            kind=FixKind.COMPILER,
            cause=_shouted(trial.failure.kind, trial.status),
            what=f"{name} {_ENDED[trial.status]}: {trial.failure.message}",
            file=trial.failure.file,
            line=trial.failure.line,
            code=trial.failure.code,
        )
        return
    explained_by = trial.graph_breaks or trial.recompile_limit_hit
    if gains.ran_eager(trial.graphs, trial.coverage) and not explained_by:
        yield Fix(
            kind=FixKind.COMPILER,
            cause="NOTHING_COMPILED",
            what=f"{name} compiled nothing that the step calls, and said nothing: the training"
            " goes past the compiled call, or the compiler skips its frames; compile what the"
            " step really calls",
        )
    for reason in trial.cudagraph_skips:
        yield Fix(
            kind=FixKind.COMPILER,
            cause="CUDA_GRAPHS_SKIPPED",
            what=f"{name} left CUDA graphs out: {reason}",
        )


_ENDED = {
    TrialStatus.FAILED_TO_COMPILE: "cannot be compiled",
    TrialStatus.CRASHED: "crashed",
    TrialStatus.OUT_OF_MEMORY: "ran out of memory",
    TrialStatus.TIMED_OUT: "took too long",
    TrialStatus.CUT_OFF: "was cut off",
    TrialStatus.DISAGREES: "does not agree with eager",
}


def _shouted(kind: str, status: TrialStatus) -> str:
    if status is TrialStatus.DISAGREES:
        return "NUMBERS_DIFFER"
    return kind.upper() if kind.islower() else status.value


def _summary(trial: Trial | None, found: Iterable[Fix]) -> Iterator[str]:
    """Yields what is wrong first: what ran compiled, what keeps the rest, what the best mend is."""
    if trial is None:
        yield "No configuration was tried, so there is nothing to explain."
        return
    name = config_name(trial.config)
    if trial.status is not TrialStatus.OK:
        message = trial.failure.message if trial.failure else trial.status.value.lower()
        yield f"{name} {_ENDED[trial.status]}: {message}."
        return
    ran = f"{name} captured {number_of(trial.graphs or 0, 'graph')}"
    if trial.coverage is not None:
        ran += f" that hold {trial.coverage:.0%} of the operator calls"
    if trial.speedup is not None:
        ran += f", and a step is {ratio(trial.speedup)} as fast as eager"
    yield ran + "."
    yield _obstacles(trial)
    best = next((fix for fix in found if fix.gain and fix.gain.median > 1), None)
    if best is not None and best.gain is not None:
        how = "measured" if best.measured else "an estimate"
        named = best.cause.replace("_", " ").lower()
        place = f" at {best.file.rpartition('/')[2]}:{best.line}" if best.file else ""
        yield f"The mend that pays most: {named}{place}, {ratio(best.gain)} ({how})."


def _obstacles(trial: Trial) -> str:
    sites, again = len(trial.graph_breaks), sum(r.count for r in trial.recompiles)
    parts = [f"{number_of(sites, 'place')} end{'s' * (sites == 1)} a graph"] if sites else []
    if again:
        lost_s = sum(r.lost_s for r in trial.recompiles)
        parts.append(f"{number_of(again, 'recompile')} took {duration(lost_s)}")
    if trial.recompile_limit_hit:
        parts.append("the recompile limit was hit, and what it refused runs eager from then on")
    if not parts:
        return "Nothing ends a graph, and nothing is compiled twice."
    return "; ".join(parts) + "."
