"""Estimates: from facts to a verdict, in the process, over the wire and on the command line."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1._async import HealthServicer

from advisor import cli
from advisor.convert import (
    estimate_message,
    estimate_record,
    estimate_request_message,
    estimate_request_record,
    outcome_message,
    outcome_record,
)
from advisor.estimate import estimate
from advisor.job_facts import EstimateRequest, JobFacts, OutcomeReport
from advisor.models.learning import Outcome, shifts
from advisor.models.plan import Plan
from advisor.models.prior import Prior
from advisor.profiler.errors import PlanError
from advisor.profiler.records import Config, Mode, Scope
from advisor.profiler.step_counts import OperatorKind, StepCounts, Work
from advisor.service import server as servers
from advisor.service.errors import error_of
from advisor.service.estimator import Estimator
from advisor.service.jobs import Jobs
from advisor.service.store import Store
from advisor.v1 import advisor_pb2 as pb
from advisor.v1 import advisor_pb2_grpc
from advisor.validate import InvalidRequest

BERT = JobFacts(
    device="a100-80gb",
    family="BertForTokenClassification",
    precision="amp-bf16",
    parameters=110e6,
    batch=16,
    length=512,
    eager_step_s=0.11,
)
COUNTS = StepCounts(
    parameters=1e6,
    tensors=10,
    layers=5,
    samples=8,
    eager=(Work(kind=OperatorKind.POINTWISE, calls=400, flops=1e9, bytes=1e10),),
    fused=(Work(kind=OperatorKind.FUSED, calls=40, flops=1e9, bytes=2e9),),
)


def asked(plan: Plan | None = None, facts: JobFacts = BERT, **changes: object) -> EstimateRequest:
    return EstimateRequest(facts=replace(facts, **changes), plan=plan)  # type: ignore[arg-type]


# --- verdicts


def test_a_long_job_is_enabled_and_a_short_one_is_not(prior: Prior) -> None:
    long = estimate(asked(Plan(hours=8)), prior)
    assert long.enable
    assert long.config is not None
    best = long.estimates[0]
    assert best.total_s is not None
    assert long.eager_total_s is not None
    assert best.total_s.median < long.eager_total_s.median == pytest.approx(8 * 3600, rel=1e-3)
    assert (best.p_saves or 0) >= 0.9
    short = estimate(asked(Plan(steps=100)), prior)
    assert not short.enable
    assert short.config is None
    assert all((each.p_saves or 0) < 0.1 for each in short.estimates)


def test_a_five_minute_job_rarely_earns_compiling_back(prior: Prior) -> None:
    found = estimate(asked(Plan(hours=5 / 60)), prior)
    assert found.estimates[0].break_even_step is not None
    assert found.estimates[0].break_even_step > 300


def test_without_a_plan_only_gains_are_said(prior: Prior) -> None:
    found = estimate(asked(), prior)
    assert not found.enable
    assert all(each.total_s is None and each.p_saves is None for each in found.estimates)
    medians = [each.speedup.median for each in found.estimates]
    assert medians == sorted(medians, reverse=True)
    assert any("--steps" in reason for reason in found.reasons)


def test_without_an_eager_time_or_counts_there_are_no_totals(prior: Prior) -> None:
    found = estimate(asked(Plan(steps=1e5), eager_step_s=None), prior)
    assert found.eager_step_s is None
    assert found.eager_total_s is None
    assert not found.enable
    assert any("--eager-step" in reason for reason in found.reasons)


def test_counts_stand_in_for_an_eager_time(prior: Prior) -> None:
    found = estimate(asked(Plan(steps=1e6), eager_step_s=None, counts=COUNTS), prior)
    assert found.eager_estimated
    assert found.eager_step_s is not None
    assert found.eager_step_s.low < found.eager_step_s.median < found.eager_step_s.high
    assert found.eager_total_s is not None


def test_restarts_are_paid_for(prior: Prior) -> None:
    once, often = (estimate(asked(Plan(hours=8, restarts=n)), prior) for n in (0, 50))
    totals = [found.estimates[0].total_s for found in (once, often)]
    assert totals[0] is not None
    assert totals[1] is not None
    assert totals[1].median > totals[0].median


def test_configurations_follow_the_device(prior: Prior) -> None:
    gpu = {each.config.mode for each in estimate(asked(), prior).estimates}
    assert gpu == {Mode.DEFAULT, Mode.REDUCE_OVERHEAD, Mode.MAX_AUTOTUNE}
    cpu = estimate(asked(device="cpu-2"), prior).estimates
    assert {each.config.scope for each in cpu} == {Scope.MODEL, Scope.REGIONAL}
    own = EstimateRequest(facts=BERT, configs=(Config(mode=Mode.REDUCE_OVERHEAD),))
    assert [each.config for each in estimate(own, prior).estimates] == list(own.configs)


def test_many_graph_breaks_leave_nothing(prior: Prior) -> None:
    clean = estimate(asked(graph_breaks=0), prior).estimates[0].speedup.median
    broken = estimate(asked(graph_breaks=30), prior).estimates
    default = next(each for each in broken if each.config == Config())
    assert clean > 1.15
    assert default.speedup.median == pytest.approx(1.0, abs=0.02)


def test_own_outcomes_are_counted_and_move_it(prior: Prior) -> None:
    facts = BERT.facts(Config())
    learnt = shifts(prior, [Outcome(facts=facts, speedup=3.0) for _ in range(30)])
    before, after = estimate(asked(), prior), estimate(asked(), prior, learnt)
    assert (before.outcomes, after.outcomes) == (0, 30)
    assert after.estimates[0].speedup.median > 1.3 * before.estimates[0].speedup.median


def test_an_unknown_device_is_named_with_those_that_are_close(prior: Prior) -> None:
    with pytest.raises(PlanError, match="a100-8gb"):
        estimate(asked(device="a100-8gb"), prior)


def test_messages_bring_records_back(prior: Prior) -> None:
    request = EstimateRequest(
        facts=replace(BERT, counts=COUNTS), plan=Plan(steps=10), configs=(Config(),)
    )
    assert estimate_request_record(estimate_request_message(request)) == request
    response = estimate(request, prior)
    assert estimate_record(estimate_message(response)) == response
    report = OutcomeReport(facts=BERT, config=Config(), speedup=1.3)
    assert outcome_record(outcome_message(report)) == report


# --- over the wire


def test_the_wire_answers_learns_and_refuses(prior: Prior, tmp_path: Path) -> None:
    async def test(stub: advisor_pb2_grpc.AdvisorAsyncStub, store: Store) -> None:
        request = estimate_request_message(asked(Plan(hours=8)))
        first = estimate_record(await stub.Estimate(request))
        assert first.enable
        report = outcome_message(OutcomeReport(facts=BERT, config=Config(), speedup=0.5))
        for count in range(1, 4):
            assert (await stub.ReportOutcome(report)).outcomes == count
        then = estimate_record(await stub.Estimate(request))
        assert then.outcomes == 3
        assert then.estimates[0].speedup.median < first.estimates[0].speedup.median
        assert len(store.outcomes(10)) == 3
        # Another server of the same database has learnt it too.
        again = await Estimator(store).estimate(asked(Plan(hours=8)))
        assert again.estimates[0].speedup.median == pytest.approx(then.estimates[0].speedup.median)

    _serve(test, tmp_path)


NONSENSE: list[tuple[dict[str, object], str]] = [
    ({"device": ""}, "facts.device"),
    ({"device": "a100", "parameters": -1.0}, "facts.parameters"),
    ({"device": "a100", "parameters": math.nan}, "facts.parameters"),
    ({"device": "a100", "parameters": 1e30}, "facts.parameters"),
    ({"device": "a100", "batch": 0.0}, "facts.batch"),
    ({"device": "a100", "length": math.inf}, "facts.length"),
    ({"device": "a100", "eager_step_s": -0.1}, "facts.eager_step_s"),
    ({"device": "a100", "graph_breaks": -1.0}, "facts.graph_breaks"),
    ({"device": "a100", "precision": "fp7"}, "facts.precision"),
    ({"device": "no such thing"}, "facts.device"),
]


@pytest.mark.parametrize(("facts", "field"), NONSENSE)
def test_nonsense_is_refused_by_the_name_of_its_field(
    facts: dict[str, object], field: str, prior: Prior, tmp_path: Path
) -> None:
    async def test(stub: advisor_pb2_grpc.AdvisorAsyncStub, store: Store) -> None:
        for call, message in (
            (stub.Estimate, pb.EstimateRequest(facts=pb.JobFacts(**facts))),  # type: ignore[arg-type]
            (
                stub.ReportOutcome,
                pb.ReportOutcomeRequest(facts=pb.JobFacts(**facts), speedup=1.0),  # type: ignore[arg-type]
            ),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(message)  # type: ignore[operator]
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            error = error_of(caught.value)
            assert isinstance(error, InvalidRequest)
            assert field in [violation.field for violation in error.violations]
        assert store.outcomes(10) == []

    _serve(test, tmp_path)


def test_an_outcome_without_a_figure_is_refused(prior: Prior, tmp_path: Path) -> None:
    async def test(stub: advisor_pb2_grpc.AdvisorAsyncStub, store: Store) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ReportOutcome(pb.ReportOutcomeRequest(facts=pb.JobFacts(device="a100")))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "speedup" in (caught.value.details() or "")

    _serve(test, tmp_path)


def _serve(test: object, data: Path) -> None:
    async def run() -> None:
        with (
            tempfile.TemporaryDirectory(prefix="adv-") as folder,
            Store(data) as store,
        ):
            estimator = Estimator(store)
            server = await servers.make_server(
                store, Jobs(store, data), estimator, HealthServicer()
            )
            address = f"unix:{folder}/s"
            with servers.bound(server, address):
                await server.start()
                try:
                    async with grpc.aio.insecure_channel(address) as channel:
                        await test(advisor_pb2_grpc.AdvisorStub(channel), store)  # type: ignore[operator]
                finally:
                    await server.stop(1)

    asyncio.run(run())


# --- the command


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


def test_the_command_answers_from_facts(prior: Prior, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(
        capsys, "estimate", "--device", "a100-80gb", "--family", "bert", "--parameters", "110M",
        "--batch-size", "16", "--length", "512", "--precision", "amp-bf16", "--eager-step", "110ms",
        "--hours", "8",
    )  # fmt: skip
    assert code == 0
    assert out.startswith("WOULD ENABLE torch.compile")
    assert "not measured" in out


def test_the_command_prints_the_message(prior: Prior, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, "estimate", "--device", "h100", "--json")
    assert code == 0
    answer = json.loads(out)
    assert {"estimates", "enable", "beyond", "outcomes"} <= answer.keys()
    assert answer["estimates"][0]["speedup"]["low"] > 0


def test_known_facts_need_neither_torch_nor_grpc(prior: Prior) -> None:
    code = (
        "import sys; from advisor import cli; code = cli.main(['estimate', '--device', 'a100']);"
        "loaded = {'torch', 'transformers', 'grpc', 'sklearn', 'pandas'} & set(sys.modules);"
        "sys.exit(code or (str(loaded) if loaded else 0))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("estimate",), "--device is missing"),
        (("estimate", "--device", "a100-8gb"), "did you mean"),
        (("estimate", "--device", "a100", "--parameters", "-3"), "--parameters"),
        (("estimate", "--device", "a100", "--parameters", "many"), "--parameters"),
        (("estimate", "--device", "a100", "--eager-step", "soon"), "--eager-step"),
        (("estimate", "--device", "a100", "--family", "quux"), "--family"),
        (("estimate", "--device", "a100", "--precision", "fp7"), "--precision"),
        (("estimate", "--device", "a100", "--graph-breaks", "-1"), "--graph-breaks"),
        (("estimate", "--device", "a100", "--steps", "-1"), "steps"),
        (("estimate", "--device", "a100", "--restarts", "3"), "--restarts"),
        (("estimate", "nowhere.py:build", "--device", "a100"), "nowhere.py"),
        (("estimate", "--device", "cpu-2", "--mode", "max-autotune"), "CUDA graphs"),
        (("report",), "--device is missing"),
        (("report", "--device", "a100"), "no figure"),
        (("report", "--device", "a100", "--speedup", "-1"), "--speedup"),
        (("report", "nowhere.jsonl"), "nowhere.jsonl"),
        (("corpus", "--family", "quux"), "families are"),
        (("corpus", "--device", "quux"), "quux"),
    ],
)
def test_mistakes_get_one_sentence(
    arguments: tuple[str, ...], words: str, prior: Prior, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = said(capsys, *arguments)
    assert code == 2
    assert words in err
    assert "Traceback" not in err
    assert out == ""


def test_reports_are_learnt_from(
    prior: Prior,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ADVISOR_DATA_DIR", str(tmp_path / "data"))
    code, out, _ = said(capsys, "report", "--device", "a100", "--family", "bert", "--speedup", "2")
    assert (code, out) == (0, "1 outcome kept; estimates learn from 1 now.\n")
    lines = tmp_path / "outcomes.jsonl"
    one = '{"facts": {"device": "a100", "family": "bert"}, "speedup": 2.1}\n'
    lines.write_text(one * 3)
    assert said(capsys, "report", str(lines))[1].startswith(
        "3 outcomes kept; estimates learn from 4"
    )
    lines.write_text(one + '{"facts": {"device": "a100"}, "speedup": -1}\n')
    code, _, err = said(capsys, "report", str(lines))
    assert code == 2
    assert "line 2" in err
    assert "speedup" in err
    answer = json.loads(said(capsys, "estimate", "--device", "a100", "--json")[1])
    assert answer["outcomes"] == 4


def test_lists_are_printed(prior: Prior, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, "devices")
    assert code == 0
    assert "a100-80gb" in out
    assert "datasheet" in out
    code, out, _ = said(capsys, "corpus", "--family", "t5")
    assert code == 0
    assert "training" in out


@pytest.mark.trial
def test_a_preset_of_billions_is_counted_here(
    prior: Prior, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    code, out, _ = said(
        capsys, "estimate", "hf:llama-1b", "--device", "h100", "--steps", "100000", "--json"
    )
    assert code == 0
    answer = json.loads(out)
    assert answer["eager_estimated"]
    assert answer["eager_step_s"]["median"] > 0.01


@pytest.mark.trial
def test_a_workload_of_ones_own_is_counted(
    prior: Prior,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("torch")
    tmp_path.joinpath("train.py").write_text(
        "import torch\n"
        "def build(device):\n"
        "    print('noise of the job')\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()).to(device)\n"
        "    return {'model': model, 'batches': lambda step: torch.ones(4, 8),\n"
        "            'loss': lambda model, batch: model(batch).sum()}\n"
        "def broken(device):\n"
        "    raise ValueError('no data here')\n"
    )
    monkeypatch.chdir(tmp_path)
    code, out, _ = said(capsys, "estimate", "train.py:build", "--device", "cpu-2", "--steps", "10")
    assert code == 0
    assert out.startswith("WOULD STAY EAGER")
    code, out, err = said(capsys, "estimate", "train.py:broken", "--device", "cpu-2")
    assert code == 2
    assert "no data here" in err
