"""Which shape policy to advise for lengths that vary, and what is said about each of them.

Pure: the options with their bills come from `models.shape_policies`. Buckets change which samples
meet in a batch, so they have to save more than a rounding error over batches as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from advisor import shape_wording, wording
from advisor.models.economics import Bill
from advisor.models.evidence import Base
from advisor.models.plan import Plan
from advisor.models.shape_policies import (
    RECOMPILE_LIMIT,
    Option,
    bucket_totals,
    lengths_of,
    options,
)
from advisor.profiler.records import (
    BatchShapes,
    Config,
    Dynamic,
    Lengths,
    PolicyTotal,
    ShapePolicy,
    Shapes,
    Trial,
    TrialKind,
    TrialStatus,
)
from advisor.profiler.settings import RECOMPILE_LIMIT as LIMIT_SETTING

# What sorting into buckets has to save of the total at least.
LEAST_OF_BUCKETS = 0.02
# Policies that need a compile for each shape: more of them than the limit need it raised.
_PER_SHAPE = (ShapePolicy.BUCKETS, ShapePolicy.PAD_TO_LONGEST)
_BY_CONFIG = {Dynamic.AUTO: ShapePolicy.AUTOMATIC, Dynamic.TRUE: ShapePolicy.DYNAMIC}


@dataclass(frozen=True, slots=True)
class Ordinary:
    """A configuration that was measured on the job's own batches, with its bill."""

    config: Config
    trial: Trial
    bill: Bill


