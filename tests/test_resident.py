"""Resident memory and the optimizer's, against what torch really holds and allocates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer

from autockpt.device import device_of
from autockpt.resident import OptimizerMemory, distinct_bytes, optimizer_memory, resident_bytes
from oracle import measure_peak
from oracle import resident_bytes as measured_resident

CPU = device_of(torch.device("cpu"))


class Tied(nn.Module):
    """1,000 + 100 numbers of parameters, 50 of buffers; the decoder is the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(10, 100)
        self.decoder = nn.Linear(10, 100, bias=False)
        self.decoder.weight = self.encoder.weight
        self.register_buffer("steps", torch.zeros(50))


def test_parameters_and_buffers_count_once() -> None:
    assert resident_bytes(Tied(), None, CPU) == 4 * (1000 + 100 + 50)


def test_inputs_count_wherever_they_are_and_once() -> None:
    x = torch.zeros(64, dtype=torch.int64)
    inputs = ((x, [x[:8]]), {"mask": torch.zeros(10, dtype=torch.bool), "scale": 3.0})
    assert resident_bytes(nn.Linear(1, 1, bias=False), inputs, CPU) == 4 + 8 * 64 + 10


def test_a_view_counts_with_all_the_memory_it_holds() -> None:
    assert distinct_bytes([torch.zeros(1000)[:1]], CPU) == 4000


def test_gradients_that_are_there_count() -> None:
    model = nn.Linear(10, 10)
    model(torch.ones(1, 10)).sum().backward()
    assert resident_bytes(model, None, CPU) == 2 * 4 * 110


def test_memory_on_another_device_does_not_count() -> None:
    assert distinct_bytes([torch.zeros(10, device="meta"), torch.zeros(10)], CPU) == 40


OPTIMIZERS = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: AdamW(p),
    "adamw_for_each_parameter": lambda p: AdamW(p, foreach=False),
    "adamw_amsgrad": lambda p: AdamW(p, amsgrad=True),
}


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(100, 200), nn.Linear(200, 50))


def give_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizers_memory_is_what_its_steps_allocate(name: str) -> None:
    model = layers()
    predicted = optimizer_memory(OPTIMIZERS[name](model.parameters()), CPU)
    optimizer = OPTIMIZERS[name](model.parameters())
    without = measured_resident(model)
    give_gradients(model)
    optimizer.step()
    model.zero_grad(set_to_none=True)
    assert predicted.state_bytes == measured_resident(model, (), optimizer) - without
    give_gradients(model)

    def step() -> None:
        torch.zeros(1)  # one allocation at least: the profiler has to report something
        optimizer.step()

    # Single numbers (step counts, bias corrections) are no allocation worth predicting.
    numbers = 16
    assert 0 <= measure_peak(step).delta_bytes - predicted.step_bytes <= numbers


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_asking_leaves_the_optimizer_alone(name: str) -> None:
    model = layers()
    optimizer = OPTIMIZERS[name](model.parameters())
    calls: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    before = [p.detach().clone() for p in model.parameters()]
    optimizer_memory(optimizer, CPU)
    assert calls == []
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    give_gradients(model)
    optimizer.step()
    assert calls == ["before", "after"]


def test_an_optimizer_that_has_run_needs_no_more_than_before() -> None:
    model = layers()
    optimizer = AdamW(model.parameters())
    fresh = optimizer_memory(optimizer, CPU)
    give_gradients(model)
    optimizer.step()
    assert optimizer_memory(optimizer, CPU) == fresh


def test_only_parameters_that_are_trained_have_state() -> None:
    model = layers()
    model[1].requires_grad_(False)
    found = optimizer_memory(SGD(model.parameters(), lr=0.1, momentum=0.9), CPU)
    assert found.state_bytes == 4 * (100 * 200 + 200)


def test_an_optimizer_that_wants_a_closure_counts_with_the_state_it_has() -> None:
    model = nn.Linear(10, 10)
    optimizer: Optimizer = LBFGS(model.parameters())
    assert optimizer_memory(optimizer, CPU) == OptimizerMemory()
    x = torch.ones(4, 10)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    found = optimizer_memory(optimizer, CPU)
    assert found.step_bytes == 0
    assert found.state_bytes >= 4 * 110  # at least the last gradient is held
