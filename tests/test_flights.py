"""Flights: several forwards of one model before the backward keep the budget together."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import autockpt
from autockpt.flights import Beside, Flights
from oracle import measure_peak, resident_bytes
from tiny_models import MLP, seeded

Loss = Callable[[nn.Module], Tensor]
ROWS, DIM = 512, 32
X, Y, SHORT = (torch.randn(n, DIM, generator=torch.manual_seed(1)) for n in (ROWS, ROWS, 256))


def views(model: nn.Module) -> Tensor:
    one, other = functional.normalize(model(X)), functional.normalize(model(Y))
    return functional.mse_loss(one, other)


def sizes(model: nn.Module) -> Tensor:
    large, small = model(X), model(SHORT)
    return large.square().mean() + small.sin().mean()


def loop(model: nn.Module) -> Tensor:
    hidden = X
    for _ in range(3):
        hidden = model(hidden)
    return hidden.square().mean()


LOOPS: dict[str, tuple[Loss, tuple[Tensor, ...]]] = {
    "two views": (views, (X, Y)),
    "two sizes": (sizes, (X, SHORT)),
    "a loop": (loop, (X,)),
}


def build() -> nn.Module:
    return seeded(lambda: MLP(DIM, layers=5, dropout=0.1))


def peak(model: nn.Module, loss: Loss, inputs: tuple[Tensor, ...]) -> int:
    """The peak of a step's whole memory."""
    model.zero_grad()
    there = resident_bytes(model, inputs)
    return there + measure_peak(lambda: loss(model).backward()).delta_bytes


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What is warned of."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("autockpt")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


@pytest.mark.parametrize("name", LOOPS)
def test_they_keep_the_budget_together(name: str, said: list[str]) -> None:
    loss, inputs = LOOPS[name]
    plain = build()
    resident = resident_bytes(plain, inputs)
    budget = resident + (peak(plain, loss, inputs) - resident) * 60 // 100
    model = autockpt.optimize(build(), budget, time_limit=1)
    for _ in range(3):
        loss(model).backward()
        model.zero_grad()
    assert peak(model, loss, inputs) <= budget
    captures = model.plan.origin["captures"]
    for one in (model, plain):
        one.zero_grad()
        torch.manual_seed(3)
        loss(one).backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    assert model.plan.origin["captures"] == captures
    assert not said


@pytest.mark.parametrize("share", [None, 60])
def test_what_they_take_together_is_predicted(share: int | None) -> None:
    resident = resident_bytes(build(), (X, Y))
    budget = None
    if share is not None:
        budget = resident + (peak(build(), views, (X, Y)) - resident) * share // 100
    model = autockpt.optimize(build(), budget, time_limit=1)
    for _ in range(3):
        views(model).backward()
        model.zero_grad()
    assert peak(model, views, (X, Y)) == pytest.approx(model.plan.peak_bytes, rel=0.01)


def test_what_cannot_be_kept_together_runs_with_the_lowest_peak(said: list[str]) -> None:
    with pytest.raises(autockpt.InfeasibleBudget) as error:
        autockpt.optimize(build(), 1, example_inputs=(X,))
    model = autockpt.optimize(build(), error.value.minimum_bytes + 3 * X.nbytes, time_limit=1)
    for _ in range(3):
        views(model).backward()
        model.zero_grad()
    assert peak(model, views, (X, Y)) < peak(build(), views, (X, Y))
    (warning,) = said
    assert "cannot be kept" in warning


def test_the_plan_that_is_shown_is_that_of_the_last_forward() -> None:
    model = autockpt.optimize(build(), None)
    peaks = []
    for x in (X, SHORT, X, SHORT):
        model(x).square().mean().backward()
        model.zero_grad()
        peaks.append(model.plan.baseline_peak_bytes)
    assert peaks[2] > peaks[3]


