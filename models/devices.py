"""What accelerators can do at best: peak FLOP/s by number format, memory bandwidth, launch cost.

Figures are the vendors' own, dense (no structured sparsity), for the matrix units where they have
them; float32 is that of the vector units. They bound a step from below (roofline: Williams et al.,
Roofline: An Insightful Visual Performance Model, CACM 2009); no training reaches them.
"""

from __future__ import annotations

import difflib
import functools
import re
from dataclasses import dataclass

from advisor.profiler.errors import PlanError

_TERA, _GIGA = 1e12, 1e9
_GIB = 2.0**30
# From the call in Python to the kernel's start, with its operator's dispatch: 5 to 10 µs on server
# CPUs of the day (PyTorch, "CUDA Graphs" blog, 2021, shows launch-bound steps at such gaps).
_LAUNCH_S = 8e-6
# On the CPU an operator's call costs its dispatch alone.
_CPU_DISPATCH_S = 3e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device. FLOP/s are peaks; a format that its matrix units lack runs at `float32_flops`."""

    name: str
    vendor: str
    # Year and generation tell apart what the compiler's generated code is good at.
    architecture: str
    float32_flops: float
    tf32_flops: float | None = None
    float16_flops: float | None = None
    bfloat16_flops: float | None = None
    bandwidth_bytes_per_s: float = 0.0
    memory_bytes: float = 0.0
    launch_s: float = _LAUNCH_S
    source: str = ""

    def flops(self, precision: str) -> float:
        """Returns the peak FLOP/s of matrix products in a precision, such as `bf16` or `fp32`."""
        found = {
            "tf32": self.tf32_flops,
            "fp16": self.float16_flops,
            "bf16": self.bfloat16_flops,
        }.get(precision.rpartition("-")[2])
        return found or self.float32_flops

    @classmethod
    def from_name(cls, name: str) -> Device:
        """Returns the device that a name stands for, as typed or as a driver spells it.

        Raises `PlanError` when it is in no table, with those that are close.
        """
        return _named(name)


@functools.lru_cache(maxsize=1024)
def _named(name: str) -> Device:
    key = _key(name)
    cores = re.fullmatch(r"cpu(\d{1,4})", key)
    if cores and int(cores[1]) > 0:
        return _cpu(int(cores[1]))
    for known, spellings in _SPELLINGS.items():
        if key == _key(known) or key in spellings:
            return DEVICES[known]
    close = difflib.get_close_matches(key, [_key(known) for known in DEVICES], n=2, cutoff=0.5)
    listed = [known for known in DEVICES if _key(known) in close]
    mend = f"did you mean {' or '.join(listed)}? " if listed else ""
    raise PlanError(
        f"device {name!r} is unknown", mend=f"{mend}known are {', '.join(DEVICES)}, cpu-CORES"
    )


def _gpu(
    name: str,
    architecture: str,
    teraflops: tuple[float, float | None, float | None, float | None],
    gigabytes_per_s: float,
    memory_gib: float,
    source: str,
    vendor: str = "nvidia",
) -> Device:
    float32, tf32, float16, bfloat16 = teraflops
    return Device(
        name=name,
        vendor=vendor,
        architecture=architecture,
        float32_flops=float32 * _TERA,
        tf32_flops=tf32 * _TERA if tf32 else None,
        float16_flops=float16 * _TERA if float16 else None,
        bfloat16_flops=bfloat16 * _TERA if bfloat16 else None,
        bandwidth_bytes_per_s=gigabytes_per_s * _GIGA,
        memory_bytes=memory_gib * _GIB,
        source=source,
    )


def _cpu(cores: int) -> Device:
    """Returns a CPU of so many cores; 8 of them are what is meant without a number.

    A core with AVX-512 does 64 float32 FLOPs a cycle, with AVX2 and FMA 32; at about 2.5 GHz. Few
    cores share what two channels of memory give, many have more channels (5 GB/s for a core).
    """
    return Device(
        name="cpu" if cores == 8 else f"cpu-{cores}",
        vendor="any",
        architecture="cpu",
        float32_flops=cores * 80e9,
        bandwidth_bytes_per_s=max(20.0, 5.0 * cores) * _GIGA,
        memory_bytes=64 * _GIB,
        launch_s=_CPU_DISPATCH_S,
        source=f"{cores} cores with AVX2 at 2.5 GHz, DDR4-2666 (JEDEC)",
    )


# Teraflops: float32, TF32, float16, bfloat16.
_TABLE = (
    _gpu("v100", "volta", (15.7, None, 125, None), 900, 32, "NVIDIA V100 datasheet (SXM2)"),
    _gpu("t4", "turing", (8.1, None, 65, None), 320, 16, "NVIDIA T4 datasheet"),
    _gpu("a100-40gb", "ampere", (19.5, 156, 312, 312), 1555, 40, "NVIDIA A100 datasheet"),
    _gpu("a100-80gb", "ampere", (19.5, 156, 312, 312), 2039, 80, "NVIDIA A100 datasheet (SXM)"),
    _gpu("a10", "ampere", (31.2, 62.5, 125, 125), 600, 24, "NVIDIA A10 datasheet"),
    _gpu("rtx-3090", "ampere", (35.6, 35.6, 71, 71), 936, 24, "NVIDIA GA102 whitepaper"),
    _gpu("rtx-3090-ti", "ampere", (40.0, 40, 80, 80), 1008, 24, "NVIDIA GA102 whitepaper"),
    _gpu("l4", "ada", (30.3, 60, 121, 121), 300, 24, "NVIDIA L4 datasheet"),
    _gpu("l40s", "ada", (91.6, 183, 362, 362), 864, 48, "NVIDIA L40S datasheet"),
    _gpu("rtx-4090", "ada", (82.6, 82.6, 165.2, 165.2), 1008, 24, "NVIDIA Ada whitepaper"),
    _gpu("h100-pcie", "hopper", (51, 378, 756, 756), 2000, 80, "NVIDIA H100 datasheet"),
    _gpu("h100", "hopper", (67, 494, 989, 989), 3350, 80, "NVIDIA H100 datasheet (SXM)"),
    _gpu("h200", "hopper", (67, 494, 989, 989), 4800, 141, "NVIDIA H200 datasheet (SXM)"),
    _gpu("b200", "blackwell", (75, 1125, 2250, 2250), 8000, 180, "NVIDIA DGX B200 datasheet"),
    _gpu(
        "rtx-5090",
        "blackwell",
        (104.8, 104.8, 209.5, 209.5),
        1792,
        32,
        "NVIDIA RTX Blackwell whitepaper",
    ),
    _gpu(
        "rtx-pro-6000",
        "blackwell",
        (110, 220, 438, 438),
        1792,
        96,
        "NVIDIA RTX PRO 6000 datasheet (Max-Q)",
    ),
    _gpu("mi250", "cdna2", (45.3, None, 362, 362), 3277, 128, "AMD MI250 datasheet", "amd"),
    _gpu(
        "mi300x", "cdna3", (163.4, 653.7, 1307.4, 1307.4), 5300, 192, "AMD MI300X datasheet", "amd"
    ),
    _cpu(8),
)
DEVICES = {device.name: device for device in _TABLE}


def _key(name: str) -> str:
    """Returns a name without case, vendor words and punctuation: `NVIDIA A100-SXM4-80GB`."""
    words = re.sub(r"nvidia|geforce|tesla|amd|instinct|graphics|generation", " ", name.lower())
    return re.sub(r"[^a-z0-9]", "", words)


# As drivers, clouds and tables spell them, without case and punctuation.
_SPELLINGS = {
    "v100": ("v100sxm2", "v100sxm216gb", "v100sxm232gb", "v100pcie16gb", "v100pcie32gb"),
    "t4": (),
    "a100-40gb": ("a100", "a100sxm440gb", "a100pcie40gb", "a100sxm40gb"),
    "a100-80gb": ("a100sxm480gb", "a100pcie80gb", "a100sxm80gb", "a10080g"),
    "a10": ("a10g", "a1024gb"),
    "rtx-3090": ("3090",),
    "rtx-3090-ti": ("3090ti",),
    "l4": (),
    "l40s": ("l40",),
    "rtx-4090": ("4090", "rtx4090d"),
    "h100-pcie": ("h100pcie80gb",),
    "h100": ("h100sxm", "h10080gbhbm3", "h100sxm80gbhbm3700w", "h100sxm580gb", "h10080gb"),
    "h200": ("h200sxm", "h200141gb"),
    "b200": ("b200sxm", "b200180gb"),
    "rtx-5090": ("5090",),
    "rtx-pro-6000": ("rtxpro6000blackwellmaxq", "rtxpro6000blackwellmaxqworkstationedition"),
    "mi250": ("mi250x",),
    "mi300x": (),
    "cpu": (),
}
