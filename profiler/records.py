"""The values that everyone speaks: frozen records, free of torch and grpc.

Units stand in the names. Every record survives `encode` and `decode` unchanged: that is how it
travels between processes and how it lies in the database. A number that could not be measured is
`None`, never 0 and never NaN.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from advisor.profiler.errors import AdvisorError
from advisor.profiler.step_counts import StepCounts

# Ranks of a trial: they share one machine.
MOST_RANKS = 64
# Raised by one with each change that an older reader would misunderstand.
SCHEMA_VERSION = 1


class Scope(enum.StrEnum):
    """What is compiled: the whole model, or its repeated blocks, once for each kind."""

    MODEL = "model"
    REGIONAL = "regional"


class Mode(enum.StrEnum):
    """The compiler's modes, spelled as `torch.compile(mode=...)` spells them."""

    DEFAULT = "default"
    REDUCE_OVERHEAD = "reduce-overhead"
    MAX_AUTOTUNE_NO_CUDAGRAPHS = "max-autotune-no-cudagraphs"
    MAX_AUTOTUNE = "max-autotune"


class Dynamic(enum.StrEnum):
    """`torch.compile(dynamic=...)`: `AUTO` is None, the compiler's own choice."""

    AUTO = "auto"
    TRUE = "true"
    FALSE = "false"


class Wrapper(enum.StrEnum):
    """How a model is spread over ranks; `OWN`: as the workload's function has built it."""

    OWN = "own"
    DDP = "ddp"
    FSDP1 = "fsdp1"
    FSDP2 = "fsdp2"


class Order(enum.StrEnum):
    """What comes first where a model is both compiled and wrapped for several ranks."""

    WRAP_FIRST = "wrap-first"
    COMPILE_FIRST = "compile-first"


class NetworkSource(enum.StrEnum):
    """Where the bandwidth between the ranks of a plan is from.

    `MEASURED`: all are on one machine like that of the trials. `ASSUMED`: a range, of published
    networks against links within a machine.
    """

    MEASURED = "measured"
    GIVEN = "given"
    ASSUMED = "assumed"


class TrialStatus(enum.StrEnum):
    """How a trial ended."""

    OK = "OK"
    FAILED_TO_COMPILE = "FAILED_TO_COMPILE"
    CRASHED = "CRASHED"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    TIMED_OUT = "TIMED_OUT"
    CUT_OFF = "CUT_OFF"
    DISAGREES = "DISAGREES"
    SKIPPED = "SKIPPED"


class TrialKind(enum.StrEnum):
    """What a trial measures.

    Eager alone, one configuration, a start from a filled cache, a start from an empty one in which
    one rank compiles before the others, one configuration on batches of chosen lengths, or nothing
    at all: the operators of a step are counted from its shapes.
    """

    EAGER = "eager"
    COMPILE = "compile"
    WARM = "warm"
    ONE_FIRST = "one_first"
    SHAPES = "shapes"
    COUNT = "count"


class Phase(enum.StrEnum):
    """The phases of a trial, in their order."""

    IMPORT = "import"
    BUILD = "build"
    WARM_UP = "warm_up"
    COLD = "cold"
    STEADY = "steady"
    NUMERICS = "numerics"
    DIAGNOSE = "diagnose"
    DONE = "done"


class GraphBreakCause(enum.StrEnum):
    """Why a graph ended (design §8)."""

    SCALAR_READ = "SCALAR_READ"
    DATA_DEPENDENT_BRANCH = "DATA_DEPENDENT_BRANCH"
    DYNAMIC_OUTPUT_SHAPE = "DYNAMIC_OUTPUT_SHAPE"
    PRINT_OR_LOGGING = "PRINT_OR_LOGGING"
    UNREGISTERED_OPERATOR = "UNREGISTERED_OPERATOR"
    FOREIGN_CALL = "FOREIGN_CALL"
    UNSUPPORTED_PYTHON = "UNSUPPORTED_PYTHON"
    AUTOGRAD_FUNCTION = "AUTOGRAD_FUNCTION"
    HOOK = "HOOK"
    DISABLED_FUNCTION = "DISABLED_FUNCTION"
    SKIPPED_FRAME = "SKIPPED_FRAME"
    DISTRIBUTED_WRAPPER = "DISTRIBUTED_WRAPPER"
    OTHER = "OTHER"


