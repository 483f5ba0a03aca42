"""Tensors and the memory behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = [
    "copy_unnoticed",
    "is_batched",
    "is_fake",
    "map_tensors",
    "storage_key",
    "storage_uses",
    "strided_parts",
    "tensor_leaves",
    "tensors_anywhere",
]


def storage_uses(tensor: torch.Tensor) -> int:
    """Return how many tensors and Python objects hold a tensor's memory."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number equal for two (fake) tensors exactly when they share memory."""
    return int(tensor.untyped_storage()._cdata)


def copy_unnoticed(written: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Write as a kernel writes that does not tell autograd, such as batch-norm's."""
    with _unsafe_preserve_version_counter(tuple(written)):
        torch._foreach_copy_(written, values)


def is_batched(value: Any) -> bool:
    """Return whether a value stands for many tensors, as under ``vmap``: it has no memory."""
    kinds = torch._C._functorch
    return isinstance(value, torch.Tensor) and (
        kinds.is_batchedtensor(value) or kinds.is_legacy_batchedtensor(value)
    )


def is_fake(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has shape and dtype but no data."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return a nested structure with ``function`` applied to each tensor in it."""
    return tree_map_only(torch.Tensor, function, value)


def tensor_leaves(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a nested structure of tuples, lists, dicts and registered classes."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def strided_parts(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a nested structure that have memory; a sparse one's are its parts."""
    parts: list[torch.Tensor] = []
    for tensor in tensor_leaves(value):
        if tensor.layout is torch.strided:
            parts.append(tensor)
        elif tensor.layout is torch.sparse_coo:
            parts += [tensor._indices(), tensor._values()]
    return parts


def tensors_anywhere(value: Any, depth: int = 6) -> Iterator[torch.Tensor]:
    """Yield the tensors in a model's inputs or outputs, of whatever classes they are made."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and not isinstance(value, (str, bytes, int, float, nn.Module)):
        if isinstance(value, Mapping):
            inner: Iterable[Any] = value.values()
        elif isinstance(value, (list, tuple, set)):
            inner = value
        elif hasattr(value, "__slots__") or hasattr(value, "__dict__"):
            names = [*getattr(value, "__slots__", ()), *getattr(value, "__dict__", ())]
            inner = [getattr(value, name, None) for name in names]
        else:
            inner = ()
        for item in inner:
            yield from tensors_anywhere(item, depth - 1)
