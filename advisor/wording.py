"""All sentences of the campaign and the advice; the lines of code to paste are `advisor.paste`.

Pure text: what is true is decided elsewhere. Every sentence carries its numbers, starts in lower
case where it follows a name or a colon, and stands alone where it is a reason.
"""

from __future__ import annotations

from advisor.models.best_case import BestCase
from advisor.models.economics import Bill
from advisor.models.evidence import Doubt, Evidence
from advisor.models.plan import Plan
from advisor.paste import code as code
from advisor.profiler.records import (
    Advice,
    Config,
    Interval,
    Trial,
    TrialStatus,
    WorkloadFacts,
)
from advisor.profiler.reproduction import command
from advisor.profiler.units import config_name, count, duration, number_of, percent, ratio, size

# --- Why something is tried, and why not -------------------------------------------------------

EAGER_FIRST = (
    "eager steps first: the step time, the shapes and the repeated blocks of the job say what is "
    "worth compiling"
)


LOOKING_BACK = "this workload was measured before: is it still the very same job?"


def measured_before(advice: Advice, trials: int) -> str:
    """Returns that an earlier campaign's trials were used, and how to measure anew."""
    return (
        f"{number_of(trials, 'trial')} of the campaign {advice.advice_id} ({advice.created}) "
        f"stand for this one: the same model, shapes, optimizer, source, torch and device "
        f"(--fresh measures anew)"
    )


def could_bring(config: Config, best: BestCase, best_s: float, now_s: float, now: str) -> str:
    """Returns why a configuration is tried."""
    return (
        f"{config_name(config)} could bring the plan from {duration(now_s)} ({now}) down to "
        f"{duration(best_s)} at best ({best.speedup:.2f}x with {duration(best.compile_s)} of "
        f"compiling: {best.source})"
    )


def to_learn_why(config: Config) -> str:
    """Returns why a configuration is measured that is not asked to pay."""
    if config.options:
        return f"{config_name(config)} shows what these settings bring"
    return f"{config_name(config)} shows what runs compiled and what keeps the rest from it"


def cannot_pay(best: BestCase, saves_s: float, now_s: float, now: str, measuring_s: float) -> str:
    """Returns why even the best case of a configuration is not worth measuring."""
    even = (
        f"even at {best.speedup:.2f}x and {duration(best.compile_s)} of compiling ({best.source})"
    )
    against = f"the {duration(now_s)} that the plan takes with {now}"
    if saves_s <= 0:
        return f"{even} it would take {duration(now_s - saves_s)}, no less than {against}"
    return (
        f"{even} it could save at most {duration(saves_s)} of {against}, and measuring it takes "
        f"about {duration(measuring_s)}"
    )


def not_worth_a_trial(speedup: Interval, gain_s: float, now: str, price_s: float) -> str:
    """Returns why a configuration that could pay is not likely enough to."""
    return (
        f"{ratio(speedup)} is expected of it, which would bring {duration(gain_s)} more than {now} "
        f"on average, and finding out takes about {duration(price_s)}"
    )


FULLGRAPH = (
    "No graph break was met, and fullgraph=True keeps it so: a later one is an error instead of a "
    "silent loss."
)


def no_blocks(facts: WorkloadFacts | None) -> str:
    """Returns why there is nothing to compile regionally."""
    name = facts.model_class if facts else "the model"
    return (
        f"{name} has no repeated blocks (2 or more of one class with the same parameter shapes), "
        "so there is nothing to compile once for all of them"
    )


def needs_cuda_graphs(config: Config, device: str) -> str:
    """Returns why a mode does not fit the device."""
    return f"{config.mode.value} works by CUDA graphs, which a {device} device does not have"


def over_budget(expected_s: float, left_s: float, budget_s: float) -> str:
    """Returns why the campaign's budget ends it."""
    return (
        f"a trial takes about {duration(expected_s)}, and {duration(max(0.0, left_s))} are left "
        f"of the budget of {duration(budget_s)}"
    )


def ruled_out(by: Trial, doubt: Doubt | None, because: str) -> str:
    """Returns why another configuration's failure speaks for this one too."""
    what = sentence_of_doubt(by, doubt) if doubt else ""
    return f"{config_name(by.config)} {because}" + (f": {what}" if what else "")


