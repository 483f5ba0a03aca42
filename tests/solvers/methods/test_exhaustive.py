"""The oracle itself, against schedules written out by hand and against random ones."""

import random

import pytest

from autockpt_solvers import Operation, Problem, SolverError, Storage, simulate
from autockpt_solvers.liveness import Liveness
from autockpt_solvers.methods import exhaustive
from autockpt_solvers.on_demand import Demand, needed_storages, on_demand
from random_problems import random_problem


def test_no_random_schedule_beats_it():
    beaten = 0
    for seed in range(150):
        problem = random_problem(seed, most=5)
        liveness = Liveness(Demand(problem))
        needed = sorted(needed_storages(liveness.demand))
        rng = random.Random(seed)
        for _ in range(6):
            kept = {s for s in needed if rng.random() < 0.5}
            held = {s for s in needed if rng.random() < 0.5}
            peak = liveness.peak(on_demand(liveness.demand, kept, held))
            best = exhaustive.solve(problem, peak.peak_bytes)
            assert best.extra_ns <= peak.extra_ns
            beaten += best.extra_ns < peak.extra_ns
    assert beaten > 100


def two_branches():
    """Two long branches meet in one backward operation; side by side they do not fit."""
    names = ["a", "b", "x", "y", "loss", "dx"]
    sizes = [8, 8, 1, 1, 1, 1]

    def op(name, inputs, output, again=True):
        return Operation(
            name,
            inputs,
            (output,),
            cost_ns=1,
            recompute_inputs=inputs if again else None,
            recompute_outputs=(output,) if again else (),
        )

    return Problem(
        storages=tuple(
            Storage(n, s, keepable=n not in "abxy") for n, s in zip(names, sizes, strict=True)
        ),
        operations=(
            op("a", (), 0),
            op("x", (0,), 2),
            op("b", (), 1),
            op("y", (1,), 3),
            op("loss", (2, 3), 4, again=False),
            op("dx", (2, 3, 4), 5, again=False),
        ),
        barrier=5,
        live_at_barrier=frozenset({4}),
        live_at_end=frozenset({4, 5}),
    )


def test_it_interleaves_freeing_and_recomputing():
    problem = two_branches()
    best = exhaustive.solve(problem, 11)
    assert best.extra_ns == 4
    assert best.peak_bytes == 11  # y beside b, x and the loss
    assert simulate(problem, best.schedule).peak_bytes == 11
    with pytest.raises(SolverError):
        exhaustive.solve(problem, 10)


def test_it_stops_at_its_limit():
    for seed in range(60):
        problem = random_problem(seed, most=20)
        if not exhaustive.fits(problem):
            with pytest.raises(SolverError, match="8 operations"):
                exhaustive.solve(problem, None)
            break
    else:
        pytest.fail("no problem was large enough")
