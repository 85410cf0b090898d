"""What a run that was handed its trial's cache need not ask again: which vector instructions run.

torch tries each instruction set in a Python process of its own, whatever the cache holds (six
processes, 2 s of a first step on an AVX-512 machine with torch 2.13). The cache was made on a CPU
of this kind, which `profiler.place` has checked: that the library loads is asked in this process.
"""

from __future__ import annotations

import os
from pathlib import Path

from advisor.injection import when_imported

_MODULE = "torch._inductor.cpu_vec_isa"


def start(folder: str | os.PathLike[str]) -> None:
    """Has libraries in `folder` tried in this process, once the compiler is imported."""
    if not str(folder):
        return
    kept = Path(folder).resolve()

    def patch() -> None:
        from advisor.profiler import torch_internals

        torch_internals.load_vector_libraries_here(lambda path: Path(path).is_relative_to(kept))

    when_imported(_MODULE, patch)
