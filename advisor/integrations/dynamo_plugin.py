"""An advice as Accelerate and transformers take it: the plugin's fields, and where they end."""

from __future__ import annotations

from advisor.profiler import settings
from advisor.profiler.errors import PlanError
from advisor.profiler.records import Advice, Config, Dynamic, Mode, Scope

_DYNAMIC = {Dynamic.TRUE: True, Dynamic.FALSE: False}
# Variables that accelerate reads where a plugin's field is not given (`accelerate launch` sets
# them): transformers gives the plugin a backend and a mode only.
_DYNAMIC_VARIABLE = "ACCELERATE_DYNAMO_USE_DYNAMIC"
_FULLGRAPH_VARIABLE = "ACCELERATE_DYNAMO_USE_FULLGRAPH"
_REGIONAL_VARIABLE = "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"


def config_of(advice: Advice | Config | None) -> Config | None:
    """Returns the configuration that is advised; None: stay eager."""
    if isinstance(advice, Advice):
        return advice.config if advice.enable else None
    return advice


def variables(config: Config | None) -> dict[str, str]:
    """Returns what `TrainingArguments` has no field for, as variables that accelerate reads."""
    found = {}
    if config is not None and config.dynamic is not Dynamic.AUTO:
        found[_DYNAMIC_VARIABLE] = str(_DYNAMIC[config.dynamic]).lower()
    if config is not None and config.fullgraph:
        found[_FULLGRAPH_VARIABLE] = "true"
    if config is not None and config.scope is Scope.REGIONAL:
        found[_REGIONAL_VARIABLE] = "true"
    return found


def inductor_options(config: Config) -> dict[str, object]:
    """Returns a configuration's options as `torch.compile(options=...)` takes them.

    Raises `PlanError` for what that cannot say: settings of Dynamo, and options beside a mode.
    """
    named = {settings.canonical(name): settings.literal(value) for name, value in config.options}
    beyond = [name for name in named if not name.startswith(settings.INDUCTOR)]
    if named and config.mode is not Mode.DEFAULT:
        beyond = list(named)
    if beyond:
        raise PlanError(
            f"a TorchDynamoPlugin cannot say {', '.join(beyond)}",
            "torch.compile takes options of Inductor only, and none beside a mode",
            "set it before, or give AutoCompile config=advice.config",
        )
    return {name.removeprefix(settings.INDUCTOR): value for name, value in named.items()}


def plugin_fields(config: Config | None) -> dict[str, object]:
    """Returns the fields of accelerate's `TorchDynamoPlugin`. Raises `PlanError` as above."""
    if config is None:
        return {"backend": "no"}
    return {
        "backend": config.backend,
        "mode": config.mode.value,
        "fullgraph": config.fullgraph,
        "dynamic": _DYNAMIC.get(config.dynamic),
        "options": inductor_options(config) or None,
        "use_regional_compilation": config.scope is Scope.REGIONAL,
    }
