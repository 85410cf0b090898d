"""From the compiler's messages of graph breaks to records: cause, reason, place.

A message names the place in the code that was traced and, the first time, the frames that led to
it. The frames above the compiled module's call are those of who called it, and belong to no graph.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from advisor.profiler.causes import break_cause, break_title
from advisor.profiler.enclosing import Enclosing, enclosing
from advisor.profiler.records import CompileEvent, GraphBreak, GraphBreakCause
from advisor.profiler.workload import is_library

# Frames of a result must stay below the cap of a message.
_MOST_BREAKS = 200
_MOST_TEXT = 500
_MOST_REASON = 900
_MOST_QUOTED = 160
_LIMIT_WORDS = "recompile limit"

_LINK = re.compile(r"https://\S*compile-graph-break-site\S*")
_PLACE = re.compile(r"in user code at (.+?):(\d+)")
_FRAME = re.compile(r'File "([^"]+)", line (\d+)(?:, in (\S+))?[^\n]*(?:\n[ \t]+([^\n]*))?')
# The call of a compiled module, in torch/nn/modules/module.py, and of a compiled function.
_ROOT_CALL = re.compile(r"_compiled_call_impl\(")
_ROOT_FILE = "torch/_dynamo/external_utils.py"
# Lines of torch's own say nothing to the person whose call led there.
_TORCH_FILE = re.compile(r"/torch/(_dynamo|nn|_higher_order_ops|utils/_\w+)\b")
_HOOK_CALL = re.compile(r"= \w*hook\(\s*self\b")
_SENTENCE_END = re.compile(r"(?<=[.!?)`])\s+(?=[A-Z])")
_OBJECT = re.compile(r"<(?:bound )?(?:function|method) ([\w.<>]+?) (?:at 0x[0-9a-f]+|of .*?)>+")
_SKIPPED = re.compile(r"frame skipped: (\S+) \(")
# The compiler's words for what becomes of the function around a break.
_WHOLE = "Skipping the function and falling back to eager"
_REST = "then skipping the rest of the function"
# Causes whose mend names the setting itself.
_OWN_SETTING = {GraphBreakCause.SCALAR_READ, GraphBreakCause.DYNAMIC_OUTPUT_SHAPE}


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of a message: where, in which function, and the source text of the line."""

    file: str
    line: int
    function: str = ""
    code: str = ""

    @property
    def mine(self) -> bool:
        """Whether the frame is the user's own code."""
        return not is_library(self.file)


def graph_breaks(
    texts: Iterable[str], events: Sequence[CompileEvent], failed_at: Mapping[str, Frame]
) -> tuple[GraphBreak, ...]:
    """Returns each place that ended a graph once, with how often a compile met it.

    Frames that the compiler gave up with an error and left to Python count as such places too;
    `failed_at` are the lines that were being traced then, by the id of the compile.
    """
    texts = list(texts)
    groups: dict[tuple[str, int, str], list[str]] = {}
    for text in texts:
        place = _head(text)
        key = (place.file, place.line, break_title(text)) if place else ("", 0, break_title(text))
        groups.setdefault(key, []).append(text)
    found: dict[tuple[str, int, str], GraphBreak] = {}
    for group in groups.values():
        _merge(found, _graph_break(group))
    for event in events:
        if _fell_back(event, texts):
            _merge(found, _fallback(event, failed_at.get(event.compile_id)))
    ranked = sorted(found.values(), key=lambda one: -one.count)
    return tuple(ranked[:_MOST_BREAKS])


def at_limit(words: str) -> bool:
    """Returns whether the compiler's words are that it met its recompile limit."""
    return _LIMIT_WORDS in words.lower()


def frames(text: str) -> tuple[Frame, ...]:
    """Returns the frames of the traceback in a compiler's text, outermost first."""
    for heading in ("User code traceback:", "from user code:"):
        _, found, traceback = text.partition(heading)
        if found:
            return tuple(
                Frame(file, int(line), function, code.strip())
                for file, line, function, code in _FRAME.findall(traceback)
            )
    return ()


def first_sentence(text: str) -> str:
    """Returns the first sentence of the compiler's explanation, without its layout."""
    explained = re.search(r"Explanation:[ \t]*(\S[^\n]*)", text)
    words = explained.group(1) if explained else break_title(text)
    words = _OBJECT.sub(r"\1", re.sub(r"\s+", " ", words)).replace(".`", "`").replace("; ", ", ")
    return _SENTENCE_END.split(words.strip(), maxsplit=1)[0].strip()[:_MOST_TEXT]


def short_path(file: str) -> str:
    """Returns a library's file without the folder that packages or Python's own modules lie in."""
    return re.split(r"(?:site|dist)-packages/|/lib/python3\.\d+/", file)[-1]


def source_line(frame: Frame) -> str:
    """Returns the source text of a frame's line."""
    return (linecache.getline(frame.file, frame.line).strip() or frame.code)[:_MOST_TEXT]


def _merge(found: dict[tuple[str, int, str], GraphBreak], met: GraphBreak) -> None:
    """Adds a break; of the same cause in the same line there is one, which tells of both."""
    key = (met.file, met.line, met.cause.value)
    known = found.get(key)
    if known is None:
        found[key] = met
        return
    new = [part for part in met.reason.split("; ") if part not in known.reason.split("; ")]
    reason = "; ".join((known.reason, *new))[:_MOST_REASON]
    found[key] = replace(known, count=known.count + met.count, reason=reason)


