"""The lines of code to paste, with the model's own attribute names."""

from __future__ import annotations

import ast
import json
import keyword
import re

from advisor.profiler.errors import PlanError
from advisor.profiler.records import Blocks, Config, Dynamic, Mode, Scope, WorkloadFacts

_DYNAMIC = {Dynamic.TRUE: "True", Dynamic.FALSE: "False"}
_OPTION = re.compile(r"(?:torch\._(dynamo|inductor)\.config\.|(dynamo|inductor)\.)?([\w.]+)")


def code(config: Config | None, facts: WorkloadFacts, form: str = "call") -> str:
    """Returns whole lines to paste after the model was moved to its device; "" for eager.

    `form` is "forward" where the model's forward is what can be compiled in place (torch's own
    classes). Raises `PlanError` for an option whose name is not one of torch's configuration.
    """
    if config is None:
        return ""
    arguments = _arguments(config)
    settings = [_setting(name, value) for name, value in config.options]
    if config.scope is Scope.REGIONAL:
        body = [line for blocks in facts.blocks for line in _loop(blocks, arguments, form)]
    else:
        body = _compile("model", arguments, facts.torch_class or form == "forward")
    lines = settings + body
    modules = sorted({line.partition(".config.")[0] + ".config" for line in settings})
    needs_torch = not modules and any("torch." in line for line in body)
    imports = [f"import {module}" for module in modules] + ["import torch"] * needs_torch
    return "\n".join([*imports, *([""] if imports else []), *lines])


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
    if _is_attribute(path):
        return f"model.{path}"
    return f"model.get_submodule({_text(path)})"


def _is_attribute(path: str) -> bool:
    parts = path.split(".")
    return all(part.isidentifier() and not keyword.iskeyword(part) for part in parts)


def _text(value: str) -> str:
    """Returns a string literal in double quotes: JSON's are Python's too."""
    return json.dumps(value, ensure_ascii=False)


def _setting(name: str, value: str) -> str:
    """Returns the line that sets an option; `mode` and `options` exclude each other in torch."""
    match = _OPTION.fullmatch(name)
    attribute = match[3] if match else ""
    if match is None or not _is_attribute(attribute):
        raise PlanError(
            f"the option {name!r} is not a setting of torch",
            "a name of torch._dynamo.config or torch._inductor.config is expected",
        )
    room = match[1] or match[2] or "inductor"
    return f"torch._{room}.config.{attribute} = {_literal(value)}"


def _literal(value: str) -> str:
    text = {"true": "True", "false": "False", "none": "None"}.get(value.lower(), value)
    try:
        return repr(ast.literal_eval(text))
    except (ValueError, SyntaxError):
        return repr(value)