def one_more_process(config: Config, width: float) -> str:
    """Returns why another process measures a configuration again."""
    return (
        f"the processes that measured {config_name(config)} leave its speedup uncertain by "
        f"±{percent(width)}: one more narrows it"
    )


def one_rank_first(config: Config, cold_s: float) -> str:
    """Returns why a start in which one rank compiles before the others is measured."""
    return (
        f"{config_name(config)} pays: how long it starts when one rank compiles first and the"
        f" others find it in the cache, instead of {duration(cold_s)} in which all compile the same"
    )


def warm_start_wanted(config: Config, cold_s: float, restarts: int) -> str:
    """Returns why the warm start is measured."""
    use = f"each of {count(restarts)} restarts pays it" if restarts > 1 else "the restart pays it"
    return (
        f"{config_name(config)} pays: a second process measures how long it starts from the filled "
        f"cache instead of the {duration(cold_s)} from an empty one, because "
        f"{use if restarts else 'the real run can start from that cache'}"
    )


_STATUS_WORDS = {
    TrialStatus.FAILED_TO_COMPILE: "does not compile",
    TrialStatus.CRASHED: "crashed",
    TrialStatus.OUT_OF_MEMORY: "ran out of memory",
    TrialStatus.TIMED_OUT: "timed out",
    TrialStatus.CUT_OFF: "was cut off",
    TrialStatus.DISAGREES: "does not agree with eager numerically",
}


def _failed(trial: Trial) -> str:
    words = _STATUS_WORDS.get(trial.status, trial.status.value)
    return f"{words}: {trial.failure.message}" if trial.failure else words


REPRODUCTIONS = "the folders hold pieces of the model's code; nothing was sent anywhere"


def reproduce(trial: Trial) -> str:
    """Returns how to repeat a trial that went wrong."""
    return f"{config_name(trial.config)}: reproduce it with {command(trial.reproduction)}"


def _no_graph(trial: Trial) -> str:
    skipped = trial.skipped_frames
    more = f" ({count(skipped)} frames were skipped)" if skipped else ""
    return (
        f"torch.compile captured no graph{more}{_first_cause(trial)}: what looks compiled ran"
        " eager, so any difference in step time is noise"
    )


def _first_cause(trial: Trial) -> str:
    """Returns what ended the first graph before it began, at a place in the person's own code."""
    own = [found for found in trial.graph_breaks if "site-packages" not in found.file]
    found = next(iter((*own, *trial.graph_breaks)), None)
    return f", because of {found.reason} ({found.file}:{found.line})" if found is not None else ""


def _limit_hit(trial: Trial) -> str:
    share = "" if trial.coverage is None else f", {percent(trial.coverage)} of the calls compiled"
    return f"{_limit_when(trial)}, and most of the step ran eager from then on{share}"


def _limit_when(trial: Trial) -> str:
    """Returns that the recompile limit was hit, at which step and after how much compiling."""
    if not trial.compile_events or not trial.cold_start_s:
        return "the recompile limit was hit"
    step = max(event.step for event in trial.compile_events) + 1
    compiles = number_of(len(trial.compile_events), "compile")
    return (
        f"the recompile limit was hit by step {count(step)}, after {compiles} that took "
        f"{duration(trial.cold_start_s)}"
    )


def _not_covered(trial: Trial) -> str:
    return (
        f"only {percent(trial.coverage or 0.0)} of the operator calls ran inside compiled graphs: "
        "too little to call it compiled"
    )


def _too_large(trial: Trial) -> str:
    peak = max(trial.peak_bytes or 0, trial.compile_peak_bytes or 0)
    return f"its peak of {size(peak)} is above the memory limit"


_DOUBTS = {
    Doubt.FAILED: _failed,
    Doubt.NO_GRAPH: _no_graph,
    Doubt.NOT_COVERED: _not_covered,
    Doubt.LIMIT_HIT: _limit_hit,
    Doubt.NOT_MEASURED: lambda trial: "its steps were not measured",
    Doubt.TOO_LARGE: _too_large,
}


def sentence_of_doubt(trial: Trial, doubt: Doubt) -> str:
    """Returns why a configuration that was tried cannot be advised."""
    return _DOUBTS[doubt](trial)


