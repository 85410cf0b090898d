"""What a step has to do, counted from shapes: against arithmetic that can be done by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from advisor.profiler import operator_counting  # noqa: E402
from advisor.profiler.step_counts import OperatorKind, StepCounts, total  # noqa: E402


def counted(
    make: Callable[[], Any], rows: int = 8, width: int = 16, optimizer: Any = None
) -> StepCounts:
    """Counts a step of a model that `make` builds, without memory."""
    with operator_counting.without_memory():
        model = make().to("cpu")
        batch = torch.randn(rows, width)
        steps = optimizer(model.parameters()) if optimizer else None

        def step() -> None:
            model.zero_grad(set_to_none=True)
            model(batch).pow(2).mean().backward()
            if steps is not None:
                steps.step()

        return operator_counting.count(model, step, float(rows))


def test_products_of_a_linear_layer_are_counted_as_on_paper() -> None:
    found = counted(lambda: torch.nn.Linear(16, 32, bias=False))
    # Forward and the weight's gradient; the input needs none. A multiply-add is two operations.
    assert total(found.eager, "flops", [OperatorKind.MATRIX_PRODUCT]) == 2 * (2 * 8 * 16 * 32)
    assert (found.parameters, found.tensors, found.layers) == (16 * 32, 1, 1)
    assert found.parameter_bytes == 4 * 16 * 32
    assert found.samples == 8


def test_a_convolution_is_told_from_a_product() -> None:
    with operator_counting.without_memory():
        model = torch.nn.Conv2d(3, 8, 3, padding=1)
        images = torch.randn(2, 3, 10, 10)
        found = operator_counting.count(model, lambda: model(images).sum().backward())
    forward = 2 * 2 * 8 * 10 * 10 * 3 * 9
    assert total(found.eager, "flops", [OperatorKind.CONVOLUTION]) >= 2 * forward
    assert total(found.eager, "flops", [OperatorKind.MATRIX_PRODUCT]) == 0


def test_fused_attention_is_counted_both_ways() -> None:
    shape = (2, 4, 32, 16)
    with operator_counting.without_memory():
        layer = torch.nn.Linear(16, 16)
        query = torch.randn(shape)

        def step() -> None:
            torch.nn.functional.scaled_dot_product_attention(
                layer(query), layer(query), layer(query)
            ).sum().backward()

        found = operator_counting.count(layer, step)
    product = 2 * 2 * 4 * 32 * 32 * 16
    assert total(found.eager, "flops", [OperatorKind.ATTENTION]) == (2 + 5) * product


class Chain(torch.nn.Module):
    """A product, then pointwise operators that one kernel can do together."""

    def __init__(self, pointwise: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 4096, bias=False)
        self.pointwise = pointwise

    def forward(self, x: Any) -> Any:
        x = self.layer(x)
        for _ in range(self.pointwise):
            x = torch.sin(x)
        return x


def test_a_chain_of_pointwise_operators_is_one_kernel() -> None:
    short, long = counted(lambda: Chain(1)), counted(lambda: Chain(10))
    assert long.operators - short.operators == 2 * 9 + 9  # sin; cos and multiply backward
    grown = total(long.fused, "calls", [OperatorKind.FUSED])
    assert grown == total(short.fused, "calls", [OperatorKind.FUSED])
    assert long.fusible_bytes > 3 * short.fusible_bytes


def test_what_a_later_product_reads_is_written() -> None:
    class Saved(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = torch.nn.Linear(16, 64), torch.nn.Linear(64, 16)

        def forward(self, x: Any) -> Any:
            return self.two(torch.sigmoid(self.one(x)))

    found = counted(Saved)
    # The sigmoid's result feeds a product and the backward: it cannot stay in registers.
    assert total(found.fused, "bytes", [OperatorKind.FUSED]) >= 8 * 64 * 4


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_the_optimizer_has_a_kind_of_its_own(kind: Any) -> None:
    without = counted(lambda: torch.nn.Linear(16, 32))
    with_it = counted(lambda: torch.nn.Linear(16, 32), optimizer=lambda p: kind(p, lr=1e-3))
    own = total(with_it.eager, "calls", [OperatorKind.OPTIMIZER])
    assert own > 0
    assert with_it.operators - own == without.operators


def test_views_and_questions_about_tensors_cost_nothing() -> None:
    class Views(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(16, 32)

        def forward(self, x: Any) -> Any:
            y = self.layer(x)
            assert y.device.type == "cpu"
            return y.view(4, 2, 32).transpose(0, 1).permute(2, 0, 1)

    plain, viewed = counted(lambda: torch.nn.Linear(16, 32)), counted(Views)
    assert viewed.operators <= plain.operators + 1  # the gradient may be made contiguous


class Stochastic(torch.nn.Module):
    """Reads values while it is built and while it runs, as libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = torch.linspace(0, 0.2, 4)[2].item()
        self.layer = torch.nn.Linear(16, 32)

    def forward(self, x: Any) -> Any:
        if x.max() > 100:
            x = x / x.max()
        y = self.layer(x)
        return y[torch.rand(8) > self.rate - 1].sum() + y.masked_select(y > 0).sum()


def test_values_that_are_read_do_not_stop_the_counting() -> None:
    found = counted(Stochastic)
    assert total(found.eager, "flops", [OperatorKind.MATRIX_PRODUCT]) > 0


def test_tied_weights_are_counted_once() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = torch.nn.Linear(16, 16)
            self.two = torch.nn.Linear(16, 16)
            self.two.weight = self.one.weight

        def forward(self, x: Any) -> Any:
            return self.two(self.one(x))

    # Moved to another dtype: parameters are made anew, and stay tied.
    with operator_counting.without_memory():
        model = Tied().to(torch.bfloat16)
        assert model.one.weight is model.two.weight
        assert sum(p.numel() for p in model.parameters()) == 16 * 16 + 32


def test_a_real_step_counts_as_much_as_a_fake_one() -> None:
    torch.manual_seed(0)
    fake = counted(lambda: Chain(3))
    model = Chain(3)
    batch = torch.randn(8, 16)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(batch).pow(2).mean().backward()

    real = operator_counting.count(model, step, 8.0)
    assert (real.eager, real.fused) == (fake.eager, fake.fused)


def test_nothing_is_left_of_it_afterwards() -> None:
    before = torch.nn.Module._apply
    with pytest.raises(RuntimeError, match="on purpose"), operator_counting.without_memory():
        raise RuntimeError("on purpose")
    assert torch.nn.Module._apply is before
    assert torch.ones(2).sum().item() == 2
