"""What does the advisor add? Time of a campaign outside the user's steps and the compiler.

The claim: at most 10 % of the whole command.

    python bench/overhead.py [WORKLOAD] [STEPS]
"""

from __future__ import annotations

import sys

from campaigns import EXAMPLE, advise, machine, verdict

MOST_SHARE = 0.10


def main() -> None:
    """Runs one campaign and sets what its trials needed against what the command took."""
    workload = sys.argv[1] if len(sys.argv) > 1 else EXAMPLE
    steps = sys.argv[2] if len(sys.argv) > 2 else "20000"
    print(machine())
    advice, wall_s = advise(workload, "--steps", steps)
    user_s = 0.0
    for trial in advice["trials"]:
        if not trial.get("wall_s"):
            continue
        user_s += trial["user_s"]
        print(
            f"{trial['kind']:8} {trial['status']:8} wall {trial['wall_s']:6.1f} s,"
            f" steps and compiler {trial['user_s']:6.1f} s"
        )
    share = 1 - user_s / wall_s
    print(f"command {wall_s:.1f} s, steps and compiler {user_s:.1f} s, the rest {share:.1%}")
    verdict(f"at most {MOST_SHARE:.0%} of a campaign is the advisor's own", ok=share <= MOST_SHARE)


if __name__ == "__main__":
    main()
