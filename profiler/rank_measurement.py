"""A trial on one of several ranks: the protocol of `measurement`, in step with the other ranks."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from advisor.profiler import collectives, coverage, wrappers
from advisor.profiler.blocks import repeated_blocks
from advisor.profiler.compile_events import CompileRecorder
from advisor.profiler.compile_turns import one_rank_first
from advisor.profiler.errors import WorkloadError
from advisor.profiler.flip import Flip, is_torch_class
from advisor.profiler.machine import Watch
from advisor.profiler.measurement import Measurement
from advisor.profiler.peers import Peers, Ranks
from advisor.profiler.records import (
    Blocks,
    Communication,
    CompileEvent,
    Config,
    Pair,
    RankFacts,
    Trial,
    TrialKind,
    TrialSpec,
    Wrapper,
)
from advisor.profiler.reporter import Reporter
from advisor.profiler.training import Batches, Trainer
from advisor.profiler.workload import Workload, build, hooks_of, seed_everything
from advisor.profiler.wrappers import Wrapped


@dataclass(frozen=True, slots=True)
class _Inner:
    """What is known of the person's own model before it was wrapped."""

    model_class: str
    torch_class: bool
    parameters: int
    trainable: int


class DifferentGraphs(RuntimeError):
    """A rank compiled other graphs than the others."""


class RankMeasurement(Measurement):
    """The phases of one trial on one rank."""

    def __init__(self, spec: TrialSpec, reporter: Reporter, peers: Peers | None = None) -> None:
        """Takes the rank's place in the default process group, which has been made."""
        super().__init__(spec, reporter)
        self._rank = torch.distributed.get_rank()
        self._peers = peers if peers is not None else Ranks()
        # Without real collectives: what is left is this rank's own work.
        self._alone = self._peers.count < torch.distributed.get_world_size()
        self._wrapped: Wrapped | None = None
        self._inner: _Inner | None = None
        self._inner_blocks: tuple[Blocks, ...] = ()
        # Whether the function knows of the ranks: then its batches are this rank's own.
        self._aware = False

    def run(self) -> Trial:
        """Runs every phase in step with the other ranks and returns this rank's trial."""
        with contextlib.ExitStack() as turns:
            if self._spec.kind is TrialKind.ONE_FIRST:
                turns.enter_context(one_rank_first(self._rank))
            trial = super().run()
        facts = RankFacts(
            rank=self._rank,
            eager_step_s=trial.eager_step_s,
            step_s=trial.step_s,
            cold_start_s=trial.cold_start_s,
            graphs=trial.graphs,
            graph_breaks=len(trial.graph_breaks),
            peak_bytes=trial.peak_bytes or trial.eager_peak_bytes,
            loss_drift=trial.loss_drift,
            graph_names=graph_names(trial.compile_events),
        )
        return replace(trial, ranks=(facts,))

    def _build(self, device: torch.device) -> Workload:
        spec, mesh = self._spec.workload, self._mesh(device)
        taken: list[str] = []

        def hooks(make: Callable[..., object]) -> dict[str, object]:
            given = {"mesh": mesh, "wrap": lambda model: self._wrap(model, device, mesh).model}
            taken.extend(hooks_of(make))
            return {name: given[name] for name in taken}

        workload = build(spec, device, hooks)
        self._aware = "mesh" in taken
        # The ranks start from the same weights, and each draws its own dropout.
        seed_everything(spec.seed + self._rank)
        if "wrap" in taken:
            if self._wrapped is None:
                raise WorkloadError(
                    "the workload's function takes `wrap` and never called it",
                    mend="call model = wrap(model) before the optimizer is made",
                )
            return workload
        names = {id(p): n for n, p in workload.model.named_parameters()}
        wrapped = self._wrap(workload.model, device, mesh)
        workload.model = wrapped.model
        if wrapped.wrapper in (Wrapper.FSDP1, Wrapper.FSDP2):
            assert workload.optimizer is not None
            workload.optimizer = wrappers.optimizer_for(workload.optimizer, names, wrapped.model)
        return workload

    def _mesh(self, device: torch.device) -> Any:
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(device.type, (torch.distributed.get_world_size(),))

    def _wrap(self, model: torch.nn.Module, device: torch.device, mesh: Any) -> Wrapped:
        spec = self._spec.workload
        self._inner_blocks = repeated_blocks(model)
        # Wrappers hide the class, and sharding the number of parameters.
        parameters = list(model.parameters())
        self._inner = _Inner(
            model_class=f"{type(model).__module__}.{type(model).__qualname__}",
            torch_class=is_torch_class(model),
            parameters=sum(p.numel() for p in parameters),
            trainable=sum(p.numel() for p in parameters if p.requires_grad),
        )
        self._wrapped = wrappers.wrap(
            model,
            self._inner_blocks,
            spec.wrapper,
            device,
            mesh,
            checkpointing=spec.checkpointing,
            alone=self._alone,
        )
        return self._wrapped

    def _trainer(self, workload: Workload, device: torch.device) -> Trainer:
        trainer = _Telling(workload, device, self._reporter)
        if not self._aware:
            trainer.batches = _Share(
                workload.batches, device, self._rank, self._spec.workload.ranks
            )
        return trainer

    def _workload_facts(self, trainer: Trainer, blocks: tuple[Blocks, ...]) -> Trial:
        """Returns the facts of the person's own model, whatever it is wrapped in."""
        trial = super()._workload_facts(trainer, blocks)
        spec, inner = self._spec.workload, self._inner
        assert trial.workload is not None and inner is not None
        # The same model on other ranks is another job.
        whole = f"{trial.workload.fingerprint}:{spec.ranks}:{spec.wrapper}:{spec.checkpointing}"
        workload = replace(
            trial.workload,
            fingerprint=hashlib.sha256(whole.encode()).hexdigest()[:16],
            model_class=inner.model_class,
            torch_class=inner.torch_class,
            parameters=inner.parameters,
            trainable_parameters=inner.trainable,
        )
        return replace(trial, workload=workload)

    def _watch(self) -> Watch:
        # The other ranks are not what disturbs: the launcher's whole tree is measured.
        return Watch(leader=os.getppid())

    def _blocks(self, trainer: Trainer) -> tuple[Blocks, ...]:
        return self._inner_blocks

    def _targets(
        self, trainer: Trainer, config: Config, blocks: tuple[Blocks, ...]
    ) -> list[torch.nn.Module]:
        assert self._wrapped is not None
        return wrappers.targets_of(self._wrapped, config)

    def _looked_into(self, trial: Trial, trainer: Trainer, step_s: float) -> Trial:
        """Returns the eager trial with what its ranks say to each other."""
        if self._alone:
            return trial
        self._reporter.tell("communication")
        batch = trainer.batches.next()
        element_bytes = max(p.element_size() for p in trainer.model.parameters())
        found = collectives.of_step(lambda: trainer.run([batch]), element_bytes)
        latency_s, bytes_per_s = collectives.speed(trainer.device, self._peers)
        return replace(
            trial,
            communication=Communication(
                collectives=found, latency_s=latency_s, bytes_per_s=bytes_per_s
            ),
        )

    def _steady(
        self,
        trainer: Trainer,
        recorder: CompileRecorder,
        flip: Flip,
        eager_s: float,
        cold_s: float,
    ) -> tuple[list[Pair], float]:
        self._check_graphs(graph_names(recorder.facts().events))
        return super()._steady(trainer, recorder, flip, eager_s, cold_s)

    def _check_graphs(self, names: tuple[str, ...]) -> None:
        """Raises `DifferentGraphs` when a rank has compiled others than most: they would not meet
        in the same collectives for long."""
        digest = int.from_bytes(hashlib.sha256("\n".join(names).encode()).digest()[:6], "big")
        digests = self._peers.each(float(digest))
        usual, _ = Counter(digests).most_common(1)[0]
        others = [rank for rank, found in enumerate(digests) if found != usual]
        if others:
            listed = ", ".join(names) or "none"
            raise DifferentGraphs(
                f"rank {', '.join(map(str, others))} compiled other graphs than the other ranks"
                f" (rank {self._rank}: {listed})"
            )

    def _left_s(self) -> float:
        # Causes are looked for by tracing anew for as long as there is time: not the same on all.
        return 0.0

    def _cover(self, trial: Trial, trainer: Trainer, flip: Flip, eager_s: float) -> Trial:
        batch = trainer.batches.next()

        def run() -> None:
            trainer.run([batch])

        with self._users_time():
            flip.to_eager()
            run()
            calls, _ = coverage.operator_calls(run)
            flip.to_compiled()
            run()
            _, outside = coverage.operator_calls(run)
        share = max(0.0, 1.0 - outside / calls) if calls else None
        return replace(trial, coverage=share)

    def _check_flip(self, trainer: Trainer, flip: Flip, eager_s: float) -> float | None:
        # A wrapped model cannot be copied: its hooks belong to the ranks' collectives.
        return None


