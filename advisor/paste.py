"""The lines of code to paste, with the model's own attribute names."""

from __future__ import annotations

import ast
import json
import keyword
from collections.abc import Iterable

from advisor.profiler import settings
from advisor.profiler.errors import PlanError
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
    chosen = [(settings.canonical(name), name, value) for name, value in config.options]
    set_first = [_setting(whole, name, value) for whole, name, value in chosen]
    if config.scope is Scope.REGIONAL:
        body = [line for blocks in facts.blocks for line in _loop(blocks, arguments, form)]
    else:
        body = _compile("model", arguments, facts.torch_class or form == "forward")
    modules = set(_modules((whole, value) for whole, _, value in chosen))
    if any("torch." in line for line in body) and not any(m.startswith("torch.") for m in modules):
        modules.add("torch")
    # As isort has them: the standard library, then torch.
    imports = [f"import {name}" for name in sorted(modules, key=lambda m: ("torch" in m, m))]
    return "\n".join([*imports, *([""] if imports else []), *set_first, *body])


def setting_lines(options: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Returns the lines that set options, without the imports that they need.

    Raises `PlanError` for a name that is no setting of torch.
    """
    return tuple(_setting(settings.canonical(name), name, value) for name, value in options)


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


def _setting(whole: str, name: str, value: str) -> str:
    """Returns the line that sets an option; `mode` and `options` exclude each other in torch."""
    room, _, attribute = whole.partition(".config.")
    if not _is_attribute(attribute):
        raise PlanError(
            f"the option {name!r} is not a setting of torch",
            "a name of torch._dynamo.config or torch._inductor.config is expected",
        )
    if whole in settings.FUNCTION_SETS:
        functions = settings.functions(name, value)
        if not all(map(_is_attribute, functions)):
            raise PlanError(f"option {name}={value} is not a list of functions")
        named = ", ".join(function.removeprefix("builtins.") for function in functions)
        # Into the set rather than in its place: what stands in it already stays.
        return f"{whole}.update({{{named}}})" if named else f"{whole}.update(())"
    return f"{room}.config.{attribute} = {_literal(value)}"


def _modules(chosen: Iterable[tuple[str, str]]) -> Iterable[str]:
    """Yields the modules that the lines which set options need."""
    for whole, value in chosen:
        yield whole.partition(".config.")[0] + ".config"
        if whole in settings.FUNCTION_SETS:
            for function in settings.functions(whole, value):
                parts = function.split(".")[:-1]
                # A class is no module: `logging.Logger.info` is found in `logging`.
                named = [part for part in parts if not part[:1].isupper()]
                if named != ["builtins"]:
                    yield ".".join(named)


def _literal(value: str) -> str:
    text = {"true": "True", "false": "False", "none": "None"}.get(value.lower(), value)
    try:
        return repr(ast.literal_eval(text))
    except (ValueError, SyntaxError):
        return repr(value)
