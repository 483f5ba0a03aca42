"""The torch-free half of autockpt: the problem, the memory model and the solvers.

>>> import autockpt_solvers
>>> sorted(autockpt_solvers.METHODS)[-3:]
['revolve', 'rotor', 'snapshot']
"""

from __future__ import annotations

from autockpt_solvers.bounds import lower_bound
from autockpt_solvers.errors import (
    AutockptError,
    BudgetError,
    CaptureError,
    InfeasibleBudget,
    InputError,
    PinError,
    PlanFormatError,
    PlanMismatch,
    ScheduleError,
    SolverError,
    StepError,
)
from autockpt_solvers.memory import Trace, live_storages, simulate
from autockpt_solvers.methods import METHODS
from autockpt_solvers.minimum import Minimum, minimum
from autockpt_solvers.problem import Operation, Problem, Storage
from autockpt_solvers.schedule import BARRIER, Barrier, Compute, Free, Schedule, free_early
from autockpt_solvers.solution import Outcome, Solution
from autockpt_solvers.solve import solve
from autockpt_solvers.sweep import sweep

__all__ = [
    "BARRIER",
    "METHODS",
    "AutockptError",
    "Barrier",
    "BudgetError",
    "CaptureError",
    "Compute",
    "Free",
    "InfeasibleBudget",
    "InputError",
    "Minimum",
    "Operation",
    "Outcome",
    "PinError",
    "PlanFormatError",
    "PlanMismatch",
    "Problem",
    "Schedule",
    "ScheduleError",
    "Solution",
    "SolverError",
    "StepError",
    "Storage",
    "Trace",
    "free_early",
    "live_storages",
    "lower_bound",
    "minimum",
    "simulate",
    "solve",
    "sweep",
]
