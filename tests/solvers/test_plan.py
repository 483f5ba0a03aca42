"""Plans: figures that certify themselves, decisions with reasons, and a file that cannot lie."""

from __future__ import annotations

import copy
import json
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autockpt_solvers.errors import InfeasibleBudget, PlanFormatError
from autockpt_solvers.memory import simulate
from autockpt_solvers.plan import Plan
from autockpt_solvers.schedule import BARRIER, Compute, Free, free_early
from autockpt_solvers.solve import solve
from random_problems import random_problem
from small_plans import MIB, many_blocks, plan_of, recomputing, small_plan, small_problem

# -------------------------------------------------------------------- figures


def test_figures_of_the_small_plan() -> None:
    plan = small_plan()
    assert plan.extra_time_s == pytest.approx(0.006)
    assert plan.baseline_time_s == pytest.approx(0.035)
    assert plan.step_time_s == pytest.approx(0.041)
    assert plan.overhead == pytest.approx(6 / 35)
    assert plan.gap == pytest.approx(2 / 35)
    # While dropout_backward runs: three of 32 MiB, embed, one weight's gradient, the loss.
    assert plan.peak_bytes == 10 * MIB + 3 * 32 * MIB + 8 * MIB + MIB + 512
    # While max_backward runs: embed, dropout, pinned, indices, its own output, the loss.
    assert plan.baseline_peak_bytes == 10 * MIB + 8 * MIB + 32 * MIB + 2 * 8 * MIB + 64 * MIB + 512
    assert plan.peak_operation == "dropout_backward"


def test_gap_is_never_negative() -> None:
    plan = replace(small_plan(), lower_bound_s=0.006_000_001)
    assert plan.gap == 0.0


def test_a_step_without_cost_has_no_overhead() -> None:
    problem = small_problem()
    free = replace(problem, operations=tuple(replace(o, cost_ns=0) for o in problem.operations))
    plan = plan_of(free, recomputing(free))
    assert plan.overhead == 0.0
    assert plan.gap == 0.0


def test_the_baseline_keeps_what_is_pinned_to_be_recomputed() -> None:
    problem = small_problem()
    storages = tuple(replace(s, keepable=s.name != "dropout") for s in problem.storages)
    pinned = replace(problem, storages=storages)
    plan = plan_of(pinned, recomputing(pinned))
    assert plan.baseline_peak_bytes == small_plan().baseline_peak_bytes
    reason = {d.name: d.reason for d in plan.decisions}["dropout"]
    assert reason.endswith("pinned by recompute=")


def _solved(seed: int, share: float) -> Plan:
    """Return a plan of a random problem, its budget between the smallest and the baseline."""
    problem = random_problem(seed)
    unplanned = plan_of(problem, free_early(problem, problem.required, problem.backward))
    low = problem.resident_bytes
    budget = low + int(share * (unplanned.baseline_peak_bytes - low))
    try:
        solution = solve(problem, budget, time_limit_s=5.0)
    except InfeasibleBudget as error:
        budget = error.minimum_bytes
        solution = solve(problem, budget, time_limit_s=5.0)
    return replace(plan_of(problem, solution.schedule), budget_bytes=budget)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 10**6), share=st.floats(0.2, 1.0))
def test_certificates_hold_on_random_problems(seed: int, share: float) -> None:
    plan = _solved(seed, share)
    problem, trace = plan.problem, simulate(plan.problem, plan.schedule)
    # What lives at the peak adds up to it.
    alive = plan.at_peak()
    total = sum(t.size_bytes for t in alive) + plan.peak_workspace_bytes + problem.resident_bytes
    assert total == plan.peak_bytes == trace.peak_bytes
    assert [t.size_bytes for t in alive] == sorted((t.size_bytes for t in alive), reverse=True)
    # The timeline has the peak, every run, and ends with the step.
    timeline = plan.timeline
    assert max(p.live_bytes for p in timeline) == plan.peak_bytes
    assert len(timeline) == 1 + sum(plan.schedule.runs.values())
    assert [p.time_s for p in timeline] == sorted(p.time_s for p in timeline)
    assert timeline[-1].time_s == plan.step_time_s
    assert max(p.live_bytes for p in plan.baseline_timeline) == plan.baseline_peak_bytes
    assert all(p.phase != "recompute" for p in plan.baseline_timeline)
    # Decisions agree with the schedule: nothing is recomputed by an operation that runs once.
    at_barrier = _resident_at_barrier(plan)
    names = [s.name for s in problem.storages]
    for decision in plan.decisions:
        storage = names.index(decision.name)
        runs = plan.schedule.runs[problem.producer[storage]]
        assert (decision.action == "recomputed") == (decision.times > 0)
        assert decision.times < runs or runs == 0
        assert (storage in at_barrier) >= (decision.action == "kept")
        assert decision.reason
    assert len({d.name for d in plan.decisions}) == len(plan.decisions)
    # The file gives the same plan back.
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def _resident_at_barrier(plan: Plan) -> set[int]:
    resident: set[int] = set()
    for step in plan.schedule.steps:
        if step == BARRIER:
            break
        if isinstance(step, Compute):
            resident.update(plan.problem.operations[step.operation].outputs)
        elif isinstance(step, Free):
            resident.discard(step.storage)
    return resident


