"""In place: what is overwritten is nobody's any more, and each rule of the proof is needed.

``python tests/test_inplace.py --graphs 2000`` tries to break the proof on as many random graphs as
it is told to, and reports the first that fails, made as small as it gets.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.ops import aten

import autockpt
import hf_models
import models
from autockpt import _torch, inplace
from autockpt.capture import capture, read_joint
from autockpt.formulate import Around, Formulation, formulate
from autockpt.inplace import FORMS
from autockpt.profile import Profile, unmeasured
from autockpt.replay import state_bytes
from autockpt.rewrite import rewrite
from autockpt_solvers.decisions import decide
from autockpt_solvers.memory import simulate
from autockpt_solvers.on_demand import Demand, on_demand, stage_schedule
from autockpt_solvers.schedule import Compute, Schedule, free_early
from benchmarks.measure import step_function
from oracle import assert_same, run_step, whole_step_peak
from tiny_models import mlp, seeded

CI_GRAPHS = 12

# ------------------------------------------------------------------ the operators

# What an operator takes beside tensors, by position; tensors stand as "x".
_ARGUMENTS: dict[Any, tuple[Any, ...]] = {
    aten.add.Scalar: ("x", 0.5),
    aten.sub.Scalar: ("x", 0.5),
    aten.mul.Scalar: ("x", 0.5),
    aten.div.Scalar: ("x", 0.7),
    aten.pow.Tensor_Scalar: ("x", 3),
    aten.addcmul.default: ("x", "x", "x"),
    aten.addcdiv.default: ("x", "x", "x"),
    aten.where.self: ("mask", "x", "x"),
    aten.masked_fill.Scalar: ("x", "mask", -1.0),
    aten.clamp.default: ("x", 0.2, 0.8),
    aten.clamp_min.default: ("x", 0.4),
    aten.clamp_max.default: ("x", 0.6),
    aten._softmax.default: ("x", -1, False),
    aten._log_softmax.default: ("x", 2, False),
    aten._softmax_backward_data.default: ("x", "x", -1, "dtype"),
    aten._log_softmax_backward_data.default: ("x", "x", 2, "dtype"),
    aten.threshold_backward.default: ("x", "x", 0.4),
    aten.leaky_relu_backward.default: ("x", "x", 0.1, False),
    aten.hardtanh_backward.default: ("x", "x", 0.2, 0.8),
    aten.softplus_backward.default: ("x", "x", 1.0, 20.0),
    aten.elu_backward.default: ("x", 1.0, 1.0, 1.0, False, "x"),
    aten.slice_scatter.default: ("x", "row", 1, 1, 2),
    aten.select_scatter.default: ("x", "plane", 1, 2),
    aten.index_put.default: ("x", ["index"], "first", True),
    aten.index_add.default: ("x", 1, "index", "row"),
}
_BINARY = {
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.mul.Tensor,
    aten.div.Tensor,
    aten.maximum.default,
    aten.minimum.default,
    aten.gelu_backward.default,
    aten.silu_backward.default,
    aten.tanh_backward.default,
    aten.sigmoid_backward.default,
}


def arguments(target: Any, dtype: torch.dtype, turned: bool) -> list[Any]:
    generator = torch.Generator().manual_seed(3)

    def tensor() -> Tensor:
        value = torch.rand(5, 3, 37, generator=generator, dtype=torch.float32).sub(0.3).to(dtype)
        if target in (aten.log.default, aten.sqrt.default, aten.rsqrt.default, aten.log1p.default):
            value = value.abs() + 0.1
        return value.transpose(0, 1).contiguous().transpose(0, 1) if turned else value

    given = _ARGUMENTS.get(target, ("x", "x") if target in _BINARY else ("x",))
    stand_ins: dict[str, Callable[[], Any]] = {
        "mask": lambda: tensor() > 0.2,
        "dtype": lambda: dtype,
        "x": tensor,
        "row": lambda: tensor()[:, :1] * 2,
        "plane": lambda: tensor()[:, 0] * 2,
        "first": lambda: tensor()[:1] * 2,
        "index": lambda: torch.tensor([1]),
    }

    def made(item: Any) -> Any:
        if isinstance(item, list):
            return [made(i) for i in item]
        return stand_ins[item]() if isinstance(item, str) else item

    return [made(item) for item in given]


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("target", FORMS, ids=str)
def test_an_operator_gives_the_same_bits_over_its_argument(
    target: Any, dtype: torch.dtype, turned: bool
) -> None:
    form = FORMS[target]
    for position in form.over:
        expected = target(*arguments(target, dtype, turned))
        args = arguments(target, dtype, turned)
        memory, pointer = args[position], args[position].data_ptr()
        kwargs = {form.keyword: memory} if form.keyword else {}
        assert form.keyword or position == 0
        if form.last_dim is not None and turned:
            # Its rows lie in pieces, which the kernel does not see: it is not written over.
            assert torch.equal(form.target(*args, **kwargs), expected)
            continue
        results: list[Tensor] = []
        events = _torch.allocation_events(
            lambda args=args, kwargs=kwargs, out=results: out.append(form.target(*args, **kwargs))
        )
        assert max(events, default=0) <= 8, "it allocates"  # a number as a tensor
        assert results[0].data_ptr() == pointer
        assert torch.equal(
            results[0].contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)
        )


@pytest.mark.parametrize("target", [f for f in FORMS if len(FORMS[f].over) > 1], ids=str)
def test_an_operator_may_read_its_memory_twice(target: Any) -> None:
    """``x * x`` over ``x``: both arguments are the very tensor that is overwritten."""
    form = FORMS[target]
    args = arguments(target, torch.float32, turned=False)
    for position in form.over:
        args[position] = args[form.over[0]]
    expected = target(*args)
    kwargs = {form.keyword: args[form.over[0]]} if form.keyword else {}
    assert torch.equal(form.target(*args, **kwargs), expected)


# ------------------------------------------------------------------ random graphs

SIZE = 8
Line = tuple[int, int, int, int]


class Tangle(nn.Module):
    """Views, expands, picks from tuples, shared weights, and inputs and inner values returned.

    ``forward(x, u)``: two (8, 8) inputs -> a tuple of tensors.
    """

    def __init__(self, lines: tuple[Line, ...], shown: frozenset[int], inputs: bool) -> None:
        super().__init__()
        self.lines, self.shown, self.inputs = lines, shown, inputs
        self.weights = nn.ParameterList(torch.randn(SIZE, SIZE) / SIZE for _ in range(2))
        self.norm = nn.LayerNorm(SIZE)
        self.register_buffer("mean", torch.zeros(SIZE, SIZE))

    def forward(self, x: Tensor, u: Tensor) -> tuple[Tensor, ...]:
        values = [u + 1, x @ self.weights[0]]
        for kind, back, other, n in self.lines:
            a = values[-1 - back % len(values)]
            b = values[-1 - other % len(values)]
            values.append(self.line(kind, a, b, x, u, n))
        result = [
            (values[-1] * self.weights[1]).sum(0),
            *(v for i, v in enumerate(values) if i in self.shown),
        ]
        return (*result, x, u.t()) if self.inputs else tuple(result)

    def line(self, kind: int, a: Tensor, b: Tensor, x: Tensor, u: Tensor, n: int) -> Tensor:
        weight = self.weights[n % 2]
        choices: tuple[Callable[[], Tensor], ...] = (
            lambda: (a.relu(), functional.gelu(a), a.tanh(), a.sigmoid(), functional.silu(a))[
                n % 5
            ],
            lambda: (a.neg(), a.abs() + 0.5, (-a.abs()).exp(), a.sin(), a.clamp(-1, 1))[n % 5],
            lambda: (a + b, a * b, a - b, torch.maximum(a, b), torch.where(a > 0, a, b))[n % 5],
            lambda: (a + a.t(), a * a, a.t() + b, a.flip(0) + a, a - a.roll(1, 0))[n % 5],
            lambda: (a[:, :1].expand(SIZE, SIZE) + b, a[:1] * b, a[n % SIZE] + a)[n % 3],
            lambda: (a.softmax(-1), a.log_softmax(-1), a.softmax(0), self.norm(a))[n % 4],
            lambda: (a @ weight, a @ weight.t(), a + weight, weight * a.t())[n % 4],
            lambda: (a * u, u + a.detach(), x.t() * a, (x * 2).relu(), u.exp())[n % 5],
            lambda: torch.cat(a.chunk(2, -1)[::-1], -1) * (b if n % 2 else 2),
            lambda: (a.max(-1, True).values + a, a.sort(-1).values, torch.stack(a.unbind()))[n % 3],
            lambda: a.reshape(SIZE * SIZE).view(1, -1).relu().view(SIZE, SIZE),
            lambda: (a.reshape(4, 2, SIZE).transpose(0, 1) * 2).reshape(SIZE, SIZE),
            lambda: (a * 1).add_(b) if n % 2 else (a + 0.5).relu_(),
            lambda: functional.dropout(a, 0.3),
            lambda: self.counted(a),
        )
        return choices[kind % len(choices)]()

    def counted(self, a: Tensor) -> Tensor:
        old = a - self.mean
        with torch.no_grad():
            self.mean.mul_(0.5).add_(a.detach())
        return old + a


def tangles() -> st.SearchStrategy[Tangle]:
    line = st.tuples(*[st.integers(0, 14)], *[st.integers(0, 3)] * 2, st.integers(0, 9))
    return st.builds(
        Tangle,
        st.lists(line, min_size=3, max_size=14).map(tuple),
        st.frozensets(st.integers(0, 12), max_size=2),
        st.booleans(),
    )


def formulated(model: nn.Module, *args: Tensor) -> Formulation:
    """The step of a model that starts its backward from all outputs, written in place."""
    found = capture(model, args, {}, lambda joint: read_joint(joint, frozenset()))
    return formulate(
        found,
        unmeasured(found),
        Around(),
        state_bytes=state_bytes(torch.device("cpu")),
        inplace=True,
    )


def chosen(formulation: Formulation, seed: int) -> list[int]:
    """A backward order that keeps and holds a random part."""
    pick = random.Random(seed)
    problem = formulation.problem
    kept = {s for s in range(len(problem.storages)) if pick.random() < pick.choice((0.1, 0.5, 1))}
    held = kept | {s for s in range(len(problem.storages)) if pick.random() < 0.5}
    return on_demand(Demand(problem), kept, held)


def out_of_place(formulation: Formulation, schedule: Schedule) -> tuple[Formulation, Schedule]:
    """The same runs with memory of their own."""
    problem = formulation.problem
    operations = tuple(replace(op, over=()) for op in problem.operations)
    problem = replace(problem, operations=operations)
    same = free_early(problem, schedule.forward_computes, schedule.backward_computes)
    return replace(formulation, problem=problem), same


def outcome(formulation: Formulation, schedule: Schedule) -> list[Tensor]:
    """Everything that can be seen of a step, with its backward run twice."""
    forward, backward = (_torch.boxed(m) for m in rewrite(formulation, schedule))
    joint = formulation.capture.joint
    generator = torch.Generator().manual_seed(5)

    def real(node: Any) -> Tensor:
        fake = node.meta["val"]
        value = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype)
        return value.copy_(torch.rand(fake.shape, generator=generator) * 2 - 1)

    torch.manual_seed(7)
    with torch.no_grad():
        primals = [real(node) for node in joint.primals]
        results = forward([*primals])
        outputs, saved = (
            results[: len(joint.forward_outputs)],
            results[len(joint.forward_outputs) :],
        )
        del results
        first = [v.clone() for v in (*outputs, *saved) if isinstance(v, Tensor)]
        tangents = [real(node) for node in joint.tangents]
        gradients = backward([*saved, *tangents])
        # The loss may be differentiated twice: what was saved and what came in is as it was.
        again = backward([*saved, *tangents])
    views = torch.tensor([isinstance(v, Tensor) and v._is_view() for v in outputs])
    seen = [views, *outputs, *saved, *first, *gradients, *again, *primals, *tangents]
    return [*(v for v in seen if isinstance(v, Tensor)), torch.rand(2)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(one, other, strict=True)
    )


def check(model: Tangle, seed: int) -> int:
    """A random schedule of a graph, in place and not; return how many runs are in place."""
    formulation = formulated(model, torch.ones(SIZE, SIZE), torch.ones(SIZE, SIZE))
    schedule = stage_schedule(formulation.problem, chosen(formulation, seed))
    plain = out_of_place(formulation, schedule)
    lowered = simulate(formulation.problem, schedule).peak_bytes
    assert lowered <= simulate(plain[0].problem, plain[1]).peak_bytes
    mine, theirs = outcome(formulation, schedule), outcome(*plain)
    assert same(mine, theirs)
    return sum(isinstance(s, Compute) and s.over is not None for s in schedule.steps)


def fuzz(graphs: int) -> int:
    """Check so many random graphs; return how many runs in place they had."""
    overwritten = 0

    @settings(
        max_examples=graphs,
        deadline=None,
        database=None,
        derandomize=graphs == CI_GRAPHS,
        suppress_health_check=list(HealthCheck),
    )
    @given(tangles(), st.integers(0, 99))
    def run(model: Tangle, seed: int) -> None:
        nonlocal overwritten
        overwritten += check(model, seed)

    run()
    return overwritten


def test_a_softmax_is_not_written_over_a_transpose() -> None:
    """A random graph that was wrong: its kernel fills a transposed memory row by row."""
    check(Tangle(((5, 0, 0, 1), (0, 0, 0, 0), (3, 1, 0, 2)), frozenset(), False), 0)


def test_an_output_is_no_view_by_way_of_another_overwrite() -> None:
    """Written over what was written over a view it would be one itself."""
    model = Breaker(lambda h, u, w: (h.view(SIZE * SIZE).relu().neg(),))
    formulation = formulated(model, torch.ones(SIZE, SIZE), torch.ones(SIZE, SIZE))
    nothing: frozenset[int] = frozenset()
    order = on_demand(Demand(formulation.problem), nothing, nothing)
    schedule = stage_schedule(formulation.problem, order)
    assert same(outcome(formulation, schedule), outcome(*out_of_place(formulation, schedule)))


def test_no_random_graph_breaks_the_proof() -> None:
    assert fuzz(CI_GRAPHS) > CI_GRAPHS


# ------------------------------------------------------------------ the clauses

REMEMBERED: list[tuple[Tensor, Tensor]] = []


@torch.library.custom_op("test_inplace::remembered", mutates_args=())
def remembered(x: Tensor) -> Tensor:
    """A user's operator that keeps what it returns."""
    result = x * 3
    REMEMBERED.append((result, result.clone()))
    return result


