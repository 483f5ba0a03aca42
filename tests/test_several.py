"""Models that do not capture as one graph: several graphs under one budget."""

from __future__ import annotations

import copy
import gc
import logging
import random
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autockpt
from autockpt import CaptureError, InfeasibleBudget
from oracle import whole_step_peak


class Branching(nn.Module):
    """Goes on by a number that is read from a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.nn.functional.gelu(self.first(x)).sin().cos()
        if h.sum().item() > 1e9:
            h = h * 2
        return self.second(h.tanh().sin())


class Looping(nn.Module):
    """Its blocks break inside a loop, which the tracer gives up whole."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Branching() for _ in range(3))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.drop(block(x)) + x
        return x.square().mean()


class Averaging(nn.Module):
    """A batch-norm with a cumulative average reads its counter as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 64),
            nn.GELU(),
            nn.Tanh(),
            nn.BatchNorm1d(64, momentum=None),
            nn.GELU(),
            nn.Dropout(0.2),
            nn.Tanh(),
            nn.Linear(64, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


class Recurrent(nn.Module):
    """The tracer does not look into LSTMs; what is before and behind one is a graph each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(16, 32), nn.LSTM(32, 8, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.inner(torch.nn.functional.gelu(self.first(x)).sin().tanh()[None])
        return self.head(states.sin().cos()).square().mean()


class Flat(nn.Module):
    """Reads a number, and runs a recurrent layer, between operations of its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 64), nn.Linear(8, 64)
        self.inner = nn.GRU(64, 8, num_layers=2, dropout=0.3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.nn.functional.gelu(self.first(x)).sin().cos()
        h = h / h.abs().max().item()
        if h.mean().item() > 2:
            h = h * 2
        states, _ = self.inner(h.tanh().sin())
        return self.last(states).tanh().sin().square().mean()


MODELS = [Looping, Averaging, Recurrent, Flat]


def train(model: nn.Module, steps: int, peaks: list[int] | None = None) -> list[Tensor]:
    """Train with one seed a step; return what the last step left behind."""
    data = torch.Generator().manual_seed(7)
    inputs = [torch.randn(32, 16, generator=data) for _ in range(steps)]
    for number, x in enumerate(inputs):

        def step(number: int = number, x: Tensor = x) -> None:
            torch.manual_seed(number)
            model(x).backward()

        model.zero_grad(set_to_none=True)
        if peaks is not None and number >= steps - 4:
            peaks.append(whole_step_peak(model, step, (x,)))
        else:
            step()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [*gradients, *(b.clone() for b in model.buffers()), torch.get_rng_state()]


@pytest.mark.parametrize("build", MODELS)
def test_gradients_peak_and_prediction(build: type[nn.Module]) -> None:
    torch.manual_seed(0)
    plain = build()
    expected = train(copy.deepcopy(plain), 9)
    free = autockpt.optimize(copy.deepcopy(plain), None)
    train(free, 9)
    baseline = free.plan.baseline_peak_bytes
    resident = free.plan.problem.resident_bytes
    for share in (1.0, 0.8, 0.6):
        budget = resident + int(share * (baseline - resident))
        model = autockpt.optimize(copy.deepcopy(plain), budget, time_limit=5)
        peaks: list[int] = []
        try:
            found = train(model, 9, peaks)
        except InfeasibleBudget as error:
            tight = autockpt.optimize(copy.deepcopy(plain), error.minimum_bytes, time_limit=5)
            found, budget, model = train(tight, 9, peaks), error.minimum_bytes, tight
        for ours, eagers in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, eagers, rtol=1e-5, atol=1e-6)
        assert len(peaks) == 4
        assert max(peaks) <= budget
        assert all(abs(peak - model.plan.peak_bytes) <= 0.01 * peak for peak in peaks)


class Warming(nn.Module):
    """Calls a module that is given up in the middle of a loop, in its first step alone."""

    def __init__(self) -> None:
        super().__init__()
        self.warm, self.block = Blocks(), Branching()
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        torch._dynamo.graph_break()
        if self.steps == 1:
            x = self.warm(x)
        return self.block(x).square().mean()


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Branching() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_a_module_that_no_longer_runs_does_not_keep_the_step_from_being_planned() -> None:
    model = autockpt.optimize(Warming(), None)
    train(model, 8)
    assert model.plan is not None


class Discarding(Flat):
    """Calls a module for nothing, and then once more."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 8), nn.Dropout(0.5), nn.GELU(), nn.Linear(8, 8))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.first(x).sin().cos()
        both = []
        while len(both) < 2 and h.sum().item() < 1e9:  # given up by the tracer
            both.append(self.inner(h))
        return both[0 if self.calls > 6 else 1].square().mean()  # then the other one


def test_a_graph_without_a_backward_stays_ready_for_one() -> None:
    torch.manual_seed(0)
    plain = Discarding()
    expected = train(copy.deepcopy(plain), 8)
    torch.testing.assert_close(train(autockpt.optimize(plain, None), 8), expected)


class Checkpointing(nn.Module):
    """Computes parts of itself again, by torch's own means."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 16)]
        self.inner, self.outer = nn.Sequential(*layers), nn.Sequential(*copy.deepcopy(layers))

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x)

    def inside(self, x: Tensor) -> Tensor:
        """In a frame of its own, behind whose numbers the tracer does not go on."""
        h = checkpoint(self.inner, x, use_reentrant=False)
        if h.sum().item() > 1e9:
            h = h * 2
        return checkpoint(self.outer, h, use_reentrant=False).square().mean()


@pytest.mark.parametrize("around", [False, True], ids=["inside", "around"])
def test_checkpoints_of_the_users(around: bool) -> None:
    def used(model: nn.Module) -> list[Tensor]:
        for number in range(5):
            torch.manual_seed(number)
            model.zero_grad()
            x = torch.randn(32, 16)
            (checkpoint(model, x, use_reentrant=False) if around else model(x)).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    torch.manual_seed(0)
    plain = Checkpointing()
    model = autockpt.optimize(copy.deepcopy(plain), None)
    torch.testing.assert_close(used(model), used(plain))


class Remembering(nn.Module):
    """Its output depends on what its forwards have left in Python."""

    def __init__(self, use: Callable[[Any], float]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
        self.random, self.last, self.use = random.Random(3), deque(maxlen=2), use

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean() * self.use(self)


def drawn(model: Any) -> float:
    return model.random.random()


def queued(model: Any) -> float:
    model.last.append(len(model.last) + 0.5)
    return sum(model.last)


def counted(model: Any) -> int:
    vars(model)["count"] = vars(model).get("count", 0) + 1
    return model.count


def listed(model: Any) -> int:
    vars(model).setdefault("seen", []).append(1)
    return len(model.seen)


@pytest.mark.parametrize("use", [drawn, queued, counted, listed])
def test_what_the_tracer_gets_wrong_runs_plainly(use: Callable[[Any], float]) -> None:
    torch.manual_seed(0)
    plain, x = Remembering(use), torch.randn(8, 16)
    model = autockpt.optimize(copy.deepcopy(plain), None)
    for _ in range(5):
        losses = [one(x) for one in (model, plain)]
        torch.testing.assert_close(*losses)
        losses[0].backward()


class Catching(Branching):
    """Tries what its layers refuse."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            h = self.second(x)
        except RuntimeError:
            h = self.first(x)
        return self.second(h.tanh().sin()).square().mean()


def test_a_model_may_catch_what_an_operator_refuses() -> None:
    torch.manual_seed(0)
    plain = Catching()
    model = autockpt.optimize(copy.deepcopy(plain), None)
    torch.testing.assert_close(train(model, 6), train(plain, 6))
    assert model.plan is not None


@pytest.mark.filterwarnings("ignore:.*jit")
def test_a_scripted_module_runs_plainly() -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 16), torch.jit.script(nn.Linear(16, 8)), nn.Tanh())

    plain, model = build(), autockpt.optimize(build(), None)
    for number in range(4):
        x = torch.randn(8, 16)
        for one in (model, plain):
            one.zero_grad()
            one(x).square().mean().backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, msg=f"step {number}")


