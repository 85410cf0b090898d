"""Trials: one configuration of a training job measured in a process of its own.

Imports no torch until `Workload` is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from advisor.profiler.api import profile, profile_async
from advisor.profiler.errors import AdvisorError, HostError, PlanError, WorkloadError
from advisor.profiler.records import Config, Trial

if TYPE_CHECKING:
    from advisor.profiler.workload import Workload

__all__ = [
    "AdvisorError",
    "Config",
    "HostError",
    "PlanError",
    "Trial",
    "Workload",
    "WorkloadError",
    "profile",
    "profile_async",
]


def __getattr__(name: str) -> Any:
    if name == "Workload":
        from advisor.profiler.workload import Workload

        return Workload
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
