"""What a configuration could bring at best, from published figures and from this workload's trials.

Used to *exclude*: a configuration whose best case cannot pay is not measured. So speedups are upper
ends, compile times lower ends; `usual_compile_s` is the middle, and only serves to say how long a
trial will probably take. Sources of the rows:

A   published_speedups.csv, PyTorch's A100 training dashboard (rows of davidberard98's
    dynamo_benchmark_results, Dec 2022 to Apr 2023, flagged ones left out): backend inductor
    without CUDA graphs, 1,068 rows,
    speedup p99 2.28, compile p05 7.7 s, median 41.5 s; with CUDA graphs, 1,012 rows, speedup p99
    3.05, compile p05 7.3 s, median 43.4 s.
B   same dashboard, 1,011 pairs of one model, precision and day with against without CUDA graphs:
    speedup ratio p99 2.42, compile ratio p01 0.94.
C   huggingface/accelerate benchmarks/torch.compile, 8 pairs of whole model against regional
    (forward only): speedup ratio at most 1.55, compile 3.5 to 9.4 times longer; regional alone
    1.95 s at least, 2.7 s at the median, which with backward is 5 s (economics: 0.55 is forward's).
D   measured here, torch 2.13, 2 cores: whole model 43 s, regional 24 s (ratio 1.8), dynamic=True
    0.56 of automatic; a three-layer MLP 15 s. A third of that is allowed for faster cores.
E   no table of CPU training is public; the gains seen here are up to 1.4. The bound is the A100's
    with CUDA graphs (A), as launch overhead, which those remove, is a CPU cost too.
F   max-autotune has no public training table. Against a mode without it: seed thread, BERT-large on
    A100, 1.39 against 1.18 (ratio 1.18, the largest of three pairs). Compile of first calls 104 s
    and 821 s (ROCm blogs, MI210, inference); it does all that the mode without it does. Regional
    is taken to compile in the same share of it as in mode default, on the CPU as long as default.
G   on the CPU, max-autotune against default: bench/regret.py, 12 tiny presets in training, 2 cores,
    torch 2.13: ratio 0.97 to 1.08 (ResNet-50; convolutions), so 1.12 with the spread from process
    to process. Ray RLlib's torch_compile benchmark, 3 pairs (inference): 0.998 to 1.003.
    Inductor's C++ matrix templates want constant weights (torch/_inductor/utils.py,
    use_cpp_gemm_template, `require_constant_mat2`), and those of a training are not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from advisor.profiler.records import Config, Dynamic, Mode, Scope

# Share of its cold start that a warm start takes at best; 3.4 s of 43 s was measured (design §9).
WARM_SHARE = 0.05
# The same at a usual warm start.
USUAL_WARM_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class BestCase:
    """The largest speedup, the shortest and the usual compile time, and where they come from."""

    speedup: float
    compile_s: float
    usual_compile_s: float
    source: str


@dataclass(frozen=True, slots=True)
class Seen:
    """What a trial of this workload showed: its speedup at the upper end, its cold start."""

    config: Config
    speedup_high: float
    cold_start_s: float
    # False where the measured steps ran eager after a recompile limit: no bound for `dynamic=True`.
    settled: bool = True


@dataclass(frozen=True, slots=True)
class _Bound:
    """How far another configuration can be from a measured one, as factors."""

    speedup: float
    compile: float


_PUBLISHED = "published training runs"
_HERE = "published and own measurements"
_OWN = "bounded by this workload's own trials"
_TABLE: dict[tuple[str, Scope, Mode], BestCase] = {
    ("cuda", Scope.REGIONAL, Mode.DEFAULT): BestCase(2.28, 1.95, 5.0, _PUBLISHED),  # A, C
    ("cuda", Scope.REGIONAL, Mode.REDUCE_OVERHEAD): BestCase(3.05, 1.95, 5.0, _PUBLISHED),  # A, C
    ("cuda", Scope.REGIONAL, Mode.MAX_AUTOTUNE_NO_CUDAGRAPHS): BestCase(
        2.28 * 1.18, 1.95, 12.5, _PUBLISHED
    ),  # A, C, F
    ("cuda", Scope.REGIONAL, Mode.MAX_AUTOTUNE): BestCase(3.05 * 1.18, 1.95, 12.5, _PUBLISHED),
    ("cuda", Scope.MODEL, Mode.DEFAULT): BestCase(2.28, 7.7, 41.5, _PUBLISHED),  # A
    ("cuda", Scope.MODEL, Mode.REDUCE_OVERHEAD): BestCase(3.05, 7.3, 43.4, _PUBLISHED),  # A
    ("cuda", Scope.MODEL, Mode.MAX_AUTOTUNE_NO_CUDAGRAPHS): BestCase(
        2.28 * 1.18, 7.7, 104.0, _PUBLISHED
    ),  # A, F
    ("cuda", Scope.MODEL, Mode.MAX_AUTOTUNE): BestCase(3.05 * 1.18, 7.3, 104.0, _PUBLISHED),  # A, F
    ("cpu", Scope.REGIONAL, Mode.DEFAULT): BestCase(3.05, 5.0, 24.0, _HERE),  # D, E
    ("cpu", Scope.REGIONAL, Mode.MAX_AUTOTUNE_NO_CUDAGRAPHS): BestCase(3.05, 5.0, 24.0, _HERE),
    ("cpu", Scope.MODEL, Mode.DEFAULT): BestCase(3.05, 5.0, 43.0, _HERE),  # D, E
    ("cpu", Scope.MODEL, Mode.MAX_AUTOTUNE_NO_CUDAGRAPHS): BestCase(3.05, 5.0, 43.0, _HERE),
}
# Devices and modes without a row of their own: the widest bounds of all rows, so that nothing is
# excluded for lack of knowledge.
_WIDEST = BestCase(
    max(row.speedup for row in _TABLE.values()),
    min(row.compile_s for row in _TABLE.values()),
    max(row.usual_compile_s for row in _TABLE.values()),
    _HERE,
)

# From the measured scope to the other, in one mode: sources C and D.
_SCOPES = {
    (Scope.REGIONAL, Scope.MODEL): _Bound(1.55, 1.5),
    (Scope.MODEL, Scope.REGIONAL): _Bound(1.03, 0.1),
}
# From a measured mode to a later one, in one scope: sources B and F.
_MODES = {
    (Mode.DEFAULT, Mode.REDUCE_OVERHEAD): _Bound(2.42, 0.94),
    (Mode.DEFAULT, Mode.MAX_AUTOTUNE_NO_CUDAGRAPHS): _Bound(1.18, 0.94),
    (Mode.DEFAULT, Mode.MAX_AUTOTUNE): _Bound(2.42 * 1.18, 0.94),
    (Mode.REDUCE_OVERHEAD, Mode.MAX_AUTOTUNE): _Bound(1.18, 0.94),
    (Mode.MAX_AUTOTUNE_NO_CUDAGRAPHS, Mode.MAX_AUTOTUNE): _Bound(2.42, 0.94),
}
# What a device's own figures say instead: source G.
_MODES_OF_DEVICE = {
    ("cpu", Mode.DEFAULT, Mode.MAX_AUTOTUNE_NO_CUDAGRAPHS): _Bound(1.12, 0.94),
}
# One compile for all shapes against one for each: 0.56 measured (D). No table bounds its speedup.
_DYNAMIC = _Bound(math.inf, 0.5)
_SAME = _Bound(1.0, 1.0)


def best_case(config: Config, device: str, seen: tuple[Seen, ...] = ()) -> BestCase:
    """Returns the best case of `config` on `device` ("cpu", "cuda:0", ...).

    `seen` are this workload's own trials; each narrows the published bounds where it differs from
    `config` in scope, mode or `dynamic` alone.
    """
    kind = device.partition(":")[0]
    row = _TABLE.get((kind, config.scope, config.mode), _WIDEST)
    if config.backend != "inductor":
        row = _WIDEST
    for trial in seen:
        bound = _bound(trial, config, kind)
        if bound is not None:
            row = _narrowed(row, trial, bound)
    return row


def _narrowed(row: BestCase, seen: Seen, bound: _Bound) -> BestCase:
    speedup = min(row.speedup, seen.speedup_high * bound.speedup)
    compile_s = max(row.compile_s, seen.cold_start_s * bound.compile)
    if (speedup, compile_s) == (row.speedup, row.compile_s):
        return row
    return BestCase(speedup, compile_s, max(row.usual_compile_s, compile_s), _OWN)


def _bound(seen: Seen, wanted: Config, device: str) -> _Bound | None:
    """Returns what `seen` says of `wanted`, or None when they differ in more than one thing."""
    known = seen.config
    if (known.fullgraph, known.backend, known.options) != (
        wanted.fullgraph,
        wanted.backend,
        wanted.options,
    ):
        return None
    differences = [
        _SCOPES.get((known.scope, wanted.scope)) if known.scope != wanted.scope else _SAME,
        _mode(known.mode, wanted.mode, device),
        _dynamic(seen, wanted),
    ]
    if None in differences or sum(found is not _SAME for found in differences) != 1:
        return None
    return next(found for found in differences if found is not _SAME)


def _mode(known: Mode, wanted: Mode, device: str) -> _Bound | None:
    if known is wanted:
        return _SAME
    return _MODES_OF_DEVICE.get((device, known, wanted), _MODES.get((known, wanted)))


def _dynamic(seen: Seen, wanted: Config) -> _Bound | None:
    if seen.config.dynamic is wanted.dynamic:
        return _SAME
    known = (seen.config.dynamic, wanted.dynamic) == (Dynamic.AUTO, Dynamic.TRUE)
    return _DYNAMIC if known and seen.settled else None
