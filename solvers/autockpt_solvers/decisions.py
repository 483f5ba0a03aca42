"""Decisions: what a schedule does with each tensor of the forward, and why, in words.

Of the backward's tensors only those are named that are written in place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from autockpt_solvers.problem import Operation, Problem
from autockpt_solvers.schedule import Compute, Free, Schedule
from autockpt_solvers.units import format_bytes, format_seconds

__all__ = ["Decision", "decide", "why_in_place"]

Action = Literal["kept", "recomputed", "freed", "in place"]


@dataclass(frozen=True, slots=True)
class Decision:
    """What happens to one tensor.

    Attributes:
        name: the graph's name of the tensor.
        module_path: the module it comes from, ``blocks.3.attn``.
        source: the user's line, ``model.py:41``.
        size_bytes: its size as the device's allocator rounds it.
        action: ``kept`` from forward to backward, ``recomputed``, ``freed`` because nothing
            needs it once the forward is over, or for a tensor of the backward ``in place``.
        times: how many copies of it are computed again and used.
        reason: why, in words.
        in_place: what its operation is written over and why that is right, ``over linear: ...``;
            or why an operation that could write in place does not, ``kept out of place: ...``.
    """

    name: str
    module_path: str
    source: str
    size_bytes: int
    action: Action
    times: int
    reason: str
    in_place: str = ""


@dataclass(frozen=True, slots=True)
class _Use:
    """Who uses each forward storage, read off a schedule."""

    made: frozenset[int]
    at_barrier: frozenset[int]
    copies: Counter[int]
    backward: Counter[int]
    again: Counter[int]


def decide(problem: Problem, schedule: Schedule) -> tuple[Decision, ...]:
    """Return one decision per forward storage the schedule makes, in the graph's order.

    Then follow the backward storages whose operations are written in place.

    Args:
        problem: the problem the schedule solves.
        schedule: a valid schedule of it.

    >>> from autockpt_solvers.problem import Storage
    >>> from autockpt_solvers.schedule import free_early
    >>> problem = Problem(
    ...     storages=(Storage("x", 8 << 20), Storage("loss", 4), Storage("grad", 8 << 20)),
    ...     operations=(
    ...         Operation("x", (), (0,), 1_200_000, recompute_inputs=(), recompute_outputs=(0,)),
    ...         Operation("loss", (0,), (1,), 5, fixed="the user holds its output"),
    ...         Operation("grad", (0, 1), (2,), 5),
    ...     ),
    ...     barrier=2,
    ...     live_at_barrier=frozenset({1}),
    ...     live_at_end=frozenset({1, 2}),
    ... )
    >>> for decision in decide(problem, free_early(problem, [0, 1], [0, 2])):
    ...     print(decision.name, decision.action, decision.times, "-", decision.reason)
    x recomputed 1 - needed by 1 backward operation; recomputing costs 1.20 ms for 8.0 MiB
    loss kept 0 - the forward returns it
    """
    use = _uses(problem, schedule)
    over = {
        step.operation: step.over
        for step in schedule.steps
        if isinstance(step, Compute) and step.over is not None
    }
    found: list[Decision] = []

    def add(index: int, storage: int, action: Action, reason: str) -> None:
        op = problem.operations[index]
        found.append(
            Decision(
                name=problem.storages[storage].name,
                module_path=op.module_path,
                source=op.source,
                size_bytes=problem.storages[storage].size_bytes,
                action=action,
                times=use.copies[storage] if action == "recomputed" else 0,
                reason=reason,
                in_place=_in_place(problem, index, over),
            )
        )

    for index in problem.forward:
        op = problem.operations[index]
        for storage in op.outputs:
            if storage in use.made:
                add(index, storage, _action(storage, use), _reason(problem, op, storage, use))
    for index in problem.backward:
        if index in over:
            storage = problem.operations[index].outputs[0]
            add(index, storage, "in place", "takes no memory of its own")
    return tuple(found)


def _action(storage: int, use: _Use) -> Action:
    if use.copies[storage]:
        return "recomputed"
    return "kept" if storage in use.at_barrier else "freed"


def why_in_place(problem: Problem, index: int, storage: int) -> str:
    """Return why an operation may be written over a storage that dies there."""
    return (
        f"over {problem.storages[storage].name}: {_operator(problem.operations[index])} is the "
        "last to read it and reads each value before it writes there; it is no parameter, input, "
        "output, saved or shared tensor, and of the same size, type and layout"
    )


def _in_place(problem: Problem, index: int, over: Mapping[int, int]) -> str:
    op = problem.operations[index]
    if index in over:
        return why_in_place(problem, index, over[index])
    if not op.over:
        return f"kept out of place: {op.kept_out}" if op.kept_out else ""
    storage = op.over[0]
    return (
        f"kept out of place: {problem.storages[storage].name} {_why_alive(problem, index, storage)}"
    )


def _why_alive(problem: Problem, index: int, storage: int) -> str:
    """Say who needs a storage after an operation that could have been written over it."""
    half = problem.forward if index < problem.barrier else problem.backward
    for later in range(index + 1, half.stop):
        if storage in problem.operations[later].inputs:
            return f"is read again by {_operator(problem.operations[later])}"
    for later in range(half.stop, len(problem.operations)):
        if storage in problem.operations[later].inputs:
            return f"is saved for {_operator(problem.operations[later])}"
    again = next(o for o in problem.operations if storage in (o.recompute_inputs or ()))
    return f"is kept to run {_operator(again)} again"


def _operator(op: Operation) -> str:
    """Return an operator's name as people say it: ``layer_norm's backward``."""
    name = op.kind.removeprefix("aten.").partition(".")[0].removeprefix("_") or op.name
    name = name.removeprefix("native_")
    for ending in ("_backward_data", "_backward"):
        if name.endswith(ending):
            return f"{name.removesuffix(ending)}'s backward"
    return name


def _uses(problem: Problem, schedule: Schedule) -> _Use:
    """Return the uses of each storage, from one walk along the schedule."""
    resident: set[int] = set()
    unread: set[int] = set()  # copies of a further run that nothing has used yet
    done: set[int] = set()
    made: set[int] = set()
    at_barrier: frozenset[int] = frozenset()
    copies: Counter[int] = Counter()
    again: dict[int, set[int]] = {}
    for step in schedule.steps:
        if isinstance(step, Compute):
            op = problem.operations[step.operation]
            first = step.operation not in done
            inputs = op.inputs if first else op.recompute_inputs or ()
            outputs = op.outputs if first else op.recompute_outputs
            done.add(step.operation)
            for storage in inputs:
                copies[storage] += storage in unread
                unread.discard(storage)
                if not first:
                    again.setdefault(storage, set()).add(step.operation)
            resident.update(outputs)
            made.update(outputs)
            if not first:
                unread.update(outputs)
            if step.over is not None:
                resident.discard(step.over)
        elif isinstance(step, Free):
            resident.discard(step.storage)
            unread.discard(step.storage)
        else:
            at_barrier = frozenset(resident)
            copies.update(unread & problem.live_at_barrier)
            unread -= problem.live_at_barrier
    return _Use(
        made=frozenset(made),
        at_barrier=at_barrier,
        copies=copies,
        backward=Counter(s for i in problem.backward for s in set(problem.operations[i].inputs)),
        again=Counter({storage: len(readers) for storage, readers in again.items()}),
    )


def _reason(problem: Problem, op: Operation, storage: int, use: _Use) -> str:
    size_bytes = problem.storages[storage].size_bytes
    if not use.copies[storage]:
        if storage not in use.at_barrier:
            return "nothing needs it once the forward is over"
        if op.optional:
            return f"lets {_count(use.again[storage], 'operation')} run again with equal results"
        if storage in problem.live_at_barrier:
            return "the forward returns it"
    parts = [_needed(use.backward[storage], use.again[storage])]
    if op.fixed:
        parts.append(op.fixed if op.fixed.startswith("pinned") else f"fixed: {op.fixed}")
    elif storage not in op.recompute_outputs:
        parts.append("fixed: only the first run makes it")
    else:
        cost = format_seconds(op.cost_ns / 1e9)
        parts.append(f"recomputing costs {cost} for {format_bytes(size_bytes)}")
    if not problem.storages[storage].keepable:
        parts.append("pinned by recompute=")
    return "; ".join(parts)


def _needed(backward: int, again: int) -> str:
    if backward and again:
        return f"needed by {backward} backward and {_count(again, 'recomputed operation')}"
    if backward:
        return f"needed by {_count(backward, 'backward operation')}"
    if again:
        return f"needed by {_count(again, 'recomputed operation')}"
    return "resident when the forward returns, though nothing reads it"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
