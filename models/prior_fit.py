"""Fits the prior on the corpus: seconds of scikit-learn, once, then arrays.

Each example is given once for every level of knowledge, so that a job of which little is known is
judged by the trees that saw little. How far the forest is off is learnt on families that it did not
see: folds never share a family.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from advisor.models import forest
from advisor.models.examples import Example
from advisor.models.features import LEVELS, NAMES, vector
from advisor.models.forest import Forest
from advisor.models.prior import (
    LEVELS_OF_BELIEF,
    TARGETS,
    Prior,
    by_physics,
    kept_gain,
    middle_and_spread,
)
from advisor.profiler.step_counts import StepCounts

TREES = 80
_FOLD_TREES = 40
_FOLDS = 14
_LEAF = 6
_FEATURE_SHARE = 0.3
_DEPTH = 8
# One job that many rows agree on weighs no more than so many.
_MOST_ROWS = 16.0


def fit(examples: Sequence[Example], *, trees: int = TREES, folds: int = _FOLDS) -> Prior:
    """Returns the prior that the examples give. Raises ValueError when there are too few."""
    if len(examples) < 2 * folds:
        raise ValueError(f"{len(examples)} examples are too few to fit a prior")
    data = _Data(examples)
    every = np.ones(len(data.level), dtype=bool)
    offsets = np.zeros((len(TARGETS), LEVELS, len(LEVELS_OF_BELIEF)))
    forests = []
    for index in range(len(TARGETS)):
        forests.append(data.forest(index, every, trees))
        offsets[index] = data.offsets(index, folds)
    seen = data.features
    return Prior(
        forest=forest.joined(forests),
        trees=trees,
        offsets=offsets,
        lowest=_edge(seen, np.fmin.reduce),
        highest=_edge(seen, np.fmax.reduce),
        families=frozenset(each.facts.family for each in examples),
        architectures=frozenset(each.facts.device.architecture for each in examples),
        modes=frozenset(str(each.facts.config.mode) for each in examples),
        typical=_typical(examples),
    )


def _typical(examples: Sequence[Example]) -> dict[str, StepCounts]:
    """Returns the step of each family whose number of calls is the median; "" is that of all."""
    of_family: dict[str, list[StepCounts]] = defaultdict(list)
    for each in examples:
        # On a GPU: what a CPU is given here is small.
        if each.facts.counts is not None and each.facts.device.architecture != "cpu":
            of_family[each.facts.family].append(each.facts.counts)
            of_family[""].append(each.facts.counts)
    return {
        name: sorted(found, key=lambda counts: counts.operators)[len(found) // 2]
        for name, found in of_family.items()
    }


class _Data:
    """The examples as arrays, one row for each example and level of knowledge."""

    def __init__(self, examples: Sequence[Example]) -> None:
        rows, levels, weights, kept, families = [], [], [], [], []
        targets: list[tuple[float, float, float]] = []
        for each in examples:
            own = range(each.facts.level + 1)
            levels_of = [level for level in own if each.facts.known_less(level).level == level]
            for level in levels_of:
                rows.append(vector(each.facts.known_less(level)))
                levels.append(level)
                weights.append(min(each.rows, _MOST_ROWS) ** 0.5)
                kept.append(kept_gain(each.facts.graphs))
                families.append(each.facts.family)
                targets.append((each.log_speedup, each.log_compile_s, each.log_memory_ratio))
        self.features = np.asarray(rows).reshape(-1, len(NAMES))
        self.level = np.asarray(levels)
        self.weights = np.asarray(weights)
        self.kept = np.asarray(kept)
        self.families = np.asarray(families)
        self.targets = np.asarray(targets)
        # The forest learns what is left of the gain once physics has had its share.
        self.physics = by_physics(self.features)
        self.targets[:, 0] -= self.physics

    def forest(self, index: int, chosen: NDArray[np.bool_], trees: int) -> Forest:
        """Returns the trees of one target, fitted to the chosen rows that state it."""
        usable = chosen & np.isfinite(self.targets[:, index])
        weights = self.weights
        if index == 0:
            # What breaks took away is put back by `kept_gain`: such rows say little of the gain.
            weights = weights * np.maximum(self.kept, 0.05)
        return forest.fit(
            self.features[usable],
            self.targets[usable, index],
            weights[usable],
            trees=trees,
            leaf=_LEAF,
            share=_FEATURE_SHARE,
            depth=_DEPTH,
        )

    def offsets(self, index: int, folds: int) -> NDArray[np.float64]:
        """Returns (levels, quantiles): how far unseen families lie from the middle, in spreads."""
        from crepes import ConformalPredictiveSystem
        from sklearn.model_selection import GroupKFold

        usable = np.flatnonzero(np.isfinite(self.targets[:, index]))
        groups = self.families[usable]
        splits = min(folds, len(np.unique(groups)))
        residuals, spreads = np.zeros(len(usable)), np.ones(len(usable))
        for train, test in GroupKFold(n_splits=splits).split(usable, groups=groups):
            chosen = np.zeros(len(self.level), dtype=bool)
            chosen[usable[train]] = True
            said = self.forest(index, chosen, _FOLD_TREES).each(self.features[usable[test]])
            middle, spread = middle_and_spread(said)
            truth = self.targets[usable[test], index]
            if index == 0:
                physics = self.physics[usable[test]]
                middle = (middle + physics) * self.kept[usable[test]]
                truth = truth + physics
            residuals[test] = truth - middle
            spreads[test] = spread
        # One for each row of the published tables, as far as one job may weigh.
        often = np.maximum(1, np.round(self.weights[usable] ** 2)).astype(int)
        system = ConformalPredictiveSystem().fit(
            residuals=np.repeat(residuals, often),
            sigmas=np.repeat(spreads, often),
            bins=np.repeat(self.level[usable], often),
        )
        levels = np.unique(self.level[usable])
        found = system.predict_percentiles(
            y_hat=np.zeros(len(levels)),
            sigmas=np.ones(len(levels)),
            bins=levels,
            higher_percentiles=list(100 * LEVELS_OF_BELIEF),
        )
        made = np.zeros((LEVELS, len(LEVELS_OF_BELIEF)))
        for place, level in enumerate(levels):
            made[level] = np.clip(found[place], -50.0, 50.0)
        for level in range(LEVELS):
            if level not in levels:
                # The nearest level that knows less, else the lowest there is.
                below = levels[levels < level]
                made[level] = made[below.max() if len(below) else levels.min()]
        return made


def _edge(features: NDArray[np.float64], reduce: object) -> NDArray[np.float64]:
    found = reduce(features, axis=0)  # type: ignore[operator]
    return np.asarray(np.nan_to_num(found, nan=0.0), dtype=np.float64)
