"""Roofline: the time of operations on a GPU that is not here, from its data sheet.

An operation takes as long as its arithmetic or its memory traffic, whichever is longer (Williams,
Waterman, Patterson 2009), at the share of the peak that large kernels reach in practice, and
at least a kernel's launch. Good enough to choose what to recompute, which depends on ratios;
workspace is taken as nothing, since only the device's libraries know it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from autockpt.tangents import tensors
from autockpt_solvers.errors import InputError

__all__ = ["GPUS", "Gpu", "Modelled", "modelled"]

aten = torch.ops.aten

_ARITHMETIC_SHARE = 0.7
_BANDWIDTH_SHARE = 0.8
_LAUNCH_NS = 3_000


@dataclass(frozen=True)
class Gpu:
    """A data sheet.

    Attributes:
        title: the product's name.
        memory_bytes: size of its memory.
        bandwidth: bytes a second.
        half: dense operations a second on 16-bit floats.
        single: operations a second on 32-bit floats, tensor cores unused as torch's default.
    """

    title: str
    memory_bytes: int
    bandwidth: float
    half: float
    single: float


GPUS: dict[str, Gpu] = {
    "a100-40gb": Gpu("NVIDIA A100 40GB", 40 << 30, 1.555e12, 312e12, 19.5e12),
    "a100-80gb": Gpu("NVIDIA A100 80GB SXM", 80 << 30, 2.039e12, 312e12, 19.5e12),
    "h100-80gb": Gpu("NVIDIA H100 80GB SXM", 80 << 30, 3.35e12, 989e12, 67e12),
    "h200-141gb": Gpu("NVIDIA H200 141GB SXM", 141 * 10**9, 4.8e12, 989e12, 67e12),
    "l4-24gb": Gpu("NVIDIA L4", 24 * 10**9, 0.3e12, 121e12, 30.3e12),
    "l40s-48gb": Gpu("NVIDIA L40S", 48 * 10**9, 0.864e12, 362e12, 91.6e12),
    "rtx-3090": Gpu("NVIDIA GeForce RTX 3090", 24 << 30, 0.936e12, 71e12, 35.6e12),
    "rtx-4090": Gpu("NVIDIA GeForce RTX 4090", 24 << 30, 1.008e12, 165e12, 82.6e12),
    "v100-32gb": Gpu("NVIDIA V100 32GB SXM2", 32 << 30, 0.9e12, 125e12, 15.7e12),
}


@dataclass(frozen=True)
class Modelled:
    """A GPU known by its data sheet only. Its tensors are fake ones on the CPU."""

    name: str
    gpu: Gpu

    @property
    def kind(self) -> torch.device:
        """Where its stand-in tensors are."""
        return torch.device("cpu")

    @property
    def total_bytes(self) -> int:
        """Its memory, for budgets in percent."""
        return self.gpu.memory_bytes

    def round_up(self, size_bytes: int) -> int:
        """Return the bytes torch's caching allocator takes for a request."""
        return -(-size_bytes // 512) * 512

    def cost_ns(self, node: fx.Node) -> int:
        """Return the modelled time of one run of a node, in nanoseconds."""
        moved = sum(_nbytes(t) for t in tensors(node))
        moved += sum(_nbytes(t) for arg in node.all_input_nodes for t in tensors(arg))
        dtypes = [t.dtype for arg in node.all_input_nodes for t in tensors(arg)]
        half = any(d in (torch.float16, torch.bfloat16) for d in dtypes)
        peak = (self.gpu.half if half else self.gpu.single) * _ARITHMETIC_SHARE
        traffic = self.gpu.bandwidth * _BANDWIDTH_SHARE
        seconds = max(_flops(node) / peak, moved / traffic)
        return _LAUNCH_NS + int(seconds * 1e9)


def modelled(name: str) -> Modelled:
    """Return the GPU of a name in ``GPUS``.

    Raises:
        InputError: there is none of this name.
    """
    if name.lower() not in GPUS:
        raise InputError(f"no GPU is called {name!r}; there are {', '.join(GPUS)}.")
    return Modelled(f"{name.lower()} (modelled)", GPUS[name.lower()])


def _nbytes(tensor: torch.Tensor) -> int:
    """Bytes read or written: an expanded tensor is as small as its memory."""
    return min(tensor.numel() * tensor.element_size(), int(tensor.untyped_storage().nbytes()))


def _flops(node: fx.Node) -> int:
    if node.target is aten._scaled_dot_product_flash_attention_for_cpu.default:
        return int(sdpa_flop_count(*(_shape(a) for a in node.args[:3])))
    if node.target is aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
        return int(sdpa_backward_flop_count(*(_shape(a) for a in node.args[:4])))
    formula: Callable[..., int] | None = flop_registry.get(
        getattr(node.target, "overloadpacket", None)
    )
    if formula is None:
        return 0
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
    return int(formula(*args, **kwargs, out_val=node.meta["val"]))


def _shape(arg: Any) -> torch.Size:
    shape: torch.Size = arg.meta["val"].shape
    return shape
