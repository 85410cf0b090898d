"""Tracing anew: which settings remove a cause, which do not, and which recompiles settle."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from advisor.profiler import probe, settings
from advisor.profiler.compile_events import CompileFacts, CompileRecorder
from advisor.profiler.flip import Flip
from advisor.profiler.records import (
    Config,
    GraphBreak,
    GraphBreakCause,
    Recompile,
    RecompileCause,
    WhatIf,
)
from advisor.profiler.settings import DYNAMO, IGNORED, RECOMPILE_LIMIT, REORDERABLE
from advisor.profiler.training import Trainer
from advisor.profiler.workload import Workload

pytestmark = pytest.mark.filterwarnings("ignore")

EAGER = Config(backend="eager")
LONG_S = 120.0
log = logging.getLogger("tests.probe")
log.addHandler(logging.NullHandler())
log.propagate = False


class Net(nn.Module):
    """Two layers, and between them what each test is about."""

    def __init__(self, between: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(4, 8), nn.Linear(8, 2)
        self.between = between
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Any, value: Any = None) -> Any:
        h = torch.relu(self.before(x))
        h = self.between(self, h, value)
        return self.after(h)


def trainer(
    between: Callable[..., Any], value: Callable[[int], Any] = lambda step: None, **parts: Any
) -> Trainer:
    torch.manual_seed(0)
    model = Net(between, **parts)

    def batches(step: int) -> Any:
        generator = torch.Generator().manual_seed(step)
        return torch.randn(4, 4, generator=generator), value(step)

    workload = Workload(
        model=model,
        batches=batches,
        loss=lambda model, batch: model(*batch).square().mean(),
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
    )
    return Trainer(workload, torch.device("cpu"))


def met(job: Trainer, steps: int = 14) -> tuple[tuple[GraphBreak, ...], tuple[Recompile, ...]]:
    """Returns what compiling this job meets, as a trial would tell it."""
    torch._dynamo.reset()
    flip = Flip([job.model], EAGER)
    recorder = CompileRecorder()
    flip.apply()
    job.run(job.batches.take(steps))
    flip.to_eager()
    facts = recorder.facts()
    return facts.graph_breaks, facts.recompiles


def tried(job: Trainer, config: Config = EAGER, limit_s: float = LONG_S) -> tuple[WhatIf, ...]:
    breaks, recompiles = met(job)
    recompiles = probe.settling(
        job, [job.model], config, recompiles, limit_s=limit_s, still_compiling=True
    )
    found: tuple[WhatIf, ...] = probe.what_ifs(
        job, [job.model], config, breaks, recompiles, limit_s=limit_s
    )
    return found


def reads_scalar(net: Any, h: Any, value: Any) -> Any:
    return h / (1.0 + h.detach().abs().max().item())


def reads_scalar_and_branches(net: Any, h: Any, value: Any) -> Any:
    peak = h.detach().abs().max().item()
    if peak > 100:
        h = h / peak
    return h


def reads_list_of_floats(net: Any, h: Any, value: Any) -> Any:
    peaks = h.detach().amax(0).tolist()
    return h * peaks[0]


def picks_rows(net: Any, h: Any, value: Any) -> Any:
    rows = torch.nonzero(h.detach().sum(1) > 0)
    return h + h[rows[:, 0]].mean()


def picks_rows_and_branches(net: Any, h: Any, value: Any) -> Any:
    chosen = h[h.detach().sum(1) > 0]
    if chosen.shape[0] > 2:
        h = h + chosen.mean()
    return h


def prints(net: Any, h: Any, value: Any) -> Any:
    print("mean", h.mean())
    return h * 2


def prints_an_object(net: Any, h: Any, value: Any) -> Any:
    print(net.before)
    return h * 2


def warns(net: Any, h: Any, value: Any) -> Any:
    warnings.warn("careful")  # noqa: B028
    return h * 2


def warns_with_a_class(net: Any, h: Any, value: Any) -> Any:
    warnings.warn("careful", UserWarning, stacklevel=2)
    return h * 2


def logs(net: Any, h: Any, value: Any) -> Any:
    log.info("mean %s", h.mean())
    return h * 2


def logs_by_module(net: Any, h: Any, value: Any) -> Any:
    logging.info("mean")  # noqa: LOG015
    return h * 2


def recurs(net: Any, h: Any, value: Any) -> Any:
    return net.rnn(h[:, None])[0][:, 0]


def branches(net: Any, h: Any, value: Any) -> Any:
    if h.detach().sum() > 1e6:
        h = h * 0
    return h


def prints_and_reads(net: Any, h: Any, value: Any) -> Any:
    print("mean", h.mean())
    h = torch.sin(h)
    return h / (1.0 + h.detach().abs().max().item())


def prints_and_branches_on_scalar(net: Any, h: Any, value: Any) -> Any:
    print("mean", h.mean())
    return reads_scalar_and_branches(net, torch.sin(h), value)


def counts(net: Any, h: Any, value: Any) -> Any:
    net.steps += 1
    return h * min(1.0, net.steps / 1000)


def picks_layer(net: Any, h: Any, value: Any) -> Any:
    return net.layers[value](h)


def reads_name(net: Any, h: Any, value: Any) -> Any:
    return h * (1.0 if value.startswith("web") else 0.5)


def layers(count: int) -> Any:
    return nn.ModuleList([nn.Linear(8, 8) for _ in range(count)])


SCALARS = (f"{DYNAMO}capture_scalar_outputs", "true")
SHAPES = (f"{DYNAMO}capture_dynamic_output_shape_ops", "true")


# --- What if ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("between", "parts", "options", "cause"),
    [
        (reads_scalar, {}, (SCALARS,), "SCALAR_READ"),
        (picks_rows, {}, (SHAPES, SCALARS), "DYNAMIC_OUTPUT_SHAPE"),
        (prints, {}, ((REORDERABLE, "builtins.print"),), "PRINT_OR_LOGGING"),
        (prints_an_object, {}, ((IGNORED, "builtins.print"),), "PRINT_OR_LOGGING"),
        (warns, {}, ((REORDERABLE, "warnings.warn"),), "PRINT_OR_LOGGING"),
        (warns_with_a_class, {}, ((IGNORED, "warnings.warn"),), "PRINT_OR_LOGGING"),
        (logs, {}, ((IGNORED, "logging.Logger.info"),), "PRINT_OR_LOGGING"),
        (logs_by_module, {}, ((IGNORED, "logging.info"),), None),
        (recurs, {"rnn": nn.GRU(8, 8)}, ((f"{DYNAMO}allow_rnn", "true"),), None),
    ],
)
def test_a_setting_that_removes_the_break_is_found(
    between: Callable[..., Any],
    parts: dict[str, Any],
    options: settings.Options,
    cause: str | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = trainer(between, **parts)
    first = tried(job)[0]
    assert first.options == options
    assert (first.sites, first.graphs, first.failure) == (0, 1, "")
    assert first.removes
    assert cause is None or cause in first.removes


@pytest.mark.parametrize(
    "between",
    [reads_scalar_and_branches, reads_list_of_floats, picks_rows_and_branches, branches],
)
def test_a_setting_that_only_moves_the_break_is_not_offered(between: Callable[..., Any]) -> None:
    assert tried(trainer(between)) == ()


def traced(*breaks: tuple[GraphBreakCause, int]) -> Any:
    """Returns what a trace showed that met these causes in these lines."""
    facts = CompileFacts(
        events=(),
        graphs=1 + len(breaks),
        graph_breaks=tuple(
            GraphBreak(cause=cause, reason="", file="a.py", line=line) for cause, line in breaks
        ),
        recompiles=(),
        recompile_limit_hit=False,
        skipped_frames=0,
    )
    return probe._Traced(facts=facts, before=facts, steps=1, wall_s=0.0)


def test_a_cause_that_gives_way_to_another_is_not_gone() -> None:
    read, branch = GraphBreakCause.SCALAR_READ, GraphBreakCause.DATA_DEPENDENT_BRANCH
    base = traced((read, 3))
    assert probe._breaks_gone(traced(), base) == {"SCALAR_READ"}
    # In the next line, and in the very line: `if x.item() > 1:`.
    assert probe._breaks_gone(traced((branch, 4)), base) == set()
    assert probe._breaks_gone(traced((branch, 3)), base) == set()
    printed = traced((read, 3), (GraphBreakCause.PRINT_OR_LOGGING, 9))
    assert probe._breaks_gone(traced((branch, 3)), printed) == {"PRINT_OR_LOGGING"}


def test_all_causes_together_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    first, *others = tried(trainer(prints_and_reads))
    assert first.options == (SCALARS, (REORDERABLE, "builtins.print"))
    assert {"PRINT_OR_LOGGING", "SCALAR_READ"} <= set(first.removes)
    assert (first.sites, first.graphs) == (0, 1)
    # Each alone leaves the other's place.
    assert {one.options for one in others} == {(SCALARS,), ((REORDERABLE, "builtins.print"),)}
    assert {one.sites for one in others} == {1}


def test_a_setting_that_brings_nothing_is_left_out_of_the_rest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The branch on the scalar stays a break: only the print's setting is worth having."""
    (found,) = tried(trainer(prints_and_branches_on_scalar))
    assert found.options == ((REORDERABLE, "builtins.print"),)
    assert found.removes == ("PRINT_OR_LOGGING",)
    assert found.sites == 1


