"""The lines of code to paste, with the model's own attribute names."""

from __future__ import annotations

import json

from advisor.profiler import settings
from advisor.profiler.lengths import padded
from advisor.profiler.records import (
    Blocks,
    Config,
    Dynamic,
    Lengths,
    Mode,
    Order,
    Scope,
    ShapePolicy,
    WorkloadFacts,
    WorkloadSpec,
    Wrapper,
)

_DYNAMIC = {Dynamic.TRUE: "True", Dynamic.FALSE: "False"}


def code(config: Config | None, facts: WorkloadFacts, form: str = "call") -> str:
    """Returns whole lines to paste after the model was moved to its device; "" for eager.

    `form` is "forward" where the model's forward is what can be compiled in place (torch's own
    classes). Raises `PlanError` for an option whose name is not one of torch's configuration.
    """
    if config is None:
        return ""
    arguments = _arguments(config)
    set_first = settings.lines(config.options)
    if config.scope is Scope.REGIONAL:
        body = [line for blocks in facts.blocks for line in _loop(blocks, arguments, form)]
    else:
        body = _compile("model", arguments, facts.torch_class or form == "forward")
    modules = set(settings.modules(config.options))
    if any("torch." in line for line in body) and not any(m.startswith("torch.") for m in modules):
        modules.add("torch")
    # As isort has them: the standard library, then torch.
    imports = [f"import {name}" for name in sorted(modules, key=lambda m: ("torch" in m, m))]
    return "\n".join([*imports, *([""] if imports else []), *set_first, *body])


def spread(config: Config, workload: WorkloadSpec, facts: WorkloadFacts, form: str = "call") -> str:
    """Returns the lines that wrap the model for its ranks and compile it, in the order advised.

    Compiling in place keeps the names in state dicts; DDP puts `module.` before them.
    """
    compiling = code(config, facts, form)
    wrapping = _wrapping(workload, facts)
    if not wrapping:
        return compiling
    # DDP hides the blocks behind `.module`, and leaves them as they are: they are compiled before.
    inside = workload.wrapper is Wrapper.DDP and config.scope is Scope.REGIONAL
    if config.order is Order.COMPILE_FIRST or inside:
        return f"{compiling}\n\n{wrapping}"
    return f"{wrapping}\n\n{compiling}"


def _wrapping(workload: WorkloadSpec, facts: WorkloadFacts) -> str:
    """Returns the lines that spread a model over its ranks; "" where the function does that."""
    kinds = ", ".join(f"type({_attribute(blocks.paths[0])})" for blocks in facts.blocks)
    lines = []
    if workload.checkpointing:
        lines.append(_CHECKPOINTING.format(kinds=kinds))
    if workload.wrapper is Wrapper.DDP:
        lines.append(_DDP)
    elif workload.wrapper is Wrapper.FSDP1:
        policy = f", auto_wrap_policy=ModuleWrapPolicy({{{kinds}}})" if kinds else ""
        lines.append((_FSDP1 if kinds else _FSDP1_WHOLE).format(policy=policy))
    elif workload.wrapper is Wrapper.FSDP2:
        shards = [line for blocks in facts.blocks for line in _each(blocks, "fully_shard(block)")]
        lines.append(_FSDP2.format(shards="".join(f"{line}\n" for line in shards)))
    return "\n".join(lines)


_DDP = """\
from torch.nn.parallel import DistributedDataParallel

model = DistributedDataParallel(model)  # on a GPU: device_ids=[local_rank]"""
_FSDP1 = """\
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

model = FullyShardedDataParallel(model, use_orig_params=True{policy})
# The optimizer is made after this, of model.parameters()."""
_FSDP1_WHOLE = """\
from torch.distributed.fsdp import FullyShardedDataParallel

model = FullyShardedDataParallel(model, use_orig_params=True{policy})
# The optimizer is made after this, of model.parameters()."""
_FSDP2 = """\
from torch.distributed.fsdp import fully_shard

{shards}fully_shard(model)
# The optimizer is made after this, of model.parameters()."""
_CHECKPOINTING = """\
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)

apply_activation_checkpointing(model, check_fn=lambda module: type(module) in ({kinds},))"""


