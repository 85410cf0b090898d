"""What watches a run that `advise exec` began: whether the cache that it was handed has served.

Runs in the person's own process, so it is small, and whatever goes wrong in it is not their
concern.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from typing import Any

from advisor.injection import when_imported
from advisor.profiler.cache_proof import cache_proof
from advisor.profiler.handover import HANDED

_OPTIMIZER = "torch.optim.optimizer"


def start() -> None:
    """Watches this process, if it was handed a cache and is the one that trains."""
    name = os.environ.get(HANDED, "")
    if name:
        teller = _Teller(name)
        when_imported(_OPTIMIZER, teller.after_first_step)
        atexit.register(teller.at_exit)


class _Teller:
    """Says once, on stderr, what the cache was good for."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._told = False
        self._handle: Any = None

    def after_first_step(self) -> None:
        """Tells after the first optimizer step that has compiled something."""
        with contextlib.suppress(Exception):
            from torch.optim.optimizer import register_optimizer_step_post_hook

            self._handle = register_optimizer_step_post_hook(self._on_step)

    def _on_step(self, *_: object) -> None:
        proof = cache_proof()
        if proof.hits or proof.misses or proof.bypassed:
            self._tell()

    def at_exit(self) -> None:
        """Tells of a run that trained and never compiled."""
        # A process of a data loader, or one that only starts others, has nothing to tell.
        if not self._told and self._handle is not None and "torch._dynamo" in sys.modules:
            self._tell()

    def _tell(self) -> None:
        self._told = True
        if self._handle is not None:
            self._handle.remove()
        with contextlib.suppress(OSError, ValueError):
            print(f"advise: {cache_proof().sentence(self._name)}", file=sys.stderr, flush=True)
