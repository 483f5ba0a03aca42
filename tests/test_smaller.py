"""A smaller input runs under the plan of a larger one: nothing is solved, and the budget holds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autockpt
from autockpt import planning
from autockpt.given import OF_A_LARGER
from models import GPT
from oracle import StepResult, assert_same, measure_peak, resident_bytes, run_step
from tiny_models import MLP, seeded


def gpt() -> nn.Module:
    return seeded(lambda: GPT(layers=2, dim=32, heads=2, vocab=64, seq=64, dropout=0.1))


def tokens(batch: int, length: int) -> tuple[Tensor, ...]:
    ids = torch.randint(64, (batch, length + 1), generator=torch.Generator().manual_seed(3))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def mlp() -> nn.Module:
    return seeded(lambda: MLP(dim=64, layers=8))


def rows(count: int, _: int) -> tuple[Tensor, ...]:
    return (torch.randn(count, 64, generator=torch.Generator().manual_seed(count)),)


def loss(output: Tensor) -> Tensor:
    return output if output.dim() == 0 else output.square().mean()


def step(model: nn.Module, args: tuple[Tensor, ...]) -> StepResult:
    return run_step(model, args, loss_fn=loss)


@pytest.fixture
def solved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of operations of each problem that is solved."""
    calls: list[int] = []
    own = planning.solve

    def counted(problem: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(len(problem.operations))
        return own(problem, *args, **kwargs)

    monkeypatch.setattr(planning, "solve", counted)
    return calls


# In the GPT the loss is the model's own, in the MLP it is the training loop's.
@pytest.mark.parametrize(
    ("build", "inputs", "sizes"),
    [
        (gpt, tokens, [(8, 48), (8, 47), (7, 40), (2, 8)]),
        (mlp, rows, [(256, 0), (250, 0), (17, 0)]),
    ],
    ids=["gpt", "mlp"],
)
def test_smaller_inputs_are_not_solved_again(
    build: Callable[[], nn.Module],
    inputs: Callable[[int, int], tuple[Tensor, ...]],
    sizes: list[tuple[int, int]],
    solved: list[int],
) -> None:
    free = autockpt.optimize(build(), None)
    for _ in range(3):
        step(free, inputs(*sizes[0]))
    resident = free.plan.problem.resident_bytes
    budget = resident + (free.plan.baseline_peak_bytes - resident) * 7 // 10
    plain, model = build(), autockpt.optimize(build(), budget, time_limit=1)
    for _ in range(3):
        step(model, inputs(*sizes[0]))
    solved.clear()
    extra = []
    for size in sizes[1:]:
        args = inputs(*size)

        def whole(args: tuple[Tensor, ...] = args) -> None:
            output = model(*args)  # held through the backward
            loss(output).backward()

        for _ in range(2):
            whole()
            model.zero_grad(set_to_none=True)
        peak = measure_peak(whole).delta_bytes
        model.zero_grad(set_to_none=True)
        peak += resident_bytes(model, args)
        assert_same(step(model, args), step(plain, args))
        assert model.plan.origin["plan"] == OF_A_LARGER
        assert peak <= budget
        assert abs(model.plan.peak_bytes - peak) <= 0.01 * peak
        extra.append(model.plan.extra_time_s)
    assert not solved
    assert extra[0] > 0
    assert extra[-1] == 0  # so small that nothing has to run again
    # A larger one is a problem of its own.
    step(model, inputs(sizes[0][0] + 1, sizes[0][1]))
    assert solved


def test_the_larger_ones_own_plan_stays(solved: list[int]) -> None:
    """Sizes that alternate cost one capture each."""
    model = autockpt.optimize(mlp(), None)
    for count in (64, 32, 64, 32, 64, 32):
        step(model, rows(count, 0))
    handle = model.autockpt
    captured = len(handle.planner.graphs)
    solved.clear()
    for count in (64, 32, 64, 32):
        step(model, rows(count, 0))
    assert len(handle.planner.graphs) == captured == 2
    assert not solved


@pytest.fixture
def said() -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("autockpt")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_captures_are_bounded_and_reported(
    monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    for place in ("autockpt._torch", "autockpt._torch.tracing"):
        monkeypatch.setattr(f"{place}.SIGNATURES", 3)
    plain, model = mlp(), autockpt.optimize(mlp(), None)
    for count in (9, 8, 7, 6, 5):
        assert_same(step(model, rows(count, 0)), step(plain, rows(count, 0)))
    captures = [line for line in said if line.startswith("captured ")]
    assert captures[-1].startswith("captured 3 of at most 3 kinds of input; planned in ")
    assert any("run without a plan" in line for line in said)
    assert model.plan.origin["captures"] == "3 of at most 3"
