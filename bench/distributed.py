"""In which order should a model be wrapped for several ranks and compiled? Tried, not known.

    python bench/distributed.py [RANKS...]

A user-defined transformer (examples/ranks.py) on 2 and 4 Gloo ranks under DDP, FSDP1 and FSDP2:
every order is measured (`advise run --exhaustive`), and what is advised has to be the fastest order
that compiles and agrees; where none is faster than eager for sure, eager.
"""

from __future__ import annotations

import sys
from typing import Any

from campaigns import advise, machine, verdict

EXAMPLE = "examples/ranks.py:build"
WRAPPERS = ("ddp", "fsdp1", "fsdp2")
STEPS = "100000000"
HEAD = ("ranks", "wrapper", "order", "graphs", "breaks", "covered", "step", "speedup",
        "compile", "one first", "warm", "drift")  # fmt: skip


def main() -> None:
    """Prints the table and ends with 1 when an advice is not the fastest order."""
    wanted = [int(number) for number in sys.argv[1:]] or [2, 4]
    print(machine())
    print("| " + " | ".join(HEAD) + " |")
    print("|" + "---|" * len(HEAD))
    fine = True
    for ranks in wanted:
        for wrapper in WRAPPERS:
            advice, _ = advise(
                EXAMPLE, "--ranks", str(ranks), "--wrap", wrapper, "--steps", STEPS,
                "--exhaustive", "--mode", "default",
            )  # fmt: skip
            table(ranks, wrapper, advice)
            fine &= is_fastest(advice)
    verdict("the order advised is the fastest that compiles and agrees", ok=fine)


def table(ranks: int, wrapper: str, advice: dict[str, Any]) -> None:
    """Prints a line for eager and for each order."""
    eager = next(trial for trial in advice["trials"] if trial["kind"] == "EAGER")
    share = (eager.get("communication") or {}).get("share")
    said = "" if share is None else f" ({share:.0%} communication)"
    line(ranks, wrapper, f"eager{said}", "", "", "", ms(eager["eager_step_s"]), "", "", "", "", "")
    for trial in advice["trials"]:
        if trial["kind"] != "COMPILE":
            continue
        config = trial["config"]
        order = f"{config['scope']} {config['order']}"
        if advice["enable"] and same(config, advice["config"]):
            order += " (advised)"
        if trial["status"] != "OK":
            line(ranks, wrapper, f"{order}: {trial['failure']['message']}", *[""] * 9)
            continue
        own = [other for other in advice["trials"] if other.get("config") == config]
        line(
            ranks, wrapper, order, trial.get("graphs", ""), len(trial["graph_breaks"]),
            f"{trial.get('coverage', 0):.0%}", ms(trial["step_s"]),
            "{median:.2f} ({low:.2f}-{high:.2f})".format(**trial["speedup"]),
            seconds([trial.get("cold_start_s")]),
            seconds(other.get("one_first_start_s") for other in own),
            seconds(other.get("warm_start_s") for other in own),
            f"{trial.get('loss_drift', 0):.1e}",
        )  # fmt: skip


def line(*cells: object) -> None:
    """Prints one line of the table."""
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def ms(interval: dict[str, float]) -> str:
    """Returns milliseconds."""
    return f"{interval['median'] * 1e3:.1f} ms"


def seconds(values: Any) -> str:
    """Returns the first of some seconds that is known; "" when none is."""
    return next((f"{value:.1f} s" for value in values if value is not None), "")


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Returns whether two configurations are one; advice adds `fullgraph` where nothing breaks."""
    return {**one, "fullgraph": False} == {**other, "fullgraph": False}


def is_fastest(advice: dict[str, Any]) -> bool:
    """Returns whether no order that can be used is faster for sure than what is advised.

    For sure: its interval lies above. Where eager is advised, that of eager is 1.
    """
    usable = [
        trial
        for trial in advice["trials"]
        if trial["kind"] == "COMPILE" and trial["status"] == "OK" and trial.get("graphs")
    ]
    if not advice["enable"]:
        return all(trial["speedup"]["low"] <= 1.0 for trial in usable)
    (advised,) = (trial for trial in usable if same(advice["config"], trial["config"]))
    return all(trial["speedup"]["low"] <= advised["speedup"]["high"] for trial in usable)


if __name__ == "__main__":
    main()
