"""Workloads whose batches are as long as their longest sample."""

import torch
from torch import nn


class Masked(nn.Module):
    """Takes a batch by its names."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.hidden, self.out = nn.Linear(16, 16), nn.Linear(16, 2)

    def forward(self, input_ids, attention_mask):
        inner = torch.tanh(self.hidden(self.embed(input_ids)))
        return self.out(inner) * attention_mask[..., None]


def padded_to_longest(device):
    """Batches of 8 to 31 tokens, with a mask of what is there."""
    torch.manual_seed(0)

    def batches(step):
        random = torch.Generator().manual_seed(step)
        lengths = torch.randint(8, 32, (4,), generator=random)
        mask = torch.arange(int(lengths.max()))[None, :] < lengths[:, None]
        ids = torch.randint(1, 50, mask.shape, generator=random) * mask
        return {"input_ids": ids.to(device), "attention_mask": mask.long().to(device)}

    return {
        "model": Masked().to(device),
        "batches": batches,
        "loss": lambda model, batch: model(**batch).square().mean(),
    }
