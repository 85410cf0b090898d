"""What to advise, from the trials of a campaign: compile how, or stay eager, and why.

The rule (design §6): the lowest expected total among the configurations that really ran compiled,
agree with eager, fit in memory and save time with at least the plan's confidence. The campaign's
own time is spent whatever is advised, so it never changes which configuration is best; the reasons
say how it compares with what is saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from advisor import paste, ranks_wording, wording
from advisor.models.economics import Bill, point_total_s
from advisor.models.evidence import Base, Doubt, Evidence, bill_of, doubt, gather
from advisor.models.plan import Plan
from advisor.models.scaling import scaling_of
from advisor.models.shape_policies import Option, base_of
from advisor.profiler import statistics
from advisor.profiler.diagnosis import Stakes, fixes
from advisor.profiler.errors import AdvisorError
from advisor.profiler.records import (
    Advice,
    Alternative,
    Config,
    HandOver,
    Interval,
    Scaling,
    Trial,
    TrialKind,
    TrialStatus,
    WorkloadFacts,
    WorkloadSpec,
)
from advisor.profiler.units import config_name
from advisor.request import AdviceRequest
from advisor.shape_advice import Choice, Ordinary

# A larger share of waiting than this is worth a warning before anything is compiled.
LARGE_DATA_WAIT = 0.2
# A half-width beyond this share of the speedup is called wide; 3 % is what a quiet machine gives.
WIDE = 0.03
# The flip must leave plain eager: beyond this the speedup is off by as much as it could gain.
FLIP_TOLERANCE = 0.03


@dataclass(frozen=True, slots=True)
class _Judged:
    """One configuration that was tried, with its bill where it could be billed."""

    evidence: Evidence
    doubt: Doubt | None
    bill: Bill | None
    confidence: float

    @property
    def config(self) -> Config:
        return self.evidence.config

    @property
    def billed(self) -> Bill:
        """The bill of a configuration that is known to have one."""
        if self.bill is None:
            raise ValueError(f"{config_name(self.config)} has no bill")
        return self.bill

    @property
    def ordinary(self) -> Ordinary:
        """The configuration with its bill, as shape policies are compared with it."""
        return Ordinary(self.config, self.evidence.trial, self.billed)

    @property
    def confident(self) -> bool:
        """Whether it saves time with the plan's confidence."""
        return self.bill is not None and self.bill.p_saves >= self.confidence

    @property
    def why(self) -> str:
        """Why it cannot be advised; "" when it can."""
        return wording.sentence_of_doubt(self.evidence.trial, self.doubt) if self.doubt else ""


def decide(
    request: AdviceRequest,
    trials: Sequence[Trial],
    campaign_s: float,
    advice_id: str,
    created: str,
    *,
    use_hand_over: bool = False,
) -> Advice:
    """Returns the advice that follows from `trials`.

    `campaign_s` is the wall time that they took, `created` an ISO 8601 time. With `use_hand_over`
    the real run is billed as starting from the kept cache, where its warm start was measured.
    Raises `AdvisorError` when no trial gave even an eager step time: there is nothing to advise on.
    """
    common = base_of(trials, request.plan)
    if common is None:
        raise AdvisorError("no trial could run", _first_failure(trials))
    judged = [_judge(e, common, request, use_hand_over) for e in gather(trials)]
    closest = _closest(judged)
    bill = closest.bill if closest else None
    best = closest if closest and closest.confident else None
    eager_total_s = bill.eager_total_s if bill else _eager_total(request.plan, trials, common)
    choice = Choice(
        trials,
        common,
        request.plan,
        [found.ordinary for found in judged if found.bill is not None],
        best.ordinary if best else None,
    )
    policy = choice.chosen
    advice = Advice(
        advice_id=advice_id,
        created=created,
        enable=False,
        target=request.workload.target,
        config=None,
        code="",
        speedup=None,
        compile_s=None,
        saved_s=None,
        eager_total_s=eager_total_s,
        advised_total_s=eager_total_s,
        break_even_step=bill.break_even_step if bill else None,
        p_saves=bill.p_saves if bill else 0.0,
        reasons=(),
        steps=request.plan.steps_planned(common.planned_step_s),
        fixes=fixes(trials, _stakes(request.plan, common)),
        shapes=choice.shapes(),
        scaling=_scaling(common, closest),
        alternatives=tuple(_alternatives(judged, trials, best, policy, request.plan)),
        warnings=tuple(
            dict.fromkeys(
                (
                    *_warnings(trials, judged, common),
                    *choice.warnings(),
                    *ranks_wording.not_scaled(request, common.spread),
                )
            )
        ),
        trials=tuple(trials),
        workload=_workload(trials),
        environment=next((t.environment for t in reversed(trials) if t.environment), None),
        campaign_s=campaign_s,
    )
    if policy is not None:
        reasons = (
            *choice.reasons(),
            wording.campaign_against_savings(campaign_s, policy.bill.saved_s),
        )
        return replace(_with_policy(advice, choice, policy), reasons=reasons)
    if best is None:
        reasons = tuple(_why_stay(judged, trials, request.plan, common, advice_id))
        reasons += tuple(
            ranks_wording.scaling(advice.scaling, closest.evidence if closest else None)
        )
        kept = _would_pay_from_cache(closest, request.plan, common)
        return replace(advice, reasons=reasons, hand_over=_hand_over(kept[0]) if kept else None)
    reasons = tuple(_why_compile(best, request.plan, common, advice, use_hand_over))
    reasons += tuple(ranks_wording.scaling(advice.scaling, best.evidence))
    if request.workload.ranks > 1:
        reasons += tuple(ranks_wording.reasons(request.workload, best.config, trials))
    return replace(_enabled(advice, best, request.workload), reasons=reasons)


