"""Models of the corpus that no package ships, built anew from their papers.

Each takes the batch and returns the module with its loss. Data are zeros: what is counted are
calls, operations and bytes, none of which depend on values.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import nn

Job = tuple[nn.Module, Callable[[], torch.Tensor]]


def _of_images(module: nn.Module, batch: int, *shape: int) -> Job:
    images = torch.zeros(batch, *shape)
    return module, lambda: module(images).float().pow(2).mean()


def dcgan(batch: int) -> Job:
    """The discriminator of Radford et al. 2016, 64 x 64."""
    layers: list[nn.Module] = []
    width = 3
    for index, out in enumerate((64, 128, 256, 512)):
        layers.append(nn.Conv2d(width, out, 4, 2, 1, bias=False))
        layers += [nn.BatchNorm2d(out)] if index else []
        layers.append(nn.LeakyReLU(0.2, inplace=True))
        width = out
    layers += [nn.Conv2d(width, 1, 4, 1, 0, bias=False), nn.Sigmoid()]
    return _of_images(nn.Sequential(*layers), batch, 3, 64, 64)


class _Added(nn.Module):
    """Adds what `inner` makes of its input, or of `shortcut`'s, to it."""

    def __init__(
        self, inner: nn.Module, shortcut: nn.Module | None = None, after: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.inner = inner
        self.shortcut = shortcut or nn.Identity()
        self.after = after or nn.Identity()

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.after(self.shortcut(given) + self.inner(given))


def _block(width: int) -> nn.Module:
    return _Added(
        nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1),
            nn.InstanceNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1),
            nn.InstanceNorm2d(width),
        )
    )


def generator(blocks: int, channels: int, side: int) -> Callable[[int], Job]:
    """The generator of Zhu et al. 2017 (CycleGAN) and Choi et al. 2018 (StarGAN)."""

    def step(layer: nn.Module, width: int) -> list[nn.Module]:
        return [layer, nn.InstanceNorm2d(width), nn.ReLU(inplace=True)]

    def made(batch: int) -> Job:
        layers = step(nn.Conv2d(channels, 64, 7, padding=3), 64)
        layers += step(nn.Conv2d(64, 128, 4, 2, 1), 128)
        layers += step(nn.Conv2d(128, 256, 4, 2, 1), 256)
        layers += [_block(256) for _ in range(blocks)]
        layers += step(nn.ConvTranspose2d(256, 128, 4, 2, 1), 128)
        layers += step(nn.ConvTranspose2d(128, 64, 4, 2, 1), 64)
        layers += [nn.Conv2d(64, 3, 7, padding=3), nn.Tanh()]
        return _of_images(nn.Sequential(*layers), batch, channels, side, side)

    return made


def painter(batch: int) -> Job:
    """The actor of Huang et al. 2019: a ResNet-18 on 9 channels."""
    import torchvision

    model = torchvision.models.resnet18(num_classes=65)
    model.conv1 = nn.Conv2d(9, 64, 3, 2, 1, bias=False)
    model.maxpool = nn.Identity()
    return _of_images(model, batch, 9, 128, 128)


def private(batch: int) -> Job:
    """A ResNet-18 with group norms on CIFAR-10, as differential privacy wants it."""
    import torchvision

    def norm(width: int) -> nn.Module:
        return nn.GroupNorm(32, width)

    return _of_images(
        torchvision.models.resnet18(num_classes=10, norm_layer=norm), batch, 3, 32, 32
    )


def recommender(batch: int) -> Job:
    """The autoencoder of Kuchaiev and Ginsburg 2017."""
    items = 197_951
    layers: list[nn.Module] = []
    width = items
    for out in (512, 512, 1024, 512, 512, items):
        layers += [nn.Linear(width, out), nn.SELU()]
        width = out
    return _of_images(nn.Sequential(*layers), batch, items)


