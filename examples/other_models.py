"""Convolutional, diffusion-style, graph, audio and recurrent models of a few layers.

``OTHERS[name]()`` -> (model, args, kwargs); each model's forward returns its loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from models import EXAMPLES

__all__ = ["OTHERS"]

Example = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def images(classes: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3, 32, 32), torch.randint(classes, (4,))


def conv_norm(inner: int, outer: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inner, outer, 3, stride, 1, groups=groups, bias=False),
        nn.BatchNorm2d(outer),
        nn.ReLU(inplace=True),
    )


class Classifier(nn.Module):
    """Features, their mean, a linear layer and cross entropy."""

    def __init__(self, features: nn.Module, width: int) -> None:
        super().__init__()
        self.features = features
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.features(x).mean((2, 3))), target)


def vgg() -> Example:
    layers = [conv_norm(3, 16), nn.MaxPool2d(2), conv_norm(16, 32), nn.MaxPool2d(2)]
    return (
        Classifier(nn.Sequential(*layers, conv_norm(32, 32), nn.Dropout2d(0.2)), 32),
        images(),
        {},
    )


class Dense(nn.Module):
    """A DenseNet block: each layer reads all before it."""

    def __init__(self, width: int, growth: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(width + growth * i),
                nn.ReLU(),
                nn.Conv2d(width + growth * i, growth, 3, padding=1, bias=False),
            )
            for i in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        found = [x]
        for layer in self.layers:
            found.append(layer(torch.cat(found, 1)))
        return torch.cat(found, 1)


def densenet() -> Example:
    features = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), Dense(16, 8, 4), nn.AvgPool2d(2))
    return Classifier(nn.Sequential(features, Dense(48, 8, 3)), 72), images(), {}


class Inverted(nn.Module):
    """MobileNet's inverted residual with squeeze and excitation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = 3 * width
        self.widen = nn.Sequential(
            nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.Hardswish()
        )
        self.depthwise = conv_norm(inner, inner, groups=inner)
        self.squeeze = nn.Sequential(nn.Linear(inner, 8), nn.ReLU(), nn.Linear(8, inner))
        self.project = nn.Sequential(nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(self.widen(x))
        y = y * functional.hardsigmoid(self.squeeze(y.mean((2, 3))))[:, :, None, None]
        return x + self.project(y)


def mobilenet() -> Example:
    features = nn.Sequential(conv_norm(3, 16, 2), Inverted(16), Inverted(16), Inverted(16))
    return Classifier(features, 16), images(), {}


class Fire(nn.Module):
    """SqueezeNet's module."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(width, inner, 1)
        self.one = nn.Conv2d(inner, width // 2, 1)
        self.three = nn.Conv2d(inner, width // 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.squeeze(x), inplace=True)
        return functional.relu(torch.cat([self.one(y), self.three(y)], 1))


def squeezenet() -> Example:
    features = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), Fire(32, 8), Fire(32, 8), Fire(32, 8))
    return Classifier(features, 32), images(), {}


class Denoiser(nn.Module):
    """A diffusion U-Net: time embedding, group norm, attention in the middle, skips."""

    class Block(nn.Module):
        def __init__(self, inner: int, outer: int) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.GroupNorm(4, inner), nn.GroupNorm(4, outer)
            self.conv1 = nn.Conv2d(inner, outer, 3, padding=1)
            self.conv2 = nn.Conv2d(outer, outer, 3, padding=1)
            self.time = nn.Linear(32, outer)
            self.skip = nn.Conv2d(inner, outer, 1)

        def forward(self, x: Tensor, time: Tensor) -> Tensor:
            h = self.conv1(functional.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
            h = functional.dropout(functional.silu(self.norm2(h)), 0.1, self.training)
            return self.skip(x) + self.conv2(h)

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 32))
        self.inward = nn.Conv2d(3, 16, 3, padding=1)
        self.down1, self.down2 = self.Block(16, 16), self.Block(16, 32)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.up1, self.up2 = self.Block(64, 16), self.Block(32, 16)
        self.outward = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        noise = torch.randn_like(x)
        level = torch.cos(time)[:, None, None, None]
        angles = time[:, None] * torch.arange(8, device=x.device)
        embedded = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        a = self.down1(self.inward(level * x + (1 - level**2).sqrt() * noise), embedded)
        b = self.down2(functional.avg_pool2d(a, 2), embedded)
        flat = b.flatten(2).transpose(1, 2)
        flat = flat + self.attention(flat, flat, flat, need_weights=False)[0]
        c = flat.transpose(1, 2).view_as(b)
        d = functional.interpolate(self.up1(torch.cat([b, c], 1), embedded), scale_factor=2)
        return functional.mse_loss(self.outward(self.up2(torch.cat([a, d], 1), embedded)), noise)


def diffusion_unet() -> Example:
    return Denoiser(), (torch.randn(2, 3, 16, 16), torch.rand(2)), {}


class DiT(nn.Module):
    """Diffusion transformer: layer norms whose scale and shift come from the time."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 32, 4, 4)
        self.time = nn.Linear(1, 32)
        self.modulate = nn.ModuleList(nn.Linear(32, 96) for _ in range(3))
        self.attention = nn.ModuleList(
            nn.MultiheadAttention(32, 4, batch_first=True) for _ in range(3)
        )
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.GELU(approximate="tanh"), nn.Linear(64, 32))
            for _ in range(3)
        )
        self.outward = nn.Linear(32, 48)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h, t = self.patch(x).flatten(2).transpose(1, 2), functional.silu(self.time(time[:, None]))
        for modulate, attention, mlp in zip(self.modulate, self.attention, self.mlp, strict=True):
            shift, scale, gate = modulate(t)[:, None].chunk(3, -1)
            y = functional.layer_norm(h, (32,)) * (1 + scale) + shift
            h = h + gate * attention(y, y, y, need_weights=False)[0]
            h = h + mlp(functional.layer_norm(h, (32,)))
        return (self.outward(h) - torch.randn_like(h[..., :1])).square().mean()