def test_statistics_may_be_written_before_the_backward_that_normalises_with_them() -> None:
    def normalising() -> nn.Module:
        return nn.Sequential(
            *(m for _ in range(4) for m in (nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM), nn.Tanh()))
        )

    def evaluated_in_part(model: nn.Module) -> None:
        for layer in list(model.children())[1:-3:3]:
            layer.eval()
        frozen = model(X)
        (frozen * model.train()(Y)).mean().backward()

    plain, model = seeded(normalising), seeded(normalising)
    with pytest.raises(autockpt.InfeasibleBudget) as error:
        autockpt.optimize(model, 1, example_inputs=(X,))
    autockpt.optimize(model, error.value.minimum_bytes * 3 // 2, time_limit=1)
    for _ in range(2):
        for one in (plain, model):
            one.zero_grad()
            evaluated_in_part(one)
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
    assert any(g.made.plan.extra_time_s > 0 for g in model.autockpt.planner.graphs)


def kept_for_another(model: nn.Module) -> None:
    """A step of two losses over one forward: the first backward keeps the graph."""
    hidden = model(X)
    hidden.sum().backward(retain_graph=True)
    hidden.square().mean().backward()


class Heads(nn.Module):
    """Two outputs of one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = MLP(DIM, layers=4, dropout=0.1)
        self.heads = nn.ModuleList(MLP(DIM, layers=2) for _ in range(2))

    def forward(self, x: Tensor) -> list[Tensor]:
        hidden = self.trunk(x)
        return [head(hidden) for head in self.heads]


def one_head_at_a_time(model: nn.Module) -> None:
    """A step of two losses, each over an output of its own."""
    one, other = model(X)
    one.square().mean().backward(retain_graph=True)
    other.square().mean().backward()


KEPT: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], None], float]] = {
    "one output": (build, kept_for_another, 0.01),
    # Planned as one backward from both outputs, of which each takes a part.
    "two outputs": (lambda: seeded(Heads), one_head_at_a_time, 0.1),
}


@pytest.mark.parametrize("share", [None, 80, 60])
@pytest.mark.parametrize("loss", KEPT)
def test_a_backward_that_keeps_its_graph_keeps_the_budget(
    loss: str, share: int | None, said: list[str]
) -> None:
    new, step, above = KEPT[loss]

    def peak(model: nn.Module) -> int:
        model.zero_grad()
        there = resident_bytes(model, (X,))
        return there + measure_peak(lambda: step(model)).delta_bytes

    plain, budget = new(), None
    resident = resident_bytes(plain, (X,))
    if share is not None:
        budget = resident + (peak(plain) - resident) * share // 100
    model = autockpt.optimize(new(), budget, time_limit=1)
    for _ in range(3):
        step(model)
        model.zero_grad()
    measured = peak(model)
    assert budget is None or measured <= budget
    assert 0.99 * measured <= model.plan.peak_bytes <= (1 + above) * measured
    assert not said
    for one in (model, plain):
        one.zero_grad()
        torch.manual_seed(3)
        step(one)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


def test_only_what_a_backward_has_followed_is_planned_for() -> None:
    flights = Flights()
    held = [Twice.apply(torch.ones((), requires_grad=True)) for _ in range(3)]
    for number in range(3):
        flights.begin("graph", held[number].grad_fn, {}, {})
    assert flights.open_keys() == ("graph",) * 3
    assert not flights.news
    held.pop().backward()
    assert flights.news
    assert flights.seen == {"graph": [Beside(("graph", "graph"))]}
    held.clear()
    assert flights.open_keys() == ()


def test_of_steps_that_are_over_nothing_stays() -> None:
    model = autockpt.optimize(build(), None)

    def flights() -> int:
        for _ in range(5):
            model(X).square().mean().backward()
        return sum(type(one).__name__ == "_Flight" for one in gc.get_objects())

    first = flights()
    assert flights() == first


def test_a_checkpoint_of_the_users_around_several_forwards() -> None:
    """The second runs save what the first have, whatever the backwards between them show."""

    def narrow() -> nn.Module:
        wide = nn.Linear(DIM, 128), nn.Tanh(), nn.Dropout(0.2), nn.Linear(128, 128)
        return nn.Sequential(*wide, nn.GELU(), nn.Linear(128, DIM))

    def used(model: nn.Module) -> list[Tensor]:
        for number in range(3):
            model.zero_grad()
            torch.manual_seed(number)
            hidden = X[:64].clone().requires_grad_()
            for _ in range(3):
                hidden = checkpoint(model, hidden, use_reentrant=False)
            hidden.square().mean().backward()
        return [p.grad for p in model.parameters()]

    budget = 1
    while True:
        model = autockpt.optimize(seeded(narrow), budget, time_limit=1)
        try:
            found = used(model)
            break
        except autockpt.InfeasibleBudget as error:
            budget = error.minimum_bytes
    torch.testing.assert_close(found, used(seeded(narrow)))
