"""What the cost model is asked and answers: records of `Estimate` and `ReportOutcome`."""

from __future__ import annotations

from dataclasses import dataclass, field

from advisor.models.devices import Device
from advisor.models.families import family_of
from advisor.models.features import Facts
from advisor.models.plan import Plan
from advisor.profiler.records import Config, Interval
from advisor.profiler.step_counts import StepCounts

PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "amp-fp16", "amp-bf16")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """What is known of a training job without measuring it. None is what is not known.

    `device` is a name of `advise devices` or as a driver spells it; `family` a family of the corpus
    or the name of a model's class; `length` tokens of a sample, `image` pixels of a side;
    `operators` calls that the compiler captures in the forward; `counts` what a whole step does.
    """

    device: str
    family: str = ""
    precision: str = "fp32"
    parameters: float | None = None
    batch: float | None = None
    length: float | None = None
    image: float | None = None
    eager_step_s: float | None = None
    operators: float | None = None
    graph_breaks: float | None = None
    counts: StepCounts | None = None
    # Equal for equal jobs: what this job itself showed before is then believed above all.
    fingerprint: str = ""

    def facts(self, config: Config) -> Facts:
        """Returns the facts as the cost model takes them. Raises `PlanError` for the device."""
        counts = self.counts
        return Facts(
            device=Device.from_name(self.device),
            family=family_of(self.family),
            precision=self.precision,
            config=config,
            parameters=self.parameters or (counts.parameters if counts else None),
            batch=self.batch or (counts.samples if counts else None),
            length=self.length,
            image=self.image,
            eager_s=self.eager_step_s,
            operators=self.operators,
            graphs=None if self.graph_breaks is None else self.graph_breaks + 1,
            counts=counts,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateRequest:
    """A job, the training that is planned, and the configurations to estimate.

    Without a plan only what a step gains is said; no configurations: those that suit the device.
    """

    facts: JobFacts
    plan: Plan | None = None
    configs: tuple[Config, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigEstimate:
    """What one configuration is believed to bring; totals and probability only under a plan."""

    config: Config
    speedup: Interval
    compile_s: Interval
    memory_ratio: Interval
    total_s: Interval | None = None
    p_saves: float | None = None
    break_even_step: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateResponse:
    """The estimates, the best first, and the verdict where a plan was given.

    `config` is what would be advised, None: stay eager, or no plan. `eager_step_s` is the one
    given, or estimated (`eager_estimated`) from what a step has to do. `beyond` says in what the
    job lies outside of all that was seen; `outcomes` is how many own measurements moved it.
    """

    estimates: tuple[ConfigEstimate, ...]
    enable: bool = False
    config: Config | None = None
    eager_step_s: Interval | None = None
    eager_estimated: bool = False
    eager_total_s: Interval | None = None
    reasons: tuple[str, ...] = ()
    beyond: tuple[str, ...] = ()
    outcomes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeReport:
    """What one configuration really brought to a job; None is what was not measured."""

    facts: JobFacts
    config: Config = field(default_factory=Config)
    speedup: float | None = None
    compile_s: float | None = None
    memory_ratio: float | None = None
    # Where it comes from, in the caller's words.
    source: str = ""
