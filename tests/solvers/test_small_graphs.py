"""Two or three blocks of real models: no answer is far from the optimum.

The graphs are those of examples/benchmarks/graphs.py with few blocks and costs of a modelled GPU,
names left out. ``optimal`` holds a budget and the extra time of the best schedule there, which the
method ilp proved in up to a minute; what it proves is checked against brute force elsewhere.
"""

import gzip
import json
from pathlib import Path

import pytest

from autockpt_solvers import Problem, simulate, solve

FILES = sorted((Path(__file__).parent / "graphs").glob("*.json.gz"))
# What an answer may cost above the optimum, as a part of the step.
CLOSE = 5e-3


@pytest.mark.parametrize("path", FILES, ids=[path.name.partition(".")[0] for path in FILES])
def test_no_answer_is_far_from_the_optimum(path):
    with gzip.open(path, "rt") as file:
        data = json.load(file)
    problem = Problem.from_dict(data)
    ((budget, optimal_ns),) = data["optimal"]
    found = solve(problem, budget, method="snapshot", time_limit_s=5)
    assert simulate(problem, found.schedule).peak_bytes <= budget
    assert found.lower_bound_ns <= optimal_ns * (1 + 1e-6)
    assert found.extra_ns <= optimal_ns + CLOSE * problem.baseline_cost_ns
