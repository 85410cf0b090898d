"""The trial that measures one configuration at chosen lengths instead of on the job's own mix."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import replace
from pathlib import Path

from advisor.profiler import facts, job_lengths, timing
from advisor.profiler.batch_shapes import Layout, Sizes
from advisor.profiler.blocks import repeated_blocks
from advisor.profiler.compile_events import CompileRecorder
from advisor.profiler.compile_phase import PhaseTeller
from advisor.profiler.errors import WorkloadError
from advisor.profiler.flip import Flip, targets
from advisor.profiler.machine import PeakMemory, Watch
from advisor.profiler.measurement import Measurement
from advisor.profiler.options import apply_options
from advisor.profiler.records import Config, Dynamic, Lengths, Phase, Trial
from advisor.profiler.shape_times import CompiledTimes
from advisor.profiler.snapshot import Snapshot
from advisor.profiler.training import Trainer

# Looking for the length of batches again: the eager trial has found it before.
_LOOKING_S = 2.0


class ShapeMeasurement(Measurement):
    """Runs a trial of kind SHAPES: `spec.shapes` are the lengths, `spec.lengths` the data set's."""

    def _measure_compiled(self, trainer: Trainer, config: Config) -> Trial:
        self._reporter.begin(Phase.WARM_UP)
        spec = self._spec
        blocks = repeated_blocks(trainer.model)
        snapshot = Snapshot(trainer)
        with self._users_time():
            first = self._first_step(trainer)
            found, data = self._lengths(trainer)
            trainer.run([first])
            step_s = timing.timed(trainer, [first])
        snapshot.restore(trainer)
        recorder = CompileRecorder()
        flip = Flip(targets(trainer.model, config, blocks), config)
        times = CompiledTimes(trainer, flip, recorder, found, data, mark=spec.mark_dynamic)
        self._reporter.begin(Phase.COLD)
        gc.collect()
        memory = PeakMemory(trainer.device)
        with self._users_time(), PhaseTeller(self._reporter.tell):
            apply_options(config)
            flip.apply()
            times.compile_for([length for _, length in spec.shapes], self._reporter.tell)
        peak_bytes = memory.peak_bytes()
        self._reporter.begin(Phase.STEADY)
        watch = Watch()
        with self._users_time():
            # A further length is a further compile where nothing is dynamic.
            times.measure(
                spec.measuring.max_steady_s,
                more=config.dynamic is not Dynamic.FALSE,
                tell=self._reporter.tell,
            )
        self._warnings += watch.sentences()
        flip.to_compiled()
        seen = recorder.facts()
        measured = times.times()
        trial = replace(
            self._workload_facts(trainer, blocks),
            form=flip.form,
            mark_dynamic=spec.mark_dynamic,
            shape_times=measured,
            cold_start_s=sum(each.compile_s for each in measured),
            compile_peak_bytes=peak_bytes,
            peak_bytes=peak_bytes,
            graphs=seen.graphs,
            graph_breaks=seen.graph_breaks,
            recompiles=seen.recompiles,
            recompile_limit_hit=seen.recompile_limit_hit,
            skipped_frames=seen.skipped_frames,
            cudagraph_skips=seen.cudagraph_skips,
            compile_events=seen.events,
            cache_folder=spec.folder,
            cache_bytes=facts.folder_bytes(Path(spec.folder)),
        )
        trial = self._cover(trial, trainer, flip, step_s)
        return self._compare(trial, trainer, flip, snapshot)

    def _lengths(self, trainer: Trainer) -> tuple[Layout, Lengths]:
        seen: Counter[Sizes] = Counter()
        found, data = job_lengths.find(trainer, seen, self._given_lengths, _LOOKING_S)
        if data is None:
            raise WorkloadError(
                "the batches show no length any more",
                "it was seen in the eager trial",
                "give batches whose shapes follow the same rule in every process",
            )
        return found, data
