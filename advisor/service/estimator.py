"""The cost model of one server: loaded when it is first asked, learning from what comes in."""

from __future__ import annotations

import asyncio
import logging

from advisor import prior_store
from advisor.estimate import checked, estimate, outcome_of
from advisor.job_facts import EstimateRequest, EstimateResponse, OutcomeReport
from advisor.models.learning import NO_SHIFTS, Residual, Shifts, residual, shifts_of
from advisor.models.prior import Prior
from advisor.profiler.errors import PlanError
from advisor.service.store import Store

log = logging.getLogger(__name__)

# The newest outcomes that are learnt from: a fleet changes, and old ones say less and less.
MOST_OUTCOMES = 2000


class Estimator:
    """Answers estimates; every outcome, of a trial here or reported, moves the next ones."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._prior: Prior | None = None
        self._residuals: list[Residual] = []
        self._shifts: Shifts = NO_SHIFTS
        self._loading = asyncio.Lock()

    async def prior(self) -> tuple[Prior, Shifts]:
        """Returns the prior and what own outcomes say of it; the first call takes seconds.

        Raises `StoreError` when it cannot be fitted.
        """
        if self._prior is None:
            async with self._loading:
                if self._prior is None:
                    self._prior = await asyncio.to_thread(self._load)
        return self._prior, self._shifts

    async def estimate(self, request: EstimateRequest) -> EstimateResponse:
        """Returns what compiling is believed to bring. Raises `PlanError` for unsound facts."""
        prior, learnt = await self.prior()
        return estimate(checked(request), prior, learnt)

    async def report(self, report: OutcomeReport, *, trial_id: str = "") -> int:
        """Keeps an outcome and learns from it; returns how many there are.

        Raises `PlanError` for a device that is unknown or a report without any figure.
        """
        if report.speedup is None and report.compile_s is None and report.memory_ratio is None:
            raise PlanError(
                "the outcome holds no figure",
                mend="give at least one of speedup, compile_s and memory_ratio",
            )
        outcome = outcome_of(report)
        prior, _ = await self.prior()
        count = await asyncio.to_thread(self._store.add_outcome, report, trial_id=trial_id)
        self._residuals = [*self._residuals, residual(prior, outcome)][-MOST_OUTCOMES:]
        self._shifts = shifts_of(self._residuals)
        return count

    def _load(self) -> Prior:
        prior = prior_store.load()
        for report in self._store.outcomes(MOST_OUTCOMES):
            try:
                self._residuals.append(residual(prior, outcome_of(report)))
            except PlanError as error:
                log.warning("an outcome is left out", extra={"why": str(error)})
        self._shifts = shifts_of(self._residuals)
        log.info("cost model ready", extra={"outcomes": len(self._residuals)})
        return prior
