"""Settings of torch put in place: for the life of a process, or for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from advisor.profiler import settings, torch_internals
from advisor.profiler.errors import PlanError
from advisor.profiler.records import Config


def apply_options(config: Config) -> None:
    """Sets the configuration's options of torch._dynamo.config or torch._inductor.config.

    For the life of this process: a trial is alone in its own. Raises `PlanError` for a name that
    neither has, or a value that the setting does not take; then none is set.
    """
    for holder, name, value in list(_resolved(config.options)):
        setattr(holder, name, value)


def check_options(config: Config) -> None:
    """Raises `PlanError` for an option that `apply_options` would refuse; sets nothing."""
    for _ in _resolved(config.options):
        pass


@contextlib.contextmanager
def applied(options: Iterable[tuple[str, str]]) -> Iterator[None]:
    """Sets options within the block, and puts back what was there. Raises `PlanError` as above."""
    changes = list(_resolved(options))
    before = [(holder, name, getattr(holder, name)) for holder, name, _ in changes]
    try:
        for holder, name, value in changes:
            setattr(holder, name, value)
        yield
    finally:
        for holder, name, value in reversed(before):
            setattr(holder, name, value)


def _resolved(options: Iterable[tuple[str, str]]) -> Iterator[tuple[Any, str, Any]]:
    """Yields the module that holds each setting, its name there, and the value to set."""
    for name, text in options:
        holder, attribute = _holder(name)
        yield holder, attribute, _value_like(getattr(holder, attribute), name, text)


def _holder(name: str) -> tuple[Any, str]:
    """Returns the module that really has a setting: this torch's own, whatever we know by name."""
    whole = settings.canonical(name)
    for room in (settings.DYNAMO, settings.INDUCTOR):
        bare = not name.startswith(("torch.", "dynamo.", "inductor."))
        attribute = name if bare else whole.removeprefix(room)
        if not bare and not whole.startswith(room):
            continue
        holder = torch_internals.find(room.rstrip("."))
        if holder is not None and hasattr(holder, attribute):
            return holder, attribute
    raise PlanError(f"option {name!r} is unknown to torch {torch.__version__}")


def _value_like(now: object, name: str, text: str) -> object:
    """Returns the value that a text stands for, of the kind that the setting has now."""
    if isinstance(now, bool):
        if text.lower() not in ("true", "false"):
            raise PlanError(f"option {name}={text} is not true or false")
        return text.lower() == "true"
    if isinstance(now, int | float):
        try:
            return type(now)(text)
        except ValueError as error:
            raise PlanError(f"option {name}={text} is not a number") from error
    if isinstance(now, set):
        return now | {_function(name, part) for part in settings.functions(name, text)}
    if now is None:
        return settings.literal(text)
    if isinstance(now, str):
        return None if text.lower() == "none" else text
    value = settings.literal(text)
    if not isinstance(value, type(now)):
        raise PlanError(f"option {name}={text} is not a {type(now).__name__}")
    return value


def _function(name: str, dotted: str) -> Callable[..., object]:
    """Returns the function behind a dotted name, found in a module that can be imported."""
    found = torch_internals.find(dotted)
    if callable(found):
        return found  # type: ignore[no-any-return]
    raise PlanError(
        f"option {name} names {dotted!r}, which is no function here", mend="check its spelling"
    )