@remembered.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Breaker(nn.Module):
    """A model for one clause: ``forward(x, u)`` -> a tuple of tensors."""

    def __init__(self, line: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(SIZE))
        self.line = line

    def forward(self, x: Tensor, u: Tensor) -> tuple[Tensor, ...]:
        h = x @ self.weight
        return tuple(v.clone() if v is h else v for v in self.line(h, u, self.weight))


# For each clause what a model does that goes wrong without it.
BREAKERS: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]] = {
    "of the step": lambda h, u, w: ((w + h) @ w,),
    "made by torch": lambda h, u, w: ((remembered(u) + 1) @ w + h,),
    "unseen": lambda h, u, w: ((y := h + 1), y.relu() @ w),
    "not saved": lambda h, u, w: (functional.gelu(h) @ w,),
    "same layout": lambda h, u, w: (((h.detach() > 0).int() + h) @ w,),
    "whole memory": lambda h, u, w: ((h[:4].relu() @ w),),
    "read in one way": lambda h, u, w: ((h + h.t()) @ w,),
    "no view shown": lambda h, u, w: (h.view(SIZE * SIZE).relu(),),
}


def judge(clause: str) -> None:
    """Run the model of a clause in place and not; raise where it is refused or goes wrong."""
    REMEMBERED.clear()
    model = Breaker(BREAKERS[clause])
    formulation = formulated(model, torch.ones(SIZE, SIZE), torch.ones(SIZE, SIZE))
    problem = formulation.problem
    kept = frozenset(range(len(problem.storages)))
    schedule = stage_schedule(problem, on_demand(Demand(problem), kept))
    mine, theirs = outcome(formulation, schedule), outcome(*out_of_place(formulation, schedule))
    assert same(mine, theirs)
    assert all(torch.equal(value, copy) for value, copy in REMEMBERED)


