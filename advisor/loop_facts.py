"""What a model that a script trains is, and what of it rules out compiling it from outside."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from advisor.loop_finder import names_of
from advisor.profiler import torch_internals
from advisor.profiler.blocks import repeated_blocks
from advisor.profiler.flip import is_torch_class
from advisor.profiler.records import WorkloadFacts

COMPILES_ITSELF = "the script compiles by itself"
# By name: none of these has to be installed, or imported.
_STRANGERS = {
    "FullyShardedDataParallel": "FSDP shards the model, and has to be compiled before it is sharded"
    " (compile its blocks in the script)",
    "FSDPModule": "FSDP shards the model, and has to be compiled before it is sharded"
    " (compile its blocks in the script)",
    "DeepSpeedEngine": "DeepSpeed runs the steps by itself (compile with its `engine.compile()`)",
    "DataParallel": "DataParallel copies the model in each step (use DistributedDataParallel)",
    "ScriptModule": "the model is TorchScript, which torch.compile does not take",
}


def compiles_itself(module: torch.nn.Module) -> bool:
    """Returns whether the script has compiled a module."""
    wrapped = type(module).__name__ == "OptimizedModule"
    return wrapped or torch_internals.compiled_call(module) is not None


def to_compile(root: torch.nn.Module) -> torch.nn.Module:
    """Returns what of a root is compiled: what DistributedDataParallel wraps, else the root."""
    if isinstance(root, torch.nn.parallel.DistributedDataParallel):
        inner: torch.nn.Module = root.get_submodule("module")
        return inner
    return root


def stranger_to(module: torch.nn.Module) -> str:
    """Returns why a module cannot be compiled from outside; "" where nothing speaks against it."""
    if compiles_itself(module):
        return COMPILES_ITSELF
    for kind in type(module).__mro__:
        why = _STRANGERS.get(kind.__name__)
        if why is not None:
            return why
    return ""


def facts_of(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> WorkloadFacts:
    """Returns what is known of a training without looking at its batches."""
    parameters = list(model.parameters())
    return WorkloadFacts(
        fingerprint="",
        model_class=type(model).__name__,
        parameters=sum(p.numel() for p in parameters),
        trainable_parameters=sum(p.numel() for p in parameters if p.requires_grad),
        optimizer=names_of(optimizers),
        dtype=str(next((p.dtype for p in parameters), torch.float32)).removeprefix("torch."),
        shapes=(),
        blocks=repeated_blocks(model),
        torch_class=is_torch_class(model),
    )
