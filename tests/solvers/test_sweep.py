"""Sweeps: costs never rise with the budget, and no answer is far from that of a solve alone."""

from itertools import pairwise

import pytest

from autockpt_solvers import InfeasibleBudget, minimum, simulate, solve, sweep
from random_problems import random_problem


@pytest.mark.parametrize("seed", range(12))
def test_costs_never_rise_with_the_budget(seed):
    problem = random_problem(seed, most=30 if seed % 3 else 6)
    smallest, largest = minimum(problem).peak_bytes, solve(problem, None).peak_bytes
    budgets = [largest - number * (largest - smallest) // 7 for number in range(8)]
    found = sweep(problem, budgets, time_limit_s=20)
    assert len(found) == len(budgets)
    for budget, solution in zip(budgets, found, strict=True):
        assert simulate(problem, solution.schedule).peak_bytes <= budget
        assert solution.lower_bound_ns <= solution.extra_ns
    for looser, tighter in pairwise(found):
        assert looser.extra_ns <= tighter.extra_ns
        assert looser.lower_bound_ns <= tighter.lower_bound_ns or looser.extra_ns == 0


def test_a_budget_below_the_minimum_is_refused():
    problem = random_problem(7, most=30)
    smallest = minimum(problem).peak_bytes
    with pytest.raises(InfeasibleBudget):
        sweep(problem, [minimum(problem).lower_bound_bytes - 1, 2 * smallest])