def not_paying(bill: Bill, plan: Plan) -> str:
    """Returns why a configuration that works does not pay for this plan."""
    compiles = _compiles(bill, plan)
    if bill.speedup.high < 1:
        return f"slower than eager: {ratio(bill.speedup)}"
    if bill.break_even_step is None:
        return (
            f"no faster than eager beyond the noise: {ratio(bill.speedup)}, so nothing pays back "
            f"{compiles}"
        )
    if bill.break_even_step > bill.steps:
        return (
            f"at {ratio(bill.speedup)} its {compiles} are paid back after step "
            f"{count(bill.break_even_step)}, and the plan has {count(bill.steps)}"
        )
    return (
        f"saves time with a probability of {_chance(bill.p_saves)}, below the "
        f"{percent(plan.confidence)} asked for: {ratio(bill.speedup)} and {compiles} are paid "
        f"back after step {count(bill.break_even_step)} of {count(bill.steps)}"
    )


def second_best(bill: Bill, best: Bill, best_name: str) -> str:
    """Returns why a configuration that pays is not the advised one."""
    return (
        f"pays too, but takes {duration(bill.expected_total_s)}, "
        f"{duration(bill.expected_total_s - best.expected_total_s)} more than "
        f"{best_name}"
    )


# --- Reasons for the advice ------------------------------------------------------------------


def faster(bill: Bill, evidence: Evidence) -> str:
    """Returns the reason that speaks of the step time."""
    processes = len({pair.process for pair in evidence.pairs})
    where = "one process" if processes == 1 else f"{processes} processes"
    return (
        f"A step takes {duration(bill.step_s.median)} instead of "
        f"{duration(bill.eager_step_s.median)}: {ratio(bill.speedup)} faster, "
        f"{len(evidence.pairs)} interleaved comparisons in {where}."
    )


def pays_back(bill: Bill, plan: Plan) -> str:
    """Returns the reason that speaks of compile time and break-even."""
    ahead = "from the first step on"
    if bill.break_even_step is not None and bill.break_even_step >= 1:
        bounds = [bill.break_even_low, bill.break_even_high]
        found = [count(bound) for bound in bounds if bound is not None]
        spread = f" (90 %: {'-'.join(found)})" if len(found) == 2 else ""
        ahead = f"after step {count(bill.break_even_step)}{spread} of {count(bill.steps)}"
    compiles = _compiles(bill, plan)
    return f"{compiles[0].upper()}{compiles[1:]} are paid back {ahead}."


def saves(bill: Bill) -> str:
    """Returns the reason that speaks of the whole plan."""
    share = bill.saved_s.median / bill.eager_total_s.median
    return (
        f"The plan takes {duration(bill.total_s.median)} instead of "
        f"{duration(bill.eager_total_s.median)}: {percent(share)} less, {_span(bill.saved_s)} "
        f"saved, with a probability of {_chance(bill.p_saves)} that anything is."
    )


def campaign_against_savings(campaign_s: float, saved: Interval) -> str:
    """Returns what the measuring took, next to what it brings."""
    if saved.median < campaign_s:
        return (
            f"Measuring took {duration(campaign_s)}, more than the {duration(saved.median)} that "
            "this run saves: it pays only if the job is run again."
        )
    return (
        f"Measuring took {duration(campaign_s)}: {duration(saved.median - campaign_s)} remain "
        "saved after it."
    )


def restarts(number: int, cold_s: float, warm_s: float | None) -> str:
    """Returns what each restart pays."""
    each = "Each of" if number > 1 else "The"
    plural = "s" if number > 1 else ""
    start = (
        f"a cold start of {duration(cold_s)}, as its warm start was not measured"
        if warm_s is None
        else f"a warm start of {duration(warm_s)} (cold: {duration(cold_s)}): keep the cache"
    )
    return f"{each} {count(number)} restart{plural} is billed {start}."


def hand_over(advice_id: str, warm: Bill, cold: Bill, used: bool) -> str:
    """Returns what the trial's compile cache changes, or would change."""
    takes, instead = duration(warm.compile_s.median), duration(cold.compile_s.median)
    how = _exec(advice_id)
    if used:
        return f"The first start is billed from the trial's cache ({how}): {takes}, not {instead}."
    return f"Started from the trial's cache ({how}) it compiles in {takes}, not {instead}."


