"""Sentences about several ranks: which order won, what they say to each other, what is saved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from advisor.profiler.records import Config, Order, Scope, Trial, TrialKind, WorkloadSpec, Wrapper
from advisor.profiler.units import config_name, duration

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
