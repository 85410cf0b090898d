"""The built-in training jobs as data: one row for each preset.

Imports neither torch nor transformers. Hyperparameters are those of the published `config.json`;
what is left out equals the default of the configuration class. Adding a preset is adding a row
to `PRESETS` (and it is then tested like all others).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a batch when none is asked for: samples, and the length of each."""

    batch_size: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A published model as a training job.

    `tasks` maps each task to its model class, the default task first. `tiny` replaces values at
    scale tiny. `parameters_m` is the published number of parameters in millions, from `source`.
    `precision` is the default at full scale; tiny is always float32 by default.
    """

    config: str
    values: Mapping[str, object]
    tasks: Mapping[str, str]
    tiny: Mapping[str, object]
    size: Size
    tiny_size: Size
    parameters_m: float
    source: str
    precision: str = "float32"


def _encoder_tasks(prefix: str) -> dict[str, str]:
    return {
        "token-classification": f"{prefix}ForTokenClassification",
        "sequence-classification": f"{prefix}ForSequenceClassification",
        "question-answering": f"{prefix}ForQuestionAnswering",
        "masked-lm": f"{prefix}ForMaskedLM",
    }


def _decoder_tasks(prefix: str, causal_lm: str) -> dict[str, str]:
    return {
        "causal-lm": causal_lm,
        "sequence-classification": f"{prefix}ForSequenceClassification",
        "token-classification": f"{prefix}ForTokenClassification",
    }


_TINY_ENCODER = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 128,
}
_TINY_DECODER = _TINY_ENCODER | {
    "num_key_value_heads": 1,
    "head_dim": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _bert(values: Mapping[str, object], batch_size: int, parameters_m: float) -> Preset:
    return Preset(
        config="BertConfig",
        values=values,
        tasks=_encoder_tasks("Bert"),
        tiny=_TINY_ENCODER,
        size=Size(batch_size, 128),
        tiny_size=Size(8, 32),
        parameters_m=parameters_m,
        source="Devlin et al. 2018, arXiv:1810.04805",
    )


def _gpt2(width: int, layers: int, heads: int, batch_size: int, parameters_m: float) -> Preset:
    return Preset(
        config="GPT2Config",
        values={"n_embd": width, "n_layer": layers, "n_head": heads},
        tasks=_decoder_tasks("GPT2", "GPT2LMHeadModel"),
        tiny={
            "vocab_size": 1024, "n_embd": 64, "n_layer": 2, "n_head": 2,
            "bos_token_id": 1, "eos_token_id": 1,
        },
        size=Size(batch_size, 1024),
        tiny_size=Size(4, 64),
        parameters_m=parameters_m,
        source="README of github.com/openai/gpt-2",
    )  # fmt: skip


def _llama(
    values: Mapping[str, object], rope_factor: float, batch_size: int, parameters_m: float,
    source: str, precision: str = "float32",
) -> Preset:  # fmt: skip
    return Preset(
        config="LlamaConfig",
        values={
            "vocab_size": 128_256,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": rope_factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "bos_token_id": 128_000,
            "eos_token_id": 128_001,
            **values,
        },
        tasks=_decoder_tasks("Llama", "LlamaForCausalLM"),
        tiny=_TINY_DECODER,
        size=Size(batch_size, 2048),
        tiny_size=Size(4, 64),
        parameters_m=parameters_m,
        source=source,
        precision=precision,
    )


PRESETS: Mapping[str, Preset] = {
    "bert-base": _bert({}, 32, 110),
    "bert-large": _bert(
        {
            "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
            "intermediate_size": 4096,
        },
        16,
        340,
    ),
    "roberta-base": Preset(
        config="RobertaConfig",
        values={
            "vocab_size": 50_265, "max_position_embeddings": 514, "type_vocab_size": 1,
            "layer_norm_eps": 1e-5,
        },
        tasks=_encoder_tasks("Roberta"),
        tiny=_TINY_ENCODER,
        size=Size(32, 128),
        tiny_size=Size(8, 32),
        parameters_m=125,
        source="Liu et al. 2019, arXiv:1907.11692; README of fairseq/examples/roberta",
    ),
    "distilbert-base": Preset(
        config="DistilBertConfig",
        values={},
        tasks=_encoder_tasks("DistilBert"),
        tiny={"vocab_size": 1024, "dim": 64, "n_layers": 2, "n_heads": 2, "hidden_dim": 128},
        size=Size(32, 128),
        tiny_size=Size(8, 32),
        parameters_m=66,
        source="Sanh et al. 2019, arXiv:1910.01108",
    ),
    "deberta-v3-base": Preset(
        config="DebertaV2Config",
        values={
            "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
            "intermediate_size": 3072, "relative_attention": True, "position_buckets": 256,
            "norm_rel_ebd": "layer_norm", "share_att_key": True, "pos_att_type": ["p2c", "c2p"],
            "position_biased_input": False,
        },
        tasks=_encoder_tasks("DebertaV2"),
        tiny=_TINY_ENCODER | {"position_buckets": 32},
        size=Size(16, 128),
        tiny_size=Size(4, 32),
        parameters_m=184,
        source="model card of microsoft/deberta-v3-base: 86M and 98M of embeddings",
    ),
    "gpt2": _gpt2(768, 12, 12, 8, 124),
    "gpt2-medium": _gpt2(1024, 24, 16, 8, 355),
    "gpt2-large": _gpt2(1280, 36, 20, 4, 774),
    "gpt2-xl": _gpt2(1600, 48, 25, 2, 1558),
    "llama-1b": _llama(
        {
            "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
            "head_dim": 64, "tie_word_embeddings": True,
        },
        32.0,
        4,
        1230,
        "model card of meta-llama/Llama-3.2-1B",
    ),
    # 8 billion float32 weights with gradients and Adam's two moments are 128 GB: more than one
    # device holds. In bfloat16 they are 64 GB.
    "llama-8b": _llama(
        {
            "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
            "head_dim": 128,
        },
        8.0,
        1,
        8030,
        "model card of meta-llama/Llama-3.1-8B",
        precision="bf16-pure",
    ),
    "qwen-0.5b": Preset(
        config="Qwen2Config",
        values={
            "vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864,
            "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
            "max_position_embeddings": 32_768, "rope_theta": 1_000_000.0, "max_window_layers": 24,
            "tie_word_embeddings": True, "bos_token_id": 151_643, "eos_token_id": 151_643,
        },
        tasks=_decoder_tasks("Qwen2", "Qwen2ForCausalLM"),
        tiny=_TINY_DECODER | {"max_window_layers": 2},
        size=Size(4, 2048),
        tiny_size=Size(4, 64),
        parameters_m=490,
        source="model card of Qwen/Qwen2.5-0.5B",
    ),
    "t5-base": Preset(
        config="T5Config",
        values={
            "d_model": 768, "d_ff": 3072, "num_layers": 12, "num_decoder_layers": 12,
            "num_heads": 12, "decoder_start_token_id": 0,
        },
        tasks={"seq2seq-lm": "T5ForConditionalGeneration"},
        tiny={
            "vocab_size": 1024, "d_model": 64, "d_kv": 32, "d_ff": 128, "num_layers": 2,
            "num_decoder_layers": 2, "num_heads": 2,
        },
        size=Size(8, 512),
        tiny_size=Size(4, 64),
        parameters_m=220,
        source="Raffel et al. 2019, arXiv:1910.10683",
    ),
    "vit-base": Preset(
        config="ViTConfig",
        values={},
        tasks={"image-classification": "ViTForImageClassification"},
        tiny={
            "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
            "intermediate_size": 128, "patch_size": 8, "encoder_stride": 8,
            "num_labels": 10,
        },
        size=Size(32, 224),
        tiny_size=Size(8, 48),
        parameters_m=86,
        source="Dosovitskiy et al. 2020, arXiv:2010.11929",
    ),
    "swin-tiny": Preset(
        config="SwinConfig",
        values={},
        tasks={"image-classification": "SwinForImageClassification"},
        tiny={"embed_dim": 32, "depths": [2, 2], "num_heads": [1, 2], "num_labels": 10},
        size=Size(32, 224),
        tiny_size=Size(4, 56),
        parameters_m=29,
        source="Liu et al. 2021, arXiv:2103.14030",
    ),
    "convnext-tiny": Preset(
        config="ConvNextConfig",
        values={},
        tasks={"image-classification": "ConvNextForImageClassification"},
        tiny={"num_stages": 2, "hidden_sizes": [32, 64], "depths": [1, 1], "num_labels": 10},
        size=Size(32, 224),
        tiny_size=Size(4, 48),
        parameters_m=29,
        source="Liu et al. 2022, arXiv:2201.03545",
    ),
    "resnet-50": Preset(
        config="ResNetConfig",
        values={},
        tasks={"image-classification": "ResNetForImageClassification"},
        tiny={"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [1, 1], "num_labels": 10},
        size=Size(64, 224),
        tiny_size=Size(8, 48),
        parameters_m=25.6,
        source="torchvision's table of models: resnet50",
    ),
    "whisper-small": Preset(
        config="WhisperConfig",
        values={
            "d_model": 768, "encoder_layers": 12, "decoder_layers": 12,
            "encoder_attention_heads": 12, "decoder_attention_heads": 12,
            "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072, "pad_token_id": 50_257,
            "bos_token_id": 50_257, "eos_token_id": 50_257, "decoder_start_token_id": 50_258,
        },
        tasks={
            "speech-seq2seq": "WhisperForConditionalGeneration",
            "audio-classification": "WhisperForAudioClassification",
        },
        tiny={
            "vocab_size": 1024, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2,
            "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 128,
            "decoder_ffn_dim": 128, "pad_token_id": 1, "bos_token_id": 1, "eos_token_id": 1,
            "decoder_start_token_id": 2,
        },
        size=Size(8, 3000),
        tiny_size=Size(4, 200),
        parameters_m=244,
        source="Radford et al. 2022, arXiv:2212.04356",
    ),
    "wav2vec2-base": Preset(
        config="Wav2Vec2Config",
        values={
            "activation_dropout": 0.0, "feat_proj_dropout": 0.1, "final_dropout": 0.0,
            "layerdrop": 0.0,
        },
        tasks={
            "ctc": "Wav2Vec2ForCTC",
            "audio-classification": "Wav2Vec2ForSequenceClassification",
        },
        tiny={
            "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
            "intermediate_size": 128, "conv_dim": [32] * 7, "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 4,
        },
        size=Size(8, 80_000),
        tiny_size=Size(2, 8_000),
        parameters_m=95,
        source="Baevski et al. 2020, arXiv:2006.11477",
    ),
}  # fmt: skip
