"""`advise explain` and `advise check` as a person and a pipeline run them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Self

import pytest

from advisor.cli import main
from advisor.events import Event
from advisor.profiler.records import (
    Advice,
    Config,
    Dynamic,
    Environment,
    Failure,
    Fix,
    GraphBreak,
    GraphBreakCause,
    Interval,
    Trial,
    TrialKind,
    TrialStatus,
)
from advisor.request import AdviceRequest
from advisor.service.store import Store

ADVISE = str(Path(sys.executable).with_name("advise"))
JOB = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(16, 16), torch.nn.Linear(16, 1)

    def forward(self, x):
        x = self.a(x).relu()
        return self.b(x)

def build(device):
    torch.manual_seed(0)
    batch = torch.ones(8, 16, device=device)
    return {
        "model": Net().to(device),
        "batches": lambda step: batch,
        "loss": lambda model, batch: model(batch).pow(2).mean(),
    }
"""
TOTAL_S = Interval(median=100.0, low=90.0, high=110.0)
GOOD = Trial(
    trial_id="t2",
    kind=TrialKind.COMPILE,
    status=TrialStatus.OK,
    config=Config(),
    speedup=Interval(median=1.31, low=1.28, high=1.34),
    graphs=1,
    coverage=0.95,
)
ENVIRONMENT = Environment(
    torch="2.13.0",
    python="3.11.9",
    device="cpu",
    device_name="AMD EPYC",
    cores=2,
    threads=2,
    memory_bytes=8 << 30,
)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a training file in the working folder."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(JOB)
    return path


def _advice(*trials: Trial, advice_id: str = "a1b2c3d4e5") -> Advice:
    return Advice(
        advice_id=advice_id,
        created="2026-12-01T10:00:00Z",
        enable=False,
        target="train.py:build",
        config=None,
        code="",
        speedup=None,
        compile_s=None,
        saved_s=None,
        eager_total_s=TOTAL_S,
        advised_total_s=TOTAL_S,
        break_even_step=None,
        p_saves=0.0,
        reasons=(),
        steps=1e6,
        trials=trials,
        environment=ENVIRONMENT,
    )


def _break(job: Path, line: int = 11) -> GraphBreak:
    return GraphBreak(
        cause=GraphBreakCause.PRINT_OR_LOGGING,
        reason="print",
        file=str(job),
        line=line,
        code="print(x.mean())",
    )


class Answering:
    """Stands in for a server that measures: gives the advice that a test wants."""

    advice = _advice(GOOD)
    asked: AdviceRequest | None = None

    def __init__(self, server: str | None = None) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def advise(self, request: AdviceRequest) -> Iterator[Event]:
        Answering.asked = request
        yield self.advice


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> type[Answering]:
    """Returns the server that the commands of a test ask."""
    monkeypatch.setattr("advisor.client.Client", Answering)
    monkeypatch.setattr(Answering, "advice", _advice(GOOD))
    return Answering


def _check(*options: str) -> int:
    return main(["check", "train.py:build", "--baseline", "base.json", *options])


# --- explain