def _scaling(common: Base, closest: _Judged | None) -> Scaling | None:
    """Returns a step on the plan's ranks, where they are more than were tried."""
    if common.spread is None:
        return None
    return scaling_of(common.spread, common.step_s, closest.bill if closest else None)


def _workload(trials: Sequence[Trial]) -> WorkloadFacts | None:
    """Returns the facts of the job: the last trial's, with the lengths that the eager one saw."""
    known = [trial.workload for trial in trials if trial.workload is not None]
    if not known:
        return None
    eager = next((t.workload for t in trials if t.kind is TrialKind.EAGER and t.workload), known[0])
    return replace(
        known[-1],
        shapes=eager.shapes,
        batches_seen=eager.batches_seen,
        batch_shapes=eager.batch_shapes,
        lengths=eager.lengths,
        most_positions=eager.most_positions,
        generates=eager.generates,
    )


def _stakes(plan: Plan, common: Base) -> Stakes:
    """Returns what a mend is weighed against under this plan."""
    return Stakes(
        total_s=plan.steps_planned(common.planned_step_s) * common.planned_step_s,
        starts=1 + plan.restarts,
        price_per_hour=plan.price_per_hour,
        evaluates=bool(plan.eval_every),
    )


def _enabled(advice: Advice, best: _Judged, workload: WorkloadSpec) -> Advice:
    """Returns the advice with the figures and the code of the best configuration."""
    bill, trial = best.billed, best.evidence.trial
    # Where nothing breaks a graph, `fullgraph` keeps it so: a later break is an error, not a loss.
    config = replace(best.config, fullgraph=_whole(trial))
    return replace(
        advice,
        enable=True,
        config=config,
        code=_code(config, advice.workload, workload, trial.form) if advice.workload else "",
        speedup=bill.speedup,
        compile_s=bill.compile_s,
        saved_s=bill.saved_s,
        advised_total_s=bill.total_s,
        hand_over=_hand_over(trial),
        gpu_hours_saved=bill.hours_saved,
        money_saved=bill.money_saved,
    )


def _code(config: Config, facts: WorkloadFacts, workload: WorkloadSpec, form: str) -> str:
    if workload.ranks > 1:
        return paste.spread(config, workload, facts, form)
    return wording.code(config, facts, form)


