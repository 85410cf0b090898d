"""How long does a person wait for `advise --help`?

The claim: at most three times as long as `python -c "import grpc"`, both run in turns.

    python bench/startup.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from campaigns import ADVISE, machine, verdict

MOST_RATIO = 3.0
ROUNDS = 15


def seconds(command: list[str]) -> float:
    """Returns the wall seconds of a command."""
    begun = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begun


def main() -> None:
    """Runs both commands in turns and compares their medians."""
    print(machine())
    help_, grpc = [str(ADVISE), "--help"], [sys.executable, "-c", "import grpc"]
    pairs = [(seconds(help_), seconds(grpc)) for _ in range(ROUNDS + 1)][1:]
    help_s = statistics.median(first for first, _ in pairs)
    grpc_s = statistics.median(second for _, second in pairs)
    ratio = statistics.median(first / second for first, second in pairs)
    print(f"advise --help {help_s:.3f} s, import grpc {grpc_s:.3f} s, ratio {ratio:.2f}")
    verdict(f"advise --help takes at most {MOST_RATIO:.0f} x import grpc", ok=ratio <= MOST_RATIO)


if __name__ == "__main__":
    main()
