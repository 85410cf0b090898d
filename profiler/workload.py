"""The person's training job: found, built, checked; every mistake said in one sentence."""

from __future__ import annotations

import copy
import difflib
import importlib
import importlib.util
import inspect
import random
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from advisor.profiler.errors import AdvisorError, PlanError, WorkloadError
from advisor.profiler.records import WorkloadSpec

Batch = Any
_OWN_FOLDERS = (str(Path(__file__).resolve().parent), str(Path(__file__).parent))


@dataclass(kw_only=True)
class Workload:
    """A training job, as a workload function returns it (or as a mapping with these keys).

    Only `model` and `batches` are required. `batches` is a function of the step, or an iterable
    of batches that is restarted when it ends. `loss(model, batch)` returns a scalar tensor.
    `step(model, batch, optimizer)` replaces the whole optimizer step (accumulation, mixed
    precision, clipping) and returns the loss. `lengths` are the lengths of the data set's samples.
    """

    model: torch.nn.Module
    batches: Callable[[int], Batch] | Iterable[Batch]
    loss: Callable[[torch.nn.Module, Batch], torch.Tensor] | None = None
    optimizer: torch.optim.Optimizer | None = None
    step: Callable[[torch.nn.Module, Batch, torch.optim.Optimizer], Any] | None = None
    lengths: Any = None


_KEYS = tuple(field.name for field in fields(Workload))


def device_of(name: str) -> torch.device:
    """Returns the device that a name stands for; `auto` is the first GPU, else the CPU.

    Raises `PlanError` for a device that this machine or this torch does not have.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda:0" if gpus else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise PlanError(
            f"device {name!r} is unknown", mend="auto, cpu, cuda or cuda:N expected"
        ) from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise PlanError(
            f"device {name!r} is not supported", mend="auto, cpu, cuda or cuda:N expected"
        )
    index = device.index or 0
    if index >= gpus:
        why = f"torch {torch.__version__} sees {gpus} CUDA device{'' if gpus == 1 else 's'} here"
        raise PlanError(f"device {name!r} is not there", why, "use --device cpu")
    return torch.device("cuda", index)


def seed_everything(seed: int) -> None:
    """Seeds Python's, NumPy's and torch's generators on all devices."""
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def load(spec: WorkloadSpec) -> Callable[..., object]:
    """Returns the function that builds the workload, from a file, a module or a preset.

    Raises `WorkloadError` when there is no such file, module, function or preset, or when
    importing it raises (with the person's own traceback).
    """
    if spec.target.startswith("hf:"):
        from advisor.profiler import presets

        return lambda device: presets.build(spec, device)
    place, separator, name = spec.target.rpartition(":")
    if not separator or not place or not name:
        raise WorkloadError(
            f"{spec.target!r} names no workload",
            mend="path/to/file.py:function, package.module:function or hf:NAME expected",
        )
    path = Path(spec.cwd, place)
    if place.endswith(".py") or path.exists():
        module = _module_of_file(path, place)
    else:
        sys.path.insert(0, spec.cwd)
        module = _run_user_code(
            f"{place} cannot be imported", lambda: importlib.import_module(place)
        )
    return _function_of(module, place, name)


def _module_of_file(path: Path, shown: str) -> ModuleType:
    if not path.is_file():
        why = "it is not a file" if path.exists() else "there is no such file"
        raise WorkloadError(f"{shown} cannot be read", why, "check the path before the colon")
    path = path.resolve()
    # What `python file.py` would see: the file's own folder first, and itself as argv[0].
    sys.path.insert(0, str(path.parent))
    sys.argv = [str(path)]
    name = path.stem if path.stem not in sys.modules else f"workload_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise WorkloadError(f"{shown} cannot be read", "it is not a Python file", "name a .py file")
    module = importlib.util.module_from_spec(spec)
    # Registered first: dataclasses and pickling look a class's module up there.
    sys.modules[name] = module
    loader = spec.loader
    _run_user_code(f"{shown} cannot be imported", lambda: loader.exec_module(module))
    return module


