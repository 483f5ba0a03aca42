"""Random models at random budgets: a planned step is eager's, and its peak is the predicted one.

``python tests/test_fuzz.py --models 5000`` runs as many as it is told to, and reports the first
that fails, made as small as it gets.
"""

from __future__ import annotations

import argparse
import logging
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import autockpt
from autockpt import InfeasibleBudget
from fuzzed import Fuzzed, Program, inputs, programs
from oracle import assert_same, measure_peak, resident_bytes, run_step

CI_MODELS = 60

pytestmark = pytest.mark.usefixtures("quiet")


def step(model: nn.Module, program: Program) -> tuple[Tensor, ...]:
    """A training step as a loop writes it, and what it leaves behind."""
    torch.manual_seed(3)
    batch = inputs(program)  # held to the end, as a loop over batches holds it
    loss = model.loss(model(batch))
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return (loss.detach(), torch.rand(1), *model.buffers(), *gradients)


def minimum_bytes(program: Program) -> int:
    with pytest.raises(InfeasibleBudget) as refusal:
        autockpt.optimize(Fuzzed(program), 1, example_inputs=(inputs(program),))
    return refusal.value.minimum_bytes


def check(program: Program, percent: int) -> None:
    """A step of the program at ``percent`` of its smallest budget: result, buffers, peak."""
    plain, model = Fuzzed(program), Fuzzed(program)
    budget = minimum_bytes(program) * percent // 100
    autockpt.optimize(model, budget, time_limit=0.5)
    for _ in range(3):  # until nothing about the loop is guessed any more
        mine, theirs = step(model, program), step(plain, program)
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    peak = measure_peak(lambda: step(model, program) and None)
    # The input is made inside the step: it is counted there.
    measured = resident_bytes(model) + peak.delta_bytes
    plan = model.plan
    allowed = plan.peak_bytes if plan.solver == "minimum" else budget
    assert measured <= allowed
    assert abs(plan.peak_bytes - measured) <= 0.01 * measured
    assert peak.left_bytes == 0
    step(plain, program)
    # Outputs, the pattern of missing gradients, the generator: all that can be seen of a step.
    x = inputs(program)
    # One graph sums gradients in another order than eager; nothing else may differ.
    expected = run_step(plain, (x,), loss_fn=plain.loss)
    assert_same(run_step(model, (x,), loss_fn=model.loss), expected, bitwise=False)


def fuzz(models: int) -> None:
    """Check so many random programs; hypothesis makes the first that fails small."""

    @settings(
        max_examples=models,
        deadline=None,
        database=None,
        derandomize=models == CI_MODELS,
        suppress_health_check=list(HealthCheck),
    )
    @given(programs(), st.integers(100, 160))
    def run(program: Program, percent: int) -> None:
        check(program, percent)

    run()


def test_random_models_at_random_budgets() -> None:
    fuzz(CI_MODELS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=500, help="how many to run")
    asked = parser.parse_args()
    logging.getLogger("autockpt").setLevel(logging.ERROR)
    began = time.perf_counter()
    fuzz(asked.models)
    print(f"{asked.models} models in {time.perf_counter() - began:.0f} s, none wrong")
