"""Compiled against eager: what is an error, what rounding and randomness explain."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from advisor.profiler import facts, numerics
from advisor.profiler.gradients import NO_GRADIENTS, Gradients, gradients_of
from advisor.profiler.numerics import Arm, Course, compare
from advisor.profiler.records import (
    Trial,
    TrialKind,
    TrialStatus,
    WorkloadFacts,
    WorkloadSpec,
)
from advisor.profiler.snapshot import Snapshot, coarsest_dtype, course, random_source
from advisor.profiler.training import Trainer
from advisor.profiler.workload import Workload, build

LOSSES = (2.0, 1.9, 1.8, 1.7, 1.6)
NAN = math.nan


def vector(*values: float) -> Gradients:
    return Gradients({"weight": torch.tensor(values)}, finite=all(map(math.isfinite, values)))


GRADIENTS = vector(3.0, 4.0)


def arms(
    compiled: Sequence[float | None] = LOSSES,
    eager: Sequence[float | None] = LOSSES,
    *,
    gradients: Gradients = GRADIENTS,
    eager_gradients: Gradients = GRADIENTS,
    reordered: Course | None = None,
    by_seed: Callable[[int], Course] | None = None,
) -> Callable[[Arm, int], Course]:
    def run(arm: Arm, seed: int) -> Course:
        if arm is Arm.COMPILED:
            return Course(compiled, gradients)
        if arm is Arm.REORDERED and reordered is not None:
            return reordered
        return by_seed(seed) if by_seed else Course(eager, eager_gradients)

    return run


def test_equal_numbers_agree() -> None:
    found = compare(arms(), "float32")
    assert found.agrees
    assert not found.stochastic
    assert (found.message, found.warnings) == ("", ())
    assert (found.loss_drift, found.loss_scale) == (0.0, 0.0)
    assert (found.gradient_drift, found.gradient_scale) == (0.0, 0.0)


def test_plain_eager_runs_around_the_compiled_steps() -> None:
    asked: list[tuple[Arm, int]] = []

    def run(arm: Arm, seed: int) -> Course:
        asked.append((arm, seed))
        return Course(LOSSES)

    compare(run, "float32", seed=7)
    assert asked[0] == asked[-1] == (Arm.EAGER, 7)
    assert asked[1:-1] == [
        (Arm.EAGER, 8),
        (Arm.EAGER, 9),
        (Arm.REORDERED, 7),
        (Arm.COMPILED, 7),
    ]
    assert len(asked) == numerics.RUNS


def test_losses_that_depart_are_an_error_from_that_step_on() -> None:
    found = compare(arms((2.0, 1.9, 1.8, 1.734, 1.7)), "float32")
    assert not found.agrees
    assert found.loss_drift == pytest.approx(0.0625)
    assert "the losses differ from step 3 on, by up to 6.25%" in found.message


@pytest.mark.parametrize(
    ("dtype", "apart", "agrees"),
    [
        ("float32", 5e-4, True),
        ("float32", 2e-3, False),
        ("bfloat16", 2e-2, True),
        ("bfloat16", 4e-2, False),
        ("float64", 1e-6, False),
    ],
)
def test_the_type_sets_what_losses_may_differ_by(dtype: str, apart: float, agrees: bool) -> None:
    compiled = [loss * (1 + apart) for loss in LOSSES]
    assert compare(arms(compiled), dtype).agrees is agrees


def test_the_first_compiled_steps_tell_when_a_stale_number_came() -> None:
    wrong = (2.1, 2.0, 1.9, 1.8, 1.7)
    begun = (2.0, 1.9, 1.9, 1.8, 1.7)
    found = compare(arms(wrong), "float32", begun=begun)
    assert "differ from step 2 on" in found.message
    assert "Python number" in found.message


def test_an_error_begins_where_it_is_small() -> None:
    """The first wrong step differs by less than a type alone may explain."""
    shares = (0.0, 1e-7, 4e-4, 2e-3, 9e-3)
    apart = [loss * (1 + share) for loss, share in zip(LOSSES, shares, strict=True)]
    found = compare(arms(apart), "float32")
    assert "differ from step 2 on, by up to 0.90%" in found.message
    assert "Python number" not in found.message


def test_losses_that_were_wrong_at_first_only_are_a_warning() -> None:
    found = compare(arms(), "float32", begun=(2.0, 1.9, 1.9))
    assert found.agrees
    (warning,) = found.warnings
    assert "from step 2 on" in warning and "counter" in warning


def test_wrong_gradients_are_an_error_though_the_first_loss_agrees() -> None:
    found = compare(arms(gradients=vector(3.0, 4.5)), "float32")
    assert not found.agrees
    assert found.gradient_drift == pytest.approx(0.1)
    assert "the gradients of step 0 differ by 10.0%" in found.message
    assert "weight" in found.message


@pytest.mark.parametrize(("dtype", "agrees"), [("float32", False), ("bfloat16", True)])
def test_the_type_sets_what_gradients_may_differ_by(dtype: str, agrees: bool) -> None:
    assert compare(arms(gradients=vector(3.0, 4.5)), dtype).agrees is agrees


def test_what_another_rounding_does_to_eager_is_allowed_to_compiled() -> None:
    """A gradient in which large parts cancel scatters by more than its type alone explains."""
    apart = Course((2.0, 1.9, 1.81, 1.72, 1.63), vector(3.0, 4.4))
    compiled, gradients = (2.0, 1.9, 1.79, 1.69, 1.58), vector(3.0, 3.5)
    assert not compare(arms(compiled, gradients=gradients), "float32").agrees
    found = compare(arms(compiled, gradients=gradients, reordered=apart), "float32")
    assert found.agrees
    assert found.gradient_scale == pytest.approx(0.08)
    assert found.loss_scale == pytest.approx(0.03 / 1.6)


def test_hidden_state_shows_as_eagers_own_difference() -> None:
    """A counter in the person's own step makes each run differ, compiled or not."""
    runs = 0

    def run(arm: Arm, seed: int) -> Course:
        nonlocal runs
        runs += 1
        return Course([loss / runs for loss in LOSSES], vector(3.0 / runs, 4.0 / runs))

    assert compare(run, "float32").agrees


