"""Drop what is cheap to recompute until the peak fits, then put back what still fits.

Start from everything kept. While the exact peak is above the budget, give up one storage that is
resident at the peak: the one with the least new recomputation per byte. A kept storage is given
up to recomputation; one that has been recomputed and waits for its next use is given up to a
second recomputation. Then each given-up storage is taken back where the peak allows, dearest
first. Every decision is made on exact peaks; nothing is proved.
"""

from __future__ import annotations

import time
from collections.abc import Sequence, Set

from autockpt_solvers.errors import SolverError
from autockpt_solvers.liveness import Liveness, Peak
from autockpt_solvers.methods import keep_all
from autockpt_solvers.on_demand import Demand, needed_storages, on_demand, stage_schedule
from autockpt_solvers.problem import Problem
from autockpt_solvers.solution import Solution, measured

__all__ = ["Choice", "descend", "put_back", "solve"]


# Decisions to change: ("kept" or "held", storage).
Flips = Set[tuple[str, int]]

# At least so many storages make it worth giving up several without trying each.
BULK = 6


class Choice:
    """Which storages are kept, and which stay once recomputed; with the schedule they make.

    Mutable: :func:`descend` and :func:`put_back` change it move by move. ``lowest`` is the lowest
    peak on the way and its backward order.
    """

    def __init__(
        self, liveness: Liveness, kept: Set[int], held: Set[int], budget_bytes: int
    ) -> None:
        self.liveness = liveness
        self.budget_bytes = budget_bytes
        self.kept = set(kept)
        self.held = set(held)
        self.order = self.order_of(self.kept, self.held)
        self.peak: Peak = liveness.peak(self.order, budget_bytes)
        self.kept &= self.peak.kept
        self.lowest = (self.peak.peak_bytes, self.order)

    def order_of(self, kept: Set[int], held: Set[int]) -> list[int]:
        """Return the backward order of other decisions."""
        return on_demand(self.liveness.demand, kept, held)

    def try_flips(self, flips: Flips) -> tuple[list[int], Peak] | None:
        """Return the order and the peak after some flips; None where it recomputes endlessly."""
        kept = self.kept ^ {s for what, s in flips if what == "kept"}
        held = self.held ^ {s for what, s in flips if what == "held"}
        try:
            order = self.order_of(kept, held)
        except SolverError:
            return None
        return order, self.liveness.peak(order, self.budget_bytes)

    def accept(self, flips: Flips, order: list[int], peak: Peak) -> None:
        """Make the flips."""
        self.kept ^= {s for what, s in flips if what == "kept"}
        self.held ^= {s for what, s in flips if what == "held"}
        self.order, self.peak = order, peak
        if peak.peak_bytes < self.lowest[0]:
            self.lowest = (peak.peak_bytes, order)
        # Kept in name only, read by nobody: forget it, or the next flip is judged wrongly.
        self.kept &= peak.kept


def solve(problem: Problem, budget_bytes: int | None, *, time_limit_s: float = 60.0) -> Solution:
    """Return the schedule that greedy choices lead to.

    Raises:
        SolverError: they do not lead under the budget.
    """
    started = time.perf_counter()
    liveness = Liveness(Demand(problem))
    needed = needed_storages(liveness.demand)
    if budget_bytes is None:
        return keep_all.solve(problem, None)
    choice = Choice(liveness, needed, needed, budget_bytes)
    descend(choice, deadline=started + 0.7 * time_limit_s)
    if choice.peak.peak_bytes <= budget_bytes:
        put_back(choice, deadline=started + time_limit_s)
    return measured(
        problem,
        stage_schedule(problem, choice.order),
        budget_bytes=budget_bytes,
        method="greedy",
        started=started,
    )


