"""What is worth mending in the training job itself, whether it is compiled or not.

Read from the eager trial alone: nothing is hinted that was not measured there. Gains are estimates
of Amdahl's law (Amdahl, AFIPS 1967) from the measured share: at least nothing, at most the share
gone altogether, and in the middle what `_REMOVED` says that the mend usually takes of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from advisor.profiler.records import (
    Dynamic,
    Fix,
    FixKind,
    Interval,
    RecompileCause,
    StepProfile,
    Trial,
)
from advisor.profiler.units import count, duration

# Shares of the step (of the loop, for the wait) from which on a mend is worth a person's time: with
# the usual part of them gone (`_REMOVED`), a step gains about 10 %, more than steps scatter by.
_LEAST_WAIT = 0.10
_LEAST_OPTIMIZER = 0.15
_LEAST_FLOAT32 = 0.20
# Buckets need the data set to be sorted, and change the order of the samples: a larger gain.
_LEAST_PADDING = 0.20
# Some gap is left between the kernels of any eager step.
_LEAST_IDLE = 0.25
# A larger batch is another training, with a learning rate of its own: only where calls dominate.
_LEAST_DISPATCH = 0.50
# The part of the share that a mend usually takes away; assumptions, except where a source is named.
_REMOVED = {
    # Workers load while the step runs; what they hand over still has to be fetched.
    "DATA_WAIT": 0.9,
    # Larger batches or CUDA graphs close the gaps between launches, not those of Python's own work.
    "DEVICE_IDLE": 0.5,
    # A product of 10,240 x 10,240 took 0.016 s in TF32 and 0.11 s in float32 on an A100 (PyTorch,
    # "CUDA semantics"); smaller ones gain less.
    "TF32_OFF": 0.6,
    # Twice the numbers for each instruction and half the bytes, less the casts around them.
    "FLOAT32": 0.5,
    # A batch of twice the size has half as many calls for a sample.
    "SMALL_BATCH": 0.5,
    # One call for all parameters leaves their arithmetic and memory traffic.
    "OPTIMIZER_LOOP": 0.5,
    # Sorted into buckets, a batch is still padded to its own longest sample.
    "PADDING": 0.8,
}
# Optimizers of torch that have one kernel for all parameters (torch/optim, `fused` parameter), and
# those that have lists of tensors only.
_FUSED = frozenset({"Adam", "AdamW", "SGD", "Adagrad"})
_FOREACH = frozenset(
    {"Adadelta", "Adafactor", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"}
)
_ROW_CAUSES = (RecompileCause.BATCH_SIZE, RecompileCause.SHAPE)
_EVALUATION_CAUSES = (RecompileCause.TRAIN_EVAL, RecompileCause.GRAD_MODE)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Eager:
    """The eager trial's figures, for those that read them below."""

    profile: StepProfile
    step_s: float
    wait_s: float
    optimizer: str
    device: str

    def fix(self, cause: str, share: float, what: str) -> Fix:
        """Returns a mend of `share` of the step; its gain is that of the loop, the wait included.

        No step gets faster by more than its own part of the loop.
        """
        of_loop = share * self.step_s / (self.step_s + self.wait_s)
        return _fix(cause, what, _gain(of_loop, _REMOVED[cause]))

    def arithmetic(self, share: float) -> float:
        """Returns what of a share is arithmetic: calling an operator is as dear in any dtype."""
        return share * (1 - (self.profile.dispatch_share or 0.0))


def hints(
    eager: Trial, *, plan_has_evaluation: bool, best_compiled: Trial | None
) -> tuple[Fix, ...]:
    """Returns the mends of the job that matter, those with the largest usual gain first.

    `eager` is the trial that ran eager only, `best_compiled` the compiled trial that the advice
    rests on. Those that cost a compile instead of a part of each step have no gain, come last, and
    say the seconds where a trial measured them.
    """
    found = [_data_wait(eager)]
    figures = _figures(eager)
    if figures is not None:
        found += [hint(figures) for hint in _OF_THE_STEP]
    found.append(_last_batch(eager, best_compiled))
    if plan_has_evaluation:
        found.append(_validation_graph(best_compiled))
    fixes = [fix for fix in found if fix is not None]
    return tuple(sorted(fixes, key=lambda fix: -(fix.gain.median if fix.gain else 0.0)))


