"""Workloads with a mistake in them, or worse, one function each."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from multiprocessing import shared_memory

import torch
from torch import nn


def good(device):
    model = nn.Linear(8, 4).to(device)
    return {
        "model": model,
        "batches": lambda step: torch.randn(16, 8, generator=torch.Generator().manual_seed(step)),
        "loss": lambda model, batch: model(batch).pow(2).mean(),
    }


def _with(device, **changes):
    return {**good(device), **changes}


def _at_step(device, act, step=2):
    def loss(model, batch):
        loss.calls += 1
        if loss.calls > step:
            act()
        return model(batch).pow(2).mean()

    loss.calls = 0
    return _with(device, loss=loss)


not_callable = 42


def raises(device):
    return _helper_that_raises()


def _helper_that_raises():
    raise KeyError("no such column: tokens")


def takes_nothing():
    return {}


def returns_none(device):
    return None


def no_model(device):
    made = good(device)
    del made["model"]
    return made


def misspelt_optimizer(device):
    made = good(device)
    return {**made, "optimiser": torch.optim.SGD(made["model"].parameters(), lr=0.1)}


def empty_batches(device):
    return _with(device, batches=[])


def one_shot_batches(device):
    return _with(device, batches=(torch.randn(16, 8) for _ in range(5)))


def vector_loss(device):
    return _with(device, loss=lambda model, batch: model(batch).pow(2).mean(1))


def nan_loss(device):
    return _with(device, loss=lambda model, batch: model(batch).mean() * float("nan"))


def no_gradient(device):
    return _with(device, loss=lambda model, batch: model(batch).detach().mean())


def loss_without_model(device):
    weight = torch.zeros(1, requires_grad=True)
    return _with(device, loss=lambda model, batch: (weight * batch.mean()).sum())


def tuple_without_loss(device):
    made = _with(device, batches=lambda step: (torch.randn(16, 8), torch.randn(16)))
    del made["loss"]
    return made


def parameter_elsewhere(device):
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4, device="meta"))
    return _with(device, model=model)


def step_raises(device):
    return _with(device, loss=lambda model, batch: model(batch[:, :5]).mean())


def exits(device):
    sys.exit(3)


def killed(device):
    return _at_step(device, lambda: os.kill(os.getpid(), signal.SIGKILL))


def segfaults(device):
    return _at_step(device, lambda: ctypes.string_at(0))


def exits_silently(device):
    return _at_step(device, lambda: os._exit(0))


def hangs(device):
    return _at_step(device, lambda: time.sleep(10_000))


def hangs_deaf(device):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return hangs(device)


def prints_a_gigabyte(device):
    def flood():
        block = b"x" * (1 << 20)
        for _ in range(1024):
            os.write(1, block)

    return _at_step(device, flood)


def allocates(device):
    held = []

    def grow():
        while True:
            held.append(torch.ones(16 << 20))

    return _at_step(device, grow)


def leaves_a_daemon(device):
    code = "import os, time\nif os.fork() == 0:\n os.setsid()\n time.sleep(1000)"
    subprocess.run([sys.executable, "-c", code], check=True)
    return good(device)


def leaves_shared_memory(device):
    shared_memory.SharedMemory(create=True, size=1 << 20, name=f"psm_advisor_{os.getpid()}")
    return _at_step(device, lambda: os.kill(os.getpid(), signal.SIGKILL))


def closes_descriptors(device):
    os.closerange(3, 256)
    return good(device)


def writes_junk(device):
    def junk():
        for descriptor in range(3, 1024):
            try:
                os.write(descriptor, b"\xff" * 64)
            except OSError:
                continue

    return _at_step(device, junk)
