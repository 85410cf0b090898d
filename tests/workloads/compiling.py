"""Small workloads that compile well, badly, or not at all, one function each."""

import torch
import torch.nn.functional as F
from torch import nn


def _batches(*shape):
    return lambda step: torch.randn(*shape, generator=torch.Generator().manual_seed(step))


def _squared(model, batch):
    return model(batch).pow(2).mean()


class Gate(nn.Module):
    """Many elementwise operators: what a fusing compiler gains most from."""

    def __init__(self, width, depth=4):
        super().__init__()
        self.depth = depth
        self.scale, self.shift = nn.Parameter(torch.randn(width)), nn.Parameter(torch.randn(width))

    def forward(self, x):
        for _ in range(self.depth):
            x = x * torch.sigmoid(x * self.scale + self.shift) + 0.1 * torch.tanh(x - self.shift)
        return x


class Stack(nn.Module):
    """Four equal pairs of gates in a list: repeated blocks."""

    def __init__(self, width):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(Gate(width), Gate(width)) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def gate(device):
    return {"model": Gate(128).to(device), "batches": _batches(256, 128), "loss": _squared}


def stack(device):
    return {"model": Stack(64).to(device), "batches": _batches(128, 64), "loss": _squared}


def torch_class(device):
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8)).to(device)
    return {"model": model, "batches": _batches(64, 32), "loss": _squared}


class Bypassed(nn.Module):
    """Training goes through `score`, so that the compiled call is never used."""

    def __init__(self):
        super().__init__()
        self.gate = Gate(128)

    def forward(self, x):
        return self.score(x)

    def score(self, x):
        return self.gate.forward(x)


def bypassed(device):
    return {
        "model": Bypassed().to(device),
        "batches": _batches(256, 128),
        "loss": lambda model, batch: model.score(batch).pow(2).mean(),
    }


class Skipped(nn.Module):
    """A branch on data inside a loop: the compiler gives the whole frame up."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x):
        for _ in range(3):
            x = x * self.weight
            if x.sum() > 1e9:
                x = x * 0.5
        return x


def skipped(device):
    return {"model": Skipped().to(device), "batches": _batches(64, 64), "loss": _squared}


class Counting(nn.Module):
    """A counter on the module changes each step, until the recompile limit is hit."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x) / self.calls


def counting(device):
    return {"model": Counting().to(device), "batches": _batches(16, 32), "loss": _squared}


class Item(nn.Module):
    """Reads a scalar in the middle of forward: one graph break."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        x = self.first(x)
        peak = x.abs().max().item()
        return self.second(x) * min(1.0, 1.0 / (1.0 + peak))


def item(device):
    return {"model": Item().to(device), "batches": _batches(16, 32), "loss": _squared}


def lengths(device):
    model = Gate(32).to(device)

    def batches(step):
        random = torch.Generator().manual_seed(step)
        length = int(torch.randint(8, 60, (1,), generator=random))
        return torch.randn(8, length, 32, generator=random)

    return {"model": model, "batches": batches, "loss": _squared}


class Dropping(nn.Module):
    """Dropout: random, and therefore different when compiled, without being wrong."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        return F.dropout(self.linear(x), 0.5, self.training)


def dropping(device):
    return {"model": Dropping().to(device), "batches": _batches(64, 64), "loss": _squared}


class WrongWhenCompiled(nn.Module):
    """Computes something else when it is compiled."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        y = self.linear(x)
        return y * 1.5 if torch.compiler.is_compiling() else y


def wrong_when_compiled(device):
    return {"model": WrongWhenCompiled().to(device), "batches": _batches(64, 64), "loss": _squared}


def double_backward(device):
    model = Gate(32).to(device)

    def loss(model, batch):
        batch = batch.requires_grad_()
        (gradient,) = torch.autograd.grad(model(batch).sum(), batch, create_graph=True)
        return gradient.pow(2).mean()

    return {"model": model, "batches": _batches(16, 32), "loss": loss}


class Matching(nn.Module):
    """Assigns predictions to targets by SciPy inside forward: not torch, and called per image."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 4)

    def forward(self, features, targets):
        from scipy.optimize import linear_sum_assignment

        found = self.linear(features)
        costs = torch.cdist(found, targets).detach().numpy()
        total = 0.0
        for index, cost in enumerate(costs):
            rows, columns = linear_sum_assignment(cost)
            total = total + (found[index, rows] - targets[index, columns]).abs().mean()
        return total


def matching(device):
    def batches(step):
        random = torch.Generator().manual_seed(step)
        return torch.randn(3, 6, 16, generator=random), torch.rand(3, 4, 4, generator=random)

    return {
        "model": Matching().to(device),
        "batches": batches,
        "loss": lambda model, batch: model(*batch),
    }


class Unfreezing(nn.Module):
    """Layers start frozen; the batches unfreeze one every two steps."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


def unfreezing(device):
    model = Unfreezing().to(device)
    model.layers.requires_grad_(False)
    draw = _batches(16, 16)

    def batches(step):
        if step % 2 == 0 and 0 < step // 2 <= len(model.layers):
            model.layers[-(step // 2)].requires_grad_(True)
        return draw(step)

    return {"model": model, "batches": batches, "loss": _squared}
