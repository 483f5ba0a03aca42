"""The optimised model is the user's model: same object, same keys, and no failure changes it."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import io
import itertools
import pickle
import re
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    is_in_torch_dispatch_mode,
)

import autockpt
from autockpt import (
    AutockptError,
    BudgetError,
    CaptureError,
    InfeasibleBudget,
    InputError,
    PinError,
    Plan,
    PlanMismatch,
)
from oracle import (
    assert_same,
    assert_state_unchanged,
    measure_peak,
    model_state,
    resident_bytes,
    run_step,
    run_steps,
)
from tiny_models import MLP, Classifier, mlp, seeded


class Norm(Classifier):
    """With a buffer that every training forward changes."""

    def __init__(self) -> None:
        super().__init__(dim=32, layers=5)
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


def built() -> tuple[nn.Module, Tensor]:
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    return seeded(Norm), x


@functools.cache
def tight() -> int:
    """A budget below the peak of ``built()``, for which something has to run again."""
    model, x = built()
    plan = autockpt.plan(model, x, None)
    resident = plan.problem.resident_bytes
    return resident + (plan.baseline_peak_bytes - resident) * 7 // 10


def optimised(budget: int | str | None = None, **options: Any) -> tuple[nn.Module, Tensor]:
    model, x = built()
    budget = tight() if budget is None else budget
    return autockpt.optimize(model, budget, time_limit=1, **options), x


# ------------------------------------------------------------------ a drop-in


def test_it_is_the_same_object_of_the_same_class_with_the_same_keys() -> None:
    model, x = built()
    before = model_state(model)
    keys = list(model.state_dict())
    names = [name for name, _ in model.named_parameters()]
    modules = [name for name, _ in model.named_modules()]
    assert autockpt.optimize(model, tight(), time_limit=1) is model
    for _ in range(2):
        model(x).backward()
    after = model_state(model)
    assert type(model) is Norm
    assert after.identities == before.identities
    assert list(model.state_dict()) == keys
    assert [name for name, _ in model.named_parameters()] == names
    assert [name for name, _ in model.named_modules()] == modules
    assert isinstance(model, nn.Module)


def test_it_trains_as_before_and_keeps_the_budget() -> None:
    plain, x = built()
    model, _ = optimised()
    for _ in range(3):
        assert_same(run_step(model, (x,)), run_step(plain, (x,)))
    measured = resident_bytes(model, x) + measure_peak(lambda: model(x).backward()).delta_bytes
    assert measured <= tight()


def test_there_is_a_plan_from_the_first_training_forward_on() -> None:
    model, x = optimised()
    assert model.plan is None
    model.eval()
    model(x)
    assert model.plan is None
    model.train()
    model(x)
    assert isinstance(model.plan, Plan)
    assert model.plan is model.autockpt.plan
    assert model.plan.budget_bytes == tight()


def test_example_inputs_make_the_plan_now() -> None:
    model, x = built()
    before = model_state(model)
    autockpt.optimize(model, tight(), example_inputs=(x,), time_limit=1)
    assert isinstance(model.plan, Plan)
    assert model_state(model).identities == before.identities
    assert torch.equal(model.norm.num_batches_tracked, torch.tensor(0))
    plain, _ = built()
    assert_same(run_step(model, (x,)), run_step(plain, (x,)))


def test_eval_and_no_grad_run_the_plain_model() -> None:
    plain, x = built()
    model, _ = optimised()
    model(x).backward()
    plain(x).backward()
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
        assert measure_peak(lambda: model(x)).left_bytes == 0
        plain(x)
    model.eval(), plain.eval()
    loss = model(x)
    assert torch.equal(loss, plain(x))
    # Eager's graph, node for node: nothing of a compiled function is in it.
    assert type(loss.grad_fn) is type(plain(x).grad_fn)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    others = torch.autograd.grad(plain(x), list(plain.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(gradients, others, strict=True))


def test_restore_undoes_it() -> None:
    model, x = built()
    before = model_state(model)
    autockpt.optimize(model, None)
    model.norm.eval()  # leaves the statistics alone
    model(x)
    model.norm.train()
    assert autockpt.restore(model) is model
    assert_state_unchanged(model, before)
    plain, _ = built()
    assert_same(run_step(model, (x,)), run_step(plain, (x,)))


def test_restore_leaves_a_plain_model_alone() -> None:
    model, _ = built()
    model.plan = "the user's"
    before = model_state(model)
    assert autockpt.restore(model) is model
    assert_state_unchanged(model, before)
    assert model.plan == "the user's"


def test_optimising_again_replaces_the_budget() -> None:
    model, x = optimised()
    model(x).backward()
    assert model.plan.extra_time_s > 0
    autockpt.optimize(model, None)
    assert model.plan is None
    model(x).backward()
    assert model.plan.extra_time_s == 0
    autockpt.restore(model)
    assert "plan" not in vars(model)


def test_hooks_run() -> None:
    model, x = built()
    seen: list[str] = []
    model.register_forward_pre_hook(lambda *_: seen.append("before"))
    model.register_forward_hook(lambda *_: seen.append("after"))
    autockpt.optimize(model, None)
    for _ in range(3):
        model(x).backward()
    assert seen == ["before", "after"] * 3


class WithPlan(Classifier):
    """A class that has a ``plan`` of its own."""

    @property
    def plan(self) -> str:
        return "the architect's"


def test_a_plan_of_the_users_is_not_shadowed() -> None:
    model, x = seeded(WithPlan), mlp()[1]
    autockpt.optimize(model, None)
    model(x).backward()
    assert model.plan == "the architect's"
    assert isinstance(model.autockpt.plan, Plan)
    autockpt.restore(model)
    assert model.plan == "the architect's"


def test_a_submodule_called_plan_is_not_shadowed() -> None:
    model, x = mlp()
    model.plan = nn.Linear(2, 2)
    autockpt.optimize(model, None)
    model(x).backward()
    assert isinstance(model.plan, nn.Linear)
    assert isinstance(model.autockpt.plan, Plan)


# ------------------------------------------------------------------ copies


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_what_is_done_to_a_shallow_copy_leaves_the_model_optimised() -> None:
    model, x = optimised()
    model(x).backward()
    handle, shallow = model.autockpt, copy.copy(model)
    autockpt.restore(shallow)
    assert "autockpt" not in vars(shallow)
    assert "step" not in vars(shallow)
    again = autockpt.optimize(copy.copy(model), None)
    assert again.autockpt is not handle
    assert model.autockpt is handle
    model.zero_grad(set_to_none=True)
    measured = resident_bytes(model, x) + measure_peak(lambda: model(x).backward()).delta_bytes
    assert measured <= tight()


@pytest.mark.parametrize("forwards", [0, 2])
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved])
def test_a_copy_is_optimised_and_its_own(
    copied: Callable[[nn.Module], nn.Module], forwards: int
) -> None:
    model, x = optimised()
    plain, _ = built()
    for one in (model, plain):
        for _ in range(forwards):
            one(x).backward()
        one.zero_grad(set_to_none=True)
    other = copied(model)
    before = model_state(model)
    assert other.autockpt is not model.autockpt
    batches = [((x,), {})] * 3
    losses = run_steps(other, SGD(other.parameters(), lr=0.1), batches)
    assert losses == run_steps(plain, SGD(plain.parameters(), lr=0.1), batches)
    assert other.plan.extra_time_s > 0
    assert other.plan.budget_bytes == tight()
    measured = resident_bytes(other, x) + measure_peak(lambda: other(x).backward()).delta_bytes
    assert measured <= tight()
    assert_state_unchanged(model, before, rng=False)


def test_a_state_dict_of_an_optimised_model_fits_a_plain_one() -> None:
    model, x = optimised()
    model(x).backward()
    plain, _ = built()
    plain.load_state_dict(model.state_dict())
    model.load_state_dict(plain.state_dict())
    plain.zero_grad(), model.zero_grad()
    assert_same(run_step(model, (x,)), run_step(plain, (x,)))


# ------------------------------------------------------------------ other inputs, broken steps


def test_a_smaller_last_batch_keeps_the_budget_too() -> None:
    plain, x = built()
    model, _ = optimised()
    for size in (64, 64, 40, 64, 40):
        assert_same(run_step(model, (x[:size].clone(),)), run_step(plain, (x[:size].clone(),)))
        assert model.plan.peak_bytes <= tight()


def test_a_larger_batch_is_planned_anew() -> None:
    model, x = optimised()
    plain, _ = built()
    budget = tight() * 5 // 4
    autockpt.optimize(model, budget, time_limit=1)
    for size in (64, 76, 64):
        batch = torch.cat([x, x])[:size].clone()
        assert_same(run_step(model, (batch,)), run_step(plain, (batch,)))
    batch = torch.cat([x, x])[:76].clone()

    def step() -> None:
        model(batch).backward()

    assert resident_bytes(model, batch) + measure_peak(step).delta_bytes <= budget


def test_an_error_in_the_users_loss_leaves_everything_usable() -> None:
    plain, x = built()
    model, _ = optimised()
    for _ in range(3):
        for one in (plain, model):
            with pytest.raises(ZeroDivisionError):
                run_step(one, (x,), loss_fn=lambda output: output / (1 // 0))
        assert_same(run_step(model, (x,)), run_step(plain, (x,)))


def test_an_error_between_forward_and_backward_leaves_nothing_allocated() -> None:
    model, x = optimised()
    model(x).backward()
    model.zero_grad(set_to_none=True)

    def broken() -> None:
        loss = model(x)
        with pytest.raises(ZeroDivisionError):
            loss / (1 // 0)

    assert measure_peak(broken).left_bytes == 0


def test_an_error_in_the_backward_leaves_everything_usable() -> None:
    plain, x = built()
    model, _ = optimised()

    def refuse(_: Tensor) -> None:
        raise ZeroDivisionError

    for one in (plain, model):
        for _ in range(2):
            hook = next(one.parameters()).register_hook(refuse)
            with pytest.raises(ZeroDivisionError):
                one(x).backward()
            hook.remove()
            one.zero_grad(set_to_none=True)
    assert_same(run_step(model, (x,)), run_step(plain, (x,)))


def test_a_forward_without_a_backward_does_no_harm() -> None:
    plain, x = built()
    model, _ = optimised()
    for one in (plain, model):
        for _ in range(3):
            one(x)
    assert_same(run_step(model, (x,)), run_step(plain, (x,)))


def test_a_backward_may_run_twice() -> None:
    plain, x = built()
    model, _ = optimised()
    for one in (plain, model):
        loss = one(x)
        loss.backward(retain_graph=True)
        loss.backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_weights_that_are_no_leaves_are_not_asked_for_gradients() -> None:
    model, x = optimised()
    for _ in range(2):
        weights = {name: p * 0.5 for name, p in model.named_parameters()}
        torch.func.functional_call(model, weights, (x,)).sum().backward()  # warnings are errors


class Transposed(nn.Module):
    """Of linear layers' results, transposed, a kernel's backward makes dense gradients."""

    def __init__(self, kernel: nn.Module) -> None:
        super().__init__()
        self.first, self.kernel, self.last = nn.Linear(16, 16), kernel, nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.kernel(self.first(x).sin().transpose(1, 2)).transpose(1, 2)
        return self.last(h.cos()).square().mean()


@pytest.mark.parametrize("kernel", [lambda: nn.BatchNorm1d(16), nn.RReLU])
def test_a_kernel_may_lay_its_result_out_otherwise_than_traced(
    kernel: Callable[[], nn.Module],
) -> None:
    plain = seeded(lambda: Transposed(kernel()))
    x = torch.randn(4, 32, 16)
    expected = run_step(plain, (x,))
    with pytest.raises(InfeasibleBudget) as error:
        autockpt.optimize(seeded(lambda: Transposed(kernel())), 1, example_inputs=(x,))
    for budget in (None, error.value.minimum_bytes):
        model = autockpt.optimize(seeded(lambda: Transposed(kernel())), budget, time_limit=1)
        assert_same(run_step(model, (x,)), expected, bitwise=False)


def test_a_forward_while_another_thread_compiles_has_its_plan() -> None:
    model, x = optimised()
    for _ in range(3):  # until no step is watched any more
        model(x).sum().backward()
    outputs: list[Tensor] = []

    def compile_slowly(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        other = threading.Thread(target=lambda: outputs.append(model(x)))
        other.start()
        other.join()
        return graph.forward

    torch.compile(torch.sin, backend=compile_slowly)(x)
    assert type(outputs[0].grad_fn).__name__ == type(model(x).grad_fn).__name__


def test_a_budget_that_holds_once_outputs_are_let_go_of_is_not_refused() -> None:
    def build() -> nn.Module:
        layers = nn.Linear(32, 128), nn.ReLU(), nn.BatchNorm1d(128), nn.Linear(128, 16)
        return nn.Sequential(*layers)

    x = torch.randn(256, 32)
    free = autockpt.optimize(build(), None)
    for _ in range(3):
        free(x).square().mean().backward()
        free.zero_grad()
    budget = free.plan.peak_bytes
    model = autockpt.optimize(build(), budget)
    for _ in range(3):
        model(x).square().mean().backward()
        model.zero_grad()
    assert model.plan.peak_bytes <= budget


def test_two_forwards_before_two_backwards() -> None:
    plain, x = built()
    model, _ = optimised()
    for one in (plain, model):
        first, second = one(x), one(2 * x)
        second.backward()
        first.backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_frozen_parameters_get_no_gradient() -> None:
    plain, x = built()
    model, _ = built()
    for one in (plain, model):
        one.layers[1].requires_grad_(False)
        one.norm.requires_grad_(False)
    autockpt.optimize(model, tight(), time_limit=1)
    result = run_step(model, (x,))
    assert_same(result, run_step(plain, (x,)))
    assert result.gradients["layers.1.weight"] is None


def test_an_input_may_need_a_gradient() -> None:
    plain, x = built()
    model, _ = optimised()
    x.requires_grad_()
    result = run_step(model, (x,))
    assert_same(result, run_step(plain, (x,)))
    assert result.input_gradients["inputs[0]"] is not None


# ------------------------------------------------------------------ given plans


def test_a_plan_may_be_given(tmp_path: Path) -> None:
    model, x = built()
    plan = autockpt.plan(model, x, tight(), time_limit=1)
    path = tmp_path / "plan.json"
    plan.save(path)
    expected = run_step(built()[0], (x,))
    for given in (plan, path, str(path)):
        model, _ = built()
        autockpt.optimize(model, tight(), plan=given)
        assert_same(run_step(model, (x,)), expected)
        assert model.plan.schedule == plan.schedule
        assert model.plan.peak_bytes <= tight()


def test_a_given_plan_brings_its_budget() -> None:
    model, x = built()
    plan = autockpt.plan(model, x, tight(), time_limit=1)
    autockpt.optimize(model, None, plan=plan)
    model(x).backward()
    assert model.plan.schedule == plan.schedule


def test_a_given_plan_stays_whatever_the_user_does_with_the_outputs() -> None:
    model, x = built()
    plan = autockpt.plan(model, x, tight(), time_limit=1)
    # Within the wider budget nothing would have to run again; the user's plan is the user's word.
    autockpt.optimize(model, 2 * tight(), plan=plan)
    for _ in range(3):
        loss = model(x)
        metric = loss.detach().clone() + torch.zeros(1000).sum()
        loss.backward()
        model.zero_grad(set_to_none=True)
    assert torch.equal(metric, loss)
    # The same runs in the same order; what the user holds is freed later.
    assert model.plan.schedule.forward_computes == plan.schedule.forward_computes
    assert model.plan.schedule.backward_computes == plan.schedule.backward_computes
    assert model.plan.budget_bytes == 2 * tight()


def test_a_plan_for_one_shape_leaves_others_within_its_budget() -> None:
    plain, x = built()
    model, _ = built()
    autockpt.optimize(model, None, plan=autockpt.plan(model, x, tight(), time_limit=1))
    for size in (64, 48):
        assert_same(run_step(model, (x[:size].clone(),)), run_step(plain, (x[:size].clone(),)))
        assert model.plan.peak_bytes <= tight()


@pytest.mark.parametrize(
    "other", [lambda: MLP(dim=32, layers=5), lambda: Classifier(dim=32, layers=4)]
)
def test_a_plan_of_another_model_is_refused(other: Callable[[], nn.Module]) -> None:
    model, x = built()
    plan = autockpt.plan(seeded(other), x, None)
    before = model_state(model)
    autockpt.optimize(model, None, plan=plan)
    with pytest.raises(PlanMismatch, match="was made for another step"):
        model(x)
    assert_state_unchanged(model, before)


def test_a_plan_over_the_budget_is_refused() -> None:
    model, x = built()
    plan = autockpt.plan(model, x, None)
    before = model_state(model)
    with pytest.raises(PlanMismatch, match="over the budget"):
        autockpt.optimize(model, tight(), plan=plan, example_inputs=(x,))
    assert_state_unchanged(model, before)


# ------------------------------------------------------------------ failures change nothing


class Branching(Classifier):
    """Decides by what it computes."""

    def forward(self, x: Tensor) -> Tensor:
        loss = super().forward(x)
        if loss.item() > 1e9:  # the line the error has to name
            return loss * 2
        return loss


BRANCH = inspect.getsourcelines(Branching)[1] + 5


def begin(
    model: nn.Module, now: bool, *inputs: Tensor, budget: int | None = None, **options: Any
) -> None:
    """Plan ``model`` now, or at its first forward."""
    if now:
        autockpt.optimize(model, budget, example_inputs=inputs, **options)
        return
    autockpt.optimize(model, budget, **options)
    model(*inputs)


def test_an_unreadable_budget() -> None:
    model, _ = built()
    before = model_state(model)
    for budget in ("forty", "40 GBit", -1, 0, 1.5, "150%", True):
        with pytest.raises(BudgetError, match="A budget is a whole number of bytes"):
            autockpt.optimize(model, budget)
    assert_state_unchanged(model, before)


def test_a_refusal_says_what_a_loop_needs_that_lets_go_of_the_outputs() -> None:
    def build() -> nn.Module:
        sizes = (16, 256, 16, 64)
        layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(sizes)]
        return seeded(lambda: nn.Sequential(*layers))

    x = torch.randn(64, 16)
    with pytest.raises(InfeasibleBudget, match="lets go of them before the backward") as error:
        autockpt.optimize(build(), 1, example_inputs=(x,))
    (least,) = re.findall(r"little more than ([\d,]+) bytes", str(error.value))
    budget = int(least.replace(",", "")) + 64  # for the loss itself
    assert budget < error.value.minimum_bytes
    model = autockpt.optimize(build(), budget, time_limit=1)

    def step() -> None:
        model(x).square().mean().backward()

    for _ in range(4):  # until no step is watched any more
        step()
        model.zero_grad(set_to_none=True)
    assert resident_bytes(model, (x,)) + measure_peak(step).delta_bytes <= budget


@pytest.mark.parametrize("now", [True, False], ids=["planned_now", "at_the_first_forward"])
def test_a_budget_below_the_minimum(now: bool) -> None:
    model, x = built()
    before = model_state(model)
    with pytest.raises(InfeasibleBudget) as error:
        begin(model, now, x, budget=1000)
    assert_state_unchanged(model, before)
    assert error.value.budget_bytes == 1000
    assert error.value.tensors
    assert f"{error.value.minimum_bytes:,}" in str(error.value)
    minimum = error.value.minimum_bytes
    autockpt.optimize(model, minimum, time_limit=1)
    plain, _ = built()
    assert_same(run_step(model, (x,)), run_step(plain, (x,)))
    measured = resident_bytes(model, x) + measure_peak(lambda: model(x).backward()).delta_bytes
    assert measured <= minimum


def test_the_wrong_number_of_example_inputs() -> None:
    model, x = built()
    before = model_state(model)
    with pytest.raises(InputError, match=r"do not fit Norm\.forward"):
        autockpt.optimize(model, None, example_inputs=(x, x))
    assert_state_unchanged(model, before)


def test_a_wrong_keyword() -> None:
    model, x = built()
    before = model_state(model)
    with pytest.raises(InputError, match=r"do not fit Norm\.forward.*targets"):
        autockpt.optimize(model, None, example_inputs=(x,), example_kwargs={"targets": x})
    assert_state_unchanged(model, before)


def test_nothing_to_train() -> None:
    model, _ = built()
    model.requires_grad_(False)
    before = model_state(model)
    with pytest.raises(CaptureError, match="no parameter that requires a gradient"):
        autockpt.optimize(model, None)
    assert_state_unchanged(model, before)


@pytest.mark.parametrize("now", [True, False], ids=["planned_now", "at_the_first_forward"])
def test_a_branch_on_data_names_the_users_line(now: bool) -> None:
    model, x = seeded(Branching), mlp()[1]
    before = model_state(model)
    with pytest.raises(CaptureError) as error:
        begin(model, now, x, fullgraph=True)
    assert "Branching" in str(error.value)
    assert f"test_module.py, line {BRANCH}, in forward" in str(error.value)
    assert_state_unchanged(model, before)


@pytest.mark.parametrize("now", [True, False], ids=["planned_now", "at_the_first_forward"])
def test_a_pin_that_matches_nothing(now: bool) -> None:
    model, x = built()
    before = model_state(model)
    with pytest.raises(PinError, match=r"keep='blocks\.\*' matches no module"):
        begin(model, now, x, keep=["blocks.*"])
    assert_state_unchanged(model, before)


def test_no_module() -> None:
    with pytest.raises(InputError, match="Module is needed"):
        autockpt.optimize(lambda x: x, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"solver": "magic"}, "solver='magic' is unknown"),
        ({"backend": "magic"}, "backend='magic' is unknown"),
        ({"time_limit": 0}, "time_limit=0"),
        ({"time_limit": "1"}, "time_limit='1'"),
        ({"keep": "blocks"}, r"keep=\['blocks'\]"),
        ({"keep": [3]}, "not 3"),
        ({"plan": 3}, "plan=3"),
        ({"optimizer": 3}, "optimizer=3"),
        ({"optimizer": SGD([nn.Parameter(torch.ones(1))])}, "none of the model's parameters"),
    ],
)
def test_an_option_without_meaning(options: dict[str, Any], message: str) -> None:
    model, _ = built()
    before = model_state(model)
    with pytest.raises(AutockptError, match=message):
        autockpt.optimize(model, None, **options)
    assert_state_unchanged(model, before)


def test_a_failure_keeps_an_earlier_optimisation() -> None:
    model, x = optimised()
    model(x).backward()
    plan = model.plan
    model.zero_grad(set_to_none=True)
    with pytest.raises(InfeasibleBudget):
        autockpt.optimize(model, 1000, example_inputs=(x,))
    assert model.plan is plan
    measured = resident_bytes(model, x) + measure_peak(lambda: model(x).backward()).delta_bytes
    assert measured <= tight()


def test_after_a_failed_first_forward_the_model_is_plain() -> None:
    model, x = built()
    autockpt.optimize(model, 1000)
    with pytest.raises(AutockptError):
        model(x)
    plain, _ = built()
    assert_same(run_step(model, (x,)), run_step(plain, (x,)))


@pytest.mark.parametrize("forwards", [0, 2])
@pytest.mark.parametrize(
    ("arguments", "keywords"),
    [
        (lambda x: (x, x), {}),
        (lambda x: (x,), {"targets": 1}),
        (lambda x: (x[:, :7],), {}),
        (lambda x: (None,), {}),
    ],
    ids=["too_many", "unknown_keyword", "wrong_shape", "no_tensor"],
)
def test_inputs_that_do_not_fit_fail_as_in_eager(
    arguments: Callable[[Tensor], tuple[Any, ...]], keywords: dict[str, Any], forwards: int
) -> None:
    plain, x = built()
    model, _ = optimised()
    with pytest.raises(Exception) as expected:  # noqa: PT011 - whatever eager raises
        plain(*arguments(x), **keywords)
    for _ in range(forwards):
        model(x)
    with pytest.raises(type(expected.value)) as error:
        model(*arguments(x), **keywords)
    assert str(error.value) == str(expected.value)
    for _ in range(forwards):
        plain(x)
    # It is optimised all the same.
    assert_same(run_step(model, (x,)), run_step(plain, (x,)))
    assert model.plan.extra_time_s > 0


class Overwriting(Classifier):
    """Overwrites what the backward needs: an error of the user's, which eager finds late."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layers[0](x).exp()
        hidden.mul_(2)
        return hidden.square().mean()


