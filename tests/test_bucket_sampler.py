"""Batches of about equally long samples: what the sampler draws, and how the collator pads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.buckets import BucketBatchSampler, PadToBoundary

EDGES = (8, 16, 32)


def _some_lengths(number: int = 200, seed: int = 0) -> list[int]:
    drawn = np.random.default_rng(seed).integers(1, EDGES[-1] + 1, number)
    return [int(length) for length in drawn]


def _boundary(lengths: Sequence[int], edges: Sequence[int] = EDGES) -> int:
    return next(edge for edge in edges if edge >= max(lengths))


# --- the sampler, on one rank


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("number", [1, 15, 16, 17, 200])
def test_every_sample_comes_once_in_an_epoch(number: int, shuffle: bool) -> None:
    sampler = BucketBatchSampler(_some_lengths(number), EDGES, 16, shuffle=shuffle)
    batches = list(sampler)
    assert sorted(index for batch in batches for index in batch) == list(range(number))
    assert len(batches) == len(sampler)
    assert all(type(index) is int for batch in batches for index in batch)


def test_at_most_one_batch_is_smaller() -> None:
    for number in range(1, 120, 7):
        sizes = Counter(map(len, BucketBatchSampler(_some_lengths(number), EDGES, 8)))
        assert max(sizes) <= 8
        assert sum(count for size, count in sizes.items() if size < 8) <= 1


def test_batches_hold_one_bucket_and_what_was_left_of_shorter_ones() -> None:
    lengths = _some_lengths()
    mixed = 0
    for batch in BucketBatchSampler(lengths, EDGES, 8):
        held = Counter(_boundary([lengths[index]]) for index in batch)
        mixed += sum(count for edge, count in held.items() if edge < max(held))
    # Fewer than a batch of each bucket but the last is carried over.
    assert mixed <= 7 * (len(EDGES) - 1) * 2
    assert mixed < len(lengths) / 4


def test_drop_last_leaves_out_only_what_fills_no_batch() -> None:
    lengths = _some_lengths(203)
    batches = list(BucketBatchSampler(lengths, EDGES, 8, drop_last=True))
    assert {len(batch) for batch in batches} == {8}
    assert len(batches) == 203 // 8 == len(BucketBatchSampler(lengths, EDGES, 8, drop_last=True))
    assert list(BucketBatchSampler([3, 4], EDGES, 8, drop_last=True)) == []


def test_same_epoch_and_seed_give_the_same_batches() -> None:
    lengths = _some_lengths()
    first, second = (BucketBatchSampler(lengths, EDGES, 8, seed=3) for _ in range(2))
    first.set_epoch(5)
    once = list(first)
    for _ in range(2):
        second.set_epoch(5)
        assert list(second) == once
    first.set_epoch(6)
    assert list(first) != once
    other = BucketBatchSampler(lengths, EDGES, 8, seed=4)
    other.set_epoch(5)
    assert list(other) != once


def test_epochs_differ_without_set_epoch() -> None:
    sampler = BucketBatchSampler(_some_lengths(), EDGES, 8)
    assert list(sampler) != list(sampler)


def test_short_and_long_batches_are_mixed_when_shuffled() -> None:
    lengths = _some_lengths()
    edges = [_boundary([lengths[i] for i in b]) for b in BucketBatchSampler(lengths, EDGES, 8)]
    assert edges != sorted(edges)


def test_unshuffled_batches_keep_the_order_of_the_data() -> None:
    sampler = BucketBatchSampler([3, 20, 4, 30, 5, 6], EDGES, 2, shuffle=False)
    assert list(sampler) == [[0, 2], [4, 5], [1, 3]]
    assert list(sampler) == list(sampler)


@pytest.mark.parametrize("as_what", [tuple, np.array, torch.tensor, np.uint16])
def test_lengths_and_boundaries_may_be_arrays(as_what: Any) -> None:
    lengths, edges = as_what(_some_lengths()), as_what(EDGES)
    expected = list(BucketBatchSampler(_some_lengths(), EDGES, 8))
    assert list(BucketBatchSampler(lengths, edges, 8)) == expected


def test_token_budget_holds_more_short_samples() -> None:
    lengths = _some_lengths(1000)
    sampler = BucketBatchSampler(lengths, EDGES, tokens_per_batch=128)
    batches = list(sampler)
    assert sorted(index for batch in batches for index in batch) == list(range(1000))
    small = 0
    for batch in batches:
        edge = _boundary([lengths[index] for index in batch])
        assert len(batch) * edge <= 128
        small += len(batch) < 128 // edge
    # One at the end; and at each edge what was carried over may fill one that others are not in.
    assert small <= 1 + len(EDGES)
    assert sampler.batch_size is None


def test_token_budget_smaller_than_a_sample_holds_one() -> None:
    batches = list(BucketBatchSampler([30, 31, 32], EDGES, tokens_per_batch=16))
    assert sorted(batches) == [[0], [1], [2]]


def test_samples_as_long_as_a_boundary_are_in_its_bucket() -> None:
    batches = list(BucketBatchSampler([8, 8, 9, 16], EDGES, 2, shuffle=False))
    assert batches == [[0, 1], [2, 3]]


# --- several ranks


def _ranks(lengths: Sequence[int], ranks: int, **options: Any) -> list[list[list[int]]]:
    found = []
    for rank in range(ranks):
        sampler = BucketBatchSampler(lengths, EDGES, num_replicas=ranks, rank=rank, **options)
        sampler.set_epoch(2)
        found.append(list(sampler))
        assert len(found[-1]) == len(sampler)
    return found


@pytest.mark.parametrize("options", [{"batch_size": 8}, {"tokens_per_batch": 128}])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ranks_share_the_samples(
    ranks: int, drop_last: bool, shuffle: bool, options: dict[str, int]
) -> None:
    lengths = _some_lengths(999)
    found = _ranks(lengths, ranks, shuffle=shuffle, drop_last=drop_last, **options)
    assert len({len(batches) for batches in found}) == 1
    for step in zip(*found, strict=True):
        assert len({len(batch) for batch in step}) == 1, "ranks wait for the largest"
        assert len({_boundary([lengths[i] for i in batch]) for batch in step}) == 1
    drawn = Counter(index for batches in found for batch in batches for index in batch)
    if drop_last:
        assert set(drawn.values()) == {1}
        most = options.get("batch_size") or 128 // EDGES[-1]
        assert len(lengths) - len(drawn) < most * ranks
    else:
        assert set(drawn) == set(range(len(lengths)))
        assert sum(drawn.values()) - len(lengths) < ranks


def test_fewer_samples_than_ranks_still_give_each_a_batch() -> None:
    for number in (1, 2, 3):
        found = _ranks([5] * number, 8, batch_size=4)
        assert [len(batches) for batches in found] == [1] * 8
        assert {index for (batch,) in found for index in batch} == set(range(number))


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 32), min_size=1, max_size=150),
    ranks=st.integers(1, 5),
    size=st.integers(1, 9),
    tokens=st.booleans(),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
)
def test_any_data_set_is_drawn_completely_and_alike(
    lengths: list[int], ranks: int, size: int, tokens: bool, drop_last: bool, shuffle: bool
) -> None:
    rows: dict[str, Any] = {"tokens_per_batch": size * 16} if tokens else {"batch_size": size}
    found = _ranks(lengths, ranks, drop_last=drop_last, shuffle=shuffle, **rows)
    drawn = Counter(index for batches in found for batch in batches for index in batch)
    assert all(batch for batches in found for batch in batches)
    for step in zip(*found, strict=True):
        assert len({len(batch) for batch in step}) == 1
        if tokens:
            longest = _boundary([lengths[i] for batch in step for i in batch])
            assert len(step[0]) <= max(1, size * 16 // longest)
        else:
            assert len(step[0]) <= size
    if drop_last:
        assert all(count == 1 for count in drawn.values())
    else:
        assert set(drawn) == set(range(len(lengths)))
        assert sum(drawn.values()) - len(lengths) < max(ranks, 1)


# --- what the sampler refuses


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        (([5], EDGES), {}, "give one of batch_size and tokens_per_batch"),
        (([5], EDGES, 4), {"tokens_per_batch": 64}, "give one of"),
        (([5], EDGES, 0), {}, "are at least 1"),
        (([5], EDGES, -1), {}, "are at least 1"),
        (([5], EDGES), {"tokens_per_batch": 0}, "are at least 1"),
        (([5], EDGES, 4), {"rank": 1}, "rank 1 is not one of 1"),
        (([5], EDGES, 4), {"rank": -1}, "rank -1"),
        (([5], EDGES, 4), {"num_replicas": 0}, "is not one of 0"),
        (([], EDGES, 4), {}, "lengths are one whole number for each sample"),
        (([[5]], EDGES, 4), {}, "lengths are one whole number"),
        (([5, 0], EDGES, 4), {}, "at least 1"),
        (([5, -3], EDGES, 4), {}, "at least 1"),
        (([5, 2.5], EDGES, 4), {}, "lengths are one whole number"),
        ((["5"], EDGES, 4), {}, "lengths are one whole number"),
        (([5, 33], EDGES, 4), {}, "sample 1 has length 33, the last boundary is 32"),
        (([5], (), 4), {}, "boundaries are"),
        (([5], (16, 8), 4), {}, "ascending"),
        (([5], (8, 8), 4), {}, "ascending"),
        (([5], (0, 8), 4), {}, "at least 1"),
        (([5], (8.5,), 4), {}, "boundaries are"),
        (([5], 8, 4), {}, "boundaries are"),
    ],
)
def test_what_makes_no_sense_is_a_value_error(
    arguments: tuple[Any, ...], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        BucketBatchSampler(*arguments, **options)


# --- the collator


def _sample(n: int, start: int = 1) -> dict[str, Any]:
    return {
        "input_ids": list(range(start, start + n)),
        "attention_mask": [1] * n,
        "token_type_ids": [1] * n,
        "labels": [5] * n,
    }


def _as_lists(values: list[int]) -> list[int]:
    return values


@pytest.mark.parametrize("as_what", [_as_lists, np.array, torch.tensor])
def test_fields_are_padded_to_the_first_boundary_that_holds_them(as_what: Any) -> None:
    samples = [{name: as_what(values) for name, values in _sample(n).items()} for n in (3, 9, 1)]
    batch = PadToBoundary(EDGES, pad_token_id=99)(samples)
    assert {name: tuple(rows.shape) for name, rows in batch.items()} == dict.fromkeys(
        ("input_ids", "attention_mask", "token_type_ids", "labels"), (3, 16)
    )
    assert {rows.dtype for rows in batch.values()} == {torch.int64}
    assert batch["input_ids"][0].tolist() == [1, 2, 3] + [99] * 13
    assert batch["attention_mask"][1].tolist() == [1] * 9 + [0] * 7
    assert batch["token_type_ids"][2].tolist() == [1] + [0] * 15
    assert batch["labels"][0].tolist() == [5] * 3 + [-100] * 13


def test_samples_that_fill_the_boundary_are_not_padded() -> None:
    batch = PadToBoundary(EDGES)([_sample(8), _sample(8)])
    assert batch["input_ids"].tolist() == [list(range(1, 9))] * 2
    assert batch["attention_mask"].all()


def test_further_fields_are_padded_or_stacked() -> None:
    samples = [
        {
            "input_ids": [1] * n,
            "boxes": np.ones((n, 4), dtype=np.float32),
            "weights": [0.5] * n,
            "label": n,
            "vector": torch.ones(3),
            "special_tokens_mask": [0] * n,
        }
        for n in (2, 5)
    ]
    batch = PadToBoundary(EDGES, pad_values={"weights": -1.0})(samples)
    assert batch["boxes"].shape == (2, 8, 4)
    assert batch["boxes"].dtype == torch.float32
    assert batch["boxes"].sum() == 4 * 7
    assert batch["weights"][0].tolist() == [0.5] * 2 + [-1.0] * 6
    assert batch["label"].tolist() == [2, 5]
    assert batch["vector"].shape == (2, 3)
    assert batch["special_tokens_mask"][0].tolist() == [0] * 2 + [1] * 6


def test_missing_attention_mask_is_made() -> None:
    batch = PadToBoundary(EDGES)([{"input_ids": [4, 5, 6]}, {"input_ids": [4]}])
    assert batch["attention_mask"].tolist() == [[1] * 3 + [0] * 5, [1] + [0] * 7]
    assert batch["attention_mask"].dtype == torch.int64


def test_samples_without_token_ids_get_no_mask() -> None:
    batch = PadToBoundary(EDGES)(
        [{"input_values": [0.5] * 9, "id": torch.tensor(3), "number": np.array(1)}]
    )
    assert set(batch) == {"input_values", "id", "number"}
    assert batch["input_values"].shape == (1, 16)


def test_tokenizer_says_its_padding_and_side() -> None:
    tokenizer = SimpleNamespace(pad_token_id=7, pad_token_type_id=3, padding_side="left")
    batch = PadToBoundary(EDGES, tokenizer=tokenizer)(
        [_sample(2), {**_sample(6), "labels": [5] * 6}]
    )
    assert batch["input_ids"][0].tolist() == [7] * 6 + [1, 2]
    assert batch["attention_mask"][0].tolist() == [0] * 6 + [1, 1]
    assert batch["token_type_ids"][0].tolist() == [3] * 6 + [1, 1]
    assert batch["labels"][0].tolist() == [-100] * 6 + [5, 5]
    made = PadToBoundary(EDGES, tokenizer=tokenizer)([{"input_ids": [1, 2]}])
    assert made["attention_mask"].tolist() == [[0] * 6 + [1, 1]]


def test_tokenizer_without_padding_token_takes_the_given_one() -> None:
    tokenizer = SimpleNamespace(pad_token_id=None, padding_side="right")
    batch = PadToBoundary(EDGES, tokenizer=tokenizer, pad_token_id=9)([{"input_ids": [1]}])
    assert batch["input_ids"].tolist() == [[1] + [9] * 7]


def test_label_is_named_for_the_models_of_transformers() -> None:
    samples = [{"input_ids": [1, 2], "label": 1}, {"input_ids": [3], "label": 0}]
    tokenizer = SimpleNamespace(pad_token_id=0)
    assert PadToBoundary(EDGES, tokenizer=tokenizer)(samples)["labels"].tolist() == [1, 0]
    assert "label" in PadToBoundary(EDGES)(samples)


def test_own_length_of_a_sample() -> None:
    collate = PadToBoundary(EDGES, length_of=lambda sample: len(sample["frames"]))
    batch = collate([{"frames": [[0.0, 1.0]] * 5, "text": [1] * 20}])
    assert batch["frames"].shape == (1, 8, 2)
    assert batch["text"].shape == (1, 20)


def test_boundary_of_a_length() -> None:
    collate = PadToBoundary(EDGES)
    assert [collate.boundary(n) for n in (1, 8, 9, 16, 17, 32)] == [8, 8, 16, 16, 32, 32]


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ([_sample(33)], "a sample of length 33 is longer than the last boundary 32"),
        ([_sample(3), _sample(0)], "a sample is empty"),
        ([{"input_ids": [[1, 2]]}], r"'input_ids' has the shape \(1, 2\)"),
        ([{"input_ids": [1], "text": "a"}], "the field 'text' makes no tensor"),
        ([{"input_ids": [1], "text": None}], "the field 'text' makes no tensor"),
        (
            [{"input_ids": [1, 2], "labels": [1]}, {"input_ids": [1, 2], "labels": [1, 2, 3]}],
            r"the field 'labels' has rows of the sizes \[\(1,\), \(3,\)\]",
        ),
        ([{"number": 3, "text": "abc"}], "no field of the sample is a sequence: number, text"),
    ],
)
def test_samples_that_cannot_be_padded_are_a_value_error(
    samples: list[dict[str, Any]], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        PadToBoundary(EDGES)(samples)


@pytest.mark.parametrize("boundaries", [(), (8, 4), (0,), (2.5,), 8])
def test_boundaries_of_the_collator_are_checked(boundaries: Any) -> None:
    with pytest.raises(ValueError, match="boundaries are lengths of at least 1, ascending"):
        PadToBoundary(boundaries)


# --- in training loops


class _Data(torch.utils.data.Dataset[dict[str, Any]]):
    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        n = self._lengths[index]
        return {"input_ids": [index + 1] * n, "labels": [index % 2] * n}


@pytest.mark.parametrize("shuffle", [True, False])
def test_data_loader_gives_batches_of_the_boundaries(shuffle: bool) -> None:
    lengths = _some_lengths(100)
    sampler = BucketBatchSampler(lengths, EDGES, 8, shuffle=shuffle)
    loader = torch.utils.data.DataLoader(
        _Data(lengths), batch_sampler=sampler, collate_fn=PadToBoundary(EDGES), num_workers=0
    )
    assert len(loader) == len(sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        seen: list[int] = []
        for batch in loader:
            assert batch["input_ids"].shape[1] in EDGES
            assert torch.equal(batch["labels"] == -100, batch["attention_mask"] == 0)
            own = batch["attention_mask"].sum(1).tolist()
            indices = (batch["input_ids"][:, 0] - 1).tolist()
            assert own == [lengths[index] for index in indices]
            seen += indices
        assert sorted(seen) == list(range(100))


def test_trainer_of_transformers_trains_on_the_batches(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    lengths = _some_lengths(24)
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=8, max_position_embeddings=32, num_labels=2,
    )  # fmt: skip
    shapes: list[tuple[int, ...]] = []

    class Bucketed(transformers.Trainer):  # type: ignore[misc, name-defined]
        def get_train_dataloader(self) -> Any:
            sampler = BucketBatchSampler(lengths, EDGES, 8)
            loader = torch.utils.data.DataLoader(
                _Data(lengths), batch_sampler=sampler, collate_fn=PadToBoundary(EDGES)
            )
            return self.accelerator.prepare(loader)

        def training_step(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
            shapes.append(tuple(inputs["input_ids"].shape))
            return super().training_step(model, inputs, *rest, **named)

    trainer = Bucketed(
        model=transformers.BertForTokenClassification(config),
        args=transformers.TrainingArguments(
            output_dir=str(tmp_path), num_train_epochs=2, report_to=[], use_cpu=True,
            save_strategy="no", disable_tqdm=True,
        ),
        train_dataset=_Data(lengths),
    )  # fmt: skip
    done = trainer.train()
    # 24 samples in batches of 8, two epochs.
    assert done.global_step == len(shapes) == 6
    assert np.isfinite(done.training_loss)
    assert {rows for rows, _ in shapes} == {8}
    assert {length for _, length in shapes} <= set(EDGES)
