"""Ranks: a window of micro-batches under DistributedDataParallel.

All backwards of a window but the last run under ``no_sync``. Where the last one cannot synchronise
(a micro-batch of weight zero on some rank, or a window flushed before its end), the gradients
are averaged here. The weight of a window is averaged over the ranks with them, so that the
gradient is that of the mean over the samples of all ranks, and the same on each.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["Ranks", "wrapper_of"]


def wrapper_of(model: nn.Module) -> nn.Module | None:
    """Return the ``DistributedDataParallel`` around a model, where this process has one."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    for candidate in gc.get_objects():
        # type(), not isinstance(): some objects compute their class.
        if issubclass(type(candidate), DistributedDataParallel) and candidate.module is model:
            found: nn.Module = candidate
            return found
    return None


class Ranks:
    """What a model is called through, and the ranks behind it; one rank where there is no more.

    Attributes:
        call: what is called in the model's place.
    """

    def __init__(self, model: nn.Module, through: Callable[..., Any] | None) -> None:
        self.call: Callable[..., Any] = through if through is not None else model
        self._group: Any = None
        self._several = False
        if isinstance(through, DistributedDataParallel):
            self._group = through.process_group
            self._several = True

    @property
    def several(self) -> bool:
        """Whether gradients are averaged over ranks."""
        return self._several

    def without_sync(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which a backward leaves the gradients to this rank."""
        make = getattr(self.call, "no_sync", None)
        return contextlib.nullcontext() if make is None else make()

    def agree(self, weight: float, ready: bool, device: torch.device) -> tuple[float, bool]:
        """Return the ranks' mean weight, and whether all are ready for a backward that syncs."""
        if not self._several:
            return weight, ready
        size = distributed.get_world_size(self._group)
        both = torch.tensor([weight, float(ready)], dtype=torch.float64, device=device)
        distributed.all_reduce(both, group=self._group)
        total, count = both.tolist()
        return total / size, round(count) == size

    def average(self, parameters: Iterable[torch.Tensor]) -> None:
        """Average the gradients over the ranks; one that no rank has stays None."""
        trained = [p for p in parameters if p.requires_grad]
        if not self._several or not trained:
            return
        size = distributed.get_world_size(self._group)
        there = torch.tensor([float(p.grad is not None) for p in trained], device=trained[0].device)
        distributed.all_reduce(there, group=self._group)
        for parameter, count in zip(trained, there.tolist(), strict=True):
            if count:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                distributed.all_reduce(parameter.grad, group=self._group)
                parameter.grad.div_(size)