class Refusing(Classifier):
    """Raises an error of its own."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 64:
            raise LookupError("no such batch")
        return super().forward(x)


@pytest.mark.parametrize("build", [Overwriting, Refusing])
def test_an_error_of_the_models_own_is_eagers(build: Callable[[], nn.Module]) -> None:
    _, x = mlp()
    with pytest.raises(Exception) as expected:  # noqa: PT011 - whatever eager raises
        seeded(build)(x).backward()
    model = autockpt.optimize(seeded(build), None)
    for _ in range(2):
        with pytest.raises(type(expected.value)) as error:
            model(x).backward()
        assert type(error.value) is type(expected.value)
        # Autograd's hints at the end depend on how it is run.
        assert str(error.value)[:100] == str(expected.value)[:100]


# ------------------------------------------------------------------ backwards that cannot be


class Unsaved(Classifier):
    """Eager's backward does not need the input; a plan that computes again from it does."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.sigmoid(x)) + 0 * x.mean()


def test_an_input_overwritten_before_the_backward_is_named() -> None:
    def step(model: nn.Module, write: bool) -> list[Tensor]:
        x = mlp()[1].clone()
        loss = model(x)
        if write:
            x.zero_()
        loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = step(seeded(Unsaved), True)
    with pytest.raises(InfeasibleBudget) as refusal:
        autockpt.plan(seeded(Unsaved), mlp()[1], 1)
    tight = autockpt.optimize(seeded(Unsaved), refusal.value.minimum_bytes, time_limit=1)
    with pytest.raises(autockpt.StaleInput, match=r"an input of shape \(64, 16\) was written"):
        step(tight, True)
    tight.zero_grad(set_to_none=True)
    for mine, theirs in zip(step(tight, False), expected, strict=True):
        assert torch.equal(mine, theirs)
    roomy = autockpt.optimize(seeded(Unsaved), None)
    for mine, theirs in zip(step(roomy, True), expected, strict=True):
        assert torch.equal(mine, theirs)


