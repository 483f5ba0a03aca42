"""Memory rows inside stages: rows that leave out schedules, and so make no bound.

Those of recomputations are added where an answer breaks the budget. They assume that a
stage runs its operations in the forward's order, each at most once, right before the backward
operation that ends it. Near the smallest budget they decide; elsewhere they hold by themselves,
and adding all of them would multiply the program's size. Those of the backward operations inside
a stage assume that nothing is recomputed before them.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import networkx as nx  # type: ignore[import-untyped]

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
    program.memory_row(f"run({program.operation[index]},{k})", constant, terms)


def add_inner_rows(program: StageProgram) -> None:
    """Bound the memory of the backward operations inside stages."""
    if program.bounded_inside:
        return
    program.bounded_inside = True
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
            program.memory_row(f"inside({k})", max(during[first:end]), terms)
        first = end + 1


def restricted(program: StageProgram) -> StageProgram:
    """Return the program with the rows of :func:`add_inner_rows`; the one given stays as it is."""
    other = copy(program)
    other.program = program.program.copy()
    add_inner_rows(other)
    return other


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
        label = f"({program.tensor[g]},{k},{program.operation[reader]})"
        column = program.program.variable(f"A{label}", integer=False)
        program.alive[g, k, reader] = column
        terms = [(program.runs[reader, k], 1), (column, -1)]
        program.program.row(f"alive{label}", terms, upper=0)
        following = _alive(program, g, k, reader + 1)
        if following is not None:
            program.program.row(f"alivestill{label}", [(following, 1), (column, -1)], upper=0)
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
        makers: nx.DiGraph = nx.DiGraph()
        makers.add_nodes_from(block)
        for run in block:
            read = (stages.groups[g].producer for g in stages.inputs[run])
            makers.add_edges_from((run, maker) for maker in read if maker in inside)
        for top in [run for run in block if makers.in_degree(run) == 0]:
            fresh = nx.dfs_postorder_nodes(makers, top)
            result.extend(run for run in fresh if run in inside)
            inside.difference_update(result)
        block.clear()
        result.append(index)
    return result
