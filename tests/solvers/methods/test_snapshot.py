"""snapshot: live bytes equal the simulator's, bounds hold for all schedules, greedy is beaten."""

import gzip
import json
import random
import time
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autockpt_solvers import Problem, SolverError, minimum, simulate, solve
from autockpt_solvers.highs import LpResult, MipProcess, Relaxation
from autockpt_solvers.incumbent import Incumbent
from autockpt_solvers.liveness import Liveness
from autockpt_solvers.methods import eviction, exhaustive, greedy, snapshot
from autockpt_solvers.methods.ilp.stages import Stages
from autockpt_solvers.methods.snapshot import Snapshots
from autockpt_solvers.methods.snapshot.blocks import (
    Layout,
    joined,
    layouts,
    refined,
    thinned,
    widened,
)
from autockpt_solvers.methods.snapshot.following import walks
from autockpt_solvers.methods.snapshot.local_search import fit, improve, wander
from autockpt_solvers.methods.snapshot.paths import PathCuts, carried
from autockpt_solvers.methods.snapshot.program import SnapshotProgram
from autockpt_solvers.methods.snapshot.residency import Facts, Residency
from autockpt_solvers.methods.snapshot.rounding import rounded
from autockpt_solvers.methods.snapshot.spans import priced, span_bound, spans
from autockpt_solvers.on_demand import Demand, needed_storages, on_demand, stage_schedule
from autockpt_solvers.solution import whole_ns
from random_problems import budgets, random_problem

GRAPHS = Path(__file__).parent.parent / "graphs"


def figures(state):
    """Peak and cost, from the state and from the simulator."""
    trace = simulate(state.problem, stage_schedule(state.problem, state.order()))
    return (state.peak(), state.cost_ns), (trace.peak_bytes, trace.extra_ns)


def random_state(seed):
    problem = random_problem(seed, most=14)
    liveness = Liveness(Demand(problem))
    rng = random.Random(seed)
    needed = needed_storages(liveness.demand)
    kept = {s for s in needed if rng.random() < 0.5}
    held = {s for s in needed if rng.random() < 0.5}
    order = on_demand(liveness.demand, kept, held)
    return Residency(Facts(liveness, Stages(liveness)), order), rng


@pytest.mark.parametrize("block", range(4))
def test_live_bytes_follow_each_change(block):
    changed = 0
    for seed in range(block * 60, block * 60 + 60):
        state, rng = random_state(seed)
        ours, simulated = figures(state)
        assert ours == simulated
        for _ in range(25):
            before = (state.order(), state.peak(), state.cost_ns)
            runs = [(index, stage) for index, stages in state.runs.items() for stage in stages]
            served = True
            if runs and rng.random() < 0.5:
                served = state.remove(*rng.choice(runs))
            elif state.runs:
                index = rng.choice(sorted(state.runs))
                reading = state.reading[rng.choice(state.outputs[index])]
                if reading:
                    state.add(index, rng.choice(reading))
            if served:
                ours, simulated = figures(state)
                assert ours == simulated
                changed += before[0] != state.order()
            if not served or rng.random() < 0.5:
                state.rollback()
                assert before == (state.order(), state.peak(), state.cost_ns)
                assert figures(state)[0] == figures(state)[1]
            else:
                state.commit()
    assert changed > 300


def test_no_choice_of_blocks_and_snapshots_bounds_too_high():
    """Against the cheapest of all schedules; with cuts and binaries, where it is tightest."""
    proved = cut = 0
    for seed in range(200):
        problem = random_problem(seed)
        rng, noise = random.Random(seed), np.random.default_rng(seed)
        liveness = Liveness(Demand(problem))
        count = problem.barrier
        last = len(problem.operations) - count
        choices = layouts(liveness, Stages(liveness).groups)
        for _ in range(3):
            cuts = sorted(rng.sample(range(count), min(count, rng.randint(0, 4))))
            block = tuple(sum(i >= cut for cut in cuts) for i in range(count))
            picked = rng.sample(range(last), min(last, rng.randint(1, 5)))
            choices.append(Layout("random", block, frozenset(picked)))
        smallest = minimum(problem).peak_bytes
        for budget in budgets(problem, smallest, solve(problem, None).peak_bytes):
            best = exhaustive.solve(problem, budget).extra_ns
            for layout in choices:
                stages = Stages(liveness, snapshots=layout.snapshots)
                program = SnapshotProgram(stages, layout, 10.0)
                if not program.memory:
                    continue
                relaxation = Relaxation(program.program, program.arrays)
                result = relaxation.solve(program.sides(budget), time_limit_s=10)
                assert result.status == "optimal"
                assert whole_ns(result.bound * program.cost_unit) <= best
                proved += result.bound > 1e-6
                cuts = PathCuts(program)
                # Cuts of a point that has little of everything, then those of the relaxation.
                relaxation.cover(cuts.violated(0.2 * noise.random(len(result.values))))
                while rows := cuts.violated(result.values):
                    relaxation.cover(rows)
                    result = relaxation.solve(program.sides(budget), time_limit_s=10)
                    assert result.status == "optimal"
                    assert whole_ns(result.bound * program.cost_unit) <= best
                cut += len(program.program.rows) - len(program.arrays["row_lower"])
                with MipProcess(program.program) as process:
                    process.arrays["row_upper"] = program.sides(budget)
                    exact = process.solve(time_limit_s=10, relative_gap=0)
                assert exact.bound <= best / program.cost_unit * (1 + 1e-6) + 1e-4
    assert proved > 500
    assert cut > 1000