def _function_of(module: ModuleType, place: str, name: str) -> Callable[..., object]:
    function = getattr(module, name, None)
    if function is None:
        known = [
            other
            for other, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        close = difflib.get_close_matches(name, known, n=1)
        listed = ", ".join(known[:8]) or "none"
        mend = f"did you mean {close[0]}?" if close else f"functions there: {listed}"
        raise WorkloadError(f"{place} has no function {name!r}", mend=mend)
    if not callable(function):
        raise WorkloadError(f"{name} in {place} is a {type(function).__name__}, not a function")
    try:
        inspect.signature(function).bind(torch.device("cpu"), **dict.fromkeys(hooks_of(function)))
    except TypeError as error:
        raise WorkloadError(
            f"{name} in {place} cannot be called with the device as its only argument",
            str(error),
            f"define it as `def {name}(device):`",
        ) from error
    except ValueError:
        pass  # a callable without a signature: calling it will tell
    return function  # type: ignore[no-any-return]


def build(
    spec: WorkloadSpec,
    device: torch.device,
    hooks: Callable[[Callable[..., object]], Mapping[str, object]] | None = None,
) -> Workload:
    """Returns the workload on `device`, checked as far as it can be without a step.

    `hooks` is given the workload's function and returns what it is called with beside the device;
    absent, a function that takes part in spreading its model has nothing to spread it over. Raises
    `WorkloadError` naming what is wrong.
    """
    function = load(spec)
    name = spec.target.rpartition(":")[2]
    what = f"{name}({device})" if not spec.target.startswith("hf:") else spec.target
    given = alone(function) if hooks is None else hooks(function)
    return made_by(lambda there: function(there, **given), what, device)


def hooks_of(make: Callable[..., object]) -> tuple[str, ...]:
    """Returns which of `mesh` and `wrap` a workload's function takes: it knows of several ranks.

    `mesh` is the mesh of all ranks (None in a process that trains alone), `wrap(model)` returns
    the model spread over them.
    """
    try:
        parameters = inspect.signature(make).parameters
    except (TypeError, ValueError):
        return ()
    return tuple(name for name in ("mesh", "wrap") if name in parameters)


def alone(make: Callable[..., object]) -> Mapping[str, object]:
    """Returns what a function that knows of several ranks is given in a process of its own."""
    nothing: Mapping[str, object] = {"mesh": None, "wrap": lambda model: model}
    return {name: nothing[name] for name in hooks_of(make)}


def made_by(make: Callable[[torch.device], object], what: str, device: torch.device) -> Workload:
    """Returns the workload that a function makes on `device`, checked; `what` names the call.

    Raises `WorkloadError` naming what is wrong.
    """
    made = _run_user_code(f"{what} raised", lambda: make(device))
    # A copy: what is filled in is not put into the person's own.
    workload = copy.copy(_from_keys(made, what))
    _check_model(workload.model, device)
    if isinstance(workload.batches, Mapping | torch.Tensor | str):
        raise WorkloadError(
            f"batches is a {type(workload.batches).__name__}",
            "it must give one batch for each step",
            "return a function of the step, a DataLoader or a list of batches",
        )
    if not callable(workload.batches) and not isinstance(workload.batches, Iterable):
        raise WorkloadError(
            f"batches is a {type(workload.batches).__name__}",
            "it can be neither called nor iterated",
            "return a function of the step, a DataLoader or a list of batches",
        )
    for key in ("loss", "step"):
        value = getattr(workload, key)
        if value is not None and not callable(value):
            raise WorkloadError(f"{key} is a {type(value).__name__}, not a function")
    if workload.optimizer is None:
        workload.optimizer = torch.optim.AdamW(workload.model.parameters(), lr=1e-4)
    elif not hasattr(workload.optimizer, "step") or not hasattr(workload.optimizer, "zero_grad"):
        raise WorkloadError(
            f"optimizer is a {type(workload.optimizer).__name__}, not a torch optimizer"
        )
    return workload


def _from_keys(made: object, what: str) -> Workload:
    if isinstance(made, Workload):
        return made
    if isinstance(made, Mapping):
        values = {str(key): value for key, value in made.items()}
    elif all(hasattr(made, key) for key in ("model", "batches")):
        values = {key: getattr(made, key) for key in _KEYS if hasattr(made, key)}
    else:
        raise WorkloadError(
            f"{what} returned a {type(made).__name__}",
            "a Workload or a mapping with the keys model and batches is needed",
        )
    for key in ("model", "batches"):
        if values.get(key) is None:
            raise WorkloadError(
                f"the workload has no {key!r}",
                f"{what} returned the keys {', '.join(map(repr, values)) or 'none'}",
                f"add {key!r} to what it returns",
            )
    unknown = [key for key in values if key not in _KEYS]
    for key in unknown:
        # Only a likely slip is refused: what people keep beside it for themselves is theirs.
        close = difflib.get_close_matches(key, _KEYS, n=1, cutoff=0.8)
        if close and close[0] not in values:
            raise WorkloadError(
                f"the workload has the unknown key {key!r}", mend=f"did you mean {close[0]!r}?"
            )
    return Workload(**{key: values[key] for key in _KEYS if key in values})


def _check_model(model: object, device: torch.device) -> None:
    if not isinstance(model, torch.nn.Module):
        raise WorkloadError(f"model is a {type(model).__name__}, not a torch.nn.Module")
    for name, parameter in model.named_parameters():
        there = parameter.device
        if there.type != device.type or (there.index or 0) != (device.index or 0):
            raise WorkloadError(
                f"parameter {name} is on {there}, not on {device}",
                "the whole model must be on the device that the workload function is given",
                "move it there: model.to(device)",
            )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise WorkloadError("the model has no parameter that requires a gradient")


def _run_user_code(what: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except AdvisorError:
        raise
    except (Exception, SystemExit) as error:
        raise user_error(what, error) from error


def user_error(what: str, error: BaseException) -> WorkloadError:
    """Returns the person's own error as a `WorkloadError` that carries their traceback."""
    if isinstance(error, SystemExit):
        why = f"it calls sys.exit({error.code!r})"
        mend = "keep argument parsing and the end of the script out of the workload function"
    else:
        why, mend = f"{type(error).__name__}: {first_line(error)}", ""
    return WorkloadError(what, why, mend, user_traceback=user_traceback(error))


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text that says something."""
    for line in str(error).splitlines():
        if line.strip():
            return line.strip()
    return type(error).__name__


def user_traceback(error: BaseException) -> str:
    """Returns a traceback cut to the person's frames, and the one in which it was raised."""
    shown = traceback.TracebackException.from_exception(error, compact=True)
    cut: traceback.TracebackException | None = shown
    while cut is not None:
        frames = list(cut.stack)
        kept = [frame for frame in frames if not is_library(frame.filename)]
        if frames and frames[-1] not in kept and not frames[-1].filename.startswith(_OWN_FOLDERS):
            kept.append(frames[-1])
        cut.stack = traceback.StackSummary.from_list(kept)
        cut = cut.__cause__ or cut.__context__
    return "".join(shown.format())


def is_library(filename: str) -> bool:
    """Returns whether a source file is not the person's: ours, Python's, or installed."""
    return (
        filename.startswith((*_OWN_FOLDERS, sys.base_prefix, "<frozen", "<string>"))
        or "site-packages" in filename
        or "dist-packages" in filename
    )
