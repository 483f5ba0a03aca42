"""Training loops: what a user's loop sees over many steps is what it sees in eager."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer

import autockpt
from autockpt import InfeasibleBudget, Plan
from autockpt_solvers.solve import solve
from benchmarks.measure import loss_of, measure_peak, resident_bytes
from models import GPT, Llama, ResNet, UNet
from oracle import assert_same, run_step, run_steps
from tiny_models import MLP, mlp, seeded

Batches = list[tuple[tuple[Tensor, ...], dict[str, Any]]]


def tokens(count: int, batch: int, seq: int, vocab: int) -> Batches:
    generator = torch.Generator().manual_seed(3)
    made = [torch.randint(vocab, (batch, seq + 1), generator=generator) for _ in range(count)]
    return [((ids[:, :-1].contiguous(), ids[:, 1:].contiguous()), {}) for ids in made]


def images(count: int, classes: int | None) -> Batches:
    generator = torch.Generator().manual_seed(3)
    made: Batches = []
    for _ in range(count):
        image = torch.randn(4, 3, 32, 32, generator=generator)
        target = image.tanh()
        if classes is not None:
            target = torch.randint(classes, (4,), generator=generator)
        made.append(((image, target), {}))
    return made


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batches]]] = {
    "gpt": (
        lambda: GPT(layers=3, dim=64, heads=4, vocab=128, seq=48, dropout=0.1),
        lambda count: tokens(count, 4, 48, 128),
    ),
    "resnet": (lambda: ResNet(width=8, depths=(1, 1), classes=10), lambda n: images(n, 10)),
    "unet": (lambda: UNet(width=8, levels=2), lambda n: images(n, None)),
}


def fraction(plan: Plan, percent: int) -> int:
    resident = plan.problem.resident_bytes
    return resident + (plan.baseline_peak_bytes - resident) * percent // 100


def smallest(plan: Plan) -> int:
    with pytest.raises(InfeasibleBudget) as error:
        solve(plan.problem, 1)
    return error.value.minimum_bytes


def runs_twice(plan: Plan) -> bool:
    order = [*plan.schedule.forward_computes, *plan.schedule.backward_computes]
    return len(order) != len(set(order))


# ------------------------------------------------------------------ twenty steps


@functools.cache
def curve(name: str) -> tuple[list[float], Plan]:
    """Eager's losses over twenty steps, and the plan of a step without a budget."""
    build, batches = MODELS[name]
    model = seeded(build)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = run_steps(model, optimizer, batches(20))
    model = autockpt.optimize(seeded(build), budget=None)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    assert run_steps(model, optimizer, batches(20)) == losses
    return losses, model.plan


@pytest.mark.parametrize("percent", [80, 55, 0])
@pytest.mark.parametrize("name", MODELS)
def test_the_loss_curve_is_eagers(name: str, percent: int) -> None:
    losses, plan = curve(name)
    budget = max(fraction(plan, percent), smallest(plan))
    build, batches = MODELS[name]
    model = autockpt.optimize(seeded(build), budget, time_limit=1)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    assert run_steps(model, optimizer, batches(20)) == losses
    assert model.plan.extra_time_s > 0
    assert len(set(losses)) == 20  # each step moved the weights


def test_nothing_is_recomputed_where_the_budget_suffices() -> None:
    model, x = mlp()
    peak = autockpt.plan(model, x, budget=None).peak_bytes
    for budget in (None, peak, 10 * peak):
        plan = autockpt.plan(model, x, budget=budget)
        assert plan.extra_time_s == 0
        assert not runs_twice(plan)
        assert plan.peak_bytes == peak
        assert plan.gap == 0
    plan = autockpt.plan(model, x, budget=peak - 1, time_limit=1)
    assert plan.extra_time_s > 0
    assert runs_twice(plan)