# -------------------------------------------------------------------- decisions


def test_decisions_say_what_and_why() -> None:
    decisions = {d.name: d for d in small_plan().decisions}
    actions = {name: (d.action, d.times) for name, d in decisions.items()}
    assert actions == {
        "rng_state": ("kept", 0),
        "embed": ("kept", 0),
        "linear": ("recomputed", 1),
        "dropout": ("recomputed", 1),
        "pinned": ("kept", 0),
        "values": ("freed", 0),
        "indices": ("kept", 0),
        "loss": ("kept", 0),
    }
    assert {name: d.reason for name, d in decisions.items()} == {
        "rng_state": "lets 1 operation run again with equal results",
        "embed": "needed by 1 backward and 1 recomputed operation; "
        "recomputing costs 1.00 ms for 8.0 MiB",
        "linear": "needed by 1 recomputed operation; recomputing costs 4.00 ms for 32.0 MiB",
        "dropout": "needed by 2 backward operations; recomputing costs 1.00 ms for 32.0 MiB",
        "pinned": "needed by 1 backward operation; pinned by keep='blocks.1.*'",
        "values": "nothing needs it once the forward is over",
        "indices": "needed by 1 backward operation; fixed: it counts its calls",
        "loss": "the forward returns it",
    }
    assert decisions["linear"].module_path == "blocks.0.mlp"
    assert decisions["linear"].source == "model.py:21"


def test_an_optional_operation_left_out_has_no_decision() -> None:
    problem = small_problem()
    plan = plan_of(problem, free_early(problem, problem.required, problem.backward))
    assert {d.name for d in plan.decisions} == {d.name for d in small_plan().decisions} - {
        "rng_state"
    }
    assert {d.action for d in plan.decisions} == {"kept", "freed"}
    assert plan.timeline == plan.baseline_timeline


def test_several_recomputations_are_counted() -> None:
    problem = small_problem()
    # max_backward, again for pinned_backward, and again for dropout_backward.
    backward = [7, 2, 3, 8, 2, 3, 9, 10, 11]
    plan = plan_of(problem, free_early(problem, range(7), backward))
    times = {d.name: d.times for d in plan.decisions}
    assert times["linear"] == 2
    assert times["dropout"] == 2
    assert plan.extra_time_s == pytest.approx(0.011)


# -------------------------------------------------------------------- file


def test_a_saved_plan_comes_back(tmp_path: Path) -> None:
    plan = small_plan()
    path = tmp_path / "plan.json"
    plan.save(path)
    again = Plan.load(str(path))
    assert again == plan
    assert again.decisions == plan.decisions
    assert again.timeline == plan.timeline


def test_the_file_is_one_line_per_part(tmp_path: Path) -> None:
    plan = many_blocks(20, 10)
    path = tmp_path / "plan.json"
    plan.save(path)
    data = json.loads(path.read_text())
    assert data["format"] == "autockpt-plan"
    assert data["version"] == 1
    assert data["figures"]["peak_bytes"] == plan.peak_bytes
    parts = len(plan.problem.storages) + len(plan.problem.operations)
    assert parts < len(path.read_text().splitlines()) < 1.5 * parts


