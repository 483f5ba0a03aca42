"""Pool: memory of a CUDA device that only the planned graphs of one model allocate from.

The allocator takes it in one segment before the first step, so that what else the process allocates
between the steps cannot cut it up. A pool belongs to a thread while it is entered, and autograd
runs backwards in threads of its own: each graph enters it where it runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from autockpt import _torch
from autockpt.allocator import reserve

__all__ = ["InPool", "Pool"]


class Pool:
    """The pool of one model, made when a graph first runs.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool: Any = None

    @contextlib.contextmanager
    def entered(self, size_bytes: int) -> Iterator[None]:
        """Let this thread allocate from the pool; ``size_bytes`` are reserved when it is new."""
        new = self._pool is None
        if new:
            self._pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(self._pool, self.device):
            if new:
                # Where there is no such piece, the step may still run in smaller ones.
                with contextlib.suppress(torch.OutOfMemoryError):
                    reserve(self.device, size_bytes)
            yield

    def release(self) -> None:
        """Let the pool go; what still lives in it is freed to the device when it dies."""
        self._pool = None


class InPool(_torch.WatchAround):
    """Runs a forward and its backward in a pool.

    Args:
        inner: who watches the graph beside.
        pool: the pool.
        size_bytes: what the step allocates at most.
    """

    def __init__(self, inner: _torch.Watch, pool: Pool, size_bytes: int) -> None:
        super().__init__(inner)
        self.pool = pool
        self.size_bytes = size_bytes

    def run_forward(self, run: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        """Run the forward in the pool."""
        with self.pool.entered(self.size_bytes):
            return self.inner.run_forward(run, args)

    def run_backward(self, run: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        """Run the backward in the pool."""
        with self.pool.entered(self.size_bytes):
            return self.inner.run_backward(run, args)