def _with_policy(advice: Advice, choice: Choice, policy: Option) -> Advice:
    """Returns the advice with the figures and the code of a shape policy."""
    bill, trial, config, facts = policy.bill, policy.trial, choice.config(), advice.workload
    if config is not None and trial is not None:
        config = replace(config, fullgraph=_whole(trial))
    code = []
    if config is not None and trial is not None and facts is not None:
        code.append(wording.code(config, facts, trial.form))
    code.append(paste.batches(policy.policy, policy.boundaries, choice.data))
    # What a trial along the lengths compiled serves any length only if it was made for all.
    kept = trial if trial is not None and config is not None and not policy.boundaries else None
    return replace(
        advice,
        enable=config is not None,
        config=config,
        code="\n\n".join(part for part in code if part),
        speedup=bill.speedup,
        compile_s=bill.compile_s,
        saved_s=bill.saved_s,
        advised_total_s=bill.total_s,
        break_even_step=bill.break_even_step,
        p_saves=bill.p_saves,
        hand_over=_hand_over(kept) if kept is not None else None,
        gpu_hours_saved=bill.hours_saved,
        money_saved=bill.money_saved,
    )


def _hand_over(trial: Trial) -> HandOver | None:
    if not trial.cache_folder:
        return None
    return HandOver(path=trial.cache_folder, bytes=trial.cache_bytes)


def _would_pay_from_cache(
    closest: _Judged | None, plan: Plan, common: Base
) -> tuple[Trial, Bill] | None:
    """Returns the trial whose cache makes its configuration pay, which does not from cold."""
    if closest is None or not closest.evidence.trial.cache_folder:
        return None
    warm = bill_of(closest.evidence, common, plan, hand_over=True)
    return (closest.evidence.trial, warm) if warm.p_saves >= plan.confidence else None


def _whole(trial: Trial) -> bool:
    """Returns whether every frame was captured as one graph, without limit and without skips."""
    return not (trial.graph_breaks or trial.skipped_frames or trial.recompile_limit_hit)


def _judge(
    evidence: Evidence, common: Base, request: AdviceRequest, use_hand_over: bool
) -> _Judged:
    found = doubt(evidence, request.limits.memory_limit_bytes)
    if found is not None:
        return _Judged(evidence, found, None, request.plan.confidence)
    bill = bill_of(evidence, common, request.plan, hand_over=use_hand_over)
    return _Judged(evidence, None, bill, request.plan.confidence)


def _closest(judged: Sequence[_Judged]) -> _Judged | None:
    """Returns what has the lowest expected total of those that reach the confidence.

    Where none reaches it, the one that is likeliest to save.
    """
    usable = [found for found in judged if found.bill is not None]
    confident = [found for found in usable if found.confident]
    if confident:
        return min(confident, key=lambda found: found.billed.expected_total_s)
    order = [(-found.billed.p_saves, found.billed.expected_total_s) for found in usable]
    return usable[order.index(min(order))] if usable else None


def _eager_total(plan: Plan, trials: Sequence[Trial], common: Base) -> Interval:
    """Returns the eager total where no configuration was billed: by the spread of eager steps."""
    steps = plan.steps_planned(common.planned_step_s)
    waiting_s = steps * common.data_wait_s
    work_s = point_total_s(plan, steps, common.planned_step_s, 0.0, 0.0)
    timings = [t.eager.step_s if t.eager else t.eager_step_s for t in trials]
    figure = next((timing for timing in timings if timing is not None), None)
    low, high = (figure.low / figure.median, figure.high / figure.median) if figure else (1.0, 1.0)
    return Interval(
        median=work_s + waiting_s, low=work_s * low + waiting_s, high=work_s * high + waiting_s
    )


def _why_compile(
    best: _Judged, plan: Plan, common: Base, advice: Advice, use_hand_over: bool
) -> Iterator[str]:
    bill, evidence = best.billed, best.evidence
    yield wording.faster(bill, evidence)
    yield wording.pays_back(bill, plan)
    yield wording.saves(bill)
    if _whole(evidence.trial):
        yield wording.FULLGRAPH
    if plan.restarts:
        warm_s = evidence.warm_start_s
        cold_s = evidence.trial.cold_start_s or 0.0
        yield wording.restarts(plan.restarts, cold_s, warm_s)
    if plan.price_per_hour:
        yield wording.worth(bill, plan.price_per_hour)
    yield wording.campaign_against_savings(advice.campaign_s, bill.saved_s)
    if evidence.warm_start_s is not None and evidence.trial.cache_folder:
        cold = bill_of(evidence, common, plan)
        warm = bill_of(evidence, common, plan, hand_over=True)
        yield wording.hand_over(advice.advice_id, warm, cold, use_hand_over)


