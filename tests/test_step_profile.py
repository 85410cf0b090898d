"""Where the time of a step goes: real steps on the CPU, and events as a GPU gives them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from advisor.profiler import step_profile, torch_internals
from advisor.profiler.padding import padding_share
from advisor.profiler.records import StepProfile
from advisor.profiler.step_parts import STEP_EVENT, StepParts
from advisor.profiler.step_profile import profile_step
from advisor.profiler.torch_internals import ProfilerEvent
from advisor.profiler.training import Trainer, signature
from advisor.profiler.workload import Workload

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _deep() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)))


def _trainer(model: nn.Module, optimizer: torch.optim.Optimizer, **more: Any) -> Trainer:
    given = {"batches": lambda step: torch.randn(4, 8), **more}
    return Trainer(
        Workload(
            model=model,
            loss=lambda model, batch: model(batch).square().mean(),
            optimizer=optimizer,
            **given,
        ),
        CPU,
    )


def _profile(trainer: Trainer, dtype: str = "float32") -> StepProfile:
    batches = trainer.batches.take(4)
    trainer.run(batches)
    begun = time.perf_counter()
    trainer.run(batches)
    step_s = (time.perf_counter() - begun) / len(batches)
    shapes = Counter(map(signature, batches))
    return profile_step(trainer, batches, step_s, shapes, dtype=dtype)


def test_shares_are_parts_of_one_step() -> None:
    model = nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 512), nn.Linear(512, 1))
    found = _profile(
        _trainer(
            model, torch.optim.SGD(model.parameters(), 1e-3), batches=lambda _: torch.ones(64, 8)
        )
    )
    shares = (found.forward_share, found.backward_share, found.optimizer_share)
    assert all(share is not None and 0 < share < 1 for share in shares)
    assert 0.5 < sum(share or 0 for share in shares) <= 1
    assert found.float32_matmul_share is not None and 0 < found.float32_matmul_share < 1
    assert found.dispatch_share is not None and 0 < found.dispatch_share <= 1
    assert found.device_busy_share is None and not found.tf32_off
    assert (found.batch_size, found.last_batch_size) == (64, None)


def test_products_in_bfloat16_are_no_float32_products() -> None:
    model = _deep()
    found = _profile(_trainer(model, torch.optim.SGD(model.parameters())), dtype="bfloat16")
    assert found.float32_matmul_share is None and not found.bfloat16_native


def test_operator_calls_are_counted_for_each_step() -> None:
    weight = nn.Parameter(torch.ones(8))
    model = nn.Module()
    model.weight = weight

    def step(model: nn.Module, batch: torch.Tensor, optimizer: object) -> None:
        with torch.no_grad():
            for _ in range(50):
                weight.mul_(weight)

    found = _profile(_trainer(model, torch.optim.SGD([weight]), step=step))
    assert found.operator_calls == 50
    # The step of one's own calls neither backward nor the optimizer.
    assert found.forward_share is found.backward_share is found.optimizer_share is None


@pytest.mark.parametrize(
    ("options", "loops"),
    [({}, True), ({"fused": True}, False), ({"foreach": True}, False), ({"foreach": False}, True)],
)
def test_an_optimizer_that_steps_parameter_by_parameter(
    options: dict[str, bool], loops: bool
) -> None:
    model = _deep()
    found = _profile(_trainer(model, torch.optim.AdamW(model.parameters(), **options)))
    assert found.optimizer_loops is loops
    assert found.optimizer_share is not None and found.optimizer_share > 0


def test_a_handful_of_parameters_is_no_loop() -> None:
    model = nn.Linear(8, 8)
    assert not _profile(_trainer(model, torch.optim.AdamW(model.parameters()))).optimizer_loops


class Looping(torch.optim.Optimizer):
    """An optimizer of a person's own, with several operators for each parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(parameter.grad.sign().mul(0.5), alpha=-1e-3)


