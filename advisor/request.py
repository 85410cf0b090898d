"""What is asked of the advisor: a workload, a plan, and the limits of the campaign."""

from __future__ import annotations

import enum
import itertools
from dataclasses import dataclass, field

from advisor.models.plan import Plan
from advisor.profiler.errors import PlanError
from advisor.profiler.records import Config, Lengths, Measuring, WorkloadSpec
from advisor.profiler.units import size

MOST_BUDGET_S = 30 * 86_400.0
LEAST_MEMORY_BYTES = 512 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the campaign may spend.

    `budget_s` is the longest time that it may measure (None: as long as it can pay),
    `memory_limit_bytes` what one trial may hold (None: 90 % of what is free), `configs` the only
    configurations to consider (empty: all that fit the device), `measure_anyway` has trials run
    even where the plan is too short for them to pay, to learn from them; `exhaustive` measures
    every configuration that can run; `fresh` measures anew what an earlier campaign has measured.
    """

    budget_s: float | None = None
    memory_limit_bytes: int | None = None
    configs: tuple[Config, ...] = ()
    measure_anyway: bool = False
    exhaustive: bool = False
    fresh: bool = False

    def validate(self) -> None:
        """Raises `PlanError` naming the limit that makes no sense."""
        if self.budget_s is not None and not 0 < self.budget_s <= MOST_BUDGET_S:
            raise PlanError(
                f"--budget {self.budget_s:g} is out of range",
                "the campaign's seconds, above 0 and at most 30 days, are expected",
            )
        limit = self.memory_limit_bytes
        if limit is not None and limit < LEAST_MEMORY_BYTES:
            raise PlanError(
                f"--memory-limit {size(limit)} is too small",
                "torch alone holds more than 300 MiB",
                "give at least 512M",
            )


class OnDisconnect(enum.StrEnum):
    """What becomes of a campaign when nobody listens to it any more."""

    CONTINUE = "continue"
    CANCEL = "cancel"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceRequest:
    """One question to the advisor.

    `request_id` is the caller's own name of it: asked again under the same name, it is the same
    campaign. None: each call is one of its own.
    """

    workload: WorkloadSpec
    plan: Plan
    limits: Limits = field(default_factory=Limits)
    measuring: Measuring = field(default_factory=Measuring)
    # The lengths of the data set's samples, where they were given beside the workload.
    lengths: Lengths | None = None
    request_id: str | None = None
    on_disconnect: OnDisconnect = OnDisconnect.CONTINUE

    def validate(self) -> None:
        """Raises `PlanError` for the first number that makes no sense."""
        self.plan.validate()
        self.limits.validate()
        _validate_world_size(self.plan.world_size, self.workload.ranks)
        if self.lengths is not None:
            _validate_lengths(self.lengths)


def _validate_world_size(size: int | None, ranks: int) -> None:
    if size is None:
        return
    if ranks == 1:
        raise PlanError(
            f"--world-size {size} needs more than one rank to be tried",
            "what ranks say to each other is measured between them",
            "give --ranks N, as many as a machine of the real run has, or 2",
        )
    if size < ranks or size % ranks:
        raise PlanError(
            f"--world-size {size} is not a multiple of --ranks {ranks}",
            "the real run is on machines with as many ranks each as are tried here",
            f"give {ranks * max(1, round(size / ranks))}, or other --ranks",
        )


def _validate_lengths(lengths: Lengths) -> None:
    values = lengths.values
    if len(values) != len(lengths.counts):
        raise PlanError(
            f"lengths has {len(values)} values and {len(lengths.counts)} counts",
            "each distinct length needs the number of its samples",
        )
    if any(later <= earlier for earlier, later in itertools.pairwise(values)):
        raise PlanError("lengths.values are out of order", "distinct and ascending ones expected")
    if lengths.pad_to is not None and values and values[-1] > lengths.pad_to:
        raise PlanError(
            f"a sample has length {values[-1]:,}",
            f"batches are padded to {lengths.pad_to:,}",
            "give the lengths after truncation, or pad to more",
        )
    if lengths.tokens_per_batch is not None and values and values[-1] > lengths.tokens_per_batch:
        raise PlanError(
            f"a sample has length {values[-1]:,}",
            f"a batch holds {lengths.tokens_per_batch:,} tokens",
            "give a larger budget, or leave such samples out",
        )
