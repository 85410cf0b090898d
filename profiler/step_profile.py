"""Where the time of an eager step goes, and what of the training job itself could be mended.

The profiler slows down what it watches: shares of the profiled step compare parts of the same
kind with each other. What is set against the clock (dispatch, the device's work) uses the step time
that was measured without it.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from advisor.profiler import torch_internals
from advisor.profiler.padding import padding_share
from advisor.profiler.records import StepProfile
from advisor.profiler.step_parts import STEP_EVENT, Part, StepParts
from advisor.profiler.training import Trainer
from advisor.profiler.workload import Batch

_MOST_STEPS = 2
# A step of more events than this is profiled once.
_MANY_EVENTS = 50_000
# Fewer parameters than these cost nothing worth mending, stepped one by one or not.
_FEW_PARAMETERS = 8
# Operator calls for each parameter in an optimizer's step that show a loop: torch's foreach path
# still reads each parameter's step number with one, its for-loop path makes about ten.
_CALLS_OF_A_LOOP = 3
# From this share of kernel time on a step is as long as its kernels, not as its launches.
_DEVICE_BOUND = 0.8
# Compute capability of Ampere, the first with TF32 and bfloat16 in its tensor cores.
_AMPERE = (8, 0)
# The price of a call is the least of some rounds of products, each of one call in the forward, two
# in its backward and one that adds up gradients.
_PRICE_ROUNDS = 7
_PRICE_PRODUCTS = 50
_CALLS_OF_A_PRODUCT = 4
_LEADING = re.compile(r"(\d+)(?:x\d+)*:")


def profile_step(
    trainer: Trainer, batches: list[Batch], step_s: float, shapes: Counter[str], *, dtype: str
) -> StepProfile:
    """Returns where the time of an eager step goes, from at most two profiled steps.

    `step_s` is the step time measured without the profiler, `shapes` counts the signatures of the
    batches seen, `dtype` is the type in which the model computes. A fact that cannot be told is
    None. Never raises: what a step raises under the profiler leaves its shares unknown.

    Dispatch: `dispatch_share` = operator calls x seconds of one call / `step_s`. Calls are the
    innermost ones (those that call no other operator), and the price of one is that of a chain of
    multiplications of one-element tensors, forward and backward, on the same device without the
    profiler. Models of one-element tensors, which are nothing but dispatch, read 0.6 to 0.9 here:
    what Python does between the calls is not in it, so it tells rather too little.

    Parts: host time from the first operator of a part to the next part; where kernels fill the
    step, kernel time instead, because the host then runs ahead of the device.
    """
    seen = _profiled(trainer, batches[:_MOST_STEPS])
    usual, last = _rows(trainer, shapes)
    cuda = trainer.device.type == "cuda"
    busy = _share(seen.kernels_s, seen.steps * step_s) if cuda and seen.kernels_s else None
    device_bound = busy is not None and busy >= _DEVICE_BOUND

    def share(part: Part, known: bool = True) -> float | None:
        if not known or seen.closure:
            return None
        if device_bound:
            return _share(part.device_s, seen.steps * step_s)
        return _share(part.host_s, seen.wall_s)

    calls = seen.calls / seen.steps if seen.steps else 0.0
    float32 = dtype == "float32"
    return StepProfile(
        operator_calls=calls,
        forward_share=share(seen.forward, seen.backward_nodes > 0),
        backward_share=share(seen.backward, seen.backward_nodes > 0),
        optimizer_share=share(seen.optimizer, seen.optimizer_steps > 0),
        dispatch_share=_share(calls * _call_s(trainer.device), step_s) if calls else None,
        device_busy_share=busy,
        float32_matmul_share=_products_share(seen, step_s, cuda) if float32 else None,
        optimizer_loops=_optimizer_loops(trainer.optimizer, seen),
        padding_share=_padding_share(batches),
        tf32_off=float32 and _is_ampere(trainer.device) and torch_internals.tf32_is_off(),
        bfloat16_native=float32 and _has_bfloat16(trainer.device),
        batch_size=usual,
        last_batch_size=last,
    )


def _products_share(seen: StepParts, step_s: float, cuda: bool) -> float | None:
    if cuda:
        # Without a kernel in the profile, what the products took on the device is not known.
        return _share(seen.products.device_s, seen.steps * step_s) if seen.kernels_s else None
    return _share(seen.products.host_s, seen.wall_s)


def _share(part_s: float, whole_s: float) -> float | None:
    return min(1.0, max(0.0, part_s / whole_s)) if whole_s > 0 else None


def _profiled(trainer: Trainer, batches: Sequence[Batch]) -> StepParts:
    seen = StepParts()
    for batch in batches:
        try:
            with torch_internals.profiler(trainer.device) as profile:
                # The first calls under a profiler set it up, and are no part of the step.
                torch.ones(1, device=trainer.device)
                with torch.profiler.record_function(STEP_EVENT):
                    trainer.run([batch])
            events = seen.add(torch_internals.profiler_events(profile))
        except (Exception, SystemExit):  # noqa: BLE001 - the person's step may raise anything
            break
        if events > _MANY_EVENTS:
            break
    return seen


def _call_s(device: torch.device) -> float:
    """Returns the seconds that one tiny operator call takes the host, without a profiler."""
    weight = torch.ones(1, device=device, requires_grad=True)
    times = []
    for _ in range(_PRICE_ROUNDS):
        begun = time.perf_counter()
        with torch.enable_grad():
            value = weight
            for _ in range(_PRICE_PRODUCTS):
                value = value * weight
        torch.autograd.grad(value, weight)
        times.append((time.perf_counter() - begun) / (_PRICE_PRODUCTS * _CALLS_OF_A_PRODUCT))
        if device.type == "cuda":
            # So that a full queue never makes a call wait.
            torch.cuda.synchronize(device)
    return min(times)


def _optimizer_loops(optimizer: torch.optim.Optimizer, seen: StepParts) -> bool:
    """Returns whether the optimizer steps more than a few parameters one by one.

    torch's own optimizers with a foreach path say so by their options; of others the operator
    calls of a step are counted.
    """
    alone = parameters = 0
    for group in optimizer.param_groups:
        trained = [parameter for parameter in group["params"] if parameter.requires_grad]
        parameters += len(trained)
        if trained and _steps_alone(group, trained):
            alone += len(trained)
    if seen.closure:
        return False  # what it calls is mostly the model
    of_torch = type(optimizer).__module__.startswith("torch.optim.")
    if of_torch and all("foreach" in group for group in optimizer.param_groups):
        return alone > _FEW_PARAMETERS
    calls = seen.optimizer_calls / seen.optimizer_steps if seen.optimizer_steps else 0.0
    return parameters > _FEW_PARAMETERS and calls >= _CALLS_OF_A_LOOP * parameters


def _steps_alone(group: dict[str, Any], trained: list[torch.Tensor]) -> bool:
    """Returns whether a group of one of torch's optimizers takes the for-loop path.

    The rule of torch/optim/adam.py, `adam()`, which the others share: foreach and fused are obeyed
    where given; where neither is, foreach is taken on an accelerator, unless the learning rate is
    a tensor that the optimizer has to read.
    """
    foreach, fused = group.get("foreach"), group.get("fused")
    if foreach is not None or fused is not None:
        return not foreach and not fused
    reads_rate = isinstance(group.get("lr"), torch.Tensor) and not group.get("capturable", False)
    if reads_rate or group.get("differentiable", False):
        return True
    return not torch_internals.steps_foreach_by_default(trained)


def _is_ampere(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.cuda is None:  # ROCm numbers its devices otherwise
        return False
    return torch.cuda.get_device_capability(device) >= _AMPERE


def _has_bfloat16(device: torch.device) -> bool:
    if device.type == "cpu":
        return torch_internals.cpu_has_bfloat16()
    return _is_ampere(device)


def _padding_share(batches: list[Batch]) -> float | None:
    try:
        return padding_share(batches)
    except Exception:  # noqa: BLE001 - a batch may be of any class, and tensors of any subclass
        return None


def _rows(trainer: Trainer, shapes: Counter[str]) -> tuple[int | None, int | None]:
    """Returns the rows of the usual batch, and those of a smaller one that ends an epoch."""
    told = _rows_of_loader(trainer.batches._source)
    return told if told is not None else _rows_of_shapes(shapes)


def _rows_of_loader(source: object) -> tuple[int, int | None] | None:
    if not isinstance(source, torch.utils.data.DataLoader) or source.batch_size is None:
        return None
    rows = source.batch_size
    if source.drop_last:
        return rows, None
    try:
        samples = len(source.sampler)  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001 - a stream has no length, and a person's class raises anything
        return None
    if samples < rows:
        return samples, None
    return rows, samples % rows or None


def _rows_of_shapes(shapes: Counter[str]) -> tuple[int | None, int | None]:
    """Tells it from signatures; more than two numbers of rows are no epochs but a moving size."""
    rows: Counter[int] = Counter()
    for signature, count in shapes.items():
        leading = Counter(int(size) for size in _LEADING.findall(signature))
        size, often = next(iter(leading.most_common(1)), (0, 0))
        if 2 * often > leading.total():
            rows[size] += count
    if not rows or 2 * rows.total() < shapes.total():
        return None, None
    (usual, batches), *others = rows.most_common()
    if len(others) == 1 and others[0][0] < usual and 2 * others[0][1] <= batches:
        return usual, others[0][0]
    return usual if not others else None, None
