"""Ahead: a plan for a model that does not run yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from autockpt.module import as_tuple, require_trainable
from autockpt.planner import Planner
from autockpt.planning import options_of
from autockpt.roofline import GPUS, modelled
from autockpt.weights import fake_copy, is_fake
from autockpt_solvers.errors import InputError
from autockpt_solvers.plan import Plan

__all__ = ["plan"]


def plan(
    model: nn.Module,
    example_inputs: tuple[Any, ...] | None,
    budget: int | str | None,
    *,
    device: str | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    optimizer: Optimizer | None = None,
    solver: str = "auto",
    time_limit: float = 60.0,
    keep: Sequence[str] = (),
    recompute: Sequence[str] = (),
    inplace: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """Return the plan that ``optimize`` would make for these inputs. Runs no step.

    The operations are measured one by one on the model's device, or modelled for a GPU that is
    not here; then weights and inputs need no data (meta or fake tensors). The model is not
    changed.

    Args:
        model: the model to train.
        example_inputs: positional arguments of a training forward.
        budget: as in :func:`autockpt.optimize`.
        device: a GPU's name (``autockpt devices`` lists them) to model; None to measure on the
            device that the model lives on.
        example_kwargs: keyword arguments of a training forward.
        optimizer: the optimizer of the training loop, to count what it allocates.
        solver: ``"auto"`` or the name of a method.
        time_limit: seconds to search for a schedule.
        keep: patterns of module paths whose results are not recomputed.
        recompute: patterns of module paths whose inner results are not kept.
        inplace: whether an operation may be written over a tensor that dies there.
        progress: called with a line of text now and then.

    Raises:
        BudgetError, InfeasibleBudget, CaptureError, InputError, PinError: as ``optimize``.
    """
    options = options_of(
        budget,
        solver=solver,
        time_limit=time_limit,
        keep=keep,
        recompute=recompute,
        inplace=inplace,
    )
    require_trainable(model)
    args, kwargs = as_tuple(example_inputs), dict(example_kwargs or {})
    if device is None:
        if is_fake(model):
            raise InputError(
                "the weights have no data, so nothing can be measured. Name the GPU to plan for: "
                f"device={next(iter(GPUS))!r}, for instance ({', '.join(GPUS)})."
            )
        return Planner(model, options, optimizer, progress).plan_now(args, kwargs)
    gpu = modelled(device)
    with fake_copy(model, args, kwargs) as (bare, bare_args, bare_kwargs):
        planner = Planner(bare, options, optimizer, progress, gpu)
        return planner.plan_now(bare_args, bare_kwargs)
