"""The picture: live bytes over the time of one step, with and without recomputation."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, BinaryIO

from autockpt_solvers.errors import AutockptError
from autockpt_solvers.plan import Plan
from autockpt_solvers.timeline import TimelinePoint
from autockpt_solvers.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_timeline", "new_figure", "save_figure"]

_BASELINE, _PLAN, _RECOMPUTE, _LIMIT, _MEASURED = (
    "#8a8f98",
    "#1f5fa8",
    "#e8923a",
    "#b3202c",
    "#2f7d4f",
)


def draw_timeline(
    plan: Plan, path: str | os.PathLike[str] | BinaryIO, measured: int | None = None
) -> None:
    """Write a picture of the plan's memory timeline; the suffix of ``path`` says its format.

    Args:
        plan: the plan to draw.
        path: where to write it, ``timeline.png`` or ``timeline.svg``; PNG into an open file.
        measured: the measured peak of a step, in bytes, marked where the plan peaks.

    Raises:
        AutockptError: where matplotlib is not installed or does not know the format.
        OSError: where the file cannot be written.
    """
    figure = new_figure()
    axes = figure.subplots()
    # The unit the plan's peak reads in; "bytes" itself leaves the scale at 1.
    unit = format_bytes(plan.peak_bytes).split()[-1]
    scale = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}[unit]
    highest = max(plan.baseline_peak_bytes, plan.peak_bytes, measured or 0)
    if plan.budget_bytes is not None and plan.budget_bytes < 1.5 * highest:
        highest = max(highest, plan.budget_bytes)
    duration_s = plan.timeline[-1].time_s
    time_unit, per_s = next(
        ((u, f) for u, f in (("s", 1.0), ("ms", 1e3), ("us", 1e6)) if duration_s * f >= 1),
        ("us", 1e6),
    )
    axes.set_xlim(0, max(duration_s * per_s, 1e-9))
    axes.set_ylim(0, highest / scale * 1.12 or 1)
    _draw_steps(axes, plan, per_s, scale)
    _draw_limits(axes, plan, measured, per_s, scale)
    axes.set_xlabel(f"time since the step began ({time_unit}, predicted)")
    axes.set_ylabel(f"allocated memory ({unit})")
    model = plan.origin.get("model") or plan.problem.name or "one training step"
    axes.set_title(
        f"{model}: peak {format_bytes(plan.peak_bytes)} instead of "
        f"{format_bytes(plan.baseline_peak_bytes)}, {plan.overhead * 100:.1f} % extra compute",
        loc="left",
        fontsize=12,
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e4e6ea", linewidth=0.8)
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    save_figure(figure, path)


def new_figure() -> Figure:
    """Return an empty figure, which needs no display and leaves pyplot's state alone.

    Raises:
        AutockptError: where matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise AutockptError(
            "drawing needs matplotlib: install it with `pip install 'autockpt[plot]'`."
        ) from error
    return Figure(figsize=(10, 5.6), dpi=150, layout="constrained")


def save_figure(figure: Figure, path: str | os.PathLike[str] | BinaryIO) -> None:
    """Write a figure in the format that the suffix of ``path`` says, PNG into an open file.

    Raises:
        AutockptError: where matplotlib does not know the format.
        OSError: where the file cannot be written.
    """
    try:
        figure.savefig(path)
    except ValueError as error:
        named = os.fspath(path) if isinstance(path, (str, os.PathLike)) else "the picture"
        raise AutockptError(f"cannot draw {named}: {error}") from error


def _draw_steps(axes: Axes, plan: Plan, per_s: float, scale: int) -> None:
    for points, colour, label in (
        (plan.baseline_timeline, _BASELINE, "nothing recomputed"),
        (plan.timeline, _PLAN, "this plan"),
    ):
        times = [point.time_s * per_s for point in points]
        sizes = [point.live_bytes / scale for point in points]
        width = 1.2 if colour == _BASELINE else 1.8
        axes.fill_between(times, sizes, step="post", color=colour, alpha=0.12, linewidth=0)
        axes.step(times, sizes, where="post", color=colour, linewidth=width, label=label)
    label = "recomputing"
    for start_s, end_s in _recomputing(plan.timeline):
        axes.axvspan(
            start_s * per_s, end_s * per_s, ymax=0.025, color=_RECOMPUTE, linewidth=0, label=label
        )
        label = ""  # one entry in the legend for all of them
    backward_s = next((p.time_s for p in plan.timeline if p.phase == "backward"), None)
    if backward_s:
        axes.axvline(backward_s * per_s, color="#9aa0aa", linewidth=1, linestyle=(0, (2, 3)))
        for name, side in (("forward ", "right"), (" backward", "left")):
            axes.text(
                backward_s * per_s,
                0.98,
                name,
                transform=axes.get_xaxis_transform(),
                ha=side,
                va="top",
                color="#6b717b",
            )


def _draw_limits(axes: Axes, plan: Plan, measured: int | None, per_s: float, scale: int) -> None:
    if plan.budget_bytes is not None:
        # One far above everything else would press the curves to the ground.
        above = plan.budget_bytes / scale > axes.get_ylim()[1]
        axes.axhline(
            plan.budget_bytes / scale,
            color=_LIMIT,
            linewidth=1.6,
            linestyle="--",
            label=f"budget: {format_bytes(plan.budget_bytes)}{' (above)' if above else ''}",
        )
    if measured is not None:
        # A mark where the plan peaks: a line would lie under the budget's.
        peak = max(plan.timeline, key=lambda point: point.live_bytes)
        axes.plot(
            [peak.time_s * per_s],
            [measured / scale],
            color=_MEASURED,
            marker="D",
            markersize=8,
            markeredgecolor="white",
            linestyle="none",
            zorder=5,
            label=f"measured peak: {format_bytes(measured)}",
        )


def _recomputing(points: Sequence[TimelinePoint]) -> Iterator[tuple[float, float]]:
    """Yield the stretches of time spent on recomputation, start and end in seconds."""
    for again, group in groupby(pairwise(points), key=lambda pair: pair[0].phase == "recompute"):
        if again:
            stretch = list(group)
            yield stretch[0][0].time_s, stretch[-1][1].time_s
