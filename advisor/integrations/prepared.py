"""What Accelerate, and the Trainer through it, has done to a model before it is trained."""

from __future__ import annotations

from typing import Any

# One whole model in each process: none, or DistributedDataParallel, whatever carries its messages.
_WHOLE = ("NO", "MULTI_")


def why_not(state: Any) -> str:
    """Returns why a model prepared under an `AcceleratorState` is left alone; "" if it is not."""
    backend = str(state.dynamo_plugin.backend.value).lower()
    if backend != "no":
        return (
            f"Accelerate compiles the model already, with the backend {backend}"
            " (dynamo_plugin, or ACCELERATE_DYNAMO_BACKEND)"
        )
    kind = str(getattr(state.distributed_type, "value", state.distributed_type))
    if not kind.startswith(_WHOLE):
        return f"no process holds the whole model ({kind})"
    return ""
