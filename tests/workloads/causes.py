"""A workload for each cause of a graph break, and beside it the same model mended.

All of them compute features by two runs of elementwise operators, which a compiler gains most from;
what ends the graph stands between the two. `NAME_mended` computes the same as `NAME`.
"""

import logging
import threading
import warnings

import numpy as np
import scipy.special
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

ROWS, WIDTH = 256, 256
# A rare event: a value that the features never reach.
HUGE = 1e6
logger = logging.getLogger(__name__)


class Mix(nn.Module):
    """Elementwise operators: what a fusing compiler gains most from."""

    def __init__(self, width=WIDTH, rounds=3):
        super().__init__()
        self.rounds = rounds
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.shift = nn.Parameter(torch.linspace(-0.5, 0.5, width))

    def forward(self, x):
        for _ in range(self.rounds):
            x = x * torch.sigmoid(x * self.scale + self.shift) + 0.1 * torch.tanh(x - self.shift)
        return x


class Net(nn.Module):
    """Two runs of elementwise operators, and room between them."""

    def __init__(self):
        super().__init__()
        self.before, self.after = Mix(), Mix()

    def forward(self, x):
        return self.after(self.before(x))


def drawn(*shape):
    """Returns batches of random numbers, the same ones for the same step."""
    return lambda step: torch.randn(*shape, generator=torch.Generator().manual_seed(step))


def squared(model, batch):
    return model(batch).pow(2).mean()


def workload(kind, batches=None, loss=squared):
    """Returns a workload function for a kind of model."""

    def build(device):
        torch.manual_seed(0)
        model = kind().to(device)
        return {
            "model": model,
            "batches": batches or drawn(ROWS, WIDTH),
            "loss": loss,
            "optimizer": torch.optim.SGD(model.parameters(), lr=1e-3),
        }

    return build


class ScalarRead(Net):
    def forward(self, x):
        x = self.before(x)
        peak = x.detach().abs().max().item()
        return self.after(x / (1.0 + peak))


class ScalarKept(Net):
    def forward(self, x):
        x = self.before(x)
        peak = x.detach().abs().max()
        return self.after(x / (1.0 + peak))


scalar_read = workload(ScalarRead)
scalar_read_mended = workload(ScalarKept)


class ThreeReads(Net):
    """Three ways to read a value, each in its own line."""

    def forward(self, x):
        x = self.before(x)
        size = float(x.detach().abs().mean())
        most = int(x.detach().argmax())
        low, high = x.detach().aminmax()
        x = x / (1.0 + size) + most * 1e-9
        return self.after(x) + sum(torch.stack([low, high]).tolist()) * 1e-9


class NoRead(Net):
    def forward(self, x):
        x = self.before(x)
        size = x.detach().abs().mean()
        most = x.detach().argmax()
        low, high = x.detach().aminmax()
        x = x / (1.0 + size) + most * 1e-9
        return self.after(x) + torch.stack([low, high]).sum() * 1e-9


three_reads = workload(ThreeReads)
three_reads_mended = workload(NoRead)


class Branch(Net):
    def forward(self, x):
        x = self.before(x)
        if x.abs().max() > HUGE:
            x = x / HUGE
        return self.after(x)


class BranchFree(Net):
    def forward(self, x):
        x = self.before(x)
        x = torch.where(x.abs().max() > HUGE, x / HUGE, x)
        return self.after(x)


branch = workload(Branch)
branch_mended = workload(BranchFree)


class BranchInLoop(Mix):
    """The compiler cannot split a loop: it gives the whole frame up."""

    def forward(self, x):
        for _ in range(6):
            x = x * torch.sigmoid(x * self.scale + self.shift) + 0.1 * torch.tanh(x - self.shift)
            if x.abs().max() > HUGE:
                x = x / HUGE
        return x


class BranchFreeLoop(Mix):
    def forward(self, x):
        for _ in range(6):
            x = x * torch.sigmoid(x * self.scale + self.shift) + 0.1 * torch.tanh(x - self.shift)
            x = torch.where(x.abs().max() > HUGE, x / HUGE, x)
        return x


branch_in_loop = workload(BranchInLoop)
branch_in_loop_mended = workload(BranchFreeLoop)


class BranchInTry(Mix):
    """A check within try: what follows it stays with Python."""

    def forward(self, x):
        try:
            x = x * torch.sigmoid(x * self.scale + self.shift)
            if not torch.isfinite(x).all():
                raise FloatingPointError("the features are no numbers")
        except FloatingPointError:
            x = torch.zeros_like(x)
        for _ in range(5):
            x = x * torch.sigmoid(x * self.scale + self.shift) + 0.1 * torch.tanh(x - self.shift)
        return x


