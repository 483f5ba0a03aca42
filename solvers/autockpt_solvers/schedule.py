"""The schedule: the exact order of computations and frees of one training step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from autockpt_solvers.problem import Problem

__all__ = ["BARRIER", "Barrier", "Compute", "Free", "Schedule", "Step", "free_early"]


@dataclass(frozen=True, slots=True)
class Compute:
    """Run an operation; its outputs become resident.

    Attributes:
        operation: the operation.
        over: the resident storage that its output is written over, which is gone then; None where
            the output gets memory of its own.
    """

    operation: int
    over: int | None = None


@dataclass(frozen=True, slots=True)
class Free:
    """Free the resident copy of a storage."""

    storage: int


@dataclass(frozen=True, slots=True)
class Barrier:
    """The forward returns to the user; the backward begins."""


BARRIER = Barrier()
Step = Compute | Free | Barrier


@dataclass(frozen=True)
class Schedule:
    """Steps in order, with exactly one barrier.

    A schedule is only data; :func:`autockpt_solvers.memory.simulate` says whether it is valid.
    """

    steps: tuple[Step, ...]

    @cached_property
    def barrier(self) -> int:
        """The position of the barrier."""
        return self.steps.index(BARRIER)

    @cached_property
    def forward_computes(self) -> tuple[int, ...]:
        """Operations run before the barrier, in order."""
        return self._computes(self.steps[: self.barrier])

    @cached_property
    def backward_computes(self) -> tuple[int, ...]:
        """Operations run after the barrier, in order."""
        return self._computes(self.steps[self.barrier :])

    @cached_property
    def runs(self) -> dict[int, int]:
        """How often each operation that runs at all is run."""
        count: dict[int, int] = {}
        for operation in (*self.forward_computes, *self.backward_computes):
            count[operation] = count.get(operation, 0) + 1
        return count

    @staticmethod
    def _computes(steps: Iterable[Step]) -> tuple[int, ...]:
        return tuple(step.operation for step in steps if isinstance(step, Compute))

    # ---------------------------------------------------------------- JSON

    def to_list(self) -> list[Any]:
        """Return plain JSON data: ``["c", 3]``, over 5 ``["c", 3, 5]``, ``["f", 7]``, ``["b"]``."""
        data: list[Any] = []
        for step in self.steps:
            if isinstance(step, Compute):
                over = [] if step.over is None else [step.over]
                data.append(["c", step.operation, *over])
            elif isinstance(step, Free):
                data.append(["f", step.storage])
            else:
                data.append(["b"])
        return data

    @staticmethod
    def from_list(data: Sequence[Sequence[Any]]) -> Schedule:
        """Return the schedule that :meth:`to_list` described."""

        def step(item: Sequence[Any]) -> Step:
            if item[0] == "c":
                return Compute(item[1], item[2] if len(item) > 2 else None)
            if item[0] == "f":
                return Free(item[1])
            if item[0] == "b":
                return BARRIER
            raise ValueError(f"{item!r} is no step of a schedule")

        return Schedule(tuple(step(item) for item in data))


def free_early(problem: Problem, forward: Sequence[int], backward: Sequence[int]) -> Schedule:
    """Return the schedule that runs these operations in order and frees each copy at once.

    A copy dies right after its last read before the same storage is computed again, or at
    the end of the part of the step in which it must survive. This is what the generated code does:
    a name is dropped after its last use and always means the newest copy. A first run whose
    operation may be written over one of the storages that die there is.

    Args:
        problem: the problem the operations belong to.
        forward: operations to run before the barrier (optional ones only where wanted).
        backward: operations after it: every backward one once, with recomputations between.
    """
    order = [*forward, -1, *backward]
    seen: set[int] = set()
    first_run: list[bool] = []
    for index in order:
        first_run.append(index not in seen)
        seen.add(index)
    needed = set(problem.live_at_end)
    held = problem.live_at_barrier & problem.live_at_end
    frees: list[list[int]] = [[] for _ in order]
    for position in range(len(order) - 1, -1, -1):
        index = order[position]
        if index < 0:
            # What lives to the barrier only is freed right behind it.
            frees[position] = sorted(problem.live_at_barrier - needed)
            needed |= problem.live_at_barrier
            continue
        op = problem.operations[index]
        if first_run[position]:
            outputs, inputs = op.outputs, op.inputs
        else:
            outputs, inputs = op.recompute_outputs, op.recompute_inputs or ()
        dead = frees[position]
        for storage in outputs:
            if storage not in needed:
                dead.append(storage)
            elif storage not in held:
                needed.remove(storage)
        for storage in inputs:
            if storage not in needed:
                dead.append(storage)
                needed.add(storage)
    steps: list[Step] = []
    for index, first, dead in zip(order, first_run, frees, strict=True):
        if index < 0:
            steps.append(BARRIER)
            over = None
        else:
            allowed = problem.overwrites[index] if first else ()
            over = next((s for s in allowed if s in dead), None)
            steps.append(Compute(index, over))
        steps.extend(Free(s) for s in dead if s != over)
    return Schedule(tuple(steps))
