"""Scripts that nobody changed: `advise train` runs them, `advise run --` measures them."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest

from advisor import handover
from advisor.cli import main
from advisor.injection import when_imported
from advisor.profiler import place
from advisor.profiler.bundle import BundleFacts
from advisor.profiler.records import Config

ADVISE = str(Path(sys.executable).with_name("advise"))

START = """
import sys
import torch
torch.manual_seed(0)
torch.set_num_threads(1)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = torch.nn.Linear(16, 32), torch.nn.Linear(32, 1)
        self.drop = torch.nn.Dropout(0.1)

    def forward(self, x):
        return self.two(self.drop(self.one(x)).relu())

net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
"""

PLAIN = (
    START
    + """
for step in range(int(sys.argv[1])):
    loss = net(torch.rand(8, 16)).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(loss.item().hex())
        net.eval()
        with torch.no_grad():
            net(torch.rand(3, 16))
        net.train()
"""
)

ACCUMULATED = (
    START
    + """
second = torch.optim.SGD(net.two.parameters(), lr=1e-3)
optimizer = torch.optim.Adam(net.one.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=5)
for step in range(int(sys.argv[1])):
    for part in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = net(torch.rand(8, 16)).pow(2).mean()
        if step == 6:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.step(second)
    scaler.update()
    optimizer.zero_grad()
    second.zero_grad()
print("scale", scaler.get_scale())
"""
)

GAN = (
    START
    + """
judge = torch.nn.Linear(1, 1)
judging = torch.optim.SGD(judge.parameters(), lr=1e-3)
for step in range(20):
    for one in (judging, optimizer):
        optimizer.zero_grad()
        judging.zero_grad()
        judge(net(torch.rand(8, 16))).mean().backward()
        one.step()
print("done")
"""
)

COMPILED = (
    START
    + """
net = torch.compile(net, backend="eager")
for step in range(20):
    net(torch.rand(8, 16)).pow(2).mean().backward()
    optimizer.step()
print("done")
"""
)

RAISES = (
    START
    + """
try:
    for step in range(100):
        net(torch.rand(8, 16)).pow(2).mean().backward()
        optimizer.step()
        if step == 5:
            raise KeyError("my own mistake")
except KeyError as error:
    if sys.argv[1:] != ["caught"]:
        raise
    print(error)
    sys.exit(7)
"""
)

TRAINER = """
import torch
import transformers
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

