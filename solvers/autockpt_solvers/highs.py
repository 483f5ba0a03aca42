"""The one door to HiGHS: programs stated in PuLP, solved in bounded time.

A :class:`Program` is a ``pulp.LpProblem`` with numbered columns: ``program.model.writeLP(path)``
writes it for people. PuLP's own HiGHS solver hands a model over column by column and row by row;
:class:`WholeModel`, a subclass of it, hands it over as arrays and adds what PuLP leaves out: row
duals where the time is up, the dual bound of an unfinished search, and a start that HiGHS takes.

What stating a program in PuLP costs, measured in seconds on one core, beside arrays alone, and what
handing it over costs this solver and PuLP's own:

===================  =======  ======  ====  ======  ==============  ====
graph                columns  rows    PuLP  arrays  hand over here  PuLP
===================  =======  ======  ====  ======  ==============  ====
8-layer GPT            8,196  13,423  0.25    0.02            0.07  0.50
4-layer llama         16,207  26,774  0.37    0.04            0.10  0.84
ResNet-50             32,297  52,102  0.66    0.09            0.13  1.11
===================  =======  ======  ====  ======  ==============  ====

A solve of the first takes 1.5 s, of the others ten and more: there is no route around PuLP.

Integer programs run in a child process. HiGHS can overrun its time limit several-fold; the child
reports every better solution and bound as it comes, and is killed when the time is up. The child
is sent the arrays, not the model.
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
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import highspy  # type: ignore[import-untyped]
import numpy as np
import pulp  # type: ignore[import-untyped]
from numpy.typing import NDArray

__all__ = [
    "Floats",
    "LpResult",
    "MipProcess",
    "MipResult",
    "Program",
    "Relaxation",
    "WholeModel",
    "run_mip",
    "safe_bound",
    "signed",
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


class Program:
    """A linear or integer program to be minimised, as a PuLP model.

    Every column has finite bounds, so that any dual vector proves a bound.

    Attributes:
        model: the model.
        variables: its variables; a column is known by its number here.
        rows: its constraints, likewise.

    >>> program = Program("example")
    >>> x, y = program.variable("x", 1.0), program.variable("y", 2.0)
    >>> _ = program.row("cover", [(x, 1), (y, 1)], lower=1)
    >>> print(program.model)
    example:
    MINIMIZE
    1.0*x + 2.0*y + 0.0
    SUBJECT TO
    cover: x + y >= 1
    <BLANKLINE>
    VARIABLES
    0 <= x <= 1 Integer
    0 <= y <= 1 Integer
    <BLANKLINE>
    """

    def __init__(self, name: str = "program") -> None:
        self.model = pulp.LpProblem(name, pulp.LpMinimize)
        self.model.setObjective(pulp.LpAffineExpression())
        self.variables: list[Any] = []
        self.rows: list[Any] = []

    def variable(
        self, name: str, cost: float = 0.0, *, upper: float = 1.0, integer: bool = True
    ) -> int:
        """Add a column from 0 to ``upper`` and return its number. Names must differ."""
        category = pulp.LpInteger if integer else pulp.LpContinuous
        variable = self.model.add_variable(name, 0.0, upper, category)
        self.variables.append(variable)
        if cost:
            self.model.objective[variable] = cost
        return len(self.variables) - 1

    def row(
        self,
        name: str,
        terms: Iterable[tuple[int, float]],
        *,
        lower: float | None = None,
        upper: float | None = None,
    ) -> int:
        """Add a row bounded on one side and return its number.

        A column must not come twice; names must differ.
        """
        assert (lower is None) != (upper is None), "a row is bounded on one side"
        variables = self.variables
        expression = pulp.LpAffineExpression([(variables[column], v) for column, v in terms])
        sense = pulp.LpConstraintGE if upper is None else pulp.LpConstraintLE
        side = lower if upper is None else upper
        constraint = pulp.LpConstraint(expression, sense, name, side)
        self.model.addConstraint(constraint)
        self.rows.append(constraint)
        return len(self.rows) - 1

    def copy(self) -> Program:
        """Return a program that may grow without this one; the columns there are shared."""
        other = Program.__new__(Program)
        other.model = self.model.copy()
        other.variables, other.rows = list(self.variables), list(self.rows)
        return other

    def bound(self, column: int, *, lower: float = 0.0, upper: float = 1.0) -> None:
        """Change the bounds of a column."""
        self.variables[column].bounds(lower, upper)

    @property
    def cost(self) -> Floats:
        """The objective, by column."""
        objective = self.model.objective
        return np.array([objective.get(v, 0.0) for v in self.variables], np.float64)

    def arrays(self) -> dict[str, Any]:
        """Return the model as arrays, its rows one behind the other."""
        number = {variable.hash: n for n, variable in enumerate(self.variables)}
        starts, columns, values = [0], [], []
        for row in self.rows:
            columns += [number[variable.hash] for variable in row.keys()]  # noqa: SIM118
            values += row.values()
            starts.append(len(columns))
        lower = [row.getLb() for row in self.rows]
        upper = [row.getUb() for row in self.rows]
        return {
            "cost": self.cost,
            "lower": np.array([v.lowBound for v in self.variables], np.float64),
            "upper": np.array([v.upBound for v in self.variables], np.float64),
            "integer": np.array([v.cat == pulp.LpInteger for v in self.variables], bool),
            "row_lower": np.array([-INFINITY if b is None else b for b in lower], np.float64),
            "row_upper": np.array([INFINITY if b is None else b for b in upper], np.float64),
            "starts": np.array(starts, np.int32),
            "columns": np.array(columns, np.int32),
            "values": np.array(values, np.float64),
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


class WholeModel(pulp.HiGHS):  # type: ignore[misc]
    """PuLP's HiGHS solver, the model handed over at once; for ``LpProblem.solve``.

    Attributes:
        highs: HiGHS after the run, with everything it knows.
    """

    def __init__(
        self,
        arrays: dict[str, Any],
        *,
        start: Sequence[float] | None = None,
        watch: Callable[[highspy.Highs], None] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(msg=False, threads=1, **options)
        self.arrays = arrays
        self.start = start
        self.watch = watch
        self.highs: highspy.Highs = None

    def buildSolverModel(self, lp: pulp.LpProblem) -> None:  # noqa: N802
        """Pass the arrays, the start and the callbacks to HiGHS."""
        arrays, self.highs = self.arrays, lp.solverModel
        rows = highspy.HighsLp()
        rows.num_col_ = len(arrays["cost"])
        rows.num_row_ = len(arrays["row_lower"])
        rows.col_cost_ = arrays["cost"]
        rows.col_lower_ = arrays["lower"]
        rows.col_upper_ = arrays["upper"]
        rows.row_lower_ = arrays["row_lower"]
        rows.row_upper_ = arrays["row_upper"]
        rows.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        rows.a_matrix_.start_ = arrays["starts"]
        rows.a_matrix_.index_ = arrays["columns"]
        rows.a_matrix_.value_ = arrays["values"]
        if self.mip:
            kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
            rows.integrality_ = [kinds[int(i)] for i in arrays["integer"]]
        self.highs.passModel(rows)
        if self.start is not None:
            solution = highspy.HighsSolution()
            solution.col_value = list(self.start)
            self.highs.setSolution(solution)
        if self.watch is not None:
            self.watch(self.highs)

    def findSolutionValues(self, lp: pulp.LpProblem) -> tuple[int, int]:  # noqa: N802
        """Return PuLP's words for how the run ended; the values stay with HiGHS, by column."""
        lp.solverModel = None  # what is large is not to live as long as the model
        status = self.highs.getModelStatus()
        if status == highspy.HighsModelStatus.kOptimal:
            return pulp.LpStatusOptimal, pulp.LpSolutionOptimal
        if status == highspy.HighsModelStatus.kInfeasible:
            return pulp.LpStatusInfeasible, pulp.LpSolutionInfeasible
        return pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound

    def actualSolve(self, lp: pulp.LpProblem) -> int:  # noqa: N802
        """Solve; PuLP's own marks every variable and row as unchanged, which nothing here reads."""
        self.createAndConfigureSolver(lp)
        self.buildSolverModel(lp)
        self.callSolver(lp)
        status, solution = self.findSolutionValues(lp)
        lp.assignStatus(status, solution)
        return status


