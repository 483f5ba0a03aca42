"""Capture: which nodes compute, which memory they live in, and what the user sees of it."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autockpt import _torch
from autockpt.capture import Capture, capture, training
from autockpt_solvers.errors import CaptureError, InputError
from oracle import assert_state_unchanged, model_state
from tiny_models import Classifier, captured, mlp, seeded

aten = torch.ops.aten


def operation(found: Capture, target: Any) -> Any:
    """The one operation of this kind."""
    (node,) = [node for node in found.operations if node.target is target]
    return node


class Views(nn.Module):
    """A linear layer whose result is viewed in three ways before it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.linear(x).view(-1, 2, 3).transpose(1, 2).chunk(2, dim=0)
        return (a.sin() * b).sum()


def test_views_ride_along_in_their_bases_memory() -> None:
    found = captured(seeded(Views), torch.ones(4, 6))
    linear = next(n for n in found.operations if n.target is aten.mm.default)
    (home,) = found.lives_in[linear]
    views = [n for n in found.joint.module.graph.nodes if n.target is aten.transpose.int]
    assert views
    forward_view = views[0]
    assert found.is_view(forward_view)
    assert not found.is_view(linear)
    assert found.lives_in[forward_view] == (home,)
    sine = operation(found, aten.sin.default)
    assert found.reads(sine) == (home,)
    assert found.storages[home].size_bytes == 4 * 6 * 4
    assert found.storages[home].roots == (linear,)


def test_memory_from_outside_is_no_storage_of_the_step() -> None:
    model, x = mlp()
    found = captured(model, x)
    assert all(found.lives_in[primal] == (-1,) for primal in found.joint.primals)
    weight_view = next(n for n in found.joint.module.graph.nodes if n.target is aten.t.default)
    assert found.lives_in[weight_view] == (-1,)


def test_forward_operations_come_first_and_each_storage_has_one_maker() -> None:
    model, x = mlp(layers=3)
    found = captured(model, x)
    forward, backward = found.operations[: found.barrier], found.operations[found.barrier :]
    kinds = [n.target for n in forward]
    assert kinds.count(aten.addmm.default) == 3
    assert kinds.count(aten.gelu.default) == 3
    assert {n.target for n in backward} >= {aten.mm.default, aten.gelu_backward.default}
    makers = [s.operation for s in found.storages]
    for number, storage in enumerate(found.storages):
        if storage.operation >= 0:
            assert number in found.lives_in[found.operations[storage.operation]]
    assert makers.count(-1) == 1  # the gradient that the backward starts from


def test_operations_with_several_outputs_make_several_storages() -> None:
    model = seeded(lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 1)))
    found = captured(model, torch.ones(4, 8))
    norm = operation(found, aten.native_layer_norm.default)
    made = found.lives_in[norm]
    assert len(set(made)) == 3
    assert [found.storages[s].size_bytes for s in made] == [4 * 8 * 4, 4 * 4, 4 * 4]
    for storage in made:
        assert all(_torch.getitem_index(r) is not None for r in found.storages[storage].roots)


class Outputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.linear(x)
        return {"y": y, "view": y[0], "x": x, "half": y.detach() / 2, "count": 3}


def test_outputs_are_the_memory_the_user_gets() -> None:
    found = captured(seeded(Outputs), torch.ones(2, 4))
    y = operation(found, aten.addmm.default)
    half = operation(found, aten.div.Tensor)
    (y_home,), (half_home,) = found.lives_in[y], found.lives_in[half]
    assert {s for own in found.outputs for s in own} == {y_home, half_home}


def test_each_gradient_knows_its_parameter() -> None:
    model, x = mlp(layers=2)
    found = captured(model, x)
    assert len(found.gradients) == 4
    for node, storage, primal in found.gradients:
        assert primal in found.joint.primals
        assert node.meta["val"].shape == primal.meta["val"].shape
        assert found.lives_in[node] == (storage,)