def test_a_plan_is_readable_without_torch(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    small_plan().save(path)
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from autockpt_solvers.plan import Plan\n"
        "print(Plan.load(sys.argv[1]).peak_bytes)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    assert int(out.stdout) == small_plan().peak_bytes


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        small_plan().save(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_saving_keeps_links_and_the_usual_mode(tmp_path: Path) -> None:
    plain, target, link = (tmp_path / name for name in ("plain", "target.json", "link.json"))
    plain.write_text("")
    target.write_text("old")
    link.symlink_to(target)
    small_plan().save(link)
    assert link.is_symlink()
    assert Plan.load(target) == small_plan()
    assert stat.S_IMODE(target.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "not a plan"),
        (b"null", "not a plan"),
        (b"{}", "not a plan"),
        (b'{"format": "other", "version": 1}', "not a plan"),
        (b'{"format": "autockpt-plan"}', "version None"),
        (b'{"format": "autockpt-plan", "version": 2}', "reads version 1"),
        (b'{"format": "autockpt-plan", "version": true}', "reads version 1"),
        (b'{"format": "autockpt-plan", "version": 1}', "damaged"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: bytes, match: str) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(text)
    with pytest.raises(PlanFormatError, match=match) as raised:
        Plan.load(path)
    assert str(path) in str(raised.value)


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Plan.load(tmp_path / "none.json")


def _edit(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def edit(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = value

    return edit


def _swap_steps(data: dict[str, Any]) -> None:
    steps = data["schedule"]
    steps[1], steps[2] = steps[2], steps[1]


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (lambda d: d.pop("problem"), "KeyError"),
        (lambda d: d.pop("solver"), "KeyError"),
        (lambda d: d.pop("figures"), "KeyError"),
        (_edit("figures", value=[]), "figures must be an object"),
        (_edit("figures", "peak_bytes", value=1), "peak_bytes = 1"),
        (_edit("figures", "fingerprint", value="0" * 16), "fingerprint"),
        (_edit("budget_bytes", value=MIB), "over its budget"),
        (_edit("budget_bytes", value="40GB"), "whole number"),
        (_edit("budget_bytes", value=True), "whole number"),
        (_edit("lower_bound_s", value=float("nan")), "time in seconds"),
        (_edit("lower_bound_s", value=-1.0), "time in seconds"),
        (_edit("solver", value=None), "must be text"),
        (_edit("stages_s", "solve", value="1"), "must be a number"),
        (_edit("schedule", value=[]), "not valid|damaged"),
        (_edit("schedule", 0, value=["x", 1]), "no step"),
        (_edit("schedule", 0, value=["c", -1]), "whole number"),
        (_edit("schedule", 0, value=["c", 99]), "99 of 12"),
        (_edit("schedule", 0, value=["f", 99]), "99 of 15"),
        (_swap_steps, "schedule is not valid"),
        (lambda d: d["schedule"].append(["b"]), "second barrier"),
        (_edit("problem", "storages", 1, "size_bytes", value=8), "states peak_bytes"),
        (_edit("problem", "storages", 1, "size_bytes", value=-8), "whole number"),
        (_edit("problem", "storages", 1, "size_bytes", value=8.5), "whole number"),
        (_edit("problem", "storages", 1, "extra", value=1), "damaged"),
        (_edit("problem", "operations", 1, "cost_ns", value=7), "states baseline_ns"),
        (_edit("problem", "operations", 1, "outputs", value=[-1]), "whole number"),
        (_edit("problem", "operations", 1, "inputs", value=[14]), "before it is made"),
        (_edit("problem", "barrier", value=3), "damaged|not valid"),
    ],
)
def test_damaged_plans_are_refused(edit: Callable[[dict[str, Any]], None], match: str) -> None:
    data = json.loads(json.dumps(small_plan().to_dict()))
    edit(data)
    with pytest.raises(PlanFormatError, match=match):
        Plan.from_dict(data)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 20) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=3,
)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_whatever_is_written_over_a_part_the_plan_loads_true_or_not_at_all(
    data: st.DataObject,
) -> None:
    document = copy.deepcopy(_DOCUMENT)
    node: Any = document
    while True:
        key = data.draw(
            st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node)))
        )
        if not isinstance(node[key], dict | list) or not node[key] or data.draw(st.booleans()):
            node[key] = data.draw(_JSON)
            break
        node = node[key]
    try:
        plan = Plan.from_dict(document)
    except PlanFormatError:
        return
    assert plan.peak_bytes == simulate(plan.problem, plan.schedule).peak_bytes
    assert plan.budget_bytes is None or plan.peak_bytes <= plan.budget_bytes
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert len(plan.decisions) == len(small_plan().decisions)


_DOCUMENT = json.loads(json.dumps(small_plan().to_dict()))
