"""What training is planned: how many steps, restarts and evaluations, at which price."""

from __future__ import annotations

import math
from dataclasses import dataclass

from advisor.profiler.errors import PlanError

# More optimizer steps than any training has taken; beyond it a number is a typing mistake.
MOST_STEPS = 1e12
MOST_HOURS = 1e6
MOST_RESTARTS = 1_000_000
MOST_PRICE = 1e9
MOST_WORLD_SIZE = 1_000_000
MOST_NETWORK_BYTES_PER_S = 1e15


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The planned training. Exactly one of `steps`, `epochs` with `steps_per_epoch`, `hours`.

    `hours` are hours of eager training; `steps_planned` turns them into steps once the eager
    step time is known. `eval_every` counts optimizer steps between evaluations, `eval_steps` the
    batches of one evaluation. `confidence` is the least P(saves) at which compiling is advised.
    `world_size` ranks will train, on machines that can send `network_bytes_per_s` for each rank;
    None: as many as are tried, and not known.
    """

    steps: float | None = None
    epochs: float | None = None
    steps_per_epoch: float | None = None
    hours: float | None = None
    restarts: int = 0
    eval_every: float | None = None
    eval_steps: float | None = None
    price_per_hour: float | None = None
    confidence: float = 0.9
    world_size: int | None = None
    network_bytes_per_s: float | None = None

    def validate(self) -> None:
        """Raises `PlanError` naming the first number that makes no sense, and why."""
        self._check_length()
        _check("--eval-every", self.eval_every, MOST_STEPS, whole=True)
        _check("--eval-steps", self.eval_steps, MOST_STEPS, whole=True)
        if (self.eval_every is None) != (self.eval_steps is None):
            given = "--eval-steps" if self.eval_every is None else "--eval-every"
            raise PlanError(
                f"{given} came alone",
                "an evaluation has a distance in optimizer steps and a length in batches",
                "give both --eval-every N and --eval-steps M",
            )
        _check_range("--world-size", self.world_size, 2, MOST_WORLD_SIZE)
        _check("--network", self.network_bytes_per_s, MOST_NETWORK_BYTES_PER_S)
        if self.network_bytes_per_s is not None and self.world_size is None:
            raise PlanError(
                "--network came without --world-size",
                "it is the speed between machines, and the trials run on one",
                "give --world-size N, the ranks of the real run",
            )
        _check_range("--restarts", self.restarts, 0, MOST_RESTARTS)
        _check_range("--price-per-hour", self.price_per_hour, 0, MOST_PRICE)
        if not 0.5 <= self.confidence < 1:
            raise PlanError(
                f"--confidence {self.confidence:g} is out of range",
                "it is the least probability of saving time at which compiling is advised",
                "give a number from 0.5 to below 1, as in 0.9",
            )

    def _check_length(self) -> None:
        lengths = {"--steps": self.steps, "--epochs": self.epochs, "--hours": self.hours}
        given = [name for name, length in lengths.items() if length is not None]
        choice = "give one of --steps N, --epochs E with --steps-per-epoch N, --hours H"
        if len(given) > 1:
            raise PlanError(f"the plan has {len(given)} lengths", " and ".join(given), choice)
        if (self.epochs is None) != (self.steps_per_epoch is None):
            alone = "--steps-per-epoch" if self.epochs is None else "--epochs"
            raise PlanError(
                f"{alone} came alone",
                "the number of optimizer steps is --epochs times --steps-per-epoch",
                "give both" if len(given) == 1 and self.epochs is not None else choice,
            )
        if not given:
            raise PlanError("the plan has no length", mend=choice)
        _check("--steps", self.steps, MOST_STEPS, whole=True)
        _check("--epochs", self.epochs, MOST_STEPS)
        _check("--steps-per-epoch", self.steps_per_epoch, MOST_STEPS, whole=True)
        _check("--hours", self.hours, MOST_HOURS)
        if self.epochs is not None and self.steps_per_epoch is not None:
            product = self.epochs * self.steps_per_epoch
            _check("--epochs times --steps-per-epoch", product, MOST_STEPS)

    def steps_planned(self, eager_step_s: float) -> float:
        """Returns the number of optimizer steps; `eager_step_s` is used for plans in hours.

        Raises `PlanError` when the plan has no length.
        """
        if self.steps is not None:
            return self.steps
        if self.epochs is not None and self.steps_per_epoch is not None:
            return max(1.0, self.epochs * self.steps_per_epoch)
        if self.hours is None:
            raise PlanError("the plan has no length")
        return max(1.0, self.hours * 3600.0 / eager_step_s)

    def evaluations(self, steps: float) -> float:
        """Returns how many evaluations come within `steps` optimizer steps."""
        return float(steps // self.eval_every) if self.eval_every else 0.0


def _check(name: str, value: float | None, most: float, *, whole: bool = False) -> None:
    """Raises `PlanError` unless `value` is None or above 0, at most `most`, and whole if asked."""
    if value is None:
        return
    kind = "a whole number" if whole else "a number"
    expected = f"{kind} above 0 and at most {most:,.0f} is expected"
    if math.isnan(value):
        raise PlanError(f"{name} is not a number", expected)
    if value <= 0:
        raise PlanError(f"{name} {value:g} is too small", expected)
    if value > most:
        raise PlanError(f"{name} {value:g} is too large", expected)
    if whole and value != int(value):
        raise PlanError(f"{name} {value:g} is not whole", expected)


def _check_range(name: str, value: float | None, least: float, most: float) -> None:
    if value is not None and not least <= value <= most:
        what = "is not a number" if math.isnan(value) else f"{value:g} is out of range"
        raise PlanError(f"{name} {what}", f"{least:,.0f} to {most:,.0f} is expected")
