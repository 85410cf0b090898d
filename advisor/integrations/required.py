"""The libraries that the plug-ins are for: found, or asked for in one sentence."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

from advisor.profiler.errors import AdvisorError


class MissingLibraryError(AdvisorError, ImportError):
    """The library that a plug-in is for is not installed; an `ImportError`, as people expect."""


def required(extra: str, *modules: str) -> Any:
    """Returns the first of some modules that this process has imported, else that is installed.

    Raises `MissingLibraryError` naming the extra that brings it when none is.
    """
    for module in modules:
        if sys.modules.get(module) is not None:
            return sys.modules[module]
    for module in modules:
        if importlib.util.find_spec(module.partition(".")[0]) is not None:
            return importlib.import_module(module)
    raise MissingLibraryError(
        f"advisor.integrations.{extra} needs the library {extra}",
        "it is not installed",
        f'pip install "compile-advisor[{extra}]"',
    )
