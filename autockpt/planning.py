"""Planning: from a captured step to a plan, and the same for a model that has not run.

One planning is profile → formulate → solve; what decides it beside the capture stands in
:class:`Options` and in :class:`autockpt.formulate.Around`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from numbers import Real
from pathlib import Path

import torch

from autockpt.budget import parse_budget
from autockpt.capture import Capture
from autockpt.device import Device
from autockpt.formulate import Around, Formulation, formulate
from autockpt.given import shrunk, transfer
from autockpt.pins import Pins
from autockpt.profile import Profile, profile
from autockpt.replay import state_bytes
from autockpt.roofline import Modelled
from autockpt.solved_before import Question, recall, remember
from autockpt_solvers.errors import InfeasibleBudget, InputError, PinError, SolverError
from autockpt_solvers.methods import METHODS
from autockpt_solvers.minimum import minimum
from autockpt_solvers.plan import Plan
from autockpt_solvers.problem import Problem
from autockpt_solvers.solve import solve

__all__ = [
    "Made",
    "Options",
    "budget_of",
    "formulated",
    "make_plan",
    "make_smaller",
    "no_limit",
    "options_of",
    "origin_of",
    "smallest",
    "solved",
]


@dataclass(frozen=True)
class Options:
    """What the user asked for, checked.

    Attributes:
        budget: as the user wrote it; it is read against the device's memory.
        solver: ``"auto"`` or the name of a method.
        time_limit_s: time to search for a schedule.
        pins: what to keep and to recompute.
        given: a plan to use instead of searching.
        fullgraph: whether a model of several graphs is an error.
        inplace: whether operations may be written over what dies there.
        arena: whether tensors have fixed places in memory that is allocated once.
    """

    budget: int | str | None
    solver: str = "auto"
    time_limit_s: float = 60.0
    pins: Pins = field(default_factory=Pins)
    given: Plan | None = None
    fullgraph: bool = False
    inplace: bool = True
    arena: bool = False


@dataclass(frozen=True)
class Made:
    """A plan, and the formulation whose operations its schedule names."""

    plan: Plan
    formulation: Formulation


def options_of(
    budget: int | str | None,
    *,
    solver: str,
    time_limit: float,
    keep: Sequence[str],
    recompute: Sequence[str],
    given: str | Path | Plan | None = None,
    fullgraph: bool = False,
    inplace: bool = True,
    arena: bool = False,
) -> Options:
    """Return checked options.

    Raises:
        BudgetError: the budget is none of the accepted forms.
        SolverError, PinError, InputError: an option has no meaning.
    """
    if isinstance(budget, str) and budget.strip().endswith("%"):
        parse_budget(budget, total_bytes=1 << 62)
    else:
        parse_budget(budget, total_bytes=None)
    if solver != "auto" and solver not in METHODS:
        raise SolverError(f"solver={solver!r} is unknown; there are auto, {', '.join(METHODS)}.")
    if not isinstance(time_limit, Real) or not time_limit > 0:
        raise InputError(f"time_limit={time_limit!r} must be a number of seconds above 0.")
    for option, patterns in (("keep", keep), ("recompute", recompute)):
        if isinstance(patterns, str):
            raise PinError(f"{option} takes a sequence of patterns: {option}=[{patterns!r}].")
        wrong = [pattern for pattern in patterns if not isinstance(pattern, str)]
        if wrong:
            raise PinError(f"{option} takes patterns of module paths, not {wrong[0]!r}.")
    loaded = Plan.load(given) if isinstance(given, (str, Path)) else given
    if not isinstance(loaded, Plan | None):
        raise InputError(f"plan={given!r} must be a Plan, or the path of a file of one.")
    pins = Pins(tuple(keep), tuple(recompute))
    return Options(budget, solver, float(time_limit), pins, loaded, fullgraph, inplace, arena)


# ------------------------------------------------------------------ a plan for a captured step


def make_plan(
    captured: Capture,
    around: Around,
    options: Options,
    device: Device | Modelled,
    *,
    model_name: str,
    capture_s: float,
    progress: Callable[[str], None] | None = None,
) -> Made:
    """Return the best plan found for a captured step.

    Args:
        captured: the step.
        around: what the step allocates outside the captured graph.
        options: what the user asked for.
        device: where to measure.
        model_name: for the plan's origin.
        capture_s: how long the capture took, for the report.
        progress: called with a line of text now and then.

    Raises:
        InfeasibleBudget: no schedule fits.
        PlanMismatch: the given plan was made for another step, or does not fit the budget.
        PinError: a pin cannot be applied.
    """
    say = progress or (lambda line: None)
    budget_bytes = budget_of(options, device)
    started = time.perf_counter()
    say(f"captured {len(captured.operations)} operations in {capture_s:.1f} s; measuring them")
    figures = profile(captured, device, progress=progress)
    measured = time.perf_counter()
    say(f"measured {figures.distinct} distinct operations in {measured - started:.1f} s; solving")
    formulation = formulated(captured, figures, around, options, device, model_name)
    problem = formulation.problem
    stages = {"capture": capture_s, "profile": measured - started}
    origin = origin_of(model_name, figures.device)
    if options.given is not None:
        made = transfer(options.given, problem, budget_bytes, stages, origin)
        return Made(made, formulation)
    try:
        plan = solved(problem, options, budget_bytes, stages, origin, progress)
    except InfeasibleBudget as error:
        raise _explained(error, options, formulation) from None
    return Made(plan, formulation)


def formulated(
    captured: Capture,
    figures: Profile,
    around: Around,
    options: Options,
    device: Device | Modelled,
    name: str,
) -> Formulation:
    """Return the problem of a captured step under the user's options.

    Raises:
        PinError: a pin cannot be applied.
    """
    return formulate(
        captured,
        figures,
        around,
        pins=options.pins,
        state_bytes=0 if isinstance(device, Modelled) else state_bytes(device.kind),
        name=name,
        inplace=options.inplace,
    )


def make_smaller(
    captured: Capture,
    around: Around,
    options: Options,
    device: Device | Modelled,
    larger: Plan,
    *,
    capture_s: float,
    again: bool = False,
) -> Made | None:
    """Return a plan for a captured step from that of a larger one, without timing or solving.

    Args:
        captured: the step.
        around: what the step allocates outside the captured graph.
        options: what the user asked for.
        device: where to measure memory.
        larger: the plan of the larger step.
        capture_s: how long the capture took, for the report.
        again: as for :func:`autockpt.given.shrunk`, which says when there is None.
    """
    started = time.perf_counter()
    figures = profile(captured, device, timed=False)
    formulation = formulated(captured, figures, around, options, device, larger.problem.name)
    plan = shrunk(
        larger,
        formulation.problem,
        budget_of(options, device),
        {"capture": capture_s, "profile": time.perf_counter() - started},
        origin_of(larger.problem.name, figures.device),
        again=again,
    )
    return None if plan is None else Made(plan, replace(formulation, problem=plan.problem))


def solved(
    problem: Problem,
    options: Options,
    budget_bytes: int | None,
    stages_s: Mapping[str, float],
    origin: Mapping[str, str],
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """Return the best plan found for a problem, by this run or an earlier one.

    Raises:
        InfeasibleBudget: no schedule fits.
    """
    asked = Question(
        problem,
        budget_bytes,
        method=options.solver,
        time_limit_s=options.time_limit_s,
        release=origin["autockpt"],
    )
    solution = recall(asked)
    if solution is not None:
        origin = {**origin, "plan": "cached"}
    else:
        solution = solve(
            problem,
            budget_bytes,
            method=options.solver,
            time_limit_s=options.time_limit_s,
            progress=progress,
        )
        remember(asked, solution)
    if progress is not None:
        progress(f"solved in {solution.solve_time_s:.1f} s with {solution.method}")
    return Plan(
        problem,
        solution.schedule,
        budget_bytes,
        solver=solution.method,
        solve_time_s=solution.solve_time_s,
        lower_bound_s=solution.lower_bound_ns / 1e9,
        stages_s={**stages_s, "solve": solution.solve_time_s},
        origin=origin,
    )


def budget_of(options: Options, device: Device | Modelled) -> int | None:
    """Return the budget in bytes."""
    return parse_budget(options.budget, total_bytes=device.total_bytes)


def no_limit(options: Options) -> Options:
    """Return the options without a budget."""
    return replace(options, budget=None, solver="auto", given=None)


def smallest(made: Made, budget_bytes: int | None, time_limit_s: float) -> Made:
    """Return the plan with the smallest peak for the same step."""
    found = minimum(made.formulation.problem, time_limit_s=time_limit_s)
    plan = replace(
        made.plan,
        schedule=found.schedule,
        budget_bytes=budget_bytes,
        solver="minimum",
        minimum_bytes=found.peak_bytes,
    )
    return Made(plan, made.formulation)


def _explained(
    error: InfeasibleBudget, options: Options, formulation: Formulation
) -> InfeasibleBudget:
    """The error with the pins named where they are what makes the budget infeasible."""
    hint = error.hint
    if options.pins:
        free = minimum(_without_pins(formulation.problem))
        if free.peak_bytes <= error.budget_bytes:
            pins = [f"keep={p!r}" for p in options.pins.keep]
            pins += [f"recompute={p!r}" for p in options.pins.recompute]
            hint = (
                f"The pins make it infeasible: without {', '.join(pins)} "
                f"{free.peak_bytes:,} bytes are enough."
            )
    return InfeasibleBudget(
        error.budget_bytes, error.minimum_bytes, error.tensors, hint, error.bound_bytes
    )


def _without_pins(problem: Problem) -> Problem:
    storages = tuple(replace(s, keepable=True) for s in problem.storages)
    operations = tuple(
        replace(op, recompute_inputs=op.inputs, recompute_outputs=op.outputs, fixed="")
        if op.fixed.startswith("pinned by keep")
        else op
        for op in problem.operations
    )
    return replace(problem, storages=storages, operations=operations)


def origin_of(model_name: str, device: str) -> dict[str, str]:
    """Return where a plan comes from: versions, device, model."""
    try:
        own = version("autockpt")
    except PackageNotFoundError:  # run from a checkout that is not installed
        own = "unknown"
    return {"autockpt": own, "torch": torch.__version__, "device": device, "model": model_name}