def _mlp(*widths: int, act: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width, out in itertools.pairwise(widths):
        layers += [nn.Linear(width, out), act()]
    return nn.Sequential(*layers[:-1])


def lennard_jones(batch: int) -> Job:
    """A potential of two particles: the loss is on the energy and on its gradient, the force."""
    model = _mlp(1, 16, 16, 16, 16, 1, act=nn.Tanh)
    distance = torch.zeros(batch, 1, requires_grad=True)

    def loss() -> torch.Tensor:
        energy = model(distance)
        (force,) = torch.autograd.grad(energy.sum(), distance, create_graph=True)
        return energy.pow(2).mean() + force.pow(2).mean()

    return model, loss


def soft_actor_critic(batch: int) -> Job:
    """Haarnoja et al. 2018 on a pendulum: two critics and a stochastic actor of width 256."""
    actor, first, second = _mlp(3, 256, 256, 2), _mlp(4, 256, 256, 1), _mlp(4, 256, 256, 1)
    state = torch.zeros(batch, 3)

    def loss() -> torch.Tensor:
        mean, log_spread = actor(state).chunk(2, dim=-1)
        drawn = mean + log_spread.clamp(-10, 2).exp() * torch.zeros_like(mean)
        given = torch.cat([state, drawn.tanh()], dim=-1)
        return torch.min(first(given), second(given)).mean() + log_spread.mean()

    return nn.ModuleList([actor, first, second]), loss


def drq(batch: int) -> Job:
    """Kostrikov et al. 2020: an encoder of four convolutions, an actor and two critics."""
    layers: list[nn.Module] = [nn.Conv2d(9, 32, 3, stride=2), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Conv2d(32, 32, 3), nn.ReLU()]
    encoder = nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 35 * 35, 50), nn.LayerNorm(50))
    actor, first, second = (
        _mlp(50, 1024, 1024, 2),
        _mlp(51, 1024, 1024, 1),
        _mlp(51, 1024, 1024, 1),
    )
    images = torch.zeros(batch, 9, 84, 84)

    def loss() -> torch.Tensor:
        seen = encoder(images).tanh()
        mean, log_spread = actor(seen).chunk(2, dim=-1)
        drawn = mean.tanh() + log_spread.exp() * torch.zeros_like(mean)
        given = torch.cat([seen, drawn], dim=-1)
        return torch.min(first(given), second(given)).mean()

    return nn.ModuleList([encoder, actor, first, second]), loss


def translation(batch: int) -> Job:
    """Vaswani et al. 2017, base, on Multi30k's sentences of about thirty words."""
    return _translation(batch, words=9_521, length=31)


def _translation(batch: int, *, words: int, length: int) -> Job:
    model = nn.Transformer(512, 8, 6, 6, 2048, batch_first=True)
    embed, head = nn.Embedding(words, 512), nn.Linear(512, words, bias=False)
    tokens = torch.zeros(batch, length, dtype=torch.int64)
    mask = nn.Transformer.generate_square_subsequent_mask(length)

    def loss() -> torch.Tensor:
        seen = model(embed(tokens), embed(tokens), tgt_mask=mask)
        return nn.functional.cross_entropy(head(seen).flatten(0, 1).float(), tokens.flatten())

    return nn.ModuleList([model, embed, head]), loss


def speech_transformer(batch: int) -> Job:
    """Dong et al. 2018 on AISHELL: 6 + 6 layers, filter banks of 320 in, 4,233 characters out."""
    model = nn.Transformer(512, 8, 6, 6, 2048, batch_first=True)
    enter, embed = nn.Linear(320, 512), nn.Embedding(4_233, 512)
    head = nn.Linear(512, 4_233, bias=False)
    heard = torch.zeros(batch, 204, 320)
    tokens = torch.zeros(batch, 22, dtype=torch.int64)
    mask = nn.Transformer.generate_square_subsequent_mask(22)

    def loss() -> torch.Tensor:
        seen = model(enter(heard), embed(tokens), tgt_mask=mask)
        return nn.functional.cross_entropy(head(seen).flatten(0, 1).float(), tokens.flatten())

    return nn.ModuleList([model, enter, embed, head]), loss


class _Recurrent(nn.Module):
    def __init__(self, inner: nn.LSTM) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.inner(given)[0]  # type: ignore[no-any-return]


def tts_angular(batch: int) -> Job:
    """A speaker encoder (Wan et al. 2018): three LSTMs of 768, projected to 256."""
    layers: list[nn.Module] = []
    width = 40
    for _ in range(3):
        layers += [
            _Recurrent(nn.LSTM(width, 768, batch_first=True)),
            nn.Linear(768, 256, bias=False),
        ]
        width = 256
    return _of_images(nn.Sequential(*layers), batch, 50, 40)


