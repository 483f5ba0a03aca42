"""Rewrite: the generated code runs the schedule, run by run, and gives the same numbers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import autockpt
from autockpt import Plan, ScheduleError, _torch
from autockpt.formulate import Formulation, Role
from autockpt.rewrite import rewrite
from autockpt_solvers.memory import simulate
from autockpt_solvers.on_demand import Demand, on_demand, stage_schedule
from autockpt_solvers.schedule import BARRIER, Compute, Schedule, free_early
from oracle import assert_same, measure_peak, resident_bytes, run_step
from tiny_models import MLP, Classifier, formulated, keeping, mlp, seeded

# ------------------------------------------------------------------ models


class Everything(nn.Module):
    """Views, a tuple, a buffer, a skip and a mask: what a rewrite has to keep apart."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 64)
        self.norm = nn.BatchNorm1d(64)
        self.layer_norm = nn.LayerNorm(32)
        self.mix = nn.Linear(32, 32)
        self.head = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.embed(x)).relu()
        a, b = x.view(-1, 2, 32).unbind(1)
        b = b + functional.dropout(self.mix(self.layer_norm(a)), 0.3, self.training)
        a = a + torch.cat([b[:, 16:], b[:, :16]], 1).sin()
        return self.head(torch.stack([a, b], 1).flatten(1)).square().mean()


def everything() -> tuple[nn.Module, Tensor]:
    x = torch.randn(512, 16, generator=torch.Generator().manual_seed(1))
    return seeded(Everything), x


def chosen(formulation: Formulation, seed: int) -> Schedule:
    """A schedule that keeps a random part of what there is, and holds a random part of the rest."""
    pick = random.Random(seed)
    problem = formulation.problem
    kept = {s for s in range(len(problem.storages)) if pick.random() < 0.4}
    held = kept | {s for s in range(len(problem.storages)) if pick.random() < 0.5}
    return stage_schedule(problem, on_demand(Demand(problem), kept, held))


def again_counts(schedule: Schedule) -> list[int]:
    counts: dict[int, int] = {}
    for step in schedule.steps:
        if isinstance(step, Compute):
            counts[step.operation] = counts.get(step.operation, 0) + 1
    return [n - 1 for n in counts.values() if n > 1]


# ------------------------------------------------------------------ order and names


def written(*modules: fx.GraphModule) -> list[tuple[str, str, int]]:
    """Name, origin and number of every run in the graphs, in their order."""
    return [
        (node.name, node.meta["autockpt"]["origin"], node.meta["autockpt"]["run"])
        for module in modules
        for node in module.graph.nodes
        if node.op == "call_function" and "autockpt" in node.meta
    ]


def scheduled(formulation: Formulation, schedule: Schedule) -> list[tuple[str, str, int]]:
    runs: dict[int, int] = {}
    result = []
    for step in schedule.steps:
        if not isinstance(step, Compute):
            continue
        origin = formulation.origins[step.operation]
        if origin.role is Role.NODE:
            count = runs.get(step.operation, 0)
            runs[step.operation] = count + 1
            name = origin.node.name
            result.append((f"{name}_again_{count}" if count else name, name, count + 1))
    return result


@pytest.mark.parametrize("seed", range(6))
def test_the_graphs_are_the_schedule_in_order_and_by_name(seed: int) -> None:
    model, x = everything()
    formulation = formulated(model, x)
    schedule = chosen(formulation, seed)
    assert again_counts(schedule)
    forward, backward = rewrite(formulation, schedule)
    assert written(forward, backward) == scheduled(formulation, schedule)
    barrier = schedule.barrier
    before = Schedule(schedule.steps[:barrier])
    assert written(forward) == scheduled(formulation, before)


def test_a_second_and_a_third_further_run_are_told_apart() -> None:
    model, x = mlp(layers=4)
    formulation = formulated(model, x)
    demand = Demand(formulation.problem)
    nothing: frozenset[int] = frozenset()
    schedule = stage_schedule(formulation.problem, on_demand(demand, nothing, nothing))
    _, backward = rewrite(formulation, schedule)
    names = [name for name, _, _ in written(backward)]
    assert {"addmm_again_1", "addmm_again_2", "addmm_again_3"} <= set(names)
    assert len(names) == len(set(names))


