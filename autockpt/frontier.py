"""The frontier: what a step costs at each of several budgets."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autockpt.picture import new_figure, save_figure
from autockpt.report import percent, proved_percent
from autockpt_solvers.minimum import minimum
from autockpt_solvers.plan import Plan
from autockpt_solvers.problem import Problem
from autockpt_solvers.solution import Solution
from autockpt_solvers.sweep import sweep
from autockpt_solvers.units import format_bytes

__all__ = ["Point", "draw_frontier", "frontier", "frontier_text"]


@dataclass(frozen=True, slots=True)
class Point:
    """The step within one budget.

    Attributes:
        budget_bytes: the budget.
        peak_bytes: the predicted peak.
        extra_time_s: time spent on recomputation, in seconds.
        overhead: the same as a part of the step with nothing recomputed.
        gap: proved: no schedule saves more than this part of a step.
    """

    budget_bytes: int
    peak_bytes: int
    extra_time_s: float
    overhead: float
    gap: float


def frontier(
    plan: Plan,
    budgets: Sequence[int] | int,
    *,
    time_limit_s: float = 60.0,
    progress: Callable[[str], None] | None = None,
) -> tuple[Point, ...]:
    """Return the step's cost at several budgets, in their order.

    Args:
        plan: any plan of the step; its own budget does not matter.
        budgets: budgets in bytes, or a number of them between the smallest that was found
            possible and the peak without recomputation.
        time_limit_s: time for all of them, in seconds.
        progress: called with a line of text now and then.

    Raises:
        InfeasibleBudget: no schedule was found for the smallest budget.
    """
    problem = plan.problem
    if isinstance(budgets, int):
        low = minimum(problem, time_limit_s=time_limit_s).peak_bytes
        high = plan.baseline_peak_bytes
        steps = max(budgets - 1, 1)
        budgets = sorted({low + (high - low) * i // steps for i in range(budgets)})
    solutions = sweep(problem, budgets, time_limit_s=time_limit_s, progress=progress)
    return tuple(
        _point(budget, problem, solution)
        for budget, solution in zip(budgets, solutions, strict=True)
    )


def _point(budget_bytes: int, problem: Problem, solution: Solution) -> Point:
    plan = Plan(
        problem,
        solution.schedule,
        budget_bytes,
        solution.method,
        solution.solve_time_s,
        solution.lower_bound_ns / 1e9,
    )
    return Point(budget_bytes, plan.peak_bytes, plan.extra_time_s, plan.overhead, plan.gap)


def frontier_text(points: Sequence[Point]) -> str:
    """Return the frontier as a table."""
    rows = [f"{'budget':>12} {'bytes':>16} {'peak':>12} {'extra time':>11} {'gap':>8}"]
    rows += [
        f"{format_bytes(p.budget_bytes):>12} {p.budget_bytes:>16,} "
        f"{format_bytes(p.peak_bytes):>12} {percent(p.overhead):>11} {proved_percent(p.gap):>8}"
        for p in points
    ]
    return "\n".join(rows) + "\n"


def draw_frontier(points: Sequence[Point], path: str | os.PathLike[str]) -> None:
    """Write a picture of the frontier; the suffix of ``path`` says its format.

    Raises:
        AutockptError: where matplotlib is not installed or does not know the format.
        OSError: where the file cannot be written.
    """
    figure = new_figure()
    axes = figure.subplots()
    ordered = sorted(points, key=lambda p: p.budget_bytes)
    mib = [p.budget_bytes / (1 << 20) for p in ordered]
    axes.plot(mib, [p.overhead * 100 for p in ordered], marker="o", label="found")
    proved = [max(0.0, p.overhead - p.gap) * 100 for p in ordered]
    axes.plot(mib, proved, linestyle=":", label="proved: not less than this")
    axes.set_xlabel("budget (MiB)")
    axes.set_ylabel("extra time (% of a step)")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    save_figure(figure, path)
