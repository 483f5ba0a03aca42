"""Hold everything while it fits, evict what is cheapest to miss: schedules for any level.

Dynamic tensor rematerialization (Kirisame et al. 2021, arXiv:2006.09616) with the future known:
walk through the backward with everything the forward made at hand. Where an operation and its
recomputations do not fit, drop the storages with the least recomputation per byte and time to
the next use (after Belady). Where nothing is left to drop, each backward operation recomputes
from scratch what it reads, so low levels are reached, at a cost. A walk takes milliseconds.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Iterable, Sequence, Set
from functools import cached_property

import networkx as nx  # type: ignore[import-untyped]

from autockpt_solvers.errors import SolverError
from autockpt_solvers.liveness import Liveness
from autockpt_solvers.methods import keep_all
from autockpt_solvers.on_demand import BACKWARD, Demand, needed_storages, stage_schedule
from autockpt_solvers.problem import Problem
from autockpt_solvers.solution import Solution, measured

__all__ = ["PATIENCE", "Eviction", "cheapest_walk", "solve"]

# How much the time to the next use counts, as an exponent: none of these is best everywhere.
PATIENCE = (1.0, 0.0, 2.0, 0.5)


def solve(problem: Problem, budget_bytes: int | None, *, time_limit_s: float = 60.0) -> Solution:
    """Return the cheapest of a few walks.

    Raises:
        SolverError: none fits the budget.
    """
    started = time.perf_counter()
    if budget_bytes is None:
        return keep_all.solve(problem, None)
    deadline = started + time_limit_s
    order = cheapest_walk(Liveness(Demand(problem)), budget_bytes, deadline=deadline)
    if order is None:
        late = time.perf_counter() > deadline
        raise SolverError(
            f"eviction finds no schedule within {budget_bytes:,} bytes"
            + (" in time." if late else ". Use 'auto', or raise the budget.")
        )
    return measured(
        problem,
        stage_schedule(problem, order),
        budget_bytes=budget_bytes,
        method="eviction",
        started=started,
    )


def cheapest_walk(
    liveness: Liveness, budget_bytes: int, *, deadline: float = math.inf
) -> list[int] | None:
    """Return the cheapest backward order that walks of different patience find in time."""
    fitting: list[list[int]] = []
    for patience in PATIENCE:
        if time.perf_counter() > deadline:
            break
        order = Eviction(liveness, patience).order(budget_bytes, deadline=deadline)
        if order is not None:
            fitting.append(order)
    return min(fitting, key=lambda order: liveness.peak(order).extra_ns, default=None)


class Eviction:
    """The walk through one problem's backward; :meth:`order` may be called for many levels.

    Args:
        liveness: the facts of the problem.
        patience: exponent of the time to the next use, by which what is missed later is worth less.
    """

    def __init__(self, liveness: Liveness, patience: float = 1.0) -> None:
        self.liveness = liveness
        self.patience = patience
        self.problem = liveness.problem
        self.demand = liveness.demand
        self.sizes = [storage.size_bytes for storage in self.problem.storages]
        self.needed = needed_storages(self.demand) - liveness.held

    @cached_property
    def reads(self) -> dict[int, list[int]]:
        """For each storage the backward operations that read it, or something made from it."""
        reads: dict[int, set[int]] = {s: set() for s in self.needed}
        for offset, wanted in enumerate(self.demand.reads):
            for storage in wanted:
                if storage in reads:
                    reads[storage].add(offset)
        near = {s: set(offsets) for s, offsets in reads.items()}
        for storage, following in self.demand.recompute_graph.edges:
            if storage in near and following in reads:
                near[storage] |= reads[following]
        return {s: sorted(offsets) for s, offsets in near.items()}

    @cached_property
    def last_useful(self) -> dict[int, int]:
        """For each storage the last backward operation that it may help to serve."""
        graph = self.demand.recompute_graph
        last = dict.fromkeys(self.needed, -1)
        for offset, wanted in enumerate(self.demand.reads):
            for storage in wanted:
                if storage in last:
                    last[storage] = offset
        for storage in reversed(list(nx.topological_sort(graph))):
            if storage in last:
                later = (last[s] for s in graph.successors(storage) if s != BACKWARD and s in last)
                last[storage] = max(last[storage], *later, -1)
        return last

    def order(self, level: int, *, deadline: float = math.inf) -> list[int] | None:
        """Return a backward order whose peak is at most ``level``; None where the walk fails.

        It fails too where ``time.perf_counter()`` passes the deadline.
        """
        barrier = self.problem.barrier
        available = self._kept(level)
        if available is None:
            return None
        order: list[int] = []
        for offset in range(len(self.demand.reads)):
            stage = self._stage(offset, available, level)
            if stage is None or time.perf_counter() > deadline:
                return None
            block, available = stage
            order += block
            order.append(barrier + offset)
        return order if self.liveness.peak(order).peak_bytes <= level else None

    def _kept(self, level: int) -> set[int] | None:
        """Return what the forward leaves behind if it is to fit."""
        kept = {s for s in self.needed if self.demand.may_keep[s]}
        problem, last_read = self.problem, self.liveness.last_read
        optional = {i for i in problem.forward if problem.operations[i].optional}
        while problem.barrier:
            live = self.liveness.forward_with(kept, optional)
            top = int(live.argmax())
            over = int(live[top]) - level
            if over <= 0:
                break
            resident = {s for s in kept if last_read[s] < top and s not in problem.live_at_barrier}
            gone = self._victims(resident, kept, -1, over)
            if not gone:
                return None
            kept -= gone
        return kept

    def _stage(
        self, offset: int, available: set[int], level: int
    ) -> tuple[list[int], set[int]] | None:
        """Return what is run again before a backward operation and what is held behind it."""
        dropped: set[int] = set()
        while True:
            block = self._block(offset, available)
            made = {s for index in block for s in self.liveness.rows[index][1]}
            hold = {
                s
                for s in (available | made) - dropped
                if s in self.last_useful and self.last_useful[s] > offset
            }
            over = self._top(offset, block, hold) - level
            if over <= 0:
                return block, hold
            gone = self._victims(hold, hold, offset, over)
            if gone:
                dropped |= gone
                continue
            # Recompute even what is there, rather than have it wait for its reader in the block.
            wanted = set(self.liveness.rows[self.problem.barrier + offset][0])
            waiting = {s for index in block for s in self.liveness.rows[index][0]} & available
            waiting = {s for s in waiting - wanted if self.demand.may_recompute[s]}
            if not waiting:
                return None
            available = available - {max(waiting, key=lambda s: (self.sizes[s], s))}

    def _block(self, offset: int, available: Set[int]) -> list[int]:
        """Return the operations to run again, inputs first, depth first."""
        rows, producer = self.liveness.rows, self.problem.producer
        have = set(available)
        block: list[int] = []
        stack = list(reversed(rows[self.problem.barrier + offset][0]))
        while stack:
            storage = stack[-1]
            if storage in have:
                stack.pop()
                continue
            self.demand.check(storage)
            index = producer[storage]
            missing = [s for s in rows[index][0] if s not in have]
            if missing:
                stack.extend(reversed(missing))
                continue
            stack.pop()
            block.append(index)
            have.update(rows[index][1])
        return block

    def _top(self, offset: int, block: Sequence[int], hold: Iterable[int]) -> int:
        """Return the highest level of a stage, as :meth:`Liveness.levels` counts it."""
        sizes, rows = self.sizes, self.liveness.rows
        during, before = self.liveness.backward_bytes
        need = set(hold) | set(rows[self.problem.barrier + offset][0])
        live = sum(sizes[s] for s in need)
        top = live + during[offset]
        base = before[offset]
        for index in reversed(block):
            reads, makes, workspace = rows[index]
            for storage in reads:
                if storage not in need:
                    need.add(storage)
                    live += sizes[storage]
            dead = sum(sizes[s] for s in makes if s not in need)
            top = max(top, live + dead + workspace + base)
            for storage in makes:
                if storage in need:
                    need.remove(storage)
                    live -= sizes[storage]
        return top

    def _victims(self, candidates: Set[int], have: Set[int], offset: int, over: int) -> set[int]:
        """Return the cheapest storages to drop that make up ``over`` bytes, or all there are."""
        ranked = sorted(
            (self._worth(s, have, offset), s)
            for s in candidates
            if self.sizes[s] and self.demand.may_recompute[s]
        )
        gone: set[int] = set()
        total = 0
        for _, storage in ranked:
            if total >= over:
                break
            gone.add(storage)
            total += self.sizes[storage]
        return gone

    def _worth(self, storage: int, have: Set[int], offset: int) -> float:
        """Return what missing a storage costs, per byte and time to its next use."""
        operations, producer = self.problem.operations, self.problem.producer
        cost = 0
        seen: set[int] = set()
        todo = [storage]
        while todo:
            index = producer[todo.pop()]
            if index in seen:
                continue
            seen.add(index)
            cost += operations[index].cost_ns
            todo += [s for s in self.liveness.rows[index][0] if s not in have]
        reads = self.reads[storage]
        following = bisect_right(reads, offset)
        end = len(self.demand.reads)
        wait = (reads[following] if following < len(reads) else 2 * end) - offset
        patience = math.pow(wait, self.patience)
        return cost / (self.sizes[storage] * patience)
