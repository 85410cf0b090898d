"""One trial, in its own process: the protocol of the design, phase by phase.

`run_trial` runs in the child that the host has forked. It reports over the frames' descriptor and
never returns a half result: either a `Result` goes out, or an `Unusable`, or the process ends
otherwise and the host says how.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import math
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from advisor.profiler import compile_events, facts, numerics, statistics, timing, torch_internals
from advisor.profiler.blocks import repeated_blocks
from advisor.profiler.compile_failure import failed_trial
from advisor.profiler.compile_phase import PhaseTeller
from advisor.profiler.errors import PlanError, WorkloadError
from advisor.profiler.flip import Flip, apply_options, targets
from advisor.profiler.frames import PhaseBegun, Reported, Result, Unusable, pack
from advisor.profiler.machine import PeakMemory, Watch, environment
from advisor.profiler.records import (
    Blocks,
    Config,
    Interval,
    Pair,
    Phase,
    Progress,
    Timing,
    Trial,
    TrialKind,
    TrialSpec,
    TrialStatus,
)
from advisor.profiler.training import Trainer, signature
from advisor.profiler.workload import Batch, build, device_of, seed_everything

# A warm start needs only enough quads to show what another process measures.
_WARM_QUADS = 6
_LEAST_QUADS = 4
# Quiet steps asked for when batches come in several shapes: a rare one may still be missing.
_QUIET_STEPS_OF_SHAPES = 16
# An epoch of at most this many steps is run to its end, where a smaller batch may wait.
_MOST_EPOCH_STEPS = 64
_PROFILED_BATCHES = 2
# How far the flip's eager may be from eager before compiling until it is worth a word.
_FLIP_TOLERANCE = 1.15


class Reporter:
    """Sends phases and progress to the host. Safe to call from several threads."""

    def __init__(self, descriptor: int, spec: TrialSpec) -> None:
        self._descriptor = descriptor
        self._spec = spec
        self._lock = threading.Lock()
        self._begun = time.monotonic()
        self._told = 0.0
        self.phase = Phase.IMPORT
        self.step = 0

    def send(self, message: object) -> None:
        """Writes one frame."""
        data = memoryview(pack(message))
        with self._lock:
            while data:
                data = data[os.write(self._descriptor, data) :]

    def begin(self, phase: Phase) -> None:
        """Enters a phase: its deadline starts."""
        self.phase, self._begun = phase, time.monotonic()
        self.send(PhaseBegun(phase=phase))
        self.tell("", urgent=True)

    def tell(self, detail: str, urgent: bool = False) -> None:
        """Reports what is being done, at most twice a second."""
        now = time.monotonic()
        if not urgent and now - self._told < 0.5:
            return
        self._told = now
        limit = self._spec.deadlines.of(self.phase)
        if self.phase is Phase.STEADY:
            limit = self._spec.measuring.max_steady_s
        elif self.phase is Phase.COLD and limit is not None and self._spec.cut_off_s is not None:
            limit = min(limit, self._spec.cut_off_s)
        progress = Progress(
            trial_id=self._spec.trial_id,
            phase=self.phase,
            detail=detail,
            step=self.step,
            elapsed_s=now - self._begun,
            at_most_s=limit,
        )
        self.send(Reported(progress=progress))


def run_trial(spec: TrialSpec, descriptor: int) -> None:
    """Runs a trial in this process and sends its result to `descriptor`."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    reporter = Reporter(descriptor, spec)
    _enter_folder(spec)
    try:
        trial = _Measurement(spec, reporter).run()
    except WorkloadError as error:
        reporter.send(
            Unusable(
                what=error.what,
                why=error.why,
                mend=error.mend,
                user_traceback=error.user_traceback[-20_000:],
            )
        )
        return
    except PlanError as error:
        reporter.send(Unusable(what=error.what, why=error.why, mend=error.mend, plan=True))
        return
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the person's code may raise anything
        trial = failed_trial(spec, reporter.phase, error)
    reporter.send(Result(trial=trial))


