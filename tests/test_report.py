"""Reports: the golden text, and figures that add up to the plan's."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from autockpt.per_module import per_module
from autockpt.picture import draw_timeline
from autockpt.report import report_dict, report_text
from autockpt_solvers.errors import AutockptError
from autockpt_solvers.plan import Plan
from small_plans import MIB, many_blocks, small_plan

# -------------------------------------------------------------------- text


def test_report_of_the_small_plan(golden: Callable[[str, str], None]) -> None:
    golden("report.txt", report_text(small_plan()))


def test_report_of_many_blocks(golden: Callable[[str, str], None]) -> None:
    golden("report_blocks.txt", report_text(many_blocks(40, 20), tensors=3))


def test_the_report_has_no_trailing_blanks_and_ends_in_one_newline() -> None:
    text = report_text(small_plan())
    assert all(line == line.rstrip() for line in text.splitlines())
    assert text.endswith("\n")
    assert not text.endswith("\n\n")


def test_the_lists_have_the_asked_length() -> None:
    text = report_text(small_plan(), tensors=2)
    peak = text[text.index("At the peak of") :].splitlines()
    assert [line.split()[2] for line in peak[1:3]] == ["dropout", "grad_dropout"]
    assert peak[3].split()[-2:] == ["(4", "more)"]
    assert "and 5 more of" in text
    everything = report_text(small_plan(), tensors=20)
    assert "more)" not in everything
    assert "more of" not in everything


def test_the_gap_is_rounded_up() -> None:
    plan = small_plan()  # 0.03501 % of 35 ms
    almost = replace(plan, lower_bound_s=plan.extra_time_s - 0.0003501 * plan.baseline_time_s)
    assert "saves more than 0.04 % of a step" in report_text(almost)
    exact = replace(plan, lower_bound_s=plan.extra_time_s)
    assert "no schedule of this step within the budget is faster" in report_text(exact)


def test_a_plan_without_a_budget_or_minimum_says_so() -> None:
    text = report_text(replace(small_plan(), budget_bytes=None, minimum_bytes=None))
    assert re.search(r"^  budget +none$", text, re.MULTILINE)
    assert "of the budget" not in text
    assert "minimum" not in text


# -------------------------------------------------------------------- per module


@pytest.mark.parametrize(
    "plan", [small_plan(), many_blocks(3, 2), many_blocks(40, 7), many_blocks(2, 0)]
)
@pytest.mark.parametrize("max_rows", [1, 2, 3, 24])
def test_the_columns_add_up_to_the_plan(plan: Plan, max_rows: int) -> None:
    rows = per_module(plan, max_rows)
    assert 1 <= len(rows) <= max_rows
    for action, column in (
        ("kept", [r.kept_bytes for r in rows]),
        ("recomputed", [r.recomputed_bytes for r in rows]),
        ("freed", [r.freed_bytes for r in rows]),
    ):
        assert sum(column) == sum(d.size_bytes for d in plan.decisions if d.action == action)
    assert sum(r.extra_ns for r in rows) == plan.trace.extra_ns


def test_modules_are_as_deep_as_the_rows_allow() -> None:
    plan = many_blocks(4, 2)
    assert [r.module for r in per_module(plan, 24)] == [
        f"blocks.{block}.{part}" for block in range(4) for part in ("attn", "mlp")
    ]
    assert [r.module for r in per_module(plan, 7)] == ["blocks.0-1", "blocks.2-3"]
    assert [r.module for r in per_module(plan, 1)] == ["blocks"]


def test_what_does_not_fit_is_one_row() -> None:
    rows = per_module(small_plan(), 3)
    assert [r.module for r in rows] == ["(model)", "embed", "(2 more)"]


# -------------------------------------------------------------------- data


def test_the_data_is_json_and_has_the_figures() -> None:
    plan = small_plan()
    data = json.loads(json.dumps(report_dict(plan)))
    for name in ("peak_bytes", "baseline_peak_bytes", "overhead", "gap", "budget_bytes"):
        assert data[name] == getattr(plan, name)
    assert [d["name"] for d in data["decisions"]] == [d.name for d in plan.decisions]
    peak = data["peak"]
    total = sum(t["size_bytes"] for t in peak["tensors"])
    assert total + peak["workspace_bytes"] + data["resident_bytes"] == data["peak_bytes"]


# -------------------------------------------------------------------- picture


def _colours(path: Path) -> set[tuple[int, ...]]:
    image = pytest.importorskip("matplotlib.image")
    pixels = (image.imread(path)[..., :3] * 255).round().astype(int)
    return {tuple(map(int, pixel)) for row in pixels for pixel in row}


_BLUE, _GREY, _RED, _GREEN, _ORANGE = (
    (0x1F, 0x5F, 0xA8),
    (0x8A, 0x8F, 0x98),
    (0xB3, 0x20, 0x2C),
    (0x2F, 0x7D, 0x4F),
    (0xE8, 0x92, 0x3A),
)


def test_the_picture_shows_plan_baseline_budget_and_measurement(tmp_path: Path) -> None:
    path = tmp_path / "timeline.png"
    plan = small_plan()
    draw_timeline(plan, path, measured=plan.peak_bytes)
    assert {_BLUE, _GREY, _RED, _GREEN, _ORANGE} <= _colours(path)
    draw_timeline(replace(plan, budget_bytes=None), path)
    assert not {_RED, _GREEN} & _colours(path)


def test_a_far_budget_does_not_flatten_the_curves(tmp_path: Path) -> None:
    near, far = tmp_path / "near.svg", tmp_path / "far.svg"
    draw_timeline(replace(small_plan(), budget_bytes=130 * MIB), near)
    draw_timeline(replace(small_plan(), budget_bytes=130_000 * MIB), far)

    def curve(path: Path) -> str:  # the path of the plan's line: its style is unique
        text = path.read_text()
        end = text.index("stroke: #1f5fa8; stroke-width: 1.8")
        return text[text.rindex('d="', 0, end) : end].split('"')[1]

    heights = [
        [float(point.split()[2]) for point in curve(path).splitlines() if len(point.split()) == 3]
        for path in (near, far)
    ]
    spread = [max(h) - min(h) for h in heights]
    assert spread[1] > 0.8 * spread[0]


def test_a_plan_without_costs_can_be_drawn(tmp_path: Path) -> None:
    plan = small_plan()
    problem = plan.problem
    free = replace(problem, operations=tuple(replace(o, cost_ns=0) for o in problem.operations))
    draw_timeline(replace(plan, problem=free), tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").stat().st_size > 0


def test_an_unknown_picture_format_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(AutockptError, match=r"cannot draw .*timeline\.xyz"):
        draw_timeline(small_plan(), tmp_path / "timeline.xyz")


def test_without_matplotlib_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(AutockptError, match=r"pip install 'autockpt\[plot\]'"):
        draw_timeline(small_plan(), tmp_path / "timeline.png")
