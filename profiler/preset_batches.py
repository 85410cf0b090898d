"""Batches of random data that fit a model's configuration: valid ids, labels and lengths.

Configurations come from transformers and are `Any` here. What depends on the kind of input or of
label is looked up in one table each, `_LENGTHS`, `_INPUTS` and `_LABELS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from advisor.profiler.errors import WorkloadError
from advisor.profiler.preset_tasks import POSITIONS_AFTER_PADDING, Inputs, Labels, Task

if TYPE_CHECKING:
    import torch

# Share of the tokens that masked language modelling predicts (Devlin et al. 2018).
MASKED_SHARE = 0.15
SHORTEST_TEXT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """What `random_batch` makes: `length` in the unit of `inputs`, floats in `dtype`."""

    config: Any
    task: Task
    inputs: Inputs
    batch_size: int
    length: int
    dtype: torch.dtype


def fitted_length(config: Any, inputs: Inputs, length: int | None, default: int) -> int:
    """Returns the length to use, and sets the sizes in `config` that must agree with it.

    `length` None gives `default`, or what the model allows if that is shorter. Raises
    `WorkloadError` when the model cannot take `length`.
    """
    if length is not None and length < 1:
        raise WorkloadError(f"length {length} is too small", mend="give at least 1")
    return _LENGTHS[inputs](config, length, default)


def random_batch(shape: BatchShape, seed: int) -> dict[str, torch.Tensor]:
    """Returns a batch on the CPU; the same seed gives the same batch on every machine."""
    import torch

    generator = torch.Generator().manual_seed(seed % 2**63)
    batch = _INPUTS[shape.inputs](shape, generator)
    batch |= _LABELS[shape.task.labels](shape, batch, generator)
    return batch


def special_tokens(config: Any) -> set[int]:
    """Returns the ids that stand for no word: padding, begin, end and so on."""
    special: set[int] = set()
    for name, value in config.to_dict().items():
        if name.endswith("_token_id"):
            values = value if isinstance(value, list | tuple) else [value]
            special.update(v for v in values if isinstance(v, int))
    return special


def _of_text(config: Any, name: str) -> Any:
    """Returns a value of the configuration, or of its text part if only that has it."""
    value = getattr(config, name, None)
    return getattr(config.get_text_config(), name, None) if value is None else value


def _too_long(length: int, unit: str, longest: int, model_type: str) -> WorkloadError:
    return WorkloadError(
        f"length {length} is too long",
        f"the {model_type} model has positions for {longest} {unit}",
        f"give at most {longest}",
    )


def _too_short(length: int, why: str, least: int) -> WorkloadError:
    return WorkloadError(f"length {length} is too short", why, f"give at least {least}")


def _text_length(config: Any, length: int | None, default: int) -> int:
    longest = _of_text(config, "max_position_embeddings")
    if not isinstance(longest, int) or longest < 1:
        longest = None  # relative positions, as in T5: any length will do
    elif config.model_type in POSITIONS_AFTER_PADDING:
        longest -= (config.pad_token_id or 0) + 1
    if length is None:
        return default if longest is None else min(default, longest)
    if longest is not None and length > longest:
        raise _too_long(length, "tokens", longest, config.model_type)
    if length < SHORTEST_TEXT:
        raise _too_short(length, "a text needs a token and its successor", SHORTEST_TEXT)
    return length


def _image_length(config: Any, length: int | None, default: int) -> int:
    size = getattr(config, "image_size", None)
    if length is None:
        side = size[0] if isinstance(size, list | tuple) else size
        length = default if side is None else int(side)
    patch = getattr(config, "patch_size", None)
    patch = patch if isinstance(patch, int) else None
    # Each stage after the first halves the image; the stem of those without patches quarters it.
    stages = len(getattr(config, "depths", None) or [0])
    least = (patch or (4 if stages > 1 else 1)) * 2 ** (stages - 1)
    if length < least:
        raise _too_short(length, f"nothing is left of an image of less than {least} pixels", least)
    if patch is not None and length % patch:
        raise WorkloadError(
            f"length {length} does not fit",
            f"the side of the image is not a multiple of the patch size {patch}",
            f"give {length - length % patch} or {length - length % patch + patch}",
        )
    if size is not None:
        config.image_size = length
    return length


def _frames_length(config: Any, length: int | None, default: int) -> int:
    if config.model_type != "whisper":
        raise _unknown_audio(config)
    # The encoder's second convolution halves the frames, and it takes no other number of them.
    longest = 2 * config.max_source_positions
    if length is None:
        length = min(default, longest)
    if length > longest:
        raise _too_long(length, "frames", longest, config.model_type)
    if length % 2:
        raise WorkloadError(
            f"length {length} does not fit",
            "the encoder halves the number of frames",
            "give an even number",
        )
    _check_masking(config, length, length)
    config.max_source_positions = length // 2
    return length


def _samples_length(config: Any, length: int | None, default: int) -> int:
    if not (getattr(config, "conv_kernel", None) and getattr(config, "conv_stride", None)):
        raise _unknown_audio(config)
    length = default if length is None else length
    frames = _frames(config, length)
    if frames < 1:
        raise WorkloadError(
            f"length {length} is too short",
            "the convolutions leave no frame of so few samples",
            "16,000 samples are one second",
        )
    _check_masking(config, length, frames)
    return length


def _unknown_audio(config: Any) -> WorkloadError:
    return WorkloadError(
        f"the audio inputs of a {config.model_type} model are not known here",
        "known are Whisper's spectrograms and the waveforms of the wav2vec 2.0 family",
        "write a function that returns the model and its batches, and name it file.py:function",
    )


def _check_masking(config: Any, length: int, frames: int) -> None:
    """Raises when the model masks longer stretches in training than there are frames."""
    masks = getattr(config, "apply_spec_augment", False) and config.mask_time_prob > 0
    if masks and frames < config.mask_time_length:
        raise WorkloadError(
            f"length {length} is too short",
            f"the model sees {frames} frames of it and masks {config.mask_time_length} at a time",
            "give a longer length",
        )


def _frames(config: Any, samples: int) -> int:
    """Returns how many frames the convolutions of a wav2vec 2.0 leave."""
    for kernel, stride in zip(config.conv_kernel, config.conv_stride, strict=True):
        samples = (samples - kernel) // stride + 1
    return samples


def _tokens(config: Any, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Returns ordinary tokens: a padding or end token in the middle changes what models do."""
    import torch

    vocabulary = torch.arange(_of_text(config, "vocab_size"))
    special = torch.tensor(sorted(special_tokens(config)), dtype=torch.long)
    ordinary = vocabulary[~torch.isin(vocabulary, special)]
    if not len(ordinary):
        raise WorkloadError(
            f"vocab_size {len(vocabulary)} leaves no token",
            "all of the vocabulary are special tokens",
        )
    return ordinary[torch.randint(len(ordinary), shape, generator=generator)]


