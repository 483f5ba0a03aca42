"""A bound beyond the relaxation's: spans of stages with binaries, at the relaxation's prices.

The relaxation mixes schedules that break the budget at different times and keep it on average. With
binaries a program says more, but as a whole it is too large to be solved with them. So its columns
are divided into spans of neighbouring stages. A row within one span stays a row there; every other
row is a price on the columns that it counts, its dual. What each span costs at these prices is
solved by itself; the sum bounds the whole::

    y'b of the priced rows  +  sum over spans of  min (c - y'A) x,  x whole and in the span's rows

**Why it holds for every schedule:** its point of the program meets the priced rows, so it costs no
less than the sum of these terms (a Lagrangean relaxation, after Geoffrion 1974); and that for any
prices of the right sign. At the duals of the relaxation's optimum the sum without binaries is the
relaxation's own bound, so with them it is at least that.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autockpt_solvers.highs import Floats, MipProcess, safe_bound, signed
from autockpt_solvers.methods.snapshot.program import SnapshotProgram

__all__ = ["Priced", "priced", "span_bound", "spans"]

# Binaries of a span: with more it says more, and is seldom solved in time.
BINARIES = 2000


@dataclass(frozen=True)
class Priced:
    """A program whose rows between spans are priced.

    Attributes:
        rest: what the rows and the columns outside the spans add to the bound.
        rows: for each span its rows.
        pieces: for each span its program, as arrays.
        bounds: for each span what the same duals prove of it.
    """

    rest: float
    rows: list[NDArray[np.int64]]
    pieces: list[dict[str, Any]]
    bounds: list[float]


def spans(program: SnapshotProgram, binaries: int = BINARIES) -> NDArray[np.int64]:
    """Return for each column its span, of so many binaries; -1 for columns of no stage."""
    stage = np.full(len(program.program.variables), -1)
    for columns in (program.resident, program.runs, program.later):
        for (_, k), column in columns.items():
            stage[column] = k
    whole = [k for columns in (program.resident, program.runs) for _, k in columns]
    spans_of, filled = [0], 0
    for count in np.bincount(whole, minlength=len(program.stages.ends)):
        full = filled > 0 and filled + count > binaries
        spans_of.append(spans_of[-1] + full)
        filled = count if full else filled + count
    of_stage = np.array(spans_of[1:], np.int64)
    return np.where(stage >= 0, of_stage[stage], -1)


def priced(arrays: dict[str, Any], duals: Floats, span: NDArray[np.int64]) -> Priced:
    """Return a program divided into spans, at the prices that its rows' duals are.

    Args:
        arrays: the program.
        duals: of its rows; any will do.
        span: for each column its span, or -1.
    """
    lower, upper = arrays["row_lower"], arrays["row_upper"]
    row = np.repeat(np.arange(len(lower)), np.diff(arrays["starts"]))
    first, last = np.full(len(lower), len(span)), np.full(len(lower), -1)
    np.minimum.at(first, row, span[arrays["columns"]])
    np.maximum.at(last, row, span[arrays["columns"]])
    own = np.where(first == last, first, -1)  # the span that a row lies in
    y = signed(arrays, duals)
    price = np.where(own < 0, y, 0.0)
    weights = arrays["values"] * price[row]
    cost = arrays["cost"] - np.bincount(
        arrays["columns"], weights=weights, minlength=len(arrays["cost"])
    )
    side = np.where(price > 0, lower, np.where(price < 0, upper, 0.0))
    box = np.where(cost < 0, cost * arrays["upper"], cost * arrays["lower"])
    result = Priced(float(price @ side + box[span < 0].sum()), [], [], [])
    for number in range(int(span.max(initial=-1)) + 1):
        columns, rows = np.flatnonzero(span == number), np.flatnonzero(own == number)
        here = own[row] == number
        length = np.bincount(row[here], minlength=len(lower))[rows]
        piece = {
            "cost": cost[columns],
            "lower": arrays["lower"][columns],
            "upper": arrays["upper"][columns],
            "integer": arrays["integer"][columns],
            "row_lower": lower[rows],
            "row_upper": upper[rows],
            "starts": np.concatenate([[0], np.cumsum(length)]).astype(np.int32),
            "columns": np.searchsorted(columns, arrays["columns"][here]).astype(np.int32),
            "values": arrays["values"][here],
        }
        result.rows.append(rows)
        result.pieces.append(piece)
        result.bounds.append(safe_bound(piece, y[rows]))
    return result


def span_bound(
    program: SnapshotProgram,
    arrays: dict[str, Any],
    duals: Floats,
    values: Floats,
    *,
    deadline: float,
) -> float:
    """Return a bound on a program's objective, from its spans with binaries.

    Args:
        program: the program.
        arrays: the same as its relaxation was solved, cuts and budget in it.
        duals: of the relaxation's rows.
        values: the relaxation's point.
        deadline: ``time.perf_counter()`` at which to stop; what is not solved counts as relaxed.
    """
    divided = priced(arrays, duals, spans(program))
    dear = _dear(program, arrays, duals, values)
    worth = [float(dear[rows].sum()) for rows in divided.rows]
    total = divided.rest
    # The span with the most to gain comes last and gets what time the others leave.
    todo = sum(worth)
    for number in np.argsort(worth, kind="stable"):
        bound = divided.bounds[number]
        left_s = deadline - time.perf_counter()
        if worth[number] > 0 and left_s > 0:
            bound = max(bound, _solved(divided.pieces[number], left_s * worth[number] / todo))
            todo -= worth[number]
        total += bound
    return total


def _dear(
    program: SnapshotProgram, arrays: dict[str, Any], duals: Floats, values: Floats
) -> Floats:
    """Return for each row what the bytes cost that a point holds in fractions; 0 for most.

    Where these are few binaries gain little.
    """
    row = np.repeat(np.arange(len(duals)), np.diff(arrays["starts"]))
    held = values[arrays["columns"]]
    broken = arrays["values"] * np.maximum(np.minimum(held, 1 - held), 0.0)
    dear = np.zeros(len(duals))
    memory = list(program.memory)
    dear[memory] = np.bincount(row, weights=broken, minlength=len(duals))[memory]
    return dear * np.maximum(-duals, 0.0)


def _solved(piece: dict[str, Any], limit_s: float) -> float:
    """Return what HiGHS proves of a span with binaries in time."""
    with MipProcess(piece) as process:
        bound = process.solve(time_limit_s=limit_s, relative_gap=1e-4).bound
    return bound if np.isfinite(bound) else -np.inf
