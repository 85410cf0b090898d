"""Sentences with numbers, and lines to paste that parse, run, and reach the right modules."""

from __future__ import annotations

import ast
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor import wording
from advisor.models.best_case import BestCase
from advisor.models.economics import Measured, bill
from advisor.models.evidence import Doubt
from advisor.models.plan import Plan
from advisor.profiler.errors import PlanError
from advisor.profiler.records import (
    Blocks,
    Config,
    Dynamic,
    Failure,
    Mode,
    Pair,
    Scope,
    Trial,
    TrialKind,
    TrialStatus,
    WorkloadFacts,
)
from advisor.profiler.units import config_name
from advisor.wording import code

REGIONAL = Config(scope=Scope.REGIONAL)
LAYERS = Blocks(
    module_class="transformers.models.bert.modeling_bert.BertLayer",
    paths=("bert.encoder.layer.0", "bert.encoder.layer.1"),
    container="bert.encoder.layer",
)


def facts(*blocks: Blocks, torch_class: bool = False) -> WorkloadFacts:
    return WorkloadFacts(
        fingerprint="f",
        model_class="Net",
        parameters=1,
        trainable_parameters=1,
        optimizer="AdamW",
        dtype="float32",
        shapes=(),
        blocks=blocks,
        torch_class=torch_class,
    )


@pytest.mark.parametrize(
    ("config", "form", "lines"),
    [
        (Config(), "call", "model.compile()"),
        (Config(mode=Mode.REDUCE_OVERHEAD), "call", 'model.compile(mode="reduce-overhead")'),
        (
            Config(dynamic=Dynamic.FALSE, fullgraph=True, backend="aot_eager"),
            "call",
            'model.compile(dynamic=False, fullgraph=True, backend="aot_eager")',
        ),
        (Config(), "forward", "import torch\n\nmodel.forward = torch.compile(model.forward)"),
        (
            Config(mode=Mode.MAX_AUTOTUNE, dynamic=Dynamic.TRUE),
            "forward",
            "import torch\n\n"
            'model.forward = torch.compile(model.forward, mode="max-autotune", dynamic=True)',
        ),
        (
            Config(options=(("triton.cudagraphs", "true"),)),
            "call",
            "import torch._inductor.config\n\n"
            "torch._inductor.config.triton.cudagraphs = True\nmodel.compile()",
        ),
        (
            Config(options=(("torch._dynamo.config.recompile_limit", "32"),)),
            "forward",
            "import torch._dynamo.config\n\n"
            "torch._dynamo.config.recompile_limit = 32\n"
            "model.forward = torch.compile(model.forward)",
        ),
    ],
)
def test_whole_model_lines(config: Config, form: str, lines: str) -> None:
    assert code(config, facts(), form) == lines


def test_model_whose_class_is_torch_s_is_compiled_by_its_forward() -> None:
    assert "torch.compile(model.forward)" in code(Config(), facts(torch_class=True))


def test_staying_eager_needs_no_code() -> None:
    assert code(None, facts(LAYERS)) == ""


def test_regional_lines_loop_over_the_model_s_own_container() -> None:
    lines = code(Config(scope=Scope.REGIONAL, dynamic=Dynamic.TRUE), facts(LAYERS))
    assert lines == "for block in model.bert.encoder.layer:\n    block.compile(dynamic=True)"


def test_blocks_without_a_container_are_listed_by_their_paths() -> None:
    scattered = Blocks(module_class="net.Block", paths=("stem", "body.3", "head.last"))
    assert code(REGIONAL, facts(scattered)) == (
        "for block in (\n"
        "    model.stem,\n"
        '    model.get_submodule("body.3"),\n'
        "    model.head.last,\n"
        "):\n"
        "    block.compile()"
    )


def test_every_kind_of_block_is_compiled_and_torch_s_own_by_their_forward() -> None:
    own = Blocks(
        module_class="torch.nn.modules.transformer.TransformerEncoderLayer",
        paths=("decoder.layers.0", "decoder.layers.1"),
        container="decoder.layers",
    )
    lines = code(Config(scope=Scope.REGIONAL, mode=Mode.MAX_AUTOTUNE), facts(LAYERS, own))
    assert lines == (
        "import torch\n\n"
        "for block in model.bert.encoder.layer:\n"
        '    block.compile(mode="max-autotune")\n'
        "for block in model.decoder.layers:\n"
        '    block.forward = torch.compile(block.forward, mode="max-autotune")'
    )


def test_path_that_is_a_python_keyword_is_still_reached() -> None:
    odd = Blocks(module_class="net.Block", paths=("lambda.a", "a-b.c"), container=None)
    lines = code(REGIONAL, facts(odd))
    ast.parse(lines)
    assert 'model.get_submodule("lambda.a")' in lines


@pytest.mark.parametrize("name", ["x = 1; import os", "", "a..b", "torch._dynamo.config.", "class"])
def test_option_that_is_no_setting_never_becomes_code(name: str) -> None:
    with pytest.raises(PlanError, match="is not a setting of torch"):
        code(Config(options=((name, "1"),)), facts())


def test_value_of_an_option_is_always_a_literal() -> None:
    lines = code(Config(options=(("max_autotune_gemm_backends", "__import__('os')"),)), facts())
    statement = ast.parse(lines).body[1]
    assert isinstance(statement, ast.Assign)
    assert isinstance(statement.value, ast.Constant)


