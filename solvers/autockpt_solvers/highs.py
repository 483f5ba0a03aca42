"""The one door to HiGHS: linear and integer programs as arrays, solved in bounded time.

PuLP, the modelling language of the other programs, is not used here: stage programs have 10^4
columns and 10^5 nonzeros, which PuLP takes longer to build than HiGHS to solve, and three things
are needed that it does not hand through: row duals at a time limit, the dual bound of an
unfinished search, and a start.

Integer programs run in a child process. HiGHS can overrun its time limit several-fold; the child
reports every better solution and bound as it comes, and is killed when the time is up.
"""

from __future__ import annotations

import contextlib
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import highspy  # type: ignore[import-untyped]
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "Floats",
    "LpResult",
    "MipProcess",
    "MipResult",
    "Program",
    "run_mip",
    "safe_bound",
    "solve_lp",
]

Floats = NDArray[np.float64]
INFINITY = float("inf")
# How long past its limit HiGHS may come to an end by itself, as a share of the limit.
GRACE = 0.1
# Programs of so few columns are solved in this process: they take less than a child's start.
SMALL = 1500

# (status or None, values or None, objective, bound)
Message = tuple[str | None, Floats | None, float, float]


@dataclass
class Program:
    """Minimise ``cost @ x`` subject to ``row_lower <= A x <= row_upper``, ``lower <= x <= upper``.

    Every column has finite bounds, so that any dual vector proves a bound.
    """

    cost: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    row_lower: list[float] = field(default_factory=list)
    row_upper: list[float] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    columns: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def variable(self, cost: float = 0.0, *, upper: float = 1.0, integer: bool = True) -> int:
        """Add a column from 0 to ``upper`` and return its number."""
        self.cost.append(cost)
        self.lower.append(0.0)
        self.upper.append(upper)
        self.integer.append(integer)
        return len(self.cost) - 1

    def row(
        self,
        terms: Iterable[tuple[int, float]],
        lower: float = -INFINITY,
        upper: float = INFINITY,
    ) -> int:
        """Add a row and return its number. A column must not come twice."""
        for column, value in terms:
            self.columns.append(column)
            self.values.append(value)
        self.starts.append(len(self.columns))
        self.row_lower.append(lower)
        self.row_upper.append(upper)
        return len(self.row_lower) - 1

    def arrays(self) -> dict[str, Any]:
        """Return the program as arrays."""
        return {
            "cost": np.array(self.cost, np.float64),
            "lower": np.array(self.lower, np.float64),
            "upper": np.array(self.upper, np.float64),
            "integer": np.array(self.integer, bool),
            "row_lower": np.array(self.row_lower, np.float64),
            "row_upper": np.array(self.row_upper, np.float64),
            "starts": np.array(self.starts, np.int32),
            "columns": np.array(self.columns, np.int32),
            "values": np.array(self.values, np.float64),
        }


@dataclass(frozen=True)
class LpResult:
    """The end of a linear program.

    Attributes:
        status: ``"optimal"``, ``"infeasible"`` or ``"stopped"``.
        values: the columns; None where there is no solution.
        duals: the rows' duals; None where there are none.
        bound: lower bound on the objective, recomputed from the duals; see :func:`safe_bound`.
    """

    status: str
    values: Floats | None
    duals: Floats | None
    bound: float


@dataclass(frozen=True)
class MipResult:
    """The end of an integer program, or what was known when its time was up.

    Attributes:
        status: ``"optimal"``, ``"infeasible"`` or ``"stopped"``.
        values: the best solution's columns, or None.
        objective: its objective; infinite where there is none.
        bound: the dual bound; minus infinity where there is none.
    """

    status: str
    values: Floats | None
    objective: float
    bound: float


