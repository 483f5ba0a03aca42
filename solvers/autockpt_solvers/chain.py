"""A step as a chain of segments, for the methods that are made for chains.

The forward is cut behind operations where one operation's outputs are all that later forward
operations read. What spans a long part of the forward (a mask that every layer reads, the skips
of a U-Net) would leave no such point; it is set aside and kept throughout. How long is long is not
known beforehand: :func:`chains` yields one chain per answer.

What a method decides is a :class:`Checkpoint` tree, the recursion of Griewank & Walther (2000) and
of Beaumont et al. (2019): reverse segments ``first`` to ``last`` either by saving what the backward
of ``first`` reads, or by running forward to a middle, keeping only what crosses there, reversing
the later part, and then the earlier part from its own input. :func:`realise` writes a tree as the
order of operations behind the barrier; whatever a chain does not say is recomputed on demand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass

from autockpt_solvers.on_demand import Demand, needed_storages

__all__ = ["Chain", "Checkpoint", "Save", "Tree", "chains", "closure", "realise"]

# Segments beyond which neighbours are joined: the methods' work grows with their third power.
MOST_SEGMENTS = 100
# A storage that spans fewer operations than this is never set aside.
SHORTEST = 6


@dataclass(frozen=True)
class Chain:
    """A problem's forward as segments, its backward operations given to them.

    Attributes:
        demand: the facts of the problem.
        segments: for each segment its forward operations, in order.
        crossing: for each segment what later segments read of it.
        saved: for each segment what its own backward operations read of it.
        backward: for each segment its backward operations, counted from the barrier.
        aside: what is kept throughout, because it fits no segment or may not be recomputed.
    """

    demand: Demand
    segments: tuple[range, ...]
    crossing: tuple[frozenset[int], ...]
    saved: tuple[frozenset[int], ...]
    backward: tuple[range, ...]
    aside: frozenset[int]


@dataclass(frozen=True)
class Save:
    """Run ``segment`` keeping what its backward reads; reverse what follows, then the segment.

    ``later`` is None at the end of the range that is reversed.
    """

    segment: int
    later: Tree | None = None


@dataclass(frozen=True)
class Checkpoint:
    """Run to ``middle`` keeping what crosses into it; reverse from there, then what is before."""

    middle: int
    later: Tree
    earlier: Tree


Tree = Save | Checkpoint


# ------------------------------------------------------------------ from a problem to a chain


def chains(demand: Demand) -> Iterator[Chain]:
    """Yield the chains of a problem, the one that sets least aside first.

    Each sets aside storages that span fewer operations than before; those that add no cut are
    left out.
    """
    problem = demand.problem
    needed = needed_storages(demand)
    once = frozenset(s for s in needed if not demand.may_recompute[s])
    last = _last_reads(demand)
    most = 0
    longest = problem.barrier
    while longest >= SHORTEST or not most:
        long = frozenset(
            s
            for s in needed
            if demand.may_keep[s] and last.get(s, 0) - problem.producer[s] > longest
        )
        cuts = _cuts(demand, last, needed - once - long)
        if len(cuts) + 1 > most:
            most = len(cuts) + 1
            yield _chain(demand, _thinned(demand, cuts), last, needed, once | long)
        longest //= 2


def _last_reads(demand: Demand) -> dict[int, int]:
    """Return the last forward operation that reads each storage, in any of its runs."""
    last: dict[int, int] = {}
    for index in demand.problem.forward:
        op = demand.problem.operations[index]
        for storage in (*op.inputs, *(op.recompute_inputs or ())):
            last[storage] = index
    return last


def _cuts(
    demand: Demand, last: dict[int, int], inside: Set[int]
) -> list[tuple[int, frozenset[int]]]:
    """Return the operations behind which one operation's outputs cross, and what crosses."""
    problem = demand.problem
    alive: set[int] = set()
    cuts: list[tuple[int, frozenset[int]]] = []
    for index in range(problem.barrier - 1):
        alive.update(s for s in problem.operations[index].outputs if s in inside)
        alive = {s for s in alive if last.get(s, -1) > index}
        makers = {problem.producer[s] for s in alive}
        if len(makers) <= 1 and not (cuts and cuts[-1][1] == alive):
            cuts.append((index, frozenset(alive)))
    return cuts


