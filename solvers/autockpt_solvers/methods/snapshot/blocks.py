"""Where the snapshot program looks: snapshots of the backward, blocks of the forward.

Any choice makes a valid bound; these make a good one. The forward is cut where few large storages
cross from one side to the other, as between the layers of a transformer; neighbouring segments
are the *blocks*. They are joined further where the program's answer takes from a neighbour what it
neither holds nor makes there (``SnapshotProgram.borrowed``). The backward passes through the
segments in turn; of each such *phase* the operation at which its own bytes peak is a *snapshot*,
and so is the first operation. Further ones follow where the program's answer breaks the budget
between two of them (``SnapshotProgram.overlooked``): near the minimum that decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise

from autockpt_solvers.liveness import Liveness
from autockpt_solvers.methods.ilp.stages import Group

__all__ = [
    "Layout",
    "even_snapshots",
    "finest",
    "joined",
    "layouts",
    "own_bytes",
    "refined",
    "segments",
    "thinned",
    "widened",
]

# A storage below this part of the largest does not count as crossing a cut.
TINY = 1e-3
# Segments shorter than this many operations join the next.
SHORTEST = 2
# Segments of so many operations are short enough to be blocks.
SHORT = 30
# Without segments: operations of a block, and snapshots.
ONE_BLOCK = 1000
EVEN = 16
# Fewer segments than this say nothing about the graph.
FEW = 6


# The name of choices whose blocks are joined where the program's answer borrows.
JOINED = "joined"


@dataclass(frozen=True)
class Layout:
    """One choice of blocks and snapshots.

    Attributes:
        name: where it comes from.
        block: for each forward operation its block.
        snapshots: backward operations, counted from the barrier.
    """

    name: str
    block: tuple[int, ...]
    snapshots: frozenset[int]


def layouts(liveness: Liveness, groups: Sequence[Group]) -> list[Layout]:
    """Return the choices worth a solve, the cheapest first."""
    count = liveness.problem.barrier
    ends = _best_cut(count, groups)
    number = _numbers(ends, count)
    own = own_bytes(liveness)
    result: list[Layout] = []
    for per_block, per_snapshot in ((2, 2), (8, 1)):
        if per_block > 2 and per_block >= 2 * len(ends):
            continue
        coarse = [e for n, e in enumerate(ends) if (n + 1) % per_snapshot == 0 or e == ends[-1]]
        snapshots = _one_per_phase(_phases(liveness, groups, coarse), own)
        block = tuple(n // per_block for n in number)
        result.append(Layout(f"{per_block} segments", block, snapshots))
    if len(ends) < FEW:
        for parts in (max(count // ONE_BLOCK, 1), max(count // 60, 1)):
            block = tuple(i * parts // count for i in range(count))
            result.append(Layout("ranges", block, even_snapshots(own, EVEN)))
    return result


def finest(liveness: Liveness, groups: Sequence[Group]) -> Layout:
    """Return the choice of one segment a block, to be joined where that turns out to matter."""
    ends = _best_cut(liveness.problem.barrier, groups)
    snapshots = _one_per_phase(_phases(liveness, groups, ends), own_bytes(liveness))
    return Layout("segments", tuple(_numbers(ends, liveness.problem.barrier)), snapshots)


def widened(layout: Layout, liveness: Liveness, groups: Sequence[Group], per_block: int) -> Layout:
    """Return a choice with so many segments to a block, and the same snapshots."""
    count = liveness.problem.barrier
    number = _numbers(_best_cut(count, groups), count)
    return replace(layout, block=tuple(n // per_block for n in number))


def joined(layout: Layout, links: Set[int]) -> Layout:
    """Return a choice whose blocks are joined with the next where their numbers are given."""
    number = {b: b - sum(link < b for link in links) for b in set(layout.block)}
    return replace(layout, name=JOINED, block=tuple(number[b] for b in layout.block))


def refined(layout: Layout, offsets: Iterable[int]) -> Layout:
    """Return a choice with more snapshots, at these backward operations."""
    return replace(layout, snapshots=layout.snapshots | set(offsets))


def thinned(layout: Layout, own: Sequence[int]) -> Layout:
    """Return a choice with the hungrier of every two snapshots, and the first."""
    ordered = sorted(layout.snapshots)
    pairs = [ordered[n : n + 2] for n in range(1, len(ordered), 2)]
    kept = {max(pair, key=lambda offset: own[offset]) for pair in pairs}
    return replace(layout, snapshots=frozenset(kept | set(ordered[:1])))


def own_bytes(liveness: Liveness) -> list[int]:
    """Return for each backward operation the bytes that no choice takes from it."""
    during, _ = liveness.backward_bytes
    storages = liveness.problem.storages
    return [
        level + sum(storages[s].size_bytes for s in reads)
        for level, reads in zip(during, liveness.demand.reads, strict=True)
    ]


def even_snapshots(own: Sequence[int], count: int) -> frozenset[int]:
    """Return the first operation and the hungriest of each of ``count`` equal ranges."""
    edges = [round(number * len(own) / count) for number in range(count + 1)]
    chosen = {0} if own else set()
    for first, end in pairwise(edges):
        if first < end:
            chosen.add(max(range(first, end), key=lambda offset: own[offset]))
    return frozenset(chosen)


def segments(groups: Sequence[Group], count: int, width: int) -> list[int]:
    """Return the last operation of each segment: cuts that at most ``width`` storages cross.

    Args:
        groups: the storages that matter behind the barrier.
        count: number of forward operations.
        width: how many large storages may cross a cut, beside those that reach most segments.
    """
    tiny = TINY * max((group.size_bytes for group in groups), default=0)
    delta = [0] * (count + 1)
    starts: set[int] = set()
    for group in groups:
        end = max(group.readers, default=-1)
        if group.size_bytes > tiny and end > group.producer:
            delta[group.producer] += 1
            delta[end] -= 1
            starts.add(group.producer)
    ends: list[int] = []
    crossing = 0
    fresh = False
    for index in range(count):
        crossing += delta[index]
        fresh = fresh or index in starts or delta[index] != 0
        previous = ends[-1] if ends else -1
        if crossing <= width and fresh and index - previous >= SHORTEST:
            ends.append(index)
            fresh = False
    if not ends or ends[-1] != count - 1:
        ends.append(count - 1)
    return ends


def _best_cut(count: int, groups: Sequence[Group]) -> list[int]:
    """Return the narrowest cuts that leave the average operation in a short segment."""
    best: list[int] = []
    score = float("inf")
    for width in (1, 2, 3, 4, 6, 8):
        ends = segments(groups, count, width)
        lengths = [b - a for a, b in pairwise([-1, *ends])]
        mean = sum(n * n for n in lengths) / max(count, 1)
        if mean <= max(SHORT, count // 12):
            return ends
        if mean < score:
            best, score = ends, mean
    return best


def _numbers(ends: Sequence[int], count: int) -> list[int]:
    number = []
    segment = 0
    for index in range(count):
        number.append(segment)
        if segment < len(ends) and index == ends[segment]:
            segment += 1
    return number


def _phases(liveness: Liveness, groups: Sequence[Group], ends: Sequence[int]) -> list[int]:
    """Return for each backward operation the segment whose turn it is, falling."""
    problem = liveness.problem
    number = _numbers(ends, problem.barrier)
    inner: dict[int, int] = {}
    for group in groups:
        segment = number[group.producer]
        # What crosses the segment's end belongs to the next as much as to this one.
        if max(group.readers, default=-1) > ends[segment]:
            continue
        for storage in group.storages:
            inner[storage] = segment
    phase = []
    current = len(ends) - 1
    for reads in liveness.demand.reads:
        used = [inner[s] for s in reads if s in inner]
        if used:
            current = min(current, max(used))
        phase.append(current)
    return phase


def _one_per_phase(phase: Sequence[int], own: Sequence[int]) -> frozenset[int]:
    top: dict[int, int] = {}
    for offset, segment in enumerate(phase):
        if segment not in top or own[offset] > own[top[segment]]:
            top[segment] = offset
    return frozenset(top.values()) | ({0} if phase else set())