def _text(shape: BatchShape, generator: torch.Generator) -> dict[str, torch.Tensor]:
    import torch

    ids = _tokens(shape.config, (shape.batch_size, shape.length), generator)
    if shape.config.is_encoder_decoder and shape.task.labels is Labels.CLASS:
        # BART and T5 classify what stands at the end token, and want exactly one in each text.
        ids[:, -1] = _end_token(shape.config)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _end_token(config: Any) -> int:
    end = config.eos_token_id
    if not isinstance(end, int):
        raise WorkloadError(
            f"a {config.model_type} model cannot classify texts without an eos_token_id",
            mend="set it in config.json",
        )
    return end


def _normal(
    shape: BatchShape, size: tuple[int, ...], generator: torch.Generator
) -> dict[str, torch.Tensor]:
    import torch

    values = torch.randn(size, generator=generator, dtype=torch.float32)
    return {str(shape.inputs): values.to(shape.dtype)}


def _image(shape: BatchShape, generator: torch.Generator) -> dict[str, torch.Tensor]:
    channels = getattr(shape.config, "num_channels", 3)
    return _normal(shape, (shape.batch_size, channels, shape.length, shape.length), generator)


def _waveform(shape: BatchShape, generator: torch.Generator) -> dict[str, torch.Tensor]:
    # No attention mask: the published feature extractor of the base models makes none.
    return _normal(shape, (shape.batch_size, shape.length), generator)


