"""Joint graphs of large models as data for solvers.py. Needs no GPU and little memory.

    python examples/benchmarks/graphs.py FOLDER [--models resnet152,llama32]
    python examples/benchmarks/graphs.py --models llama32,llama80

Models and inputs are fake tensors; operations cost what a roofline model of an A100 says. Each
file is a gzip'd JSON of ``Problem.to_dict()``. Without a folder each model is captured and planned,
at 70, 50 and 30 % between its smallest peak and the one with nothing recomputed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autockpt
from autockpt_solvers import minimum

# -------------------------------------------------------------------- blocks


class Norm(nn.Module):
    """Root-mean-square norm, as its users write it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class Attention(nn.Module):
    """Multi-head attention over ``x``, or from ``x`` to ``other``."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        other = x if other is None else other
        split = [
            layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, y in ((self.query, x), (self.key, other), (self.value, other))
        ]
        y = F.scaled_dot_product_attention(*split, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(-2))


class Gated(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Mixture(nn.Module):
    """Every token through a few experts, weighted: dense dispatch, so that shapes are static."""

    def __init__(self, width: int, inner: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Gated(width, inner) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        return sum(
            w.unsqueeze(-1) * e(x) for w, e in zip(weights.unbind(-1), self.experts, strict=True)
        )


class Layer(nn.Module):
    """A transformer layer: norm first, cross attention where there is something to attend to."""

    def __init__(
        self,
        width: int,
        heads: int,
        feed: nn.Module,
        *,
        causal: bool = False,
        cross: bool = False,
        dropout: float = 0.0,
        norm: Callable[[int], nn.Module] = nn.LayerNorm,
    ) -> None:
        super().__init__()
        self.first, self.attention = norm(width), Attention(width, heads, causal)
        self.cross = Attention(width, heads, False) if cross else None
        self.between = norm(width) if cross else None
        self.second, self.feed = norm(width), feed
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        x = x + self.dropout(self.attention(self.first(x)))
        if self.cross is not None and self.between is not None:
            x = x + self.dropout(self.cross(self.between(x), other))
        return x + self.dropout(self.feed(self.second(x)))


def mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


# -------------------------------------------------------------------- models


class Decoder(nn.Module):
    """Token embedding, layers, next-token loss."""

    def __init__(self, width: int, layers: list[nn.Module], vocabulary: int = 32000) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(layers)
        self.norm, self.head = Norm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def llama(layers: int, width: int, inner: int, heads: int) -> nn.Module:
    return Decoder(
        width,
        [Layer(width, heads, Gated(width, inner), causal=True, norm=Norm) for _ in range(layers)],
    )


def mixture(layers: int, width: int, experts: int) -> nn.Module:
    feeds = [Mixture(width, 2 * width, experts) for _ in range(layers)]
    return Decoder(width, [Layer(width, 16, f, causal=True, norm=Norm) for f in feeds])


class EncoderDecoder(nn.Module):
    def __init__(self, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(32000, width)
        self.encoder = nn.ModuleList(
            Layer(width, 16, mlp(width), dropout=dropout) for _ in range(layers)
        )
        self.decoder = nn.ModuleList(
            Layer(width, 16, mlp(width), causal=True, cross=True, dropout=dropout)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 32000)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x, y = self.embed(source), self.embed(target)
        for layer in self.encoder:
            x = layer(x)
        for layer in self.decoder:
            y = layer(y, x)
        return F.cross_entropy(self.head(y).flatten(0, 1), target.flatten())


class VisionTransformer(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 16, 16)
        self.position = nn.Parameter(torch.zeros(1, 196, width))
        self.layers = nn.ModuleList(Layer(width, 16, mlp(width)) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2) + self.position
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1)).logsumexp(-1).mean()


class Bottleneck(nn.Module):
    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inside, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.short = nn.Sequential()
        if stride > 1 or inside != out:
            self.short = nn.Sequential(
                nn.Conv2d(inside, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.short(x))


class ResNet(nn.Module):
    def __init__(self, depths: tuple[int, ...]) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.Conv2d(3, 64, 7, 2, 3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        ]
        inside = 64
        for stage, depth in enumerate(depths):
            width = 64 << stage
            for number in range(depth):
                layers.append(Bottleneck(inside, width, 2 if stage and not number else 1))
                inside = 4 * width
        self.body, self.head = nn.Sequential(*layers), nn.Linear(inside, 1000)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(images).mean((2, 3))).logsumexp(-1).mean()


class Dense(nn.Module):
    def __init__(self, inside: int, growth: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(inside),
            nn.ReLU(),
            nn.Conv2d(inside, 4 * growth, 1, bias=False),
            nn.BatchNorm2d(4 * growth),
            nn.ReLU(),
            nn.Conv2d(4 * growth, growth, 3, 1, 1, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x, self.body(x)), 1)


class DenseNet(nn.Module):
    def __init__(self, depths: tuple[int, ...], growth: int = 32) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.Conv2d(3, 2 * growth, 7, 2, 3, bias=False),
            nn.BatchNorm2d(2 * growth),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        ]
        width = 2 * growth
        for stage, depth in enumerate(depths):
            for _ in range(depth):
                layers.append(Dense(width, growth))
                width += growth
            if stage < len(depths) - 1:
                layers += [
                    nn.BatchNorm2d(width),
                    nn.ReLU(),
                    nn.Conv2d(width, width // 2, 1, bias=False),
                    nn.AvgPool2d(2),
                ]
                width //= 2
        self.body, self.head = nn.Sequential(*layers), nn.Linear(width, 1000)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(F.relu(self.body(images)).mean((2, 3))).logsumexp(-1).mean()


class Convolutions(nn.Module):
    def __init__(self, inside: int, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.GroupNorm(8, inside),
            nn.SiLU(),
            nn.Conv2d(inside, width, 3, 1, 1),
            nn.GroupNorm(8, width),
            nn.SiLU(),
            nn.Conv2d(width, width, 3, 1, 1),
        )
        self.short = nn.Conv2d(inside, width, 1) if inside != width else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.short(x) + self.body(x)


class UNet(nn.Module):
    """Four levels of two blocks, attention at the two lowest."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width, 8 * width]
        self.first = nn.Conv2d(3, width, 3, 1, 1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        self.low, self.high = nn.ModuleList(), nn.ModuleList()
        inside = width
        for level, w in enumerate(widths):
            self.down.append(nn.Sequential(Convolutions(inside, w), Convolutions(w, w)))
            self.low.append(Attention(w, 8, False) if level >= 2 else nn.Identity())
            inside = w
        for level, w in reversed(list(enumerate(widths))):
            self.up.append(nn.Sequential(Convolutions(inside + w, w), Convolutions(w, w)))
            self.high.append(Attention(w, 8, False) if level >= 2 else nn.Identity())
            inside = w
        self.last = nn.Conv2d(width, 3, 3, 1, 1)

    @staticmethod
    def attend(module: nn.Module, x: Tensor) -> Tensor:
        if isinstance(module, nn.Identity):
            return x
        return x + module(x.flatten(2).transpose(1, 2)).transpose(1, 2).unflatten(2, x.shape[2:])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        skips = []
        for level, (block, attention) in enumerate(zip(self.down, self.low, strict=True)):
            x = self.attend(attention, block(x))
            skips.append(x)
            x = F.avg_pool2d(x, 2) if level < 3 else x
        for level, (block, attention) in enumerate(zip(self.up, self.high, strict=True)):
            x = self.attend(attention, block(torch.cat((x, skips.pop()), 1)))
            x = F.interpolate(x, scale_factor=2.0) if level < 3 else x
        return self.last(x).square().mean()


# -------------------------------------------------------------------- the table


def tokens(batch: int, length: int) -> Tensor:
    return torch.zeros(batch, length, dtype=torch.long)


def images(batch: int, size: int) -> Tensor:
    return torch.zeros(batch, 3, size, size, dtype=torch.get_default_dtype())


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "llama4": lambda: (llama(4, 4096, 11008, 32), (tokens(4, 4096),)),
    "llama32": lambda: (llama(32, 4096, 11008, 32), (tokens(4, 4096),)),
    "llama80": lambda: (llama(80, 8192, 28672, 64), (tokens(4, 4096),)),
    "resnet152": lambda: (ResNet((3, 8, 36, 3)), (images(64, 224),)),
    "densenet201": lambda: (DenseNet((6, 12, 48, 32)), (images(64, 224),)),
    "unet": lambda: (UNet(), (images(16, 256),)),
    "encdec24": lambda: (EncoderDecoder(1024, 24, 0.1), (tokens(8, 512), tokens(8, 512))),
    "moe": lambda: (mixture(16, 1024, 8), (tokens(4, 2048),)),
    "vit_l": lambda: (VisionTransformer(1024, 24), (images(64, 224),)),
}


