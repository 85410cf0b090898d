"""The lines of code to paste, with the model's own attribute names."""

from __future__ import annotations

import json

from advisor.profiler import settings
from advisor.profiler.records import Blocks, Config, Dynamic, Mode, Scope, WorkloadFacts

_DYNAMIC = {Dynamic.TRUE: "True", Dynamic.FALSE: "False"}


def code(config: Config | None, facts: WorkloadFacts, form: str = "call") -> str:
    """Returns whole lines to paste after the model was moved to its device; "" for eager.

    `form` is "forward" where the model's forward is what can be compiled in place (torch's own
    classes). Raises `PlanError` for an option whose name is not one of torch's configuration.
    """
    if config is None:
        return ""
    arguments = _arguments(config)
    set_first = settings.lines(config.options)
    if config.scope is Scope.REGIONAL:
        body = [line for blocks in facts.blocks for line in _loop(blocks, arguments, form)]
    else:
        body = _compile("model", arguments, facts.torch_class or form == "forward")
    modules = set(settings.modules(config.options))
    if any("torch." in line for line in body) and not any(m.startswith("torch.") for m in modules):
        modules.add("torch")
    # As isort has them: the standard library, then torch.
    imports = [f"import {name}" for name in sorted(modules, key=lambda m: ("torch" in m, m))]
    return "\n".join([*imports, *([""] if imports else []), *set_first, *body])


def _arguments(config: Config) -> str:
    named = [
        ("mode", _text(config.mode.value) if config.mode is not Mode.DEFAULT else ""),
        ("dynamic", _DYNAMIC.get(config.dynamic, "")),
        ("fullgraph", "True" if config.fullgraph else ""),
        ("backend", _text(config.backend) if config.backend != "inductor" else ""),
    ]
    return ", ".join(f"{name}={value}" for name, value in named if value)


def _compile(target: str, arguments: str, by_forward: bool) -> list[str]:
    if not by_forward:
        return [f"{target}.compile({arguments})"]
    inner = ", ".join(part for part in (f"{target}.forward", arguments) if part)
    return [f"{target}.forward = torch.compile({inner})"]


def _loop(blocks: Blocks, arguments: str, form: str) -> list[str]:
    if blocks.container is not None:
        head = [f"for block in {_attribute(blocks.container)}:"]
    else:
        head = ["for block in (", *(f"    {_attribute(p)}," for p in blocks.paths), "):"]
    # Compiling a torch class's call captures nothing; compiling its forward does (design §5.3).
    by_forward = form == "forward" or blocks.module_class.startswith("torch.nn")
    return [*head, *(f"    {line}" for line in _compile("block", arguments, by_forward))]


def _attribute(path: str) -> str:
    """Returns the expression for a submodule; `get_submodule` where dots do not spell Python."""
    if not path:
        return "model"
    if settings.is_dotted_name(path):
        return f"model.{path}"
    return f"model.get_submodule({_text(path)})"


def _text(value: str) -> str:
    """Returns a string literal in double quotes: JSON's are Python's too."""
    return json.dumps(value, ensure_ascii=False)
