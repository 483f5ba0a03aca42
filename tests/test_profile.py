"""Profile: bytes are the real ones, equal operations are measured once, nothing is disturbed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from autockpt import _torch
from autockpt.capture import Capture
from autockpt.device import Cpu, device_of
from autockpt.profile import Measured, _measure, profile, unmeasured
from oracle import measure_peak
from tiny_models import Classifier, captured, mlp, seeded

aten = torch.ops.aten
CPU = device_of(torch.device("cpu"))


def figures(found: Capture, target: Any) -> tuple[fx.Node, Measured]:
    measured = profile(found, CPU).measured
    index = next(i for i, n in enumerate(found.operations) if n.target is target)
    return found.operations[index], measured[index]


class Loss(nn.Module):
    """A parameter of the input's shape and a loss between the two."""

    def __init__(self, loss: Callable[..., Tensor], shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))
        self.loss = loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.weight, x)


def test_the_bytes_behind_mse_loss_are_those_of_all_its_differences() -> None:
    shape = (40, 50)
    found = captured(seeded(lambda: Loss(functional.mse_loss, shape)), torch.ones(shape))
    node, measured = figures(found, aten.mse_loss.default)
    real = functional.mse_loss(torch.ones(shape), torch.zeros(shape)).untyped_storage().nbytes()
    assert real > 4  # the surprise: else this test has lost its point
    assert measured.output_bytes == (real,)
    assert node.meta["val"].untyped_storage().nbytes() == 4  # what the traced tensor says


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.second = nn.ConvTranspose2d(8, 4, 2, 2)
        self.embed = nn.Embedding(10, 4)

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        y = self.second(functional.max_pool2d(functional.silu(self.norm(self.first(x))), 2))
        return (
            (functional.softmax(y.flatten(2), -1).sum(-1) @ self.embed(index).T)
            .logsumexp(-1)
            .mean()
        )


def zeros(value: Any) -> Any:
    if isinstance(value, Tensor):
        base = torch.zeros(value.untyped_storage().nbytes(), dtype=torch.uint8).view(value.dtype)
        return base.as_strided(value.shape, value.stride(), value.storage_offset())
    return [zeros(v) for v in value] if isinstance(value, list | tuple) else value


def test_every_operators_bytes_are_those_of_a_run_of_it() -> None:
    """Outputs and workspace against the profiler's events around the operator itself."""
    found = captured(seeded(Convolutions), torch.ones(2, 3, 8, 8), torch.arange(6) % 10)
    seen = 0
    figures = zip(found.operations, profile(found, CPU).measured, strict=True)
    for node, measured in {node.target: (node, m) for node, m in figures}.values():
        real = {arg: zeros(arg.meta["val"]) for arg in node.all_input_nodes}
        args = fx.node.map_arg(node.args, real.__getitem__)
        kwargs = fx.node.map_arg(node.kwargs, real.__getitem__)
        held: list[Any] = []
        with torch.no_grad():
            node.target(*args, **kwargs)  # libraries allocate at their first call
            peak = measure_peak(lambda: held.append(node.target(*args, **kwargs)))  # noqa: B023
        assert sum(measured.output_bytes) == peak.left_bytes, node
        assert measured.workspace_bytes == peak.delta_bytes - peak.left_bytes, node
        seen += measured.workspace_bytes > 0
    assert seen  # some operation did need workspace


def test_every_operation_costs_time() -> None:
    model, x = mlp()
    assert all(m.cost_ns > 0 for m in profile(captured(model, x), CPU).measured)


class Counting(Cpu):
    """A CPU that counts what is measured on it, and shares no figures with others."""

    def __init__(self) -> None:
        super().__init__()
        self.measured = 0

    def state(self) -> tuple[Any, ...]:
        return ("counting", id(self))

    def warm_up(self, run: Callable[[], Any]) -> None:
        self.measured += 1
        super().warm_up(run)


def test_identical_operations_are_measured_once() -> None:
    device = Counting()
    found = captured(*mlp(layers=6))
    result = profile(found, device)
    assert device.measured == result.distinct < len(found.operations)
    by_kind: dict[str, set[Measured]] = {}
    for node, measured in zip(found.operations, result.measured, strict=True):
        by_kind.setdefault(str(node.target), set()).add(measured)
    # Six layers of one shape; a kind may occur with warm and with cold inputs.
    assert len(by_kind["aten.addmm.default"]) <= 2
    before = device.measured
    assert profile(found, device) == result
    assert device.measured == before
    # More of the same layers are nothing new, another shape is.
    profile(captured(*mlp(layers=8)), device)
    assert device.measured == before
    profile(captured(*mlp(dim=24, layers=6)), device)
    assert device.measured > before


