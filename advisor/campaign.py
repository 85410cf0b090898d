"""Which trial comes next, and which configurations are not worth one (the simple campaign).

Eager facts first, then regional, then the whole model, then the other modes, then the warm start of
what would be advised. A trial has a price, and a configuration whose best case cannot bring it back
is recorded as skipped, with the reason. Pure: nothing is run here, and time is passed in.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from advisor import orders, shape_wording, wording
from advisor.beliefs import Beliefs, Known, Worth
from advisor.models.best_case import USUAL_WARM_SHARE, WARM_SHARE, BestCase, Seen, best_case
from advisor.models.economics import Bill, point_total_s
from advisor.models.evidence import Base, Doubt, Evidence, bill_of, doubt, gather
from advisor.models.shape_policies import Option, base_of, lengths_of, options, padding_gain
from advisor.outlook import Outlook, Skip
from advisor.profiler.diagnosis import what_if_configs
from advisor.profiler.lengths import rows_at
from advisor.profiler.records import (
    Config,
    Dynamic,
    Failure,
    Interval,
    Mode,
    Scope,
    Trial,
    TrialKind,
    TrialStatus,
    WorkloadSpec,
    Wrapper,
)
from advisor.profiler.statistics import half_width, speedup
from advisor.profiler.units import config_name
from advisor.request import AdviceRequest
from advisor.shape_trials import shape_trials

CUDA_GRAPH_MODES = frozenset({Mode.REDUCE_OVERHEAD, Mode.MAX_AUTOTUNE})
_ALL_MODES = (
    Mode.DEFAULT,
    Mode.REDUCE_OVERHEAD,
    Mode.MAX_AUTOTUNE_NO_CUDAGRAPHS,
    Mode.MAX_AUTOTUNE,
)
_FIRST = (Config(scope=Scope.REGIONAL), Config(scope=Scope.MODEL))
# A trial before anything is known: torch imported, the model built, eager steps made steady.
EAGER_TRIAL_S = 25.0
EAGER = "eager"
# The winner is measured in further processes, so many at least and until its speedup is known to
# this share of itself, as long as each of them takes no more than this share of the plan.
_NARROW = 0.03
_LEAST_WARM_TRIALS = 2
_MOST_WARM_TRIALS = 5
_MOST_SHARE_OF_PLAN = 0.05
# Settings of the compiler that a campaign tries beside the configurations themselves.
_MOST_WHAT_IFS = 4
# ABBA: a quad is four blocks of at least one step.
BLOCKS_OF_QUAD = 4

# What a failure says about all configurations of the same backend: they need the same tools.
_MISSING_TOOLS = re.compile(
    r"no working c\+\+ compiler|InvalidCxxCompiler|c\+\+ compiler|cannot find a working triton"
    r"|TritonMissing|GPUTooOldForTriton|python 3\.\d+\+? (?:is )?not (?:yet )?supported",
    re.IGNORECASE,
)
# How an end in mode default speaks for the other modes of its scope: they run the same front end,
# or compile for at least as long.
_SPEAKS_FOR_MODES = {
    Doubt.NO_GRAPH: "ran without any graph, and the mode does not change what is captured",
    Doubt.NOT_COVERED: "hardly ran compiled, and the mode does not change what is captured",
}
_STATUS_SPEAKS_FOR_MODES = {
    TrialStatus.FAILED_TO_COMPILE: "failed in the part that all modes share",
    TrialStatus.CRASHED: "crashed in the part that all modes share",
    TrialStatus.TIMED_OUT: "compiled for too long, and this compiles no faster",
    TrialStatus.CUT_OFF: "compiled for too long, and this compiles no faster",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The trial to run next.

    `cut_off_s` is the compile time beyond which the configuration can only lose, `expected_s` what
    the trial will probably take, `budget_left_s` the longest it may take in all.
    """

    kind: TrialKind
    config: Config | None
    cut_off_s: float | None
    plan_steps: float | None
    why: str
    expected_s: float
    # Where a warm start finds the cache: the folder of the trial that it repeats.
    from_folder: str | None = None
    budget_left_s: float | None = None
    # What compiling is believed to take, to tell how long it may still take.
    compile_s: Interval | None = None
    # The plan's total with the best so far, as a share of eager's.
    rival_share: float = 1.0
    # Rows and padded length of the batches to measure, and whether the length is marked dynamic.
    shapes: tuple[tuple[int, int], ...] = ()
    mark_dynamic: bool = False


