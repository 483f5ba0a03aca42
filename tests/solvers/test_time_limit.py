"""The time limit holds for every method, and what is found by then comes back with its gap."""

import gc
import time

import pytest

from autockpt_solvers import METHODS, InfeasibleBudget, SolverError, minimum, simulate, solve
from chain_problems import random_chain

LIMIT_S = 1.5


@pytest.fixture(scope="module")
def hard():
    """A long chain at a low budget, which no method closes in the limit."""
    problem = random_chain(3, 700)
    smallest = minimum(problem, time_limit_s=3).peak_bytes
    return problem, smallest + (solve(problem, None).peak_bytes - smallest) // 20


@pytest.fixture(autouse=True)
def own_objects_only():
    """What other tests have left is not to be walked through at each garbage collection."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("method", ["auto", *METHODS])
def test_the_time_limit_holds(method, hard, monkeypatch):
    problem, budget = hard
    # Time of this process: what else runs on the machine takes none of it.
    monkeypatch.setattr(time, "perf_counter", time.process_time)
    taken_s = []
    for _ in range(3):  # a busy machine's caches only ever add to it
        started = time.perf_counter()
        try:
            found = solve(problem, budget, method=method, time_limit_s=LIMIT_S)
        except (SolverError, InfeasibleBudget):
            assert method not in ("auto", "snapshot")
        else:
            assert simulate(problem, found.schedule).peak_bytes <= budget
            assert found.lower_bound_ns <= found.extra_ns
        taken_s.append(time.perf_counter() - started)
        if taken_s[-1] < 1.1 * LIMIT_S:
            break
    assert min(taken_s) < 1.1 * LIMIT_S
