"""Real training jobs without a script: `hf:NAME` for a published model, `hf:DIR` for a folder.

The architecture is the published one, the weights and the data are random, and nothing is
downloaded. torch and transformers are imported when a job is built, not before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from advisor.profiler.errors import WorkloadError
from advisor.profiler.preset_batches import BatchShape, random_batch
from advisor.profiler.preset_configs import Job, Precision, blaming, decided_job, required
from advisor.profiler.preset_table import PRESETS
from advisor.profiler.preset_tasks import TASKS
from advisor.profiler.records import WorkloadSpec

if TYPE_CHECKING:
    import torch

# Batches made beforehand and given in turn, so that no step waits for random numbers.
DISTINCT_BATCHES = 8


def names() -> tuple[str, ...]:
    """Returns the names of the presets, without `hf:`."""
    return tuple(PRESETS)


def describe() -> list[tuple[str, tuple[str, ...], float]]:
    """Returns name, tasks (the default first) and published parameters in millions of each."""
    return [(name, tuple(row.tasks), row.parameters_m) for name, row in PRESETS.items()]


def parameters(spec: WorkloadSpec) -> int:
    """Returns the number of parameters of the model that `spec` names, without its memory.

    Raises `WorkloadError` like `build`.
    """
    torch = required("torch")
    job = decided_job(spec)
    try:
        model = _constructed(job, torch.device("meta"))
    except RuntimeError:
        # transformers 4.45 reads the values of a tensor to construct Swin and ConvNeXt.
        model = _model(job, torch.device("cpu"))
    return sum(parameter.numel() for parameter in model.parameters())


def build(spec: WorkloadSpec, device: torch.device) -> dict[str, object]:
    """Returns the training job that `spec` names, on `device`, as a mapping of design §4.

    Keys: `model` (in train mode), `batches` (step to batch, on the device; the same step gives
    the same batch), with autocast also `loss`, with a gradient scaler also `step`. The weights
    come from torch's global generator: seed it before. Raises `WorkloadError` when the preset,
    the folder or an option cannot be used.
    """
    torch = required("torch")
    job = decided_job(spec)
    _check_autocast(job.precision, device)
    model = _model(job, device)
    shape = BatchShape(
        config=job.config,
        task=TASKS[job.task],
        inputs=job.inputs,
        batch_size=job.size.batch_size,
        length=job.size.length,
        dtype=getattr(torch, job.precision.weights),
    )
    workload: dict[str, object] = {"model": model, "batches": _batches(shape, spec.seed, device)}
    if job.precision.autocast is not None:
        loss = _autocast_loss(device, getattr(torch, job.precision.autocast))
        workload["loss"] = loss
        if job.precision.scaled:
            workload["step"] = _scaled_step(device, loss)
    return workload


def _batches(
    shape: BatchShape, seed: int, device: torch.device
) -> Callable[[int], dict[str, torch.Tensor]]:
    from advisor.profiler import torch_internals

    # Real ones also where the model is only counted: their values decide some of their shapes.
    with torch_internals.real_tensors():
        made = [
            {
                key: tensor.to(device)
                for key, tensor in random_batch(shape, seed * DISTINCT_BATCHES + index).items()
            }
            for index in range(DISTINCT_BATCHES)
        ]

    def batches(step: int) -> dict[str, torch.Tensor]:
        return dict(made[step % DISTINCT_BATCHES])

    return batches


def _autocast_loss(
    device: torch.device, dtype: torch.dtype
) -> Callable[[Any, Mapping[str, torch.Tensor]], Any]:
    import torch

    def loss(model: Any, batch: Mapping[str, torch.Tensor]) -> Any:
        with torch.autocast(device.type, dtype=dtype):
            return model(**batch).loss

    return loss


def _scaled_step(
    device: torch.device, loss: Callable[[Any, Mapping[str, torch.Tensor]], Any]
) -> Callable[[Any, Mapping[str, torch.Tensor], Any], Any]:
    import torch

    scaler = torch.amp.GradScaler(device.type)

    def step(model: Any, batch: Mapping[str, torch.Tensor], optimizer: Any) -> Any:
        optimizer.zero_grad(set_to_none=True)
        value = loss(model, batch)
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        return value

    return step


def _model(job: Job, device: torch.device) -> Any:
    """Returns the model in train mode, made on the device itself: large ones fit nowhere else."""
    try:
        model = _constructed(job, device)
    except RuntimeError as error:
        if _fails_without_memory(job, error):
            raise WorkloadError(_cannot_be_used(job), _first_line(error)) from error
        raise
    return model.to(device).train()


def _fails_without_memory(job: Job, error: RuntimeError) -> bool:
    """Returns whether the sizes are to blame, such as negative ones, not memory that ran out."""
    import torch

    try:
        _constructed(job, torch.device("meta"))
    except RuntimeError as again:
        return _first_line(again) == _first_line(error)
    return False


def _first_line(error: RuntimeError) -> str:
    return str(error).split("\n", maxsplit=1)[0]


def _constructed(job: Job, device: torch.device) -> Any:
    import torch

    with (
        blaming(_cannot_be_used(job)),
        _default_dtype(getattr(torch, job.precision.weights)),
        torch.device(device),
    ):
        return job.model_class(job.config)


def _cannot_be_used(job: Job) -> str:
    return f"{job.model_class.__name__} with this configuration cannot be used"


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """New tensors have `dtype`. Casting afterwards would also cast what must stay float32."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _check_autocast(precision: Precision, device: torch.device) -> None:
    """Raises `WorkloadError` when this device cannot compute in the autocast data type."""
    import torch

    if precision.autocast is None:
        return
    dtype = getattr(torch, precision.autocast)
    # No random weights here: they would change those of the model that is built next.
    weight = torch.ones(8, 8, device=device, requires_grad=True)
    try:
        with torch.autocast(device.type, dtype=dtype):
            value = torch.nn.functional.linear(torch.ones(2, 8, device=device), weight)
        value.float().sum().backward()
        why = "" if value.dtype == dtype else "autocast falls back to float32"
    except RuntimeError as error:
        why = _first_line(error)
    if why:
        raise WorkloadError(
            f"this {device.type} cannot train in {precision.autocast}",
            why,
            "choose --precision float32",
        )
