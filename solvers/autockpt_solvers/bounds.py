"""Proved lower bounds on the extra time of any schedule."""

from __future__ import annotations

from autockpt_solvers.problem import Problem

__all__ = ["lower_bound"]


def lower_bound(problem: Problem, budget_bytes: int | None, *, time_limit_s: float = 10.0) -> int:
    """Return a proved lower bound on ``extra_ns`` at a budget, in nanoseconds."""
    return 0
