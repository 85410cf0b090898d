"""Accelerate on several ranks: its configurations are ones it reads, and the example compiles."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
LAUNCHER = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_addr", "127.0.0.1")
# Accelerate spreads by FSDP on accelerators only: on the CPU the ranks are those of DDP.
REGIONAL = {"ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "true"}


@pytest.mark.parametrize("name", ["accelerate_ddp", "accelerate_fsdp2"])
def test_configuration_is_one_that_accelerate_reads(name: str) -> None:
    config = pytest.importorskip("accelerate.commands.config.config_args")
    found = config.load_config_from_file(str(EXAMPLES / f"{name}.yaml"))
    assert found.num_processes == 2
    assert found.dynamo_config["dynamo_backend"] == "INDUCTOR"
    if name == "accelerate_fsdp2":
        assert found.fsdp_config["fsdp_version"] == 2


@pytest.mark.trial
@pytest.mark.parametrize("variables", [{}, REGIONAL], ids=["model", "regional"])
def test_example_trains_compiled_on_two_ranks(tmp_path: Path, variables: dict[str, str]) -> None:
    pytest.importorskip("accelerate")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    done = subprocess.run(
        [sys.executable, "-P", *LAUNCHER, "--master_port", str(port),
         str(EXAMPLES / "accelerate_ranks.py"), "--steps", "3"],
        cwd=tmp_path,
        env={
            **os.environ,
            "ACCELERATE_USE_CPU": "true",
            "ACCELERATE_DYNAMO_BACKEND": "aot_eager",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(EXAMPLES),
            **variables,
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        assert f"rank {rank} of 2: MULTI_CPU, loss" in done.stdout
    assert " 0 graphs" not in done.stdout
