"""The integer program against the oracle: 1,000 random problems at several budgets."""

import pulp
import pytest

from autockpt_solvers import SolverError, minimum, simulate, solve
from autockpt_solvers.highs import MipProcess
from autockpt_solvers.liveness import Liveness
from autockpt_solvers.methods import exhaustive, ilp
from autockpt_solvers.methods.ilp.instage import depth_first
from autockpt_solvers.methods.ilp.program import StageProgram
from autockpt_solvers.methods.ilp.split import split
from autockpt_solvers.methods.ilp.stages import Stages
from autockpt_solvers.on_demand import Demand, needed_storages, on_demand, stage_schedule
from random_problems import budgets, random_problem


@pytest.mark.parametrize("block", range(20))
def test_equals_the_exhaustive_search(block):
    """Without exception, in the space of all schedules that run the forward once."""
    compared = 0
    for seed in range(block * 50, block * 50 + 50):
        problem = random_problem(seed, most=5)
        smallest = minimum(problem).peak_bytes
        for budget in budgets(problem, smallest, solve(problem, None).peak_bytes):
            best = exhaustive.solve(problem, budget)
            found = ilp.solve(problem, budget, time_limit_s=10)
            assert found.extra_ns == best.extra_ns
            assert found.lower_bound_ns <= best.extra_ns
            assert found.peak_bytes <= budget
            compared += 1
    assert compared > 50


def test_split_stages_take_any_order():
    """Idle operations change nothing, and give a place to runs that no stage has room for."""
    for seed in range(100):
        problem = random_problem(seed, most=14)
        order = on_demand(Demand(problem), set())
        offsets = [n for n in range(len(problem.operations) - problem.barrier) if n % 3]
        wider = split(problem, offsets * 2)
        assert len(wider.idle) == 2 * len(offsets)
        there = wider.there(order)
        assert wider.back(there) == order
        peak, same = Liveness(Demand(problem)).peak(order), Liveness(Demand(wider.problem))
        assert same.peak(there).peak_bytes == peak.peak_bytes


def test_schedules_and_points_correspond():
    for seed in range(80):
        problem = random_problem(seed, most=14)
        liveness = Liveness(Demand(problem))
        needed = needed_storages(liveness.demand)
        budget = solve(problem, None).peak_bytes
        program = StageProgram(Stages(liveness), budget)
        program.close(0)
        order = on_demand(liveness.demand, {s for s in needed if s % 2})
        point = program.point(order)
        assert point is not None
        cost = float(program.program.cost @ point)
        back = program.order(point)
        assert liveness.peak(back).extra_ns == pytest.approx(cost * program.cost_unit)
        assert liveness.peak(back).extra_ns <= liveness.peak(order).extra_ns
        fits = liveness.peak(order).peak_bytes <= budget
        for variable, value in zip(program.program.variables, point, strict=True):
            variable.varValue = value
        for row in program.program.rows:
            assert not fits or row.valid(1e-9), str(row)


def test_depth_first_order_is_valid():
    for seed in range(100):
        problem = random_problem(seed, most=14)
        liveness = Liveness(Demand(problem))
        order = on_demand(liveness.demand, set())
        again = depth_first(Stages(liveness), order)
        assert sorted(again) == sorted(order)
        simulate(problem, stage_schedule(problem, again))


def test_a_budget_below_every_schedule_is_refused():
    problem = random_problem(2, most=14)
    with pytest.raises(SolverError, match="ilp finds no schedule"):
        ilp.solve(problem, problem.resident_bytes + 1)


def test_the_program_can_be_written_and_read(tmp_path):
    """As an LP file for people, as an MPS file for other solvers: both hold the same program."""
    problem = random_problem(4, most=14)
    smallest, largest = minimum(problem).peak_bytes, solve(problem, None).peak_bytes
    program = StageProgram(Stages(Liveness(Demand(problem))), (smallest + largest) // 2)
    program.close(0)
    program.program.model.writeLP(str(tmp_path / "program.lp"))
    text = (tmp_path / "program.lp").read_text()
    names = {v.name for v in program.program.variables}
    for family in ("R(", "S(", "T("):
        assert any(name.startswith(family) for name in names)
    for family in ("had(", "either(", "input(", "read(", "memory(", "later(", "laterread("):
        assert f"\n{family}" in text
    program.program.model.writeMPS(str(tmp_path / "program.mps"))
    _, again = pulp.LpProblem.fromMPS(str(tmp_path / "program.mps"))
    again.solve(pulp.HiGHS(msg=False, threads=1, gapRel=0))
    with MipProcess(program.program) as process:
        ours = process.solve(time_limit_s=10, relative_gap=0)
    assert pulp.value(again.objective) == pytest.approx(ours.objective)
