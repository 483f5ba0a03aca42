"""The frontier: many budgets of one problem, solved together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from autockpt_solvers.incumbent import Incumbent
from autockpt_solvers.liveness import Liveness
from autockpt_solvers.methods import exhaustive, keep_all
from autockpt_solvers.methods.snapshot import Snapshots
from autockpt_solvers.on_demand import Demand
from autockpt_solvers.problem import Problem
from autockpt_solvers.solution import Solution
from autockpt_solvers.solve import accept_smallest, solve

__all__ = ["sweep"]


def sweep(
    problem: Problem,
    budgets: Sequence[int],
    *,
    time_limit_s: float = 60.0,
    progress: Callable[[str], None] | None = None,
) -> tuple[Solution, ...]:
    """Return a solution for each budget, in their order; costs never rise with a rising budget.

    The budgets share the programs, each solved from where its neighbour's ended; an answer is
    a start for the next, and what is proved at a larger budget holds at a smaller one. Each
    answer is searched for more briefly than :func:`autockpt_solvers.solve.solve` does.

    Args:
        problem: the step to plan.
        budgets: bounds on the peak, ``problem.resident_bytes`` included.
        time_limit_s: time for all of them together, in seconds.
        progress: called with a line of text now and then.

    Raises:
        InfeasibleBudget: for the smallest budget no schedule was found that fits.
        PinError: a pin asks for the recomputation of what may not run again.
    """
    say = progress or (lambda line: None)
    Demand(problem).check_pins()
    started = time.perf_counter()
    deadline = started + time_limit_s
    distinct = sorted(set(budgets))
    if exhaustive.fits(problem):
        answers = {budget: solve(problem, budget, time_limit_s=time_limit_s) for budget in distinct}
        return tuple(answers[budget] for budget in budgets)
    liveness = Liveness(Demand(problem))
    shared = Snapshots(liveness)
    found: dict[int, Incumbent] = {}
    times: dict[int, float] = {}
    free: dict[int, Solution] = {}
    start: list[list[int]] = []
    everything = keep_all.solve(problem, None)
    for number, budget in enumerate(distinct):
        begun = time.perf_counter()
        if everything.peak_bytes <= budget:
            free[budget] = everything
            continue
        best = Incumbent(liveness, budget)
        share_s = (deadline - begun) / (len(distinct) - number)
        shared.run(best, deadline=begun + share_s, starts=start, brief=True)
        if best.order is None:
            accept_smallest(best, max(deadline - time.perf_counter(), 1.0))
        if best.order is not None:
            start = [best.order]
        found[budget] = best
        times[budget] = time.perf_counter() - begun
        say(f"budget {number + 1} of {len(distinct)}")
    bound = 0
    for budget in reversed(distinct):
        if budget in found:
            found[budget].prove(bound)
            bound = found[budget].bound_ns
    answers = dict(free)
    for budget, best in found.items():
        answers[budget] = replace(best.solution(started), solve_time_s=times[budget])
    return tuple(answers[budget] for budget in budgets)
