"""The exact stage-indexed integer program, for problems of up to a few hundred operations.

A greedy schedule starts it, the relaxation with closure cuts bounds it, HiGHS solves it, and where
it does not close in time a window search goes on from its best answer. The bound it proves covers
all schedules that run the forward once (:mod:`autockpt_solvers.methods.ilp.program`); the
schedules it looks for recompute each operation at most once between two backward operations, in
the forward's order, and on small problems more often and in other orders where that decides
(:mod:`autockpt_solvers.methods.ilp.split`).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from autockpt_solvers.errors import SolverError
from autockpt_solvers.highs import Floats, MipProcess
from autockpt_solvers.liveness import Liveness
from autockpt_solvers.methods import greedy, keep_all
from autockpt_solvers.methods.ilp.instage import add_inner_rows, add_row, depth_first, restricted
from autockpt_solvers.methods.ilp.program import StageProgram
from autockpt_solvers.methods.ilp.split import split
from autockpt_solvers.methods.ilp.stages import Stages
from autockpt_solvers.methods.ilp.window_search import improve
from autockpt_solvers.on_demand import Demand, needed_storages, stage_schedule
from autockpt_solvers.problem import Problem
from autockpt_solvers.solution import CLOSED_GAP, Solution, broken_off, measured, whole_ns

__all__ = ["program_size", "solve"]

# Columns beyond which operations inside stages are bounded by rows instead of promoted.
LARGE = 4000
# Thresholds at which the relaxation's storages count as kept.
ROUNDED = (0.999, 0.8, 0.5, 0.2)
# How often the stages are split in which the order of the runs decides.
SPLITS = 2
# Part of the time left that one of them takes at most.
SPLIT_SHARE = 0.15
# Columns beyond which a window search goes before the whole program.
HARD = 20_000
# Seconds that stating a program takes per column.
COLUMN_S = 5e-5


def solve(
    problem: Problem,
    budget_bytes: int | None,
    *,
    time_limit_s: float = 60.0,
    start: Sequence[int] | None = None,
) -> Solution:
    """Return the cheapest schedule found, with its proved bound.

    Args:
        problem: the problem.
        budget_bytes: bound on the peak; None for no limit.
        time_limit_s: time limit, in seconds.
        start: backward order of a schedule to start from; by default greedy's.

    Raises:
        SolverError: no schedule was found within the budget and the time.
    """
    started = time.perf_counter()
    if budget_bytes is None:
        return keep_all.solve(problem, None)
    search = _Search(problem, budget_bytes, started, time_limit_s)
    interrupted = False
    try:
        search.run(start)
        if search.small and not search.closed:
            _split_stages(search)
    except KeyboardInterrupt:
        if search.order is None:
            raise
        interrupted = True
    if search.order is None:
        raise SolverError(
            f"ilp finds no schedule within {budget_bytes:,} bytes"
            + (": it proves that there is none." if search.infeasible else " in its time limit.")
        )
    found = measured(
        problem,
        stage_schedule(problem, search.order),
        budget_bytes=budget_bytes,
        method="ilp",
        started=started,
        lower_bound_ns=search.lower_bound_ns(),
    )
    return broken_off(found) if interrupted else found


def _split_stages(search: _Search) -> None:
    """Go on in programs whose stages are split where their inner rows decided."""
    cuts: Counter[int] = Counter()
    tried = search
    for _ in range(SPLITS):
        bitten = {end for _, end in tried.rows}
        if not bitten or search.left_s <= 0 or search.closed:
            return
        if tried is search:
            cuts.update(bitten)
        else:
            cuts.update(dict.fromkeys(cuts, 1))
        wider = split(search.problem, cuts.elements())
        limit_s = SPLIT_SHARE * search.left_s
        tried = _Search(wider.problem, search.budget_bytes, time.perf_counter(), limit_s)
        tried.promoted = wider.idle
        tried.bound_ns = search.bound_ns
        tried.run(None if search.order is None else wider.there(search.order))
        if tried.order is not None:
            search.accept(wider.back(tried.order))


def program_size(problem: Problem) -> int:
    """Return the number of binaries that the program of a problem has."""
    return _size(Stages(Liveness(Demand(problem))))


def _size(stages: Stages) -> int:
    return sum(len(runs) for runs in stages.runs) + sum(last + 1 for last in stages.last_stage)


@dataclass
class _Search:
    """One solve: the best order so far and what is proved."""

    problem: Problem
    budget_bytes: int
    started: float
    time_limit_s: float

    def __post_init__(self) -> None:
        self.deadline = self.started + self.time_limit_s
        self.liveness = Liveness(Demand(self.problem))
        self.order: list[int] | None = None
        self.extra_ns = 0
        self.peak_bytes = 0
        self.bound_ns = 0.0
        self.infeasible = False
        # The program's own budget: a few bytes less where HiGHS's tolerances let too much pass.
        self.aim_bytes = self.budget_bytes
        self.rows: set[tuple[int, int]] = set()
        self.restricted = False
        self.promoted: frozenset[int] = frozenset()
        self.columns = 0

    # ---------------------------------------------------------------- what is known

    def accept(self, order: Sequence[int]) -> bool:
        """Take an order over if it fits and costs less, or the same at a lower peak."""
        peak = self.liveness.peak(order)
        if peak.peak_bytes > self.budget_bytes:
            return False
        if self.order is None or (peak.extra_ns, peak.peak_bytes) < (
            self.extra_ns,
            self.peak_bytes,
        ):
            self.order = list(order)
            self.extra_ns, self.peak_bytes = peak.extra_ns, peak.peak_bytes
        return True

    def prove(self, bound: float, program: StageProgram) -> None:
        """Note a bound, unless the program leaves out schedules that the bound must cover."""
        if self.covers_all and math.isfinite(bound):
            self.bound_ns = max(self.bound_ns, bound * program.cost_unit)

    def lower_bound_ns(self) -> int:
        """Return the proved bound in whole nanoseconds, minus the solver's tolerance."""
        bound = whole_ns(self.bound_ns)
        # Within the tolerance of what was found it is what was found.
        if self.extra_ns < bound <= self.extra_ns * (1 + 1e-6) + 1:
            return self.extra_ns
        return bound

    @property
    def closed(self) -> bool:
        """Whether what was found is as good as what is proved."""
        gap = self.extra_ns - self.lower_bound_ns()
        return self.order is not None and gap <= CLOSED_GAP * self.problem.baseline_cost_ns / 2

    @property
    def small(self) -> bool:
        """Whether the last program was small enough to be solved several times more."""
        return 0 < self.columns <= LARGE

    @property
    def covers_all(self) -> bool:
        """Whether the program leaves out no schedule that the bound must cover."""
        return not self.rows and not self.restricted and self.aim_bytes == self.budget_bytes

    @property
    def left_s(self) -> float:
        """Seconds left."""
        return self.deadline - time.perf_counter()

    # ---------------------------------------------------------------- the search

    def run(self, start: Sequence[int] | None = None) -> None:
        """Search until closed or out of time."""
        if start is None:
            with contextlib.suppress(SolverError):
                found = greedy.solve(
                    self.problem, self.budget_bytes, time_limit_s=0.2 * self.time_limit_s
                )
                start = found.schedule.backward_computes
        if start is not None:
            self.accept(start)
        program: StageProgram | None = None
        while self.left_s > 0 and not self.closed:
            if program is None:
                program = self._build()
                if program is None:
                    return
                if len(program.program.variables) > HARD:
                    # A good start prunes more of the whole program than it costs.
                    self._improve(program, time.perf_counter() + 0.15 * self.left_s)
                continue
            with MipProcess(program.program) as process:
                result = process.solve(
                    time_limit_s=self.left_s * (0.7 if self.order is not None else 0.9),
                    relative_gap=self._relative_gap(),
                    start=None if self.order is None else program.point(self.order),
                )
            self.prove(result.bound, program)
            if result.status == "infeasible":
                self.infeasible = self.covers_all
                return
            if result.values is None:
                return
            order = program.order(list(result.values))
            if self.accept(order) or self.accept(depth_first(program.stages, order)):
                if result.status == "optimal":
                    return
                break
            self._repair(order)
            program = self._refine(program, order)
        if program is not None:
            self._improve(program, self.deadline)

    def _improve(self, program: StageProgram, deadline: float) -> None:
        """Search windows around the best order until a deadline."""
        point = None if self.order is None or self.closed else program.point(self.order)
        if point is None:
            return
        goal = self.bound_ns + CLOSED_GAP * self.problem.baseline_cost_ns / 2
        goal /= program.cost_unit
        improve(restricted(program), point, self.accept, deadline=deadline, goal=goal)

    def _round(self, program: StageProgram, values: Floats) -> None:
        """Take over what the relaxation's kept storages make, rounded at a few thresholds.

        Where storages are few and large this is the best there is, long before the program ends.
        """
        held = needed_storages(self.liveness.demand)
        tried: set[frozenset[int]] = set()
        deadline = time.perf_counter() + 0.05 * self.left_s
        for threshold in ROUNDED:
            kept = frozenset(
                s
                for g, group in enumerate(program.stages.groups)
                if (g, 0) in program.resident and values[program.resident[g, 0]] > threshold
                for s in group.storages
            )
            if kept in tried or time.perf_counter() > deadline:
                continue
            tried.add(kept)
            choice = greedy.Choice(self.liveness, kept, held, self.budget_bytes)
            greedy.descend(choice, deadline=deadline)
            if choice.peak.peak_bytes <= self.budget_bytes:
                greedy.put_back(choice, deadline=deadline)
            self.accept(choice.order)

    def _repair(self, order: Sequence[int]) -> None:
        """Take over what becomes of an order that breaks the budget when its runs are put off.

        The program may run an operation earlier than needed; where that breaks the budget only
        between stages, the same storages kept and recomputed on demand often fit.
        """
        kept = self.liveness.peak(order).kept
        held = needed_storages(self.liveness.demand)
        choice = greedy.Choice(self.liveness, kept, held, self.budget_bytes)
        deadline = time.perf_counter() + 0.1 * self.left_s
        greedy.descend(choice, deadline=deadline)
        if choice.peak.peak_bytes <= self.budget_bytes:
            greedy.put_back(choice, deadline=deadline)
        self.accept(choice.order)

    def _relative_gap(self) -> float:
        """Return the relative gap at which the search may stop: half of what counts as closed."""
        worth = CLOSED_GAP / 2 * self.problem.baseline_cost_ns
        return min(1e-2, max(1e-7, worth / self.extra_ns)) if self.extra_ns else 1e-6

    def _build(self) -> StageProgram | None:
        """Return the program with closure cuts, operations that its relaxation overlooks promoted.

        None where nothing is left to search, or no time to state it.
        """
        deadline = time.perf_counter() + 0.4 * self.left_s
        for _ in range(3):
            stages = Stages(self.liveness, self.promoted)
            if _size(stages) * COLUMN_S > self.left_s:
                return None
            program = StageProgram(stages, self.aim_bytes)
            self.columns = len(program.program.variables)
            starts = {end: k for k, end in enumerate(program.stages.ends)}
            for index, end in sorted(self.rows):
                if end in starts and (index, starts[end]) in program.runs:
                    add_row(program, index, starts[end])
            result = program.relax(deadline=deadline)
            self.prove(result.bound, program)
            if result.status == "infeasible":
                self.infeasible = self.covers_all
                return None
            if self.closed:
                return None
            if result.values is None:
                break
            self._round(program, result.values)
            if self.closed:
                return None
            more = self._overlooked(program, result.values)
            if not more:
                break
            self.promoted |= more
        return program

    def _overlooked(self, program: StageProgram, values: Floats) -> frozenset[int]:
        """Return backward operations inside stages at which a relaxation breaks the budget."""
        stages = program.stages
        during, _ = self.liveness.backward_bytes
        more: set[int] = set()
        first = 0
        for k, end in enumerate(stages.ends):
            inside = range(first, end)
            first = end + 1
            if not inside:
                continue
            resident = sum(
                group.size_bytes * values[program.resident[g, k]]
                for g, group in enumerate(stages.groups)
                if (g, k) in program.resident
            )
            worst = max(inside, key=lambda offset: during[offset])
            if resident + during[worst] > self.budget_bytes * (1 + 1e-6):
                more.add(worst)
        return frozenset(more) - self.promoted

    def _refine(self, program: StageProgram, order: list[int]) -> StageProgram | None:
        """Return the program that no longer allows an order that breaks the budget.

        None: it has to be built anew.
        """
        barrier = self.problem.barrier
        levels = self.liveness.levels(order)
        broken = [p for p, level in enumerate(levels) if level > self.budget_bytes]
        ends = program.stages.ends
        more: set[int] = set()
        rows: set[tuple[int, int]] = set()
        offset = len(self.problem.operations) - barrier
        stage_of = {}
        for position in range(len(order) - 1, -1, -1):
            if order[position] >= barrier:
                offset = order[position] - barrier
            stage_of[position] = offset
        for position in broken:
            end = stage_of[position]
            if order[position] < barrier:
                rows.add((order[position], end))
                # Recomputations may also run earlier in the stage.
                before = max((e for e in ends if e < end), default=-1)
                more.update(range(before + 1, end))
            elif end not in ends:
                more.add(end)
        more -= self.promoted | set(ends)
        rows -= self.rows
        if not more and not rows:
            # Only the solver's tolerances are left: aim lower by what it let pass.
            over = self.liveness.peak(order).peak_bytes - self.budget_bytes
            # Beside them only what the program takes to be written over.
            saved_bytes = max((saved for _, saved in self.liveness.in_place.values()), default=0)
            if over > 1e-3 * self.budget_bytes + saved_bytes:
                raise SolverError(
                    f"ilp overlooks {over:,} bytes in its own answer. This is a bug; please "
                    "report it."
                )
            self.aim_bytes -= over
            return None
        self.rows |= rows
        if more and len(program.program.variables) > LARGE:
            # Building and bounding anew takes too long; the bound proved so far stays.
            add_inner_rows(program)
            self.restricted = True
        elif more:
            self.promoted |= more
            return None
        starts = {end: k for k, end in enumerate(ends)}
        for index, end in sorted(rows):
            add_row(program, index, starts[end])
        return program
