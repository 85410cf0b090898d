"""Spreading a model over ranks: DDP, FSDP1, FSDP2, before or after it is compiled.

Compiling is in place everywhere (`flip`), so the order shows in which module is compiled. With the
wrapper first it is the one that `wrap` returns, in the form that people paste (`model.compile()`);
compiled first it is the person's own module, inside. Blocks of FSDP1 have a wrapper each, and the
same holds for them; DDP and FSDP2 put no module around a block: there both orders are one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from advisor.profiler.errors import PlanError, WorkloadError
from advisor.profiler.records import Blocks, Config, Order, Scope, Wrapper

# What wrappers put into the names of parameters.
_PREFIXES = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


@dataclass(frozen=True, slots=True)
class Wrapped:
    """A model spread over ranks: what is trained, the person's own module, and its blocks."""

    model: torch.nn.Module
    inner: torch.nn.Module
    blocks: tuple[torch.nn.Module, ...]
    wrapper: Wrapper


def wrap(
    model: torch.nn.Module,
    blocks: Sequence[Blocks],
    wrapper: Wrapper,
    device: torch.device,
    mesh: Any = None,
    *,
    checkpointing: bool = False,
    alone: bool = False,
) -> Wrapped:
    """Returns the model spread over the ranks of the default process group.

    `alone`: its collectives return at once, as what they were given. FSDP shards each repeated
    block and then the rest; activation checkpointing is put around the same blocks before. Raises
    `PlanError` where there is nothing to put it around.
    """
    paths = [path for group in blocks for path in group.paths]
    if checkpointing:
        if not paths:
            raise PlanError(
                "the model has no repeated blocks to checkpoint", mend="leave --checkpointing out"
            )
        _checkpoint(model, paths)
    found = tuple(model.get_submodule(path) for path in paths)
    if wrapper is Wrapper.DDP:
        ids = [device.index] if device.type == "cuda" else None
        outer = torch.nn.parallel.DistributedDataParallel(model, device_ids=ids)
        if alone:
            from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

            # The group that answers at once gives DDP no gradients back.
            outer.register_comm_hook(None, noop_hook)
        return Wrapped(outer, model, found, wrapper)
    if wrapper is Wrapper.FSDP1:
        return Wrapped(_fsdp1(model, found, device), model, found, wrapper)
    if wrapper is Wrapper.FSDP2:
        _fsdp2(model, found, mesh)
    return Wrapped(model, model, found, wrapper)


def _checkpoint(model: torch.nn.Module, paths: Sequence[str]) -> None:
    """Has each block compute its activations anew in the backward pass.

    By torch's wrapper, which takes its own name out of state dicts.
    """
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for path in paths:
        parent, _, name = path.rpartition(".")
        holder = model.get_submodule(parent)
        block = checkpoint_wrapper(model.get_submodule(path))
        holder.register_module(name, block)


def _fsdp1(
    model: torch.nn.Module, blocks: Sequence[torch.nn.Module], device: torch.device
) -> torch.nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import CustomPolicy

    chosen = set(map(id, blocks))
    return FullyShardedDataParallel(
        model,
        # With the original parameters dynamo can trace what is inside (torch.compile's FAQ).
        use_orig_params=True,
        auto_wrap_policy=CustomPolicy(lambda module: id(module) in chosen),
        # Absent, FSDP1 looks for an accelerator and refuses a machine that has none.
        device_id=device,
    )


def _fsdp2(model: torch.nn.Module, blocks: Sequence[torch.nn.Module], mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def targets_of(wrapped: Wrapped, config: Config) -> list[torch.nn.Module]:
    """Returns the modules that a configuration compiles, for its order.

    Raises `PlanError` for the regional scope when the model repeats no block.
    """
    wrapped_first = config.order is Order.WRAP_FIRST
    if config.scope is Scope.MODEL:
        return [wrapped.model if wrapped_first else wrapped.inner]
    if not wrapped.blocks:
        raise PlanError(
            "the model has no repeated blocks to compile regionally", mend="use --scope model"
        )
    if wrapped.wrapper is Wrapper.FSDP1 and wrapped_first:
        around = {id(inner): outer for outer, inner in _fsdp1_pairs(wrapped.model)}
        return [around[id(block)] for block in wrapped.blocks]
    return list(wrapped.blocks)


def _fsdp1_pairs(model: torch.nn.Module) -> list[tuple[torch.nn.Module, torch.nn.Module]]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return [
        (module, module.module)
        for module in model.modules()
        if isinstance(module, FullyShardedDataParallel)
    ]


def optimizer_for(
    optimizer: torch.optim.Optimizer, names: dict[int, str], model: torch.nn.Module
) -> torch.optim.Optimizer:
    """Returns an optimizer like `optimizer` over the parameters of the wrapped model.

    `names` are the names of the parameters before wrapping, by their identity. FSDP replaces
    parameters, so that an optimizer made before would step what is no longer trained. Raises
    `WorkloadError` when it holds parameters that the model does not have, or has stepped already.
    """
    if optimizer.state:
        raise WorkloadError(
            "the optimizer has stepped before the model was spread over ranks",
            "its state belongs to the parameters that were replaced",
            "return it as it was made, or let the function take `wrap` and make it afterwards",
        )
    after = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    groups = []
    for group in optimizer.param_groups:
        moved = []
        for parameter in group["params"]:
            name = names.get(id(parameter))
            if name is None or name not in after:
                raise WorkloadError(
                    "the optimizer holds a parameter that the model does not have",
                    "it cannot be found again once the model is spread over ranks",
                    "make the optimizer of model.parameters()",
                )
            moved.append(after[name])
        groups.append({**{k: v for k, v in group.items() if k != "params"}, "params": moved})
    try:
        # Groups carry every setting of theirs, the optimizer's defaults included.
        kind: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] = type(optimizer)
        return kind(groups)
    except TypeError as error:
        raise WorkloadError(
            f"a {type(optimizer).__name__} cannot be made anew for the wrapped model",
            str(error),
            "let the function take `wrap`, wrap the model with it and make the optimizer then",
        ) from error


def plain_name(name: str) -> str:
    """Returns the name of a parameter without what wrappers put into it."""
    for prefix in _PREFIXES:
        name = name.replace(prefix, "")
    return name.removeprefix("module.")
