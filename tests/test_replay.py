"""Random numbers are drawn once: the masks of a recompute are the forward's, at every budget."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autockpt
from autockpt import Plan
from autockpt.replay import generator_state, replay, state_bytes
from oracle import assert_same, measure_peak, resident_bytes, run_step
from tiny_models import nothing_kept, seeded

CPU = torch.device("cpu")

# ------------------------------------------------------------------ the two functions


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.rand(5),
        lambda: torch.randperm(20),
        lambda: torch.bernoulli(torch.full((20,), 0.5)),
        lambda: functional.dropout(torch.ones(20), 0.5),
    ],
    ids=["rand", "randperm", "bernoulli", "dropout"],
)
def test_a_replay_draws_the_same_and_moves_nothing(draw: Callable[[], Tensor]) -> None:
    state = generator_state(CPU)
    first = draw()
    torch.rand(3)
    now = torch.get_rng_state()
    assert torch.equal(replay(state, CPU, draw), first)
    assert torch.equal(torch.get_rng_state(), now)
    assert torch.equal(replay(state, CPU, draw), first)  # the state itself is untouched
    torch.set_rng_state(state)
    assert torch.equal(draw(), first)


def test_a_replay_passes_on_what_it_is_given() -> None:
    state = generator_state(CPU)
    first = torch.full((2, 3), 7.0).uniform_(2, 3)
    again = replay(state, CPU, torch.Tensor.uniform_, torch.zeros(2, 3), 2, to=3)
    assert torch.equal(again, first)


def test_the_generator_is_put_back_after_an_error() -> None:
    state = generator_state(CPU)
    torch.rand(3)
    now = torch.get_rng_state()

    def fail() -> None:
        torch.rand(7)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        replay(state, CPU, fail)
    assert torch.equal(torch.get_rng_state(), now)


def test_a_state_has_the_bytes_that_are_counted_for_it() -> None:
    state = generator_state(CPU)
    assert state_bytes(CPU) == state.untyped_storage().nbytes()


# ------------------------------------------------------------------ models that draw


class Dropout(nn.Module):
    """Blocks that draw; ``draw`` is what they draw with. Wide: what is drawn is 1 MiB and more."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.draw(functional.gelu(layer(x)))
        return x.square().mean()


def bernoulli(x: Tensor) -> Tensor:
    return x * torch.bernoulli(torch.full_like(x, 0.7))


def shuffled_rows(x: Tensor) -> Tensor:
    return x[torch.randperm(x.shape[0])].sin()


def shuffled_elements(x: Tensor) -> Tensor:
    return x.flatten()[torch.randperm(x.numel())].view_as(x).sin()


def noise(x: Tensor) -> Tensor:
    return (x + torch.rand_like(x)).sin()


def gaussian(x: Tensor) -> Tensor:
    return x * torch.randn(x.shape).exp()


def attention(x: Tensor) -> Tensor:
    heads = x.view(64, -1, 4, 16).transpose(1, 2)
    y = functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.2, is_causal=True)
    return y.transpose(1, 2).reshape_as(x)


DRAWS = {
    "dropout": lambda x: functional.dropout(x, 0.3),
    "dropout_of_features": lambda x: functional.dropout1d(x.view(32, -1, 64), 0.3).view_as(x),
    "bernoulli": bernoulli,
    "randperm_of_rows": shuffled_rows,
    "randperm_of_elements": shuffled_elements,
    "rand_like": noise,
    "randn": gaussian,
    "attention": attention,
    "multinomial": lambda x: x * torch.multinomial(torch.ones(x.shape[0], 2), 1) + 1,
}
# A replay pays only where what is drawn is much larger than the generator's state.
REPLAYED = {"dropout", "bernoulli", "randperm_of_elements", "rand_like", "randn", "attention"}


def drawing(name: str) -> tuple[nn.Module, Tensor]:
    x = torch.randn(4096, 64, generator=torch.Generator().manual_seed(1))
    return seeded(lambda: Dropout(DRAWS[name])), x


@pytest.mark.parametrize("name", DRAWS)
def test_what_is_drawn_is_drawn_once(name: str) -> None:
    eager, x = drawing(name)
    # Twice: the generator has moved on between two steps.
    expected = [run_step(eager, (x,), seed=seed) for seed in (1, 2)]
    plan = nothing_kept(autockpt.plan(drawing(name)[0], x, None))
    model, _ = drawing(name)
    autockpt.optimize(model, plan.peak_bytes, plan=plan)
    model(x).backward()
    for seed, wanted in zip((1, 2), expected, strict=True):
        assert_same(run_step(model, (x,), seed=seed), wanted)
    assert model.plan.schedule == plan.schedule
    assert replays(plan) == (name in REPLAYED)
    measured = resident_bytes(model, x) + measure_peak(lambda: model(x).backward()).delta_bytes
    assert measured <= plan.peak_bytes
    assert abs(plan.peak_bytes - measured) <= 0.01 * measured


def replays(plan: Plan) -> bool:
    """Whether a generator's state is saved, and so a draw is made again."""
    return any(plan.problem.operations[i].kind == "state" for i in plan.schedule.forward_computes)


def test_the_user_may_draw_between_forward_and_backward() -> None:
    eager, x = drawing("dropout")
    model, _ = drawing("dropout")
    autockpt.optimize(model, None, plan=nothing_kept(autockpt.plan(model, x, None)))
    ends = []
    for one in (eager, model):
        drawn: list[Tensor] = []

        def loss_fn(loss: Tensor, drawn: list[Tensor] = drawn) -> Tensor:
            drawn.append(torch.rand(3))
            return loss * drawn[0][0]

        one(x).backward()
        result = run_step(one, (x,), loss_fn=loss_fn)
        ends.append((result, drawn[0], torch.rand(3)))
    (wanted, *wanted_drawn), (result, *result_drawn) = ends
    assert replays(model.plan)
    assert_same(result, wanted)
    assert all(torch.equal(a, b) for a, b in zip(result_drawn, wanted_drawn, strict=True))


def test_planning_draws_nothing() -> None:
    model, x = drawing("dropout")
    state = torch.get_rng_state()
    autockpt.plan(model, x, None)
    assert torch.equal(torch.get_rng_state(), state)
    autockpt.optimize(model, None, example_inputs=(x,))
    assert torch.equal(torch.get_rng_state(), state)


class DrawsForNothing(Dropout):
    """Draws what nobody uses: the generator moves all the same."""

    def forward(self, x: Tensor) -> Tensor:
        torch.rand(3)
        return super().forward(x)


def test_the_generator_ends_where_eager_leaves_it_after_unused_draws() -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    eager, model = (seeded(lambda: DrawsForNothing(DRAWS["dropout"])) for _ in range(2))
    autockpt.optimize(model, None)
    for _ in range(2):
        assert_same(run_step(model, (x,)), run_step(eager, (x,)))


def test_a_loop_of_steps_draws_as_eagers() -> None:
    ends = []
    for budgeted in (False, True):
        model, x = drawing("dropout")
        if budgeted:
            plan = nothing_kept(autockpt.plan(model, x, None))
            autockpt.optimize(model, None, plan=plan)
        torch.manual_seed(5)
        for _ in range(4):
            model(x).backward()
        ends.append((torch.rand(4), [p.grad for p in model.parameters()]))
    (drawn, gradients), (other_drawn, other_gradients) = ends
    assert torch.equal(drawn, other_drawn)
    assert all(torch.equal(a, b) for a, b in zip(gradients, other_gradients, strict=True))
