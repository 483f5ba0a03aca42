"""The fast peak equals the simulator's, whatever is kept and held."""

import random

import pytest

from autockpt_solvers import simulate
from autockpt_solvers.liveness import Liveness
from autockpt_solvers.memory import live_storages
from autockpt_solvers.on_demand import Demand, needed_storages, on_demand, stage_schedule
from autockpt_solvers.schedule import Compute
from random_problems import random_problem


@pytest.mark.parametrize("block", range(10))
def test_peak_and_cost_are_the_simulators(block):
    for seed in range(block * 60, block * 60 + 60):
        problem = random_problem(seed, most=12)
        liveness = Liveness(Demand(problem))
        needed = sorted(needed_storages(liveness.demand))
        rng = random.Random(seed)
        for _ in range(4):
            kept = {s for s in needed if rng.random() < 0.5}
            held = {s for s in needed if rng.random() < 0.5}
            order = on_demand(liveness.demand, kept, held, tight=rng.random() < 0.3)
            schedule = stage_schedule(problem, order)
            trace = simulate(problem, schedule)
            level = rng.randint(0, trace.peak_bytes)
            peak = liveness.peak(order, level)
            assert (peak.peak_bytes, peak.extra_ns) == (trace.peak_bytes, trace.extra_ns)
            runs = [
                live
                for step, live in zip(schedule.steps, trace.live_bytes, strict=True)
                if isinstance(step, Compute)
            ]
            assert peak.excess == sum(live - level for live in runs if live > level)
            assert liveness.levels(order) == runs[-len(order) :]


def test_residents_at_the_peak_are_the_simulators():
    compared = 0
    for seed in range(200):
        problem = random_problem(seed, most=12)
        liveness = Liveness(Demand(problem))
        order = on_demand(liveness.demand, set())
        peak = liveness.peak(order)
        schedule = stage_schedule(problem, order)
        if peak.position < 0:
            continue
        runs = [n for n, step in enumerate(schedule.steps) if isinstance(step, Compute)]
        step = runs[len(schedule.forward_computes) + peak.position]
        op = problem.operations[order[peak.position]]
        made = set(op.recompute_outputs)
        expected = {
            s
            for s in live_storages(problem, schedule, step)
            if liveness.demand.is_forward[s] and s not in liveness.held and s not in made
        }
        assert set(liveness.resident(order, peak)) - made == expected
        compared += 1
    assert compared > 50