def solve_lp(program: Program, *, time_limit_s: float) -> LpResult:
    """Return the solution of the relaxation, or what is proved when the time is up.

    Args:
        program: the program; its integrality is ignored.
        time_limit_s: time limit, in seconds.
    """
    arrays = program.arrays()
    solver = WholeModel(arrays, mip=False, timeLimit=max(time_limit_s, 0.01))
    program.model.solve(solver)
    return _lp_result(solver.highs, arrays)


def _lp_result(highs: Any, arrays: dict[str, Any]) -> LpResult:
    """What a run of HiGHS has found, with the bound that its duals prove."""
    status = highs.getModelStatus()
    if status == highspy.HighsModelStatus.kInfeasible:
        return LpResult("infeasible", None, None, INFINITY)
    solution = highs.getSolution()
    duals = np.array(solution.row_dual) if solution.dual_valid else None
    values = np.array(solution.col_value) if solution.value_valid else None
    done = status == highspy.HighsModelStatus.kOptimal
    bound = safe_bound(arrays, duals) if duals is not None else -INFINITY
    return LpResult("optimal" if done else "stopped", values if done else None, duals, bound)


class Relaxation:
    """A linear program to be solved at many right sides, each from where the last one ended.

    Args:
        program: the program; its integrality is ignored.
        arrays: its arrays, where they are at hand.
    """

    def __init__(self, program: Program, arrays: dict[str, Any] | None = None) -> None:
        self.program = program
        self.arrays = program.arrays() if arrays is None else dict(arrays)
        self._highs: highspy.Highs = None

    def solve(self, row_upper: Floats, *, time_limit_s: float) -> LpResult:
        """Return the solution for other upper sides of the rows, or what is proved in time."""
        changed = np.flatnonzero(row_upper != self.arrays["row_upper"])
        self.arrays["row_upper"] = row_upper
        limit_s = max(time_limit_s, 0.01)
        if self._highs is None:
            solver = WholeModel(self.arrays, mip=False, timeLimit=limit_s)
            self.program.model.solve(solver)
            self._highs = solver.highs
        else:
            lower = self.arrays["row_lower"]
            for row in changed:
                self._highs.changeRowBounds(int(row), lower[row], row_upper[row])
            # Its clock goes on from run to run.
            self._highs.setOptionValue("time_limit", self._highs.getRunTime() + limit_s)
            self._highs.run()
        return _lp_result(self._highs, self.arrays)

    def cover(self, rows: Sequence[Sequence[int]]) -> None:
        """Add rows that the sum of some columns is at least 1, to the program too."""
        for row in rows:
            name = f"cover({len(self.program.rows)})"
            self.program.row(name, [(column, 1.0) for column in row], lower=1)
        columns = np.array([column for row in rows for column in row], np.int32)
        ends = np.cumsum([len(row) for row in rows]).astype(np.int32)
        before = self.arrays["starts"][-1]
        lower, upper = np.ones(len(rows)), np.full(len(rows), INFINITY)
        for name, more in (
            ("row_lower", lower),
            ("row_upper", upper),
            ("starts", before + ends),
            ("columns", columns),
            ("values", np.ones(len(columns))),
        ):
            self.arrays[name] = np.concatenate([self.arrays[name], more])
        if self._highs is not None:
            starts = np.concatenate([[0], ends[:-1]]).astype(np.int32)
            ones = np.ones(len(columns))
            self._highs.addRows(len(rows), lower, upper, len(columns), starts, columns, ones)


