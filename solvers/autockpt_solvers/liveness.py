"""The simulator's peak for on-demand schedules, a hundred times faster.

Searches ask for thousands of peaks of one problem. With the forward run once and every copy freed
at once (:func:`autockpt_solvers.schedule.free_early`), the bytes of backward storages and of
forward storages during the forward hardly depend on the schedule. They are added up once; per
schedule remains one reversed pass over the backward order. A property test pins this file to
:func:`autockpt_solvers.memory.simulate`, and every answer is simulated again before it is returned.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autockpt_solvers.memory import simulate
from autockpt_solvers.on_demand import Demand, optional_operations, stage_schedule
from autockpt_solvers.problem import Problem
from autockpt_solvers.schedule import BARRIER, Compute

__all__ = ["Liveness", "Peak"]


@dataclass(frozen=True)
class Peak:
    """Where and how high a schedule peaks.

    Attributes:
        peak_bytes: the peak, resident bytes included.
        position: the index into the backward order at which it is reached; for an operation of
            the forward, that operation minus the number of forward operations (negative).
        kept: the forward storages resident behind the barrier.
        extra_ns: cost of recomputations and optional operations, in nanoseconds.
        excess: sum, over the operations as they run, of the bytes above the asked level.
    """

    peak_bytes: int
    position: int
    kept: frozenset[int]
    extra_ns: int
    excess: int


@dataclass(frozen=True)
class Liveness:
    """Byte counts of one problem that no schedule changes.

    Attributes:
        demand: the facts of the problem.
    """

    demand: Demand

    @property
    def problem(self) -> Problem:
        """The problem."""
        return self.demand.problem

    @cached_property
    def held(self) -> frozenset[int]:
        """Storages the user holds from their making to the end."""
        return self.problem.live_at_barrier & self.problem.live_at_end

    @cached_property
    def last_read(self) -> tuple[int, ...]:
        """For each storage its last required operation, reading or making it, in its own half."""
        problem = self.problem
        last = list(problem.producer)
        for index, op in enumerate(problem.operations):
            if op.optional:
                continue
            for storage in op.inputs:
                if index < problem.barrier or not self.demand.is_forward[storage]:
                    last[storage] = max(last[storage], index)
        return tuple(last)

    @cached_property
    def in_place(self) -> dict[int, tuple[tuple[int, ...], int]]:
        """The forward operations that are written over one of these storages if it is not kept.

        With them stands what that saves while they run, in bytes.
        """
        problem = self.problem
        return {
            i: (over, problem.storages[over[0]].size_bytes)
            for i in problem.forward
            if (over := problem.overwrites[i])
        }

    @cached_property
    def forward_bytes(self) -> NDArray[np.int64]:
        """Bytes during each forward operation if nothing is kept, workspace included."""
        problem = self.problem
        delta = np.zeros(problem.barrier + 1, np.int64)
        for storage, made in enumerate(problem.producer):
            if made < problem.barrier:
                end = self.last_read[storage] + 1
                if storage in problem.live_at_barrier:
                    end = problem.barrier
                delta[made] += problem.storages[storage].size_bytes
                delta[end] -= problem.storages[storage].size_bytes
        workspace = [problem.operations[i].workspace_bytes for i in problem.forward]
        for index, (_, saved_bytes) in self.in_place.items():
            workspace[index] -= saved_bytes
        return np.cumsum(delta)[:-1] + np.array(workspace, np.int64) + problem.resident_bytes

    @cached_property
    def backward_bytes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Bytes without the chosen forward storages, by backward operation.

        First while it runs, workspace included; second right before it.
        """
        problem = self.problem
        barrier, end = problem.barrier, len(problem.operations)
        delta = np.zeros(end - barrier + 1, np.int64)
        outputs = np.zeros(end - barrier, np.int64)
        for storage, made in enumerate(problem.producer):
            if made >= barrier:
                size = problem.storages[storage].size_bytes
                last = end if storage in problem.live_at_end else self.last_read[storage] + 1
                delta[made - barrier] += size
                delta[last - barrier] -= size
                outputs[made - barrier] += size
        constant = problem.resident_bytes + sum(problem.storages[s].size_bytes for s in self.held)
        during = np.cumsum(delta)[:-1] + constant
        workspace = np.array([problem.operations[i].workspace_bytes for i in problem.backward])
        for index in problem.backward:
            if problem.overwrites[index]:
                workspace[index - barrier] -= outputs[index - barrier]
        before = during - outputs
        return (
            tuple(int(x) for x in during + workspace.astype(np.int64)),
            tuple(int(x) for x in before),
        )

    @cached_property
    def _odd(self) -> bool:
        """Whether optional operations read storages, so that they change forward lifetimes."""
        return any(op.optional and op.inputs for op in self.problem.operations)

    @cached_property
    def rows(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]:
        """For each operation, as it runs behind the barrier: forward reads, makes, workspace."""
        problem, demand = self.problem, self.demand
        rows = []
        for index, op in enumerate(problem.operations):
            inputs = op.recompute_inputs or () if index < problem.barrier else op.inputs
            reads = (s for s in inputs if demand.is_forward[s] and s not in self.held)
            makes = op.recompute_outputs if index < problem.barrier else ()
            rows.append((tuple(dict.fromkeys(reads)), tuple(makes), op.workspace_bytes))
        return tuple(rows)

    def kept(self, order: Sequence[int]) -> set[int]:
        """Return the forward storages that a backward order needs behind the barrier."""
        need: set[int] = set()
        for index in reversed(order):
            reads, makes, _ = self.rows[index]
            need.difference_update(makes)
            need.update(reads)
        return need

    def levels(self, order: Sequence[int]) -> list[int]:
        """Return the bytes during each operation of a backward order, as :meth:`peak` counts."""
        barrier = self.problem.barrier
        during, before = self.backward_bytes
        need: set[int] = set()
        live = base = 0
        levels: list[int] = []
        for index in reversed(order):
            reads, makes, workspace = self.rows[index]
            fresh = [s for s in reads if s not in need]
            need.update(fresh)
            live += sum(self.problem.storages[s].size_bytes for s in fresh)
            if index >= barrier:
                base = before[index - barrier]
                levels.append(live + during[index - barrier])
                continue
            dead = sum(self.problem.storages[s].size_bytes for s in makes if s not in need)
            gone = sum(self.problem.storages[s].size_bytes for s in makes if s in need)
            need.difference_update(makes)
            levels.append(live + dead + workspace + base)
            live -= gone
        return levels[::-1]

    def peak(self, order: Sequence[int], level: int = 0) -> Peak:
        """Return the peak of a backward order with its forward run once, and its excess.

        The order must be valid, as those of :func:`autockpt_solvers.on_demand.on_demand` are.
        """
        if self._odd:
            return self._simulated(order, level)
        problem = self.problem
        barrier = problem.barrier
        during, before = self.backward_bytes
        storages, rows = problem.storages, self.rows
        need: set[int] = set()
        live = 0
        best, where = -1, 0
        extra = 0
        base = 0
        excess = 0
        read: set[int] = set()
        for position in range(len(order) - 1, -1, -1):
            index = order[position]
            reads, makes, workspace = rows[index]
            for storage in reads:
                if storage not in need:
                    need.add(storage)
                    live += storages[storage].size_bytes
            if index >= barrier:
                base = before[index - barrier]
                now = live + during[index - barrier]
            else:
                dead = 0
                gone = 0
                for storage in makes:
                    if storage in need:
                        need.remove(storage)
                        gone += storages[storage].size_bytes
                    else:
                        dead += storages[storage].size_bytes
                now = live + dead + workspace + base
                live -= gone
                extra += problem.operations[index].cost_ns
                read.update(problem.operations[index].recompute_inputs or ())
            if now > best:
                best, where = now, position
            if now > level:
                excess += now - level
        optional = optional_operations(problem, read)
        extra += sum(problem.operations[i].cost_ns for i in optional)
        forward = self.forward_with(need, optional)
        if barrier:
            top = int(forward.argmax())
            if int(forward[top]) >= best:
                best, where = int(forward[top]), top - barrier
            excess += int((forward - level)[forward > level].sum())
        return Peak(best, where, frozenset(need), extra, excess)

    def forward_with(self, kept: Set[int], optional: Set[int]) -> NDArray[np.int64]:
        """Return the bytes during each forward operation; 0 for one that does not run."""
        problem = self.problem
        delta = np.zeros(problem.barrier + 1, np.int64)
        for storage in kept:
            if storage not in problem.live_at_barrier:
                delta[self.last_read[storage] + 1] += problem.storages[storage].size_bytes
        total = np.cumsum(delta)[:-1] + self.forward_bytes
        for index, (over, saved_bytes) in self.in_place.items():
            if all(storage in kept for storage in over):
                total[index] += saved_bytes
        for index in problem.forward:
            op = problem.operations[index]
            if op.optional and index not in optional:
                total[index] = 0
                # ``forward_bytes`` counts its outputs for that one operation only, so nothing
                # else has to be taken back.
        return total

    def resident(self, order: Sequence[int], peak: Peak) -> frozenset[int]:
        """Return the forward storages resident where a backward order peaks."""
        problem = self.problem
        where, kept = peak.position, peak.kept
        if where < 0:
            index = where + problem.barrier
            return frozenset(
                s
                for s, made in enumerate(problem.producer)
                if made <= index
                and (s in kept or s in problem.live_at_barrier or self.last_read[s] >= index)
            )
        need: set[int] = set()
        for index in reversed(order[where:]):
            reads, makes, _ = self.rows[index]
            if index != order[where] or index >= problem.barrier:
                need.difference_update(makes)
            need.update(reads)
        return frozenset(need)

    def _simulated(self, order: Sequence[int], level: int) -> Peak:
        """Return the same from the simulator: slow, and right for every problem."""
        problem = self.problem
        schedule = stage_schedule(problem, list(order))
        trace = simulate(problem, schedule)
        computes = [
            s.operation for s in schedule.steps[: trace.peak_step + 1] if isinstance(s, Compute)
        ]
        behind = BARRIER in schedule.steps[: trace.peak_step + 1]
        forward = len(schedule.forward_computes)
        position = len(computes) - forward - 1 if behind else computes[-1] - problem.barrier
        return Peak(
            trace.peak_bytes,
            position,
            frozenset(self.kept(order)),
            trace.extra_ns,
            sum(
                live - level
                for step, live in zip(schedule.steps, trace.live_bytes, strict=True)
                if isinstance(step, Compute) and live > level
            ),
        )
