"""A token classification job on real text of varying length, for bench/shapes.py.

The sentences are those of docstrings and comments in installed packages, the tokenizer is trained
on them here, a label says whether a word is written like a name. Batches are padded to their
longest sentence, as a data collator of transformers pads them.

    advise run bench/shapes_job.py:build --epochs 4 --steps-per-epoch 375
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import BertConfig, BertForTokenClassification

BATCH_SIZE, LONGEST, SENTENCES, VOCABULARY = 16, 160, 6000, 4000
PACKAGES = ("transformers", "torch", "numpy")
PAD = "[PAD]"


def sentences() -> Iterator[str]:
    """Yields the sentences of docstrings in installed packages, in the order of their files."""
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            continue
        for file in sorted(Path(spec.submodule_search_locations[0]).rglob("*.py"))[::3]:
            try:
                tree = ast.parse(file.read_text(encoding="utf-8"))
            except (SyntaxError, UnicodeDecodeError, RecursionError):
                continue
            for node in ast.walk(tree):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                    text = re.sub(r"\s+", " ", ast.get_docstring(node) or "")
                    for sentence in re.split(r"(?<=[.!?]) (?=[A-Z])", text):
                        if len(sentence.split()) > 2:
                            yield sentence


@functools.cache
def samples() -> list[dict[str, list[int]]]:
    """Returns the tokenized sentences with a label for each token."""
    seen: set[str] = set()
    new = (text for text in sentences() if not (text in seen or seen.add(text)))
    texts = list(itertools.islice(new, SENTENCES))
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = [PAD, "[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(
        vocab_size=VOCABULARY, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    found = []
    for encoded in tokenizer.encode_batch(texts):
        ids = encoded.ids[:LONGEST]
        labels = [int(token[:1].isupper()) for token in encoded.tokens[:LONGEST]]
        found.append({"input_ids": ids, "labels": labels})
    return found


def collate(rows: list[dict[str, list[int]]], length: int | None = None) -> dict[str, torch.Tensor]:
    """Returns a batch padded to `length`, or to its longest sentence."""
    longest = length or max(len(row["input_ids"]) for row in rows)

    def padded(name: str, filler: int) -> torch.Tensor:
        return torch.tensor([row[name] + [filler] * (longest - len(row[name])) for row in rows])

    ids = padded("input_ids", 0)
    mask = torch.tensor([[i < len(row["input_ids"]) for i in range(longest)] for row in rows])
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": padded("labels", -100)}


def model(device: torch.device) -> torch.nn.Module:
    """Returns a small BERT with random weights."""
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=8,
        intermediate_size=512,
        hidden_act="gelu_new",
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
        num_labels=2,
    )
    torch.manual_seed(0)
    return BertForTokenClassification(config).to(device)


def build(device: torch.device) -> dict[str, object]:
    """Returns the workload: the loader that anyone would write, and the lengths of the data."""
    data = samples()
    loader = torch.utils.data.DataLoader(
        data,  # type: ignore[arg-type]
        batch_size=BATCH_SIZE,
        shuffle=True,
        collate_fn=collate,
        generator=torch.Generator().manual_seed(0),
    )
    network = model(device)
    return {
        "model": network,
        "optimizer": torch.optim.AdamW(network.parameters(), lr=5e-5),
        "batches": loader,
        "lengths": [len(row["input_ids"]) for row in data],
    }
