"""Models of the kinds the examples, benchmarks and tests train.

Each is written as its users write it, without a thought for memory. Every model's forward takes
the data and, optionally, the targets: with targets it returns the scalar loss, without them the
prediction. ``EXAMPLES`` names a function per model that returns ``(model, args, kwargs)`` in train
mode, deterministic in ``seed`` and without touching the caller's random generator, at a size:

* ``"bench"``: 150 to 300 MiB of eager whole-step peak, about a second a step on two CPU cores;
* ``"test"``: at most 30 MiB, below 150 ms a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "EXAMPLES",
    "GPT",
    "DenseNet",
    "Example",
    "Llama",
    "MLPMixer",
    "ResNet",
    "Size",
    "UNet",
    "densenet_example",
    "gpt_example",
    "llama_example",
    "mixer_example",
    "resnet_example",
    "unet_example",
]

Size = Literal["bench", "test"]
Example = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]

# ---------------------------------------------------------------------------------------------
# GPT: pre-norm transformer decoder with learned positions
# ---------------------------------------------------------------------------------------------


class GPTBlock(nn.Module):
    """Attention and a four times wider GELU network, each behind a LayerNorm and a residual."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.mlp_norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def attend(self, x: Tensor) -> Tensor:
        batch, seq, dim = x.shape
        q, k, v = (
            t.view(batch, seq, self.heads, dim // self.heads).transpose(1, 2)
            for t in self.qkv(x).chunk(3, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, seq, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attend(self.attention_norm(x)), self.dropout, self.training)
        y = self.down(F.gelu(self.up(self.mlp_norm(x))))
        return x + F.dropout(y, self.dropout, self.training)


class GPT(nn.Module):
    """A GPT. ``forward(ids, targets=None)``: ids (batch, seq) -> loss, or logits (.., vocab)."""

    def __init__(
        self,
        *,
        layers: int = 8,
        dim: int = 256,
        heads: int = 8,
        vocab: int = 4096,
        seq: int = 256,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"dim {dim} is not a multiple of heads {heads}")
        self.dropout = dropout
        self.tokens = nn.Embedding(vocab, dim)
        self.positions = nn.Parameter(torch.randn(seq, dim) * 0.02)
        self.blocks = nn.ModuleList(GPTBlock(dim, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.apply(_init_small)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.tokens(ids) + self.positions[: ids.shape[1]]
        x = F.dropout(x, self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _init_small(module: nn.Module) -> None:
    """GPT-2's initialisation: small normal weights, so that the first loss is ln(vocab)."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


# ---------------------------------------------------------------------------------------------
# ResNet: bottlenecks with BatchNorm and in-place relus, as torchvision writes them
# ---------------------------------------------------------------------------------------------


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions around a residual; the last widens four times."""

    expansion = 4

    def __init__(self, inplanes: int, planes: int, stride: int) -> None:
        super().__init__()
        outplanes = planes * self.expansion
        self.conv1 = nn.Conv2d(inplanes, planes, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3 = nn.Conv2d(planes, outplanes, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outplanes)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or inplanes != outplanes:
            self.downsample = nn.Sequential(
                nn.Conv2d(inplanes, outplanes, 1, stride, bias=False), nn.BatchNorm2d(outplanes)
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """A ResNet-50 at any width. ``forward(images, targets=None)``: (batch, 3, h, w) -> loss."""

    def __init__(
        self, *, width: int = 64, depths: tuple[int, ...] = (3, 4, 6, 3), classes: int = 1000
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layers = nn.ModuleList()
        inplanes = width
        for stage, depth in enumerate(depths):
            planes = width * 2**stage
            blocks = []
            for index in range(depth):
                stride = 2 if stage and index == 0 else 1
                blocks.append(Bottleneck(inplanes, planes, stride))
                inplanes = planes * Bottleneck.expansion
            self.layers.append(nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inplanes, classes)

    def forward(self, images: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        for layer in self.layers:
            x = layer(x)
        logits = self.fc(self.avgpool(x).flatten(1))
        return logits if targets is None else F.cross_entropy(logits, targets)


# ---------------------------------------------------------------------------------------------
# U-Net: four levels down and up, long skips, GroupNorm and SiLU
# ---------------------------------------------------------------------------------------------


class DoubleConv(nn.Module):
    """Two 3x3 convolutions, each followed by GroupNorm and SiLU."""

    def __init__(self, inplanes: int, planes: int, groups: int = 8) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, 1, 1)
        self.norm1 = nn.GroupNorm(groups, planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1)
        self.norm2 = nn.GroupNorm(groups, planes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.norm1(self.conv1(x)))
        return F.silu(self.norm2(self.conv2(x)))


class UNet(nn.Module):
    """A denoiser. ``forward(images, targets=None)``: (batch, 3, h, w) -> mean squared error."""

    def __init__(self, *, width: int = 32, levels: int = 4, channels: int = 3) -> None:
        super().__init__()
        planes = [width * 2**level for level in range(levels)]
        self.down = nn.ModuleList(
            DoubleConv(channels if level == 0 else planes[level - 1], planes[level])
            for level in range(levels)
        )
        self.middle = DoubleConv(planes[-1], planes[-1])
        self.upsample = nn.ModuleList(
            nn.ConvTranspose2d(planes[min(level + 1, levels - 1)], planes[level], 2, 2)
            for level in reversed(range(levels))
        )
        self.up = nn.ModuleList(
            DoubleConv(2 * planes[level], planes[level]) for level in reversed(range(levels))
        )
        self.out = nn.Conv2d(width, channels, 1)

    def forward(self, images: Tensor, targets: Tensor | None = None) -> Tensor:
        x = images
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for upsample, block in zip(self.upsample, self.up, strict=True):
            x = block(torch.cat([upsample(x), skips.pop()], dim=1))
        prediction = self.out(x)
        return prediction if targets is None else F.mse_loss(prediction, targets)


# ---------------------------------------------------------------------------------------------
# DenseNet: every layer reads all before it
# ---------------------------------------------------------------------------------------------


class DenseLayer(nn.Module):
    """BatchNorm, ReLU and a 1x1 convolution, then the same with a 3x3: ``growth`` new planes."""

    def __init__(self, inplanes: int, growth: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inplanes)
        self.conv1 = nn.Conv2d(inplanes, 4 * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, 1, 1, bias=False)

    def forward(self, *found: Tensor) -> Tensor:
        x = self.conv1(F.relu(self.norm1(torch.cat(found, dim=1)), inplace=True))
        return self.conv2(F.relu(self.norm2(x), inplace=True))


class DenseNet(nn.Module):
    """A DenseNet-BC classifier. ``forward(images, targets=None)``: (batch, 3, h, w) -> loss."""

    def __init__(
        self, *, growth: int = 16, blocks: tuple[int, ...] = (6, 12, 24, 16), classes: int = 100
    ) -> None:
        super().__init__()
        planes = 2 * growth
        self.stem = nn.Conv2d(3, planes, 7, 2, 3, bias=False)
        self.stem_norm = nn.BatchNorm2d(planes)
        self.blocks = nn.ModuleList()
        self.transitions = nn.ModuleList()
        for index, layers in enumerate(blocks):
            self.blocks.append(
                nn.ModuleList(DenseLayer(planes + growth * i, growth) for i in range(layers))
            )
            planes += growth * layers
            if index < len(blocks) - 1:
                self.transitions.append(
                    nn.Sequential(
                        nn.BatchNorm2d(planes),
                        nn.ReLU(inplace=True),
                        nn.Conv2d(planes, planes // 2, 1, bias=False),
                        nn.AvgPool2d(2),
                    )
                )
                planes //= 2
        self.norm = nn.BatchNorm2d(planes)
        self.classifier = nn.Linear(planes, classes)

    def forward(self, images: Tensor, targets: Tensor | None = None) -> Tensor:
        x = F.max_pool2d(F.relu(self.stem_norm(self.stem(images)), inplace=True), 3, 2, 1)
        for index, block in enumerate(self.blocks):
            found = [x]
            for layer in block:
                found.append(layer(*found))
            x = torch.cat(found, dim=1)
            if index < len(self.transitions):
                x = self.transitions[index](x)
        x = F.relu(self.norm(x), inplace=True).mean(dim=(2, 3))
        scores = self.classifier(x)
        return scores if targets is None else F.cross_entropy(scores, targets)


# ---------------------------------------------------------------------------------------------
# MLP-Mixer
# ---------------------------------------------------------------------------------------------


class MixerBlock(nn.Module):
    """A network over the patches, then one over the channels, each behind a residual."""

    def __init__(self, patches: int, dim: int, token_hidden: int, channel_hidden: int) -> None:
        super().__init__()
        self.token_norm = nn.LayerNorm(dim)
        self.token_mlp = nn.Sequential(
            nn.Linear(patches, token_hidden), nn.GELU(), nn.Linear(token_hidden, patches)
        )
        self.channel_norm = nn.LayerNorm(dim)
        self.channel_mlp = nn.Sequential(
            nn.Linear(dim, channel_hidden), nn.GELU(), nn.Linear(channel_hidden, dim)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.token_mlp(self.token_norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channel_mlp(self.channel_norm(x))


class MLPMixer(nn.Module):
    """An MLP-Mixer. ``forward(images, targets=None)``: (batch, 3, h, w) -> loss, or logits."""

    def __init__(
        self,
        *,
        image: int = 64,
        patch: int = 8,
        dim: int = 256,
        layers: int = 8,
        classes: int = 100,
    ) -> None:
        super().__init__()
        patches = (image // patch) ** 2
        self.embed = nn.Conv2d(3, dim, patch, patch)
        self.blocks = nn.ModuleList(
            MixerBlock(patches, dim, dim // 2, 4 * dim) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, images: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embed(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x).mean(dim=1))
        return logits if targets is None else F.cross_entropy(logits, targets)


# ---------------------------------------------------------------------------------------------
# Llama-like: RMSNorm, rotary positions, grouped-query attention, SwiGLU
# ---------------------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    """Divides by the root mean square of the last dimension, then scales."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of (batch, heads, seq, head dim), halves as in Llama."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], dim=-1) * sin


class LlamaBlock(nn.Module):
    """Grouped-query attention with rotary positions, then SwiGLU, each behind an RMSNorm."""

    def __init__(self, dim: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.kv_heads = kv_heads
        self.head_dim = dim // heads
        self.attention_norm = RMSNorm(dim)
        self.q = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.k = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.mlp_norm = RMSNorm(dim)
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, dim = x.shape
        h = self.attention_norm(x)
        q = self.q(h).view(batch, seq, self.heads, self.head_dim).transpose(1, 2)
        k = self.k(h).view(batch, seq, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v(h).view(batch, seq, self.kv_heads, self.head_dim).transpose(1, 2)
        repeats = self.heads // self.kv_heads
        k = rotate(k, cos, sin).repeat_interleave(repeats, dim=1)
        v = v.repeat_interleave(repeats, dim=1)
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, seq, dim))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """A deep llama-like stack. ``forward(ids, targets=None)``: (batch, seq) -> loss, or logits."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        *,
        layers: int = 24,
        dim: int = 128,
        heads: int = 4,
        kv_heads: int = 2,
        vocab: int = 1024,
        seq: int = 128,
    ) -> None:
        super().__init__()
        if dim % heads or heads % kv_heads or (dim // heads) % 2:
            raise ValueError(f"dim {dim}, heads {heads} and kv_heads {kv_heads} do not divide")
        hidden = (dim * 8 // 3 + 31) // 32 * 32
        self.tokens = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(LlamaBlock(dim, heads, kv_heads, hidden) for _ in range(layers))
        self.norm = RMSNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.apply(_init_small)
        half = dim // heads // 2
        inverse = 10000.0 ** (-torch.arange(half, dtype=torch.float32) / half)
        angles = torch.outer(torch.arange(seq, dtype=torch.float32), inverse).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        seq = ids.shape[1]
        cos, sin = self.cos[:seq], self.sin[:seq]
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# ---------------------------------------------------------------------------------------------
# Examples: (model, args, kwargs) at a size
# ---------------------------------------------------------------------------------------------


def gpt_example(size: Size = "bench", *, dropout: float = 0.0, seed: int = 0) -> Example:
    """An 8-layer GPT and a batch of random tokens."""
    if size == "bench":
        batch, config = 6, {"layers": 8, "dim": 256, "heads": 8, "vocab": 2048, "seq": 256}
    else:
        batch, config = 4, {"layers": 8, "dim": 64, "heads": 4, "vocab": 512, "seq": 64}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPT(**config, dropout=dropout)
        ids = torch.randint(config["vocab"], (batch, config["seq"] + 1))
    return model, (ids[:, :-1].contiguous(), ids[:, 1:].contiguous()), {}


def resnet_example(size: Size = "bench", *, seed: int = 0) -> Example:
    """A ResNet-50 with BatchNorm and in-place relus, and random images."""
    if size == "bench":
        width, classes, batch, image = 32, 100, 10, 160
    else:
        width, classes, batch, image = 8, 10, 4, 64
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = ResNet(width=width, classes=classes)
        images = torch.randn(batch, 3, image, image)
        targets = torch.randint(classes, (batch,))
    return model, (images, targets), {}


def unet_example(size: Size = "bench", *, seed: int = 0) -> Example:
    """A four-level U-Net with long skips, and noisy images to clean."""
    width, batch, image = (32, 4, 128) if size == "bench" else (8, 2, 64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = UNet(width=width)
        clean = torch.randn(batch, 3, image, image)
        noisy = clean + 0.3 * torch.randn(batch, 3, image, image)
    return model, (noisy, clean), {}


def densenet_example(size: Size = "bench", *, seed: int = 0) -> Example:
    """A DenseNet-BC, of 121 layers for the benchmark, and random images."""
    if size == "bench":
        config, batch, image = {"growth": 16, "blocks": (6, 12, 24, 16), "classes": 100}, 12, 128
    else:
        config, batch, image = {"growth": 8, "blocks": (2, 3, 3), "classes": 10}, 4, 64
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DenseNet(**config)
        images = torch.randn(batch, 3, image, image)
        targets = torch.randint(config["classes"], (batch,))
    return model, (images, targets), {}


def mixer_example(size: Size = "bench", *, seed: int = 0) -> Example:
    """An MLP-Mixer and random images."""
    if size == "bench":
        batch, config = 24, {"image": 64, "patch": 8, "dim": 256, "layers": 8, "classes": 100}
    else:
        batch, config = 4, {"image": 32, "patch": 4, "dim": 64, "layers": 6, "classes": 10}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MLPMixer(**config)
        images = torch.randn(batch, 3, config["image"], config["image"])
        targets = torch.randint(config["classes"], (batch,))
    return model, (images, targets), {}


def llama_example(size: Size = "bench", *, seed: int = 0) -> Example:
    """A deep llama-like stack (24 layers) and a batch of random tokens."""
    if size == "bench":
        batch = 8
        config = {"layers": 24, "dim": 128, "heads": 4, "kv_heads": 2, "vocab": 1024, "seq": 128}
    else:
        batch = 2
        config = {"layers": 16, "dim": 64, "heads": 4, "kv_heads": 2, "vocab": 256, "seq": 64}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Llama(**config)
        ids = torch.randint(config["vocab"], (batch, config["seq"] + 1))
    return model, (ids[:, :-1].contiguous(), ids[:, 1:].contiguous()), {}


EXAMPLES: dict[str, Callable[..., Example]] = {
    "gpt": gpt_example,
    "resnet": resnet_example,
    "unet": unet_example,
    "densenet": densenet_example,
    "mixer": mixer_example,
    "llama": llama_example,
}
