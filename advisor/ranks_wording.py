"""Sentences about several ranks: which order won, what they say to each other, what is saved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from advisor.models.economics import slowest_of
from advisor.models.evidence import Evidence
from advisor.models.scaling import Spread
from advisor.profiler.records import (
    Config,
    Interval,
    NetworkSource,
    Order,
    Scaling,
    Scope,
    Trial,
    TrialKind,
    WorkloadSpec,
    Wrapper,
)
from advisor.profiler.units import config_name, duration
from advisor.request import AdviceRequest

_NAMES = {
    Wrapper.DDP: "DistributedDataParallel",
    Wrapper.FSDP1: "FullyShardedDataParallel",
    Wrapper.FSDP2: "fully_shard",
    Wrapper.OWN: "your function's own wrapping",
}
_CHECKPOINTS = {
    Wrapper.DDP: (
        "DistributedDataParallel puts `module.` before every name in a state dict; save"
        " `model.module.state_dict()`, which loads with and without ranks, and compiled or not:"
        " compiling in place changes no name."
    ),
    Wrapper.FSDP1: (
        "State dicts are gathered or sharded by FSDP (`get_model_state_dict` of"
        " torch.distributed.checkpoint.state_dict gives the plain names); compiling in place"
        " changes no name, so both load compiled or not."
    ),
    Wrapper.FSDP2: (
        "State dicts have the plain names, with a DTensor for each parameter"
        " (`get_model_state_dict` of torch.distributed.checkpoint.state_dict gathers them);"
        " compiling in place changes no name, so both load compiled or not."
    ),
}


def reasons(workload: WorkloadSpec, config: Config, trials: Sequence[Trial]) -> Iterator[str]:
    """Yields what follows from several ranks for the configuration that is advised."""
    wrapping = _NAMES[workload.wrapper]
    what = "its repeated blocks" if config.scope is Scope.REGIONAL else "the model"
    if workload.wrapper is not Wrapper.OWN:
        if config.order is Order.COMPILE_FIRST:
            order = f"{what} compiled first, then {wrapping}"
        else:
            order = f"{wrapping} first, then {what} compiled"
        yield f"Of the orders that were tried on {workload.ranks} ranks, {order} was the fastest."
    share = communication_share(trials)
    if share is not None:
        yield (
            f"{share:.0%} of an eager step is communication between the ranks, which compiling does"
            " not make faster."
        )
    yield from _starts(config, trials)
    if workload.wrapper in _CHECKPOINTS:
        yield _CHECKPOINTS[workload.wrapper]


def communication_share(trials: Sequence[Trial]) -> float | None:
    """Returns the share of the eager step that its ranks spend on each other, where measured."""
    for trial in trials:
        if trial.kind is TrialKind.EAGER and trial.communication is not None:
            return trial.communication.share
    return None


def scaling(found: Scaling | None, evidence: Evidence | None) -> Iterator[str]:
    """Yields what the plan's ranks are expected to take, and of which model that is."""
    if found is None:
        return
    machines = "one machine" if found.machines == 1 else f"{found.machines:,} machines"
    steps = f"{_between(found.eager_step_s)} eager"
    if found.step_s is not None and evidence is not None:
        steps += f" and {_between(found.step_s)} with {config_name(evidence.config)}"
    share = found.communication_share
    yield (
        f"On {found.world_size:,} ranks of {machines} like this one a step is expected to take"
        f" {steps}, {share.low:.0%} to {share.high:.0%} of the eager one communication:"
        f" a model (latency and bandwidth, ring), of what {found.ranks} ranks measured here,"
        f" with {_NETWORKS[found.network]}. All totals are for these ranks."
    )
    yield from _machines_start(found, evidence)


_NETWORKS = {
    NetworkSource.MEASURED: "the bandwidth that was measured between them",
    NetworkSource.GIVEN: "the network that was given",
    NetworkSource.ASSUMED: (
        "a network between machines that gives each rank a twelfth to all of the bandwidth measured"
        " here (name it by --network, as in --network 25G, to narrow this)"
    ),
}


def _machines_start(found: Scaling, evidence: Evidence | None) -> Iterator[str]:
    """Yields how long the machines compile, each with a cache of its own and with one for all."""
    cold_s = evidence.trial.cold_start_s if evidence is not None else None
    if evidence is None or cold_s is None or found.machines == 1:
        return
    slowest = slowest_of(found.machines)
    sentence = (
        f"Each of the {found.machines:,} machines compiles with a cache of its own, at the same"
        f" time, and the last is done after {duration(cold_s * slowest)} ({duration(cold_s)} here)"
    )
    if evidence.warm_start_s is not None:
        warm_s = evidence.warm_start_s * slowest
        sentence += f"; with the cache handed over to each, after {duration(warm_s)}"
    yield sentence + "."


def not_scaled(request: AdviceRequest, spread: Spread | None) -> Iterator[str]:
    """Yields that more ranks were planned than can be spoken of."""
    size = request.plan.world_size
    if size is not None and spread is None:
        yield (
            f"What ranks say to each other could not be measured, so that all figures are those of"
            f" {request.workload.ranks} ranks, not of the {size:,} planned."
        )


def _between(interval: Interval) -> str:
    return f"{duration(interval.median)} ({duration(interval.low)} to {duration(interval.high)})"


def _starts(config: Config, trials: Sequence[Trial]) -> Iterator[str]:
    """Yields how long the ranks start when one compiles first."""
    own = [t for t in trials if t.config == config]
    cold = next((t.cold_start_s for t in own if t.kind is TrialKind.COMPILE), None)
    first = next((t.one_first_start_s for t in own if t.one_first_start_s is not None), None)
    if cold is not None and first is not None:
        yield (
            f"All ranks compile {config_name(config)} in {duration(cold)} at the same time,"
            f" and in {duration(first)} when one compiles first and the others find what it made."
        )
