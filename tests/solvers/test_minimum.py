"""The minimum is the smallest peak there is, and planning at it succeeds."""

import pytest

from autockpt_solvers import InfeasibleBudget, minimum, simulate, solve
from autockpt_solvers.methods import exhaustive
from autockpt_solvers.minimum import unavoidable_bytes
from random_problems import random_problem


def test_no_schedule_peaks_lower_on_small_problems():
    for seed in range(150):
        problem = random_problem(seed, most=5)
        found = minimum(problem)
        assert simulate(problem, found.schedule).peak_bytes == found.peak_bytes
        assert found.lower_bound_bytes == found.peak_bytes
        below = exhaustive.cheapest(problem, found.peak_bytes - 1, deadline=float("inf"))
        assert below is None


def test_bounds_hold_and_the_error_states_a_budget_that_works():
    for seed in range(40):
        problem = random_problem(seed, most=16)
        found = minimum(problem)
        assert unavoidable_bytes(problem) <= found.lower_bound_bytes <= found.peak_bytes
        with pytest.raises(InfeasibleBudget) as caught:
            solve(problem, found.lower_bound_bytes - 1, time_limit_s=5)
        error = caught.value
        assert error.minimum_bytes == found.peak_bytes
        assert error.tensors
        assert sum(size for _, size in error.tensors) <= error.minimum_bytes
        assert solve(problem, error.minimum_bytes, time_limit_s=5).peak_bytes <= found.peak_bytes


def test_the_search_is_deterministic():
    from autockpt_solvers.minimum import search

    for seed in range(10):
        problem = random_problem(seed, most=20)
        assert search(problem, 60.0) == search(problem, 60.0)
