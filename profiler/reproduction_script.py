"""The script that repeats a trial: torch and the person's own file are all that it needs.

The pieces below are the protocol of a trial (`measurement`) without its clocks. They repeat what
other modules do on purpose: the script is to be read, changed and sent to PyTorch by someone who
has none of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from advisor.profiler import settings
from advisor.profiler.records import (
    Blocks,
    Config,
    Phase,
    Scope,
    Trial,
    TrialSpec,
    TrialStatus,
)
from advisor.profiler.units import config_name, printable

_IMPORTS = """
import atexit
import copy
import itertools
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Mapping

# Set before torch is imported: an empty compile cache, as the trial had.
if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)

import torch
"""

_SEED = """

def seed_everything(seed):
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def device():
    if DEVICE == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    return torch.device(DEVICE)
"""

_BUILD_FROM_FILE = """

def load():
    import importlib.util

    sys.path.insert(0, CWD)
    sys.path.insert(0, os.path.dirname(FILE))
    sys.argv = [FILE]
    name = os.path.splitext(os.path.basename(FILE))[0]
    name = name if name not in sys.modules else f"workload_{name}"
    spec = importlib.util.spec_from_file_location(name, FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return getattr(module, FUNCTION)
"""

_BUILD_FROM_MODULE = """

def load():
    import importlib

    sys.path.insert(0, CWD)
    return getattr(importlib.import_module(MODULE), FUNCTION)
"""

_BUILD_FROM_PRESET = """

def load():
    # The preset is built by the advisor itself, which must be installed.
    from advisor.profiler.records import WorkloadSpec
    from advisor.profiler.workload import load as load_preset

    return load_preset(WorkloadSpec(**WORKLOAD))
"""

_JOB = '''

class Job:
    """The training job: its model, its batches, and one optimizer step."""

    def __init__(self, made):
        def of(key):
            return made.get(key) if isinstance(made, Mapping) else getattr(made, key, None)

        self.model, self.source = of("model"), of("batches")
        self.loss = of("loss") or (lambda model, batch: model(**batch).loss)
        self.optimizer = of("optimizer") or torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.own_step = of("step")
        self.state = {name: tensor.detach().clone() for name, tensor in self.tensors()}
        self.optimizer_state = copy.deepcopy(self.optimizer.state_dict())
        self.numbers = [(module, numbers_of(module)) for module in self.model.modules()]

    def tensors(self):
        return [*self.model.named_parameters(), *self.model.named_buffers()]

    def restore(self):
        """Puts weights, buffers and optimizer back to where the training starts."""
        with torch.no_grad():
            for name, tensor in self.tensors():
                if name in self.state:
                    tensor.copy_(self.state[name])
        self.optimizer.load_state_dict(copy.deepcopy(self.optimizer_state))
        self.optimizer.zero_grad(set_to_none=True)
        for module, numbers in self.numbers:
            module.__dict__.update(numbers)

    def batches(self):
        """Yields the batches of the training in their order, each when its step comes."""
        if callable(self.source):
            for step in itertools.count():
                yield moved(self.source(step), device())
        kept = []
        iterator = iter(self.source)
        one_shot = iterator is self.source
        while True:
            for batch in iterator:
                if one_shot:
                    kept.append(batch)
                yield moved(batch, device())
            # A one-shot iterator cannot be restarted: go round what it gave.
            iterator = iter(kept if one_shot else self.source)

    def step(self, batch):
        if self.own_step is not None:
            return self.own_step(self.model, batch, self.optimizer)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(self.model, batch)
        loss.backward()
        self.optimizer.step()
        return loss

    def run(self, batches):
        """Returns the losses of these steps, and the gradients that the first of them left."""
        losses, gradients = [], None
        for batch in batches:
            loss = self.step(batch)
            if gradients is None:
                gradients = {
                    name: p.grad.detach().to_dense().to("cpu", copy=True)
                    for name, p in self.model.named_parameters()
                    if p.grad is not None
                }
            if isinstance(loss, torch.Tensor):
                loss = loss.detach()
            losses.append(float("nan") if loss is None else float(loss))
        return losses, gradients


def numbers_of(module):
    """Returns the plain numbers on a module, such as a counter of its calls."""
    return {
        name: value
        for name, value in vars(module).items()
        if type(value) in (int, float) and not name.startswith("_")
    }


def moved(batch, device):
    if isinstance(batch, (list, tuple)):
        parts = [moved(part, device) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    if type(batch) is dict:
        return {key: moved(value, device) for key, value in batch.items()}
    return batch.to(device) if hasattr(batch, "to") else batch
'''

_MODEL = """

def modules_to_compile(model):
    return [model]
"""

_KNOWN_BLOCKS = '''

def modules_to_compile(model):
    """Returns the repeated blocks of the model."""
    return [model.get_submodule(path) for path in BLOCKS]
'''

_FIND_BLOCKS = '''

def modules_to_compile(model):
    """Returns the outermost repeated blocks: same class, same names and shapes of parameters."""
    whole = sum(p.numel() for p in model.parameters()) or 1
    groups = {}
    for path, module in model.named_modules():
        if path and any(True for _ in module.children()):
            shapes = tuple((n, tuple(p.shape)) for n, p in module.named_parameters())
            groups.setdefault((type(module), shapes), []).append((path, module))
    found, taken = [], set()
    for members in sorted(groups.values(), key=lambda group: group[0][0].count(".")):
        free = [(p, m) for p, m in members if not any((p + ".").startswith(t + ".") for t in taken)]
        held = sum(sum(p.numel() for p in module.parameters()) for _, module in free)
        if len(free) >= 2 and held >= 0.05 * whole:
            found += [module for _, module in free]
            taken.update(path for path, _ in free)
    return found
'''

_COMPILE = """

def compile_in_place(model):
    for module in modules_to_compile(model):
        if type(module).__module__.startswith("torch."):
            # Compiling the call of a class of torch's own captures no graph.
            module.forward = torch.compile(module.forward, **ARGUMENTS)
        else:
            module.compile(**ARGUMENTS)
"""

_DISTANCE = '''

def distance(first, second):
    """Returns |first - second| / |first| of two steps' gradients."""
    whole = apart = 0.0
    for name in {**first, **second}:
        present = first.get(name, second.get(name))
        a = first.get(name, torch.zeros_like(present)).double()
        b = second.get(name, torch.zeros_like(present)).double()
        whole += float(a.abs().square().sum())
        apart += float((a - b).abs().square().sum())
    return (apart / whole) ** 0.5 if whole else 0.0
'''

_MAIN_HEAD = """

def main():
    os.chdir(CWD)
    seed_everything(SEED)
    job = Job(load()(device()))
    batches = job.batches()
"""

_MAIN_EAGER = """    for step, batch in enumerate(itertools.islice(batches, STEPS)):
        print(f"eager, step {step}: {job.run([batch])[0][0]:.6g}", flush=True)
    print("no error in these steps")
"""

_MAIN_FAILS = """    first = next(batches)
    print("eager, 3 steps on the first batch:", job.run([first] * 3)[0], flush=True)
    job.restore()
    seed_everything(SEED)
    compile_in_place(job.model)
    for step, batch in enumerate(itertools.chain([first], itertools.islice(batches, STEPS - 1))):
        print(f"compiled, step {step}: {job.run([batch])[0][0]:.6g}", flush=True)
    print("no error in these steps")
"""

_MAIN_DISAGREES = """    taken = list(itertools.islice(batches, STEPS))
    compared = taken[:COMPARED]
    seed_everything(SEED)
    eager, eager_gradients = job.run(compared)
    job.restore()
    seed_everything(SEED)
    compile_in_place(job.model)
    # Everything that is compiled once more (another length, a number that changes) is now.
    compiled, _ = job.run(taken)
    job.restore()
    seed_everything(SEED)
    again, gradients = job.run(compared)
    print(f"{'step':>4}  {'eager':>14}  {'compiled':>14}  {'compiled again':>14}")
    for step, row in enumerate(zip(eager, compiled, again)):
        print(f"{step:>4}  " + "  ".join(f"{loss:>14.8g}" for loss in row))
    apart = distance(eager_gradients, gradients)
    print(f"gradients of step 0, |compiled again - eager| / |eager|: {apart:.3g}")
"""

_MAIN_TAIL = """

if __name__ == "__main__":
    main()
"""

# Steps until a cold phase has seen everything, and until the measured steps have ended, at least;
# a script that fails as its trial did ends with its error before.
_COLD_STEPS = 65
_MEASURED_STEPS = 300
_DISAGREEING_STEPS = 16


def script(trial: Trial, spec: TrialSpec, blocks: Sequence[Blocks] = ()) -> str:
    """Returns a script that does what the trial did, and shows the same error or difference.

    `blocks` are the model's repeated blocks when they are known; else the script looks for them.
    """
    regional = spec.config is not None and spec.config.scope is Scope.REGIONAL
    pieces = [_heading(trial, spec), _IMPORTS, _constants(trial, spec, blocks if regional else ())]
    pieces += [_SEED, _loader(spec), _JOB]
    if spec.config is None:
        main = _MAIN_EAGER
    else:
        find = _MODEL
        if regional:
            find = _KNOWN_BLOCKS if blocks else _FIND_BLOCKS
        pieces += [find, _options(spec.config), _COMPILE]
        main = _MAIN_FAILS
        if trial.status is TrialStatus.DISAGREES:
            pieces.append(_DISTANCE)
            main = _MAIN_DISAGREES
        if spec.config.options:
            call = "    compile_in_place(job.model)\n"
            main = main.replace(call, "    set_options()\n" + call)
    return "".join([*pieces, _MAIN_HEAD, main, _MAIN_TAIL])


def _heading(trial: Trial, spec: TrialSpec) -> str:
    found = trial.failure.message if trial.failure else trial.status.value
    lines = [
        f"Repeats trial {trial.trial_id} of {spec.workload.target}: {config_name(spec.config)}.",
        f"It ended with {trial.status.value}: {found}",
        "Run it with: python reproduce.py",
    ]
    return "".join(f"# {line}\n" for text in lines for line in printable(text).splitlines())


def _constants(trial: Trial, spec: TrialSpec, blocks: Sequence[Blocks]) -> str:
    return "\n" + "".join(f"{name} = {value!r}\n" for name, value in _values(trial, spec, blocks))


def _values(
    trial: Trial, spec: TrialSpec, blocks: Sequence[Blocks]
) -> Iterator[tuple[str, object]]:
    """Yields the names and values that differ from trial to trial."""
    workload, config = spec.workload, spec.config
    place, _, function = workload.target.rpartition(":")
    yield "CWD", workload.cwd
    if workload.target.startswith("hf:"):
        yield "WORKLOAD", msgspec.to_builtins(workload)
    else:
        if _is_file(spec):
            yield "FILE", str(Path(workload.cwd, place).resolve())
        else:
            yield "MODULE", place
        yield "FUNCTION", function
    yield "DEVICE", trial.environment.device if trial.environment else workload.device
    yield "SEED", workload.seed
    if config is not None:
        yield "ARGUMENTS", settings.compile_arguments(config)
    if blocks:
        yield "BLOCKS", [path for group in blocks for path in group.paths]
    if trial.status is TrialStatus.DISAGREES:
        yield "COMPARED", spec.measuring.numerics_steps
        yield "STEPS", max(_DISAGREEING_STEPS, spec.measuring.numerics_steps)
    else:
        later = trial.phase_reached in (Phase.STEADY, Phase.NUMERICS, Phase.DIAGNOSE)
        yield "STEPS", _MEASURED_STEPS if later else _COLD_STEPS


def _options(config: Config) -> str:
    """Returns the function that sets a configuration's options; nothing where there are none."""
    if not config.options:
        return ""
    imports = [f"import {name}" for name in settings.modules(config.options)]
    body = [*imports, "", *settings.lines(config.options)]
    return "\n\ndef set_options():\n" + "".join(f"    {line}".rstrip() + "\n" for line in body)


def _is_file(spec: TrialSpec) -> bool:
    place = spec.workload.target.rpartition(":")[0]
    return place.endswith(".py") or Path(spec.workload.cwd, place).exists()


def _loader(spec: TrialSpec) -> str:
    if spec.workload.target.startswith("hf:"):
        return _BUILD_FROM_PRESET
    return _BUILD_FROM_FILE if _is_file(spec) else _BUILD_FROM_MODULE