class NoTry(Mix):
    def forward(self, x):
        x = x * torch.sigmoid(x * self.scale + self.shift)
        x = torch.where(torch.isfinite(x).all(), x, torch.zeros_like(x))
        for _ in range(5):
            x = x * torch.sigmoid(x * self.scale + self.shift) + 0.1 * torch.tanh(x - self.shift)
        return x


branch_in_try = workload(BranchInTry)
branch_in_try_mended = workload(NoTry)


class Masked(Net):
    """Keeps the positive features only: how many there are depends on the data."""

    def forward(self, x):
        x = self.before(x)
        kept = x[x > 0]
        return self.after(x) + 0.01 * kept.tanh().mean()


class Weighted(Net):
    def forward(self, x):
        x = self.before(x)
        mask = (x > 0).to(x.dtype)
        return self.after(x) + 0.01 * (x.tanh() * mask).sum() / mask.sum()


masked = workload(Masked)
masked_mended = workload(Weighted)


class Printing(Net):
    def forward(self, x):
        x = self.before(x)
        print("mean feature", x.mean())
        return self.after(x)


class Logging(Net):
    def forward(self, x):
        x = self.before(x)
        logger.info("features of %d rows", x.shape[0])
        return self.after(x)


class Warning_(Net):
    def forward(self, x):
        x = self.before(x)
        warnings.warn("features are not normalised", stacklevel=1)
        return self.after(x)


printing = workload(Printing)
printing_mended = workload(Net)
logs = workload(Logging)
logs_mended = workload(Net)
warns = workload(Warning_)
warns_mended = workload(Net)


_LIBRARY = torch.library.Library("causes", "DEF")
_LIBRARY.define("soften(Tensor x) -> Tensor")
_LIBRARY.impl("soften", lambda x: x / (1 + x.abs()), "CPU")


@torch.library.custom_op("causes::soften_known", mutates_args=())
def soften_known(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + x.abs())


@torch.library.custom_op("causes::soften_half_known", mutates_args=())
def soften_half_known(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + x.abs())


soften_known.register_fake(torch.empty_like)


class Unregistered(Net):
    def forward(self, x):
        x = self.before(x)
        gate = torch.ops.causes.soften(x.detach())
        return self.after(x * gate)


class Registered(Net):
    def forward(self, x):
        x = self.before(x)
        gate = torch.ops.causes.soften_known(x.detach())
        return self.after(x * gate)


class HalfRegistered(Net):
    """A custom operator without a fake implementation: the compiler raises."""

    def forward(self, x):
        x = self.before(x)
        gate = torch.ops.causes.soften_half_known(x.detach())
        return self.after(x * gate)


half_registered = workload(HalfRegistered)
half_registered_mended = workload(Registered)
unregistered = workload(Unregistered)
unregistered_mended = workload(Registered)


class ByScipy(Net):
    def forward(self, x):
        x = self.before(x)
        gate = scipy.special.erf(x.detach().numpy())
        return self.after(x * torch.from_numpy(gate))


class ByTorch(Net):
    def forward(self, x):
        x = self.before(x)
        gate = torch.erf(x.detach())
        return self.after(x * gate)


by_scipy = workload(ByScipy)
by_scipy_mended = workload(ByTorch)


class ByNumpy(Net):
    """A function of NumPy that the compiler has no translation for."""

    def forward(self, x):
        x = self.before(x)
        gate = np.interp(x.detach().numpy(), [-2.0, 0.0, 2.0], [0.0, 1.0, 0.0])
        return self.after(x * torch.from_numpy(gate).float())


class ByClamp(Net):
    def forward(self, x):
        x = self.before(x)
        gate = (1 - x.detach().abs() / 2).clamp(min=0.0)
        return self.after(x * gate)


by_numpy = workload(ByNumpy)
by_numpy_mended = workload(ByClamp)


class Locked(Net):
    """A lock is a context manager that the compiler does not know."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()

    def forward(self, x):
        x = self.before(x)
        with self.lock:
            self.rows = x.shape[0]
        return self.after(x)


class Unlocked(Net):
    def forward(self, x):
        x = self.before(x)
        self.rows = x.shape[0]
        return self.after(x)


locked = workload(Locked)
locked_mended = workload(Unlocked)


class Recurrent(Net):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 16, batch_first=True)

    def forward(self, x):
        x = self.before(x)
        states, _ = self.lstm(x.view(-1, 4, WIDTH))
        return self.after(x) + states.mean()


class Stepwise(Recurrent):
    """The same weights, one time step after the other in operators of torch."""

    def forward(self, x):
        x = self.before(x)
        states, _ = self.unrolled(x.view(-1, 4, WIDTH))
        return self.after(x) + states.mean()

    def unrolled(self, sequence):
        lstm = self.lstm
        state = cell = sequence.new_zeros(sequence.shape[0], lstm.hidden_size)
        states = []
        for x in sequence.unbind(1):
            gates = F.linear(x, lstm.weight_ih_l0, lstm.bias_ih_l0)
            gates = gates + F.linear(state, lstm.weight_hh_l0, lstm.bias_hh_l0)
            enter, forget, new, leave = gates.chunk(4, 1)
            cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
            state = leave.sigmoid() * cell.tanh()
            states.append(state)
        return torch.stack(states, 1), (state, cell)


recurrent = workload(Recurrent)
recurrent_mended = workload(Stepwise)


class Clip(torch.autograd.Function):
    """Clips its input; its gradient is made smaller where it explodes."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(-1.0, 1.0)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        if gradient.abs().max() > HUGE:
            gradient = gradient / HUGE
        return gradient * (x.abs() <= 1.0)