class Recorder(TorchDispatchMode):
    """The operators that really run, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.kinds.append(str(func))
        return func(*args, **(kwargs or {}))


def stand_ins(nodes: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(n.meta["val"].shape, generator=generator) for n in nodes]


def executed(
    formulation: Formulation, schedule: Schedule
) -> tuple[list[Any], list[Any], list[str]]:
    """Run both graphs as torch runs them: their outputs, and the operators that ran."""
    forward, backward = rewrite(formulation, schedule)
    joint = formulation.capture.joint
    count = len(joint.forward_outputs)
    with torch.no_grad(), Recorder() as recorder:
        outputs = _torch.boxed(forward)(stand_ins(joint.primals))
        tangents = stand_ins(joint.tangents)
        recorder.kinds.append("barrier")
        gradients = _torch.boxed(backward)([*outputs[count:], *tangents])
    kinds = [k for k in recorder.kinds if k != "aten.randn.generator"]
    return list(outputs[:count]), list(gradients), kinds


@pytest.mark.parametrize("seed", range(4))
def test_what_runs_is_the_schedule(seed: int) -> None:
    model, x = mlp(layers=5)
    formulation = formulated(model, x)
    problem = formulation.problem
    plain = free_early(problem, problem.required, problem.backward)
    schedule = chosen(formulation, seed)
    assert schedule != plain
    outputs, gradients, kinds = executed(formulation, schedule)
    expected_outputs, expected_gradients, _ = executed(formulation, plain)
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected_outputs, strict=True))
    assert len(gradients) == len(expected_gradients)
    for mine, theirs in zip(gradients, expected_gradients, strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or torch.equal(mine, theirs)
    computing = {op.kind for op in problem.operations if not op.outside}
    wanted = [
        "barrier" if step is BARRIER else problem.operations[step.operation].kind
        for step in schedule.steps
        if step is BARRIER
        or (isinstance(step, Compute) and not problem.operations[step.operation].outside)
    ]
    assert [k for k in kinds if k in computing or k == "barrier"] == wanted


def test_the_code_is_readable() -> None:
    model, x = mlp(layers=3)
    formulation = formulated(model, x)
    _, backward = rewrite(formulation, keeping(formulation, set()))
    compile(backward.code, "backward", "exec")
    assert "addmm_again_1 = torch.ops.aten.addmm.default(" in backward.code
    # A name is dropped where it is used last; nothing is held to the end.
    (line,) = [n for n in backward.code.splitlines() if "gelu_again_1 = torch" in n]
    assert "addmm_again_1" in line


def test_a_rewritten_graph_is_this(golden: Callable[[str, str], None]) -> None:
    model = seeded(lambda: Classifier(dim=8, layers=2))
    formulation = formulated(model, torch.ones(4, 8))
    forward, backward = rewrite(formulation, keeping(formulation, set()))
    golden("rewritten.py.txt", f"{forward.code.strip()}\n\n\n{backward.code.strip()}\n")


# ------------------------------------------------------------------ what a forward hands over


def test_the_forward_saves_what_the_backward_takes() -> None:
    model, x = everything()
    formulation = formulated(model, x)
    forward, backward = rewrite(formulation, chosen(formulation, 1))
    joint = formulation.capture.joint
    (output,) = forward.graph.find_nodes(op="output")
    saved = [n.name for n in output.args[0][len(joint.forward_outputs) :]]
    taken = [n.name for n in backward.graph.find_nodes(op="placeholder")]
    assert taken == [*saved, *(t.name for t in joint.tangents)]
    assert len(output.meta["desc"]) == len(output.args[0])


def test_only_what_is_kept_is_saved() -> None:
    model, x = mlp(layers=6)
    formulation = formulated(model, x)
    made = {n.name for n in formulation.capture.operations}

    def saved(kept: set[int]) -> set[str]:
        _, backward = rewrite(formulation, keeping(formulation, kept))
        return {n.name for n in backward.graph.find_nodes(op="placeholder")} & made

    storages = range(len(formulation.problem.storages))
    assert {"addmm", "gelu", "addmm_3", "gelu_3"} <= saved(set(storages))
    assert saved(set()) == set()
    (one,) = [s for s in storages if formulation.problem.storages[s].name == "gelu_2"]
    assert saved({one}) == {"gelu_2"}


def test_a_schedule_that_frees_late_is_refused() -> None:
    model, x = mlp()
    formulation = formulated(model, x)
    problem = formulation.problem
    schedule = free_early(problem, problem.required, problem.backward)
    frees = [i for i, s in enumerate(schedule.steps) if not isinstance(s, Compute)]
    late = list(schedule.steps)
    late.append(late.pop(next(i for i in frees if late[i] is not BARRIER)))
    simulate(problem, Schedule(tuple(late)))  # it is a valid schedule
    with pytest.raises(ScheduleError, match="later than at its last use"):
        rewrite(formulation, Schedule(tuple(late)))


# ------------------------------------------------------------------ through the whole of torch


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "everything": everything,
    "mlp": lambda: mlp(dim=32, layers=6, dropout=0.2),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", MODELS)
def test_any_schedule_gives_the_same_step_at_its_predicted_peak(name: str, seed: int) -> None:
    model, x = MODELS[name]()
    autockpt.optimize(model, None)
    model(x).backward()
    expected = run_step(model, (x,))
    plan = autockpt.plan(MODELS[name]()[0], x, None)
    demand = Demand(plan.problem)
    pick = random.Random(seed)
    kept = {s for s in range(len(plan.problem.storages)) if pick.random() < 0.3}
    schedule = stage_schedule(plan.problem, on_demand(demand, kept, kept))
    assert again_counts(schedule)
    given: Plan = replace(plan, schedule=schedule)
    model, _ = MODELS[name]()
    autockpt.optimize(model, None, plan=given)
    model(x).backward()
    assert_same(run_step(model, (x,)), expected)
    measured = resident_bytes(model, x) + measure_peak(lambda: model(x).backward()).delta_bytes
    assert model.plan.schedule == schedule
    assert abs(model.plan.peak_bytes - measured) <= 0.01 * measured


def test_the_model_that_is_rewritten_may_return_what_it_computes_inside() -> None:
    class Hidden(MLP):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            hidden = functional.gelu(self.layers[0](x))
            return super().forward(hidden), hidden, hidden[:2]

    def loss(outputs: Any) -> Tensor:
        return outputs[0].square().mean() + outputs[2].sum()

    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    eager, model = seeded(Hidden), seeded(Hidden)
    plan = autockpt.plan(model, x, None)
    autockpt.optimize(model, int(plan.peak_bytes * 0.95), time_limit=1)
    for _ in range(3):
        assert_same(run_step(model, (x,), loss_fn=loss), run_step(eager, (x,), loss_fn=loss))
