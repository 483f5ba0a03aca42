"""Placement: offsets in one arena for blocks of memory whose lifetimes are known.

Dynamic storage allocation: blocks that live at the same time must not overlap, and the arena is to
be as small as possible. NP-hard; no arena is smaller than the bytes alive at once. Blocks are put
one by one at the lowest offset, or into the tightest gap, that is free through their life; the
order decides. Several orders are tried (by size: Pisarchyk & Lee 2020, arXiv:2001.03288); then the
blocks that reach highest are moved forward in the order, again and again. A few blocks are placed
exactly, by an integer program.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autockpt_solvers.highs import MipProcess, Program
from autockpt_solvers.problem import Problem
from autockpt_solvers.schedule import Compute, Free, Schedule

__all__ = ["Block", "Placement", "blocks_of", "check", "place"]

# Blocks up to which the integer program is tried where the bound is not reached.
EXACT = 14


@dataclass(frozen=True, slots=True)
class Block:
    """Memory that is needed from one step of a schedule to another.

    Attributes:
        size_bytes: its size.
        start: the step that allocates it.
        end: the step behind the last that needs it.
        storages: the storages that lie in it, one after the other: each is written over the one
            before.
    """

    size_bytes: int
    start: int
    end: int
    storages: tuple[int, ...] = ()


@dataclass(frozen=True)
class Placement:
    """Where blocks lie.

    Attributes:
        offsets: for each block its first byte.
        arena_bytes: the size of the arena.
        live_bytes: the largest number of bytes alive at once: no arena is smaller.
        method: what placed them.
    """

    offsets: tuple[int, ...]
    arena_bytes: int
    live_bytes: int
    method: str

    @property
    def fragmentation(self) -> float:
        """The arena over the bytes alive at once: 1.0 where nothing is lost."""
        return self.arena_bytes / self.live_bytes if self.live_bytes else 1.0


def blocks_of(
    problem: Problem,
    schedule: Schedule,
    wanted: Callable[[int], bool] = lambda operation: True,
    held: Collection[int] = (),
) -> tuple[Block, ...]:
    """Return the blocks that a schedule allocates and frees, in the order of their making.

    Left out is what outlives the step or is the user's: what is live at the barrier or at the
    end, and what is made outside the graph.

    Args:
        problem: the problem.
        schedule: a valid schedule of it.
        wanted: whether the outputs of an operation are to lie in the arena.
        held: storages that somebody may hold although the schedule frees them.
    """
    visible = problem.live_at_barrier | problem.live_at_end | set(held)
    alive: dict[int, tuple[int, tuple[int, ...]]] = {}  # storage -> made at, storages before it
    blocks: list[Block] = []
    done: set[int] = set()

    def end(storage: int, position: int) -> None:
        if storage in alive:
            start, chain = alive.pop(storage)
            size_bytes = problem.storages[storage].size_bytes
            if size_bytes:
                blocks.append(Block(size_bytes, start, position, (*chain, storage)))

    for position, step in enumerate(schedule.steps):
        if isinstance(step, Free):
            end(step.storage, position)
        elif isinstance(step, Compute):
            op = problem.operations[step.operation]
            outputs = op.recompute_outputs if step.operation in done else op.outputs
            done.add(step.operation)
            if step.over is not None:
                (output,) = outputs
                if step.over in alive and output not in visible:
                    start, chain = alive.pop(step.over)
                    alive[output] = (start, (*chain, step.over))
                else:  # the user gets what is written there, or it never was in the arena
                    alive.pop(step.over, None)
            elif not op.outside and wanted(step.operation):
                alive.update((s, (position, ())) for s in outputs if s not in visible)
    for storage in list(alive):
        end(storage, len(schedule.steps))
    return tuple(sorted(blocks, key=lambda block: (block.start, block.storages)))


def place(
    blocks: Sequence[Block], *, align_bytes: int = 64, time_limit_s: float = 5.0
) -> Placement:
    """Return a placement of the blocks, the smallest that was found in time.

    Args:
        blocks: what to place.
        align_bytes: every offset is a multiple of it, and sizes are rounded up to one.
        time_limit_s: time to search, in seconds; one order is tried whatever it says.

    >>> blocks = [Block(64, 0, 2), Block(128, 1, 3), Block(64, 2, 4)]
    >>> found = place(blocks)
    >>> found.offsets, found.arena_bytes, found.live_bytes
    ((128, 0, 128), 192, 192)
    """
    deadline = time.perf_counter() + time_limit_s
    space = _Space(blocks, align_bytes)
    if not blocks:
        return Placement((), 0, 0, "nothing")
    best: tuple[int, NDArray[np.int64], list[int], str] | None = None
    for name, order in space.orders():
        for fit in (False, True):
            if best is not None and (best[0] == space.live_bytes or time.perf_counter() > deadline):
                break
            offsets = space.filled(order, best_fit=fit)
            top = int((offsets + space.sizes).max())
            if best is None or top < best[0]:
                best = (top, offsets, order, f"{name}, {'best' if fit else 'first'} fit")
    assert best is not None
    top, offsets, order, method = best
    while top > space.live_bytes and time.perf_counter() < deadline:
        order = space.raised(order, offsets)
        other = space.filled(order, best_fit=False)
        height = int((other + space.sizes).max())
        if height >= top:
            if space.tried_often():
                break
        else:
            space.patience = 0
        offsets = other
        if height < top:
            top, best = height, (height, other, order, "raised")
    top, offsets, _, method = best
    if top > space.live_bytes and len(blocks) <= EXACT:
        exact = space.exact(top, time_limit_s=max(1.0, deadline - time.perf_counter()))
        if exact is not None:
            offsets, method = exact, "integer program"
            top = int((offsets + space.sizes).max())
    result = Placement(tuple(int(o) for o in offsets), top, space.live_bytes, method)
    check(blocks, result)
    return result


def check(blocks: Sequence[Block], placement: Placement) -> None:
    """Raise where two blocks that live at once share memory, or one leaves the arena.

    Raises:
        ValueError: it names two blocks.
    """
    starts, ends = (np.array([getattr(b, n) for b in blocks], np.int64) for n in ("start", "end"))
    low = np.array(placement.offsets, np.int64)
    high = low + np.array([b.size_bytes for b in blocks], np.int64)
    for index in range(len(blocks)):
        rest = slice(index + 1, None)
        clash = (starts[rest] < ends[index]) & (ends[rest] > starts[index])
        clash &= (low[rest] < high[index]) & (high[rest] > low[index])
        if clash.any():
            other = index + 1 + int(clash.argmax())
            raise ValueError(f"{blocks[index]} and {blocks[other]} share memory")
    if len(blocks) and (low.min() < 0 or high.max() > placement.arena_bytes):
        raise ValueError("a block lies outside the arena")


class _Space:
    """Blocks as arrays, and ways to fill an arena with them."""

    def __init__(self, blocks: Sequence[Block], align_bytes: int) -> None:
        self.align_bytes = align_bytes
        unit = align_bytes
        self.sizes = np.array([-(-b.size_bytes // unit) * unit for b in blocks], np.int64)
        self.starts = np.array([b.start for b in blocks], np.int64)
        self.ends = np.array([b.end for b in blocks], np.int64)
        change = np.zeros(int(self.ends.max(initial=0)) + 1, np.int64)
        np.add.at(change, self.starts, self.sizes)
        np.subtract.at(change, self.ends, self.sizes)
        self.live_bytes = int(np.cumsum(change).max(initial=0))
        self.patience = 0

    def orders(self) -> list[tuple[str, list[int]]]:
        """Return orders in which to place the blocks, the one that is best most often first."""
        life = self.ends - self.starts
        keys = {
            "by size": (-self.sizes, -life),
            "by area": (-self.sizes * life, -self.sizes),
            "by lifetime": (-life, -self.sizes),
            "by making": (self.starts, -self.sizes),
        }
        return [
            (name, [int(i) for i in np.lexsort((second, first))])
            for name, (first, second) in keys.items()
        ]

    def filled(self, order: Sequence[int], *, best_fit: bool) -> NDArray[np.int64]:
        """Return the offsets from placing the blocks in an order."""
        offsets = np.full(len(order), -1, np.int64)
        placed = np.zeros(len(order), np.bool_)
        for index in order:
            alive = placed & (self.starts < self.ends[index]) & (self.ends > self.starts[index])
            near = np.flatnonzero(alive)
            low = offsets[near]
            rising = np.argsort(low, kind="stable")
            low = low[rising]
            high = np.maximum.accumulate(low + self.sizes[near][rising])
            bottoms = np.concatenate(([0], high))
            room = np.concatenate((low, [np.iinfo(np.int64).max])) - bottoms
            fits = np.flatnonzero(room >= self.sizes[index])
            gap = fits[np.argmin(room[fits])] if best_fit else fits[0]
            offsets[index] = bottoms[gap]
            placed[index] = True
        return offsets

    def raised(self, order: list[int], offsets: NDArray[np.int64]) -> list[int]:
        """Return the order with the blocks that reach the top moved halfway to the front."""
        top = offsets + self.sizes
        highest = {int(i) for i in np.flatnonzero(top == top.max())}
        result = [i for i in order if i not in highest]
        for block in highest:
            place = order.index(block) // 2
            result.insert(place, block)
        return result

    def tried_often(self) -> bool:
        """Count an attempt that brought nothing; return whether they are enough."""
        self.patience += 1
        return self.patience > 200

    def exact(self, top: int, *, time_limit_s: float) -> NDArray[np.int64] | None:
        """Return offsets with an arena below ``top``, by an integer program; None without one."""
        program = Program("placement")
        unit = float(self.align_bytes)
        most = (top - self.align_bytes) / unit
        sizes = self.sizes / unit
        height = program.variable("height", 1.0, upper=most, integer=False)
        at = [program.variable(f"at{i}", upper=most, integer=False) for i in range(len(sizes))]
        program.row("live", [(height, 1)], lower=self.live_bytes / unit)
        for i in range(len(sizes)):
            program.row(f"top{i}", [(height, 1), (at[i], -1)], lower=float(sizes[i]))
            for j in range(i):
                if self.starts[i] < self.ends[j] and self.ends[i] > self.starts[j]:
                    below = program.variable(f"below{j},{i}")
                    # below = 1: j lies below i.
                    program.row(
                        f"up{j},{i}",
                        [(at[i], 1), (at[j], -1), (below, -most)],
                        lower=float(sizes[j]) - most,
                    )
                    program.row(
                        f"down{j},{i}",
                        [(at[j], 1), (at[i], -1), (below, most)],
                        lower=float(sizes[i]),
                    )
        with MipProcess(program) as process:
            result = process.solve(time_limit_s=time_limit_s, relative_gap=0.0)
        if result.values is None:
            return None
        # The solver's numbers are nearly right; the order of the blocks in them is what counts.
        near = [float(result.values[column]) for column in at]
        order = sorted(range(len(sizes)), key=near.__getitem__)
        offsets = self.filled_above(order)
        return offsets if int((offsets + self.sizes).max()) < top else None

    def filled_above(self, order: Sequence[int]) -> NDArray[np.int64]:
        """Return the offsets with each block right above those before it that live with it."""
        offsets = np.zeros(len(order), np.int64)
        for position, index in enumerate(order):
            before = np.array(order[:position], np.int64)
            alive = (self.starts[before] < self.ends[index]) & (
                self.ends[before] > self.starts[index]
            )
            under = before[alive]
            offsets[index] = (offsets[under] + self.sizes[under]).max(initial=0)
        return offsets