def test_the_measured_peak_never_rises_as_the_budget_falls() -> None:
    """A deep llama-like stack; with block checkpointing it does (pytorch/pytorch#197838)."""
    ((args, _),) = tokens(1, 4, 32, 64)

    def build() -> nn.Module:
        return Llama(layers=5, dim=32, heads=2, kv_heads=1, vocab=64, seq=32)

    def step(model: nn.Module) -> None:
        model(*args).backward()
        model.zero_grad(set_to_none=True)

    budget: int | None = None
    peaks: list[int] = []
    for percent in (90, 80, 70, 60, 50, 45, 40, 35):
        solver = "auto" if budget is None else "greedy"
        model = autockpt.optimize(seeded(build), budget, solver=solver, time_limit=1)
        for _ in range(2):
            step(model)
        peaks.append(
            resident_bytes(model, args) + measure_peak(lambda m=model: step(m)).delta_bytes
        )
        assert abs(model.plan.peak_bytes - peaks[-1]) <= 0.01 * peaks[-1]
        assert budget is None or peaks[-1] <= budget
        if budget is None:
            first = model.plan
        budget = fraction(first, percent)
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < peaks[0]


# ------------------------------------------------------------------ the optimizer in the budget


@pytest.mark.parametrize(
    "make", [AdamW, functools.partial(SGD, lr=0.05, momentum=0.9)], ids=["adamw", "momentum"]
)
def test_the_optimizers_state_and_step_are_in_the_budget(
    make: Callable[[Any], Optimizer],
) -> None:
    # Wide and few rows: the optimizer's memory is a good part of the step's.
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(256, 64, generator=generator)

    def built() -> tuple[nn.Module, Optimizer]:
        model = seeded(lambda: MLP(dim=64, layers=8))
        return model, make(model.parameters())

    def step(model: nn.Module, optimizer: Optimizer) -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    model, optimizer = built()
    expected = [step(model, optimizer) for _ in range(4)]
    model, optimizer = built()
    without = autockpt.plan(model, x, None)
    plan = autockpt.plan(model, x, None, optimizer=optimizer)
    step(model, optimizer)
    state = sum(t.numel() * t.element_size() for s in optimizer.state.values() for t in s.values())
    assert plan.problem.resident_bytes - without.problem.resident_bytes == state

    model, optimizer = built()
    budget = fraction(plan, 70)
    autockpt.optimize(model, budget, optimizer=optimizer, time_limit=1)
    losses = [step(model, optimizer) for _ in range(3)]
    optimizer.zero_grad(set_to_none=True)
    found: list[float] = []
    peak = measure_peak(lambda: found.append(step(model, optimizer)))
    optimizer.zero_grad(set_to_none=True)
    assert [*losses, *found] == expected
    measured = resident_bytes(model, x, optimizer) + peak.delta_bytes
    assert measured <= budget
    assert abs(model.plan.peak_bytes - measured) <= 0.01 * measured
    assert model.plan.extra_time_s > 0


def test_the_peak_may_be_the_optimizers() -> None:
    """With a small batch it is the step of AdamW that allocates most."""
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
    model = seeded(lambda: MLP(dim=64, layers=8))
    optimizer = AdamW(model.parameters())
    autockpt.optimize(model, None, optimizer=optimizer)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(3):
        step()
    measured = resident_bytes(model, x, optimizer) + measure_peak(step).delta_bytes
    assert model.plan.peak_operation == "optimizer_step"
    assert abs(model.plan.peak_bytes - measured) <= 0.01 * measured


# ------------------------------------------------------------------ a loss outside the model


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gpt() -> nn.Module:
    return GPT(layers=3, dim=32, heads=2, vocab=256, seq=48)