class _Demucs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width, channels = 2, 64
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        for index in range(6):
            down = [nn.Conv1d(width, channels, 8, 4), nn.ReLU()]
            self.down.append(
                nn.Sequential(*down, nn.Conv1d(channels, 2 * channels, 1), nn.GLU(dim=1))
            )
            up = [nn.Conv1d(channels, 2 * channels, 3, padding=1), nn.GLU(dim=1)]
            out = 8 if index == 0 else width
            up.append(nn.ConvTranspose1d(channels, out, 8, 4))
            self.up.insert(0, nn.Sequential(*up, *([nn.ReLU()] if index else [])))
            width, channels = channels, 2 * channels
        self.between = nn.LSTM(width, width, 2, bidirectional=True)
        self.joined = nn.Linear(2 * width, width)

    def forward(self, heard: torch.Tensor) -> torch.Tensor:
        kept = []
        for layer in self.down:
            heard = layer(heard)
            kept.append(heard)
        heard = self.joined(self.between(heard.permute(2, 0, 1))[0]).permute(1, 2, 0)
        for layer in self.up:
            skipped = kept.pop()
            heard = layer(heard[..., : skipped.shape[-1]] + skipped[..., : heard.shape[-1]])
        return heard


def demucs(batch: int) -> Job:
    """Defossez et al. 2019: six levels, two LSTMs, ten seconds at 44.1 kHz."""
    return _of_images(_Demucs(), batch, 2, 441_000)


