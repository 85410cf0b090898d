"""A small job for the pages beside this one: real text, a tokenizer of its words, and a tiny BERT.

Which package does a sentence come from? The sentences stand in the docstrings of torch,
transformers and numpy, so that nothing is downloaded. Weights are random. Dropout is off, as in
many fine-tuning recipes: compiled and eager losses can then be compared.
"""

import ast
import collections
import functools
import importlib.util
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForSequenceClassification

PACKAGES = ("torch", "transformers", "numpy")
VOCABULARY, LENGTH = 1_000, 48
SPECIAL = ["[PAD]", "[UNK]"]


def sentences(package: str) -> Iterator[str]:
    """Yields the sentences of a package's docstrings, in the order of its files."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations
    for file in sorted(Path(spec.submodule_search_locations[0]).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = re.sub(r"\s+", " ", ast.get_docstring(node) or "")
                for sentence in re.split(r"(?<=[.!?]) (?=[A-Z])", text):
                    if len(sentence.split()) > 4:
                        yield sentence


def tokenizer(texts: list[str]) -> Tokenizer:
    """Returns one whose words are the most frequent of some texts, the same in each process."""
    words = collections.Counter(re.findall(r"\w+|[^\w\s]", " ".join(texts).lower()))
    frequent = sorted(words, key=lambda word: (-words[word], word))[: VOCABULARY - len(SPECIAL)]
    numbers = {word: number for number, word in enumerate([*SPECIAL, *frequent])}
    made = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.enable_truncation(LENGTH)
    made.enable_padding(length=LENGTH)
    return made


@functools.cache
def samples(number: int = 384) -> list[dict[str, torch.Tensor]]:
    """Returns tokenized sentences of equal length, each with its package as label."""
    each = number // len(PACKAGES)
    texts = [list(itertools.islice(sentences(package), each)) for package in PACKAGES]
    made = tokenizer(list(itertools.chain(*texts)))
    return [
        {
            "input_ids": torch.tensor(encoded.ids),
            "attention_mask": torch.tensor(encoded.attention_mask),
            "labels": torch.tensor(label),
        }
        for label, own in enumerate(texts)
        for encoded in made.encode_batch([text.lower() for text in own])
    ]


def bert(seed: int = 0) -> BertForSequenceClassification:
    """Returns a BERT of 2 layers of width 64, its weights drawn with a seed."""
    torch.manual_seed(seed)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=256,
            max_position_embeddings=LENGTH,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            attn_implementation="eager",
            num_labels=len(PACKAGES),
        )
    )
