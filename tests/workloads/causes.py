"""A workload for each cause of a graph break, and beside it the same model mended.

Here: values that leave the graph, what is told, and code that is not torch. In `python_breaks`:
Python that the compiler does not follow.

All of them compute features by two runs of elementwise operators, which a compiler gains most from;
what ends the graph stands between the two. `NAME_mended` computes the same as `NAME`.
"""

import logging
import warnings

import numpy as np
import scipy.special
import torch
from torch import nn

# Two sizes: equal ones would be taken for one, and with a static width no other number of rows
# would do.
ROWS, WIDTH = 320, 192
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


class Warns(Net):
    def forward(self, x):
        x = self.before(x)
        warnings.warn("features are not normalised", stacklevel=1)
        return self.after(x)


printing = workload(Printing)
printing_mended = workload(Net)
logs = workload(Logging)
logs_mended = workload(Net)
warns = workload(Warns)
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
