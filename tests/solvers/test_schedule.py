"""free_early frees at once, and the simulator names what is wrong with a schedule."""

import pytest

from autockpt_solvers import (
    BARRIER,
    Compute,
    Free,
    Operation,
    Problem,
    Schedule,
    ScheduleError,
    Storage,
    free_early,
    simulate,
)
from random_problems import random_problem

PROBLEM = Problem(
    storages=(Storage("x", 8, keepable=False), Storage("loss", 4), Storage("grad", 8)),
    operations=(
        Operation("x", (), (0,), 5, recompute_inputs=(), recompute_outputs=(0,)),
        Operation("loss", (0,), (1,), 5, fixed="the user holds its output"),
        Operation("grad", (0, 1), (2,), 5, fixed="a backward operation"),
    ),
    barrier=2,
    live_at_barrier=frozenset({1}),
    live_at_end=frozenset({1, 2}),
)
GOOD = (
    Compute(0), Compute(1), Free(0), BARRIER, Compute(0), Compute(2), Free(0),
)  # fmt: skip


def test_the_good_schedule_is_what_free_early_makes():
    schedule = free_early(PROBLEM, [0, 1], [0, 2])
    assert schedule.steps == GOOD
    assert simulate(PROBLEM, schedule).extra_ns == 5


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (GOOD[1:], "loss reads x, which is not resident"),
        (GOOD[:3] + GOOD[4:], "grad belongs behind the barrier"),
        ((*GOOD[:2], BARRIER, *GOOD[5:]), "x is pinned to be recomputed"),
        ((Compute(0), Free(0), BARRIER, *GOOD[4:]), "loss has not run"),
        ((*GOOD[:2], Free(1), *GOOD[2:]), "frees loss, which the user holds"),
        ((*GOOD[:5], Compute(0), *GOOD[5:]), "computes x, which is resident"),
        (GOOD[:5], "grad has not run"),
        ((*GOOD, Free(2)), "grad must live to the end"),
        ((*GOOD, Compute(1)), "loss may not run again: the user holds its output"),
        ((*GOOD, Free(0)), "frees x, which is not resident"),
        ((*GOOD, BARRIER), "a second barrier"),
        (GOOD[:3], "there is no barrier"),
        ((*GOOD, Compute(2)), "grad runs where nothing is due"),
        ((*GOOD[:3], BARRIER, Compute(0), Compute(1)), "loss may not run again"),
    ],
)
def test_broken_schedules_are_refused(steps, message):
    with pytest.raises(ScheduleError, match=message):
        simulate(PROBLEM, Schedule(tuple(steps)))


def test_free_early_leaves_nothing_that_nobody_reads():
    """Dropping any one free and putting it anywhere earlier breaks the schedule."""
    for seed in range(60):
        problem = random_problem(seed)
        forward = [i for i in problem.forward if not problem.operations[i].optional]
        if any(not s.keepable for s in problem.storages):
            continue
        schedule = free_early(problem, forward, list(problem.backward))
        simulate(problem, schedule)
        steps = list(schedule.steps)
        for position, step in enumerate(steps):
            if not isinstance(step, Free):
                continue
            earlier = position - 1
            while isinstance(steps[earlier], Free):
                earlier -= 1
            moved = [*steps[:earlier], step, *steps[earlier:position], *steps[position + 1 :]]
            with pytest.raises(ScheduleError):
                simulate(problem, Schedule(tuple(moved)))


def test_json_round_trip():
    schedule = Schedule(GOOD)
    assert Schedule.from_list(schedule.to_list()) == schedule
