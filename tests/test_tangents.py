"""Tangents: a backward starts from some of the outputs, and the others cost and change nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autockpt
from autockpt import _torch
from autockpt.capture import Capture, capture, read_joint
from autockpt.tangents import assumed_absent, without_tangents
from oracle import StepResult, assert_same, measure_peak, resident_bytes, run_step
from tiny_models import captured, nothing_kept, seeded

# ------------------------------------------------------------------ models with two outputs


class TwoHeads(nn.Module):
    """A trunk and two heads, each with a parameter that only it uses."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.first = nn.Linear(32, 8)
        self.second = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Any:
        for layer in self.trunk:
            x = functional.gelu(layer(x))
        return self.first(x), self.second(x)


class LossAndLogits(TwoHeads):
    """As language models return it; the logits have a head of their own."""

    def forward(self, x: Tensor) -> Any:
        first, second = super().forward(x)
        return {"loss": first.square().mean(), "logits": second}


class TwoLosses(TwoHeads):
    def forward(self, x: Tensor) -> Any:
        first, second = super().forward(x)
        return first.square().mean(), second.square().mean()


Loss = Callable[[Any], Tensor]
LOSSES: dict[type[nn.Module], dict[str, Loss]] = {
    TwoHeads: {
        "first": lambda out: out[0].square().sum(),
        "second": lambda out: out[1].sin().sum(),
        "both": lambda out: (out[0] * out[1]).sum(),
    },
    LossAndLogits: {
        "loss": lambda out: out["loss"],
        "logits": lambda out: out["logits"].square().sum(),
        "both": lambda out: out["loss"] + out["logits"].sum(),
    },
    TwoLosses: {
        "first": lambda out: out[0],
        "second": lambda out: out[1],
        "both": lambda out: out[0] + 2 * out[1],
    },
}
CASES = [(model, name) for model, losses in LOSSES.items() for name in losses]


def batch() -> Tensor:
    return torch.randn(128, 32, generator=torch.Generator().manual_seed(1))


def budget_of(model: type[nn.Module], percent: int) -> int:
    plan = autockpt.plan(seeded(model), batch(), None)
    resident = plan.problem.resident_bytes
    return resident + (plan.baseline_peak_bytes - resident) * percent // 100


def expected(model: type[nn.Module], loss: str) -> StepResult:
    return run_step(seeded(model), (batch(),), loss_fn=LOSSES[model][loss])


# ------------------------------------------------------------------ whole steps


@pytest.mark.parametrize("percent", [None, 75])
@pytest.mark.parametrize(("model", "loss"), CASES)
def test_the_gradients_and_their_absence_are_eagers(
    model: type[nn.Module], loss: str, percent: int | None
) -> None:
    wanted = expected(model, loss)
    if loss != "both":
        assert sum(g is None for g in wanted.gradients.values()) == 2
    optimised = seeded(model)
    budget = None if percent is None else budget_of(model, percent)
    autockpt.optimize(optimised, budget, time_limit=1)
    for _ in range(3):  # the first step guesses, the later ones know
        result = run_step(optimised, (batch(),), loss_fn=LOSSES[model][loss])
        assert_same(result, wanted)


@pytest.mark.parametrize("model", LOSSES)
def test_a_backward_from_other_outputs_than_planned_is_right(model: type[nn.Module]) -> None:
    optimised = seeded(model)
    autockpt.optimize(optimised, budget_of(model, 75), time_limit=1)
    wanted = {name: expected(model, name) for name in LOSSES[model]}
    for first, second in itertools.permutations(LOSSES[model], 2):
        for name in (first, second, second, first):
            result = run_step(optimised, (batch(),), loss_fn=LOSSES[model][name])
            assert_same(result, wanted[name])


@pytest.mark.parametrize("model", LOSSES)
def test_a_backward_that_no_plan_foresaw_recomputes_what_it_needs(model: type[nn.Module]) -> None:
    """The forward has saved next to nothing, and not for this backward."""
    for name, loss in LOSSES[model].items():
        optimised = seeded(model)
        plan = nothing_kept(autockpt.plan(optimised, batch(), None))
        autockpt.optimize(optimised, None, plan=plan)
        result = run_step(optimised, (batch(),), loss_fn=loss)
        assert_same(result, expected(model, name))


class DrawingHeads(TwoHeads):
    """Each head draws a mask of its own; one of them may end a graph."""

    breaks = False

    def forward(self, x: Tensor) -> Any:
        for layer in self.trunk:
            x = functional.gelu(layer(x))
        if self.breaks and x.sum().item() > 1e9:
            x = x * 2
        return self.first(functional.dropout(x, 0.3)), self.second(functional.dropout(x, 0.3))


@pytest.mark.parametrize("breaks", [False, True], ids=["one graph", "several"])
def test_heads_that_draw_may_take_turns(breaks: bool) -> None:
    models = seeded(DrawingHeads), seeded(DrawingHeads)
    for model in models:
        model.breaks = breaks
    optimised = autockpt.optimize(models[0], None)
    for turn in (0, 0, 0, 1, 0, 1, 1):
        one, other = (
            run_step(model, (batch(),), loss_fn=lambda out, turn=turn: out[turn].sin().sum())
            for model in models
        )
        assert_same(one, other)
    assert optimised.plan is not None


