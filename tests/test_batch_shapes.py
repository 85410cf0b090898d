"""Which size of a batch is its length, and batches made to measure."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from transformers import BatchEncoding

from advisor.profiler.batch_shapes import Layout, layout, resized, sizes_of
from advisor.profiler.records import BatchShapes


def seen(*batches: Any) -> Counter[Any]:
    counts: Counter[Any] = Counter()
    for batch in batches:
        counts[sizes_of(batch)] += 1
    return counts


def tokens(rows: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.arange(rows * length).reshape(rows, length)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids % 3}


def test_the_same_shape_always() -> None:
    assert layout(seen(tokens(4, 8), tokens(4, 8))).kind is BatchShapes.CONSTANT


def test_a_length_that_varies_is_found_wherever_it_occurs() -> None:
    def batch(length: int) -> dict[str, torch.Tensor]:
        return {**tokens(4, length), "mask": torch.zeros(4, 1, length, length)}

    found = layout(seen(batch(8), batch(12), batch(9)))
    assert found.kind is BatchShapes.LENGTH
    assert found.length == ((0, 1), (1, 1), (2, 1), (3, 2), (3, 3))
    assert found.rows == ((0, 0), (1, 0), (2, 0), (3, 0))
    assert found.tokens is None


def test_a_smaller_last_batch_is_no_length() -> None:
    found = layout(seen(*[tokens(4, 8)] * 5, tokens(3, 8)))
    assert found.kind is BatchShapes.ROWS


def test_a_smaller_last_batch_beside_a_length() -> None:
    found = layout(seen(*[tokens(4, n) for n in (8, 9, 10, 11, 12)], tokens(3, 8)))
    assert found.kind is BatchShapes.LENGTH
    assert found.tokens is None


def test_rows_that_shrink_as_the_length_grows_are_a_token_budget() -> None:
    found = layout(seen(*[tokens(480 // n, n) for n in (8, 10, 12, 20, 40)]))
    assert found.kind is BatchShapes.LENGTH
    assert found.tokens == 480


def test_sizes_that_vary_on_their_own_are_several() -> None:
    graphs = [(torch.zeros(n, 4), torch.zeros(2, e)) for n, e in ((5, 9), (6, 30), (7, 11))]
    assert layout(seen(*graphs)).kind is BatchShapes.SEVERAL
    translation = [
        {"source": torch.zeros(4, a), "target": torch.zeros(4, b)} for a, b in ((5, 9), (6, 7))
    ]
    assert layout(seen(*translation)).kind is BatchShapes.SEVERAL


def test_packed_rows_are_no_length_to_pad() -> None:
    packed = [(torch.zeros(n, 4), torch.zeros(n)) for n in (20, 31, 25, 28)]
    assert layout(seen(*packed)).kind is BatchShapes.SEVERAL


def test_a_length_given_beside_constant_batches() -> None:
    found = layout(seen(tokens(4, 64)), constant_length=True)
    assert found.kind is BatchShapes.CONSTANT
    assert found.length == ((0, 1), (1, 1), (2, 1))
    assert found.size(((4, 64), (4, 64), (4, 64))) == (4, 64)


def test_a_batch_is_made_longer_and_shorter_of_what_it_holds() -> None:
    batch = tokens(4, 8)
    found = layout(seen(batch, tokens(4, 12)))
    longer = resized(batch, found, 4, 20)
    assert {name: tuple(t.shape) for name, t in longer.items()} == dict.fromkeys(batch, (4, 20))
    # Only values that were there: token ids stay within the vocabulary.
    assert set(longer["input_ids"].unique().tolist()) <= set(batch["input_ids"].unique().tolist())
    shorter = resized(batch, found, 4, 3)
    assert torch.equal(shorter["input_ids"], batch["input_ids"][:, :3])
    assert torch.equal(batch["input_ids"], tokens(4, 8)["input_ids"])
    assert tuple(resized(batch, found, 6, 8)["labels"].shape) == (6, 8)


def test_a_batch_keeps_its_class() -> None:
    batch = BatchEncoding(tokens(2, 4))
    found = layout(seen(batch, BatchEncoding(tokens(2, 6))))
    made = resized(batch, found, 2, 5)
    assert isinstance(made, BatchEncoding)
    assert tuple(made.input_ids.shape) == (2, 5)
    assert tuple(batch.input_ids.shape) == (2, 4)


def test_tuples_lists_and_numbers_pass() -> None:
    batch = (torch.ones(2, 4), [torch.ones(2, 4), 7], "name")
    found = Layout(BatchShapes.LENGTH, rows=((0, 0), (1, 0)), length=((0, 1), (1, 1)))
    made = resized(batch, found, 2, 9)
    assert tuple(made[0].shape) == tuple(made[1][0].shape) == (2, 9)
    assert made[1][1:] == [7]
    assert made[2] == "name"
