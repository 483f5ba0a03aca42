"""Fit the training of a PyTorch model into a memory budget, at the least extra compute."""

from autockpt.ahead import plan
from autockpt.measure import measure
from autockpt.module import optimize, restore
from autockpt.out_of_memory import OutOfMemory
from autockpt_solvers.errors import (
    AutockptError,
    BudgetError,
    CaptureError,
    DoubleBackward,
    InfeasibleBudget,
    InputError,
    PinError,
    PlanFormatError,
    PlanMismatch,
    ScheduleError,
    SolverError,
    StaleInput,
    StepError,
)
from autockpt_solvers.plan import Plan

__all__ = [
    "AutockptError",
    "BudgetError",
    "CaptureError",
    "DoubleBackward",
    "InfeasibleBudget",
    "InputError",
    "OutOfMemory",
    "PinError",
    "Plan",
    "PlanFormatError",
    "PlanMismatch",
    "ScheduleError",
    "SolverError",
    "StaleInput",
    "StepError",
    "measure",
    "optimize",
    "plan",
    "restore",
]