def logits_step(model: nn.Module, ids: Tensor, targets: Tensor, keep: bool) -> None:
    """A step whose loss is the user's; ``keep`` says whether the logits outlive it."""
    if keep:
        logits = model(ids)
        cross_entropy(logits, targets).backward()
        del logits
    else:
        cross_entropy(model(ids), targets).backward()
    model.zero_grad(set_to_none=True)


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "dropped"])
def test_a_loss_outside_the_model_is_in_the_budget(keep: bool) -> None:
    (((ids, targets), _),) = tokens(1, 4, 48, 256)

    def loss(logits: Tensor) -> Tensor:
        return cross_entropy(logits, targets)

    expected = run_step(seeded(gpt), (ids,), loss_fn=loss)
    free = autockpt.optimize(seeded(gpt), None)
    assert_same(run_step(free, (ids,), loss_fn=loss), expected)
    autockpt.restore(free)
    autockpt.optimize(free, None)
    for _ in range(2):
        logits_step(free, ids, targets, keep)
    budget = fraction(free.plan, 60)
    model = autockpt.optimize(seeded(gpt), budget, time_limit=1)
    # Every step is right: the first, whose plan rests on a guess, and those planned again.
    for _ in range(3):
        assert_same(run_step(model, (ids,), loss_fn=loss), expected)
    autockpt.restore(model)
    autockpt.optimize(model, budget, time_limit=1)
    for _ in range(2):
        logits_step(model, ids, targets, keep)
    peak = measure_peak(lambda: logits_step(model, ids, targets, keep))
    measured = resident_bytes(model, (ids, targets)) + peak.delta_bytes
    # The targets never enter the model: they are the user's memory, and no part of the plan.
    measured -= targets.numel() * targets.element_size()
    assert measured <= budget
    assert abs(model.plan.peak_bytes - measured) <= 0.01 * measured
    assert peak.left_bytes == 0
    assert model.plan.extra_time_s > 0
    assert_same(run_step(model, (ids,), loss_fn=loss), expected)


def test_outputs_that_the_user_lets_go_of_are_not_counted() -> None:
    (((ids, targets), _),) = tokens(1, 4, 48, 256)
    peaks = {}
    for keep in (True, False):
        model = autockpt.optimize(seeded(gpt), None)
        for _ in range(3):
            logits_step(model, ids, targets, keep)
        peaks[keep] = model.plan.peak_bytes
    assert peaks[False] < peaks[True]


def test_the_user_may_hold_outputs_of_many_steps() -> None:
    (((ids, targets), _),) = tokens(1, 4, 48, 256)
    eager = seeded(gpt)
    model = autockpt.optimize(seeded(gpt), None)
    peak = autockpt.plan(model, ids, None).peak_bytes
    autockpt.optimize(model, int(0.8 * peak), time_limit=1)
    expected, held = [], []
    for one, outputs in ((eager, expected), (model, held)):
        optimizer = SGD(one.parameters(), lr=0.1)
        for _ in range(4):
            outputs.append(one(ids))
            cross_entropy(outputs[-1], targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    for mine, theirs in zip(held, expected, strict=True):
        assert torch.equal(mine, theirs)


# ------------------------------------------------------------------ gradients that add up


def test_gradients_add_up_over_backwards() -> None:
    batches = tokens(6, 4, 48, 256)
    results: list[list[Tensor]] = []
    peak = autockpt.plan(seeded(gpt), batches[0][0], None).peak_bytes
    for budget in (None, int(0.75 * peak)):
        eager, model = seeded(gpt), autockpt.optimize(seeded(gpt), budget, time_limit=1)
        for one in (eager, model):
            gradients: list[Tensor] = []
            for index, (args, _) in enumerate(batches):
                loss_of(one(*args)).backward()
                if index % 3 == 2:
                    gradients += [p.grad.clone() for p in one.parameters()]
                    one.zero_grad(set_to_none=True)
            results.append(gradients)
    expected, *others = results
    for gradients in others:
        assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


def test_gradients_that_stay_are_in_the_budget() -> None:
    """With ``zero_grad(set_to_none=False)`` every step adds to gradients that are there."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(256, 64, generator=generator)
    model = seeded(lambda: MLP(dim=64, layers=8))
    plan = autockpt.plan(model, x, None)
    gradients = sum(4 * p.numel() for p in model.parameters())
    budget = fraction(plan, 75) + gradients
    autockpt.optimize(model, budget, time_limit=1)

    def step() -> None:
        model(x).square().mean().backward()
        model.zero_grad(set_to_none=False)

    for _ in range(3):
        step()
    measured = resident_bytes(model, x) + measure_peak(step).delta_bytes
    assert measured <= budget
    assert abs(model.plan.peak_bytes - measured) <= 0.01 * measured
