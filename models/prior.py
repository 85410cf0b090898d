"""What compiling brings to a job that was not measured, with honest intervals.

A forest over physical features (`features`) says the middle, conformal calibration on families that
the forest had not seen (Vovk et al., Algorithmic Learning in a Random World, 2005; crepes) says how
far it may be off. Here it is only evaluated, as arrays: `prior_fit` makes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from statistics import NormalDist

import msgspec
import numpy as np
from numpy.typing import NDArray

from advisor.models.devices import Device
from advisor.models.features import NAMES, Facts, gain_by_physics, vector
from advisor.models.forest import Forest
from advisor.profiler.records import Interval, Mode
from advisor.profiler.step_counts import StepCounts

# The quantiles that a belief is kept at.
LEVELS_OF_BELIEF = np.asarray((0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99))
_PLACES = {float(share): place for place, share in enumerate(LEVELS_OF_BELIEF)}
_LOW, _MIDDLE, _HIGH = _PLACES[0.05], _PLACES[0.5], _PLACES[0.95]
TARGETS = ("speedup", "compile_s", "memory_ratio")
# Added to the trees' own spread, so that trees that agree by chance are not taken for certainty.
LEAST_SPREAD = 0.05
# The device that nearly all training rows come from.
REFERENCE = Device.from_name("a100-40gb")
# The share of the (log) gain by physics that the forest corrects instead of learning: physics alone
# promises too much, as no compiler fuses all and no kernel reaches the roofline. Chosen by leaving
# families out (0, 0.2, 0.3, 0.4 and 0.5 were tried: within half a per cent of each other).
PHYSICS_SHARE = 0.3
# An estimate beyond what was seen is this much less certain.
_BEYOND = 1.5
# With this many graphs the published gain is gone: 0.97x at the median of mixed-precision training
# at 20 and more (the A100 dashboard); up to 2 nothing of it is (one is the benchmark's wrapper).
_WHOLE_GRAPHS, _GONE_GRAPHS = 2.0, 20.0
# max-autotune has no training table for GPUs. Against the same mode without it: 1.18 in the quoted
# BERT-large run, 1.00 to 1.12 in others; compile 104 s against 41.5 s at the median (best_case, F).
_AUTOTUNE_GAIN, _AUTOTUNE_SPREAD, _AUTOTUNE_COMPILE = math.log(1.06), 0.07, math.log(2.5)


@dataclass(frozen=True, slots=True)
class Belief:
    """What is believed of a positive quantity: its logarithm at `LEVELS_OF_BELIEF`."""

    logs: NDArray[np.float64]

    @property
    def median(self) -> float:
        """The value that is as likely exceeded as not."""
        return math.exp(self.logs[_MIDDLE])

    def quantile_log(self, share: float) -> float:
        """Returns the logarithm that a share of the belief lies below."""
        place = _PLACES.get(share)
        if place is not None:
            return float(self.logs[place])
        return float(np.interp(share, LEVELS_OF_BELIEF, self.logs))

    def interval(self) -> Interval:
        """Returns the median and the interval that holds 90 % of the belief."""
        logs = self.logs.tolist()
        return Interval(
            median=math.exp(logs[_MIDDLE]), low=math.exp(logs[_LOW]), high=math.exp(logs[_HIGH])
        )

    def above(self, value: float) -> float:
        """Returns the probability that the quantity exceeds `value`, within 1 % and 99 %."""
        return 1.0 - float(np.interp(math.log(value), self.logs, LEVELS_OF_BELIEF))

    def moved(self, by_log: float, spread_log: float = 0.0) -> Belief:
        """Returns the belief shifted, and widened by an independent normal spread."""
        middle = self.quantile_log(0.5)
        own = (self.quantile_log(0.95) - self.quantile_log(0.05)) / (2 * 1.645)
        factor = math.hypot(own, spread_log) / own if own > 0 else 1.0
        return Belief(middle + by_log + (self.logs - middle) * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What compiling a job as configured is believed to bring.

    `speedup` is eager over compiled step time, `compile_s` the cold start, `memory_ratio` eager
    over compiled peak memory. `beyond` says in what the job lies outside of all that was seen.
    """

    speedup: Belief
    compile_s: Belief
    memory_ratio: Belief
    beyond: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prior:
    """The fitted arrays: trees of all targets in one forest, and how far they were off.

    `offsets` (targets, levels of knowledge, quantiles) are in units of the trees' spread;
    `lowest` and `highest` (features,) are what was seen.
    """

    forest: Forest
    trees: int
    offsets: NDArray[np.float64]
    lowest: NDArray[np.float64]
    highest: NDArray[np.float64]
    families: frozenset[str] = frozenset()
    architectures: frozenset[str] = frozenset()
    modes: frozenset[str] = frozenset()
    # A typical step of each family; under "" one for families without.
    typical: Mapping[str, StepCounts] = field(default_factory=dict)
    # What was worked out of the above: few devices, precisions and modes are asked for.
    _moves: dict[tuple[str, ...], float] = field(default_factory=dict, repr=False)

    def estimate(self, facts: Facts) -> Estimate:
        """Returns what compiling the job is believed to bring. Takes about a tenth of a ms."""
        features = vector(facts)
        said = self.forest.each(features).reshape(len(TARGETS), self.trees)
        middles, spreads = middle_and_spread(said)
        middles[0] += by_physics(features) + self._moved_device(facts)
        beyond = self._beyond(facts, features)
        if beyond:
            spreads = spreads * _BEYOND
        # Not a reason for wider intervals: they were calibrated on families left out.
        beyond = (*self._unseen_family(facts), *beyond)
        middles[0] *= kept_gain(facts.graphs)
        logs = middles[:, None] + spreads[:, None] * self.offsets[:, facts.level]
        beliefs = [Belief(each) for each in logs]
        if self._transferred(facts):
            beliefs[0] = beliefs[0].moved(_AUTOTUNE_GAIN, _AUTOTUNE_SPREAD)
            beliefs[1] = beliefs[1].moved(_AUTOTUNE_COMPILE, 0.4)
        return Estimate(
            speedup=beliefs[0], compile_s=beliefs[1], memory_ratio=beliefs[2], beyond=beyond
        )

    def _transferred(self, facts: Facts) -> bool:
        autotune = facts.config.mode in (Mode.MAX_AUTOTUNE, Mode.MAX_AUTOTUNE_NO_CUDAGRAPHS)
        return autotune and facts.device.architecture != "cpu"

    def _moved_device(self, facts: Facts) -> float:
        """Returns what physics says of the device of a job without counts, against `REFERENCE`.

        Nearly all training rows come from one kind of device, so no forest learns what another one
        does; a typical step of the family stands in for the job's own.
        """
        if facts.counts is not None or facts.device == REFERENCE:
            return 0.0
        key = (facts.family, facts.device.name, facts.precision, facts.config.mode)
        if key not in self._moves:
            typical = self.typical.get(facts.family, self.typical.get(""))
            if typical is None:
                return 0.0
            there = gain_by_physics(replace(facts, counts=typical))
            here = gain_by_physics(replace(facts, counts=typical, device=REFERENCE))
            self._moves[key] = PHYSICS_SHARE * math.log(there / here)
        return self._moves[key]

    def _unseen_family(self, facts: Facts) -> tuple[str, ...]:
        if facts.family in self.families:
            return ()
        named = f"family {facts.family!r}" if facts.family else "a family that is not known"
        return (f"no row is of {named}",)

    def _beyond(self, facts: Facts, features: NDArray[np.float64]) -> tuple[str, ...]:
        found = []
        if facts.device.architecture not in self.architectures:
            found.append(f"no training row is from a {facts.device.architecture} device")
        for place in _RANGED:
            value, low, high = features[place], self.lowest[place], self.highest[place]
            # Neither holds where it is not known.
            if value < low - _EDGE or value > high + _EDGE:
                what = NAMES[place].removeprefix("log ")
                side = "more" if value > high else "less"
                edge = math.exp(high if value > high else low)
                found.append(
                    f"{what} is {math.exp(value):.3g}, {side} than any row has ({edge:.3g})"
                )
        return tuple(found)

    def arrays(self) -> tuple[dict[str, NDArray[np.generic]], dict[str, object]]:
        """Returns what an `.npz` and a JSON file keep of it."""
        named = self.forest.arrays("forest")
        named |= {"offsets": self.offsets, "lowest": self.lowest, "highest": self.highest}
        facts: dict[str, object] = {
            "trees": self.trees,
            "families": sorted(self.families),
            "architectures": sorted(self.architectures),
            "modes": sorted(self.modes),
            "features": list(NAMES),
            "typical": {name: asdict(counts) for name, counts in self.typical.items()},
        }
        return named, facts

    @classmethod
    def of_arrays(
        cls, arrays: Mapping[str, NDArray[np.generic]], facts: Mapping[str, object]
    ) -> Prior:
        """Returns the prior that was kept. Raises KeyError or ValueError when it is not whole."""
        if facts["features"] != list(NAMES):
            raise ValueError("the features are others")
        return cls(
            forest=Forest.of_arrays(arrays, "forest"),
            trees=int(facts["trees"]),  # type: ignore[call-overload]
            offsets=np.asarray(arrays["offsets"], dtype=np.float64),
            lowest=np.asarray(arrays["lowest"], dtype=np.float64),
            highest=np.asarray(arrays["highest"], dtype=np.float64),
            families=frozenset(facts["families"]),  # type: ignore[call-overload]
            architectures=frozenset(facts["architectures"]),  # type: ignore[call-overload]
            modes=frozenset(facts["modes"]),  # type: ignore[call-overload]
            typical=msgspec.convert(facts["typical"], dict[str, StepCounts]),
        )


