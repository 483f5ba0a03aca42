"""Joined: several graphs of one step, and what runs between them, as one problem.

The graphs' operations stand in the order in which the graphs ran. Operators between them run once
and are the user's: their memory lives as long as it was seen to live. A graph's own values may be
kept or recomputed, each within its own backward, which alone reads them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from torch import fx

from autockpt.capture import Capture
from autockpt.formulate import Formulation, Role, again
from autockpt.record import OUTSIDE, Event, Kind, Record
from autockpt_solvers.problem import Operation, Problem, Storage
from autockpt_solvers.schedule import Schedule, free_early

__all__ = ["Joined", "Member", "join"]

_USERS = "it runs outside the captured graphs"


@dataclass(frozen=True)
class Member:
    """One graph of the step: its own problem, and where in the model it comes from."""

    formulation: Formulation
    path: str


@dataclass(frozen=True)
class Joined:
    """The step as one problem.

    Attributes:
        problem: all graphs and what runs between them.
        places: for each graph, in the order of its forwards: its own operation -> the problem's.
        windows: what the backward runs, in order: a graph's backward, as the graph's number, or
            None and operations between.
    """

    problem: Problem
    places: tuple[dict[int, int], ...]
    windows: tuple[tuple[int | None, tuple[int, ...]], ...]

    def own(self, schedule: Schedule, number: int, formulation: Formulation) -> Schedule:
        """Return the part of a schedule that one graph executes."""
        back = {place: local for local, place in self.places[number].items()}
        problem = formulation.problem
        forward = [back[i] for i in schedule.forward_computes if i in back]
        backward = [back[i] for i in schedule.backward_computes if i in back]
        own = [i for i in problem.backward if not problem.operations[i].outside]
        first = own[0] if own else problem.barrier
        outside = [i for i in problem.backward if problem.operations[i].outside]
        before = [i for i in outside if i < first]
        after = [i for i in outside if i > first]
        return free_early(problem, forward, [*before, *backward, *after])

    def orderly(self, schedule: Schedule) -> Schedule:
        """Return a schedule with each recomputation inside the backward of its own graph.

        Made earlier it would only lie there: nobody else reads it.
        """
        graph_of = {
            place: number for number, places in enumerate(self.places) for place in places.values()
        }
        order: dict[int, list[int]] = {}
        between: list[int] = []
        for index in schedule.backward_computes:
            if index in graph_of:
                order.setdefault(graph_of[index], []).append(index)
            else:
                between.append(index)
        backward: list[int] = []
        for number, operations in self.windows:
            backward += operations if number is None else order.get(number, [])
        return free_early(self.problem, schedule.forward_computes, backward)


def join(
    record: Record,
    members: Sequence[Member],
    *,
    resident_bytes: int,
    optimizer_bytes: int,
    name: str,
) -> Joined:
    """Return the joined problem of a recorded step.

    Args:
        record: the step; a regular one.
        members: its graphs, in the order of their forwards.
        resident_bytes: what is there throughout.
        optimizer_bytes: peak allocated inside the optimizer's step.
        name: the model's name.
    """
    return _Joiner(record, members).build(resident_bytes, optimizer_bytes, name)


class _Joiner:
    def __init__(self, record: Record, members: Sequence[Member]) -> None:
        self.record = record
        self.members = members
        self.number = {graph: i for i, graph in enumerate(record.sequence)}
        self.operations: list[Operation] = []
        self.storages: list[Storage] = []
        self.blocks: dict[int, int] = {}  # a recorded block of memory -> storage
        self.own: list[dict[int, int]] = [{} for _ in members]  # a graph's storage -> storage
        self.places: list[dict[int, int]] = [{} for _ in members]
        self.given: list[tuple[int, ...]] = [() for _ in members]
        self.windows: list[tuple[int | None, tuple[int, ...]]] = []
        self.last_reads: dict[int, list[int]] = {}  # event -> blocks released there
        self.primals = [
            {p: i for i, p in enumerate(m.formulation.capture.joint.primals)} for m in members
        ]
        for block, event in record.died.items():
            self.last_reads.setdefault(event, []).append(block)

    def build(self, resident_bytes: int, optimizer_bytes: int, name: str) -> Joined:
        barrier = -1
        for position, event in enumerate(self.record.events):
            if event.kind is Kind.BACKWARD and barrier < 0:
                barrier = len(self.operations)
            start = len(self.operations)
            graph: int | None = None
            if event.kind is Kind.OPERATOR:
                self._operator(event, position)
            elif event.kind is Kind.FORWARD:
                self._forward(event, position)
            else:
                graph = self.number[event.graph]
                self._backward(event, position, graph)
            if barrier >= 0 and graph is None:
                self.windows.append((None, tuple(range(start, len(self.operations)))))
        if barrier < 0:
            barrier = len(self.operations)
        lasting = {
            storage for block, storage in self.blocks.items() if block not in self.record.died
        }
        if optimizer_bytes:
            start = len(self.operations)
            self._outside("optimizer_step", sorted(lasting), (), optimizer_bytes, "optimizer")
            self.windows.append((None, (start,)))
        made_forward = {s for op in self.operations[:barrier] for s in op.outputs}
        problem = Problem(
            tuple(self.storages),
            tuple(self.operations),
            barrier,
            resident_bytes + sum(member.formulation.number_bytes for member in self.members),
            live_at_barrier=frozenset(lasting & made_forward),
            live_at_end=frozenset(lasting),
            name=name,
        )
        return Joined(problem, tuple(self.places), tuple(self.windows))

    # -------------------------------------------------------------- events

    def _operator(self, event: Event, position: int) -> None:
        outputs = tuple(self._block(b) for b in event.outputs)
        self._outside(
            event.name,
            self._released(position, outputs),
            outputs,
            event.workspace_bytes,
            event.name,
        )

    def _forward(self, event: Event, position: int) -> None:
        number = self.number[event.graph]
        member, own = self.members[number], self.own[number]
        captured = member.formulation.capture
        self.given[number] = event.inputs
        for storages, block in zip(captured.outputs, event.outputs, strict=True):
            if block != OUTSIDE and len(storages) == 1 and block not in self.blocks:
                size = member.formulation.problem.storages[storages[0]].size_bytes
                own[storages[0]] = self._block(block, size)
        made: list[int] = []
        for local in member.formulation.problem.forward:
            made += self._node(number, local)
        last = [own[s] for s in captured.new_buffers if s in own]
        # An output nobody was seen with lives while the graph runs.
        outputs = {s for storages in captured.outputs for s in storages}
        last += [own[s] for s in outputs if s in own and own[s] not in self.blocks.values()]
        last += self._released(position, ())
        self._outside(f"end_of_{member.path or 'forward'}", sorted(set(last)), (), 0, "end")

    def _backward(self, event: Event, position: int, number: int) -> None:
        member, own = self.members[number], self.own[number]
        captured, problem = member.formulation.capture, member.formulation.problem
        for tangent, block in zip(captured.joint.tangents, event.inputs, strict=False):
            for storage in captured.lives_in[tangent]:
                if storage >= 0 and block != OUTSIDE and block in self.blocks:
                    own[storage] = self.blocks[block]
        for (_, storage, _), block in zip(
            captured.gradients, _recorded(captured, event), strict=True
        ):
            known = block == OUTSIDE or block in self.blocks
            if storage >= 0 and storage not in own and not known:
                own[storage] = self._block(block, problem.storages[storage].size_bytes)
        gone = self._released(position, ())
        # Torch before 2.13 holds the tangents while a backward runs.
        till_its_end = {self.blocks[b] for b in (*event.outputs, *event.held) if b in self.blocks}
        start = len(self.operations)
        first = [s for s in gone if s not in till_its_end]
        self._outside(f"begin_of_{member.path or 'backward'}", first, (), 0, "begin")
        self.windows.append((None, (start,)))
        for local in problem.backward:
            if not problem.operations[local].outside:
                self._node(number, local, till_its_end)
        self.windows.append((number, ()))
        start = len(self.operations)
        last = [s for s in gone if s in till_its_end]
        self._outside(f"end_of_{member.path or 'backward'}", last, (), 0, "end")
        self.windows.append((None, (start,)))

    # -------------------------------------------------------------- parts

    def _node(self, number: int, local: int, held: Collection[int] = ()) -> list[int]:
        """Take over one operation of a graph, which may not write over what is held.

        Returns:
            What it makes.
        """
        member, own = self.members[number], self.own[number]
        problem = member.formulation.problem
        op = problem.operations[local]
        for storage in op.outputs:
            if storage not in own:
                own[storage] = len(self.storages)
                self.storages.append(problem.storages[storage])
        outputs = tuple(own[s] for s in op.outputs)
        reads = self._boundary(number, local, further=False)
        recompute: tuple[int, ...] | None = None
        if op.recompute_inputs is not None:
            recompute = self._mapped(own, op.recompute_inputs)
            recompute = _distinct((*recompute, *self._boundary(number, local, further=True)))
        self.places[number][local] = len(self.operations)
        path = ".".join(part for part in (member.path, op.module_path) if part)
        self.operations.append(
            replace(
                op,
                inputs=_distinct((*self._mapped(own, op.inputs), *reads)),
                outputs=outputs,
                recompute_inputs=recompute,
                recompute_outputs=tuple(own[s] for s in op.recompute_outputs),
                over=tuple(s for s in self._mapped(own, op.over) if s not in held),
                module_path=path,
            )
        )
        return list(outputs)

    def _boundary(self, number: int, local: int, *, further: bool) -> tuple[int, ...]:
        """Storages from outside the graph that an operation reads through its primals."""
        formulation = self.members[number].formulation
        origin = formulation.origins[local]
        if origin.node is None or origin.role is not Role.NODE:
            return ()
        arguments: list[fx.Node] = []
        fx.node.map_arg(
            again(origin.node)[1:] if further else (origin.node.args, origin.node.kwargs),
            arguments.append,
        )
        captured = formulation.capture
        position = self.primals[number]
        found: list[int] = []
        while arguments:
            node = arguments.pop()
            if node in position:
                block = self.given[number][position[node]]
                if block in self.blocks:
                    found.append(self.blocks[block])
            elif captured.is_view(node):
                arguments += node.all_input_nodes
        return _distinct(found)

    def _mapped(self, own: dict[int, int], storages: Iterable[int]) -> tuple[int, ...]:
        """What is not known here (a tangent from before the step) is there all the time."""
        return tuple(own[s] for s in storages if s in own)

    def _block(self, block: int, size_bytes: int | None = None) -> int:
        if block not in self.blocks:
            self.blocks[block] = len(self.storages)
            size = self.record.size_bytes[block] if size_bytes is None else size_bytes
            self.storages.append(Storage(f"block_{block}", size))
        return self.blocks[block]

    def _released(self, position: int, fresh: Sequence[int]) -> list[int]:
        found = [self.blocks[b] for b in self.last_reads.get(position, ()) if b in self.blocks]
        return sorted(set(found) - set(fresh))

    def _outside(
        self,
        name: str,
        inputs: Sequence[int],
        outputs: tuple[int, ...],
        workspace_bytes: int,
        kind: str,
    ) -> None:
        self.operations.append(
            Operation(
                name=name,
                inputs=tuple(inputs),
                outputs=outputs,
                workspace_bytes=workspace_bytes,
                fixed=_USERS,
                outside=True,
                kind=kind,
            )
        )


def _distinct(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(values))


def _recorded(captured: Capture, event: Event) -> list[int]:
    """The recorded memory of each entry of ``captured.gradients``."""
    return [
        block
        for value, block in zip(captured.joint.backward_outputs, event.outputs, strict=True)
        if isinstance(value, fx.Node) and len(captured.lives_in[value]) == 1
    ]
