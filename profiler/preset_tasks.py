"""The tasks that a preset can be trained on, and what their models read, as data.

Imports neither torch nor transformers. Adding a task is adding a row to `TASKS`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from advisor.profiler.preset_table import Size


class Inputs(enum.StrEnum):
    """What a model reads, by the name of its main input. `length` counts these."""

    TOKENS = "input_ids"
    PIXELS = "pixel_values"  # length: the side of the square image
    SAMPLES = "input_values"  # length: samples of the waveform
    FRAMES = "input_features"  # length: frames of the spectrogram


class Labels(enum.StrEnum):
    """What a task is trained on."""

    CLASS = "one class for each sample"
    CLASS_PER_TOKEN = "one class for each token"
    SPAN = "first and last token of an answer"
    MASKED_TOKENS = "15 % of the tokens"
    SAME_TOKENS = "the input itself, shifted by the model"
    SEQUENCE = "another sequence of tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task: where transformers lists its model classes, and what its labels are.

    `mapping` is the name in `transformers.models.auto.modeling_auto`. `classes` is the number of
    classes that a preset gets, `inputs_per_label` how much input stands for one label of a
    sequence. `aliases` are other names in use, those of `transformers.pipeline` among them.
    """

    mapping: str
    labels: Labels
    classes: int | None = None
    inputs_per_label: int = 1
    aliases: tuple[str, ...] = ()


TASKS: Mapping[str, Task] = {
    # CoNLL-2003 has 9 tags, SST-2 2 classes, ImageNet 1000, Speech Commands 35.
    "token-classification": Task(
        mapping="MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
        labels=Labels.CLASS_PER_TOKEN,
        classes=9,
        aliases=("ner",),
    ),
    "sequence-classification": Task(
        mapping="MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
        labels=Labels.CLASS,
        classes=2,
        aliases=("text-classification",),
    ),
    "question-answering": Task(
        mapping="MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES", labels=Labels.SPAN
    ),
    "masked-lm": Task(
        mapping="MODEL_FOR_MASKED_LM_MAPPING_NAMES",
        labels=Labels.MASKED_TOKENS,
        aliases=("fill-mask",),
    ),
    "causal-lm": Task(
        mapping="MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
        labels=Labels.SAME_TOKENS,
        aliases=("text-generation",),
    ),
    "seq2seq-lm": Task(
        mapping="MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
        labels=Labels.SEQUENCE,
        inputs_per_label=4,
        aliases=("text2text-generation", "summarization", "translation"),
    ),
    "image-classification": Task(
        mapping="MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", labels=Labels.CLASS, classes=1000
    ),
    "audio-classification": Task(
        mapping="MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES", labels=Labels.CLASS, classes=35
    ),
    # About 4 tokens for a second of speech: 100 frames.
    "speech-seq2seq": Task(
        mapping="MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
        labels=Labels.SEQUENCE,
        inputs_per_label=25,
        aliases=("automatic-speech-recognition",),
    ),
    # About 16 letters for a second of speech: 16,000 samples.
    "ctc": Task(
        mapping="MODEL_FOR_CTC_MAPPING_NAMES",
        labels=Labels.SEQUENCE,
        inputs_per_label=1000,
        aliases=("automatic-speech-recognition",),
    ),
}


# For `hf:DIR`. The length gives way to a lower maximum, or to the configuration's image size.
FOLDER_SIZES: Mapping[Inputs, Size] = {
    Inputs.TOKENS: Size(8, 128),
    Inputs.PIXELS: Size(8, 224),
    Inputs.SAMPLES: Size(4, 80_000),
    Inputs.FRAMES: Size(4, 3_000),
}

# Model types whose positions count from the padding token on: the first `pad_token_id + 1` rows
# of their position table are no positions of a token.
POSITIONS_AFTER_PADDING = frozenset(
    {
        "camembert", "data2vec-text", "esm", "ibert", "longformer", "luke", "mpnet", "roberta",
        "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
    }
)  # fmt: skip
