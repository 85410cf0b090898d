"""The command: one clear sentence for what is wrong, before anything is started; exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from advisor import exits
from advisor.cli import main
from advisor.client import Client, PrivateServer, check_address
from advisor.profiler.errors import HostError, Interrupted, PlanError, StoreError, WorkloadError
from advisor.profiler.records import Config, Dynamic, Mode, Scope
from advisor.question import Typed, advice_id_of, configs_of, explain_request, request_of

ADVISE = str(Path(sys.executable).with_name("advise"))

TINY = """
import torch

def build(device):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    batch = torch.ones(8, 16, device=device)
    return {
        "model": model.to(device),
        "batches": lambda step: batch,
        "loss": lambda model, batch: model(batch).pow(2).mean(),
    }

def broken(device):
    raise RuntimeError("my data set is gone")

not_a_function = 3
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a training file in the working folder."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(TINY)
    return path


def _advise(*arguments: str, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ADVISE, *arguments], capture_output=True, text=True, timeout=timeout, check=False
    )


# --- help


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    heavy = ("torch", "transformers", "sklearn", "grpc", "rich", "sqlalchemy", "msgspec", "numpy")
    code = (
        "import sys\n"
        "from advisor.cli import main\n"
        "codes = [main(['--help']), main(['run', '--help']), main(['check', '--help'])]\n"
        f"print(codes, [name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True, text=True, cwd=tmp_path, check=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "[0, 0, 0] []"


def test_help_takes_at_most_three_imports_of_grpc(tmp_path: Path) -> None:
    def best_s(*command: str) -> float:
        taken = []
        for _ in range(5):
            began = time.perf_counter()
            subprocess.run(command, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL, timeout=60)
            taken.append(time.perf_counter() - began)
        return min(taken)

    assert best_s(ADVISE, "--help") <= 3 * best_s(sys.executable, "-c", "import grpc")


def test_help_names_the_exit_codes_and_every_command() -> None:
    text = _advise("--help").stdout
    commands = ("run", "explain", "check", "serve", "trials", "show", "presets", "version")
    for name in (*commands, "Exit codes", "1 check found something worse"):
        assert name in text


# --- wrong requests


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("", "Usage: advise"),
        ("frob", "No such command 'frob'"),
        ("run", "Missing argument"),
        ("run train.py:build --stesp 10", "No such option: --stesp"),
        ("run train.py:build --steps ten", "Invalid value for '--steps'"),
        ("run train.py:build", "--epochs E with --steps-per-epoch N, --hours H"),
        ("run train.py:build --steps 10 --hours 2", "give"),
        ("run train.py:build --steps 0", "--steps 0"),
        ("run train.py:build --steps -1", "--steps -1"),
        ("run train.py:build --steps 1e30", "--steps 1e+30"),
        ("run train.py:build --steps nan", "--steps"),
        ("run train.py:build --steps 10 --confidence 2", "--confidence 2"),
        ("run train.py:build --steps 10 --budget soon", "--budget 'soon' is not a duration"),
        ("run train.py:build --steps 10 --budget 0", "--budget 0 is out of range"),
        ("run train.py:build --steps 10 --memory-limit 1M", "--memory-limit"),
        ("run train.py:build --steps 10 --mode fast", "known are default, reduce-overhead"),
        ("run train.py:build --steps 10 --scope all", "known are model, regional"),
        ("run train.py:build --steps 10 --dynamic no", "known are auto, true, false"),
        ("run train.py:build --steps 10 --device tpu", "auto, cpu, cuda or cuda:N"),
        (
            "run train.py:build --steps 10 --device cpu --mode reduce-overhead",
            "it uses CUDA graphs",
        ),
        ("run train.py:build --steps 10 --seed -1", "--seed -1 is out of range"),
        ("run train.py:build --steps 10 --scale tiny", "it is an option of the presets"),
        ("run train.py --steps 10", "names no workload"),
        ("run train.py: --steps 10", "names no workload"),
        ("run :build --steps 10", "names no workload"),
        ("run train.py:two+two --steps 10", "is not a function's name"),
        ("run missing.py:build --steps 10", "missing.py cannot be read: there is no such file"),
        ("run .:build --steps 10", "cannot be read: it is not a file"),
        ("run no/such/file:build --steps 10", "there is no such file"),
        ("run my-module:build --steps 10", "neither a file nor a module's name"),
        ("run tr\x1bain.py:build --steps 10", r"control characters: tr\x1bain.py:build"),
        ("run hf:bert-bse --steps 10", "did you mean hf:bert-base?"),
        ("run hf: --steps 10", "the preset '' is unknown"),
        ("run hf:. --steps 10", "holds no config.json"),
        ("run hf:no/such --steps 10", "there is no folder 'no/such'"),
        ("run hf:bert-base --steps 10 --batch-size 0", "--batch-size 0 is out of range"),
        ("run train.py:build --steps 10 --plot out.pdf", "suffix that is not known"),
        ("run train.py:build --steps 10 --plot no/out.png", "its folder is missing"),
        ("run train.py:build --steps 10 --server nowhere", "is not an address"),
        ("show a1 --plot out.pdf", "suffix that is not known"),
        ("explain", "Missing argument"),
        ("explain train.py", "neither the id of an advice nor a workload"),
        ("explain missing.py:build", "there is no such file"),
        ("explain train.py:build --steps 0", "--steps 0"),
        ("explain train.py:build --mode fast", "known are default, reduce-overhead"),
        ("explain a1b2c3d4e5 --device cpu", "the advice a1b2c3d4e5 is only shown"),
        ("explain train.py:build --json --sarif", "--json and --sarif came together"),
        ("check train.py:build", "Missing option '--baseline'"),
        ("check missing.py:build --baseline b.json", "there is no such file"),
        ("check train.py:build --baseline b.json", "run once with --update to write it"),
        ("check train.py:build --baseline train.py", "train.py is not a baseline"),
        ("check train.py:build --baseline train.py --update", "train.py is not a baseline"),
        ("check train.py:build --baseline no/b.json --update", "its folder is missing"),
        ("trials --most 0", "Invalid value for '--most'"),
        ("serve --listen 0.0.0.0:50551", "is not a loopback address"),
    ],
)
def test_wrong_request_is_one_sentence_and_starts_nothing(
    arguments: str,
    sentence: str,
    job: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_process(*_: object, **__: object) -> None:
        raise AssertionError("a process was started for a request that is wrong")

    monkeypatch.setattr(subprocess, "Popen", no_process)
    began = time.perf_counter()
    assert main(arguments.split(" ") if arguments else []) == 2
    assert time.perf_counter() - began < 5
    out, err = capsys.readouterr()
    assert out == ""
    assert sentence in err
    assert "Traceback" not in err
    if arguments:
        said = [line for line in err.splitlines() if not line.startswith("{")]
        assert len(said) == 1
        assert said[0].startswith("advise: ")


def test_missing_file_is_said_before_anything_heavy_is_loaded(tmp_path: Path) -> None:
    done = subprocess.run(
        [str(ADVISE), "run", str(tmp_path / "missing.py:build"), "--steps", "10"],
        env={**os.environ, "PYTHONPROFILEIMPORTTIME": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if "|" in line}
    assert "advisor.cli" in loaded
    assert not loaded & {"torch", "grpc", "advisor.service.server"}


def test_file_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    name = os.fsencode(tmp_path) + b"/tr\xe9.py:build"
    done = subprocess.run(
        [os.fsencode(ADVISE), b"run", name, b"--steps", b"10"], capture_output=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.count(b"\n") == 1
    assert b"is not valid UTF-8" in done.stderr


def test_working_folder_that_was_deleted_is_said(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    code = "import os, sys; from advisor.cli import main; os.rmdir(os.getcwd()); sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, "run", "hf:gpt2", "--steps", "10"],
        capture_output=True, text=True, cwd=gone, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "advise: this folder does not exist any more (cd to another)\n"


# --- requests


def test_options_become_the_request(job: Path) -> None:
    request = request_of(
        Typed(target="train.py:build", hours=2, restarts=3, budget="5m", memory_limit="4G")
    )
    assert (request.plan.hours, request.plan.restarts) == (2, 3)
    assert (request.limits.budget_s, request.limits.memory_limit_bytes) == (300, 4 << 30)
    assert request.workload.cwd == str(job.parent)
    assert request.limits.configs == ()


def test_restricted_configurations_are_each_combination_once() -> None:
    assert configs_of(["default"], [], [], "auto") == (
        Config(scope=Scope.REGIONAL),
        Config(scope=Scope.MODEL),
    )
    found = configs_of([], ["model", "model"], ["true", "false"], "cpu")
    assert len(found) == 4
    assert {config.mode for config in found} == {Mode.DEFAULT, Mode.MAX_AUTOTUNE_NO_CUDAGRAPHS}
    assert {config.dynamic for config in found} == {Dynamic.TRUE, Dynamic.FALSE}


def test_module_entry_points_and_folders_with_a_configuration_pass(job: Path) -> None:
    (job.parent / "mine").mkdir()
    (job.parent / "mine" / "config.json").write_text("{}")
    for target in ("package.module:build", "hf:gpt2", "hf:mine", f"{job}:build"):
        assert request_of(Typed(target=target, steps=10)).workload.target == target


@pytest.mark.parametrize("address", ["localhost:50551", "10.0.0.1:1", "[::1]:50551", "unix:/tmp/s"])
def test_addresses_pass(address: str) -> None:
    check_address(address)


@pytest.mark.parametrize(
    "address", ["", "localhost", "localhost:", "h:99999", "a b:1", "http://h:1"]
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(PlanError, match="HOST:PORT or unix:PATH"):
        check_address(address)


def test_workload_to_explain_is_measured_whatever_its_plan(job: Path) -> None:
    request = explain_request(Typed(target="train.py:build"))
    assert request.limits.measure_anyway
    assert request.limits.configs == (Config(),)
    assert request.plan.steps == 1e6
    asked = explain_request(Typed(target="train.py:build", steps=500, dynamics=["true"]))
    assert asked.limits.configs == (Config(dynamic=Dynamic.TRUE),)
    assert asked.plan.steps == 500
    assert not request_of(Typed(target="train.py:build", steps=10)).limits.measure_anyway


def test_name_with_a_colon_is_a_workload_and_without_one_an_id() -> None:
    assert advice_id_of(Typed(target="3ea83c0801")) == "3ea83c0801"
    for target in ("train.py:build", "hf:gpt2", "package.module:build"):
        assert advice_id_of(Typed(target=target)) is None


# --- how errors are said


def test_own_traceback_of_the_person_comes_before_the_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    theirs = 'Traceback (most recent call last):\n  File "train.py", line 3\nKeyError: \x1b[2J\n'
    error = WorkloadError("build(cpu) raised", "KeyError: 'x'", user_traceback=theirs)
    assert exits.say(error) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "Traceback (most recent call last):",
        '  File "train.py", line 3',
        r"KeyError: \x1b[2J",
        "advise: build(cpu) raised: KeyError: 'x'",
    ]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (HostError("no trial can run here"), 3),
        (StoreError("the database is locked"), 3),
        (PlanError("--steps 0"), 2),
        (Interrupted("the server stopped"), 130),
    ],
)
def test_errors_have_their_exit_codes(
    error: HostError, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exits.say(error) == code
    assert capsys.readouterr().err == f"advise: {error}\n"


def test_mistake_of_ours_is_one_sentence_with_the_traceback_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert exits.say_inside(ZeroDivisionError("x / 0")) == 3
    err = capsys.readouterr().err
    (file,) = tmp_path.glob("advise-error-*.txt")
    assert err.count("\n") == 1
    assert str(file) in err
    assert "ZeroDivisionError: x / 0" in file.read_text()


def test_reader_that_closes_the_pipe_gets_no_traceback() -> None:
    done = subprocess.run(
        f"{ADVISE} presets | true", shell=True, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""


# --- the client and its private server


def test_nobody_at_the_address_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trials", "--server", "127.0.0.1:1"]) == 3
    assert capsys.readouterr().err == (
        "advise: no advisor answers at 127.0.0.1:1 (advise serve starts one)\n"
    )


def test_private_server_answers_and_leaves_nothing(tmp_path: Path) -> None:
    with Client() as client:
        assert client.private is not None
        pid, folder = client.private.pid, Path(client.private.address.removeprefix("unix:")).parent
        assert pid is not None
        assert folder.stat().st_mode & 0o777 == 0o700
        assert os.getsid(pid) == pid, "a Ctrl-C in the terminal would reach the server"
        assert client.list_trials() == []
    assert not psutil.pid_exists(pid)
    assert not folder.exists()


def test_private_server_ends_when_its_client_is_killed(tmp_path: Path) -> None:
    code = (
        "import time; from advisor.client import PrivateServer\n"
        "with PrivateServer() as server:\n"
        "    print(server.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-P", "-c", code],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as client:  # fmt: skip
        assert client.stdout is not None
        server = psutil.Process(int(client.stdout.readline()))
        client.send_signal(signal.SIGKILL)
    server.wait(timeout=15)


def test_private_server_gets_a_short_path_whatever_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with PrivateServer() as server:
        assert len(server.address.removeprefix("unix:")) <= 107


def test_server_that_cannot_start_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ADVISOR_DATA_DIR", str(tmp_path / "file"))
    assert main(["trials"]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("advise: the private server cannot start: ")


def test_unknown_advice_is_a_wrong_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "nope"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "nope" in err


@pytest.mark.trial
def test_short_plan_is_answered_in_json_and_can_be_shown_again(job: Path) -> None:
    plan = ["--steps", "50", "--device", "cpu"]
    done = _advise("run", "train.py:build", *plan, "--json", "--plot", "out.png")
    assert done.returncode == 0, done.stderr
    advice = json.loads(done.stdout)
    assert advice["enable"] is False
    assert advice["target"] == "train.py:build"
    run = [trial["kind"] for trial in advice["trials"] if trial["status"] != "SKIPPED"]
    assert run == ["EAGER"], "50 steps of a tiny model can pay for no compile"
    assert "eager" in done.stderr
    assert Path("out.png").read_bytes().startswith(b"\x89PNG")
    again = _advise("show", advice["advice_id"], "--json")
    assert json.loads(again.stdout) == advice
    report = _advise("show", advice["advice_id"])
    assert report.stdout.startswith("STAY EAGER")
    assert "train.py" in _advise("trials").stdout


@pytest.mark.trial
def test_function_that_raises_shows_the_frames_of_the_person(job: Path) -> None:
    done = _advise("run", "train.py:broken", "--steps", "50", "--device", "cpu")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "my data set is gone" in done.stderr.splitlines()[-1]
    frames = [line for line in done.stderr.splitlines() if line.startswith("  File ")]
    assert len(frames) == 1
    assert "train.py" in frames[0]


@pytest.mark.trial
def test_function_that_is_not_there_is_one_sentence(job: Path) -> None:
    done = _advise("run", "train.py:biuld", "--steps", "50", "--device", "cpu")
    assert done.returncode == 2
    assert "did you mean build?" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
