"""free_early frees at once, and the simulator names what is wrong with a schedule."""

from dataclasses import replace

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
    for steps in (GOOD, IN_PLACE):
        schedule = Schedule(steps)
        assert Schedule.from_list(schedule.to_list()) == schedule


# ------------------------------------------------------------------ in place


def in_place_problem(**changes):
    """x, then y over x, then the loss, which the user holds; the backward's gradient over g."""
    operations = {
        "x": Operation("x", (), (0,), 5, recompute_inputs=(), recompute_outputs=(0,)),
        "y": Operation(
            "y", (0,), (1,), 5, recompute_inputs=(0,), recompute_outputs=(1,), over=(0,)
        ),
        "loss": Operation("loss", (1,), (2,), 5, fixed="the user holds its output"),
        "g": Operation("g", (1, 2), (3,), 5),
        "grad": Operation("grad", (3,), (4,), 5, over=(3,)),
    }
    operations.update({name: replace(operations[name], **c) for name, c in changes.items()})
    return Problem(
        storages=tuple(Storage(n, 8) for n in ("x", "y", "loss", "g", "grad")),
        operations=tuple(operations.values()),
        barrier=3,
        live_at_barrier=frozenset({2}),
        live_at_end=frozenset({2, 4}),
    )


IN_PLACE = (Compute(0), Compute(1, 0), Compute(2), BARRIER, Compute(3), Free(1), Compute(4, 3))


def test_what_dies_is_written_over():
    problem = in_place_problem()
    schedule = free_early(problem, range(3), [3, 4])
    assert schedule.steps == IN_PLACE
    assert simulate(problem, schedule).live_bytes == (8, 8, 16, 16, 24, 16, 16)


def test_what_lives_on_is_not_written_over():
    """y runs again, so x is kept; a further run has memory of its own."""
    schedule = free_early(in_place_problem(), range(3), [1, 3, 4])
    assert schedule.steps[:3] == (Compute(0), Compute(1), Compute(2))
    assert Compute(1) in schedule.steps[4:]
    again = free_early(in_place_problem(), range(3), [0, 1, 3, 4])
    assert again.steps[1] == Compute(1, 0)
    assert again.steps[-6:-2] == (Compute(0), Compute(1), Free(0), Compute(3))


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ((Compute(0), Compute(1, 0), Free(0)), "frees x, which is not resident"),
        ((*IN_PLACE[:2], Compute(2, 1)), "loss may not write over y"),
        ((*IN_PLACE[:5], Compute(4, 1)), "grad may not write over y"),
        ((*IN_PLACE[:4], Compute(1)), r"y reads x, .* not resident \(y is written over it\)"),
        (
            (Compute(0), Compute(1), Free(1), Compute(1, 0)),
            "y writes in place in a further run",
        ),
    ],
)
def test_a_schedule_that_overwrites_what_it_must_not_is_refused(steps, message):
    with pytest.raises(ScheduleError, match=message):
        simulate(in_place_problem(), Schedule(steps))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y": {"over": (1,)}}, "does not read it"),
        ({"g": {"over": (1,)}}, "saved for the backward"),
        ({"g": {"over": (2,)}}, "saved for the backward"),
        ({"x": {"outside": True}}, "made outside the graph"),
        ({"y": {"outputs": (1, 5), "recompute_outputs": (1,)}}, "exactly one storage"),
    ],
)
def test_a_problem_that_allows_what_is_never_right_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        in_place_problem(**changes)


def test_in_place_lowers_peaks_and_never_raises_one():
    lower = 0
    for seed in range(200):
        problem = random_problem(seed)
        plain = replace(problem, operations=tuple(replace(o, over=()) for o in problem.operations))
        if any(not s.keepable for s in problem.storages):
            continue
        there, here = (
            simulate(p, free_early(p, p.required, p.backward)).peak_bytes for p in (plain, problem)
        )
        assert here <= there
        lower += here < there
    assert lower > 20
