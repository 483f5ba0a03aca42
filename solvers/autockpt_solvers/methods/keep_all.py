"""Recompute nothing: the baseline, and the answer whenever the budget suffices."""

from __future__ import annotations

import time

from autockpt_solvers.on_demand import Demand, needed_storages, on_demand, stage_schedule
from autockpt_solvers.problem import Problem
from autockpt_solvers.solution import Solution, measured

__all__ = ["solve"]


def solve(problem: Problem, budget_bytes: int | None, *, time_limit_s: float = 60.0) -> Solution:
    """Return the schedule that keeps everything the backward needs.

    Storages pinned to be recomputed are recomputed all the same: once, and held.

    Raises:
        SolverError: it does not fit the budget.
    """
    started = time.perf_counter()
    demand = Demand(problem)
    schedule = stage_schedule(problem, on_demand(demand, needed_storages(demand)))
    return measured(
        problem, schedule, budget_bytes=budget_bytes, method="keep_all", started=started
    )
