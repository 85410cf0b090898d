"""A step on more ranks than were tried: what was measured, and a model of communication.

    t(n) = t(N) + e(n) - e(N)        e: communication that the step waits for

N ranks of one machine were measured, and n ranks on machines like it are planned, each rank with
the batch of the trial. What waits is the measured share, e(N). It grows with what the step's
collectives take by the latency and the bandwidth (alpha and beta: Hockney 1994), of which all but a
rank's own part travels a ring (Thakur, Rabenseifner, Gropp 2005):

    C(n) = calls * alpha(n) + bytes * (n - 1) / n / beta(n)

Three things are not known from one machine, and drawn: whether latency grows as a tree's
(log n) or a ring's (n - 1); how much of what is more can hide behind computing (as much as in the
trial, or nothing); and how fast the network is, where nobody said (`NETWORK_SHARE`). That one of
many machines is slow, and that sharded optimizers have less to do, is not in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from advisor.models.economics import DRAWS, Bill
from advisor.models.plan import Plan
from advisor.profiler.records import (
    Collective,
    Communication,
    Interval,
    NetworkSource,
    Scaling,
    Trial,
    TrialKind,
)
from advisor.profiler.statistics import Z_95, Array, interval

# Between machines each rank has at least this share of the bandwidth within them: an A100 300 GB/s
# each way by NVLink and 25 GB/s by its network card, an H100 450 and 50 (NVIDIA's datasheets of the
# DGX A100 and the DGX H100). What Gloo reaches within one machine is rarely above its network.
NETWORK_SHARE = 1 / 12
# How often the data of a call travels the ring: to be reduced, and to be given back.
_TRIPS = {"all_reduce": 2.0}


@dataclass(frozen=True, slots=True, eq=False)
class Spread:
    """From the ranks of the trials to those of the plan.

    `added_s` are draws of the seconds that each step takes more (less: below 0), `waits_s` of those
    that it then waits for the other ranks.
    """

    ranks: int
    world_size: int
    machines: int
    network: NetworkSource
    added_s: Array
    waits_s: Array


def spread(
    eager_step_s: Interval,
    communication: Communication,
    ranks: int,
    plan: Plan,
    *,
    machines: int | None = None,
    seed: int = 0,
) -> Spread | None:
    """Returns what a step takes more on the plan's `world_size` ranks; None where none is planned.

    `ranks` were measured with `communication` in an eager step of `eager_step_s`. The planned ones
    are on `machines`, as many as hold `ranks` each where nothing is said. None too where the share
    of communication could not be measured.
    """
    size, share = plan.world_size, communication.share
    if size is None or share is None or ranks < 2:
        return None
    if machines is None:
        machines = math.ceil(size / ranks)
    rng = np.random.default_rng([seed, 7])
    waits = _waits(eager_step_s, share, rng)
    source, slower = _network(communication, plan, machines, rng)
    now = _takes(communication, ranks, ranks, np.zeros(DRAWS), np.ones(DRAWS))
    then = _takes(communication, ranks, size, rng.random(DRAWS), slower)
    # Hidden as in the trial, it grows in proportion; what nothing hides comes whole.
    with np.errstate(divide="ignore", invalid="ignore"):
        proportion = np.where(now > 0, then / now, 1.0)
    in_proportion, whole = waits * proportion, np.maximum(0.0, waits + then - now)
    hidden = rng.random(DRAWS)
    planned = hidden * in_proportion + (1 - hidden) * whole
    return Spread(ranks, size, machines, source, planned - waits, planned)


def spread_of(trials: Sequence[Trial], plan: Plan) -> Spread | None:
    """Returns `spread` by the eager trial of a campaign; None where it does not say enough."""
    for trial in trials:
        known = trial.kind is TrialKind.EAGER and trial.communication is not None
        if known and trial.eager_step_s is not None and trial.communication is not None:
            return spread(trial.eager_step_s, trial.communication, len(trial.ranks), plan)
    return None


def scaling_of(spread: Spread, eager_step_s: float, billed: Bill | None) -> Scaling:
    """Returns what a step takes on the plan's ranks: by a bill, or of eager alone by its time."""
    eager = billed.eager_step_s if billed else interval(eager_step_s + spread.added_s)
    return Scaling(
        ranks=spread.ranks,
        world_size=spread.world_size,
        machines=spread.machines,
        network=spread.network,
        eager_step_s=eager,
        communication_share=interval(np.minimum(1.0, spread.waits_s / eager.median)),
        step_s=billed.step_s if billed else None,
    )


def _waits(eager_step_s: Interval, share: float, rng: np.random.Generator) -> Array:
    """Returns draws of the seconds of a step that communication takes: of a difference."""
    sigma = math.log(eager_step_s.high / eager_step_s.low) / (2 * Z_95)
    # Both the step and the one without communication were measured as surely as that.
    noise = math.sqrt(1 + (1 - share) ** 2) * sigma * rng.standard_normal(DRAWS)
    return np.maximum(0.0, eager_step_s.median * (share + noise))


def _network(
    communication: Communication, plan: Plan, machines: int, rng: np.random.Generator
) -> tuple[NetworkSource, Array]:
    """Returns where the bandwidth is from, and draws of its share of the one measured."""
    if machines == 1:
        return NetworkSource.MEASURED, np.ones(DRAWS)
    if plan.network_bytes_per_s is not None and communication.bytes_per_s is not None:
        share = min(1.0, plan.network_bytes_per_s / communication.bytes_per_s)
        return NetworkSource.GIVEN, np.full(DRAWS, share)
    return NetworkSource.ASSUMED, NETWORK_SHARE ** rng.random(DRAWS)


def _takes(
    communication: Communication, ranks: int, size: int, ring: Array, bandwidth: Array
) -> Array:
    """Returns draws of what the collectives of a step take on `size` ranks, in seconds.

    `ring` is where latency stands between a tree's growth (0) and a ring's (1), `bandwidth` the
    share of the measured one.
    """
    if size < 2:
        return np.zeros(DRAWS)
    tree, whole = math.log2(size) / math.log2(ranks), (size - 1) / (ranks - 1)
    latency_s = (communication.latency_s or 0.0) * tree ** (1 - ring) * whole**ring
    calls = sum(found.calls for found in communication.collectives)
    travelled = sum(map(_travelled, communication.collectives)) * (size - 1) / size
    byte_s = 1 / communication.bytes_per_s if communication.bytes_per_s else 0.0
    return calls * latency_s + travelled * byte_s / bandwidth


def _travelled(found: Collective) -> float:
    """Returns the bytes of a kind of calls, as often as they travel the ring."""
    return _TRIPS.get(found.name, 1.0) * found.part_bytes
