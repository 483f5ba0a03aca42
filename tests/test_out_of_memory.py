"""A step that runs out of memory says where, what was alive, and which budget would have held."""

from __future__ import annotations

import contextlib
import gc
import pickle
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autockpt
from autockpt import AutockptError, InfeasibleBudget, OutOfMemory
from autockpt_solvers.schedule import Compute
from oracle import assert_same, measure_peak, run_step
from tiny_models import Classifier, mlp, seeded

# As torch's allocators say it.
REFUSED: list[Callable[[], Exception]] = [
    lambda: RuntimeError(
        "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 4096 bytes. Error code 12 (Cannot allocate memory)"
    ),
    lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
]


@contextlib.contextmanager
def refusing(
    run: int, error: Callable[[], Exception] = REFUSED[0], kind: str = "aten.gelu.default"
) -> Iterator[None]:
    """In generated code, let one run of an operator, in place or not, find no memory."""
    _, name, _ = kind.split(".")
    overloads = getattr(torch.ops.aten, name).overloads()
    bindings = {f"_operator_aten_{name}_{overload}" for overload in overloads}
    runs = iter(range(1_000_000))
    own: list[tuple[dict[str, Any], str, Any]] = []

    def refuse(binding: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(runs) == run:
                raise error()
            return binding(*args, **kwargs)

        return call

    generated = [f.__globals__ for f in gc.get_objects() if type(f) is types.FunctionType]
    for names in {id(names): names for names in generated}.values():
        own += [(names, here, names[here]) for here in bindings & names.keys()]
    assert own
    for names, here, binding in own:
        names[here] = refuse(binding)
    try:
        yield
    finally:
        for names, here, binding in own:
            names[here] = binding


def tight() -> tuple[nn.Module, Tensor]:
    """A model that has run under the smallest budget, and its input."""
    model, x = mlp(dim=32)
    with pytest.raises(InfeasibleBudget) as refusal:
        autockpt.plan(model, x, 1)
    autockpt.optimize(model, refusal.value.minimum_bytes, time_limit=1)
    for _ in range(3):
        run_step(model, (x,))
    return model, x


@pytest.mark.parametrize("error", REFUSED, ids=["cpu", "cuda"])
def test_in_the_forward_it_names_the_operation(error: Callable[[], Exception]) -> None:
    model, x = tight()
    with pytest.raises(torch.OutOfMemoryError) as caught, refusing(1, error):
        model(x)
    told = caught.value
    assert isinstance(told, OutOfMemory)
    assert isinstance(told, AutockptError)
    assert type(told.__cause__) is type(error())
    assert str(told.__cause__) == str(error())
    assert told.operation.startswith("gelu_1 [aten.gelu")
    assert "tiny_models.py:" in told.operation
    assert told.at.startswith("in the forward, ")
    assert str(told).startswith(f"out of memory in {told.operation}, {told.at}.")
    again = pickle.loads(pickle.dumps(told))
    assert (str(again), again.tensors) == (str(told), told.tensors)


def test_in_the_backward_it_says_what_was_alive_and_what_would_have_held() -> None:
    plain, _ = mlp(dim=32)
    model, x = tight()
    plan = model.plan
    again = [op for op in plan.schedule.backward_computes if op < plan.problem.barrier]
    gelus = [op for op in again if plan.problem.operations[op].kind.startswith("aten.gelu")]
    last = plan.problem.operations[gelus[-1]]
    loss = model(x)
    with pytest.raises(OutOfMemory) as caught, refusing(len(gelus) - 1):
        loss.backward()
    told = caught.value
    assert told.operation.startswith(f"{last.name} [")
    assert told.at.startswith("in the backward, where it runs again, ")
    sizes = [size for _, size in told.tensors]
    assert sizes == sorted(sizes, reverse=True)
    assert told.live_bytes == sum(sizes)
    assert plan.problem.resident_bytes in sizes
    assert told.live_bytes <= told.budget_bytes <= plan.peak_bytes
    assert told.minimum_bytes == plan.peak_bytes
    # Nothing of the step is left, and the next one is right.
    del caught, told, loss
    model.zero_grad(set_to_none=True)
    assert_same(run_step(model, (x,)), run_step(plain, (x,)))


def test_a_budget_that_would_have_held_does() -> None:
    model, x = mlp(dim=32)
    autockpt.optimize(model, None)
    run_step(model, (x,))
    plan = model.plan
    peak = plan.trace.peak_step
    kinds = [
        plan.problem.operations[step.operation].kind
        for step in plan.schedule.steps[: peak + 1]
        if isinstance(step, Compute)
    ]
    with (
        pytest.raises(OutOfMemory, match=r"A budget of [\d,]+ bytes would have held") as caught,
        refusing(kinds.count(kinds[-1]) - 1, kind=kinds[-1]),
    ):
        model(x).backward()
    assert caught.value.minimum_bytes <= caught.value.budget_bytes < plan.peak_bytes
    model, _ = mlp(dim=32)
    autockpt.optimize(model, caught.value.budget_bytes, time_limit=1)
    run_step(model, (x,))
    assert model.plan.peak_bytes <= caught.value.budget_bytes


def test_where_none_would_have_held_it_says_so() -> None:
    model, x = tight()
    with pytest.raises(OutOfMemory, match="No budget would have held: ") as caught, refusing(0):
        model(x)
    assert caught.value.budget_bytes < caught.value.minimum_bytes == model.plan.peak_bytes


def test_what_the_failed_step_held_is_free() -> None:
    model, x = tight()
    kept: list[Exception] = []

    def fails() -> None:
        with refusing(2):
            try:
                model(x)
            except OutOfMemory as error:
                kept.append(error)

    assert measure_peak(fails).left_bytes == 0
    assert kept


class Breaking(nn.Module):
    """Two graphs, the second behind a number read from a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = seeded(lambda: Classifier(32)), seeded(lambda: Classifier(32))

    def forward(self, x: Tensor) -> Tensor:
        loss = self.first(x)
        if loss.item() > 1e9:
            loss = loss * 2
        return loss + self.second(x)


def test_of_several_graphs_it_tells_the_one() -> None:
    x = mlp(dim=32)[1]
    model = autockpt.optimize(Breaking(), None)
    for _ in range(6):
        run_step(model, (x,))
    with pytest.raises(OutOfMemory) as caught, refusing(5):
        model(x)
    assert "second" in caught.value.operation or "gelu_1" in caught.value.operation
    assert model.plan.problem.resident_bytes in [size for _, size in caught.value.tensors]
    run_step(model, (x,))


def test_other_errors_stay_what_they_are() -> None:
    model, x = tight()
    with (
        pytest.raises(RuntimeError, match=r"^of another kind$") as caught,
        refusing(1, lambda: RuntimeError("of another kind")),
    ):
        model(x)
    assert not isinstance(caught.value, AutockptError)
