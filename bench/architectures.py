"""Rewrites models/corpus/architectures.jsonl: what a step of the corpus's models has to do.

    pip install --no-deps timm torchvision
    python bench/architectures.py

Each published training row whose model can be built from a published configuration (transformers,
timm, torchvision; random weights, no memory) is counted at its batch, its length and its kind of
precision, without the optimizer, as the benchmark behind most rows is run. A model that has not
the published number of parameters is left out.
"""

from __future__ import annotations

import re
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import published_models
import torch

# A wheel of torchvision for another build of torch brings no operators. Its models need none, but
# its import registers their shapes.
sys.modules["torchvision._meta_registrations"] = types.ModuleType("none")

import transformers as hf  # noqa: E402

from advisor.models import corpus  # noqa: E402
from advisor.models.architectures import Architecture, key_of, known, write  # noqa: E402
from advisor.profiler import operator_counting, torch_internals  # noqa: E402

TARGET = Path(__file__).resolve().parent.parent / "models" / "corpus" / "architectures.jsonl"
TOLERANCE = 0.06
# As torchbench runs them, where the rows do not state a length.
TORCHBENCH: dict[str, tuple[str, dict[str, Any], int]] = {
    "hf_Bert": ("BertForMaskedLM", {}, 512),
    "hf_Bert_large": (
        "BertForMaskedLM",
        {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
        },
        512,
    ),
    "hf_Albert": (
        "AlbertForMaskedLM",
        {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
        512,
    ),
    "hf_GPT2": ("GPT2LMHeadModel", {}, 512),
    "hf_GPT2_large": ("GPT2LMHeadModel", {"n_embd": 1280, "n_layer": 36, "n_head": 20}, 512),
    "hf_DistilBert": ("DistilBertForMaskedLM", {}, 512),
    "hf_Bart": (
        "BartForConditionalGeneration",
        {
            "d_model": 768,
            "encoder_layers": 6,
            "decoder_layers": 6,
            "encoder_attention_heads": 12,
            "decoder_attention_heads": 12,
            "encoder_ffn_dim": 3072,
            "decoder_ffn_dim": 3072,
        },
        512,
    ),
    "hf_T5": ("T5ForConditionalGeneration", {}, 1024),
    "hf_T5_large": (
        "T5ForConditionalGeneration",
        {"d_model": 1024, "d_ff": 4096, "num_layers": 24, "num_heads": 16},
        512,
    ),
    "hf_Longformer": (
        "LongformerForMaskedLM",
        {"vocab_size": 50_265, "max_position_embeddings": 4098},
        1024,
    ),
    "hf_Reformer": ("ReformerForMaskedLM", {"is_decoder": False}, 4096),
}
# The dashboard's name, the class, and what differs from its default configuration.
DASHBOARD: dict[str, tuple[str, dict[str, Any]]] = {
    "CamemBert": ("CamembertForMaskedLM", {}),
    "YituTechConvBert": ("ConvBertForMaskedLM", {}),
    "GoogleFnet": ("FNetForMaskedLM", {}),
    "DistillGPT2": ("GPT2LMHeadModel", {"n_layer": 6}),
    # Its class left transformers; this one is the same decoder.
    "Speech2Text2ForCausalLM": (
        "TrOCRForCausalLM",
        {
            "vocab_size": 10_000,
            "d_model": 256,
            "decoder_layers": 6,
            "decoder_attention_heads": 4,
            "decoder_ffn_dim": 2048,
            "max_position_embeddings": 1024,
        },
    ),
    "T5Small": ("T5ForConditionalGeneration", {}),
    "MT5ForConditionalGeneration": (
        "MT5ForConditionalGeneration",
        {
            "d_model": 512,
            "d_ff": 1024,
            "num_layers": 8,
            "num_heads": 6,
        },
    ),
}
CS336 = {
    "small": (768, 3072, 12, 12),
    "medium": (1024, 4096, 24, 16),
    "large": (1280, 5120, 36, 20),
    "xl": (1600, 6400, 48, 25),
    "2.7B": (2560, 10240, 32, 32),
}
TIMM = {
    "timm_vision_transformer": "vit_small_patch16_224",
    "timm_efficientnet": "mixnet_m",
    "timm_nfnet": "dm_nfnet_f0",
    "timm_regnet": "regnety_120",
    "timm_resnest": "resnest14d",
    "timm_vovnet": "vovnet39a",
    "gluon_xception65": "xception65",
}
Job = tuple[torch.nn.Module, Callable[[], torch.Tensor]]


def main() -> None:
    """Counts every model that can be built and is not in the file yet, and writes the file."""
    wanted = {}
    for row in corpus.published():
        if row.training and row.fit and row.batch:
            wanted.setdefault(key_of(row), row)
    there = known() if TARGET.exists() else {}
    made = [Architecture(key=key, counts=counts) for key, counts in there.items()]
    for key, row in sorted(wanted.items(), key=lambda each: str(each[0])):
        found = _counted(row) if key not in there else None
        if found is not None:
            made.append(Architecture(key=key, counts=found))
            print(f"{key}: {found.operators:.0f} calls, {found.flops / 1e9:.0f} GFLOP", flush=True)
    with TARGET.open("w", encoding="utf-8") as file:
        write(made, file)
    print(f"{len(made)} of {len(wanted)} in {TARGET}")


def _counted(row: corpus.CorpusRow) -> Any:
    torch.manual_seed(0)
    try:
        with operator_counting.without_memory():
            job = _job(row)
            if job is None:
                return None
            model, loss = job
            held = sum(each.numel() for each in model.parameters())
            if row.parameters and abs(held / row.parameters - 1) > TOLERANCE:
                print(f"{row.model}: {held:.4g} parameters, published {row.parameters:.4g}")
                return None
            model.train()

            def step() -> None:
                model.zero_grad(set_to_none=True)
                with torch.autocast("cpu", torch.bfloat16, enabled="amp" in row.precision):
                    value = loss()
                value.backward()

            return operator_counting.count(model, step, row.batch)
    except Exception as error:  # noqa: BLE001 - other people's models
        lines = traceback.format_exception_only(error)
        print(f"{row.model}: {lines[-1].strip()[:200]}", file=sys.stderr)
        return None


def _job(row: corpus.CorpusRow) -> Job | None:
    cs336 = re.fullmatch(r"CS336 BasicsTransformerLM (\S+)", row.model)
    if cs336 and cs336[1] in CS336:
        width, inner, layers, heads = CS336[cs336[1]]
        config = hf.LlamaConfig(
            vocab_size=10_000,
            hidden_size=width,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            attn_implementation="eager",
        )
        return _language(hf.LlamaForCausalLM(config), config, row.batch, row.length)
    if row.model in TORCHBENCH:
        name, changed, length = TORCHBENCH[row.model]
        return _transformer(name, changed, row.batch, length)
    if hasattr(hf, row.model) or row.model in DASHBOARD:
        name, changed = DASHBOARD.get(row.model, (row.model, {}))
        return _transformer(name, changed, row.batch, row.length or 512)
    if row.model in published_models.BUILDERS:
        return published_models.BUILDERS[row.model](int(row.batch or 1))
    return _image(row)


def _transformer(name: str, changed: dict[str, Any], batch: Any, length: float) -> Job:
    kind = getattr(hf, name)
    config = kind.config_class(**changed)
    config._attn_implementation = "eager"
    if getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0
    if name.endswith("ForCausalLM") and hasattr(config, "is_decoder"):
        config.is_decoder = True
    model = kind(config)
    if name == "MT5ForConditionalGeneration":
        # Published with a head of its own, which today's class ties to the embedding.
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    return _language(model, config, batch, length)


def _language(model: Any, config: Any, batch: Any, length: Any) -> Job:
    tokens = torch.zeros(int(batch), int(length), dtype=torch.int64)
    given: dict[str, Any] = {"input_ids": tokens}
    if type(model).__name__.endswith("ForQuestionAnswering"):
        ends = torch.zeros(int(batch), dtype=torch.int64)
        given |= {"start_positions": ends, "end_positions": ends}
    elif type(model).__name__.endswith("ForSequenceClassification"):
        config.pad_token_id = 0
        given["labels"] = torch.zeros(int(batch), dtype=torch.int64)
    else:
        given["labels"] = tokens
    return model, lambda: model(**given).loss


def _image(row: corpus.CorpusRow) -> Job | None:
    import timm
    import torchvision

    name = TIMM.get(row.model, row.model)
    if row.model in ("resnet152", "resnet18", "resnet50", "resnext50_32x4d", "vgg16") or (
        row.model in ("densenet121", "mobilenet_v2", "mobilenet_v3_large", "mnasnet1_0")
    ):
        model = torchvision.models.get_model(row.model)
        side = 224
    elif row.model == "squeezenet1_1":
        model, side = torchvision.models.squeezenet1_1(), 224
    elif name and timm.is_model(name):
        # Built for real, as some compute their widths with tensors; then without memory.
        with torch_internals.real_tensors():
            model = timm.create_model(name)
        model._apply(torch.zeros_like)
        side = timm.data.resolve_data_config({}, model=model)["input_size"][-1]
    else:
        return None
    side = int(row.image or side)
    images = torch.zeros(int(row.batch or 1), 3, side, side)
    labels = torch.zeros(int(row.batch or 1), dtype=torch.int64)

    def loss() -> torch.Tensor:
        out = model(images)
        out = out[0] if isinstance(out, tuple) else out
        return torch.nn.functional.cross_entropy(out.float(), labels)

    return model, loss


if __name__ == "__main__":
    main()