class Counting(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


def test_buffers_that_the_forward_overwrites_are_stale() -> None:
    found = captured(seeded(Counting), torch.ones(8, 16))
    assert len(found.stale) == 3  # mean, variance, number of batches
    assert sorted(found.storages[s].size_bytes for s in found.new_buffers) == [8, 64, 64]
    outputs = {s for own in found.outputs for s in own}
    assert outputs.isdisjoint(found.new_buffers)


def test_the_backward_of_batch_norm_does_not_read_the_statistics() -> None:
    found = captured(seeded(Counting), torch.ones(8, 16))
    (node,) = [
        n for n in found.operations[found.barrier :] if "batch_norm_backward" in str(n.target)
    ]
    assert set(found.reads(node)).isdisjoint(found.new_buffers)
    assert not set(node.all_input_nodes) & found.stale


def test_a_gradient_that_batch_norm_is_not_asked_for_takes_no_memory() -> None:
    found = captured(seeded(Counting), torch.ones(8, 16))
    (node,) = [
        n for n in found.operations[found.barrier :] if "batch_norm_backward" in str(n.target)
    ]
    assert node.args[9] == [False, True, True]
    assert [found.storages[s].size_bytes for s in found.lives_in[node]] == [64, 64]


class Unused(Classifier):
    """Computes what nobody needs."""

    def forward(self, x: Tensor) -> Tensor:
        x.exp()
        return super().forward(x)


def test_what_nobody_needs_is_left_out() -> None:
    found = captured(seeded(Unused), torch.ones(8, 16))
    kinds = [n.target for n in found.operations]
    assert aten.gelu.default in kinds
    assert aten.exp.default not in kinds


def test_operations_know_their_module_and_line() -> None:
    model, x = mlp(layers=2)
    found = captured(nn.Sequential(model), x)
    line = inspect.getsourcelines(Classifier.__mro__[1].forward)[1] + 2
    gelus = [n for n in found.operations if n.target is aten.gelu.default]
    linears = [n for n in found.operations if n.target is aten.addmm.default]
    assert [_torch.module_path(n) for n in linears] == ["0.layers.0", "0.layers.1"]
    assert {_torch.module_path(n) for n in gelus} == {"0"}
    assert {_torch.source_line(n) for n in gelus} == {f"tiny_models.py:{line}"}


# ------------------------------------------------------------------ tracing runs nothing


def test_capturing_leaves_the_model_alone() -> None:
    model = seeded(lambda: nn.Sequential(Counting(), nn.Identity(), nn.Dropout(0.5)))
    before = model_state(model)
    captured(model, torch.ones(8, 16))
    assert_state_unchanged(model, before)


def test_what_stops_the_use_of_a_capture_arrives() -> None:
    model, x = mlp()

    def use(_: Any) -> None:
        raise CaptureError("of our own")

    with pytest.raises(CaptureError, match="of our own"):
        capture(model, (x,), {}, use)


def test_a_forward_without_gradients_is_an_error() -> None:
    model, x = mlp()
    model.requires_grad_(False)
    with pytest.raises(CaptureError, match="needs no gradient"):
        captured(model, x)


class PrintsIt(Classifier):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()  # what cannot be captured, in one line
        return super().forward(x)


def test_what_cannot_be_captured_names_the_line() -> None:
    line = inspect.getsourcelines(PrintsIt.forward)[1] + 1
    with pytest.raises(CaptureError, match=f"test_capture.py, line {line}, in forward"):
        captured(seeded(PrintsIt), torch.ones(8, 16))


@pytest.mark.parametrize(
    ("args", "kwargs"), [((), {}), ((1, 2), {}), ((torch.ones(2, 16),), {"y": 1})]
)
def test_inputs_that_do_not_fit(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"do not fit Classifier\.forward"):
        captured(mlp()[0], *args, **kwargs)


def test_inputs_that_an_operation_refuses(capfd: pytest.CaptureFixture[str]) -> None:
    """The error says what the operation says, and at which of the user's lines; nothing more."""
    with pytest.raises(InputError, match=r"\.py, line \d+, in forward: RuntimeError: ") as caught:
        captured(mlp()[0], torch.randn(2, 5))
    assert "[2, 5]" in str(caught.value)
    assert "ynamo" not in str(caught.value)
    assert capfd.readouterr().err == ""


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y.add_(1)
        y[:, 0] = 0
        return functional.mse_loss(y, x)


def test_in_place_writes_into_own_results_become_plain_operations() -> None:
    found = captured(seeded(InPlace), torch.ones(3, 4))
    for node in found.operations:
        assert not node.target._schema.is_mutable


# ------------------------------------------------------------------ training mode


def test_a_model_in_eval_mode_is_put_back() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout()).eval()
    with training(model):
        assert all(m.training for m in model.modules())
    assert not any(m.training for m in model.modules())


def test_parts_in_eval_mode_of_a_model_in_training_stay() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout()).train()
    model[1].eval()
    with training(model):
        assert not model[1].training
    assert model.training
    assert not model[1].training


def test_modes_are_put_back_after_an_error() -> None:
    model = nn.Linear(2, 2).eval()
    with pytest.raises(ZeroDivisionError), training(model):
        raise ZeroDivisionError
    assert not model.training
