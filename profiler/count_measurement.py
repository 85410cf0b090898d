"""The trial that runs nothing: what a step of the job has to do, from shapes alone."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace

import torch

from advisor.profiler import facts, operator_counting
from advisor.profiler.blocks import repeated_blocks
from advisor.profiler.machine import environment
from advisor.profiler.records import Phase, Trial, TrialSpec, TrialStatus
from advisor.profiler.reporter import Reporter
from advisor.profiler.training import Trainer, samples_of, signature
from advisor.profiler.workload import build, device_of, seed_everything

_CPU = torch.device("cpu")
_BATCHES = 8


class CountMeasurement:
    """Runs a trial of kind COUNT: the job is built on the CPU without memory, and never trained."""

    def __init__(self, spec: TrialSpec, reporter: Reporter) -> None:
        self._spec = spec
        self._reporter = reporter
        self._begun = time.perf_counter()

    def run(self) -> Trial:
        """Returns the facts and the counts of the job.

        A job that cannot be built or stepped on shapes alone, because it looks at values, is built
        and stepped for real. Raises `WorkloadError` when that fails too.
        """
        self._reporter.begin(Phase.BUILD)
        try:
            with operator_counting.without_memory():
                trial = self._count()
        except Exception as error:  # noqa: BLE001 - whatever a step does that shapes cannot answer
            self._reporter.tell(f"counting a real step ({type(error).__name__} without values)")
            trial = self._count()
            what = "a step had to be run for real to count its operators: it looks at values"
            trial = replace(trial, warnings=(*trial.warnings, what))
        return replace(
            trial,
            environment=environment(device_of(self._spec.workload.device)),
            phase_reached=Phase.DONE,
            wall_s=time.perf_counter() - self._begun,
        )

    def _count(self) -> Trial:
        seed_everything(self._spec.workload.seed)
        trainer = Trainer(build(replace(self._spec.workload, device="cpu"), _CPU), _CPU)
        batch = trainer.batches.next()
        with facts.compute_dtype(trainer.model) as dtype:
            trainer.step(batch)
        counts = operator_counting.count(
            trainer.model, lambda: trainer.step(batch), samples_of(batch), stepped=True
        )
        # As many as tell whether sizes vary.
        more = trainer.batches.take(_BATCHES - 1)
        seen = Counter(signature(each) for each in (batch, *more))
        blocks = repeated_blocks(trainer.model)
        return Trial(
            trial_id=self._spec.trial_id,
            kind=self._spec.kind,
            status=TrialStatus.OK,
            counts=counts,
            workload=facts.workload_facts(trainer, seen, blocks, dtype()),
        )
