"""The set of storages to keep by a minimum cut, as torch's default partitioner finds it.

The min-cut partitioner of AOTAutograd (He & Yu 2023, *Transcending runtime-memory tradeoffs in
checkpointing by being fusion aware*, MLSys; ``torch/_functorch/partitioners.py``) cuts the forward
between its inputs and what the backward reads, so that the fewest bytes cross; everything
behind the cut is recomputed. It bans what is dear from recomputation. Here recomputation has its
measured price instead: at a price per byte ``p`` the cut minimises exactly

    sum of p * bytes over kept storages + sum of cost over operations run again,

when each operation runs again at most once (a selection problem with closure; Picard 1976). The
budget bounds the peak, not the kept bytes, so the price is raised until the peak of the schedule
that recomputes the rest on demand fits, and lowered by bisection while it does. Limits:

- only the sets on the lower convex hull of cost over kept bytes are met by any price;
- recomputed storages stay to their last use, so backward peaks are not the cut's concern: low
  budgets are not reached.
"""

from __future__ import annotations

import time

import networkx as nx  # type: ignore[import-untyped]
from networkx.algorithms.flow import boykov_kolmogorov  # type: ignore[import-untyped]

from autockpt_solvers.errors import SolverError
from autockpt_solvers.liveness import Liveness
from autockpt_solvers.methods import keep_all
from autockpt_solvers.on_demand import Demand, needed_storages, on_demand, stage_schedule
from autockpt_solvers.problem import Problem
from autockpt_solvers.solution import Solution, measured

__all__ = ["cheapest_set", "solve"]

# Fractions of a nanosecond that capacities count in: whole numbers make the cut exact.
FINE = 1 << 20
# Prices this close are taken for one; the first that fits is looked for in larger steps.
CLOSE, STEP = 1.002, 1.5


def solve(problem: Problem, budget_bytes: int | None, *, time_limit_s: float = 60.0) -> Solution:
    """Return the cheapest schedule that a price per byte leads to within the budget.

    Raises:
        SolverError: none does.
    """
    started = time.perf_counter()
    if budget_bytes is None:
        return keep_all.solve(problem, None)
    liveness = Liveness(Demand(problem))
    best: tuple[int, int, list[int]] | None = None
    smallest: int | None = None
    slowest_s = 0.0

    def in_time() -> bool:
        return time.perf_counter() - started + slowest_s < time_limit_s

    def fits(price: float) -> bool:
        nonlocal best, smallest, slowest_s
        began = time.perf_counter()
        order = on_demand(liveness.demand, cheapest_set(liveness.demand, price))
        peak = liveness.peak(order)
        smallest = min(smallest or peak.peak_bytes, peak.peak_bytes)
        slowest_s = max(slowest_s, time.perf_counter() - began)
        if peak.peak_bytes > budget_bytes:
            return False
        found = (peak.extra_ns, peak.peak_bytes, order)
        best = min(best or found, found)
        return True

    low, high = _price_range(problem)
    price = 0.0  # everything is kept
    # The peak falls with the price at first and rises again where all is recomputed at once, so
    # the first price that fits is looked for from below, and then approached.
    while not fits(price) and price < high and in_time():
        low, price = price or low, max(low, STEP * price)
    while best is not None and price > low * CLOSE and in_time():
        middle = (low * price) ** 0.5
        low, price = (low, middle) if fits(middle) else (middle, price)
    if best is None:
        raise SolverError(
            f"mincut finds no schedule within {budget_bytes:,} bytes; its smallest peak here is "
            f"{smallest or 0:,} bytes. Use 'auto', or raise the budget."
        )
    return measured(
        problem,
        stage_schedule(problem, best[2]),
        budget_bytes=budget_bytes,
        method="mincut",
        started=started,
    )


def _price_range(problem: Problem) -> tuple[float, float]:
    """Return a price at which nothing is worth a run, and one at which every byte is."""
    costs = [problem.operations[i].cost_ns for i in problem.forward]
    sizes = [storage.size_bytes for storage in problem.storages if storage.size_bytes]
    low = min((cost for cost in costs if cost), default=1) / max(1, sum(sizes))
    return low, (sum(costs) + 1) / min(sizes, default=1)


def cheapest_set(demand: Demand, price: float) -> frozenset[int]:
    """Return the storages to keep when a kept byte costs ``price`` nanoseconds.

    Nodes on the sink's side of the cut are what the backward needs: ``("need", s)`` that a storage
    is there, ``("run", i)`` that an operation runs again. A needed storage is kept, which cuts
    the edge between its two nodes, or its operation runs again and needs its own inputs.
    """
    problem = demand.problem
    graph: nx.DiGraph = nx.DiGraph()
    graph.add_nodes_from(("source", "sink"))
    graph.add_edges_from((("need", s), "sink") for reads in demand.reads for s in reads)
    for storage in needed_storages(demand):
        index = problem.producer[storage]
        size = problem.storages[storage].size_bytes
        # What may not run again is there whatever is chosen.
        again = demand.may_recompute[storage]
        maker = ("run", index) if again else "source"
        if demand.may_keep[storage]:
            graph.add_edge(maker, ("need", storage), capacity=round(price * size * FINE))
        else:
            graph.add_edge(maker, ("need", storage))
        if again:
            op = problem.operations[index]
            graph.add_edge("source", maker, capacity=op.cost_ns * FINE)
            graph.add_edges_from((("need", s), maker) for s in op.recompute_inputs or ())
    _, (kept_side, _) = nx.minimum_cut(graph, "source", "sink", flow_func=boykov_kolmogorov)
    return frozenset(
        storage
        for storage in needed_storages(demand)
        if ("need", storage) not in kept_side
        and (not demand.may_recompute[storage] or ("run", problem.producer[storage]) in kept_side)
    )