def batches(policy: ShapePolicy, boundaries: tuple[int, ...], data: Lengths | None) -> str:
    """Returns the lines that make the batches of a shape policy; "" where they stay as they are.

    `lengths`, `dataset` and `tokenizer` are the names that the person has for theirs.
    """
    if data is None:
        return ""
    if policy in (ShapePolicy.MARK_DYNAMIC, ShapePolicy.MARK_DYNAMIC_BUCKETS):
        mark = _MARK.format(low=max(2, data.values[0]), high=data.values[-1])
    else:
        mark = ""
    if policy is ShapePolicy.PAD_TO_LONGEST:
        return _PAD_ONLY.format(boundaries=(padded(data.values[-1], data),))
    if not boundaries:
        return mark
    to_boundary = policy is ShapePolicy.BUCKETS
    if data.whole_batches:
        return _PAD_ONLY.format(boundaries=boundaries)
    size = (
        f"tokens_per_batch={data.tokens_per_batch}"
        if data.tokens_per_batch is not None
        else f"batch_size={data.batch_size or 1}"
    )
    drop = ", drop_last=True" if data.drop_last else ""
    lines = (_BUCKETS if to_boundary else _SORTED).format(
        boundaries=boundaries, size=size, drop=drop
    )
    return "\n".join(part for part in (lines, mark) if part)


_BUCKETS = """\
from advisor.buckets import BucketBatchSampler, PadToBoundary

boundaries = {boundaries}
sampler = BucketBatchSampler(lengths, boundaries, {size}{drop})  # lengths: one for each sample
collate = PadToBoundary(boundaries, tokenizer=tokenizer)
loader = torch.utils.data.DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)"""
_SORTED = """\
from advisor.buckets import BucketBatchSampler

boundaries = {boundaries}
sampler = BucketBatchSampler(lengths, boundaries, {size}{drop})  # lengths: one for each sample
# The collator stays yours: it pads each batch to its longest sample.
loader = torch.utils.data.DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)"""
_PAD_ONLY = """\
from advisor.buckets import PadToBoundary

# In place of your collator: each batch is padded to the first of these lengths that holds it.
collate = PadToBoundary({boundaries}, tokenizer=tokenizer)"""
_MARK = """\
# For each tensor of a batch that has the length as its dimension 1, before the step:
torch._dynamo.mark_dynamic(tensor, 1, min={low}, max={high})"""


def _arguments(config: Config) -> str:
    named = [
        ("mode", _text(config.mode.value) if config.mode is not Mode.DEFAULT else ""),
        ("dynamic", _DYNAMIC.get(config.dynamic, "")),
        ("fullgraph", "True" if config.fullgraph else ""),
        ("backend", _text(config.backend) if config.backend != "inductor" else ""),
    ]
    return ", ".join(f"{name}={value}" for name, value in named if value)


def _compile(target: str, arguments: str, by_forward: bool) -> list[str]:
    if not by_forward:
        return [f"{target}.compile({arguments})"]
    inner = ", ".join(part for part in (f"{target}.forward", arguments) if part)
    return [f"{target}.forward = torch.compile({inner})"]


def _loop(blocks: Blocks, arguments: str, form: str) -> list[str]:
    # Compiling a torch class's call captures nothing; compiling its forward does (design §5.3).
    by_forward = form == "forward" or blocks.module_class.startswith("torch.nn")
    return _each(blocks, *_compile("block", arguments, by_forward))


def _each(blocks: Blocks, *body: str) -> list[str]:
    """Returns a loop over the blocks with these lines in it."""
    if blocks.container is not None:
        head = [f"for block in {_attribute(blocks.container)}:"]
    else:
        head = ["for block in (", *(f"    {_attribute(p)}," for p in blocks.paths), "):"]
    return [*head, *(f"    {line}" for line in body)]


def _attribute(path: str) -> str:
    """Returns the expression for a submodule; `get_submodule` where dots do not spell Python."""
    if not path:
        return "model"
    if settings.is_dotted_name(path):
        return f"model.{path}"
    return f"model.get_submodule({_text(path)})"


def _text(value: str) -> str:
    """Returns a string literal in double quotes: JSON's are Python's too."""
    return json.dumps(value, ensure_ascii=False)