def _why_stay(
    judged: Sequence[_Judged], trials: Sequence[Trial], plan: Plan, common: Base, advice_id: str
) -> Iterator[str]:
    """Yields the reasons for eager, the one that matters most first."""
    closest = _closest(judged)
    skipped = [t for t in trials if t.status is TrialStatus.SKIPPED and t.config and t.failure]
    skipped = [t for t in skipped if t.kind is TrialKind.COMPILE]
    if closest is not None:
        yield wording.stay_eager(closest.config, wording.not_paying(closest.billed, plan))
        kept = _would_pay_from_cache(closest, plan, common)
        if kept is not None:
            yield wording.hand_over_would_pay(advice_id, kept[1])
    elif judged:
        # A compile that silently did nothing matters more than one that said that it failed.
        silent = [found for found in judged if found.doubt is not Doubt.FAILED]
        ordered = [*silent, *(found for found in judged if found not in silent)]
        yield wording.all_failed([config_name(found.config) for found in ordered], ordered[0].why)
        for found in ordered[1:]:
            yield wording.named(found.config, found.why)
    elif skipped:
        # That it could not pay holds for any budget; the other reasons could be mended.
        first = min(skipped, key=lambda t: t.failure is None or t.failure.kind != "cannot_pay")
        yield wording.nothing_tried(first.config, first.failure.message if first.failure else "")
    else:
        yield wording.nothing_to_try()


def _alternatives(
    judged: Sequence[_Judged],
    trials: Sequence[Trial],
    best: _Judged | None,
    policy: Option | None,
    plan: Plan,
) -> Iterator[Alternative]:
    """Yields every configuration that is not advised: the billed ones first, by their total."""
    winner = None if best is None else (best.billed, config_name(best.config))
    if policy is not None:
        winner = policy.bill, f"the shape policy {policy.policy.value}"
    billed = sorted(
        (found for found in judged if found.bill and (policy or found is not best)),
        key=lambda found: found.billed.expected_total_s,
    )
    for found in billed:
        if winner is not None and found.confident:
            why_not = wording.second_best(found.billed, *winner)
        else:
            why_not = wording.not_paying(found.billed, plan)
        yield Alternative(config=found.config, why_not=why_not, total_s=found.billed.total_s)
    for found in judged:
        if found.bill is None:
            yield Alternative(config=found.config, why_not=found.why)
    for trial in trials:
        # Those along the lengths are told with the shape policies.
        ordinary = trial.kind is TrialKind.COMPILE
        if ordinary and trial.status is TrialStatus.SKIPPED and trial.failure is not None:
            yield Alternative(config=trial.config, why_not=trial.failure.message)


def _warnings(trials: Sequence[Trial], judged: Sequence[_Judged], common: Base) -> Iterator[str]:
    for trial in trials:
        yield from trial.warnings
    shaky = [t.eager.spread for t in trials if t.eager and not t.eager.steady]
    if shaky:
        yield wording.unsteady(max(shaky))
    share = _data_wait_share(common)
    if share > LARGE_DATA_WAIT:
        yield wording.waits_for_data(share)
    for found in judged:
        yield from _warnings_of(found)
    for trial in trials:
        failed = trial.kind is TrialKind.WARM and trial.status is not TrialStatus.OK
        if failed and trial.config is not None:
            yield wording.warm_start_failed(trial)


def _warnings_of(found: _Judged) -> Iterator[str]:
    """Yields what makes the figures of one configuration that ran compiled less certain."""
    if found.bill is None:
        return
    trial, speedup = found.evidence.trial, found.bill.speedup
    if trial.recompile_limit_hit:
        yield wording.limit_warning(trial)
    if trial.flip_check is not None and abs(trial.flip_check - 1) > FLIP_TOLERANCE:
        yield wording.flip_warning(found.config, trial.flip_check)
    sigma = statistics.between_processes(found.evidence.pairs)
    if sigma > WIDE:
        yield wording.processes_disagree(found.config, sigma)
    elif statistics.half_width(speedup) > WIDE:
        yield wording.wide(found.config, speedup, statistics.half_width(speedup))


def _data_wait_share(common: Base) -> float:
    return common.data_wait_s / (common.data_wait_s + common.step_s)


def _first_failure(trials: Sequence[Trial]) -> str:
    reasons = [trial.failure.message for trial in trials if trial.failure]
    return reasons[0] if reasons else "no eager step was measured"