def test_spans_with_binaries_bound_every_schedule_at_any_prices():
    more = 0
    for seed in range(60):
        problem = random_problem(seed)
        rng = np.random.default_rng(seed)
        liveness = Liveness(Demand(problem))
        budget = int(minimum(problem).peak_bytes * 1.05)
        best = exhaustive.solve(problem, budget).extra_ns
        every = frozenset(range(len(problem.operations) - problem.barrier))
        layout = Layout("all", (0,) * problem.barrier, every)
        program = SnapshotProgram(Stages(liveness, snapshots=every), layout, 10.0)
        if not program.memory:
            continue
        relaxation = Relaxation(program.program, program.arrays)
        result = relaxation.solve(program.sides(budget), time_limit_s=10)
        tight = span_bound(
            program,
            relaxation.arrays,
            result.duals,
            result.values,
            deadline=time.perf_counter() + 10,
        )
        assert tight >= result.bound - 1e-6
        assert whole_ns(tight * program.cost_unit) <= best
        more += tight > result.bound + 1e-3
        duals = result.duals + rng.normal(size=len(result.duals))
        for binaries in (1, 12):
            span = spans(program, binaries)
            divided = priced(relaxation.arrays, duals, span)
            assert len(divided.pieces) == span.max() + 1
            total = divided.rest
            for piece, bound in zip(divided.pieces, divided.bounds, strict=True):
                with MipProcess(piece) as process:
                    exact = process.solve(time_limit_s=10, relative_gap=0)
                assert exact.bound >= bound - 1e-6
                total += exact.bound
            assert whole_ns(total * program.cost_unit) <= best
    assert more > 10


def test_cuts_hold_with_more_snapshots_and_wider_blocks():
    taken = 0
    for seed in range(100):
        problem = random_problem(seed)
        rng, noise = random.Random(seed), np.random.default_rng(seed)
        liveness = Liveness(Demand(problem))
        budget = minimum(problem).peak_bytes
        best = exhaustive.solve(problem, budget).extra_ns
        count, last = problem.barrier, len(problem.operations) - problem.barrier
        for _ in range(3):
            cuts = sorted(rng.sample(range(count), min(count, rng.randint(0, 4))))
            block = tuple(sum(i >= cut for cut in cuts) for i in range(count))
            picked = rng.sample(range(last), min(last, rng.randint(1, 4)))
            coarse = Layout("coarse", block, frozenset(picked))
            finer = refined(coarse, rng.sample(range(last), min(last, 3)))
            finer = joined(finer, set(rng.sample(block, rng.randint(0, 1))))
            before, after = (
                SnapshotProgram(Stages(liveness, snapshots=layout.snapshots), layout, 10.0)
                for layout in (coarse, finer)
            )
            if not after.memory:
                continue
            points = 0.3 * noise.random((3, len(before.program.variables)))
            rows = [row for point in points for row in PathCuts(before).violated(point)]
            relaxation = Relaxation(after.program, after.arrays)
            relaxation.cover(carried(rows, before, after))
            result = relaxation.solve(after.sides(budget), time_limit_s=10)
            assert result.status == "optimal"
            assert whole_ns(result.bound * after.cost_unit) <= best
            taken += len(rows)
    assert taken > 1000