config = BertConfig(
    vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
    intermediate_size=16, max_position_embeddings=16,
)
rows = [{"input_ids": torch.arange(8) + n % 40, "labels": n % 2} for n in range(16)]
arguments = TrainingArguments(
    "out", max_steps=14, per_device_train_batch_size=2, gradient_accumulation_steps=2,
    report_to="none", save_strategy="no", disable_tqdm=True, use_cpu=True,
)
model = BertForSequenceClassification(config)
Trainer(model=model, args=arguments, train_dataset=rows).train()
print("done", "_orig_mod" in "".join(model.state_dict()))
"""

RANKS = """
import torch
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
net = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(40):
    net(torch.rand(4, 8)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
# In one piece: the ranks share the output.
print(f"rank {torch.distributed.get_rank()} done\\n", end="", flush=True)
torch.distributed.destroy_process_group()
"""

LOADER = """
import torch

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.zeros(2)

if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(Rows(), num_workers=1, multiprocessing_context="spawn")
    print(len(list(loader)))
"""

DAEMON = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)  # left behind"],
                 start_new_session=True)
print("asleep", flush=True)
time.sleep(600)
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path, compile_cache: Path) -> Iterator[Run]:
    """Runs a script by a command, in a folder of its own, and looks that nothing is left."""
    # A short path: sockets of data loaders lie in it, and one of 108 characters cannot be made.
    temporary = Path(tempfile.mkdtemp(prefix="train-"))
    environment = {**os.environ, "TMPDIR": str(temporary), "GLOO_SOCKET_IFNAME": "lo"}

    def running(
        script: str, *arguments: str, by: tuple[str, ...] = (), python: tuple[str, ...] = ()
    ) -> subprocess.CompletedProcess[str]:
        (tmp_path / "script.py").write_text(textwrap.dedent(script))
        command = [*(python or (sys.executable,)), "script.py", *arguments]
        done = subprocess.run(
            [ADVISE, *by, "--", *command] if by else command,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert not list(temporary.glob("advise-*"))
        return done

    yield running
    shutil.rmtree(temporary, ignore_errors=True)


def said(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("advise: ")]


# --- advise train


@pytest.mark.trial
def test_training_that_stays_eager_has_the_losses_of_the_plain_script(
    run: Run, tmp_path: Path
) -> None:
    plain = run(PLAIN, "60")
    by = ("train", "--steps", "60", "--json", "how.json")
    watched = run(PLAIN, "60", by=by)
    assert watched.returncode == 0, watched.stderr
    assert watched.stdout == plain.stdout
    assert len(plain.stdout.splitlines()) == 6
    (sentence,) = said(watched)
    assert "on the training stays eager: " in sentence
    result = json.loads((tmp_path / "how.json").read_text())
    # Nobody counts on once it is settled.
    assert 8 < result["optimizer_steps"] <= 60
    assert (result["outcome"]["arm"], result["forwards"]) == ("eager", 1)
    assert result["facts"]["model_class"] == "Net"


@pytest.mark.trial
def test_accumulation_with_scaler_and_two_optimizers_is_one_step(run: Run, tmp_path: Path) -> None:
    done = run(ACCUMULATED, "45", by=("train", "--steps", "45", "--json", "how.json"))
    assert done.returncode == 0, done.stderr
    # One step overflowed and halved it, the others doubled it eight times.
    assert done.stdout == "scale 32768.0\n"
    result = json.loads((tmp_path / "how.json").read_text())
    assert (result["problem"], result["forwards"]) == ("", 3)
    assert "stays eager" in said(done)[0]


@pytest.mark.trial
@pytest.mark.parametrize(
    ("script", "words"),
    [(GAN, "2 modules are trained side by side"), (COMPILED, "the script compiles by itself")],
)
def test_script_that_is_left_alone_is_told_why(run: Run, script: str, words: str) -> None:
    done = run(script, by=("train", "--steps", "1e9"))
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    (sentence,) = said(done)
    assert words in sentence
    assert done.stderr.strip() == sentence


@pytest.mark.trial
def test_errors_and_exit_codes_are_the_scripts_own(run: Run) -> None:
    done = run(RAISES, "caught", by=("train",))
    assert (done.returncode, done.stdout) == (7, "'my own mistake'\n")
    assert "ended after 6 optimizer steps" in said(done)[0]


@pytest.mark.trial
def test_trainer_script(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    done = run(TRAINER, by=("train", "--steps", "14", "--json", "how.json"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "done False"
    result = json.loads((tmp_path / "how.json").read_text())
    assert (result["problem"], result["forwards"]) == ("", 2)
    # It may be settled before the last.
    assert 8 < result["optimizer_steps"] <= 14
    assert result["facts"]["model_class"] == "BertForSequenceClassification"
    assert len(said(done)) == 1


@pytest.mark.trial
def test_ranks_train_together_and_one_of_them_speaks(run: Run, tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d",
                "--rdzv-endpoint=127.0.0.1:0")  # fmt: skip
    by = ("train", "--steps", "40", "--json", "how.json")
    done = run(RANKS, by=by, python=(sys.executable, *launcher))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 done", "rank 1 done"]
    (sentence,) = said(done)
    assert "stays eager" in sentence
    assert json.loads((tmp_path / "how.json").read_text())["ranks"] == 2


@pytest.mark.trial
def test_training_starts_from_a_kept_cache(run: Run, tmp_path: Path) -> None:
    (tmp_path / "trial" / "inductor").mkdir(parents=True)
    (tmp_path / "trial" / "inductor" / "one.py").write_text("")
    here = place.here(torch=version("torch"))
    facts = BundleFacts(fingerprint="f00d", config=Config(), place=here)
    kept = handover.store().put([tmp_path / "trial"], facts, names=["kept"])
    done = run(PLAIN, "60", by=("train", "--id", "kept", "--steps", "60"))
    assert done.returncode == 0, done.stderr
    watched, cache = said(done)
    assert "stays eager" in watched
    assert f"compile cache {kept.bundle_id}: " in cache


def test_all_who_wait_for_a_module_are_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "waited_for.py").write_text("value = 3")
    monkeypatch.syspath_prepend(tmp_path)
    told: list[int] = []
    for number in range(2):
        when_imported("waited_for", lambda number=number: told.append(number))
    assert importlib.import_module("waited_for").value == 3
    assert sorted(told) == [0, 1]
    when_imported("waited_for", lambda: told.append(2))
    assert told[-1] == 2


@pytest.mark.trial
def test_process_that_never_trains_is_told_once(run: Run) -> None:
    done = run(LOADER, by=("train",))
    assert (done.returncode, done.stdout) == (0, "4\n")
    assert said(done) == [
        "advise: no optimizer of torch has stepped, so there was nothing to compile"
    ]


# --- advise run --


@pytest.mark.trial
def test_script_is_measured_in_its_first_steps_and_ended(run: Run) -> None:
    by = ("run", "--steps", "1e8", "--json", "--price-per-hour", "2")
    done = run(PLAIN, "1000000000", by=by)
    assert done.returncode == 0, done.stderr
    advice = json.loads(done.stdout)
    eager, trial = advice["trials"]
    assert (eager["kind"], trial["kind"]) == ("EAGER", "COMPILE")
    assert (trial["status"], trial["graphs"]) == ("OK", 1)
    assert advice["steps"] == 1e8
    assert advice["enable"] == (advice["p_saves"] >= 0.9)
    assert advice["workload"]["model_class"] == "Net"
    assert trial["cold_start_s"] > 0
    # The script's own output does not mix with the answer.
    assert "0x1." in done.stderr
    show = subprocess.run(
        [ADVISE, "show", advice["advice_id"]], capture_output=True, text=True, check=False
    )
    assert show.returncode == 0
    assert ("ENABLE" in show.stdout) == advice["enable"]
    assert "script.py 1000000000" in advice["target"]


@pytest.mark.trial
@pytest.mark.parametrize(
    ("script", "words"),
    [
        (RAISES, "failed by itself with exit code 1: after 6 optimizer steps"),
        (GAN, "was not measured: 2 modules are trained side by side"),
        ("print('no torch')", "no optimizer of torch has stepped"),
    ],
)
def test_script_that_gives_no_verdict_ends_with_three(run: Run, script: str, words: str) -> None:
    done = run(script, by=("run", "--steps", "1e8"))
    assert (done.returncode, done.stdout) == (3, ""), done.stderr
    assert len(said(done)) == 2
    assert words in said(done)[-1]


@pytest.mark.trial
@pytest.mark.fault
def test_script_that_goes_on_is_ended_with_all_that_it_started(run: Run) -> None:
    begun = time.monotonic()
    done = run(DAEMON, by=("run", "--steps", "1e8", "--budget", "2"))
    assert time.monotonic() - begun < 30
    assert done.returncode == 3
    assert "was not measured within" in said(done)[-1]
    left = [p for p in psutil.process_iter(["cmdline"]) if "# left behind" in str(p.info)]
    assert not left


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("run -- python train.py", "give one of --steps N"),
        ("run --steps 10 --", "there is no command to run"),
        ("run --steps 10 -- no-such-command", "'no-such-command' cannot be run"),
        ("run train.py:build --steps 10 -- python train.py", "two jobs were named"),
        ("run --steps 10 --scale tiny -- python train.py", "--scale is about workloads"),
        ("run --steps 10 --server h:1 -- python train.py", "--server is about workloads"),
        ("run --steps 10 --mode fast -- python train.py", "known are default"),
        ("run --steps 10 --budget soon -- python train.py", "is not a duration"),
        ("run --steps 10 --scope model --scope regional -- python train.py", "2 configurations"),
        ("run train.py --steps 10", "names no workload"),
        ("train", "there is no command to run"),
        ("train --steps 0 -- python train.py", "--steps 0"),
        ("train --stesp 3 -- python train.py", "No such option: --stesp"),
        ("train -- no-such-command", "'no-such-command' cannot be run"),
        ("train --json no/such/file -- python train.py", "cannot be written"),
        ("train --id none -- python train.py", "none"),
    ],
)
def test_wrong_request_is_one_sentence(
    arguments: str,
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_process(*_: object, **__: object) -> None:
        raise AssertionError("a process was started for a request that is wrong")

    monkeypatch.setattr(subprocess, "Popen", no_process)
    monkeypatch.setattr(os, "execvpe", no_process)
    assert main(arguments.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert sentence in err
    assert err.count("\n") == 1
