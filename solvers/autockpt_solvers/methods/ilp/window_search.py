"""Large neighbourhood search: free a few ranges of operations, fix the rest, solve, repeat.

Where the whole program does not close in time, its sub-programs around a good schedule do
(Shaw 1998, *Using constraint programming and local search methods*; here on ranges of the
forward's order).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

import numpy as np

from autockpt_solvers.highs import MipProcess
from autockpt_solvers.methods.ilp.program import StageProgram

__all__ = ["improve"]

SHARE = 14  # a window is at first so small a part of the operations
PATIENCE = 5  # windows without success before they grow


def improve(
    program: StageProgram,
    start: Sequence[float],
    accept: Callable[[list[int]], bool],
    *,
    deadline: float,
    goal: float,
) -> None:
    """Improve a point of the program until the deadline.

    Args:
        program: the program.
        start: the point to start from.
        accept: called with each better backward order; returns whether it holds on exact peaks.
        deadline: ``time.perf_counter()`` at which to stop.
        goal: objective at which nothing is left to gain, in the program's units.
    """
    rng = random.Random(0)
    point = np.array(start, np.float64)
    cost = program.program.cost
    objective = float(cost @ point)
    operations = sorted({index for index, _ in program.runs})
    keys = list(program.runs.items())
    columns = np.array([column for _, column in keys], np.int64)
    owner = np.array([index for (index, _), _ in keys], np.int64)
    width = max(6, len(operations) // SHARE)
    failures = 0
    with MipProcess(program.program) as process:
        base_lower, base_upper = process.arrays["lower"], process.arrays["upper"]
        while objective > goal and deadline - time.perf_counter() > 0.3:
            windows = rng.choice((1, 2, 2, 2, 3))
            free: set[int] = set()
            for _ in range(windows):
                size = max(4, 2 * width // (windows + 1))
                first = rng.randrange(-size // 2, max(len(operations) - size // 2, 1))
                free.update(operations[max(first, 0) : max(first + size, 0)])
            fixed = ~np.isin(owner, np.array(sorted(free), np.int64))
            lower, upper = base_lower.copy(), base_upper.copy()
            rounded = np.round(point[columns[fixed]])
            lower[columns[fixed]] = rounded
            upper[columns[fixed]] = rounded
            result = process.solve(
                time_limit_s=min(4.0, deadline - time.perf_counter()),
                relative_gap=1e-4,
                start=list(point),
                lower=lower,
                upper=upper,
            )
            better = result.values is not None and result.objective < objective * (1 - 1e-6)
            if better and result.values is not None and accept(program.order(list(result.values))):
                point, objective = result.values, result.objective
                failures = 0
                continue
            failures += 1
            if failures >= PATIENCE:
                if width >= len(operations):
                    return
                width = min(len(operations), width * 4 // 3 + 1)
                failures = 0
