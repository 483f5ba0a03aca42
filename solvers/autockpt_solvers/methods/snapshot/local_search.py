"""Local search on runs by stage: fit a budget, then take runs out and make room for what that holds.

To take out a run holds a value longer; where that breaks the budget, other values are made again
instead, cheapest per byte first, as long as the exchange gains (an ejection chain, after Glover
1996). Every trial is one change of :class:`Residency`, with exact peaks.
"""

from __future__ import annotations

import random
import time
from bisect import bisect_right
from collections.abc import Callable

from autockpt_solvers.methods.snapshot.residency import KEPT, Residency

__all__ = ["fit", "improve"]

# How many of the most promising changes are tried at a peak that must come down.
LOOK = 10
# Changes that may follow the one that takes a run out.
CHAIN = 8
# By how much the order of promise is shaken, so that repeated trials differ.
NOISE = 0.6


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
    found: Callable[[Residency], None] | None = None,
) -> None:
    """Lower the cost of a state that fits, change by change.

    Args:
        state: changed in place and committed; it fits throughout.
        budget_bytes: the budget.
        deadline: ``time.perf_counter()`` at which to stop.
        goal_ns: cost at which nothing is left to gain.
        patience: passes over all runs without a gain that end the search.
        seed: of the order in which runs are tried.
        found: called after each pass that gained.
    """
    rng = random.Random(seed)
    passes = 0
    noise = 0.0
    while passes < patience and state.cost_ns > goal_ns:
        before = state.cost_ns
        todo = [(index, stage) for index, stages in state.runs.items() for stage in stages]
        if passes or noise:
            rng.shuffle(todo)
        else:
            todo.sort(key=lambda run: -state.op_cost[run[0]])
        for index, stage in todo:
            if stage not in state.runs[index]:
                continue
            if time.perf_counter() > deadline or state.cost_ns <= goal_ns:
                return
            _exchange(state, index, stage, budget_bytes, noise, rng)
        if state.cost_ns < before:
            passes = 0
            if found is not None:
                found(state)
        else:
            passes += 1
            noise = NOISE


def _exchange(
    state: Residency, index: int, stage: int, budget_bytes: int, noise: float, rng: random.Random
) -> bool:
    """Take a run out and make room for what that holds; return whether the cost fell."""
    before = state.cost_ns
    if not state.remove(index, stage) or state.cost_ns >= before:
        state.rollback()
        return False
    for _ in range(CHAIN):
        if state.peak() <= budget_bytes:
            state.commit()
            return True
        room = before - state.cost_ns
        if not _relieve(state, budget_bytes, 2, limit_ns=room, noise=noise, rng=rng):
            break
        if state.cost_ns >= before:
            break
    if state.peak() <= budget_bytes and state.cost_ns < before:
        state.commit()
        return True
    state.rollback()
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
    ranked = _ways(state, budget_bytes, limit_ns, noise, rng)
    for _, index, stage in ranked[:look]:
        mark = state.mark()
        state.add(index, stage)
        if state.excess(budget_bytes) < excess:
            return True
        state.rollback(mark)
    return False


def _ways(
    state: Residency,
    budget_bytes: int,
    limit_ns: int | None,
    noise: float,
    rng: random.Random | None,
) -> list[tuple[float, int, int]]:
    """Return runs that take a value out of the highest peak: price per byte, operation, stage."""
    held = state.held + state.during
    inside = state.through + state.top
    top_held, top_inside = int(held.argmax()), int(inside.argmax())
    levels = (int(held[top_held]), int(inside[top_inside]), int(state.forward.max(initial=0)))
    over = max(levels) - budget_bytes
    limit = float("inf") if limit_ns is None else limit_ns
    ways: list[tuple[float, int, int]] = []
    if max(levels) == levels[2]:
        where = KEPT
        moment = int(state.forward.argmax())
    else:
        where = top_held if levels[0] >= levels[1] else top_inside
        moment = -1
    for g in state.resident(where):
        size = state.sizes[g]
        maker = state.maker[g]
        if maker < 0 or not size:
            continue
        if where == KEPT and not 0 <= state.forward_from[g] <= moment:
            continue
        reading = state.reading[g]
        position = bisect_right(reading, where)
        if position == len(reading):
            continue
        price = state.price(maker, reading[position], limit)
        if price >= limit:
            continue
        score = price / min(size, over)
        if noise and rng is not None:
            score *= 1 + noise * (rng.random() - 0.5)
        ways.append((score, maker, reading[position]))
    ways.sort()
    return ways