@pytest.mark.parametrize("clause", inplace.CLAUSES)
def test_each_clause_is_needed(clause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    judge(clause)
    monkeypatch.delitem(inplace.CLAUSES, clause)
    with pytest.raises((ValueError, RuntimeError, AssertionError)):
        judge(clause)


def test_memory_that_an_operator_shares_against_its_word_is_left_alone() -> None:
    model, x = mlp()
    found = capture(model, (x,), {}, lambda joint: read_joint(joint, frozenset()))
    honest = unmeasured(found)

    def overwritten(profile: Profile) -> int:
        problem = formulate(found, profile, Around(), inplace=True).problem
        return sum(bool(op.over) for op in problem.operations)

    assert overwritten(honest) > 0
    for flag in ({"shares": True}, {"alone": False}):
        sharing = replace(honest, measured=tuple(replace(m, **flag) for m in honest.measured))
        assert overwritten(sharing) == 0


# ------------------------------------------------------------------ training in place


def gpt() -> nn.Module:
    return models.GPT(layers=2, dim=32, heads=4, vocab=512, seq=64)


def resnet() -> nn.Module:
    return models.ResNet(width=8, depths=(2, 1), classes=10)


def unet() -> nn.Module:
    return models.UNet(width=8, levels=2)


def vit() -> nn.Module:
    return hf_models.vit_example("tiny")[0]


def inputs_of(model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    generator = torch.Generator().manual_seed(2)
    if isinstance(model, models.GPT):
        ids = torch.randint(512, (4, 65), generator=generator)
        return (ids[:, :-1].contiguous(), ids[:, 1:].contiguous()), {}
    if not isinstance(model, models.ResNet | models.UNet):
        return hf_models.vit_example("tiny")[1:]
    images = torch.randn(4, 3, 32, 32, generator=generator)
    targets = torch.arange(4) if isinstance(model, models.ResNet) else images.flip(0)
    return (images, targets), {}


@pytest.mark.parametrize(("build", "lowers"), [(gpt, 0.05), (vit, 0.0), (resnet, 0.0), (unet, 0.0)])
def test_a_step_in_place_is_the_same_step_in_less_memory(
    build: Callable[[], nn.Module], lowers: float
) -> None:
    found = {}
    for allowed in (True, False):
        model = seeded(build)
        args, kwargs = inputs_of(model)
        autockpt.optimize(model, None, example_inputs=args, example_kwargs=kwargs, inplace=allowed)
        result = run_step(model, args, kwargs)
        peak = whole_step_peak(model, step_function(model, args, kwargs), (args, kwargs))
        assert abs(model.plan.peak_bytes - peak) <= 0.01 * peak
        found[allowed] = peak, result, model.plan
    assert_same(found[True][1], found[False][1])
    runs = [s for s in found[True][2].schedule.steps if isinstance(s, Compute)]
    assert any(step.over is not None for step in runs)
    assert found[True][0] <= (1 - lowers) * found[False][0]
    assert not any(d.in_place for d in found[False][2].decisions)


def test_the_plan_and_the_code_say_why() -> None:
    model, x = mlp(dropout=0.0)
    formulation = formulated(model, x)
    problem = formulation.problem
    kept = frozenset(range(len(problem.storages)))
    schedule = stage_schedule(problem, on_demand(Demand(problem), kept))
    reasons = {d.name: d.in_place for d in decide(problem, schedule)}
    assert reasons["gelu"] == "kept out of place: addmm is saved for gelu's backward"
    code = "".join(module.code for module in rewrite(formulation, schedule))
    overwritten = [s for s in schedule.steps if isinstance(s, Compute) and s.over is not None]
    assert overwritten
    for step in overwritten:
        reason = reasons[problem.storages[problem.operations[step.operation].outputs[0]].name]
        assert f"# in place {reason}" in code
        assert "the last to read it" in reason


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", type=int, default=2000, help="how many to run")
    asked = parser.parse_args()
    began = time.perf_counter()
    total = fuzz(asked.graphs)
    print(
        f"{asked.graphs} graphs with {total} runs in place in {time.perf_counter() - began:.0f} s, "
        "none wrong"
    )
