"""Ctrl-C at any moment leaves no process, no folder and no half-written row behind."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import psutil
import pytest

ADVISE = str(Path(sys.executable).with_name("advise"))

JOB = """
import torch

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

def build(device):
    batch = torch.ones(64, 32, device=device)
    return {
        "model": Model().to(device),
        "batches": lambda step: batch,
        "loss": lambda model, batch: model(batch).pow(2).mean(),
    }
"""

# Words of the progress, and the phase of the trial that they tell of.
MOMENTS = {
    "the server starts": "",
    "import": "trial 1, eager, at most",
    "build": "building the model",
    "warm-up": "eager steps until they are steady",
    "a trial starts": "trial 2, regional default, at most",
    "cold": "regional default: compiling",
    "steady": "regional default: measuring",
    "numerics": "comparing the losses",
}


@contextlib.contextmanager
def _advise_run(folder: Path, mark: str) -> Iterator[subprocess.Popen[str]]:
    """Runs a long campaign as a terminal would: in a process group of its own."""
    folder.joinpath("train.py").write_text(JOB)
    folder.joinpath("tmp").mkdir()
    folder.joinpath("data").mkdir()
    environment = os.environ | {
        "ADVISOR_TEST_MARK": mark,
        "ADVISOR_DATA_DIR": str(folder / "data"),
        "TMPDIR": str(folder / "tmp"),
    }
    # A shell's background job ignores SIGINT and hands that on: a terminal's job does not.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # One configuration: which of several comes first is decided by what is measured.
    command = [ADVISE, "run", "train.py:build", "--steps", "1e9", "--device", "cpu"]
    command += ["--scope", "regional", "--mode", "default"]
    process = subprocess.Popen(
        command, cwd=folder, env=environment, text=True, process_group=0,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        with process:
            try:
                yield process
            finally:
                process.kill()
    finally:
        for left in _marked(mark):
            left.kill()


def _marked(mark: str) -> list[psutil.Process]:
    """Returns the living processes that inherited the mark, however they were started."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            marked = process.environ().get("ADVISOR_TEST_MARK") == mark
            if marked and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _wait_for(stream: IO[str], words: str, timeout_s: float) -> list[str]:
    """Returns the lines, which go on growing, once there is one with `words` ("": at once)."""
    lines: list[str] = []
    found, ended = threading.Event(), threading.Event()

    def read() -> None:
        for line in stream:
            lines.append(line)
            if words in line:
                found.set()
        ended.set()

    threading.Thread(target=read, daemon=True).start()
    deadline = time.monotonic() + timeout_s
    while words and not found.wait(0.05):
        assert not ended.is_set(), f"it ended before {words!r}: {lines}"
        assert time.monotonic() < deadline, f"no {words!r} within {timeout_s} s: {lines}"
    return lines


def _assert_nothing_left(folder: Path, mark: str) -> None:
    deadline = time.monotonic() + 1.0
    while (left := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [process.cmdline() for process in left] == []
    assert list(folder.joinpath("tmp").glob("advise-*")) == []
    database = next(iter(folder.joinpath("data").rglob("*.sqlite3")), None)
    if database is not None:
        with contextlib.closing(sqlite3.connect(database)) as connection:
            assert connection.execute("PRAGMA quick_check").fetchone() == ("ok",)
            assert connection.execute("SELECT count(*) FROM advices").fetchone() == (0,)


@pytest.mark.trial
@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_leaves_nothing(moment: str, tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    with _advise_run(tmp_path, mark) as process:
        assert process.stderr is not None
        lines = _wait_for(process.stderr, MOMENTS[moment], timeout_s=200)
        if not MOMENTS[moment]:
            time.sleep(0.7)
        assert _marked(mark), "the processes of the run cannot be seen, so this test shows nothing"
        began = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=30) == 130, lines
        assert time.monotonic() - began < 10
        _assert_nothing_left(tmp_path, mark)
        assert process.stdout is not None
        assert process.stdout.read() == ""
        assert not any("Traceback" in line for line in lines)


@pytest.mark.trial
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_other_ends_of_the_command_leave_nothing(number: signal.Signals, tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    with _advise_run(tmp_path, mark) as process:
        assert process.stderr is not None
        _wait_for(process.stderr, MOMENTS["warm-up"], timeout_s=100)
        process.send_signal(number)
        code = process.wait(timeout=30)
        assert code == (-9 if number is signal.SIGKILL else 128 + number)
        if number is signal.SIGKILL:  # the server ends by itself, once its pipe has closed
            deadline = time.monotonic() + 10
            while _marked(mark) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert _marked(mark) == []
        else:
            _assert_nothing_left(tmp_path, mark)


@pytest.mark.trial
def test_impatient_second_ctrl_c_leaves_no_process(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    with _advise_run(tmp_path, mark) as process:
        assert process.stderr is not None
        _wait_for(process.stderr, MOMENTS["warm-up"], timeout_s=100)
        for _ in range(3):
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(0.03)
        assert process.wait(timeout=30) == 130
        _assert_nothing_left(tmp_path, mark)