class Remembers(Branching):
    """Holds on to a hidden value, and with it to the graph of the step before."""

    hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.first(x)
        return super().forward(x + self.hidden.tanh().mean())


def test_a_graph_that_goes_while_the_next_step_runs() -> None:
    torch.manual_seed(0)
    plain = Remembers()
    model = autockpt.optimize(copy.deepcopy(plain), None)
    for _ in range(4):
        x = torch.randn(32, 16)
        for one in (plain, model):
            one(x).square().mean().backward()
    torch.testing.assert_close(model.first.weight.grad, plain.first.weight.grad)
    assert model.plan is not None


class Chosen(nn.Module):
    """Writes what it computes of some rows, whose number depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        chosen, y = x.mean(-1) > 0, x.clone()
        y[chosen] = self.inner(x[chosen]).tanh()
        return y


def test_a_trace_that_cannot_be_differentiated_gives_no_warning() -> None:
    torch.manual_seed(0)
    x, plain = torch.randn(32, 16), Chosen()
    model = autockpt.optimize(copy.deepcopy(plain), None)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(4):
            model(x).square().mean().backward()
            plain(x).square().mean().backward()
    assert not said
    torch.testing.assert_close(model.inner.weight.grad, plain.inner.weight.grad)


class Descends(nn.Module):
    """Takes gradients in its forward, of what the tracer does not look into."""

    def __init__(self) -> None:
        super().__init__()
        self.energy, self.head = nn.Sequential(nn.Linear(16, 16), nn.SiLU()), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        z = x.detach().clone().requires_grad_(True)
        for _ in range(2):
            (slope,) = torch.autograd.grad(self.energy(z).sum(), z)
            z = (z - 0.1 * slope).detach().requires_grad_(True)
        return self.head(self.energy(z.detach()))


def test_no_step_is_planned_by_a_backward_inside_its_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    log = logging.getLogger("autockpt")
    monkeypatch.setattr(log, "warning", lambda text, *_: said.append(text))
    torch.manual_seed(0)
    x, plain = torch.randn(32, 16), Descends()
    model = autockpt.optimize(copy.deepcopy(plain), None)
    for _ in range(5):
        for one in (plain, model):
            one(x).square().mean().backward()
    torch.testing.assert_close(model.head.weight.grad, plain.head.weight.grad)
    assert model.plan is None
    (warning,) = said
    assert "takes gradients inside its forward" in warning


def test_a_double_backward_is_refused() -> None:
    model, x = autockpt.optimize(Branching(), None), torch.randn(4, 16, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    with pytest.raises(autockpt.DoubleBackward):
        gradient.square().sum().backward()


class Checked(nn.Module):
    """Nearly all of it is one graph; what it returns is looked at behind."""

    def __init__(self) -> None:
        super().__init__()
        layers = [part for _ in range(8) for part in (nn.Linear(16, 16), nn.GELU(), nn.Tanh())]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        return y.square().mean() if y.detach().abs().max().item() < 1e9 else y.mean()


def test_the_first_steps_keep_the_budget_too() -> None:
    def peaks(budget: int | None, steps: int) -> list[int]:
        torch.manual_seed(0)
        model, x = autockpt.optimize(Checked(), budget), torch.randn(256, 16)
        return [whole_step_peak(model, lambda: model(x).backward(), (x,)) for _ in range(steps)]

    free = peaks(None, 3)[-1]
    budget = free * 6 // 10
    assert max(peaks(budget, 4)) <= budget


def test_a_step_over_micro_batches() -> None:
    torch.manual_seed(0)
    plain = Branching().double()
    model = copy.deepcopy(plain)
    x = torch.randn(12, 16, dtype=torch.float64)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    autockpt.optimize(
        model, None, optimizer=optimizers[1], loss_fn=lambda h: h.square().mean(), accumulate=3
    )
    found: list[Tensor] = []
    hook = optimizers[1].register_step_pre_hook(
        lambda *_: found.extend(p.grad.clone() for p in model.parameters())
    )
    for _ in range(4):
        plain(x).square().mean().backward()
        model.step(x)
        for mine, parameter in zip(found, plain.parameters(), strict=True):
            torch.testing.assert_close(mine, parameter.grad, rtol=1e-10, atol=1e-14)
        found.clear()
        optimizers[0].step()
        optimizers[0].zero_grad()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-14)
    hook.remove()
    # The plan is for a micro-batch that finds gradients of the ones before.
    peak = whole_step_peak(model, lambda: model.step(x), (x,))
    assert abs(peak - model.plan.peak_bytes) <= 0.01 * peak


class Skipping(nn.Module):
    """Draws with NumPy which layers of a module to run, past the module itself."""

    def __init__(self) -> None:
        super().__init__()
        layers = [
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Tanh(), nn.Linear(64, 16))
            for _ in range(4)
        ]
        self.encoder = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.encoder:
            if np.random.rand() > 0.3:
                x = x + layer(x)
        return x.square().mean()


def test_layers_that_are_called_past_their_module_keep_the_budget() -> None:
    def trained(model: nn.Module, peaks: list[int]) -> list[Tensor]:
        np.random.seed(0)
        torch.manual_seed(1)
        for number in range(14):
            x = torch.randn(256, 16)
            model.zero_grad()

            def step(x: Tensor = x) -> None:
                model(x).backward()

            if number < 8:
                step()
            else:
                peaks.append(whole_step_peak(model, step, (x,)))
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    torch.manual_seed(0)
    plain, eagers, ours = Skipping(), [], []
    model = copy.deepcopy(plain)
    expected = trained(plain, eagers)
    budget = max(eagers) * 3 // 4
    found = trained(autockpt.optimize(model, budget, time_limit=1), ours)
    torch.testing.assert_close(found, expected)
    assert max(ours) <= budget
    assert int(model.plan.origin["graphs"]) > 1


def test_below_the_minimum_says_what_is_enough() -> None:
    torch.manual_seed(0)
    plain = Averaging()
    model = autockpt.optimize(copy.deepcopy(plain), "1kB", time_limit=5)
    with pytest.raises(InfeasibleBudget) as caught:
        train(model, 9)
    model = autockpt.optimize(copy.deepcopy(plain), caught.value.minimum_bytes, time_limit=5)
    peaks: list[int] = []
    train(model, 9, peaks)
    assert max(peaks) <= caught.value.minimum_bytes


def test_fullgraph_is_an_error() -> None:
    model = autockpt.optimize(Looping(), None, fullgraph=True)
    with pytest.raises(CaptureError, match="cannot be captured as one graph"):
        model(torch.randn(4, 16))
    assert not hasattr(model, "autockpt")


def test_says_what_is_not_optimised() -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("autockpt").addHandler(handler)
    try:
        model = autockpt.optimize(Looping(), None)
        train(model, 9)
    finally:
        logging.getLogger("autockpt").removeHandler(handler)
    text = model.plan.origin["unoptimised"]
    assert "test_several.py" in text
    assert "blocks.1" in text
    assert any("Not optimised" in record.getMessage() for record in records)


def test_graphs_go_on_behind_numbers_and_recurrent_layers() -> None:
    model = autockpt.optimize(Flat(), None)
    train(model, 7)
    assert model.plan.origin["graphs"] == "3"
    captures = model.autockpt._several.captures
    train(model, 3)  # other numbers: nothing is captured anew
    assert model.autockpt._several.captures == captures


def test_what_stands_beside_a_recurrent_layer_is_planned() -> None:
    model = autockpt.optimize(Recurrent(), None)
    train(model, 6)
    assert model.plan.origin["graphs"] == "2"
    model = autockpt.optimize(Recurrent(), 1)
    with pytest.raises(InfeasibleBudget) as refusal:
        train(model, 6)
    model = autockpt.optimize(Recurrent(), refusal.value.minimum_bytes)
    train(model, 6)
    assert model.plan.extra_time_s > 0


def test_restore_takes_every_part_off() -> None:
    model = autockpt.optimize(Looping(), None)
    train(model, 3)
    assert any("_compiled_call_impl" in vars(m) for m in model.blocks)
    autockpt.restore(model)
    assert not any(vars(m).get("_compiled_call_impl") for m in model.modules())


@pytest.mark.parametrize("build", MODELS)
def test_nothing_keeps_a_model_that_is_let_go_of(build: type[nn.Module]) -> None:
    model = autockpt.optimize(build(), None)
    train(model, 9)
    gone = [weakref.ref(model)]
    for part in model.autockpt._several._all_parts():
        for compiled in part.compiled:
            gone += [weakref.ref(watch.joint.module) for watch in compiled.backend.watches]
    part = compiled = None
    assert len(gone) > 1
    del model
    for _ in range(3):  # each takes compiled code, which had a hold on what the next one takes
        gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone)


def test_copies_plan_for_themselves() -> None:
    model = autockpt.optimize(Looping(), None)
    train(model, 3)
    twin = copy.deepcopy(model)
    torch.testing.assert_close(train(twin, 3), train(model, 3))