def _enter_folder(spec: TrialSpec) -> None:
    """Gives the trial caches of its own, so that cold is cold, and the person's folder to run in.

    All below one private folder: Inductor's and Triton's caches, the driver's JIT cache, which
    would warm "cold" runs otherwise, and temporary files.
    """
    folder = Path(spec.folder)
    for name, variable in (
        ("inductor", "TORCHINDUCTOR_CACHE_DIR"),
        ("triton", "TRITON_CACHE_DIR"),
        ("cuda", "CUDA_CACHE_PATH"),
        ("tmp", "TMPDIR"),
    ):
        (folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        os.environ[variable] = str(folder / name)
    os.environ["ADVISOR_TRIAL_ID"] = spec.trial_id
    os.chdir(spec.workload.cwd)


class _Measurement:
    """The state that the phases of one trial share."""

    def __init__(self, spec: TrialSpec, reporter: Reporter) -> None:
        self._spec = spec
        self._reporter = reporter
        self._begun = time.perf_counter()
        self._user_s = 0.0
        self._seen: Counter[str] = Counter()
        self._warnings = list(torch_internals.missing())
        self._dtype = "float32"

    def run(self) -> Trial:
        """Runs every phase and returns the trial."""
        spec = self._spec
        device = device_of(spec.workload.device)
        seed_everything(spec.workload.seed)
        self._reporter.begin(Phase.BUILD)
        with self._users_time():
            workload = build(spec.workload, device)
        trainer = Trainer(workload, device)
        snapshot = self._snapshot(trainer)
        eager, eager_peak_bytes = self._warm_up(trainer)
        blocks = repeated_blocks(trainer.model)
        trial = Trial(
            trial_id=spec.trial_id,
            kind=spec.kind,
            status=TrialStatus.OK,
            config=spec.config,
            phase_reached=Phase.DONE,
            eager=eager,
            eager_step_s=eager.step_s,
            eager_peak_bytes=eager_peak_bytes,
            workload=facts.workload_facts(trainer, self._seen, blocks, self._dtype),
            environment=environment(device),
        )
        if spec.config is not None:
            trial = self._measure_compiled(trial, trainer, snapshot, blocks, spec.config)
        return replace(
            trial,
            warnings=tuple(dict.fromkeys(self._warnings)),
            user_s=self._user_s,
            wall_s=time.perf_counter() - self._begun,
        )

    @contextlib.contextmanager
    def _users_time(self) -> Iterator[None]:
        """Counts the user's own steps and the compiler, as opposed to what we add."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._user_s += time.perf_counter() - begun

    def _snapshot(self, trainer: Trainer) -> numerics.Snapshot | None:
        if self._spec.kind is not TrialKind.COMPILE:
            return None
        return numerics.Snapshot(trainer)

    def _warm_up(self, trainer: Trainer) -> tuple[Timing, int | None]:
        self._reporter.begin(Phase.WARM_UP)
        memory, watch = PeakMemory(trainer.device), Watch()
        measuring = self._spec.measuring
        with self._users_time():
            with facts.compute_dtype(trainer.model) as dtype:
                self._see(trainer.first_step())
            self._dtype = dtype()
            warm = timing.warm_up(
                trainer,
                self._see,
                measuring.max_warm_up_s,
                self._spec.plan_steps or math.inf,
                self._reporter.tell,
            )
        if not warm.steady:
            self._warnings.append(
                f"eager steps did not get steady within {measuring.max_warm_up_s:.0f} s:"
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
        return eager, memory.peak_bytes()

    def _see(self, batch: Batch) -> None:
        self._seen[signature(batch)] += 1

    def _measure_compiled(
        self,
        trial: Trial,
        trainer: Trainer,
        snapshot: numerics.Snapshot | None,
        blocks: tuple[Blocks, ...],
        config: Config,
    ) -> Trial:
        eager_s = trial.eager_step_s.median if trial.eager_step_s is not None else 1.0
        recorder = compile_events.CompileRecorder()
        memory = PeakMemory(trainer.device)
        flip, cold_s, steps = self._cold(trainer, recorder, config, blocks)
        compile_peak_bytes = memory.peak_bytes()
        memory.restart()
        with self._users_time():
            trainer.run(trainer.batches.take(_LEAST_QUADS))
        peak_bytes = memory.peak_bytes()
        pairs, late_s = self._steady(trainer, recorder, flip, eager_s, cold_s)
        flip.to_compiled()
        step_s = statistics.interval([pair.compiled_s for pair in pairs])
        start_s = max(0.0, cold_s + late_s - steps * step_s.median)
        coverage = self._coverage(trainer, flip)
        found = recorder.facts()
        warm = self._spec.kind is TrialKind.WARM
        trial = replace(
            trial,
            form=flip.form,
            pairs=tuple(pairs),
            eager_step_s=statistics.interval([pair.eager_s for pair in pairs]),
            step_s=step_s,
            speedup=statistics.speedup(pairs),
            cold_start_s=None if warm else start_s,
            warm_start_s=start_s if warm else None,
            compile_peak_bytes=compile_peak_bytes,
            peak_bytes=peak_bytes,
            coverage=coverage,
            graphs=found.graphs,
            graph_breaks=found.graph_breaks,
            recompiles=found.recompiles,
            recompile_limit_hit=found.recompile_limit_hit,
            skipped_frames=found.skipped_frames,
            compile_events=found.events,
            flip_check=self._check_flip(pairs, eager_s),
            cache_folder=self._spec.folder,
            cache_bytes=facts.folder_bytes(Path(self._spec.folder)),
        )
        return self._compare(trial, trainer, flip, snapshot)

    def _cold(
        self,
        trainer: Trainer,
        recorder: compile_events.CompileRecorder,
        config: Config,
        blocks: tuple[Blocks, ...],
    ) -> tuple[Flip, float, int]:
        """Compiles in real steps until it has been quiet; returns their seconds and number."""
        self._reporter.begin(Phase.COLD)
        gc.collect()
        quiet_wanted = self._spec.measuring.quiet_steps
        if len(self._seen) > 1:
            quiet_wanted = max(quiet_wanted, _QUIET_STEPS_OF_SHAPES)
        epoch = trainer.batches.per_epoch or 0
        least_steps = epoch + 1 if epoch <= _MOST_EPOCH_STEPS else 0
        wall_s, steps, quiet = 0.0, 0, 0
        with self._users_time(), PhaseTeller(self._reporter.tell):
            begun = time.perf_counter()
            apply_options(config)
            flip = Flip(targets(trainer.model, config, blocks), config)
            wall_s += time.perf_counter() - begun
            while quiet < quiet_wanted or steps < least_steps:
                batch = trainer.batches.next()
                self._reporter.step = recorder.step = steps
                events = recorder.count()
                begun = time.perf_counter()
                trainer.run([batch])
                wall_s += time.perf_counter() - begun
                quiet = quiet + 1 if recorder.count() == events else 0
                steps += 1
        return flip, wall_s, steps

    def _steady(
        self,
        trainer: Trainer,
        recorder: compile_events.CompileRecorder,
        flip: Flip,
        eager_s: float,
        cold_s: float,
    ) -> tuple[list[Pair], float]:
        """Returns the ABBA quads, and the seconds of compiles that came late, within them."""
        self._reporter.begin(Phase.STEADY)
        measuring, watch = self._spec.measuring, Watch()
        process = int(self._spec.kind is TrialKind.WARM)
        good: list[Pair] = []
        late_s = 0.0
        events = recorder.count()

        def enough(_: list[Pair]) -> str:
            return self._enough(good, cold_s)

        with self._users_time():
            step_s = max(eager_s, 1e-6)
            for pairs in timing.measure_quads(trainer, flip, step_s, measuring, enough):
                now = recorder.count()
                if now == events:
                    good.append(replace(pairs[-1], process=process))
                else:
                    # A compile within the quad: its time belongs to compiling, not to the steps.
                    excess_s = pairs[-1].compiled_s - (good[-1].compiled_s if good else eager_s)
                    late_s += max(0.0, excess_s) * 2 * timing.block_steps(step_s)
                    events = now
                if good:
                    ratio = statistics.speedup(good)
                    self._reporter.tell(
                        f"{ratio.median:.3f} x ({ratio.low:.3f}-{ratio.high:.3f})"
                        f" after {len(good)} pairs"
                    )
        if not good:
            good = [replace(pairs[-1], process=process)]
            self._warnings.append(
                "it was still compiling when measuring ended: step times contain compiles"
            )
        self._warnings += watch.sentences()
        return good, late_s

    def _enough(self, pairs: list[Pair], cold_s: float) -> str:
        """Returns why no more quads are needed, or an empty string."""
        measuring, plan_steps = self._spec.measuring, self._spec.plan_steps
        if self._spec.kind is TrialKind.WARM:
            return "another process was seen" if len(pairs) >= _WARM_QUADS else ""
        if len(pairs) < _LEAST_QUADS:
            return ""
        ratio = statistics.speedup(pairs)
        if len(pairs) >= measuring.min_quads:
            if (ratio.high - ratio.low) / 2 <= measuring.half_width * ratio.median:
                return "the interval is narrow enough"
            eager_s = statistics.interval([pair.eager_s for pair in pairs]).median
            if plan_steps is not None:
                saving_s = plan_steps * eager_s * max(0.0, 1 - 1 / ratio.high)
                if saving_s < cold_s:
                    return "it can no longer pay"
        return ""

    def _check_flip(self, pairs: list[Pair], eager_s: float) -> float:
        """Returns flipped eager over eager before compiling; says so when they are far apart."""
        flipped_s = statistics.interval([pair.eager_s for pair in pairs]).median
        ratio = flipped_s / eager_s
        if not 1 / _FLIP_TOLERANCE <= ratio <= _FLIP_TOLERANCE:
            self._warnings.append(
                f"eager steps took {ratio:.2f} x as long after compiling as before:"
                " the machine or the workload changed meanwhile"
            )
        return ratio

    def _coverage(self, trainer: Trainer, flip: Flip) -> float | None:
        """Returns the share of the eager operator calls that ran inside compiled graphs."""
        batches = trainer.batches.take(_PROFILED_BATCHES)
        flip.to_compiled()
        trainer.run(batches)
        _, outside = compile_events.operator_calls(lambda: trainer.run(batches))
        flip.to_eager()
        trainer.run(batches[:1])
        total, _ = compile_events.operator_calls(lambda: trainer.run(batches))
        flip.to_compiled()
        return max(0.0, 1.0 - outside / total) if total else None

    def _compare(
        self,
        trial: Trial,
        trainer: Trainer,
        flip: Flip,
        snapshot: numerics.Snapshot | None,
    ) -> Trial:
        if snapshot is None:
            return trial
        self._reporter.begin(Phase.NUMERICS)
        batches = trainer.batches.take(self._spec.measuring.numerics_steps)

        def run(compiled: bool, seed: int) -> list[float | None]:
            (flip.to_compiled if compiled else flip.to_eager)()
            with self._users_time():
                return numerics.losses(trainer, snapshot, batches, seed)

        agreement = numerics.compare(run, self._dtype)
        if agreement.message and agreement.agrees:
            self._warnings.append(agreement.message)
        return facts.with_agreement(trial, agreement)
