"""Optimal persistent checkpointing of chains whose links differ in time and memory.

Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova: *Optimal checkpointing for heterogeneous chains:
how to train deep neural networks with limited memory* (2019, arXiv:1911.13214), theorem 1. Each
segment of the chain runs forward in one of three ways: saving nothing (its input dies), keeping
its input, or saving all that its backward reads. *Persistent*: what is kept stays until
the backward of its segment. Within that class the dynamic program over (first segment, last
segment, memory) is exact, up to the discretisation of the memory.

Carried over to graphs by :mod:`autockpt_solvers.chain`. Its limits:

- it decides between whole segments: where the forward has few narrow points (U-Nets, DenseNets)
  segments are large, and inside one it recomputes all or nothing;
- what spans many segments is kept throughout;
- memory is counted in ``SLOTS`` units, sizes rounded up. The schedules of all memory sizes near
  the budget are simulated exactly, so that rounding costs time, never the budget;
- the bound of its class is not a bound on all schedules: none is claimed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autockpt_solvers.chain import Chain, Checkpoint, Save, Tree, chains, closure, realise
from autockpt_solvers.errors import SolverError
from autockpt_solvers.liveness import Liveness
from autockpt_solvers.methods import keep_all
from autockpt_solvers.on_demand import Demand, stage_schedule
from autockpt_solvers.problem import Problem
from autockpt_solvers.solution import Solution, measured

__all__ = ["orders", "solve"]

# Units the budget is counted in.
SLOTS = 400
# The program is solved for this much more than the budget: its count of bytes is from above.
HEADROOM = 1.15
# Orders for other methods to start from are those of up to this much more, and of so many segments.
LARGEST, FEWEST = 1.6, 6
# Stands for no schedule; twice it and all costs together stay within 64 bits.
NEVER = 1 << 60


def solve(problem: Problem, budget_bytes: int | None, *, time_limit_s: float = 60.0) -> Solution:
    """Return the cheapest persistent schedule found that fits the budget.

    Raises:
        SolverError: none fits the budget.
    """
    started = time.perf_counter()
    if budget_bytes is None:
        return keep_all.solve(problem, None)
    liveness = Liveness(Demand(problem))
    best: tuple[int, int, list[int]] | None = None
    segments = 1
    for chain in chains(liveness.demand):
        segments = len(chain.segments)
        program = _Program(_Costs(liveness, chain), budget_bytes)
        found = _cheapest(liveness, chain, program.trees(), budget_bytes)
        if found is not None and (best is None or found < best):
            best = found
        if time.perf_counter() - started > 0.5 * time_limit_s:
            break
    if best is None:
        raise SolverError(
            f"rotor: no schedule of a chain of {segments} segments fits {budget_bytes:,} bytes. "
            "Use 'auto', or raise the budget."
        )
    return measured(
        problem,
        stage_schedule(problem, best[2]),
        budget_bytes=budget_bytes,
        method="rotor",
        started=started,
    )


def orders(liveness: Liveness, budget_bytes: int, count: int) -> Iterator[list[int]]:
    """Yield backward orders of so many trees, from cheap in memory to cheap in time.

    Most break the budget; none where the problem is hardly a chain.
    """
    chain = next(chains(liveness.demand), None)
    if chain is None or len(chain.segments) < FEWEST:
        return
    trees = _Program(_Costs(liveness, chain), int(LARGEST * budget_bytes)).trees()
    for number in range(min(count, len(trees))):
        yield realise(chain, trees[number * len(trees) // min(count, len(trees))])


def _cheapest(
    liveness: Liveness, chain: Chain, trees: list[Tree], budget_bytes: int
) -> tuple[int, int, list[int]] | None:
    """Return the last of some trees, from cheap in memory to cheap in time, that fits; exactly.

    By bisection where there are many: more memory for the program means a higher peak, nearly.
    """
    found: tuple[int, int, list[int]] | None = None

    def fits(tree: Tree) -> bool:
        nonlocal found
        order = realise(chain, tree)
        peak = liveness.peak(order)
        if peak.peak_bytes > budget_bytes:
            return False
        if found is None or (peak.extra_ns, peak.peak_bytes) < found[:2]:
            found = (peak.extra_ns, peak.peak_bytes, order)
        return True

    low, high = 0, len(trees)
    while high - low > 32:
        middle = (low + high) // 2
        if fits(trees[middle]):
            low = middle
        else:
            high = middle
    for tree in trees[max(0, low - 8) : high + 8]:
        fits(tree)
    return found


# ------------------------------------------------------------------ a segment's figures


@dataclass(frozen=True)
class _Run:
    """One way to run a segment forward.

    Attributes:
        cost_ns: the time of it.
        inside_bytes: its peak, not counting what enters the segment.
        peak_bytes: its peak, counting what enters up to its last use.
    """

    cost_ns: int
    inside_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class _Costs:
    """Times and bytes of a chain's segments, and of what is there beside them."""

    liveness: Liveness
    chain: Chain

    def size(self, storages: Iterable[int]) -> int:
        """Bytes of some storages."""
        known = self.liveness.problem.storages
        return sum(known[s].size_bytes for s in storages)

    @cached_property
    def constant(self) -> int:
        """Bytes there throughout: resident, the user's outputs, what is set aside."""
        liveness = self.liveness
        held = self.size(liveness.held)
        return liveness.problem.resident_bytes + held + self.size(self.chain.aside - liveness.held)

    @cached_property
    def beside(self) -> list[int]:
        """For each segment the bytes of backward storages right before its backward."""
        before = self.liveness.backward_bytes[1]
        base = self.liveness.problem.resident_bytes + self.size(self.liveness.held)
        return [
            before[ops.start] - base if ops.start < len(before) else 0
            for ops in self.chain.backward
        ]

    @cached_property
    def backward(self) -> list[int]:
        """For each segment the peak of its backward, with what it saved and without its input."""
        during = self.liveness.backward_bytes[0]
        base = self.liveness.problem.resident_bytes + self.size(self.liveness.held)
        peaks = []
        for segment, ops in enumerate(self.chain.backward):
            peak, reading = 0, set[int]()
            for offset in reversed(ops):
                reading |= self.chain.saved[segment].intersection(
                    self.liveness.demand.reads[offset]
                )
                peak = max(peak, during[offset] - base + self.size(reading))
            peaks.append(peak)
        return peaks

    def run(self, segment: int, wanted: Set[int], *, first: bool) -> _Run:
        """Return what it takes to make some storages of a segment from what enters it.

        Args:
            segment: the segment.
            wanted: what must be there behind it.
            first: whether it is the run before the barrier, of all its operations.
        """
        chain, problem = self.chain, self.liveness.problem
        operations = problem.operations
        entering = chain.crossing[segment - 1] if segment else frozenset[int]()
        if first:
            runs = [i for i in chain.segments[segment] if not operations[i].optional]
            steps = [(operations[i].inputs, operations[i].outputs) for i in runs]
        else:
            own = {s for i in chain.segments[segment] for s in operations[i].outputs} - chain.aside
            runs = closure(chain.demand, wanted, set(range(len(problem.storages))) - own)
            steps = [
                (operations[i].recompute_inputs or (), operations[i].recompute_outputs)
                for i in runs
            ]
        last = {s: number for number, (reads, _) in enumerate(steps) for s in reads}
        there, alive = set(entering), set[int]()
        inside = peak = 0
        for number, (_, makes) in enumerate(steps):
            alive.update(set(makes) - chain.aside - self.liveness.held)
            during = self.size(alive) + operations[runs[number]].workspace_bytes
            inside, peak = max(inside, during), max(peak, during + self.size(there))
            alive = {s for s in alive if s in wanted or last.get(s, -1) > number}
            there = {s for s in there if last.get(s, -1) > number}
        return _Run(sum(operations[i].cost_ns for i in runs), inside, peak)


