"""Schedules that recompute on demand: a set of kept storages decides everything.

The forward runs once and keeps some storages. Each backward operation then asks for its inputs;
what is missing is recomputed right before it, and what that needs first, depth first.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass
from functools import cached_property

import networkx as nx  # type: ignore[import-untyped]

from autockpt_solvers.errors import PinError, SolverError
from autockpt_solvers.problem import Problem
from autockpt_solvers.schedule import Schedule, free_early

__all__ = ["Demand", "needed_storages", "on_demand", "optional_operations", "stage_schedule"]

# Stands for the backward operations in ``Demand.recompute_graph``; storages are numbered from 0.
BACKWARD = -1


@dataclass(frozen=True)
class Demand:
    """Facts about a problem's forward storages that every on-demand schedule needs.

    Attributes:
        problem: the problem.
    """

    problem: Problem

    @cached_property
    def is_forward(self) -> tuple[bool, ...]:
        """For each storage whether a forward operation makes it."""
        return tuple(p < self.problem.barrier for p in self.problem.producer)

    @cached_property
    def may_keep(self) -> tuple[bool, ...]:
        """For each storage whether it may be resident at the barrier."""
        problem = self.problem
        return tuple(
            self.is_forward[s] and (storage.keepable or s in problem.live_at_barrier)
            for s, storage in enumerate(problem.storages)
        )

    @cached_property
    def may_recompute(self) -> tuple[bool, ...]:
        """For each storage whether a further run of its operation can allocate it again.

        What such a run reads must itself be there to be kept or recomputed.
        """
        problem = self.problem
        again = [False] * len(problem.storages)
        for op in problem.operations:
            inputs = op.recompute_inputs
            if inputs is not None and all(self.may_keep[s] or again[s] for s in inputs):
                for storage in op.recompute_outputs:
                    again[storage] = True
        return tuple(again)

    @cached_property
    def reads(self) -> tuple[tuple[int, ...], ...]:
        """For each backward operation, counted from the barrier, the forward storages it reads."""
        problem = self.problem
        return tuple(
            tuple(sorted({s for s in problem.operations[k].inputs if self.is_forward[s]}))
            for k in problem.backward
        )

    @cached_property
    def recompute_graph(self) -> nx.DiGraph:
        """The storages, with an edge from what a further run reads to what it makes.

        Node ``BACKWARD`` stands for the backward operations, which read and are not run again.
        """
        problem = self.problem
        graph: nx.DiGraph = nx.DiGraph()
        graph.add_node(BACKWARD)
        graph.add_edges_from((s, BACKWARD) for reads in self.reads for s in reads)
        graph.add_edges_from(
            (read, made)
            for made, again in enumerate(self.may_recompute)
            if again
            for read in problem.operations[problem.producer[made]].recompute_inputs or ()
        )
        return graph

    def check_pins(self) -> None:
        """Raise where a pin leaves a backward operation no way to what it reads.

        Raises:
            PinError: it names the tensor and why its operation may not run again.
        """
        for reads in self.reads:
            for storage in reads:
                self.check(storage)

    def check(self, storage: int) -> None:
        """Raise where a storage can neither be kept nor recomputed."""
        if self.may_keep[storage] or self.may_recompute[storage]:
            return
        problem = self.problem
        index = problem.producer[storage]
        inputs = problem.operations[index].recompute_inputs
        if inputs is not None and storage in problem.operations[index].recompute_outputs:
            # It may run again by itself; what it reads is not to be had.
            for read in inputs:
                self.check(read)
        name, op = problem.storages[storage].name, problem.operations[index]
        why = op.fixed or "a further run of it does not make this tensor"
        raise PinError(
            f"{name} is pinned to be recomputed, but {op.name}"
            + (f" in {op.module_path}" if op.module_path else "")
            + f" may not run again: {why}. Drop the pin or narrow its pattern."
        )


def needed_storages(demand: Demand) -> frozenset[int]:
    """Return the forward storages that a schedule may want to keep.

    These are the ones the backward reads, and transitively the ones that recomputing them reads.
    """
    return frozenset(nx.ancestors(demand.recompute_graph, BACKWARD))


def optional_operations(problem: Problem, storages: Iterable[int]) -> set[int]:
    """Return the optional operations that make these storages, and those that these need."""
    wanted: set[int] = set()
    todo = list(storages)
    while todo:
        index = problem.producer[todo.pop()]
        if index not in wanted and problem.operations[index].optional:
            wanted.add(index)
            todo.extend(problem.operations[index].inputs)
    return wanted


def stage_schedule(problem: Problem, backward: list[int]) -> Schedule:
    """Return the schedule with this backward order and the forward run once.

    The optional operations are run whose storages the backward order reads.
    """
    read: list[int] = []
    for index in backward:
        if index < problem.barrier:
            read.extend(problem.operations[index].recompute_inputs or ())
    optional = optional_operations(problem, read)
    forward = [i for i in problem.forward if not problem.operations[i].optional or i in optional]
    return free_early(problem, forward, backward)


def on_demand(
    demand: Demand,
    kept: Set[int],
    held: Set[int] | None = None,
    *,
    tight: bool = False,
) -> list[int]:
    """Return the backward order that keeps these storages and recomputes the others.

    Storages that cannot be recomputed are kept, those that may not be kept are not.

    Args:
        demand: the facts of the problem.
        kept: storages kept from the forward.
        held: storages that stay once recomputed, to their last use; the others are recomputed
            for each backward operation that needs them. None: all stay.
        tight: also forget, inside one backward operation's recomputations, what is not held as
            soon as the recomputation that asked for it has run. Costs more, peaks lower.

    Raises:
        PinError: a storage may neither be kept nor recomputed.
        SolverError: ``tight`` recomputes without end in sight.
    """
    problem = demand.problem
    operations, producer = problem.operations, problem.producer
    available = {
        s
        for s in range(len(problem.storages))
        if demand.may_keep[s] and (s in kept or not demand.may_recompute[s])
    }
    order: list[int] = []
    limit = 50 * (len(operations) + 1)
    resident = available  # one set: what is not to stay is taken out again behind each operation
    for offset, reads in enumerate(demand.reads):
        passing: set[int] = set()
        for first in reads:
            if first in resident:
                continue
            stack = [first]  # explicit: chains can be thousands of operations deep
            while stack:
                storage = stack[-1]
                if storage in resident:
                    stack.pop()
                    continue
                demand.check(storage)
                index = producer[storage]
                op = operations[index]
                inputs = op.recompute_inputs or ()
                missing = [s for s in inputs if s not in resident]
                if missing:
                    missing.sort(reverse=not tight)
                    stack.extend(missing)
                    continue
                stack.pop()
                order.append(index)
                if len(order) > limit:
                    raise SolverError("recomputation on demand runs away")
                if held is not None:
                    passing.update(
                        s for s in op.recompute_outputs if s not in held and s not in resident
                    )
                resident.update(op.recompute_outputs)
                if tight:
                    gone = passing.intersection(inputs).difference(reads)
                    passing -= gone
                    resident -= gone
        resident -= passing
        order.append(problem.barrier + offset)
    return order
