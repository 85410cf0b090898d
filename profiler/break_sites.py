"""Where graph breaks stand in the running program: how often it comes by, and what they cost.

A break is known by file and line. Two steps are watched with `sys.settrace`: an eager one, which
shows how often each line is reached and through which functions; and a compiled one, in which those
functions open profiler ranges that carry the breaks to blame for what runs under them.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch

from advisor.profiler.records import GraphBreak
from advisor.profiler.source_lines import Statement, statements

Tracer = Callable[[FrameType, str, Any], Any]

# Ranges of the compiled step are named so, followed by the indexes of the breaks.
RANGE = "advisor::lost::"
# Call chains looked at for each break: enough for every caller, few in a loop of thousands.
_MOST_CHAINS = 256
# What dynamo's rewritten code calls: its graphs, and the functions in which a frame goes on. Code
# without any of them is the person's own, run by Python (torch/_dynamo/output_graph.py and
# resume_execution.py, 2.4 to 2.13).
_REWRITTEN = ("__compiled_fn", "__resume_at")
_MODULE_CALL = torch.nn.Module.__call__.__code__


@dataclass(slots=True)
class Function:
    """A function that holds breaks or leads to them: which, at which of its lines."""

    code: CodeType
    lines: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))

    def runs_as(self, code: CodeType) -> bool:
        """Returns whether `code` is this function, dynamo's form of it, or a rest of it."""
        mine = self.code
        if code is mine:
            return True
        if code.co_filename != mine.co_filename:
            return False
        if code.co_name == mine.co_name:
            return _definition(code) == _definition(mine)
        first, last = _extent(mine)
        return f"_in_{mine.co_name}_at_" in code.co_name and first <= code.co_firstlineno <= last


def _definition(code: CodeType) -> int:
    """Returns the line that tells functions of one name apart, also after dynamo's rewriting.

    Rewritten code starts where the function does, or (3.11) where its `def` stands below its
    decorators.
    """
    statement = statements(code.co_filename).get(code.co_firstlineno)
    return statement.start if statement is not None else code.co_firstlineno


def _extent(code: CodeType) -> tuple[int, int]:
    lines = [line for _, _, line in code.co_lines() if line]
    return min(lines, default=code.co_firstlineno), max(lines, default=code.co_firstlineno)


def _starts(code: CodeType) -> dict[int, set[int]]:
    """Returns for each line of a code the offsets at which the flow from above enters it."""
    starts: dict[int, set[int]] = defaultdict(set)
    before: int | None = None
    for start, _, line in code.co_lines():
        if line is not None and line != before:
            starts[line].add(start)
        before = line
    return starts


@functools.lru_cache(maxsize=256)
def _first_resume(code: CodeType) -> int:
    """Returns the offset at which a code is called; a generator goes on at later ones."""
    offsets = (each.offset for each in dis.get_instructions(code) if each.opname == "RESUME")
    return next(offsets, 0)


def is_rewritten(code: CodeType) -> bool:
    """Returns whether code is what dynamo made of a function rather than the function itself."""
    return any(name.startswith(_REWRITTEN) for name in code.co_names)


class _Watch:
    """Traces the calling thread within a `with`; what traced before is then back."""

    def __init__(self, roots: Sequence[torch.nn.Module]) -> None:
        self._roots = tuple(map(id, roots))
        # The frame that called the compiled module, while that runs.
        self._root: FrameType | None = None
        self._before: Any = None

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        # Between two graphs dynamo looks at every function that is called, a tracer's too, and
        # would compile it (seen with torch 2.13).
        sys.settrace(torch.compiler.disable(self._enter))

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)
        self._root = None

    def _enter(self, frame: FrameType, event: str, argument: object) -> Tracer | None:
        if frame.f_code is _MODULE_CALL:
            if self._root is None and id(frame.f_locals.get("self")) in self._roots:
                self._root = frame
                frame.f_trace_lines = False
                return self._leave_root
            return None
        return self._enter_function(frame)

    def _leave_root(self, frame: FrameType, event: str, argument: object) -> Tracer:
        if event == "return":
            self._root = None
        return self._leave_root

    def _enter_function(self, frame: FrameType) -> Tracer | None:
        raise NotImplementedError


@dataclass(slots=True)
class _Passes:
    """How often the code of one function came by a line."""

    entries: int = 0
    # Jumps back within the line: rounds of a comprehension or a one-line loop.
    rounds: int = 0
    calls: int = 0


