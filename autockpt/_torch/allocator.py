"""What a device's allocator did during a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

__all__ = [
    "AllocatorEvent",
    "NamedRange",
    "allocation_events",
    "cuda_history",
    "is_profiled",
    "named_range",
    "queue_delay",
    "watched_step",
]


def allocation_events(run: Callable[[], Any]) -> list[int]:
    """Return the CPU allocator's events while ``run()`` runs: bytes, negative for a free.

    A thread can hold one profiler only. Where the user is profiling this one, the run takes place
    in a thread of its own.
    """
    if not is_profiled():
        return _legacy_events(run)
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(_without_gradients, run).result()


def is_profiled() -> bool:
    """Return whether the user is profiling this thread: the allocator's events go there."""
    return bool(torch._C._autograd._profiler_enabled())


def _without_gradients(run: Callable[[], Any]) -> list[int]:
    # Grad mode belongs to a thread.
    with torch.no_grad():
        return _legacy_events(run)


def _legacy_events(run: Callable[[], Any]) -> list[int]:
    autograd: Any = torch.autograd
    config = autograd.ProfilerConfig(
        autograd.ProfilerState.CPU,
        False,
        True,
        False,
        False,
        False,
        torch._C._profiler._ExperimentalConfig(),
    )
    autograd._enable_profiler_legacy(config)
    try:
        run()
    finally:
        records: Any = autograd._disable_profiler_legacy()
    return [
        event.cpu_memory_usage()
        for thread in records
        for event in thread
        if event.kind() == "memory_alloc" and event.cpu_memory_usage()
    ]


@dataclass(frozen=True, slots=True)
class AllocatorEvent:
    """One allocation, or one free where the bytes are negative.

    Attributes:
        time_ns: when, on the profiler's clock.
        address: of the memory.
        size_bytes: what was allocated or freed.
        scope: the innermost range around it that :func:`named_range` opened, else the operator's.
    """

    time_ns: int
    address: int
    size_bytes: int
    scope: str


@dataclass(frozen=True, slots=True)
class NamedRange:
    """One range that :func:`named_range` opened.

    Attributes:
        name: its name.
        compiled: whether it lies inside a compiled graph.
        first_event: the number of the allocator's events before it.
        last_event: the number of them by its end.
    """

    name: str
    compiled: bool
    first_event: int
    last_event: int


_RANGE = "autockpt/"


def named_range(name: str) -> contextlib.AbstractContextManager[Any]:
    """Open a range that :func:`watched_step` reports."""
    return torch.profiler.record_function(_RANGE + name)


def watched_step(run: Callable[[], Any]) -> tuple[list[AllocatorEvent], list[NamedRange]]:
    """Run a step; return the CPU allocator's events and the named ranges, in their order."""
    profiler = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    )
    profiler.start()
    try:
        run()
    finally:
        profiler.stop()
    inner: Any = profiler.profiler
    roots = inner.kineto_results.experimental_event_tree()
    events: list[AllocatorEvent] = []
    ranges: list[NamedRange] = []

    def walk(nodes: Iterable[Any], scope: str, compiled: bool) -> None:
        for node in sorted(nodes, key=lambda n: n.start_time_ns):
            fields = node.extra_fields
            if hasattr(fields, "alloc_size"):
                if fields.device.type == "cpu":
                    events.append(
                        AllocatorEvent(node.start_time_ns, fields.ptr, fields.alloc_size, scope)
                    )
                continue
            inside = compiled or "CompiledFunction" in node.name
            if not node.name.startswith(_RANGE):
                own = scope if scope.startswith(_RANGE) else node.name
                walk(node.children, own, inside)
                continue
            position, first = len(ranges), len(events)
            ranges.append(NamedRange("", False, 0, 0))
            walk(node.children, node.name, inside)
            name = node.name.removeprefix(_RANGE)
            ranges[position] = NamedRange(name, compiled, first, len(events))

    walk(roots, "", False)
    return [replace(e, scope=e.scope.removeprefix(_RANGE)) for e in events], ranges


def cuda_history(run: Callable[[], Any], device: torch.device) -> Any:
    """Run a step; return torch's snapshot of the allocator with the step's history."""
    torch.cuda.memory._record_memory_history(max_entries=1_000_000, device=device)
    try:
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.memory._snapshot(device)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None, device=device)


def queue_delay(cycles: int) -> None:
    """Let the current CUDA stream wait, so that launches after it queue up."""
    torch.cuda._sleep(cycles)
