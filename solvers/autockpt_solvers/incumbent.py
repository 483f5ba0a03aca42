"""The best schedule so far and what is proved about it: what a search leaves whenever it ends."""

from __future__ import annotations

from collections.abc import Sequence

from autockpt_solvers.liveness import Liveness
from autockpt_solvers.on_demand import stage_schedule
from autockpt_solvers.solution import CLOSED_GAP, Solution, broken_off, measured

__all__ = ["Incumbent"]


class Incumbent:
    """The cheapest backward order found that fits, and the best bound. Mutable.

    Args:
        liveness: the facts of the problem.
        budget_bytes: the budget.

    Attributes:
        order: the order; None as long as there is none.
        extra_ns: its cost.
        peak_bytes: its peak.
        bound_ns: proved lower bound on the cost of every schedule that fits.
        method: the method that found the order.
        infeasible: whether it is proved that no schedule fits.
        interrupted: whether Ctrl-C ended the search.
    """

    def __init__(self, liveness: Liveness, budget_bytes: int) -> None:
        self.liveness = liveness
        self.budget_bytes = budget_bytes
        self.order: list[int] | None = None
        self.extra_ns = 0
        self.peak_bytes = 0
        self.bound_ns = 0
        self.method = ""
        self.infeasible = False
        self.interrupted = False

    def accept(self, order: Sequence[int], method: str) -> bool:
        """Take an order over if it fits and is better; return whether it was."""
        peak = self.liveness.peak(order)
        if peak.peak_bytes > self.budget_bytes:
            return False
        figures = (peak.extra_ns, peak.peak_bytes)
        if self.order is not None and figures >= (self.extra_ns, self.peak_bytes):
            return False
        self.order = list(order)
        self.extra_ns, self.peak_bytes = figures
        self.method = method
        return True

    def prove(self, bound_ns: int) -> None:
        """Note a bound; it never exceeds the cost found by more than the solver's tolerance."""
        if self.order is not None and self.extra_ns < bound_ns <= self.extra_ns * (1 + 1e-6) + 1:
            bound_ns = self.extra_ns
        self.bound_ns = max(self.bound_ns, bound_ns)

    @property
    def gap_ns(self) -> float:
        """The cost above the bound; infinite where there is no order."""
        return float("inf") if self.order is None else self.extra_ns - self.bound_ns

    @property
    def closed(self) -> bool:
        """Whether the gap is below the noise of the cost measurements."""
        return self.gap_ns <= CLOSED_GAP * self.liveness.problem.baseline_cost_ns

    def solution(self, started: float) -> Solution:
        """Return the order as a solution, simulated and with the bound."""
        assert self.order is not None
        problem = self.liveness.problem
        solution = measured(
            problem,
            stage_schedule(problem, self.order),
            budget_bytes=self.budget_bytes,
            method=self.method,
            started=started,
            lower_bound_ns=min(self.bound_ns, self.extra_ns)
            if self.bound_ns <= self.extra_ns * (1 + 1e-6) + 1
            else self.bound_ns,
        )
        return broken_off(solution) if self.interrupted else solution