@pytest.mark.parametrize("bad", [NAN, math.inf])
def test_a_compiled_loss_that_is_no_number_is_an_error(bad: float) -> None:
    found = compare(arms((2.0, 1.9, 1.8, bad, bad)), "float32")
    assert not found.agrees
    assert found.message == f"the compiled loss is {bad} at step 3, where the eager one is 1.7"
    assert found.loss_drift is None


def test_an_eager_loss_that_is_no_number_is_an_error_where_compiled_has_one() -> None:
    found = compare(arms(eager=(2.0, NAN, NAN, NAN, NAN)), "float32")
    assert found.message == "the eager loss is nan at step 1, where the compiled one is 1.9"


def test_losses_that_break_alike_agree() -> None:
    broken = (2.0, 1.9, NAN, NAN, NAN)
    assert compare(arms(broken, broken), "float32").agrees


def test_a_training_that_breaks_by_chance_is_not_judged() -> None:
    found = compare(
        arms((2.0, 1.9, NAN, NAN, NAN), reordered=Course((2.0, 1.9, 1.8, NAN, NAN), GRADIENTS)),
        "float32",
    )
    assert found.agrees
    assert "say nothing" in found.warnings[0]


@pytest.mark.parametrize(
    ("eager", "compiled", "broken"),
    [(GRADIENTS, vector(3.0, NAN), "compiled"), (vector(math.inf, 1.0), GRADIENTS, "eager")],
)
def test_gradients_that_are_no_numbers_in_one_arm_are_an_error(
    eager: Gradients, compiled: Gradients, broken: str
) -> None:
    found = compare(arms(gradients=compiled, eager_gradients=eager), "float32")
    assert not found.agrees
    assert found.message.startswith(f"the {broken} gradients of step 0 hold NaN or infinity")
    assert found.gradient_drift is None


def test_float16_gradients_that_overflow_in_one_arm_are_a_warning() -> None:
    """The loss scaler leaves the step out there, and the losses part."""
    found = compare(arms((2.0, 2.0, 1.9, 1.8, 1.7), gradients=vector(math.inf, 1.0)), "float16")
    assert found.agrees
    assert "loss scaler" in found.warnings[0]


def test_gradients_that_overflow_in_both_arms_are_not_compared() -> None:
    both = vector(math.inf, 1.0)
    found = compare(arms(gradients=both, eager_gradients=both), "float16")
    assert found.agrees and found.gradient_drift is None and found.warnings == ()


def test_a_step_that_clears_its_gradients_is_judged_by_its_losses() -> None:
    for cleared in (NO_GRADIENTS, vector(0.0, 0.0)):
        found = compare(arms(gradients=cleared, eager_gradients=cleared), "float32")
        assert found.agrees and found.gradient_drift is None


def test_gradients_that_are_rounding_are_no_error() -> None:
    tiny = compare(
        arms(gradients=vector(0.0, -3e-9), eager_gradients=vector(1e-9, 2e-9)), "float32"
    )
    assert tiny.agrees


def test_gradients_that_vanish_in_one_arm_are_an_error() -> None:
    assert not compare(arms(gradients=NO_GRADIENTS), "float32").agrees
    assert not compare(arms(eager_gradients=NO_GRADIENTS), "float32").agrees


