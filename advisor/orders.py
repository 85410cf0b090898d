"""In which order to wrap a model for several ranks and to compile it: what there is to try."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from advisor.profiler.records import Config, Order, Scope, Wrapper

# DDP's own splitting of graphs at its gradient buckets, switched off.
WITHOUT_DDP_OPTIMIZER = (("torch._dynamo.config.optimize_ddp", "false"),)


def candidates(wrapper: Wrapper) -> tuple[Config, ...]:
    """Returns both scopes in mode default, in each order that is one of its own."""
    return in_each_order((Config(scope=Scope.REGIONAL), Config(scope=Scope.MODEL)), wrapper)


def in_each_order(configs: Iterable[Config], wrapper: Wrapper) -> tuple[Config, ...]:
    """Returns the configurations in each order that differs for this wrapper, each once."""
    found = (
        distinct(wrapper, replace(config, order=order))
        for config in configs
        for order in ((config.order,) if config.order is not None else tuple(Order))
    )
    return tuple(dict.fromkeys(found))


def distinct(wrapper: Wrapper, config: Config) -> Config:
    """Returns the configuration that stands for `config` where both orders are one.

    Compiling in place puts no module around anything. DDP leaves blocks as the modules they are,
    `fully_shard` the model too, and a model that the person's function wraps is compiled after it.
    """
    same = wrapper in (Wrapper.FSDP2, Wrapper.OWN) or (
        wrapper is Wrapper.DDP and config.scope is Scope.REGIONAL
    )
    return replace(config, order=Order.WRAP_FIRST) if same else config
