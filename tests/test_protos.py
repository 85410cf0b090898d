"""The contract: generated code is what the proto says, and the two sides have the same fields."""

from __future__ import annotations

import enum
import json
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor import FieldDescriptor

from advisor import convert
from advisor.profiler import records
from advisor.v1 import advisor_pb2 as pb

ROOT = Path(__file__).resolve().parent.parent
GENERATED = (
    "advisor_pb2.py",
    "advisor_pb2.pyi",
    "advisor_pb2_grpc.py",
    "advisor_pb2_grpc.pyi",
)


@pytest.mark.parametrize(
    "arguments",
    [
        ["lint", str(ROOT / "protos")],
        # The contract as others have it; a release takes `buf build protos -o protos/base.binpb`.
        ["breaking", str(ROOT / "protos"), "--against", str(ROOT / "protos" / "base.binpb")],
    ],
    ids=["lint", "breaking"],
)
def test_proto_keeps_its_rules_and_breaks_nobody(arguments: list[str]) -> None:
    buf = Path(sys.executable).with_name("buf")
    found = subprocess.run(
        [buf, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr


def test_generated_code_is_what_the_proto_says(tmp_path: Path) -> None:
    subprocess.run([ROOT / "protos/generate.sh", tmp_path], check=True, timeout=300)
    for name in GENERATED:
        fresh = (tmp_path / "advisor/v1" / name).read_text()
        committed = (ROOT / "advisor/v1" / name).read_text()
        assert fresh == committed, f"{name} is stale: run protos/generate.sh"


@pytest.mark.parametrize("record", convert.MESSAGES, ids=lambda record: record.__name__)
def test_record_and_message_have_the_same_fields(record: type) -> None:
    descriptor = convert.MESSAGES[record].DESCRIPTOR
    assert {slot.name for slot in convert.SLOTS[record]} == set(descriptor.fields_by_name)
    for slot in convert.SLOTS[record]:
        field = descriptor.fields_by_name[slot.name]
        assert slot.repeated == field.is_repeated or slot.name == "options"
        if slot.optional:
            assert field.has_presence, f"{descriptor.name}.{slot.name} may be absent"
        if slot.kind is int:
            assert field.cpp_type in (
                FieldDescriptor.CPPTYPE_INT32,
                FieldDescriptor.CPPTYPE_DOUBLE,
            ), f"{descriptor.name}.{slot.name} would print as a string"


@pytest.mark.parametrize("record", convert.MESSAGES, ids=lambda record: record.__name__)
def test_enums_have_the_same_names(record: type) -> None:
    descriptor = convert.MESSAGES[record].DESCRIPTOR
    for slot in convert.SLOTS[record]:
        enum_type = descriptor.fields_by_name[slot.name].enum_type
        if enum_type is not None and issubclass(slot.kind, enum.Enum):
            wire = {value.name for value in enum_type.values if value.number != 0}
            assert wire == set(slot.kind.__members__)


def test_no_field_is_a_64_bit_integer() -> None:
    wide = {
        FieldDescriptor.CPPTYPE_INT64,
        FieldDescriptor.CPPTYPE_UINT64,
        FieldDescriptor.CPPTYPE_UINT32,
        FieldDescriptor.CPPTYPE_FLOAT,
    }
    for message in pb.DESCRIPTOR.message_types_by_name.values():
        for field in message.fields:
            assert field.cpp_type not in wide, field.full_name


def full_trial() -> records.Trial:
    """Returns a trial in which every field says something."""
    interval = records.Interval(median=1.25, low=1.2, high=1.3)
    return records.Trial(
        trial_id="t1",
        kind=records.TrialKind.COMPILE,
        status=records.TrialStatus.OUT_OF_MEMORY,
        config=records.Config(scope=records.Scope.REGIONAL, options=(("max_fusion_size", "8"),)),
        failure=records.Failure(
            kind="device", message="out of memory", details="...", phase=records.Phase.STEADY
        ),
        phase_reached=records.Phase.WARM_UP,
        eager_step_s=interval,
        step_s=interval,
        speedup=interval,
        pairs=(records.Pair(eager_s=0.1, compiled_s=0.08),),
        cold_start_s=40.0,
        warm_start_s=3.5,
        eager=records.Timing(step_s=interval, data_wait_s=0.01, steps=20),
        eager_peak_bytes=12_345_678_901,
        compile_peak_bytes=12_345_678_901,
        peak_bytes=12_345_678_901,
        graphs=3,
        coverage=0.97,
        graph_breaks=(
            records.GraphBreak(cause=records.GraphBreakCause.SCALAR_READ, reason="Tensor.item()"),
        ),
        recompiles=(
            records.Recompile(cause=records.RecompileCause.BATCH_SIZE, reason="size", lost_s=3.0),
        ),
        recompile_limit_hit=True,
        loss_drift=float("nan"),
        stdout_tail="torn \udce9 text",
        cache_bytes=12_345_678_901,
        wall_s=70.0,
    )


def full_advice() -> records.Advice:
    """Returns an advice in which the fields of design §8 say something."""
    interval = records.Interval(median=100.0, low=90.0, high=110.0)
    return records.Advice(
        advice_id="a1",
        created="2026-01-01T00:00:00+00:00",
        enable=True,
        target="train.py:build",
        config=records.Config(dynamic=records.Dynamic.TRUE),
        code="model.compile(dynamic=True)",
        speedup=interval,
        compile_s=interval,
        saved_s=interval,
        eager_total_s=interval,
        advised_total_s=interval,
        break_even_step=12_345_678_901.0,
        p_saves=0.99,
        reasons=("it is 1.25 × faster",),
        steps=20_000.0,
        trials=(full_trial(),),
        hand_over=records.HandOver(path="/cache", bytes=12_345_678_901),
    )


def test_json_of_an_advice_reads_well() -> None:
    text = convert.advice_json(full_advice())
    assert "NaN" not in text
    assert "Infinity" not in text
    advice = json.loads(text)
    trial = advice["trials"][0]
    assert advice["hand_over"]["bytes"] == 12_345_678_901
    assert advice["break_even_step"] == 12_345_678_901
    assert advice["config"] == {
        "scope": "model",
        "mode": "default",
        "dynamic": "true",
        "fullgraph": False,
        "backend": "inductor",
        "options": {},
    }
    assert trial["config"]["options"] == {"max_fusion_size": "8"}
    assert (trial["status"], trial["kind"]) == ("OUT_OF_MEMORY", "COMPILE")
    assert trial["phase_reached"] == "WARM_UP"
    assert trial["graph_breaks"][0]["cause"] == "SCALAR_READ"
    assert trial["recompiles"][0]["cause"] == "BATCH_SIZE"
    assert trial["peak_bytes"] == 12_345_678_901
    assert trial["graphs"] == 3
    assert "loss_drift" not in trial
    assert trial["stdout_tail"] == "torn \\udce9 text"
    # Defaults are printed: a reader need not know them.
    assert (trial["skipped_frames"], trial["form"], advice["warnings"]) == (0, "call", [])
    assert not [value for value in _strings(advice) if value.isdigit() and value != "8"]


def _strings(value: object) -> list[str]:
    if isinstance(value, dict):
        return [text for item in value.values() for text in _strings(item)]
    if isinstance(value, list):
        return [text for item in value for text in _strings(item)]
    return [value] if isinstance(value, str) else []
