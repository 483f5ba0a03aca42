"""The report: a plan as text for people and as data for other programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from autockpt.per_module import per_module
from autockpt_solvers.decisions import Decision
from autockpt_solvers.plan import Plan
from autockpt_solvers.schedule import Compute
from autockpt_solvers.units import format_bytes, format_seconds

__all__ = ["percent", "proved_percent", "report_dict", "report_text"]


def report_text(plan: Plan, *, tensors: int = 8) -> str:
    """Return the report of a plan as lines of text.

    Args:
        plan: the plan to report.
        tensors: how many tensors the two lists of tensors show.
    """
    sections = [
        _origin(plan),
        _memory(plan),
        _time(plan),
        _planning(plan),
        _modules(plan),
        _decisions(plan, tensors),
        _peak(plan, tensors),
    ]
    return "\n".join("\n".join(section) + "\n" for section in sections if section)


def report_dict(plan: Plan) -> dict[str, Any]:
    """Return the figures, decisions, shares per module and tensors at the peak as JSON data."""
    return {
        "budget_bytes": plan.budget_bytes,
        "peak_bytes": plan.peak_bytes,
        "baseline_peak_bytes": plan.baseline_peak_bytes,
        "minimum_bytes": plan.minimum_bytes,
        "resident_bytes": plan.problem.resident_bytes,
        "arena_bytes": plan.placement.arena_bytes,
        "arena_live_bytes": plan.placement.live_bytes,
        "step_time_s": plan.step_time_s,
        "baseline_time_s": plan.baseline_time_s,
        "extra_time_s": plan.extra_time_s,
        "overhead": plan.overhead,
        "lower_bound_s": plan.lower_bound_s,
        "gap": plan.gap,
        "solver": plan.solver,
        "solve_time_s": plan.solve_time_s,
        "stages_s": dict(plan.stages_s),
        "origin": dict(plan.origin),
        "modules": [asdict(share) for share in per_module(plan)],
        "decisions": [asdict(decision) for decision in plan.decisions],
        "peak": {
            "operation": plan.peak_operation,
            "workspace_bytes": plan.peak_workspace_bytes,
            "tensors": [asdict(tensor) for tensor in plan.at_peak()],
        },
    }


# -------------------------------------------------------------------- sections


def _origin(plan: Plan) -> list[str]:
    if not plan.origin:
        return []
    return _section("Plan", [(name, value, "") for name, value in plan.origin.items()])


def _memory(plan: Plan) -> list[str]:
    rows = [("budget", "none", "", "")]
    share = ""
    if plan.budget_bytes is not None:
        rows = [_bytes_row("budget", plan.budget_bytes, "")]
        share = f"{percent(plan.peak_bytes / plan.budget_bytes)} of the budget, "
    rows += [
        _bytes_row("predicted peak", plan.peak_bytes, f"{share}while {_runs(plan)}"),
        _bytes_row("baseline peak", plan.baseline_peak_bytes, "with nothing recomputed"),
    ]
    if plan.minimum_bytes is not None:
        note = "the smallest budget a schedule was found for"
        rows.append(_bytes_row("minimum", plan.minimum_bytes, note))
    note = "throughout the step: parameters, buffers, inputs, optimizer state"
    rows.append(_bytes_row("resident", plan.problem.resident_bytes, note))
    arena, lost = plan.placement, math.ceil((plan.placement.fragmentation - 1) * 1e4 - 1e-6) / 1e2
    note = f"{lost:.2f} % above what is alive at once: all that one arena could hold, placed in it"
    rows.append(_bytes_row("arena", arena.arena_bytes, note))
    over = [s.over for s in plan.schedule.steps if isinstance(s, Compute) and s.over is not None]
    if over:
        size_bytes = sum(plan.problem.storages[storage].size_bytes for storage in over)
        note = f"in {len(over)} operations, each written over a tensor that dies there"
        rows.append(_bytes_row("in place", size_bytes, note))
    return ["Memory", *_table(rows, "<>><")]


def _bytes_row(name: str, size_bytes: int, note: str) -> tuple[str, str, str, str]:
    return name, format_bytes(size_bytes), f"({size_bytes:,} bytes)", note


def _time(plan: Plan) -> list[str]:
    # Behind the forward's tensors there are those that the backward writes in place.
    forward = [decision for decision in plan.decisions if decision.action != "in place"]
    recomputed = sum(decision.action == "recomputed" for decision in forward)
    extra = format_seconds(plan.extra_time_s)
    note = f"{extra} to recompute {recomputed} of {len(forward)} tensors"
    if not recomputed and not plan.extra_time_s:
        note = "nothing is recomputed"
    rows = [
        ("predicted step", format_seconds(plan.step_time_s), "time of its operations"),
        ("baseline step", format_seconds(plan.baseline_time_s), "with nothing recomputed"),
        ("overhead", percent(plan.overhead), note),
        ("gap", *_gap(plan)),
    ]
    return _section("Time", rows)


def _gap(plan: Plan) -> tuple[str, str]:
    gap = proved_percent(plan.gap)
    within = "this step" if plan.budget_bytes is None else "this step within the budget"
    if gap == "0.00 %":
        return "0 %", f"proved: no schedule of {within} is faster"
    return gap, f"proved: no schedule of {within} saves more than {gap} of a step"


def _planning(plan: Plan) -> list[str]:
    rows = [(name, format_seconds(time_s), "") for name, time_s in plan.stages_s.items()]
    rows.append(("solver", plan.solver, f"took {format_seconds(plan.solve_time_s)}"))
    return _section("Planning", rows)


def _modules(plan: Plan) -> list[str]:
    rows = [
        (
            share.module,
            _size(share.kept_bytes),
            _size(share.recomputed_bytes),
            _size(share.freed_bytes),
            format_seconds(share.extra_ns / 1e9) if share.extra_ns else "-",
        )
        for share in per_module(plan)
    ]
    head = ("module", "kept", "recomputed", "not needed", "extra time")
    return ["Forward tensors by module", *_table([head, *rows], "<>>>>")] if rows else []


def _decisions(plan: Plan, count: int) -> list[str]:
    """Return the largest tensors kept or recomputed with the reason, equal ones in one line."""
    alike: dict[tuple[object, ...], list[Decision]] = {}
    for decision in plan.decisions:
        if decision.action != "freed":
            key = (decision.size_bytes, decision.source, decision.action, decision.reason)
            alike.setdefault((*key, decision.times), []).append(decision)
    groups = sorted(alike.values(), key=lambda group: -sum(d.size_bytes for d in group))
    rows = [
        (
            f"{len(group)} x" if len(group) > 1 else "",
            format_bytes(group[0].size_bytes),
            group[0].name if len(group) == 1 else f"{group[0].name} ...",
            group[0].module_path if len(group) == 1 else f"{group[0].module_path} ...",
            group[0].source,
            group[0].action if group[0].times < 2 else f"{group[0].action} {group[0].times}x",
            group[0].reason,
        )
        for group in groups[:count]
    ]
    if not rows:
        return []
    rest = [decision.size_bytes for group in groups[count:] for decision in group]
    more = [f"  and {len(rest)} more of {format_bytes(sum(rest))}"] if rest else []
    return ["Largest tensors kept or recomputed", *_table(rows, ">><<<<<"), *more]


def _peak(plan: Plan, count: int) -> list[str]:
    known = plan.at_peak()
    rows = [
        (format_bytes(tensor.size_bytes), tensor.name, tensor.module_path, tensor.source)
        for tensor in known[:count]
    ]
    rest = [tensor.size_bytes for tensor in known[count:]]
    around = [
        (format_bytes(size_bytes), what, "", "")
        for size_bytes, what in (
            (plan.peak_workspace_bytes, "(workspace of the operation)"),
            (plan.problem.resident_bytes, "(resident throughout the step)"),
        )
        if size_bytes
    ]
    more = [(format_bytes(sum(rest)), f"({len(rest)} more)", "", "")] if rest else []
    title = f"At the peak of {format_bytes(plan.peak_bytes)}, while {_runs(plan)}"
    return [title, *_table([*rows, *more, *around], "><<<")]


# -------------------------------------------------------------------- lines


def _section(title: str, rows: Sequence[tuple[str, str, str]]) -> list[str]:
    return [title, *_table(rows, "<<<")]


def _table(rows: Sequence[Sequence[str]], align: str) -> list[str]:
    """Return the rows with their columns aligned as ``align`` says: ``<`` left, ``>`` right."""
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(map(_cell, row, widths, align)).rstrip() for row in rows]


def _cell(text: str, width: int, align: str) -> str:
    return text.rjust(width) if align == ">" else text.ljust(width)


def _runs(plan: Plan) -> str:
    return f"{plan.peak_operation} runs" if plan.peak_operation else "nothing runs"


def _size(size_bytes: int) -> str:
    return format_bytes(size_bytes) if size_bytes else "-"


def percent(part: float) -> str:
    """Return a part as percent."""
    return f"{part * 100:.2f} %"


def proved_percent(gap: float) -> str:
    """Return a gap as percent, rounded up: a text must not claim more than is proved."""
    return f"{max(0.0, math.ceil(gap * 1e4 - 1e-6) / 1e2):.2f} %"
