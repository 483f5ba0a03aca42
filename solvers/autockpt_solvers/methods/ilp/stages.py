"""What the stage-indexed program counts: groups of storages, stages, and who may run where.

A *stage* ends with a backward operation that reads recomputable forward storages; recomputation
happens in stages. A *group* is a set of storages that no schedule gains from telling apart: made
by one operation, read by the same operations, equal in every rule.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from autockpt_solvers.liveness import Liveness
from autockpt_solvers.on_demand import needed_storages
from autockpt_solvers.problem import Problem

__all__ = ["Group", "Stages"]


@dataclass(frozen=True)
class Group:
    """Storages of one fate.

    Attributes:
        storages: the storages.
        size_bytes: their size together.
        producer: the operation that makes them.
        again: whether a further run makes them again.
        may_keep: whether they may be resident at the barrier.
        at_barrier: whether the user sees them at the barrier, kept or not.
        forward_end: the last forward operation at which they are resident without being kept.
        readers: operations that may run again and read them then.
        reads: backward operations that read them, counted from the barrier.
    """

    storages: tuple[int, ...]
    size_bytes: int
    producer: int
    again: bool
    may_keep: bool
    at_barrier: bool
    forward_end: int
    readers: tuple[int, ...]
    reads: tuple[int, ...]


@dataclass(frozen=True)
class Stages:
    """The index sets of the program.

    Attributes:
        liveness: the facts of the problem.
        promoted: backward operations, counted from the barrier, that end a stage although they
            read nothing recomputable; see :mod:`autockpt_solvers.methods.ilp.program`.
        snapshots: the only operations that end a stage, besides the last one that reads something
            recomputable; None: all that read something recomputable.
    """

    liveness: Liveness
    promoted: frozenset[int] = frozenset()
    snapshots: frozenset[int] | None = None

    @property
    def problem(self) -> Problem:
        """The problem."""
        return self.liveness.problem

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The groups of the storages that matter behind the barrier."""
        problem, demand, liveness = self.problem, self.liveness.demand, self.liveness
        needed = needed_storages(demand) - liveness.held
        readers: dict[int, list[int]] = {s: [] for s in needed}
        makers = {problem.producer[s] for s in needed if demand.may_recompute[s]}
        for index in sorted(makers):
            for storage in dict.fromkeys(problem.operations[index].recompute_inputs or ()):
                if storage in readers:
                    readers[storage].append(index)
        reads: dict[int, list[int]] = {s: [] for s in needed}
        for offset, wanted in enumerate(demand.reads):
            for storage in wanted:
                if storage in reads:
                    reads[storage].append(offset)
        alike: dict[tuple[object, ...], list[int]] = {}
        for storage in sorted(needed):
            key = (
                problem.producer[storage],
                demand.may_recompute[storage],
                demand.may_keep[storage],
                storage in problem.live_at_barrier,
                liveness.last_read[storage],
                tuple(readers[storage]),
                tuple(reads[storage]),
            )
            alike.setdefault(key, []).append(storage)
        return tuple(
            Group(
                storages=tuple(members),
                size_bytes=sum(problem.storages[s].size_bytes for s in members),
                producer=problem.producer[members[0]],
                again=demand.may_recompute[members[0]],
                may_keep=demand.may_keep[members[0]],
                at_barrier=members[0] in problem.live_at_barrier,
                forward_end=liveness.last_read[members[0]],
                readers=tuple(readers[members[0]]),
                reads=tuple(reads[members[0]]),
            )
            for members in alike.values()
        )

    @cached_property
    def group_of(self) -> dict[int, int]:
        """For each storage that matters its group."""
        return {s: g for g, group in enumerate(self.groups) for s in group.storages}

    @cached_property
    def inputs(self) -> dict[int, tuple[int, ...]]:
        """For each operation that may run again the groups it then reads."""
        return {
            index: self._groups(self.problem.operations[index].recompute_inputs or ())
            for index in {group.producer for group in self.groups if group.again}
        }

    @cached_property
    def outputs(self) -> dict[int, tuple[int, ...]]:
        """For each operation that may run again the groups it then makes."""
        made: dict[int, list[int]] = {}
        for number, group in enumerate(self.groups):
            if group.again:
                made.setdefault(group.producer, []).append(number)
        return {index: tuple(numbers) for index, numbers in made.items()}

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """The backward operations, counted from the barrier, that end a stage."""
        ends: set[int] = set()
        for group in self.groups:
            if group.again:
                ends.update(group.reads)
        last = max(ends, default=-1)
        if self.snapshots is not None:
            ends &= {last}
            ends.update(offset for offset in self.snapshots if offset < last)
        ends.update(offset for offset in self.promoted if offset < last)
        return tuple(sorted(ends))

    @cached_property
    def at_end(self) -> tuple[tuple[int, ...], ...]:
        """For each stage the groups that its last operation reads."""
        return tuple(self._groups(self.liveness.demand.reads[offset]) for offset in self.ends)

    @cached_property
    def uses(self) -> tuple[tuple[int, ...], ...]:
        """For each stage the groups that its backward operations read."""
        reads = self.liveness.demand.reads
        first = 0
        uses = []
        for end in self.ends:
            uses.append(self._groups(s for offset in range(first, end + 1) for s in reads[offset]))
            first = end + 1
        return tuple(uses)

    @cached_property
    def runs(self) -> tuple[frozenset[int], ...]:
        """For each stage the operations that it or a later stage may need run again."""
        later: set[int] = set()
        runs: list[frozenset[int]] = []
        for wanted in reversed(self.uses):
            todo = [self.groups[g].producer for g in wanted if self.groups[g].again]
            while todo:
                index = todo.pop()
                if index in later:
                    continue
                later.add(index)
                todo.extend(
                    self.groups[g].producer for g in self.inputs[index] if self.groups[g].again
                )
            runs.append(frozenset(later))
        return tuple(reversed(runs))

    @cached_property
    def last_stage(self) -> tuple[int, ...]:
        """For each group the last stage at whose start it may be worth having; -1 for none."""
        last = [-1] * len(self.groups)
        for stage, wanted in enumerate(self.uses):
            for g in wanted:
                last[g] = stage
        final = {index: stage for stage, runs in enumerate(self.runs) for index in runs}
        for g, group in enumerate(self.groups):
            last[g] = max([last[g], *(final.get(index, -1) for index in group.readers)])
            if not group.again:
                # Read between stages: resident from the barrier to there.
                last[g] = max(last[g], self.forced(g) - 1)
        return tuple(last)

    def forced(self, g: int) -> int:
        """Return for how many stage starts a group that is made once must be resident."""
        group = self.groups[g]
        if group.again or not group.reads:
            return 0
        final = group.reads[-1]
        return 1 + sum(end < final for end in self.ends)

    def _groups(self, storages: Iterable[int]) -> tuple[int, ...]:
        found = (self.group_of.get(s) for s in storages)
        return tuple(dict.fromkeys(g for g in found if g is not None))