def test_a_parameter_overwritten_before_the_backward_is_named() -> None:
    model, x = mlp()
    autockpt.optimize(model, None)
    loss = model(x)
    with torch.no_grad():
        model.layers[2].weight.add_(1)
    with pytest.raises(autockpt.StaleInput, match=r"the parameter 'layers\.2\.weight' was written"):
        loss.backward()


def test_data_replaced_before_the_backward_leaves_it_the_forwards() -> None:
    def step(model: nn.Module, replace: bool) -> list[Tensor]:
        loss = model(mlp()[1])
        for parameter in model.parameters() if replace else ():
            parameter.data = parameter.data * 2
        loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = step(mlp()[0], False)
    with pytest.raises(InfeasibleBudget) as refusal:
        autockpt.plan(*mlp(), 1)
    for budget in (None, refusal.value.minimum_bytes):
        model = autockpt.optimize(mlp()[0], budget, time_limit=1)
        for mine, theirs in zip(step(model, True), expected, strict=True):
            assert torch.equal(mine, theirs)
    # So does eager here, whose linear layers save views of their weights.
    for mine, theirs in zip(step(mlp()[0], True), expected, strict=True):
        assert torch.equal(mine, theirs)


def test_a_double_backward_is_refused_where_it_begins() -> None:
    model, x = mlp()
    autockpt.optimize(model, None)
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(model(x), x, create_graph=True)
    plain, _ = mlp()
    (expected,) = torch.autograd.grad(plain(x), x)
    assert torch.equal(gradient, expected)  # the first order is there
    with pytest.raises(autockpt.DoubleBackward, match="create_graph=True"):
        gradient.square().sum().backward()


