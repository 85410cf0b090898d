"""From what a script's training showed in its first steps to an advice, as a campaign gives it."""

from __future__ import annotations

import math
import shlex
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from advisor import paste, wording
from advisor.decision import LARGE_DATA_WAIT, WIDE
from advisor.models.economics import DRAWS, Bill, Measured, bill
from advisor.models.evidence import Doubt
from advisor.models.loop_policy import LoopOutcome
from advisor.models.plan import Plan
from advisor.profiler.errors import AdvisorError
from advisor.profiler.records import (
    Advice,
    Alternative,
    Failure,
    Interval,
    Timing,
    Trial,
    TrialKind,
    TrialStatus,
)
from advisor.profiler.statistics import Z_95, StepDraws, half_width, interval
from advisor.profiler.units import count, duration, number_of, ratio
from advisor.script_run import ScriptRun
from advisor.watch_settings import Watched


def advice_of(
    run: ScriptRun, command: Sequence[str], plan: Plan, advice_id: str, created: str
) -> Advice:
    """Returns the advice that follows from what a script has shown.

    Raises `AdvisorError` when that is not enough for any.
    """
    seen = run.watched
    if seen is None or seen.outcome.eager_step_s is None or not _tells(seen):
        raise AdvisorError(*nothing_measured(run, shlex.join(command)))
    eager, trial = _eager(seen, f"{advice_id}-1"), _trial(seen, f"{advice_id}-2", run.took_s)
    billed = _bill(seen, plan) if trial.status is TrialStatus.OK and trial.graphs != 0 else None
    advice = _without_bill(seen, (eager, trial), plan, run.took_s)
    if billed is not None:
        advice = _with_bill(advice, billed, seen, plan)
    return replace(
        advice,
        advice_id=advice_id,
        created=created,
        target=shlex.join(command),
        warnings=tuple(_warnings(seen, billed)),
    )


def nothing_measured(run: ScriptRun, command: str) -> tuple[str, str, str]:
    """Returns why a script gave no verdict: what, why, and how to mend it."""
    seen = run.watched or Watched()
    steps = number_of(seen.optimizer_steps, "optimizer step")
    if seen.problem:
        return f"{command} was not measured", seen.problem, ""
    if run.code:
        how = f"with exit code {run.code}" if run.code > 0 else f"by {_signal(-run.code)}"
        return f"{command} failed by itself {how}", f"after {steps}, before it was measured", ""
    if not run.reached:
        return (
            f"{command} was not measured",
            "no Python that has compile-advisor ran in it",
            "install compile-advisor into the script's environment",
        )
    if run.code == 0:
        why = f"it took {steps}"
        if not seen.optimizer_steps:
            why = "no optimizer of torch has stepped"
        return f"{command} ended before it was measured", why, "let it train for longer"
    at = seen.outcome.eager_step_s
    each = f", an eager one takes {duration(at)}" if at else ""
    compiling = seen.outcome.compile_s
    spent = f" and {duration(compiling)} of compiling" if compiling else ""
    return (
        f"{command} was not measured within {duration(run.took_s)}",
        f"it came to {steps}{spent}{each}",
        "give it longer with --budget",
    )


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _tells(seen: Watched) -> bool:
    """Returns whether compiled steps were compared with eager ones, or why they cannot be."""
    outcome = seen.outcome
    stopped = seen.settled and not seen.problem and bool(outcome.failure or outcome.reason)
    return outcome.speedup is not None or stopped


def _eager(seen: Watched, trial_id: str) -> Trial:
    step_s = _exactly(seen.outcome.eager_step_s or 0.0)
    return Trial(
        trial_id=trial_id,
        kind=TrialKind.EAGER,
        status=TrialStatus.OK,
        eager_step_s=step_s,
        eager=Timing(step_s=step_s, data_wait_s=seen.wait_s, steps=seen.outcome.steps_done),
        workload=seen.facts,
        environment=seen.environment,
    )


def _trial(seen: Watched, trial_id: str, took_s: float) -> Trial:
    outcome, speedup = seen.outcome, seen.outcome.speedup
    step_s = outcome.eager_step_s or 0.0
    status, failure = TrialStatus.OK, None
    if outcome.failure:
        status, failure = (
            TrialStatus.FAILED_TO_COMPILE,
            Failure(kind="loop", message=outcome.failure),
        )
    elif speedup is None:
        status, failure = TrialStatus.CUT_OFF, Failure(kind="loop", message=outcome.reason)
    return Trial(
        trial_id=trial_id,
        kind=TrialKind.COMPILE,
        status=status,
        config=seen.config,
        failure=failure,
        eager_step_s=_exactly(step_s),
        step_s=_compiled_s(step_s, speedup) if speedup else None,
        speedup=speedup,
        cold_start_s=outcome.compile_s if speedup else None,
        graphs=seen.graphs,
        form="forward" if seen.facts and seen.facts.torch_class else "call",
        workload=seen.facts,
        environment=seen.environment,
        wall_s=took_s,
    )


