"""Given: a plan made before, applied to a step captured now: the same step, or a smaller one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autockpt_solvers.errors import PlanMismatch, ScheduleError
from autockpt_solvers.memory import simulate
from autockpt_solvers.methods import keep_all
from autockpt_solvers.plan import Plan
from autockpt_solvers.problem import Problem
from autockpt_solvers.schedule import Schedule, free_early

__all__ = ["OF_A_LARGER", "shrunk", "transfer"]

# What a plan's origin calls a plan that was made for larger inputs.
OF_A_LARGER = "of a larger input"


def transfer(
    given: Plan,
    problem: Problem,
    budget_bytes: int | None,
    stages: Mapping[str, float],
    origin: Mapping[str, str],
) -> Plan:
    """Return a plan for ``problem`` with the schedule of a given plan.

    What happens outside the captured graph may differ: it is taken as it is now.

    Raises:
        PlanMismatch: the plan was made for another graph, or its peak breaks the budget.
    """
    if given.problem.fingerprint != problem.fingerprint:
        raise PlanMismatch(
            f"the plan was made for another step: {_difference(given.problem, problem)}. "
            "Plan again for this model, these input shapes and this version of torch."
        )
    schedule = _transferred(given, problem)
    try:
        peak = simulate(problem, schedule).peak_bytes
    except ScheduleError as error:
        raise PlanMismatch(
            f"the plan's schedule is not possible on this step: {error}. Plan again."
        ) from None
    limit = budget_bytes if budget_bytes is not None else given.budget_bytes
    if limit is not None and peak > limit:
        raise PlanMismatch(
            f"the plan's peak is {peak:,} bytes on this step, over the budget of {limit:,} bytes. "
            "Plan again with this budget."
        )
    return Plan(
        problem,
        schedule,
        limit,
        solver=given.solver,
        solve_time_s=given.solve_time_s,
        # A bound is proved for the problem it was computed for.
        lower_bound_s=given.lower_bound_s if given.problem == problem else 0.0,
        minimum_bytes=given.minimum_bytes,
        stages_s=dict(stages),
        origin={**origin, "plan": "given"},
    )


def shrunk(
    larger: Plan,
    problem: Problem,
    budget_bytes: int | None,
    stages: Mapping[str, float],
    origin: Mapping[str, str],
    *,
    again: bool,
) -> Plan | None:
    """Return a plan for a smaller step from the plan of a larger one: nothing is solved.

    It recomputes nothing where that fits, and else what the larger one recomputes. Operations are
    taken to cost as much as there.

    Args:
        larger: the plan of a step of the same operations, each as large or larger.
        problem: the step; its costs are not looked at.
        budget_bytes: what the peak may be.
        stages: how long the stages took.
        origin: where the plan comes from.
        again: keep the larger plan's schedule also where nothing would have to be recomputed.

    Returns:
        None where the steps are of other kinds, or the peak is above the budget.
    """
    if not _is_smaller(problem, larger.problem):
        return None
    costs = {i: op.cost_ns for i, op in enumerate(larger.problem.operations) if not op.outside}
    operations = tuple(
        replace(op, cost_ns=costs.get(i, op.cost_ns)) for i, op in enumerate(problem.operations)
    )
    problem = replace(problem, operations=operations)
    schedules = [(larger.solver, _transferred(larger, problem))]
    if not again:
        schedules.insert(0, ("keep_all", keep_all.solve(problem, None).schedule))
    for solver, schedule in schedules:
        try:
            peak = simulate(problem, schedule).peak_bytes
        except ScheduleError:
            continue
        if budget_bytes is None or peak <= budget_bytes:
            return Plan(
                problem,
                schedule,
                budget_bytes,
                solver=solver,
                solve_time_s=0.0,
                lower_bound_s=0.0,
                stages_s=dict(stages),
                origin={**origin, "plan": OF_A_LARGER},
            )
    return None


def _is_smaller(problem: Problem, larger: Problem) -> bool:
    """Whether the operations are the same, and no memory inside the graph is larger."""
    inside = [op for op in problem.operations if not op.outside]
    theirs = [op for op in larger.operations if not op.outside]
    if problem.barrier != larger.barrier or len(inside) != len(theirs):
        return False
    for mine, other in zip(inside, theirs, strict=True):
        if (mine.kind, mine.inputs, mine.outputs, mine.recompute_inputs) != (
            other.kind,
            other.inputs,
            other.outputs,
            other.recompute_inputs,
        ):
            return False
        for storage in mine.outputs:
            if problem.storages[storage].size_bytes > larger.storages[storage].size_bytes:
                return False
    return True


def _transferred(given: Plan, problem: Problem) -> Schedule:
    """The schedule with what happens outside the graph as it is now: it stands at the end."""
    last = max(i for i, op in enumerate(problem.operations) if not op.outside)
    backward = [i for i in given.schedule.backward_computes if i <= last]
    tail = [i for i in problem.backward if i > last]
    return free_early(problem, given.schedule.forward_computes, [*backward, *tail])


def _difference(planned: Problem, captured: Problem) -> str:
    if len(planned.operations) != len(captured.operations):
        return f"{len(planned.operations)} operations there, {len(captured.operations)} here"
    for mine, theirs in zip(planned.operations, captured.operations, strict=True):
        if mine.kind != theirs.kind:
            return f"{mine.name} is {mine.kind} there and {theirs.kind} here"
        for a, b in zip(mine.outputs, theirs.outputs, strict=False):
            there, here = planned.storages[a].size_bytes, captured.storages[b].size_bytes
            if there != here:
                return f"{mine.name} makes {there:,} bytes there and {here:,} bytes here"
    return "operations are connected in another way"
