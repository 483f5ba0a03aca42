"""Measure: one step as the device's allocator sees it, beside what the plan predicts.

Nothing of the simulator goes into the measured figures: on the CPU they are the allocations and
frees that torch's profiler reports, on CUDA those of the caching allocator. Which operation runs
when comes from a dispatch mode; inside the compiled graphs the operators run in the schedule's
order, which names them.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autockpt import _torch
from autockpt.allocator import AllocatorReport, allocator_report, reset_peaks
from autockpt.device import placement
from autockpt_solvers.chrome import Point, write_chrome_trace
from autockpt_solvers.errors import InputError
from autockpt_solvers.plan import PeakTensor, Plan
from autockpt_solvers.schedule import Compute

__all__ = ["Compared", "Measurement", "measure"]


@dataclass(frozen=True, slots=True)
class Compared:
    """The live bytes while one run of an operation lasts, measured and predicted."""

    operation: str
    measured_bytes: int
    predicted_bytes: int


@dataclass(frozen=True)
class Measurement:
    """One measured step.

    Attributes:
        timeline: time in seconds since the first event, bytes alive after it, and the operation;
            one point per allocation and free.
        peak_bytes: the largest of these bytes.
        left_bytes: what the step allocated and has not freed.
        at_peak: what the step allocated and is alive at the peak, largest first; named as in the
            plan where it is known, else by the operator that allocated it.
        compared: for each run of the plan's schedule that was recognised the bytes while it lasts.
        plan: the plan the step ran under, where there is one.
        snapshot: torch's own snapshot of the allocator, on CUDA.
        allocator: what the allocator reserved for it, on CUDA.
    """

    timeline: tuple[Point, ...]
    peak_bytes: int
    left_bytes: int
    at_peak: tuple[PeakTensor, ...]
    compared: tuple[Compared, ...] = ()
    plan: Plan | None = None
    snapshot: Any = None
    allocator: AllocatorReport | None = None

    def save_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the measured timeline, and the plan's, for chrome://tracing or Perfetto.

        Raises:
            OSError: where the file cannot be written.
        """
        timelines: dict[str, Sequence[Point]] = {"measured": self.timeline}
        if self.plan is not None:
            timelines["predicted"] = self.plan.points
        write_chrome_trace(path, timelines)

    def save_snapshot(self, path: str | os.PathLike[str]) -> None:
        """Write torch's snapshot, which https://pytorch.org/memory_viz reads.

        Raises:
            InputError: on the CPU, whose allocator has none.
            OSError: where the file cannot be written.
        """
        if self.snapshot is None:
            raise InputError("only CUDA's allocator has a snapshot; use save_chrome_trace.")
        Path(path).write_bytes(pickle.dumps(self.snapshot))


def measure(step: Callable[[], Any], model: nn.Module | None = None) -> Measurement:
    """Run one training step and return what it allocated when.

    Run a step or two before: the first ones capture and plan.

    Args:
        step: forward, backward and whatever else belongs to a step; called once.
        model: the optimised model. With it the bytes count what its plan says is there
            throughout, names are the plan's, and prediction and measurement stand side by side.

    Raises:
        InputError: the thread is being profiled already.
    """
    if _torch.is_profiled():
        raise InputError("this thread is being profiled already; measure outside the profiler.")
    device = torch.device("cpu") if model is None else placement(model)
    handle = getattr(model, "autockpt", None)
    resident_bytes = 0 if handle is None else handle.bytes_before()
    if model is None and torch.cuda.is_initialized():
        device = torch.device("cuda", torch.cuda.current_device())
    onlooker = _Onlooker(device)
    snapshot = allocator = None
    ranges: list[_torch.NamedRange] = []
    if device.type == "cuda":
        snapshot = _torch.cuda_history(lambda: onlooker.watch(step), device)
        allocator = onlooker.report()
        events = _cuda_events(snapshot, device)
    else:
        events, ranges = _torch.watched_step(lambda: onlooker.watch(step))
    plan = getattr(handle, "plan", None)
    live = [resident_bytes]
    for event in events:
        live.append(live[-1] + event.size_bytes)
    steps: dict[int, Compute] = {}
    compared: tuple[Compared, ...] = ()
    if plan is not None:
        highs = {
            int(r.name): max(live[r.first_event : r.last_event + 1]) for r in ranges if r.compiled
        }
        if device.type == "cuda":
            highs = {n: high + resident_bytes for n, high in onlooker.highs.items()}
        steps, compared = _aligned(plan, onlooker.names, highs)
    start_ns = events[0].time_ns if events else 0
    timeline = tuple(
        ((e.time_ns - start_ns) / 1e9, after, _label(e.scope, onlooker.names))
        for e, after in zip(events, live[1:], strict=True)
    )
    return Measurement(
        timeline,
        max(live),
        live[-1] - resident_bytes,
        _alive(plan, events[: live.index(max(live))], steps, onlooker.names),
        compared,
        plan,
        snapshot,
        allocator,
    )


