"""Facts of a workload that no clock is needed for."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from advisor.profiler.flip import is_torch_class
from advisor.profiler.numerics import Agreement
from advisor.profiler.records import Blocks, Failure, Shape, Trial, TrialStatus, WorkloadFacts
from advisor.profiler.training import Trainer
from advisor.profiler.workload import is_library

_MOST_SHAPES = 100


def workload_facts(
    trainer: Trainer, seen: Counter[str], blocks: tuple[Blocks, ...], dtype: str
) -> WorkloadFacts:
    """Returns what was seen of the workload in its eager steps."""
    model = trainer.model
    parameters = list(model.named_parameters())
    steps = sum(seen.values()) or 1
    return WorkloadFacts(
        fingerprint=_fingerprint(trainer, seen),
        model_class=f"{type(model).__module__}.{type(model).__qualname__}",
        parameters=sum(parameter.numel() for _, parameter in parameters),
        trainable_parameters=sum(p.numel() for _, p in parameters if p.requires_grad),
        optimizer=type(trainer.optimizer).__name__,
        dtype=dtype,
        shapes=tuple(
            Shape(signature=signature, share=count / steps)
            for signature, count in seen.most_common(_MOST_SHAPES)
        ),
        blocks=blocks,
        torch_class=is_torch_class(model),
        batches_seen=steps,
        batches_per_epoch=trainer.batches.per_epoch,
    )


def _fingerprint(trainer: Trainer, seen: Counter[str]) -> str:
    """Returns a name for this job: equal for equal architecture, optimizer, shapes and source.

    What else decides a measurement, such as the device and the version of torch, stands in
    `Environment`.
    """
    digest = hashlib.sha256()
    optimizer = trainer.optimizer
    settings = {key: value for key, value in optimizer.defaults.items() if key in _SETTINGS}
    for part in (
        f"{type(trainer.model).__module__}.{type(trainer.model).__qualname__}",
        type(optimizer).__name__,
        str(sorted(settings.items())),
        *(
            f"{name}:{tuple(parameter.shape)}:{parameter.dtype}:{parameter.requires_grad}"
            for name, parameter in trainer.model.named_parameters()
        ),
        *_sources(),
        # One signature only: which of many random lengths were met first is not the job's nature.
        *(sorted(seen) if len(seen) == 1 else [str(len(next(iter(seen), "").split()))]),
    ):
        digest.update(part.encode("utf-8", "surrogatepass"))
        digest.update(b"\0")
    return digest.hexdigest()[:16]


# Settings of an optimizer that change what a step does.
_SETTINGS = frozenset({"amsgrad", "foreach", "fused", "capturable", "differentiable", "nesterov"})


def _sources() -> Iterator[str]:
    """Yields the text of the person's own files that this process has imported.

    Whole files: what a step does may also change in a function that it calls, or a constant.
    """
    files = {
        str(module.__file__)
        for name, module in list(sys.modules.items())
        if str(getattr(module, "__file__", "")).endswith(".py") and not _is_ours(name)
    }
    texts = []
    for file in files:
        if not is_library(file):
            with contextlib.suppress(OSError):
                texts.append(Path(file).read_text(encoding="utf-8", errors="replace"))
    yield from sorted(texts)


def _is_ours(name: str) -> bool:
    return name == "advisor" or name.startswith("advisor.")


@contextlib.contextmanager
def compute_dtype(model: torch.nn.Module) -> Iterator[Callable[[], str]]:
    """Gives a function that tells in which type the model computed during the block.

    Looks at what a layer with weights puts out: under autocast that is not the weights' own type.
    The hook is gone when the block ends, so that it breaks no graph.
    """
    seen: list[torch.dtype] = []

    def look(_: torch.nn.Module, __: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.is_floating_point():
            seen.append(output.dtype)

    layers = [
        module
        for module in model.modules()
        if isinstance(getattr(module, "weight", None), torch.Tensor)
        and not any(True for _ in module.children())
        and isinstance(module, torch.nn.Linear | torch.nn.modules.conv._ConvNd)
    ]
    handles = [layer.register_forward_hook(look) for layer in layers[:8]]

    def answer() -> str:
        first = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
        found = Counter(seen).most_common(1)[0][0] if seen else first
        return str(found or torch.float32).removeprefix("torch.")

    try:
        yield answer
    finally:
        for handle in handles:
            handle.remove()


def folder_bytes(folder: Path) -> int:
    """Returns the size of all regular files below a folder."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            if path.is_file() and not path.is_symlink():
                total += path.stat().st_size
    return total


def with_agreement(trial: Trial, agreement: Agreement) -> Trial:
    """Returns the trial with its drifts from eager, and as DISAGREES when one is an error."""
    workload = trial.workload
    if workload is not None:
        workload = replace(workload, stochastic=agreement.stochastic)
    trial = replace(
        trial,
        loss_drift=agreement.loss_drift,
        loss_scale=agreement.loss_scale,
        gradient_drift=agreement.gradient_drift,
        gradient_scale=agreement.gradient_scale,
        workload=workload,
    )
    if agreement.agrees:
        return trial
    return replace(
        trial,
        status=TrialStatus.DISAGREES,
        failure=Failure(kind="numerics", message=agreement.message),
    )