class Together(Looping):
    """The same in three operators for all parameters."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        parameters = self.param_groups[0]["params"]
        signs = torch._foreach_sign([parameter.grad for parameter in parameters])
        torch._foreach_mul_(signs, 0.5)
        torch._foreach_add_(parameters, signs, alpha=-1e-3)


def test_a_foreign_optimizer_is_judged_by_its_calls() -> None:
    for kind, loops in ((Looping, True), (Together, False)):
        model = _deep()
        assert _profile(_trainer(model, kind(model.parameters()))).optimizer_loops is loops


def test_an_optimizer_that_calls_the_model_hides_the_parts() -> None:
    model = _deep()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def step(model: nn.Module, batch: torch.Tensor, optimizer: torch.optim.Optimizer) -> object:
        def closure() -> float:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            return float(loss.detach())

        return optimizer.step(closure)

    found = _profile(_trainer(model, optimizer, step=step))
    assert found.forward_share is found.backward_share is found.optimizer_share is None
    assert found.operator_calls > 0 and not found.optimizer_loops


def test_an_optimizer_that_steps_in_a_backward_hook_is_not_the_backward() -> None:
    model = _deep()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    first = model[0]
    assert isinstance(first, nn.Linear)
    first.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())

    def step(model: nn.Module, batch: torch.Tensor, optimizer: object) -> None:
        model(batch).square().mean().backward()

    found = _profile(_trainer(model, optimizer, step=step))
    assert found.optimizer_share is not None and found.optimizer_share > 0.1
    assert found.backward_share is not None and found.forward_share is not None
    assert found.forward_share + found.backward_share + found.optimizer_share <= 1


def test_a_step_that_raises_leaves_what_can_be_seen() -> None:
    model = _deep()
    trainer = _trainer(
        model,
        torch.optim.AdamW(model.parameters()),
        step=lambda *_: (_ for _ in ()).throw(SystemExit),
    )
    found = profile_step(
        trainer, [torch.ones(4, 8)] * 4, 0.001, Counter({"4x8:float32": 4}), dtype="float32"
    )
    assert found.operator_calls == 0 and found.dispatch_share is None
    assert found.optimizer_loops and found.batch_size == 4


def test_dispatch_is_the_price_of_all_calls_over_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _deep()
    trainer = _trainer(model, torch.optim.SGD(model.parameters()))
    monkeypatch.setattr(step_profile, "_call_s", lambda _: 2e-6)
    found = profile_step(trainer, trainer.batches.take(2), 0.01, Counter(), dtype="float32")
    assert found.operator_calls > 100
    assert found.dispatch_share == pytest.approx(found.operator_calls * 2e-6 / 0.01)


def test_the_price_of_a_call_is_that_of_what_a_product_calls() -> None:
    weight = torch.ones(1, requires_grad=True)
    value = weight
    seen = StepParts()
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
        torch.profiler.record_function(STEP_EVENT),
    ):
        for _ in range(step_profile._PRICE_PRODUCTS):
            value = value * weight
        torch.autograd.grad(value, weight)
    seen.add(torch_internals.profiler_events(profile))
    expected = step_profile._PRICE_PRODUCTS * step_profile._CALLS_OF_A_PRODUCT
    assert seen.calls == pytest.approx(expected, abs=5)


def test_at_most_two_steps_are_taken() -> None:
    steps: list[object] = []
    model = _deep()
    trainer = _trainer(
        model, torch.optim.AdamW(model.parameters()), step=lambda *given: steps.append(given)
    )
    profile_step(trainer, [torch.ones(4, 8)] * 9, 0.001, Counter(), dtype="float32")
    assert len(steps) == 2


def test_dispatch_is_set_against_the_step_without_the_profiler() -> None:
    model = _deep()
    trainer = _trainer(model, torch.optim.AdamW(model.parameters()))
    batches = trainer.batches.take(2)
    trainer.run(batches)
    day_s = 86_400.0
    found = profile_step(trainer, batches, day_s, Counter(), dtype="float32")
    assert found.dispatch_share is not None and 0 < found.dispatch_share < 1e-3
    assert profile_step(trainer, batches, 1e-9, Counter(), dtype="float32").dispatch_share == 1


# --- rows of batches


def _loader(samples: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(samples, 8)), **options)


@pytest.mark.parametrize(
    ("loader", "rows"),
    [
        (_loader(10, batch_size=4), (4, 2)),
        (_loader(8, batch_size=4), (4, None)),
        (_loader(10, batch_size=4, drop_last=True), (4, None)),
        (_loader(3, batch_size=4), (3, None)),
    ],
)
def test_a_loader_says_how_long_its_last_batch_is(
    loader: DataLoader[Any], rows: tuple[int, int | None]
) -> None:
    model = nn.Linear(8, 8)
    step = {"step": lambda *_: None}
    trainer = _trainer(model, torch.optim.SGD(model.parameters()), batches=loader, **step)
    found = profile_step(trainer, [], 0.001, Counter(), dtype="float32")
    assert (found.batch_size, found.last_batch_size) == rows


@pytest.mark.parametrize(
    ("shapes", "rows"),
    [
        ({"32x64:int64 32:float32": 9, "5x64:int64 5:float32": 1}, (32, 5)),
        ({"32x64:int64": 4, "32x48:int64": 3, "7x48:int64": 1}, (32, 7)),
        # A graph's nodes: another number in each batch.
        ({"30x4:float32": 1, "31x4:float32": 1, "32x4:float32": 1}, (None, None)),
        # The larger one is the rare one: no end of an epoch.
        ({"32x4:float32": 9, "64x4:float32": 1}, (None, None)),
        ({"scalar:int64": 3}, (None, None)),
        ({}, (None, None)),
    ],
)
def test_shapes_say_how_long_the_last_batch_is(
    shapes: dict[str, int], rows: tuple[int | None, int | None]
) -> None:
    model = nn.Linear(8, 8)
    trainer = _trainer(model, torch.optim.SGD(model.parameters()))
    found = profile_step(trainer, [], 0.001, Counter(shapes), dtype="float32")
    assert (found.batch_size, found.last_batch_size) == rows


# --- padding


def _rows_of(lengths: list[int], longest: int, *, left: bool = False) -> torch.Tensor:
    """Returns True for each token of rows of some lengths."""
    kept = torch.arange(longest) < torch.tensor(lengths)[:, None]
    return kept.flip(1) if left else kept


KEPT = _rows_of([8, 4, 2, 6], 8)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize(
    ("batch", "share"),
    [
        (lambda kept: {"attention_mask": kept.long()}, 12 / 32),
        (lambda kept: {"attention_mask": kept.float()}, 12 / 32),
        (lambda kept: {"src_key_padding_mask": ~kept}, 12 / 32),
        (lambda kept: {"key_padding_mask": ~kept[1:]}, 12 / 24),
        (lambda kept: {"mask": kept}, 12 / 32),
        (lambda kept: {"mask": kept[1:]}, 12 / 24),
        # Which is which is told by the whole row, whatever the name says.
        (lambda kept: {"padding_mask": kept}, 12 / 32),
        (lambda kept: (torch.randn(4, 8), ~kept), 12 / 32),
        (lambda kept: {"input_ids": torch.arange(7, 39).view(4, 8) * kept}, 12 / 32),
        (lambda kept: (torch.arange(7, 39).view(4, 8) * kept, torch.ones(4)), 12 / 32),
    ],
)
def test_padding_is_counted_exactly(batch: Any, share: float, left: bool) -> None:
    kept = KEPT.flip(1) if left else KEPT
    assert padding_share([batch(kept)]) == pytest.approx(share)


@pytest.mark.parametrize(
    "batch",
    [
        {"mask": torch.ones(6, 6).tril().bool()},
        {"mask": torch.ones(6, 6).tril().logical_not()},
        {"mask": torch.tensor([[1, 0, 1, 0], [0, 1, 1, 0]]).bool()},
        {"attention_mask": torch.zeros(4, 1, 8, 8)},
        {"input_ids": torch.arange(7, 39).view(4, 8)},
        # Zeros elsewhere as well: a number like others.
        {"input_ids": torch.tensor([[0, 5, 3, 2, 0, 0], [4, 1, 2, 0, 0, 0]])},
        # All rows end alike: a constant, not lengths.
        {"input_ids": torch.tensor([[4, 5, 3, 2, 9, 9], [4, 1, 2, 3, 9, 9]])},
        {"label": KEPT[1:]},
        torch.ones(4, 8, dtype=torch.bool),
        torch.randn(4, 8),
        None,
        "text",
    ],
)
def test_what_is_no_padding_is_not_taken_for_it(batch: Any) -> None:
    assert padding_share([batch]) is None


def test_no_padding_is_zero_where_a_mask_says_so() -> None:
    assert padding_share([{"attention_mask": torch.ones(4, 8)}]) == 0
    assert padding_share([{"key_padding_mask": torch.zeros(4, 8).bool()}]) == 0


def test_padding_is_that_of_all_batches_together() -> None:
    batches = [{"attention_mask": KEPT.long()}, {"attention_mask": torch.ones(4, 24).long()}]
    assert padding_share(batches) == pytest.approx(12 / 128)
    assert padding_share([]) is None


def test_a_batch_that_raises_does_not_take_the_profile() -> None:
    class Hostile(dict[str, Any]):
        def items(self) -> Any:
            raise RuntimeError("no")

    model = nn.Linear(8, 8)
    trainer = _trainer(model, torch.optim.SGD(model.parameters()), step=lambda *_: None)
    found = profile_step(trainer, [Hostile()], 0.001, Counter(), dtype="float32")
    assert found.padding_share is None


# --- what a GPU's profiler gives: the host's calls in two threads, and kernels, in microseconds


def _event(
    name: str, start: int, end: int, *, thread: int = 1, correlation: int = 0, gpu: bool = False
) -> ProfilerEvent:
    return ProfilerEvent(name, thread, start * 1000, end * 1000, gpu, correlation)


def _node(start: int, end: int, thread: int = 2) -> ProfilerEvent:
    return _event("autograd::engine::evaluate_function: X", start, end, thread=thread)


def _gpu_step() -> StepParts:
    """Returns a step of 1,000 us: 300 forward, 400 backward, 200 optimizer on the host.

    The kernels: 100 us of forward, 500 of backward and 100 beside them on a second stream, 50 of
    the optimizer.
    """
    seen = StepParts()
    seen.add(
        [
            _event("aten::ones", -50, -20, correlation=9),
            _event(STEP_EVENT, 0, 1000),
            _event("aten::linear", 5, 295, correlation=1),
            _event("aten::addmm", 10, 290, correlation=2),
            _node(300, 500),
            _event("aten::mm", 310, 490, thread=2, correlation=3),
            _node(520, 700),
            _event("aten::sum", 530, 600, thread=2, correlation=4),
            _event("Optimizer.step#AdamW.step", 750, 950),
            _event("aten::_fused_adamw_", 760, 900, correlation=5),
            _event("cudaDeviceSynchronize", 950, 999),
            _event("fill", -10, -5, correlation=9, gpu=True),
            _event("gemm", 100, 200, correlation=2, gpu=True),
            _event("gemm", 400, 900, correlation=3, gpu=True),
            _event("reduce", 500, 600, correlation=4, gpu=True),
            _event("adam", 900, 950, correlation=5, gpu=True),
        ]
    )
    return seen


def test_kernels_that_run_at_once_count_once() -> None:
    seen = _gpu_step()
    assert seen.kernels_s == pytest.approx(650e-6)
    assert (seen.calls, seen.optimizer_steps, seen.optimizer_calls) == (4, 1, 1)


def test_host_and_kernel_time_of_the_parts() -> None:
    seen = _gpu_step()
    assert seen.forward.host_s == pytest.approx(300e-6)
    # 20 us between two nodes are the engine's; 50 before the optimizer are nobody's.
    assert seen.backward.host_s == pytest.approx(400e-6)
    assert seen.optimizer.host_s == pytest.approx(200e-6)
    parts = (seen.forward, seen.backward, seen.optimizer, seen.products)
    assert [part.device_s for part in parts] == pytest.approx([100e-6, 600e-6, 50e-6, 600e-6])


def test_a_forward_between_two_backwards_is_a_forward() -> None:
    seen = StepParts()
    seen.add(
        [
            _event(STEP_EVENT, 0, 100),
            _node(10, 20, thread=1),
            _event("aten::mul", 25, 30),
            _node(40, 60, thread=1),
        ]
    )
    assert seen.forward.host_s == pytest.approx(30e-6)
    assert seen.backward.host_s == pytest.approx(30e-6)


@pytest.mark.parametrize(
    ("step_s", "busy", "backward"), [(1300e-6, 0.5, 0.4), (650e-6, 1.0, 600 / 650)]
)
def test_kernels_tell_the_parts_where_they_fill_the_step(
    step_s: float, busy: float, backward: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(8, 8)
    trainer = _trainer(model, torch.optim.SGD(model.parameters()))
    trainer.device = torch.device("cuda", 0)
    monkeypatch.setattr(step_profile, "_profiled", lambda *_: _gpu_step())
    monkeypatch.setattr(step_profile, "_call_s", lambda _: 5e-6)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    found = profile_step(trainer, [], step_s, Counter(), dtype="float32")
    assert found.device_busy_share == pytest.approx(busy)
    assert found.backward_share == pytest.approx(backward)
    assert found.float32_matmul_share == pytest.approx(600e-6 / step_s)
    assert found.dispatch_share == pytest.approx(20e-6 / step_s)
    assert found.tf32_off and found.bfloat16_native
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    found = profile_step(trainer, [], step_s, Counter(), dtype="float32")
    assert not found.tf32_off and not found.bfloat16_native


def test_tf32_is_read_from_either_of_torchs_names() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        for precision, off in (("highest", True), ("high", False), ("highest", True)):
            torch.set_float32_matmul_precision(precision)
            assert torch_internals.tf32_is_off() is off
    finally:
        torch.set_float32_matmul_precision(before)


def test_names_that_torch_may_lack_are_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_internals, "find", lambda _: None)
    assert not torch_internals.steps_foreach_by_default([torch.ones(2)])
    assert not torch_internals.cpu_has_bfloat16()
    profile: Any = object()
    assert list(torch_internals.profiler_events(profile)) == []
    monkeypatch.setattr(torch_internals, "profiler_events", lambda _: iter(()))
    model = _deep()
    found = _profile(_trainer(model, torch.optim.AdamW(model.parameters())))
    assert found.operator_calls == 0
    assert found.dispatch_share is found.optimizer_share is found.float32_matmul_share is None
    assert found.optimizer_loops
