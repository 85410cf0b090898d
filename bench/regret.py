"""What does measuring less cost? Campaigns against exhaustive ones, on twelve architectures.

    python bench/regret.py [FOLDER]

Each architecture is measured exhaustively once (`advise run --exhaustive`); FOLDER keeps those
answers, so that an interrupted run goes on. Campaigns for plans of 100 to 100,000 steps then ask
for their trials as always and are given the measured ones, each at the time that it took: what is
compared is which trials were asked for, on the same measurements. Regret is the plan's total under
the advice over the best total of all configurations, minus 1.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from campaigns import advise, machine, verdict
from google.protobuf import json_format

from advisor import prior_store
from advisor.beliefs import Beliefs
from advisor.campaign import Campaign
from advisor.convert import advice_record
from advisor.decision import decide
from advisor.models.economics import point_total_s
from advisor.models.evidence import bill_of, doubt, gather
from advisor.models.learning import NO_SHIFTS
from advisor.models.plan import Plan
from advisor.models.shape_policies import base_of
from advisor.profiler.records import Advice, Config, Trial, TrialKind, TrialStatus, WorkloadSpec
from advisor.request import AdviceRequest
from advisor.v1 import advisor_pb2

ARCHITECTURES = (
    "bert-base", "roberta-base", "distilbert-base", "deberta-v3-base", "gpt2", "llama-1b",
    "qwen-0.5b", "t5-base", "vit-base", "swin-tiny", "convnext-tiny", "resnet-50",
)  # fmt: skip
PLANS = (1e2, 1e3, 1e4, 1e5)
MOST_REGRET, MOST_SHARE = 0.01, 1 / 3


def exhaustive(name: str, folder: Path) -> Advice:
    """Returns the advice on one architecture with every configuration measured."""
    kept = folder / f"{name}.json"
    if not kept.exists():
        answer, _ = advise(
            f"hf:{name}", "--scale", "tiny", "--steps", "1000000", "--device", "cpu", "--exhaustive"
        )
        kept.write_text(json.dumps(answer))
    message = json_format.ParseDict(json.loads(kept.read_text()), advisor_pb2.Advice())
    return advice_record(message)


def replayed(request: AdviceRequest, measured: Advice, believe: object) -> tuple[Advice, float]:
    """Returns the advice of a campaign that is given measured trials, and the time they took."""
    campaign = Campaign(request, believe=believe)  # type: ignore[arg-type]
    spent_s = 0.0
    while (step := campaign.next()) is not None:
        trial = _found(measured, step.kind, step.config, campaign.trials)
        if trial is None:
            break
        campaign.add(trial, trial.wall_s)
        spent_s += trial.wall_s
    return decide(request, campaign.trials, spent_s, "replay", measured.created), spent_s


def _found(
    measured: Advice, kind: TrialKind, config: Config | None, taken: tuple[Trial, ...]
) -> Trial | None:
    for trial in measured.trials:
        used = any(each.trial_id == trial.trial_id for each in taken)
        ran = trial.status is not TrialStatus.SKIPPED
        if ran and not used and (trial.kind, trial.config) == (kind, config):
            return trial
    return None


def totals(request: AdviceRequest, measured: Advice) -> dict[Config | None, float]:
    """Returns the plan's total with each configuration that can be advised at all; None: eager.

    What failed, disagrees numerically or did not run compiled is no choice that one could regret.
    """
    plan = request.plan
    common = base_of(measured.trials, plan)
    if common is None:
        raise SystemExit(f"{measured.target}: no eager step time")
    steps = plan.steps_planned(common.step_s)
    found: dict[Config | None, float] = {None: point_total_s(plan, steps, common.step_s, 0.0, 0.0)}
    for evidence in gather(measured.trials):
        if doubt(evidence) is None:
            found[evidence.config] = bill_of(evidence, common, plan).expected_total_s
    return found


def main() -> None:
    """Prints the table and ends with 1 when a claim does not hold."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    prior = prior_store.load()
    regrets, shares, wrong = [], [], 0
    print(f"{'architecture':18}{'steps':>8}{'best':>26}{'advised':>26}{'regret':>8}{'time':>7}")
    for name in ARCHITECTURES:
        measured = exhaustive(name, folder)
        ran = [t for t in measured.trials if t.status is not TrialStatus.SKIPPED]
        all_s = sum(trial.wall_s for trial in ran)
        for steps in PLANS:
            request = AdviceRequest(
                workload=WorkloadSpec(target=f"hf:{name}", cwd="/", device="cpu"),
                plan=Plan(steps=steps),
            )
            advice, spent_s = replayed(
                request, measured, lambda eager: Beliefs.of(prior, NO_SHIFTS, eager)
            )
            known = totals(request, measured)
            best = min(known, key=lambda config: known[config])
            total = known[_plain(advice.config)]
            regret = total / known[best] - 1
            regrets.append(regret)
            shares.append(spent_s / all_s)
            # Against what all measurements together would advise: the same certainty is asked for.
            truth = decide(request, measured.trials, 0.0, "all", measured.created)
            wrong += truth.enable != advice.enable
            print(f"{name:18}{steps:8.0f}{_name(best):>26}{_name(advice.config):>26}"
                  f"{regret:8.1%}{spent_s / all_s:7.0%}")  # fmt: skip
    print(machine())
    print(f"mean regret {np.mean(regrets):.2%}, wrong enable/stay {wrong} of {len(regrets)}, "
          f"campaign time {np.mean(shares):.0%} of exhaustive")  # fmt: skip
    verdict(
        "measuring less costs nothing",
        ok=float(np.mean(regrets)) <= MOST_REGRET
        and wrong == 0
        and float(np.mean(shares)) <= MOST_SHARE,
    )


def _plain(config: Config | None) -> Config | None:
    """Returns a configuration as it was tried: advice adds `fullgraph` where nothing breaks."""
    return None if config is None else replace(config, fullgraph=False)


def _name(config: Config | None) -> str:
    return "eager" if config is None else f"{config.scope} {config.mode}"[:25]


if __name__ == "__main__":
    main()
