"""Solved before: the schedules of earlier runs, looked up by the problem they solve.

An entry is for one problem with exactly these costs and sizes, one budget, method, time limit and
release. Its schedule is simulated when it is read, and one that breaks a rule or the budget is
not used.
"""

from __future__ import annotations

import time
from typing import Any

from autockpt import cache
from autockpt_solvers.errors import AutockptError
from autockpt_solvers.problem import Problem
from autockpt_solvers.schedule import Compute, Free, Schedule
from autockpt_solvers.solution import Outcome, Solution, measured
from autockpt_solvers.units import format_bytes

__all__ = ["Question", "recall", "remember"]

# What a problem says for people only.
_WORDS = {"name", "kind", "module_path", "source", "outside", "kept_out"}


class Question:
    """What a solution answers: problem, budget, method, time limit and release.

    Attributes:
        problem: the problem.
        budget_bytes: the budget.
        method: the method asked for.
        key: the name of its entry.
    """

    def __init__(
        self,
        problem: Problem,
        budget_bytes: int | None,
        *,
        method: str,
        time_limit_s: float,
        release: str,
    ) -> None:
        self.problem = problem
        self.budget_bytes = budget_bytes
        self.method = method
        parts = [_figures(problem), budget_bytes, method, time_limit_s, release]
        self.key = cache.digest(parts)


def recall(question: Question) -> Solution | None:
    """Return the solution an earlier run found; None where there is none that holds."""
    started = time.perf_counter()
    data = cache.read("schedule", question.key)
    if data is None:
        return None
    problem = question.problem
    try:
        schedule = Schedule.from_list(data["schedule"])
        for step in schedule.steps:
            if isinstance(step, Compute):
                _index(step.operation, len(problem.operations))
                if step.over is not None:
                    _index(step.over, len(problem.storages))
            elif isinstance(step, Free):
                _index(step.storage, len(problem.storages))
        return measured(
            problem,
            schedule,
            budget_bytes=question.budget_bytes,
            method=str(data["method"]),
            started=started,
            lower_bound_ns=int(data["lower_bound_ns"]),
        )
    except (AutockptError, KeyError, IndexError, TypeError, ValueError):
        return None


def remember(question: Question, solution: Solution) -> None:
    """Keep a solution for later runs, unless its search was broken off or there was none."""
    if solution.outcome is Outcome.INTERRUPTED or question.budget_bytes is None:
        return
    data = {
        "schedule": solution.schedule.to_list(),
        "method": solution.method,
        "lower_bound_ns": solution.lower_bound_ns,
    }
    extra = solution.extra_ns / max(question.problem.baseline_cost_ns, 1)
    about = {
        "name": question.problem.name,
        "what": f"{format_bytes(question.budget_bytes)}, overhead {extra:.1%}, "
        f"{solution.method} in {solution.solve_time_s:.1f} s",
    }
    cache.write("schedule", question.key, data, about)


def _figures(problem: Problem) -> dict[str, Any]:
    """The problem as data, without the words."""
    data = problem.to_dict()
    del data["name"]
    for part in ("storages", "operations"):
        data[part] = [
            [value for key, value in item.items() if key not in _WORDS] for item in data[part]
        ]
    return data


def _index(value: Any, count: int) -> None:
    if not isinstance(value, int) or not 0 <= value < count:
        raise IndexError(value)
