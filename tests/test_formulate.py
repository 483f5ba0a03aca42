"""Formulate: what may run again and what it then reads, what the user holds, what lies around."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autockpt.device import device_of
from autockpt.formulate import Around, Formulation, Role, formulate
from autockpt.pins import Pins
from autockpt.profile import profile
from autockpt.replay import state_bytes
from autockpt_solvers.memory import simulate
from autockpt_solvers.problem import Operation
from autockpt_solvers.schedule import free_early
from oracle import measure_peak
from tiny_models import MLP, Classifier, captured, formulated, mlp, operation_named, seeded

STATE = state_bytes(torch.device("cpu"))


def of_kind(formulation: Formulation, kind: str) -> list[Operation]:
    return [op for op in formulation.problem.operations if op.kind == f"aten.{kind}"]


def baseline_peak(formulation: Formulation) -> int:
    problem = formulation.problem
    return simulate(problem, free_early(problem, problem.required, problem.backward)).peak_bytes


# ------------------------------------------------------------------ the shape of a problem


def test_operations_stand_in_the_graphs_order_with_the_loss_between() -> None:
    model, x = mlp(layers=2)
    formulation = formulated(model, x)
    problem, capture = formulation.problem, formulation.capture
    names = [op.name for op in problem.operations]
    nodes = [n.name for n in capture.operations]
    assert [n for n in names if n in set(nodes)] == nodes
    assert names[problem.barrier] == "loss_outside_the_graph"
    assert all(op.outside for op in problem.operations if op.kind in ("loss", "accumulate"))
    for op, origin in zip(problem.operations, formulation.origins, strict=True):
        if origin.role is Role.NODE:
            assert origin.node.name == op.name
        assert op.outside == (origin.role is Role.AROUND)


def test_backward_operations_run_once() -> None:
    model, x = mlp()
    problem = formulated(model, x).problem
    assert all(problem.operations[i].recompute_inputs is None for i in problem.backward)


def test_plain_operations_may_run_again_and_read_the_same() -> None:
    model, x = mlp()
    for op in of_kind(formulated(model, x), "gelu.default"):
        assert op.recompute_inputs == op.inputs
        assert op.recompute_outputs == op.outputs
        assert op.fixed == ""


def test_operations_know_the_users_module_and_line() -> None:
    model, x = mlp(layers=2)
    linears = of_kind(formulated(model, x), "addmm.default")
    assert [op.module_path for op in linears] == ["layers.0", "layers.1"]
    assert all(op.source.startswith("tiny_models.py:") for op in linears)


# ------------------------------------------------------------------ what the user has


class TwoOutputs(MLP):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.layers[0](x)
        return hidden[:1], functional.gelu(self.layers[1](functional.gelu(hidden)))


def test_what_the_user_holds_runs_once_and_lives_to_the_end() -> None:
    formulation = formulated(seeded(TwoOutputs), torch.ones(4, 16))
    problem = formulation.problem
    hidden = of_kind(formulation, "addmm.default")[0]
    assert hidden.fixed == "the user holds its output"
    assert hidden.recompute_inputs is None
    assert set(hidden.outputs) <= problem.live_at_barrier & problem.live_at_end
    assert of_kind(formulation, "addmm.default")[1].recompute_inputs is not None


def test_what_the_user_lets_go_of_may_run_again() -> None:
    around = Around(released=(True, False))
    formulation = formulated(seeded(TwoOutputs), torch.ones(4, 16), around=around)
    problem = formulation.problem
    hidden, last = of_kind(formulation, "addmm.default")[0], of_kind(formulation, "gelu.default")[1]
    assert hidden.recompute_inputs is not None
    assert set(hidden.outputs) <= problem.live_at_barrier - problem.live_at_end
    assert last.fixed == "the user holds its output"


def test_gradients_live_to_the_end() -> None:
    model, x = mlp(layers=2)
    formulation = formulated(model, x)
    gradients = {storage for _, storage, _ in formulation.capture.gradients}
    assert len(gradients) == 4
    assert gradients <= formulation.problem.live_at_end


def test_gradients_that_exist_already_take_over_nothing() -> None:
    model, x = mlp(layers=2)
    problem = formulated(model, x, around=Around(gradients_exist=True)).problem
    adding = [op for op in problem.operations if op.kind == "accumulate"]
    assert len(adding) == 4
    assert all(op.outputs == () for op in adding)
    assert not any(op.outputs and set(op.inputs) & problem.live_at_end for op in adding)


class Shared(nn.Module):
    """One gradient for two parameters: each ``.grad`` needs memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(8, 8))
        self.b = nn.Parameter(torch.ones(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return ((self.a + self.b) * x).sum()


def test_a_gradient_of_two_parameters_is_copied() -> None:
    formulation = formulated(seeded(Shared), torch.ones(8, 8))
    problem = formulation.problem
    copies = [s for s, storage in enumerate(problem.storages) if "_copied" in storage.name]
    model, x = seeded(Shared), torch.ones(8, 8)
    model(x).backward()
    pointers = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
    own = {s for _, s, _ in formulation.capture.gradients} & set(problem.live_at_end)
    assert len(pointers) == 2
    assert len(set(copies) & problem.live_at_end | own) == len(pointers)


# ------------------------------------------------------------------ around the graph


def test_what_is_resident_counts_throughout() -> None:
    model, x = mlp()
    one, two = (formulated(model, x, around=Around(resident_bytes=n)) for n in (0, 1000))
    assert baseline_peak(two) - baseline_peak(one) == 1000


def test_the_loss_and_the_optimizer_need_room() -> None:
    model, x = mlp()
    around = Around(loss_bytes=1 << 20, optimizer_bytes=2 << 20)
    formulation = formulated(model, x, around=around)
    assert operation_named(formulation, "loss_outside_the_graph").workspace_bytes == 1 << 20
    step = operation_named(formulation, "optimizer_step")
    assert step.workspace_bytes == 2 << 20
    assert formulation.problem.operations[-1] is step
    # All gradients are there when the optimizer runs.
    assert set(step.inputs) == {s for _, s, _ in formulation.capture.gradients}


def test_there_is_no_optimizer_step_without_one() -> None:
    model, x = mlp()
    names = [op.name for op in formulated(model, x).problem.operations]
    assert "optimizer_step" not in names


# ------------------------------------------------------------------ random operations


def dropout_problem(rows: int) -> tuple[Formulation, Operation]:
    model = seeded(lambda: Classifier(dim=64, layers=2, dropout=0.5))
    formulation = formulated(model, torch.ones(rows, 64))
    return formulation, of_kind(formulation, "native_dropout.default")[0]


def test_a_large_random_operation_runs_again_from_the_saved_state() -> None:
    formulation, drop = dropout_problem(4096)
    problem = formulation.problem
    (extra,) = set(drop.recompute_inputs or ()) - set(drop.inputs)
    saving = problem.operations[problem.producer[extra]]
    assert saving.optional
    assert saving.kind == "state"
    assert problem.storages[extra].size_bytes == STATE
    assert problem.operations.index(saving) < problem.operations.index(drop)
    assert formulation.states[formulation.origins[problem.operations.index(drop)].node] == extra
    # Each draw has a state of its own.
    assert len(set(formulation.states.values())) == 2


def test_a_random_operation_smaller_than_the_state_is_kept() -> None:
    _, drop = dropout_problem(4)
    assert drop.recompute_inputs is None
    assert drop.fixed == "it draws random numbers"


# ------------------------------------------------------------------ buffers


class Norm(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(self.layers[0](x)))


def test_batch_norm_runs_again_without_its_statistics() -> None:
    formulation = formulated(seeded(Norm), torch.ones(8, 16))
    (norm,) = of_kind(formulation, "_native_batch_norm_legit_functional.default")
    assert len(norm.outputs) == 5
    assert norm.recompute_outputs == norm.outputs[:3]
    assert not set(norm.recompute_outputs) & set(formulation.capture.new_buffers)
    assert formulation.old_values == {}


class PowerIteration(nn.Module):
    """Reads a vector that every forward replaces, as spectral normalisation does."""

    vector: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(16))
        self.register_buffer("vector", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        scale = (self.weight + self.vector).exp()
        with torch.no_grad():
            self.vector.copy_(functional.normalize(self.weight @ self.vector, dim=0))
        return ((x @ scale).sin() @ self.weight).square().mean()


def test_a_further_run_reads_the_old_value_of_an_overwritten_buffer() -> None:
    formulation = formulated(seeded(PowerIteration), torch.ones(8, 16))
    problem = formulation.problem
    ((primal, storage),) = formulation.old_values.items()
    assert primal in formulation.capture.stale
    copying = problem.operations[problem.producer[storage]]
    assert copying.kind == "old_value"
    readers = [
        op
        for op in problem.operations
        if storage in (op.recompute_inputs or ()) or storage in op.inputs
    ]
    assert readers
    # The first forward run reads the buffer itself, where it still has its old value.
    assert all(storage not in problem.operations[i].inputs for i in problem.forward)


def test_new_values_of_buffers_are_there_when_the_forward_ends() -> None:
    for build, count in ((Norm, 3), (PowerIteration, 1)):
        formulation = formulated(seeded(build), torch.ones(8, 16))
        new = set(formulation.capture.new_buffers)
        assert len(new) == count
        assert new <= formulation.problem.live_at_barrier


# ------------------------------------------------------------------ pins


def test_what_is_pinned_to_be_kept_may_not_run_again() -> None:
    model, x = mlp(layers=3)
    formulation = formulated(model, x, pins=Pins(keep=("layers.1",)))
    fixed = [op.fixed for op in of_kind(formulation, "addmm.default")]
    assert fixed == ["", "pinned by keep='layers.1'", ""]


def test_what_leaves_a_module_pinned_to_be_recomputed_may_be_kept() -> None:
    model = seeded(lambda: nn.Sequential(MLP(layers=2), MLP(layers=2), nn.Linear(16, 1)))
    formulation = formulated(model, torch.ones(4, 16), pins=Pins(recompute=("0",)))
    problem = formulation.problem
    inside = [
        s
        for i in problem.forward
        if problem.operations[i].module_path.startswith("0")
        for s in problem.operations[i].outputs
    ]
    keepable = [problem.storages[s].keepable for s in inside]
    assert keepable == [False] * (len(inside) - 1) + [True]
    others = set(range(len(problem.storages))) - set(inside)
    assert all(problem.storages[s].keepable for s in others)


# ------------------------------------------------------------------ the whole of it


class Squared(nn.Module):
    """``mse_loss`` keeps the memory of all its differences behind one number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return functional.mse_loss(self.linear(x), x)


def test_sizes_are_the_measured_ones() -> None:
    found = captured(seeded(Squared), torch.ones(64, 32))
    formulation = formulate(found, profile(found, device_of(torch.device("cpu"))), Around())
    (loss,) = of_kind(formulation, "mse_loss.default")
    assert formulation.problem.storages[loss.outputs[0]].size_bytes == 64 * 32 * 4


BUILDS: dict[str, Any] = {"mlp": lambda: Classifier(dim=32), "squared": Squared}


@pytest.mark.parametrize("name", BUILDS)
def test_the_baselines_peak_is_eagers_within_what_eager_keeps_longer(name: str) -> None:
    """The graph frees at last uses; eager's autograd frees at the same points or later."""
    x = torch.ones(64, 32)
    model = seeded(BUILDS[name])
    found = captured(model, x)
    formulation = formulate(found, profile(found, device_of(torch.device("cpu"))), Around())
    eager = measure_peak(lambda: model(x).backward()).delta_bytes
    assert 0.8 * eager <= baseline_peak(formulation) <= eager