def _bill(seen: Watched, plan: Plan) -> Bill:
    outcome = seen.outcome
    measured = Measured(
        pairs=(),
        cold_start_s=outcome.compile_s,
        data_wait_s=seen.wait_s or 0.0,
        draws=_draws(outcome),
    )
    return bill(plan, _steps(seen, plan), measured)


def _draws(outcome: LoopOutcome) -> StepDraws:
    """Returns step times with the spread of the speedup that was measured, either side its own."""
    found, eager_s = outcome.speedup, outcome.eager_step_s or 0.0
    assert found is not None
    normal = np.random.default_rng(0).standard_normal(DRAWS)
    below = math.log(found.median / found.low) / Z_95
    above = math.log(found.high / found.median) / Z_95
    ratios = found.median * np.exp(np.where(normal < 0, below, above) * normal)
    return StepDraws(np.full(DRAWS, eager_s), eager_s / ratios)


def _without_bill(seen: Watched, trials: tuple[Trial, Trial], plan: Plan, took_s: float) -> Advice:
    _, trial = trials
    steps = _steps(seen, plan)
    total = _exactly(steps * ((seen.outcome.eager_step_s or 0.0) + (seen.wait_s or 0.0)))
    why = trial.failure.message if trial.failure else ""
    if trial.graphs == 0:
        why = wording.sentence_of_doubt(trial, Doubt.NO_GRAPH)
    return Advice(
        advice_id="",
        created="",
        enable=False,
        target="",
        config=None,
        code="",
        speedup=None,
        compile_s=None,
        saved_s=None,
        eager_total_s=total,
        advised_total_s=total,
        break_even_step=None,
        p_saves=0.0,
        reasons=(f"{wording.all_failed(['compiling'], why)}",),
        steps=steps,
        alternatives=(Alternative(config=seen.config, why_not=why),),
        trials=trials,
        workload=seen.facts,
        environment=seen.environment,
        campaign_s=took_s,
    )


def _with_bill(advice: Advice, billed: Bill, seen: Watched, plan: Plan) -> Advice:
    common = replace(
        advice,
        eager_total_s=billed.eager_total_s,
        break_even_step=billed.break_even_step,
        p_saves=billed.p_saves,
        alternatives=(),
    )
    if billed.p_saves < plan.confidence:
        why = wording.not_paying(billed, plan)
        return replace(
            common,
            advised_total_s=billed.eager_total_s,
            reasons=(wording.stay_eager(seen.config, why),),
            alternatives=(Alternative(config=seen.config, why_not=why, total_s=billed.total_s),),
        )
    form = advice.trials[-1].form
    return replace(
        common,
        enable=True,
        config=seen.config,
        code=paste.code(seen.config, seen.facts, form) if seen.facts else "",
        speedup=billed.speedup,
        compile_s=billed.compile_s,
        saved_s=billed.saved_s,
        advised_total_s=billed.total_s,
        reasons=tuple(_reasons(billed, seen, plan, advice.campaign_s)),
        gpu_hours_saved=billed.hours_saved,
        money_saved=billed.money_saved,
    )


def _reasons(billed: Bill, seen: Watched, plan: Plan, took_s: float) -> Iterator[str]:
    yield (
        f"A step takes {duration(billed.step_s.median)} instead of "
        f"{duration(billed.eager_step_s.median)}: {ratio(billed.speedup)} faster, compared in "
        f"turns within the first {count(seen.outcome.steps_done)} steps of the script."
    )
    yield wording.pays_back(billed, plan)
    yield wording.saves(billed)
    if plan.price_per_hour:
        yield wording.worth(billed, plan.price_per_hour)
    yield wording.campaign_against_savings(took_s, billed.saved_s)


def _warnings(seen: Watched, billed: Bill | None) -> Iterator[str]:
    if billed is None:
        return
    if billed.data_wait_share > LARGE_DATA_WAIT:
        yield wording.waits_for_data(billed.data_wait_share)
    if half_width(billed.speedup) > WIDE:
        yield wording.wide(seen.config, billed.speedup, half_width(billed.speedup))
    if not seen.settled:
        yield "The measuring was cut short: with a longer --budget the figures are surer."
    if seen.ranks > 1:
        yield f"Times are those of the slowest of {seen.ranks} ranks."


def _steps(seen: Watched, plan: Plan) -> float:
    return plan.steps_planned((seen.outcome.eager_step_s or 0.0) + (seen.wait_s or 0.0))


def _exactly(seconds: float) -> Interval:
    return Interval(median=seconds, low=seconds, high=seconds)


def _compiled_s(eager_s: float, speedup: Interval) -> Interval:
    return interval([eager_s / speedup.low, eager_s / speedup.median, eager_s / speedup.high])