def load(highs: highspy.Highs, arrays: dict[str, Any], *, relaxed: bool) -> None:
    """Pass a program's arrays to HiGHS."""
    lp = highspy.HighsLp()
    lp.num_col_ = len(arrays["cost"])
    lp.num_row_ = len(arrays["row_lower"])
    lp.col_cost_ = arrays["cost"]
    lp.col_lower_ = arrays["lower"]
    lp.col_upper_ = arrays["upper"]
    lp.row_lower_ = arrays["row_lower"]
    lp.row_upper_ = arrays["row_upper"]
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = arrays["starts"]
    lp.a_matrix_.index_ = arrays["columns"]
    lp.a_matrix_.value_ = arrays["values"]
    if not relaxed:
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        lp.integrality_ = [kinds[int(i)] for i in arrays["integer"]]
    highs.passModel(lp)


def solve_lp(program: Program, *, time_limit_s: float, interior: bool = False) -> LpResult:
    """Return the solution of the relaxation, or what is proved when the time is up.

    Args:
        program: the program; its integrality is ignored.
        time_limit_s: time limit, in seconds.
        interior: interior point without crossover, faster on large programs; its solution lies
            inside a face instead of at a corner.
    """
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("threads", 1)
    highs.setOptionValue("time_limit", max(float(time_limit_s), 0.01))
    if interior:
        highs.setOptionValue("solver", "ipm")
        highs.setOptionValue("run_crossover", "off")
    arrays = program.arrays()
    load(highs, arrays, relaxed=True)
    highs.run()
    status = highs.getModelStatus()
    if status == highspy.HighsModelStatus.kInfeasible:
        return LpResult("infeasible", None, None, INFINITY)
    solution = highs.getSolution()
    duals = np.array(solution.row_dual) if solution.dual_valid else None
    values = np.array(solution.col_value) if solution.value_valid else None
    done = status == highspy.HighsModelStatus.kOptimal
    bound = safe_bound(arrays, duals) if duals is not None else -INFINITY
    return LpResult("optimal" if done else "stopped", values if done else None, duals, bound)


def safe_bound(arrays: dict[str, Any], duals: Floats) -> float:
    """Return the bound that any dual vector proves: y'b + sum of min(0, reduced cost) * upper.

    Weak duality over a box; what the solver says about itself does not enter. A dual of the
    wrong sign for its row is set to 0.
    """
    lower, upper = arrays["row_lower"], arrays["row_upper"]
    y = np.where((duals > 0) & ~np.isfinite(lower), 0.0, duals)
    y = np.where((y < 0) & ~np.isfinite(upper), 0.0, y)
    rows = np.repeat(np.arange(len(lower)), np.diff(arrays["starts"]))
    weights = arrays["values"] * y[rows]
    reduced = arrays["cost"] - np.bincount(
        arrays["columns"], weights=weights, minlength=len(arrays["cost"])
    )
    finite = np.where(y > 0, lower, np.where(y < 0, upper, 0.0))
    box = np.where(reduced < 0, reduced * arrays["upper"], reduced * arrays["lower"])
    return float(y @ np.where(y == 0, 0.0, finite) + box.sum())


def run_mip(
    arrays: dict[str, Any], request: dict[str, Any], report: Callable[[Message], None]
) -> Message:
    """Return the end of an integer program, as ``(status, values, objective, bound)``.

    Args:
        arrays: the program.
        request: ``time_limit``, ``gap``, ``start`` and the columns' ``lower`` and ``upper``.
        report: called with the same, status None, for each better solution or bound.
    """
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("threads", 1)
    highs.setOptionValue("time_limit", float(request["time_limit"]))
    highs.setOptionValue("mip_rel_gap", float(request["gap"]))
    bounds = {"lower": request["lower"], "upper": request["upper"]}
    load(highs, {**arrays, **bounds}, relaxed=False)
    if request["start"] is not None:
        solution = highspy.HighsSolution()
        solution.col_value = list(request["start"])
        highs.setSolution(solution)
    sent = [-INFINITY]

    def better(event: Any) -> None:
        out = event.data_out
        bound = float(out.mip_dual_bound)
        report((None, np.array(out.mip_solution), float(out.objective_function_value), bound))

    def logged(event: Any) -> None:
        bound = float(event.data_out.mip_dual_bound)
        if bound > sent[0]:
            sent[0] = bound
            report((None, None, INFINITY, bound))

    highs.cbMipImprovingSolution += better
    highs.cbMipLogging += logged
    highs.run()
    status = highs.getModelStatus()
    info = highs.getInfo()
    if status == highspy.HighsModelStatus.kInfeasible:
        return ("infeasible", None, INFINITY, INFINITY)
    values = None
    if info.primal_solution_status == 2:
        values = np.array(highs.getSolution().col_value)
    done = status == highspy.HighsModelStatus.kOptimal
    bound = float(info.mip_dual_bound)
    objective = float(info.objective_function_value) if values is not None else INFINITY
    return ("optimal" if done else "stopped", values, objective, bound)


