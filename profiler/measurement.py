"""The protocol of a trial, phase by phase (design §5)."""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from advisor.profiler import (
    coverage,
    diagnose_phase,
    facts,
    job_lengths,
    numerics,
    operator_counting,
    statistics,
    timing,
    torch_internals,
)
from advisor.profiler.batch_shapes import Sizes, sizes_of
from advisor.profiler.blocks import repeated_blocks
from advisor.profiler.compile_events import CompileRecorder
from advisor.profiler.compile_phase import PhaseTeller
from advisor.profiler.flip import Flip, targets
from advisor.profiler.frames import Result
from advisor.profiler.lengths import measured_lengths
from advisor.profiler.machine import PeakMemory, Watch, environment
from advisor.profiler.options import apply_options
from advisor.profiler.peers import Peers
from advisor.profiler.records import (
    Blocks,
    Config,
    Interval,
    Lengths,
    Pair,
    Phase,
    Timing,
    Trial,
    TrialKind,
    TrialSpec,
    TrialStatus,
)
from advisor.profiler.reporter import Reporter
from advisor.profiler.shape_times import eager_times
from advisor.profiler.snapshot import Snapshot, coarsest_dtype, course, random_source
from advisor.profiler.step_counts import StepCounts
from advisor.profiler.step_profile import profile_step
from advisor.profiler.training import Trainer, loss_value, samples_of, signature
from advisor.profiler.twin import flip_check
from advisor.profiler.workload import Batch, Workload, build, device_of, seed_everything

_LEAST_QUADS = 4
# Eager steps on the first batch before compiling: what is touched for the first time is touched.
_FIRST_TOUCH_STEPS = 3
# Steps that a cold phase has at least, as long as they cost little: schedules, unfreezing, rare
# shapes and the recompile limit (8) all show within them.
_LEAST_COLD_STEPS = 16
_LEAST_COLD_S = 5.0
# An epoch of at most this many steps is run to its end, where a smaller batch may wait.
_MOST_EPOCH_STEPS = 64
_PROFILED_BATCHES = 2
# Looking at further batches for their lengths, and eager steps along them.
_LOOKING_S = 2.0
_ALONG_S = 6.0
_EAGER_LENGTHS = 5
# A shorter plan than this bears no shape policy.
_LEAST_PLAN_S = 30.0
# Steps longer than this are profiled on one batch.
_LONG_STEP_S = 5.0
# Trials that only show what another process sees: how it starts, and its steps.
_STARTS = frozenset({TrialKind.WARM, TrialKind.ONE_FIRST})
# What a trial takes to end; the campaign's budget must not pass meanwhile.
_ENDING_S = 5.0
# Steps of each run whose losses are compared: fewer when they take long, but never fewer than this.
_LEAST_COMPARED = 3
_MOST_COMPARING_S = 40.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cold:
    """What the cold phase left: wall seconds of its steps, and the flip that it made."""

    flip: Flip
    wall_s: float
    steps: int
    peak_bytes: int | None


