"""Pick a method, check its answer, attach what is proved."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace

from autockpt_solvers.bounds import lower_bound
from autockpt_solvers.errors import InfeasibleBudget, SolverError
from autockpt_solvers.incumbent import Incumbent
from autockpt_solvers.liveness import Liveness
from autockpt_solvers.memory import live_storages, simulate
from autockpt_solvers.methods import METHODS, exhaustive, greedy, ilp, keep_all
from autockpt_solvers.methods.snapshot import Snapshots
from autockpt_solvers.minimum import Minimum, minimum
from autockpt_solvers.on_demand import Demand
from autockpt_solvers.problem import Operation, Problem
from autockpt_solvers.schedule import Compute, Schedule
from autockpt_solvers.solution import Outcome, Solution, with_bound

__all__ = ["accept_smallest", "alive", "checked", "peak_parts", "solve", "with_origin"]

# Binaries beyond which the integer program does not close what the local search leaves open.
ILP_LIMIT = 20_000
# Up to so many forward operations greedy costs next to nothing and makes a start of its own.
GREEDY_FIRST = 300
# On larger ones it takes about so many seconds for each, and is asked where much is open.
GREEDY_S = 2e-3
# Part of the time limit for a method that is asked for; the rest is for the bound on its answer.
OWN = 0.9
# Gaps, as parts of the step: one at which the search ends, and one for which the integer program
# gets only so many seconds.
CLOSE, MODEST, MODEST_S = 5e-4, 3e-3, 3.0


def solve(
    problem: Problem,
    budget_bytes: int | None,
    *,
    method: str = "auto",
    time_limit_s: float = 60.0,
    progress: Callable[[str], None] | None = None,
) -> Solution:
    """Return a schedule that keeps the budget at the least extra time found.

    Args:
        problem: the step to plan.
        budget_bytes: bound on the peak, ``problem.resident_bytes`` included; None for no limit.
        method: ``"auto"`` or a name of ``METHODS``.
        time_limit_s: time to search, in seconds.
        progress: called with a line of text now and then.

    Raises:
        InfeasibleBudget: no schedule fits, or ``"auto"`` found none; it says which budget is met.
        PinError: a pin asks for the recomputation of what may not run again.
        SolverError: the method is unknown, cannot do what is asked, or finds nothing in its time
            where another may.

    >>> from autockpt_solvers import Operation, Problem, Storage
    >>> problem = Problem(
    ...     storages=(Storage("x", 8), Storage("y", 8), Storage("loss", 1), Storage("dx", 8)),
    ...     operations=(
    ...         Operation("x", (), (0,), 5, recompute_inputs=(), recompute_outputs=(0,)),
    ...         Operation("y", (0,), (1,), 5, recompute_inputs=(0,), recompute_outputs=(1,)),
    ...         Operation("loss", (1,), (2,), 5, fixed="the user holds its output"),
    ...         Operation("dx", (0, 2), (3,), 5),
    ...     ),
    ...     barrier=3,
    ...     live_at_barrier=frozenset({2}),
    ...     live_at_end=frozenset({2, 3}),
    ... )
    >>> solve(problem, 20).extra_ns
    0
    """
    started = time.perf_counter()
    if method != "auto" and method not in METHODS:
        raise SolverError(f"no method is called {method!r}; there are auto, {', '.join(METHODS)}.")
    say = progress or (lambda line: None)
    Demand(problem).check_pins()
    if budget_bytes is None and method == "auto":
        return keep_all.solve(problem, None, time_limit_s=time_limit_s)
    if budget_bytes is not None and method == "auto":
        found = _auto(problem, budget_bytes, started + time_limit_s, say)
    else:
        try:
            found = METHODS[method](problem, budget_bytes, time_limit_s=OWN * time_limit_s)
        except SolverError:
            if budget_bytes is not None:
                left_s = started + time_limit_s - time.perf_counter()
                smallest = minimum(problem, time_limit_s=max(left_s, 0.1 * time_limit_s))
                if smallest.lower_bound_bytes > budget_bytes:
                    raise _infeasible(problem, budget_bytes, smallest) from None
            raise
    found = checked(problem, budget_bytes, found)
    if found.outcome is Outcome.FEASIBLE and found.lower_bound_ns == 0:
        say("proving a bound")
        left_s = started + time_limit_s - time.perf_counter()
        bound = lower_bound(problem, budget_bytes, time_limit_s=max(left_s, 0.1 * time_limit_s))
        found = with_bound(problem, found, bound)
    return replace(found, solve_time_s=time.perf_counter() - started)


def _auto(
    problem: Problem, budget_bytes: int, deadline: float, say: Callable[[str], None]
) -> Solution:
    """Return the best of several methods."""
    started = time.perf_counter()
    try:
        return keep_all.solve(problem, budget_bytes)
    except SolverError:
        pass
    if exhaustive.fits(problem):
        try:
            limit_s = (deadline - started) / 2
            return exhaustive.solve(problem, budget_bytes, time_limit_s=limit_s)
        except SolverError:
            pass  # too many states, or nothing fits
    liveness = Liveness(Demand(problem))
    best = Incumbent(liveness, budget_bytes)
    try:
        _search(best, deadline, say)
    except KeyboardInterrupt:
        if best.order is None:
            raise
        say("interrupted; taking the best plan so far")
        best.interrupted = True
    return best.solution(started)


def _search(best: Incumbent, deadline: float, say: Callable[[str], None]) -> None:
    """Improve an incumbent by all methods that its problem's size and the time allow.

    Raises:
        InfeasibleBudget: nothing was found that fits.
    """
    problem, budget_bytes = best.liveness.problem, best.budget_bytes
    started = time.perf_counter()
    limit_s = deadline - started
    step = problem.baseline_cost_ns
    starts: list[list[int]] = []
    early = problem.barrier <= GREEDY_FIRST
    if early:
        starts = _greedy(best, 0.15 * limit_s)

    def more(limit_s: float) -> list[list[int]]:
        enough = not early and limit_s > GREEDY_S * problem.barrier
        return _greedy(best, limit_s) if enough else []

    say("snapshots and local search")
    last = ilp.program_size(problem) > ILP_LIMIT
    Snapshots(best.liveness).run(
        best,
        deadline=started + (0.98 if last else 0.9) * limit_s,
        starts=starts,
        more=more,
        say=say,
    )
    if best.order is None:
        say("no schedule yet; looking for the smallest peak")
        accept_smallest(best, max(deadline - time.perf_counter(), 0.1 * limit_s))
    if best.gap_ns <= CLOSE * step:
        return
    left_s = deadline - time.perf_counter()
    if last or left_s < 0.1 * limit_s:
        return
    # A small gap is not worth the whole limit.
    if best.gap_ns <= MODEST * step:
        left_s = min(left_s, MODEST_S)
    say(f"integer program, up to {left_s:.0f} s")
    with contextlib.suppress(SolverError):
        found = ilp.solve(problem, budget_bytes, time_limit_s=left_s, start=best.order)
        best.accept(found.schedule.backward_computes, "ilp")
        best.prove(found.lower_bound_ns)
        best.interrupted = found.outcome is Outcome.INTERRUPTED


def accept_smallest(best: Incumbent, time_limit_s: float) -> None:
    """Give an incumbent without an order the schedule of the smallest peak.

    Raises:
        InfeasibleBudget: that does not fit either.
    """
    problem = best.liveness.problem
    smallest = minimum(problem, time_limit_s=time_limit_s)
    if smallest.peak_bytes > best.budget_bytes:
        raise _infeasible(problem, best.budget_bytes, smallest)
    best.accept(smallest.schedule.backward_computes, "minimum")


def _greedy(best: Incumbent, time_limit_s: float) -> list[list[int]]:
    """Let greedy look for a schedule; return its order, if any."""
    with contextlib.suppress(SolverError):
        problem = best.liveness.problem
        found = greedy.solve(problem, best.budget_bytes, time_limit_s=time_limit_s)
        order = list(found.schedule.backward_computes)
        best.accept(order, "greedy")
        return [order]
    return []


def checked(problem: Problem, budget_bytes: int | None, found: Solution) -> Solution:
    """Return a solution whose figures the simulator confirms; raise where it does not."""
    trace = simulate(problem, found.schedule)
    claimed = (found.extra_ns, found.peak_bytes)
    if claimed != (trace.extra_ns, trace.peak_bytes):
        raise SolverError(f"{found.method} misstates its schedule: a bug; please report it.")
    if budget_bytes is not None and trace.peak_bytes > budget_bytes:
        raise SolverError(f"{found.method} breaks the budget: a bug; please report it.")
    return found


def _infeasible(problem: Problem, budget_bytes: int, smallest: Minimum) -> InfeasibleBudget:
    return InfeasibleBudget(
        budget_bytes,
        smallest.peak_bytes,
        peak_parts(problem, smallest.schedule),
        bound_bytes=smallest.lower_bound_bytes,
    )


def peak_parts(problem: Problem, schedule: Schedule) -> tuple[tuple[str, int], ...]:
    """Return what a schedule's peak is made of, as names for people and bytes, largest first.

    The bytes add up to the peak.
    """
    trace = simulate(problem, schedule)
    parts = list(alive(problem, schedule, trace.peak_step))
    step = schedule.steps[trace.peak_step] if schedule.steps else None
    if isinstance(step, Compute):
        op = problem.operations[step.operation]
        parts.append((f"workspace of {with_origin(op.name, op)}", op.workspace_bytes))
    return tuple(sorted((part for part in parts if part[1]), key=lambda part: -part[1]))


def alive(problem: Problem, schedule: Schedule, step: int) -> tuple[tuple[str, int], ...]:
    """Return what lives when a step of a schedule is done, as names for people and bytes, largest
    first; before the first step at -1.
    """
    parts = [("parameters, buffers, inputs and optimizer state", problem.resident_bytes)]
    for storage in live_storages(problem, schedule, step):
        op = problem.operations[problem.producer[storage]]
        name = with_origin(problem.storages[storage].name, op)
        parts.append((name, problem.storages[storage].size_bytes))
    return tuple(sorted((part for part in parts if part[1]), key=lambda part: -part[1]))


def with_origin(name: str, op: Operation) -> str:
    """Return a name with the module and the line it comes from, where they are known."""
    origin = ", ".join(part for part in (op.module_path, op.source) if part)
    return f"{name} ({origin})" if origin else name
