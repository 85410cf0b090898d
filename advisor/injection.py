"""Getting into a script that nobody changed: our `sitecustomize`, and calls after an import.

Python imports `sitecustomize` as it starts (the `site` module's documentation). Nothing heavy is
imported by it: what waits for torch is called once the script itself has imported it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).resolve().parent / "injected"


def injected(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment in which Python runs our `sitecustomize` first."""
    paths = [str(FOLDER), *filter(None, environment.get("PYTHONPATH", "").split(":"))]
    return {**environment, "PYTHONPATH": ":".join(dict.fromkeys(paths))}


def when_imported(name: str, then: Callable[[], None]) -> None:
    """Has `then` called once the module `name` was imported; at once when it is there already."""
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Watcher(name, then))


class _Watcher(importlib.abc.MetaPathFinder):
    """Finds a module as the others do, once, and calls a function after it was executed."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Returns the spec of the module that is waited for, None for all others."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        # The others, among them those who wait for the same module.
        finders = (finder.find_spec(fullname, path, target) for finder in tuple(sys.meta_path))
        spec = next((found for found in finders if found is not None), None)
        if spec is not None and spec.loader is not None and not isinstance(spec.loader, type):
            _call_after(spec.loader, self._then)
        return spec


def _call_after(loader: importlib.abc.Loader, then: Callable[[], None]) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        then()

    # This loader is the module's own: finders make one for each spec, or else give a class.
    loader.exec_module = exec_module  # type: ignore[method-assign]
