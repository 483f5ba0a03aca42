"""chen, greedy and keep_all: within the budget, and in the order of quality one expects."""

import pytest
from random_problems import budgets, random_problem

from autockpt_solvers import SolverError, minimum, simulate, solve
from autockpt_solvers.methods import chen, greedy, keep_all


def test_greedy_beats_chen_where_both_answer():
    better = worse = 0
    for seed in range(80):
        problem = random_problem(seed, most=20)
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


def test_chen_lowers_the_peak_of_deep_chains():
    from test_on_demand import chain

    problem = chain(100)
    trace = simulate(problem, chen.solve(problem, None).schedule)
    assert trace.extra_ns == 0