def dit() -> Example:
    return DiT(), (torch.randn(4, 3, 16, 16), torch.rand(4)), {}


class VAE(nn.Module):
    """A convolutional variational autoencoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(
            nn.Conv2d(3, 16, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(16, 16, 4, 2, 1)
        )
        self.decode = nn.Sequential(
            nn.ConvTranspose2d(8, 16, 4, 2, 1), nn.ELU(), nn.ConvTranspose2d(16, 3, 4, 2, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        mean, log_variance = self.encode(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).mean()
        return functional.binary_cross_entropy_with_logits(self.decode(z), x) + divergence


def vae() -> Example:
    return VAE(), (torch.rand(4, 3, 32, 32),), {}


class GAN(nn.Module):
    """A generator and a spectrally normalised discriminator in one step."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.spectral_norm
        self.generate = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh())
        self.judge = nn.Sequential(norm(nn.Linear(64, 64)), nn.LeakyReLU(), norm(nn.Linear(64, 1)))

    def forward(self, real: Tensor) -> Tensor:
        fake = self.generate(torch.randn(real.shape[0], 8))
        return (
            functional.softplus(self.judge(fake)).mean()
            + functional.softplus(-self.judge(real)).mean()
        )


def gan() -> Example:
    return GAN(), (torch.randn(64, 64),), {}


class GCN(nn.Module):
    """Graph convolution by a normalised dense adjacency, node classification."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor, adjacency: Tensor, target: Tensor) -> Tensor:
        degree = adjacency.sum(-1).clamp(min=1).rsqrt()
        adjacency = degree[:, None] * adjacency * degree[None]
        for layer in self.layers:
            x = functional.dropout(functional.relu(adjacency @ layer(x)), 0.2, self.training)
        return functional.cross_entropy(self.head(x), target)


def gcn() -> Example:
    adjacency = (torch.rand(128, 128) < 0.1).float()
    return GCN(), (torch.randn(128, 16), adjacency, torch.randint(4, (128,))), {}


class GAT(nn.Module):
    """Graph attention over an edge list: gathers, a softmax per node, scatters."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.score = nn.ModuleList(nn.Linear(32, 1) for _ in range(3))
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        for project, score in zip(self.project, self.score, strict=True):
            h = project(x)
            e = functional.leaky_relu(score(torch.cat([h[source], h[target]], -1)), 0.2).exp()
            total = torch.zeros(x.shape[0], 1).index_add(0, target, e)
            message = h[source] * (e / total[target].clamp(min=1e-6))
            x = functional.elu(torch.zeros_like(x).index_add(0, target, message)) + x
        return self.head(x).square().mean()


def gat() -> Example:
    edges = torch.randint(64, (2, 400))
    return GAT(), (torch.randn(64, 16), edges[0], edges[1]), {}


