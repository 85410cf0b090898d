"""Tracing anew at the end of a trial: what settings would capture, and which recompiles settle.

With the backend "eager" no kernel is built: the same Dynamo front end with the same guards answers
in milliseconds to a second for each graph. Its counts differ a little from Inductor's (a float that
changes is compiled in less often), so that only counts of this backend are compared. The steps are
real ones and train the model on: nothing may be measured afterwards.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from advisor.profiler import settings, torch_internals
from advisor.profiler.compile_events import CompileFacts, CompileRecorder
from advisor.profiler.flip import Flip
from advisor.profiler.options import applied
from advisor.profiler.records import Config, GraphBreak, Recompile, WhatIf
from advisor.profiler.settings import Options
from advisor.profiler.training import Trainer
from advisor.profiler.workload import Batch

# Enough for the usual recompile limit (8) to show, and for a counter to be told from a few values.
_STEPS = 16
_SETTLING_STEPS = 48
_LEAST_SETTLING_STEPS = 6
_LEAST_RECOMPILES = 3
# Share of the time that the base may take: each candidate after it takes about as long.
_BASE_SHARE = 0.3
_MOST_TEXT = 300
# Without it what a trace learned of shapes would be taken over into the next one from a folder.
_FRESH: Options = ((f"{settings.DYNAMO}automatic_dynamic_local_pgo", "false"),)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traced:
    """What tracing a number of steps showed: at their end, and after two thirds of them."""

    facts: CompileFacts
    before: CompileFacts
    steps: int
    wall_s: float

    @property
    def sites(self) -> int:
        """Places in the source at which a graph ends."""
        return len({(met.file, met.line) for met in self.facts.graph_breaks})

    @property
    def recompiles(self) -> int:
        """Recompiles of all causes."""
        return sum(met.count for met in self.facts.recompiles)


class _OutOfTime(Exception):
    """The limit was reached: what was traced until then is not comparable."""


def what_ifs(
    trainer: Trainer,
    modules: Sequence[torch.nn.Module],
    config: Config,
    breaks: Sequence[GraphBreak],
    recompiles: Sequence[Recompile],
    *,
    limit_s: float,
) -> tuple[WhatIf, ...]:
    """Returns the settings that remove breaks or recompiles, those that leave least first.

    Each brings fewer break sites, fewer recompiles or keeps away from the recompile limit, without
    leaving more to Python; their `options` are whole ones, those of `config` among them. Last come
    candidates that raised, with `failure` set: they are not offered. The modules must be plain
    eager, and are so afterwards; compiled code that dynamo held is gone. Takes at most about
    `limit_s` seconds (a step that has begun is ended) and raises nothing that the workload's own
    steps or torch raise.
    """
    wanted = _wanted(config, breaks, recompiles)
    if not wanted or limit_s <= 0:
        return ()
    until = time.perf_counter() + limit_s
    probe = _Probe(trainer, modules, config)
    steps = _steps_wanted(recompiles)
    try:
        base = probe.trace(config.options, steps, time.perf_counter() + limit_s * _BASE_SHARE)
    except (Exception, SystemExit):  # noqa: BLE001 - the person's own steps run here
        return ()  # nothing to compare with
    found: list[WhatIf] = []
    for options in wanted:
        if time.perf_counter() + base.wall_s > until:
            break
        try:
            traced = probe.trace(options, base.steps, until, whole=True)
        except _OutOfTime:
            break
        except (Exception, SystemExit) as error:  # noqa: BLE001 - as above
            text = f"{type(error).__name__}: {error}".strip().split("\n", 1)[0]
            found.append(WhatIf(options=options, failure=text[:_MOST_TEXT]))
            continue
        if _is_better(traced, base):
            found.append(_what_if(options, traced, base))
    return _best_first(found)


def settling(
    trainer: Trainer,
    modules: Sequence[torch.nn.Module],
    config: Config,
    recompiles: tuple[Recompile, ...],
    *,
    limit_s: float,
    still_compiling: bool,
) -> tuple[Recompile, ...]:
    """Returns the recompiles with `settles`, and with `variants` where they were counted.

    Where the limit was hit or there were several, up to 48 steps are traced under a raised limit:
    what brought none in their last third settles, and what did goes on. Otherwise, and where it
    cannot be traced, all settle unless the trial was `still_compiling` at its end. The modules must
    be plain eager, and are so afterwards; raises nothing that the steps raise.
    """
    trial_says = tuple(replace(met, settles=not still_compiling) for met in recompiles)
    if limit_s <= 0 or not _worth_tracing(recompiles, still_compiling):
        return trial_says
    raised = ((settings.RECOMPILE_LIMIT, str(settings.HIGHEST_LIMIT)),)
    options = settings.merged(config.options, raised)
    until = time.perf_counter() + limit_s
    try:
        traced = _Probe(trainer, modules, config).trace(options, _SETTLING_STEPS, until)
    except (Exception, SystemExit):  # noqa: BLE001 - the person's own steps run here
        return trial_says
    if traced.steps < _LEAST_SETTLING_STEPS:
        return trial_says
    return tuple(_settled(met, traced, still_compiling) for met in recompiles)


def _worth_tracing(recompiles: Sequence[Recompile], still_compiling: bool) -> bool:
    several = sum(met.count for met in recompiles) >= _LEAST_RECOMPILES
    return bool(recompiles) and (still_compiling or several)


def _settled(met: Recompile, traced: _Traced, still_compiling: bool) -> Recompile:
    """Returns a recompile with what the trace says of its cause, or else of its very place."""

    def counts(same: Callable[[Recompile], bool]) -> tuple[int, int]:
        both = traced.before.recompiles, traced.facts.recompiles
        before, after = (sum(one.count for one in found if same(one)) for found in both)
        return before, after

    place = met.cause, met.file, met.line
    # One cause is often told at several places: the first guard here, the next one there.
    for before, after in (
        counts(lambda one: one.cause is met.cause),
        counts(lambda one: (one.cause, one.file, one.line) == place),
    ):
        if after and after == before and not traced.facts.recompile_limit_hit:
            return replace(met, settles=True, variants=after + 1)
    seen = any(one.cause is met.cause for one in traced.facts.recompiles)
    # Not met at all with this backend: only the trial's own end speaks.
    return replace(met, settles=False if seen else not still_compiling)


def _wanted(
    config: Config, breaks: Sequence[GraphBreak], recompiles: Sequence[Recompile]
) -> tuple[Options, ...]:
    own = settings.merged(
        tuple((settings.canonical(name), value) for name, value in config.options)
    )
    merged = (settings.merged(own, one) for one in settings.candidates(breaks, recompiles))
    return tuple(dict.fromkeys(options for options in merged if options != own))


def _steps_wanted(recompiles: Sequence[Recompile]) -> int:
    """Returns the steps to trace: more where many variants are known to come in turn."""
    return min(_SETTLING_STEPS, max(_STEPS, 2 * settings.variants(recompiles)))


class _Probe:
    """Traces steps on the same batches, each time as a fresh process would."""

    def __init__(
        self, trainer: Trainer, modules: Sequence[torch.nn.Module], config: Config
    ) -> None:
        self._trainer = trainer
        self._modules = tuple(modules)
        self._config = replace(config, backend="eager", options=())
        self._batches: list[Batch] = []

    def trace(self, options: Options, steps: int, until: float, *, whole: bool = False) -> _Traced:
        """Returns what `steps` steps showed, fewer when `until` comes before them.

        `whole` raises `_OutOfTime` instead of tracing fewer. Raises what the steps raise.
        """
        begun = time.perf_counter()
        flip = Flip(self._modules, self._config)
        torch_internals.forget_compiled_code()
        with applied((*_known(_FRESH), *options)):
            try:
                flip.apply()
                recorder = CompileRecorder()
                known = self._run(recorder, steps, until)
            finally:
                flip.to_eager()
        if whole and len(known) < steps:
            raise _OutOfTime
        torch_internals.forget_compiled_code()
        return _Traced(
            facts=known[-1],
            # Of the first two thirds, rounded up.
            before=known[-(-2 * len(known) // 3) - 1],
            steps=len(known),
            wall_s=time.perf_counter() - begun,
        )

    def _run(self, recorder: CompileRecorder, steps: int, until: float) -> list[CompileFacts]:
        """Returns what was known after each step: of all `steps`, or of those before `until`."""
        known: list[CompileFacts] = []
        for step in range(steps):
            if step and time.perf_counter() > until:
                break
            recorder.step = step
            self._trainer.run([self._batch(step)])
            known.append(recorder.facts())
        return known

    def _batch(self, step: int) -> Batch:
        """Returns the batch of a step, the same one each time."""
        if step == len(self._batches):
            self._batches.append(self._trainer.batches.next())
        return self._batches[step]


def _known(options: Options) -> Options:
    """Returns those of our own options that this torch has."""
    return tuple(pair for pair in options if torch_internals.find(pair[0]) is not None)


def _is_better(traced: _Traced, base: _Traced) -> bool:
    """Returns whether less stands in the way, and no more was left to Python for it."""
    now, then = traced.facts, base.facts
    if now.skipped_frames > then.skipped_frames or (then.graphs and not now.graphs):
        return False
    if traced.sites > base.sites or now.recompile_limit_hit > then.recompile_limit_hit:
        return False
    return (
        traced.sites < base.sites
        or now.recompile_limit_hit < then.recompile_limit_hit
        or traced.recompiles < base.recompiles
    )


def _what_if(options: Options, traced: _Traced, base: _Traced) -> WhatIf:
    return WhatIf(
        options=options,
        removes=tuple(sorted({*_breaks_gone(traced, base), *_recompiles_gone(traced, base)})),
        graphs=traced.facts.graphs,
        sites=traced.sites,
        recompiles=traced.recompiles,
        recompile_limit_hit=traced.facts.recompile_limit_hit,
    )


def _breaks_gone(traced: _Traced, base: _Traced) -> set[str]:
    """Returns the causes of breaks that are gone, not just moved on.

    A scalar that is captured may be branched on in the same line or the next: then the graph ends
    there. Each new place takes back the one nearest to it that is gone.
    """
    left = {met.cause for met in traced.facts.graph_breaks}
    places = {(met.file, met.line) for met in traced.facts.graph_breaks}
    gone = {(met.file, met.line): met.cause for met in base.facts.graph_breaks}
    new = places - gone.keys()
    moved = {gone[place].value for place in places & gone.keys() if gone[place] not in left}
    for file, line in new:
        near = [place for place in gone if place[0] == file and place not in places]
        if not near:
            return set()  # cannot be told
        moved.add(gone[min(near, key=lambda place: abs(place[1] - line))].value)
    return {cause.value for cause in gone.values() if cause not in left} - moved


def _recompiles_gone(traced: _Traced, base: _Traced) -> set[str]:
    """Returns the causes whose recompiles stay out, or come to an end below the limit.

    One recompile may remain of several: by it Dynamo learns that a number changes.
    """
    now, then = _counts(traced), _counts(base)
    ended = traced.facts.recompile_limit_hit < base.facts.recompile_limit_hit
    return {
        cause
        for cause, count in then.items()
        if not now[cause] or (now[cause] == 1 and count > 1) or (ended and count > 1)
    }


def _counts(traced: _Traced) -> Counter[str]:
    counts: Counter[str] = Counter()
    for met in traced.facts.recompiles:
        counts[met.cause.value] += met.count
    return counts


def _best_first(found: Sequence[WhatIf]) -> tuple[WhatIf, ...]:
    """Returns those that leave least first; one that asks for more and brings no more is dropped.

    Failures come last.
    """

    def order(one: WhatIf) -> tuple[bool, int, int, int]:
        return (
            one.recompile_limit_hit,
            one.sites,
            one.recompiles,
            settings.size(one.options),
        )

    kept: list[WhatIf] = []
    for one in sorted((one for one in found if not one.failure), key=order):
        if not any(_makes_needless(other, one) for other in kept):
            kept.append(one)
    return (*kept, *(one for one in found if one.failure))


def _makes_needless(better: WhatIf, one: WhatIf) -> bool:
    """Returns whether one asks for as much as another that leaves no more, and brings no more."""
    if settings.merged(better.options, one.options) == one.options:
        return True  # the further settings brought nothing
    fewer = settings.size(better.options) <= settings.size(one.options)
    return fewer and set(one.removes) <= set(better.removes)
