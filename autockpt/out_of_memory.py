"""Out of memory: a step that ran out of it, told in the terms of its plan.

The generated code has a line for each run of an operation, so that the line which failed says where
in the schedule the step was; the plan says the rest.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable

import torch

from autockpt import _torch
from autockpt_solvers.errors import AutockptError, SolverError
from autockpt_solvers.minimum import minimum
from autockpt_solvers.plan import Plan
from autockpt_solvers.schedule import Compute
from autockpt_solvers.solve import alive, with_origin
from autockpt_solvers.units import format_seconds

__all__ = ["OutOfMemory", "Place", "explained"]

# Where an operation stands in a plan: the plan, and the operation's number in its problem.
Place = tuple[Plan, int]


class OutOfMemory(AutockptError, torch.OutOfMemoryError):
    """A planned step ran out of memory; the original error is its cause.

    Attributes:
        operation: the name of the operation that failed, with its module and source line.
        at: which part of the step it belongs to, and when it is due.
        tensors: ``(name, size_bytes)`` of what was alive, largest first, as the plan has it.
        live_bytes: their sum.
        budget_bytes: the budget that would have held: what the step is known to have had.
        minimum_bytes: the smallest peak found for the step; where it is larger than
            ``budget_bytes``, no budget would have held.
    """

    def __init__(
        self,
        operation: str,
        at: str,
        tensors: tuple[tuple[str, int], ...],
        budget_bytes: int,
        minimum_bytes: int,
    ) -> None:
        self.operation = operation
        self.at = at
        self.tensors = tensors
        self.live_bytes = sum(size for _, size in tensors)
        self.budget_bytes = budget_bytes
        self.minimum_bytes = minimum_bytes
        lines = [f"out of memory in {operation}, {at}.", f"{self.live_bytes:,} bytes were alive:"]
        lines += [f"  {size:>16,} bytes  {name}" for name, size in tensors[:8]]
        if budget_bytes >= minimum_bytes:
            lines.append(f"A budget of {budget_bytes:,} bytes would have held.")
        else:
            lines.append(
                f"No budget would have held: {budget_bytes:,} bytes were there at most, and the "
                f"smallest peak of this step is {minimum_bytes:,} bytes. Use a smaller batch, or "
                "free what else is on the device."
            )
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[object, ...]:
        fields = (self.operation, self.at, self.tensors, self.budget_bytes, self.minimum_bytes)
        return (type(self), fields)


def explained(
    error: BaseException, names: dict[str, int], place: Callable[[int], Place]
) -> OutOfMemory | None:
    """Return an allocation failure inside generated code in terms of the plan; None for others.

    What the failed call still held is let go of.

    Args:
        error: as the generated code raised it.
        names: of the graph's operations -> their numbers.
        place: where such an operation stands in the plan of the whole step.
    """
    if not _torch.is_out_of_memory(error):
        return None
    run = _torch.failed_run(error, names)
    if run is None:
        return None
    name, count = run
    plan, index = place(names[name])
    problem, schedule = plan.problem, plan.schedule
    computes = ((i, s) for i, s in enumerate(schedule.steps) if isinstance(s, Compute))
    runs = [i for i, s in computes if s.operation == index]
    if not runs:
        return None
    step = runs[min(count, len(runs) - 1)]
    trace = plan.trace
    op = problem.operations[index]
    before = sum(
        problem.operations[s.operation].cost_ns
        for s in schedule.steps[:step]
        if isinstance(s, Compute)
    )
    phase = "forward" if step < len(schedule.forward_computes) else "backward"
    phase = "backward, where it runs again" if step > runs[0] else phase
    at = f"in the {phase}, {format_seconds(before / 1e9)} into the step"
    there = alive(problem, schedule, step - 1)
    held = max([problem.resident_bytes, *trace.live_bytes[:step]])
    if trace.live_bytes[step] <= held:  # what was there before is not there any more
        held = sum(size for _, size in there)
    traceback.clear_frames(error.__traceback__)
    return OutOfMemory(
        with_origin(f"{op.name} [{op.kind}]", op),
        f"{at} of {format_seconds(trace.cost_ns / 1e9)}",
        there,
        held,
        _smallest(plan),
    )


def _smallest(plan: Plan) -> int:
    if plan.minimum_bytes is not None:
        return plan.minimum_bytes
    try:
        return minimum(plan.problem, time_limit_s=5.0).peak_bytes
    except SolverError:
        return plan.peak_bytes
