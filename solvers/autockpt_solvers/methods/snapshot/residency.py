"""A backward order as runs by stage, whose live bytes follow each change at once.

A *stage* is a backward operation with the recomputations right before it. Which operation runs
again in which stages decides everything: a read in a stage is served by the newest *copy*, the
one made in the last run at or before that stage, or the one kept from the forward; a copy lives
from its making to its last read. A change of one run changes few copies, and each copy adds one
number to one range of an array. Trying a change costs a small part of a millisecond, where
:meth:`autockpt_solvers.liveness.Liveness.peak` walks through the whole order; a property test
holds the two together.

Within a stage the recomputations run in the forward's order, each at most once.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from autockpt_solvers.liveness import Liveness
from autockpt_solvers.methods.ilp.stages import Stages
from autockpt_solvers.on_demand import optional_operations

__all__ = ["Facts", "Residency"]

KEPT = -1  # the stage in which a copy kept from the forward was made
NEVER = -(1 << 60)

# Stage it was made in, stage of its last read, whether the backward operation itself reads it then.
Copy = tuple[int, int, bool]


class Facts:
    """What no run changes, made once for all states of a problem.

    Args:
        liveness: the facts of the problem.
        stages: its groups.
    """

    def __init__(self, liveness: Liveness, stages: Stages) -> None:
        self.liveness = liveness
        self.stages = stages
        problem = liveness.problem
        self.problem = problem
        groups = stages.groups
        self.sizes = [group.size_bytes for group in groups]
        self.maker = [group.producer if group.again else -1 for group in groups]
        self.may_keep = [group.may_keep for group in groups]
        self.forward_from = [-1 if group.at_barrier else group.forward_end + 1 for group in groups]
        self.op_cost = [problem.operations[i].cost_ns for i in problem.forward]
        group_of = stages.group_of
        self.reads = [
            tuple(dict.fromkeys(group_of[s] for s in reads if s in group_of))
            for reads in liveness.demand.reads
        ]
        self.direct = [frozenset(group.reads) for group in groups]
        self.size_by_group = np.array(self.sizes, np.float64)
        self.cost_by_group = np.array(
            [problem.operations[group.producer].cost_ns for group in groups], np.float64
        )
        self.optional = [
            tuple(sorted(optional_operations(problem, group.storages)))
            if problem.operations[group.producer].optional
            else ()
            for group in groups
        ]
        # Bytes of outputs that no group has, while a run lasts; and its workspace.
        self.passing = {
            index: problem.operations[index].workspace_bytes
            + sum(
                problem.storages[s].size_bytes
                for s in problem.operations[index].recompute_outputs
                if s not in group_of
            )
            for index in stages.outputs
        }
        # Forward operations that are written over a group if it is not kept; how many there are.
        self.overwrites: dict[int, int] = {}
        self.over: dict[int, int] = {}
        for index, (over, _) in liveness.in_place.items():
            if all(storage in group_of for storage in over):
                own = {group_of[storage] for storage in over}
                self.over[index] = len(own)
                self.overwrites.update(dict.fromkeys(own, index))
        self.forward = liveness.forward_bytes.copy()
        for index in problem.forward:
            if problem.operations[index].optional:
                self.forward[index] += NEVER
        during, before = liveness.backward_bytes
        self.during = np.array(during, np.int64)
        self.before = np.array(before, np.int64)


class Residency:
    """Runs by stage, and the bytes and the cost they lead to. Mutable.

    Changes made since the last :meth:`commit` are taken back by :meth:`rollback`.

    Args:
        facts: the facts of the problem; shared between instances.
        order: the backward order to start from; runs nobody needs are left out.

    Attributes:
        cost_ns: time of the runs and of the optional operations they need.
        runs: for each operation the stages in which it runs again, rising.
        block: for each stage the operations that run again in it, rising.
    """

    def __init__(self, facts: Facts, order: Sequence[int]) -> None:
        self.liveness, self.problem = facts.liveness, facts.problem
        groups = facts.stages.groups
        self.inputs, self.outputs = facts.stages.inputs, facts.stages.outputs
        self.sizes, self.maker, self.may_keep = facts.sizes, facts.maker, facts.may_keep
        self.forward_from, self.op_cost = facts.forward_from, facts.op_cost
        self.reads, self.direct, self.optional = facts.reads, facts.direct, facts.optional
        self.size_by_group, self.cost_by_group = facts.size_by_group, facts.cost_by_group
        self.passing, self.overwrites = facts.passing, facts.overwrites
        self.during = facts.during
        problem = self.problem
        count = len(problem.operations) - problem.barrier
        self.runs: dict[int, list[int]] = {index: [] for index in self.outputs}
        self.block: list[list[int]] = [[] for _ in range(count)]
        self.reading: list[list[int]] = [list(group.reads) for group in groups]
        self.times: list[dict[int, int]] = [dict.fromkeys(group.reads, 1) for group in groups]
        self.copies: list[tuple[Copy, ...]] = [()] * len(groups)
        # From the making of the first copy to the last read; nothing for what is made once.
        self.first_made = np.full(len(groups), len(self.reads), np.int64)
        self.final_read = np.full(len(groups), NEVER, np.int64)
        self.wanted: dict[int, int] = {}
        # Bytes of copies: while a backward operation runs; through a whole stage; in the forward.
        self.held = np.zeros(count, np.int64)
        self.through = facts.before.copy()
        self.top = np.full(count, NEVER, np.int64)  # highest of the runs of a stage, without these
        self.forward = facts.forward.copy()
        # How many of the groups that a forward operation could be written over are left.
        self.left = dict(facts.over)
        self.cost_ns = 0
        self._touched: set[int] = set()
        self._dirty: set[int] = set()
        self._journal: list[tuple[int, int, bool]] = []
        self._suspects: list[tuple[int, int]] = []
        stage = 0
        barrier = problem.barrier
        for index in order:
            if index >= barrier:
                stage = index - barrier + 1
            elif index in self.runs and stage not in self.runs[index]:
                self._set(index, stage, True)
        self._touched.update(range(len(groups)))
        self._suspects = [(i, k) for i, stages_ in self.runs.items() for k in stages_]
        self.settle()
        self.commit()

    # ---------------------------------------------------------------- what holds

    def peak(self) -> int:
        """Return the peak, resident bytes included."""
        top = max(int((self.held + self.during).max()), int((self.through + self.top).max()))
        return max(top, int(self.forward.max(initial=0)))

    def excess(self, budget_bytes: int) -> int:
        """Return the bytes above a budget, summed over the operations."""
        total = 0
        for level in (self.held + self.during, self.through + self.top, self.forward):
            over = level - budget_bytes
            total += int(over[over > 0].sum())
        return total

    def order(self) -> list[int]:
        """Return the backward order."""
        barrier = self.problem.barrier
        result: list[int] = []
        for stage, block in enumerate(self.block):
            result += block
            result.append(barrier + stage)
        return result

    def serving(self, g: int, stage: int) -> int:
        """Return the stage in which the copy was made that serves a read in a stage."""
        maker = self.maker[g]
        if maker < 0:
            return KEPT
        runs = self.runs[maker]
        position = bisect_right(runs, stage)
        return runs[position - 1] if position else KEPT

    def last_read(self, g: int, stage: int) -> int:
        """Return the last read of the copy that would serve a stage; KEPT - 1 if it has none."""
        reading = self.reading[g]
        maker = self.maker[g]
        first, position = KEPT, len(reading)
        if maker >= 0:
            runs = self.runs[maker]
            here = bisect_right(runs, stage)
            first = runs[here - 1] if here else KEPT
            if here < len(runs):
                position = bisect_left(reading, runs[here])
        if not position:
            return KEPT - 1
        last = reading[position - 1]
        return last if last >= first else KEPT - 1

    def cheapest_first(self, stage: int, over: int, limit_ns: float) -> Iterator[tuple[float, int]]:
        """Yield groups that may be resident at a stage and read later, with a bound on their worth.

        The bound: the time of one run of their maker, per byte that lowers the stage, of which
        there are ``over`` too many.

        Args:
            stage: a backward operation, or KEPT for what is kept from the forward.
            over: bytes.
            limit_ns: makers whose run costs as much are left out.
        """
        there = (self.first_made <= stage) & (self.final_read > stage)
        near = np.flatnonzero(there & (self.cost_by_group < limit_ns))
        bound = self.cost_by_group[near] / np.minimum(self.size_by_group[near], over)
        rising = np.argsort(bound, kind="stable")
        yield from zip(bound[rising].tolist(), near[rising].tolist(), strict=True)

    def is_resident(self, g: int, stage: int) -> bool:
        """Return whether a copy of a group lives at a stage's end and is read later."""
        for made, last, _ in self.copies[g]:
            if made <= stage:
                if stage < last:
                    return True
            else:
                break
        return False

    # ---------------------------------------------------------------- changes

    def remove(self, index: int, stage: int) -> bool:
        """Take a run out, and those that only served it; return whether every read is served.

        What it made is then held from the copy before.
        """
        self._set(index, stage, False)
        for g in self.outputs[index]:
            if not self.may_keep[g] and self.serving(g, stage) == KEPT:
                last = self.last_read(g, stage)
                if last >= stage:
                    return False
        self.settle()
        return True

    def add(self, index: int, stage: int) -> None:
        """Run an operation again in a stage, and first what it needs there and is not resident."""
        todo = [index]
        while todo:
            run = todo.pop()
            runs = self.runs[run]
            position = bisect_left(runs, stage)
            if position < len(runs) and runs[position] == stage:
                continue
            for d in self.inputs[run]:
                maker = self.maker[d]
                if maker >= 0 and self.last_read(d, stage) < stage and maker != run:
                    todo.append(maker)
            self._set(run, stage, True)
        self.settle()

    def price(self, index: int, stage: int, limit: float = float("inf")) -> int:
        """Return what :meth:`add` costs, before what it makes superfluous; or more than a limit."""
        # The search spends most of its time here: what else is a method stands in the loop.
        makers, inputs, op_cost = self.maker, self.inputs, self.op_cost
        all_runs, all_reading = self.runs, self.reading
        total = 0
        seen = {index}
        todo = [index]
        while todo:
            run = todo.pop()
            total += op_cost[run]
            if total > limit:
                break
            for d in inputs[run]:
                maker = makers[d]
                if maker < 0 or maker in seen:
                    continue
                reading = all_reading[d]
                if reading and reading[-1] >= stage:
                    runs = all_runs[maker]
                    if not runs or runs[-1] <= stage:
                        continue  # the newest copy is read at the stage or later
                    following = runs[bisect_right(runs, stage)]
                    if reading[bisect_left(reading, stage)] < following:
                        continue
                seen.add(maker)
                todo.append(maker)
        return total

    def commit(self) -> None:
        """Make the changes final."""
        self._journal.clear()

    def mark(self) -> int:
        """Return where the changes stand, for :meth:`rollback`."""
        return len(self._journal)

    def rollback(self, mark: int = 0) -> None:
        """Take back all changes since the last :meth:`commit`, or since a mark after it."""
        for index, stage, added in reversed(self._journal[mark:]):
            self._set(index, stage, not added)
        del self._journal[mark:]
        self._suspects.clear()
        self._repaint()

    def settle(self) -> None:
        """Leave out runs that nobody needs and bring the bytes up to date."""
        while self._suspects:
            index, stage = self._suspects.pop()
            runs = self.runs[index]
            position = bisect_left(runs, stage)
            if position >= len(runs) or runs[position] != stage:
                continue
            end = runs[position + 1] if position + 1 < len(runs) else len(self.block)
            for g in self.outputs[index]:
                reading = self.reading[g]
                first = bisect_left(reading, stage)
                if first < len(reading) and reading[first] < end:
                    break
            else:
                self._set(index, stage, False)
        self._repaint()

    # ---------------------------------------------------------------- inside

    def _set(self, index: int, stage: int, add: bool) -> None:
        """Add or take out a run; the bytes follow in :meth:`_repaint`."""
        self._journal.append((index, stage, add))
        runs = self.runs[index]
        touched, suspects = self._touched, self._suspects
        if add:
            insort(runs, stage)
            insort(self.block[stage], index)
            self.cost_ns += self.op_cost[index]
            position = bisect_left(runs, stage)
            if position:
                suspects.append((index, runs[position - 1]))
        else:
            runs.remove(stage)
            self.block[stage].remove(index)
            self.cost_ns -= self.op_cost[index]
        self._dirty.add(stage)
        touched.update(self.outputs[index])
        for d in self.inputs[index]:
            touched.add(d)
            times, reading = self.times[d], self.reading[d]
            if add:
                count = times.get(stage, 0)
                times[stage] = count + 1
                if not count:
                    insort(reading, stage)
                continue
            count = times[stage] - 1
            if count:
                times[stage] = count
                continue
            del times[stage]
            del reading[bisect_left(reading, stage)]
            made = self.serving(d, stage)
            if made != KEPT:
                suspects.append((self.maker[d], made))

    def _copies(self, g: int) -> tuple[Copy, ...]:
        """Return the copies of a group that are read."""
        reading = self.reading[g]
        if not reading:
            return ()
        maker, direct = self.maker[g], self.direct[g]
        result = []
        position = 0
        made = KEPT
        for start in self.runs[maker] if maker >= 0 else ():
            end = bisect_left(reading, start, position)
            if end > position:
                last = reading[end - 1]
                result.append((made, last, last in direct))
                position = end
            made = start
        if position < len(reading):
            last = reading[-1]
            result.append((made, last, last in direct))
        return tuple(result)

    def _repaint(self) -> None:
        """Bring the bytes of the touched groups and the tops of the changed stages up to date."""
        dirty = self._dirty
        for g in self._touched:
            old, new = self.copies[g], self._copies(g)
            if old == new:
                continue
            self.copies[g] = new
            if self.maker[g] >= 0 and self.sizes[g]:
                self.first_made[g] = new[0][0] if new else len(self.block)
                self.final_read[g] = new[-1][1] if new else NEVER
            if len(old) == 1 and len(new) == 1:
                gone: Iterable[Copy] = old
                fresh: Iterable[Copy] = new
            else:
                gone, fresh = set(old).difference(new), set(new).difference(old)
            for copy in gone:
                self._paint(g, copy, -1)
            for copy in fresh:
                self._paint(g, copy, 1)
        self._touched.clear()
        for stage in dirty:
            self.top[stage] = self._top(stage) if self.block[stage] else NEVER
        dirty.clear()

    def _paint(self, g: int, copy: Copy, sign: int) -> None:
        made, last, direct = copy
        size = sign * self.sizes[g]
        end = last + 1 if direct else last
        self._dirty.add(last)
        if made == KEPT:
            self.held[:end] += size
            self.through[:last] += size
            start = self.forward_from[g]
            if start >= 0:
                self.forward[start:] += size
            if g in self.overwrites:
                self._overwritten(self.overwrites[g], sign)
            for index in self.optional[g]:
                count = self.wanted.get(index, 0) + sign
                self.wanted[index] = count
                if sign > 0 and count == 1:
                    self.cost_ns += self.op_cost[index]
                    self.forward[index] -= NEVER
                elif sign < 0 and count == 0:
                    self.cost_ns -= self.op_cost[index]
                    self.forward[index] += NEVER
            return
        self._dirty.add(made)
        self.held[made:end] += size
        self.through[made + 1 : last] += size

    def _overwritten(self, index: int, sign: int) -> None:
        """Count a group more (or less) as kept that a forward operation could be written over."""
        saved_bytes = self.liveness.in_place[index][1]
        if sign > 0 and self.left[index] == 1:
            self.forward[index] += saved_bytes
        elif sign < 0 and not self.left[index]:
            self.forward[index] -= saved_bytes
        self.left[index] -= sign

    def _top(self, stage: int) -> int:
        """Return the highest level of a stage's runs, without what is there all through it."""
        block, sizes = self.block[stage], self.sizes
        end = len(block)
        last: dict[int, int] = {}
        made: dict[int, int] = {}
        for position, index in enumerate(block):
            for d in self.inputs[index]:
                last[d] = position
            for g in self.outputs[index]:
                made[g] = position
        for g in self.reads[stage]:
            last[g] = end
        change = [0] * (end + 2)
        for g, position in last.items():
            if g in made:
                continue
            if self.last_read(g, stage) == stage:
                change[0] += sizes[g]
                change[position + 1] -= sizes[g]
        for g, start in made.items():
            change[start] += sizes[g]
            if self.last_read(g, stage) <= stage:
                change[last.get(g, start) + 1] -= sizes[g]
        level = 0
        top = NEVER
        for position, index in enumerate(block):
            level += change[position]
            now = level + self.passing[index]
            if now > top:
                top = now
        return top
