"""The minimum is the smallest peak there is, and planning at it succeeds."""

import time
from dataclasses import replace

import pytest

from autockpt_solvers import (
    InfeasibleBudget,
    Operation,
    Problem,
    Storage,
    minimum,
    simulate,
    solve,
)
from autockpt_solvers.liveness import Liveness
from autockpt_solvers.methods import exhaustive
from autockpt_solvers.methods.ilp.peak import lowest_peak
from autockpt_solvers.minimum import unavoidable_bytes
from autockpt_solvers.on_demand import Demand, needed_storages, on_demand
from chain_problems import random_chain
from random_problems import random_problem


def test_no_schedule_peaks_lower_on_small_problems():
    for seed in range(150):
        problem = random_problem(seed, most=5)
        found = minimum(problem)
        assert simulate(problem, found.schedule).peak_bytes == found.peak_bytes
        assert found.lower_bound_bytes == found.peak_bytes
        below = exhaustive.cheapest(problem, found.peak_bytes - 1, deadline=float("inf"))
        assert below is None


def test_the_exact_program_finds_the_smallest_of_its_space():
    for seed in range(150):
        problem = random_problem(seed, most=5)
        liveness = Liveness(Demand(problem))
        low = unavoidable_bytes(problem)
        start = on_demand(liveness.demand, needed_storages(liveness.demand))
        order, bound = lowest_peak(liveness, start, low, deadline=time.perf_counter() + 20)
        peak = liveness.peak(order).peak_bytes
        ordered = exhaustive.smallest(problem, deadline=float("inf"), index_order=True)
        smallest = exhaustive.smallest(problem, deadline=float("inf"))
        assert low <= liveness.peak(smallest).peak_bytes <= peak
        assert bound == peak == liveness.peak(ordered).peak_bytes


def test_bounds_hold_and_the_error_states_a_budget_that_works():
    for seed in range(30):
        problem = random_problem(seed, most=14)
        found = minimum(problem)
        assert unavoidable_bytes(problem) <= found.lower_bound_bytes
        assert found.lower_bound_bytes <= found.ordered_bound_bytes <= found.peak_bytes
        with pytest.raises(InfeasibleBudget) as caught:
            solve(problem, found.lower_bound_bytes - 1, time_limit_s=5)
        error = caught.value
        assert error.minimum_bytes == found.peak_bytes
        sizes = [size for _, size in error.tensors]
        assert sum(sizes) == error.minimum_bytes
        assert sizes == sorted(sizes, reverse=True)
        assert solve(problem, error.minimum_bytes, time_limit_s=5).peak_bytes <= found.peak_bytes


def test_a_minimum_found_in_haste_is_looked_for_again_and_never_given_up():
    problem = random_chain(3, 120)
    hasty = minimum(problem, time_limit_s=0)
    calm = minimum(problem, time_limit_s=5)
    assert calm.peak_bytes < hasty.peak_bytes
    assert minimum(problem, time_limit_s=0) is calm
    assert calm.lower_bound_bytes == hasty.lower_bound_bytes <= calm.ordered_bound_bytes


def test_the_search_is_deterministic():
    from autockpt_solvers.minimum import search

    for seed in range(10):
        problem = random_problem(seed, most=20)
        assert search(problem, 60.0) == search(problem, 60.0)


def test_the_error_names_what_people_know():
    problem = Problem(
        storages=(Storage("mm_29", 8), Storage("mean", 1), Storage("grad", 9)),
        operations=(
            Operation("mm_29", (), (0,), 1, module_path="head", source="model.py:41"),
            Operation("mean", (0,), (1,), 1, module_path="head"),
            Operation("backward", (0, 1), (2,), 1, workspace_bytes=5),
        ),
        barrier=2,
        resident_bytes=7,
        live_at_barrier=frozenset({1}),
        live_at_end=frozenset({1, 2}),
    )
    with pytest.raises(InfeasibleBudget) as caught:
        solve(problem, 20)
    assert caught.value.tensors == (
        ("grad", 9),
        ("mm_29 (head, model.py:41)", 8),
        ("parameters, buffers, inputs and optimizer state", 7),
        ("workspace of backward", 5),
        ("mean (head)", 1),
    )


def test_times_measured_again_leave_the_minimum_where_it_was():
    problem = random_problem(3, most=14)
    slower = tuple(
        replace(op, cost_ns=7 * op.cost_ns + i) for i, op in enumerate(problem.operations)
    )
    assert minimum(replace(problem, operations=slower)) is minimum(problem)
