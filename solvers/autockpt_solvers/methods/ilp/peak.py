"""The exact program for the smallest peak: the stage program with the peak as a variable.

Its space: every forward operation runs once before the barrier; behind it each backward operation
is preceded by its recomputations, in the forward's order, each at most once. Memory rows of
recomputations are added where an answer breaks them; without them any bound is that of the
hungriest operation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from autockpt_solvers.highs import MipProcess
from autockpt_solvers.liveness import Liveness
from autockpt_solvers.methods.ilp.instage import add_row
from autockpt_solvers.methods.ilp.program import StageProgram
from autockpt_solvers.methods.ilp.stages import Stages

__all__ = ["lowest_peak"]

# Programs with more columns are not tried.
COLUMNS = 12_000
# Searches, each with the rows that the last one's answer broke, and nodes of each search: limits
# that end them alike on every machine.
ROUNDS = 20
NODES = 20
# HiGHS's tolerance, in units of the program.
TOLERANCE = 2e-6


def lowest_peak(
    liveness: Liveness, start: Sequence[int], low: int, *, deadline: float
) -> tuple[list[int], int]:
    """Return the backward order with the lowest peak found, and a bound on those of its space.

    Args:
        liveness: the facts of the problem.
        start: a backward order.
        low: a bound on the peak of every schedule.
        deadline: ``time.perf_counter()`` at which to stop.
    """
    problem = liveness.problem
    best, peak_bytes = list(start), liveness.peak(start).peak_bytes
    bound = low
    inside = frozenset(range(len(problem.operations) - problem.barrier))
    stages = Stages(liveness, inside)
    size = sum(map(len, stages.runs)) + sum(last + 1 for last in stages.last_stage)
    if size > COLUMNS or not stages.ends:
        return best, bound
    program = StageProgram(stages, peak_bytes, least_bytes=low)
    runs = [program.program.cost[c] for c in (*program.runs.values(), *program.optional.values())]
    worth = max(0.5, 1e-4 * (peak_bytes - low)) / program.byte_unit
    stage_of = {end: k for k, end in enumerate(stages.ends)}
    rows: set[tuple[int, int]] = set()
    for _ in range(ROUNDS):
        if bound >= peak_bytes or time.perf_counter() > deadline:
            break
        point = program.point(best)
        if point is not None and program.saved is not None:
            point[program.saved] = (program.budget_bytes - peak_bytes) / program.byte_unit
        with MipProcess(program.program) as process:
            result = process.solve(
                time_limit_s=deadline - time.perf_counter(),
                relative_gap=0.0,
                absolute_gap=worth,
                nodes=NODES,
                start=point,
            )
        if math.isfinite(result.bound):
            # The objective is the runs less what is saved.
            units = result.bound - sum(runs) - TOLERANCE
            proved = program.budget_bytes + units * program.byte_unit
            bound = max(bound, math.ceil(proved))
        if result.status == "infeasible":
            return best, max(bound, peak_bytes)  # nothing of the space is below what was found
        if result.values is None:
            break
        order = program.order(list(result.values))
        levels = liveness.levels(order)
        found = liveness.peak(order).peak_bytes
        if found < peak_bytes:
            best, peak_bytes = order, found
        if result.status != "optimal":
            break
        aim = bound
        fresh: set[tuple[int, int]] = set()
        offset = len(liveness.demand.reads)
        for position in range(len(order) - 1, -1, -1):
            index = order[position]
            if index >= problem.barrier:
                offset = index - problem.barrier
            elif levels[position] > aim and offset in stage_of:
                fresh.add((index, stage_of[offset]))
        fresh -= rows
        if not fresh:
            break
        rows |= fresh
        for index, k in sorted(fresh):
            add_row(program, index, k)
    return best, min(bound, peak_bytes)
