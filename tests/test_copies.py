"""Copies in a traced graph: dropped where nobody can tell, kept where somebody can."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autockpt
from oracle import assert_same, run_step, whole_step_peak
from tiny_models import captured, seeded


class Attention(nn.Module):
    """Without dropout in effect, as most large models are trained; its result is viewed."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q = self.query(x).view(4, 64, 2, 8).transpose(1, 2)
        weights = functional.dropout((q @ q.transpose(2, 3)).softmax(-1), 0.0, self.training)
        mixed = (weights @ q).transpose(1, 2).reshape(4, 64, 16)
        return functional.dropout(self.out(mixed), 0.0, self.training).square().mean()


class Held(nn.Module):
    """Copies that are somebody's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        given = x.clone()  # the user may write into his input
        y = self.inner(given)
        returned = y.clone()
        part = y.chunk(2)[0].clone()  # frees the other half
        return y, returned, part.tanh()


def copies_in(model: nn.Module, *args: Any) -> list[Any]:
    operations = captured(model, *args).operations
    return [node for node in operations if node.target is torch.ops.aten.clone.default]


def test_a_dropout_of_nothing_is_no_copy() -> None:
    x = torch.randn(4, 64, 16, generator=torch.Generator().manual_seed(1))
    plain, model = seeded(Attention), seeded(Attention)
    layouts = {node.kwargs.get("memory_format") for node in copies_in(model, x)}
    assert layouts <= {torch.contiguous_format}  # that of reshape, which eager makes, too
    expected = run_step(plain, (x,), {})
    peaks = []
    for one in (plain, autockpt.optimize(model, None)):
        for _ in range(2):
            assert_same(run_step(one, (x,), {}), expected)
        peaks.append(whole_step_peak(one, lambda one=one: one(x).backward(), (x,)))
        one.zero_grad(set_to_none=True)
    assert peaks[1] <= peaks[0]
    assert abs(model.plan.peak_bytes - peaks[1]) <= 0.01 * peaks[1]


def test_copies_that_somebody_can_tell_stay() -> None:
    x = torch.randn(4, 8)
    assert len(copies_in(seeded(Held), x)) == 3
    model = autockpt.optimize(seeded(Held), None)
    for _ in range(2):
        inputs = x.clone()
        y, returned, part = model(inputs)
        before = y.detach().clone()
        inputs.zero_()
        returned.detach().zero_()
        assert torch.equal(y, before)
        (y.sum() + part.sum()).backward()


class Queue(nn.Module):
    """Compares with earlier results, and copies them: new ones are written before the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.register_buffer("queue", functional.normalize(torch.randn(64, 16), dim=1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        key = functional.normalize(self.inner(x).tanh(), dim=1)
        return key @ self.queue.clone().detach().t(), key

    def train_on(self, x: Tensor) -> None:
        compared, key = self(x)
        with torch.no_grad():
            self.queue.copy_(torch.cat([key, self.queue[: -len(key)]]))
        compared.exp().mean().backward()


def test_a_buffer_may_be_written_where_the_model_reads_a_copy() -> None:
    x = torch.randn(32, 16)
    with pytest.raises(autockpt.InfeasibleBudget) as error:
        autockpt.optimize(seeded(Queue), 1, example_inputs=(x,))
    for budget in (None, error.value.minimum_bytes):
        plain, model = seeded(Queue), autockpt.optimize(seeded(Queue), budget)
        for _ in range(3):
            for one in (plain, model):
                one.train_on(x)
        torch.testing.assert_close(model.inner.weight.grad, plain.inner.weight.grad)
        torch.testing.assert_close(model.queue, plain.queue)