def test_profiling_leaves_the_generator_and_the_model_alone() -> None:
    model, x = mlp(dim=20, dropout=0.5)
    found = captured(model, x)
    assert any(_torch.is_random(n) for n in found.operations)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    state = torch.get_rng_state()
    profile(found, Counting())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert all(p.grad is None for p in model.parameters())


def test_profiling_holds_one_operations_tensors_at_a_time() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, width) for width in range(256, 288))

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([functional.gelu(layer(x)).mean() for layer in self.layers]).sum()

    found = captured(seeded(Wide), torch.ones(256, 64))
    device = Counting()
    step = sum(s.size_bytes for s in found.storages)
    largest = 0
    for node in found.operations:
        held = {
            t.untyped_storage()._cdata: t.untyped_storage().nbytes()
            for n in (node, *node.all_input_nodes)
            for t in ([n.meta["val"]] if isinstance(n.meta["val"], Tensor) else n.meta["val"])
        }
        largest = max(largest, sum(held.values()))
    peak = measure_peak(lambda: profile(found, device))
    assert peak.delta_bytes < 3 * largest < step


@pytest.mark.parametrize(
    ("module", "args"),
    [
        (lambda: nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 1)), (torch.arange(6),)),
        (lambda: nn.EmbeddingBag(50, 8, mode="sum"), (torch.zeros(2, 3, dtype=torch.long),)),
        (lambda: Loss(lambda w, i: w.gather(0, i), (5, 4)), (torch.zeros(2, 4, dtype=torch.long),)),
        (lambda: Loss(lambda w, i: w[i], (5, 4)), (torch.zeros(3, dtype=torch.long),)),
        (lambda: Loss(lambda w, m: w.masked_fill(m, 0.0), (5,)), (torch.ones(5).bool(),)),
        (lambda: Loss(functional.cross_entropy, (5, 4)), (torch.zeros(5, dtype=torch.long),)),
        (lambda: Loss(lambda w, i: torch.index_add(w, 0, i, w), (3, 2)), (torch.arange(3),)),
        (lambda: Loss(lambda w, i: w.sort().values.cumsum(0), (9,)), (torch.ones(1),)),
        (lambda: Loss(lambda w, x: w.to(torch.bfloat16) @ x, (8, 8)), (torch.ones(8).bfloat16(),)),
        (lambda: Loss(lambda w, x: torch.linalg.inv(w @ w.T + x), (4, 4)), (torch.eye(4),)),
    ],
    ids=[
        "embedding",
        "bag",
        "gather",
        "index",
        "mask",
        "cross_entropy",
        "index_add",
        "sort",
        "bfloat16",
        "inverse",
    ],
)
def test_operators_that_are_picky_about_their_inputs_can_be_measured(
    module: Callable[[], nn.Module], args: tuple[Tensor, ...]
) -> None:
    found = captured(seeded(module), *args)
    assert all(m.cost_ns > 0 for m in profile(found, CPU).measured)


def test_progress_is_told() -> None:
    lines: list[str] = []
    profile(captured(*mlp(dim=40, layers=6)), Counting(), progress=lines.append)
    assert lines
    assert all(line.startswith("measured ") for line in lines)


def test_sizes_without_measurements_are_those_of_the_shapes() -> None:
    found = captured(seeded(lambda: Classifier(dim=8, layers=2)), torch.ones(4, 8))
    result = unmeasured(found)
    assert result.distinct == 0
    assert all(m.cost_ns == m.workspace_bytes == 0 for m in result.measured)
    index = next(i for i, n in enumerate(found.operations) if n.target is aten.gelu.default)
    assert result.measured[index].output_bytes == (4 * 8 * 4,)


@pytest.mark.parametrize(("target", "shares"), [(aten.detach, True), (aten.neg, False)])
def test_memory_shared_with_an_input_is_noticed(target: Any, shares: bool) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(target.default, (x,))
    x.meta["val"], node.meta["val"] = torch.empty(8), torch.empty(8)
    assert _measure(node, (True,), Cpu(), 1).shares is shares


def test_what_others_take_of_the_processor_is_no_operations_time() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert Cpu().time_ns(lambda: time.sleep(0.05)) < 10_000_000
    finally:
        torch.set_num_threads(before)
