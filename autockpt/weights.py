"""Weights: a model as fake tensors on the CPU, to be captured where its weights are not.

torch differentiates fake CPU tensors on any build; on the meta device the backward goes missing,
and fake CUDA tensors need a CUDA build.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from autockpt import _torch

__all__ = ["fake_copy", "is_fake"]


def is_fake(model: nn.Module) -> bool:
    """Return whether some parameter has no data: on the meta device, or a fake tensor."""
    return any(_torch.is_fake(p) for p in (*model.parameters(), *model.buffers()))


@contextlib.contextmanager
def fake_copy(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]:
    """Give a copy of a model and its inputs without data, inside the mode that they need.

    Shapes, strides, dtypes and ``requires_grad`` are the originals'; the model is not touched.
    """
    with _torch.FakeTensorMode(allow_non_fake_inputs=True):
        memo: dict[int, Any] = {}
        for parameter in model.parameters():
            memo[id(parameter)] = nn.Parameter(
                _empty(parameter), requires_grad=parameter.requires_grad
            )
        for buffer in model.buffers():
            memo[id(buffer)] = _empty(buffer)
        bare = copy.deepcopy(model, memo)
        yield bare, _torch.map_tensors(_empty, args), _torch.map_tensors(_empty, dict(kwargs))


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_strided(
        tuple(tensor.shape), tuple(tensor.stride()), dtype=tensor.dtype, device="cpu"
    )
    return empty.requires_grad_(tensor.requires_grad and tensor.is_leaf)
