"""What watches a script that was begun by `advise exec`, `advise train` or `advise run -- ...`.

Whether the compile cache that it was handed has served, and whether compiling its training pays.

Runs in the person's own process, so it is small, and whatever goes wrong in it is not their
concern.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from typing import Any

from advisor import quick_start
from advisor.injection import when_imported
from advisor.profiler.cache_proof import cache_proof
from advisor.profiler.handover import HANDED
from advisor.watch_settings import TOP, WatchSettings


def start() -> None:
    """Watches this process, if it was asked for and this is the one that trains."""
    settings = WatchSettings.of(os.environ)
    if settings is not None:
        _watch_loop(settings)
    name = os.environ.get(HANDED, "")
    if name:
        quick_start.start(os.environ.get("TORCHINDUCTOR_CACHE_DIR", ""))
        teller = _Teller(name)
        when_imported("torch", teller.after_first_step)
        atexit.register(teller.at_exit)


def _watch_loop(settings: WatchSettings) -> None:
    top = os.environ.get(TOP, "")
    if not top or not os.path.exists(f"/proc/{top}"):
        os.environ[TOP] = str(os.getpid())
    if settings.measure:
        settings.reached()

    def torch_is_there() -> None:
        # It is the script that goes on, whatever is wrong with us.
        with contextlib.suppress(Exception):
            from advisor.loop_watch import LoopWatch

            watch = LoopWatch(settings)
            watch.start()
            atexit.register(watch.at_exit)

    when_imported("torch", torch_is_there)


class _Teller:
    """Says once, on stderr, what the cache was good for."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._told = False
        self._handles: list[Any] = []

    def after_first_step(self) -> None:
        """Tells after the first optimizer step that has compiled something."""
        with contextlib.suppress(Exception):
            from advisor.profiler import torch_internals

            self._handles = torch_internals.on_optimizer_step(self._before_step, self._on_step)

    def _before_step(self, *_: object) -> None:
        pass

    def _on_step(self, *_: object) -> None:
        proof = cache_proof()
        if proof.hits or proof.misses or proof.bypassed:
            self._tell()

    def at_exit(self) -> None:
        """Tells of a run that trained and never compiled."""
        # A process of a data loader, or one that only starts others, has nothing to tell.
        if not self._told and self._handles and "torch._dynamo" in sys.modules:
            self._tell()

    def _tell(self) -> None:
        self._told = True
        for handle in self._handles:
            handle.remove()
        with contextlib.suppress(OSError, ValueError):
            print(f"advise: {cache_proof().sentence(self._name)}", file=sys.stderr, flush=True)
