"""revolve: the binomial formula, and the oracle where it can be asked."""

from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autockpt_solvers import SolverError, minimum, solve
from autockpt_solvers.liveness import Liveness
from autockpt_solvers.methods import exhaustive, revolve, rotor
from autockpt_solvers.on_demand import Demand
from chain_problems import uniform_chain
from random_problems import budget_between, random_problem


@cache
def fewest(steps, checkpoints):
    """Bellman's equation for the forward steps, from the definition."""
    if steps <= 1:
        return 0
    if checkpoints == 1:
        return steps * (steps - 1) // 2
    return min(
        ahead + fewest(steps - ahead, checkpoints - 1) + fewest(ahead, checkpoints)
        for ahead in range(1, steps)
    )


def test_the_formula_is_the_optimum_of_its_recursion():
    for steps in range(1, 50):
        for checkpoints in range(1, 51):
            assert revolve.forward_steps(steps, checkpoints) == fewest(steps, checkpoints)


@settings(deadline=None)
@given(st.integers(2, 70), st.integers(1, 70))
def test_its_schedules_take_as_many_steps_as_the_formula_says(length, checkpoints):
    """The input is a checkpoint that weighs nothing; a running step has two links."""
    problem = uniform_chain(length)
    checkpoints = min(checkpoints, length)
    found = revolve.solve(problem, checkpoints + 1)
    # The first pass to the last step is the forward itself.
    assert found.extra_ns == revolve.forward_steps(length, checkpoints) - (length - 1)
    assert found.peak_bytes <= checkpoints + 1


@pytest.mark.parametrize("length", range(2, 9))
def test_nothing_is_better_on_uniform_chains(length):
    problem = uniform_chain(length)
    smallest = minimum(problem).peak_bytes
    costs = []
    for budget in range(smallest, solve(problem, None).peak_bytes + 1):
        found = revolve.solve(problem, budget)
        assert found.extra_ns == exhaustive.solve(problem, budget).extra_ns
        assert found.extra_ns == rotor.solve(problem, budget).extra_ns
        costs.append(found.extra_ns)
    assert all(tighter >= looser for tighter, looser in pairwise(costs))
    assert costs[-1] == 0
    with pytest.raises(SolverError, match="revolve: no schedule of a chain"):
        revolve.solve(problem, smallest - 1)


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 3))
def test_answers_keep_the_budget(seed, thirds):
    problem = random_problem(seed, most=16)
    budget = budget_between(problem, thirds)
    try:
        found = revolve.solve(problem, budget)
    except SolverError:
        return
    assert found.peak_bytes <= budget
    peak = Liveness(Demand(problem)).peak(list(found.schedule.backward_computes))
    assert (peak.peak_bytes, peak.extra_ns) == (found.peak_bytes, found.extra_ns)