def test_a_cut_is_short_of_one_where_it_is_violated():
    for seed in range(40):
        problem = random_problem(seed, most=16)
        liveness = Liveness(Demand(problem))
        rng = np.random.default_rng(seed)
        for layout in layouts(liveness, Stages(liveness).groups):
            stages = Stages(liveness, snapshots=layout.snapshots)
            program = SnapshotProgram(stages, layout, 10.0)
            values = 0.3 * rng.random(len(program.program.variables))
            for columns in PathCuts(program).violated(values):
                assert len(set(columns)) == len(columns)
                assert values[columns].sum() < 1
            # Where all run all the time nothing is violated, nor looked for in windows that end
            # before they begin.
            assert not PathCuts(program).violated(np.ones(len(values)))


def test_blocks_that_borrow_are_joined():
    layout = Layout("example", (0, 0, 1, 2, 2, 3), frozenset({0, 4, 5, 8}))
    assert joined(layout, {0, 2}).block == (0, 0, 0, 1, 1, 1)
    assert thinned(layout, [9, 0, 0, 0, 7, 8, 0, 0, 1]).snapshots == {0, 5, 8}
    with gzip.open(GRAPHS / "llama.json.gz", "rt") as file:
        data = json.load(file)
    problem, ((budget, _),) = Problem.from_dict(data), data["optimal"]
    search = Snapshots(Liveness(Demand(problem)))
    best = Incumbent(search.liveness, budget * 4 // 5)
    deadline = time.perf_counter() + 20
    before = search.first_bound(best, deadline=deadline)
    points = search.tighten(best, deadline=deadline)
    assert best.bound_ns > 1.005 * before
    for order in chain.from_iterable(points):
        simulate(problem, stage_schedule(problem, order))
    found = eviction.solve(problem, best.budget_bytes)
    assert best.bound_ns <= found.extra_ns


def relaxed(liveness, layout, budget):
    """The program of a choice, and its relaxation's point and bound, in nanoseconds."""
    stages = Stages(liveness, snapshots=layout.snapshots)
    program = SnapshotProgram(stages, layout, budget / 1000)
    relaxation = Relaxation(program.program, program.arrays)
    result = relaxation.solve(program.sides(budget), time_limit_s=10)
    return program, result.values, result.bound * program.cost_unit


def test_snapshots_where_a_point_breaks_the_budget_say_more():
    with gzip.open(GRAPHS / "resnet.json.gz", "rt") as file:
        data = json.load(file)
    problem, ((roomy, _),) = Problem.from_dict(data), data["optimal"]
    budget = roomy * 3 // 4
    liveness = Liveness(Demand(problem))
    layout = Layout("example", (0,) * problem.barrier, frozenset({0}))
    program, values, before = relaxed(liveness, layout, budget)
    assert not program.overlooked(values, 2 * roomy)
    for _ in range(2):
        offsets = program.overlooked(values, budget)
        assert offsets
        assert not set(offsets) & set(program.stages.ends)
        layout = refined(layout, offsets)
        program, values, bound = relaxed(liveness, layout, budget)
    assert bound > 1.05 * before
    states, fitting = [], 0
    orders = walks(
        [(program, values)],
        budget,
        lambda: states[-1] if states else None,
        deadline=time.perf_counter() + 20,
    )
    for order in filter(None, islice(orders, 12)):
        states.append(Residency(Facts(liveness, Stages(liveness)), order))
        trace = simulate(problem, stage_schedule(problem, order))
        assert trace.peak_bytes <= budget
        assert bound <= trace.extra_ns
        fitting += 1
    assert fitting > 6


def test_spans_start_from_the_point_before_the_one_that_was_broken_off(monkeypatch):
    with gzip.open(GRAPHS / "resnet.json.gz", "rt") as file:
        data = json.load(file)
    problem, ((roomy, _),) = Problem.from_dict(data), data["optimal"]
    best = Incumbent(Liveness(Demand(problem)), roomy * 3 // 4)
    search = Snapshots(best.liveness)
    deadline = time.perf_counter() + 20
    best.accept(eviction.solve(problem, best.budget_bytes).schedule.backward_computes, "eviction")
    first = search.first_bound(best, deadline=deadline)
    whole = snapshot.Relaxation.solve
    # What the solver leaves when its time is up: nothing, or duals.
    stopped = [
        lambda *_, **__: LpResult("stopped", None, None, -np.inf),
        lambda *a, **k: replace(whole(*a, **k), status="stopped", values=None),
    ]
    bounds = [first]
    for solve_lp in stopped:
        monkeypatch.setattr(snapshot.Relaxation, "solve", solve_lp)
        search.tighten(best, deadline=deadline)
        bounds.append(best.bound_ns)
        search.spans(best, deadline=deadline)
        bounds.append(best.bound_ns)
    assert bounds == sorted(bounds)
    assert first == bounds[1] < bounds[2]
    assert bounds[-1] <= best.extra_ns


def test_blocks_are_widened():
    with gzip.open(GRAPHS / "llama.json.gz", "rt") as file:
        problem = Problem.from_dict(json.load(file))
    liveness = Liveness(Demand(problem))
    groups = Stages(liveness).groups
    layout = layouts(liveness, groups)[0]
    wider = widened(layout, liveness, groups, 4)
    assert len(set(wider.block)) < len(set(layout.block))
    assert list(wider.block) == sorted(wider.block)
    assert wider.snapshots == layout.snapshots


def test_rounded_points_are_schedules():
    for seed in range(60):
        problem = random_problem(seed, most=16)
        liveness = Liveness(Demand(problem))
        rng = random.Random(seed)
        for layout in layouts(liveness, Stages(liveness).groups):
            stages = Stages(liveness, snapshots=layout.snapshots)
            program = SnapshotProgram(stages, layout, 10.0)
            point = [rng.random() for _ in program.program.variables]
            order = rounded(program, point, 0.5)
            simulate(problem, stage_schedule(problem, order))


def test_local_search_keeps_the_budget_and_gains():
    gained = 0
    for seed in range(60):
        state, _ = random_state(seed)
        budget = (minimum(state.problem).peak_bytes + 2 * state.peak()) // 3
        deadline = time.perf_counter() + 5
        if not fit(state, budget, deadline=deadline):
            continue
        costs = [state.cost_ns]
        improve(state, budget, deadline=deadline)
        costs.append(state.cost_ns)
        for better in wander(state, budget, deadline=deadline, goal_ns=0, trials=30):
            costs.append(better.cost_ns)
            ours, simulated = figures(better)
            assert ours == simulated
            assert better.peak() <= budget
        assert costs == sorted(costs, reverse=True)
        gained += costs[-1] < costs[0]
    assert gained > 15


@settings(max_examples=960, deadline=None, derandomize=True)
@given(st.integers(0, 10**9), st.floats(0, 1))
def test_auto_is_never_worse_than_greedy(seed, fraction):
    never_worse_than_greedy(random_problem(seed, most=8), fraction)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 10**9), st.floats(0, 1))