def first_candidates(workload: WorkloadSpec) -> tuple[Config, ...]:
    """Returns the configurations that are tried before any other: both scopes in mode default.

    With several ranks these in each order of compiling and wrapping that is one of its own.
    """
    if workload.ranks == 1:
        return _FIRST
    return orders.candidates(workload.wrapper)


def candidates(
    request: AdviceRequest, device: str, shapes: int, like: Config
) -> tuple[Config, ...]:
    """Returns all configurations to consider, in the order of trying.

    The further modes are tried as `like` is compiled; `shapes` is the number of batch shapes.
    """
    if request.limits.configs:
        wanted = request.limits.configs
        if request.workload.ranks > 1:
            wanted = orders.in_each_order(wanted, request.workload.wrapper)
        return tuple(dict.fromkeys(wanted))
    further = [replace(like, dynamic=Dynamic.TRUE)] if shapes > 1 else []
    further += [
        replace(like, mode=mode)
        for mode in _ALL_MODES[1:]
        if device == "cuda" or mode not in CUDA_GRAPH_MODES
    ]
    if request.workload.wrapper is Wrapper.DDP and request.workload.ranks > 1:
        further += [replace(like, options=orders.WITHOUT_DDP_OPTIMIZER)]
    return (*first_candidates(request.workload), *further)


