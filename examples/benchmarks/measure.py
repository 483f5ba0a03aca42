"""What is true: peak bytes from the allocator's own events, and step times side by side.

Nothing here knows of plans, graphs or simulators, so it can judge them.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile

__all__ = [
    "ALLOCATOR_ENVIRONMENT",
    "MIB",
    "Peak",
    "Timing",
    "ensure_allocator",
    "loss_of",
    "measure_peak",
    "measure_times",
    "pair_ratio",
    "resident_bytes",
    "step_clock",
    "step_function",
    "storage_bytes",
    "whole_step_peak",
]

MIB = 2**20

# glibc gives large blocks back to the kernel at every free and faults them in again at the next
# allocation, which makes a step several times slower and hides what is being compared.
ALLOCATOR_ENVIRONMENT = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(16 * 2**30),
    "MALLOC_TOP_PAD_": str(256 * MIB),
    "GOMP_SPINCOUNT": "2000",
}


def ensure_allocator() -> None:
    """Start this script again, once, under ``ALLOCATOR_ENVIRONMENT`` unless it is in force.

    The C library reads these variables when the process starts, so setting them later is of no
    use. It returns in the restarted process, or where there is nothing to do. Call it only
    in a process of the script's own: it replaces the process.
    """
    missing = {k: v for k, v in ALLOCATOR_ENVIRONMENT.items() if k not in os.environ}
    if not missing or sys.platform != "linux":
        return
    print(
        "restarting with " + " ".join(f"{k}={v}" for k, v in missing.items()),
        file=sys.stderr,
        flush=True,
    )
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **missing})


# ---------------------------------------------------------------------------------------------
# Bytes
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Peak:
    """Bytes above those live at the start: at the highest point, and left at the end.

    ``events`` is the number of allocations and frees seen (0 on CUDA, which keeps its own peak).
    """

    delta_bytes: int
    left_bytes: int
    events: int


def measure_peak(fn: Callable[[], object], *, device: torch.device | str = "cpu") -> Peak:
    """Peak bytes the device's allocator hands out while ``fn()`` runs.

    On CPU: the running sum of the torch profiler's ``[memory]`` events, one for every allocation
    and free of torch's CPU allocator. A free of something allocated before ``fn`` is not seen, so
    give ``fn`` a step that starts with gradients set to None. On CUDA:
    ``torch.cuda.max_memory_allocated`` less what was allocated at the start. Python's garbage
    collector runs before, and not during, ``fn``.
    """
    device = torch.device(device)
    with garbage_collector_off():
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            start = torch.cuda.memory_allocated(device)
            fn()
            torch.cuda.synchronize(device)
            peak = torch.cuda.max_memory_allocated(device)
            return Peak(peak - start, torch.cuda.memory_allocated(device) - start, 0)
        if device.type != "cpu":
            raise ValueError(f"peaks are measured on cpu and cuda devices, not on {device}")
        prof = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
        with _quiet_stderr():
            prof.start()
        try:
            fn()
        finally:
            with _quiet_stderr():
                prof.stop()
    kineto = prof.profiler.kineto_results.events()
    events = sorted((e for e in kineto if e.name() == "[memory]"), key=lambda e: e.start_ns())
    if not events:
        raise RuntimeError("the profiler reported no allocation: the peak is unknown")
    live = highest = 0
    for event in events:
        live += event.nbytes()
        highest = max(highest, live)
    return Peak(highest, live, len(events))


@contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Keep out the line kineto writes to file descriptor 2 whenever a session starts or stops."""
    sys.stderr.flush()
    saved = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind ``tensors``; views and tied weights count once.

    CUDA's allocator hands out multiples of 512 bytes, and they are counted as such.
    """
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        unit = 512 if tensor.device.type == "cuda" else 1
        storages[storage.data_ptr(), tensor.device] = -(-storage.nbytes() // unit) * unit
    return sum(storages.values())


def resident_bytes(
    model: nn.Module,
    inputs: object = (),
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    *,
    device: torch.device | str = "cpu",
) -> int:
    """Bytes on ``device`` that outlive a step: parameters, buffers, inputs, optimizer state.

    ``inputs`` is any nest of tuples, lists, mappings and objects with tensors. Gradients that
    exist now are counted too. The whole step's peak is this plus the step's ``delta_bytes``.
    """
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())
    tensors = [*model.parameters(), *model.buffers(), *_tensors_in(inputs)]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    for one in optimizers:
        tensors += _tensors_in(list(one.state.values()))
        tensors += _tensors_in([group["params"] for group in one.param_groups])
    device = torch.device(device)
    return storage_bytes(t for t in tensors if t.device.type == device.type)


def _tensors_in(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, Sequence | set) and not isinstance(value, str | bytes):
        for item in value:
            yield from _tensors_in(item)
    elif hasattr(value, "__dataclass_fields__"):
        yield from _tensors_in(vars(value))


def whole_step_peak(
    model: nn.Module,
    step: Callable[[], object],
    inputs: object = (),
    optimizer: Optimizer | None = None,
    *,
    device: torch.device | str = "cpu",
) -> int:
    """Peak bytes of one ``step``, counting everything on the device that the step touches."""
    resident = resident_bytes(model, inputs, optimizer, device=device)
    return resident + measure_peak(step, device=device).delta_bytes


# ---------------------------------------------------------------------------------------------
# Steps and times
# ---------------------------------------------------------------------------------------------


def loss_of(output: Any) -> Tensor:
    """The scalar loss in a model's output: itself, its ``.loss``, or its ``["loss"]``."""
    if isinstance(output, Tensor):
        return output
    return output["loss"] if isinstance(output, Mapping) else output.loss


