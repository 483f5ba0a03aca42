"""Operators that a trace would treat otherwise than eager, and outputs of unusual kinds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autockpt
from oracle import assert_same, measure_peak, resident_bytes, run_step
from tiny_models import captured, seeded

aten = torch.ops.aten


class Between(nn.Module):
    """A function of a convolution's result, and a convolution behind it."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)).relu()).square().mean()


def pictures() -> Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def rows(count: int = 64, width: int = 16) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(1))


def assert_planned(build: Callable[[], nn.Module], x: Tensor, loss: Callable[[Any], Tensor]) -> Any:
    """Check that a step is eager's and its peak the predicted one. Returns the model."""
    plain, model = seeded(build), autockpt.optimize(seeded(build), None)

    def step(one: nn.Module = model) -> list[Tensor]:
        loss(one(x)).backward()
        gradients = [p.grad for p in one.parameters()]
        one.zero_grad(set_to_none=True)
        return gradients

    for _ in range(4):
        for mine, theirs in zip(step(), step(plain), strict=True):
            assert mine.layout == theirs.layout
            torch.testing.assert_close(mine.to_dense(), theirs.to_dense())
    measured = resident_bytes(model, x) + measure_peak(step).delta_bytes
    assert abs(model.plan.peak_bytes - measured) <= 0.01 * measured
    return model


# ------------------------------------------------------------------ kernels


def larger(mode: str) -> Callable[[Tensor], Tensor]:
    return lambda x: functional.interpolate(x, scale_factor=2.0, mode=mode)


@pytest.mark.parametrize(
    ("function", "kernel"),
    [
        (larger("nearest"), aten.upsample_nearest2d.default),
        (larger("nearest-exact"), aten._upsample_nearest_exact2d.default),
        (larger("bilinear"), aten.upsample_bilinear2d.default),
        (larger("bicubic"), aten.upsample_bicubic2d.default),
        (functional.hardshrink, aten.hardshrink.default),
    ],
)
def test_what_has_a_kernel_is_not_taken_apart(
    function: Callable[[Tensor], Tensor], kernel: Any
) -> None:
    x = pictures()
    operations = captured(seeded(lambda: Between(function)), x).operations
    assert [node.target for node in operations].count(kernel) == 1
    assert len(operations) <= 15  # convolutions, relu, the loss, and their backwards
    assert kernel.py_kernels  # torch's compilers get theirs as before
    plain, model = seeded(lambda: Between(function)), seeded(lambda: Between(function))
    autockpt.optimize(model, None)
    assert_same(run_step(model, (x,)), run_step(plain, (x,)))


class Conjugate(nn.Module):
    """The gradient of a complex product's real part is a conjugate that a copy makes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return torch.polar(h.abs(), h).real


def test_a_copy_of_a_conjugate_is_no_mere_copy() -> None:
    assert_planned(Conjugate, rows(), lambda y: y.square().mean())


# ------------------------------------------------------------------ operators with effects


class Solving(nn.Module):
    """A linear system, whose solver checks its result: an effect that a trace orders by a token."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.left, self.right = nn.Linear(64, 32), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        matrix = self.left(x).t() @ self.right(x) * 0.1 * self.scale + 5 * torch.eye(32)
        return torch.linalg.solve(matrix, self.right(x).t()).square().mean()


def test_gradients_are_their_parameters_beside_a_token() -> None:
    model = seeded(Solving)
    gradients = captured(model, rows(64, 64)).gradients
    shapes = sorted(tuple(primal.meta["val"].shape) for _, _, primal in gradients)
    assert shapes == sorted(tuple(p.shape) for p in model.parameters())
    assert all(n.meta["val"].shape == p.meta["val"].shape for n, _, p in gradients)


def test_gradients_are_added_beside_a_token() -> None:
    x = rows(64, 64)
    plain, model = seeded(Solving), seeded(Solving)
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    autockpt.optimize(model, None, optimizer=own, accumulate=4)
    for _ in range(4):
        for part in x.chunk(4):
            (plain(part) / 4).backward()
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        plain.zero_grad()
        model.step(x)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    measured = resident_bytes(model, x) + measure_peak(lambda: model.step(x)).delta_bytes
    assert abs(model.plan.peak_bytes - measured) <= 0.01 * measured


class SolvingBetween(Solving):
    """The same in several graphs."""

    def forward(self, x: Tensor) -> Tensor:
        loss = super().forward(x)
        return loss * 2 if loss.item() > 1e9 else loss


def test_an_effect_is_seen_in_several_graphs() -> None:
    plain, model = seeded(SolvingBetween), autockpt.optimize(seeded(SolvingBetween), None)
    x = rows(64, 64)
    for _ in range(4):
        assert_same(run_step(model, (x,)), run_step(plain, (x,)), bitwise=False)
    assert model.plan is not None


