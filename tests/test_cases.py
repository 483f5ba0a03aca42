"""Every case of ``tests/cases`` at every budget: eager's values, and a peak within the budget.

A case distils a public bug report into a model of a few operations; each file names its source.
They are copies, kept as they came: what they say is not ours to change.
"""

from __future__ import annotations

import functools
import importlib.util
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import autockpt
from autockpt import InfeasibleBudget, Plan
from oracle import measure_peak, resident_bytes

# Dynamo itself makes an instance of a user's autograd function where it traces one.
_INSTANCES = "ignore:.*should not be instantiated:DeprecationWarning"
pytestmark = [pytest.mark.filterwarnings(_INSTANCES), pytest.mark.usefixtures("quiet")]

FOLDER = Path(__file__).parent / "cases"
CASES = sorted(path.stem for path in FOLDER.glob("[0-9]*.py"))
# Their forwards do not capture as one graph: a size or a factor depends on data, or there is a
# recurrent layer. They are planned when steps have shown their graphs, not ahead.
SEVERAL_GRAPHS = (
    "01_bn_running_stats",
    "08_slice_assign_token",
    "27_moe_token_counts",
    "28_lstm",
)
ONE_GRAPH = [name for name in CASES if name not in SEVERAL_GRAPHS]
BUDGETS = ("100%", "60%", "40%", "minimum")


def loaded(path: Path) -> ModuleType:
    """The module of a file whose name is no identifier."""
    spec = importlib.util.spec_from_file_location(f"case_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # pickle looks classes up by it
    spec.loader.exec_module(module)
    return module


def batches(case: ModuleType) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The case's batches, made anew: some collect what the forward leaves in them."""
    return case.make()[1]


def step(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], loss_fn: Any) -> None:
    """One training step that leaves no gradient behind."""
    torch.manual_seed(5)
    random.seed(5)
    loss_fn(model(*args, **kwargs)).backward()
    model.zero_grad(set_to_none=True)


def optimised(case: ModuleType, budget: int | None) -> nn.Module:
    model: nn.Module = case.make()[0]
    return autockpt.optimize(model, budget, time_limit=1)


@functools.cache
def case_named(name: str) -> ModuleType:
    return loaded(FOLDER / f"{name}.py")


def settled(case: ModuleType, index: int, budget: int | None) -> nn.Module:
    """The case's model after enough steps on one batch for its plan to rest on what it saw."""
    model = optimised(case, budget)
    for _ in range(3):
        step(model, *batches(case)[index], case.make()[2])
    return model


@functools.cache
def plans(name: str) -> tuple[Plan, ...]:
    """For each batch the plan of its step without a budget."""
    case = case_named(name)
    found: list[Plan] = []
    shapes: list[str] = []
    for index, batch in enumerate(batches(case)):
        shape = repr(_shapes(batch))
        known = shape in shapes
        shapes.append(shape)
        found.append(found[shapes.index(shape)] if known else settled(case, index, None).plan)
    return tuple(found)


def _shapes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.dtype)
    if isinstance(value, dict):
        return {k: _shapes(v) for k, v in value.items()}
    return [_shapes(v) for v in value] if isinstance(value, (list, tuple)) else value


def budget_bytes(name: str, budget: str) -> int:
    """Resident memory and the given part of the largest baseline's activations."""
    plan = max(plans(name), key=lambda p: p.baseline_peak_bytes)
    if budget == "minimum":
        return 1  # what it is raised to
    resident = plan.problem.resident_bytes
    return resident + (plan.baseline_peak_bytes - resident) * int(budget.rstrip("%")) // 100


# What refusals named, by case and the way its budget is used.
_minima: dict[tuple[str, str], int] = {}


def feasible(
    name: str, budget: str, way: str, use: Callable[[int], nn.Module]
) -> tuple[int, nn.Module] | None:
    """What ``use`` returns at the budget; None where that is refused, as it then must be.

    What is tested in its place is the minimum that the refusal names, a case of its own.
    """
    allowed = budget_bytes(name, budget)
    if budget == "minimum":
        allowed = max(allowed, _minima.get((name, way), 0))
    for _ in range(1 + len(plans(name))):  # each batch may have a minimum of its own
        try:
            return allowed, use(allowed)
        except InfeasibleBudget as refusal:
            smallest = refusal.minimum_bytes
        assert smallest > allowed
        allowed = _minima[name, way] = smallest
        if budget != "minimum":
            return None
    pytest.fail("a budget that a refusal named is refused")


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", ONE_GRAPH)
def test_a_case_has_eagers_values(name: str, budget: str) -> None:
    case = case_named(name)
    harness = loaded(FOLDER / "_harness.py")
    run = harness.make_run(case)

    def once(allowed: int) -> nn.Module:
        model = optimised(case, allowed)
        mine, theirs = run(model), run(eager := case.make()[0])
        harness.same(theirs, mine, eager, model, getattr(case, "TOL", 1e-5))
        return model

    found = feasible(name, budget, "values", once)
    if found is not None and hasattr(case, "check"):
        case.check(case.make()[0], optimised(case, found[0]), run)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", ONE_GRAPH)
def test_a_case_keeps_its_budget(name: str, budget: str) -> None:
    case = case_named(name)
    seen: set[str] = set()
    for index, batch in enumerate(batches(case)):
        if repr(_shapes(batch)) in seen:
            continue
        seen.add(repr(_shapes(batch)))
        use = functools.partial(settled, case, index)
        found = feasible(name, budget, f"batch {index}", use)
        if found is None:
            continue
        allowed, model = found
        args, kwargs = batches(case)[index]
        resident = resident_bytes(model, (args, kwargs))
        loss_fn = case.make()[2]
        peak = measure_peak(functools.partial(step, model, args, kwargs, loss_fn))
        # A refusal names what the model needs; the user's loss may need more, which is said in a
        # warning and stands in the plan.
        smallest = model.plan.solver == "minimum"
        assert resident + peak.delta_bytes <= (model.plan.peak_bytes if smallest else allowed)
        assert abs(model.plan.peak_bytes - resident - peak.delta_bytes) <= (
            0.01 * (resident + peak.delta_bytes)
        )


@pytest.mark.parametrize("name", SEVERAL_GRAPHS)
def test_a_case_of_several_graphs_has_eagers_values(name: str) -> None:
    case = case_named(name)
    harness = loaded(FOLDER / "_harness.py")
    run = harness.make_run(case)
    model, eager = autockpt.optimize(case.make()[0], "1GB"), case.make()[0]
    for _ in range(3):  # under the first plan, the recorded step's, and after it
        harness.same(run(eager), run(model), eager, model, getattr(case, "TOL", 1e-5))
    if hasattr(case, "check"):
        case.check(case.make()[0], autockpt.optimize(case.make()[0], "1GB"), run)
