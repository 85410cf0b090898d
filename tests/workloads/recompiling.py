"""A workload for each cause of a recompile, and beside it the same model mended.

Also those that the compiler makes something else of: random streams, a constant that went stale, a
step that it cannot compile.
"""

import enum

import torch
import torch.nn.functional as F
from causes import ROWS, WIDTH, Mix, Net, drawn, squared, workload
from torch import nn

# More than the compiler makes variants of (8).
MANY = 12


def _with(value_of):
    """Returns batches of features and a value that depends on the step."""
    draw = drawn(ROWS, WIDTH)
    return lambda step: (draw(step), value_of(step))


def _passing(form=lambda value: value):
    """Returns a loss that passes the batch's value to the model, in some form."""
    return lambda model, batch: model(batch[0], form(batch[1])).pow(2).mean()


def _short_last(step):
    """Every fifth batch is the smaller one that ends an epoch."""
    random = torch.Generator().manual_seed(step)
    return torch.randn(ROWS // 3 if step % 5 == 4 else ROWS, WIDTH, generator=random)


batch_size = workload(Net, _short_last)
# drop_last=True
batch_size_mended = workload(Net)


def _lengths(step):
    random = torch.Generator().manual_seed(step)
    length = int(torch.randint(20, 60, (1,), generator=random))
    return torch.randn(8, length, WIDTH, generator=random)


def _marked_lengths(step):
    batch = _lengths(step)
    torch._dynamo.mark_dynamic(batch, 1)
    return batch


lengths = workload(Net, _lengths)
lengths_mended = workload(Net, _marked_lengths)


class Warming(Net):
    """A warm-up factor from the step's number, an argument."""

    def forward(self, x, step):
        x = self.before(x)
        return self.after(x * (0.5 + 1 / (step + 2)))


number = workload(Warming, _with(lambda step: step), _passing())
number_mended = workload(Warming, _with(torch.tensor), _passing())


class Picking(Net):
    """A number picks one of many adapters: each is another program."""

    def __init__(self):
        super().__init__()
        self.adapters = nn.ModuleList(Mix(rounds=1) for _ in range(MANY))

    def forward(self, x, which):
        x = self.before(x)
        return self.after(self.adapters[which](x))


class PickingStacked(Picking):
    """The same adapters, picked by a tensor out of their stacked weights."""

    def forward(self, x, which):
        x = self.before(x)
        scale = torch.stack([adapter.scale for adapter in self.adapters])[which]
        shift = torch.stack([adapter.shift for adapter in self.adapters])[which]
        x = x * torch.sigmoid(x * scale + shift) + 0.1 * torch.tanh(x - shift)
        return self.after(x)


picking = workload(Picking, _with(lambda step: step % MANY), _passing())
# A tensor of one dimension: one without would be read as a number.
picking_mended = workload(
    PickingStacked, _with(lambda step: torch.tensor([step % MANY])), _passing()
)


class Counting(Net):
    """A counter on the module."""

    def __init__(self):
        super().__init__()
        self.steps = 0

    def forward(self, x):
        self.steps += 1
        return self.after(self.before(x) * (0.5 + 1 / self.steps))


class CountedOutside(Net):
    """The counter is a buffer that the training loop advances, not forward."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        return self.after(self.before(x) * (0.5 + 1 / self.steps))


class CountingInPlace(CountedOutside):
    """Forward changes the buffer and uses it: Inductor's gradients are those of the next step.

    The backward pass computes the factor anew from the buffer, which has changed by then; the loss
    is right. Seen with torch 2.13; see pytorch/pytorch#197039.
    """

    def forward(self, x):
        self.steps += 1
        return super().forward(x)


def _counted(model, batch):
    model.steps += 1
    return squared(model, batch)


counting = workload(Counting)
counting_mended = workload(CountedOutside, loss=_counted)
counting_in_place = workload(CountingInPlace)


class Normed(Net):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        x = self.before(x)
        return self.after(self.norm(x))


def _with_teacher(model, batch):
    """The model in evaluation mode is its own teacher."""
    model.eval()
    target = model(batch).detach()
    model.train()
    return F.mse_loss(model(batch), 0.9 * target)


train_eval = workload(Normed, loss=_with_teacher)


class Frozen(Net):
    def __init__(self):
        super().__init__()
        self.before.requires_grad_(False)
        self.after.shift.requires_grad_(False)


def unfreezing(device):
    """From step 4 on all is trained, from step 8 on all but what was frozen last."""
    job = workload(Frozen)(device)
    model, draw = job["model"], job["batches"]

    def batches(step):
        model.after.shift.requires_grad_(step >= 4)
        model.before.requires_grad_(step >= 8)
        return draw(step)

    return {**job, "batches": batches}


def _two_dtypes(step):
    batch = drawn(ROWS, WIDTH)(step)
    return batch.double() if step % 2 else batch


dtype = workload(Net, _two_dtypes)
dtype_mended = workload(Net, lambda step: _two_dtypes(step).float())


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution, self.mix = nn.Conv2d(3, 8, 3, 2, 1), Mix(32)

    def forward(self, x):
        return self.mix(self.convolution(x))


def _two_layouts(step):
    images = drawn(8, 3, 64, 64)(step)
    return images.contiguous(memory_format=torch.channels_last) if step % 2 else images


stride = workload(Images, _two_layouts)
stride_mended = workload(Images, lambda step: _two_layouts(step).contiguous())


class RateAware(Net):
    """Scales its features by the optimizer's learning rate."""

    optimizer = None

    def forward(self, x):
        x = self.before(x)
        return self.after(x * (1.0 + 100 * self.optimizer.param_groups[0]["lr"]))


def _scheduled(form):
    """Returns a workload function with a learning rate, in some form, that falls each step."""

    def build(device):
        job = workload(RateAware)(device)
        model = job["model"]
        model.optimizer = torch.optim.SGD(model.parameters(), lr=form(1e-3))
        schedule = torch.optim.lr_scheduler.ExponentialLR(model.optimizer, 0.999)

        def step(model, batch, optimizer):
            optimizer.zero_grad(set_to_none=True)
            loss = squared(model, batch)
            loss.backward()
            optimizer.step()
            schedule.step()
            return loss

        return {**job, "optimizer": model.optimizer, "step": step}

    return build


optimizer_state = _scheduled(float)
optimizer_state_mended = _scheduled(torch.tensor)

Source = enum.Enum("Source", [f"shard_{index}" for index in range(MANY)])
SOURCES = tuple(Source)


class Weighing(Net):
    """Features of some sources weigh more; an object of its own stands for each source."""

    def forward(self, x, source):
        x = self.after(self.before(x))
        return x * 2.0 if source in SOURCES[:4] else x


class WeighingByName(Net):
    def forward(self, x, name):
        x = self.after(self.before(x))
        return x * 2.0 if name.startswith("web") else x


class Weighed(Net):
    def forward(self, x, weight):
        return self.after(self.before(x)) * weight


def _source(step):
    return SOURCES[step % MANY]


def _name(step):
    return f"{'web' if step % MANY < 4 else 'book'}-{step:05d}"


def _weight(step):
    return torch.tensor(2.0 if step % MANY < 4 else 1.0)


identity = workload(Weighing, _with(_source), _passing())
identity_mended = workload(Weighed, _with(_weight), _passing())
text = workload(WeighingByName, _with(_name), _passing())
text_mended = workload(Weighed, _with(_weight), _passing())


class Mended(nn.Module):
    """All of these whose values come as tensors, in one."""

    def __init__(self):
        super().__init__()
        self.warming, self.picking = Warming(), PickingStacked()
        self.counted, self.weighed = CountedOutside(), Weighed()

    def forward(self, x, values):
        step, which, weight = values
        x = self.warming(x, step)
        x = self.picking(x, which)
        x = self.counted(x)
        return self.weighed(x, weight)


def _tensors(step):
    return torch.tensor(step), torch.tensor([step % MANY]), _weight(step)


def _all_counted(model, batch):
    model.counted.steps += 1
    return _passing()(model, batch)


all_mended = workload(Mended, _with(_tensors), _all_counted)


class Dropping(Net):
    """Dropout: other random numbers when compiled, and no error."""

    def forward(self, x):
        x = self.before(x)
        return self.after(F.dropout(x, 0.5, self.training))


dropping = workload(Dropping)


def _penalty(model, batch):
    """A loss of the gradient, which differentiates twice."""
    batch = batch.requires_grad_()
    (gradient,) = torch.autograd.grad(model(batch).sum(), batch, create_graph=True)
    return gradient.norm(dim=1).sub(1.0).square().mean()


penalty = workload(Net, loss=_penalty)


class Limited(Net):
    """Clamps by a limit that falls; compiled code goes on with an earlier one, without a word.

    Seen with torch 2.13; see pytorch/pytorch#194976.
    """

    def forward(self, x, limit):
        return self.after(self.before(x).clamp(-limit, limit))


def _limit(step):
    return torch.tensor(2.0 * 0.8**step, dtype=torch.float64)


stale = workload(Limited, _with(_limit), _passing(float))
stale_mended = workload(Limited, _with(_limit), _passing(lambda limit: limit.float()))
