"""Is the cost model honest on families that it has not seen?

    python bench/prior.py

Leaves out one family of architectures after the other, fits on the rest (calibration included) and
compares with the rows left out: median absolute error of the speedup, share of rows within the 90 %
interval, median factor of the compile time; beside it the corpus median, the family's own median
(which has seen the rows that it is judged by) and physics alone. Then the cases that people quote,
and what own outcomes of this machine bring on those held out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from campaigns import machine, verdict

from advisor.job_facts import JobFacts
from advisor.models import corpus, prior_fit
from advisor.models.examples import Example, examples, facts_of
from advisor.models.features import gain_by_physics, rooflines
from advisor.models.learning import Outcome, shifts
from advisor.models.prior import Prior
from advisor.profiler.records import Config, Mode

MOST_ERROR, LEAST_COVER, MOST_COVER, MOST_FACTOR = 0.10, 0.86, 0.94, 1.6


def main() -> None:
    """Prints the tables and ends with 1 when a claim does not hold."""
    rows = [row for row in corpus.published() if row.training and row.fit and row.speedup]
    known = examples(corpus.all_rows())
    scores = _left_out(rows, known)
    _print_table(scores)
    ok = _claims(scores)
    prior = prior_fit.fit(known)
    _constants(known)
    ok &= _quoted(prior)
    ok &= _learning(prior)
    print(machine())
    verdict("the cost model on unseen families", ok=ok)


class Score:
    """What was said of each row of one family, and what it was."""

    def __init__(self) -> None:
        self.errors: list[float] = []
        self.inside: list[bool] = []
        self.factors: list[float] = []
        self.truth: list[float] = []
        self.physics: list[float] = []


def _left_out(rows: Sequence[corpus.CorpusRow], known: Sequence[Example]) -> dict[str, Score]:
    scores: dict[str, Score] = defaultdict(Score)
    for family in sorted({row.family for row in rows}):
        prior = prior_fit.fit([each for each in known if each.facts.family != family])
        for row in rows:
            facts = facts_of(row) if row.family == family else None
            if facts is None or row.speedup is None:
                continue
            said = prior.estimate(facts)
            score, truth = scores[family], math.log(row.speedup)
            score.truth.append(truth)
            score.errors.append(math.exp(said.speedup.quantile_log(0.5) - truth) - 1)
            interval = said.speedup.interval()
            score.inside.append(interval.low <= row.speedup <= interval.high)
            score.physics.append(math.log(gain_by_physics(facts)))
            if row.compile_s:
                off = said.compile_s.quantile_log(0.5) - math.log(row.compile_s)
                score.factors.append(math.exp(abs(off)))
    return scores


def _print_table(scores: dict[str, Score]) -> None:
    truth = np.concatenate([score.truth for score in scores.values()])
    print(f"{'family':34} {'rows':>5} {'error':>7} {'corpus':>7} {'family':>7} {'inside':>7} "
          f"{'compile':>8}")  # fmt: skip
    for name, score in sorted(scores.items(), key=lambda each: -len(each[1].truth)):
        others = np.concatenate([s.truth for n, s in scores.items() if n != name])
        own = np.asarray(score.truth)
        print(
            f"{name[:34]:34} {len(own):5} {_median_error(score.errors):7.1%} "
            f"{np.median(np.abs(np.exp(np.median(others) - own) - 1)):7.1%} "
            f"{np.median(np.abs(np.exp(np.median(own) - own) - 1)):7.1%} "
            f"{np.mean(score.inside):7.1%} "
            f"{np.median(score.factors) if score.factors else math.nan:7.2f}x"
        )
    print(f"{len(truth)} rows")


def _claims(scores: dict[str, Score]) -> bool:
    errors = [error for score in scores.values() for error in score.errors]
    inside = [each for score in scores.values() for each in score.inside]
    factors = [each for score in scores.values() for each in score.factors]
    corpus_errors, family_errors, physics_errors = [], [], []
    for name, score in scores.items():
        own = np.asarray(score.truth)
        others = np.concatenate([s.truth for n, s in scores.items() if n != name])
        corpus_errors += list(np.exp(np.median(others) - own) - 1)
        family_errors += list(np.exp(np.median(own) - own) - 1)
        physics = np.asarray(score.physics)
        physics_errors += list((np.exp(physics - own) - 1)[np.isfinite(physics)])
    error, cover, factor = _median_error(errors), float(np.mean(inside)), float(np.median(factors))
    print(f"median absolute error of the speedup {error:.1%} (claim: at most {MOST_ERROR:.0%})")
    print(
        f"baselines: corpus median {_median_error(corpus_errors):.1%}, family median (has seen "
        f"them) {_median_error(family_errors):.1%}, physics alone "
        f"{_median_error(physics_errors):.1%} (on {len(physics_errors)} rows that have counts)"
    )
    print(f"90 % intervals hold {cover:.1%} (claim: {LEAST_COVER:.0%} to {MOST_COVER:.0%})")
    print(f"compile time within a factor {factor:.2f} at the median (claim: {MOST_FACTOR})")
    return error <= MOST_ERROR and LEAST_COVER <= cover <= MOST_COVER and factor <= MOST_FACTOR


def _median_error(errors: Sequence[float]) -> float:
    return float(np.median(np.abs(errors)))


# What people quote: facts, mode, the speedup said.
QUOTED = (
    ("BERT-large, A100-80GB, reduce-overhead",
     JobFacts(device="a100-80gb", family="bert", precision="amp-bf16", parameters=335e6),
     Mode.REDUCE_OVERHEAD, 168 / 142),
    ("BERT-large, A100-80GB, max-autotune, no breaks",
     JobFacts(device="a100-80gb", family="bert", precision="amp-bf16", parameters=335e6,
              graph_breaks=0), Mode.MAX_AUTOTUNE, 198 / 142),
    ("130M, A100, max-autotune, no breaks",
     JobFacts(device="a100", family="bert", precision="amp-bf16", parameters=130e6,
              graph_breaks=0), Mode.MAX_AUTOTUNE, 1.31),
    ("110M NER, A100, a wall of breaks",
     JobFacts(device="a100", family="bert", precision="amp-bf16", parameters=110e6,
              graph_breaks=12), Mode.DEFAULT, 1.08),
)  # fmt: skip


def _constants(known: Sequence[Example]) -> None:
    """Prints what `learning.SHARED` and the eager step by physics in `estimate` rest on."""
    late = []
    for each in known:
        facts = each.facts
        if facts.counts is not None and facts.eager_s and facts.device.architecture != "cpu":
            least, _ = rooflines(facts, facts.counts)
            late.append(math.log(facts.eager_s / least.seconds(synchronous=False)))
    print(
        f"eager step by physics: log factor {np.median(late):.2f}, spread {np.std(late):.2f}"
        f" ({len(late)} jobs)"
    )
    errors: dict[tuple[object, ...], list[list[float]]] = defaultdict(list)
    for family in sorted({each.facts.family for each in known}):
        prior = prior_fit.fit([e for e in known if e.facts.family != family], folds=2)
        for each in (e for e in known if e.facts.family == family):
            facts = each.facts
            if facts.device.architecture != "cpu":
                job = (facts.parameters, facts.batch, facts.length, facts.image, facts.operators)
                named = (family, *job, facts.precision, each.source.partition("@")[0])
                errors[named].append(_errors(prior, each))
    pairs = np.asarray([found for found in errors.values() if len(found) == 2])
    for place, name in enumerate(("speedup", "compile_s", "memory_ratio")):
        first, second = pairs[:, 0, place], pairs[:, 1, place]
        usable = np.isfinite(first) & np.isfinite(second)
        shared = np.corrcoef(first[usable], second[usable])[0, 1]
        print(f"error of the {name} shared between modes: {shared:.2f} ({usable.sum()} jobs)")


def _errors(prior: Prior, each: Example) -> list[float]:
    """Returns how far the truth lies from what is believed, in spreads, for each quantity."""
    said = prior.estimate(each.facts)
    found = []
    for belief, truth in (
        (said.speedup, each.log_speedup),
        (said.compile_s, each.log_compile_s),
        (said.memory_ratio, each.log_memory_ratio),
    ):
        spread = (belief.quantile_log(0.95) - belief.quantile_log(0.05)) / (2 * 1.645)
        found.append((truth - belief.quantile_log(0.5)) / spread)
    return found


def _quoted(prior: Prior) -> bool:
    ok = True
    for name, facts, mode, said in QUOTED:
        interval = prior.estimate(facts.facts(Config(mode=mode))).speedup.interval()
        holds = interval.low <= said <= interval.high and interval.median > 1
        ok &= holds
        print(f"{'ok' if holds else 'NO'}: {name}: {said:.2f} quoted, {interval.median:.2f} "
              f"({interval.low:.2f} to {interval.high:.2f})")  # fmt: skip
    a100, v100 = (
        prior.estimate(
            JobFacts(device=name, family="bert", precision="amp-fp16", parameters=110e6,
                     batch=32, length=128).facts(Config())
        ).speedup.median
        for name in ("a100", "v100")
    )  # fmt: skip
    print(f"{'ok' if v100 <= a100 else 'NO'}: V100 {v100:.2f}, A100 {a100:.2f}")
    return ok and v100 <= a100


def _learning(prior: Prior) -> bool:
    """Compares errors on every second own job, with and without the others as outcomes."""
    own = [each for each in examples(corpus.measured()) if math.isfinite(each.log_speedup)]
    if not own:
        print("no own rows: learning is not judged")
        return True
    without = prior_fit.fit(examples(corpus.published()))
    jobs = sorted({_job(each) for each in own})
    kept = {job for index, job in enumerate(jobs) if index % 2}
    learnt = shifts(
        without,
        [
            Outcome(
                facts=each.facts,
                speedup=math.exp(each.log_speedup),
                compile_s=math.exp(each.log_compile_s),
            )
            for each in own
            if _job(each) not in kept
        ],
    )
    before, after = [], []
    for each in own:
        if _job(each) in kept:
            said = without.estimate(each.facts)
            moved = learnt.applied(said, each.facts)
            before.append(math.exp(said.speedup.quantile_log(0.5) - each.log_speedup) - 1)
            after.append(math.exp(moved.speedup.quantile_log(0.5) - each.log_speedup) - 1)
    first, then = _median_error(before), _median_error(after)
    print(
        f"learning on {len(own) - len(before)} own outcomes, judged on {len(before)} of other "
        f"jobs: error {first:.1%} before, {then:.1%} after"
    )
    return then <= first


def _job(each: Example) -> str:
    facts = each.facts
    return f"{facts.family} {facts.parameters} {facts.batch} {facts.length} {facts.precision}"


if __name__ == "__main__":
    main()
