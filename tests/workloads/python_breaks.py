"""Workloads with Python that the compiler does not follow, and beside each the same model mended.

The second half of `causes`, whose models these share; at the end several of both in one.
"""

import threading

import torch
import torch.distributed as dist
import torch.nn.functional as F
from causes import (
    HUGE,
    WIDTH,
    Branch,
    BranchFree,
    BranchFreeLoop,
    BranchInLoop,
    BranchInTry,
    ByClamp,
    ByNumpy,
    ByScipy,
    ByTorch,
    Logging,
    Masked,
    Mix,
    Net,
    NoRead,
    NoTry,
    Printing,
    Registered,
    ScalarKept,
    ScalarRead,
    Unregistered,
    Warns,
    Weighted,
    drawn,
    workload,
)
from torch import nn


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


class Stepwise(Net):
    """The same weights, one time step after the other in operators of torch."""

    def __init__(self):
        super().__init__()
        lstm = nn.LSTM(WIDTH, 16, batch_first=True)
        self.enter, self.bias_enter = lstm.weight_ih_l0, lstm.bias_ih_l0
        self.recur, self.bias_recur = lstm.weight_hh_l0, lstm.bias_hh_l0

    def forward(self, x):
        x = self.before(x)
        return self.after(x) + self.unrolled(x.view(-1, 4, WIDTH)).mean()

    def unrolled(self, sequence):
        state = cell = sequence.new_zeros(sequence.shape[0], self.recur.shape[1])
        states = []
        for x in sequence.unbind(1):
            gates = F.linear(x, self.enter, self.bias_enter)
            gates = gates + F.linear(state, self.recur, self.bias_recur)
            enter, forget, new, leave = gates.chunk(4, 1)
            cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
            state = leave.sigmoid() * cell.tanh()
            states.append(state)
        return torch.stack(states, 1)


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


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = Mix()

    def forward(self, x):
        return 0.5 * (x + self.mix(x))


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

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


# Few rows: what is found in these does not depend on how long a step takes.
FEW = drawn(32, WIDTH)
values = workload(lambda: Chain(Branch, Masked, Unregistered), FEW)
given_up = workload(lambda: Chain(BranchInLoop, BranchInTry, SkippedFrame), FEW)
telling = workload(lambda: Chain(Printing, Logging, Warns), FEW)
foreign = workload(lambda: Chain(ByScipy, ByNumpy, Locked), FEW)
marked = workload(lambda: Chain(Hooked, Disabled, Clipped), FEW)
settable = workload(lambda: Chain(ScalarRead, Masked, Recurrent), FEW)
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
    ),
    FEW,
)