class EagerWatch(_Watch):
    """Counts how often an eager step comes by each break, and through which functions."""

    def __init__(self, breaks: Sequence[GraphBreak], roots: Sequence[torch.nn.Module]) -> None:
        super().__init__(roots)
        self._sites: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for index, found in enumerate(breaks):
            if found.file and found.line > 0:
                self._sites[found.file][found.line].append(index)
        self._starts: dict[CodeType, dict[int, set[int]]] = {}
        self._chains: Counter[tuple[str, int]] = Counter()
        self._passes: dict[tuple[str, int], dict[CodeType, _Passes]] = defaultdict(
            lambda: defaultdict(_Passes)
        )
        self._functions: dict[CodeType, Function] = {}

    def hits(self, found: GraphBreak) -> int | None:
        """Returns how often the line of a break was reached, or None when it never was."""
        passes = self._passes.get((found.file, found.line))
        if not passes:
            return None
        # A lambda or comprehension on the line: its rounds, not that of the line around it.
        inner = [count for code, count in passes.items() if code.co_name.startswith("<")]
        statement = statements(found.file).get(found.line)
        repeats = statement is not None and statement.repeats == "each"
        total = 0
        for count in inner or list(passes.values()):
            entered = max(count.entries, count.calls)
            total += count.rounds or entered if repeats else entered
        return total or None

    def functions(self) -> list[Function]:
        """Returns the functions under the compiled modules that hold breaks or lead to them."""
        return list(self._functions.values())

    def _enter_function(self, frame: FrameType) -> Tracer | None:
        code = frame.f_code
        lines = self._sites.get(code.co_filename)
        if lines is None:
            return None
        starts = self._starts.get(code)
        if starts is None:
            starts = {line: found for line, found in _starts(code).items() if line in lines}
            self._starts[code] = starts
        if not starts:
            return None
        if code.co_firstlineno in starts and not code.co_name.startswith("<"):
            self._came_by(frame, code.co_firstlineno).calls += 1
        return self._lines_of(code, starts, resumed=frame.f_lasti > _first_resume(code))

    def _lines_of(self, code: CodeType, starts: dict[int, set[int]], resumed: bool) -> Tracer:
        of_line = statements(code.co_filename)
        statement: object = None
        # Offset of the last entry counted for each line of the statement that runs.
        last: dict[int, int] = {}
        first = not resumed

        def trace(frame: FrameType, event: str, argument: object) -> Tracer:
            nonlocal statement, first
            if event != "line":
                return trace
            line, offset = frame.f_lineno, frame.f_lasti
            now: object = of_line.get(line, line)
            if now is not statement and now != statement:
                statement = now
                last.clear()
            if line in starts:
                if not first and offset not in starts[line]:
                    self._came_by(frame, line).rounds += 1
                elif offset <= last.get(line, offset):  # else: back on the line that called
                    last[line] = offset
                    self._came_by(frame, line).entries += 1
            first = False
            return trace

        return trace

    def _came_by(self, frame: FrameType, line: int) -> _Passes:
        code = frame.f_code
        site = (code.co_filename, line)
        if self._root is not None and self._chains[site] < _MOST_CHAINS:
            self._chains[site] += 1
            for caller, at in self._chain(frame, line):
                function = self._functions.setdefault(caller, Function(caller))
                function.lines[at].update(self._sites[code.co_filename][line])
        return self._passes[site][code]

    def _chain(self, frame: FrameType, line: int) -> Iterator[tuple[CodeType, int]]:
        """Gives code and line of the frames from a break out to the compiled module's call."""
        yield frame.f_code, line
        caller = frame.f_back
        while caller is not None and caller is not self._root:
            if not _is_module_call(caller.f_code):
                yield caller.f_code, caller.f_lineno
            caller = caller.f_back


def _is_module_call(code: CodeType) -> bool:
    return code is _MODULE_CALL or (
        code.co_filename == _MODULE_CALL.co_filename and code.co_name.startswith("_call_impl")
    )


@dataclass(frozen=True, slots=True)
class _Blame:
    """Which breaks are to blame for what a code runs outside of graphs: anywhere, or by line."""

    anywhere: frozenset[int] = frozenset()
    by_line: dict[int, frozenset[int]] = field(default_factory=dict)
    # The code is what remains of a function after a break.
    rest: bool = False


