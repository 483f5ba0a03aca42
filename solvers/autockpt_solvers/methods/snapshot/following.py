"""Walks through the backward that follow a point of the relaxation, and the best schedule so far.

Rounding a point breaks the budget between snapshots, and what is then made again to fit is chosen
without the point. These walks fit all along: where an operation and its recomputations do not fit,
the storages go first that cost little to miss and that the point does not hold either. Once there
is a good schedule, most walks go between it and the point, shaken, so that each is another start
nearby (iterated greedy, after Ruiz and Stützle 2007); some begin afresh.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence, Set
from itertools import count

from autockpt_solvers.highs import Floats
from autockpt_solvers.methods.eviction import Eviction
from autockpt_solvers.methods.snapshot.program import SnapshotProgram
from autockpt_solvers.methods.snapshot.residency import Residency

__all__ = ["Point", "walks"]

Point = tuple[SnapshotProgram, Floats]

# What a storage is worth that neither holds, as part of one that both do: none is best everywhere.
FLOORS = (0.05, 0.3, 0.01)
# How much the point counts beside the schedule, and by how much the worth is shaken.
SHARES, NOISE = (0.0, 0.3, 0.6), (0.2, 0.6, 1.0)


def walks(
    points: Sequence[Point],
    budget_bytes: int,
    best: Callable[[], Residency | None],
    *,
    deadline: float,
) -> Iterator[list[int] | None]:
    """Yield backward orders that fit, without end; None where a walk fails.

    Args:
        points: programs and their points, the best first.
        budget_bytes: the budget.
        best: called before each walk; returns the best schedule so far, if there is one.
        deadline: ``time.perf_counter()`` at which walks are broken off.
    """
    rng = random.Random(0)
    for turn in count() if points else ():
        walk = _Following(points[turn % len(points)])
        state = best()
        if turn < len(points) or state is None:
            walk.floor = FLOORS[turn // len(points) % len(FLOORS)]
        elif turn % 3:
            walk.state, walk.share = state, rng.choice(SHARES)
            walk.floor, walk.noise, walk.rng = rng.choice(FLOORS), rng.choice(NOISE), rng
        else:  # from afresh
            walk.floor, walk.noise, walk.rng = rng.choice(FLOORS), rng.choice(NOISE), rng
        yield walk.order(budget_bytes, deadline=deadline)


class _Following(Eviction):
    """One walk.

    Args:
        point: the point that it follows.

    Attributes:
        state: the schedule that it follows, too; None for none.
        share: how much the point counts beside the schedule.
        floor: see ``FLOORS``.
        noise: by how much the worth of a storage is shaken.
        rng: what shakes it.
    """

    state: Residency | None = None
    share = 1.0
    floor = FLOORS[0]
    noise = 0.0
    rng: random.Random

    def __init__(self, point: Point) -> None:
        self.program, self.values = point
        super().__init__(self.program.stages.liveness, 0.0)

    def _worth(self, storage: int, have: Set[int], offset: int) -> float:
        """Return what missing a storage costs, less where it is not to be held."""
        worth = super()._worth(storage, have, offset) * (self.floor + self._held(storage, offset))
        return worth * (1 + self.noise * (self.rng.random() - 0.5)) if self.noise else worth

    def _held(self, storage: int, offset: int) -> float:
        """Return how much of a storage is to be held behind a backward operation."""
        stages = self.program.stages
        g = stages.group_of.get(storage)
        if g is None:
            return 0.0
        if self.state is None:
            return self._by_point(g, offset)
        held = float(self.state.is_resident(g, offset))
        return self.share * self._by_point(g, offset) + (1 - self.share) * held

    def _by_point(self, g: int, offset: int) -> float:
        stages = self.program.stages
        k = bisect_left(stages.ends, offset) if offset >= 0 else -1
        if 0 <= k < len(stages.ends):
            reads = stages.groups[g].reads
            following = bisect_right(reads, offset)
            if following < len(reads) and reads[following] <= stages.ends[k]:
                return 1.0  # the stage itself still reads it
        return max(self.program.held(g, k + 1, self.values), 0.0)