class SchNet(nn.Module):
    """Continuous-filter convolutions over atoms at a distance."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 16)
        self.filters = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 16), nn.Softplus(), nn.Linear(16, 16)) for _ in range(3)
        )
        self.update = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.register_buffer("centres", torch.linspace(0, 4, 12))

    def forward(self, kinds: Tensor, places: Tensor, energy: Tensor) -> Tensor:
        distance = (places[:, :, None] - places[:, None]).square().sum(-1).add(1e-6).sqrt()
        basis = torch.exp(-(distance[..., None] - self.centres).square())
        h = self.embed(kinds)
        for filters, update in zip(self.filters, self.update, strict=True):
            h = h + functional.softplus(update((filters(basis) * h[:, None]).sum(2)))
        return functional.mse_loss(h.sum((1, 2)), energy)


def schnet() -> Example:
    return SchNet(), (torch.randint(10, (4, 12)), torch.randn(4, 12, 3), torch.randn(4)), {}


class WaveNet(nn.Module):
    """Dilated causal convolutions with gates and skips."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Conv1d(1, 16, 1)
        self.dilated = nn.ModuleList(
            nn.Conv1d(16, 32, 2, dilation=2**i, padding=2**i) for i in range(5)
        )
        self.mix = nn.ModuleList(nn.Conv1d(16, 32, 1) for _ in range(5))
        self.outward = nn.Conv1d(16, 32, 1)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h = self.inward(x)
        total = torch.zeros_like(h)
        for dilated, mix in zip(self.dilated, self.mix, strict=True):
            a, b = dilated(h)[..., : h.shape[-1]].chunk(2, 1)
            residual, skip = mix(torch.tanh(a) * torch.sigmoid(b)).chunk(2, 1)
            h, total = h + residual, total + skip
        return functional.cross_entropy(self.outward(functional.relu(total)), target)


def wavenet() -> Example:
    return WaveNet(), (torch.randn(2, 1, 256), torch.randint(32, (2, 256))), {}


class Recogniser(nn.Module):
    """Spectrogram, convolutions and CTC."""

    def __init__(self) -> None:
        super().__init__()
        self.convolve = nn.Sequential(
            nn.Conv1d(33, 32, 3, padding=1), nn.BatchNorm1d(32), nn.GELU(), nn.Conv1d(32, 32, 3)
        )
        self.head = nn.Linear(32, 12)
        self.register_buffer("window", torch.hann_window(64))

    def forward(self, wave: Tensor, target: Tensor) -> Tensor:
        bins = torch.stft(wave, 64, 16, window=self.window, return_complex=True).abs()
        scores = self.head(self.convolve((bins + 1e-3).log()).transpose(1, 2)).log_softmax(-1)
        lengths = torch.full((wave.shape[0],), scores.shape[1])
        wanted = torch.full((wave.shape[0],), target.shape[1])
        return functional.ctc_loss(scores.transpose(0, 1), target, lengths, wanted)


def speech_ctc() -> Example:
    return Recogniser(), (torch.randn(4, 800), torch.randint(1, 12, (4, 8))), {}


class Recurrent(nn.Module):
    """A recurrent layer between an embedding and a head."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.recur = kind(16, 24, num_layers=2, batch_first=True)
        self.head = nn.Linear(24, 40)

    def forward(self, tokens: Tensor) -> Tensor:
        scores = self.head(self.recur(self.embed(tokens))[0])
        return functional.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def lstm() -> Example:
    return Recurrent(nn.LSTM), (torch.randint(40, (4, 16)),), {}


def gru() -> Example:
    return Recurrent(nn.GRU), (torch.randint(40, (4, 16)),), {}


class Cells(nn.Module):
    """A loop over LSTM cells, written out in time."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, 16)
        self.head = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        loss = x.new_zeros(())
        for step in range(x.shape[1] - 1):
            state = self.cell(x[:, step], state)
            loss = loss + functional.mse_loss(self.head(state[0]), x[:, step + 1])
        return loss


def lstm_cells() -> Example:
    return Cells(), (torch.randn(16, 8, 8),), {}


OTHERS: dict[str, Callable[[], Example]] = {
    "conv: resnet bottleneck": lambda: EXAMPLES["resnet"]("test"),
    "conv: u-net": lambda: EXAMPLES["unet"]("test"),
    "conv: mlp-mixer": lambda: EXAMPLES["mixer"]("test"),
    "conv: vgg": vgg,
    "conv: densenet": densenet,
    "conv: mobilenet": mobilenet,
    "conv: squeezenet": squeezenet,
    "diffusion: u-net": diffusion_unet,
    "diffusion: transformer": dit,
    "diffusion: vae": vae,
    "adversarial: gan": gan,
    "graph: gcn": gcn,
    "graph: gat": gat,
    "graph: schnet": schnet,
    "audio: wavenet": wavenet,
    "audio: speech ctc": speech_ctc,
    "recurrent: lstm": lstm,
    "recurrent: gru": gru,
    "recurrent: lstm cells": lstm_cells,
}
