"""Lengths seen in real batches, and real trials along them in their own process."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from advisor.profiler import job_lengths
from advisor.profiler.batch_shapes import layout, sizes_of
from advisor.profiler.errors import WorkloadError
from advisor.profiler.launch import TrialHost
from advisor.profiler.lengths import counted
from advisor.profiler.records import (
    BatchShapes,
    Config,
    Dynamic,
    Lengths,
    LengthSource,
    Measuring,
    Trial,
    TrialKind,
    TrialSpec,
    TrialStatus,
    WorkloadSpec,
)
from advisor.profiler.shape_times import eager_times
from advisor.profiler.training import Trainer
from advisor.profiler.workload import Workload

FILE = Path(__file__).parent / "workloads" / "varying.py"


class Tagger(nn.Module):
    """A tiny model of token ids; `config` as transformers' models have one."""

    class config:
        max_position_embeddings = 64

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 16)
        self.layer = nn.Linear(16, 16)
        self.head = nn.Linear(16, 2)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = torch.tanh(self.layer(self.embed(ids))) * mask[..., None]
        out: torch.Tensor = self.head(hidden)
        return out


def batch(lengths: list[int], to: int | None = None) -> dict[str, torch.Tensor]:
    longest = to or max(lengths)
    mask = torch.tensor([[i < n for i in range(longest)] for n in lengths]).long()
    return {"input_ids": torch.randint(1, 100, mask.shape) * mask, "attention_mask": mask}


