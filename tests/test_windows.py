"""Windows of micro-batches: the optimizer step is that of the whole batch's mean."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import LBFGS, SGD, AdamW, Optimizer

import autockpt
from autockpt import InputError, StepError
from hf_models import HF_EXAMPLES
from models import GPT
from tiny_models import MLP, seeded

MEAN = functional.mse_loss


def batch(samples: int = 12, dim: int = 8, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(samples, dim, generator=generator, dtype=dtype) for _ in range(2)]


def mlp(dtype: torch.dtype = torch.float64) -> nn.Module:
    return seeded(lambda: MLP(dim=8, layers=2)).to(dtype)


class Recorder(SGD):
    """Does not move the weights, and keeps the gradients it was to step on."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.0)
        self.model = model
        self.seen: list[dict[str, Tensor | None]] = []

    def step(self, closure: Any = None) -> Any:
        self.seen.append(gradients(self.model))
        return super().step(closure)


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {
        n: None if p.grad is None else p.grad.detach().clone() for n, p in model.named_parameters()
    }


def optimised(model: nn.Module, accumulate: Any, **options: Any) -> tuple[nn.Module, Recorder]:
    optimizer = Recorder(model)
    autockpt.optimize(model, None, optimizer=optimizer, accumulate=accumulate, **options)
    return model, optimizer


def assert_close(
    got: dict[str, Tensor | None], want: dict[str, Tensor | None], rtol: float
) -> None:
    """Each gradient as far off as ``rtol`` of its norm at most, or of the largest's."""
    assert list(got) == list(want)
    floor = max(float(g.norm()) for g in want.values() if g is not None)
    for name, gradient in want.items():
        mine = got[name]
        assert (mine is None) == (gradient is None), name
        if gradient is not None and mine is not None:
            error = float((mine.double() - gradient.double()).norm())
            assert error <= rtol * max(float(gradient.norm()), 0.01 * floor), (name, error)


def full_batch(
    model: nn.Module, loss: Callable[[nn.Module], Tensor]
) -> tuple[float, dict[str, Tensor | None]]:
    model.zero_grad(set_to_none=True)
    value = loss(model)
    value.backward()
    found = gradients(model)
    model.zero_grad(set_to_none=True)
    return value.item(), found


