"""Orders on demand are valid, and say plainly where they cannot be."""

import random
from dataclasses import replace

import pytest

from autockpt_solvers import (
    METHODS,
    Operation,
    PinError,
    Problem,
    Storage,
    minimum,
    simulate,
    solve,
)
from autockpt_solvers.on_demand import Demand, needed_storages, on_demand, stage_schedule
from random_problems import random_problem


def chain(length):
    storages = [Storage(f"f{i}", 1) for i in range(length)]
    operations = [
        Operation(
            f"f{i}",
            (i - 1,) if i else (),
            (i,),
            cost_ns=1,
            recompute_inputs=(i - 1,) if i else (),
            recompute_outputs=(i,),
        )
        for i in range(length)
    ]
    storages.append(Storage("gradient", 1))
    operations.append(Operation("gradient", (length - 1,), (length,), cost_ns=1))
    return Problem(tuple(storages), tuple(operations), length, live_at_end=frozenset({length}))


def test_every_choice_gives_a_valid_schedule():
    for seed in range(300):
        problem = random_problem(seed)
        demand = Demand(problem)
        rng = random.Random(seed)
        kept = {s for s in needed_storages(demand) if rng.random() < 0.5}
        for held in (None, set(), kept):
            for tight in (False, True):
                order = on_demand(demand, kept, held, tight=tight)
                simulate(problem, stage_schedule(problem, order))


def test_held_storages_are_recomputed_once():
    for seed in range(100):
        problem = random_problem(seed)
        demand = Demand(problem)
        order = on_demand(demand, set())
        single = [
            i
            for i in order
            if i < problem.barrier and len(problem.operations[i].recompute_outputs) == 1
        ]
        assert len(single) == len(set(single))


def test_a_chain_of_thousands_needs_no_recursion():
    problem = chain(5000)
    order = on_demand(Demand(problem), set())
    assert order == list(range(5001))


def test_optional_operations_run_only_where_something_reads_them():
    left_out = used = 0
    for seed in range(200):
        problem = random_problem(seed)
        demand = Demand(problem)
        optional = [i for i in problem.forward if problem.operations[i].optional]
        for kept in (set(), needed_storages(demand)):
            order = on_demand(demand, kept)
            schedule = stage_schedule(problem, order)
            read = {
                s
                for i in order
                if i < problem.barrier
                for s in problem.operations[i].recompute_inputs
            }
            for index in optional:
                runs = index in schedule.forward_computes
                assert runs == bool(read & set(problem.operations[index].outputs))
                used += runs
                left_out += not runs
    assert used > 20
    assert left_out > 20


def test_a_storage_neither_kept_nor_recomputed_is_a_pin_error():
    problem = chain(2)
    first, last = problem.operations[0], problem.operations[1]
    problem = replace(
        problem,
        storages=(problem.storages[0], Storage("f1", 1, keepable=False), problem.storages[2]),
        operations=(
            first,
            replace(last, recompute_inputs=None, recompute_outputs=(), fixed="it has an effect"),
            problem.operations[2],
        ),
    )
    wanted = r"f1 is pinned to be recomputed, but f1 may not run again: it has an effect"
    with pytest.raises(PinError, match=wanted):
        on_demand(Demand(problem), set())
    for method in ("auto", *METHODS):
        for budget in (None, 2, 100):
            with pytest.raises(PinError, match=wanted):
                solve(problem, budget, method=method)
    with pytest.raises(PinError, match=wanted):
        minimum(problem)


def test_what_cannot_be_reached_is_kept():
    """f1 may run again, but not what it reads: pinning that is no error while f1 can be kept."""
    problem = chain(3)
    operations = list(problem.operations)
    operations[0] = replace(
        operations[0], recompute_inputs=None, recompute_outputs=(), fixed="it has an effect"
    )
    storages = list(problem.storages)
    storages[0] = replace(storages[0], keepable=False)
    problem = replace(problem, storages=tuple(storages), operations=tuple(operations))
    for method in ("auto", "keep_all", "greedy", "ilp", "exhaustive"):
        assert solve(problem, None, method=method).extra_ns == 0
    storages[2] = replace(storages[2], keepable=False)
    problem = replace(problem, storages=tuple(storages))
    assert solve(problem, None).extra_ns == 1  # f2 from f1, which is kept
    storages[1] = replace(storages[1], keepable=False)
    with pytest.raises(PinError, match="f0 is pinned"):
        solve(replace(problem, storages=tuple(storages)), None)
