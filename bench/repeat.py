"""Does it say the same twice? Two campaigns in a row on one machine.

The claims: the intervals of the speedup overlap, and each half-width is at most 3 % of the ratio.

    python bench/repeat.py [WORKLOAD] [STEPS]
"""

from __future__ import annotations

import sys

from campaigns import EXAMPLE, advise, machine, verdict

MOST_HALF_WIDTH = 0.03


def main() -> None:
    """Runs two campaigns and compares their speedups, configuration by configuration."""
    workload = sys.argv[1] if len(sys.argv) > 1 else EXAMPLE
    steps = sys.argv[2] if len(sys.argv) > 2 else "20000"
    print(machine())
    found = []
    for _ in range(2):
        advice, wall_s = advise(workload, "--steps", steps)
        speedup = advice.get("speedup")
        if speedup is None:
            raise SystemExit("the advice is to stay eager: there is no speedup to compare")
        half = (speedup["high"] - speedup["low"]) / 2 / speedup["median"]
        print(
            f"campaign {wall_s:.0f} s: {advice['config']['scope']} {speedup['median']:.3f} x"
            f" ({speedup['low']:.3f}-{speedup['high']:.3f}), half-width {half:.1%}"
        )
        found.append((speedup, half))
    (first, _), (second, _) = found
    overlap = first["low"] <= second["high"] and second["low"] <= first["high"]
    narrow = all(half <= MOST_HALF_WIDTH for _, half in found)
    verdict("the intervals overlap", ok=overlap)
    verdict(f"each half-width is at most {MOST_HALF_WIDTH:.0%} of the ratio", ok=narrow)


if __name__ == "__main__":
    main()