def _thinned(demand: Demand, cuts: list[tuple[int, frozenset[int]]]) -> list[int]:
    """Return the operations of at most ``MOST_SEGMENTS`` - 1 cuts, the narrowest of equal parts."""
    storages = demand.problem.storages
    limit = MOST_SEGMENTS - 1
    if len(cuts) > limit:
        edges = [len(cuts) * part // limit for part in range(limit + 1)]
        groups = (cuts[edges[part] : edges[part + 1]] for part in range(limit))
        cuts = [min(g, key=lambda cut: sum(storages[s].size_bytes for s in cut[1])) for g in groups]
    return [index for index, _ in cuts]


def _chain(
    demand: Demand,
    cuts: Sequence[int],
    last: dict[int, int],
    needed: Set[int],
    aside: frozenset[int],
) -> Chain:
    problem = demand.problem
    bounds = [0, *(cut + 1 for cut in cuts), problem.barrier]
    segments = tuple(map(range, bounds, bounds[1:]))
    made = {
        s: t for t, ops in enumerate(segments) for i in ops for s in problem.operations[i].outputs
    }

    def crosses(storage: int) -> bool:
        return last.get(storage, -1) >= segments[made[storage]].stop

    # A backward operation belongs to the segment whose inner storages it reads; one that reads
    # only what enters a segment belongs to that segment. None comes before one of a later segment.
    belongs: list[int] = []
    current = 0
    for reads in reversed(demand.reads):
        own = [made[s] + crosses(s) for s in reads if s not in aside]
        current = max(current, min(own, default=0))
        belongs.append(current)
    belongs.reverse()

    saved: list[set[int]] = [set() for _ in segments]
    misfits: set[int] = set()
    for reads, segment in zip(demand.reads, belongs, strict=True):
        for storage in reads:
            if made[storage] == segment:
                saved[segment].add(storage)
            elif (
                not (crosses(storage) and made[storage] + 1 == segment) and demand.may_keep[storage]
            ):
                misfits.add(storage)
    aside |= misfits
    return Chain(
        demand,
        segments,
        crossing=tuple(
            frozenset(
                s for i in ops for s in problem.operations[i].outputs if s in needed and crosses(s)
            )
            - aside
            for ops in segments
        ),
        saved=tuple(frozenset(storages) - aside for storages in saved),
        backward=tuple(_positions(belongs, segment) for segment in range(len(segments))),
        aside=aside,
    )


def _positions(belongs: Sequence[int], segment: int) -> range:
    """Return the positions of a segment in a falling list; where it would stand if it is not in."""
    start = sum(other > segment for other in belongs)
    return range(start, start + belongs.count(segment))


# ------------------------------------------------------------------ from a tree to an order


def realise(chain: Chain, tree: Tree) -> list[int]:
    """Return the backward order that a tree stands for, without runs that nothing reads."""
    demand = chain.demand
    barrier = demand.problem.barrier
    resident = {
        s
        for s, keepable in enumerate(demand.may_keep)
        if keepable and (s in chain.aside or not demand.may_recompute[s])
    }
    order: list[int] = []

    def make(wanted: Set[int]) -> set[int]:
        """Make storages resident; return those that were not."""
        fresh = set(wanted) - resident
        if order:
            order.extend(closure(demand, fresh, resident))
        else:  # the forward itself makes them
            fresh = {s for s in fresh if demand.may_keep[s]}
        resident.update(fresh)
        return fresh

    def backward(segment: int) -> None:
        for offset in chain.backward[segment]:
            reads = demand.reads[offset]
            order.extend(closure(demand, (s for s in reads if s not in resident), resident))
            order.append(barrier + offset)

    def walk(tree: Tree) -> None:
        if isinstance(tree, Save):
            wanted = chain.saved[tree.segment]
            if tree.later is not None:
                wanted |= chain.crossing[tree.segment]
            fresh = make(wanted)
            if tree.later is not None:
                walk(tree.later)
            backward(tree.segment)
            resident.difference_update(fresh)
            return
        fresh = make(chain.crossing[tree.middle - 1])
        walk(tree.later)
        resident.difference_update(fresh)
        walk(tree.earlier)

    walk(tree)
    return _pruned(demand, order)


def closure(demand: Demand, wanted: Iterable[int], resident: Set[int]) -> list[int]:
    """Return the operations to run for some storages, in the forward's order."""
    problem = demand.problem
    runs: set[int] = set()
    todo = list(wanted)
    while todo:
        storage = todo.pop()
        index = problem.producer[storage]
        if storage in resident or index in runs:
            continue
        demand.check(storage)
        runs.add(index)
        todo.extend(problem.operations[index].recompute_inputs or ())
    return sorted(runs)


def _pruned(demand: Demand, order: list[int]) -> list[int]:
    """Return the order without recomputations of which nothing is read."""
    problem = demand.problem
    need: set[int] = set()
    kept: list[int] = []
    for index in reversed(order):
        if index >= problem.barrier:
            need.update(demand.reads[index - problem.barrier])
        else:
            op = problem.operations[index]
            if need.isdisjoint(op.recompute_outputs):
                continue
            need.difference_update(op.recompute_outputs)
            need.update(op.recompute_inputs or ())
        kept.append(index)
    return kept[::-1]