def hand_over_would_pay(advice_id: str, warm: Bill) -> str:
    """Returns that a configuration pays if the real run starts from the trial's cache."""
    return (
        f"Started from the trial's cache ({_exec(advice_id)}) it would compile in "
        f"{duration(warm.compile_s.median)} and save {_span(warm.saved_s)}."
    )


def _exec(advice_id: str) -> str:
    return f"`advise exec {advice_id} -- python train.py`"


def not_kept(error: str) -> str:
    """Returns the warning that a real run cannot start from the trial's cache."""
    return f"The real run starts cold: {error}."


def worth(bill: Bill, price_per_hour: float) -> str:
    """Returns the money saved."""
    money = bill.money_saved or 0.0
    return f"At {price_per_hour:,.2f} an hour that is {money:,.2f} saved."


def waits_for_data(share: float) -> str:
    """Returns the warning that the job waits for its input."""
    return (
        f"{percent(share)} of the eager training waits for data, which compiling does not make "
        "faster: more loader workers or prefetching come first."
    )


def stay_eager(config: Config, why_not: str) -> str:
    """Returns the reason for staying eager that names the configuration that came closest."""
    return f"{config_name(config)} comes closest, but {why_not}."


def all_failed(names: list[str], why_not: str) -> str:
    """Returns the reason when no configuration that was tried could be used."""
    if len(names) == 1:
        return f"{names[0]} cannot be used: {why_not}."
    return f"none of the {len(names)} configurations tried can be used; {names[0]}: {why_not}."


def nothing_tried(config: Config | None, why_not: str) -> str:
    """Returns the reason when no compile trial was run at all."""
    return f"no configuration was measured; {config_name(config)}: {why_not}."


def nothing_to_try() -> str:
    """Returns the reason when the campaign ended before any configuration was looked at."""
    return "no configuration was measured: the campaign ended after the eager steps."


def named(config: Config, why_not: str) -> str:
    """Returns a reason that holds for one configuration."""
    return f"{config_name(config)}: {why_not}."


# --- Warnings --------------------------------------------------------------------------------


def unsteady(spread: float) -> str:
    """Returns the warning that eager steps did not become steady."""
    return (
        f"Eager steps did not become steady: block means scatter by {percent(spread)}. Something "
        "else may use this machine, so all figures are less certain than they look."
    )


def wide(config: Config, figure: Interval, share: float) -> str:
    """Returns the warning that a speedup is not known well."""
    return (
        f"The speedup of {config_name(config)} is known only to ±{percent(share)}: "
        f"{ratio(figure)}. Measure on a quieter machine or for longer."
    )


def limit_warning(trial: Trial) -> str:
    """Returns the warning that a recompile limit was hit."""
    return (
        f"{config_name(trial.config)}: {_limit_when(trial)}; a part of the model runs eager from "
        "then on, silently."
    )


def flip_warning(config: Config, check: float) -> str:
    """Returns the warning that the eager arm was not plain eager."""
    return (
        f"In the trial of {config_name(config)} the eager arm took {check:.2f}x the time of a "
        "model that was never compiled, so its speedup is off by as much."
    )


def processes_disagree(config: Config, sigma: float) -> str:
    """Returns the warning that a second process measured another ratio."""
    return (
        f"Two processes measured speedups of {config_name(config)} that differ by more than their "
        f"noise (±{percent(sigma)} from process to process); the interval covers both."
    )


def warm_start_failed(trial: Trial) -> str:
    """Returns the warning that the warm start is not known."""
    return f"The warm start of {config_name(trial.config)} could not be measured: {_failed(trial)}."


def _compiles(bill: Bill, plan: Plan) -> str:
    first, everything = bill.compile_s.median, bill.all_compiles_s.median
    if not plan.restarts:
        return f"{duration(everything)} of compiling"
    plural = "s" if plan.restarts > 1 else ""
    return (
        f"{duration(everything)} of compiling ({duration(first)} at the first start, then "
        f"{count(plan.restarts)} restart{plural})"
    )


def _span(figure: Interval) -> str:
    return f"{duration(figure.median)} ({duration(figure.low)} to {duration(figure.high)})"


def _chance(probability: float) -> str:
    """Returns a probability in percent; one that was found by drawing is never certain."""
    if probability > 0.99:
        return "more than 99 %"
    if probability < 0.01:
        return "less than 1 %"
    return f"{100 * probability:.0f} %"
