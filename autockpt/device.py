"""Device: how time and memory are measured on the processor that a model lives on.

Two kinds, with one interface: the CPU, whose allocator is watched through its events, and CUDA,
with events for time and the caching allocator's statistics for memory.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import platform
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from autockpt import _torch
from autockpt_solvers.errors import CaptureError

__all__ = ["Cpu", "Cuda", "Device", "device_of", "placement"]


class Device(Protocol):
    """What the planner needs of a processor."""

    name: str
    kind: torch.device
    cache_bytes: int  # last-level cache one process can count on
    small_bytes: int  # operations below it are timed by their overhead: no flush
    total_bytes: int  # memory, for budgets in percent

    def state(self) -> tuple[Any, ...]:
        """Return what else decides a measurement: threads, model of the device."""

    def round_up(self, size_bytes: int) -> int:
        """Return the bytes the allocator takes for a request."""

    def warm_up(self, run: Callable[[], Any]) -> None:
        """Run once, so that libraries load and tune."""

    def peak_of(self, run: Callable[[], Any]) -> int:
        """Return the largest number of bytes allocated at once during a run, beyond before."""

    def flush_cache(self) -> None:
        """Put the caches into the state in which nothing of the operation is in them."""

    def touch(self, tensor: torch.Tensor) -> None:
        """Bring a tensor into the cache."""

    def time_ns(self, run: Callable[[], Any]) -> int:
        """Return the time of one run, in nanoseconds."""


class Cpu:
    """The host processor and its allocator, which takes what it is asked for, unrounded."""

    def __init__(self) -> None:
        self.name = "cpu"
        self.kind = torch.device("cpu")
        self.cache_bytes = _last_level_cache_bytes()
        self.small_bytes = 256 << 10
        self.total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self._flush: torch.Tensor | None = None
        self._memory: bytearray | None = None

    def state(self) -> tuple[Any, ...]:
        return ("cpu", _processor_name(), os.cpu_count(), torch.get_num_threads())

    def round_up(self, size_bytes: int) -> int:
        return size_bytes

    def warm_up(self, run: Callable[[], Any]) -> None:
        run()

    def peak_of(self, run: Callable[[], Any]) -> int:
        held: list[Any] = []
        live = peak = 0
        for change in _torch.allocation_events(lambda: held.append(run())):
            live += change
            peak = max(peak, live)
        return peak

    def flush_cache(self) -> None:
        if self._flush is None:
            # Memory from outside torch's allocator: it never counts against a budget.
            self._memory = bytearray(self.cache_bytes * 3 // 2)
            self._flush = torch.frombuffer(self._memory, dtype=torch.int64)
        self._flush.fill_(1)

    def touch(self, tensor: torch.Tensor) -> None:
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        flat = tensor.detach().as_strided((size,), (1,), 0)
        flat.copy_(flat)

    def time_ns(self, run: Callable[[], Any]) -> int:
        # Alone, a thread's own time is what an operation takes; what others on the machine take
        # in between is not its, and would make one size of a batch look dearer than another.
        clock = time.thread_time_ns if torch.get_num_threads() == 1 else time.perf_counter_ns
        start = clock()
        result = run()
        elapsed = clock() - start
        del result
        return elapsed


class Cuda:
    """A CUDA device behind torch's caching allocator, which rounds requests up to 512 bytes."""

    def __init__(self, device: torch.device) -> None:
        self.kind = torch.device("cuda", device.index or 0)
        properties = torch.cuda.get_device_properties(self.kind)
        self.name = f"cuda:{self.kind.index} ({properties.name})"
        self.cache_bytes = int(getattr(properties, "L2_cache_size", 0)) or 32 << 20
        self.small_bytes = 0
        self.total_bytes = int(properties.total_memory)
        self._flush: torch.Tensor | None = None

    def state(self) -> tuple[Any, ...]:
        return (
            self.name,
            torch.backends.cuda.matmul.allow_tf32,
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic,
        )

    def round_up(self, size_bytes: int) -> int:
        return -(-size_bytes // 512) * 512

    def warm_up(self, run: Callable[[], Any]) -> None:
        for _ in range(2):
            run()
        torch.cuda.synchronize(self.kind)

    def peak_of(self, run: Callable[[], Any]) -> int:
        torch.cuda.synchronize(self.kind)
        before = torch.cuda.memory_allocated(self.kind)
        torch.cuda.reset_peak_memory_stats(self.kind)
        result = run()
        torch.cuda.synchronize(self.kind)
        peak = torch.cuda.max_memory_allocated(self.kind) - before
        del result
        return peak

    def flush_cache(self) -> None:
        free, _ = torch.cuda.mem_get_info(self.kind)
        size = min(2 * self.cache_bytes, free // 4)
        if self._flush is None or self._flush.numel() != size:
            self._flush = torch.empty(size, dtype=torch.uint8, device=self.kind)
        self._flush.zero_()

    def touch(self, tensor: torch.Tensor) -> None:
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        flat = tensor.detach().as_strided((size,), (1,), 0)
        flat.copy_(flat)

    def time_ns(self, run: Callable[[], Any]) -> int:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # A short wait on the device hides the launch from the measurement, as a busy queue does.
        _torch.queue_delay(200_000)
        start.record()
        result = run()
        end.record()
        torch.cuda.synchronize(self.kind)
        del result
        return int(start.elapsed_time(end) * 1e6)


def placement(model: nn.Module) -> torch.device:
    """Return the device that a model's parameters are on; the CPU where it has none."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


@functools.cache
def _for(kind: str, index: int) -> Device:
    return Cpu() if kind == "cpu" else Cuda(torch.device(kind, index))


def device_of(device: torch.device) -> Device:
    """Return the device to measure on for a model that lives on ``device``.

    Raises:
        CaptureError: for a kind of device autockpt has no measurements for.
    """
    if device.type not in ("cpu", "cuda"):
        raise CaptureError(
            f"the model lives on {device}; autockpt measures on cpu and cuda. "
            "Move the model with .to('cuda') or .to('cpu') first."
        )
    return _for(device.type, device.index or 0)


@functools.cache
def _processor_name() -> str:
    """Return the model that Linux names for the first core; elsewhere the architecture."""
    with contextlib.suppress(OSError):
        text = pathlib.Path("/proc/cpuinfo").read_text()
        for line in text.splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.machine()


def _last_level_cache_bytes() -> int:
    """Return the size of the largest cache Linux reports for the first core; else 32 MiB."""
    found = []
    for path in pathlib.Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
        found.append(int(text.rstrip("KM")) * unit)
    return max(found, default=32 << 20)
