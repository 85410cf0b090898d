"""A forest of regression trees as plain arrays: fitted with scikit-learn, evaluated with NumPy.

One call of scikit-learn for one row takes longer than a whole remote call; walking all trees at
once, one level in a step, takes a tenth of that and needs no scikit-learn where it runs. Arrays
also travel as `.npz`, without pickles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_NAMES = ("roots", "feature", "threshold", "left", "value")


@dataclass(frozen=True, slots=True, eq=False)
class Forest:
    """Trees end to end in flat arrays of nodes; `roots` are the places where each begins.

    The right child of a node stands behind the left one. A leaf is its own left child and has no
    right one, its threshold being infinite, so that walking a fixed number of levels ends in
    leaves. `feature` counts to twice `features`: the second half are nodes at which a feature that
    is not known goes right.
    """

    roots: NDArray[np.intp]
    feature: NDArray[np.intp]
    threshold: Floats
    left: NDArray[np.intp]
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
            # `take` is what indexing does, at half its price for a few hundred nodes.
            node = self.roots
            for _ in range(self.depth):
                goes_right = given.take(self.feature.take(node)) > self.threshold.take(node)
                node = self.left.take(node) + goes_right
            return self.value.take(node)
        node = np.broadcast_to(self.roots, (len(features), len(self.roots)))
        row = np.arange(len(features))[:, None]
        for _ in range(self.depth):
            goes_right = given[row, self.feature[node]] > self.threshold[node]
            node = self.left[node] + goes_right
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
        left=np.concatenate([forest.left + start for forest, start in moved]),
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
        made.append(_of_tree(tree, features.shape[1]))
    return joined(made)


def _of_tree(tree: Any, features: int) -> Forest:
    """Returns one tree of scikit-learn, its nodes numbered so that siblings stand together."""
    order = [0]
    left = np.zeros(tree.node_count, dtype=np.intp)
    for place in range(tree.node_count):
        node = order[place]
        if tree.children_left[node] < 0:
            left[place] = place
        else:
            left[place] = len(order)
            order += [tree.children_left[node], tree.children_right[node]]
    taken = np.asarray(order)
    leaves = tree.children_left[taken] < 0
    goes_right = ~np.asarray(tree.missing_go_to_left, dtype=np.bool_)[taken]
    return Forest(
        roots=np.zeros(1, dtype=np.intp),
        feature=np.where(leaves, 0, tree.feature[taken] + goes_right * features).astype(np.intp),
        threshold=np.where(leaves, np.inf, tree.threshold[taken]).astype(np.float64),
        left=left,
        value=tree.value[taken, 0, 0].astype(np.float64),
        depth=int(tree.max_depth),
        features=features,
    )
