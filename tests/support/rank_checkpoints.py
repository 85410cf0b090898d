"""Saves a model that is spread over ranks and loads it again: each way that people do, both ways.

    python -P rank_checkpoints.py WRAPPER FOLDER

Run by each rank, with RANK and WORLD_SIZE. Writes FOLDER/rankN.json: what was loaded into what,
and whether the model then says the same.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from ranks import Net, batches
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from advisor.profiler.blocks import repeated_blocks
from advisor.profiler.flip import Flip
from advisor.profiler.records import Config, Order, Wrapper
from advisor.profiler.wrappers import Wrapped, targets_of, wrap

CPU = torch.device("cpu")
# Without cpu_offload, of which FSDP1 dies on a CPU (SIGSEGV, torch 2.13).
FULL = StateDictOptions(full_state_dict=True)
FROM_FIRST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
# How a model is made: eager, or compiled in one of the orders.
FORMS = (None, Order.WRAP_FIRST, Order.COMPILE_FIRST)


def made(wrapper: Wrapper, form: Order | None, seed: int) -> Wrapped:
    """Returns a model of its own weights, spread and compiled as trials do it, and stepped once."""
    torch._dynamo.reset()
    torch.manual_seed(seed)
    model = Net()
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    wrapped = wrap(model, repeated_blocks(model), wrapper, CPU, mesh)
    if form is not None:
        config = Config(backend="eager", order=form)
        Flip(targets_of(wrapped, config), config).apply()
    wrapped.model(batches(0)).pow(2).mean().backward()
    optimizer = torch.optim.SGD(wrapped.model.parameters(), lr=0.1)
    optimizer.step()
    # FSDP1 cannot be traced while it holds gradients, which are sharded (torch 2.13).
    optimizer.zero_grad()
    return wrapped


def says(wrapped: Wrapped) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = wrapped.model(batches(1)).clone()
    if isinstance(wrapped.model, FSDPModule):
        # The root keeps its parameters whole after a forward, for the backward that comes next.
        wrapped.model.reshard()
    return result


def through_full(wrapper: Wrapper, _: Path) -> Callable[[Wrapped, Wrapped], None]:
    """Loads the gathered state dict; that of DDP is its module's own."""

    def move(source: Wrapped, target: Wrapped) -> None:
        if wrapper is Wrapper.DDP:
            target.model.module.load_state_dict(source.model.module.state_dict())  # type: ignore[union-attr, arg-type, operator]
            return
        # Rank 0 has it all, and the others nothing.
        state = get_model_state_dict(source.model, options=FULL)
        set_model_state_dict(target.model, state, options=FROM_FIRST)

    return move


def through_shards(_: Wrapper, folder: Path) -> Callable[[Wrapped, Wrapped], None]:
    """Saves each rank's part by torch.distributed.checkpoint and loads it."""
    numbers = itertools.count()

    def move(source: Wrapped, target: Wrapped) -> None:
        place = folder / f"shards{next(numbers)}"
        dcp.save(get_model_state_dict(source.model), checkpoint_id=place)
        state = get_model_state_dict(target.model)
        dcp.load(state, checkpoint_id=place)
        set_model_state_dict(target.model, state)

    return move


def into_plain(source: Wrapped, wrapper: Wrapper, *, compiled: bool) -> bool:
    """Returns whether the gathered state dict loads into the model as it is without ranks."""
    if wrapper is Wrapper.DDP:
        state: dict[str, Any] = source.model.module.state_dict()  # type: ignore[union-attr, assignment, operator]
    else:
        state = get_model_state_dict(source.model, options=FULL)
    there = says(source)
    if int(os.environ["RANK"]) != 0:
        return True
    plain = Net()
    if compiled:
        plain.compile(backend="eager")
    plain.load_state_dict(state)
    with torch.no_grad():
        return torch.allclose(plain(batches(1)), there, atol=1e-5)


def main() -> None:
    wrapper, folder = Wrapper(sys.argv[1]), Path(sys.argv[2])
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(folder / "store"), ranks)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=ranks, store=store)
    found: dict[str, bool] = {}
    for how, make in (("full", through_full), ("sharded", through_shards)):
        move = make(wrapper, folder)
        for saved, loaded in itertools.product(FORMS, FORMS):
            source, target = made(wrapper, saved, 1), made(wrapper, loaded, 2)
            before = torch.allclose(says(source), says(target), atol=1e-5)
            move(source, target)
            after = torch.allclose(says(source), says(target), atol=1e-5)
            found[f"{how}: {saved} into {loaded}"] = after and not before
    for saved in FORMS:
        for compiled in (False, True):
            name = f"plain: {saved} into one process, {'compiled' if compiled else 'eager'}"
            found[name] = into_plain(made(wrapper, saved, 1), wrapper, compiled=compiled)
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
