"""What the lines of a source file are: which statement each belongs to, and what encloses it."""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Statement:
    """Lines of a simple statement, or of the head of a compound one, and what encloses it.

    `repeats` says how its line is counted: "once" for each entry, "each" for each round of a
    comprehension or of a loop whose body stands on the same line.
    """

    start: int
    end: int
    in_loop_or_try: bool = False
    in_with: bool = False
    repeats: str = "once"


@functools.lru_cache(maxsize=64)
def syntax_tree(file: str) -> ast.Module | None:
    """Returns a source file parsed, None when it cannot be read or parsed."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


@functools.lru_cache(maxsize=64)
def statements(file: str) -> dict[int, Statement]:
    """Returns the innermost statement of each line of a file; empty when it cannot be parsed."""
    tree = syntax_tree(file)
    if tree is None:
        return {}
    found: dict[int, Statement] = {}
    _visit(tree.body, False, False, found)
    for node in ast.walk(tree):
        if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            element = node.key if isinstance(node, ast.DictComp) else node.elt
            _repeat(found, element.lineno)
        elif isinstance(node, ast.For | ast.AsyncFor) and node.body[0].lineno == node.lineno:
            _repeat(found, node.lineno)
    return found


def _repeat(found: dict[int, Statement], line: int) -> None:
    statement = found.get(line)
    if statement is not None:
        found[line] = Statement(
            statement.start, statement.end, statement.in_loop_or_try, statement.in_with, "each"
        )


def _visit(
    body: Sequence[ast.stmt], looped: bool, withed: bool, found: dict[int, Statement]
) -> None:
    for node in body:
        inner: list[ast.stmt] = getattr(node, "body", None) or []
        end = max(node.lineno, inner[0].lineno - 1) if inner else node.end_lineno or node.lineno
        # The test of a while loop runs in each round; what a for loop runs over is read once.
        head = Statement(node.lineno, end, looped or isinstance(node, ast.While), withed)
        for line in range(node.lineno, end + 1):
            found[line] = head
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            _visit(inner, False, False, found)
            continue
        loops = isinstance(node, ast.For | ast.AsyncFor | ast.While | ast.Try | ast.TryStar)
        opens = isinstance(node, ast.With | ast.AsyncWith)
        _visit(inner, looped or loops, withed or opens, found)
        for handler in getattr(node, "handlers", ()):
            _visit(handler.body, looped, withed, found)
        for case in getattr(node, "cases", ()):
            _visit(case.body, looped, withed, found)
        for name in ("orelse", "finalbody"):
            _visit(getattr(node, name, None) or [], looped, withed, found)
