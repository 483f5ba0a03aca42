"""Where a tensor is read in pieces, its gradient is put together from theirs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autockpt
from oracle import assert_same, run_step
from tiny_models import formulated, seeded


class Reads(nn.Module):
    """A layer whose result ``look`` reads, and the loss of what it makes of it."""

    def __init__(self, look: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 24)
        self.look = look

    def forward(self, x: Tensor) -> Tensor:
        return self.look(torch.tanh(self.layer(x))).square().mean()


def unpacked(x: Tensor) -> Tensor:
    q, k, v = x.view(-1, 3, 8).permute(1, 0, 2)
    return q * k.sin() + v


def steps(x: Tensor) -> Tensor:
    state = x[:, 23].cos()
    for step in range(23):
        state = torch.tanh(state) * x[:, step]
    return state


def halves(x: Tensor) -> Tensor:
    turned = torch.cat((-x[:, 12:], x[:, :12]), dim=-1)
    return x * 0.7 + turned * 0.3


def some(x: Tensor) -> Tensor:
    return x[:, 0] * x[:, 2]


def overlapping(x: Tensor) -> Tensor:
    return x[:, :16].sin() * x[:, 8:]


def twice(x: Tensor) -> Tensor:
    return x[:, :12] * x[:, 12:] + x[:, 12:].cos()


def pieces_left(model: nn.Module, x: Tensor) -> int:
    operations = formulated(model, x).problem.operations
    return sum("select_backward" in op.kind or "slice_backward" in op.kind for op in operations)


@pytest.mark.parametrize("look", [unpacked, steps, halves])
def test_pieces_that_make_up_the_whole_are_joined(look: Callable[[Tensor], Tensor]) -> None:
    assert pieces_left(seeded(lambda: Reads(look)), torch.randn(8, 12)) == 0


@pytest.mark.parametrize("look", [some, overlapping])
def test_others_are_summed_up_as_they_were(look: Callable[[Tensor], Tensor]) -> None:
    assert pieces_left(seeded(lambda: Reads(look)), torch.randn(8, 12)) == 2


@pytest.mark.parametrize("tight", [False, True])
@pytest.mark.parametrize("look", [unpacked, steps, halves, some, overlapping, twice])
def test_gradients_are_those_of_eager(look: Callable[[Tensor], Tensor], tight: bool) -> None:
    eager, model = seeded(lambda: Reads(look)), seeded(lambda: Reads(look))
    x = torch.randn(8, 12, generator=torch.manual_seed(1)).requires_grad_()
    budget = None
    if tight:
        with pytest.raises(autockpt.InfeasibleBudget) as error:
            autockpt.plan(model, (x,), 1)
        budget = error.value.minimum_bytes
    autockpt.optimize(model, budget, time_limit=1)
    expected = run_step(eager, (x,))
    assert_same(run_step(model, (x,)), expected, bitwise=False)