def planned(name: str) -> None:
    """Plan a model at three budgets, each from the model itself, and print what that took."""
    with torch.device("meta"):
        model, inputs = MODELS[name]()
    free = autockpt.plan(model, inputs, None, device="a100-80gb")
    least, most = minimum(free.problem, time_limit_s=20.0).peak_bytes, free.baseline_peak_bytes
    for share in (0.7, 0.5, 0.3):
        torch._dynamo.reset()
        budget = least + int(share * (most - least))
        started, began = time.perf_counter(), time.process_time()
        plan = autockpt.plan(model, inputs, budget, device="a100-80gb", time_limit=20)
        print(
            f"{name:<12} {share:.0%}: {time.process_time() - began:5.1f} s of the processor, "
            f"{time.perf_counter() - started:5.1f} s in all; {plan.overhead:.3%} recomputed, gap "
            f"{plan.gap:.3%}",
            flush=True,
        )


def main() -> None:
    """Write one file per model, or plan each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--models", default=",".join(MODELS))
    options = parser.parse_args()
    torch.set_default_dtype(torch.bfloat16)
    if options.folder is None:
        for name in options.models.split(","):
            planned(name)
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.models.split(","):
        started = time.perf_counter()
        with torch.device("meta"):
            model, inputs = MODELS[name]()
        plan = autockpt.plan(model, inputs, None, device="a100-80gb")
        data = {**plan.problem.to_dict(), "name": name}
        with gzip.open(options.folder / f"{name}.json.gz", "wt") as file:
            json.dump(data, file)
        count, seconds = len(plan.problem.operations), time.perf_counter() - started
        print(f"{name:<12} {plan.problem.barrier:>5} / {count:>5} operations {seconds:6.1f} s")


if __name__ == "__main__":
    main()