def test_stored_advice_is_explained_as_text_json_and_sarif(
    job: Path, data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = _break(job)
    fix = Fix(
        cause=found.cause.value,
        what="a graph ends here: remove it",
        file=found.file,
        line=found.line,
        code=found.code,
        gain=Interval(median=1.2, low=1.1, high=1.3),
    )
    advice = replace(
        _advice(replace(GOOD, graph_breaks=(found,)), advice_id="00c0ffee00"), fixes=(fix,)
    )
    with Store(data_dir) as store:
        store.add_advice(advice)
    assert main(["explain", "00c0ffee00"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("train.py:build\n")
    assert "   train.py:11\n       print(x.mean())\n" in text
    assert "1.20x (1.10-1.30)" in text
    assert main(["explain", "00c0ffee00", "--json"]) == 0
    message = json.loads(capsys.readouterr().out)
    assert message["advice_id"] == "00c0ffee00"
    assert message["fixes"][0]["kind"] == "GRAPH_BREAK"
    assert "eager_total_s" not in message, "a diagnosis, not the whole advice"
    assert main(["explain", "00c0ffee00", "--sarif"]) == 0
    log = json.loads(capsys.readouterr().out)
    (result,) = log["runs"][0]["results"]
    place = result["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "train.py"
    assert place["region"]["startLine"] == 11


def test_unknown_advice_cannot_be_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "0123456789"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1


def test_workload_is_measured_to_be_explained(
    job: Path, server: type[Answering], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "train.py:build", "--dynamic", "true", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["target"] == "train.py:build"
    assert server.asked is not None
    assert server.asked.limits.measure_anyway
    assert [config.dynamic for config in server.asked.limits.configs] == ["true"]


# --- check


def test_exit_code_says_whether_anything_is_worse(
    job: Path, server: type[Answering], capsys: pytest.CaptureFixture[str]
) -> None:
    assert _check("--update") == 0
    assert capsys.readouterr().out.startswith("Wrote base.json.")
    written = Path("base.json").read_bytes()
    assert _check() == 0
    assert capsys.readouterr().out.startswith("Nothing worse than base.json.")
    server.advice = _advice(replace(GOOD, graph_breaks=(_break(job),)))
    assert _check() == 1
    out = capsys.readouterr().out
    assert out.startswith("WORSE than base.json: 1 regression.")
    assert "train.py:11" in out
    assert "advise explain a1b2c3d4e5" in out
    assert Path("base.json").read_bytes() == written, "only --update writes"
    assert _check("--update") == 0
    assert "train.py:11" in capsys.readouterr().out, "what is accepted is said"
    assert _check() == 0


def test_programs_get_the_diagnosis_and_people_the_sentences(
    job: Path, server: type[Answering], capsys: pytest.CaptureFixture[str]
) -> None:
    assert _check("--update") == 0
    capsys.readouterr()
    server.advice = _advice(replace(GOOD, graph_breaks=(_break(job),)))
    assert _check("--sarif") == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["version"] == "2.1.0"
    assert "WORSE than base.json: 1 regression." in err


def test_configurations_of_the_baseline_are_measured_again(
    job: Path, server: type[Answering]
) -> None:
    dynamic = replace(GOOD, config=Config(dynamic=Dynamic.TRUE))
    server.advice = _advice(dynamic)
    assert _check("--update", "--dynamic", "true") == 0
    assert _check() == 0
    assert server.asked is not None
    assert server.asked.limits.configs == (dynamic.config,)
    assert _check("--dynamic", "false") == 2


def test_trial_that_did_not_run_is_no_verdict(
    job: Path, server: type[Answering], capsys: pytest.CaptureFixture[str]
) -> None:
    assert _check("--update") == 0
    written = Path("base.json").read_bytes()
    skipped = replace(
        GOOD,
        status=TrialStatus.SKIPPED,
        failure=Failure(kind="over_budget", message="3 s are left of the budget"),
    )
    server.advice = _advice(skipped)
    capsys.readouterr()
    for options in ((), ("--update",)):
        assert _check(*options) == 3
        assert "3 s are left of the budget" in capsys.readouterr().err
    assert Path("base.json").read_bytes() == written


@pytest.mark.trial
@pytest.mark.timeout(900)
def test_change_that_adds_a_print_is_caught_at_its_line(job: Path) -> None:
    def check(*options: str) -> subprocess.CompletedProcess[str]:
        command = [ADVISE, "check", "train.py:build", "--baseline", "ci/base.json", *options]
        return subprocess.run(
            [*command, "--device", "cpu"],
            capture_output=True, text=True, timeout=440, check=False,
        )  # fmt: skip

    Path("ci").mkdir()
    done = check("--update")
    assert done.returncode == 0, done.stderr
    held = json.loads(Path("ci/base.json").read_text())
    assert held["target"] == "../train.py:build"
    assert held["configurations"][0]["graph_breaks"] == []
    job.write_text(JOB.replace("relu()\n", "relu()\n        print('mean', x.mean())\n"))
    done = check("--sarif")
    assert done.returncode == 1, done.stderr
    line = job.read_text().splitlines().index("        print('mean', x.mean())") + 1
    assert f"train.py:{line}" in done.stderr
    places = [
        place["physicalLocation"]
        for result in json.loads(done.stdout)["runs"][0]["results"]
        for place in result.get("locations", ())
    ]
    # A gain that was lost has a file and no line.
    assert line in [place.get("region", {}).get("startLine") for place in places]