class Seen(nn.Module):
    """Returns a view of what its backward reads."""

    def __init__(self, view: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.view = nn.Linear(16, 8), view

    def forward(self, x: Tensor) -> Any:
        return self.view(self.layer(x).sigmoid())


@pytest.mark.parametrize(
    "view",
    [lambda h: h[:, :4], Tensor.t, lambda h: h.chunk(2), lambda h: (h.detach(), h[1])],
    ids=["part", "transposed", "chunks", "detached"],
)
def test_writing_to_an_output_that_is_a_view_is_refused_as_in_eager(
    view: Callable[[Tensor], Any],
) -> None:
    model, plain = seeded(lambda: Seen(view)), seeded(lambda: Seen(view))
    autockpt.optimize(model, None)

    def write_and_step(one: nn.Module) -> None:
        output = one(mlp()[1])
        parts = output if isinstance(output, tuple) else (output,)
        parts[0].mul_(2)
        parts[-1].square().sum().backward()

    for one in (plain, model, model):
        with pytest.raises(RuntimeError, match=r"modified( by an)? inplace"):
            write_and_step(one)


# ------------------------------------------------------------------ the user's modes


def test_nothing_keeps_a_model_that_is_let_go_of() -> None:
    """Torch remembers backends and compiled functions: none may lead back to the model."""
    gc.collect()  # what other tests left in cycles
    model, x = mlp()
    autockpt.optimize(model, None)
    for _ in range(3):  # autograd's graph dies inside its backward, where no mode can be left
        model(x).backward()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    other, _ = mlp()
    loss = autockpt.optimize(other, None)(x)
    del loss
    assert _get_current_dispatch_mode_stack() == []


def test_nothing_keeps_the_graphs_of_a_model_that_is_let_go_of() -> None:
    """Dynamo keeps what it compiles as long as what it was made from, which it keeps as well."""
    model, x = mlp()
    autockpt.optimize(model, None)
    graphs = []
    for _ in range(3):  # the first plan is a guess and may be written anew
        model(x).backward()
        graphs += [weakref.ref(graph.joint.module) for graph in model.autockpt.planner.graphs]
    del model
    gc.collect()  # takes the compiled code, which
    gc.collect()  # had a hold on what is taken here
    assert [ref() for ref in graphs] == [None] * len(graphs)


class Counting(TorchDispatchMode):
    """Counts operators."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_no_mode_stays_behind() -> None:
    """The first step is watched by a mode of ours; the user's come and go meanwhile."""
    plain, x = mlp()
    gc.collect()  # graphs that other tests left in cycles
    for inner in (False, True):
        model, _ = mlp()
        autockpt.optimize(model, None)
        loss = model(x)
        with Counting() as mode:
            loss = loss * 2
            if inner:  # the watched graph dies while the user's mode stands above ours
                del loss
            else:
                loss.backward()
        if not inner:
            del loss
        assert mode.calls > 0
        assert _get_current_dispatch_mode_stack() == []
        assert not is_in_torch_dispatch_mode()
        model.zero_grad(set_to_none=True)
        assert_same(run_step(model, (x,)), run_step(plain, (x,)))
