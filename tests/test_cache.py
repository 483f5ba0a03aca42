"""The cache: found again by the next run, never trusted, never in the way."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import autockpt
from autockpt import cache, profile
from autockpt.cli import main
from autockpt.solved_before import Question, recall, remember
from autockpt_solvers import Outcome, Problem, minimum, solve
from random_problems import random_problem
from tiny_models import mlp

KEY = "0" * 32


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOCKPT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# -------------------------------------------------------------------- files


def test_the_environment_says_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOCKPT_CACHE", "0")
    assert cache.folder() is None
    monkeypatch.delenv("AUTOCKPT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache.folder() == Path("/somewhere/autockpt")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache.folder() == Path("/home/me/.cache/autockpt")


def test_a_cache_that_is_off_or_not_to_be_written_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    for word in ("0", str(tmp_path / "file")):
        monkeypatch.setenv("AUTOCKPT_CACHE", word)
        cache.write("costs", KEY, [1], {})
        assert cache.read("costs", KEY) is None
        assert (cache.entries(), cache.clear()) == ([], 0)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace("1234", "1235"),
        lambda text: text.replace("cache-1", "cache-0"),
        lambda text: "[]",
        lambda text: "\xff",
    ],
)
def test_a_damaged_entry_is_ignored(folder: Path, damage: Callable[[str], str]) -> None:
    cache.write("costs", KEY, {"a": 1234}, {"name": "x"})
    assert cache.read("costs", KEY) == {"a": 1234}
    (path,) = folder.iterdir()
    path.write_text(damage(path.read_text()), encoding="latin-1")
    assert cache.read("costs", KEY) is None


def test_what_was_not_used_for_longest_goes_and_foreign_files_stay(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir()
    (folder / "notes.json").write_text("x" * 1000)
    names = [str(number) * 32 for number in range(4)]
    for age, name in enumerate(names):
        cache.write("schedule", name, "x" * 100, {})
        os.utime(folder / f"schedule-{name}.json", (age, age))
    cache.read("schedule", names[0])
    monkeypatch.setattr(
        cache, "LIMIT_BYTES", 3 * (folder / f"schedule-{names[0]}.json").stat().st_size
    )
    cache.write("schedule", "f" * 32, "x" * 100, {})
    left = {entry.path.name[9:10] for entry in cache.entries()}
    assert left == {"f", "0", "3"}
    assert cache.clear() == 3
    assert [path.name for path in folder.iterdir()] == ["notes.json"]


# -------------------------------------------------------------------- schedules


def asked(problem: Problem, budget: int, **options: object) -> Question:
    words: dict = {"method": "auto", "time_limit_s": 5.0, "release": "1", **options}
    return Question(problem, budget, **words)


def test_a_schedule_is_found_again_for_the_same_question_only(folder: Path) -> None:
    problem = random_problem(3)
    budget = minimum(problem).peak_bytes
    solution = solve(problem, budget)
    remember(asked(problem, budget), solution)
    found = recall(asked(replace(problem, name="another name"), budget))
    assert found is not None
    assert replace(found, solve_time_s=solution.solve_time_s) == solution
    dearer = replace(problem.operations[0], cost_ns=problem.operations[0].cost_ns + 1)
    other = replace(problem, operations=(dearer, *problem.operations[1:]))
    assert recall(asked(other, budget)) is None
    assert recall(asked(problem, budget + 1)) is None
    assert recall(asked(problem, budget, method="ilp")) is None
    assert recall(asked(problem, budget, time_limit_s=9.0)) is None
    assert recall(asked(problem, budget, release="2")) is None


def test_a_schedule_that_breaks_the_budget_or_a_rule_is_refused(folder: Path) -> None:
    problem = random_problem(3)
    budget = minimum(problem).peak_bytes
    question = asked(problem, budget)
    remember(question, solve(problem, budget))
    data = cache.read("schedule", question.key)
    assert recall(question) is not None
    roomy = solve(problem, None)
    assert roomy.peak_bytes > budget  # else the next line breaks nothing
    for schedule in (
        roomy.schedule.to_list(),
        data["schedule"][1:],
        [["c", -1], *data["schedule"]],
        [["c", 99], *data["schedule"]],
        "nonsense",
    ):
        cache.write("schedule", question.key, {**data, "schedule": schedule}, {})
        assert recall(question) is None
    cache.write("schedule", question.key, {**data, "lower_bound_ns": 10**12}, {})
    assert recall(question) is None


def test_a_search_that_was_broken_off_is_not_kept(folder: Path) -> None:
    problem = random_problem(3)
    budget = minimum(problem).peak_bytes
    solution = replace(solve(problem, budget), outcome=Outcome.INTERRUPTED)
    remember(asked(problem, budget), solution)
    assert not folder.exists()


# -------------------------------------------------------------------- the whole way


def test_the_next_run_measures_and_solves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profile, "_known", {})  # a new process
    model, x = mlp()
    smallest = minimum(autockpt.plan(model, (x,), None).problem).peak_bytes
    first = autockpt.plan(model, (x,), smallest)

    def never(*args: object, **options: object) -> None:
        raise AssertionError("the answer is in the cache")

    monkeypatch.setattr(profile, "_known", {})
    monkeypatch.setattr(profile, "_measure", never)
    monkeypatch.setattr("autockpt.planning.solve", never)
    second = autockpt.plan(model, (x,), smallest)
    assert second.origin["plan"] == "cached"
    assert (second.problem, second.schedule) == (first.problem, first.schedule)
    assert second.lower_bound_s == first.lower_bound_s

    assert main(["cache", "list"]) == 0
    listed = capsys.readouterr().out
    assert listed.startswith("2 entries")
    assert "Classifier: " in listed
    assert main(["cache", "clear"]) == 0
    assert capsys.readouterr().out == f"deleted 2 files in {folder}\n"
    assert list(folder.iterdir()) == []


def test_figures_that_are_no_figures_are_measured_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = mlp()
    monkeypatch.setattr(profile, "_known", {})
    autockpt.plan(model, (x,), None)
    (path,) = folder.iterdir()
    stored = json.loads(path.read_text())["data"]
    key = path.stem.partition("-")[2]
    cache.write("costs", key, {name: [-1, "x", None, True] for name in stored}, {})
    monkeypatch.setattr(profile, "_known", {})
    again = autockpt.plan(model, (x,), None)
    assert all(op.cost_ns >= 0 for op in again.problem.operations)
    assert cache.read("costs", key).keys() == stored.keys()
