"""What a line of source lies in: its function, the loop or try around it, an autograd.Function."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace

from advisor.profiler.source_lines import syntax_tree

_BLOCKS: tuple[tuple[tuple[type[ast.AST], ...], str], ...] = (
    ((ast.For, ast.AsyncFor, ast.While), "loop"),
    ((ast.Try, ast.TryStar), "try block"),
    ((ast.With, ast.AsyncWith), "with block"),
    ((ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp), "comprehension"),
)


@dataclass(frozen=True, slots=True)
class Enclosing:
    """What a line lies in, innermost of each; empty where there is none.

    `function_class` is the class when it is an autograd.Function.
    """

    function: str = ""
    block: str = ""
    function_class: str = ""


def enclosing(file: str, line: int) -> Enclosing:
    """Returns what a line lies in; nothing when the file cannot be read or parsed."""
    tree = syntax_tree(file)
    if tree is None:
        return Enclosing()
    found = Enclosing()
    node: ast.AST | None = tree
    while node is not None:
        node = next((child for child in _within(node) if _holds(child, line)), None)
        if node is not None:
            found = _with(found, node)
    return found


def _within(node: ast.AST) -> list[ast.AST]:
    """Returns the children that have lines."""
    children = list(ast.iter_child_nodes(node))
    return [child for child in children if hasattr(child, "lineno")]


def _holds(node: ast.AST, line: int) -> bool:
    end = getattr(node, "end_lineno", None) or node.lineno  # type: ignore[attr-defined]
    return bool(node.lineno <= line <= end)  # type: ignore[attr-defined]


def _with(found: Enclosing, node: ast.AST) -> Enclosing:
    if isinstance(node, ast.ClassDef):
        bases = [ast.unparse(base) for base in node.bases]
        ours = any(base.rpartition(".")[2] in ("Function", "InplaceFunction") for base in bases)
        return Enclosing(function_class=node.name if ours else "")
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return replace(found, function=node.name, block="")
    if isinstance(node, ast.Lambda):
        return replace(found, function="<lambda>", block="")
    block = next((word for kinds, word in _BLOCKS if isinstance(node, kinds)), "")
    return replace(found, block=block) if block else found