def graph_names(events: Sequence[CompileEvent]) -> tuple[str, ...]:
    """Returns the functions that were compiled and the operators in each, each once."""
    made = {f"{event.function}: {event.operators} operators" for event in events if event.operators}
    return tuple(sorted(made))


class _Telling(Trainer):
    """Tells that it steps: a rank that says nothing for long is taken to hang."""

    def __init__(self, workload: Workload, device: torch.device, reporter: Reporter) -> None:
        super().__init__(workload, device)
        self._reporter = reporter

    def step(self, batch: Any) -> Any:
        self._reporter.tell("")
        return super().step(batch)


class _Share(Batches):
    """Every so-many-th batch: the part of one rank of what the workload gives."""

    def __init__(self, source: Any, device: torch.device, rank: int, ranks: int) -> None:
        super().__init__(source, device)
        self._before, self._after = rank, ranks - rank - 1
        if self.per_epoch is not None:
            self.per_epoch = self.per_epoch // ranks or None

    def next(self) -> Any:
        self._pass_over(self._before)
        batch = super().next()
        self._pass_over(self._after)
        return batch

    def _pass_over(self, count: int) -> None:
        """Leaves out what other ranks train on; a function of the step is not even called."""
        if callable(self._source):
            self._step += count
            return
        for _ in range(count):
            super().next()