def trainer(batches: Any) -> Trainer:
    torch.manual_seed(0)
    model = Tagger()
    workload = Workload(
        model=model,
        batches=batches,
        loss=lambda m, b: m(b["input_ids"], b["attention_mask"]).square().mean(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
    )
    return Trainer(workload, torch.device("cpu"))


def random_batches(step: int) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(step)
    return batch([int(n) for n in rng.integers(4, 40, size=8)])


def test_the_samples_own_lengths_are_read_from_their_masks() -> None:
    found, data = job_lengths.find(trainer(random_batches), Counter(), None, 5.0)
    assert found.kind is BatchShapes.LENGTH
    assert data is not None
    assert data.source is LengthSource.BATCHES
    assert not data.whole_batches
    assert (min(data.values), max(data.values)) == (4, 39)
    assert sum(data.counts) == 8 * sum(each.count for each in data.batches)
    assert data.batch_size == 8


def test_without_a_mask_only_batches_are_known() -> None:
    def plain(step: int) -> dict[str, torch.Tensor]:
        length = 8 + step % 5
        ids = torch.randint(1, 100, (4, length))
        return {"input_ids": ids, "attention_mask": torch.rand(4, length)}

    _, data = job_lengths.find(trainer(plain), Counter(), None, 5.0)
    assert data is not None
    assert data.whole_batches
    assert data.values == (8, 9, 10, 11, 12)


def test_given_lengths_take_their_rules_from_the_batches() -> None:
    def rounded(step: int) -> dict[str, torch.Tensor]:
        return batch([3, 5], to=8 * (1 + step % 4))

    given = counted([3, 5, 30], "lengths", LengthSource.FILE)
    _, data = job_lengths.find(trainer(rounded), Counter(), given, 5.0)
    assert data is not None
    assert (data.batch_size, data.pad_multiple, data.pad_to) == (2, 8, None)
    assert data.batches == ()


def test_given_lengths_make_fixed_padding_a_choice() -> None:
    given = counted([3, 5, 30], "lengths", LengthSource.FILE)
    fixed = trainer(lambda step: batch([3, 5], to=32))
    found, data = job_lengths.find(fixed, Counter(), given, 5.0)
    assert found.kind is BatchShapes.CONSTANT
    assert data is not None
    assert data.pad_to == 32


def test_constant_batches_alone_have_no_lengths() -> None:
    found, data = job_lengths.find(trainer(lambda step: batch([3, 5], to=32)), Counter(), None, 1.0)
    assert found.kind is BatchShapes.CONSTANT
    assert data is None


def test_a_sample_longer_than_the_model_takes_is_one_sentence() -> None:
    given = counted([3, 65], "lengths", LengthSource.FILE)
    with pytest.raises(WorkloadError, match="a sample has length 65: the model takes 64 positions"):
        job_lengths.find(trainer(random_batches), Counter(), given, 1.0)


def test_a_sample_longer_than_its_padding_is_one_sentence() -> None:
    given = counted([3, 40], "lengths", LengthSource.FILE)
    with pytest.raises(WorkloadError, match="batches are padded to 32"):
        job_lengths.find(trainer(lambda step: batch([3], to=32)), Counter(), given, 1.0)


@pytest.mark.parametrize(
    ("lengths", "says"),
    [
        ([], "has no lengths"),
        ([3, 0], "has 0 as length number 2"),
        (["a"], "it is text"),
        ({"lengths": [3], "batchsize": 4}, "did you mean 'batch_size'"),
        ({"lengths": [3], "batch_size": 0}, "at least 1"),
        ({"batch_size": 4}, "has no lengths"),
        (5, "no list of lengths"),
    ],
)
def test_a_workloads_wrong_lengths_are_one_sentence(lengths: Any, says: str) -> None:
    with pytest.raises(WorkloadError, match=says):
        job_lengths.of_workload(lengths)


def test_a_workloads_lengths_with_rules() -> None:
    data = job_lengths.of_workload(
        {"lengths": torch.tensor([5, 3, 3]), "tokens_per_batch": 64, "drop_last": True}
    )
    assert data == Lengths(
        values=(3, 5),
        counts=(2, 1),
        tokens_per_batch=64,
        drop_last=True,
        source=LengthSource.WORKLOAD,
    )


def test_eager_steps_are_measured_along_the_lengths() -> None:
    made = trainer(lambda step: batch([16, 512] * 16))
    seen = Counter({sizes_of(batch([n] * 32)): 1 for n in (16, 512)})
    data = counted([16] * 50 + [512] * 50, "lengths", LengthSource.FILE)
    rows = Lengths(values=data.values, counts=data.counts, batch_size=32)
    times = eager_times(made, layout(seen), rows, (16, 512), 1.0)
    assert {(t.rows, t.length) for t in times} >= {(32, 16), (32, 512)}
    for each in times:
        figure = each.eager_step_s
        assert figure is not None
        assert 0 < figure.low <= figure.median <= figure.high
        assert each.step_s is None


def along(folder: Path, dynamic: Dynamic, lengths: tuple[int, ...], *, mark: bool = False) -> Trial:
    spec = TrialSpec(
        trial_id=f"along-{dynamic.value}-{mark}",
        kind=TrialKind.SHAPES,
        workload=WorkloadSpec(target=f"{FILE}:padded_to_longest", cwd=str(FILE.parent)),
        folder=str(folder),
        config=Config(dynamic=dynamic),
        measuring=Measuring(max_steady_s=2.0),
        shapes=tuple((4, length) for length in lengths),
        mark_dynamic=mark,
    )

    async def ran() -> Trial:
        async with TrialHost.start() as host:
            return await host.run(spec, on_progress=lambda _: None)

    return asyncio.run(ran())


@pytest.mark.trial
def test_one_graph_serves_all_lengths_or_each_has_its_own(tmp_path: Path) -> None:
    one = along(tmp_path, Dynamic.TRUE, (8, 16, 31))
    assert one.status is TrialStatus.OK, one.failure
    assert [(t.length, t.compiles) for t in one.shape_times][:3] == [(8, 1), (16, 0), (31, 0)]
    assert one.cold_start_s == one.shape_times[0].compile_s > 0
    assert all(len(t.pairs) >= 2 and t.step_s for t in one.shape_times)
    assert one.pairs == ()
    assert one.coverage is not None and one.coverage > 0.7
    marked = along(tmp_path, Dynamic.AUTO, (8, 16, 31), mark=True)
    assert marked.status is TrialStatus.OK, marked.failure
    assert marked.mark_dynamic
    assert [t.compiles for t in marked.shape_times][:3] == [1, 0, 0]
    each = along(tmp_path, Dynamic.FALSE, (8, 31))
    assert each.status is TrialStatus.OK, each.failure
    assert [t.length for t in each.shape_times] == [8, 31]
    assert all(t.compiles > 0 and t.compile_s > 0 for t in each.shape_times)
