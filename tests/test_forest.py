"""A forest as arrays says what scikit-learn's says."""

from __future__ import annotations

import numpy as np
import pytest

from advisor.models import forest

pytest.importorskip("sklearn")


def data(rows: int = 300) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    features = random.normal(size=(rows, 5))
    target = features[:, 0] + np.where(features[:, 1] > 0, 1.0, -1.0)
    features[random.random(features.shape) < 0.2] = np.nan
    return features, target


def fitted(trees: int = 20) -> forest.Forest:
    features, target = data()
    ones = np.ones(len(target))
    return forest.fit(features, target, ones, trees=trees, leaf=3, share=0.6, depth=9)


def test_it_says_what_scikit_learn_says() -> None:
    from sklearn.ensemble import ExtraTreesRegressor

    features, target = data()
    theirs = ExtraTreesRegressor(
        n_estimators=20, min_samples_leaf=3, max_features=0.6, max_depth=9, random_state=0
    ).fit(features, target)
    found = fitted().each(features)
    assert found.shape == (300, 20)
    np.testing.assert_allclose(found.mean(axis=1), theirs.predict(features), rtol=1e-6, atol=1e-9)


def test_one_row_is_a_row_of_many() -> None:
    features, _ = data()
    made = fitted()
    np.testing.assert_array_equal(made.each(features[7]), made.each(features)[7])


def test_joined_forests_say_what_each_says() -> None:
    features, target = data()
    ones = np.ones(len(target))
    other = forest.fit(features, -target, ones, trees=4, leaf=30, share=1.0, depth=3)
    both = forest.joined([fitted(), other]).each(features)
    np.testing.assert_array_equal(both[:, :20], fitted().each(features))
    np.testing.assert_array_equal(both[:, 20:], other.each(features))


def test_arrays_bring_it_back() -> None:
    features, _ = data()
    made = fitted()
    again = forest.Forest.of_arrays(made.arrays("f"), "f")
    np.testing.assert_array_equal(again.each(features), made.each(features))
    with pytest.raises(KeyError):
        forest.Forest.of_arrays({}, "f")
