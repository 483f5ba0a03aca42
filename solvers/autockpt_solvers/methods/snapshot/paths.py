"""Cuts for the snapshot program: what is read was held on the way to it, or is made again in time.

The relaxation makes a long chain in slices: half of a value in the stage that reads it, a quarter
in the stage before, and so on, and hardly pays for having the whole chain at hand. For each path of
operations i = o1, ..., on of one block, each making an input of the next and the last one a group
that is read in one of the stages k1..k2::

    sum over the path of S[g, k1]  +  sum of R[i, j] for j = k1..k2  >=  1

where g are the groups along the path. **Why it holds for every schedule:** let none of them be
resident at k1. The last is read in k1..k2, so its maker runs there, so the group before it is made
there, and so on down to i. With ``k1 = lo`` both S and R speak of the moment that stands for all
before (:mod:`.program`), and the same holds. The closure rows of the program are those with
``k2 = hi``, taken together.

The cuts do not depend on the budget, and hold for a program with more snapshots or wider blocks, of
whose columns those of the same time are taken. There are too many to state; the violated ones are
found by a shortest path, with S for lengths, for all windows k1..k2 at once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autockpt_solvers.highs import Floats
from autockpt_solvers.methods.snapshot.program import SnapshotProgram

__all__ = ["PathCuts", "carried"]

# How much a cut must be violated to be worth a row.
VIOLATION = 0.05
# Cuts of one operation in a round, and how far apart their windows are.
PER_OPERATION, APART = 2, 2
# The windows of one operation that are looked at, the most violated first.
LOOK = 12
FAR = 9.0


def carried(
    cuts: Sequence[Sequence[int]], before: SnapshotProgram, after: SnapshotProgram
) -> list[list[int]]:
    """Return the columns of cuts of one program in another, whose choice refines or widens its.

    Args:
        cuts: their columns in the program before.
        before: the program they were found for.
        after: a program with all its snapshots, and of whose blocks each holds whole ones of it.
    """
    held = {column: key for key, column in before.resident.items()}
    made = {column: key for key, column in before.runs.items()}
    ends = after.stages.ends
    first = [0, *(bisect_right(ends, end) for end in before.stages.ends)]
    result: list[list[int]] = []
    for cut in cuts:
        columns: list[int] = []
        for column in cut:
            if column in held:
                g, k = held[column]
                # A block is first read in the last of the stages that one was divided into.
                low, _ = after.window[after.block[after.stages.groups[g].producer]]
                columns.append(after.resident[g, max(first[k], low)])
            else:
                index, k = made[column]
                stages = range(first[k], first[k + 1])
                columns += [after.runs[index, j] for j in stages if (index, j) in after.runs]
        result.append(columns)
    return result


class PathCuts:
    """Finds the cuts of one program that a point violates.

    Args:
        program: the program.
    """

    def __init__(self, program: SnapshotProgram) -> None:
        stages = program.stages
        blocks: dict[int, list[int]] = {}
        for index in sorted(stages.outputs):
            if program.block[index] in program.window:
                blocks.setdefault(program.block[index], []).append(index)
        reads: dict[int, list[int]] = {}
        for k, used in enumerate(stages.uses):
            for g in used:
                reads.setdefault(g, []).append(k)
        self.blocks = [
            _Block(program, operations, reads)
            for b, operations in blocks.items()
            if program.window[b][0] < program.window[b][1]
        ]

    def violated(self, values: Floats) -> list[list[int]]:
        """Return the columns of cuts that a point violates: of each the sum is at least 1."""
        return [cut for block in self.blocks for cut in block.violated(values)]


class _Block:
    """The cuts of one block; stages are counted from its first one."""

    def __init__(
        self, program: SnapshotProgram, operations: Sequence[int], reads: dict[int, list[int]]
    ) -> None:
        stages = program.stages
        low, high = program.window[program.block[operations[0]]]
        self.operations = operations
        self.outputs = {index: stages.outputs[index] for index in operations}
        window = range(low, high + 1)
        self.runs = {
            index: np.array([program.runs[index, k] for k in window]) for index in operations
        }
        self.resident: dict[int, NDArray[np.int64]] = {}
        self.readers: dict[int, list[int]] = {}
        # For each group and k1 its first read from there on.
        self.following: dict[int, NDArray[np.int64]] = {}
        for groups in self.outputs.values():
            for g in groups:
                self.resident[g] = np.array([program.resident[g, k] for k in window])
                self.readers[g] = []
                later = [k - low for k in reads.get(g, ())]
                position = np.searchsorted(later, np.arange(len(window)))
                self.following[g] = np.array([*later, len(window)])[position]
        for index in operations:
            for g in stages.inputs[index]:
                if g in self.readers:
                    self.readers[g].append(index)
        self.stages = np.arange(len(window))

    def violated(self, values: Floats) -> list[list[int]]:
        """Return the columns of the block's cuts that a point violates."""
        length: dict[int, Floats] = {}
        cuts = []
        backwards = self.stages[:, None] > self.stages[None, :]
        for index in reversed(self.operations):
            length[index] = np.minimum.reduce(
                [self._beyond(g, length, values) for g in self.outputs[index]]
            )
            made = np.concatenate([[0.0], np.cumsum(np.maximum(values[self.runs[index]], 0.0))])
            missing = 1.0 - length[index] - (made[1:][None, :] - made[:-1][:, None])
            missing[backwards] = -FAR  # however often the operation runs between
            taken: list[tuple[int, int]] = []
            for window in np.argsort(-missing, axis=None)[:LOOK]:
                first, last = divmod(int(window), len(self.stages))
                if missing[first, last] < VIOLATION or len(taken) == PER_OPERATION:
                    break
                if all(abs(first - f) >= APART or abs(last - t) >= APART for f, t in taken):
                    taken.append((first, last))
                    cuts.append(self._cut(index, first, last, length, values))
        return cuts

    def _beyond(self, g: int, length: dict[int, Floats], values: Floats) -> Floats:
        """Return for each window k1, k2 the length of the shortest path from a group to a read."""
        best = np.where(self.following[g][:, None] <= self.stages[None, :], 0.0, FAR)
        for reader in self.readers[g]:
            best = np.minimum(best, length[reader])
        result: Floats = best + np.maximum(values[self.resident[g]], 0.0)[:, None]
        return result

    def _cut(
        self, index: int, first: int, last: int, length: dict[int, Floats], values: Floats
    ) -> list[int]:
        """Return the columns of the cut along the shortest path from an operation."""
        columns: list[int] = self.runs[index][first : last + 1].tolist()
        at: int | None = index
        while at is not None:
            ways: list[tuple[float, int, int | None]] = []
            for g in self.outputs[at]:
                there = max(float(values[self.resident[g][first]]), 0.0)
                if self.following[g][first] <= last:
                    ways.append((there, g, None))
                ways += [(there + length[r][first, last], g, r) for r in self.readers[g]]
            _, g, at = min(ways, key=lambda way: way[0])
            columns.append(int(self.resident[g][first]))
        return columns