class Choice:
    """The shape policies of one campaign, and the one that is advised if any is."""

    def __init__(
        self,
        trials: Sequence[Trial],
        common: Base,
        plan: Plan,
        ordinary: Sequence[Ordinary],
        best: Ordinary | None,
    ) -> None:
        """Bills every policy that was measured. `best` would be advised without them."""
        self._trials = trials
        self._common = common
        self._plan = plan
        self._ordinary = ordinary
        self._best = best
        self.data: Lengths | None = lengths_of(trials)
        self.options = options(self.data, trials, common, plan) if self.data else ()
        self.chosen = self._choose()

    @property
    def _now(self) -> Option:
        """Eager batches as they are: the first of the options."""
        return self.options[0]

    def _choose(self) -> Option | None:
        if not self.options:
            return None
        sure = [o for o in self._compared() if o.bill.p_saves >= self._plan.confidence]
        rival_s = self._now.bill.expected_total_s
        if self._best is not None:
            rival_s = min(rival_s, self._best.bill.expected_total_s)
        as_is = [o for o in sure if not o.bucketed]
        least = min(as_is, key=_total_s, default=None)
        if least is not None and _total_s(least) < rival_s:
            rival_s = _total_s(least)
        else:
            least = None
        in_buckets = min((o for o in sure if o.bucketed), key=_total_s, default=None)
        if in_buckets is not None and _total_s(in_buckets) < rival_s * (1 - LEAST_OF_BUCKETS):
            return in_buckets
        return least

    def config(self) -> Config | None:
        """Returns how the chosen policy is compiled, its limit of recompiles raised if need be."""
        chosen = self.chosen
        if chosen is None or chosen.config is None:
            return None
        if chosen.policy in _PER_SHAPE and chosen.compiles > RECOMPILE_LIMIT:
            raised = (LIMIT_SETTING, str(2 * chosen.compiles))
            return replace(chosen.config, options=tuple(sorted((*chosen.config.options, raised))))
        return chosen.config

    def shapes(self) -> Shapes | None:
        """Returns what is said about shapes; None where no batch was looked at."""
        eager = next((t for t in self._trials if t.kind is TrialKind.EAGER), None)
        facts = eager.workload if eager else None
        if eager is None or facts is None:
            return None
        if self.data is None or not self.options:
            return self._nothing_to_decide(eager, facts.batch_shapes)
        now, shown = self._now, self.chosen
        policy = shown.policy if shown is not None else self._advised_policy()
        padding = (shown or now).epoch.padding_share
        told = not self.data.whole_batches
        return Shapes(
            policy=policy,
            boundaries=shown.boundaries if shown is not None else (),
            padding_share=padding if told else None,
            padding_share_now=now.epoch.padding_share if told else None,
            policies=tuple(self._totals(told=told)),
            bucket_totals=bucket_totals(self.data, self._trials, self._common, self._plan),
        )

    def reasons(self) -> Iterator[str]:
        """Yields why the chosen policy is advised, the figures first."""
        chosen = self.chosen
        if chosen is None or self.data is None:
            return
        yield shape_wording.policy_faster(chosen)
        if chosen.compiles:
            yield wording.pays_back(chosen.bill, self._plan)
        yield wording.saves(chosen.bill)
        if chosen.bucketed and not self.data.whole_batches:
            yield shape_wording.buckets(chosen, self._now)
        config = self.config()
        if config is not None and config.options:
            yield shape_wording.limit_raised(chosen.compiles, RECOMPILE_LIMIT)

    def warnings(self) -> Iterator[str]:
        """Yields what static shapes would run into, and what has lengths of its own."""
        limit = self.limit()
        if limit is not None:
            yield limit
        facts = next((t.workload for t in self._trials if t.workload), None)
        if self.options and facts is not None and facts.generates and self.chosen is not None:
            yield shape_wording.GENERATION

    def limit(self) -> str | None:
        """Returns where compiling for each length alone would end, None where it would not."""
        found = next((o for o in self.options if o.policy is ShapePolicy.STATIC_PER_LENGTH), None)
        if found is not None and found.limit_step is not None:
            return shape_wording.per_length_limit(found, RECOMPILE_LIMIT, measured=True)
        now = self._now if self.options else None
        step = now.epoch.first_step_with(RECOMPILE_LIMIT + 1) if now else None
        compiled = next((o for o in self._ordinary if o.trial.graphs), None)
        if now is None or step is None or compiled is None:
            return None
        # What one graph took in the trial of the job's own batches stands for each of them.
        each_s = (compiled.trial.cold_start_s or 0.0) / (compiled.trial.graphs or 1)
        estimated = replace(now, limit_step=step, compile_s=each_s * RECOMPILE_LIMIT)
        return shape_wording.per_length_limit(estimated, RECOMPILE_LIMIT, measured=False)

    def _advised_policy(self) -> ShapePolicy:
        if self._best is None:
            return ShapePolicy.EAGER
        return _BY_CONFIG.get(self._best.config.dynamic, ShapePolicy.STATIC_PER_LENGTH)

    def _nothing_to_decide(self, eager: Trial, kind: BatchShapes) -> Shapes:
        profile = eager.step_profile
        padding = profile.padding_share if profile else None
        policy = ShapePolicy.STATIC
        if kind in (BatchShapes.LENGTH, BatchShapes.SEVERAL):
            policy = self._advised_policy()
        facts = eager.workload
        return Shapes(
            policy=policy,
            padding_share=padding,
            padding_share_now=padding,
            reason=shape_wording.no_policy(kind, facts.batches_seen if facts else 0),
        )

    def _totals(self, *, told: bool) -> Iterator[PolicyTotal]:
        """Yields every policy, the fastest first; those that were not measured last."""
        rows: list[tuple[PolicyTotal, Option | None]] = [
            (self._row(option, told=told), option) for option in self._compared()
        ]
        automatic = self._automatic()
        if automatic is not None:
            rows.append((self._row_of(automatic, told=told), None))
        rows.sort(key=lambda pair: pair[0].total_s.median if pair[0].total_s else 0.0)
        advised = self._advised_row(rows)
        winner_s = advised.total_s.median if advised and advised.total_s else None
        for row, option in rows:
            why_not = "" if row is advised else self._why(row, option, winner_s)
            yield replace(row, why_not=why_not)
        for trial in self._trials:
            failed = trial.kind is TrialKind.SHAPES and trial.status is not TrialStatus.OK
            if failed and trial.config is not None and trial.failure is not None:
                yield PolicyTotal(
                    policy=_policy_of(trial),
                    total_s=None,
                    compile_s=0.0,
                    compiles=0,
                    config=trial.config,
                    why_not=trial.failure.message,
                )

    def _compared(self) -> Iterator[Option]:
        """Yields the policies to compare: a whole measurement takes the place of a composed one."""
        composed = ShapePolicy.AUTOMATIC if self._automatic() is not None else None
        yield from (option for option in self.options if option.policy is not composed)

    def _row(self, option: Option, *, told: bool) -> PolicyTotal:
        return PolicyTotal(
            policy=option.policy,
            total_s=option.bill.total_s,
            compile_s=option.compile_s,
            compiles=option.compiles,
            boundaries=option.boundaries,
            padding_share=option.epoch.padding_share if told else None,
            config=self.config() if option is self.chosen else option.config,
        )

    def _row_of(self, ordinary: Ordinary, *, told: bool) -> PolicyTotal:
        return PolicyTotal(
            policy=ShapePolicy.AUTOMATIC,
            total_s=ordinary.bill.total_s,
            compile_s=ordinary.trial.cold_start_s or 0.0,
            compiles=ordinary.trial.graphs or 0,
            padding_share=self._now.epoch.padding_share if told else None,
            config=ordinary.config,
        )

    def _advised_row(self, rows: Sequence[tuple[PolicyTotal, Option | None]]) -> PolicyTotal | None:
        if self.chosen is not None:
            return next(row for row, option in rows if option is self.chosen)
        policy = self._advised_policy()
        return next((row for row, _ in rows if row.policy is policy), None)

    def _why(self, row: PolicyTotal, option: Option | None, winner_s: float | None) -> str:
        """Returns why a policy is not the one advised."""
        total_s = row.total_s.median if row.total_s else 0.0
        more = shape_wording.policy_slower(total_s, winner_s) if winner_s is not None else ""
        if option is None or option.policy is ShapePolicy.EAGER:
            return more
        if option.policy is ShapePolicy.STATIC_PER_LENGTH:
            return self.limit() or more
        if option.bill.p_saves < self._plan.confidence:
            return wording.not_paying(option.bill, self._plan)
        if winner_s is not None and total_s < winner_s:
            return shape_wording.buckets_save_little(winner_s - total_s, winner_s)
        return more

    def _automatic(self) -> Ordinary | None:
        """Returns automatic dynamic shapes in the scope that does better with them."""
        found = [o for o in self._ordinary if o.config.dynamic is Dynamic.AUTO]
        plain = [o for o in found if not o.config.options and o.config.mode == Config().mode]
        return min(plain, key=lambda o: o.bill.expected_total_s, default=None)


def _total_s(option: Option) -> float:
    return option.bill.expected_total_s


def _policy_of(trial: Trial) -> ShapePolicy:
    if trial.mark_dynamic:
        return ShapePolicy.MARK_DYNAMIC
    static = trial.config is not None and trial.config.dynamic is Dynamic.FALSE
    return ShapePolicy.BUCKETS if static else ShapePolicy.DYNAMIC
