"""A transformer for several ranks: advise run examples/ranks.py:build --ranks 2 --steps 100000

`build` knows nothing of ranks: the advisor spreads its model, by DDP or as `--wrap fsdp2` says, and
tries in which order wrapping and compiling work. `build_sharded` spreads its model by itself, as
`--wrap own` leaves it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH, BATCH = 512, 128, 4, 4, 64, 8


class Block(nn.Module):
    """Attention and a feed-forward network, each with its residual."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.feed_norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns what comes after the block, of the same shape."""
        rows, length, _ = x.shape
        heads = self.query_key_value(self.attention_norm(x)).view(rows, length, 3, HEADS, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.down(nn.functional.gelu(self.up(self.feed_norm(x))))


class Transformer(nn.Module):
    """A small causal language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the logits of each next token."""
        x = self.embedding(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Returns the mean cross-entropy of the next tokens."""
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def batches(device: torch.device) -> Callable[[int], torch.Tensor]:
    """Returns a function of the step; ranks are given every so-many-th of its batches."""

    def batch(step: int) -> torch.Tensor:
        random = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=random)
        return tokens.to(device)

    return batch


def build(device: torch.device) -> dict[str, Any]:
    """Returns the training job, which knows nothing of ranks."""
    model = Transformer().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    return {"model": model, "batches": batches(device), "loss": loss, "optimizer": optimizer}


def build_sharded(device: torch.device, mesh: Any) -> dict[str, Any]:
    """Returns the same job, sharded by its own hand over the mesh of all ranks."""
    model = Transformer().to(device)
    if mesh is not None:
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    # After sharding, which replaces the parameters.
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    rank = 0 if mesh is None else mesh.get_rank()
    ranks = 1 if mesh is None else mesh.size()
    batch = batches(device)
    # A function that takes `mesh` knows of the ranks: its batches are this rank's own.
    return {
        "model": model,
        "batches": lambda step: batch(step * ranks + rank),
        "loss": loss,
        "optimizer": optimizer,
    }
