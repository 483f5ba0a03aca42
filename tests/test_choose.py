"""``accumulate="auto"``: the micro-batch and the plan, chosen together."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW

import autockpt
from autockpt import CaptureError, InfeasibleBudget, InputError, Plan, StepError
from autockpt.choose import candidates, choose
from autockpt.split import shares
from autockpt_solvers.problem import Operation, Problem, Storage
from autockpt_solvers.schedule import free_early
from models import GPT
from oracle import measure_peak, model_state, resident_bytes
from tiny_models import MLP, seeded


def step_of(time_ns: int, peak_bytes: int) -> Plan:
    """A plan of a step that takes so long and so much."""
    problem = Problem(
        storages=(Storage("x", peak_bytes),),
        operations=(Operation("x", (), (0,), cost_ns=time_ns),),
        barrier=1,
    )
    return Plan(problem, free_early(problem, [0], []), None, "keep_all", 0.0, 0.0)


class Machine:
    """A model of 1 ms a micro-batch and 1 ms a sample, of 10 bytes a sample.

    Under the budget each byte that is missing costs ``price_ns``; a sample needs ``floor`` bytes.
    """

    def __init__(self, budget: int, price_ns: int, floor: int = 0) -> None:
        self.budget, self.price_ns, self.floor = budget, price_ns, floor
        self.measured: list[int] = []
        self.solved: dict[int, float] = {}  # size -> seconds it was given

    def unlimited(self, size: int, parts: int) -> Plan:
        self.measured.append(size)
        return step_of(1_000_000 * (1 + size), 10 * size)

    def limited(self, size: int, parts: int, seconds: float) -> Plan:
        self.solved[size] = self.solved.get(size, 0.0) + seconds
        missing = 10 * size - self.budget
        if self.budget < self.floor * size:
            raise InfeasibleBudget(self.budget, self.floor * size)
        return step_of(1_000_000 * (1 + size) + self.price_ns * missing, self.budget)

    def time_s(self, samples: int, parts: int) -> float:
        size = shares(samples, parts)[0]
        fits = 10 * size <= self.budget
        if not fits and self.budget < self.floor * size:
            return float("inf")
        plan = self.unlimited(size, parts) if fits else self.limited(size, parts, 0.0)
        return plan.step_time_s * samples / size

    def choose(self, samples: int) -> tuple[int, ...]:
        return choose(samples, self.unlimited, self.limited, self.budget, 0.0, 8.0).sizes


@pytest.mark.parametrize("samples", [1, 6, 12, 32, 60])
def test_the_fastest_that_fits_is_chosen(samples: int) -> None:
    for price_ns, budget, floor in itertools.product(
        [1_000, 20_000, 300_000], [10, 25, 80, 200, 1000], [0, 3, 9]
    ):
        machine = Machine(budget, price_ns, floor)
        parts = len(machine.choose(samples))
        times = {p: machine.time_s(samples, p) for p in candidates(samples)}
        assert times[parts] == min(times.values()), (price_ns, budget, floor)


def test_what_cannot_win_is_not_solved() -> None:
    machine = Machine(budget=160, price_ns=10**9)
    assert machine.choose(32) == (16, 16)
    assert list(machine.solved) == [32]


def test_a_large_batch_takes_the_time_of_a_few_plans() -> None:
    machine = Machine(budget=10, price_ns=10)
    samples = 720  # of 30 divisors
    assert machine.choose(samples) == (720,)
    assert len(machine.measured) == len(set(machine.measured)) < 16
    assert sum(machine.solved.values()) <= 5 * 8.0
    # Who is ahead at last had most of it.
    assert max(machine.solved, key=machine.solved.__getitem__) == 720


def test_adding_gradients_takes_time_too() -> None:
    def cheap(size: int, parts: int) -> Plan:
        return step_of(1_000_000 * size, 10 * size)

    def dear(size: int, parts: int, seconds: float) -> Plan:
        return step_of(1_050_000 * size, 40)

    assert choose(8, cheap, dear, 40, 0.0, 1.0).sizes == (4, 4)
    assert choose(8, cheap, dear, 40, 1e-3, 1.0).sizes == (8,)


def test_a_size_whose_operations_do_not_fit_the_device_is_left_out() -> None:
    machine = Machine(budget=1000, price_ns=1)

    def unlimited(size: int, parts: int) -> Plan:
        if size > room:
            raise torch.OutOfMemoryError("no memory")
        return machine.unlimited(size, parts)

    room = 5
    found = choose(8, unlimited, machine.limited, 1000, 0.0, 1.0)
    assert found.sizes == (4, 4)
    assert "1 of 8: an operation fails" in found.why
    room = 0
    with pytest.raises(torch.OutOfMemoryError):
        choose(8, unlimited, machine.limited, 1000, 0.0, 1.0)


def gpt() -> nn.Module:
    return seeded(lambda: GPT(layers=1, dim=16, heads=2, vocab=32, seq=24))


@pytest.fixture(scope="module")
def data() -> tuple[Tensor, Tensor]:
    ids = torch.randint(32, (4, 25), generator=torch.Generator().manual_seed(3))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def optimised(budget: int | None, **options: object) -> tuple[nn.Module, AdamW]:
    model = gpt()
    optimizer = AdamW(model.parameters(), lr=0.0)
    autockpt.optimize(
        model, budget, optimizer=optimizer, accumulate="auto", time_limit=0.5, **options
    )
    return model, optimizer


def test_without_a_budget_the_choice_is_explained(data: tuple[Tensor, Tensor]) -> None:
    model, _ = optimised(None)
    model.step(*data)
    plan = model.plan
    assert "samples" in plan.origin["micro-batches"]
    for parts in candidates(4):
        assert f"{parts} of {4 // parts}: " in plan.origin["compared"]
    assert Plan.from_dict(plan.to_dict()).origin == plan.origin


@pytest.mark.parametrize(("share", "loss"), [(0.6, "inside"), (0.3, "outside")])
def test_the_budget_is_kept_and_the_result_is_the_full_batchs(
    share: float, loss: str, data: tuple[Tensor, Tensor]
) -> None:
    x, y = data
    plain = gpt()
    plain(x, y).backward()
    full = autockpt.plan(gpt(), (x, y), None)
    model, optimizer = optimised(None)
    resident = resident_bytes(model, (x, y)) + 3 * sum(4 * p.numel() for p in model.parameters())
    budget = resident + int(share * (full.baseline_peak_bytes - full.problem.resident_bytes))

    def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    outside = loss == "outside"
    model, optimizer = optimised(budget, loss_fn=cross_entropy if outside else None)
    found: list[list[Tensor]] = []
    optimizer.register_step_pre_hook(
        lambda *_: found.append([p.grad.clone() for p in model.parameters()])
    )

    def step() -> None:
        if outside:
            model.step(x, target=y)
        else:
            model.step(x, y)

    for _ in range(3):
        step()
    for mine, theirs in zip(found[-1], plain.parameters(), strict=True):
        assert (mine - theirs.grad).norm() <= 1e-5 * theirs.grad.norm()
    found.clear()
    measured = resident_bytes(model, (x, y), optimizer) + measure_peak(step).delta_bytes
    measured -= sum(g.numel() * 4 for window in found for g in window)  # this test's own copies
    assert measured <= budget
    assert model.plan.budget_bytes == budget


def test_a_size_that_the_model_does_not_take_is_left_out() -> None:
    """Batch-norm has no variance over one sample."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = SGD(model.parameters(), lr=0.1)
    autockpt.optimize(
        model, None, optimizer=optimizer, accumulate="auto", loss_fn=lambda y: y.square().mean()
    )
    assert model.step(torch.randn(3, 4)).isfinite()
    assert "3 of 1: an operation fails" in model.plan.origin["compared"]