# ------------------------------------------------------------------ writes to a part


class Filling(nn.Module):
    """Writes what it computes into a tensor, a step at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        filled, h = torch.zeros(len(x), 12, 16), x
        for step in range(12):
            h = torch.tanh(self.linear(h))
            filled[:, step] = h
        return filled


class Rearranging(nn.Module):
    """Writes to parts of tensors that are read again, also in other ways, and to its own output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("last", torch.zeros(8, 16))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.linear(x)
        filled = torch.zeros(64, 4, 16)
        for part in range(4):
            filled[:, part] = h * part
        other = filled.clone()
        other[:, 1] = filled[:, 2]
        filled[:, 0] = other[:, 1].sin()
        rows = h.new_zeros(8, 16).index_add(0, torch.arange(64) % 8, h)
        rows[torch.arange(3)] = h[:3].tanh()
        rows[4:] = rows[:4]
        self.last[2:] = rows[:6].detach()
        y = h.clone()
        y[:, :4] = self.last[:1, :4]
        return filled.cumsum(1), other, rows, y


def test_a_write_to_a_part_copies_no_whole() -> None:
    def loss(filled: Tensor) -> Tensor:
        return filled.square().mean()

    x = rows()
    plain, model = seeded(Filling), assert_planned(Filling, x, loss)
    scatters = [d for d in model.plan.decisions if d.name.startswith("select_scatter")]
    assert len(scatters) == 23  # each step's, and its gradient's: the last has none of its own
    in_place = [d for d in scatters if d.in_place.startswith("over ")]
    assert len(in_place) == 22  # not the one that the user gets
    peaks = []
    for one in (plain, model):

        def step(one: nn.Module = one) -> None:
            loss(one(x)).backward()
            one.zero_grad(set_to_none=True)

        step()
        peaks.append(measure_peak(step).delta_bytes)
    assert peaks[1] <= 1.02 * peaks[0]


@pytest.mark.parametrize("tight", [False, True])
def test_parts_that_are_read_again_are_not_lost(tight: bool) -> None:
    plain, model = seeded(Rearranging), seeded(Rearranging)
    x = rows()
    budget = None
    if tight:
        with pytest.raises(autockpt.InfeasibleBudget) as refusal:
            autockpt.optimize(model, 1, example_inputs=(x,))
        budget = refusal.value.minimum_bytes
    autockpt.optimize(model, budget)

    def loss(found: tuple[Tensor, ...]) -> Tensor:
        return sum(t.sin().sum() for t in found)

    for _ in range(2):
        mine, theirs = (run_step(one, (x,), loss_fn=loss) for one in (model, plain))
        assert_same(mine, theirs, bitwise=False)


# ------------------------------------------------------------------ unusual memory


@dataclass
class Pair:
    x: Tensor
    more: dict[str, Tensor]


class OfAPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, pair: Pair) -> Tensor:
        return (self.linear(pair.x).tanh() * pair.more["gate"]).square().mean()


def test_inputs_of_any_class_count() -> None:
    pair = Pair(rows(), {"gate": rows(64, 16)})
    model = autockpt.optimize(seeded(OfAPair), None, example_inputs=(pair,))
    inputs = sum(t.numel() * 4 for t in (pair.x, pair.more["gate"], *model.parameters()))
    assert model.plan.problem.resident_bytes == inputs


class Marked(Tensor):
    """A tensor with a name of its own, as libraries for images have them."""


def test_tensors_of_another_class_are_tensors() -> None:
    model, plain = (seeded(lambda: nn.Sequential(nn.Linear(16, 16), nn.Tanh())) for _ in range(2))
    autockpt.optimize(model, None)
    for _ in range(2):
        found, expected = (one(rows(64, 16).as_subclass(Marked)) for one in (model, plain))
        assert type(found) is type(expected)
        found.square().mean().backward()
        expected.square().mean().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


class PartOfAView(nn.Module):
    """Its second output is a view with gaps, and so is the gradient that arrives for it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 32)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x).view(4, -1, 32).sin()
        return y.cos(), y[:, 0]


def test_a_gradient_takes_its_outputs_span() -> None:
    assert_planned(PartOfAView, rows(), lambda y: y[0].square().mean() + y[1].square().mean())


class Bags(nn.Module):
    """A table of sparse gradients, the largest of the step's tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.EmbeddingBag(64, 32, sparse=True), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.table((x.abs() * 1000).long() % 64)).square().mean()


def test_sparse_gradients_count() -> None:
    model = assert_planned(Bags, rows(), lambda y: y)
    assert "sparse=False" in model.plan.origin["unoptimised"]
