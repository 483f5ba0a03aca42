"""Any size: a linear program over snapshots, rounded and improved by local search.

The relaxation (:mod:`.program`) bounds every schedule and says what to hold. Its point is rounded
at a few thresholds (:mod:`.rounding`), beside walks that evict; each start is made to fit and
improved by exchanges on exact peaks, the best one further by kicks (:mod:`.local_search`). Where
much is open, blocks are joined and cuts added (:mod:`.paths`), which makes for better bounds and
better starts; spans of stages with binaries prove more (:mod:`.spans`), and schedules for chains
with more memory, made to fit, are further starts. Finds several recomputations of one tensor where
the budget is near the minimum. The search ends where the bound is met, or when kicks gain nothing
for long. Near the minimum of convolutional graphs the bound stays far below what is found.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import numpy as np

from autockpt_solvers.errors import SolverError
from autockpt_solvers.highs import Floats, MipProcess, Relaxation
from autockpt_solvers.incumbent import Incumbent
from autockpt_solvers.liveness import Liveness
from autockpt_solvers.methods import keep_all, rotor
from autockpt_solvers.methods.eviction import PATIENCE, Eviction
from autockpt_solvers.methods.ilp.stages import Stages
from autockpt_solvers.methods.snapshot.blocks import (
    JOINED,
    Layout,
    finest,
    joined,
    layouts,
    own_bytes,
    refined,
    thinned,
    widened,
)
from autockpt_solvers.methods.snapshot.following import walks
from autockpt_solvers.methods.snapshot.local_search import fit, improve, wander
from autockpt_solvers.methods.snapshot.paths import PathCuts, carried
from autockpt_solvers.methods.snapshot.program import SnapshotProgram
from autockpt_solvers.methods.snapshot.residency import Facts, Residency
from autockpt_solvers.methods.snapshot.rounding import rounded
from autockpt_solvers.methods.snapshot.spans import span_bound
from autockpt_solvers.on_demand import Demand, needed_storages, on_demand
from autockpt_solvers.problem import Problem
from autockpt_solvers.solution import Solution, whole_ns

__all__ = ["Snapshots", "solve"]

THRESHOLDS = (0.5, 0.2, 0.8, 0.999)
# Columns beyond which no layout but the first is tried.
COLUMNS = 50_000
# Seconds that stating and solving takes per column, on slow machines.
COLUMN_S = 1e-4
# Gaps, as parts of the step: three at which the search ends, on small graphs, on others and where
# it is to be brief, and one not worth long.
ENOUGH = 2e-4
CLOSE = 5e-4
BRIEF = 1e-3
GOOD = 3e-3
# A gap at which walks follow the relaxation's points, and how many of these.
OPEN, FOLLOWED = 6e-2, 2
# Schedules for chains to start from there, until which part of the time, and how many in a row
# that gain nothing, or which multiple of the budget for a peak, say that this is hardly a chain.
CHAINS, CHAINED, HARDLY, FAR = 8, 0.3, 2, 1.3
# A gap at which spans of stages are solved with binaries.
WIDE_OPEN = 1e-2
# Until which part of the time blocks are joined and cut, their points begun with, and spans
# solved: where little is open, and where much is, since walks gain less there than the bound does.
TIGHT, BEGUN, SPANS = (0.6, 0.68), (0.65, 0.73), (0.7, 0.8)
# Columns up to which a program is solved with binaries, and seconds for one of them: where much
# is open, where little is, and where it hardly matters.
BINARIES, INTEGER_S, BRIEF_S, LAST_S = 6000, 8.0, 3.0, 1.0
# Where it is, seconds for kicks on graphs of at most so many forward operations, and on others.
LONG_S, SMALL, SHORT_S = 4.0, 400, 2.0
# Columns of programs whose blocks are joined, seconds for each, and snapshots they keep at least.
LARGE, LARGE_S, FEWEST = 45_000, 1.2e-4, 10
# Part of the time for joining, and how often snapshots are added to one choice.
JOINING, REFINED = 0.35, 4
# Work up to which a relaxation takes a second or two, and segments of wider blocks.
WORK = 2.5e8
WIDER = (32, 24, 16, 12)
# Part of a gap by which two of them differ where they say different things.
ALIKE = 0.1
# Part of the time left for starts of other methods.
MORE = 0.25
# Rounds of cuts that close less than this part of the gap, after which a program gets no more.
GAIN, IDLE = 0.01, 2
# Seconds of the first turn of kicks, most turns, and states that take turns.
TURN_S, TURNS, WIDE = 0.7, 20, 3


def solve(problem: Problem, budget_bytes: int | None, *, time_limit_s: float = 60.0) -> Solution:
    """Return the cheapest schedule found, with its proved bound.

    Raises:
        SolverError: no schedule was found within the budget and the time.
    """
    started = time.perf_counter()
    if budget_bytes is None:
        return keep_all.solve(problem, None)
    search = Snapshots(Liveness(Demand(problem)))
    best = Incumbent(search.liveness, budget_bytes)
    try:
        search.run(best, deadline=started + time_limit_s)
    except KeyboardInterrupt:
        if best.order is None:
            raise
        best.interrupted = True
    if best.order is None:
        raise SolverError(
            f"snapshot finds no schedule within {budget_bytes:,} bytes"
            + (": it proves that there is none." if best.infeasible else " in its time limit.")
        )
    return best.solution(started)


class Snapshots:
    """The search through one problem; what does not depend on the budget is made once.

    Args:
        liveness: the facts of the problem.
    """

    def __init__(self, liveness: Liveness) -> None:
        self.liveness = liveness
        self.problem = liveness.problem
        self.stages = Stages(liveness)
        self.facts = Facts(liveness, self.stages)
        self._layouts = layouts(liveness, self.stages.groups)
        self._choices = len(self._layouts)  # others join blocks of these
        self._programs: dict[int, tuple[SnapshotProgram, Relaxation]] = {}
        self._cuts: dict[int, PathCuts] = {}
        self._points: dict[int, Floats] = {}
        self._duals: dict[int, Floats] = {}  # where there is a point
        self._proved: dict[int, float] = {}
        self._refined: set[int] = set()
        self._enough_ns = 0.0

    def run(
        self,
        best: Incumbent,
        *,
        deadline: float,
        starts: Sequence[Sequence[int]] = (),
        more: Callable[[float], Sequence[Sequence[int]]] = lambda limit_s: (),
        brief: bool = False,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Improve an incumbent and its bound until closed, out of ideas, or out of time.

        Args:
            best: changed in place; it holds the best order at any moment.
            deadline: ``time.perf_counter()`` at which to stop.
            starts: orders to start from besides those found here.
            more: called with a limit in seconds for further ones, where much is open.
            brief: improve only the best start, without kicks, and be content with a larger gap.
            say: called with a line of text now and then.
        """
        if not self.problem.backward:
            best.accept([], "snapshot")  # the one order of a step that is all forward
            return
        started = time.perf_counter()
        enough = BRIEF if brief else ENOUGH if self.problem.barrier <= SMALL else CLOSE
        self._enough_ns = enough * self.problem.baseline_cost_ns

        def by(share: float) -> float:
            return started + share * (deadline - started)

        states: list[Residency] = []
        for order in starts:
            if brief:  # to be improved only where it is needed
                best.accept(order, "snapshot")
            else:
                self._begin(order, best, states, deadline)
        self._first(best, states, deadline, starts if brief else None)
        if not states and not best.infeasible:
            for order in more(MORE * (deadline - time.perf_counter())):
                self._begin(order, best, states, deadline)
        if not states or best.gap_ns <= self._enough_ns:
            return
        say(f"snapshots: {self._figures(best)}; local search")
        self._improve(_distinct(states)[:1], best, by(0.2))
        far = OPEN * self.problem.baseline_cost_ns
        if not brief and best.gap_ns <= far:
            self._improve(_distinct(states)[1:WIDE], best, by(0.2))
        if brief or best.gap_ns <= self._enough_ns:
            return
        if best.gap_ns > far:
            self._chained(states, best, by(CHAINED))
        say(f"{self._figures(best)}; joined blocks")
        fresh: list[Residency] = []
        until = by(TIGHT[best.gap_ns > far])
        for order in chain.from_iterable(self.tighten(best, deadline=until)):
            self._begin(order, best, fresh, by(BEGUN[best.gap_ns > far]))
        if best.gap_ns <= far:
            self._improve(_distinct(fresh)[:WIDE], best, by(0.7), patience=1)
        if GOOD * self.problem.baseline_cost_ns < best.gap_ns <= far:
            for order in more(MORE * (deadline - time.perf_counter())):
                self._begin(order, best, states, deadline)
        if best.gap_ns <= far:
            self._improve(_unlike(states, best.bound_ns), best, by(0.85), patience=1)
        states = _distinct([*states, *fresh])
        if best.gap_ns > WIDE_OPEN * self.problem.baseline_cost_ns:
            say(f"{self._figures(best)}; spans with binaries")
            self.spans(best, deadline=by(SPANS[best.gap_ns > far]))
        if self._enough_ns < best.gap_ns <= far:  # beyond, the walks find more
            self._integer(states, best, by(0.9), say)
        if best.gap_ns > far:
            say(f"{self._figures(best)}; walks")
            self._follow(states, best, by(0.97))
        if best.gap_ns > self._enough_ns:
            self._wander(_distinct(states), best, deadline, say)

    def _first(
        self,
        best: Incumbent,
        states: list[Residency],
        deadline: float,
        brief: Sequence[Sequence[int]] | None,
    ) -> None:
        """Solve the relaxations of the first choices; begin with their points and with walks.

        Args:
            best: changed in place.
            states: grows by what fits.
            deadline: ``time.perf_counter()`` at which to stop.
            brief: orders to begin with beside the first points, which are then all; or None.
        """
        step = self.problem.baseline_cost_ns
        for number in range(self._choices):
            if best.infeasible or time.perf_counter() > deadline:
                return
            for order in self._relax(number, best, deadline):
                self._begin(order, best, states, deadline)
                if best.gap_ns <= self._enough_ns:
                    return
            for start in brief or ():
                self._begin(start, best, states, deadline)
            # The first choices are cheap; the dearer ones only pay where much is open.
            if states and self._enough_ns < best.gap_ns <= GOOD * step:
                self._improve(_distinct(states)[:1], best, deadline, patience=1)
            if best.gap_ns <= self._enough_ns or (brief is not None and states):
                return
            if not number and brief is None:
                # Where there is nothing yet it is well spent.
                share = 0.1 if states else 0.5
                until = time.perf_counter() + share * (deadline - time.perf_counter())
                for order in self._walks(best.budget_bytes, until):
                    self._begin(order, best, states, until)

    def bound(self, budget_bytes: int, *, deadline: float) -> int:
        """Return the best bound of all choices, in nanoseconds."""
        best = Incumbent(self.liveness, budget_bytes)
        self.first_bound(best, deadline=deadline)
        self.tighten(best, deadline=deadline)
        return best.bound_ns

    def first_bound(self, best: Incumbent, *, deadline: float) -> int:
        """Prove what the first choices do; return that, in nanoseconds."""
        for number in range(self._choices):
            self._relax(number, best, deadline, hurry=True)
        return best.bound_ns

    def tighten(self, best: Incumbent, *, deadline: float) -> list[Iterator[list[int]]]:
        """Prove more, by joined blocks and by cuts; return the rounded points, made when asked for.

        Args:
            best: changed in place.
            deadline: ``time.perf_counter()`` at which to stop.
        """
        left_s = deadline - time.perf_counter()
        points = [self._join(best, time.perf_counter() + JOINING * left_s)]
        numbers = sorted(self._programs, key=lambda number: self._proved.get(number, 0))
        if best.gap_ns > self._enough_ns:
            numbers[-2:] = [self._refine(number, best, deadline) for number in numbers[-2:]]
            numbers.sort(key=lambda number: self._proved.get(number, 0))
        for number in reversed(numbers):
            points.append(self._cut(number, best, deadline))
            if number in self._refined and number == numbers[-1]:
                points.append(self._widen(number, best, deadline))
        return points

    def spans(self, best: Incumbent, *, deadline: float) -> None:
        """Prove more by the spans of the choice of which most is proved.

        Args:
            best: changed in place.
            deadline: ``time.perf_counter()`` at which to stop.
        """
        number = max(self._points, key=lambda number: self._proved[number], default=None)
        if number is not None:
            program, relaxation = self._programs[number]
            values, duals = self._points[number], np.zeros(len(relaxation.arrays["row_lower"]))
            duals[: len(self._duals[number])] = self._duals[number]  # of later cuts there are none
            bound = span_bound(program, relaxation.arrays, duals, values, deadline=deadline)
            best.prove(whole_ns(bound * program.cost_unit))

    # ---------------------------------------------------------------- inside

    def _walks(self, budget_bytes: int, deadline: float) -> list[list[int]]:
        """Return orders that do without the relaxation: all that can be is held, or evicted."""
        walks = (
            Eviction(self.liveness, patience).order(budget_bytes, deadline=deadline)
            for patience in PATIENCE[:2]
        )
        demand = self.liveness.demand
        everything = on_demand(demand, needed_storages(demand))
        return [everything, *(order for order in walks if order is not None)]

    def _relax(
        self,
        number: int,
        best: Incumbent,
        deadline: float,
        *,
        hurry: bool = False,
        share: float = 0.5,
        finer_than: int | None = None,
    ) -> Iterator[list[int]]:
        """Solve a relaxation; note its bound and return its rounded points, made when asked for.

        All but the first, and in a hurry that too, are solved only where the time allows; at most
        a share of the time goes into solving.
        """
        layout = self._layouts[number]
        if number not in self._programs:
            stages = Stages(self.liveness, snapshots=layout.snapshots)
            size = sum(SnapshotProgram.sizes(stages, layout))
            long = size * COLUMN_S > deadline - time.perf_counter()
            if (number and (size > COLUMNS or long)) or (hurry and long):
                return iter(())
            unit = max(int(self.liveness.forward_bytes.max(initial=1)), best.budget_bytes, 1)
            made = SnapshotProgram(stages, layout, unit / 1000)
            self._programs[number] = (made, Relaxation(made.program, made.arrays))
            if finer_than is not None:
                self._carry(finer_than, number)
        return self._solved(number, best, share * (deadline - time.perf_counter()))

    def _carry(self, coarse: int, fine: int) -> None:
        """Give a program the cuts of one that it refines or widens, those that bind there."""
        before, relaxation = self._programs[coarse]
        arrays, duals = relaxation.arrays, self._duals[coarse]
        cuts = [
            arrays["columns"][arrays["starts"][row] : arrays["starts"][row + 1]].tolist()
            for row in range(len(before.arrays["row_lower"]), len(duals))
            if duals[row] > 0
        ]
        after, relaxation = self._programs[fine]
        relaxation.cover(carried(cuts, before, after))

    def _solved(
        self, number: int, best: Incumbent, limit_s: float, *, again: bool = False
    ) -> Iterator[list[int]]:
        """Solve a relaxation; note its bound and its point, return that rounded.

        Args:
            number: the choice.
            best: changed in place.
            limit_s: seconds.
            again: whether only cuts came to it since; the point before then stays if time is up.
        """
        program, relaxation = self._programs[number]
        point = self._points.pop(number, None)
        proved = self._proved.get(number, 0.0) if again else -math.inf
        result = relaxation.solve(program.sides(best.budget_bytes), time_limit_s=limit_s)
        if result.status == "infeasible":
            best.infeasible = best.order is None
            return iter(())
        bound = result.bound * program.cost_unit
        self._proved[number] = max(bound, proved)
        best.prove(whole_ns(self._proved[number]))
        if result.duals is not None and (result.values is not None or bound >= proved):
            self._duals[number] = result.duals
        values = result.values
        if values is None:
            if again and point is not None:
                self._points[number] = point
            return iter(())
        self._points[number] = values
        return (rounded(program, values, threshold) for threshold in THRESHOLDS)

    def _join(self, best: Incumbent, deadline: float) -> Iterator[list[int]]:
        """Solve relaxations whose blocks are joined where the last one's borrowed.

        Returns the rounded points of the last.
        """
        own = own_bytes(self.liveness)
        layout = finest(self.liveness, self.stages.groups)
        orders: Iterator[list[int]] = iter(())
        last: int | None = None
        while time.perf_counter() < deadline:
            self._layouts.append(layout)
            number = len(self._layouts) - 1
            points = self._relax(number, best, deadline, share=1.0)
            if number not in self._points:
                break
            if last is not None:  # this one says more
                del self._programs[last], self._points[last]
            orders, last = points, number
            links = self._programs[number][0].borrowed(self._points[number])
            if not links:
                break
            layout = joined(layout, links)
            most = min(LARGE, (deadline - time.perf_counter()) / LARGE_S)
            while len(layout.snapshots) > FEWEST and (
                self._size(layout) > most or self._work(layout) > WORK
            ):
                layout = thinned(layout, own)
            if self._size(layout) > most:
                break
        return orders

    def _size(self, layout: Layout) -> int:
        return sum(self._sizes(layout))

    def _refine(self, number: int, best: Incumbent, deadline: float) -> int:
        """Add snapshots to a choice where its point breaks the budget; return its number."""
        for _ in range(REFINED):
            self._cut(number, best, deadline, rounds=1)
            if number not in self._points or time.perf_counter() > deadline:
                break
            program, _ = self._programs[number]
            offsets = program.overlooked(self._points[number], best.budget_bytes)
            if not offsets:
                break
            layout = refined(self._layouts[number], offsets)
            finer = self._further(layout, number, best, deadline)
            if finer is None:
                break
            if number >= self._choices:  # the finer one says more
                del self._programs[number], self._points[number]
            number = finer
            self._refined.add(number)
        return number

    def _widen(self, number: int, best: Incumbent, deadline: float) -> Iterator[list[int]]:
        """Solve and cut a choice with the widest blocks that are not too much work.

        Where blocks are joined they are as wide as they need be.
        """
        for per_block in WIDER if self._layouts[number].name != JOINED else ():
            layout = widened(self._layouts[number], self.liveness, self.stages.groups, per_block)
            if len(set(layout.block)) >= len(set(self._layouts[number].block)):
                break
            wider = self._further(layout, number, best, deadline)
            if wider is not None:
                return self._cut(wider, best, deadline)
        return iter(())

    def _further(self, layout: Layout, coarse: int, best: Incumbent, deadline: float) -> int | None:
        """Solve the relaxation of one more choice; return its number, or None without a point.

        Args:
            layout: the choice; it refines or widens another.
            coarse: the number of that one, which has a point.
            best: changed in place.
            deadline: ``time.perf_counter()`` at which to stop.
        """
        left_s = deadline - time.perf_counter()
        if self._work(layout) > WORK or self._size(layout) > min(LARGE, left_s / LARGE_S):
            return None
        self._layouts.append(layout)
        number = len(self._layouts) - 1
        self._relax(number, best, deadline, share=1.0, finer_than=coarse)
        if number in self._points:
            return number
        self._programs.pop(number, None)
        return None

    def _work(self, layout: Layout) -> float:
        """Return a measure of the time that a relaxation takes: columns, by those of one block."""
        sizes = self._sizes(layout)
        return sum(sizes) * max(sizes, default=0)

    def _sizes(self, layout: Layout) -> list[int]:
        return SnapshotProgram.sizes(Stages(self.liveness, snapshots=layout.snapshots), layout)

    def _cut(
        self, number: int, best: Incumbent, deadline: float, rounds: int | None = None
    ) -> Iterator[list[int]]:
        """Add cuts to a relaxation, note its bound and return its rounded points.

        Args:
            number: the choice.
            best: changed in place.
            deadline: ``time.perf_counter()`` at which to stop.
            rounds: how many times at most; None: as long as that gains.
        """
        program, relaxation = self._programs[number]
        orders: Iterator[list[int]] = iter(())
        if number not in self._cuts:
            self._cuts[number] = PathCuts(program)
        idle = done = 0
        while number in self._points and idle < IDLE and time.perf_counter() < deadline:
            if done == rounds:
                break
            done += 1
            rows = self._cuts[number].violated(self._points[number])
            if not rows or best.gap_ns <= self._enough_ns:
                break
            relaxation.cover(rows)
            before = best.bound_ns
            orders = self._solved(number, best, deadline - time.perf_counter(), again=True)
            worth = GAIN * min(best.gap_ns, self.problem.baseline_cost_ns)
            idle = 0 if best.bound_ns - before > worth else idle + 1
        return orders

    def _begin(
        self, order: Sequence[int], best: Incumbent, states: list[Residency], deadline: float
    ) -> None:
        """Make an order fit and note it."""
        if time.perf_counter() > deadline and best.order is not None:
            return
        state = Residency(self.facts, order)
        if fit(state, best.budget_bytes, deadline=deadline):
            self._take(state, best)
            states.append(state)

    def _take(self, state: Residency, best: Incumbent) -> None:
        """Let an incumbent take a state over if it is better."""
        if best.order is None or state.cost_ns < best.extra_ns:
            best.accept(state.order(), "snapshot")

    def _improve(
        self, states: Sequence[Residency], best: Incumbent, deadline: float, patience: int = 3
    ) -> None:
        """Improve states by exchanges, as long as there is something to gain and time."""
        for state in states:
            if best.gap_ns <= self._enough_ns or time.perf_counter() > deadline:
                return
            improve(
                state,
                best.budget_bytes,
                deadline=deadline,
                goal_ns=best.bound_ns,
                patience=patience,
            )
            self._take(state, best)

    def _chained(self, states: list[Residency], best: Incumbent, deadline: float) -> None:
        """Improve schedules for chains with more memory, made to fit."""
        idle = 0
        for order in rotor.orders(self.liveness, best.budget_bytes, CHAINS):
            if time.perf_counter() > deadline or idle == HARDLY:
                return
            if self.liveness.peak(order).peak_bytes > FAR * best.budget_bytes:
                return  # and so do those that follow
            before = best.extra_ns
            fresh: list[Residency] = []
            self._begin(order, best, fresh, deadline)
            self._improve(fresh, best, deadline, patience=1)
            states += fresh
            idle = 0 if best.extra_ns < before else idle + 1

    def _follow(self, states: list[Residency], best: Incumbent, deadline: float) -> None:
        """Improve walks that follow the points of which most is proved, and the cheapest state."""
        numbers = sorted(self._points, key=lambda number: -self._proved[number])[:FOLLOWED]
        points = [(self._programs[number][0], self._points[number]) for number in numbers]

        def cheapest() -> Residency | None:
            return min(states, key=lambda state: state.cost_ns, default=None)

        for order in walks(points, best.budget_bytes, cheapest, deadline=deadline):
            if best.gap_ns <= self._enough_ns or time.perf_counter() > deadline:
                return
            if order is not None:
                fresh: list[Residency] = []
                self._begin(order, best, fresh, deadline)
                self._improve(fresh, best, deadline, patience=1)
                states += fresh

    def _integer(
        self,
        states: list[Residency],
        best: Incumbent,
        deadline: float,
        say: Callable[[str], None],
    ) -> None:
        """Solve the smaller programs with binaries; add what becomes of their points.

        The program knows the memory at its snapshots only. Where its point does not fit, it is
        solved once more with so much less memory.
        """
        step = self.problem.baseline_cost_ns
        for program, _ in self._programs.values():
            if len(program.program.variables) > BINARIES:
                continue
            with MipProcess(program.program) as process:
                aim = best.budget_bytes
                for _ in range(2):
                    left_s = deadline - time.perf_counter()
                    if best.gap_ns <= self._enough_ns or left_s < 0.2:
                        return
                    process.arrays["row_upper"] = program.sides(aim)
                    gap = best.gap_ns / max(step, 1)
                    limit_s = INTEGER_S if gap > GOOD else BRIEF_S if gap > CLOSE else LAST_S
                    limit_s = min(left_s / 2, limit_s)
                    say(f"{self._figures(best)}; integer program, up to {limit_s:.0f} s")
                    process.kill()
                    result = process.solve(time_limit_s=limit_s, relative_gap=1e-4)
                    if aim == best.budget_bytes:
                        best.prove(whole_ns(result.bound * program.cost_unit))
                    if result.values is None:
                        break
                    order = rounded(program, result.values, 0.5)
                    peak_bytes = self.liveness.peak(order).peak_bytes
                    fresh: list[Residency] = []
                    self._begin(order, best, fresh, deadline)
                    self._improve(fresh, best, deadline)
                    states += fresh
                    over = peak_bytes - best.budget_bytes
                    if over <= 0:
                        break
                    aim -= over

    def _wander(
        self,
        states: list[Residency],
        best: Incumbent,
        deadline: float,
        say: Callable[[str], None],
    ) -> None:
        """Kick the cheapest states in turn, for longer and longer, as long as that gains."""
        step = self.problem.baseline_cost_ns
        goal_ns = best.bound_ns + int(self._enough_ns)
        started = told = time.perf_counter()
        if best.gap_ns <= GOOD * step:
            long = self.problem.barrier <= SMALL and best.gap_ns > CLOSE * step
            deadline = min(deadline, started + (LONG_S if long else SHORT_S))
        turn_s = TURN_S
        for seed in range(TURNS):
            before = best.extra_ns
            for state in sorted(states, key=lambda state: state.cost_ns)[:WIDE]:
                now = time.perf_counter()
                if now > deadline or best.extra_ns <= goal_ns:
                    return
                until = min(deadline, now + turn_s)
                for better in wander(
                    state, best.budget_bytes, deadline=until, goal_ns=goal_ns, seed=seed
                ):
                    best.accept(better.order(), "snapshot")
                    if time.perf_counter() > told + 5:
                        told = time.perf_counter()
                        say(f"local search: {self._figures(best)}")
            if seed and best.extra_ns == before:
                return
            turn_s *= 1.5

    def _figures(self, best: Incumbent) -> str:
        step = max(self.problem.baseline_cost_ns, 1)
        found = "none" if best.order is None else f"{best.extra_ns / step:.2%}"
        return f"extra time {found}, proved at least {best.bound_ns / step:.2%}"


def _unlike(states: Sequence[Residency], bound_ns: int) -> list[Residency]:
    """Return the states, the cheapest first, those last whose gap is nearly that of one before.

    The thresholds of one point often make nearly the same state several times.
    """
    different: dict[int, Residency] = {}
    alike: list[Residency] = []
    for state in _distinct(states):
        gap = math.log(max(state.cost_ns - bound_ns, 1)) / math.log(1 + ALIKE)
        if different.setdefault(int(gap), state) is not state:
            alike.append(state)
    return [*different.values(), *alike]


def _distinct(states: Sequence[Residency]) -> list[Residency]:
    """Return the states of different cost or peak, the cheapest first."""
    different = {(state.cost_ns, state.peak()): state for state in states}
    return [different[figures] for figures in sorted(different)]
