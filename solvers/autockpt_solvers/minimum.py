"""The smallest peak that any schedule reaches, with a proved lower bound."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from autockpt_solvers.errors import SolverError
from autockpt_solvers.liveness import Liveness
from autockpt_solvers.memory import simulate
from autockpt_solvers.methods import exhaustive
from autockpt_solvers.methods.eviction import PATIENCE, Eviction
from autockpt_solvers.methods.ilp.peak import lowest_peak
from autockpt_solvers.methods.ilp.stages import Stages
from autockpt_solvers.methods.snapshot.local_search import fit
from autockpt_solvers.methods.snapshot.residency import Facts, Residency
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
        ordered_bound_bytes: of those, none peaks lower whose recomputations between two backward
            operations run in the forward's order, each at most once; ``peak_bytes`` where that
            is lower.
    """

    peak_bytes: int
    schedule: Schedule
    lower_bound_bytes: int
    ordered_bound_bytes: int


# Most seconds for the exact program; its limit of nodes ends it before on most machines.
EXACT_S = 10.0
# Most seconds for walks that evict, and for fitting their best; small problems need less.
WALKS_S = 5.0
FITS_S = 5.0
# With so many seconds none of these is cut short by the time limit.
UNCUT_S = 30.0

# The one in-process cache of the solvers: a budget below the minimum is often asked for again at
# the minimum, and must then be met by the very schedule that proved it. Few and small. Times are
# not part of the key: measured again they differ, and no peak depends on them. With each stands
# how many seconds it had.
_FOUND: dict[Problem, tuple[Minimum, float]] = {}
_FOUND_LIMIT = 16


def minimum(problem: Problem, *, time_limit_s: float = 60.0) -> Minimum:
    """Return the smallest peak found and a schedule that reaches it.

    Exact for problems of at most 8 recomputable operations. Otherwise by eviction at lower and
    lower levels, which often reaches the bound, and from there by the exact program where it is
    not too large. Two searches that their time limit does not cut end at the same schedule. What
    was found in a short time is searched for again where there is twice as much.
    """
    Demand(problem).check_pins()
    untimed = replace(problem, operations=tuple(replace(o, cost_ns=0) for o in problem.operations))
    before, spent_s = _FOUND.get(untimed, (None, 0.0))
    if before is not None:
        proved = before.peak_bytes <= before.ordered_bound_bytes
        if proved or 2 * spent_s > min(time_limit_s, UNCUT_S):
            return before
    found = search(problem, time_limit_s)
    if before is not None and before.peak_bytes <= found.peak_bytes:
        ordered = max(before.ordered_bound_bytes, found.ordered_bound_bytes)
        found = replace(before, ordered_bound_bytes=min(ordered, before.peak_bytes))
    while len(_FOUND) >= _FOUND_LIMIT:
        del _FOUND[next(iter(_FOUND))]
    _FOUND[untimed] = (found, time_limit_s)
    return found


def unavoidable_bytes(problem: Problem) -> int:
    """Return what the hungriest operation needs whatever the schedule: a bound on every peak.

    Counted are its own inputs and outputs and what is read later and cannot be made again.
    """
    liveness = Liveness(Demand(problem))
    demand, sizes = liveness.demand, [storage.size_bytes for storage in problem.storages]
    during, _ = liveness.backward_bytes
    needs = [problem.resident_bytes]
    once: set[int] = set()
    for offset in range(len(demand.reads) - 1, -1, -1):
        reads = set(demand.reads[offset]) - liveness.held
        once |= {s for s in reads if not demand.may_recompute[s]}
        needs.append(during[offset] + sum(sizes[s] for s in reads | once))
    forward = liveness.forward_with(once, frozenset())
    needs += [int(forward[i]) for i in problem.required]
    return max(needs)


def search(problem: Problem, time_limit_s: float) -> Minimum:
    """Return the minimum, found anew."""
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
            return Minimum(peak, schedule, peak, peak)
    liveness = Liveness(Demand(problem))
    order = _lowest(liveness, bound, started + 0.5 * time_limit_s)
    deadline = min(deadline, time.perf_counter() + EXACT_S)
    order, ordered = lowest_peak(liveness, order, bound, deadline=deadline)
    schedule = stage_schedule(problem, order)
    return Minimum(simulate(problem, schedule).peak_bytes, schedule, bound, ordered)


def _lowest(liveness: Liveness, bound: int, deadline: float) -> list[int]:
    """Return the backward order with the lowest peak found; the cheapest of equal ones.

    By eviction at lower and lower levels, then by making more values again where the best order
    peaks. Whether either comes through is not monotonic in the level, so bisection may miss
    lower ones.
    """
    everything = on_demand(liveness.demand, needed_storages(liveness.demand))
    peak = liveness.peak(everything)
    best = (peak.peak_bytes, peak.extra_ns, everything)
    started = time.perf_counter()
    halfway = min(started + WALKS_S, started + 0.5 * (deadline - started))
    for patience in PATIENCE:
        walk = Eviction(liveness, patience)
        low, high = bound, best[0] + 1
        level = bound  # often reached
        while low < high and time.perf_counter() < halfway:
            order = walk.order(level, deadline=halfway)
            if order is None:
                low = level + 1
            else:
                peak = liveness.peak(order)
                high = peak.peak_bytes
                best = min(best, (peak.peak_bytes, peak.extra_ns, order))
            if high - low <= bound // 10_000:
                break
            level = (low + high) // 2
    facts = Facts(liveness, Stages(liveness))
    deadline = min(deadline, time.perf_counter() + FITS_S)
    low = level = bound
    while low < best[0] and time.perf_counter() < deadline:
        state = Residency(facts, best[2])
        fit(state, level, deadline=deadline)
        # The state peaks lowest where it fits, and may have come down where it does not.
        order = state.order()
        peak = liveness.peak(order)
        best = min(best, (peak.peak_bytes, peak.extra_ns, order))
        if peak.peak_bytes > level:
            low = level + 1
        if best[0] - low <= bound // 10_000:
            break
        level = (low + best[0]) // 2
    return best[2]
