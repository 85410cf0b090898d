"""The presets: real models of transformers with random weights, small and at published size."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from advisor.profiler import presets
from advisor.profiler.errors import WorkloadError
from advisor.profiler.preset_table import PRESETS
from advisor.profiler.preset_tasks import TASKS
from advisor.profiler.records import WorkloadSpec

CPU = torch.device("cpu")
EVERY_TASK = [(name, task) for name, row in PRESETS.items() for task in row.tasks]
# One of each kind of model, where the size of the family does not matter.
SIZES = {"bert-large", "gpt2-medium", "gpt2-large", "gpt2-xl", "llama-1b"}
FAMILIES = [name for name in PRESETS if name not in SIZES]

ISSUED = {
    "bert-base", "bert-large", "roberta-base", "distilbert-base", "deberta-v3-base", "gpt2",
    "gpt2-medium", "gpt2-large", "gpt2-xl", "llama-1b", "llama-8b", "qwen-0.5b", "t5-base",
    "vit-base", "swin-tiny", "convnext-tiny", "resnet-50", "whisper-small", "wav2vec2-base",
}  # fmt: skip

TINY_BERT = {
    "model_type": "bert", "architectures": ["BertForTokenClassification"], "vocab_size": 200,
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 64, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "id2label": {"0": "O", "1": "B-PER", "2": "I-PER"},
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Two threads on such small models mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def spec(name: str, cwd: Path | str = "/", **options: Any) -> WorkloadSpec:
    return WorkloadSpec(target=f"hf:{name}", cwd=str(cwd), **options)


def built(name: str, cwd: Path | str = "/", **options: Any) -> tuple[Any, Callable[[int], Any]]:
    torch.manual_seed(0)
    workload: Any = presets.build(spec(name, cwd, **options), CPU)
    return workload["model"], workload["batches"]


def tiny(name: str, **options: Any) -> tuple[Any, Callable[[int], Any]]:
    return built(name, scale="tiny", **options)


def folder(path: Path, config: Mapping[str, object]) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    return path


def refusal(name: str, cwd: Path | str = "/", **options: Any) -> str:
    with pytest.raises(WorkloadError) as caught:
        presets.build(spec(name, cwd, **options), CPU)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- presets


def test_every_preset_of_the_issue_is_there() -> None:
    assert set(presets.names()) >= ISSUED
    assert {"token-classification", "sequence-classification", "masked-lm"} <= set(
        PRESETS["bert-base"].tasks
    )


def test_names_and_descriptions_need_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from advisor.profiler import presets;"
        "assert dict((n, t) for n, t, _ in presets.describe())['bert-large'][0]"
        " == 'token-classification';"
        "assert len(presets.names()) >= 19;"
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("name", "task"), EVERY_TASK)
def test_tiny_preset_trains(name: str, task: str) -> None:
    model, batches = tiny(name, task=task)
    assert type(model).__name__ == PRESETS[name].tasks[task]
    assert model.training
    assert getattr(model.config, "use_cache", False) is False
    loss = model(**batches(0)).loss
    assert loss.ndim == 0
    assert math.isfinite(loss.item())
    loss.backward()
    without = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert without == []
    total = sum(p.grad.abs().sum().item() for p in model.parameters() if p.grad is not None)
    assert math.isfinite(total)
    assert total > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_same_step_gives_the_same_batch_and_loss(name: str) -> None:
    model, batches = tiny(name)
    _, again = tiny(name)
    model.eval()  # without dropout only the batch can change the loss
    with torch.no_grad():
        losses = [model(**batches(step)).loss.item() for step in (0, 1, 0)]
        assert model(**again(1)).loss.item() == losses[1]
    assert losses[0] == losses[2] != losses[1]


def test_seed_changes_the_batches() -> None:
    _, batches = tiny("bert-base")
    _, others = tiny("bert-base", seed=1)
    assert not torch.equal(batches(0)["input_ids"], others(0)["input_ids"])


@pytest.mark.parametrize("name", list(PRESETS))
def test_full_scale_has_the_published_number_of_parameters(name: str) -> None:
    published = PRESETS[name].parameters_m * 1e6
    assert PRESETS[name].source
    assert presets.parameters(spec(name)) == pytest.approx(published, rel=0.03)


@pytest.mark.parametrize("name", FAMILIES)
def test_tiny_is_small(name: str) -> None:
    row = PRESETS[name]
    assert row.tiny_size.length < row.size.length
    assert presets.parameters(spec(name, scale="tiny")) < 1e6


def test_published_regularisation_is_kept() -> None:
    model, _ = tiny("bert-base")
    assert model.config.hidden_dropout_prob == 0.1
    model, _ = tiny("swin-tiny")
    assert model.config.drop_path_rate == 0.1


def test_building_leaves_the_table_as_it_was() -> None:
    before = repr(PRESETS)
    presets.parameters(spec("llama-1b"))  # its configuration class writes into rope_scaling
    assert repr(PRESETS) == before


# --- options


@pytest.mark.parametrize(
    ("name", "length", "key", "shape"),
    [
        ("bert-base", 17, "input_ids", (3, 17)),
        ("t5-base", 40, "labels", (3, 10)),
        ("vit-base", 32, "pixel_values", (3, 3, 32, 32)),
        ("swin-tiny", 28 * 4, "pixel_values", (3, 3, 112, 112)),
        ("resnet-50", 33, "pixel_values", (3, 3, 33, 33)),
        ("whisper-small", 100, "input_features", (3, 80, 100)),
        ("wav2vec2-base", 6400, "input_values", (3, 6400)),
    ],
)
def test_batch_size_and_length_are_taken(
    name: str, length: int, key: str, shape: tuple[int, ...]
) -> None:
    model, batches = tiny(name, batch_size=3, length=length)
    assert tuple(batches(0)[key].shape) == shape
    assert math.isfinite(model(**batches(0)).loss.item())


def test_masked_lm_predicts_the_same_share_of_every_text() -> None:
    _, batches = tiny("bert-base", task="masked-lm", length=40)
    predicted = (batches(0)["labels"] != -100).sum(dim=1)
    assert predicted.tolist() == [6] * 8


def test_tokens_are_never_special_ones() -> None:
    model, batches = tiny("roberta-base", batch_size=64)
    special = {0, 1, 2}
    assert not special & set(batches(0)["input_ids"].flatten().tolist())
    assert batches(0)["attention_mask"].min() == 1
    assert batches(0)["labels"].max() < model.config.num_labels


@pytest.mark.parametrize(
    ("name", "alias", "class_name"),
    [
        ("bert-base", "text-classification", "BertForSequenceClassification"),
        ("bert-base", "fill_mask", "BertForMaskedLM"),
        ("gpt2", "Text-Generation", "GPT2LMHeadModel"),
        ("whisper-small", "automatic-speech-recognition", "WhisperForConditionalGeneration"),
        ("wav2vec2-base", "automatic-speech-recognition", "Wav2Vec2ForCTC"),
    ],
)
def test_pipeline_names_of_tasks_are_understood(name: str, alias: str, class_name: str) -> None:
    model, _ = tiny(name, task=alias)
    assert type(model).__name__ == class_name


@pytest.mark.parametrize("name", ["bert-base", "llama-1b", "resnet-50", "wav2vec2-base"])
def test_bf16_pure_puts_weights_and_inputs_into_bfloat16(name: str) -> None:
    model, batches = tiny(name, precision="bf16-pure")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    floats = {t.dtype for t in batches(0).values() if t.is_floating_point()}
    assert floats <= {torch.bfloat16}
    assert math.isfinite(model(**batches(0)).loss.item())
    assert torch.get_default_dtype() == torch.float32


def test_bf16_pure_leaves_rotary_frequencies_in_float32() -> None:
    model, _ = tiny("llama-1b", precision="bf16-pure")
    frequencies = [b for n, b in model.named_buffers() if "inv_freq" in n]
    assert frequencies
    assert {b.dtype for b in frequencies} == {torch.float32}


def test_bf16_runs_forward_and_loss_under_autocast() -> None:
    torch.manual_seed(0)
    workload: Any = presets.build(spec("bert-base", scale="tiny", precision="bf16"), CPU)
    model, batch = workload["model"], workload["batches"](0)
    seen: list[torch.dtype] = []
    model.classifier.register_forward_hook(lambda _m, _i, out: seen.append(out.dtype))
    loss = workload["loss"](model, batch)
    loss.backward()
    assert seen == [torch.bfloat16]
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("name", ["bert-base", "resnet-50"])
def test_fp16_step_scales_the_loss_and_changes_the_weights(name: str) -> None:
    torch.manual_seed(0)
    workload: Any = presets.build(spec(name, scale="tiny", precision="fp16"), CPU)
    model = workload["model"]
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loss = workload["step"](model, workload["batches"](0), optimizer)
    assert math.isfinite(loss.item())
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_precision_does_not_change_the_weights() -> None:
    plain, _ = tiny("bert-base")
    mixed, _ = tiny("bert-base", precision="bf16")
    for a, b in zip(plain.parameters(), mixed.parameters(), strict=True):
        assert torch.equal(a, b)


# --- folders


def test_folder_trains_what_its_architecture_says(tmp_path: Path) -> None:
    folder(tmp_path, TINY_BERT)
    model, batches = built(tmp_path.name, cwd=tmp_path.parent)
    assert type(model).__name__ == "BertForTokenClassification"
    assert model.config.num_labels == 3
    assert tuple(batches(0)["input_ids"].shape) == (8, 64)  # no more positions than 64
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        loss = model(**batches(0)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_folder_that_save_pretrained_wrote_gives_the_same_model(tmp_path: Path) -> None:
    original, _ = tiny("qwen-0.5b")
    original.config.architectures = [type(original).__name__]
    original.config.save_pretrained(tmp_path)
    model, batches = built(str(tmp_path), batch_size=2, length=16)
    assert type(model) is type(original)
    for a, b in zip(original.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert math.isfinite(model(**batches(0)).loss.item())


@pytest.mark.parametrize(
    ("task", "class_name"),
    [
        ("masked-lm", "BertForMaskedLM"),
        ("sequence-classification", "BertForSequenceClassification"),
        ("question-answering", "BertForQuestionAnswering"),
        ("causal-lm", "BertLMHeadModel"),
    ],
)
def test_task_comes_before_the_architecture(tmp_path: Path, task: str, class_name: str) -> None:
    folder(tmp_path, TINY_BERT)
    model, batches = built(".", cwd=tmp_path, task=task)
    assert type(model).__name__ == class_name
    assert math.isfinite(model(**batches(0)).loss.item())


@pytest.mark.parametrize("problem", ["regression", "multi_label_classification", None])
def test_folder_keeps_its_kind_of_classification(tmp_path: Path, problem: str | None) -> None:
    labels = {"0": "a"} if problem is None else {"0": "a", "1": "b", "2": "c"}
    folder(tmp_path, TINY_BERT | {"problem_type": problem, "id2label": labels})
    model, batches = built(".", cwd=tmp_path, task="sequence-classification")
    assert batches(0)["labels"].is_floating_point()
    assert math.isfinite(model(**batches(0)).loss.item())


def test_folder_in_bfloat16_is_trained_in_float32_unless_asked(tmp_path: Path) -> None:
    folder(tmp_path, TINY_BERT | {"torch_dtype": "bfloat16"})
    model, _ = built(".", cwd=tmp_path)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    model, _ = built(".", cwd=tmp_path, precision="bf16-pure")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_encoder_decoder_folder_classifies_texts(tmp_path: Path) -> None:
    config = {
        "model_type": "bart", "vocab_size": 100, "d_model": 16, "encoder_layers": 1,
        "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
        "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 32,
    }  # fmt: skip
    folder(tmp_path, config)
    for task in ("sequence-classification", "seq2seq-lm"):
        model, batches = built(".", cwd=tmp_path, task=task)
        assert math.isfinite(model(**batches(0)).loss.item())


def test_positions_after_the_padding_token_are_not_counted(tmp_path: Path) -> None:
    config = TINY_BERT | {"model_type": "roberta", "pad_token_id": 1}
    folder(tmp_path, config | {"architectures": ["RobertaForMaskedLM"]})
    model, batches = built(".", cwd=tmp_path, length=62)
    assert math.isfinite(model(**batches(0)).loss.item())
    assert "at most 62" in refusal(".", cwd=tmp_path, length=63)


def test_folder_of_a_preset_name_is_reached_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "bert-base").mkdir()
    folder(tmp_path / "bert-base", TINY_BERT)
    model, _ = built("./bert-base", cwd=tmp_path)
    assert model.config.vocab_size == 200


def test_code_in_a_folder_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "configuration_own.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass OwnConfig: pass\n"
    )
    own = {"auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    folder(tmp_path, own | {"model_type": "own-model"})
    assert "own-model" in refusal(".", cwd=tmp_path)
    folder(tmp_path, TINY_BERT | own)
    built(".", cwd=tmp_path)
    assert not (tmp_path / "ran").exists()


# --- refusals


@pytest.mark.parametrize(
    ("name", "options", "parts"),
    [
        ("bert-bse", {}, ["unknown preset 'bert-bse'", "did you mean bert-base"]),
        ("bert-base-uncased", {}, ["unknown preset", "bert-base"]),
        ("openai/gpt2-xl", {}, ["unknown preset", "nothing is downloaded", "gpt2-xl"]),
        ("zzzzzz", {}, ["unknown preset 'zzzzzz'", "known: bert-base"]),
        ("", {}, ["unknown preset ''"]),
        ("x" * 5000, {}, ["unknown preset"]),
        ("bert-base", {"task": "juggling"}, ["unknown task 'juggling'", "masked-lm"]),
        ("bert-base", {"task": "ctc"}, ["bert-base has no task 'ctc'", "token-classification"]),
        ("bert-base", {"precision": "fp8"}, ["unknown precision 'fp8'", "bf16-pure"]),
        ("bert-base", {"scale": "huge"}, ["unknown scale 'huge'", "full, tiny"]),
        ("bert-base", {"batch_size": 0}, ["batch size 0", "at least 1"]),
        ("bert-base", {"batch_size": -3}, ["batch size -3"]),
        ("bert-base", {"length": 0}, ["length 0 is too small"]),
        ("bert-base", {"length": 1}, ["length 1 is too short", "at least 2"]),
        ("bert-base", {"length": 513}, ["length 513 is too long", "at most 512"]),
        ("roberta-base", {"length": 513}, ["length 513 is too long", "at most 512"]),
        ("gpt2", {"length": 1025}, ["length 1025 is too long", "at most 1024"]),
        ("vit-base", {"length": 230}, ["patch size 16", "224 or 240"]),
        ("resnet-50", {"length": 31}, ["length 31 is too short", "at least 32"]),
        ("whisper-small", {"length": 3002}, ["at most 3000"]),
        ("whisper-small", {"length": 99}, ["even number"]),
        ("wav2vec2-base", {"length": 100}, ["length 100 is too short", "no frame"]),
        ("wav2vec2-base", {"length": 1600}, ["sees 4 frames", "masks 10"]),
    ],
)
def test_refusal_of_a_preset_says_what_why_and_how(
    name: str, options: dict[str, Any], parts: list[str], tmp_path: Path
) -> None:
    message = refusal(name, cwd=tmp_path, **options)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("content", "options", "parts"),
    [
        ("{", {}, ["config.json cannot be read as JSON"]),
        ("\x80", {}, ["config.json cannot be read as JSON"]),
        ("[" * 200_000, {}, ["config.json cannot be read as JSON"]),
        ("[1]", {}, ["names no model_type"]),
        ("{}", {}, ["names no model_type"]),
        ('{"model_type": 5}', {}, ["names no model_type"]),
        ('{"model_type": "brt"}', {}, ["unknown model_type 'brt'", "did you mean"]),
        ({"hidden_size": 33}, {}, ["BertForTokenClassification", "33"]),
        ({"hidden_size": -32}, {}, ["BertForTokenClassification", "cannot be used"]),
        ({"num_attention_heads": 0}, {}, ["cannot be used"]),
        ({"hidden_act": "wow"}, {}, ["cannot be used", "wow"]),
        ({"vocab_size": 1}, {}, ["vocab_size 1 leaves no token"]),
        ({"id2label": {}}, {}, ["has 0 classes", "at least 2"]),
        ({"id2label": {"0": "a"}}, {}, ["has 1 classes", "at least 2"]),
        ({"hidden_size": "wide"}, {}, ["cannot be used"]),
        ({"architectures": None}, {}, ["does not say for which task", "--task", "masked-lm"]),
        ({"architectures": ["BertModel"]}, {}, ["BertModel", "--task"]),
        ({}, {"task": "seq2seq-lm"}, ["has no task 'seq2seq-lm'"]),
        ({}, {"scale": "tiny"}, ["scale 'tiny' is for presets"]),
        ({}, {"length": 65}, ["at most 64"]),
        ({"model_type": "clip"}, {"task": "masked-lm"}, ["has no task", "image-classification"]),
        ({"model_type": "clap"}, {}, ["no task is known for the model_type 'clap'"]),
    ],
)
def test_refusal_of_a_folder_says_what_and_why(
    content: str | dict[str, Any], options: dict[str, Any], parts: list[str], tmp_path: Path
) -> None:
    if isinstance(content, dict):
        folder(tmp_path, TINY_BERT | content)
    else:
        (tmp_path / "config.json").write_text(content, encoding="latin-1")
    message = refusal(".", cwd=tmp_path, **options)
    for part in parts:
        assert part in message


def test_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    assert "does not exist" in refusal("./nowhere", cwd=tmp_path)
    assert "does not exist" in refusal("~nobody-of-that-name/x", cwd=tmp_path)
    assert "has no config.json" in refusal(".", cwd=tmp_path)
    folder(tmp_path, TINY_BERT)
    assert "is not a folder" in refusal("config.json", cwd=tmp_path)


def test_unknown_audio_inputs_are_refused(tmp_path: Path) -> None:
    config = {"model_type": "audio-spectrogram-transformer"}
    folder(tmp_path, config | {"architectures": ["ASTForAudioClassification"]})
    assert "audio inputs" in refusal(".", cwd=tmp_path)


def test_running_out_of_memory_is_not_blamed_on_the_folder(tmp_path: Path) -> None:
    folder(tmp_path, TINY_BERT | {"vocab_size": 2**50})  # 128 PiB
    with pytest.raises(RuntimeError, match="memory"):
        presets.build(spec(".", cwd=tmp_path), CPU)


@pytest.mark.parametrize("module", ["torch", "transformers"])
def test_missing_library_is_named_with_its_extra(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    message = refusal("bert-base", scale="tiny")
    assert f"needs {module}" in message
    assert "pip install 'compile-advisor[profiler]'" in message


def test_device_without_float16_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # As torch before 2.3 on the CPU: its autocast knew bfloat16 only.
    monkeypatch.setattr(torch.amp.autocast_mode, "is_autocast_available", lambda _device: False)
    message = refusal("bert-base", scale="tiny", precision="fp16")
    assert "this cpu cannot train in float16" in message
    assert "--precision float32" in message


def test_tasks_are_named_as_transformers_names_their_mappings() -> None:
    from transformers.models.auto import modeling_auto

    for task in TASKS.values():
        assert getattr(modeling_auto, task.mapping)