def step_function(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    optimizer: Optimizer | None = None,
    forward: Callable[..., Any] | None = None,
) -> Callable[[], None]:
    """A training step without arguments: forward, backward, optimizer, gradients to None.

    ``forward`` stands in for ``model`` where a peer wraps it; the gradients are the model's.
    """
    call = model if forward is None else forward
    kwargs = dict(kwargs or {})

    def step() -> None:
        output = call(*args, **kwargs)  # held through the backward, as a training loop does
        loss_of(output).backward()
        if optimizer is not None:
            optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None

    return step


@dataclass(frozen=True)
class Timing:
    """Seconds of every run of one contender, in the order of the rounds."""

    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


def measure_times(
    contenders: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int = 2,
    device: torch.device | str = "cpu",
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time all ``contenders`` in turn, ``rounds`` times, so that all see the same machine.

    The order within a round is reversed every second round: what a contender inherits from its
    predecessor (warm caches, a busy neighbour) falls on each of them. Compare with ``pair_ratio``.
    ``time.process_time`` as the clock leaves out what other processes take, for one thread.
    """
    device = torch.device(device)

    def timed(fn: Callable[[], object]) -> float:
        start = clock()
        fn()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return clock() - start

    for fn in contenders.values():
        for _ in range(warmup):
            timed(fn)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    with garbage_collector_off():
        for index in range(rounds):
            for name in names if index % 2 == 0 else reversed(names):
                seconds[name].append(timed(contenders[name]))
            gc.collect()  # between rounds, where it disturbs nobody
    return {name: Timing(tuple(times)) for name, times in seconds.items()}


def step_clock() -> Callable[[], float]:
    """The clock for steps on the CPU: with one thread the processor's, which only runs for us."""
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


def pair_ratio(times: Timing, base: Timing) -> tuple[float, float]:
    """Median over the rounds of ``times / base``, and half the distance between its quartiles."""
    ratios = sorted(a / b for a, b in zip(times.seconds, base.seconds, strict=True))
    if len(ratios) < 2:
        return ratios[0], 0.0
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return statistics.median(ratios), (high - low) / 2


@contextmanager
def garbage_collector_off() -> Iterator[None]:
    """Collect now, then keep Python's garbage collector still until the end."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
