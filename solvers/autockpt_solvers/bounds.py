"""Proved lower bounds on the extra time of any schedule, for the answers of any method.

The relaxation of the snapshot program (:mod:`autockpt_solvers.methods.snapshot.program`) at a few
choices of snapshots and blocks, and on small problems that of the stage program
(:mod:`autockpt_solvers.methods.ilp.program`), which is tighter. Values are recomputed from the dual
solution (:func:`autockpt_solvers.highs.safe_bound`), so that a solver that stops early or errs can
weaken the bound, never falsify it.
"""

from __future__ import annotations

import time

from autockpt_solvers.liveness import Liveness
from autockpt_solvers.methods.ilp.program import StageProgram
from autockpt_solvers.methods.ilp.stages import Stages
from autockpt_solvers.methods.snapshot import Snapshots
from autockpt_solvers.on_demand import Demand
from autockpt_solvers.problem import Problem
from autockpt_solvers.solution import whole_ns

__all__ = ["lower_bound"]

# Part of the time for the stage program.
SHARE = 0.4
# Columns of the stage program up to which it is stated, and how many a second of time left allows.
FULL = 40_000
PER_SECOND = 6_000


def lower_bound(problem: Problem, budget_bytes: int | None, *, time_limit_s: float = 10.0) -> int:
    """Return a proved lower bound on ``extra_ns`` at a budget, in nanoseconds.

    It covers every schedule that runs each forward operation once before the barrier; 0 where
    nothing is proved in time. Where no such schedule exists the bound means nothing.
    """
    if budget_bytes is None:
        return 0
    deadline = time.perf_counter() + time_limit_s
    liveness = Liveness(Demand(problem))
    # The rest is for the stage program, where there may be one.
    share = deadline - SHARE * time_limit_s
    bound = Snapshots(liveness).bound(budget_bytes, deadline=share)
    stages = Stages(liveness)
    size = sum(map(len, stages.runs)) + sum(last + 1 for last in stages.last_stage)
    if size > min(FULL, PER_SECOND * (deadline - time.perf_counter())):
        return bound
    program = StageProgram(stages, budget_bytes)
    result = program.relax(deadline=deadline)
    return max(bound, whole_ns(result.bound * program.cost_unit))