def test_a_step_without_a_loss_is_judged_by_its_gradients() -> None:
    nothing = (None, None)
    found = compare(arms(nothing, nothing), "float32")
    assert found.agrees and found.loss_drift is None and found.gradient_drift == 0.0
    assert "no loss" in found.warnings[0]
    assert not compare(arms(nothing, nothing, gradients=vector(3.0, 5.0)), "float32").agrees


def seeded(seed: int) -> Course:
    losses = [loss * (1 + 0.02 * ((7 * seed + i) % 3)) for i, loss in enumerate(LOSSES)]
    return Course(losses, vector(3.0 + seed, 4.0 - seed))


def test_randomness_is_told_apart_from_an_error() -> None:
    found = compare(
        arms(seeded(5).losses, gradients=seeded(5).gradients, by_seed=seeded),
        "float32",
        random_source="dropout",
    )
    assert found.agrees and found.stochastic
    (warning,) = found.warnings
    for word in ("dropout", "158643", "fallback_random", "from seed to seed"):
        assert word in warning
    assert f"{found.loss_drift:.2%}" in warning and f"{found.loss_scale:.2%}" in warning


def test_the_same_random_stream_needs_no_warning() -> None:
    same = seeded(0)
    found = compare(arms(same.losses, gradients=same.gradients, by_seed=seeded), "float32")
    assert found.stochastic and found.warnings == ()


def test_an_error_larger_than_randomness_is_found() -> None:
    doubled = [2 * loss for loss in LOSSES]
    assert not compare(arms(doubled, by_seed=seeded), "float32").agrees


@given(
    st.lists(st.floats(0.1, 10.0), min_size=5, max_size=5),
    st.floats(-3e-4, 3e-4),
    st.sampled_from(["float32", "bfloat16", "float16"]),
)
def test_rounding_is_never_an_error(losses: list[float], apart: float, dtype: str) -> None:
    compiled = [loss * (1 + apart) for loss in losses]
    gradients = vector(3.0 * (1 + apart), 4.0)
    assert compare(arms(compiled, losses, gradients=gradients), dtype).agrees


def test_a_disagreement_becomes_the_trials_status() -> None:
    workload = WorkloadFacts(
        fingerprint="f", model_class="M", parameters=1, trainable_parameters=1,
        optimizer="SGD", dtype="float32", shapes=(),
    )  # fmt: skip
    trial = Trial(trial_id="t", kind=TrialKind.COMPILE, status=TrialStatus.OK, workload=workload)
    wrong = compare(arms(gradients=vector(3.0, 4.5)), "float32")
    found = facts.with_agreement(trial, wrong)
    assert found.status is TrialStatus.DISAGREES
    assert found.failure is not None and found.failure.message == wrong.message
    assert found.gradient_drift == wrong.gradient_drift
    right = facts.with_agreement(trial, replace(compare(arms(), "float32"), stochastic=True))
    assert right.status is TrialStatus.OK
    assert right.workload is not None and right.workload.stochastic


# --- Vectors of gradients, and courses of real steps ------------------------------------------


class Parts(nn.Module):
    """A used layer, an unused one, and a table with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)
        self.table = nn.Embedding(10, 4, sparse=True)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.used(self.table(index)).square().mean()


def test_gradients_of_unused_and_sparse_parameters_are_compared() -> None:
    torch.manual_seed(0)
    model = Parts()
    model(torch.tensor([1, 1, 3])).backward()
    sparse = gradients_of(model)
    assert sorted(sparse.tensors) == ["table.weight", "used.bias", "used.weight"]
    table = model.table.weight.grad
    assert table is not None and table.is_sparse
    model.table.weight.grad = table.to_dense()
    model.unused.weight.grad = torch.zeros(4, 4)
    dense = gradients_of(model)
    assert sparse.distance(dense)[0] == pytest.approx(0, abs=1e-12)
    assert sparse.norm() == pytest.approx(dense.norm())
    model.table.weight.grad[1] += 1.0
    for one, other in ((sparse, gradients_of(model)), (gradients_of(model), sparse)):
        distance, most_in = one.distance(other)
        assert distance == pytest.approx(2.0) and most_in == "table.weight"


def test_a_sample_of_large_gradients_keeps_their_relative_difference() -> None:
    model = nn.Linear(100, 100)
    first = torch.randn(100, 100, generator=torch.Generator().manual_seed(0))
    model.weight.grad = first
    sampled, whole = gradients_of(model, most_elements=2_000), gradients_of(model)
    assert sampled.tensors["weight"].numel() < 2_000
    model.weight.grad = first * 1.25
    for before, after in (
        (sampled, gradients_of(model, most_elements=2_000)),
        (whole, gradients_of(model)),
    ):
        assert before.distance(after)[0] / before.norm() == pytest.approx(0.25, rel=1e-5)


def test_one_gradient_that_is_no_number_is_seen_outside_the_sample() -> None:
    model = nn.Linear(100, 100)
    model.weight.grad = torch.zeros(100, 100)
    model.weight.grad[0, 1] = NAN
    assert not gradients_of(model, most_elements=100).finite


def trainer_of(model: nn.Module, loss: Callable[..., torch.Tensor]) -> Trainer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    workload = Workload(model=model, batches=[None], loss=loss, optimizer=optimizer)
    return Trainer(workload, torch.device("cpu"))


def batches(count: int = 3) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    return [torch.randn(8, 16, generator=random) for _ in range(count)]


def test_a_course_starts_from_the_snapshot_whatever_ran_before() -> None:
    torch.manual_seed(0)
    trainer = trainer_of(nn.Linear(16, 4), lambda model, batch: model(batch).square().mean())
    snapshot = Snapshot(trainer)
    first = course(trainer, snapshot, batches(), Arm.EAGER, 0, "float32")
    trainer.run(batches())
    again = course(trainer, snapshot, batches(), Arm.EAGER, 0, "float32")
    assert first.losses == again.losses
    assert first.gradients.distance(again.gradients) == (0.0, "")


class Fading(nn.Module):
    """Counts its calls, and gives less with each."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(16, 4), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x) / self.calls