def _head(text: str) -> Frame | None:
    place = _PLACE.search(text)
    if place:
        return Frame(place.group(1), int(place.group(2)))
    stack = frames(text)
    return stack[-1] if stack else None


def _traced(stack: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """Returns the frames below the call of the compiled module; all when it is not among them."""
    for index, frame in enumerate(stack):
        if _ROOT_CALL.search(frame.code) or frame.file.endswith(_ROOT_FILE):
            return stack[index + 1 :]
    return stack


def _graph_break(group: Sequence[str]) -> GraphBreak:
    # A repeated message is shortened by torch; the longest tells most.
    text = max(group, key=len)
    stack = frames(text)
    traced = _traced(stack)
    head = _head(text) or Frame("", 0)
    mine = [frame for frame in traced if frame.mine]
    place = mine[-1] if mine else (traced[-1] if traced else head)
    within = enclosing(place.file, place.line)
    cause = break_cause(
        text, innermost_file=head.file, in_function=bool(within.function_class and within.function)
    )
    parts = [
        first_sentence(text.split("Graph Break Reason:", 1)[-1]),
        *_quoted(cause, text),
        *_elsewhere(place, head, stack, traced),
        *_surroundings(within, traced),
        *_given_up(" ".join(group), place, mine),
        *_setting(cause, text),
    ]
    link = _LINK.search(text)
    return GraphBreak(
        cause=cause,
        reason="; ".join(part for part in parts if part)[:_MOST_REASON],
        file=place.file,
        line=place.line,
        code=source_line(place),
        hint=link.group(0) if link else "",
        count=len(group),
    )


def _quoted(cause: GraphBreakCause, text: str) -> list[str]:
    """Returns what is printed or logged, where the compiler knows it: it often names the mend."""
    if cause is not GraphBreakCause.PRINT_OR_LOGGING:
        return []
    said = re.search(r"ConstantVariable\(str: (['\"])(.+?)\1\)", text)
    return [f"it says: {said.group(2)[:_MOST_QUOTED].replace('; ', ', ')}"] if said else []


def _elsewhere(
    place: Frame, head: Frame, stack: tuple[Frame, ...], traced: tuple[Frame, ...]
) -> list[str]:
    """Returns the library's line when the place is the user's, and the caller's when it is not."""
    if place.mine:
        if head.file in ("", place.file) or head.mine or _TORCH_FILE.search(head.file):
            return []
        code = source_line(head)
        shown = f" `{code}`" if code else ""
        return [f"in {short_path(head.file)}:{head.line}{shown}"]
    callers = [frame for frame in stack[: len(stack) - len(traced)] if frame.mine]
    return [f"called from {callers[-1].file}:{callers[-1].line}"] if callers else []


def _surroundings(within: Enclosing, traced: tuple[Frame, ...]) -> list[str]:
    parts = []
    if within.function_class and within.function:
        parts.append(
            f"it stands in `{within.function}` of the autograd.Function `{within.function_class}`"
        )
    if any(_HOOK_CALL.search(frame.code) for frame in traced):
        parts.append("it runs in a hook")
    return parts


def _given_up(texts: str, place: Frame, mine: Sequence[Frame]) -> list[str]:
    """Returns what becomes of the function: a graph cannot end within a loop, `try` or `with`."""
    whole, rest = _WHOLE in texts, _REST in texts
    if not whole and not rest:
        return []
    around = next(
        (found for frame in reversed(mine) if (found := enclosing(frame.file, frame.line)).block),
        enclosing(place.file, place.line),
    )
    skipped = _SKIPPED.search(texts)
    block = "loop" if skipped and "graph break in loop" in texts else around.block
    name = skipped.group(1) if skipped else around.function
    shown = f"`{name}`" if name else "the function"
    why = f"as it lies in a {block}, " if block else ""
    return [f"{why}{'all' if whole else 'the rest'} of {shown} is left to Python"]


def _setting(cause: GraphBreakCause, text: str) -> list[str]:
    """Returns torch's own hint when it names a setting that our mend does not."""
    if cause in _OWN_SETTING:
        return []
    hints = re.findall(r"Hint: ([^\n]*torch\._dynamo\.config\.[^\n]*)", text)
    return [f"torch's hint: {hints[0].rstrip('.').replace('; ', ', ')}"] if hints else []


def _fell_back(event: CompileEvent, texts: Sequence[str]) -> bool:
    """Returns whether a frame was left to Python for an error that no message tells of."""
    if not event.failure or at_limit(event.failure):
        return False
    words = event.failure.strip().splitlines()[0]
    return not any(words in text for text in texts)


def _fallback(event: CompileEvent, traced: Frame | None) -> GraphBreak:
    place = traced if traced is not None and traced.mine else Frame(event.file, event.line)
    name = f"`{event.function}`" if event.function else "the function"
    return GraphBreak(
        cause=break_cause(event.failure),
        reason=f"the compiler failed: {first_sentence(event.failure)}; all of {name} is left to"
        " Python",
        file=place.file,
        line=place.line,
        code=source_line(place),
    )