class MipProcess:
    """A child process that solves integer programs and can be killed; a context manager.

    The program is sent once; each :meth:`solve` may change column bounds.
    """

    def __init__(self, program: Program) -> None:
        self._arrays = program.arrays()
        self._child: subprocess.Popen[bytes] | None = None
        self._messages: queue.Queue[Any] = queue.Queue()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    def kill(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.kill()
            for pipe in (self._child.stdin, self._child.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):  # what the child never read
                        pipe.close()
            self._child.wait()
            self._child = None

    def solve(
        self,
        *,
        time_limit_s: float,
        relative_gap: float,
        start: Sequence[float] | None = None,
        lower: Floats | None = None,
        upper: Floats | None = None,
    ) -> MipResult:
        """Return the best solution and bound within the time, whatever HiGHS does."""
        deadline = time.perf_counter() + time_limit_s
        request = {
            "time_limit": max(time_limit_s - 0.05, 0.05),
            "gap": relative_gap,
            "start": None if start is None else np.array(start, np.float64),
            "lower": self._arrays["lower"] if lower is None else lower,
            "upper": self._arrays["upper"] if upper is None else upper,
        }
        if len(self._arrays["cost"]) <= SMALL:
            status, values, objective, bound = run_mip(self._arrays, request, lambda message: None)
            return MipResult(status or "stopped", values, objective, bound)
        result = MipResult("stopped", None, INFINITY, -INFINITY)
        child = self._start()
        assert child.stdin is not None
        try:
            pickle.dump(request, child.stdin)
            child.stdin.flush()
        except OSError:
            self.kill()
            return result
        while True:
            left = deadline + GRACE * time_limit_s + 0.2 - time.perf_counter()
            try:
                message = self._messages.get(timeout=max(left, 0.001))
            except queue.Empty:
                self.kill()
                return result
            if message is None:  # the child died: out of memory, or a crash in HiGHS
                self.kill()
                return result
            status, values, objective, bound = message
            result = MipResult(
                status or "stopped",
                result.values if values is None else values,
                result.objective if values is None else objective,
                max(result.bound, bound),
            )
            if status is not None:
                return result

    def _start(self) -> subprocess.Popen[bytes]:
        if self._child is None:
            root = str(Path(__file__).resolve().parent.parent)
            command = (
                "import sys; sys.path.insert(0, sys.argv[1]);"
                "from autockpt_solvers.highs_child import main; main()"
            )
            self._child = subprocess.Popen(
                [sys.executable, "-c", command, root],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            self._messages = queue.Queue()
            threading.Thread(target=_read, args=(self._child, self._messages), daemon=True).start()
            assert self._child.stdin is not None
            pickle.dump(self._arrays, self._child.stdin)
            self._child.stdin.flush()
        return self._child


def _read(child: subprocess.Popen[bytes], messages: queue.Queue[Any]) -> None:
    """Move the child's messages into a queue until it ends."""
    assert child.stdout is not None
    try:
        while True:
            messages.put(pickle.load(child.stdout))
    except (EOFError, OSError, ValueError, pickle.UnpicklingError):
        messages.put(None)
