"""How long does it take to cut the lengths of a data set into buckets?

The claim: a million lengths are counted and cut into up to 64 buckets within 2 s, whether they are
tokens of texts of up to 512 or have half a million distinct values.

    python bench/buckets.py
"""

from __future__ import annotations

import time

import numpy as np
from campaigns import machine, verdict

from advisor.models.buckets import MOST_BUCKETS, cost_of, optimal_cuts, quantile_boundaries

MOST_S = 2.0
SAMPLES = 1_000_000
MOST_DISTINCT = 500_000
ROUNDS = 3


def data_sets() -> dict[str, np.ndarray]:
    """Returns the lengths of all samples, by name."""
    rng = np.random.default_rng(0)
    texts = np.clip(np.rint(rng.lognormal(4, 0.7, SAMPLES)), 1, 512)
    wide = np.clip(np.rint(rng.lognormal(11, 0.8, SAMPLES)), 1, MOST_DISTINCT)
    each = np.arange(1, MOST_DISTINCT + 1)
    more = rng.integers(1, MOST_DISTINCT + 1, SAMPLES - MOST_DISTINCT)
    return {
        "lognormal up to 512": texts.astype(np.int64),
        "lognormal up to 500,000": wide.astype(np.int64),
        "500,000 distinct": rng.permutation(np.concatenate((each, more))),
    }


def main() -> None:
    """Counts and cuts each data set, and compares its slowest round with the limit."""
    print(machine())
    slowest = 0.0
    for name, samples in data_sets().items():
        times = []
        for _ in range(ROUNDS):
            begun = time.perf_counter()
            lengths, counts = np.unique(samples, return_counts=True)
            sample_s = 1e-3 + 1e-5 * lengths + 1e-8 * lengths.astype(np.float64) ** 2
            cuts = optimal_cuts(lengths, counts, sample_s)
            times.append(time.perf_counter() - begun)
        slowest = max(slowest, *times)
        equal = quantile_boundaries(lengths, counts, MOST_BUCKETS).tolist()
        ratio = cost_of(equal, lengths, counts, sample_s) / cuts[-1].seconds
        print(
            f"{name}: {len(lengths):,} distinct, {len(cuts)} cuts in {min(times):.2f} to"
            f" {max(times):.2f} s; {MOST_BUCKETS} quantiles take {ratio:.3f} x as long"
        )
    verdict(f"{SAMPLES:,} lengths are cut within {MOST_S:.0f} s", ok=slowest <= MOST_S)


if __name__ == "__main__":
    main()
