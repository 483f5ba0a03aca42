"""Together: plans for graphs whose forwards stand open at once, each beside what the others hold.

What one plan keeps is room that the others lack. So each is allowed to hold a share of what lies
between the least and all, and planned beside others that hold as much; the share is looked for
under which least is recomputed. A backward that keeps its graph holds all that its own forward has
saved; how much more than its peak that takes is known of a plan, and the next is made with it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from autockpt.accumulate import is_leaf
from autockpt.capture import Capture
from autockpt.formulate import Around
from autockpt.planning import Made
from autockpt.tangents import tensors
from autockpt_solvers.errors import InfeasibleBudget
from autockpt_solvers.memory import peak_keeping_graph, simulate
from autockpt_solvers.minimum import Minimum, minimum
from autockpt_solvers.on_demand import Demand, on_demand, stage_schedule
from autockpt_solvers.plan import Plan
from autockpt_solvers.problem import Problem
from autockpt_solvers.schedule import Schedule

__all__ = ["Member", "gradient_bytes", "kept_bytes", "plan_together"]

# Shares that are tried, and by how much of the range two of them differ at first.
_SHARES = 7
_GOLDEN = (5**0.5 - 1) / 2
# Plans that are made in turn for what the one before takes.
_TURNS = 4

Held = Mapping[str, int]  # graph -> what an open forward of it holds
Kept = Mapping[str, int]  # graph -> by how much a backward that keeps its graph raises the peak
Make = Callable[[Capture, Around, bool], Made]


@dataclass(frozen=True)
class Member:
    """One of the graphs.

    Attributes:
        captured: its step.
        around: what happens around it, other forwards left out.
        beside: what is there beside it, where an open forward of each graph holds so much, and
            where its own backward, should that keep its graph, holds so much more.
    """

    captured: Capture
    around: Around
    beside: Callable[[Held, int], int]


@dataclass(frozen=True)
class _Trial:
    """A plan for each graph, what is there beside each, and the highest peak."""

    made: dict[str, Made]
    beside: dict[str, int]
    peak_bytes: int

    @property
    def extra_s(self) -> float:
        return sum(one.plan.extra_time_s for one in self.made.values())


def kept_bytes(plan: Plan) -> int:
    """Return by how much a backward that keeps its graph raises the plan's peak."""
    return peak_keeping_graph(plan.problem, plan.schedule) - plan.peak_bytes


def gradient_bytes(captured: Capture, round_up: Callable[[int], int]) -> int:
    """Return the bytes of the gradients that one backward makes of parameters."""
    own = {
        primal: tensors(primal)[0]
        for _, _, primal in captured.gradients
        if primal is not None and is_leaf(primal)
    }
    return sum(round_up(t.numel() * t.element_size()) for t in own.values())


def plan_together(
    members: Mapping[str, Member],
    elsewhere: Held,
    make: Make,
    budget_bytes: int | None,
    time_limit_s: Callable[[], float],
) -> dict[str, tuple[Around, Made]]:
    """Return a plan for each of the graphs, and what it takes to be around it.

    Args:
        members: the graphs, by key.
        elsewhere: what open forwards of other graphs hold.
        make: plans one graph, within the budget or, where it is told False, without one.
        budget_bytes: what the peak of each may be. Where no plans are found that keep it, those
            with the lowest peak are returned.
        time_limit_s: returns the time there is to look for the smallest peak of a graph.
    """
    search = _Search(members, elsewhere, make, time_limit_s)
    most = search.judged(search.free)
    if budget_bytes is None or most.peak_bytes <= budget_bytes:
        return search.stated(most, None)
    least = search.judged(
        search.with_schedules(
            {key: _keeping_least(made.plan.problem) for key, made in search.free.items()}
        )
    )
    best = search.best(_held(least.made), _held(most.made), budget_bytes)
    if best is not None:
        return search.stated(best, budget_bytes)
    smallest = search.judged(
        search.with_schedules({key: found.schedule for key, found in search.minima.items()})
    )
    fitting = min((least, smallest), key=lambda trial: max(trial.peak_bytes, budget_bytes))
    return search.stated(fitting, None)


