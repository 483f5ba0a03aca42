"""What a solver returns: a schedule, its exact figures, and what is proved about them."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from enum import Enum

from autockpt_solvers.errors import SolverError
from autockpt_solvers.memory import simulate
from autockpt_solvers.problem import Problem
from autockpt_solvers.schedule import Schedule

__all__ = ["Outcome", "Solution", "broken_off", "measured", "whole_ns", "with_bound"]

# A gap below this share of the step is noise of the cost measurements; it counts as closed.
CLOSED_GAP = 1e-4


class Outcome(Enum):
    """How good a solution is proved to be; the value says what to do next."""

    OPTIMAL = "proved: no schedule within the budget costs noticeably less; nothing to do"
    FEASIBLE = (
        "within the budget, a cheaper schedule is not ruled out; raise time_limit to look further"
    )
    INTERRUPTED = "within the budget, the search was broken off; solve again to look further"


@dataclass(frozen=True)
class Solution:
    """A schedule that keeps the budget, with exact figures.

    Attributes:
        schedule: the schedule; :func:`autockpt_solvers.memory.simulate` accepts it.
        extra_ns: time of its recomputations and optional operations, in nanoseconds.
        peak_bytes: its exact peak, resident bytes included.
        lower_bound_ns: proved lower bound on ``extra_ns`` over all schedules of the problem that
            keep the budget and run each forward operation once before the barrier; 0 where
            nothing is proved.
        method: the method that found it.
        solve_time_s: time the search took, in seconds.
        outcome: what is proved.
    """

    schedule: Schedule
    extra_ns: int
    peak_bytes: int
    lower_bound_ns: int
    method: str
    solve_time_s: float
    outcome: Outcome


def measured(
    problem: Problem,
    schedule: Schedule,
    *,
    budget_bytes: int | None,
    method: str,
    started: float,
    lower_bound_ns: int = 0,
) -> Solution:
    """Return the solution a schedule makes, with its figures from the simulator.

    Args:
        problem: the problem.
        schedule: a schedule of it.
        budget_bytes: the budget it must keep; None for no limit.
        method: the name of the method that found it.
        started: ``time.perf_counter()`` when the search began.
        lower_bound_ns: what is proved; see :class:`Solution`.

    Raises:
        ScheduleError: the schedule breaks a dependency.
        SolverError: it breaks the budget, or beats its own lower bound.
    """
    trace = simulate(problem, schedule)
    if budget_bytes is not None and trace.peak_bytes > budget_bytes:
        raise SolverError(
            f"{method} finds no schedule within {budget_bytes:,} bytes; its smallest peak here is "
            f"{trace.peak_bytes:,} bytes. Use 'auto', or raise the budget."
        )
    solution = Solution(
        schedule=schedule,
        extra_ns=trace.extra_ns,
        peak_bytes=trace.peak_bytes,
        lower_bound_ns=0,
        method=method,
        solve_time_s=time.perf_counter() - started,
        outcome=Outcome.FEASIBLE,
    )
    return with_bound(problem, solution, lower_bound_ns)


def with_bound(problem: Problem, solution: Solution, lower_bound_ns: int) -> Solution:
    """Return a solution with a proved bound and the outcome that follows from it.

    Raises:
        SolverError: the solution beats the bound.
    """
    if lower_bound_ns > solution.extra_ns:
        raise SolverError(
            f"{solution.method}: no schedule is said to cost less than {lower_bound_ns:,} ns, but "
            f"one costs {solution.extra_ns:,} ns: a bug; please report it."
        )
    closed = solution.extra_ns - lower_bound_ns <= CLOSED_GAP * problem.baseline_cost_ns
    outcome = Outcome.OPTIMAL if closed else Outcome.FEASIBLE
    return replace(solution, lower_bound_ns=lower_bound_ns, outcome=outcome)


def broken_off(solution: Solution) -> Solution:
    """Return a solution whose search was interrupted, as one that may be improved."""
    if solution.outcome is Outcome.OPTIMAL:
        return solution
    return replace(solution, outcome=Outcome.INTERRUPTED)


def whole_ns(bound_ns: float) -> int:
    """Return a bound on a whole number of nanoseconds, less the solver's relative tolerance."""
    if not math.isfinite(bound_ns):
        return 0
    return max(0, math.ceil(bound_ns * (1 - 1e-6) - 1e-3))