# ------------------------------------------------------------------ equal to the full batch

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("accumulate", [1, 2, 3, 8, 20])
def test_the_gradient_is_the_full_batchs(accumulate: int, dtype: torch.dtype) -> None:
    x, y = batch(dtype=dtype)
    loss, want = full_batch(mlp(dtype), lambda m: MEAN(m(x), y))
    model, optimizer = optimised(mlp(dtype), accumulate, loss_fn=MEAN)
    for _ in range(2):
        found = model.step(x, target=y)
        assert found.item() == pytest.approx(loss, rel=TOLERANCE[dtype])
        assert not found.requires_grad
        assert found.dim() == 0
        assert_close(optimizer.seen.pop(), want, TOLERANCE[dtype])
        assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("accumulate", "dtype"),
    [(1, torch.float32), (2, torch.float64), (3, torch.float32), (8, torch.float64)],
)
def test_ten_steps_of_adamw_end_at_the_same_weights(accumulate: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(32, (10, 8, 13), generator=generator)

    def built() -> tuple[nn.Module, Optimizer]:
        model = seeded(lambda: GPT(layers=1, dim=16, heads=2, vocab=32, seq=12)).to(dtype)
        # A large epsilon: where a gradient is rounding noise, its sign must not be a whole step.
        return model, AdamW(model.parameters(), lr=1e-2, eps=1e-4)

    plain, optimizer = built()
    for step in ids:
        plain(step[:, :-1], step[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    model, optimizer = built()
    autockpt.optimize(model, None, optimizer=optimizer, accumulate=accumulate)
    for step in ids:
        model.step(step[:, :-1], step[:, 1:])
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        error = (mine - theirs).norm() / theirs.norm()
        assert error <= {torch.float64: 1e-6, torch.float32: 1e-5}[dtype]


def test_a_budget_changes_nothing_about_it() -> None:
    x, y = batch(64)
    _, want = full_batch(mlp(), lambda m: MEAN(m(x), y))
    plan = autockpt.plan(mlp(), x[:16], None)
    resident = plan.problem.resident_bytes
    model = mlp()
    optimizer = Recorder(model)
    gradient_bytes = sum(8 * p.numel() for p in model.parameters())
    budget = resident + 2 * 48 * 8 * 8 + gradient_bytes
    budget += (plan.baseline_peak_bytes - resident) * 3 // 4
    autockpt.optimize(model, budget, optimizer=optimizer, accumulate=4, loss_fn=MEAN, time_limit=1)
    for _ in range(3):
        model.step(x, target=y)
        assert_close(optimizer.seen.pop(), want, 1e-12)
    assert model.plan.peak_bytes <= budget


# ------------------------------------------------------------------ weights


class TokenModel(nn.Module):
    """A mean over the tokens whose label is not -100, as language models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.inner = nn.Linear(6, 6)
        self.head = nn.Linear(6, 9)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.inner(self.embed(ids))))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def labelled(counts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """One sample for each count of labels that are valid."""
    generator = torch.Generator().manual_seed(33)
    ids = torch.randint(9, (len(counts), 8), generator=generator)
    labels = torch.randint(9, (len(counts), 8), generator=generator)
    for row, valid in zip(labels, counts, strict=True):
        row[valid:] = -100
    return ids, labels


def tokens() -> nn.Module:
    return seeded(TokenModel).double()


def count(ids: Tensor, labels: Tensor) -> Tensor:
    return (labels != -100).sum()


COUNTS = [(8, 2, 0, 5), (0, 0, 3, 1), (1, 8, 8, 8), (8, 1, 1, 0), (0, 4, 0, 0), (5, 5, 5, 5)]
WEIGHTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "function": lambda ids, labels: count,
    "mask": lambda ids, labels: labels != -100,
    "per_sample": lambda ids, labels: (labels != -100).sum(dim=1),
    "sequence": lambda ids, labels: (labels != -100).sum(dim=1).tolist(),
}


Steps = tuple[nn.Module, Recorder]


@pytest.fixture(scope="module")
def token_steps() -> Steps:
    """One model for all of them: its weights do not move, and what it is asked does not change."""
    return optimised(tokens(), 4)


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("counts", COUNTS)
def test_a_mean_over_tokens_is_weighted_by_tokens(
    counts: tuple[int, ...], kind: str, token_steps: Steps
) -> None:
    ids, labels = labelled(counts)
    loss, want = full_batch(tokens(), lambda m: m(ids, labels))
    model, optimizer = token_steps
    for _ in range(2):
        found = model.step(ids, labels, weight=WEIGHTS[kind](ids, labels))
        assert found.item() == pytest.approx(loss, rel=1e-12)
        assert_close(optimizer.seen.pop(), want, 1e-12)


@pytest.mark.parametrize("counts", COUNTS)
def test_micro_steps_are_weighted_by_what_they_turn_out_to_hold(
    counts: tuple[int, ...], token_steps: Steps
) -> None:
    ids, labels = labelled(counts)
    _, want = full_batch(tokens(), lambda m: m(ids, labels))
    model, optimizer = token_steps
    for _ in range(2):
        for row in range(4):
            assert not optimizer.seen
            assert model.autockpt.open_micro_steps == row
            own = int((labels[row] != -100).sum())
            loss = model.micro_step(ids[row : row + 1], labels[row : row + 1], weight=own)
            assert loss.isfinite()
        assert_close(optimizer.seen.pop(), want, 1e-12)
    assert model.flush() is None
    assert not optimizer.seen


@pytest.mark.parametrize("counts", [(8, 2, 5), (1, 8, 0), (0, 3, 8), (2,)])
def test_a_leftover_window_has_its_own_weights(counts: tuple[int, ...], token_steps: Steps) -> None:
    ids, labels = labelled(counts)
    loss, want = full_batch(tokens(), lambda m: m(ids, labels))
    model, optimizer = token_steps
    for row in range(len(counts)):
        model.micro_step(ids[row : row + 1], labels[row : row + 1], weight=count)
    assert not optimizer.seen
    with torch.no_grad():  # there is nothing to differentiate any more
        found = model.flush()
    assert found.item() == pytest.approx(loss, rel=1e-12)
    assert_close(optimizer.seen.pop(), want, 1e-12)
    assert model.flush() is None
    assert not optimizer.seen


@pytest.mark.parametrize("weight", [torch.ones(12), torch.ones(12, 3), 5, [7.0], None])
def test_a_window_of_one_micro_batch_is_any_weights(weight: Any) -> None:
    x, y = batch()
    loss, want = full_batch(mlp(), lambda m: MEAN(m(x), y))
    model, optimizer = optimised(mlp(), 1, loss_fn=MEAN)
    assert model.step(x, target=y, weight=weight).item() == pytest.approx(loss, rel=1e-12)
    assert_close(optimizer.seen.pop(), want, 1e-12)


def test_an_infinite_loss_is_the_mean() -> None:
    x, y = batch()
    y[:4] = float("inf")
    model, _ = optimised(mlp(), 3, loss_fn=MEAN)
    assert model.step(x, target=y).item() == float("inf")


def test_uneven_loader_batches_count_by_their_samples() -> None:
    x, y = batch(12)
    _, want = full_batch(mlp(), lambda m: MEAN(m(x), y))
    model, optimizer = optimised(mlp(), 3, loss_fn=MEAN)
    for _ in range(2):
        for rows in (slice(0, 2), slice(2, 9), slice(9, 12)):
            model.micro_step(x[rows], target=y[rows])
        assert_close(optimizer.seen.pop(), want, 1e-12)


def test_a_window_that_counts_for_nothing_changes_nothing(token_steps: Steps) -> None:
    ids, labels = labelled((0, 0, 0, 0))
    model, optimizer = token_steps
    assert model.step(ids, labels, weight=count).item() == 0
    for row in range(4):
        model.micro_step(ids[row : row + 1], labels[row : row + 1], weight=count)
    assert not optimizer.seen
    assert model.autockpt.open_micro_steps == 0
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("accumulate", [2, 3])
def test_a_language_model_of_transformers(accumulate: int) -> None:
    model, _, _ = HF_EXAMPLES["gpt2"]("test")
    ids = torch.randint(
        model.config.vocab_size, (6, 16), generator=torch.Generator().manual_seed(1)
    )
    labels = ids.clone()
    for row in range(6):
        labels[row, 3 + 2 * row :] = -100

    def shifted(input_ids: Tensor, labels: Tensor) -> Tensor:
        return (labels[:, 1:] != -100).sum()

    model.eval()  # no dropout: the full batch draws other masks
    model.double()
    loss, want = full_batch(model, lambda m: m(input_ids=ids, labels=labels).loss)
    model, optimizer = optimised(model, accumulate)
    found = model.step(input_ids=ids, labels=labels, weight=shifted)
    assert found.item() == pytest.approx(loss, rel=1e-6)  # transformers' loss is single precision
    assert_close(optimizer.seen.pop(), want, 1e-6)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (-1.0, "finite numbers"),
        (float("nan"), "finite numbers"),
        ("many", "finite numbers"),
        (torch.ones(5), None),
    ],
)
def test_a_weight_that_is_none_is_refused(weight: Any, message: str | None) -> None:
    x, y = batch()
    model, optimizer = optimised(mlp(), 2, loss_fn=MEAN)
    if message is not None:
        with pytest.raises(InputError, match=message):
            model.micro_step(x, target=y, weight=weight)
    else:
        with pytest.raises(InputError, match="one weight per sample"):
            model.step(x, target=y, weight=weight)
    with pytest.raises(InputError, match=r"single count|finite"):
        model.step(x, target=y, weight=3 if message is None else weight)
    assert model.autockpt.open_micro_steps == 0
    assert not optimizer.seen


# ------------------------------------------------------------------ half precision


def test_nothing_overflows_where_a_plain_loop_does_not() -> None:
    """Gradients near the largest half-precision number, in batches of growing weight."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, dtype=torch.float16))

        def forward(self, x: Tensor) -> Tensor:
            return (self.weight * x).sum()

    model, optimizer = optimised(Scale(), 4)
    x = torch.full((4,), 40_000.0, dtype=torch.float16)
    for weights in ((1, 100, 10_000, 3), (10_000, 1, 1, 1), (0, 1, 1000, 1000)):
        for weight in weights:
            model.micro_step(x, weight=weight)
        gradient = optimizer.seen.pop()["weight"]
        assert torch.allclose(gradient, x, rtol=5e-3)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_autocast_is_a_plain_loops(accumulate: int) -> None:
    x, y = batch(12, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss, want = full_batch(mlp(torch.float32), lambda m: MEAN(m(x).float(), y))
    model, optimizer = optimised(
        mlp(torch.float32), accumulate, loss_fn=lambda o, t: MEAN(o.float(), t)
    )
    before = [p.clone() for p in model.parameters()]
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            found = model.step(x, target=y)
        assert found.item() == pytest.approx(loss, rel=1e-3)
        assert_close(optimizer.seen.pop(), want, 2e-2)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_casts_of_old_weights_are_not_used_again() -> None:
    """Autocast remembers them up to its context's end, which may span several steps."""
    x, y = batch(8, dtype=torch.float32)
    losses = []
    for inside in (False, True):
        model = mlp(torch.float32)
        optimizer = SGD(model.parameters(), lr=0.5)
        autockpt.optimize(
            model, None, optimizer=optimizer, accumulate=2, loss_fn=lambda o, t: MEAN(o.float(), t)
        )
        outer = torch.autocast("cpu", torch.bfloat16) if inside else contextlib.nullcontext()
        found = []
        with outer:
            for _ in range(4):
                with torch.autocast("cpu", torch.bfloat16):
                    found.append(model.step(x, target=y).item())
        losses.append(found)
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 4


# ------------------------------------------------------------------ scaler and clipping


class ScalerLog(torch.amp.GradScaler):
    """Counts its updates."""

    updates = 0

    def update(self, new_scale: Any = None) -> None:
        self.updates += 1
        super().update(new_scale)


@pytest.fixture(scope="module")
def single_steps() -> Steps:
    return optimised(tokens().float(), 4)


@pytest.mark.parametrize("micro", [False, True])
@pytest.mark.parametrize("max_grad_norm", [None, 0.01])
def test_a_scaler_and_clipping_see_the_whole_windows_gradient(
    micro: bool, max_grad_norm: float | None, single_steps: Steps
) -> None:
    ids, labels = labelled((8, 1, 3, 6))
    plain = tokens().float()
    plain(ids, labels).backward()
    if max_grad_norm is not None:
        nn.utils.clip_grad_norm_(plain.parameters(), max_grad_norm)
    want = gradients(plain)
    model, optimizer = single_steps
    scaler = ScalerLog("cpu", init_scale=1024.0, growth_interval=1000)
    for _ in range(2):
        options: dict[str, Any] = {"scaler": scaler, "max_grad_norm": max_grad_norm}
        if micro:
            for row in range(4):
                rows = slice(row, row + 1)
                model.micro_step(ids[rows], labels[rows], weight=count, **options)
        else:
            model.step(ids, labels, weight=count, **options)
        assert_close(optimizer.seen.pop(), want, 1e-5)
    assert scaler.updates == 2


def test_a_step_with_infinite_gradients_is_skipped_and_the_scale_falls_once() -> None:
    x, y = batch(8, dtype=torch.float32)
    model = mlp(torch.float32)
    optimizer = SGD(model.parameters(), lr=0.1)
    autockpt.optimize(model, None, optimizer=optimizer, accumulate=4, loss_fn=MEAN)
    scaler = ScalerLog("cpu", init_scale=2.0**127, growth_interval=1000)
    before = [p.clone() for p in model.parameters()]
    loss = model.step(1e3 * x, target=y, scaler=scaler, max_grad_norm=1.0)
    assert loss.isfinite()
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert scaler.updates == 1
    assert scaler.get_scale() == 2.0**126
    assert all(p.grad is None for p in model.parameters())
    scaler.update(1024.0)
    model.step(x, target=y, scaler=scaler)
    assert all(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


# ------------------------------------------------------------------ losses


@dataclass
class Output:
    loss: Tensor
    logits: Tensor


@pytest.mark.parametrize("kind", ["scalar", "one_number", "attribute", "mapping", "loss_fn"])
def test_a_loss_may_come_in_any_of_these_ways(kind: str) -> None:
    class Model(MLP):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            logits = super().forward(x)
            loss = MEAN(logits, y)
            return {
                "scalar": loss,
                "one_number": loss.reshape(1, 1),
                "attribute": Output(loss, logits),
                "mapping": {"logits": logits, "loss": loss},
                "loss_fn": (loss, logits),
            }[kind]

    x, y = batch()
    _, want = full_batch(mlp(), lambda m: MEAN(m(x), y))
    own = (lambda output: output[0]) if kind == "loss_fn" else None
    model, optimizer = optimised(seeded(lambda: Model(dim=8, layers=2)).double(), 3, loss_fn=own)
    for _ in range(2):
        model.step(x, y)
        assert_close(optimizer.seen.pop(), want, 1e-12)


@pytest.mark.parametrize("named", [True, False])
def test_without_a_loss_fn_the_target_is_an_argument_of_the_model(named: bool) -> None:
    class Named(MLP):
        def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
            return MEAN(super().forward(x), target)

    class Others(MLP):
        def forward(self, x: Tensor, **others: Tensor) -> Tensor:
            return MEAN(super().forward(x), others["target"])

    kind = Named if named else Others
    x, y = batch()
    _, want = full_batch(mlp(), lambda m: MEAN(m(x), y))
    model, optimizer = optimised(seeded(lambda: kind(dim=8, layers=2)).double(), 3)
    model.step(x, target=y)
    assert_close(optimizer.seen.pop(), want, 1e-12)
    model, _ = optimised(mlp(), 3)
    with pytest.raises(InputError, match="does not take it"):
        model.step(x, target=y)


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (None, "shape"),
        (lambda output: output.detach().mean(), "does not depend"),
        (lambda output: (output, 3), "the loss alone"),
        (lambda output: output.mean().item(), "the loss alone"),
        (lambda output: output.argmax(), "floating-point"),
    ],
)
def test_what_is_no_loss_is_refused(loss_fn: Any, message: str) -> None:
    x, _ = batch()
    model, optimizer = optimised(mlp(), 2, loss_fn=loss_fn)
    with pytest.raises(InputError, match=message):
        model.step(x)
    assert not optimizer.seen
    assert all(p.grad is None for p in model.parameters())


# ------------------------------------------------------------------ failures


def test_an_exception_in_a_step_leaves_nothing_of_it() -> None:
    x, y = batch()
    _, want = full_batch(mlp(), lambda m: MEAN(m(x), y))
    calls = 0

    def failing(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ZeroDivisionError
        return MEAN(output, target)

    model, optimizer = optimised(mlp(), 4, loss_fn=failing)
    with pytest.raises(ZeroDivisionError):
        model.step(x, target=y)
    assert all(p.grad is None for p in model.parameters())
    assert model.autockpt.open_micro_steps == 0
    assert not optimizer.seen
    model.step(x, target=y)
    assert_close(optimizer.seen.pop(), want, 1e-12)


@pytest.mark.parametrize("reset", [False, True])
def test_after_an_exception_in_a_forward_a_window_goes_on_or_is_dropped(reset: bool) -> None:
    x, y = batch(12)
    rows = slice(6, 12) if reset else slice(0, 12)
    _, want = full_batch(mlp(), lambda m: MEAN(m(x[rows]), y[rows]))
    model, optimizer = optimised(mlp(), 4, loss_fn=MEAN)
    for start in (0, 3):
        model.micro_step(x[start : start + 3], target=y[start : start + 3])
    for _ in range(2):
        with pytest.raises((RuntimeError, autockpt.AutockptError)):
            model.micro_step(x[:3, :5], target=y[:3])
        assert model.autockpt.open_micro_steps == 2
    if reset:
        model.autockpt.reset()
        assert all(p.grad is None for p in model.parameters())
    for start in (6, 9):
        model.micro_step(x[start : start + 3], target=y[start : start + 3])
    if reset:
        model.flush()
    assert_close(optimizer.seen.pop(), want, 1e-12)


@pytest.mark.parametrize("where", ["backward", "optimizer"])
def test_a_window_that_failed_midway_must_be_reset(where: str) -> None:
    x, y = batch(12)
    _, want = full_batch(mlp(), lambda m: MEAN(m(x), y))
    model, optimizer = optimised(mlp(), 3, loss_fn=MEAN)

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    model.micro_step(x[:4], target=y[:4])
    if where == "backward":
        hook = model.layers[0].weight.register_hook(fail)
    else:
        model.micro_step(x[4:8], target=y[4:8])
        hook = optimizer.register_step_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        model.micro_step(x[8:], target=y[8:])
    hook.remove()
    for again in (model.flush, lambda: model.micro_step(x[:4], target=y[:4])):
        with pytest.raises(StepError, match="reset"):
            again()
    optimizer.seen.clear()
    model.autockpt.reset()
    model.step(x, target=y)
    assert_close(optimizer.seen.pop(), want, 1e-12)


def test_what_cannot_be_stepped_says_so_and_changes_nothing() -> None:
    x, y = batch()
    model = mlp()
    autockpt.optimize(model, None, loss_fn=MEAN)
    with pytest.raises(StepError, match="no optimizer"):
        model.step(x, target=y)
    autockpt.optimize(model, None, loss_fn=MEAN, optimizer=LBFGS(model.parameters()))
    with pytest.raises(StepError, match="closure"):
        model.step(x, target=y)
    model, _ = optimised(mlp(), 2, loss_fn=MEAN)
    with pytest.raises(StepError, match="closure"):
        model.step(x, target=y, closure=lambda: None)
    with torch.no_grad(), pytest.raises(StepError, match="no_grad"):
        model.step(x, target=y)
    model.micro_step(x, target=y)
    with pytest.raises(StepError, match="flush"):
        model.step(x, target=y)
    with pytest.raises(StepError, match="max_grad_norm"):
        model.micro_step(x, target=y, max_grad_norm=1.0)
    assert model.autockpt.open_micro_steps == 1
    model.autockpt.reset()
    for wrong in ({"max_grad_norm": 0.0}, {"max_grad_norm": "1"}, {"scaler": 2}, {"through": 3}):
        with pytest.raises(InputError, match=f"{next(iter(wrong))}="):
            model.step(x, target=y, **wrong)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("accumulate", [0, -1, 1.5, True, "many"])
def test_a_number_of_micro_batches_is_a_whole_one(accumulate: Any) -> None:
    with pytest.raises(InputError, match="accumulate"):
        autockpt.optimize(mlp(), None, accumulate=accumulate)


# ------------------------------------------------------------------ gradients of others


def test_gradients_from_before_are_added_to_the_windows() -> None:
    x, y = batch()
    _, want = full_batch(mlp(), lambda m: MEAN(m(x), y) + 2 * m.layers[0].weight.square().sum())
    model, optimizer = optimised(mlp(), 3, loss_fn=MEAN)
    for rows in (slice(0, 1), slice(1, 9), slice(9, 12)):
        if rows.start == 0:
            (2 * model.layers[0].weight.square().sum()).backward()
        model.micro_step(x[rows], target=y[rows])
    assert_close(optimizer.seen.pop(), want, 1e-12)


def test_a_loss_with_parameters_of_its_own_is_trained_with_it() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return MEAN(self.scale * output, target)

    x, y = batch()
    criterion, model = Scaled(), mlp()
    criterion(model(x), y).backward()
    want = criterion.scale.grad
    criterion, model = Scaled(), mlp()
    optimizer = SGD([*model.parameters(), *criterion.parameters()], lr=1.0)
    autockpt.optimize(model, None, optimizer=optimizer, loss_fn=criterion, accumulate=5)
    for rows in (slice(0, 1), slice(1, 9), slice(9, 12)):
        model.micro_step(x[rows], target=y[rows])
    model.flush()
    assert criterion.scale.item() == pytest.approx(2.0 - want.item(), rel=1e-12)


@pytest.mark.parametrize("kind", ["tensor", "accumulated"])
def test_gradient_hooks_are_called_for_each_micro_batch(kind: str) -> None:
    x, y = batch()
    _, want = full_batch(mlp(), lambda m: MEAN(m(x), y))
    model, optimizer = optimised(mlp(), 3, loss_fn=MEAN)
    calls = []
    weight = model.layers[1].weight
    if kind == "tensor":
        hook = weight.register_hook(lambda gradient: calls.append(gradient.clone()))
    else:
        hook = weight.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad.clone()))
    model.step(x, target=y)
    assert len(calls) == 3
    whole = sum(calls) if kind == "tensor" else calls[-1]
    assert torch.allclose(whole, want["layers.1.weight"], rtol=1e-12, atol=1e-15)
    assert_close(optimizer.seen.pop(), want, 1e-12)
    hook.remove()
    model.step(x, target=y)
    assert_close(optimizer.seen.pop(), want, 1e-12)
    assert len(calls) == 3


def test_frozen_and_unused_parameters_have_no_gradient() -> None:
    x, y = batch()
    model = mlp()
    model.spare = nn.Linear(2, 2).double()
    model.layers[1].requires_grad_(False)
    model, optimizer = optimised(model, 3, loss_fn=MEAN)
    for _ in range(2):
        model.step(x, target=y)
        seen = optimizer.seen.pop()
        assert {n for n, g in seen.items() if g is None} == {
            "layers.1.weight",
            "layers.1.bias",
            "spare.weight",
            "spare.bias",
        }


# ------------------------------------------------------------------ the loop it stands for


def micro_batch_loop(
    model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, sizes: list[int]
) -> float:
    total = 0.0
    for part, target in zip(x.split(sizes), y.split(sizes), strict=True):
        loss = model(part, target) * (len(part) / len(x))
        total += loss.item()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return total


@pytest.mark.parametrize("accumulate", [1, 3])
def test_batch_norm_is_that_of_a_plain_micro_batch_loop(accumulate: int) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(8, 3, 8, 8, generator=generator)
    y = torch.randint(4, (8,), generator=generator)
    sizes = {1: [8], 3: [3, 3, 2]}[accumulate]

    class Convolutional(nn.Sequential):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return functional.cross_entropy(super().forward(x).mean(dim=(2, 3)), y)

    def layers() -> nn.Module:
        convolutions = (nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))
        norms = (nn.BatchNorm2d(4), nn.BatchNorm2d(4, momentum=0.3))
        return Convolutional(convolutions[0], norms[0], nn.ReLU(), convolutions[1], norms[1])

    def built() -> tuple[nn.Module, Optimizer]:
        model = seeded(layers)
        return model, SGD(model.parameters(), lr=0.1)

    plain, optimizer = built()
    losses = [micro_batch_loop(plain, optimizer, x, y, sizes) for _ in range(4)]
    model, optimizer = built()
    autockpt.optimize(model, None, optimizer=optimizer, accumulate=accumulate)
    found = [model.step(x, y).item() for _ in range(4)]
    assert found == pytest.approx(losses, rel=1e-6)
    state = plain.state_dict()
    assert any("running_mean" in name for name in state)
    for name, value in model.state_dict().items():
        # Statistics and counts are a plain loop's; convolutions may sum in another order.
        assert torch.allclose(value, state[name], rtol=1e-5, atol=1e-6), name
    counts = [v for n, v in state.items() if n.endswith("num_batches_tracked")]
    assert counts
    assert all(int(v) == 4 * accumulate for v in counts)


def test_random_draws_are_a_plain_loops() -> None:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(32, (6, 13), generator=generator)
    x, y = ids[:, :-1], ids[:, 1:]

    def built() -> tuple[nn.Module, Optimizer]:
        model = seeded(lambda: GPT(layers=1, dim=16, heads=2, vocab=32, seq=12, dropout=0.2))
        return model, SGD(model.parameters(), lr=0.1)

    plain, optimizer = built()
    torch.manual_seed(1)
    losses = [micro_batch_loop(plain, optimizer, x, y, [2, 2, 2]) for _ in range(3)]
    end = torch.get_rng_state()
    model, optimizer = built()
    autockpt.optimize(model, None, optimizer=optimizer, accumulate=3)
    torch.manual_seed(1)
    assert [model.step(x, y).item() for _ in range(3)] == pytest.approx(losses, rel=1e-6)
    assert torch.equal(torch.get_rng_state(), end)


# ------------------------------------------------------------------ on the model


def test_the_steps_are_short_cuts_that_hide_nothing() -> None:
    class Own(MLP):
        def step(self) -> str:
            return "own"

    model = seeded(lambda: Own(dim=8, layers=1)).double()
    optimizer = SGD(model.parameters(), lr=0.1)
    autockpt.optimize(model, None, optimizer=optimizer, loss_fn=MEAN, accumulate=2)
    assert model.step() == "own"
    x, y = batch()
    assert model.autockpt.step(x, target=y).isfinite()
    assert model.micro_step.__self__ is model.autockpt
    model.micro_step(x, target=y)
    autockpt.restore(model)
    assert model.step() == "own"
    assert not hasattr(model, "flush")
    # What half a window has added is of no use to anyone.
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_steps_by_itself(copied: Callable[[nn.Module], nn.Module]) -> None:
    x, y = batch()
    model, optimizer = optimised(mlp(), 3, loss_fn=MEAN)
    model.step(x, target=y)
    other = copied(model)
    assert other.step.__self__ is other.autockpt is not model.autockpt
    with pytest.raises(StepError, match="of its own"):
        other.step(x, target=y)
    other, own = optimised(other, 3, loss_fn=MEAN)
    other.step(x, target=y)
    assert_close(own.seen.pop(), optimizer.seen.pop(), 1e-12)
    assert not optimizer.seen
