"""One rank compiles first, and the others find what it made in the cache that they share.

Ranks on one machine compile the same graphs at the same time and share its cores for it. In turns
each graph is compiled once. Compiling itself runs no collective of the job, so that waiting for the
first rank stops nobody: it goes on when it has compiled, and meets the others in its collective.
"""

from __future__ import annotations

import contextlib
import datetime
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from advisor.profiler import torch_internals

# A graph that the first rank never compiles is not waited for beyond this.
_PATIENCE = datetime.timedelta(seconds=120)


@contextlib.contextmanager
def one_rank_first(rank: int) -> Iterator[None]:
    """Has rank 0 compile each graph before the others of the default process group begin."""
    store = _store()
    begun: Counter[str] = Counter()
    ended: Counter[str] = Counter()

    def start(compile_id: str) -> None:
        key = _key(compile_id, begun)
        if rank > 0:
            # The rank 0 of a job that compiles otherwise there: then each compiles on its own.
            with contextlib.suppress(RuntimeError):
                store.wait([key], _PATIENCE)

    def end(compile_id: str) -> None:
        key = _key(compile_id, ended)
        if rank == 0:
            store.set(key, "compiled")

    endings = [torch_internals.on_compile_start(start), torch_internals.on_compile_end(end)]
    try:
        yield
    finally:
        for ending in endings:
            ending()


def _key(compile_id: str, seen: Counter[str]) -> str:
    """Returns the name of a compile in the store: a forward and its backward have the same id."""
    seen[compile_id] += 1
    return f"compiled/{compile_id}/{seen[compile_id]}"


def _store() -> Any:
    return torch.distributed.distributed_c10d._get_default_store()
