"""Proved lower bounds on the extra time of any schedule, for the answers of any method.

The relaxation of the stage program (:mod:`autockpt_solvers.methods.ilp.program`) with stages that
end at chosen *snapshots* only: any choice gives a valid bound, more snapshots a better one. Its
value is recomputed from the dual solution (:func:`autockpt_solvers.highs.safe_bound`), so that a
solver that stops early or errs can weaken the bound, never falsify it.
"""

from __future__ import annotations

import time
from itertools import pairwise

from autockpt_solvers.liveness import Liveness
from autockpt_solvers.methods.ilp.program import StageProgram
from autockpt_solvers.methods.ilp.stages import Stages
from autockpt_solvers.on_demand import Demand
from autockpt_solvers.problem import Problem
from autockpt_solvers.solution import whole_ns

__all__ = ["lower_bound", "snapshots"]

# Columns up to which every reading operation ends a stage.
FULL = 40_000
# Columns that larger problems' snapshots may make.
COLUMNS = 15_000


def lower_bound(problem: Problem, budget_bytes: int | None, *, time_limit_s: float = 10.0) -> int:
    """Return a proved lower bound on ``extra_ns`` at a budget, in nanoseconds.

    It covers every schedule that runs each forward operation once before the barrier; 0 where
    nothing is proved in time. Where no such schedule exists the bound means nothing.
    """
    if budget_bytes is None:
        return 0
    deadline = time.perf_counter() + time_limit_s
    liveness = Liveness(Demand(problem))
    stages = Stages(liveness)
    size = sum(map(len, stages.runs)) + sum(last + 1 for last in stages.last_stage)
    if size > FULL:
        count = max(2, len(stages.ends) * COLUMNS // size)
        stages = Stages(liveness, snapshots=snapshots(liveness, stages.ends[-1], count))
    program = StageProgram(stages, budget_bytes)
    result = program.relax(deadline=deadline, interior=size > FULL)
    return whole_ns(result.bound * program.cost_unit)


def snapshots(liveness: Liveness, last: int, count: int) -> frozenset[int]:
    """Return about so many backward operations at which memory is scarcest.

    The first operation, and of each of ``count`` equal ranges the one with the most bytes of its
    own.
    """
    during, _ = liveness.backward_bytes
    storages = liveness.problem.storages
    own = [
        during[offset] + sum(storages[s].size_bytes for s in liveness.demand.reads[offset])
        for offset in range(last + 1)
    ]
    edges = [round(number * (last + 1) / count) for number in range(count + 1)]
    chosen = {0}
    for first, end in pairwise(edges):
        if first < end:
            chosen.add(max(range(first, end), key=lambda offset: own[offset]))
    return frozenset(chosen)
