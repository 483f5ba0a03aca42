"""Every schedule of a tiny problem, cheapest first: the oracle of the tests.

The space: the forward runs once, in order, with any choice of optional operations; then, between
any two backward operations, forward operations run again in any order and any number of times;
storages are freed at any time. Left out is only recomputation before the barrier. The search is
Dijkstra's over pairs (next operation of the step, resident forward storages), so it looks at
every schedule of that space without listing them.

With ``index_order`` the space shrinks to the one that stage-indexed programs (Checkmate, Jain et
al. 2020, arXiv:1910.02653) search: between two backward operations each operation at most once, in
the forward's order.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from autockpt_solvers.errors import SolverError
from autockpt_solvers.memory import simulate
from autockpt_solvers.on_demand import Demand, needed_storages, stage_schedule
from autockpt_solvers.problem import Problem
from autockpt_solvers.solution import Solution, measured

# (next operation, resident forward storages as bits, last recomputation of this stage)
State = tuple[int, int, int]

__all__ = ["MAX_RECOMPUTABLE", "cheapest", "fits", "smallest", "solve"]

MAX_RECOMPUTABLE = 8
MAX_STATES = 400_000


def solve(problem: Problem, budget_bytes: int | None, *, time_limit_s: float = 60.0) -> Solution:
    """Return the cheapest schedule, and among those the one with the smallest peak.

    Raises:
        SolverError: more than 8 forward operations may be recomputed, no schedule fits the
            budget, or the time is up.
    """
    started = time.perf_counter()
    if not fits(problem):
        raise SolverError(
            f"exhaustive looks at every schedule and stops at {MAX_RECOMPUTABLE} operations that "
            "may be recomputed; use method='auto'."
        )
    deadline = started + time_limit_s
    order = cheapest(problem, budget_bytes, deadline=deadline)
    if order is None:
        raise SolverError(f"exhaustive: no schedule fits {budget_bytes or 0:,} bytes.")
    best = simulate(problem, stage_schedule(problem, order))
    bound = best.extra_ns
    while True:  # equal cost, smaller peak
        other = cheapest(problem, best.peak_bytes - 1, deadline=deadline, limit_ns=bound)
        if other is None:
            break
        order, best = other, simulate(problem, stage_schedule(problem, other))
    return measured(
        problem,
        stage_schedule(problem, order),
        budget_bytes=budget_bytes,
        method="exhaustive",
        started=started,
        lower_bound_ns=bound,
    )


def fits(problem: Problem) -> bool:
    """Return whether a problem is small enough."""
    needed = needed_storages(Demand(problem))
    makers = {problem.producer[s] for s in needed}
    return sum(problem.operations[i].recomputable for i in makers) <= MAX_RECOMPUTABLE


def smallest(problem: Problem, *, deadline: float, index_order: bool = False) -> list[int]:
    """Return the backward order with the smallest peak; found by bisection.

    Raises:
        SolverError: the time is up.
    """
    order = cheapest(problem, None, deadline=deadline, index_order=index_order)
    assert order is not None
    high = simulate(problem, stage_schedule(problem, order)).peak_bytes
    low = problem.resident_bytes
    while low < high:
        middle = (low + high) // 2
        found = cheapest(problem, middle, deadline=deadline, index_order=index_order)
        if found is None:
            low = middle + 1
        else:
            order = found
            high = simulate(problem, stage_schedule(problem, order)).peak_bytes
    return order


@dataclass(frozen=True)
class _Step:
    """Bit masks and byte counts of one problem, by position in the step."""

    problem: Problem

    @cached_property
    def demand(self) -> Demand:
        return Demand(self.problem)

    @cached_property
    def useful(self) -> tuple[int, ...]:
        """For each operation the forward storages that it or anything later may still read."""
        problem, demand = self.problem, self.demand
        useful = [0] * (len(problem.operations) + 1)
        current = 0
        for index in range(len(problem.operations) - 1, -1, -1):
            todo = [s for s in problem.operations[index].inputs if demand.is_forward[s]]
            while todo:
                storage = todo.pop()
                if not current >> storage & 1:
                    current |= 1 << storage
                    if index >= problem.barrier and demand.may_recompute[storage]:
                        producer = problem.operations[problem.producer[storage]]
                        todo.extend(producer.recompute_inputs or ())
            useful[index] = current
        return tuple(useful)

    @cached_property
    def fixed_bytes(self) -> tuple[int, ...]:
        """Bytes at each operation that no choice changes, when it starts; see ``_held``."""
        problem, demand = self.problem, self.demand
        last: dict[int, int] = {}
        for index, op in enumerate(problem.operations):
            for storage in (*op.inputs, *op.outputs):
                last[storage] = index
        live = problem.resident_bytes
        fixed = [live]
        for index, op in enumerate(problem.operations):
            mine = [s for s in op.outputs if not demand.is_forward[s] or self.held >> s & 1]
            live += sum(problem.storages[s].size_bytes for s in mine)
            for storage in {*op.inputs, *op.outputs}:
                gone = last[storage] == index and storage not in problem.live_at_end
                if gone and not demand.is_forward[storage]:
                    live -= problem.storages[storage].size_bytes
            fixed.append(live)
        return tuple(fixed)

    @cached_property
    def held(self) -> int:
        """Storages the user holds from their making to the end."""
        return self.mask(self.problem.live_at_barrier & self.problem.live_at_end)

    @cached_property
    def at_barrier(self) -> int:
        """Storages that must be resident at the barrier."""
        return self.mask(self.problem.live_at_barrier)

    @cached_property
    def never_at_barrier(self) -> int:
        """Storages that must not be resident at the barrier."""
        return self.mask(
            s for s in range(len(self.problem.storages)) if not self.demand.may_keep[s]
        )

    @cached_property
    def pinned(self) -> tuple[int, ...]:
        """For each operation the storages whose freeing before it leaves no way to the end."""
        problem, demand = self.problem, self.demand
        once = self.mask(s for s, again in enumerate(demand.may_recompute) if not again)
        pinned = [self.held] * (len(problem.operations) + 1)
        forward = backward = 0
        for index in range(len(problem.operations) - 1, -1, -1):
            op = problem.operations[index]
            reads = self.mask(s for s in op.inputs if demand.is_forward[s])
            if index >= problem.barrier:
                backward |= reads & once
                pinned[index] |= backward
            else:
                forward |= 0 if op.optional else reads
                pinned[index] |= forward | backward | self.at_barrier
        return tuple(pinned)

    @staticmethod
    def mask(storages: Iterable[int]) -> int:
        mask = 0
        for storage in storages:
            mask |= 1 << storage
        return mask

    def size(self, mask: int) -> int:
        """Bytes of the storages in a mask, without those counted as fixed."""
        total = 0
        mask &= ~self.held
        while mask:
            low = mask & -mask
            total += self.problem.storages[low.bit_length() - 1].size_bytes
            mask ^= low
        return total


def cheapest(
    problem: Problem,
    budget_bytes: int | None,
    *,
    deadline: float,
    index_order: bool = False,
    limit_ns: int | None = None,
) -> list[int] | None:
    """Return the backward order of a cheapest schedule, or None where none fits.

    Args:
        problem: the problem.
        budget_bytes: the budget; None for no limit.
        deadline: ``time.perf_counter()`` at which to give up.
        index_order: only schedules with each stage's recomputations in the forward's order.
        limit_ns: only schedules that cost at most this.

    Raises:
        SolverError: the time is up, or there are too many states.
    """
    step = _Step(problem)
    operations, barrier, end = problem.operations, problem.barrier, len(problem.operations)
    forward_outputs = [
        step.mask(op.outputs) if i < barrier else 0 for i, op in enumerate(operations)
    ]
    inputs = [step.mask(s for s in op.inputs if step.demand.is_forward[s]) for op in operations]
    again_inputs = [step.mask(op.recompute_inputs or ()) for op in operations]
    again_outputs = [step.mask(op.recompute_outputs) for op in operations]
    # What a backward operation allocates: nothing where it is written over what dies there.
    backward_bytes = [
        sum(problem.storages[s].size_bytes for s in op.outputs)
        if i >= barrier and not problem.overwrites[i]
        else 0
        for i, op in enumerate(operations)
    ]
    held_bytes = [
        sum(problem.storages[s].size_bytes for s in op.outputs if step.held >> s & 1)
        for op in operations
    ]
    recomputable = [i for i in problem.forward if operations[i].recomputable]

    start: State = (0, 0, -1)
    best: dict[State, int] = {start: 0}
    parent: dict[State, tuple[State, int]] = {}
    done: set[State] = set()
    heap: list[tuple[int, int, State]] = [(0, 0, start)]
    pushed = 0
    while heap:
        cost, _, state = heapq.heappop(heap)
        if state in done:
            continue
        done.add(state)
        position, resident, last = state
        if position == end:
            order: list[int] = []
            while state in parent:
                state, index = parent[state]
                if index >= barrier or (index >= 0 and state[0] >= barrier):
                    order.append(index)
            return order[::-1]
        if len(done) > MAX_STATES or time.perf_counter() > deadline:
            raise SolverError("exhaustive: the time or the number of states is used up.")
        moves: list[tuple[State, int, int]] = []
        tight = False
        fixed = step.fixed_bytes[position]
        # Run the next operation.
        op = operations[position]
        if inputs[position] & ~resident == 0:
            during = resident | forward_outputs[position]
            over = problem.overwrites[position] if position < barrier else ()
            # Where it does not fit, in place of one of the storages that may die there.
            for left in (during, *(during & ~(1 << storage) for storage in over)):
                live = fixed + step.size(left) + backward_bytes[position] + held_bytes[position]
                if budget_bytes is not None and live + op.workspace_bytes > budget_bytes:
                    tight = True
                    continue
                after = left & (step.useful[position + 1] | step.held)
                if position + 1 <= barrier:
                    after |= left & step.at_barrier
                reached: State | None = (position + 1, after, -1)
                if position + 1 == barrier:
                    reached = _cross(step, left)
                if reached is not None:
                    moves.append((reached, cost + (op.cost_ns if op.optional else 0), position))
                if left == during:
                    break
        if op.optional:
            skipped: State | None = (position + 1, resident, -1)
            if position + 1 == barrier:
                skipped = _cross(step, resident)
            if skipped is not None:
                moves.append((skipped, cost, -1))
        if position >= barrier:
            for index in recomputable:
                if index_order and index <= last:
                    continue
                gain = again_outputs[index] & ~resident & step.useful[position]
                if not gain or again_inputs[index] & ~resident:
                    continue
                during = resident | again_outputs[index]
                live = fixed + step.size(during) + operations[index].workspace_bytes
                if budget_bytes is None or live <= budget_bytes:
                    after = during & (step.useful[position] | step.held)
                    reached = (position, after, index if index_order else -1)
                    moves.append((reached, cost + operations[index].cost_ns, index))
                else:
                    tight = True
        if tight:
            # Freeing can always wait until something does not fit.
            rest = resident & ~step.pinned[position]
            while rest:
                low = rest & -rest
                rest ^= low
                moves.append(((position, resident & ~low, last), cost, -1))
        for reached, total, index in moves:
            if limit_ns is not None and total > limit_ns:
                continue
            if reached not in best or total < best[reached]:
                best[reached] = total
                parent[reached] = (state, index)
                pushed += 1
                heapq.heappush(heap, (total, pushed, reached))
    return None


def _cross(step: _Step, resident: int) -> tuple[int, int, int] | None:
    """Return the state behind the barrier; None where something the user holds is missing."""
    if step.at_barrier & ~resident:
        return None
    barrier = step.problem.barrier
    after = resident & ~(step.never_at_barrier & ~step.at_barrier)
    return (barrier, after & (step.useful[barrier] | step.held), -1)