def by_physics(features: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the log gain that physics is trusted with, (rows,) or a scalar; 0 without counts."""
    found = PHYSICS_SHARE * features[..., _BY_PHYSICS]
    return np.where(np.isnan(found), 0.0, found)


# Features whose range is worth a word when a job lies outside of it (by this much, as a logarithm).
_RANGED = tuple(
    NAMES.index(name)
    for name in ("log parameters", "log batch", "log length", "log image", "log eager")
)
_EDGE = 0.1
_BY_PHYSICS = NAMES.index("log gain by physics")


def middle_and_spread(
    said: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns the median and the spread of what trees say, (..., trees), over the trees."""
    ordered = np.sort(said, axis=-1)
    count = said.shape[-1]
    middle = (ordered[..., (count - 1) // 2] + ordered[..., count // 2]) / 2
    # As `mean` does it, less its checks: there are as many values as trees.
    mean = np.add.reduce(said, axis=-1) / count
    variance = np.add.reduce(said * said, axis=-1) / count - mean * mean
    return middle, np.sqrt(np.maximum(0.0, variance) + LEAST_SPREAD**2)


def kept_gain(graphs: float | None) -> float:
    """Returns the share of the (log) gain that is left when a step runs in so many graphs."""
    if graphs is None or graphs <= _WHOLE_GRAPHS:
        return 1.0
    gone = math.log(graphs / _WHOLE_GRAPHS) / math.log(_GONE_GRAPHS / _WHOLE_GRAPHS)
    return max(0.0, 1.0 - gone)


def normal_quantiles(shares: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the standard normal quantiles of some shares."""
    return np.asarray([NormalDist().inv_cdf(float(share)) for share in shares])
