"""Square-root checkpointing: cut the forward into equal segments, keep only what crosses a cut.

Chen, Xu, Zhang, Guestrin: *Training deep nets with sublinear memory cost* (2016,
arXiv:1604.06174), carried over from chains to graphs: cuts lie behind operations through which
everything passes (dominators), or else where few bytes cross. It is a
baseline, not a contender: it knows neither costs nor the budget's exact shape.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import networkx as nx  # type: ignore[import-untyped]

from autockpt_solvers.errors import SolverError
from autockpt_solvers.memory import simulate
from autockpt_solvers.on_demand import Demand, needed_storages, on_demand, stage_schedule
from autockpt_solvers.problem import Problem
from autockpt_solvers.solution import Solution, measured

__all__ = ["segmentations", "solve"]


def solve(problem: Problem, budget_bytes: int | None, *, time_limit_s: float = 60.0) -> Solution:
    """Return the cheapest segmentation that fits the budget.

    Tried are 1 to 4 sqrt(n) segments of equal bytes, each cut moved to the narrowest point of its
    neighbourhood; inside a segment everything is recomputed once and held.

    Raises:
        SolverError: none fits the budget.
    """
    started = time.perf_counter()
    demand = Demand(problem)
    best: tuple[int, int, list[int]] | None = None
    smallest: int | None = None
    for kept in segmentations(demand):
        if best is not None and time.perf_counter() - started > time_limit_s:
            break
        order = on_demand(demand, kept)
        trace = simulate(problem, stage_schedule(problem, order))
        smallest = min(trace.peak_bytes, smallest or trace.peak_bytes)
        fits = budget_bytes is None or trace.peak_bytes <= budget_bytes
        key = (trace.extra_ns, trace.peak_bytes)
        if fits and (best is None or key < best[:2]):
            best = (*key, order)
    if best is None:
        raise SolverError(
            f"chen finds no schedule within {budget_bytes or 0:,} bytes; its smallest peak here is "
            f"{smallest or 0:,} bytes. Use 'auto', or raise the budget."
        )
    return measured(
        problem,
        stage_schedule(problem, best[2]),
        budget_bytes=budget_bytes,
        method="chen",
        started=started,
    )


def segmentations(demand: Demand) -> Iterator[frozenset[int]]:
    """Yield what crosses the cuts of 1, 2, ... segments."""
    problem = demand.problem
    needed = needed_storages(demand)
    crossing = _crossing(problem, demand)
    bottlenecks = _bottlenecks(problem)
    weight = [
        sum(problem.storages[s].size_bytes for s in problem.operations[i].outputs if s in needed)
        for i in problem.forward
    ]
    for segments in range(1, 4 * math.isqrt(max(problem.barrier, 1)) + 2):
        cuts = _cuts(problem, crossing, bottlenecks, weight, segments)
        yield frozenset().union(*(crossing[cut] for cut in cuts))


def _crossing(problem: Problem, demand: Demand) -> list[frozenset[int]]:
    """Return, for each forward operation, the storages alive right behind it in the forward."""
    last: dict[int, int] = {}
    for index in problem.forward:
        for storage in problem.operations[index].inputs:
            last[storage] = index
    alive: set[int] = set()
    crossing = []
    for index in problem.forward:
        alive.update(problem.operations[index].outputs)
        alive = {s for s in alive if last.get(s, -1) > index}
        crossing.append(frozenset(s for s in alive if demand.may_keep[s]))
    return crossing


def _bottlenecks(problem: Problem) -> set[int]:
    """Return the forward operations through which all that the backward starts from passes."""
    start, end = -1, problem.barrier
    graph: nx.DiGraph = nx.DiGraph()
    for index in problem.required:
        inputs = problem.operations[index].inputs
        graph.add_edges_from((problem.producer[s], index) for s in inputs)
        if not inputs:
            graph.add_edge(start, index)
    for storage in problem.live_at_barrier & problem.live_at_end:
        graph.add_edge(problem.producer[storage], end)
    if start not in graph or end not in graph:
        return set()
    dominator = nx.immediate_dominators(graph, start)
    found: set[int] = set()
    index = dominator.get(end)
    while index is not None and index != start:
        found.add(index)
        index = dominator[index]
    return found


def _cuts(
    problem: Problem,
    crossing: list[frozenset[int]],
    bottlenecks: set[int],
    weight: list[int],
    segments: int,
) -> list[int]:
    """Return the operations behind which this many segments of equal bytes are cut."""
    total = sum(weight)
    goals = [total * k // segments for k in range(1, segments)]
    slack = max(1, problem.barrier // (2 * segments))
    cuts: list[int] = []
    seen = 0
    for index, bytes_made in enumerate(weight):
        seen += bytes_made
        while goals and seen >= goals[0]:
            goals.pop(0)
            near = range(max(0, index - slack), min(problem.barrier, index + slack + 1))
            width = {
                i: (
                    i not in bottlenecks,
                    sum(problem.storages[s].size_bytes for s in crossing[i]),
                    abs(i - index),
                )
                for i in near
            }
            cuts.append(min(near, key=width.__getitem__))
    return sorted(set(cuts))