# ------------------------------------------------------------------ the dynamic program


class _Program:
    """The tables: by first and last segment and memory, the least extra time and its decision.

    ``again`` is for ranges that run once more, beside the gradients there are by then. ``first``
    is for those that run to the end of the chain for the first time: that costs nothing, and
    there are no gradients yet. A decision is the middle of a checkpoint, or the first segment
    itself where that is saved.
    """

    def __init__(self, costs: _Costs, budget_bytes: int) -> None:
        self.costs = costs
        self.count = count = len(costs.chain.segments)
        free = max(0, int(HEADROOM * (budget_bytes - costs.constant)) + 1)
        self.unit = max(1, -(-free // SLOTS))
        self.memory = np.arange(free // self.unit + 1, dtype=np.int64) * self.unit
        self.slots = len(self.memory)
        self.again = np.full((count, count, self.slots), NEVER, np.int64)
        self.again_choice = np.full((count, count, self.slots), -1, np.int16)
        self.first = np.full((count, self.slots), NEVER, np.int64)
        self.first_choice = np.full((count, self.slots), -1, np.int16)
        chain = costs.chain
        both = [
            saved | crossing for saved, crossing in zip(chain.saved, chain.crossing, strict=True)
        ]
        self.crossing = [self._units(storages) for storages in chain.crossing]
        self.whole = [self._units(storages) for storages in both]
        self.runs = [
            [
                [costs.run(segment, wanted[segment], first=first) for segment in range(count)]
                for wanted in (chain.crossing, both, chain.saved)
            ]
            for first in (False, True)
        ]
        self._fill()

    def _units(self, storages: Iterable[int]) -> int:
        return -(-self.costs.size(storages) // self.unit)

    def _fill(self) -> None:
        count, last = self.count, self.count - 1
        # ``again`` and ``first`` less what the checkpoint of their own input takes.
        behind, behind_first = np.full_like(self.again, NEVER), np.full_like(self.first, NEVER)
        for start in reversed(range(count)):
            cross, whole, leaf = self.runs[False]
            forward_ns = np.cumsum([run.cost_ns for run in cross[start:]], dtype=np.int64)
            for end in range(start, count):
                cell = self.again[start, end], self.again_choice[start, end]
                beside = self.costs.beside[end]
                if start == end:
                    self._save(cell, start, leaf[start], beside, np.zeros(self.slots, np.int64))
                else:
                    rest = _less(self.again[start + 1, end], self.whole[start])
                    self._save(cell, start, whole[start], beside, rest)
                    total = behind[start + 1 : end + 1, end] + self.again[start, start:end]
                    total += forward_ns[: end - start, None]
                    self._checkpoint(cell, start, cross[start:end], beside, total)
            cross, whole, leaf = self.runs[True]
            cell = self.first[start], self.first_choice[start]
            if start == last:
                free = _Run(0, leaf[start].inside_bytes, 0)
                self._save(cell, start, free, 0, np.zeros(self.slots, np.int64))
            else:
                free = _Run(0, whole[start].inside_bytes, 0)
                self._save(cell, start, free, 0, _less(self.first[start + 1], self.whole[start]))
                total = behind_first[start + 1 :] + self.again[start, start:last]
                self._checkpoint(cell, start, cross[start:last], 0, total)
            if start:
                taken = self.crossing[start - 1]
                behind[start, start:] = _less(self.again[start, start:], taken)
                behind_first[start] = _less(self.first[start], taken)

    def _save(
        self,
        cell: tuple[NDArray[np.int64], NDArray[np.int16]],
        start: int,
        run: _Run,
        beside: int,
        rest: NDArray[np.int64],
    ) -> None:
        """Enter the decision to save the first segment; ``rest`` is what follows it costs."""
        needs = max(beside + run.inside_bytes, self.costs.backward[start])
        allowed = (self.memory >= needs) & (rest < NEVER)
        cell[0][allowed] = rest[allowed] + run.cost_ns
        cell[1][allowed] = start

    def _checkpoint(
        self,
        cell: tuple[NDArray[np.int64], NDArray[np.int16]],
        start: int,
        runs: list[_Run],
        beside: int,
        total: NDArray[np.int64],
    ) -> None:
        """Enter the best middle where it is better; ``total`` has a row per middle."""
        peaks = [runs[0].inside_bytes, *(run.peak_bytes for run in runs[1:])]
        needs = np.maximum.accumulate(np.array(peaks, np.int64)) + beside
        total = np.where(self.memory >= needs[:, None], total, NEVER)
        best = total.min(axis=0)
        better = best < cell[0]
        cell[0][better] = best[better]
        cell[1][better] = (total.argmin(axis=0) + start + 1)[better]

    # -------------------------------------------------------------- reading the tables

    def trees(self) -> list[Tree]:
        """Return the distinct decisions for the whole chain, from little memory to much."""
        found: list[Tree] = []
        for slot in range(self.slots):
            if self.first[0, slot] < NEVER:
                tree = self._first_tree(0, slot)
                if not found or tree != found[-1]:
                    found.append(tree)
        return found

    def _first_tree(self, start: int, slot: int) -> Tree:
        choice = int(self.first_choice[start, slot])
        if start == self.count - 1:
            return Save(start)
        if choice == start:
            return Save(start, self._first_tree(start + 1, slot - self.whole[start]))
        later = self._first_tree(choice, slot - self.crossing[choice - 1])
        return Checkpoint(choice, later, self._tree(start, choice - 1, slot))

    def _tree(self, start: int, end: int, slot: int) -> Tree:
        choice = int(self.again_choice[start, end, slot])
        if start == end:
            return Save(start)
        if choice == start:
            return Save(start, self._tree(start + 1, end, slot - self.whole[start]))
        later = self._tree(choice, end, slot - self.crossing[choice - 1])
        return Checkpoint(choice, later, self._tree(start, choice - 1, slot))


def _less(table: NDArray[np.int64], units: int) -> NDArray[np.int64]:
    """Return a table as it is with so much less memory, along its last axis."""
    less: NDArray[np.int64] = np.full_like(table, NEVER)
    left = max(0, table.shape[-1] - units)
    less[..., table.shape[-1] - left :] = table[..., :left]
    return less
