"""The names of torch that may go: each is there, and what a missing one costs is said."""

from __future__ import annotations

import ast
import logging
import re
from pathlib import Path

import pytest
import torch

from advisor.profiler import torch_internals

PRIVATE = ("torch._dynamo", "torch._inductor", "torch._functorch")
# Loggers that torch makes when it is imported; they are found by name, not by attribute.
LOGGERS = (torch_internals.GRAPH_BREAK_LOGGER, torch_internals.CUDAGRAPH_LOGGER)


def resolved_names() -> set[str]:
    """Returns the dotted names that the module's functions look up."""
    tree = ast.parse(Path(torch_internals.__file__).read_text())
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
            if re.fullmatch(r"torch(\.\w+)*\.[A-Za-z_]\w+", text) and text not in LOGGERS:
                names.add(text)
    return names


def test_this_torch_has_every_name() -> None:
    assert torch_internals.missing() == ()


@pytest.mark.parametrize("name", sorted(resolved_names()))
def test_every_name_that_a_function_looks_up_is_there(name: str) -> None:
    assert torch_internals.find(name) is not None


def test_names_that_are_put_together_are_there_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}
    find = torch_internals.find

    def noted(name: str) -> object:
        asked[name] = find(name)
        return asked[name]

    monkeypatch.setattr(torch_internals, "find", noted)
    torch_internals.start_compile_records()
    torch_internals.compile_metrics()
    torch_internals.counters()
    torch_internals.cpu_has_bfloat16()
    torch_internals.jagged_tensors_made()
    assert {name for name, found in asked.items() if found is None} == set()
    assert "torch._dynamo.utils.clear_compilation_metrics" in asked


def test_the_names_looked_up_were_found_in_the_source() -> None:
    assert resolved_names() >= {
        "torch._dynamo.utils.counters",
        "torch._dynamo.callback.callback_handler",
        "torch._logging.set_logs",
    }


@pytest.mark.parametrize("name", sorted(torch_internals._NAMES))
def test_a_name_that_is_gone_is_said_with_what_is_not_known(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = torch_internals.find
    monkeypatch.setattr(
        torch_internals, "find", lambda asked: None if asked == name else found(asked)
    )
    (sentence,) = torch_internals.missing()
    assert name in sentence and torch_internals._NAMES[name] in sentence
    assert torch.__version__ in sentence


def test_without_any_name_everything_still_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_internals, "find", lambda _: None)
    heard: list[str] = []
    torch_internals.start_compile_records()
    torch_internals.on_compile_start(heard.append)
    torch_internals.listen_to_graph_breaks(logging.NullHandler())
    assert torch_internals.compile_metrics() == []
    assert torch_internals.counters() == {}
    assert not torch_internals.jagged_tensors_made()
    assert len(torch_internals.missing()) == len(torch_internals._NAMES)


@pytest.mark.parametrize("name", LOGGERS)
def test_torch_has_the_loggers(name: str) -> None:
    import torch._dynamo.symbolic_convert
    import torch._inductor.cudagraph_utils  # noqa: F401 - importing it makes its logger

    assert name in logging.Logger.manager.loggerDict


def private_names(source: str) -> list[str]:
    """Returns the private names of torch that a source reaches for."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            found.append(ast.unparse(node))
    return [name for name in found if name.startswith(PRIVATE)]


def test_only_one_module_reaches_for_private_names_of_the_compiler(repository: Path) -> None:
    sources = [file for room in ("profiler", "advisor", "models")
               for file in (repository / room).rglob("*.py")]  # fmt: skip
    assert len(sources) > 40
    offenders = {
        file.name: names
        for file in sources
        if file.name != "torch_internals.py" and (names := private_names(file.read_text()))
    }
    assert offenders == {}


@pytest.mark.parametrize(
    "line",
    [
        "import torch._dynamo.config",
        "from torch._inductor import config",
        "torch._dynamo.reset()",
    ],
)
def test_the_check_for_private_names_sees_them(line: str) -> None:
    assert private_names(f"import torch\n{line}")


def test_jagged_tensors_are_noticed_once_made() -> None:
    values, offsets = torch.randn(5, 2), torch.tensor([0, 2, 5])
    torch.nested.nested_tensor_from_jagged(values, offsets)
    assert torch_internals.jagged_tensors_made()
