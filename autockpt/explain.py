"""Explain: why a tensor is kept or recomputed, and what it would cost to have it the other way."""

from __future__ import annotations

import fnmatch
from collections.abc import Set
from dataclasses import dataclass

from autockpt.pins import Pins
from autockpt_solvers.decisions import Decision
from autockpt_solvers.errors import InputError
from autockpt_solvers.memory import Trace, simulate
from autockpt_solvers.on_demand import Demand, on_demand, stage_schedule
from autockpt_solvers.plan import Plan
from autockpt_solvers.schedule import Compute
from autockpt_solvers.units import format_bytes, format_seconds

__all__ = ["Explanation", "Switched", "explain", "explain_text"]


@dataclass(frozen=True, slots=True)
class Switched:
    """The step with one tensor treated the other way and all others the same.

    Attributes:
        action: what happens to the tensor then.
        time_ns: by how much the step takes longer, in nanoseconds.
        peak_bytes: by how much its peak is higher.
        fits: whether the peak is within the budget.
    """

    action: str
    time_ns: int
    peak_bytes: int
    fits: bool


@dataclass(frozen=True, slots=True)
class Explanation:
    """One tensor of the forward, or one of the backward that is written in place.

    Attributes:
        decision: what happens to it, and why.
        operation_ns: time of the operation that makes it, in nanoseconds.
        switched: what the other treatment would cost; None where there is none.
        why_not: why there is none.
    """

    decision: Decision
    operation_ns: int
    switched: Switched | None
    why_not: str = ""


def explain(plan: Plan, pattern: str) -> tuple[Explanation, ...]:
    """Return an explanation for each tensor that a pattern matches, the largest first.

    Behind those of the forward stand the backward's that are written in place.

    Args:
        plan: the plan.
        pattern: a module path as for ``keep=`` (``blocks.*.attn``), with all that is inside, or a
            tensor's name (``gelu*``).

    Raises:
        InputError: it matches nothing.
    """
    problem = plan.problem
    in_place = {
        step.operation
        for step in plan.schedule.steps
        if isinstance(step, Compute) and step.over is not None
    }
    forward = (
        storage
        for index in problem.forward
        if index in plan.schedule.runs
        for storage in problem.operations[index].outputs
    )
    backward = (
        problem.operations[index].outputs[0] for index in problem.backward if index in in_place
    )
    found = list(zip((*forward, *backward), plan.decisions, strict=True))
    pins = Pins(keep=(pattern,))
    matching = [
        (storage, decision)
        for storage, decision in found
        if pins.kept(decision.module_path) or fnmatch.fnmatchcase(decision.name, pattern)
    ]
    if not matching:
        paths = sorted({decision.module_path for _, decision in found if decision.module_path})
        raise InputError(
            f"{pattern!r} matches no module and no tensor of this plan. Its modules: "
            f"{', '.join(paths)[:2000] or 'none'}."
        )
    demand = Demand(problem)
    kept = frozenset(storage for storage, decision in found if decision.action == "kept")
    as_it_is = _trace(plan, demand, kept)
    matching.sort(key=lambda one: (one[1].action == "in place", -one[1].size_bytes))
    return tuple(
        _explained(plan, demand, kept, as_it_is, storage, decision)
        for storage, decision in matching
    )


def _explained(
    plan: Plan,
    demand: Demand,
    kept: Set[int],
    as_it_is: Trace,
    storage: int,
    decision: Decision,
) -> Explanation:
    operation_ns = plan.problem.operations[plan.problem.producer[storage]].cost_ns
    why_not = ""
    if decision.action == "freed":
        why_not = "nothing needs it later"
    elif decision.action == "in place":
        why_not = "it belongs to the backward"
    elif decision.action == "kept" and not demand.may_recompute[storage]:
        why_not = "it cannot be made again"
    elif decision.action == "kept" and storage in plan.problem.live_at_barrier:
        why_not = "the user holds it"
    elif decision.action == "recomputed" and not demand.may_keep[storage]:
        why_not = "it may not be kept"
    if why_not:
        return Explanation(decision, operation_ns, None, why_not)
    trace = _trace(plan, demand, kept ^ {storage})
    peak = plan.peak_bytes + trace.peak_bytes - as_it_is.peak_bytes
    switched = Switched(
        "recomputed" if decision.action == "kept" else "kept",
        trace.cost_ns - as_it_is.cost_ns,
        peak - plan.peak_bytes,
        plan.budget_bytes is None or peak <= plan.budget_bytes,
    )
    return Explanation(decision, operation_ns, switched)


def _trace(plan: Plan, demand: Demand, kept: Set[int]) -> Trace:
    """The step that keeps these: the fastest that fits, or else the one with the smallest peak."""
    traces = [
        simulate(plan.problem, stage_schedule(plan.problem, on_demand(demand, kept, held)))
        for held in (None, kept)
    ]

    def worth(trace: Trace) -> tuple[int, int]:
        limit = plan.budget_bytes
        over = 0 if limit is None else max(0, trace.peak_bytes - limit)
        return over, trace.cost_ns

    return min(traces, key=worth)


# ------------------------------------------------------------------ for people


def explain_text(explanations: tuple[Explanation, ...], *, tensors: int = 8) -> str:
    """Return the first explanations as lines of text."""
    lines: list[str] = []
    for one in explanations[:tensors]:
        decision = one.decision
        times = f" {decision.times} times" if decision.times > 1 else ""
        lines += [
            "  ".join(
                part for part in (decision.name, decision.module_path, decision.source) if part
            ),
            f"  {decision.action}{times}, {format_bytes(decision.size_bytes)}, made in "
            f"{format_seconds(one.operation_ns / 1e9)}: {decision.reason}",
            f"  {_otherwise(one)}",
        ]
    rest = explanations[tensors:]
    if rest:
        size = sum(one.decision.size_bytes for one in rest)
        lines.append(f"and {len(rest)} more of {format_bytes(size)}")
    return "\n".join(lines) + "\n"


def _otherwise(one: Explanation) -> str:
    switched = one.switched
    if switched is None:
        return f"no other way: {one.why_not}"
    time, peak = abs(switched.time_ns) / 1e9, abs(switched.peak_bytes)
    longer = "longer" if switched.time_ns >= 0 else "shorter"
    higher = "higher" if switched.peak_bytes >= 0 else "lower"
    said = [
        f"step {format_seconds(time)} {longer}" if time else "step as long",
        f"peak {format_bytes(peak)} {higher}" if peak else "peak the same",
    ]
    fits = "" if switched.fits else ", over the budget"
    return f"{switched.action} instead: {', '.join(said)}{fits}"
