"""The snapshot program: a linear relaxation whose size grows with the layers, not their square.

The stage program (:mod:`autockpt_solvers.methods.ilp.program`) has a column for each operation and
each stage. Here stages end at few *snapshots* of the backward, and a group of storages has columns
only from the first to the last stage that reads its *block*, a range of the forward. What happens
to a block before, one copy of its columns says for all snapshots.

Columns in [0, 1], for g and i of block b and its stages ``k = lo..hi``: ``S[g, k]``, resident when
stage k begins; ``R[i, k]``, run again in stage k; ``Y[i, k]``, run again in stage k or later;
``O[i]``, an optional operation runs. Minimise the time of R and O subject to

1. ``S[g, k+1] <= S[g, k] + R[maker(g), k]``
2. ``S[g, k] + R[maker(g), k] >= 1`` where stage k reads g;
3. ``R[i, k] <= S[d, k] + R[maker(d), k]`` for inputs d of i, in one block for all k, across blocks
   where S is *exact* for both: k past ``lo``, or ``lo = 0``; and not past ``hi`` of d's;
4. at each snapshot, and at the hungriest operations of the forward, the bytes fit; before its
   ``lo`` a block counts with ``S[g, lo]``;
5. ``Y[i, k] <= sum of R[i, j] for j >= k``, ``Y[i, k] <= S[d, k] + Y[maker(d), k]`` inside a block,
   and across blocks where S is exact for both and d's ``hi`` is not the earlier one;
   ``S[g, k] + Y[maker(g), k] >= 1`` where stage k or a later one reads g;
6. ``S[g, lo] <= O[i]`` where the optional i makes g.

**Why it bounds every schedule** that runs the forward once. Of the stage starts 0..lo of a block
take the one, q, at which the schedule holds the fewest bytes of it. Let ``S[g, lo]`` say what is
resident at q, ``R[i, lo]`` whether i runs again in stages q..lo; for later k let S and R say
what is true. Rows 4 hold since before lo the block holds at least the bytes of q, and no
operation before stage lo reads it. A value used in a stage was resident at its start or made in
it, or for ``lo`` since q; so 1-3 and 5 hold. A forward row counts a block with ``lo > 0`` only if
it counts all of it, since at the barrier too it holds at least the bytes of q. Runs outside a
block's stages, inputs from elsewhere and in-stage memory are left out, which only relaxes.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from autockpt_solvers.highs import INFINITY, Floats, Program
from autockpt_solvers.methods.ilp.stages import Stages
from autockpt_solvers.methods.snapshot.blocks import Layout
from autockpt_solvers.on_demand import optional_operations

__all__ = ["SnapshotProgram"]

# Part of the budget that a point may use beyond it between snapshots.
OVER = 5e-3
# By how much more an input's reader may run again than the input is held.
BORROWED = 0.1


def windows(stages: Stages, layout: Layout) -> dict[int, tuple[int, int]]:
    """Return for each block the first and the last stage that it has columns for."""
    window: dict[int, tuple[int, int]] = {}
    for k, used in enumerate(stages.uses):
        for g in used:
            b = layout.block[stages.groups[g].producer]
            window[b] = (window.get(b, (k, k))[0], k)
    return window


class SnapshotProgram:
    """The program of one problem; the budget comes with :meth:`sides`.

    Args:
        stages: the index sets; their ends are the snapshots.
        layout: the blocks.
        byte_unit: bytes per unit of the memory rows.

    Attributes:
        program: rows and columns.
        resident: column of ``S[g, k]``.
        runs: column of ``R[i, k]``.
        later: column of ``Y[i, k]``.
        window: for each block the first and the last stage that reads it.
        memory: for each memory row the bytes that no column counts.
        cost_unit: nanoseconds per unit of the objective.
    """

    def __init__(self, stages: Stages, layout: Layout, byte_unit: float) -> None:
        self.stages = stages
        self.block = layout.block
        self.byte_unit = byte_unit
        self.program = Program("snapshots")
        problem = stages.problem
        total = sum(problem.operations[i].cost_ns for i in problem.forward)
        self.cost_unit = max(total, 1) / 1000
        self.resident: dict[tuple[int, int], int] = {}
        self.runs: dict[tuple[int, int], int] = {}
        self.later: dict[tuple[int, int], int] = {}
        self.memory: dict[int, int] = {}
        self.window = windows(stages, layout)
        self._columns()
        self._dependencies()
        self._closure()
        self._memory()
        self.arrays = self.program.arrays()

    @staticmethod
    def sizes(stages: Stages, layout: Layout) -> list[int]:
        """Return about the numbers of columns that the program would have, by block."""
        window = windows(stages, layout)
        columns = dict.fromkeys(window, 0)
        for index in [group.producer for group in stages.groups] + 2 * list(stages.outputs):
            b = layout.block[index]
            if b in window:
                low, high = window[b]
                columns[b] += high - low + 1
        return list(columns.values())

    def sides(self, budget_bytes: int) -> Floats:
        """Return the rows' upper sides at a budget."""
        cuts = len(self.program.rows) - len(self.arrays["row_upper"])
        upper: Floats = np.concatenate([self.arrays["row_upper"], np.full(cuts, INFINITY)])
        rows = np.array(list(self.memory), np.int64)
        constants = np.array(list(self.memory.values()), np.float64)
        upper[rows] = (budget_bytes - constants) / self.byte_unit
        return upper

    def borrowed(self, values: Floats) -> set[int]:
        """Return the blocks from which a point takes what it neither holds nor makes there.

        Inputs from another block are free before its ``lo``. Where a point makes much of that, the
        block should be one with the next, and with those between where it takes from further off.
        """
        blocks: set[int] = set()
        for index, inputs in self.stages.inputs.items():
            own = self.block[index]
            if own not in self.window:
                continue
            low, high = self.window[own]
            made = max(float(values[self.runs[index, k]]) for k in range(low, high + 1))
            for d in inputs:
                group = self.stages.groups[d]
                block = self.block[group.producer]
                if block == own or not group.again or not group.size_bytes:
                    continue
                window = self.window.get(block)
                held = float(values[self.resident[d, window[0]]]) if window else 0.0
                if made - held > BORROWED:
                    blocks.update(range(min(block, own), max(block, own)))
        return blocks

    def overlooked(self, values: Floats, budget_bytes: int) -> list[int]:
        """Return the backward operations between snapshots at which a point breaks the budget.

        Of each stage the worst. What a point holds at the end of a stage, and what the stage still
        reads, is there all the while if the stage does not make it.
        """
        stages = self.stages
        during, _ = stages.liveness.backward_bytes
        reads = stages.liveness.demand.reads
        size = [group.size_bytes for group in stages.groups]
        worst: list[int] = []
        first = 0
        for k, end in enumerate(stages.ends):
            made = [self._made(g, k, values) for g in range(len(size))]
            held = [self._through(g, k, values, made[g]) for g in range(len(size))]
            total = sum(share * weight for share, weight in zip(held, size, strict=True))
            highest, where = budget_bytes * (1 + OVER), -1
            for offset in range(end, first - 1, -1):
                read = {stages.group_of[s] for s in reads[offset] if s in stages.group_of}
                level = during[offset] + total + sum(size[g] * (1 - held[g]) for g in read)
                if offset < end and level > highest:
                    highest, where = level, offset
                for g in read:
                    more = max(1 - made[g] - held[g], 0.0)
                    held[g] += more
                    total += more * size[g]
            if where >= 0:
                worst.append(where)
            first = end + 1
        return worst

    def held(self, g: int, k: int, values: Floats) -> float:
        """Return how much of a group a point holds when a stage begins."""
        column = self._at(g, k)
        return 0.0 if column is None else float(values[column])

    def _made(self, g: int, k: int, values: Floats) -> float:
        """Return how much of a group a point makes in a stage."""
        column = self.runs.get((self.stages.groups[g].producer, k))
        return 0.0 if column is None else float(values[column])

    def _through(self, g: int, k: int, values: Floats, made: float) -> float:
        """Return how much of a group a point holds through a stage to its end."""
        return max(self.held(g, k + 1, values) - made, 0.0)

    # ---------------------------------------------------------------- columns

    def _columns(self) -> None:
        stages, problem, program = self.stages, self.stages.problem, self.program
        for g, group in enumerate(stages.groups):
            window = self.window.get(self.block[group.producer])
            if window is None:
                continue
            forced = stages.forced(g)
            for k in range(window[0], window[1] + 1):
                column = program.variable(f"S({g},{k})")
                self.resident[g, k] = column
                if k < forced:
                    program.bound(column, lower=1.0)
                elif k == 0 and not group.may_keep:
                    program.bound(column, upper=0.0)
        for index in sorted(stages.outputs):
            window = self.window.get(self.block[index])
            if window is None:
                continue
            cost = problem.operations[index].cost_ns / self.cost_unit
            for k in range(window[0], window[1] + 1):
                self.runs[index, k] = program.variable(f"R({index},{k})", cost)
        chosen: dict[int, int] = {}
        for g, group in enumerate(stages.groups):
            low, _ = self.window.get(self.block[group.producer], (0, 0))
            if not problem.operations[group.producer].optional or (g, low) not in self.resident:
                continue
            for index in sorted(optional_operations(problem, group.storages)):
                cost = problem.operations[index].cost_ns / self.cost_unit
                if cost and index not in chosen:
                    chosen[index] = program.variable(f"O({index})", cost, integer=False)
                if cost:
                    terms = [(self.resident[g, low], 1.0), (chosen[index], -1.0)]
                    program.row(f"optional({g},{index})", terms, upper=0)

    # ---------------------------------------------------------------- rows

    def _had(self, g: int, k: int) -> list[tuple[int, float]]:
        """Return ``-S[g, k]`` and ``-R[maker(g), k]``."""
        terms = [(self.resident[g, k], -1.0)]
        group = self.stages.groups[g]
        if group.again:
            terms.append((self.runs[group.producer, k], -1.0))
        return terms

    def _exact(self, index: int, k: int) -> bool:
        """Return whether S of an operation's block says at stage k what is true at that moment."""
        low, _ = self.window[self.block[index]]
        return k > low or not low

    def _dependencies(self) -> None:
        stages, program = self.stages, self.program
        for (g, k), column in self.resident.items():
            if (g, k - 1) in self.resident:
                program.row(f"had({g},{k})", [(column, 1.0), *self._had(g, k - 1)], upper=0)
        for (index, k), column in self.runs.items():
            for d in stages.inputs[index]:
                maker = stages.groups[d].producer
                apart = self.block[maker] != self.block[index]
                if (d, k) not in self.resident:
                    continue
                if apart and not (self._exact(index, k) and self._exact(maker, k)):
                    continue
                program.row(f"input({index},{d},{k})", [(column, 1.0), *self._had(d, k)], upper=0)
        for k, used in enumerate(stages.uses):
            for g in used:
                terms = [(c, -v) for c, v in self._had(g, k)]
                program.row(f"read({g},{k})", terms, lower=1)

    def _closure(self) -> None:
        """Add rows 5 for every stage of a window but the last, where R says the same."""
        stages, program = self.stages, self.program
        last_use: dict[int, int] = {}
        for k, used in enumerate(stages.uses):
            last_use.update(dict.fromkeys(used, k))
        later = self.later
        for index in sorted(stages.outputs):
            low, high = self.window.get(self.block[index], (0, -1))
            for k in range(low, high):
                column = program.variable(f"Y({index},{k})", integer=False)
                later[index, k] = column
                terms = [(self.runs[index, j], -1.0) for j in range(k, high + 1)]
                program.row(f"later({index},{k})", [(column, 1.0), *terms], upper=0)
                for g in stages.outputs[index]:
                    if last_use.get(g, -1) >= k:
                        terms = [(column, 1.0), (self.resident[g, k], 1.0)]
                        program.row(f"laterread({g},{k})", terms, lower=1)
        for (index, k), column in later.items():
            for d in stages.inputs[index]:
                group = stages.groups[d]
                maker = group.producer
                if (d, k) not in self.resident or not self._together(index, maker, k):
                    continue
                terms = [(column, 1.0), (self.resident[d, k], -1.0)]
                if group.again:
                    # In the last stage of a window R says the same.
                    terms.append((later.get((maker, k), self.runs[maker, k]), -1.0))
                program.row(f"laterinput({index},{d},{k})", terms, upper=0)

    def _together(self, index: int, maker: int, k: int) -> bool:
        """Return whether Y of two operations speaks of the same time from stage k on."""
        own, other = self.block[index], self.block[maker]
        if own == other:
            return True
        inside = self.window[own][1] <= self.window[other][1]
        return inside and self._exact(index, k) and self._exact(maker, k)

    def _at(self, g: int, k: int) -> int | None:
        """Return the column that says whether a group is resident when stage k begins."""
        window = self.window.get(self.block[self.stages.groups[g].producer])
        if window is None or k > window[1]:
            return None
        return self.resident[g, max(k, window[0])]

    def _memory_row(self, name: str, constant: int, groups: Iterable[tuple[int, int]]) -> None:
        terms: list[tuple[int, float]] = []
        for g, k in groups:
            column, size = self._at(g, k), self.stages.groups[g].size_bytes
            if column is not None and size:
                terms.append((column, size / self.byte_unit))
        if terms:
            self.memory[self.program.row(name, terms, upper=0)] = constant

    def _memory(self) -> None:
        stages, liveness = self.stages, self.stages.liveness
        groups, problem = stages.groups, stages.problem
        during, _ = liveness.backward_bytes
        everything = range(len(groups))
        for k, end in enumerate(stages.ends):
            wanted = set(stages.at_end[k])
            constant = during[end] + sum(groups[g].size_bytes for g in wanted)
            rest = ((g, k + 1) for g in everything if g not in wanted)
            self._memory_row(f"memory({k})", constant, rest)
        # Forward: rows whose constant no later row exceeds; a later row has more terms.
        whole: dict[int, int] = {}
        for group in groups:
            b = self.block[group.producer]
            end = problem.barrier if group.at_barrier else group.forward_end
            whole[b] = max(whole.get(b, -1), end)
        highest = -1
        forward = liveness.forward_bytes
        for index in reversed(problem.required):
            if int(forward[index]) <= highest:
                continue
            highest = int(forward[index])
            counted = []
            for g, group in enumerate(groups):
                b = self.block[group.producer]
                exact = b in self.window and self.window[b][0] == 0
                end = group.forward_end if exact else whole[b]
                if end < index and not group.at_barrier:
                    counted.append((g, 0))
            self._memory_row(f"forward({index})", highest, counted)
