"""The same promises on a CUDA device, against its allocator's own statistics."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

import autockpt
from autockpt import InfeasibleBudget, Plan
from benchmarks.measure import step_function
from models import EXAMPLES, Example, gpt_example
from oracle import StepResult, assert_same, measure_peak, resident_bytes, run_step

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
MODELS: dict[str, Callable[..., Example]] = {
    "gpt": EXAMPLES["gpt"],
    "gpt_dropout": functools.partial(gpt_example, dropout=0.1),
    "resnet": EXAMPLES["resnet"],
    "unet": EXAMPLES["unet"],
}


@pytest.fixture(autouse=True)
def _same_kernels_every_time() -> Any:
    """Deterministic kernels: the default ones add up gradients in any order."""
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before


def example(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    model, args, _ = MODELS[name]("test")
    return model.to(CUDA), tuple(a.to(CUDA) for a in args)


def second_step(model: nn.Module, args: tuple[Any, ...]) -> tuple[StepResult, torch.Tensor]:
    """The result of the second of two steps, and where the device's generator then stands."""
    torch.manual_seed(7)
    step_function(model, args)()
    return run_step(model, args), torch.cuda.get_rng_state(CUDA)


def whole_peak(model: nn.Module, args: tuple[Any, ...]) -> int:
    """The step's peak as ``max_memory_allocated`` has it, less what belongs to other tests.

    Libraries' own workspace (cuBLAS) is allocated once per process and is no part of a step.
    """
    step = step_function(model, args)
    step()
    return resident_bytes(model, args, device=CUDA) + measure_peak(step, device=CUDA).delta_bytes


@functools.cache
def reference(name: str) -> tuple[StepResult, torch.Tensor, Plan, int]:
    model, args = example(name)
    autockpt.optimize(model, budget=None)
    result, state = second_step(model, args)
    with pytest.raises(InfeasibleBudget) as error:
        autockpt.plan(example(name)[0], args, budget=1)
    return result, state, model.plan, error.value.minimum_bytes


@pytest.mark.parametrize("name", MODELS)
def test_without_a_budget_a_step_is_eagers(name: str) -> None:
    result, state, plan, _ = reference(name)
    model, args = example(name)
    expected, expected_state = second_step(model, args)
    assert_same(result, expected, bitwise=False)
    assert torch.equal(state, expected_state)
    model, args = example(name)
    autockpt.optimize(model, None, plan=plan)
    assert abs(plan.peak_bytes - whole_peak(model, args)) <= 0.01 * plan.peak_bytes


@pytest.mark.parametrize("budget", ["80%", "60%", "minimum"])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_keeps_its_budget_and_its_result(name: str, budget: str) -> None:
    expected, expected_state, baseline, minimum_bytes = reference(name)
    budget_bytes = minimum_bytes
    if budget != "minimum":
        resident = baseline.problem.resident_bytes
        added = baseline.baseline_peak_bytes - resident
        budget_bytes = max(minimum_bytes, resident + added * int(budget.rstrip("%")) // 100)
    model, args = example(name)
    autockpt.optimize(model, budget_bytes, time_limit=3)
    result, state = second_step(model, args)
    assert_same(result, expected)
    assert torch.equal(state, expected_state)
    measured = whole_peak(model, args)
    assert measured <= budget_bytes
    assert abs(model.plan.peak_bytes - measured) <= 0.01 * measured
    assert model.plan.extra_time_s > 0


def test_the_whole_process_keeps_the_budget() -> None:
    """The statistic a user reads: ``max_memory_allocated``, with the optimizer's step in it."""
    model, args = example("gpt")
    optimizer = AdamW(model.parameters())
    plan = autockpt.plan(model, args, None, optimizer=optimizer)
    resident = plan.problem.resident_bytes
    budget_bytes = resident + (plan.baseline_peak_bytes - resident) * 7 // 10
    autockpt.optimize(model, budget_bytes, optimizer=optimizer, time_limit=3)
    step = step_function(model, args, optimizer=optimizer)
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    own = resident_bytes(model, args, optimizer, device=CUDA)
    others = torch.cuda.memory_allocated(CUDA) - own  # libraries' workspace, other tests
    torch.cuda.reset_peak_memory_stats(CUDA)
    step()
    torch.cuda.synchronize()
    measured = torch.cuda.max_memory_allocated(CUDA) - others
    assert measured <= budget_bytes
    assert abs(model.plan.peak_bytes - measured) <= 0.01 * measured


def test_half_precision_trains_within_the_budget() -> None:
    model, args = example("gpt")
    model = model.to(torch.bfloat16)
    plan = autockpt.plan(model, args, None)
    eager, _ = example("gpt")
    expected, _ = second_step(eager.to(torch.bfloat16), args)
    budget_bytes = int(0.8 * plan.peak_bytes)
    autockpt.optimize(model, budget_bytes, time_limit=3)
    result, _ = second_step(model, args)
    assert_same(result, expected, bitwise=False, rtol=1e-2)  # bfloat16 has 8 bits
    assert whole_peak(model, args) <= budget_bytes


@pytest.mark.parametrize("name", MODELS)
def test_with_an_arena_later_steps_reserve_nothing_more(name: str) -> None:
    expected, expected_state, baseline, _ = reference(name)
    model, args = example(name)
    autockpt.optimize(model, int(1.1 * baseline.peak_bytes), time_limit=3, arena=True)
    result, state = second_step(model, args)
    assert_same(result, expected)
    assert torch.equal(state, expected_state)
    step = step_function(model, args)
    step()
    torch.cuda.synchronize()
    reserved = torch.cuda.memory_reserved(CUDA)
    for _ in range(3):
        step()
        between = [torch.empty(1 << 16, device=CUDA) for _ in range(8)]  # what would cut it up
        del between
    torch.cuda.synchronize()
    assert torch.cuda.memory_reserved(CUDA) <= reserved + (1 << 21)
