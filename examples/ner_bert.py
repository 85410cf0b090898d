"""Token classification (named entities) with a small BERT, as a workload for the advisor.

    advise run examples/ner_bert.py:build --steps 20000

The architecture is BERT's, made small enough for a laptop: 4 layers of width 64, batches of 8
sentences of 128 tokens, GELU in its tanh form and attention written out in plain operators.
Dropout is off, as in many fine-tuning recipes. Weights are random and the sentences made up, so
nothing is downloaded.
"""

import torch
from transformers import BertConfig, BertForTokenClassification

LABELS = 9  # B- and I- of four kinds of entities, and O
VOCABULARY = 2_000
BATCH_SIZE, LENGTH = 8, 128


def build(device: torch.device) -> dict[str, object]:
    """Returns the workload: a model, its optimizer, and batches as a function of the step."""
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
        num_labels=LABELS,
    )
    model = BertForTokenClassification(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)

    def batches(step: int) -> dict[str, torch.Tensor]:
        random = torch.Generator().manual_seed(step)
        size = (BATCH_SIZE, LENGTH)
        tokens = torch.randint(0, VOCABULARY, size, generator=random)
        labels = torch.randint(0, LABELS, size, generator=random)
        mask = torch.ones(size, dtype=torch.long)
        return {
            "input_ids": tokens.to(device),
            "attention_mask": mask.to(device),
            "labels": labels.to(device),
        }

    return {"model": model, "optimizer": optimizer, "batches": batches}
