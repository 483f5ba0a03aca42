"""The document: a plan as one file for people, with its figures, its picture and every decision."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass

from autockpt.per_module import per_module
from autockpt.picture import draw_timeline
from autockpt.report import percent, proved_percent
from autockpt_solvers.plan import Plan
from autockpt_solvers.units import format_bytes, format_seconds

__all__ = ["FORMATS", "document"]

FORMATS = ("md", "html")

Row = tuple[str, ...]


@dataclass(frozen=True)
class _Table:
    title: str
    head: Row
    rows: Sequence[Row]


def document(plan: Plan, kind: str, *, picture: bool = True) -> str:
    """Return a plan as a document that needs no other file.

    Args:
        plan: the plan.
        kind: ``"md"`` or ``"html"``.
        picture: whether the memory timeline is drawn into it, which needs matplotlib.

    Raises:
        AutockptError: matplotlib is not installed.
    """
    title = plan.origin.get("model") or plan.problem.name or "One training step"
    image = ""
    if picture:
        drawn = io.BytesIO()
        draw_timeline(plan, drawn)
        image = "data:image/png;base64," + base64.b64encode(drawn.getvalue()).decode("ascii")
    tables = [_figures(plan), _modules(plan), _peak(plan), _decisions(plan)]
    write = _html if kind == "html" else _markdown
    return write(title, image, [table for table in tables if table.rows])


# ------------------------------------------------------------------ what is in it


def _figures(plan: Plan) -> _Table:
    def size(size_bytes: int | None) -> str:
        return (
            "none" if size_bytes is None else f"{format_bytes(size_bytes)} ({size_bytes:,} bytes)"
        )

    rows = [
        ("budget", size(plan.budget_bytes)),
        ("predicted peak", f"{size(plan.peak_bytes)}, while {plan.peak_operation} runs"),
        ("peak with nothing recomputed", size(plan.baseline_peak_bytes)),
        ("resident throughout the step", size(plan.problem.resident_bytes)),
        ("predicted step", format_seconds(plan.step_time_s)),
        ("step with nothing recomputed", format_seconds(plan.baseline_time_s)),
        ("extra compute", percent(plan.overhead)),
        ("proved distance from the optimum", f"at most {proved_percent(plan.gap)} of a step"),
        ("solver", f"{plan.solver}, {format_seconds(plan.solve_time_s)}"),
        *plan.origin.items(),
    ]
    if plan.minimum_bytes is not None:
        rows.insert(3, ("smallest budget found possible", size(plan.minimum_bytes)))
    return _Table("Figures", ("", ""), rows)


def _modules(plan: Plan) -> _Table:
    return _Table(
        "Forward tensors by module",
        ("module", "kept", "recomputed", "not needed", "extra time"),
        [
            (
                share.module,
                format_bytes(share.kept_bytes),
                format_bytes(share.recomputed_bytes),
                format_bytes(share.freed_bytes),
                format_seconds(share.extra_ns / 1e9),
            )
            for share in per_module(plan)
        ],
    )


def _peak(plan: Plan) -> _Table:
    rows = [
        (format_bytes(tensor.size_bytes), tensor.name, tensor.module_path, tensor.source)
        for tensor in plan.at_peak()
    ]
    return _Table("Tensors at the peak", ("size", "tensor", "module", "line"), rows)


def _decisions(plan: Plan) -> _Table:
    return _Table(
        "Decisions",
        ("tensor", "module", "line", "size", "what happens", "why"),
        [
            (
                decision.name,
                decision.module_path,
                decision.source,
                format_bytes(decision.size_bytes),
                decision.action if decision.times < 2 else f"{decision.action} {decision.times}x",
                decision.reason,
            )
            for decision in plan.decisions
        ],
    )


# ------------------------------------------------------------------ how it is written


def _markdown(title: str, image: str, tables: Sequence[_Table]) -> str:
    def line(row: Row) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"

    parts = [f"# {title}", ""]
    for table in tables:
        parts += [f"## {table.title}", "", line(table.head), "|" + "---|" * len(table.head)]
        parts += [*map(line, table.rows), ""]
        if image and table.title == "Figures":
            parts += [f"![live bytes over the time of the step]({image})", ""]
    return "\n".join(parts)


_STYLE = """\
body{font:15px/1.45 system-ui,sans-serif;margin:2em auto;max-width:72em;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:.5em 0 1.5em;font-size:14px}
td,th{border-bottom:1px solid #e1e4e8;padding:.25em .9em .25em 0;text-align:left;vertical-align:top}
img{max-width:100%}"""


def _html(title: str, image: str, tables: Sequence[_Table]) -> str:
    def line(row: Row, cell: str) -> str:
        return "<tr>" + "".join(f"<{cell}>{html.escape(text)}</{cell}>" for text in row) + "</tr>"

    name = html.escape(title)
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{name}</title>',
        f"<style>{_STYLE}</style></head><body>",
        f"<h1>{name}</h1>",
    ]
    for table in tables:
        head = [line(table.head, "th")] if any(table.head) else []
        rows = [line(row, "td") for row in table.rows]
        parts += [f"<h2>{html.escape(table.title)}</h2>", "<table>", *head, *rows, "</table>"]
        if image and table.title == "Figures":
            parts.append(f'<img alt="live bytes over the time of the step" src="{image}">')
    return "\n".join([*parts, "</body></html>", ""])