def _figures(eager: Trial) -> _Eager | None:
    if eager.step_profile is None or eager.eager_step_s is None or eager.eager_step_s.median <= 0:
        return None
    return _Eager(
        profile=eager.step_profile,
        step_s=eager.eager_step_s.median,
        wait_s=_wait_s(eager),
        optimizer=eager.workload.optimizer if eager.workload else "",
        device=eager.environment.device if eager.environment else "",
    )


def _wait_s(eager: Trial) -> float:
    return eager.eager.data_wait_s or 0.0 if eager.eager is not None else 0.0


def _gain(share: float, removed: float) -> Interval:
    """Returns the speedup from taking none, the usual part and all of a share away."""
    # Nothing makes a step free: a share that seems to be all of it is measured to a few percent.
    share = min(share, 0.95)
    return Interval(median=1 / (1 - share * removed), low=1.0, high=1 / (1 - share))


def _fix(cause: str, what: str, gain: Interval | None, lost_s: float | None = None) -> Fix:
    return Fix(kind=FixKind.JOB, cause=cause, what=what, gain=gain, lost_s=lost_s)


def _data_wait(eager: Trial) -> Fix | None:
    wait_s = _wait_s(eager)
    if eager.eager is None or wait_s <= 0:
        return None
    loop_s = eager.eager.step_s.median + wait_s
    share = wait_s / loop_s
    if share < _LEAST_WAIT:
        return None
    on_gpu = eager.environment is not None and eager.environment.device.startswith("cuda")
    pinned = ", pin_memory=True" if on_gpu else ""
    what = (
        f"the job waits for its input {share:.0%} of the time ({duration(wait_s)} for each step of "
        f"{duration(eager.eager.step_s.median)}), which no compiler makes faster: load with "
        f"DataLoader(num_workers=4, persistent_workers=True{pinned}), or prepare the samples once "
        "before training"
    )
    return _fix("DATA_WAIT", what, _gain(share, _REMOVED["DATA_WAIT"]))


def _device_idle(eager: _Eager) -> Fix | None:
    busy = eager.profile.device_busy_share
    if busy is None or 1 - busy < _LEAST_IDLE:
        return None
    what = (
        f"the GPU idles {1 - busy:.0%} of the step between launches: take .item(), print and other "
        "waits for the device out of the step, make the batch larger, or replay it as one CUDA "
        'graph with torch.compile(mode="reduce-overhead")'
    )
    return eager.fix("DEVICE_IDLE", 1 - busy, what)


def _tf32_off(eager: _Eager) -> Fix | None:
    share = eager.profile.float32_matmul_share
    if not eager.profile.tf32_off or share is None or eager.arithmetic(share) < _LEAST_FLOAT32:
        return None
    what = (
        f"matrix products in full float32 take {share:.0%} of the step and this GPU has TF32: set "
        'torch.set_float32_matmul_precision("high") at the start'
    )
    return eager.fix("TF32_OFF", eager.arithmetic(share), what)


def _float32(eager: _Eager) -> Fix | None:
    share = eager.profile.float32_matmul_share
    native = eager.profile.bfloat16_native
    if not native or share is None or eager.arithmetic(share) < _LEAST_FLOAT32:
        return None
    kind = "cuda" if eager.device.startswith("cuda") else "cpu"
    what = (
        f"matrix products in float32 take {share:.0%} of the step and this device has bfloat16: "
        f'run model and loss under torch.autocast("{kind}", torch.bfloat16), and check that the '
        "loss still falls as before"
    )
    return eager.fix("FLOAT32", eager.arithmetic(share), what)