def safe_bound(arrays: dict[str, Any], duals: Floats) -> float:
    """Return the bound that any dual vector proves: y'b + sum of min(0, reduced cost) * upper.

    Weak duality over a box; what the solver says about itself does not enter.
    """
    lower, upper = arrays["row_lower"], arrays["row_upper"]
    y = signed(arrays, duals)
    rows = np.repeat(np.arange(len(lower)), np.diff(arrays["starts"]))
    weights = arrays["values"] * y[rows]
    reduced = arrays["cost"] - np.bincount(
        arrays["columns"], weights=weights, minlength=len(arrays["cost"])
    )
    finite = np.where(y > 0, lower, np.where(y < 0, upper, 0.0))
    box = np.where(reduced < 0, reduced * arrays["upper"], reduced * arrays["lower"])
    return float(y @ np.where(y == 0, 0.0, finite) + box.sum())


def signed(arrays: dict[str, Any], duals: Floats) -> Floats:
    """Return duals of the rows, 0 in place of those that have the wrong sign for their row."""
    y = np.where((duals > 0) & ~np.isfinite(arrays["row_lower"]), 0.0, duals)
    result: Floats = np.where((y < 0) & ~np.isfinite(arrays["row_upper"]), 0.0, y)
    return result


def run_mip(
    arrays: dict[str, Any], request: dict[str, Any], report: Callable[[Message], None]
) -> Message:
    """Return the end of an integer program, as ``(status, values, objective, bound)``.

    Args:
        arrays: the program.
        request: ``time_limit``, ``gap``, ``absolute_gap``, ``nodes``, ``start`` and the columns'
            ``lower`` and ``upper``.
        report: called with the same, status None, for each better solution or bound.
    """
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

    def watch(highs: highspy.Highs) -> None:
        highs.cbMipImprovingSolution += better
        highs.cbMipLogging += logged

    solver = WholeModel(
        {**arrays, "lower": request["lower"], "upper": request["upper"]},
        start=request["start"],
        watch=watch,
        timeLimit=request["time_limit"],
        gapRel=request["gap"],
        gapAbs=request["absolute_gap"],
        mip_max_nodes=request["nodes"],
    )
    # The model itself stayed with the parent; what is solved are its arrays.
    status = pulp.LpProblem("arrays").solve(solver)
    highs = solver.highs
    if status == pulp.LpStatusInfeasible:
        return ("infeasible", None, INFINITY, INFINITY)
    info = highs.getInfo()
    values = None
    if info.primal_solution_status == 2:
        values = np.array(highs.getSolution().col_value)
    bound = float(info.mip_dual_bound)
    objective = float(info.objective_function_value) if values is not None else INFINITY
    done = status == pulp.LpStatusOptimal
    return ("optimal" if done else "stopped", values, objective, bound)


