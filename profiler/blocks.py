"""Repeated blocks of a model: what regional compilation compiles once for each kind."""

from __future__ import annotations

from collections import defaultdict

import torch

from advisor.profiler.records import Blocks

# Fewer copies gain nothing over compiling the whole.
_LEAST_COPIES = 2
# A kind of block that holds less than this share of the parameters is not worth a region.
_LEAST_SHARE = 0.05

_Key = tuple[type, tuple[tuple[str, tuple[int, ...]], ...]]


def repeated_blocks(model: torch.nn.Module) -> tuple[Blocks, ...]:
    """Returns the outermost repeated blocks of a model, in the order of the model.

    Blocks of one kind have the same class and the same names and shapes of parameters. Those in a
    `ModuleList` or `Sequential` come first; else repeated children anywhere count.
    """
    whole = sum(parameter.numel() for parameter in model.parameters()) or 1
    groups: dict[_Key, list[tuple[str, torch.nn.Module]]] = defaultdict(list)
    for path, module in model.named_modules():
        if path and any(True for _ in module.children()):
            groups[_kind(module)].append((path, module))
    found: list[Blocks] = []
    taken: set[str] = set()
    for members in sorted(groups.values(), key=lambda group: group[0][0].count(".")):
        free = [(path, module) for path, module in members if not _inside(path, taken)]
        held = sum(sum(p.numel() for p in module.parameters()) for _, module in free)
        if len(free) < _LEAST_COPIES or held < _LEAST_SHARE * whole:
            continue
        paths = tuple(path for path, _ in free)
        taken.update(paths)
        found.append(
            Blocks(
                module_class=_class_name(free[0][1]),
                paths=paths,
                container=_container(model, paths),
                parameters=held,
            )
        )
    return tuple(found)


def _kind(module: torch.nn.Module) -> _Key:
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in module.named_parameters())
    return type(module), shapes


def _class_name(module: torch.nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _inside(path: str, taken: set[str]) -> bool:
    parts = path.split(".")
    return any(".".join(parts[:cut]) in taken for cut in range(1, len(parts) + 1))


def _container(model: torch.nn.Module, paths: tuple[str, ...]) -> str | None:
    """Returns the path of the container whose children are exactly these blocks."""
    parents = {path.rpartition(".")[0] for path in paths}
    if len(parents) != 1:
        return None
    parent = parents.pop()
    module = model.get_submodule(parent)
    listed = isinstance(module, torch.nn.ModuleList | torch.nn.Sequential)
    return parent if listed and len(list(module.children())) == len(paths) else None