def _conv(width: int, out: int, size: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(width, out, size, stride, size // 2, bias=False),
        nn.BatchNorm2d(out),
        nn.LeakyReLU(0.1, inplace=True),
    )


class _Yolo(nn.Module):
    """Redmon and Farhadi 2018: Darknet-53 and three heads."""

    def __init__(self) -> None:
        super().__init__()
        self.levels = nn.ModuleList()
        width = 32
        layers: list[nn.Module] = [_conv(3, 32, 3)]
        for index, blocks in enumerate((1, 2, 8, 8, 4)):
            layers.append(_conv(width, 2 * width, 3, 2))
            width *= 2
            layers += [
                _Added(nn.Sequential(_conv(width, width // 2, 1), _conv(width // 2, width, 3)))
                for _ in range(blocks)
            ]
            if index >= 2:
                self.levels.append(nn.Sequential(*layers))
                layers = []
        self.necks, self.heads, self.between = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for width, given in ((512, 1024), (256, 768), (128, 384)):
            neck = [_conv(given, width, 1), _conv(width, 2 * width, 3), _conv(2 * width, width, 1)]
            self.necks.append(
                nn.Sequential(*neck, _conv(width, 2 * width, 3), _conv(2 * width, width, 1))
            )
            self.heads.append(
                nn.Sequential(_conv(width, 2 * width, 3), nn.Conv2d(2 * width, 255, 1))
            )
            self.between.append(
                nn.Sequential(_conv(width, width // 2, 1), nn.Upsample(scale_factor=2))
            )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        kept = []
        for level in self.levels:
            images = level(images)
            kept.append(images)
        found, seen = torch.zeros(()), kept.pop()
        for index in range(3):
            seen = self.necks[index](seen)
            out = self.heads[index](seen)
            found = found + out.sigmoid().sum() + out.exp().mean()
            if index < 2:
                seen = torch.cat([self.between[index](seen), kept.pop()], dim=1)
        return found


def yolov3(batch: int) -> Job:
    """As its PyTorch port trains it on COCO: 512 pixels, padded to 384 x 512."""
    return _of_images(_Yolo(), batch, 3, 384, 512)


def small_resnet(batch: int) -> Job:
    """He et al. 2016 on CIFAR-10: three groups of three blocks, 16 to 64 channels."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
    ]
    width = 16
    for group in range(3):
        for block in range(3):
            stride = 2 if group and not block else 1
            out = 16 * 2**group
            inner = nn.Sequential(
                nn.Conv2d(width, out, 3, stride, 1, bias=False),
                nn.BatchNorm2d(out),
                nn.ReLU(),
                nn.Conv2d(out, out, 3, padding=1, bias=False),
                nn.BatchNorm2d(out),
            )
            shortcut = nn.Conv2d(width, out, 1, stride) if stride > 1 else None
            layers.append(_Added(inner, shortcut, nn.ReLU()))
            width = out
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)]
    return _of_images(nn.Sequential(*layers), batch, 3, 32, 32)


class _Dense(nn.Module):
    def __init__(self, width: int, growth: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * growth, 1, bias=False),
            nn.BatchNorm2d(2 * growth),
            nn.ReLU(),
            nn.Conv2d(2 * growth, growth, 3, padding=1, bias=False),
        )

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.inner(given), given], dim=1)


def small_densenet(batch: int) -> Job:
    """Huang et al. 2017 on CIFAR-10: four groups of six layers, growth 16."""
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1)]
    width = 32
    for group in range(4):
        for _ in range(6):
            layers.append(_Dense(width, 16))
            width += 16
        if group < 3:
            layers += [
                nn.BatchNorm2d(width),
                nn.ReLU(),
                nn.Conv2d(width, width // 2, 1, bias=False),
                nn.AvgPool2d(2),
            ]
            width //= 2
    layers += [nn.BatchNorm2d(width), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return _of_images(nn.Sequential(*layers, nn.Linear(width, 10)), batch, 3, 32, 32)


class _Unet(nn.Module):
    """Ronneberger et al. 2015 with average pooling and bilinear upsampling."""

    def __init__(self, given: int, out: int) -> None:
        super().__init__()
        widths = (32, 64, 128, 256, 512, 512)

        def pair(width: int, to: int, size: int = 3) -> nn.Sequential:
            def layer(width: int) -> list[nn.Module]:
                return [nn.Conv2d(width, to, size, padding=size // 2), nn.LeakyReLU(0.1)]

            return nn.Sequential(*layer(width), *layer(to))

        self.enter = pair(given, 32, 7)
        self.down = nn.ModuleList(
            nn.Sequential(nn.AvgPool2d(2), pair(width, to))
            for width, to in itertools.pairwise(widths)
        )
        back = widths[::-1]
        self.up = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, to, 3, padding=1), nn.LeakyReLU(0.1))
            for width, to in itertools.pairwise(back)
        )
        self.joined = nn.ModuleList(
            nn.Sequential(nn.Conv2d(2 * to, to, 3, padding=1), nn.LeakyReLU(0.1)) for to in back[1:]
        )
        self.leave = nn.Conv2d(32, out, 3, padding=1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        seen = self.enter(images)
        kept = []
        for layer in self.down:
            kept.append(seen)
            seen = layer(seen)
        for up, joined in zip(self.up, self.joined, strict=True):
            seen = nn.functional.interpolate(seen, scale_factor=2, mode="bilinear")
            seen = joined(torch.cat([up(seen), kept.pop()], dim=1))
        return self.leave(seen)


def slow_motion(batch: int) -> Job:
    """Jiang et al. 2018: two U-Nets and four warps at 352 x 352, a loss on VGG-16's features."""
    import torchvision

    flow, between = _Unet(6, 4), _Unet(20, 5)
    judge = torchvision.models.vgg16().features[:22]
    first, second = torch.zeros(batch, 3, 352, 352), torch.zeros(batch, 3, 352, 352)

    def warped(image: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        grid = by.permute(0, 2, 3, 1) / 352
        return nn.functional.grid_sample(image, grid.to(image.dtype), align_corners=False)

    def loss() -> torch.Tensor:
        there, back = flow(torch.cat([first, second], dim=1)).split(2, dim=1)
        mixed = [0.25 * there + 0.25 * back, 0.25 * there - 0.25 * back]
        seen = [warped(first, mixed[0]), warped(second, mixed[1])]
        found = between(torch.cat([first, second, there, back, *mixed, *seen], dim=1))
        shown = found[:, 4:].sigmoid()
        drawn = shown * warped(first, mixed[0] + found[:, :2])
        drawn = drawn + (1 - shown) * warped(second, mixed[1] + found[:, 2:4])
        apart = (judge(drawn) - judge(first)).pow(2).mean()
        smooth = (there[:, :, 1:] - there[:, :, :-1]).abs().mean()
        again = [warped(first, back), warped(second, there)]
        return apart + smooth + sum((one - first).abs().mean() for one in [*again, drawn])

    return nn.ModuleList([flow, between, judge]), loss


def matting(batch: int) -> Job:
    """Sengupta et al. 2020: three encoders, seven and three residual blocks, two decoders."""

    def normed(layer: nn.Module, width: int) -> list[nn.Module]:
        return [layer, nn.BatchNorm2d(width), nn.ReLU(True)]

    def encoder(channels: int) -> nn.Sequential:
        layers = normed(nn.Conv2d(channels, 64, 7, bias=False, padding=3), 64)
        layers += normed(nn.Conv2d(64, 128, 3, 2, 1, bias=False), 128)
        return nn.Sequential(*layers, *normed(nn.Conv2d(128, 256, 3, 2, 1, bias=False), 256))

    def block() -> nn.Module:
        layers = normed(nn.Conv2d(256, 256, 3, padding=1), 256)
        return _Added(
            nn.Sequential(*layers, nn.Conv2d(256, 256, 3, padding=1), nn.BatchNorm2d(256))
        )

    def decoder(out: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for width in (256, 128):
            layers.append(nn.Upsample(scale_factor=2, mode="bilinear"))
            layers += normed(nn.Conv2d(width, width // 2, 3, padding=1), width // 2)
        return nn.Sequential(*layers, nn.Conv2d(64, out, 7, padding=3), nn.Tanh())

    image, ground, rough = encoder(3), encoder(3), encoder(1)
    pairs = nn.ModuleList(
        nn.Sequential(*normed(nn.Conv2d(512, 64, 1, bias=False), 64)) for _ in range(2)
    )
    enter = nn.Sequential(*normed(nn.Conv2d(256 + 128, 256, 1, bias=False), 256))
    shared = nn.Sequential(*[block() for _ in range(7)])
    alpha, front = (nn.Sequential(*[block() for _ in range(3)], decoder(out)) for out in (1, 3))
    images, mask = torch.zeros(batch, 3, 512, 512), torch.zeros(batch, 1, 512, 512)

    def loss() -> torch.Tensor:
        seen = image(images)
        others = [ground(images), rough(mask)]
        joined = [
            pair(torch.cat([seen, other], dim=1)) for pair, other in zip(pairs, others, strict=True)
        ]
        found = shared(enter(torch.cat([seen, *joined], dim=1)))
        shown, drawn = alpha(found), front(found)
        mixed = shown * drawn + (1 - shown) * images
        return (mixed - images).abs().mean() + (shown - mask).abs().mean()

    return nn.ModuleList([image, ground, rough, pairs, enter, shared, alpha, front]), loss


def dlrm(batch: int) -> Job:
    """Naumov et al. 2019: eight tables of a million rows, a hundred looked up in each."""
    tables = nn.ModuleList(nn.EmbeddingBag(1_000_000, 64, mode="sum") for _ in range(8))
    below, above = _mlp(512, 512, 64), _mlp(64 + 36, 1024, 1024, 1024, 1)
    dense = torch.zeros(batch, 512)
    found = torch.zeros(batch, 100, dtype=torch.int64)
    row, column = torch.tril_indices(9, 9, -1).tolist()

    def loss() -> torch.Tensor:
        seen = below(dense).relu()
        stacked = torch.stack([seen, *(table(found) for table in tables)], dim=1)
        pairs = torch.bmm(stacked, stacked.transpose(1, 2))[:, row, column]
        return above(torch.cat([seen, pairs], dim=1)).sigmoid().pow(2).mean()

    return nn.ModuleList([tables, below, above]), loss


BUILDERS: dict[str, Callable[[int], Job]] = {
    "dcgan": dcgan,
    "pytorch_CycleGAN_and_pix2pix": generator(9, 3, 256),
    "pytorch_stargan": generator(6, 8, 128),
    "LearningToPaint": painter,
    "functorch_dp_cifar10": private,
    "nvidia_deeprecommender": recommender,
    "lennard_jones": lennard_jones,
    "soft_actor_critic": soft_actor_critic,
    "drq": drq,
    "attention_is_all_you_need_pytorch": translation,
    "speech_transformer": speech_transformer,
    "tts_angular": tts_angular,
    "demucs": demucs,
    "yolov3": yolov3,
    "phlippe_resnet": small_resnet,
    "phlippe_densenet": small_densenet,
    "Super_SloMo": slow_motion,
    "Background_Matting": matting,
    "dlrm": dlrm,
}
