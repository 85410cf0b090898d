"""Trials: one configuration of a training job measured, in a process of its own or in this one.

Names are imported when they are asked for: what only needs an error or a record must not wait for
the rest, and nothing here imports torch but `Workload` and `profile_here`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from advisor.profiler.api import diagnose, diagnose_async, profile, profile_async
    from advisor.profiler.errors import AdvisorError, HostError, PlanError, WorkloadError
    from advisor.profiler.in_process import profile_here
    from advisor.profiler.records import Config, Diagnosis, Trial
    from advisor.profiler.workload import Workload

__all__ = [
    "AdvisorError",
    "Config",
    "Diagnosis",
    "HostError",
    "PlanError",
    "Trial",
    "Workload",
    "WorkloadError",
    "diagnose",
    "diagnose_async",
    "profile",
    "profile_async",
    "profile_here",
]

_ROOMS = {
    "api": ("diagnose", "diagnose_async", "profile", "profile_async"),
    "errors": ("AdvisorError", "HostError", "PlanError", "WorkloadError"),
    "in_process": ("profile_here",),
    "records": ("Config", "Diagnosis", "Trial"),
    "workload": ("Workload",),
}


def __getattr__(name: str) -> Any:
    for room, names in _ROOMS.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{room}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