class Measurement:
    """The phases of one trial and the state that they share."""

    def __init__(self, spec: TrialSpec, reporter: Reporter) -> None:
        self._spec = spec
        self._reporter = reporter
        self._begun = time.perf_counter()
        self._user_s = 0.0
        self._seen: Counter[str] = Counter()
        # The same by the sizes alone; empty where a tensor has no plain shape.
        self._sizes: Counter[Sizes] = Counter()
        # The first batches of the training, in their order.
        self._first: list[Batch] = []
        # The losses of the first compiled steps, which are on these batches.
        self._cold_losses: list[float | None] = []
        self._warnings = list(torch_internals.missing())
        self._dtype = "float32"
        self._still_compiling = False
        self._given_lengths: Lengths | None = None
        # Set once a configuration was measured: what `_diagnose` traces anew.
        self._flip: Flip | None = None
        self._peers = Peers()

    def run(self) -> Trial:
        """Runs every phase and returns the trial."""
        spec = self._spec
        device = device_of(spec.workload.device)
        seed_everything(spec.workload.seed)
        self._reporter.begin(Phase.BUILD)
        with self._users_time():
            workload = self._build(device)
            self._given_lengths = spec.lengths or job_lengths.of_workload(workload.lengths)
        trainer = self._trainer(workload, device)
        if spec.config is None:
            trial = self._measure_eager(trainer)
        else:
            trial = self._measure_compiled(trainer, spec.config)
        trial = self._closed(replace(trial, config=spec.config, environment=environment(device)))
        if self._flip is None or not diagnose_phase.worthwhile(trial, self._left_s()):
            return trial
        return self._diagnose(trial, trainer, self._flip)

    def _build(self, device: torch.device) -> Workload:
        return build(self._spec.workload, device)

    def _trainer(self, workload: Workload, device: torch.device) -> Trainer:
        return Trainer(workload, device)

    def _closed(self, trial: Trial) -> Trial:
        """Returns the trial as it is sent: with its warnings and times so far."""
        return replace(
            trial,
            phase_reached=Phase.DONE,
            warnings=tuple(dict.fromkeys((*trial.warnings, *self._warnings))),
            user_s=self._user_s,
            wall_s=time.perf_counter() - self._begun,
        )

    def _left_s(self) -> float:
        """Returns the seconds that are left for looking for causes."""
        most_s = self._spec.measuring.max_diagnose_s
        if self._spec.budget_s is None:
            return most_s
        spent_s = time.perf_counter() - self._begun
        return min(most_s, self._spec.budget_s - spent_s - _ENDING_S)

    def _diagnose(self, trial: Trial, trainer: Trainer, flip: Flip) -> Trial:
        """Returns the trial with its causes looked into; sends it before, in case that goes wrong.

        The person's own steps run under other settings here, and may hang or crash.
        """
        self._reporter.send(Result(trial=replace(trial, phase_reached=Phase.DIAGNOSE), final=False))
        self._reporter.begin(Phase.DIAGNOSE)
        with self._users_time():
            trial = diagnose_phase.diagnose(
                trial,
                trainer,
                flip.modules,
                flip.config,
                limit_s=self._left_s(),
                still_compiling=self._still_compiling,
            )
        return self._closed(trial)

    @contextlib.contextmanager
    def _users_time(self) -> Iterator[None]:
        """Counts the user's own steps and the compiler, as opposed to what we add."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._user_s += time.perf_counter() - begun

    def _take(self, trainer: Trainer) -> Batch:
        """Returns the next batch, and remembers its shape and the first of them."""
        batch = trainer.batches.next()
        self._see(batch)
        return batch

    def _see(self, batch: Batch) -> None:
        self._seen[signature(batch)] += 1
        sizes = sizes_of(batch)
        if sizes is not None:
            self._sizes[sizes] += 1
        if len(self._first) < self._spec.measuring.numerics_steps:
            self._first.append(batch)

    def _first_step(self, trainer: Trainer) -> Batch:
        with facts.compute_dtype(trainer.model) as dtype:
            batch = trainer.first_step()
        self._dtype = dtype()
        self._see(batch)
        return batch

    def _workload_facts(self, trainer: Trainer, blocks: tuple[Blocks, ...]) -> Trial:
        return Trial(
            trial_id=self._spec.trial_id,
            kind=self._spec.kind,
            status=TrialStatus.OK,
            workload=facts.workload_facts(trainer, self._seen, blocks, self._dtype),
        )

    def _measure_eager(self, trainer: Trainer) -> Trial:
        self._reporter.begin(Phase.WARM_UP)
        memory, watch = PeakMemory(trainer.device), self._watch()
        limit_s = self._spec.measuring.max_warm_up_s
        with self._users_time():
            self._first_step(trainer)
            warm = timing.warm_up(
                trainer,
                self._see,
                limit_s,
                self._spec.plan_steps or math.inf,
                self._reporter.tell,
                self._peers,
            )
        peak_bytes = memory.peak_bytes()
        if not warm.steady:
            self._warnings.append(
                f"eager steps did not get steady within {limit_s:.0f} s:"
                f" they scatter by {warm.spread:.0%}"
            )
        self._warnings += watch.sentences()
        times = [window.step_s for window in warm.windows[-6:]]
        eager = Timing(
            step_s=Interval(median=warm.step_s, low=min(times), high=max(times)),
            data_wait_s=warm.wait_s,
            steps=sum(window.steps for window in warm.windows),
            steady=warm.steady,
            spread=warm.spread,
        )
        trial = replace(
            self._workload_facts(trainer, self._blocks(trainer)),
            eager=eager,
            eager_step_s=eager.step_s,
            eager_peak_bytes=peak_bytes,
        )
        return self._looked_into(trial, trainer, warm.step_s)

    def _looked_into(self, trial: Trial, trainer: Trainer, step_s: float) -> Trial:
        """Returns the eager trial with where its steps spend their time, and along its lengths."""
        with self._users_time():
            profile = profile_step(
                trainer,
                trainer.batches.take(_profiled_batches(step_s)),
                step_s,
                self._seen,
                dtype=self._dtype,
            )
            trial = replace(trial, step_profile=profile, counts=self._counts(trainer))
            return self._at_lengths(trial, trainer, step_s)

    def _counts(self, trainer: Trainer) -> StepCounts | None:
        """Returns what one more step has to do; None where it bears nobody who counts along."""
        batch = trainer.batches.next()
        with contextlib.suppress(Exception):
            return operator_counting.count(
                trainer.model, lambda: trainer.step(batch), samples_of(batch), stepped=True
            )
        return None

    def _at_lengths(self, trial: Trial, trainer: Trainer, step_s: float) -> Trial:
        """Returns the eager trial with the job's lengths, and step times along them."""
        given = self._given_lengths
        found, data = job_lengths.find(trainer, self._sizes, given, _LOOKING_S)
        if trial.workload is None:
            return trial
        workload = replace(
            trial.workload,
            batch_shapes=found.kind,
            lengths=data,
            most_positions=job_lengths.most_positions(trainer.model),
            generates=job_lengths.generates(trainer.model),
        )
        trial = replace(trial, workload=workload)
        lengths = measured_lengths(data, _EAGER_LENGTHS, probe=True) if data else ()
        plan_s = (self._spec.plan_steps or math.inf) * step_s
        if data is None or len(lengths) < 2 or plan_s < _LEAST_PLAN_S:
            return trial
        self._reporter.tell("steps along the lengths")
        times = eager_times(trainer, found, data, lengths, _ALONG_S)
        return replace(trial, shape_times=times)

    def _measure_compiled(self, trainer: Trainer, config: Config) -> Trial:
        self._reporter.begin(Phase.WARM_UP)
        blocks = self._blocks(trainer)
        modules = self._targets(trainer, config, blocks)
        snapshot = Snapshot(trainer)
        memory = PeakMemory(trainer.device)
        with self._users_time():
            first = self._first_step(trainer)
            trainer.run([first] * (_FIRST_TOUCH_STEPS - 1))
            eager_s = self._peers.most(timing.timed(trainer, [first]))
        eager_peak_bytes = memory.peak_bytes()
        # Compiling starts where the training does, not three steps into it.
        snapshot.restore(trainer)
        seed_everything(self._spec.workload.seed)
        recorder = CompileRecorder()
        cold = self._cold(trainer, recorder, Flip(modules, config), first, eager_s)
        flip = cold.flip
        memory.restart()
        with self._users_time():
            trainer.run(trainer.batches.take(_LEAST_QUADS))
        peak_bytes = memory.peak_bytes()
        pairs, late_s = self._steady(trainer, recorder, flip, eager_s, cold.wall_s)
        flip.to_compiled()
        step_s = statistics.interval([pair.compiled_s for pair in pairs])
        start_s = max(0.0, cold.wall_s + late_s - cold.steps * step_s.median)
        found = recorder.facts()
        kind = self._spec.kind
        eager_step_s = statistics.interval([pair.eager_s for pair in pairs])
        trial = replace(
            self._workload_facts(trainer, blocks),
            form=flip.form,
            pairs=tuple(pairs),
            eager_step_s=eager_step_s,
            step_s=step_s,
            speedup=statistics.speedup(pairs),
            cold_start_s=None if kind in _STARTS else start_s,
            warm_start_s=start_s if kind is TrialKind.WARM else None,
            one_first_start_s=start_s if kind is TrialKind.ONE_FIRST else None,
            eager_peak_bytes=eager_peak_bytes,
            compile_peak_bytes=cold.peak_bytes,
            peak_bytes=peak_bytes,
            graphs=found.graphs,
            graph_breaks=found.graph_breaks,
            recompiles=found.recompiles,
            recompile_limit_hit=found.recompile_limit_hit,
            skipped_frames=found.skipped_frames,
            cudagraph_skips=found.cudagraph_skips,
            compile_events=found.events,
            cache_folder=self._spec.folder,
            cache_bytes=facts.folder_bytes(Path(self._spec.folder)),
        )
        if kind in _STARTS:
            return trial
        self._flip = flip
        trial = self._cover(trial, trainer, flip, eager_s)
        trial = replace(trial, flip_check=self._check_flip(trainer, flip, eager_step_s.median))
        return self._compare(trial, trainer, flip, snapshot)

    def _watch(self) -> Watch:
        return Watch()

    def _blocks(self, trainer: Trainer) -> tuple[Blocks, ...]:
        return repeated_blocks(trainer.model)

    def _targets(
        self, trainer: Trainer, config: Config, blocks: tuple[Blocks, ...]
    ) -> list[torch.nn.Module]:
        """Returns the modules that a configuration compiles."""
        return targets(trainer.model, config, blocks)

    def _cold(
        self,
        trainer: Trainer,
        recorder: CompileRecorder,
        flip: Flip,
        first: Batch,
        eager_s: float,
    ) -> _Cold:
        """Compiles in real steps, from the first batch on, until it has been quiet."""
        self._reporter.begin(Phase.COLD)
        gc.collect()
        memory = PeakMemory(trainer.device)
        quiet_wanted = self._spec.measuring.quiet_steps
        epoch = self._peers.most(trainer.batches.per_epoch or 0)
        cheap = round(_LEAST_COLD_S / max(eager_s, 1e-6))
        least_steps = min(_LEAST_COLD_STEPS, cheap)
        if epoch <= min(_MOST_EPOCH_STEPS, cheap):
            least_steps = max(least_steps, int(epoch) + 1)
        wall_s, steps, quiet = 0.0, 0, 0
        with self._users_time(), PhaseTeller(self._reporter.tell):
            begun = time.perf_counter()
            apply_options(flip.config)
            flip.apply()
            wall_s += time.perf_counter() - begun
            while quiet < quiet_wanted or steps < least_steps:
                batch = self._take(trainer) if steps else first
                if self._peers.any(len(self._seen) > 1):
                    # A shape that is rare may still be missing.
                    quiet_wanted = max(quiet_wanted, min(_LEAST_COLD_STEPS, cheap))
                self._reporter.step = recorder.step = steps
                events = recorder.count()
                begun = time.perf_counter()
                loss = trainer.run([batch])
                wall_s += time.perf_counter() - begun
                if steps < self._spec.measuring.numerics_steps:
                    self._cold_losses.append(loss_value(loss))
                # An output of a CUDA graph must not be alive when the graph runs again.
                del loss
                quiet = 0 if self._peers.any(recorder.count() != events) else quiet + 1
                steps += 1
        return _Cold(flip=flip, wall_s=wall_s, steps=steps, peak_bytes=memory.peak_bytes())

    def _steady(
        self,
        trainer: Trainer,
        recorder: CompileRecorder,
        flip: Flip,
        eager_s: float,
        cold_s: float,
    ) -> tuple[list[Pair], float]:
        """Returns the ABBA quads, and the seconds of compiles that came late, within them."""
        self._reporter.begin(Phase.STEADY)
        measuring, watch = self._spec.measuring, self._watch()
        warm = self._spec.kind in _STARTS
        limit_s = measuring.max_warm_steady_s if warm else measuring.max_steady_s
        cold_s = self._peers.most(cold_s)
        good: list[Pair] = []
        disturbed: list[Pair] = []
        late_s = 0.0
        events = recorder.count()
        steps = timing.block_steps(eager_s)

        def enough() -> bool:
            return self._enough(good, cold_s)

        with self._users_time():
            for pair in timing.measure_quads(trainer, flip, steps, limit_s, enough, self._peers):
                now = recorder.count()
                if not self._peers.any(now != events):
                    good.append(replace(pair, process=int(warm)))
                else:
                    # A compile within the quad: its time belongs to compiling, not to the steps.
                    usual_s = good[-1].compiled_s if good else eager_s
                    late_s += max(0.0, pair.compiled_s - usual_s) * 2 * steps
                    disturbed.append(replace(pair, process=int(warm)))
                    events = now
                if good:
                    ratio = statistics.speedup(good)
                    self._reporter.tell(
                        f"{ratio.median:.3f}x ({ratio.low:.3f}-{ratio.high:.3f})"
                        f" after {len(good)} pairs"
                    )
        if not good:
            good = disturbed
            self._still_compiling = True
            self._warnings.append(
                "it was still compiling when measuring ended: step times contain compiles"
            )
        self._warnings += watch.sentences()
        return good, late_s

    def _enough(self, pairs: list[Pair], cold_s: float) -> bool:
        """Returns whether more quads would change nothing: narrow enough, or out of reach."""
        measuring, plan_steps = self._spec.measuring, self._spec.plan_steps
        if len(pairs) < max(_LEAST_QUADS, measuring.min_quads):
            return False
        ratio = statistics.speedup(pairs)
        if (ratio.high - ratio.low) / 2 <= measuring.half_width * ratio.median:
            return True
        if plan_steps is None:
            return False
        eager_s = statistics.interval([pair.eager_s for pair in pairs]).median
        eager_total_s = plan_steps * eager_s
        return cold_s + eager_total_s / ratio.high > self._spec.rival_share * eager_total_s

    def _cover(self, trial: Trial, trainer: Trainer, flip: Flip, eager_s: float) -> Trial:
        """Returns the trial with what of it runs in graphs: the same in every warm start of it."""
        with self._users_time():
            batches = trainer.batches.take(_profiled_batches(eager_s))
            covered = coverage.measure(trainer, flip, batches, trial.graph_breaks)
        return replace(
            trial,
            coverage=covered.calls,
            time_coverage=covered.time,
            graph_breaks=covered.breaks,
        )

    def _check_flip(self, trainer: Trainer, flip: Flip, eager_s: float) -> float | None:
        flip.to_eager()
        try:
            return flip_check(trainer, eager_s)
        finally:
            flip.to_compiled()

    def _compare(self, trial: Trial, trainer: Trainer, flip: Flip, snapshot: Snapshot) -> Trial:
        self._reporter.begin(Phase.NUMERICS)
        step_s = trial.eager_step_s.median if trial.eager_step_s else 0.0
        steps = max(_LEAST_COMPARED, int(_MOST_COMPARING_S / max(numerics.RUNS * step_s, 1e-9)))
        batches = self._first[:steps]
        flip.to_eager()
        dtype = coarsest_dtype(trainer, snapshot, batches[0], self._dtype)

        def run(arm: numerics.Arm, seed: int) -> numerics.Course:
            (flip.to_compiled if arm is numerics.Arm.COMPILED else flip.to_eager)()
            with self._users_time():
                return course(trainer, snapshot, batches, arm, seed, dtype)

        agreement = numerics.compare(
            run,
            dtype,
            seed=self._spec.workload.seed,
            begun=self._cold_losses if snapshot.holds(trainer) else (),
            random_source=random_source(trainer.model),
        )
        flip.to_compiled()
        self._warnings += agreement.warnings
        return facts.with_agreement(trial, agreement)


def _profiled_batches(step_s: float) -> int:
    """Returns on how many batches steps of `step_s` are profiled."""
    return _PROFILED_BATCHES if step_s < _LONG_STEP_S else 1
