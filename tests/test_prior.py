"""The cost model: what it says, of what it is sure, and what moves it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from advisor import prior_store
from advisor.models import corpus, prior_fit
from advisor.models.devices import Device
from advisor.models.examples import Example, examples, facts_of
from advisor.models.families import family_of
from advisor.models.features import LEVELS, NAMES, Facts, gain_by_physics, vector
from advisor.models.learning import NO_SHIFTS, Outcome, conditioned, narrowed_to, shifts
from advisor.models.prior import Belief, Prior, kept_gain, normal_quantiles
from advisor.profiler.records import Config, Mode
from advisor.profiler.step_counts import OperatorKind, StepCounts, Work

A100 = Device.from_name("a100")
FACTS = Facts(device=A100, family="bert-like encoder", precision="amp-fp16", parameters=110e6,
              batch=16.0, length=512.0, eager_s=0.11, operators=370.0, graphs=1.0)  # fmt: skip


def known(speedup: float = 1.4, eager_s: float = 0.1, family: str = "f0") -> Example:
    return Example(
        facts=replace(FACTS, eager_s=eager_s, family=family),
        log_speedup=math.log(speedup),
        log_compile_s=math.log(40.0),
        log_memory_ratio=math.log(1.1),
        rows=1,
        source="a test",
    )


@pytest.fixture(scope="module")
def small() -> Prior:
    """A prior on a made-up corpus: short steps gain much, long ones little."""
    random = np.random.default_rng(0)
    made = []
    for family in range(10):
        for _ in range(12):
            eager_s = float(np.exp(random.uniform(math.log(0.002), math.log(1.0))))
            gain = 1.0 + 0.8 * math.exp(-eager_s / 0.1)
            noisy = gain * math.exp(random.normal(0, 0.05))
            made.append(known(noisy, eager_s, f"f{family}"))
    return prior_fit.fit(made, trees=40, folds=5)


def belief(median: float, spread: float) -> Belief:
    from advisor.models.prior import LEVELS_OF_BELIEF

    return Belief(math.log(median) + spread * normal_quantiles(LEVELS_OF_BELIEF))


def test_short_steps_are_believed_to_gain_more(small: Prior) -> None:
    short = small.estimate(replace(FACTS, family="f1", eager_s=0.003)).speedup
    long = small.estimate(replace(FACTS, family="f1", eager_s=0.9)).speedup
    assert short.median == pytest.approx(1.78, rel=0.08)
    assert long.median == pytest.approx(1.0, rel=0.08)
    assert short.interval().low < 1.78 < short.interval().high
    assert short.above(1.5) > 0.9 > 0.1 > long.above(1.5)


def test_who_knows_less_is_less_sure(small: Prior) -> None:
    def width(facts: Facts) -> float:
        interval = small.estimate(facts).speedup.interval()
        return interval.high / interval.low

    asked = replace(FACTS, family="f1")
    assert width(replace(asked, eager_s=None)) > 1.2 * width(asked)


def test_graph_breaks_take_the_gain_away(small: Prior) -> None:
    facts = replace(FACTS, family="f1", eager_s=0.003)
    gains = [
        small.estimate(replace(facts, graphs=graphs)).speedup.median for graphs in (1.0, 6.0, 30.0)
    ]
    assert gains[0] > gains[1] > gains[2]
    assert gains[2] == pytest.approx(1.0, abs=0.01)
    assert [kept_gain(graphs) for graphs in (None, 1.0, 2.0, 20.0, 500.0)] == [1, 1, 1, 0, 0]


def test_it_says_when_it_is_asked_beyond_what_it_has_seen(small: Prior) -> None:
    inside = small.estimate(replace(FACTS, family="f1"))
    assert inside.beyond == ()
    assert small.estimate(replace(FACTS, family="gnn")).beyond == ("no row is of family 'gnn'",)
    strange = replace(
        FACTS, device=Device.from_name("v100"), family="gnn", parameters=5e12, batch=16.0
    )
    outside = small.estimate(strange)
    assert any("gnn" in what for what in outside.beyond)
    assert any("volta" in what for what in outside.beyond)
    assert any("parameters is 5e+12, more than" in what for what in outside.beyond)
    spread = [
        math.log(each.speedup.interval().high / each.speedup.interval().low)
        for each in (inside, outside)
    ]
    assert spread[1] > spread[0]


def test_arrays_and_words_bring_it_back(small: Prior, tmp_path: Path) -> None:
    arrays, words = small.arrays()
    np.savez(tmp_path / "p.npz", **arrays)
    with np.load(tmp_path / "p.npz", allow_pickle=False) as held:
        again = Prior.of_arrays(dict(held), json.loads(json.dumps(words)))
    facts = replace(FACTS, family="f1")
    np.testing.assert_array_equal(
        again.estimate(facts).speedup.logs, small.estimate(facts).speedup.logs
    )
    with pytest.raises(ValueError, match="features"):
        Prior.of_arrays(arrays, words | {"features": ["another"]})


def test_it_is_fitted_once_and_a_damaged_file_is_made_anew(
    small: Prior, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fits = []

    def fitted() -> Prior:
        fits.append(1)
        return small

    monkeypatch.setattr(prior_store, "fitted", fitted)
    prior_store.load(tmp_path)
    prior_store.load(tmp_path)
    assert len(fits) == 1
    (arrays,) = tmp_path.glob("*.npz")
    assert not list(tmp_path.glob("*.new"))
    for damage in (b"", b"not a zip", arrays.read_bytes()[:-200]):
        arrays.write_bytes(damage)
        found = prior_store.load(tmp_path)
        assert found.trees == small.trees
    assert len(fits) == 4
    (words,) = tmp_path.glob("*.json")
    words.write_text("{}")
    prior_store.load(tmp_path)
    assert len(fits) == 5


def test_too_few_examples_are_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        prior_fit.fit([known()] * 3)


# --- features


def counts(operators: float, flops: float, moved: float, kernels: float) -> StepCounts:
    return StepCounts(
        parameters=1e6,
        tensors=10,
        layers=5,
        eager=(
            Work(kind=OperatorKind.MATRIX_PRODUCT, calls=10, flops=flops, bytes=1e6),
            Work(kind=OperatorKind.POINTWISE, calls=operators - 10, flops=1e6, bytes=moved),
        ),
        fused=(
            Work(kind=OperatorKind.MATRIX_PRODUCT, calls=10, flops=flops, bytes=1e6),
            Work(kind=OperatorKind.FUSED, calls=kernels, flops=1e6, bytes=moved / 4),
        ),
    )


def test_every_feature_has_a_name_and_lack_of_knowledge_is_nan() -> None:
    assert len(vector(FACTS)) == len(NAMES)
    bare = vector(Facts(device=A100))
    assert len(bare) == len(NAMES)
    assert math.isnan(bare[NAMES.index("log parameters")])
    assert bare[NAMES.index("cpu")] == 0
    full = vector(replace(FACTS, counts=counts(400, 1e12, 1e10, 40)))
    assert np.isfinite(full[NAMES.index("log gain by physics")])
    levels = [replace(FACTS, counts=counts(400, 1e12, 1e10, 40)).known_less(n) for n in range(4)]
    assert [facts.level for facts in levels] == list(range(LEVELS))


def test_physics_knows_what_fusing_and_launching_bring() -> None:
    by_memory = replace(FACTS, counts=counts(100, 1e9, 4e10, 20))
    by_products = replace(FACTS, counts=counts(100, 1e14, 1e8, 20))
    by_launches = replace(FACTS, counts=counts(5000, 1e9, 1e6, 20))
    assert gain_by_physics(by_memory) > 2
    assert gain_by_physics(by_products) == pytest.approx(1.0, abs=0.01)
    assert gain_by_physics(by_launches) > 10
    assert math.isnan(gain_by_physics(FACTS))


def test_a_v100_gains_less_from_fusing_than_an_a100_in_float32() -> None:
    # TF32 leaves products short beside the memory traffic that fusing saves; a V100 has none.
    job = replace(FACTS, precision="tf32", counts=counts(100, 3e12, 2e10, 20))
    v100 = replace(job, device=Device.from_name("v100"))
    assert gain_by_physics(v100) < gain_by_physics(job)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("BertForMaskedLM", "bert-like encoder"),
        ("DebertaV2ForMaskedLM", "deberta"),
        ("DistilBertForTokenClassification", "distilbert/mobilebert (small bert)"),
        ("LlamaForCausalLM", "llama-like decoder"),
        ("GPT2LMHeadModel", "gpt-like decoder"),
        ("T5ForConditionalGeneration", "t5"),
        ("BartForConditionalGeneration", "bart/marian/pegasus (enc-dec)"),
        ("ViTForImageClassification", "vit/deit/beit"),
        ("SwinForImageClassification", "swin/hierarchical vit"),
        ("ConvNextForImageClassification", "convnext-like"),
        ("ResNetForImageClassification", "resnet-like cnn"),
        ("MyOwnThing", ""),
    ],
)
def test_families_are_known_by_class_names(name: str, family: str) -> None:
    assert family_of(name) == family
    assert not family or family in {row.family for row in corpus.published()}


# --- examples


def test_rows_of_one_job_are_one_example() -> None:
    rows = [row for row in corpus.published() if row.model == "BertForMaskedLM"]
    found = examples(rows)
    assert 2 <= len(found) < len(rows) / 2
    assert sum(each.rows for each in found) == len([r for r in rows if r.fit and r.training])
    assert all(each.facts.counts is not None for each in found)


def test_rows_that_say_too_little_or_failed_are_left_out() -> None:
    row = next(row for row in corpus.published() if row.training and row.fit)
    assert examples([replace(row, failed=True), replace(row, flags="SUSPECT")]) == ()
    assert facts_of(replace(row, device="something unheard of")) is None
    assert facts_of(replace(row, mode="other")) is None


# --- learning


def outcomes(factor: float, count: int, **changes: object) -> list[Outcome]:
    facts = replace(FACTS, family="f1", **changes)  # type: ignore[arg-type]
    return [Outcome(facts=facts, speedup=factor, job=f"job{index}") for index in range(count)]


def test_own_outcomes_move_the_estimates_of_their_device(small: Prior) -> None:
    facts = replace(FACTS, family="f1")
    before = small.estimate(facts)
    one, many = (shifts(small, outcomes(2.0, count)) for count in (1, 60))
    moved = [each.applied(before, facts).speedup.median for each in (NO_SHIFTS, one, many)]
    assert moved[0] == before.speedup.median < moved[1] < moved[2]
    assert moved[2] == pytest.approx(2.0, rel=0.1)
    elsewhere = replace(facts, device=Device.from_name("h100"))
    untouched = small.estimate(elsewhere)
    assert many.applied(untouched, elsewhere).speedup.median == untouched.speedup.median


def test_the_very_job_is_known_after_one_outcome(small: Prior) -> None:
    facts = replace(FACTS, family="f1")
    before = small.estimate(facts)
    learnt = shifts(small, [Outcome(facts=facts, job="mine", speedup=1.9)])
    mine = learnt.applied(before, facts, "mine").speedup
    assert mine.median == pytest.approx(1.9, rel=0.2)
    assert mine.interval().high / mine.interval().low < 1.25
    other = learnt.applied(before, facts, "another").speedup
    assert abs(math.log(other.median / before.speedup.median)) < abs(
        math.log(mine.median / before.speedup.median)
    )


def test_one_absurd_outcome_does_not_carry_a_fleet_away(small: Prior) -> None:
    facts = replace(FACTS, family="f1")
    before = small.estimate(facts)
    learnt = shifts(small, [Outcome(facts=facts, speedup=100.0)])
    assert learnt.applied(before, facts).speedup.median < 1.9 * before.speedup.median


def test_what_one_mode_showed_narrows_the_others() -> None:
    wide = belief(1.3, 0.2)
    assert conditioned(wide, "speedup", []) is wide
    slow = conditioned(wide, "speedup", [(belief(1.3, 0.2), 0.95)])
    fast = conditioned(wide, "speedup", [(belief(1.3, 0.2), 1.8)])
    assert slow.median < 1.1 < 1.5 < fast.median
    for each in (slow, fast):
        assert each.interval().high / each.interval().low < (
            0.9 * wide.interval().high / wide.interval().low
        )
    two = conditioned(wide, "speedup", [(belief(1.3, 0.2), 0.95), (belief(1.2, 0.2), 0.9)])
    assert two.interval().high / two.interval().low < slow.interval().high / slow.interval().low


def test_beliefs_are_never_widened_by_narrowing() -> None:
    sure = belief(1.3, 0.01)
    assert narrowed_to(sure, 0.2) is sure
    assert narrowed_to(belief(1.3, 0.2), 0.05).interval().high == pytest.approx(
        1.3 * math.exp(0.05 * 1.645), rel=1e-3
    )
    moved = belief(1.3, 0.1).moved(math.log(1.1), 0.1)
    assert moved.median == pytest.approx(1.43)
    assert moved.interval().high == pytest.approx(1.43 * math.exp(0.1 * 2**0.5 * 1.645), rel=1e-3)


# --- the real corpus


def test_the_corpus_gives_sound_estimates(prior: Prior) -> None:
    facts = replace(FACTS, config=Config(mode=Mode.REDUCE_OVERHEAD))
    said = prior.estimate(facts)
    assert 1.1 < said.speedup.median < 2.2
    assert 5 < said.compile_s.median < 300
    assert 0.6 < said.memory_ratio.median < 1.6
    autotune = prior.estimate(replace(facts, config=Config(mode=Mode.MAX_AUTOTUNE)))
    assert autotune.speedup.median > said.speedup.median
    assert autotune.compile_s.median > 1.5 * said.compile_s.median


def test_a_v100_is_believed_to_gain_less_than_an_a100(prior: Prior) -> None:
    facts = replace(FACTS, eager_s=None, operators=None)
    v100 = prior.estimate(replace(facts, device=Device.from_name("v100"))).speedup
    a100 = prior.estimate(facts).speedup
    assert v100.median < a100.median
    assert v100.interval().high / v100.interval().low > a100.interval().high / a100.interval().low


def test_nothing_known_but_the_device_is_still_an_answer(prior: Prior) -> None:
    said = prior.estimate(Facts(device=A100))
    interval = said.speedup.interval()
    assert interval.low < 1.2 < interval.high
    assert all(np.isfinite(each.logs).all() for each in (said.speedup, said.compile_s))
