"""The door to HiGHS: bounds hold from any duals, and time limits hold whatever HiGHS does."""

import random
import time

import numpy as np
import pulp
import pytest

from autockpt_solvers.highs import SMALL, MipProcess, Program, safe_bound, solve_lp


def knapsack(items, seed, rows=1):
    rng = random.Random(seed)
    program = Program("knapsack")
    columns = [program.variable(f"x{n}", -rng.randint(10, 99)) for n in range(items)]
    for row in range(rows):
        sizes = [rng.randint(10, 99) for _ in columns]
        program.row(f"room{row}", zip(columns, sizes, strict=True), upper=sum(sizes) // 3)
    return program


def test_any_duals_prove_a_bound():
    rng = np.random.default_rng(0)
    for seed in range(20):
        program = knapsack(12, seed, rows=3)
        with MipProcess(program) as process:
            best = process.solve(time_limit_s=10, relative_gap=0)
        assert best.status == "optimal"
        relaxed = solve_lp(program, time_limit_s=10)
        assert relaxed.bound == pytest.approx(float(program.cost @ relaxed.values), abs=1e-6)
        for _ in range(20):
            duals = rng.normal(size=3) * 3
            assert safe_bound(program.arrays(), duals) <= relaxed.bound + 1e-6


def test_a_child_solves_what_is_too_large_for_this_process():
    program = knapsack(SMALL + 1, 1)
    with MipProcess(program) as process:
        first = process.solve(time_limit_s=20, relative_gap=1e-4)
        fixed = np.zeros(SMALL + 1)
        second = process.solve(time_limit_s=20, relative_gap=1e-4, upper=fixed)
    assert first.objective >= first.bound - 1e-6
    assert first.bound >= first.objective - abs(first.objective) * 1e-3
    assert second.objective == 0


def test_the_time_limit_holds():
    program = knapsack(SMALL + 500, 2, rows=60)
    started = time.perf_counter()
    with MipProcess(program) as process:
        result = process.solve(time_limit_s=2, relative_gap=0)
    assert time.perf_counter() - started < 3.5
    assert result.status == "stopped"
    assert np.isfinite(result.bound)


def test_infeasible_programs_say_so():
    program = Program()
    program.row("impossible", [(program.variable("x"), 1.0)], lower=2.0)
    assert solve_lp(program, time_limit_s=5).status == "infeasible"
    with MipProcess(program) as process:
        assert process.solve(time_limit_s=5, relative_gap=0).status == "infeasible"


def test_pulps_own_solver_finds_the_same():
    """PuLP hands a model over piece by piece; nothing may be lost in handing it over whole."""
    for seed in range(10):
        program = knapsack(15, seed, rows=3)
        program.bound(0, lower=1.0)
        program.bound(1, upper=0.0)
        with MipProcess(program) as process:
            ours = process.solve(time_limit_s=10, relative_gap=0)
        assert program.model.solve(pulp.HiGHS(msg=False, threads=1, gapRel=0)) == 1
        assert pulp.value(program.model.objective) == pytest.approx(ours.objective)
        relaxed = solve_lp(program, time_limit_s=10)
        program.model.solve(pulp.HiGHS(msg=False, threads=1, mip=False))
        assert pulp.value(program.model.objective) == pytest.approx(relaxed.bound)


def test_a_copy_grows_alone():
    program = knapsack(5, 0)
    other = program.copy()
    other.row("more", [(0, 1.0)], upper=0.0)
    assert len(program.arrays()["row_lower"]) == 1
    assert len(other.arrays()["row_lower"]) == 2
    assert "more" not in str(program.model)
