"""Random small problems with every feature the solvers must handle."""

from __future__ import annotations

import random
from dataclasses import replace

from autockpt_solvers import Operation, Problem, Storage
from autockpt_solvers.minimum import minimum
from autockpt_solvers.solve import solve


def random_problem(seed: int, *, most: int = 6) -> Problem:
    """Return a small random problem.

    It has skips, operations of several outputs, workspace, operations that may not run again,
    random ones that need an optional operation to be replayed, storages that a further run does
    not make, storages the user holds or sees at the barrier, pins, backward-only operations and
    operations that may be written over an input.

    Args:
        seed: equal seeds make equal problems.
        most: the largest number of forward operations, optional ones apart.
    """
    rng = random.Random(seed)
    count = rng.randint(2, most)
    storages: list[Storage] = []
    operations: list[Operation] = []
    forward_storages: list[int] = []
    states: set[int] = set()
    live_at_barrier: set[int] = set()
    live_at_end: set[int] = set()

    def make(name: str, low: int = 1) -> int:
        storages.append(Storage(name, rng.randint(low, 9)))
        return len(storages) - 1

    for number in range(count):
        readable = [s for s in forward_storages if s not in states]
        near = readable[-3:] if rng.random() < 0.8 else readable
        inputs = tuple(sorted(rng.sample(near, min(len(near), rng.choice((1, 1, 1, 2))))))
        kind = rng.random()
        replay: tuple[int, ...] = ()
        if kind < 0.15:
            state = make(f"state{number}", low=0)
            operations.append(
                Operation(
                    f"save{number}",
                    (),
                    (state,),
                    cost_ns=rng.randint(0, 2),
                    fixed="saves a state",
                    optional=True,
                )
            )
            forward_storages.append(state)
            states.add(state)
            replay = (state,)
        outputs = tuple(make(f"f{number}.{j}") for j in range(rng.choice((1, 1, 1, 2))))
        fixed = kind > 0.92
        again = outputs[:1] if len(outputs) > 1 and rng.random() < 0.3 else outputs
        operations.append(
            Operation(
                f"f{number}",
                inputs,
                outputs,
                cost_ns=rng.randint(1, 9),
                workspace_bytes=rng.choice((0, 0, 0, 3)),
                recompute_inputs=None if fixed else (*inputs, *replay),
                recompute_outputs=() if fixed else again,
                fixed="has a side effect" if fixed else "",
            )
        )
        forward_storages.extend(outputs)
    # The loss, held by the user; sometimes a second output that only lives to the barrier.
    readable = [s for s in forward_storages if s not in states]
    loss = make("loss")
    operations.append(
        Operation("loss", (readable[-1],), (loss,), cost_ns=1, fixed="the user holds its output")
    )
    live_at_barrier.add(loss)
    live_at_end.add(loss)
    if rng.random() < 0.2:
        live_at_barrier.add(rng.choice(readable))
    barrier = len(operations)
    gradient = loss
    forward = [op for op in operations[:-1] if not op.optional]
    for op in reversed(forward):
        saved = [s for s in (*op.inputs, *op.outputs) if rng.random() < 0.6]
        if rng.random() < 0.1:
            saved.append(rng.choice(readable))
        outputs = (make(f"d{op.name}"),)
        if rng.random() < 0.3:
            outputs = (*outputs, make(f"w{op.name}"))
            live_at_end.add(outputs[1])
        operations.append(
            Operation(
                f"b{op.name}",
                tuple(sorted({gradient, *saved})),
                outputs,
                cost_ns=rng.randint(1, 9),
                workspace_bytes=rng.choice((0, 0, 0, 3)),
                fixed="a backward operation",
            )
        )
        gradient = outputs[0]
        if rng.random() < 0.3:
            following = make(f"g{op.name}")
            operations.append(
                Operation(
                    f"c{op.name}",
                    (gradient,),
                    (following,),
                    cost_ns=1,
                    fixed="a backward operation",
                )
            )
            gradient = following
    live_at_end.add(gradient)
    operations, storages = _in_place(seed, operations, storages, live_at_barrier | live_at_end)
    makers = {s: op for op in operations for s in op.recompute_outputs}
    pinned = {s for s in makers if s not in live_at_barrier and rng.random() < 0.05}
    return Problem(
        storages=tuple(
            Storage(s.name, s.size_bytes, keepable=i not in pinned) for i, s in enumerate(storages)
        ),
        operations=tuple(operations),
        barrier=barrier,
        resident_bytes=rng.choice((0, 5)),
        live_at_barrier=frozenset(live_at_barrier),
        live_at_end=frozenset(live_at_end),
        name=f"random {seed}",
    )


def _in_place(
    seed: int, operations: list[Operation], storages: list[Storage], visible: set[int]
) -> tuple[list[Operation], list[Storage]]:
    """Let some operations be written over one or two of their inputs, of the same size."""
    rng = random.Random(f"in place {seed}")
    storages = list(storages)
    result = []
    half = {s: i for i, op in enumerate(operations) for s in op.outputs}
    barrier = next(i for i, op in enumerate(operations) if op.name == "loss") + 1
    for index, op in enumerate(operations):
        own = [
            s for s in op.inputs if s not in visible and (half[s] < barrier) == (index < barrier)
        ]
        if own and len(op.outputs) == 1 and not op.optional and rng.random() < 0.5:
            over = tuple(rng.sample(own, min(len(own), rng.choice((1, 2)))))
            size = storages[op.outputs[0]].size_bytes
            over = tuple(s for s in over if storages[s].size_bytes == size) or over[:1]
            # Sizes of what came before may be relied on already; that of its output is not.
            size = storages[over[0]].size_bytes
            name = storages[op.outputs[0]].name
            storages[op.outputs[0]] = Storage(name, size)
            op = replace(op, over=tuple(s for s in over if storages[s].size_bytes == size))
        result.append(op)
    return result, storages


def budgets(problem: Problem, smallest: int, largest: int) -> list[int]:
    """Return a few budgets from the minimum to the peak with nothing recomputed."""
    span = largest - smallest
    return sorted({smallest, smallest + span // 3, smallest + 2 * span // 3, largest})


def budget_between(problem: Problem, thirds: int) -> int:
    """Return a budget so many thirds of the way from the minimum to the baseline's peak."""
    lowest, highest = minimum(problem).peak_bytes, solve(problem, None).peak_bytes
    return lowest + thirds * (highest - lowest) // 3