def test_a_limit_above_all_variants_is_found() -> None:
    job = trainer(picks_layer, lambda step: (step * 5) % 12, layers=layers(12))
    (found,) = tried(job)
    ((name, value),) = found.options
    assert name == RECOMPILE_LIMIT
    assert value == "16"
    assert not found.recompile_limit_hit
    assert found.removes == ("PYTHON_NUMBER",)


def test_settings_of_the_trial_stay_part_of_what_is_offered(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = Config(backend="eager", options=(("capture_scalar_outputs", "true"),))
    found = tried(trainer(prints_and_reads), config)
    assert [one.options for one in found] == [(SCALARS, (REORDERABLE, "builtins.print"))]


# --- What is left behind ---------------------------------------------------------------------


def test_the_model_is_plain_eager_and_settings_are_back_afterwards() -> None:
    job = trainer(reads_scalar)
    before = torch._dynamo.config.get_config_copy()
    assert tried(job)
    assert torch._dynamo.config.get_config_copy() == before
    assert job.model._compiled_call_impl is None
    recorder = CompileRecorder()
    job.run(job.batches.take(1))
    assert recorder.count() == 0


def test_a_class_of_torch_gets_its_own_forward_back() -> None:
    job = trainer(reads_scalar)
    breaks, _ = met(job)
    alone = job.model.get_submodule("before")
    probe.what_ifs(job, [alone], EAGER, breaks, (), limit_s=LONG_S)
    assert "forward" not in vars(alone)


def test_a_job_whose_steps_raise_is_told_nothing_and_stays_plain() -> None:
    def raises_later(net: Any, h: Any, value: Any) -> Any:
        if value > 18:
            raise SystemExit("enough")
        return reads_scalar(net, h, value)

    job = trainer(raises_later, lambda step: step)
    breaks, recompiles = met(job)
    assert breaks
    before = torch._dynamo.config.get_config_copy()
    assert probe.what_ifs(job, [job.model], EAGER, breaks, recompiles, limit_s=LONG_S) == ()
    assert job.model._compiled_call_impl is None
    assert torch._dynamo.config.get_config_copy() == before


def test_a_candidate_that_raises_is_a_failure_and_comes_last(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A model may look at the setting and refuse; others are tried all the same."""

    def refuses(net: Any, h: Any, value: Any) -> Any:
        net.refuse()
        return prints_and_reads(net, h, value)

    def refuse() -> None:
        if torch._dynamo.config.capture_scalar_outputs:
            raise RuntimeError("not with scalars\nat all")

    job = trainer(refuses, refuse=torch._dynamo.disable(refuse))
    found = tried(job)
    failed = [one for one in found if one.failure]
    assert failed == list(found[-len(failed) :])
    assert {one.failure for one in failed} == {"RuntimeError: not with scalars"}
    assert all(SCALARS in one.options and not one.removes for one in failed)
    assert found[0].options == ((REORDERABLE, "builtins.print"),)


def test_nothing_is_begun_without_time() -> None:
    job = trainer(reads_scalar)
    breaks, recompiles = met(job)
    for limit_s, begun in ((0.0, 0), (1e-9, 1)):
        steps = job.batches._step
        found = probe.what_ifs(job, [job.model], EAGER, breaks, recompiles, limit_s=limit_s)
        assert found == ()
        # One step of the base: that it takes too long cannot be known before.
        assert job.batches._step - steps == begun


def test_nothing_to_try_runs_no_step() -> None:
    job = trainer(branches)
    breaks, recompiles = met(job)
    steps = job.batches._step
    assert probe.what_ifs(job, [job.model], EAGER, breaks, recompiles, limit_s=LONG_S) == ()
    assert job.batches._step == steps


# --- Settling --------------------------------------------------------------------------------


def settled(job: Trainer, *, still_compiling: bool = True) -> tuple[Recompile, ...]:
    _, recompiles = met(job)
    assert recompiles
    found: tuple[Recompile, ...] = probe.settling(
        job,
        [job.model],
        EAGER,
        recompiles,
        limit_s=LONG_S,
        still_compiling=still_compiling,
    )
    assert [(one.cause, one.reason, one.count) for one in found] == [
        (one.cause, one.reason, one.count) for one in recompiles
    ]
    return found


def test_a_counter_on_the_module_never_settles_but_has_a_setting() -> None:
    job = trainer(counts, steps=0)
    recompiles = settled(job)
    assert {(one.settles, one.variants) for one in recompiles} == {(False, None)}
    (found,) = probe.what_ifs(job, [job.model], EAGER, (), recompiles, limit_s=LONG_S)
    assert found.options == ((f"{DYNAMO}allow_unspec_int_on_nn_module", "true"),)
    assert found.removes == tuple({one.cause.value for one in recompiles})
    assert found.recompiles <= 1
    assert not found.recompile_limit_hit


def test_names_never_settle_and_have_no_setting() -> None:
    job = trainer(reads_name, lambda step: f"web-{step:05d}")
    recompiles = settled(job)
    assert {one.settles for one in recompiles} == {False}
    assert probe.what_ifs(job, [job.model], EAGER, (), recompiles, limit_s=LONG_S) == ()


@pytest.mark.parametrize("count", [5, 12])
def test_layers_picked_in_turn_settle_at_their_number(count: int) -> None:
    job = trainer(picks_layer, lambda step: (step * 7) % count, layers=layers(count))
    found = settled(job)
    assert {one.cause for one in found} == {RecompileCause.PYTHON_NUMBER}
    assert all(one.settles for one in found)
    assert {one.variants for one in found} == {count}


def test_what_came_to_an_end_in_the_trial_settles_without_tracing() -> None:
    job = trainer(picks_layer, lambda step: min(step, 1), layers=layers(2))
    steps = job.batches._step
    found = settled(job, still_compiling=False)
    assert {one.settles for one in found} == {True}
    assert job.batches._step == steps + 14


def test_where_it_cannot_be_traced_the_trials_own_end_speaks() -> None:
    one = Recompile(cause=RecompileCause.OTHER, reason="r", count=9)

    def raises(net: Any, h: Any, value: Any) -> Any:
        raise RuntimeError("no more")

    job = trainer(raises)
    for still_compiling in (True, False):
        (found,) = probe.settling(
            job, [job.model], EAGER, (one,), limit_s=LONG_S, still_compiling=still_compiling
        )
        assert found.settles is not still_compiling
        assert found.variants is None
    assert job.model._compiled_call_impl is None


def test_no_recompile_needs_no_tracing() -> None:
    job = trainer(reads_scalar)
    assert probe.settling(job, [job.model], EAGER, (), limit_s=LONG_S, still_compiling=True) == ()
    assert job.batches._step == 0
