"""Pins: which module paths a pattern means, and that they bind the plan."""

from __future__ import annotations

import pytest
import torch

import autockpt
from autockpt import InfeasibleBudget, PinError, Plan
from autockpt.pins import Pins
from oracle import assert_same, run_step
from tiny_models import formulated, mlp

# ------------------------------------------------------------------ patterns


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("head", "head", True),
        ("head", "head.norm", True),
        ("head", "heads", False),
        ("head", "blocks.0.head", False),
        ("blocks.*.attn", "blocks.3.attn", True),
        ("blocks.*.attn", "blocks.3.attn.out", True),
        ("blocks.*.attn", "blocks.3", False),
        ("blocks.*.attn", "blocks.3.mlp", False),
        ("blocks.*", "blocks.a.b.c", True),
        ("*.attn", "blocks.3.attn", False),
        ("blocks.[01]", "blocks.1.mlp", True),
        ("blocks.[01]", "blocks.2.mlp", False),
        ("blocks.1?", "blocks.12", True),
        ("Blocks", "blocks", False),
        ("*", "", False),
    ],
)
def test_a_pattern_means_a_module_and_what_is_inside(
    pattern: str, path: str, matches: bool
) -> None:
    assert bool(Pins(keep=(pattern,)).kept(path)) is matches
    assert bool(Pins(recompute=(pattern,)).recomputed(path)) is matches


def test_a_match_says_by_which_pattern_and_around_which_module() -> None:
    pins = Pins(keep=("x", "blocks.*.attn"), recompute=("blocks.*",))
    assert pins.kept("blocks.3.attn.out") == "blocks.*.attn"
    assert pins.recomputed("blocks.3.attn.out") == "blocks.3"


def test_no_pins_are_false() -> None:
    assert not Pins()
    assert Pins(keep=("a",))
    assert Pins(recompute=("a",))


def test_a_pattern_that_matches_nothing_is_an_error_that_names_the_modules() -> None:
    with pytest.raises(PinError, match=r"recompute='block\.\*' matches no module.*blocks\.0"):
        Pins(recompute=("block.*",)).check(["", "blocks.0", "head"])


def test_patterns_that_contradict_are_an_error() -> None:
    pins = Pins(keep=("blocks.*",), recompute=("blocks.1",))
    with pytest.raises(PinError, match=r"both match 'blocks\.1\.mlp'"):
        pins.check(["blocks.0.mlp", "blocks.1.mlp"])
    Pins(keep=("blocks.0",), recompute=("blocks.1",)).check(["blocks.0.mlp", "blocks.1.mlp"])


# ------------------------------------------------------------------ in a plan


def tightest(**pins: list[str]) -> Plan:
    """The plan of the smallest budget there is under these pins."""
    model, x = mlp(dim=32, layers=6)
    with pytest.raises(InfeasibleBudget) as error:
        autockpt.plan(model, x, budget=1, **pins)
    return autockpt.plan(model, x, budget=error.value.minimum_bytes, time_limit=1, **pins)


def recomputed(plan: Plan) -> set[str]:
    """The modules in which something runs again."""
    counts: dict[int, int] = {}
    for index in (*plan.schedule.forward_computes, *plan.schedule.backward_computes):
        counts[index] = counts.get(index, 0) + 1
    return {plan.problem.operations[i].module_path for i, n in counts.items() if n > 1}


def test_what_is_pinned_to_be_kept_runs_once() -> None:
    free, pinned = tightest(), tightest(keep=["layers.*"])
    assert any(path.startswith("layers.") for path in recomputed(free))
    assert not any(path.startswith("layers.") for path in recomputed(pinned))
    assert pinned.peak_bytes > free.peak_bytes


def test_what_is_pinned_to_be_recomputed_runs_again_without_need() -> None:
    model, x = mlp(dim=32, layers=6)
    autockpt.optimize(model, budget=None)
    expected = run_step(model, (x,))
    assert recomputed(model.plan) == set()
    # The results of layers are read outside of them, by the activations: nothing is inside.
    # A pin on all of them makes the model one module; the root itself has no path.
    wrapped = torch.nn.Sequential(model)
    autockpt.restore(model)
    autockpt.optimize(wrapped, budget=None, recompute=["0"])
    result = run_step(wrapped, (x,))
    assert recomputed(wrapped.plan) >= {"0"}
    assert wrapped.plan.extra_time_s > 0
    assert torch.equal(result.loss, expected.loss)
    for mine, theirs in zip(result.gradients.values(), expected.gradients.values(), strict=True):
        assert mine is not None
        assert theirs is not None
        assert torch.equal(mine, theirs)


def test_nothing_inside_a_pinned_module_waits_for_the_backward() -> None:
    model, x = mlp(dim=32, layers=6)
    formulation = formulated(torch.nn.Sequential(model), x, pins=Pins(recompute=("0",)))
    problem = formulation.problem
    inside = [
        storage
        for index in problem.forward
        for storage in problem.operations[index].outputs
        if storage not in problem.live_at_barrier and problem.operations[index].recomputable
    ]
    assert inside
    assert not any(problem.storages[s].keepable for s in inside)


def test_pins_that_make_a_budget_infeasible_are_named() -> None:
    model, x = mlp(dim=32, layers=6)
    budget = tightest().peak_bytes
    with pytest.raises(InfeasibleBudget, match=r"keep='layers\.\*'") as error:
        autockpt.plan(model, x, budget=budget, keep=["layers.*"])
    assert error.value.minimum_bytes > budget
    minimum = error.value.minimum_bytes
    plan = autockpt.plan(model, x, budget=minimum, time_limit=1, keep=["layers.*"])
    assert plan.peak_bytes <= minimum


def test_a_pin_that_matches_nothing_stops_the_planning() -> None:
    model, x = mlp()
    with pytest.raises(PinError, match=r"keep='blocks' matches no module"):
        autockpt.plan(model, x, budget=None, keep=["blocks"])


def test_pins_do_not_change_the_result() -> None:
    plain, x = mlp(dim=32, layers=6)
    autockpt.optimize(plain, budget=None)
    pinned, _ = mlp(dim=32, layers=6)
    budget = tightest(keep=["layers.2"]).peak_bytes
    autockpt.optimize(pinned, budget, time_limit=1, keep=["layers.2"])
    assert_same(run_step(pinned, (x,)), run_step(plain, (x,)))
    assert "layers.2" not in recomputed(pinned.plan)
    assert recomputed(pinned.plan)