class CompiledWatch(_Watch):
    """Opens profiler ranges in a compiled step, named for the breaks to blame.

    A function that Python runs as it was written was given up by the compiler, because of breaks
    that it cannot go on from: in a loop or a `try`. In a function that runs as dynamo rewrote it,
    what is left to Python is the very statement of a break, with all that it calls.

    `refused` names code (file, first line) that runs as written because the compiler had compiled
    it too often: there a break loses no more than its own statement.
    """

    def __init__(
        self,
        functions: Sequence[Function],
        roots: Sequence[torch.nn.Module],
        refused: frozenset[tuple[str, int]] = frozenset(),
    ) -> None:
        super().__init__(roots)
        self._by_file: dict[str, list[Function]] = defaultdict(list)
        for function in functions:
            self._by_file[function.code.co_filename].append(function)
        self._refused = refused
        self._blames: dict[CodeType, _Blame | None] = {}
        # Breaks of the ranges that are open, outermost first; None: any may come within.
        self._open: list[frozenset[int] | None] = []
        # For each watched frame that runs, the range that it was called in.
        self._called_in: dict[FrameType, frozenset[int] | None] = {}

    def _enter_function(self, frame: FrameType) -> Tracer | None:
        code = frame.f_code
        if self._root is None or code.co_filename not in self._by_file:
            return None
        if code not in self._blames:
            self._blames[code] = self._blame(code)
        blame = self._blames[code]
        if blame is None:
            return None
        frame.f_trace_lines = bool(blame.by_line)
        called_in = self._open[-1] if self._open else None
        whole = None
        if blame.rest and frame.f_back in self._called_in:
            # Dynamo calls the rest of a function from the line of the break: not within it.
            called_in = self._called_in[frame.f_back]
            whole = self._open_range(called_in)
        self._called_in[frame] = called_in
        return self._ranges_of(blame, whole)

    def _ranges_of(self, blame: _Blame, whole: Any) -> Tracer:
        current = self._begin(blame.anywhere)
        statement: frozenset[int] = frozenset()

        def trace(frame: FrameType, event: str, argument: object) -> Tracer:
            nonlocal current, statement
            now = blame.by_line.get(frame.f_lineno, frozenset()) if event == "line" else statement
            if event == "return" or now != statement:
                self._end(current)
                statement = now
                current = self._begin(now) if event == "line" else None
            if event == "return":
                self._end(whole)
                self._called_in.pop(frame, None)
            return disabled

        disabled: Tracer = torch.compiler.disable(trace)
        return disabled

    def _begin(self, breaks: frozenset[int]) -> Any:
        """Opens a range, and returns it; None when there is nothing to say.

        A function that is shared by many callers leads to more breaks than the caller's line.
        """
        if self._open and self._open[-1] is not None:
            breaks &= self._open[-1]
        return self._open_range(breaks) if breaks else None

    def _open_range(self, breaks: frozenset[int] | None) -> Any:
        opened = torch.profiler.record_function(RANGE + ",".join(map(str, sorted(breaks or ()))))
        opened.__enter__()
        self._open.append(breaks)
        return opened

    def _end(self, opened: Any) -> None:
        if opened is not None:
            opened.__exit__(None, None, None)
            self._open.pop()

    def _blame(self, code: CodeType) -> _Blame | None:
        fitting = [each for each in self._by_file[code.co_filename] if each.runs_as(code)]
        if not fitting:
            return None
        function = min(fitting, key=lambda each: _extent(each.code)[1] - _extent(each.code)[0])
        rest = code.co_name != function.code.co_name
        refused = (code.co_filename, code.co_firstlineno) in self._refused
        if is_rewritten(code) or refused:
            return _Blame(by_line=_by_line(function), rest=rest)
        return _Blame(anywhere=_culprits(function, code), rest=rest)


def _by_line(function: Function) -> dict[int, frozenset[int]]:
    """Returns the breaks of each line, spread over the whole of their statements."""
    of_line = statements(function.code.co_filename)
    found: dict[int, frozenset[int]] = defaultdict(frozenset)
    for line, breaks in function.lines.items():
        statement = of_line.get(line, Statement(line, line))
        for each in range(statement.start, statement.end + 1):
            found[each] |= breaks
    return dict(found)


def _culprits(function: Function, code: CodeType) -> frozenset[int]:
    """Returns the breaks for which a function, or the rest of it, was given up.

    A break in a loop or a `try` cannot be gone on from (torch/_dynamo/symbolic_convert.py,
    "graph break in loop"); then come those under a context manager, then all.
    """
    if code.co_name != function.code.co_name:  # a rest: what is above it was passed
        below = {
            line: breaks for line, breaks in function.lines.items() if line >= code.co_firstlineno
        }
    else:
        below = dict(function.lines)
    below = below or dict(function.lines)
    of_line = statements(code.co_filename)
    kinds: list[set[int]] = [set(), set(), set()]
    for line, breaks in below.items():
        statement = of_line.get(line, Statement(line, line))
        kinds[0 if statement.in_loop_or_try else 1 if statement.in_with else 2].update(breaks)
    return frozenset(next(kind for kind in kinds if kind))
