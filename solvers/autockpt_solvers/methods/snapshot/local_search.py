"""Local search on runs by stage: fit a budget, then take runs out and make room for it.

To take out a run holds a value longer; where that breaks the budget, other values are made again
instead, cheapest per byte first, as long as the exchange gains (an ejection chain, after Glover
1996). Every trial is one change of :class:`Residency`, with exact peaks.
"""

from __future__ import annotations

import random
import time
from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence

from autockpt_solvers.methods.snapshot.residency import KEPT, Residency

__all__ = ["fit", "improve", "wander"]

# How many of the most promising changes are tried at a peak that must come down.
LOOK = 10
# Changes that may follow the one that takes a run out.
CHAIN = 8
# By how much the order of promise is shaken, so that repeated trials differ.
NOISE = 0.6
# How many operations, side by side, a kick may touch.
WIDTHS = (4, 8, 16, 32)
# What part of the way to the goal a kick may lose.
SLACK = 0.05


def fit(state: Residency, budget_bytes: int, *, deadline: float) -> bool:
    """Make values again, cheapest per byte first, until the budget holds; return whether it does.

    Args:
        state: changed in place and committed.
        budget_bytes: the budget.
        deadline: ``time.perf_counter()`` at which to give up.
    """
    while state.peak() > budget_bytes:
        if time.perf_counter() > deadline or not _relieve(state, budget_bytes, LOOK * 4):
            state.commit()
            return False
        state.commit()
    return True


def improve(
    state: Residency,
    budget_bytes: int,
    *,
    deadline: float,
    goal_ns: int = 0,
    patience: int = 3,
    seed: int = 0,
) -> None:
    """Lower the cost of a state that fits, change by change, until none gains.

    Args:
        state: changed in place and committed; it fits throughout.
        budget_bytes: the budget.
        deadline: ``time.perf_counter()`` at which to stop.
        goal_ns: cost at which nothing is left to gain.
        patience: passes over all runs without a gain that end the search.
        seed: of the order in which runs are tried.
    """
    rng = random.Random(seed)
    passes = 0
    while passes < patience and state.cost_ns > goal_ns:
        before = state.cost_ns
        todo = [(index, stage) for index, stages in state.runs.items() for stage in stages]
        if passes:
            rng.shuffle(todo)
        else:
            todo.sort(key=lambda run: (-state.op_cost[run[0]], run))
        for index, stage in todo:
            if time.perf_counter() > deadline or state.cost_ns <= goal_ns:
                return
            if stage in state.runs[index] and _exchange(
                state, index, stage, budget_bytes, NOISE if passes else 0.0, rng
            ):
                state.commit()
        passes = 0 if state.cost_ns < before else passes + 1


def wander(
    state: Residency,
    budget_bytes: int,
    *,
    deadline: float,
    goal_ns: int,
    seed: int = 0,
    trials: int | None = None,
) -> Iterator[Residency]:
    """Yield better and better states, all of them the one given, found by iterated local search.

    A kick makes a few values of a random neighbourhood again, or takes runs out and makes room
    whatever that costs; then exchanges there and at random elsewhere. What ends a little above
    the start is taken too, or the search would stay where it is (threshold accepting, Dueck and
    Scheuer 1990).

    Args:
        state: changed in place; it fits throughout. It ends at the last accepted state.
        budget_bytes: the budget.
        deadline: ``time.perf_counter()`` at which to stop.
        goal_ns: cost at which nothing is left to gain.
        seed: of all that is random.
        trials: kicks without a gain that end the search; None: as many as there are runs.
    """
    rng = random.Random(seed)
    best = state.cost_ns
    makers = sorted(state.runs)
    if not makers:
        return
    idle = 0
    while best > goal_ns and time.perf_counter() < deadline:
        limit = trials if trials is not None else max(100, len(makers))
        if idle > limit:
            return
        state.commit()
        before = state.cost_ns
        width = rng.choice(WIDTHS)
        first = rng.randrange(max(len(makers) - width, 1))
        near = makers[first : first + width]
        if not _kick(state, near, budget_bytes, rng):
            state.rollback()
            idle += 1
            continue
        for turn in range(2):
            todo = [(index, stage) for index in near for stage in state.runs[index]]
            far = [makers[rng.randrange(len(makers))] for _ in near]
            todo += [(index, stage) for index in far for stage in state.runs[index]]
            rng.shuffle(todo)
            for index, stage in todo:
                if time.perf_counter() > deadline:
                    break
                if stage in state.runs[index]:
                    _exchange(state, index, stage, budget_bytes, NOISE * turn, rng)
        slack = (before - goal_ns) * SLACK * rng.random()
        if state.cost_ns > max(before, min(before + slack, best + (best - goal_ns) * 0.1)):
            state.rollback()
        if state.cost_ns < best:
            best = state.cost_ns
            idle = 0
            yield state
        else:
            idle += 1


