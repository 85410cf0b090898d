"""Which workloads a server runs: files below its folders, modules of its list, presets.

A path is judged after every link in it was followed, and passed on as what it then is. Whoever is
refused learns nothing of what is there: outside the folders and not there at all is one sentence.
"""

from __future__ import annotations

import logging
import stat
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from advisor.profiler.errors import PlanError
from advisor.profiler.preset_table import PRESETS
from advisor.profiler.records import WorkloadSpec
from advisor.service.errors import Denied

log = logging.getLogger(__name__)

_PRESET = "hf:"


@dataclass(frozen=True, slots=True)
class Admission:
    """What a server runs. `roots` None: whatever its one client names, as for a private server.

    `modules` are names of packages whose functions may be run wherever they are installed. What
    needs no folder of the caller's runs in `neutral`.
    """

    roots: tuple[Path, ...] | None
    modules: frozenset[str]
    neutral: Path

    @classmethod
    def everything(cls, neutral: Path) -> Admission:
        """Returns one that refuses nothing."""
        return cls(None, frozenset(), neutral)

    @classmethod
    def of(cls, roots: Sequence[Path], modules: Collection[str], neutral: Path) -> Admission:
        """Returns one of these folders and modules.

        Raises `PlanError` for a folder that is none or that everybody can write to, and for a name
        that is no module's.
        """
        for name in modules:
            if not all(part.isidentifier() for part in name.split(".")):
                raise PlanError(f"--allow-module {name!r} is not a module's name")
        return cls(tuple(map(_root, roots)), frozenset(modules), neutral)

    def admitted(self, spec: WorkloadSpec) -> WorkloadSpec:
        """Returns the workload as it may run, with paths as they are. Raises `Denied`."""
        if self.roots is None:
            return spec
        name = spec.target.removeprefix(_PRESET)
        if spec.target.startswith(_PRESET):
            if name in PRESETS:
                return replace(spec, cwd=str(self.neutral))
            folder = self._below(Path(spec.cwd, name), spec)
            return replace(spec, target=f"{_PRESET}{folder}", cwd=str(folder))
        place, _, function = spec.target.rpartition(":")
        if self._is_module(place):
            return replace(spec, cwd=str(self.neutral))
        cwd = self._below(Path(spec.cwd), spec)
        file = self._below(Path(spec.cwd, place), spec)
        if not file.is_file():
            raise _denied(spec, "not a regular file")
        return replace(spec, target=f"{file}:{function}", cwd=str(cwd))

    def _is_module(self, place: str) -> bool:
        parts = place.split(".")
        return any(".".join(parts[:count]) in self.modules for count in range(1, len(parts) + 1))

    def _below(self, path: Path, spec: WorkloadSpec) -> Path:
        """Returns what a path is once links are followed. Raises `Denied` outside the folders."""
        try:
            found = path.resolve(strict=True)
        except (OSError, RuntimeError, ValueError) as error:
            raise _denied(spec, type(error).__name__) from None
        root = next((root for root in self.roots or () if found.is_relative_to(root)), None)
        if root is None:
            raise _denied(spec, "outside the folders")
        for each in (found, *found.parents):
            if each == root:
                break
            if each.stat().st_mode & stat.S_IWOTH:
                raise _denied(spec, "everybody can write to a part of it")
        return found


def _root(path: Path) -> Path:
    try:
        found = path.resolve(strict=True)
    except OSError as error:
        raise PlanError(f"--workload-root {path} cannot be used", error.strerror or "") from error
    if not found.is_dir():
        raise PlanError(f"--workload-root {path} is not a folder")
    if found.stat().st_mode & stat.S_IWOTH:
        raise PlanError(
            f"--workload-root {path} is no safe place",
            "everybody can write to it, and what is in it is run",
            f"chmod o-w {path}",
        )
    return found


def _denied(spec: WorkloadSpec, why: str) -> Denied:
    log.warning("a workload is refused", extra={"target": spec.target, "why": why})
    return Denied(
        f"{spec.target} is no workload of this server",
        "it is not below its --workload-root folders, nor of an --allow-module, or not there",
        "name one that is, or start the server with the folder",
    )
