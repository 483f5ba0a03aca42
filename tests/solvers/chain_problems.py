"""Chains: the problems for which revolve and rotor are optimal, or nearly."""

from __future__ import annotations

import random

from autockpt_solvers import Operation, Problem, Storage

__all__ = ["random_chain", "uniform_chain"]


def uniform_chain(length: int) -> Problem:
    """Return a chain of equal links whose backward reads each link's input.

    The model of Griewank & Walther: links and costs are 1, the chain's own input is a parameter
    and always there, gradients weigh nothing, and a backward step needs as much room beside its
    input as a forward step does.
    """
    return _chain([(1, 1, 0, False, 0)] * length, [(1, 0, 1)] * length)


def random_chain(seed: int, length: int, *, saving: bool = True) -> Problem:
    """Return a chain whose links differ in cost, size, workspace and in what they save.

    With ``saving`` off, the backward of a link reads the link's input only.
    """
    rng = random.Random(seed)
    links = [
        (
            rng.randint(1, 9),
            rng.randint(1, 9),
            rng.choice((0, 0, rng.randint(1, 9))) if saving else 0,
            saving and rng.random() < 0.3,
            rng.choice((0, 0, 3)),
        )
        for _ in range(length)
    ]
    gradients = [(rng.randint(1, 9), rng.randint(1, 5), rng.choice((0, 0, 3))) for _ in links]
    return _chain(links, gradients)


def _chain(
    links: list[tuple[int, int, int, bool, int]], gradients: list[tuple[int, int, int]]
) -> Problem:
    """Return a chain.

    Args:
        links: cost, output bytes, bytes saved beside it, whether the output is saved, workspace.
        gradients: of each link's backward the cost, the bytes and the workspace.
    """
    storages: list[Storage] = []
    operations: list[Operation] = []
    made: list[tuple[int, ...]] = []
    for number, (cost_ns, size, beside, _, workspace) in enumerate(links):
        inputs = made[-1][:1] if made else ()
        storages.append(Storage(f"f{number}", size))
        outputs = (len(storages) - 1,)
        if beside:
            storages.append(Storage(f"t{number}", beside))
            outputs = (*outputs, len(storages) - 1)
        made.append(outputs)
        operations.append(
            Operation(
                f"f{number}",
                inputs,
                outputs,
                cost_ns,
                workspace,
                recompute_inputs=inputs,
                recompute_outputs=outputs,
            )
        )
    barrier = len(operations)
    gradient: tuple[int, ...] = ()
    for number in reversed(range(barrier)):
        cost_ns, size, workspace = gradients[number]
        reads = {*gradient, *made[number][1:], *(made[number - 1][:1] if number else ())}
        if links[number][3]:
            reads.add(made[number][0])
        storages.append(Storage(f"b{number}", size))
        gradient = (len(storages) - 1,)
        operations.append(
            Operation(f"b{number}", tuple(sorted(reads)), gradient, cost_ns, workspace)
        )
    return Problem(tuple(storages), tuple(operations), barrier, live_at_end=frozenset(gradient))
