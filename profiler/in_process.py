"""A trial within the person's own process, on live objects; afterwards all is as it was.

    trial = profile_here({"model": model, "optimizer": optimizer, "batches": batches}, Config())

`profile` is the usual way: a process of its own has nothing to be put back, cold starts that are
cold, and ends whatever hangs. This one is for what cannot be named and built anew: a model in a
notebook, a job half-way through its training.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from advisor.profiler import compiler_state, process_state
from advisor.profiler.compile_failure import failed_trial
from advisor.profiler.errors import AdvisorError, PlanError, WorkloadError
from advisor.profiler.frames import Ended, Exit
from advisor.profiler.held_state import Held
from advisor.profiler.outcome import trial_of
from advisor.profiler.records import (
    Config,
    Deadlines,
    Measuring,
    Mode,
    Progress,
    Trial,
    TrialKind,
    TrialSpec,
    WorkloadSpec,
)
from advisor.profiler.stopping import Cancelled, Limits
from advisor.profiler.supervised import (
    CallbackRaised,
    Stopped,
    SupervisedMeasurement,
    Supervisor,
)
from advisor.profiler.trial_folder import trial_folder
from advisor.profiler.workload import Workload, device_of, made_by

LiveWorkload = Workload | Mapping[str, object] | Callable[[torch.device], object]

# What the compiler records it records for the process: two trials would read each other's.
_ONE = threading.Lock()
_CUDA_GRAPHS = (Mode.REDUCE_OVERHEAD, Mode.MAX_AUTOTUNE)
_OTHERS_STAY = (
    "causes were not looked for by tracing anew: that drops what else this process has compiled"
)


def profile_here(
    workload: LiveWorkload,
    config: Config | None = None,
    *,
    device: str | None = None,
    also: Sequence[object] = (),
    folder: str | os.PathLike[str] | None = None,
    deadlines: Deadlines | None = None,
    deadline_s: float | None = None,
    measuring: Measuring | None = None,
    cancelled: Cancelled | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Trial:
    """Measures one configuration (None: eager alone) in this process, and puts all back.

    `workload` is a `Workload`, a mapping with its keys, or a function of the device that makes one.
    `batches` must be a list, a DataLoader or a function of the step: what an iterator has given
    cannot be given back. Call it between two steps, with no other thread that trains.

    Put back, bit by bit: weights, buffers, gradients, optimizer state, flags, hooks and attributes
    of the modules; what the functions `loss` and `step` use (schedulers, scalers, containers,
    variables, the attributes of their object); random generators; settings of torch and of its
    compiler, environment, folder, paths, signals, warnings, loggers. Further objects with a state
    of their own, such as a metric or a class that draws augmentations, go into `also`. What code
    of the person's own sends away, to a file or a tracker, is sent. Peak memory as the system and
    the CUDA allocator count it starts anew, and CUDA holds no more than before.

    Compiled code of ours is dropped. That of others stays, except for the `forward` of the classes
    of this model's modules, which compiles again when it is next called.

    It stops between steps: once `deadlines` of a phase or `deadline_s` in all have passed
    (`TIMED_OUT`), or `cancelled` is set or returns true (`CUT_OFF`). What `on_progress` raises
    ends it and comes out here, as does Ctrl-C. `on_progress` is called in this thread, and in
    another while a compile runs. The cold start is as cold as this process still is: `profile`
    measures a real one. Whatever else goes wrong is the trial's status, except that
    `WorkloadError` is raised when the workload cannot be used at all, and `PlanError` when it
    cannot be measured here.
    """
    if not _ONE.acquire(blocking=False):
        raise PlanError(
            "profile_here is running in this process already",
            "the compiler keeps one record for a process",
            "wait for it, or use profile, which starts a process of its own",
        )
    try:
        limits = Limits(deadline_s, cancelled)
        _refuse_ranks()
        with _put_back() as stack:
            stack.enter_context(process_state.kept())
            made = made_by(_maker(workload), "the workload", _device_of(workload, device))
            place = stack.enter_context(trial_folder(folder))
            spec = TrialSpec(
                trial_id=uuid.uuid4().hex,
                kind=TrialKind.EAGER if config is None else TrialKind.COMPILE,
                workload=_named(made),
                folder=str(place),
                config=config,
                deadlines=deadlines or Deadlines(),
                measuring=measuring or Measuring(),
                budget_s=limits.left_s,
            )
            return _measured(stack, spec, made, also, Supervisor(spec, on_progress, limits))
    finally:
        _ONE.release()


@contextlib.contextmanager
def _put_back() -> Iterator[contextlib.ExitStack]:
    """Gives a stack of what is to be put back; Ctrl-C waits while that is done."""
    stack = contextlib.ExitStack()
    with process_state.Interrupts() as interrupts:
        try:
            try:
                yield stack
            except BaseException as error:
                interrupts.hold()
                _release(error)
                raise
            finally:
                interrupts.hold()
                stack.close()
        finally:
            # Once more, should Ctrl-C have come in just before it could be held.
            interrupts.hold()
            stack.close()
            gc.collect()
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                torch.cuda.empty_cache()


def _measured(
    stack: contextlib.ExitStack,
    spec: TrialSpec,
    made: Workload,
    also: Sequence[object],
    supervisor: Supervisor,
) -> Trial:
    """Returns the trial; what is put back afterwards is put on the stack before it is changed."""
    _refuse(made)
    roots = (made.model, made.optimizer, made.loss, made.step, *also)
    # The data may be large, and is only read: each step gets a copy of its batch.
    held = Held(*roots, left=(made.batches,))
    stack.callback(held.restore)
    stack.callback(_keep_loader(made.batches))
    stack.callback(_forget_modules, Path(spec.folder))
    others = stack.enter_context(compiler_state.kept(made.model))
    _refuse_graphs(spec, others)
    if torch.is_inference_mode_enabled():
        stack.enter_context(torch.inference_mode(False))
    torch.set_grad_enabled(True)
    for name, variable in (("inductor", "TORCHINDUCTOR_CACHE_DIR"), ("triton", "TRITON_CACHE_DIR")):
        os.environ[variable] = str(Path(spec.folder, name))
    if spec.workload.device.startswith("cuda"):
        # What is still running on the device must not write over what is put back.
        stack.callback(torch.cuda.synchronize, torch.device(spec.workload.device))
    warnings = compiler_state.missing()
    if others and spec.config is not None:
        spec = replace(spec, measuring=replace(spec.measuring, max_diagnose_s=0.0))
        warnings += (_OTHERS_STAY,)
    trial = _run(spec, made, supervisor)
    return replace(trial, warnings=trial.warnings + warnings)


def _run(spec: TrialSpec, made: Workload, supervisor: Supervisor) -> Trial:
    begun = time.perf_counter()
    raised: CallbackRaised | None = None
    try:
        return SupervisedMeasurement(spec, supervisor, made).run()
    except Stopped as stopped:
        wall_s = time.perf_counter() - begun
        end = Exit(ended=stopped.reason, phase=supervisor.phase, wall_s=wall_s)
        ended = Ended(trial_id=spec.trial_id, exit=end, trial=supervisor.measured)
        return trial_of(spec, ended)
    except CallbackRaised as carrier:
        raised = carrier
    except AdvisorError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the person's code may raise anything
        return failed_trial(spec, supervisor.phase, error)
    raise raised.error


def _maker(workload: LiveWorkload) -> Callable[[torch.device], object]:
    if isinstance(workload, torch.nn.Module):
        raise WorkloadError(
            "the workload is a model",
            "its batches are needed, too",
            "give a mapping with the keys model, batches, optimizer and loss",
        )
    if isinstance(workload, str | WorkloadSpec):
        raise WorkloadError(
            "the workload is named, not given",
            "profile_here takes live objects",
            "use profile, which builds it in a process of its own",
        )
    if isinstance(workload, Workload | Mapping) or not callable(workload):
        return lambda _: workload
    return workload


def _device_of(workload: LiveWorkload, name: str | None) -> torch.device:
    """Returns the device that a function is to build on, or on which a live model is."""
    if name is not None:
        return device_of(name)
    model = workload.get("model") if isinstance(workload, Mapping) else None
    model = workload.model if isinstance(workload, Workload) else model
    if isinstance(model, torch.nn.Module):
        for parameter in model.parameters():
            return parameter.device
    return device_of("auto")


def _named(made: Workload) -> WorkloadSpec:
    device = next((p.device for p in made.model.parameters()), torch.device("cpu"))
    name = f"{type(made.model).__qualname__} in this process"
    return WorkloadSpec(target=name, cwd=str(Path.cwd()), device=str(device))


def _refuse_ranks() -> None:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        ranks = distributed.get_world_size()
        if ranks > 1:
            raise PlanError(
                f"this is one of {ranks} ranks",
                "each would stop measuring at another step, and wait for the others for ever",
                "use AutoCompile in the training loop, or profile one rank's workload",
            )


def _refuse(made: Workload) -> None:
    """Raises what says why a workload cannot be put back as it is."""
    parts = [*made.model.modules(), made.loss, made.step]
    for part in filter(compiler_state.is_compiled, parts):
        what = "model" if isinstance(part, torch.nn.Module) else "loss or step"
        raise WorkloadError(
            f"the {what} is compiled already",
            "nothing can be compared with it",
            f"give the {what} as it was before torch.compile",
        )
    if any(map(is_lazy, made.model.parameters())):
        raise WorkloadError(
            "the model has lazy parameters that were never used",
            "they cannot be made as if they had not been",
            "call it once with a batch before",
        )
    if isinstance(made.batches, Iterator):
        raise WorkloadError(
            "batches is an iterator",
            "what it has given cannot be given again to the training",
            "give a list of batches, a DataLoader or a function of the step",
        )
    if isinstance(made.batches, DataLoader) and made.batches._iterator is not None:
        raise WorkloadError(
            "batches is a DataLoader whose persistent workers are in use",
            "they can go through the data once at a time",
            "give a DataLoader of its own, or a list of batches",
        )


def _refuse_graphs(spec: TrialSpec, others: bool) -> None:
    cuda, config = spec.workload.device.startswith("cuda"), spec.config
    if others and cuda and config is not None and config.mode in _CUDA_GRAPHS:
        raise PlanError(
            f"mode {config.mode.value} cannot be measured here",
            "this process has compiled other code, which shares the memory of CUDA graphs",
            "use profile, which starts a process of its own",
        )


def _keep_loader(batches: object) -> Callable[[], None]:
    """Keeps the generators of a DataLoader; returns what puts them back and ends its workers."""
    if not isinstance(batches, DataLoader):
        return lambda: None
    sampler = batches.batch_sampler
    holders = (batches, batches.sampler, sampler, getattr(sampler, "sampler", None))
    held = Held(*(getattr(holder, "generator", None) for holder in holders))

    def restore() -> None:
        held.restore()
        batches._iterator = None

    return restore


def _forget_modules(folder: Path) -> None:
    """Forgets modules whose files were made in the trial's folder."""
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(f"{folder}{os.sep}"):
            del sys.modules[name]


def _release(error: BaseException) -> None:
    """Has the frames of an error let go of what they hold: a model's memory, workers."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        one = waiting.pop()
        if id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            waiting += [more for more in (one.__cause__, one.__context__) if more is not None]