class MipProcess:
    """A child process that solves integer programs and can be killed; a context manager.

    The program is sent once; each :meth:`solve` may change column bounds.

    Args:
        program: the program, or its arrays.

    Attributes:
        arrays: the program as it is sent.
    """

    def __init__(self, program: Program | dict[str, Any]) -> None:
        self.arrays = program.arrays() if isinstance(program, Program) else program
        self._child: subprocess.Popen[bytes] | None = None
        self._messages: queue.Queue[Any] = queue.Queue()

    def __enter__(self) -> MipProcess:  # noqa: PYI034 - Self needs Python 3.11
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
        absolute_gap: float = 1e-6,
        nodes: int | None = None,
        start: Sequence[float] | None = None,
        lower: Floats | None = None,
        upper: Floats | None = None,
    ) -> MipResult:
        """Return the best solution and bound within the time, whatever HiGHS does.

        Args:
            time_limit_s: time limit, in seconds.
            relative_gap: relative gap between solution and bound that ends the search.
            absolute_gap: the same, absolute.
            nodes: nodes of the search tree that end it: the same on every machine.
            start: the columns of a solution to start from.
            lower: lower bounds of the columns in place of the program's.
            upper: upper bounds likewise.
        """
        deadline = time.perf_counter() + time_limit_s
        request = {
            "time_limit": max(time_limit_s - 0.05, 0.05),
            "gap": relative_gap,
            "absolute_gap": absolute_gap,
            "nodes": nodes,
            "start": None if start is None else np.array(start, np.float64),
            "lower": self.arrays["lower"] if lower is None else lower,
            "upper": self.arrays["upper"] if upper is None else upper,
        }
        if len(self.arrays["cost"]) <= SMALL:
            status, values, objective, bound = run_mip(self.arrays, request, lambda message: None)
            return MipResult(status or "stopped", values, objective, bound)
        result = MipResult("stopped", None, INFINITY, -INFINITY)
        try:
            child = self._start()
            assert child.stdin is not None
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
            pickle.dump(self.arrays, self._child.stdin)
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
