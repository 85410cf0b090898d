"""From a spec to a decided job: which configuration, model class, task, size and precision.

Covers `hf:NAME` (a row of the table) and `hf:DIR` (a folder with a `config.json`). Allocates
nothing; torch and transformers are imported when a job is decided, not before.
"""

from __future__ import annotations

import copy
import difflib
import importlib
import json
import os.path
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from advisor.profiler.errors import WorkloadError
from advisor.profiler.preset_batches import fitted_length
from advisor.profiler.preset_table import PRESETS, Preset, Size
from advisor.profiler.preset_tasks import FOLDER_SIZES, TASKS, Inputs, Labels
from advisor.profiler.records import WorkloadSpec

PREFIX = "hf:"
SCALES = ("full", "tiny")
OWN_FUNCTION = (
    "write a function that returns the model and its batches, and name it file.py:function"
)


@dataclass(frozen=True, slots=True)
class Precision:
    """Data types by torch's names: of the weights, and of autocast, if any."""

    weights: str
    autocast: str | None = None
    scaled: bool = False


PRECISIONS: Mapping[str, Precision] = {
    "float32": Precision("float32"),
    "bf16": Precision("float32", autocast="bfloat16"),
    "bf16-pure": Precision("bfloat16"),
    "fp16": Precision("float32", autocast="float16", scaled=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A workload whose options are all decided: what is left is to allocate it.

    `config` and `model_class` come from transformers, which this project reads as `Any`.
    """

    config: Any
    model_class: Any
    task: str
    inputs: Inputs
    size: Size
    precision: Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """What the target stands for, before the options are looked at.

    `size` is None where only the configuration knows it: a folder.
    """

    what: str
    config: Any
    task: str
    class_name: str
    size: Size | None
    precision: str


def decided_job(spec: WorkloadSpec) -> Job:
    """Returns the job of a spec with every option decided. Raises `WorkloadError`."""
    torch = required("torch")
    scale = spec.scale or "full"
    if scale not in SCALES:
        raise WorkloadError(f"unknown scale {scale!r}", mend=f"known: {', '.join(SCALES)}")
    name = spec.target.removeprefix(PREFIX)
    choice = _preset(name, spec.task, scale) if name in PRESETS else _folder(name, spec, scale)
    precision = spec.precision or choice.precision
    if precision not in PRECISIONS:
        raise WorkloadError(
            f"unknown precision {precision!r}", mend=f"known: {', '.join(PRECISIONS)}"
        )
    if spec.batch_size is not None and spec.batch_size < 1:
        raise WorkloadError(f"batch size {spec.batch_size} is too small", mend="give at least 1")
    model_class = transformers_class(choice.class_name)
    inputs = _inputs(model_class)
    default = choice.size or FOLDER_SIZES[inputs]
    length = spec.length
    if length is None and choice.size is not None:
        # A preset's own length comes before the image size that its configuration class has.
        length = choice.size.length
    with blaming(f"{choice.what} cannot be used"):
        length = fitted_length(choice.config, inputs, length, default.length)
    _check_classes(choice.config, choice.task, choice.what)
    chosen = PRECISIONS[precision]
    _complete(choice.config, choice.task, getattr(torch, chosen.weights))
    return Job(
        config=choice.config,
        model_class=model_class,
        task=choice.task,
        inputs=inputs,
        size=Size(default.batch_size if spec.batch_size is None else spec.batch_size, length),
        precision=chosen,
    )


def _inputs(model_class: Any) -> Inputs:
    try:
        return Inputs(model_class.main_input_name)
    except ValueError as error:
        raise WorkloadError(
            f"the inputs of {model_class.__name__} are not known here",
            f"it reads {model_class.main_input_name}",
            OWN_FUNCTION,
        ) from error


def _complete(config: Any, task: str, dtype: Any) -> None:
    """Sets what a script would set before it trains a model of this configuration."""
    if hasattr(config, "use_cache"):
        config.use_cache = False  # of no use in training, and it breaks graphs
    # Named torch_dtype before transformers 4.56. Parts of a model read it, whatever we ask for.
    setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", dtype)
    if TASKS[task].labels is Labels.SPAN:
        config.num_labels = 2  # one for where the answer starts, one for where it ends
    padding = getattr(config, "pad_token_id", None)
    if padding is None and TASKS[task].labels is Labels.CLASS and hasattr(config, "vocab_size"):
        # Decoders classify at the last token that is no padding, and refuse batches without one.
        end = getattr(config, "eos_token_id", None)
        padding = end if isinstance(end, int) else 0
        config.pad_token_id = padding
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = padding or 0


def _check_classes(config: Any, task: str, what: str) -> None:
    """Raises `WorkloadError` when there are too few classes to learn anything."""
    # One class for a whole text is a regression; one for each token is nothing.
    least = {Labels.CLASS: 1, Labels.CLASS_PER_TOKEN: 2}.get(TASKS[task].labels, 0)
    if config.num_labels < least:
        raise WorkloadError(
            f"{what} has {config.num_labels} classes",
            f"{task} needs at least {least}",
            "name them in id2label of config.json",
        )


def _task(asked: str | None, offered: Sequence[str], what: str) -> str:
    """Returns the task that is meant: the first offered if none is asked for."""
    if asked is None:
        return offered[0]
    wanted = asked.strip().lower().replace("_", "-")
    for task in offered:
        if wanted == task or wanted in TASKS[task].aliases:
            return task
    known = wanted in TASKS or any(wanted in row.aliases for row in TASKS.values())
    raise WorkloadError(
        f"{what} has no task {asked!r}" if known else f"unknown task {asked!r}",
        mend=f"{what} can be trained for {', '.join(offered)}",
    )


def _preset(name: str, asked: str | None, scale: str) -> _Choice:
    row = PRESETS[name]
    what = f"the preset {name}"
    task = _task(asked, tuple(row.tasks), what)
    full = scale == "full"
    return _Choice(
        what=what,
        config=_preset_config(row, task, what, row.values if full else {**row.values, **row.tiny}),
        task=task,
        class_name=row.tasks[task],
        size=row.size if full else row.tiny_size,
        precision=row.precision if full else "float32",
    )


def _preset_config(row: Preset, task: str, what: str, values: Mapping[str, object]) -> Any:
    # Copied, because configuration classes write into the mappings that they are given.
    own = copy.deepcopy(dict(values))
    if (classes := TASKS[task].classes) is not None:
        own.setdefault("num_labels", classes)
    config_class = transformers_class(row.config)
    with blaming(f"{what} cannot be used"):
        return config_class(**own)


def _folder(name: str, spec: WorkloadSpec, scale: str) -> _Choice:
    folder = _folder_path(name, spec.cwd)
    if scale == "tiny":
        raise WorkloadError(
            "scale 'tiny' is for presets",
            f"the sizes of {folder} stand in its config.json",
            "lower them there, or leave --scale out",
        )
    config = _folder_config(folder)
    task, class_name = _folder_task(spec.task, config, folder)
    return _Choice(
        what=str(folder),
        config=config,
        task=task,
        class_name=class_name,
        size=None,
        precision="float32",
    )


def _folder_path(name: str, cwd: str) -> Path:
    """Returns the folder that `name` means. Raises `WorkloadError` if it means none."""
    folder = Path(cwd, os.path.expanduser(name))
    if name and os.path.isdir(folder):
        return folder
    if os.path.isfile(folder):
        raise WorkloadError(
            f"{folder} is not a folder", mend=f"name the folder: {PREFIX}{folder.parent}"
        )
    if name.startswith((".", "~", "/")):
        raise WorkloadError(
            f"the folder {folder} does not exist", mend="name one that has a config.json"
        )
    close = difflib.get_close_matches(name.split("/")[-1].lower(), PRESETS, n=3, cutoff=0.5)
    raise WorkloadError(
        f"unknown preset {name!r}",
        f"no preset and no folder in {cwd} has that name, and nothing is downloaded",
        f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(PRESETS)}",
    )


def _folder_config(folder: Path) -> Any:
    """Returns the configuration in a folder; code that lies beside it is never run."""
    transformers = required("transformers")
    file = folder / "config.json"
    if not file.is_file():
        raise WorkloadError(
            f"{folder} has no config.json",
            mend="name a folder that save_pretrained wrote, or a preset",
        )
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise WorkloadError(f"{file} cannot be read as JSON", str(error)) from error
    model_type = content.get("model_type") if isinstance(content, dict) else None
    if not isinstance(model_type, str):
        raise WorkloadError(
            f"{file} names no model_type", mend='add one, such as "model_type": "bert"'
        )
    if model_type not in transformers.CONFIG_MAPPING:
        close = difflib.get_close_matches(model_type, list(transformers.CONFIG_MAPPING), n=3)
        raise WorkloadError(
            f"{file} names the unknown model_type {model_type!r}",
            f"transformers {transformers.__version__} has no such model, and code beside it is "
            "never run",
            f"did you mean {' or '.join(close)}?" if close else OWN_FUNCTION,
        )
    with blaming(f"{file} cannot be used"):
        return transformers.AutoConfig.from_pretrained(
            str(folder), trust_remote_code=False, local_files_only=True
        )


def _folder_task(asked: str | None, config: Any, folder: Path) -> tuple[str, str]:
    """Returns task and model class: of the task asked for, else of config.json's architecture."""
    auto = required("transformers.models.auto.modeling_auto")
    offered: dict[str, str] = {}
    for task, row in TASKS.items():
        class_name = getattr(auto, row.mapping).get(config.model_type)
        if isinstance(class_name, str):
            offered[task] = class_name
    if not offered:
        raise WorkloadError(
            f"no task is known for the model_type {config.model_type!r} of {folder}",
            mend=OWN_FUNCTION,
        )
    if asked is not None:
        task = _task(asked, tuple(offered), str(folder))
        return task, offered[task]
    architectures = getattr(config, "architectures", None) or []
    for task, class_name in offered.items():
        if class_name in architectures:
            return task, class_name
    named = ", ".join(map(str, architectures))
    raise WorkloadError(
        f"{folder} does not say for which task to train",
        f"no task is known for the architecture {named} in its config.json"
        if named
        else "its config.json names no architecture",
        f"give --task, one of {', '.join(offered)}",
    )


@contextmanager
def blaming(what: str) -> Iterator[None]:
    """Turns what a configuration's wrong values make transformers raise into `WorkloadError(what)`.

    RuntimeError passes: it is how torch says that memory ran out, which the trial must see.
    """
    try:
        yield
    except (WorkloadError, RuntimeError, MemoryError):
        raise
    except Exception as error:
        # The name first: the text of a KeyError is the key alone.
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise WorkloadError(what, why[:300]) from error


def required(module: str) -> Any:
    """Returns an imported module. Raises `WorkloadError` saying how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise WorkloadError(
            f"a preset needs {module.split('.')[0]}",
            str(error),
            "pip install 'compile-advisor[profiler]'",
        ) from error


def transformers_class(name: str) -> Any:
    """Returns a class of transformers by name. Raises `WorkloadError` if it is too old for it."""
    transformers = required("transformers")
    try:
        return getattr(transformers, name)
    except AttributeError as error:
        raise WorkloadError(
            f"transformers {transformers.__version__} has no {name}",
            mend="install a newer transformers",
        ) from error
