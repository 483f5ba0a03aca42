"""rotor: optimal within its class, by listing the class; never better than what is proved."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autockpt_solvers import SolverError, lower_bound, minimum, simulate, solve
from autockpt_solvers.chain import Checkpoint, Save, chains, realise
from autockpt_solvers.liveness import Liveness
from autockpt_solvers.methods import exhaustive, rotor
from autockpt_solvers.on_demand import Demand, stage_schedule
from chain_problems import random_chain
from random_problems import budget_between, random_problem


@cache
def all_trees(start, end):
    """Every persistent schedule of a range of segments."""
    if start == end:
        return [Save(start)]
    trees = [Save(start, later) for later in all_trees(start + 1, end)]
    for middle in range(start + 1, end + 1):
        for later in all_trees(middle, end):
            trees += [Checkpoint(middle, later, e) for e in all_trees(start, middle - 1)]
    return trees


def test_orders_to_start_from_go_from_little_memory_to_little_time():
    for seed in range(10):
        problem = random_chain(seed, 12)
        liveness = Liveness(Demand(problem))
        budget = minimum(problem).peak_bytes * 5 // 4
        traces = [
            simulate(problem, stage_schedule(problem, order))
            for order in rotor.orders(liveness, budget, 6)
        ]
        assert 1 < len(traces) <= 6
        assert traces[0].peak_bytes < traces[-1].peak_bytes
        assert traces[0].extra_ns > traces[-1].extra_ns
        assert not list(rotor.orders(Liveness(Demand(random_chain(seed, 4))), budget, 6))


@pytest.mark.parametrize("length", [2, 3, 4, 5])
def test_nothing_in_its_class_is_better(length):
    compared = 0
    for seed in range(30):
        problem = random_chain(seed, length)
        chain = next(chains(Demand(problem)))
        assert len(chain.segments) == length
        known = []
        for tree in all_trees(0, length - 1):
            trace = simulate(problem, stage_schedule(problem, realise(chain, tree)))
            known.append((trace.peak_bytes, trace.extra_ns))
        for budget in range(min(known)[0], solve(problem, None).peak_bytes + 1):
            best = min(extra for peak, extra in known if peak <= budget)
            assert rotor.solve(problem, budget).extra_ns == best
            compared += best > 0
        with pytest.raises(SolverError, match="rotor: no schedule"):
            rotor.solve(problem, min(known)[0] - 1)
    assert compared > 10 * length


def test_it_comes_near_the_best_schedule_of_any_class():
    ours = best = 0
    for seed in range(40):
        problem = random_chain(seed, 6, saving=False)
        lowest, highest = minimum(problem).peak_bytes, solve(problem, None).peak_bytes
        for budget in range(lowest, highest + 1, 3):
            oracle = exhaustive.solve(problem, budget).extra_ns
            try:
                found = rotor.solve(problem, budget).extra_ns
            except SolverError:
                continue
            assert found >= oracle
            ours, best = ours + found, best + oracle
    assert best < ours <= 1.1 * best  # persistence is not free, as the paper shows


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 3))
def test_answers_keep_the_budget_and_the_bound(seed, thirds):
    problem = random_problem(seed, most=16) if seed % 2 else random_chain(seed, 12)
    budget = budget_between(problem, thirds)
    try:
        found = rotor.solve(problem, budget)
    except SolverError:
        return
    assert found.peak_bytes <= budget
    assert found.extra_ns >= lower_bound(problem, budget)


def test_memory_in_coarse_units_keeps_the_budget(monkeypatch):
    """With sizes far above the number of units, rounding costs time, never the budget."""
    monkeypatch.setattr(rotor, "SLOTS", 12)
    answers = 0
    for seed in range(30):
        problem = random_chain(seed, 12)
        lowest, highest = minimum(problem).peak_bytes, solve(problem, None).peak_bytes
        for budget in range(lowest, highest + 1, 5):
            try:
                found = rotor.solve(problem, budget)
            except SolverError:
                continue
            assert found.peak_bytes <= budget
            answers += 1
    assert answers > 100
