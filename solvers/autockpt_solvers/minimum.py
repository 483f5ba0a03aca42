"""The smallest peak that any schedule reaches, with a proved lower bound."""

from __future__ import annotations

import time
from dataclasses import dataclass

from autockpt_solvers.errors import SolverError
from autockpt_solvers.liveness import Liveness
from autockpt_solvers.memory import simulate
from autockpt_solvers.methods import exhaustive
from autockpt_solvers.methods.greedy import Choice, descend
from autockpt_solvers.on_demand import Demand, needed_storages, on_demand, stage_schedule
from autockpt_solvers.problem import Problem
from autockpt_solvers.schedule import Schedule

__all__ = ["Minimum", "minimum", "unavoidable_bytes"]


@dataclass(frozen=True)
class Minimum:
    """The smallest peak found.

    Attributes:
        peak_bytes: the exact peak of ``schedule``, resident bytes included.
        schedule: a schedule that reaches it.
        lower_bound_bytes: no schedule that runs each forward operation once before the barrier
            peaks lower.
    """

    peak_bytes: int
    schedule: Schedule
    lower_bound_bytes: int


# Descents per search.
LEVELS = 7

# The one in-process cache of the solvers: a budget below the minimum is often asked for again at
# the minimum, and must then be met by the very schedule that proved it. Few and small.
_FOUND: dict[Problem, Minimum] = {}
_FOUND_LIMIT = 16


def minimum(problem: Problem, *, time_limit_s: float = 60.0) -> Minimum:
    """Return the smallest peak found and a schedule that reaches it.

    Exact for problems of at most 8 recomputable operations. Otherwise a search from several
    starts: everything kept, nothing kept, recomputed storages held or not. The search counts its
    steps rather than the time, so that it ends at the same schedule on every machine;
    ``time_limit_s`` only cuts it off where the machine is very slow.
    """
    Demand(problem).check_pins()
    found = _FOUND.get(problem)
    if found is None:
        found = search(problem, time_limit_s)
        while len(_FOUND) >= _FOUND_LIMIT:
            del _FOUND[next(iter(_FOUND))]
        _FOUND[problem] = found
    return found


def unavoidable_bytes(problem: Problem) -> int:
    """Return what the hungriest operation needs whatever the schedule: a bound on every peak."""
    liveness = Liveness(Demand(problem))
    during, _ = liveness.backward_bytes
    needs = [problem.resident_bytes]
    for offset, reads in enumerate(liveness.demand.reads):
        own = sum(problem.storages[s].size_bytes for s in reads if s not in liveness.held)
        needs.append(during[offset] + own)
    forward = liveness.forward_bytes
    needs += [int(forward[i]) for i in problem.required]
    return max(needs)


def search(problem: Problem, time_limit_s: float) -> Minimum:
    started = time.perf_counter()
    deadline = started + time_limit_s
    bound = unavoidable_bytes(problem)
    if exhaustive.fits(problem):
        try:
            schedule = stage_schedule(problem, exhaustive.smallest(problem, deadline=deadline))
        except SolverError:
            pass  # too many states: search like a larger problem
        else:
            peak = simulate(problem, schedule).peak_bytes
            return Minimum(peak, schedule, peak)
    liveness = Liveness(Demand(problem))
    order = _lowest(liveness, bound, deadline)
    schedule = stage_schedule(problem, order)
    return Minimum(simulate(problem, schedule).peak_bytes, schedule, bound)


def _lowest(liveness: Liveness, bound: int, deadline: float) -> list[int]:
    """Return the backward order with the lowest peak found, by descents to lower and lower levels.

    A descent lowers the bytes above its level, summed over the step; how low it gets depends on
    the level, so levels between the bound and the best peak are bisected.
    """
    needed = needed_storages(liveness.demand)
    nothing: frozenset[int] = frozenset()
    starts = [(needed, needed), (nothing, needed), (nothing, nothing)]
    best: tuple[int, list[int]] | None = None
    low = bound
    for _ in range(LEVELS):
        level = low if best is None else (low + best[0]) // 2
        reached: list[tuple[int, list[int], int]] = []
        for number, (kept, held) in enumerate(starts):
            try:
                choice = Choice(liveness, kept, held, level)
                tight = on_demand(liveness.demand, kept, held, tight=True)
            except SolverError:
                continue  # recomputes without end in sight
            descend(choice, deadline=deadline)
            peak, order = min(choice.lowest, (liveness.peak(tight).peak_bytes, tight))
            reached.append((peak, order, number))
        if not reached:
            break
        reached.sort()
        peak, order, _ = reached[0]
        # Lower levels only from the two starts that got lowest: each descent takes its time.
        starts = [starts[number] for _, _, number in reached[:2]]
        if best is None or peak < best[0]:
            best = (peak, order)
        if best[0] > level:
            low = level
        if best[0] - low <= max(1, bound // 1000) or time.perf_counter() > deadline:
            break
    assert best is not None
    return best[1]