def _small_batch(eager: _Eager) -> Fix | None:
    share = eager.profile.dispatch_share
    if share is None or share < _LEAST_DISPATCH:
        return None
    rows = eager.profile.batch_size
    now = f" (now {count(rows)} {'row' if rows == 1 else 'rows'})" if rows is not None else ""
    what = (
        f"calling {count(eager.profile.operator_calls)} operators takes {share:.0%} of the step, "
        f"whatever their size: make the batch larger{now}, in place of gradient accumulation where "
        "there is any; the gain is in samples per second"
    )
    return eager.fix("SMALL_BATCH", share, what)


def _optimizer_loop(eager: _Eager) -> Fix | None:
    share = eager.profile.optimizer_share
    if not eager.profile.optimizer_loops or share is None or share < _LEAST_OPTIMIZER:
        return None
    name = eager.optimizer
    if name in _FUSED:
        mend = f"{name}(..., fused=True)"
    elif name in _FOREACH:
        if not eager.device.startswith("cuda"):
            # There foreach is a loop as well (aten/src/ATen/native/ForeachOpsKernels.cpp).
            return None
        mend = f"{name}(..., foreach=True)"
    else:
        mend = "an optimizer that steps them together, such as torch.optim.AdamW(..., fused=True)"
    what = (
        f"the optimizer takes {share:.0%} of the step because it steps parameter by parameter: "
        f"use {mend}"
    )
    return eager.fix("OPTIMIZER_LOOP", share, what)


def _padding(eager: _Eager) -> Fix | None:
    profile = eager.profile
    share = profile.padding_share
    if share is None or share < _LEAST_PADDING:
        return None
    computed = 1.0
    if profile.forward_share is not None and profile.backward_share is not None:
        # The optimizer does not see tokens.
        computed = min(1.0, profile.forward_share + profile.backward_share)
    what = (
        f"{share:.0%} of the tokens are padding, in forward and backward that take {computed:.0%} "
        "of the step: sort the samples by length into batches of like length (length buckets), or "
        "pack several into one row"
    )
    return eager.fix("PADDING", share * computed, what)


def _last_batch(eager: Trial, best_compiled: Trial | None) -> Fix | None:
    profile = eager.step_profile
    if profile is None or profile.batch_size is None or profile.last_batch_size is None:
        return None
    config = best_compiled.config if best_compiled is not None else None
    if config is not None and config.dynamic is Dynamic.TRUE:
        return None  # one graph for every size
    batches = eager.workload.batches_per_epoch if eager.workload is not None else None
    of_steps = f" ({1 / batches:.1%} of the steps)" if batches else ""
    lost_s = _lost_s(best_compiled, _ROW_CAUSES)
    cost = f", which took {duration(lost_s)} in the trial" if lost_s else ""
    what = (
        f"the last batch of an epoch has {count(profile.last_batch_size)} rows instead of "
        f"{count(profile.batch_size)}{of_steps}: compiled, it costs another graph{cost}: set "
        "drop_last=True in the DataLoader"
    )
    return _fix("LAST_BATCH", what, None, lost_s)


def _validation_graph(best_compiled: Trial | None) -> Fix | None:
    if best_compiled is None or best_compiled.cold_start_s is None:
        return None
    lost_s = _lost_s(best_compiled, _EVALUATION_CAUSES)
    cost = (
        f"took {duration(lost_s)} in the trial"
        if lost_s
        else f"takes up to {duration(best_compiled.cold_start_s)}, the cold start of training"
    )
    what = (
        "validation runs under eval() and no_grad(), for which the compiler makes a second graph "
        f"at the first one; it {cost}: compile the evaluation too if it is long, at the same batch "
        'size, else evaluate eager with torch.compiler.set_stance("force_eager")'
    )
    return _fix("VALIDATION_GRAPH", what, None, lost_s)


def _lost_s(trial: Trial | None, causes: tuple[RecompileCause, ...]) -> float | None:
    """Returns the seconds of a trial's recompiles of some causes, None where there were none."""
    if trial is None:
        return None
    return sum(met.lost_s for met in trial.recompiles if met.cause in causes) or None


_OF_THE_STEP: tuple[Callable[[_Eager], Fix | None], ...] = (
    _device_idle,
    _tf32_off,
    _float32,
    _small_batch,
    _optimizer_loop,
    _padding,
)
