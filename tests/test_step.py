"""A training step under a budget: it keeps the budget, and its result is the step's without one.

Every model at every budget. Peaks are what the allocator's own events say; the simulator has no
part in them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import autockpt
from autockpt import InfeasibleBudget, Plan
from autockpt_solvers.solve import solve
from benchmarks.measure import step_function
from hf_models import HF_EXAMPLES
from models import EXAMPLES, GPT, Example, Llama, Size, gpt_example, llama_example
from oracle import StepResult, assert_same, measure_peak, resident_bytes, run_step


def small_gpt_with_dropout(size: Size) -> Example:
    _, args, kwargs = gpt_example(size)
    model = GPT(layers=4, dim=64, heads=4, vocab=512, seq=64, dropout=0.1)
    return model, args, kwargs


def llama(size: Size) -> Example:
    """Of the example's width; its depth is what ``test_training`` sweeps."""
    _, args, kwargs = llama_example(size)
    return Llama(layers=6, dim=64, heads=4, kv_heads=2, vocab=256, seq=64), args, kwargs


def vit(size: Size) -> Example:
    model, args, kwargs = HF_EXAMPLES["vit"](size)
    # Its loss would fill this in at the first call, and be traced again for it.
    model.config.problem_type = "single_label_classification"
    return model, args, kwargs


MODELS: dict[str, Callable[[Size], Example]] = {
    "gpt": gpt_example,
    "gpt_dropout": small_gpt_with_dropout,
    "resnet": EXAMPLES["resnet"],
    "unet": EXAMPLES["unet"],
    "mixer": EXAMPLES["mixer"],
    "llama": llama,
    "gpt2": HF_EXAMPLES["gpt2"],
    "hf_llama": HF_EXAMPLES["hf_llama"],
    "bert": HF_EXAMPLES["bert"],
    "vit": vit,
    "t5": HF_EXAMPLES["t5"],
}
BUDGETS = ("90%", "70%", "50%", "35%", "minimum")
# Models whose graph runs eager's kernels in eager's order, sums of gradients included.
AS_EAGER = frozenset(MODELS) - {"hf_llama"}


def example(name: str) -> Example:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MODELS[name]("test")


@dataclass(frozen=True)
class Reference:
    """A model's step without a budget: eager, and as the graph with nothing recomputed."""

    eager: StepResult
    graph: StepResult
    plan: Plan
    measured_bytes: int
    left_bytes: int
    minimum_bytes: int

    def budget(self, name: str) -> int:
        """90 % means: resident memory, and 90 % of what the baseline's step adds to it."""
        if name == "minimum":
            return self.minimum_bytes
        resident = self.plan.problem.resident_bytes
        added = self.plan.baseline_peak_bytes - resident
        return resident + added * int(name.rstrip("%")) // 100


def second_step(model: nn.Module, args: tuple[Any, ...], kwargs: Any) -> StepResult:
    """The result of the second of two steps; the first is a plain one, as a user's loop has it."""
    torch.manual_seed(7)
    step_function(model, args, kwargs)()
    return run_step(model, args, kwargs)


def measured(model: nn.Module, args: tuple[Any, ...], kwargs: Any) -> tuple[int, int]:
    """The peak of a later step, resident memory included, and the bytes it leaves behind."""
    peak = measure_peak(step_function(model, args, kwargs))
    return resident_bytes(model, (args, kwargs)) + peak.delta_bytes, peak.left_bytes


def attempted(
    model: nn.Module, args: tuple[Any, ...], kwargs: Any
) -> StepResult | InfeasibleBudget:
    try:
        return second_step(model, args, kwargs)
    except InfeasibleBudget as error:
        return error


@functools.cache
def reference(name: str) -> Reference:
    eager = second_step(*example(name))
    model, args, kwargs = example(name)
    autockpt.optimize(model, budget=None)
    graph = second_step(model, args, kwargs)
    with pytest.raises(InfeasibleBudget) as error:
        solve(model.plan.problem, 1)
    return Reference(
        eager, graph, model.plan, *measured(model, args, kwargs), error.value.minimum_bytes
    )


@pytest.mark.parametrize("name", MODELS)
def test_without_a_budget_a_step_is_eagers(name: str) -> None:
    """At each budget the result has the bits of the graph's; this ties the graph to eager."""
    expected = reference(name)
    assert_same(expected.graph, expected.eager, bitwise=name in AS_EAGER)


@pytest.mark.parametrize("name", MODELS)
def test_without_a_budget_the_peak_is_the_predicted_one(name: str) -> None:
    expected = reference(name)
    assert expected.plan.extra_time_s == 0
    assert expected.plan.peak_bytes <= expected.plan.baseline_peak_bytes  # some is in place
    assert_predicted(expected.plan, expected.measured_bytes)
    assert expected.left_bytes == 0


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", MODELS)
def test_a_step_keeps_its_budget_and_its_result(name: str, budget: str) -> None:
    expected = reference(name)
    budget_bytes = expected.budget(budget)
    model, args, kwargs = example(name)
    # Greedy ends by itself, and soon; near the minimum it may find nothing where the others do.
    easy = budget_bytes > 1.2 * expected.minimum_bytes
    solver, limit = ("greedy", 60.0) if easy else ("auto", 0.5)
    autockpt.optimize(model, budget_bytes, solver=solver, time_limit=limit)
    result = attempted(model, args, kwargs)
    if isinstance(result, InfeasibleBudget):
        # What is tested in its place is the minimum, which is a case of its own.
        assert budget_bytes < result.minimum_bytes == expected.minimum_bytes
        return
    assert_same(result, expected.graph)
    measured_bytes, left_bytes = measured(model, args, kwargs)
    assert measured_bytes <= budget_bytes
    assert_predicted(model.plan, measured_bytes)
    assert left_bytes == 0
    # Below the baseline's peak something runs again, or this tested nothing.
    assert model.plan.baseline_peak_bytes > budget_bytes
    assert model.plan.extra_time_s > 0


def assert_predicted(plan: Plan, measured_bytes: int) -> None:
    assert abs(plan.peak_bytes - measured_bytes) <= 0.01 * measured_bytes
