"""A forest of regression trees as plain arrays: fitted with scikit-learn, evaluated with NumPy.

One call of scikit-learn for one row takes longer than a whole remote call; walking all trees at
once, one level in a step, takes a tenth of that and needs no scikit-learn where it runs. Arrays
also travel as `.npz`, without pickles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_NAMES = ("roots", "feature", "threshold", "left", "right", "missing_left", "value")


@dataclass(frozen=True, slots=True, eq=False)
class Forest:
    """Trees end to end in flat arrays of nodes; `roots` are the places where each begins.

    A leaf has itself as both children, so that walking a fixed number of levels ends in leaves.
    """

    roots: NDArray[np.intp]
    feature: NDArray[np.intp]
    threshold: Floats
    left: NDArray[np.intp]
    right: NDArray[np.intp]
    missing_left: NDArray[np.bool_]
    value: Floats
    depth: int

    def each(self, features: Floats) -> Floats:
        """Returns what each tree says: from (features,) the (trees,), from (rows, features) the

        (rows, trees). NaN stands for a feature that is not known.
        """
        rows = np.atleast_2d(features)
        node = np.broadcast_to(self.roots, (len(rows), len(self.roots)))
        place = np.arange(len(rows))[:, None]
        for _ in range(self.depth):
            given = rows[place, self.feature[node]]
            goes_left = (given <= self.threshold[node]) | (
                np.isnan(given) & self.missing_left[node]
            )
            node = np.where(goes_left, self.left[node], self.right[node])
        found = self.value[node]
        return found[0] if features.ndim == 1 else found

    def arrays(self, prefix: str) -> dict[str, NDArray[np.generic]]:
        """Returns the arrays by name, to be kept in an `.npz` file."""
        named = {f"{prefix}.{name}": getattr(self, name) for name in _NAMES}
        return {**named, f"{prefix}.depth": np.asarray(self.depth)}

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, NDArray[np.generic]], prefix: str) -> Forest:
        """Returns the forest that `arrays` were made of. Raises KeyError when one is missing."""
        named = {name: arrays[f"{prefix}.{name}"] for name in _NAMES}
        return cls(**named, depth=int(arrays[f"{prefix}.depth"]))  # type: ignore[arg-type]


def joined(forests: Sequence[Forest]) -> Forest:
    """Returns one forest with the trees of several, in their order: one walk evaluates all."""
    starts = np.cumsum([0, *(len(forest.feature) for forest in forests)])[:-1]
    moved = list(zip(forests, starts, strict=True))
    return Forest(
        roots=np.concatenate([forest.roots + start for forest, start in moved]),
        feature=np.concatenate([forest.feature for forest in forests]),
        threshold=np.concatenate([forest.threshold for forest in forests]),
        left=np.concatenate([forest.left + start for forest, start in moved]),
        right=np.concatenate([forest.right + start for forest, start in moved]),
        missing_left=np.concatenate([forest.missing_left for forest in forests]),
        value=np.concatenate([forest.value for forest in forests]),
        depth=max(forest.depth for forest in forests),
    )


def fit(
    features: Floats,
    target: Floats,
    weights: Floats,
    *,
    trees: int,
    leaf: int,
    share: float,
    depth: int,
    seed: int = 0,
) -> Forest:
    """Returns extremely randomised trees (Geurts et al., Machine Learning 2006), as arrays.

    `features` (rows, features) may hold NaN, `leaf` is the least number of rows in a leaf, `share`
    the share of features that a split looks at.
    """
    from sklearn.ensemble import ExtraTreesRegressor

    model = ExtraTreesRegressor(
        n_estimators=trees,
        min_samples_leaf=leaf,
        max_features=share,
        max_depth=depth,
        random_state=seed,
        n_jobs=1,
    )
    model.fit(features, target, sample_weight=weights)
    made = []
    for each in model.estimators_:
        tree = each.tree_
        own = np.arange(tree.node_count)
        leaves = tree.children_left < 0
        made.append(
            Forest(
                roots=np.zeros(1, dtype=np.intp),
                feature=np.where(leaves, 0, tree.feature).astype(np.intp),
                threshold=tree.threshold.astype(np.float64),
                left=np.where(leaves, own, tree.children_left).astype(np.intp),
                right=np.where(leaves, own, tree.children_right).astype(np.intp),
                missing_left=np.asarray(tree.missing_go_to_left, dtype=np.bool_),
                value=tree.value[:, 0, 0].astype(np.float64),
                depth=int(tree.max_depth),
            )
        )
    return joined(made)