class Campaign:
    """The trials behind one piece of advice: says which comes next, and takes their results."""

    def __init__(
        self,
        request: AdviceRequest,
        *,
        new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
        believe: Callable[[Trial], Beliefs | None] = lambda _: None,
    ) -> None:
        """Makes a campaign that knows nothing yet. `new_id` names the skipped trials.

        `believe` gives what is believed of the job after its eager trial; without beliefs the best
        cases alone decide what is tried.
        """
        self._request = request
        self._believe = believe
        self._beliefs: Beliefs | None = None
        self._new_id = new_id
        self._trials: list[Trial] = []
        self._spent_s = 0.0
        self._known_options: tuple[int, tuple[Option, ...]] | None = None
        # Fixed once all of the first were looked at, so that no later figure reopens the campaign.
        self._like: Config | None = None

    @property
    def trials(self) -> tuple[Trial, ...]:
        """All trials so far in their order, the skipped ones included."""
        return tuple(self._trials)

    @property
    def eager(self) -> Trial | None:
        """The eager facts, None before they were measured."""
        return next((t for t in self._trials if t.kind is TrialKind.EAGER), None)

    @property
    def spent_s(self) -> float:
        """Seconds of all trials so far."""
        return self._spent_s

    def total_configurations(self) -> int:
        """Returns how many configurations are considered, skipped ones included."""
        return len(self._candidates())

    def add(self, trial: Trial, wall_s: float) -> None:
        """Takes the result of the trial that `next` asked for and the time that it took."""
        self._trials.append(trial)
        self._spent_s += wall_s
        if trial is self.eager:
            self._beliefs = self._believe(trial)

    def next(self) -> Step | None:
        """Returns the trial to run now, or None when the campaign is over.

        Configurations that are not worth a trial are added to `trials` as skipped on the way.
        Asking twice without a result in between gives the same answer.
        """
        if self.eager is None:
            return Step(
                kind=TrialKind.EAGER,
                config=None,
                cut_off_s=None,
                plan_steps=self._request.plan.steps,
                why=wording.EAGER_FIRST,
                expected_s=EAGER_TRIAL_S,
                budget_left_s=self._left_s(),
            )
        common = base_of(self._trials, self._request.plan)
        if self.eager.status is not TrialStatus.OK or common is None:
            return None
        wanted = self._candidates()
        first = first_candidates(self._request.workload)
        early = [config for config in wanted if config in first or config.options]
        return (
            self._first_of(early, common)
            or self._shape_step(common)
            or self._first_of(self._candidates(), common)
            or (None if self._anyway else self._warm_start(common) or self._one_first(common))
        )

    def _first_of(self, configs: Iterable[Config], common: Base) -> Step | None:
        """Returns the trial that is worth most for its price; those not worth one are skipped.

        Without beliefs it is the first that can pay at all.
        """
        for config, outlook in self._ranked(configs, common):
            expected_s = self._usual_s(common) + outlook.usual_compile_s
            skip = (
                self._impossible(config)
                or (None if self._all else outlook.not_worth_it())
                or self._unaffordable(expected_s)
            )
            if skip is not None:
                self._skip(config, skip)
                continue
            return Step(
                kind=TrialKind.COMPILE,
                config=config,
                cut_off_s=None if self._all else outlook.cut_off_s,
                plan_steps=outlook.steps,
                why=self._why(config, outlook),
                expected_s=expected_s,
                budget_left_s=self._left_s(),
                compile_s=outlook.worth.compile_s if outlook.worth else None,
                rival_share=1.0 if self._all else outlook.rival_share,
            )
        return None

    def _ranked(self, configs: Iterable[Config], common: Base) -> Iterator[tuple[Config, Outlook]]:
        """Yields the untried configurations, the one worth most for its price first."""
        untried = [
            (config, self._outlook(config, common))
            for config in configs
            if not any(t.config == config and t.kind is TrialKind.COMPILE for t in self._trials)
        ]
        yield from sorted(untried, key=lambda each: -each[1].gain_over_price)

    def _shape_step(self, common: Base) -> Step | None:
        """Returns the next trial along the lengths of the job, if they vary and it can pay."""
        data, eager = lengths_of(self._trials), self.eager
        if data is None or eager is None or self._request.limits.configs or self._anyway:
            return None
        gain = padding_gain(data, eager)
        for trial in shape_trials(self._like_which().scope, self._device()):
            if any(trial.is_of(t) for t in self._trials):
                continue
            lengths = trial.lengths(data, eager)
            # Without padding it could be faster by as much again; each length may compile anew.
            outlook = self._outlook(trial.config, common)
            compiles = len(lengths) if trial.config.dynamic is Dynamic.FALSE else 1
            best = replace(
                outlook.best,
                speedup=outlook.best.speedup * gain,
                compile_s=outlook.best.compile_s * compiles,
                usual_compile_s=outlook.best.usual_compile_s * compiles,
            )
            outlook = replace(outlook, best=best)
            expected_s = self._usual_s(common) + best.usual_compile_s
            skip = (
                self._impossible(trial.config)
                or outlook.not_worth_it()
                or self._unaffordable(expected_s)
            )
            if skip is not None:
                self._skip(trial.config, skip, TrialKind.SHAPES, mark_dynamic=trial.mark_dynamic)
                continue
            return Step(
                kind=TrialKind.SHAPES,
                config=trial.config,
                cut_off_s=outlook.cut_off_s,
                plan_steps=outlook.steps,
                why=shape_wording.along_lengths(
                    trial.config, lengths, mark_dynamic=trial.mark_dynamic
                ),
                expected_s=expected_s,
                budget_left_s=self._left_s(),
                shapes=tuple((rows_at(data, length), length) for length in lengths),
                mark_dynamic=trial.mark_dynamic,
            )
        return None

    def _options(self, common: Base) -> tuple[Option, ...]:
        """Returns the shape policies that pay, as far as they were measured."""
        data = lengths_of(self._trials)
        if data is None or self._anyway:
            return ()
        if self._known_options is None or self._known_options[0] != len(self._trials):
            # Without waiting for data, which no policy changes.
            found = options(
                data, self._trials, replace(common, data_wait_s=0.0), self._request.plan
            )
            self._known_options = (len(self._trials), found)
        least = self._request.plan.confidence
        return tuple(o for o in self._known_options[1] if o.bill.p_saves >= least)

    def _why(self, config: Config, outlook: Outlook) -> str:
        if self._anyway:
            return wording.to_learn_why(config)
        return wording.could_bring(config, outlook.best, outlook.best_s, outlook.now_s, outlook.now)

    def _candidates(self) -> tuple[Config, ...]:
        facts = self.eager.workload if self.eager else None
        # Along a length, trials of their own compare what `dynamic` brings.
        shapes = len(facts.shapes) if facts and lengths_of(self._trials) is None else 1
        wanted = candidates(self._request, self._device(), shapes, self._like_which())
        early = first_candidates(self._request.workload)
        first = [config for config in wanted if config in early]
        return tuple(dict.fromkeys((*first, *self._what_ifs(), *wanted)))

    def _what_ifs(self) -> Iterator[Config]:
        """Yields what was tried, with settings under which tracing it met fewer obstacles."""
        found = [config for t in self._trials for config in what_if_configs(t)]
        yield from found[:_MOST_WHAT_IFS]

    @property
    def _anyway(self) -> bool:
        """Whether trials are run to learn from them, whatever the plan is."""
        return self._request.limits.measure_anyway

    @property
    def _all(self) -> bool:
        """Whether every configuration that can run is measured, whether it pays or not."""
        return self._anyway or self._request.limits.exhaustive

    def _device(self) -> str:
        environment = self.eager.environment if self.eager else None
        device = environment.device if environment else self._request.workload.device
        return device.partition(":")[0]

    def _like_which(self) -> Config:
        """Returns the configuration in mode default that did best; the whole model when in doubt.

        The further modes are tried in its scope and order.
        """
        if self._like is not None:
            return self._like
        first = first_candidates(self._request.workload)
        common = base_of(self._trials, self._request.plan)
        totals = {
            e.config: self._bill(e, common).expected_total_s
            for e in gather(self._trials)
            if common and e.config in first and doubt(e, self._memory_limit()) is None
        }
        whole = next((config for config in first if config.scope is Scope.MODEL), first[0])
        like = min(totals, key=lambda config: totals[config]) if totals else whole
        if all(any(t.config == config for t in self._trials) for config in first):
            self._like = like
        return like

    def _outlook(self, config: Config, common: Base) -> Outlook:
        plan = self._request.plan
        steps = plan.steps_planned(common.planned_step_s)
        totals = [(point_total_s(plan, steps, common.planned_step_s, 0.0, 0.0), EAGER)]
        for evidence, found in self._paying(replace(common, data_wait_s=0.0)):
            totals.append((found.expected_total_s, config_name(evidence.config)))
        found_options = self._options(common)
        totals += [(o.bill.expected_total_s, o.policy.value) for o in found_options]
        now_s, now = min(totals)
        best = best_case(config, self._device(), self._seen())
        return Outlook(
            config=config,
            plan=plan,
            steps=steps,
            eager_step_s=common.planned_step_s,
            best=best,
            now_s=now_s,
            now=now,
            measuring_s=self._least_measuring_s(common) if now == EAGER else self._usual_s(common),
            worth=self._worth(config, common, best, now_s),
        )

    def _worth(self, config: Config, common: Base, best: BestCase, now_s: float) -> Worth | None:
        """Returns what a trial is believed to be worth; None where nothing is believed of it."""
        if self._beliefs is None or self._all or config.options:
            return None
        plan = self._request.plan
        return self._beliefs.worth(
            config,
            self._known(),
            plan=plan,
            steps=plan.steps_planned(common.planned_step_s),
            eager_step_s=common.planned_step_s,
            now_s=now_s,
            measuring_s=self._usual_s(common),
            most_speedup=best.speedup,
            least_compile_s=best.compile_s,
        )

    def _known(self) -> tuple[Known, ...]:
        """Returns what the configurations that really ran compiled showed."""
        return tuple(
            Known(e.config, speedup(e.pairs).median, e.trial.cold_start_s or 0.0)
            for e in gather(self._trials)
            if not e.config.options and doubt(e, self._memory_limit()) is None
        )

    def _unaffordable(self, expected_s: float) -> Skip | None:
        left_s, budget_s = self._left_s(), self._request.limits.budget_s
        if left_s is None or budget_s is None or expected_s <= left_s:
            return None
        return Skip("over_budget", wording.over_budget(expected_s, left_s, budget_s))

    def _impossible(self, config: Config) -> Skip | None:
        """Returns why a configuration cannot work here, whatever it would bring."""
        facts = self.eager.workload if self.eager else None
        if config.mode in CUDA_GRAPH_MODES and self._device() != "cuda":
            return Skip("not_on_device", wording.needs_cuda_graphs(config, self._device()))
        if config.scope is Scope.REGIONAL and not (facts and facts.blocks):
            return Skip("no_blocks", wording.no_blocks(facts))
        for evidence in gather(self._trials):
            because = self._rules_out(evidence, config)
            if because:
                found = doubt(evidence, self._memory_limit())
                return Skip("ruled_out", wording.ruled_out(evidence.trial, found, because))
        return None

    def _rules_out(self, evidence: Evidence, config: Config) -> str | None:
        """Returns why one configuration's end speaks for `config` too, or None when it does not."""
        trial, known = evidence.trial, evidence.config
        message = f"{trial.failure.kind} {trial.failure.message}" if trial.failure else ""
        if known.backend == config.backend and _MISSING_TOOLS.search(message):
            return "lacks a tool that this needs as well"
        alike = known.scope is config.scope and known.order is config.order
        if not alike or known.mode is not Mode.DEFAULT:
            return None
        if config.mode is Mode.DEFAULT and trial.status in (
            TrialStatus.TIMED_OUT,
            TrialStatus.CUT_OFF,
        ):
            # One compile for all shapes may well be faster than one for each.
            return None
        found = doubt(evidence, self._memory_limit())
        if found is Doubt.FAILED:
            return _STATUS_SPEAKS_FOR_MODES.get(trial.status)
        return _SPEAKS_FOR_MODES.get(found) if found else None

    def _skip(
        self,
        config: Config,
        skip: Skip,
        kind: TrialKind = TrialKind.COMPILE,
        *,
        mark_dynamic: bool = False,
    ) -> None:
        self._trials.append(
            Trial(
                trial_id=self._new_id(),
                kind=kind,
                mark_dynamic=mark_dynamic,
                status=TrialStatus.SKIPPED,
                config=config,
                failure=Failure(kind=skip.kind, message=skip.message),
            )
        )

    def _warm_start(self, common: Base) -> Step | None:
        """Returns the warm trial of what would be advised, if its figure is worth its price."""
        plan = self._request.plan
        best = min(self._paying(common), key=lambda found: found[1].expected_total_s, default=None)
        if best is None:
            return None
        evidence, _ = best
        trial = evidence.trial
        total_s = self._bill(evidence, replace(common, data_wait_s=0.0)).expected_total_s
        if any(o.bill.expected_total_s < total_s for o in self._options(common)):
            # It will not be advised.
            return None
        if not trial.cache_folder:
            return None
        cold = trial.cold_start_s or 0.0
        expected = self._startup_s() + USUAL_WARM_SHARE * cold
        expected += self._request.measuring.max_warm_steady_s
        left = self._left_s()
        tried = [t for t in self._trials if t.kind is TrialKind.WARM and t.config == trial.config]
        if tried:
            why = self._why_once_more(evidence, tried, expected, common)
        elif plan.restarts > 0 or cold * (1 - WARM_SHARE) > expected:
            why = wording.warm_start_wanted(evidence.config, cold, plan.restarts)
        else:
            why = ""
        if not why or (left is not None and expected > left):
            return None
        return Step(
            kind=TrialKind.WARM,
            config=evidence.config,
            cut_off_s=None,
            plan_steps=plan.steps_planned(common.planned_step_s),
            why=why,
            expected_s=expected,
            from_folder=trial.cache_folder,
            budget_left_s=left,
        )

    def _one_first(self, common: Base) -> Step | None:
        """Returns the trial in which one rank of what would be advised compiles before the others.

        What it can save is what the ranks compile at the same time; it is worth a trial where that
        takes longer than the trial's own start.
        """
        best = min(self._paying(common), key=lambda found: found[1].expected_total_s, default=None)
        if best is None or self._request.workload.ranks == 1:
            return None
        trial, left = best[0].trial, self._left_s()
        cold = trial.cold_start_s or 0.0
        expected = self._startup_s() + cold + self._request.measuring.max_warm_steady_s
        tried = any(
            t.kind is TrialKind.ONE_FIRST and t.config == trial.config for t in self._trials
        )
        if tried or cold < self._startup_s() or (left is not None and expected > left):
            return None
        return Step(
            kind=TrialKind.ONE_FIRST,
            config=trial.config,
            cut_off_s=None,
            plan_steps=self._request.plan.steps_planned(common.planned_step_s),
            why=wording.one_rank_first(best[0].config, cold),
            expected_s=expected,
            budget_left_s=left,
        )

    def _why_once_more(
        self, evidence: Evidence, tried: list[Trial], expected_s: float, common: Base
    ) -> str:
        """Returns why one more process is to measure what would be advised; "" when none is.

        Processes differ by more than the quads within one tell (Kalibera and Jones, see
        `statistics`), so it takes several of them, not longer ones, to narrow the interval.
        """
        plan = self._request.plan
        total_s = plan.steps_planned(common.planned_step_s) * common.planned_step_s
        cheap = expected_s <= _MOST_SHARE_OF_PLAN * total_s
        ended_well = all(t.status is TrialStatus.OK for t in tried)
        width = half_width(speedup(evidence.pairs))
        wanted = _MOST_WARM_TRIALS if width > _NARROW else _LEAST_WARM_TRIALS
        if len(tried) < wanted and cheap and ended_well:
            return wording.one_more_process(evidence.config, width)
        return ""

    def _paying(self, common: Base) -> Iterator[tuple[Evidence, Bill]]:
        """Yields what would be advised if an unknown warm start turned out as short as any."""
        plan = self._request.plan
        for evidence in gather(self._trials):
            if doubt(evidence, self._memory_limit()) is None:
                found = self._bill(evidence, common)
                if found.p_saves >= plan.confidence:
                    yield evidence, found

    def _bill(self, evidence: Evidence, common: Base) -> Bill:
        return bill_of(evidence, common, self._request.plan, warm_share=WARM_SHARE)

    def _memory_limit(self) -> int | None:
        return self._request.limits.memory_limit_bytes

    def _left_s(self) -> float | None:
        budget = self._request.limits.budget_s
        return None if budget is None else max(0.0, budget - self._spent_s)

    def _startup_s(self) -> float:
        """Returns what a further trial takes before it compiles: what the eager one took."""
        return self.eager.wall_s if self.eager and self.eager.wall_s else EAGER_TRIAL_S

    def _least_measuring_s(self, common: Base) -> float:
        measuring = self._request.measuring
        least = measuring.min_quads * BLOCKS_OF_QUAD * common.step_s
        return min(least, measuring.max_steady_s)

    def _usual_s(self, common: Base) -> float:
        """Returns what a trial usually takes beside compiling.

        Loading and warming up, and a steady phase between the shortest and the longest.
        """
        longest_s = self._request.measuring.max_steady_s
        return self._startup_s() + (self._least_measuring_s(common) + longest_s) / 2

    def _seen(self) -> tuple[Seen, ...]:
        """Returns what the trials so far showed of this workload's gains and compile times."""
        found = []
        for evidence in gather(self._trials):
            trial = evidence.trial
            usable = doubt(evidence, self._memory_limit()) is None
            if usable and trial.cold_start_s is not None:
                high = speedup(evidence.pairs).high
                settled = not trial.recompile_limit_hit
                found.append(Seen(evidence.config, high, trial.cold_start_s, settled))
        return tuple(found)
