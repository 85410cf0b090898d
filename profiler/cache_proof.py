"""Whether a run really started from the cache that it was handed: what torch counted tells."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

# Graphs found in the cache, compiled anew, and those that torch never caches.
_HIT, _MISS, _BYPASS = "fxgraph_cache_hit", "fxgraph_cache_miss", "fxgraph_cache_bypass"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheProof:
    """Graphs of this process by where their code came from."""

    hits: int
    misses: int
    bypassed: int = 0

    @property
    def served(self) -> bool:
        """Whether every graph came from the cache."""
        return self.hits > 0 and not self.misses and not self.bypassed

    def sentence(self, name: str) -> str:
        """Returns what to say of the cache `name`."""
        total = self.hits + self.misses + self.bypassed
        if total == 0:
            return f"compile cache {name}: nothing was compiled yet, so it was not used"
        if self.served:
            plural = "" if self.hits == 1 else "s"
            return f"compile cache {name}: all {self.hits} graph{plural} came from it"
        parts = [f"{self.hits} of {total} graphs came from it"]
        if self.misses:
            parts.append(
                f"{self.misses} were compiled anew: model, shapes, settings of the compiler or"
                " versions are others than in the trial"
            )
        if self.bypassed:
            parts.append(f"torch caches {self.bypassed} of them never")
        return f"compile cache {name}: {', '.join(parts)}"


def cache_proof() -> CacheProof:
    """Returns what this process has compiled so far; all zeros before torch was imported."""
    utils = sys.modules.get("torch._dynamo.utils")
    counted: Mapping[str, Mapping[str, int]] = getattr(utils, "counters", {})
    inductor = counted.get("inductor", {})
    return CacheProof(
        hits=inductor.get(_HIT, 0),
        misses=inductor.get(_MISS, 0),
        bypassed=inductor.get(_BYPASS, 0),
    )


def compiling_has_begun() -> bool:
    """Returns whether dynamo has looked at any frame of this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    counted: Mapping[str, Mapping[str, int]] = getattr(utils, "counters", {})
    return bool(counted.get("frames", {}).get("total", 0))
