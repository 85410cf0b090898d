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
_NAMES = ("roots", "feature", "threshold", "child", "value")


@dataclass(frozen=True, slots=True, eq=False)
class Forest:
    """Trees end to end in flat arrays of nodes; `roots` are the places where each begins.

    `child` holds the left and the right child of each node, one after the other; a leaf has itself
    as both, so that walking a fixed number of levels ends in leaves. `feature` counts to twice
    `features`: the second half are nodes at which a feature that is not known goes right.
    """

    roots: NDArray[np.intp]
    feature: NDArray[np.intp]
    threshold: Floats
    child: NDArray[np.intp]
    value: Floats
    depth: int
    features: int

    def each(self, features: Floats) -> Floats:
        """Returns what each tree says: (trees,) of (features,), (rows, trees) of (rows, features).

        NaN stands for a feature that is not known.
        """
        unknown = np.isnan(features)
        given = np.concatenate(
            [np.where(unknown, -np.inf, features), np.where(unknown, np.inf, features)], axis=-1
        )
        if features.ndim == 1:
            node = self.roots
            for _ in range(self.depth):
                goes_right = given[self.feature[node]] > self.threshold[node]
                node = self.child[2 * node + goes_right]
            return self.value[node]
        node = np.broadcast_to(self.roots, (len(features), len(self.roots)))
        row = np.arange(len(features))[:, None]
        for _ in range(self.depth):
            goes_right = given[row, self.feature[node]] > self.threshold[node]
            node = self.child[2 * node + goes_right]
        return self.value[node]

    def arrays(self, prefix: str) -> dict[str, NDArray[np.generic]]:
        """Returns the arrays by name, to be kept in an `.npz` file."""
        named = {f"{prefix}.{name}": getattr(self, name) for name in _NAMES}
        sizes = np.asarray([self.depth, self.features])
        return {**named, f"{prefix}.sizes": sizes}

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, NDArray[np.generic]], prefix: str) -> Forest:
        """Returns the forest that `arrays` were made of. Raises KeyError when one is missing."""
        named = {name: arrays[f"{prefix}.{name}"] for name in _NAMES}
        depth, features = (int(each) for each in arrays[f"{prefix}.sizes"])
        return cls(**named, depth=depth, features=features)  # type: ignore[arg-type]


def joined(forests: Sequence[Forest]) -> Forest:
    """Returns one forest with the trees of several, in their order: one walk evaluates all."""
    starts = np.cumsum([0, *(len(forest.feature) for forest in forests)])[:-1]
    moved = list(zip(forests, starts, strict=True))
    return Forest(
        roots=np.concatenate([forest.roots + start for forest, start in moved]),
        feature=np.concatenate([forest.feature for forest in forests]),
        threshold=np.concatenate([forest.threshold for forest in forests]),
        child=np.concatenate([forest.child + start for forest, start in moved]),
        value=np.concatenate([forest.value for forest in forests]),
        depth=max(forest.depth for forest in forests),
        features=forests[0].features,
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
        left = np.where(leaves, own, tree.children_left)
        right = np.where(leaves, own, tree.children_right)
        goes_right = ~np.asarray(tree.missing_go_to_left, dtype=np.bool_)
        made.append(
            Forest(
                roots=np.zeros(1, dtype=np.intp),
                feature=np.where(leaves, 0, tree.feature + goes_right * features.shape[1]).astype(
                    np.intp
                ),
                threshold=tree.threshold.astype(np.float64),
                child=np.column_stack([left, right]).ravel().astype(np.intp),
                value=tree.value[:, 0, 0].astype(np.float64),
                depth=int(tree.max_depth),
                features=features.shape[1],
            )
        )
    return joined(made)