class _Onlooker:
    """Sees every operator of a step; on CUDA it reads the allocator's figures around each."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.names: list[str] = []
        self.highs: dict[int, int] = {}
        self.before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        self.peaks = (0, 0)  # the allocator's own figures begin anew at each operator

    def report(self) -> AllocatorReport:
        """Return what CUDA's allocator held at most during the step."""
        now = allocator_report(self.device)
        allocated = max(self.peaks[0], now.peak_allocated_bytes)
        reserved = max(self.peaks[1], now.peak_reserved_bytes)
        return replace(now, peak_allocated_bytes=allocated, peak_reserved_bytes=reserved).advised()

    def watch(self, step: Callable[[], Any]) -> None:
        with _torch.OperatorMode(self.see):
            step()

    def see(self, name: str, run: Callable[[], Any], _inputs: list[torch.Tensor]) -> Any:
        number = len(self.names)
        self.names.append(name)
        if self.device.type == "cuda":
            reset_peaks(self.device)
            try:
                return run()
            finally:
                report = allocator_report(self.device)
                self.highs[number] = report.peak_allocated_bytes - self.before
                own = (report.peak_allocated_bytes, report.peak_reserved_bytes)
                self.peaks = max(self.peaks[0], own[0]), max(self.peaks[1], own[1])
        with _torch.named_range(str(number)):
            return run()


def _cuda_events(snapshot: Any, device: torch.device) -> list[_torch.AllocatorEvent]:
    signs = {"alloc": 1, "free_completed": -1}
    traces = snapshot["device_traces"][device.index or 0]
    return [
        _torch.AllocatorEvent(e["time_us"] * 1000, e["addr"], signs[e["action"]] * e["size"], "")
        for e in traces
        if e["action"] in signs
    ]


# ------------------------------------------------------------------ beside the plan


def _operator(kind: str) -> str:
    """Return what all forms of one operator share: ``aten.relu_.default`` is ``relu``."""
    name = kind.partition(".")[2].partition(".")[0]
    return name.rstrip("_").removesuffix("_functional")


def _aligned(
    plan: Plan, seen: Sequence[str], highs: dict[int, int]
) -> tuple[dict[int, Compute], tuple[Compared, ...]]:
    """Find the schedule's runs among the operators that ran inside compiled graphs.

    Returns:
        Operator seen -> step of the schedule; and the bytes of each run, in order. Views are
        seen and not scheduled; what runs outside the graphs is scheduled and not seen.
    """
    problem = plan.problem
    runs = [
        (step, level)
        for step, level in zip(plan.schedule.steps, plan.trace.live_bytes, strict=True)
        if isinstance(step, Compute) and _operator(problem.operations[step.operation].kind)
    ]
    steps: dict[int, Compute] = {}
    compared: list[Compared] = []
    for number in sorted(highs):
        if len(compared) == len(runs):
            break
        step, predicted_bytes = runs[len(compared)]
        op = problem.operations[step.operation]
        if _operator(seen[number]) == _operator(op.kind):
            steps[number] = step
            compared.append(Compared(op.name, highs[number], predicted_bytes))
    return steps, tuple(compared)


def _label(scope: str, seen: Sequence[str]) -> str:
    return seen[int(scope)] if scope.isdecimal() else scope


def _alive(
    plan: Plan | None,
    events: Sequence[_torch.AllocatorEvent],
    steps: dict[int, Compute],
    seen: Sequence[str],
) -> tuple[PeakTensor, ...]:
    """Return what is alive after these events, largest first."""
    alive: dict[int, _torch.AllocatorEvent] = {}
    for event in events:
        if event.size_bytes > 0:
            alive[event.address] = event
        else:
            alive.pop(event.address, None)
    now = max((int(e.scope) for e in events if e.scope.isdecimal()), default=-1)
    tensors = []
    for event in alive.values():
        tensor = PeakTensor(_label(event.scope, seen), "", "", event.size_bytes)
        if plan is not None and event.scope.isdecimal() and int(event.scope) in steps:
            tensor = _named(plan, event, steps, now)
        tensors.append(tensor)
    return tuple(sorted(tensors, key=lambda t: -t.size_bytes))


def _named(
    plan: Plan, event: _torch.AllocatorEvent, steps: dict[int, Compute], now: int
) -> PeakTensor:
    """Return what lies in memory that an operation of the plan allocated."""
    problem, number = plan.problem, int(event.scope)
    op = problem.operations[steps[number].operation]
    storage = next((s for s in op.outputs if _size(plan, s) == event.size_bytes), None)
    for later in range(number + 1, now + 1):  # others may have been written over it since
        if storage is not None and later in steps and steps[later].over == storage:
            op = problem.operations[steps[later].operation]
            storage = op.outputs[0]
    name = op.name if storage is None else problem.storages[storage].name
    return PeakTensor(name, op.module_path, op.source, event.size_bytes)


def _size(plan: Plan, storage: int) -> int:
    return plan.problem.storages[storage].size_bytes
