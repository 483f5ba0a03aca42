"""One door: every answer is valid, within its budget, and no better than what is proved."""

import pickle
from itertools import pairwise

import pytest

from autockpt_solvers import (
    METHODS,
    InfeasibleBudget,
    Operation,
    Outcome,
    Problem,
    SolverError,
    Storage,
    lower_bound,
    minimum,
    simulate,
    solve,
)
from autockpt_solvers.methods import exhaustive
from chain_problems import random_chain
from random_problems import budgets, random_problem


@pytest.mark.parametrize("method", ["auto", *METHODS])
def test_every_answer_is_valid_and_within_the_budget(method):
    answers = 0
    for seed in range(70):
        problem = random_problem(seed, most=6 if method == "exhaustive" else 14)
        if method == "exhaustive" and not exhaustive.fits(problem):
            continue
        smallest = minimum(problem).peak_bytes
        for budget in budgets(problem, smallest, solve(problem, None).peak_bytes):
            try:
                found = solve(problem, budget, method=method, time_limit_s=10)
            except SolverError:
                assert method not in ("auto", "exhaustive")
                continue
            trace = simulate(problem, found.schedule)
            assert (trace.peak_bytes, trace.extra_ns) == (found.peak_bytes, found.extra_ns)
            assert found.peak_bytes <= budget
            assert 0 <= found.lower_bound_ns <= found.extra_ns
            answers += 1
    assert answers >= 60


def test_bounds_are_below_the_cheapest_schedule_there_is():
    proved = 0
    for seed in range(150):
        problem = random_problem(seed)
        smallest = minimum(problem).peak_bytes
        for budget in budgets(problem, smallest, solve(problem, None).peak_bytes):
            best = exhaustive.solve(problem, budget)
            bound = lower_bound(problem, budget)
            assert bound <= best.extra_ns
            proved += bound > 0
    assert proved > 100


def test_cost_falls_and_peak_rises_with_the_budget():
    for seed in range(80):
        problem = random_problem(seed)
        smallest = minimum(problem).peak_bytes
        largest = solve(problem, None).peak_bytes
        answers = [solve(problem, b) for b in range(smallest, largest + 1)]
        for tighter, looser in pairwise(answers):
            assert tighter.extra_ns >= looser.extra_ns
            assert tighter.peak_bytes <= looser.peak_bytes


def test_nothing_is_recomputed_where_the_budget_suffices():
    for seed in range(50):
        problem = random_problem(seed, most=12)
        free = solve(problem, None)
        again = solve(problem, free.peak_bytes)
        assert again.method == "keep_all"
        assert again.extra_ns == free.extra_ns
        if all(s.keepable for s in problem.storages):
            assert free.extra_ns == 0
            assert free.outcome is Outcome.OPTIMAL


def test_unknown_method_names_those_there_are():
    with pytest.raises(SolverError, match=r"no method is called 'magic'.*greedy"):
        solve(random_problem(0), 100, method="magic")


def test_a_method_that_cannot_do_it_says_so():
    problem = random_problem(3, most=30)
    while exhaustive.fits(problem):
        problem = random_problem(hash(problem.name) % 1000, most=30)
    with pytest.raises(SolverError, match="stops at 8 operations"):
        solve(problem, None, method="exhaustive")


def test_infeasible_budget_whatever_the_method():
    problem = random_problem(1)
    for method in ("auto", *METHODS):
        with pytest.raises(InfeasibleBudget):
            solve(problem, 1, method=method)


@pytest.mark.parametrize("method", ["auto", *METHODS])
def test_where_nothing_may_run_again_the_one_schedule_is_the_minimum(method):
    # A step that is all forward, as one that only runs plainly is recorded.
    problem = Problem(
        storages=tuple(Storage(f"made {i}", 8) for i in range(20)),
        operations=tuple(Operation(f"make {i}", (), (i,), 1, outside=True) for i in range(20)),
        barrier=20,
        live_at_barrier=frozenset(range(20)),
        live_at_end=frozenset(),
    )
    with pytest.raises(InfeasibleBudget) as error:
        solve(problem, 159, method=method)
    assert error.value.minimum_bytes == 160
    assert solve(problem, 160, method=method).peak_bytes == 160


def test_what_was_not_found_in_time_is_not_called_infeasible():
    problem = random_chain(3, 200)
    budget = int(1.1 * minimum(problem, time_limit_s=1).peak_bytes)
    for method in ("greedy", "ilp", "chen", "eviction"):
        with pytest.raises(SolverError, match=method):
            solve(problem, budget, method=method, time_limit_s=0.01)
    assert solve(problem, budget, method="eviction", time_limit_s=5).peak_bytes <= budget


def test_the_error_says_whether_it_is_proved():
    low, lowest = 100, 120
    for budget, proved in ((low - 1, True), (low, False), (lowest - 1, False)):
        error = pickle.loads(pickle.dumps(InfeasibleBudget(budget, lowest, bound_bytes=low)))
        assert error.proved == proved
        assert ("no schedule fits" in str(error)) == proved
        assert "the smallest feasible budget is 120 bytes" in str(error)
    assert InfeasibleBudget(5, 10).proved


def test_progress_says_what_is_tried():
    lines = []
    problem = random_problem(5, most=20)
    while exhaustive.fits(problem):
        problem = random_problem(problem.resident_bytes + 6, most=20)
    budget = (minimum(problem).peak_bytes + solve(problem, None).peak_bytes) // 2
    solve(problem, budget, progress=lines.append)
    assert any("snapshots" in line for line in lines)
    assert any("binaries" in line or "program" in line for line in lines), lines