class _Search:
    def __init__(
        self,
        members: Mapping[str, Member],
        elsewhere: Held,
        make: Make,
        time_limit_s: Callable[[], float],
    ) -> None:
        self.members = members
        self.elsewhere = elsewhere
        self.make = make
        self.time_limit_s = time_limit_s
        self.free = {key: make(m.captured, m.around, False) for key, m in members.items()}

    @functools.cached_property
    def minima(self) -> dict[str, Minimum]:
        """The smallest peak of each graph by itself: looked for once, it takes long."""
        return {
            key: minimum(made.plan.problem, time_limit_s=self.time_limit_s())
            for key, made in self.free.items()
        }

    def best(self, least: Held, most: Held, budget_bytes: int) -> _Trial | None:
        """Return the cheapest plans found that keep the budget.

        With a larger share less is recomputed for the others' sake, and more for what is beside:
        between the two lies the best, which a golden section finds.
        """
        tried: dict[float, _Trial | None] = {}

        def cost_s(share: float) -> float:
            if share not in tried:
                held = {key: int(least[key] + share * (most[key] - least[key])) for key in least}
                tried[share] = self.trial(held, budget_bytes)
            found = tried[share]
            return math.inf if found is None else found.extra_s

        low, high = 0.0, 1.0
        nothing = dict.fromkeys(self.members, 0)
        if self.beside(least, nothing) == self.beside(most, nothing):  # nothing to be shared
            cost_s(high)
            low = high
        while low < high and len(tried) < _SHARES:
            left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
            if cost_s(left) <= cost_s(right):
                high = right
            else:
                low = left
        found = [trial for trial in tried.values() if trial is not None]
        return min(found, key=lambda trial: trial.extra_s, default=None)

    def trial(self, held: Held, budget_bytes: int) -> _Trial | None:
        """Return plans that hold no more than this each; None where none are found."""
        kept: Kept = dict.fromkeys(self.members, 0)
        before: dict[str, int] = {}
        for _ in range(_TURNS):
            beside = self.beside(held, kept)
            if beside == before or not self.has_room(beside, budget_bytes):
                return None
            try:
                made = self.holding_no_more(held, beside, budget_bytes)
            except InfeasibleBudget:
                return None
            found = self.judged(made)
            if found.peak_bytes <= budget_bytes:
                return found
            kept = {key: max(kept[key], kept_bytes(one.plan)) for key, one in made.items()}
            before = beside
        return None

    def has_room(self, beside: Mapping[str, int], budget_bytes: int) -> bool:
        """Whether each graph's smallest peak fits beside so much."""
        return all(
            found.peak_bytes + beside[key] <= budget_bytes for key, found in self.minima.items()
        )

    def holding_no_more(
        self, held: Held, beside: Mapping[str, int], budget_bytes: int
    ) -> dict[str, Made]:
        """Return a plan for each graph whose forward holds no more than this."""
        made = {}
        for key, member in self.members.items():
            problem = self.free[key].plan.problem
            # The user's loss stands where all is held: it is taken to need what holding more would.
            joint = member.captured.joint
            waiting = {s for t in joint.tangents for s in member.captured.lives_in[t] if s >= 0}
            there = problem.resident_bytes + beside[key] + held[key]
            there += sum(problem.storages[storage].size_bytes for storage in waiting)
            around = self.around(key, beside)
            around = replace(around, loss_bytes=max(around.loss_bytes, budget_bytes - there))
            made[key] = self.make(member.captured, around, True)
        return made

    def beside(self, held: Held, kept: Kept) -> dict[str, int]:
        there = {**self.elsewhere, **held}
        return {key: member.beside(there, kept[key]) for key, member in self.members.items()}

    def beside_made(self, made: Mapping[str, Made]) -> dict[str, int]:
        kept = {key: kept_bytes(one.plan) for key, one in made.items()}
        return self.beside(_held(made), kept)

    def planned(self, beside: Mapping[str, int], *, bounded: bool) -> dict[str, Made]:
        """Return plans for so many bytes beside each graph."""
        return {
            key: self.make(member.captured, self.around(key, beside), bounded)
            for key, member in self.members.items()
        }

    def around(self, key: str, beside: Mapping[str, int]) -> Around:
        return replace(self.members[key].around, beside_bytes=beside[key])

    def with_schedules(self, schedules: Mapping[str, Schedule]) -> dict[str, Made]:
        return {
            key: _with_schedule(made, schedules[key], "minimum") for key, made in self.free.items()
        }

    def judged(self, made: dict[str, Made]) -> _Trial:
        """Return plans with what is there beside each of them, whatever they were made for."""
        beside = self.beside_made(made)
        peaks = [
            simulate(self.free[key].plan.problem, one.plan.schedule).peak_bytes + beside[key]
            for key, one in made.items()
        ]
        return _Trial(made, beside, max(peaks))

    def stated(self, trial: _Trial, budget_bytes: int | None) -> dict[str, tuple[Around, Made]]:
        """Return a trial's plans as plans for what is there beside each.

        What is proved of such a step holds with the others as they are.
        """
        try:
            anew = self.planned(trial.beside, bounded=budget_bytes is not None)
        except InfeasibleBudget:  # not found in this time
            anew = self.planned(trial.beside, bounded=False)
        if budget_bytes is None or self.beside_made(anew) != trial.beside:
            before = {key: made.plan for key, made in trial.made.items()}
            anew = {
                key: _with_schedule(made, before[key].schedule, before[key].solver)
                for key, made in anew.items()
            }
        return {key: (self.around(key, trial.beside), made) for key, made in anew.items()}


def _held(made: Mapping[str, Made]) -> dict[str, int]:
    return {key: one.plan.trace.held_bytes for key, one in made.items()}


def _with_schedule(made: Made, schedule: Schedule, solver: str) -> Made:
    plan = replace(made.plan, schedule=schedule, solver=solver)
    bound_s = min(plan.lower_bound_s, plan.extra_time_s)
    return Made(replace(plan, lower_bound_s=bound_s), made.formulation)


def _keeping_least(problem: Problem) -> Schedule:
    return stage_schedule(problem, on_demand(Demand(problem), frozenset()))