class FixKind(enum.StrEnum):
    """What a mend is about."""

    GRAPH_BREAK = "GRAPH_BREAK"
    RECOMPILE = "RECOMPILE"
    # The compiler did less than asked: nothing compiled, CUDA graphs left out, numbers differ.
    COMPILER = "COMPILER"
    # The training job itself, whether it is compiled or not.
    JOB = "JOB"


class RecompileCause(enum.StrEnum):
    """Why compiled code was made once more (design §8)."""

    BATCH_SIZE = "BATCH_SIZE"
    SHAPE = "SHAPE"
    PYTHON_NUMBER = "PYTHON_NUMBER"
    MODULE_ATTRIBUTE = "MODULE_ATTRIBUTE"
    TRAIN_EVAL = "TRAIN_EVAL"
    GRAD_MODE = "GRAD_MODE"
    DTYPE_OR_DEVICE = "DTYPE_OR_DEVICE"
    STRIDE = "STRIDE"
    OPTIMIZER_STATE = "OPTIMIZER_STATE"
    OBJECT_IDENTITY = "OBJECT_IDENTITY"
    OTHER = "OTHER"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A figure with its 90 % interval: 5 %, 50 % and 95 % quantiles."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One way to compile. Equal configurations are equal records."""

    scope: Scope = Scope.MODEL
    mode: Mode = Mode.DEFAULT
    dynamic: Dynamic = Dynamic.AUTO
    fullgraph: bool = False
    backend: str = "inductor"
    # Settings of torch._dynamo.config or torch._inductor.config, name and value, sorted by name.
    options: tuple[tuple[str, str], ...] = ()
    # None where nothing is wrapped for several ranks.
    order: Order | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """Which training job: its entry point, the options that a preset takes, and its ranks.

    `target` is `path/to/file.py:function`, `package.module:function`, `hf:NAME` or `hf:DIR`.
    A relative path is looked up from `cwd`, in which the job also runs. `None` means: the
    preset's own default.
    """

    target: str
    cwd: str
    device: str = "auto"
    task: str | None = None
    batch_size: int | None = None
    length: int | None = None
    precision: str | None = None
    scale: str | None = None
    seed: int = 0
    # Processes that train together on this machine, and how the model is spread over them.
    ranks: int = 1
    wrapper: Wrapper = Wrapper.OWN
    # Whether repeated blocks compute their activations anew in the backward pass.
    checkpointing: bool = False
    # Port of 127.0.0.1 at which the ranks meet; 0: one that is free.
    port: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """The longest that each phase of a trial may take."""

    import_s: float = 120.0
    build_s: float = 180.0
    warm_up_s: float = 180.0
    cold_s: float = 900.0
    steady_s: float = 180.0
    numerics_s: float = 120.0
    diagnose_s: float = 120.0

    def of(self, phase: Phase) -> float | None:
        """Returns the deadline of a phase in seconds, or None for the phase that ends a trial."""
        return {
            Phase.IMPORT: self.import_s,
            Phase.BUILD: self.build_s,
            Phase.WARM_UP: self.warm_up_s,
            Phase.COLD: self.cold_s,
            Phase.STEADY: self.steady_s,
            Phase.NUMERICS: self.numerics_s,
            Phase.DIAGNOSE: self.diagnose_s,
        }.get(phase)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measuring:
    """How precisely to measure, and when to stop."""

    # Stop once the half-width of the ratio's 90 % interval falls to this share of the ratio.
    half_width: float = 0.02
    min_quads: int = 8
    # Time after which measuring stops with the precision it has.
    max_steady_s: float = 40.0
    # The same for a warm start, which only shows what another process sees. In 8 s a process knew
    # its own ratio to no better than 6 % on a noisy 2-core virtual machine.
    max_warm_steady_s: float = 20.0
    # Time for eager steps to become steady.
    max_warm_up_s: float = 20.0
    # Steps without any compile event that end the cold phase.
    quiet_steps: int = 4
    # Steps whose losses are compared between compiled and eager.
    numerics_steps: int = 5
    # Time for tracing anew under other settings, once breaks or recompiles were met.
    max_diagnose_s: float = 30.0


