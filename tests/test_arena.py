"""Arena: the same step in memory that is allocated once, and as always where that is not free."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autockpt
import models
from autockpt import _torch
from autockpt.arena import OUT, layout_of
from benchmarks.measure import step_function
from oracle import assert_same, measure_peak, resident_bytes, run_step
from test_inplace import arguments
from tiny_models import Classifier, formulated, keeping, seeded

LARGE = 4096


def gpt(dropout: float = 0.0) -> nn.Module:
    return models.GPT(layers=2, dim=32, heads=4, vocab=256, seq=64, dropout=dropout)


def tokens(batch: int = 4) -> tuple[Tensor, Tensor]:
    ids = torch.randint(256, (batch, 65), generator=torch.Generator().manual_seed(2))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def pair(budget: int | None = None, **options: Any) -> tuple[nn.Module, nn.Module]:
    """The same model with an arena and without one, after a step."""
    found = []
    for arena in (True, False):
        model = seeded(gpt)
        autockpt.optimize(model, budget, example_inputs=tokens(), arena=arena, **options)
        step_function(model, tokens())()
        found.append(model)
    return found[0], found[1]


def block(model: nn.Module) -> Tensor:
    return model.autockpt._memory._block


@pytest.mark.parametrize("target", [t for t in OUT if "backward" not in str(t)], ids=str)
def test_an_operator_gives_the_same_bits_in_its_place(target: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    a, b = torch.rand(2, 7, 7, generator=generator)
    special: dict[Any, tuple[Any, ...]] = {
        torch.ops.aten.mm.default: (a, b),
        torch.ops.aten.bmm.default: (a[None], b[None]),
        torch.ops.aten.addmm.default: (a[0], a, b),
        torch.ops.aten.cat.default: ([a, b], 1),
        torch.ops.aten.sum.dim_IntList: (a, [1], True),
        torch.ops.aten.mean.dim: (a, [1], True),
    }
    args = special.get(target) or arguments(target, torch.float32, turned=False)
    expected = target(*args)
    form, keyword = OUT[target]
    place = torch.empty_like(expected)
    events = _torch.allocation_events(lambda: form(*args, **{keyword: place}))
    assert max(events, default=0) <= 64
    assert torch.equal(place, expected)


def test_a_step_in_the_arena_is_the_same_step() -> None:
    mine, plain = pair()
    for seed in (1, 2):
        assert_same(run_step(mine, tokens(), seed=seed), run_step(plain, tokens(), seed=seed))
    assert mine.autockpt._memory.allocations == 1


def test_after_the_first_step_the_arena_needs_no_allocator() -> None:
    mine, plain = pair()
    large = [
        len([e for e in _torch.allocation_events(step_function(m, tokens())) if e > LARGE])
        for m in (mine, plain)
    ]
    layout = layout_of(mine.autockpt.planner.graphs[0].made.formulation, mine.plan.schedule)
    placed = sum(b.size_bytes > LARGE for b in layout.blocks)
    assert placed > 20
    assert large[1] - large[0] == placed


def test_the_peak_is_the_stated_one() -> None:
    mine, _ = pair()
    step = step_function(mine, tokens())
    whole = resident_bytes(mine, tokens()) + block(mine).nbytes + measure_peak(step).delta_bytes
    stated = int(mine.plan.origin["arena"].split("peaks at ")[1].split(";")[0].replace(",", ""))
    assert abs(stated - whole) <= 0.01 * whole


def test_what_the_user_holds_lies_outside() -> None:
    model = seeded(lambda: models.GPT(layers=1, dim=32, heads=4, vocab=64, seq=64))
    ids = tokens()[0] % 64
    autockpt.optimize(model, None, example_inputs=(ids,), arena=True)
    logits = model(ids)
    logits.retain_grad()
    logits.square().mean().backward()
    memory = model.autockpt._memory
    held = [logits, logits.grad, *(p.grad for p in model.parameters())]
    assert not any(memory.holds(value) for value in held)
    copies = [value.clone() for value in held]
    model.zero_grad(set_to_none=True)
    model(ids).mean().backward()
    assert all(torch.equal(value, copy) for value, copy in zip(held, copies, strict=True))


def test_two_steps_in_flight_do_not_share_it() -> None:
    mine, plain = pair()
    gradients = []
    for model in (mine, plain):
        first, second = model(*tokens()), model(*(t.flip(0) for t in tokens()))
        (first * 2).backward()
        second.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad(set_to_none=True)
    assert all(map(torch.equal, *gradients))
    assert_same(run_step(mine, tokens()), run_step(plain, tokens()))


def test_a_backward_may_run_twice() -> None:
    mine, plain = pair()
    gradients = []
    for model in (mine, plain):
        loss = model(*tokens())
        loss.backward(retain_graph=True)
        loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(map(torch.equal, *gradients))


def test_a_forward_that_is_given_up_leaves_it_usable() -> None:
    mine, plain = pair()
    held = mine(*tokens())  # never differentiated, and still there
    assert_same(run_step(mine, tokens()), run_step(plain, tokens()))
    del held
    with pytest.raises(IndexError):
        mine(tokens()[0] + 1000, tokens()[1])
    assert mine.autockpt._memory.lend(1)
    assert_same(run_step(mine, tokens()), run_step(plain, tokens()))


def test_micro_batches_share_it() -> None:
    found = []
    for arena in (True, False):
        model = seeded(gpt)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        autockpt.optimize(model, None, optimizer=optimizer, accumulate=2, arena=arena)
        for _ in range(3):
            model.micro_step(*tokens(2))  # the first of a window: its gradients stay
            if arena and model.autockpt._memory._block is not None:
                memory = model.autockpt._memory
                assert not any(memory.holds(p.grad) for p in model.parameters())
            model.micro_step(*tokens(2))
        found.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *found))


def test_another_shape_takes_the_same_memory() -> None:
    mine, plain = pair()
    for batch in (6, 2, 4):
        assert_same(run_step(mine, tokens(batch)), run_step(plain, tokens(batch)))
    memory = mine.autockpt._memory
    assert memory.allocations == 2  # for batch 4 and for batch 6
    autockpt.restore(mine)
    assert memory._block is None


def test_a_budget_that_is_too_small_for_it_goes_without() -> None:
    model = seeded(gpt)
    full = autockpt.plan(model, tokens(), None)
    autockpt.optimize(
        model, int(0.7 * full.peak_bytes), example_inputs=tokens(), arena=True, time_limit=1
    )
    step_function(model, tokens())()
    plan = model.plan
    whole = (
        resident_bytes(model, tokens()) + measure_peak(step_function(model, tokens())).delta_bytes
    )
    memory = model.autockpt._memory
    if memory._block is not None:
        whole += memory._block.nbytes
    assert whole <= plan.budget_bytes


def test_layouts_of_models_waste_little() -> None:
    model = seeded(lambda: Classifier(layers=6))
    formulation = formulated(model, torch.randn(64, 16))
    for kept in (set(range(200)), set()):
        layout = layout_of(formulation, keeping(formulation, kept))
        assert layout.placement.fragmentation <= 1.05
