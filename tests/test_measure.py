"""Measure: the timeline of a step as it happened lies on the predicted one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import autockpt
import models
from autockpt import InputError
from autockpt_solvers.schedule import Compute
from benchmarks.measure import step_function
from oracle import whole_step_peak
from tiny_models import mlp, seeded


@pytest.fixture(scope="module")
def gpt() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A small GPT in two thirds of its memory, after two steps."""
    model = seeded(lambda: models.GPT(layers=2, dim=32, heads=4, vocab=256, seq=64, dropout=0.1))
    ids = torch.randint(256, (8, 65), generator=torch.Generator().manual_seed(2))
    args = (ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    full = autockpt.plan(model, args, None).baseline_peak_bytes
    autockpt.optimize(model, int(0.66 * full), time_limit=2)
    for _ in range(2):
        step_function(model, args)()
    return model, args


def test_every_point_of_the_timeline_is_the_predicted_one(gpt) -> None:
    model, args = gpt
    found = autockpt.measure(step_function(model, args), model)
    plan = found.plan
    assert plan is model.plan
    assert sum(plan.schedule.runs.values()) > len(plan.problem.operations)  # it recomputes
    scheduled = [
        plan.problem.operations[step.operation]
        for step in plan.schedule.steps
        if isinstance(step, Compute)
    ]
    inside = [op.name for op in scheduled if op.kind.startswith("aten.")]
    assert [point.operation for point in found.compared] == inside
    for point in found.compared:
        assert abs(point.measured_bytes - point.predicted_bytes) <= 0.01 * plan.peak_bytes, point
    assert abs(found.peak_bytes - plan.peak_bytes) <= 0.01 * plan.peak_bytes
    assert found.left_bytes == 0


def test_the_peak_is_the_oracles(gpt) -> None:
    model, args = gpt
    found = autockpt.measure(step_function(model, args), model)
    assert found.peak_bytes == whole_step_peak(model, step_function(model, args), args)
    assert found.peak_bytes == max(live for _, live, _ in found.timeline)


def test_what_is_alive_at_the_peak_is_named_and_adds_up(gpt) -> None:
    model, args = gpt
    found = autockpt.measure(step_function(model, args), model)
    resident = found.plan.problem.resident_bytes
    assert resident + sum(t.size_bytes for t in found.at_peak) == found.peak_bytes
    sizes = [t.size_bytes for t in found.at_peak]
    assert sizes == sorted(sizes, reverse=True)
    measured = {t.name for t in found.at_peak if t.size_bytes > 4096}
    predicted = {t.name for t in found.plan.at_peak() if t.size_bytes > 4096}
    assert measured == predicted
    assert any(t.module_path and t.source for t in found.at_peak)


def test_a_model_without_a_plan_is_measured_too() -> None:
    model, x = mlp(layers=3)
    found = autockpt.measure(step_function(model, (x,)))
    assert found.plan is None
    assert not found.compared
    assert found.peak_bytes == whole_step_peak(nn.Module(), step_function(model, (x,)))
    assert {t.name for t in found.at_peak} & {"aten.addmm.default", "aten.gelu.default"}


def test_both_timelines_are_exported(gpt, tmp_path: Path) -> None:
    model, args = gpt
    found = autockpt.measure(step_function(model, args), model)
    found.save_chrome_trace(tmp_path / "step.json")
    found.plan.save_chrome_trace(tmp_path / "plan.json")
    for name, processes in (("step.json", ["measured", "predicted"]), ("plan.json", ["predicted"])):
        events = json.loads((tmp_path / name).read_text())["traceEvents"]
        assert [e["args"]["name"] for e in events if e["ph"] == "M"] == processes
        for process, title in enumerate(processes):
            counters = [e for e in events if e["ph"] == "C" and e["pid"] == process]
            assert [e["ts"] for e in counters] == sorted(e["ts"] for e in counters)
            peak = found.peak_bytes if title == "measured" else found.plan.peak_bytes
            assert max(e["args"]["bytes"] for e in counters) == peak
    with pytest.raises(InputError, match="CUDA"):
        found.save_snapshot(tmp_path / "snapshot.pickle")


def test_a_step_is_not_measured_twice_at_once() -> None:
    with torch.autograd.profiler.profile(), pytest.raises(InputError, match="profiled already"):
        autockpt.measure(lambda: None)


def test_gradients_that_a_step_makes_count_once() -> None:
    """The plan of a step over micro-batches takes them to be there all the time."""
    model, x = mlp(dim=64, layers=3)
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    autockpt.optimize(model, None, optimizer=own, accumulate=4)
    for _ in range(3):
        model.step(x)
    found = autockpt.measure(lambda: model.step(x), model)
    assert found.peak_bytes == whole_step_peak(model, lambda: model.step(x), x)
    assert abs(found.peak_bytes - model.plan.peak_bytes) <= 0.01 * found.peak_bytes
