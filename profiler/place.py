"""Where compiled code may run: what a compile cache was made on, and what is here. No torch.

Inductor compiles C++ for the very CPU (`-march=native`) and kernels for the GPU's capability, and
its caches are keyed by the version of torch: what was made elsewhere is refused instead of missed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import platform
import sys
from dataclasses import dataclass, fields
from pathlib import Path

_NAMES = {
    "torch": "torch",
    "python": "Python",
    "system": "the system",
    "cpu": "the CPU",
    "capability": "the GPU's capability",
    "cuda": "CUDA",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What compiled code depends on. `capability` and `cuda` are empty where no GPU was used."""

    torch: str
    python: str
    system: str
    cpu: str
    capability: str = ""
    cuda: str = ""


def here(torch: str = "", capability: str = "", cuda: str = "") -> Place:
    """Returns this place; without `torch`, that of the torch that is installed beside us."""
    return Place(
        torch=torch or _installed_torch(),
        python=".".join(platform.python_version_tuple()[:2]),
        system=f"{sys.platform}-{platform.machine()}",
        cpu=cpu(),
        capability=capability,
        cuda=cuda,
    )


def difference(made: Place, now: Place) -> str:
    """Returns in words what is another here than where a cache was made; "" when nothing is.

    What is not known here (a GPU that nobody has asked yet) is not held against it.
    """
    for field in fields(Place):
        before, after = getattr(made, field.name), getattr(now, field.name)
        unknown = field.name in ("capability", "cuda") and not (before and after)
        if before != after and not unknown:
            return f"{_NAMES[field.name]} was {before or 'unknown'} and is {after or 'unknown'}"
    return ""


def cpu_name() -> str:
    """Returns the CPU's product name, or what the system calls it."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


@functools.cache
def cpu() -> str:
    """Returns the CPU's name and a digest of its instruction sets: equal for equal ones."""
    flags = " ".join(sorted((_cpuinfo("flags") or _cpuinfo("Features")).split()))
    return f"{cpu_name()} {hashlib.sha256(flags.encode()).hexdigest()[:8]}"


def _cpuinfo(name: str) -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(name):
                return line.split(":", 1)[1].strip()
    return ""


def _installed_torch() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""
