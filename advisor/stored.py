"""A trial as it lies in the results database."""

from __future__ import annotations

from dataclasses import dataclass

from advisor.profiler.records import Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTrial:
    """A trial, the advice of its campaign, and when it was stored (ISO 8601, UTC).

    There is no advice of that id when the campaign was cancelled.
    """

    advice_id: str
    created: str
    target: str
    trial: Trial