def test_a_budget_too_small_for_one_sample_says_the_minimum(data: tuple[Tensor, Tensor]) -> None:
    model, _ = optimised(1000)
    before = model_state(model)
    autockpt.restore(model)
    with pytest.raises(InfeasibleBudget) as error:
        optimised(1000, example_inputs=data)
    model, _ = optimised(1000)
    with pytest.raises(InfeasibleBudget) as later:
        model.step(*data)
    assert later.value.minimum_bytes == error.value.minimum_bytes
    assert not hasattr(model, "autockpt")
    assert len(before.identities) == len(model_state(model).identities)
    model, optimizer = optimised(error.value.minimum_bytes)
    for _ in range(3):
        model.step(*data)
    measured = resident_bytes(model, data, optimizer)
    measured += measure_peak(lambda: model.step(*data)).delta_bytes
    assert measured <= error.value.minimum_bytes + 8  # the loss that is returned


def test_a_batch_of_another_size_is_cut_to_fit_too() -> None:
    model = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    optimizer = SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(64, 6), torch.randn(64, 64)

    def optimised_for(budget: int) -> None:
        autockpt.optimize(
            model,
            budget,
            optimizer=optimizer,
            accumulate="auto",
            loss_fn=functional.mse_loss,
            time_limit=0.5,
        )

    def step(samples: int) -> int:
        assert model.step(x[:samples].clone(), target=y[:samples].clone()).isfinite()
        return model.plan.peak_bytes

    optimised_for(1000)
    with pytest.raises(InfeasibleBudget) as error:
        step(32)
    budget = error.value.minimum_bytes
    optimised_for(budget)
    step(32)
    first = step(32)
    assert step(31) <= budget
    assert model.plan.origin["micro-batches"] == "31 of at most 1 samples"
    assert step(32) == first <= budget  # the plan shown is that of this step
    step(64)  # with its inputs nothing fits: the training goes on
    assert "64 of 1: may need" in model.plan.origin["compared"]


def test_what_auto_cannot_do_says_so() -> None:
    class Breaking(MLP):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x).mean()
            return -y if y.item() > 1e9 else y

    model = seeded(lambda: Breaking(dim=8, layers=1))
    optimizer = SGD(model.parameters(), lr=0.1)
    autockpt.optimize(model, None, optimizer=optimizer, accumulate="auto")
    with pytest.raises(CaptureError, match="Give a number of micro-batches"):
        model.step(torch.ones(4, 8))
    plan = step_of(1, 1)
    with pytest.raises(InputError, match="give a number"):
        autockpt.optimize(gpt(), None, accumulate="auto", plan=plan)
    model = seeded(lambda: MLP(dim=8, layers=1))
    autockpt.optimize(
        model, None, optimizer=SGD(model.parameters(), lr=0.1), accumulate="auto",
        loss_fn=lambda output: output.square().mean(),
    )  # fmt: skip
    with pytest.raises(StepError, match="auto"):
        model.micro_step(torch.ones(4, 8))
    assert model.step(torch.ones(4, 8)).isfinite()
