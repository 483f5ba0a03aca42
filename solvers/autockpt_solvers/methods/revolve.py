"""Binomial checkpointing: optimal on chains whose links are all alike.

Griewank & Walther: *Algorithm 799: revolve* (2000, ACM TOMS 26(1)), the schedules of Griewank's
treeverse (1992). With ``c`` checkpoints, the chain's input being the first, ``l`` steps
are reversed with the fewest forward steps there can be,

    t(l, c) = r l - beta(c + 1, r - 1),   beta(c, r) = C(c + r, c),

where ``r`` is the number with beta(c, r - 1) < l <= beta(c, r): no step runs forward more than
``r`` times. Segments are taken for equal, their inputs are the only checkpoints, and the
backward of a segment finds what it reads by running the segment once more. Limits:

- costs and bytes of the segments are not looked at; tried is every number of checkpoints, and the
  cheapest schedule that fits is returned;
- with all checkpoints there still is one recomputation of nearly everything, so the extra time
  does not fall below about one forward: :mod:`autockpt_solvers.methods.rotor` mends both;
- a graph is cut at its narrow points, see :mod:`autockpt_solvers.chain`.
"""

from __future__ import annotations

import math
import time
from functools import cache

from autockpt_solvers.chain import Checkpoint, Save, Tree, chains, realise
from autockpt_solvers.errors import SolverError
from autockpt_solvers.liveness import Liveness
from autockpt_solvers.methods import keep_all
from autockpt_solvers.on_demand import Demand, stage_schedule
from autockpt_solvers.problem import Problem
from autockpt_solvers.solution import Solution, measured

__all__ = ["forward_steps", "repetitions", "solve"]


def solve(problem: Problem, budget_bytes: int | None, *, time_limit_s: float = 60.0) -> Solution:
    """Return the cheapest binomial schedule that fits the budget, over all numbers of checkpoints.

    Raises:
        SolverError: none fits the budget.
    """
    started = time.perf_counter()
    if budget_bytes is None:
        return keep_all.solve(problem, None)
    liveness = Liveness(Demand(problem))
    best: tuple[int, int, list[int]] | None = None
    segments, smallest = 1, 0
    for chain in chains(liveness.demand):
        segments = len(chain.segments)
        for checkpoints in range(segments, 0, -1):
            order = realise(chain, tree_of(segments, checkpoints))
            peak = liveness.peak(order)
            smallest = min(smallest or peak.peak_bytes, peak.peak_bytes)
            if peak.peak_bytes > budget_bytes:
                continue
            found = (peak.extra_ns, peak.peak_bytes, order)
            if best is None or found < best:
                best = found
            if time.perf_counter() - started > time_limit_s:
                break
    if best is None:
        raise SolverError(
            f"revolve: no schedule of a chain of {segments} segments fits {budget_bytes:,} bytes; "
            f"its smallest peak here is {smallest:,} bytes. Use 'auto', or raise the budget."
        )
    return measured(
        problem,
        stage_schedule(problem, best[2]),
        budget_bytes=budget_bytes,
        method="revolve",
        started=started,
    )


def repetitions(steps: int, checkpoints: int) -> int:
    """Return how often a step runs forward at most, when so many are reversed.

    >>> [repetitions(steps, 3) for steps in (1, 2, 4, 5, 10, 11)]
    [0, 1, 1, 2, 2, 3]
    """
    repeats = 0
    while math.comb(checkpoints + repeats, checkpoints) < steps:
        repeats += 1
    return repeats


def forward_steps(steps: int, checkpoints: int) -> int:
    """Return the fewest forward steps that reverse a chain: Griewank & Walther's t(l, c).

    The last forward step of each reversal, the one its backward follows at once, is not counted.

    >>> [forward_steps(10, checkpoints) for checkpoints in (1, 2, 3, 9, 10)]
    [45, 20, 15, 9, 9]
    """
    if steps <= 1:
        return 0
    repeats = repetitions(steps, checkpoints)
    return repeats * steps - math.comb(checkpoints + repeats, checkpoints + 1)


def tree_of(segments: int, checkpoints: int) -> Tree:
    """Return the decisions that reverse so many segments with so many checkpoints."""

    @cache
    def middle(steps: int, free: int) -> int:
        """The first of the optimal steps to put the next checkpoint behind."""
        goal = forward_steps(steps, free)
        return next(
            n
            for n in range(1, steps)
            if n + forward_steps(steps - n, free - 1) + forward_steps(n, free) == goal
        )

    def reverse(start: int, steps: int, free: int) -> Tree:
        if steps == 1:
            return Save(start)
        # A single checkpoint holds the input: run from it to each step, last one first.
        ahead = middle(steps, free) if free > 1 else steps - 1
        later = reverse(start + ahead, steps - ahead, max(free - 1, 1))
        return Checkpoint(start + ahead, later, reverse(start, ahead, free))

    return reverse(0, segments, checkpoints)