names = st.text(st.characters(codec="utf-8", exclude_characters="."), min_size=1, max_size=8)
paths = st.lists(names, min_size=1, max_size=4).map(".".join)
blocks = st.builds(
    Blocks,
    module_class=st.sampled_from(["net.Block", "torch.nn.modules.linear.Linear"]),
    paths=st.lists(paths, min_size=2, max_size=4).map(tuple),
    container=st.none() | paths,
)
configs = st.builds(
    Config,
    scope=st.sampled_from(list(Scope)),
    mode=st.sampled_from(list(Mode)),
    dynamic=st.sampled_from(list(Dynamic)),
    fullgraph=st.booleans(),
    backend=st.sampled_from(["inductor", "eager", 'we"ird\\']),
    options=st.sampled_from([(), (("epilogue_fusion", "True"), ("dynamo.verbose", "x'y"))]),
)


@given(configs, st.lists(blocks, min_size=1, max_size=3), st.sampled_from(["call", "forward"]))
@settings(max_examples=150, deadline=None)
def test_generated_code_compiles(config: Config, found: list[Blocks], form: str) -> None:
    lines = code(config, facts(*found), form)
    compile(lines, "<advice>", "exec")
    assert ("torch." not in lines) or lines.startswith("import torch")
    assert lines == lines.strip()


def test_pasted_lines_put_the_compiled_call_into_real_modules() -> None:
    nn = pytest.importorskip("torch.nn")

    class Block(nn.Module):
        pass

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Block(), Block()])
            self.mlp = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
            self.single = Block()

    layers = Blocks(module_class="net.Block", paths=("layers.0", "layers.1"), container="layers")
    listed = Blocks(module_class="net.Block", paths=("layers.1", "single"))
    linear = Blocks(
        module_class="torch.nn.modules.linear.Linear", paths=("mlp.0", "mlp.1"), container="mlp"
    )
    for found, touched in (
        (layers, ["layers.0", "layers.1"]),
        (listed, ["layers.1", "single"]),
        (linear, ["mlp.0", "mlp.1"]),
    ):
        model = Net()
        exec(code(REGIONAL, facts(found)), {"model": model})
        changed = [
            name
            for name, module in model.named_modules()
            if module._compiled_call_impl is not None or "forward" in vars(module)
        ]
        assert changed == touched
    model = Net()
    exec(code(Config(), facts()), {"model": model})
    assert model._compiled_call_impl is not None


# --- Sentences -------------------------------------------------------------------------------


def job(ratio: float, cold_start_s: float = 24.0, count: int = 8) -> Measured:
    pair = Pair(eager_s=0.06, compiled_s=0.06 / ratio)
    return Measured(pairs=(pair,) * count, cold_start_s=cold_start_s)


def test_best_case_that_cannot_pay_is_told_with_all_its_numbers() -> None:
    best = BestCase(speedup=3.0, compile_s=5.0, usual_compile_s=20.0, source="published runs")
    assert wording.cannot_pay(best, 12.0, 40.0, "eager", 14.0) == (
        "even at 3.00x and 5.0 s of compiling (published runs) it could save at most 12 s of the "
        "40 s that the plan takes with eager, and measuring it takes about 14 s"
    )
    hopeless = wording.cannot_pay(best, -3.0, 3.0, "eager", 14.0)
    assert "would take 6.0 s, no less than the 3.0 s" in hopeless


@pytest.mark.parametrize(
    ("ratio", "steps", "words"),
    [
        (0.8, 10**6, "slower than eager: 0.80x"),
        (1.2, 1000, "paid back after step 2,4"),
        (1.01, 10**6, "with a probability of"),
    ],
)
def test_why_a_configuration_does_not_pay(ratio: float, steps: int, words: str) -> None:
    plan = Plan(steps=steps)
    assert words in wording.not_paying(bill(plan, steps, job(ratio)), plan)


def test_restarts_are_named_in_the_compile_time() -> None:
    plan = Plan(steps=20_000, restarts=1)
    sentence = wording.pays_back(bill(plan, 20_000, job(1.2)), plan)
    assert re.match(
        r"48 s of compiling \(24 s at the first start, then 1 restart\) are paid back after step "
        r"4,\d{3} \(90 %: [34],\d{3}-[5-6],\d{3}\) of 20,000\.",
        sentence,
    )


def test_probability_is_never_called_certain_before_it_is() -> None:
    plan = Plan(steps=10**6)
    sure = bill(plan, 10**6, job(2.0))
    assert sure.p_saves == 1.0
    assert "more than 99 %" in wording.saves(sure)


def test_every_doubt_and_status_has_its_sentence() -> None:
    for status in set(TrialStatus) - {TrialStatus.OK, TrialStatus.SKIPPED}:
        trial = Trial(
            trial_id="t",
            kind=TrialKind.COMPILE,
            status=status,
            config=Config(),
            failure=Failure(kind="k", message="because of this"),
            peak_bytes=2**31,
        )
        for doubt in Doubt:
            sentence = wording.sentence_of_doubt(trial, doubt)
            assert len(sentence) > 20
            assert not sentence.endswith(".")
        assert "because of this" in wording.sentence_of_doubt(trial, Doubt.FAILED)


@given(st.floats(0.5, 3.0), st.integers(1, 10**7), st.integers(0, 9), st.floats(0.0, 1e4))
@settings(max_examples=30, deadline=None)
def test_sentences_hold_no_raw_floats(
    ratio: float, steps: int, restarts: int, campaign_s: float
) -> None:
    plan = Plan(steps=steps, restarts=restarts, price_per_hour=3.0)
    found = bill(plan, steps, job(ratio))
    for sentence in (
        wording.not_paying(found, plan),
        wording.pays_back(found, plan),
        wording.saves(found),
        wording.worth(found, 3.0),
        wording.campaign_against_savings(campaign_s, found.saved_s),
        wording.second_best(found, found, config_name(Config())),
    ):
        assert not re.search(r"\d\.\d{4,}|nan|inf\b|None|e\+\d", sentence), sentence