def test_gradients_from_many_tangents_at_once() -> None:
    def jacobian(model: nn.Module) -> tuple[Tensor, ...]:
        output = model(batch())[1][:2, :4].reshape(-1)
        weights = [layer.weight for layer in model.trunk]
        return torch.autograd.grad(output, weights, torch.eye(8), is_grads_batched=True)

    model = seeded(TwoHeads)
    plan = nothing_kept(autockpt.plan(model, batch(), None))
    autockpt.optimize(model, None, plan=plan)
    for _ in range(2):
        torch.testing.assert_close(jacobian(model), jacobian(seeded(TwoHeads)))


@pytest.mark.parametrize("model", LOSSES)
def test_two_backwards_from_one_forward(model: type[nn.Module]) -> None:
    """First from one output, then from the other, adding up."""
    results = []
    for optimise in (False, True):
        one = seeded(model)
        if optimise:
            autockpt.optimize(one, None)
        first, second, _ = LOSSES[model].values()
        for _ in range(2):
            output = one(batch())
            first(output).backward(retain_graph=True)
            second(output).backward()
        results.append([p.grad for p in one.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_what_the_backward_does_not_start_from_costs_no_memory() -> None:
    model = seeded(LossAndLogits)
    x = batch()
    autockpt.optimize(model, None)

    def step() -> None:
        output = model(x)
        output["loss"].backward()
        model.zero_grad(set_to_none=True)

    step()
    step()
    measured = resident_bytes(model, x) + measure_peak(step).delta_bytes
    assert abs(model.plan.peak_bytes - measured) <= 0.01 * measured
    names = [op.name for op in model.plan.problem.operations]
    gradients = [name for name in names[model.plan.problem.barrier :] if "mm" in name]
    assert len(gradients) == 2 * 4 + 2 - 1  # the second head has none, nor has the input


def test_gradients_of_inputs_that_only_an_unused_output_needs_are_none() -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
            y = self.linear(x)
            return y.sum(), y * gate

    def inputs() -> tuple[Tensor, Tensor]:
        return torch.ones(2, 4, requires_grad=True), torch.ones(2, 4, requires_grad=True)

    eager, model = seeded(Gate), autockpt.optimize(seeded(Gate), None)
    wanted = run_step(eager, inputs(), loss_fn=lambda out: out[0])
    assert wanted.input_gradients["inputs[1]"] is None
    for _ in range(2):
        assert_same(run_step(model, inputs(), loss_fn=lambda out: out[0]), wanted)


# ------------------------------------------------------------------ what is assumed


@pytest.mark.parametrize(
    ("model", "absent"),
    [(TwoHeads, frozenset()), (LossAndLogits, frozenset({1})), (TwoLosses, frozenset())],
)
def test_a_single_number_among_the_outputs_is_taken_for_the_loss(
    model: type[nn.Module], absent: frozenset[int]
) -> None:
    found = captured(seeded(model), batch())
    assert found.absent == absent
    assert assumed_absent(found.joint) == absent


# ------------------------------------------------------------------ the graph without a tangent


def read(model: type[nn.Module], absent: frozenset[int]) -> Capture:
    found: Capture = capture(seeded(model), (batch(),), {}, lambda joint: read_joint(joint, absent))
    return found


@pytest.mark.parametrize("absent", [frozenset(), {0}, {1}, {0, 1}])
def test_what_only_an_absent_tangent_feeds_is_gone(absent: Any) -> None:
    found = read(TwoHeads, frozenset(absent))
    whole = read(TwoHeads, frozenset())
    backward = len(found.operations) - found.barrier
    gone = [name for name, t in (("first", 0), ("second", 1)) if t in absent]
    with_gradient = {
        _torch.module_path(node).partition(".")[0] for node in found.operations[found.barrier :]
    }
    assert not with_gradient & set(gone)
    none = [v for v in found.joint.backward_outputs if v is None]
    # The input needs no gradient; each head's weight and bias; with both, the trunk's too.
    assert len(none) == 1 + 2 * len(gone) + (8 if len(gone) == 2 else 0)
    if gone:
        assert backward < len(whole.operations) - whole.barrier
    assert (backward == 0) == (len(gone) == 2)
    # Of two gradients that were added, the one that is there needs no sum.
    adds = [n for n in found.operations[found.barrier :] if "add" in str(n.target)]
    assert bool(adds) == (not gone)


def test_the_joint_graph_is_left_as_it_was() -> None:
    def use(joint: _torch.JointGraph) -> tuple[str, str]:
        before = str(joint.module.graph)
        without_tangents(joint, {0})
        return before, str(joint.module.graph)

    before, after = capture(seeded(TwoHeads), (batch(),), {}, use)
    assert before == after


def test_nothing_joined_with_something_is_zeros() -> None:
    """Two outputs that one operator's backward joins, other than by adding."""

    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return self.linear(x).split([3, 5], dim=1)

    def loss(out: Any) -> Tensor:
        return out[1].square().sum()

    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    wanted = run_step(seeded(Joined), (x,), loss_fn=loss)
    model = autockpt.optimize(seeded(Joined), None)
    for _ in range(3):
        assert_same(run_step(model, (x,), loss_fn=loss), wanted)