def test_a_counter_on_a_module_starts_anew_with_each_course() -> None:
    torch.manual_seed(0)
    trainer = trainer_of(Fading(), lambda model, batch: model(batch).square().mean())
    snapshot = Snapshot(trainer)
    first = course(trainer, snapshot, batches(), Arm.EAGER, 0, "float32")
    assert course(trainer, snapshot, batches(), Arm.EAGER, 0, "float32").losses == first.losses


def test_a_snapshot_tells_whether_other_parameters_are_trained_since() -> None:
    trainer = trainer_of(nn.Linear(16, 4), lambda model, batch: model(batch).square().mean())
    snapshot = Snapshot(trainer)
    assert snapshot.holds(trainer)
    trainer.model.bias.requires_grad_(False)  # type: ignore[union-attr]
    assert not snapshot.holds(trainer)


def test_another_rounding_moves_a_step_by_about_its_type() -> None:
    torch.manual_seed(0)
    trainer = trainer_of(nn.Linear(16, 4), lambda model, batch: model(batch).square().mean())
    snapshot, threads = Snapshot(trainer), torch.get_num_threads()
    plain = course(trainer, snapshot, batches(), Arm.EAGER, 0, "float32")
    for dtype, least, most in (("float32", 1e-9, 1e-5), ("bfloat16", 1e-4, 1e-1)):
        other = course(trainer, snapshot, batches(), Arm.REORDERED, 0, dtype)
        apart = plain.gradients.distance(other.gradients)[0] / plain.gradients.norm()
        assert least < apart < most
    assert torch.get_num_threads() == threads
    back = course(trainer, snapshot, batches(), Arm.EAGER, 0, "float32")
    assert back.losses == plain.losses


def test_the_type_of_autocast_within_a_loss_is_found() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(batch).float().square().mean()

    trainer = trainer_of(nn.Linear(16, 4), loss)
    assert coarsest_dtype(trainer, Snapshot(trainer), batches()[0], "float32") == "bfloat16"
    plain = trainer_of(nn.Linear(16, 4), lambda model, batch: model(batch).square().mean())
    assert coarsest_dtype(plain, Snapshot(plain), batches()[0], "float32") == "float32"
    assert coarsest_dtype(plain, Snapshot(plain), batches()[0], "bfloat16") == "bfloat16"


def test_dropout_modules_are_named() -> None:
    assert random_source(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))) == "dropout"
    assert "other random numbers" in random_source(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)))


FILE = Path(__file__).parent / "workloads" / "compiling.py"


@pytest.mark.parametrize("name", ["gate", "stack", "dropping", "counting", "item", "lengths"])
def test_eager_agrees_with_itself(name: str) -> None:
    """The compiled arm plays eager, but with a seed of its own where there is randomness."""
    spec = WorkloadSpec(target=f"{FILE}:{name}", cwd=str(FILE.parent), device="cpu")
    trainer = Trainer(build(spec, torch.device("cpu")), torch.device("cpu"))
    snapshot, taken = Snapshot(trainer), trainer.batches.take(5)

    def run(arm: Arm, seed: int) -> Course:
        other_stream = seed + 100 if arm is Arm.COMPILED else seed
        return course(trainer, snapshot, taken, arm, other_stream, "float32")

    found = compare(run, "float32", random_source=random_source(trainer.model))
    assert found.agrees, found.message
    assert found.stochastic is (name == "dropping")
    assert bool(found.warnings) is found.stochastic