def _kick(state: Residency, near: Sequence[int], budget_bytes: int, rng: random.Random) -> bool:
    """Change a state at random in a neighbourhood; return whether it changed and still fits."""
    mark = state.mark()
    if rng.random() < 0.5:
        runs = [(index, stage) for index in near for stage in state.runs[index]]
        rng.shuffle(runs)
        for index, stage in runs[: rng.choice((1, 1, 2, 3))]:
            if stage in state.runs[index]:
                here = state.mark()
                if not state.remove(index, stage):
                    state.rollback(here)
    else:
        for _ in range(rng.choice((1, 2, 3, 4))):
            index = near[rng.randrange(len(near))]
            outputs = state.outputs[index]
            reading = state.reading[outputs[rng.randrange(len(outputs))]]
            if reading:
                state.add(index, reading[rng.randrange(len(reading))])
    if state.mark() == mark:
        return False
    for _ in range(4 * CHAIN):
        if state.peak() <= budget_bytes:
            return True
        if not _relieve(state, budget_bytes, 4, noise=2 * NOISE, rng=rng):
            return False
    return state.peak() <= budget_bytes


def _exchange(
    state: Residency, index: int, stage: int, budget_bytes: int, noise: float, rng: random.Random
) -> bool:
    """Take a run out and make room for what that holds; return whether the cost fell.

    Where it does not, nothing has changed. Nothing is committed.
    """
    mark = state.mark()
    before = state.cost_ns
    if not state.remove(index, stage) or state.cost_ns >= before:
        state.rollback(mark)
        return False
    for _ in range(CHAIN):
        if state.peak() <= budget_bytes:
            return True
        room = before - state.cost_ns
        if not _relieve(state, budget_bytes, 2, limit_ns=room, noise=noise, rng=rng):
            break
        if state.cost_ns >= before:
            break
    if state.peak() <= budget_bytes and state.cost_ns < before:
        return True
    state.rollback(mark)
    return False


def _relieve(
    state: Residency,
    budget_bytes: int,
    look: int,
    *,
    limit_ns: int | None = None,
    noise: float = 0.0,
    rng: random.Random | None = None,
) -> bool:
    """Make one value again later instead of holding it through the peak; return whether one helped.

    Only what lowers the *excess* is taken, the bytes above the budget summed over all operations:
    many operations may peak equally high. The change is not committed.
    """
    excess = state.excess(budget_bytes)
    ranked = _ways(state, budget_bytes, look, limit_ns, noise, rng)
    for _, index, stage in ranked:
        mark = state.mark()
        state.add(index, stage)
        if state.excess(budget_bytes) < excess:
            return True
        state.rollback(mark)
    return False


def _ways(
    state: Residency,
    budget_bytes: int,
    look: int,
    limit_ns: int | None,
    noise: float,
    rng: random.Random | None,
) -> list[tuple[float, int, int]]:
    """Return the best runs to take a value out of the highest peak.

    At most ``look`` of them, as price per byte, operation and stage.
    """
    held = state.held + state.during
    inside = state.through + state.top
    top_held, top_inside = int(held.argmax()), int(inside.argmax())
    levels = (int(held[top_held]), int(inside[top_inside]), int(state.forward.max(initial=0)))
    over = max(levels) - budget_bytes
    limit = float("inf") if limit_ns is None else limit_ns
    where, moment = KEPT, int(state.forward.argmax()) if max(levels) == levels[2] else -1
    if moment < 0:
        where = top_held if levels[0] >= levels[1] else top_inside
    ways: list[tuple[float, int, int]] = []
    least = 1 - noise / 2
    for bound, g in state.cheapest_first(where, over, limit):
        if len(ways) == look and bound * least >= ways[-1][0]:
            break
        if not state.is_resident(g, where):
            continue
        if moment >= 0 and not 0 <= state.forward_from[g] <= moment:
            continue
        maker, reading = state.maker[g], state.reading[g]
        stage = reading[bisect_right(reading, where)]
        relief = min(state.sizes[g], over)
        worst = min(limit, ways[-1][0] * relief / least) if len(ways) == look else limit
        price = state.price(maker, stage, worst)
        if price >= worst:
            continue
        score = price / relief
        if noise and rng is not None:
            score *= 1 + noise * (rng.random() - 0.5)
        insort(ways, (score, maker, stage))
        del ways[look:]
    return ways
