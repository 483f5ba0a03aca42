"""Dropout on the CPU computes what eager does, and keeps a factor or a mask of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autockpt
from autockpt.capture import capture, read_joint
from oracle import assert_same, measure_peak, resident_bytes, run_step
from tiny_models import formulated, seeded

aten = torch.ops.aten


class Drops(nn.Module):
    """Linear layers with a dropout behind each, of the layer's result or of a view of it."""

    def __init__(self, turned: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, dtype=dtype) for _ in range(3))
        self.turned = turned

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            if self.turned:
                x = functional.dropout(x.t(), 0.3, self.training).t()
            else:
                x = functional.dropout(x, 0.3, self.training)
        return x.square().mean()


def batch(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(512, 64, generator=torch.manual_seed(1)).to(dtype)


BUILDS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: Drops(),
    "turned": lambda: Drops(turned=True),
    "bfloat16": lambda: Drops(dtype=torch.bfloat16),
}


@pytest.mark.parametrize("share", [None, 60])
@pytest.mark.parametrize("name", BUILDS)
def test_a_step_is_that_of_eager(name: str, share: int | None) -> None:
    eager, model = seeded(BUILDS[name]), seeded(BUILDS[name])
    x = batch(next(eager.parameters()).dtype)
    budget = None
    if share is not None:
        resident = resident_bytes(eager, (x,))
        peak = measure_peak(lambda: run_step(eager, (x,))).delta_bytes
        budget = resident + peak * share // 100
    autockpt.optimize(model, budget, time_limit=1)
    for _ in range(2):
        ours, theirs = run_step(model, (x,)), run_step(eager, (x,))
    # What the operator multiplies with is rounded once less.
    assert_same(ours, theirs, bitwise=name != "turned")
    assert share is None or model.plan.overhead > 0


def test_the_factor_is_made_again_from_the_mask() -> None:
    problem = formulated(seeded(Drops), batch()).problem
    mask, factor = (
        next(op for op in problem.operations if op.kind == kind)
        for kind in ("bernoulli.p", "div.Tensor")
    )
    sizes = [problem.storages[op.outputs[0]].size_bytes for op in (mask, factor)]
    assert sizes == [512 * 64, 4 * 512 * 64]
    assert factor.recompute_inputs is not None
    readers = [op for op in problem.operations if factor.outputs[0] in op.inputs]
    assert [problem.operations.index(op) < problem.barrier for op in readers] == [True, False]


def test_for_another_device_the_operator_stays() -> None:
    def targets(elsewhere: bool) -> set[object]:
        found = capture(
            seeded(Drops), (batch(),), {}, lambda joint: read_joint(joint, elsewhere=elsewhere)
        )
        return {node.target for node in found.operations}

    assert aten.native_dropout.default in targets(True)
    assert aten.native_dropout.default not in targets(False)
