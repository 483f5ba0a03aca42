"""The memory model: the one place that computes live bytes.

Rules, as the generated code and the device's allocator behave:

- a run needs its inputs resident, allocates all its outputs, then its workspace on top; the live
  bytes *during* the run count inputs, outputs and workspace together;
- a storage lives until its ``Free``; a storage is never computed while a copy is resident;
- a run in place takes over the memory of an input, which is gone from then on: who reads it later
  has to compute it again;
- at the barrier the user's outputs are resident, at the end the gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

from autockpt_solvers.errors import ScheduleError
from autockpt_solvers.problem import Problem
from autockpt_solvers.schedule import Barrier, Compute, Free, Schedule

__all__ = ["Trace", "live_storages", "peak_keeping_graph", "simulate"]


@dataclass(frozen=True)
class Trace:
    """What a schedule costs, step by step.

    Attributes:
        live_bytes: for each step of the schedule the bytes allocated while it runs (workspace
            included, resident bytes included); for a free or the barrier, after it.
        peak_bytes: the largest of them.
        peak_step: the first step of the schedule that reaches the peak.
        held_bytes: what lies between the forward's end and the backward, without resident bytes.
        cost_ns: time of all runs, in nanoseconds.
        extra_ns: the part of it spent on runs after the first and on optional operations.
    """

    live_bytes: tuple[int, ...]
    peak_bytes: int
    peak_step: int
    held_bytes: int
    cost_ns: int
    extra_ns: int


def simulate(problem: Problem, schedule: Schedule) -> Trace:
    """Return the live bytes and the cost of a schedule.

    Raises:
        ScheduleError: where the schedule breaks a dependency or a rule; the message names
            the step.

    >>> from autockpt_solvers.problem import Operation, Storage
    >>> from autockpt_solvers.schedule import free_early
    >>> problem = Problem(
    ...     storages=(Storage("x", 8), Storage("loss", 4), Storage("grad", 8)),
    ...     operations=(
    ...         Operation("x", (), (0,), 5, recompute_inputs=(), recompute_outputs=(0,)),
    ...         Operation("loss", (0,), (1,), 5, fixed="the user holds its output"),
    ...         Operation("grad", (0, 1), (2,), 5),
    ...     ),
    ...     barrier=2,
    ...     resident_bytes=100,
    ...     live_at_barrier=frozenset({1}),
    ...     live_at_end=frozenset({1, 2}),
    ... )
    >>> trace = simulate(problem, free_early(problem, [0, 1], [2]))
    >>> trace.peak_bytes, trace.extra_ns
    (120, 0)
    """
    operations, storages = problem.operations, problem.storages
    resident: set[int] = set()
    done = [False] * len(operations)
    live = problem.resident_bytes
    live_bytes: list[int] = []
    cost = extra = 0
    next_backward = problem.barrier
    passed = False
    held = problem.live_at_barrier & problem.live_at_end
    written_over: dict[int, str] = {}

    def fail(position: int, message: str) -> ScheduleError:
        return ScheduleError(f"step {position} of the schedule: {message}")

    def missing(storage: int) -> str:
        by = f" ({written_over[storage]} is written over it)" if storage in written_over else ""
        return f"{storages[storage].name}, which is not resident{by}"

    for position, step in enumerate(schedule.steps):
        if isinstance(step, Compute):
            index = step.operation
            op = operations[index]
            again = done[index]
            if index >= problem.barrier:
                if not passed:
                    raise fail(position, f"{op.name} belongs behind the barrier")
                if index != next_backward:
                    expected = (
                        operations[next_backward].name
                        if next_backward < len(operations)
                        else "nothing"
                    )
                    raise fail(position, f"{op.name} runs where {expected} is due")
                next_backward += 1
            elif passed and not again:
                raise fail(position, f"{op.name} first runs behind the barrier")
            if again and op.recompute_inputs is None:
                raise fail(position, f"{op.name} may not run again: {op.fixed}")
            inputs = op.recompute_inputs if again else op.inputs
            outputs = op.recompute_outputs if again else op.outputs
            assert inputs is not None
            for storage in inputs:
                if storage not in resident:
                    raise fail(position, f"{op.name} reads {missing(storage)}")
            if step.over is not None:
                if step.over not in op.over:
                    raise fail(position, f"{op.name} may not write over {storages[step.over].name}")
                if again:
                    raise fail(position, f"{op.name} writes in place in a further run")
                resident.remove(step.over)
                live -= storages[step.over].size_bytes
                written_over[step.over] = op.name
            for storage in outputs:
                if storage in resident:
                    raise fail(
                        position, f"{op.name} computes {storages[storage].name}, which is resident"
                    )
                resident.add(storage)
                live += storages[storage].size_bytes
            live_bytes.append(live + op.workspace_bytes)
            cost += op.cost_ns
            if again or op.optional:
                extra += op.cost_ns
            done[index] = True
        elif isinstance(step, Free):
            storage = step.storage
            if storage not in resident:
                raise fail(position, f"frees {storages[storage].name}, which is not resident")
            if storage in held:
                raise fail(position, f"frees {storages[storage].name}, which the user holds")
            resident.remove(storage)
            live -= storages[storage].size_bytes
            live_bytes.append(live)
        else:
            assert isinstance(step, Barrier)
            if passed:
                raise fail(position, "a second barrier")
            passed = True
            for index in problem.required:
                if not done[index]:
                    raise fail(position, f"{operations[index].name} has not run")
            for storage in problem.live_at_barrier:
                if storage not in resident:
                    raise fail(position, f"{storages[storage].name} is not there for the user")
            for storage in resident:
                if not storages[storage].keepable and storage not in problem.live_at_barrier:
                    raise fail(position, f"{storages[storage].name} is pinned to be recomputed")
            live_bytes.append(live)
    end = len(schedule.steps)
    if not passed:
        raise fail(end, "there is no barrier")
    if next_backward != len(operations):
        raise fail(end, f"{operations[next_backward].name} has not run")
    for storage in problem.live_at_end:
        if storage not in resident:
            raise fail(end, f"{storages[storage].name} must live to the end")
    peak = max(live_bytes)
    between = live_bytes[schedule.barrier] - problem.resident_bytes
    return Trace(tuple(live_bytes), peak, live_bytes.index(peak), between, cost, extra)


def peak_keeping_graph(problem: Problem, schedule: Schedule) -> int:
    """Return the peak of a schedule whose backward keeps its graph: it may run again.

    What the forward has saved is then there to the end, whatever the schedule frees.
    """
    peak = kept = 0
    saved: set[int] | None = None  # what the backward has not let go of yet
    trace = simulate(problem, schedule)
    for position, (step, live) in enumerate(zip(schedule.steps, trace.live_bytes, strict=True)):
        if isinstance(step, Barrier):
            saved = set(live_storages(problem, schedule, position))
        elif saved is not None and isinstance(step, Free) and step.storage in saved:
            saved.remove(step.storage)
            kept += problem.storages[step.storage].size_bytes
        peak = max(peak, live + kept)
    return peak


def live_storages(problem: Problem, schedule: Schedule, step: int) -> tuple[int, ...]:
    """Return the storages resident during a step of a valid schedule, largest first."""
    resident: set[int] = set()
    done: set[int] = set()
    for item in schedule.steps[: step + 1]:
        if isinstance(item, Compute):
            op = problem.operations[item.operation]
            resident.discard(-1 if item.over is None else item.over)
            resident.update(op.recompute_outputs if item.operation in done else op.outputs)
            done.add(item.operation)
        elif isinstance(item, Free):
            resident.discard(item.storage)
    return tuple(sorted(resident, key=lambda s: (-problem.storages[s].size_bytes, s)))