class LengthSource(enum.StrEnum):
    """Where the lengths of the samples are known from."""

    FILE = "file"
    WORKLOAD = "workload"
    BATCHES = "batches"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchClass:
    """Batches of one shape: samples in each, their padded length, and how many there were."""

    rows: int
    length: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """The lengths of a data set's samples, and how batches are made of them.

    `values` are distinct and ascending, `counts` the samples of each. A batch holds `batch_size`
    samples, or as many as fit into `tokens_per_batch` when padded. It is padded to `pad_to`, or to
    its longest sample, rounded up to a multiple of `pad_multiple`.

    With `whole_batches` the samples' own lengths are not known: `values` are padded lengths of
    batches. `batches` are those that were seen, where the lengths are known from them.
    """

    values: tuple[int, ...]
    counts: tuple[int, ...]
    batch_size: int | None = None
    tokens_per_batch: int | None = None
    pad_to: int | None = None
    pad_multiple: int = 1
    shuffled: bool = True
    drop_last: bool = False
    source: LengthSource = LengthSource.BATCHES
    whole_batches: bool = False
    batches: tuple[BatchClass, ...] = ()


class BatchShapes(enum.StrEnum):
    """How the sizes of batches vary from step to step."""

    CONSTANT = "constant"
    # Only the number of rows: a smaller last batch.
    ROWS = "rows"
    # One length, the same for all tensors that have it.
    LENGTH = "length"
    # Several sizes that vary on their own: source and target, nodes and edges.
    SEVERAL = "several"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeTime:
    """Steps on batches of one shape: seconds eager and compiled, and what compiling for it took."""

    rows: int
    length: int
    eager_step_s: Interval | None = None
    step_s: Interval | None = None
    pairs: tuple[Pair, ...] = ()
    compile_s: float = 0.0
    compiles: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSpec:
    """One trial to run: what, how, and within which limits."""

    trial_id: str
    kind: TrialKind
    workload: WorkloadSpec
    # Private folder of the trial; the compile cache lies in `folder`/inductor (see `host`).
    folder: str
    config: Config | None = None
    deadlines: Deadlines = field(default_factory=Deadlines)
    measuring: Measuring = field(default_factory=Measuring)
    memory_limit_bytes: int | None = None
    # Steps of the plan: lets the trial stop measuring once a win is out of reach.
    plan_steps: float | None = None
    # The plan's total with the best configuration so far, as a share of eager's: a trial that
    # cannot get below it any more has lost the race.
    rival_share: float = 1.0
    # Seconds that the campaign leaves for this trial; what can be left out is, towards their end.
    budget_s: float | None = None
    # Compile time beyond which this configuration can only lose: the trial is then cut off.
    cut_off_s: float | None = None
    # The lengths of the data set where the person gave them beside the workload.
    lengths: Lengths | None = None
    # Rows and padded length of the batches to measure, and whether their length is marked dynamic.
    shapes: tuple[tuple[int, int], ...] = ()
    mark_dynamic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a trial did not end well. `message` is one sentence; `details` may be long."""

    kind: str
    message: str
    details: str = ""
    phase: Phase | None = None
    # Where in the person's code it was, as far as known.
    file: str = ""
    line: int = 0
    code: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphBreak:
    """One place in the source that ends a graph. `count` is how often a compile met it.

    `hits_per_step` is how often a step comes by; `lost_share` the share of the eager step's
    operator time that ran outside compiled graphs because of it.
    """

    cause: GraphBreakCause
    reason: str
    file: str = ""
    line: int = 0
    code: str = ""
    hint: str = ""
    count: int = 1
    hits_per_step: float | None = None
    lost_share: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompile:
    """One reason for compiling again; `lost_s` is the wall time of those compiles.

    `settles` says whether it stopped by itself after some variants, `variants` how many there are.
    """

    cause: RecompileCause
    reason: str
    file: str = ""
    line: int = 0
    count: int = 1
    lost_s: float = 0.0
    settles: bool | None = None
    variants: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """What tracing anew under some settings of the compiler showed, without building kernels.

    `removes` names the causes that are gone under them, `sites` the places of graph breaks left.
    """

    options: tuple[tuple[str, str], ...]
    removes: tuple[str, ...] = ()
    graphs: int = 0
    sites: int = 0
    recompiles: int = 0
    recompile_limit_hit: bool = False
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """Where the time of an eager step goes. Shares are of the step; None: could not be told."""

    operator_calls: float = 0.0
    forward_share: float | None = None
    backward_share: float | None = None
    optimizer_share: float | None = None
    # Share that the mere calling of operators explains, whatever their size.
    dispatch_share: float | None = None
    # Share in which the accelerator computed; None on the CPU.
    device_busy_share: float | None = None
    # Share of the step that matrix products in float32 took.
    float32_matmul_share: float | None = None
    # Whether the optimizer steps parameter by parameter (neither foreach nor fused).
    optimizer_loops: bool = False
    # Share of the tokens that are padding.
    padding_share: float | None = None
    # TF32 is off where the device has it; bfloat16 is native where the model computes in float32.
    tf32_off: bool = False
    bfloat16_native: bool = False
    # Rows of the usual batch and of the smaller one that ends an epoch.
    batch_size: int | None = None
    last_batch_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileEvent:
    """One attempt of the compiler on one frame, with the seconds of its phases."""

    compile_id: str
    function: str
    file: str
    line: int
    # Step of the cold phase during which it came, counted from 0.
    step: int
    wall_s: float
    dynamo_s: float | None = None
    aot_autograd_s: float | None = None
    inductor_s: float | None = None
    code_generation_s: float | None = None
    backward_s: float | None = None
    operators: int = 0
    recompile_reason: str = ""
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One class of batches: the shapes and dtypes of its tensors, and its share of the steps."""

    signature: str
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Repeated blocks of a model: same class, same parameter shapes.

    `paths` are attribute paths from the model (`bert.encoder.layer.0`); `container` is set when
    they are exactly the children of one ModuleList or Sequential.
    """

    module_class: str
    paths: tuple[str, ...]
    container: str | None = None
    parameters: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadFacts:
    """What was seen of the training job itself."""

    fingerprint: str
    model_class: str
    parameters: int
    trainable_parameters: int
    optimizer: str
    dtype: str
    shapes: tuple[Shape, ...]
    blocks: tuple[Blocks, ...] = ()
    # True when the model's own class is torch's: then `forward` is what can be compiled in place.
    torch_class: bool = False
    stochastic: bool = False
    batches_seen: int = 0
    # Batches before the iterable starts again, when that was seen or can be asked.
    batches_per_epoch: int | None = None
    # How sizes vary, and what is known of the lengths; None where no length was made out.
    batch_shapes: BatchShapes = BatchShapes.CONSTANT
    lengths: Lengths | None = None
    # The most positions that the model takes; None where it does not say.
    most_positions: int | None = None
    # Whether the model can also generate, each token at a length of its own.
    generates: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Where it was measured."""

    torch: str
    python: str
    device: str
    device_name: str
    cores: int
    threads: int
    memory_bytes: int
    transformers: str = ""
    cuda: str = ""
    driver: str = ""
    platform: str = ""
    # The GPU's own name, which no renumbering changes.
    device_uuid: str = ""
    # What kernels are compiled for, such as "9.0"; empty without a GPU.
    capability: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds for each step and mean seconds waited for each batch, in one arm of a trial."""

    step_s: Interval
    data_wait_s: float | None = None
    steps: int = 0
    steady: bool = True
    # Coefficient of variation of the step time over blocks.
    spread: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One ABBA quad: mean seconds of a step, eager and compiled, over the same batches."""

    eager_s: float
    compiled_s: float
    # Process in which it was measured: 0 the trial, 1 its warm start.
    process: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """What one rank of a trial measured.

    `graph_names` are the functions that it compiled and the operators in each: equal on ranks that
    compile the same.
    """

    rank: int
    eager_step_s: Interval | None = None
    step_s: Interval | None = None
    cold_start_s: float | None = None
    graphs: int | None = None
    graph_breaks: int = 0
    peak_bytes: int | None = None
    loss_drift: float | None = None
    graph_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One kind of communication in an eager step: calls and bytes of each rank's part."""

    name: str
    calls: float
    part_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """What ranks say to each other in an eager step, and what that takes.

    `share` is the share of the step without which it would be that of `alone_step_s`, the same
    step whose collectives return at once; None where that could not be measured. `latency_s` and
    `bytes_per_s` are of an all-reduce between these ranks, fitted to several sizes.
    """

    collectives: tuple[Collective, ...] = ()
    alone_step_s: float | None = None
    share: float | None = None
    latency_s: float | None = None
    bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The result of one trial (design §8). What was not reached is None."""

    trial_id: str
    kind: TrialKind
    status: TrialStatus
    config: Config | None = None
    failure: Failure | None = None
    phase_reached: Phase | None = None
    eager_step_s: Interval | None = None
    step_s: Interval | None = None
    speedup: Interval | None = None
    pairs: tuple[Pair, ...] = ()
    cold_start_s: float | None = None
    warm_start_s: float | None = None
    # A start from an empty cache in which one rank compiled before the others.
    one_first_start_s: float | None = None
    eager: Timing | None = None
    eager_peak_bytes: int | None = None
    compile_peak_bytes: int | None = None
    peak_bytes: int | None = None
    graphs: int | None = None
    coverage: float | None = None
    # The same by the time of the eager operators instead of their number.
    time_coverage: float | None = None
    graph_breaks: tuple[GraphBreak, ...] = ()
    recompiles: tuple[Recompile, ...] = ()
    recompile_limit_hit: bool = False
    # Frames that the compiler gave up on and left to Python.
    skipped_frames: int = 0
    # Why CUDA graphs were left out, in the compiler's words.
    cudagraph_skips: tuple[str, ...] = ()
    compile_events: tuple[CompileEvent, ...] = ()
    # Largest relative difference of a loss, compiled against eager; and what eager itself spreads.
    loss_drift: float | None = None
    loss_scale: float | None = None
    # The same for the gradients of one step, as vectors: |compiled - eager| / |eager|.
    gradient_drift: float | None = None
    gradient_scale: float | None = None
    # What tracing anew under other settings showed.
    what_ifs: tuple[WhatIf, ...] = ()
    # Where the time of the eager step goes; measured by the eager trial.
    step_profile: StepProfile | None = None
    # Step times on batches of chosen lengths.
    shape_times: tuple[ShapeTime, ...] = ()
    mark_dynamic: bool = False
    # What an eager step has to do.
    counts: StepCounts | None = None
    # Folder with a script that repeats a trial that failed.
    reproduction: str = ""
    # Flipped eager over a twin that was never compiled; 1 when noise explains the rest.
    flip_check: float | None = None
    # Where the compiled call was put: "call" for module.compile(), "forward" for its forward.
    form: str = "call"
    warnings: tuple[str, ...] = ()
    workload: WorkloadFacts | None = None
    environment: Environment | None = None
    cache_folder: str = ""
    cache_bytes: int = 0
    # Seconds of the user's own steps and of the compiler within wall_s: the rest is ours.
    user_s: float = 0.0
    wall_s: float = 0.0
    stdout_tail: str = ""
    stderr_tail: str = ""
    # Each rank of a trial of several; step times above are the slowest rank's.
    ranks: tuple[RankFacts, ...] = ()
    communication: Communication | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a running trial is doing. `detail` names the compile phase or the precision so far."""

    trial_id: str
    phase: Phase
    detail: str = ""
    step: int = 0
    elapsed_s: float = 0.0
    # The longest that this phase may still take.
    at_most_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """A mend that would bring something; `gain` in steps per second relative to now.

    `measured` says whether the gain comes from a trial with the mend; else it is an estimate.
    `lost_s` is the compile time that the cause took in the trial, `money_lost` what that costs at
    the plan's price over all its starts.
    """

    cause: str
    what: str
    file: str = ""
    line: int = 0
    gain: Interval | None = None
    measured: bool = False
    kind: FixKind = FixKind.GRAPH_BREAK
    code: str = ""
    link: str = ""
    count: int | None = None
    hits_per_step: float | None = None
    lost_s: float | None = None
    money_lost: float | None = None
    # Settings of the compiler that remove the cause, by name; empty: it takes an edit.
    options: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A configuration that was not advised, and why."""

    config: Config | None
    why_not: str
    total_s: Interval | None = None


class ShapePolicy(enum.StrEnum):
    """What to do about lengths that vary."""

    # Nothing varies: there is nothing to do.
    STATIC = "static"
    # Batches as they are, compiled as each name says.
    EAGER = "eager"
    AUTOMATIC = "automatic"
    DYNAMIC = "dynamic"
    MARK_DYNAMIC = "mark-dynamic"
    STATIC_PER_LENGTH = "static-per-length"
    # All batches padded to one length, or to the boundary of their bucket.
    PAD_TO_LONGEST = "pad-to-longest"
    BUCKETS = "buckets"
    # Samples sorted into buckets, batches padded to their longest sample.
    EAGER_BUCKETS = "eager-buckets"
    DYNAMIC_BUCKETS = "dynamic-buckets"
    MARK_DYNAMIC_BUCKETS = "mark-dynamic-buckets"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTotal:
    """What the plan takes under one shape policy: compiling `compiles` times is in `total_s`.

    `total_s` is None for a policy that was not measured.
    """

    policy: ShapePolicy
    total_s: Interval | None
    compile_s: float
    compiles: int
    boundaries: tuple[int, ...] = ()
    padding_share: float | None = None
    config: Config | None = None
    # Why it is not the one advised; empty for the one that is.
    why_not: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketTotal:
    """Seconds of the plan with so many static buckets, their compiles apart."""

    buckets: int
    steps_s: float
    compile_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """The shape policy advised, and what each of the others would take.

    `padding_share` is that under the policy, `padding_share_now` that of the batches as they are.
    """

    policy: ShapePolicy
    boundaries: tuple[int, ...] = ()
    padding_share: float | None = None
    padding_share_now: float | None = None
    policies: tuple[PolicyTotal, ...] = ()
    bucket_totals: tuple[BucketTotal, ...] = ()
    # Why there was nothing to decide; empty where policies were compared.
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """A step on all ranks of the plan, which are more than were tried: a model (models/scaling.py).

    `communication_share` is of the eager step, `step_s` of the configuration that the advice bills.
    """

    ranks: int
    world_size: int
    machines: int
    network: NetworkSource
    eager_step_s: Interval
    communication_share: Interval
    step_s: Interval | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOver:
    """The compile cache that the real run can start from."""

    path: str
    bytes: int
    # Names what is in it; empty where it was not kept.
    bundle_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The answer (design §8)."""

    advice_id: str
    created: str
    enable: bool
    target: str
    config: Config | None
    code: str
    speedup: Interval | None
    compile_s: Interval | None
    saved_s: Interval | None
    eager_total_s: Interval
    advised_total_s: Interval
    break_even_step: float | None
    p_saves: float
    reasons: tuple[str, ...]
    steps: float
    fixes: tuple[Fix, ...] = ()
    shapes: Shapes | None = None
    scaling: Scaling | None = None
    alternatives: tuple[Alternative, ...] = ()
    warnings: tuple[str, ...] = ()
    trials: tuple[Trial, ...] = ()
    workload: WorkloadFacts | None = None
    environment: Environment | None = None
    hand_over: HandOver | None = None
    gpu_hours_saved: float | None = None
    money_saved: float | None = None
    campaign_s: float = 0.0
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Why a compile gains what it gains: the causes alone, ranked by what a mend would bring."""

    target: str
    summary: tuple[str, ...]
    advice_id: str = ""
    created: str = ""
    config: Config | None = None
    speedup: Interval | None = None
    graphs: int | None = None
    coverage: float | None = None
    fixes: tuple[Fix, ...] = ()
    warnings: tuple[str, ...] = ()
    trials: tuple[Trial, ...] = ()
    workload: WorkloadFacts | None = None
    environment: Environment | None = None


R = TypeVar("R")


def encode(record: object) -> bytes:
    """Returns a record as UTF-8 JSON. NaN and infinity become null."""
    return msgspec.json.encode(record)


def decode(data: bytes, kind: type[R]) -> R:
    """Returns the record of type `kind` in `data`.

    Raises `AdvisorError` when `data` is not such a record: a result is never half read.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise AdvisorError(f"not a readable {kind.__name__}", str(error)) from error
