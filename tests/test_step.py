"""A training step under a budget: it keeps the budget, and its result is the step's without one.

Every model at every budget. Peaks are what the allocator's own events say; the simulator has no
part in them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import autockpt
from autockpt import InfeasibleBudget, Plan
from benchmarks.measure import step_function
from hf_models import HF_EXAMPLES
from models import EXAMPLES, Example, gpt_example
from oracle import StepResult, assert_same, measure_peak, resident_bytes, run_step

# Name -> its example, and the method that plans it fast enough for a test.
MODELS: dict[str, tuple[Any, str]] = {
    "gpt": (EXAMPLES["gpt"], "auto"),
    "gpt_dropout": (functools.partial(gpt_example, dropout=0.1), "auto"),
    "resnet": (EXAMPLES["resnet"], "auto"),
    "unet": (EXAMPLES["unet"], "auto"),
    "mixer": (EXAMPLES["mixer"], "auto"),
    "llama": (EXAMPLES["llama"], "greedy"),
    "gpt2": (HF_EXAMPLES["gpt2"], "auto"),
    "hf_llama": (HF_EXAMPLES["hf_llama"], "greedy"),
    "bert": (HF_EXAMPLES["bert"], "auto"),
    "vit": (HF_EXAMPLES["vit"], "auto"),
    "t5": (HF_EXAMPLES["t5"], "greedy"),
}
BUDGETS = ("90%", "70%", "50%", "35%", "minimum")
# Models whose graph runs eager's kernels in eager's order, sums of gradients included.
AS_EAGER: frozenset[str] = frozenset()


def example(name: str) -> Example:
    return MODELS[name][0]("test")


@dataclass(frozen=True)
class Reference:
    """A model's step without a budget: eager, and as the graph with nothing recomputed."""

    eager: StepResult
    graph: StepResult
    plan: Plan
    minimum_bytes: int

    def budget(self, name: str) -> int:
        """90 % means: resident memory, and 90 % of what the baseline's step adds to it."""
        if name == "minimum":
            return self.minimum_bytes
        resident = self.plan.problem.resident_bytes
        added = self.plan.baseline_peak_bytes - resident
        return resident + added * int(name.rstrip("%")) // 100


def second_step(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Any) -> StepResult:
    """The result of the second of two steps; the first is a plain one, as a user's loop has it."""
    torch.manual_seed(7)
    step_function(model, args, kwargs)()
    return run_step(model, args, kwargs)


@functools.cache
def reference(name: str) -> Reference:
    eager = second_step(*example(name))
    model, args, kwargs = example(name)
    autockpt.optimize(model, budget=None)
    graph = second_step(model, args, kwargs)
    with pytest.raises(InfeasibleBudget) as error:
        autockpt.plan(model, args, budget=1, example_kwargs=kwargs)
    return Reference(eager, graph, model.plan, error.value.minimum_bytes)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", MODELS)
def test_a_step_keeps_its_budget_and_its_result(name: str, budget: str) -> None:
    expected = reference(name)
    budget_bytes = expected.budget(budget)
    model, args, kwargs = example(name)
    if budget_bytes < expected.minimum_bytes:
        with pytest.raises(InfeasibleBudget) as error:
            autockpt.optimize(
                model, budget_bytes, solver="greedy", time_limit=1,
                example_inputs=args, example_kwargs=kwargs,
            )  # fmt: skip
        assert error.value.minimum_bytes == expected.minimum_bytes
        return  # what is tested in its place is the minimum, which has a test of its own
    autockpt.optimize(model, budget_bytes, solver=MODELS[name][1], time_limit=3)
    assert_same(second_step(model, args, kwargs), expected.graph)
    peak = measure_peak(step_function(model, args, kwargs))
    measured_bytes = resident_bytes(model, (args, kwargs)) + peak.delta_bytes
    predicted_bytes = model.plan.peak_bytes
    assert measured_bytes <= budget_bytes
    assert abs(predicted_bytes - measured_bytes) <= 0.01 * measured_bytes
    assert peak.left_bytes == 0
    # Otherwise this tested nothing: below the baseline's peak something must run again.
    assert model.plan.baseline_peak_bytes > budget_bytes
    assert model.plan.extra_time_s > 0


@pytest.mark.parametrize("name", MODELS)
def test_without_a_budget_a_step_is_eagers(name: str) -> None:
    """At each budget the result has the bits of the graph's; this ties the graph to eager."""
    expected = reference(name)
    assert_same(expected.graph, expected.eager, bitwise=name in AS_EAGER)
    assert expected.plan.extra_time_s == 0


@pytest.mark.parametrize("name", MODELS)
def test_without_a_budget_the_peak_is_predicted(name: str) -> None:
    model, args, kwargs = example(name)
    autockpt.optimize(model, budget=None, plan=reference(name).plan)
    step = step_function(model, args, kwargs)
    step()
    step()
    peak = measure_peak(step)
    measured_bytes = resident_bytes(model, (args, kwargs)) + peak.delta_bytes
    assert abs(model.plan.baseline_peak_bytes - measured_bytes) <= 0.01 * measured_bytes
    assert peak.left_bytes == 0