def descend(choice: Choice, *, deadline: float, look: int = 12) -> None:
    """Flip decisions until the peak fits, no flip helps, or the time is up.

    Many operations may peak equally high, so that no single flip lowers the peak; what every
    flip must lower is the *excess*, the bytes above the budget summed over all operations.

    Args:
        choice: changed in place.
        deadline: ``time.perf_counter()`` at which to stop.
        look: how many of the most promising flips are tried exactly per move.
    """
    while choice.peak.peak_bytes > choice.budget_bytes and time.perf_counter() < deadline:
        over = choice.peak.peak_bytes - choice.budget_bytes
        ranked = _ranked(choice, over)
        if _descend_in_bulk(choice, ranked, over // 4):
            continue
        best: tuple[float, Flips, list[int], Peak] | None = None
        for start in range(0, len(ranked), look):
            for _, flips, _ in ranked[start : start + look]:
                tried = choice.try_flips(flips)
                if tried is None:
                    continue
                order, peak = tried
                gain = choice.peak.excess - peak.excess
                if gain <= 0:
                    continue
                score = max(peak.extra_ns - choice.peak.extra_ns, 0) / gain
                if best is None or score < best[0]:
                    best = (score, flips, order, peak)
            if best is not None or time.perf_counter() > deadline:
                break
        if best is None:
            return
        choice.accept(best[1], best[2], best[3])


def _ranked(choice: Choice, over: int) -> list[tuple[float, Flips, int]]:
    """Return ways to give up what is resident at the peak: (cost per byte, flips, bytes).

    A kept storage is recomputed from what is kept anyway, or from its operation's inputs, which
    are then kept instead where they are smaller. Cheapest per byte first.
    """
    demand = choice.liveness.demand
    problem = demand.problem
    sizes = [storage.size_bytes for storage in problem.storages]
    running = set(choice.order)
    ranked: list[tuple[float, Flips, int]] = []
    for storage in sorted(choice.liveness.resident(choice.order, choice.peak)):
        if not demand.may_recompute[storage] or not sizes[storage]:
            continue
        if storage not in choice.kept:
            if storage in choice.held:
                flips = frozenset({("held", storage)})
                cost = _recompute_cost(choice, storage, set())
                ranked.append((cost / min(sizes[storage], over), flips, sizes[storage]))
            continue
        cost = _recompute_cost(choice, storage, running)
        flips = frozenset({("kept", storage)})
        ranked.append((cost / min(sizes[storage], over), flips, sizes[storage]))
        op = problem.operations[problem.producer[storage]]
        instead = {
            s
            for s in op.recompute_inputs or ()
            if s not in choice.kept and demand.may_recompute[s] and demand.may_keep[s]
        }
        saved = sizes[storage] - sum(sizes[s] for s in instead)
        if instead and saved > 0:
            flips |= {("kept", s) for s in instead}
            ranked.append((op.cost_ns / min(saved, over), flips, saved))
    ranked.sort(key=lambda way: (way[0], sorted(way[1])))
    return ranked


def _descend_in_bulk(choice: Choice, ranked: list[tuple[float, Flips, int]], goal: int) -> bool:
    """Give up the first ``goal`` bytes of a ranking at once; return whether that helped.

    Far above the budget single moves would take as many evaluations as there are storages.
    """
    flips: set[tuple[str, int]] = set()
    given = 0
    count = 0
    for _, more, size in ranked:
        if given + size > goal:
            break
        if flips.isdisjoint(more):
            given += size
            flips |= more
            count += 1
    if count < BULK:
        return False
    tried = choice.try_flips(flips)
    if tried is None or tried[1].excess >= choice.peak.excess:
        return False
    choice.accept(flips, *tried)
    return True


def put_back(choice: Choice, *, deadline: float) -> None:
    """Keep or hold again what lowers the cost and still fits; dearest per byte first.

    Halves of the list are tried whole before their halves: far from the budget most fit.

    Args:
        choice: changed in place; it fits.
        deadline: ``time.perf_counter()`` at which to stop.
    """
    demand = choice.liveness.demand
    sizes = [storage.size_bytes for storage in demand.problem.storages]
    needed = needed_storages(demand)
    moves = [("kept", s) for s in needed if s not in choice.kept and demand.may_keep[s]]
    moves += [("held", s) for s in needed if s not in choice.held]
    moves.sort(
        key=lambda move: (
            -_recompute_cost(choice, move[1], set()) / max(sizes[move[1]], 1),
            move,
        )
    )
    todo: list[Sequence[tuple[str, int]]] = [moves]
    while todo and time.perf_counter() < deadline:
        group = todo.pop()
        tried = choice.try_flips(set(group)) if group else None
        if tried is not None:
            order, peak = tried
            if peak.peak_bytes <= choice.budget_bytes and peak.extra_ns < choice.peak.extra_ns:
                choice.accept(set(group), order, peak)
                continue
        if len(group) > 1:
            half = len(group) // 2
            todo += [group[half:], group[:half]]


def _recompute_cost(choice: Choice, storage: int, running: Set[int]) -> int:
    """Return about what recomputing a storage costs, given what is kept and ``running`` anyway."""
    demand = choice.liveness.demand
    problem = demand.problem
    total = 0
    todo = [storage]
    seen: set[int] = set()
    while todo:
        index = problem.producer[todo.pop()]
        if index in seen or index in running:
            continue
        seen.add(index)
        op = problem.operations[index]
        total += op.cost_ns
        todo.extend(
            s for s in op.recompute_inputs or () if s not in choice.kept and demand.may_recompute[s]
        )
    return total
