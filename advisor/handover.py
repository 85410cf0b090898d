"""Starting the real run from the compile cache of a trial: `activate(id)` in Python.

    from advisor import handover
    handover.activate("3f2a9c01de45")     # before anything is compiled

`advise env` and `advise exec` do the same from outside.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from advisor import quick_start
from advisor.places import data_folder
from advisor.profiler import place
from advisor.profiler.bundle import Bundle, BundleFacts
from advisor.profiler.cache_proof import CacheProof, cache_proof, compiling_has_begun
from advisor.profiler.errors import PlanError
from advisor.profiler.handover import USUAL_LIMIT_BYTES, Handed, HandoverStore
from advisor.profiler.place import Place
from advisor.profiler.records import Advice, HandOver, Trial, TrialKind
from advisor.profiler.units import parse_size

_LIMIT = "ADVISOR_HANDOVER_LIMIT"


@dataclass(frozen=True, slots=True)
class Activation:
    """A run that starts from a kept cache."""

    bundle: Bundle
    folder: Path

    def proof(self) -> CacheProof:
        """Returns which graphs came from the cache so far: to be asked after the first step."""
        return cache_proof()

    def sentence(self) -> str:
        """Returns the proof in words."""
        return self.proof().sentence(self.bundle.bundle_id)


def activate(name: str, *, data: Path | None = None) -> Activation:
    """Lets this process compile from the cache of an advice or a bundle.

    To be called before the first compile. Raises `PlanError` when something was compiled already
    or the cache was made for another torch, CPU or GPU, `NotFoundError` when there is none of that
    name, `StoreError` when it is damaged.
    """
    if compiling_has_begun():
        raise PlanError(
            f"the compile cache {name} comes too late",
            "something was compiled already",
            "activate it before the first step",
        )
    caches = store(data)
    bundle = caches.find(name)
    handed = caches.hand_over(bundle, _this_place())
    caches.hold(bundle)
    os.environ.update(variables(handed))
    quick_start.start(handed.folder)
    return Activation(bundle, handed.folder)


def variables(handed: Handed) -> dict[str, str]:
    """Returns the variables of a run's environment; a job's own name stays as it is."""
    return {
        name: value
        for name, value in handed.variables.items()
        if name != "TORCH_COMPILE_JOB_ID" or name not in os.environ
    }


def store(data: Path | None = None) -> HandoverStore:
    """Returns the compile caches of a data folder; None is the person's own.

    Raises `PlanError` when ADVISOR_HANDOVER_LIMIT is no size.
    """
    return HandoverStore((data or data_folder()) / "handover", _limit_bytes())


def with_cache_kept(advice: Advice, caches: HandoverStore) -> Advice:
    """Returns the advice with the cache that it hands over in the store.

    Raises `StoreError` when it cannot be kept.
    """
    given = advice.hand_over
    trial = next((t for t in advice.trials if given and _is_of(t, given.path)), None)
    if given is None or trial is None or trial.config is None or trial.environment is None:
        return advice
    seen = trial.environment
    facts = BundleFacts(
        fingerprint=advice.workload.fingerprint if advice.workload else "",
        config=trial.config,
        place=place.here(torch=seen.torch, capability=seen.capability, cuda=seen.cuda),
        advice_id=advice.advice_id,
        created=advice.created,
    )
    bundle = caches.put([Path(given.path)], facts, names=[advice.advice_id])
    handed = caches.hand_over(bundle, facts.place)
    kept = HandOver(path=str(handed.folder), bytes=bundle.size, bundle_id=bundle.bundle_id)
    trials = tuple(
        replace(t, cache_folder=kept.path if t.cache_folder == given.path else "")
        for t in advice.trials
    )
    return replace(advice, hand_over=kept, trials=trials)


def _is_of(trial: Trial, path: str) -> bool:
    return trial.cache_folder == path and trial.kind is not TrialKind.WARM


def _this_place() -> Place:
    torch = sys.modules.get("torch")
    if torch is None:
        return place.here()
    # Asking a GPU that was not used yet would start CUDA, which no fork survives.
    ready = torch.cuda.is_available() and torch.cuda.is_initialized()
    capability = "{}.{}".format(*torch.cuda.get_device_capability()) if ready else ""
    return place.here(
        torch=str(torch.__version__), capability=capability, cuda=torch.version.cuda or ""
    )


def _limit_bytes() -> int:
    text = os.environ.get(_LIMIT, "")
    return parse_size(text, _LIMIT) if text else USUAL_LIMIT_BYTES
