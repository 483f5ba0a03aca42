"""mincut: the cut is the cheapest set, by trying all sets; answers keep the budget."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autockpt_solvers import SolverError, lower_bound, minimum, solve
from autockpt_solvers.chain import closure
from autockpt_solvers.methods import greedy, mincut
from autockpt_solvers.on_demand import Demand, needed_storages
from random_problems import budget_between, random_problem


def price_of(demand, kept, price):
    """What the kept bytes and running each missing operation once cost."""
    problem = demand.problem
    there = {s for s in range(len(problem.storages)) if not demand.may_recompute[s]} | set(kept)
    wanted = {s for reads in demand.reads for s in reads}
    runs = closure(demand, wanted, there)
    used = wanted | {s for i in runs for s in problem.operations[i].recompute_inputs or ()}
    once = {s for s in used if not demand.may_recompute[s] and demand.is_forward[s]}
    size_bytes = sum(problem.storages[s].size_bytes for s in once | set(kept))
    return price * size_bytes + sum(problem.operations[i].cost_ns for i in runs)


@pytest.mark.parametrize("price", [0.0, 0.3, 1.1, 4.7])
def test_no_other_set_costs_less(price):
    chosen = 0
    for seed in range(60):
        problem = random_problem(seed, most=6)
        demand = Demand(problem)
        free = [
            s for s in needed_storages(demand) if demand.may_keep[s] and demand.may_recompute[s]
        ]
        kept = mincut.cheapest_set(demand, price) & set(free)
        best = min(
            price_of(demand, subset, price)
            for size in range(len(free) + 1)
            for subset in combinations(free, size)
        )
        assert price_of(demand, kept, price) == pytest.approx(best, abs=1e-4)
        chosen += 0 < len(kept) < len(free)
    assert price in (0.0, 4.7) or chosen > 10


def test_a_higher_price_keeps_fewer_bytes():
    for seed in range(60):
        problem = random_problem(seed, most=16)
        demand = Demand(problem)
        sizes = [
            sum(problem.storages[s].size_bytes for s in mincut.cheapest_set(demand, price))
            for price in (0.01, 0.1, 0.3, 1.0, 3.0, 10.0)
        ]
        assert sizes == sorted(sizes, reverse=True)


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 3))
def test_answers_keep_the_budget_and_the_bound(seed, thirds):
    problem = random_problem(seed, most=16)
    budget = budget_between(problem, thirds)
    try:
        found = mincut.solve(problem, budget)
    except SolverError as error:
        assert "mincut finds no schedule within" in str(error)  # noqa: PT017
        return
    assert found.peak_bytes <= budget
    assert found.extra_ns >= lower_bound(problem, budget)


def test_greedy_that_sees_the_peak_is_rarely_worse():
    better = worse = 0
    for seed in range(60):
        problem = random_problem(seed, most=16)
        lowest, highest = minimum(problem).peak_bytes, solve(problem, None).peak_bytes
        try:
            cut = mincut.solve(problem, (lowest + highest) // 2)
            found = greedy.solve(problem, (lowest + highest) // 2)
        except SolverError:
            continue
        better += found.extra_ns < cut.extra_ns
        worse += found.extra_ns > cut.extra_ns
    assert better > worse
