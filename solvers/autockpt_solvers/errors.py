"""Every error autockpt raises on purpose.

::

    AutockptError
    ├── BudgetError (ValueError)      the budget cannot be read
    ├── InfeasibleBudget              no schedule fits the budget
    ├── PinError (ValueError)         a keep= or recompute= pattern cannot be met
    ├── CaptureError                  the model cannot be captured as one training graph
    ├── InputError (TypeError)        the inputs do not fit the model's forward
    ├── StaleInput (RuntimeError)     a value the backward reads was overwritten after the forward
    ├── DoubleBackward (RuntimeError) a gradient of a gradient, which a planned step does not have
    ├── PlanMismatch                  a loaded plan was made for another model, input or torch
    ├── PlanFormatError (ValueError)  a file is not a plan of a version this release reads
    ├── StepError                     step, micro_step or flush cannot be taken now
    ├── ScheduleError                 a schedule breaks a dependency or a rule of the problem
    ├── SolverError                   a method failed, or was asked for something it cannot do
    └── OutOfMemory                   a step ran out of memory; defined beside torch, whose
                                      OutOfMemoryError it is as well

Each message says what was found and what to do next.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "AutockptError",
    "BudgetError",
    "CaptureError",
    "DoubleBackward",
    "InfeasibleBudget",
    "InputError",
    "PinError",
    "PlanFormatError",
    "PlanMismatch",
    "ScheduleError",
    "SolverError",
    "StaleInput",
    "StepError",
]


class AutockptError(Exception):
    """The root of every error autockpt raises on purpose."""


class BudgetError(AutockptError, ValueError):
    """The budget is not one of the accepted forms."""


class InfeasibleBudget(AutockptError):
    """No schedule of the stated problem fits the budget, or none was found and more is not known.

    Attributes:
        budget_bytes: the budget that was asked for.
        minimum_bytes: the smallest budget a schedule was found for; planning with it succeeds.
        tensors: ``(name, size_bytes)`` of what makes the minimum's peak, largest first: tensors
            with their module and source line, the workspace of the operation that runs there, and
            what is resident throughout. The bytes add up to ``minimum_bytes``.
        bound_bytes: it is proved that no schedule fits less; None: as for ``minimum_bytes``.
    """

    def __init__(
        self,
        budget_bytes: int,
        minimum_bytes: int,
        tensors: Sequence[tuple[str, int]] = (),
        hint: str = "",
        bound_bytes: int | None = None,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.minimum_bytes = minimum_bytes
        self.tensors = tuple(tensors)
        self.hint = hint
        self.bound_bytes = minimum_bytes if bound_bytes is None else bound_bytes
        if self.proved:
            first = f"no schedule fits a budget of {budget_bytes:,} bytes"
        else:
            first = (
                f"no schedule was found for a budget of {budget_bytes:,} bytes (that there is none "
                f"is proved below {self.bound_bytes:,})"
            )
        lines = [f"{first}; the smallest feasible budget is {minimum_bytes:,} bytes."]
        if self.tensors:
            lines.append("At that minimum the peak is made of:")
            lines += [f"  {size:>16,} bytes  {name}" for name, size in self.tensors[:8]]
        if hint:
            lines.append(hint)
        lines.append(f"Raise the budget to {minimum_bytes:,} bytes or use a smaller batch.")
        super().__init__("\n".join(lines))

    @property
    def proved(self) -> bool:
        """Whether no schedule fits the budget, rather than none was found."""
        return self.budget_bytes < self.bound_bytes

    def __reduce__(self) -> tuple[object, ...]:
        said = (self.budget_bytes, self.minimum_bytes, self.tensors, self.hint, self.bound_bytes)
        return (type(self), said)


class PinError(AutockptError, ValueError):
    """A manual pin cannot be applied."""


class CaptureError(AutockptError):
    """The model cannot be captured as one training graph; the message names the source line."""


class InputError(AutockptError, TypeError):
    """The inputs do not fit the model's forward."""


class StaleInput(AutockptError, RuntimeError):
    """A parameter, buffer or input was written in place between a forward and its backward."""


class DoubleBackward(AutockptError, RuntimeError):
    """A backward through a planned backward: gradients of gradients need the plain model."""


class PlanMismatch(AutockptError):
    """A plan was made for another graph than the one captured."""


class PlanFormatError(AutockptError, ValueError):
    """A file is not a plan, or of a version this release does not read."""


class StepError(AutockptError):
    """A step, micro-step or flush cannot be taken as things are."""


class ScheduleError(AutockptError):
    """A schedule breaks a dependency or a rule of its problem."""


class SolverError(AutockptError):
    """A solver method failed, or was asked for something it cannot do."""
