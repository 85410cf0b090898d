"""The compiler's words for a guard: what failed, what it is about, in a person's names."""

from __future__ import annotations

import re

# Advice that torch puts behind a guard on a parameter; it is about shapes, whatever had changed.
_TORCH_ADVICE = re.compile(r"\.? ?Guard failed on a parameter.*$")
# How dynamo writes the way to a thing, and how a person does.
_WAYS: tuple[tuple[str, str], ...] = (
    (r"\bfn\.__self__", "model"),
    (r"\.?_(?:modules|parameters|buffers)\['(\w+)'\]", r".\1"),
    (r"\bG\['(\w+)'\]", r"\1"),
    (r"\bL\['(\w+)'\]", r"\1"),
    (r"\bdict\(type\((\w+)\)\.__dict__\)\['(\w+)'\]", r"\1.\2"),
    (r"\.__closure__\[\d+\]\.cell_contents", ""),
)
_SUBJECTS = (
    r"^tensor '(?P<what>.+?)' (?:size|stride|dtype|device|rank|requires_grad|dispatch)",
    r"^___check_(?:obj|type)_id\((?P<what>.+?)(?:, \d+)?\)(?:,|$)",
    r"^expected type of '(?P<what>.+)' to be",
    r"^(?:not )?(?P<what>.+?) (?:is|[=<>!]=|[<>]|in) ",
    r"^(?P<what>GLOBAL_STATE changed: .+)$",
)


def guard_of(reason: str) -> str:
    """Returns the guard that failed, as dynamo writes it, without id, source and advice."""
    first = re.sub(r"^\d+/\d+(?:_\d+)?:\s*", "", reason.split("\n", 1)[0])
    guard = re.sub(r"\s+", " ", re.split(r"\s+# ", first, maxsplit=1)[0]).strip()
    return _TORCH_ADVICE.sub("", guard)


def readable(guard: str) -> str:
    """Returns a guard with the names that a person knows: `self.blocks.5.bias`."""
    for dynamos, ours in _WAYS:
        guard = re.sub(dynamos, ours, guard)
    return re.sub(r"(___check_(?:obj|type)_id\(.+), \d+\)", r"\1)", guard)


def subject(guard: str) -> str:
    """Returns what a guard is about, or an empty string."""
    for pattern in _SUBJECTS:
        found = re.search(pattern, guard)
        if found:
            return found.group("what").strip()
    return ""