def _spectrogram(shape: BatchShape, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return _normal(shape, (shape.batch_size, shape.config.num_mel_bins, shape.length), generator)


def _classes(
    shape: BatchShape, batch: dict[str, torch.Tensor], generator: torch.Generator
) -> dict[str, torch.Tensor]:
    import torch

    count = shape.config.num_labels
    problem = getattr(shape.config, "problem_type", None)
    if problem == "multi_label_classification":
        labels = torch.randint(2, (shape.batch_size, count), generator=generator).to(shape.dtype)
    elif problem == "regression" or (problem is None and count == 1):
        size = (shape.batch_size,) if count == 1 else (shape.batch_size, count)
        labels = torch.randn(size, generator=generator).to(shape.dtype)
    else:
        labels = torch.randint(count, (shape.batch_size,), generator=generator)
    return {"labels": labels}


def _token_classes(
    shape: BatchShape, batch: dict[str, torch.Tensor], generator: torch.Generator
) -> dict[str, torch.Tensor]:
    import torch

    size = batch["input_ids"].shape
    return {"labels": torch.randint(shape.config.num_labels, size, generator=generator)}


def _spans(
    shape: BatchShape, batch: dict[str, torch.Tensor], generator: torch.Generator
) -> dict[str, torch.Tensor]:
    import torch

    ends = torch.randint(shape.length, (shape.batch_size, 2), generator=generator)
    ends = ends.sort(dim=1).values
    return {"start_positions": ends[:, 0].clone(), "end_positions": ends[:, 1].clone()}


def _masked(
    shape: BatchShape, batch: dict[str, torch.Tensor], generator: torch.Generator
) -> dict[str, torch.Tensor]:
    import torch

    masked = max(1, round(MASKED_SHARE * shape.length))
    order = torch.rand(batch["input_ids"].shape, generator=generator).argsort(dim=1)
    tokens = _tokens(shape.config, tuple(order.shape), generator)
    # -100 is the label that the loss leaves out; the same number is predicted in every text.
    return {"labels": torch.where(order < masked, tokens, -100)}


def _same(
    shape: BatchShape, batch: dict[str, torch.Tensor], generator: torch.Generator
) -> dict[str, torch.Tensor]:
    return {"labels": batch["input_ids"].clone()}


def _sequence(
    shape: BatchShape, batch: dict[str, torch.Tensor], generator: torch.Generator
) -> dict[str, torch.Tensor]:
    config = shape.config
    length = shape.length // shape.task.inputs_per_label
    if shape.inputs is Inputs.SAMPLES:
        # CTC needs a blank between equal neighbours: at most one label for two frames is safe.
        length = min(length, _frames(config, shape.length) // 2)
    for limit in ("max_target_positions", "max_position_embeddings"):
        longest = getattr(config, limit, None)
        if isinstance(longest, int) and longest > 0:
            length = min(length, longest)
    return {"labels": _tokens(config, (shape.batch_size, max(1, length)), generator)}


_LENGTHS: dict[Inputs, Callable[[Any, int | None, int], int]] = {
    Inputs.TOKENS: _text_length,
    Inputs.PIXELS: _image_length,
    Inputs.SAMPLES: _samples_length,
    Inputs.FRAMES: _frames_length,
}
_INPUTS: dict[Inputs, Callable[[BatchShape, Any], dict[str, Any]]] = {
    Inputs.TOKENS: _text,
    Inputs.PIXELS: _image,
    Inputs.SAMPLES: _waveform,
    Inputs.FRAMES: _spectrogram,
}
_LABELS: dict[Labels, Callable[[BatchShape, Any, Any], dict[str, Any]]] = {
    Labels.CLASS: _classes,
    Labels.CLASS_PER_TOKEN: _token_classes,
    Labels.SPAN: _spans,
    Labels.MASKED_TOKENS: _masked,
    Labels.SAME_TOKENS: _same,
    Labels.SEQUENCE: _sequence,
}