class ClipBranchFree(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(-1.0, 1.0)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        gradient = torch.where(gradient.abs().max() > HUGE, gradient / HUGE, gradient)
        return gradient * (x.abs() <= 1.0)


class Clipped(Net):
    clip = Clip

    def forward(self, x):
        x = self.before(x)
        x = self.clip.apply(x)
        return self.after(x)


class ClippedBranchFree(Clipped):
    clip = ClipBranchFree


autograd_function = workload(Clipped)
autograd_function_mended = workload(ClippedBranchFree)


def _clamped(gradient):
    return gradient.clamp(-1e-3, 1e-3)


class Hooked(Net):
    """The gradient is clamped by a backward hook of a module."""

    def __init__(self):
        super().__init__()
        self.after.register_full_backward_hook(lambda module, inner, outer: (_clamped(inner[0]),))

    def forward(self, x):
        x = self.before(x)
        return self.after(x)


class TensorHooked(Net):
    """The same by a hook of the tensor, which the compiler takes into the graph."""

    def forward(self, x):
        x = self.before(x)
        x.register_hook(_clamped)
        return self.after(x)


hooked = workload(Hooked)
hooked_mended = workload(TensorHooked)


@torch.compiler.disable
def left_alone(x):
    return x / (1 + x.abs())


class Disabled(Net):
    def forward(self, x):
        x = self.before(x)
        x = left_alone(x)
        return self.after(x)


class Enabled(Net):
    def forward(self, x):
        x = self.before(x)
        x = x / (1 + x.abs())
        return self.after(x)


disabled = workload(Disabled)
disabled_mended = workload(Enabled)


class SkippedFrame(Net):
    """Asks the compiler to skip the whole frame."""

    def forward(self, x):
        for _ in range(3):
            x = x * torch.sigmoid(x * self.before.scale) + 0.1 * torch.tanh(x)
        torch._dynamo.skip_frame("not this one")
        for _ in range(3):
            x = x * torch.sigmoid(x * self.after.scale) + 0.1 * torch.tanh(x)
        return x


class TakenFrame(Net):
    def forward(self, x):
        for _ in range(3):
            x = x * torch.sigmoid(x * self.before.scale) + 0.1 * torch.tanh(x)
        for _ in range(3):
            x = x * torch.sigmoid(x * self.after.scale) + 0.1 * torch.tanh(x)
        return x


skipped_frame = workload(SkippedFrame)
skipped_frame_mended = workload(TakenFrame)


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Mix() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def sharded(device):
    """FSDP2 on one process; compiled by its blocks (scope regional) it has no break."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if not dist.is_initialized():
        # Keeps its store in this process: no port to be free.
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    job = workload(Blocks)(device)
    mesh = init_device_mesh("cpu", (1,))
    for block in job["model"].blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(job["model"], mesh=mesh)
    return {**job, "optimizer": torch.optim.SGD(job["model"].parameters(), lr=1e-3)}


class Chain(nn.Module):
    """Several models one after the other, each in a line of its own."""

    def __init__(self, *kinds):
        super().__init__()
        self.parts = nn.ModuleList(kind() for kind in kinds)

    def forward(self, x):
        first, second, third = self.parts
        x = first(x)
        x = second(x)
        return third(x)


class Loop(nn.Module):
    """Any number of models: for those that break nowhere."""

    def __init__(self, *kinds):
        super().__init__()
        self.parts = nn.ModuleList(kind() for kind in kinds)

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x


telling = workload(lambda: Chain(Printing, Logging, Warning_))
foreign = workload(lambda: Chain(ByScipy, ByNumpy, Locked))
marked = workload(lambda: Chain(Hooked, Disabled, Recurrent))
all_mended = workload(
    lambda: Loop(
        ScalarKept,
        NoRead,
        BranchFree,
        BranchFreeLoop,
        NoTry,
        Weighted,
        Net,
        Registered,
        ByTorch,
        ByClamp,
        Unlocked,
        Stepwise,
        ClippedBranchFree,
        TensorHooked,
        Enabled,
        TakenFrame,
    )
)
