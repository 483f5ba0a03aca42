"""Any size: a linear program over snapshots, rounded and improved by local search.

The relaxation (:mod:`.program`) bounds every schedule and says what to hold. Its point is rounded
at a few thresholds (:mod:`.rounding`), beside a walk that evicts; each start is made to fit and
improved by exchanges on exact peaks, the best one further by kicks (:mod:`.local_search`). Finds
several recomputations of one tensor where the budget is near the minimum. The
search ends where the bound is met, or when kicks gain nothing for long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from autockpt_solvers.errors import SolverError
from autockpt_solvers.highs import Relaxation
from autockpt_solvers.incumbent import Incumbent
from autockpt_solvers.liveness import Liveness
from autockpt_solvers.methods import keep_all
from autockpt_solvers.methods.eviction import PATIENCE, Eviction
from autockpt_solvers.methods.ilp.stages import Stages
from autockpt_solvers.methods.snapshot.blocks import layouts
from autockpt_solvers.methods.snapshot.local_search import fit, improve, wander
from autockpt_solvers.methods.snapshot.program import SnapshotProgram
from autockpt_solvers.methods.snapshot.residency import Residency
from autockpt_solvers.methods.snapshot.rounding import rounded
from autockpt_solvers.on_demand import Demand
from autockpt_solvers.problem import Problem
from autockpt_solvers.solution import Solution, whole_ns

__all__ = ["Snapshots", "solve"]

THRESHOLDS = (0.5, 0.2, 0.8, 0.999)
# Columns beyond which no layout but the first is tried.
COLUMNS = 50_000
# Seconds that stating and solving takes per column, on slow machines.
COLUMN_S = 2e-4
# Gap, as a part of the step, at which kicks end; and one at which they are not worth long.
ENOUGH = 2e-4
GOOD = 3e-3
# Kicks without a gain that end the search.
TRIALS = 400


def solve(problem: Problem, budget_bytes: int | None, *, time_limit_s: float = 60.0) -> Solution:
    """Return the cheapest schedule found, with its proved bound.

    Raises:
        SolverError: no schedule was found within the budget and the time.
    """
    started = time.perf_counter()
    if budget_bytes is None:
        return keep_all.solve(problem, None)
    search = Snapshots(Liveness(Demand(problem)))
    best = Incumbent(search.liveness, budget_bytes)
    try:
        search.run(best, deadline=started + time_limit_s)
    except KeyboardInterrupt:
        if best.order is None:
            raise
    if best.order is None:
        raise SolverError(
            f"snapshot finds no schedule within {budget_bytes:,} bytes"
            + (": it proves that there is none." if best.infeasible else " in its time limit.")
        )
    return best.solution(started)


class Snapshots:
    """The search through one problem; what does not depend on the budget is made once.

    Args:
        liveness: the facts of the problem.
    """

    def __init__(self, liveness: Liveness) -> None:
        self.liveness = liveness
        self.problem = liveness.problem
        self.stages = Stages(liveness)
        self._layouts = layouts(liveness, self.stages.groups)
        self._programs: dict[int, tuple[SnapshotProgram, Relaxation]] = {}

    def run(
        self,
        best: Incumbent,
        *,
        deadline: float,
        starts: Sequence[Sequence[int]] = (),
        brief: bool = False,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Improve an incumbent and its bound until closed, out of ideas, or out of time.

        Args:
            best: changed in place; it holds the best order at any moment.
            deadline: ``time.perf_counter()`` at which to stop.
            starts: orders to start from besides those found here.
            brief: improve only the best start, without kicks.
            say: called with a line of text now and then.
        """
        step = self.problem.baseline_cost_ns
        started = time.perf_counter()
        states: list[Residency] = []
        walks: list[list[int]] = []
        if not (brief and starts):
            walks = self._walks(best.budget_bytes, started + 0.2 * (deadline - started))
        for order in [*starts, *walks]:
            self._begin(order, best, states, deadline)
        for number in range(len(self._layouts)):
            if best.closed or best.infeasible or time.perf_counter() > deadline:
                return
            points = self._relax(number, best, deadline)
            for order in points:
                self._begin(order, best, states, deadline)
            # The first choices are cheap; the dearer ones only pay where much is open.
            if best.gap_ns <= ENOUGH * step / 2:
                break
        states.sort(key=lambda state: state.cost_ns)
        if not states:
            return
        say(f"snapshots: {self._figures(best)}; local search")
        for state in _distinct(states)[: 1 if brief else None]:
            if best.closed or time.perf_counter() > deadline:
                return
            share = started + 0.6 * (deadline - started)
            if best.order is not None and time.perf_counter() > share:
                break
            improve(state, best.budget_bytes, deadline=share, goal_ns=best.bound_ns)
            best.accept(state.order(), "snapshot")
            if best.gap_ns <= ENOUGH * step:
                return
        if brief:
            return
        self._wander(min(states, key=lambda state: state.cost_ns), best, deadline, say)

    def bound(self, budget_bytes: int, *, deadline: float) -> int:
        """Return the best bound of all choices, in nanoseconds."""
        best = Incumbent(self.liveness, budget_bytes)
        for number in range(len(self._layouts)):
            if time.perf_counter() < deadline:
                self._relax(number, best, deadline)
        return best.bound_ns

    # ---------------------------------------------------------------- inside

    def _walks(self, budget_bytes: int, deadline: float) -> list[list[int]]:
        walks = (
            Eviction(self.liveness, patience).order(budget_bytes, deadline=deadline)
            for patience in PATIENCE[:2]
        )
        return [order for order in walks if order is not None]

    def _relax(self, number: int, best: Incumbent, deadline: float) -> list[list[int]]:
        """Solve a relaxation; note its bound and return its rounded points."""
        layout = self._layouts[number]
        if number not in self._programs:
            stages = Stages(self.liveness, snapshots=layout.snapshots)
            size = SnapshotProgram.size(stages, layout)
            if number and (size > COLUMNS or size * COLUMN_S > deadline - time.perf_counter()):
                return []
            unit = max(int(self.liveness.forward_bytes.max(initial=1)), best.budget_bytes, 1)
            made = SnapshotProgram(stages, layout, unit / 1000)
            self._programs[number] = (made, Relaxation(made.program, made.arrays))
        program, relaxation = self._programs[number]
        left_s = deadline - time.perf_counter()
        result = relaxation.solve(program.sides(best.budget_bytes), time_limit_s=0.5 * left_s)
        if result.status == "infeasible":
            best.infeasible = best.order is None
            return []
        best.prove(whole_ns(result.bound * program.cost_unit))
        if result.values is None:
            return []
        orders = [rounded(program, result.values, threshold) for threshold in THRESHOLDS]
        return list(map(list, dict.fromkeys(map(tuple, orders))))

    def _begin(
        self, order: Sequence[int], best: Incumbent, states: list[Residency], deadline: float
    ) -> None:
        """Make an order fit and note it."""
        if time.perf_counter() > deadline and best.order is not None:
            return
        state = Residency(self.liveness, self.stages, order)
        if fit(state, best.budget_bytes, deadline=deadline):
            best.accept(state.order(), "snapshot")
            states.append(state)

    def _wander(
        self, state: Residency, best: Incumbent, deadline: float, say: Callable[[str], None]
    ) -> None:
        step = self.problem.baseline_cost_ns
        now = time.perf_counter()
        most_s = 0.8 * (deadline - now) if best.gap_ns > GOOD * step else 2.0
        told = now
        for better in wander(
            state,
            best.budget_bytes,
            deadline=min(deadline, now + most_s),
            goal_ns=best.bound_ns + int(ENOUGH * step),
            trials=TRIALS,
        ):
            best.accept(better.order(), "snapshot")
            if time.perf_counter() > told + 5:
                told = time.perf_counter()
                say(f"local search: {self._figures(best)}")

    def _figures(self, best: Incumbent) -> str:
        step = max(self.problem.baseline_cost_ns, 1)
        found = "none" if best.order is None else f"{best.extra_ns / step:.2%}"
        return f"extra time {found}, proved at least {best.bound_ns / step:.2%}"


def _distinct(states: Sequence[Residency]) -> list[Residency]:
    """Return the states of different cost or peak."""
    return list({(state.cost_ns, state.peak()): state for state in states}.values())
