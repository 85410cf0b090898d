"""Checkpoints of a model on several ranks load both ways: compiled, not, and without ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from advisor.profiler.records import Wrapper

pytestmark = pytest.mark.trial

SCRIPT = Path(__file__).resolve().parent / "support" / "rank_checkpoints.py"
RANKS = 2


@pytest.mark.parametrize("wrapper", [Wrapper.DDP, Wrapper.FSDP1, Wrapper.FSDP2])
def test_checkpoints_load_both_ways(tmp_path: Path, wrapper: Wrapper) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-P", str(SCRIPT), str(wrapper), str(tmp_path)],
            cwd=tmp_path,
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(RANKS),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(SCRIPT.parent),
                # FSDP1 warns that torch will take it away.
                "PYTHONWARNINGS": "ignore",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        printed = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, text in zip(ranks, printed, strict=True):
        assert rank.returncode == 0, text[-3000:]
    for number in range(RANKS):
        found = json.loads((tmp_path / f"rank{number}.json").read_text())
        # Full and sharded, each of three forms into each, and into one process twice.
        assert len(found) == 2 * 9 + 6
        assert all(found.values()), [name for name, fine in found.items() if not fine]
