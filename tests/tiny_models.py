"""Models of a few operations, and captures of them, for tests of one stage at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from autockpt.capture import Capture, capture, read_joint
from autockpt.formulate import Around, Formulation, formulate
from autockpt.pins import Pins
from autockpt.profile import unmeasured
from autockpt.replay import state_bytes
from autockpt_solvers.on_demand import Demand, on_demand, stage_schedule
from autockpt_solvers.plan import Plan
from autockpt_solvers.schedule import Schedule

__all__ = [
    "MLP",
    "Classifier",
    "captured",
    "formulated",
    "keeping",
    "mlp",
    "nothing_kept",
    "operation_named",
    "seeded",
]


class MLP(nn.Module):
    """Linear layers with GELU and dropout between them: ``forward(x)`` -> (batch, dim)."""

    def __init__(self, dim: int = 16, layers: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = functional.gelu(layer(x))
            if self.dropout:
                x = functional.dropout(x, self.dropout, self.training)
        return x


class Classifier(MLP):
    """The same with the loss inside: ``forward(x)`` -> the mean square of the result."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """The model with the same weights at every call; the caller's generator stays as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build().train()


def mlp(**options: Any) -> tuple[nn.Module, Tensor]:
    """A classifier and a batch for it, the same at every call."""
    model = seeded(lambda: Classifier(**options))
    x = torch.randn(64, model.layers[0].in_features, generator=torch.Generator().manual_seed(1))
    return model, x


def captured(model: nn.Module, *args: Any, **kwargs: Any) -> Capture:
    """What a training forward with these arguments computes, forward and backward."""
    found: Capture = capture(model, args, kwargs, read_joint)
    return found


def formulated(
    model: nn.Module,
    *args: Any,
    around: Around | None = None,
    pins: Pins | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> Formulation:
    """The problem of such a step, with sizes by shape and a cost of nothing."""
    found = captured(model, *args, **(kwargs or {}))
    return formulate(
        found,
        unmeasured(found),
        around or Around(),
        pins=pins,
        state_bytes=state_bytes(torch.device("cpu")),
    )


def keeping(formulation: Formulation, storages: set[int]) -> Schedule:
    """The schedule that keeps these storages where it may, and recomputes the others."""
    demand = Demand(formulation.problem)
    kept = frozenset(storages)
    return stage_schedule(formulation.problem, on_demand(demand, kept, kept))


def nothing_kept(plan: Plan) -> Plan:
    """The same step with nothing kept that may run again, for each operation that needs it."""
    nothing: frozenset[int] = frozenset()
    order = on_demand(Demand(plan.problem), nothing, nothing)
    return replace(plan, schedule=stage_schedule(plan.problem, order), budget_bytes=None)


def operation_named(formulation: Formulation, name: str) -> Any:
    """The operation of the problem with this name."""
    return next(op for op in formulation.problem.operations if op.name == name)
