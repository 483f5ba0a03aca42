"""Memory rows inside stages: rows that leave out schedules, and so make no bound.

Those of recomputations are added where an answer breaks the budget. They assume that a
stage runs its operations in the forward's order, each at most once, right before the backward
operation that ends it. Near the smallest budget they decide; elsewhere they hold by themselves,
and adding all of them would multiply the program's size. Those of the backward operations inside
a stage assume that nothing is recomputed before them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from autockpt_solvers.methods.ilp.program import StageProgram
from autockpt_solvers.methods.ilp.stages import Stages

__all__ = ["add_inner_rows", "add_row", "depth_first", "restricted"]


def add_row(program: StageProgram, index: int, k: int) -> None:
    """Bound the memory at the moment in stage k at which operation ``index`` may run."""
    stages, groups = program.stages, program.stages.groups
    problem, liveness = stages.problem, stages.liveness
    _, before = liveness.backward_bytes
    op = problem.operations[index]
    constant = before[stages.ends[k]]
    made = sum(problem.storages[s].size_bytes for s in op.recompute_outputs)
    terms = {program.runs[index, k]: made + op.workspace_bytes}
    wanted = set(stages.uses[k])
    for g, group in enumerate(groups):
        if group.producer == index and group.again:
            continue  # counted as made
        if group.producer > index:
            column = program.resident.get((g, k))
        elif g in wanted:
            constant += group.size_bytes
            continue
        else:
            column = _alive(program, g, k, index)
        if column is not None:
            terms[column] = terms.get(column, 0) + group.size_bytes
    program.memory_row(constant, terms)


def add_inner_rows(program: StageProgram) -> None:
    """Bound the memory of the backward operations inside stages."""
    stages = program.stages
    during, _ = stages.liveness.backward_bytes
    first = 0
    for k, end in enumerate(stages.ends):
        if first < end:
            terms = {
                program.resident[g, k]: group.size_bytes
                for g, group in enumerate(stages.groups)
                if (g, k) in program.resident
            }
            program.memory_row(max(during[first:end]), terms)
        first = end + 1


@contextmanager
def restricted(program: StageProgram) -> Iterator[None]:
    """Within it the program has the rows of :func:`add_inner_rows`."""
    rows = program.program
    count = len(rows.row_lower)
    add_inner_rows(program)
    try:
        yield
    finally:
        del rows.row_lower[count:], rows.row_upper[count:], rows.starts[count + 1 :]
        del rows.columns[rows.starts[count] :], rows.values[rows.starts[count] :]


def _alive(program: StageProgram, g: int, k: int, index: int) -> int | None:
    """Return the column that says whether a group is still read in stage k from ``index`` on.

    The group is not read by the end of the stage itself; None where nothing may read it.
    """
    readers = [
        reader
        for reader in program.stages.groups[g].readers
        if reader >= index and (reader, k) in program.runs
    ]
    after = program.resident.get((g, k + 1))
    if not readers:
        return after
    reader = readers[0]
    column = program.alive.get((g, k, reader))
    if column is None:
        column = program.program.variable(integer=False)
        program.alive[g, k, reader] = column
        program.program.row([(program.runs[reader, k], 1), (column, -1)], upper=0)
        following = _alive(program, g, k, reader + 1)
        if following is not None:
            program.program.row([(following, 1), (column, -1)], upper=0)
    return column


def depth_first(stages: Stages, order: Sequence[int]) -> list[int]:
    """Return a backward order with each stage's recomputations in depth-first order.

    An input is then made right before its reader, which often peaks lower than the forward's
    order, where long branches are made side by side.
    """
    barrier = stages.problem.barrier
    result: list[int] = []
    block: list[int] = []
    for index in order:
        if index < barrier:
            block.append(index)
            continue
        inside = set(block)
        read = {stages.groups[g].producer for i in block for g in stages.inputs[i]} & inside
        done: set[int] = set()
        for top in (i for i in block if i not in read):
            stack = [top]
            while stack:
                current = stack[-1]
                missing = [
                    stages.groups[g].producer
                    for g in reversed(stages.inputs[current])
                    if stages.groups[g].producer in inside - done
                ]
                if current in done:
                    stack.pop()
                elif missing:
                    stack.extend(missing)
                else:
                    stack.pop()
                    done.add(current)
                    result.append(current)
        block.clear()
        result.append(index)
    return result
