"""Walks through the backward that follow a point of the relaxation.

Rounding a point breaks the budget between snapshots, and what is then made again to fit is chosen
without the point. These walks fit all along: where an operation and its recomputations do not fit,
the storages go first that cost little to miss and that the point does not hold either.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Set

from autockpt_solvers.highs import Floats
from autockpt_solvers.methods.eviction import Eviction
from autockpt_solvers.methods.snapshot.program import SnapshotProgram

__all__ = ["walks"]

# Patience of the walks, and what a storage is worth that a point does not hold, as part of one
# that it does: none of these is best everywhere, the first ones are most often.
CHOICES = ((0.0, 0.05), (0.0, 0.3), (1.0, 0.05), (0.0, 0.01), (1.0, 0.01), (0.5, 0.1), (1.0, 0.3))


def walks(
    program: SnapshotProgram, values: Floats, budget_bytes: int, *, deadline: float
) -> Iterator[list[int]]:
    """Yield backward orders that fit and hold about what a point holds.

    Args:
        program: the program.
        values: its point.
        budget_bytes: the budget.
        deadline: ``time.perf_counter()`` at which to stop.
    """
    for patience, floor in CHOICES:
        order = _Following(program, values, patience, floor).order(budget_bytes, deadline=deadline)
        if order is not None:
            yield order


class _Following(Eviction):
    """The walks; what a storage is worth follows the point."""

    def __init__(
        self, program: SnapshotProgram, values: Floats, patience: float, floor: float
    ) -> None:
        super().__init__(program.stages.liveness, patience)
        self.program = program
        self.values = values
        self.floor = floor

    def _worth(self, storage: int, have: Set[int], offset: int) -> float:
        """Return what missing a storage costs, less where the point does not hold it."""
        return super()._worth(storage, have, offset) * (self.floor + self._held(storage, offset))

    def _held(self, storage: int, offset: int) -> float:
        """Return how much of a storage the point holds behind a backward operation."""
        stages = self.program.stages
        g = stages.group_of.get(storage)
        if g is None:
            return 0.0
        k = bisect_left(stages.ends, offset) if offset >= 0 else -1
        if 0 <= k < len(stages.ends):
            reads = stages.groups[g].reads
            following = bisect_right(reads, offset)
            if following < len(reads) and reads[following] <= stages.ends[k]:
                return 1.0  # the stage itself still reads it
        return max(self.program.held(g, k + 1, self.values), 0.0)