def test_auto_is_never_worse_than_greedy_on_larger_problems(seed, fraction):
    never_worse_than_greedy(random_problem(seed, most=24), fraction)


def never_worse_than_greedy(problem, fraction):
    smallest, largest = minimum(problem).peak_bytes, solve(problem, None).peak_bytes
    budget = smallest + int(fraction * (largest - smallest))
    found = solve(problem, budget, time_limit_s=1.0)
    assert simulate(problem, found.schedule).peak_bytes <= budget
    assert found.lower_bound_ns <= found.extra_ns
    try:
        simple = greedy.solve(problem, budget)
    except SolverError:
        return
    assert found.extra_ns <= simple.extra_ns


def test_close_to_the_exact_program():
    for seed in range(40):
        problem = random_problem(seed)
        smallest, largest = minimum(problem).peak_bytes, solve(problem, None).peak_bytes
        for budget in budgets(problem, smallest, largest):
            best = exhaustive.solve(problem, budget)
            try:
                found = snapshot.solve(problem, budget, time_limit_s=5)
            except SolverError:
                # At the minimum the order inside a stage may decide, which snapshot does not vary.
                assert budget == smallest
                continue
            assert found.lower_bound_ns <= best.extra_ns <= found.extra_ns


def test_ctrl_c_leaves_the_best_so_far(monkeypatch):
    problem = random_problem(11, most=24)
    smallest, largest = minimum(problem).peak_bytes, solve(problem, None).peak_bytes
    budget = (smallest + largest) // 2

    def interrupt(*_args, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(Snapshots, "_improve", interrupt)
    lines = []
    found = solve(problem, budget, progress=lines.append)
    assert simulate(problem, found.schedule).peak_bytes <= budget
    assert found.extra_ns >= found.lower_bound_ns > 0
    assert any("interrupted" in line for line in lines)
    assert snapshot.solve(problem, budget).peak_bytes <= budget


def test_ctrl_c_before_there_is_anything_is_an_interrupt(monkeypatch):
    problem = random_problem(11, most=24)
    budget = (minimum(problem).peak_bytes + solve(problem, None).peak_bytes) // 2

    def interrupt(*_args, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(greedy, "solve", interrupt)
    with pytest.raises(KeyboardInterrupt):
        solve(problem, budget)
