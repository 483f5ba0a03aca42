"""The memory timeline: live bytes over the time of one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autockpt_solvers.memory import Trace
from autockpt_solvers.problem import Problem
from autockpt_solvers.schedule import Compute, Schedule

__all__ = ["TimelinePoint", "trace_timeline"]


@dataclass(frozen=True, slots=True)
class TimelinePoint:
    """The live bytes from one moment on, until the next point.

    Attributes:
        time_s: time since the step began, in seconds.
        live_bytes: allocated while the operation runs, workspace and resident bytes included.
        operation: the operation that starts here; empty at the end of the step.
        phase: the part of the step the operation belongs to.
    """

    time_s: float
    live_bytes: int
    operation: str
    phase: Literal["forward", "recompute", "backward", "end"]


def trace_timeline(problem: Problem, schedule: Schedule, trace: Trace) -> tuple[TimelinePoint, ...]:
    """Return one point per run, at its start, and one at the end of the step.

    Frees take no time, so what they release shows in the next run's point. The largest point
    is the trace's peak.

    Args:
        problem: the problem the schedule solves.
        schedule: a valid schedule of it.
        trace: its simulation.

    >>> from autockpt_solvers.memory import simulate
    >>> from autockpt_solvers.problem import Operation, Storage
    >>> from autockpt_solvers.schedule import free_early
    >>> problem = Problem(
    ...     storages=(Storage("x", 8), Storage("grad", 8)),
    ...     operations=(
    ...         Operation("x", (), (0,), cost_ns=5_000, workspace_bytes=2),
    ...         Operation("grad", (0,), (1,), cost_ns=5_000),
    ...     ),
    ...     barrier=1,
    ...     live_at_end=frozenset({1}),
    ... )
    >>> schedule = free_early(problem, [0], [1])
    >>> for point in trace_timeline(problem, schedule, simulate(problem, schedule)):
    ...     print(point)
    TimelinePoint(time_s=0.0, live_bytes=10, operation='x', phase='forward')
    TimelinePoint(time_s=5e-06, live_bytes=16, operation='grad', phase='backward')
    TimelinePoint(time_s=1e-05, live_bytes=8, operation='', phase='end')
    """
    points = []
    done: set[int] = set()
    now_ns = 0
    live_bytes = 0
    for step, during_bytes in zip(schedule.steps, trace.live_bytes, strict=True):
        live_bytes = during_bytes
        if isinstance(step, Compute):
            op = problem.operations[step.operation]
            phase: Literal["forward", "recompute", "backward"] = "recompute"
            if step.operation >= problem.barrier:
                phase = "backward"
            elif step.operation not in done:
                phase = "forward"
            points.append(TimelinePoint(now_ns / 1e9, during_bytes, op.name, phase))
            done.add(step.operation)
            now_ns += op.cost_ns
            live_bytes -= op.workspace_bytes
    points.append(TimelinePoint(now_ns / 1e9, live_bytes, "", "end"))
    return tuple(points)
