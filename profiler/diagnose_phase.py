"""The last phase of a trial: what other settings would capture, and which recompiles settle.

All figures are known by then. Whatever goes wrong here costs a warning, not the trial: it has been
sent already when this begins.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import cast

import torch

from advisor.profiler import probe, torch_internals
from advisor.profiler.records import Config, Scope, Trial
from advisor.profiler.training import Trainer

# Less time than this is not worth beginning with.
_LEAST_S = 2.0
# Share of the time for whether recompiles settle; what settings would bring gets the rest.
_SETTLING_SHARE = 0.4
# Under which attribute torch's wrapper holds the model (torch/_dynamo/eval_frame.py).
_PREFIX = "_orig_mod"
_MOST_TEXT = 200


def worthwhile(trial: Trial, limit_s: float) -> bool:
    """Returns whether there is anything to look for, and time for it."""
    whole = trial.config is not None and trial.config.scope is Scope.MODEL
    return bool(whole or trial.graph_breaks or trial.recompiles) and limit_s >= _LEAST_S


def diagnose(
    trial: Trial,
    trainer: Trainer,
    modules: Sequence[torch.nn.Module],
    config: Config,
    *,
    limit_s: float,
    still_compiling: bool,
) -> Trial:
    """Returns the trial with `what_ifs`, and with `settles` and `variants` of its recompiles.

    Traces the modules anew, so that the trial's own compiled code is gone afterwards.
    """
    begun = time.perf_counter()
    if config.scope is Scope.MODEL:
        trial = replace(trial, warnings=(*trial.warnings, *_wrapped(trainer)))
    if not (trial.graph_breaks or trial.recompiles):
        return trial
    try:
        recompiles = probe.settling(
            trainer,
            modules,
            config,
            trial.recompiles,
            limit_s=limit_s * _SETTLING_SHARE,
            still_compiling=still_compiling,
        )
        what_ifs = probe.what_ifs(
            trainer,
            modules,
            config,
            trial.graph_breaks,
            recompiles,
            limit_s=limit_s - (time.perf_counter() - begun),
        )
    except Exception as error:  # noqa: BLE001 - the person's own steps run here, and may raise
        text = f"not all causes were looked for: {type(error).__name__}: {error}"
        return replace(trial, warnings=(*trial.warnings, text[:500]))
    return replace(trial, recompiles=recompiles, what_ifs=what_ifs)


def _wrapped(trainer: Trainer) -> Iterator[str]:
    """Yields what goes wrong when the job is handed `torch.compile(model)` instead of its model.

    That is the form which most people write. It renames every parameter, on which exponential
    averages, checkpoints and parameter groups made by name depend; compiling in place does not.
    """
    model = trainer.model
    batch = trainer.batches.next()
    trainer.model = cast(torch.nn.Module, torch.compile(model, backend="eager"))
    try:
        with torch_internals.plain_calls():
            trainer.step(batch)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the person's own step runs here
        if _PREFIX in str(error):
            yield (
                f"handed torch.compile(model), this job raises {type(error).__name__}: "
                f"{str(error)[:_MOST_TEXT]}: the wrapper puts {_PREFIX}. before every parameter's "
                "name; compile in place instead, model.compile(), which keeps the names"
            )
    finally:
        trainer.model = model
