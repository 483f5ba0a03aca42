"""Numbers of Python's that change from step to step, and are read in the forward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autockpt
from oracle import measure_peak, resident_bytes
from tiny_models import seeded

X = torch.randn(256, 32, generator=torch.manual_seed(1))
Use = Callable[[Tensor, float], Tensor]


class Annealed(nn.Module):
    """A number of its own is read between two layers, one that is given in the loss."""

    def __init__(self, use: Use) -> None:
        super().__init__()
        self.use = use
        self.inner = nn.Module()
        self.inner.temperature = 1.0
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor, weight: float = 1.0) -> Tensor:
        for layer in self.layers:
            x = x + self.use(layer(x), self.inner.temperature)  # type: ignore[arg-type]
        return x.square().mean() * weight


def branching(x: Tensor, number: float) -> Tensor:
    return torch.tanh(x / number) if number > 0.85 else torch.sin(x) * (1 - number)


# How a number is used -> the traces that seven values of it take.
USES: dict[str, tuple[Use, int]] = {
    "in an expression": (lambda x, number: torch.tanh(x / number) * (2 * number - 1) ** 2, 2),
    "a branch": (branching, 3),
    "a mixture": (
        lambda x, t: functional.celu(x, t) + functional.hardtanh(x, -t, t) + x.clamp(-t, t),
        7,
    ),
    "a dropout": (lambda x, number: functional.dropout(x, number / 2), 7),
}


def step(model: nn.Module, number: int) -> list[Tensor]:
    model.get_submodule("inner").temperature = 0.95**number
    model.zero_grad()
    torch.manual_seed(number)
    loss = model(X, weight=0.1 * number)
    loss.backward()
    return [
        loss.detach(),
        torch.rand(1),
        *(p.grad for p in model.parameters() if p.grad is not None),
    ]


@pytest.mark.parametrize("name", USES)
def test_a_float_is_traced_as_a_number_that_varies(name: str) -> None:
    use, traces = USES[name]

    def build() -> nn.Module:
        return seeded(lambda: Annealed(use))

    plain = build()
    resident = resident_bytes(plain, (X,))
    peak = measure_peak(lambda: step(plain, 1) and None).delta_bytes
    budget = resident + peak * 70 // 100
    model = autockpt.optimize(build(), budget, time_limit=1)
    for number in range(1, 8):
        for mine, theirs in zip(step(model, number), step(plain, number), strict=True):
            torch.testing.assert_close(mine, theirs)
    model.zero_grad()
    measured = resident + measure_peak(lambda: step(model, 7) and None).delta_bytes
    assert measured <= budget
    assert measured == pytest.approx(model.plan.peak_bytes, rel=0.01)
    if name == "a branch" and torch.__version__ < "2.12":
        return  # the trace holds for one value there
    assert model.plan.origin["captures"].startswith(f"{traces} of")


class Reading(Annealed):
    """Ends its graph in the middle, and reads its numbers behind it as well."""

    def forward(self, x: Tensor, weight: float = 1.0) -> Tensor:
        for layer in self.layers[:2]:
            x = x + self.use(layer(x), self.inner.temperature)
        torch._dynamo.graph_break()
        for layer in self.layers[2:]:
            x = x + self.use(layer(x), self.inner.temperature)
        return x.square().mean() * weight


def test_it_varies_in_each_of_several_graphs() -> None:
    use, _ = USES["in an expression"]
    plain, model = (seeded(lambda: Reading(use)) for _ in range(2))
    autockpt.optimize(model, None, time_limit=1)
    captures = []
    for number in range(1, 10):
        for mine, theirs in zip(step(model, number), step(plain, number), strict=True):
            torch.testing.assert_close(mine, theirs)
        captures.append(model.autockpt._several.captures)
    assert captures[3] == captures[-1] > 1


class Measured(nn.Module):
    """Reads a number from a tensor, once in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.register_buffer("slope", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + functional.leaky_relu(layer(x), self.slope.item())  # type: ignore[operator]
        return x.square().mean()


@pytest.mark.parametrize("share", [None, 60])
def test_a_number_of_a_tensor_is_there_in_the_backward(share: int | None) -> None:
    plain, model = seeded(Measured), seeded(Measured)
    peak = measure_peak(lambda: plain(X).backward()).delta_bytes
    resident = resident_bytes(plain, (X,))
    autockpt.optimize(model, share and resident + peak * share // 100, time_limit=1)
    for number in range(4):
        for one in (plain, model):
            one.zero_grad()
            one.slope.fill_(0.9**number)  # type: ignore[operator, union-attr]
            loss = one(X)
            one.slope.fill_(7.0)  # type: ignore[operator, union-attr]
            loss.backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
    assert model.plan.origin["captures"].startswith("1 of")


class Decaying(Annealed):
    """Changes its number itself."""

    def forward(self, x: Tensor, weight: float = 1.0) -> Tensor:
        loss = super().forward(x, weight)
        self.inner.temperature = self.inner.temperature * 0.97  # type: ignore[operator]
        return loss


def test_a_forward_may_change_its_own_number() -> None:
    plain, model = (seeded(lambda: Decaying(USES["in an expression"][0])) for _ in range(2))
    autockpt.optimize(model, None, time_limit=1)
    for _ in range(6):
        for one in (plain, model):
            one.zero_grad()
            one(X).backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
    assert model.inner.temperature == plain.inner.temperature
    assert model.plan.origin["captures"].startswith("2 of")


class Counted(nn.Module):
    """Reads whole numbers that the loop sets: one of its own, one of a layer's, and an argument."""

    def __init__(self, use: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.use = use
        self.epoch = 0
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.layers[2].step = 0

    def forward(self, x: Tensor, step: int = 0) -> Tensor:
        for layer in self.layers:
            x = x + self.use(layer(x), step)
        return x.square().mean() * (1 + self.epoch) / (10 + self.layers[2].step)


# How a whole number is used -> the traces that eight values of it take.
INTEGER_USES: dict[str, tuple[Callable[[Tensor, int], Tensor], int]] = {
    "in an expression": (lambda x, n: torch.tanh(x) * min(1.0, n / 5), 4),
    "a branch": (lambda x, n: x.sin() if n > 4 else x.cos() * n, 4),
    "a size": (lambda x, n: functional.pad(x[:, n:], (0, n)), 9),
}


@pytest.mark.parametrize("share", [80, 65])
@pytest.mark.parametrize("name", INTEGER_USES)
def test_a_whole_number_that_the_loop_sets_varies(name: str, share: int) -> None:
    use, most = INTEGER_USES[name]
    plain, model = (seeded(lambda: Counted(use)) for _ in range(2))
    resident = resident_bytes(plain, (X,))
    peak = measure_peak(lambda: plain(X, step=7).backward()).delta_bytes
    budget = resident + peak * share // 100
    autockpt.optimize(model, budget, time_limit=1)
    for number in range(1, 9):
        for one in (plain, model):
            one.zero_grad()
            one.epoch, one.layers[2].step = number, 3 * number  # type: ignore[index,union-attr]
            one(X, step=number).backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
    plain.zero_grad()
    model.zero_grad()
    measured = resident + measure_peak(lambda: model(X, step=8).backward()).delta_bytes
    assert measured <= budget
    assert int(model.plan.origin["captures"].split()[0]) <= most
