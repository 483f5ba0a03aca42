"""chen, greedy and keep_all: within the budget, and in the order of quality one expects."""

import math

import pytest

from autockpt_solvers import Operation, Problem, SolverError, Storage, minimum, simulate, solve
from autockpt_solvers.liveness import Liveness
from autockpt_solvers.methods import chen, eviction, greedy, keep_all
from autockpt_solvers.on_demand import Demand, on_demand
from random_problems import budgets, random_problem


def test_greedy_beats_chen_where_both_answer():
    better = worse = 0
    for seed in range(60):
        problem = random_problem(seed, most=16)
        smallest = minimum(problem).peak_bytes
        for budget in budgets(problem, smallest, solve(problem, None).peak_bytes):
            try:
                simple = chen.solve(problem, budget)
                found = greedy.solve(problem, budget)
            except SolverError:
                continue
            better += found.extra_ns < simple.extra_ns
            worse += found.extra_ns > simple.extra_ns
    assert better > 10 * max(worse, 1)


def test_greedy_recomputes_nothing_without_need():
    for seed in range(60):
        problem = random_problem(seed, most=20)
        free = keep_all.solve(problem, None)
        assert greedy.solve(problem, free.peak_bytes).extra_ns == free.extra_ns


def test_keep_all_refuses_what_does_not_fit():
    for seed in range(30):
        problem = random_problem(seed)
        peak = keep_all.solve(problem, None).peak_bytes
        assert keep_all.solve(problem, peak).peak_bytes == peak
        with pytest.raises(SolverError, match="keep_all finds no schedule within"):
            keep_all.solve(problem, peak - 1)


def mirror(length):
    """A chain whose backward reads every link."""
    storages = [Storage(f"f{i}", 1) for i in range(length)]
    operations = []
    for i in range(length):
        inputs = (i - 1,) if i else ()
        operations.append(
            Operation(f"f{i}", inputs, (i,), 1, recompute_inputs=inputs, recompute_outputs=(i,))
        )
    for i in reversed(range(length)):
        storages.append(Storage(f"b{i}", 1))
        inputs = (i,) if i == length - 1 else (i, len(storages) - 2)
        operations.append(Operation(f"b{i}", inputs, (len(storages) - 1,), 1))
    end = frozenset({len(storages) - 1})
    return Problem(tuple(storages), tuple(operations), length, live_at_end=end)


def test_chen_needs_the_square_root_of_a_chain():
    for length in (25, 100, 400):
        problem = mirror(length)
        budget = 2 * math.isqrt(length) + 4
        found = chen.solve(problem, budget)
        assert simulate(problem, found.schedule).peak_bytes <= budget
        assert found.extra_ns <= length


def test_eviction_gets_as_low_as_recomputing_from_scratch():
    missed = 0
    for seed in range(150):
        problem = random_problem(seed, most=16)
        liveness = Liveness(Demand(problem))
        nothing: frozenset[int] = frozenset()
        level = liveness.peak(on_demand(liveness.demand, nothing, nothing)).peak_bytes
        order = eviction.cheapest_walk(liveness, level)
        missed += order is None
        assert order is None or liveness.peak(order).peak_bytes <= level
    assert missed <= 5  # depth-first order in a stage is not always the leanest
