"""The command line: it parses, calls, prints, and fails with one clean message."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autockpt.cli import main
from autockpt.report import report_dict, report_text
from autockpt_solvers.errors import BudgetError, InfeasibleBudget
from autockpt_solvers.plan import Plan
from autockpt_solvers.problem import Operation, Problem, Storage
from autockpt_solvers.schedule import BARRIER, Compute, Free, Schedule
from small_plans import MIB, plan_of, small_plan

Calls = list[dict[str, Any]]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    small_plan().save(path)
    return path


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Replace the planning by a recorder, so that these tests see what the command asks for."""
    calls: Calls = []

    def plan(model: Any, example_inputs: tuple[Any, ...], budget: Any, **options: Any) -> Plan:
        calls.append({"model": model, "inputs": example_inputs, "budget": budget, **options})
        options["progress"]("profiled 3 of 7 operations")
        return small_plan()

    monkeypatch.setitem(sys.modules, "autockpt.ahead", SimpleNamespace(plan=plan))
    return calls


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Write a user's module in the current folder."""
    path = tmp_path / "user_model.py"
    path.write_text(
        "from torch import nn\n"
        "model = nn.Linear(2, 2)\n"
        "def args(): return model, (1, 2)\n"
        "def listed(): return model, [1, 2]\n"
        "def kwargs(): return model, {'x': 1}\n"
        "def both(): return model, (1,), {'x': 2}\n"
        "def flat(): return model, 1, 2\n"
        "def single(): return model, 1\n"
        "def with_mapping_input(): return model, 1, {'x': 2}\n"
        "def only_model(): return model\n"
        "def no_model(): return 1, 2\n"
        "def breaks(): raise RuntimeError('out of cheese')\n"
        "number = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    known = list(sys.path)
    yield path
    sys.path[:] = known
    sys.modules.pop("user_model", None)


# -------------------------------------------------------------------- plan


@pytest.mark.parametrize(
    ("function", "inputs", "kwargs"),
    [
        ("args", (1, 2), {}),
        ("listed", (1, 2), {}),
        ("kwargs", (), {"x": 1}),
        ("both", (1,), {"x": 2}),
        ("flat", (1, 2), {}),
        ("single", (1,), {}),
        ("with_mapping_input", (1, {"x": 2}), {}),
    ],
)
@pytest.mark.usefixtures("module")
def test_plan_takes_every_form_of_inputs(
    calls: Calls, function: str, inputs: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    assert main(["plan", f"user_model:{function}", "--budget", "2GB"]) == 0
    (call,) = calls
    assert type(call["model"]).__name__ == "Linear"
    assert call["inputs"] == inputs
    assert call["example_kwargs"] == kwargs
    assert call["budget"] == "2GB"


@pytest.mark.usefixtures("module")
def test_plan_passes_its_options_prints_and_saves(
    calls: Calls, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = {"--budget": "123", "-o": "out.json", "--solver": "ilp", "--time-limit": "5"}
    pins = (("--keep", "blocks.*.attn"), ("--keep", "head"), ("--recompute", "blocks.*.mlp"))
    command = ["plan", "user_model:args", "--device", "cpu"]
    for option, value in (*options.items(), *pins):
        command += [option, value]
    assert main(command) == 0
    (call,) = calls
    assert call["budget"] == 123
    assert call["solver"] == "ilp"
    assert call["time_limit"] == 5.0
    assert call["keep"] == ("blocks.*.attn", "head")
    assert call["recompute"] == ("blocks.*.mlp",)
    assert call["device"] == "cpu"
    captured = capsys.readouterr()
    assert captured.out == report_text(small_plan())
    assert "profiled 3 of 7 operations" in captured.err
    assert Plan.load(tmp_path / "out.json") == small_plan()


@pytest.mark.parametrize(("text", "budget"), [("none", None), ("4096", 4096), ("80%", "80%")])
@pytest.mark.usefixtures("module")
def test_plan_reads_what_a_shell_can_write_of_a_budget(
    calls: Calls, text: str, budget: object
) -> None:
    assert main(["plan", "user_model:args", "--budget", text]) == 0
    assert calls[0]["budget"] == budget


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("user_model", "is not of the form PACKAGE.MODULE:FUNCTION"),
        ("user_model:", "is not of the form PACKAGE.MODULE:FUNCTION"),
        ("models/user_model.py:args", "models/user_model.py is a file: name the module as"),
        ("./user_model.py:args", "from the current folder, user_model:args"),
        ("no_such_module:args", "cannot import no_such_module: ModuleNotFoundError"),
        ("user_model:missing", "user_model has no function missing"),
        ("user_model:number", "user_model has no function number"),
        ("user_model:breaks", "user_model:breaks failed: RuntimeError: out of cheese"),
        ("user_model:only_model", "returned Linear; expected (model, args)"),
        ("user_model:no_model", "returned tuple; expected (model, args)"),
    ],
)
@pytest.mark.usefixtures("module")
def test_plan_says_what_is_wrong_with_the_target(
    calls: Calls, capsys: pytest.CaptureFixture[str], target: str, message: str
) -> None:
    assert main(["plan", target, "--budget", "2GB"]) == 2
    assert message in capsys.readouterr().err
    assert not calls


@pytest.mark.usefixtures("module")
def test_plan_finds_out_about_a_missing_folder_before_it_works(
    calls: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "user_model:args", "--budget", "2GB", "-o", "no/where/plan.json"]) == 2
    assert "there is no folder no/where" in capsys.readouterr().err
    assert not calls


@pytest.mark.parametrize("error", [InfeasibleBudget(5, 10, [("logits", 7)]), BudgetError("what")])
@pytest.mark.usefixtures("module")
def test_typed_errors_of_planning_are_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def plan(*_: object, **__: object) -> Plan:
        raise error

    monkeypatch.setitem(sys.modules, "autockpt.ahead", SimpleNamespace(plan=plan))
    assert main(["plan", "user_model:args", "--budget", "5"]) == 2
    assert capsys.readouterr().err == f"autockpt: error: {error}\n"


@pytest.mark.usefixtures("module")
def test_an_interrupt_ends_quietly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def plan(*_: object, **__: object) -> Plan:
        raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "autockpt.ahead", SimpleNamespace(plan=plan))
    assert main(["plan", "user_model:args", "--budget", "5"]) == 130
    assert capsys.readouterr().err == "autockpt: interrupted\n"


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["plan"],
        ["plan", "a:b"],
        ["plan", "a:b", "--budget", "1", "--time-limit", "0"],
        ["plan", "a:b", "--budget", "1", "--time-limit", "nan"],
        ["plan", "a:b", "--budget", "1", "--time-limit", "abc"],
        ["inspect"],
        ["inspect", "plan.json", "--tensors", "-1"],
        ["unknown"],
    ],
)
def test_arguments_that_do_not_parse_end_with_code_2(
    capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(command)
    assert raised.value.code == 2
    assert "_" not in capsys.readouterr().err  # no name of ours in what people read


# -------------------------------------------------------------------- inspect


def test_inspect_prints_the_report(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(saved)]) == 0
    assert capsys.readouterr() == (report_text(small_plan()), "")
    assert main(["inspect", str(saved), "--tensors", "1"]) == 0
    assert capsys.readouterr().out == report_text(small_plan(), tensors=1)


def test_inspect_prints_json(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(saved), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(report_dict(small_plan())))


def test_inspect_writes_the_timeline(saved: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    assert main(["inspect", str(saved), "--trace", str(trace)]) == 0
    events = json.loads(trace.read_text())["traceEvents"]
    assert max(e["args"]["bytes"] for e in events if e["ph"] == "C") == Plan.load(saved).peak_bytes


def test_inspect_draws(saved: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "timeline.png"
    assert main(["inspect", str(saved), "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_inspect_of_no_plan_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing, other = tmp_path / "missing.json", tmp_path / "other.json"
    other.write_text("{}")
    for path in (missing, other, tmp_path):
        assert main(["inspect", str(path)]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("autockpt: error: ")
        assert str(path) in captured.err
        assert captured.err.count("\n") == 1


# -------------------------------------------------------------------- explain


def test_explain_says_why_and_what_the_other_way_costs(
    saved: Path, capsys: pytest.CaptureFixture[str], golden: Callable[[str, str], None]
) -> None:
    assert main(["explain", str(saved), "*", "--tensors", "7"]) == 0
    golden("explain.txt", capsys.readouterr().out)
    assert main(["explain", str(saved), "blocks.0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {one["decision"]["name"] for one in found} == {"linear", "dropout"}
    # With dropout's result kept nothing runs again.
    (dropout,) = [one for one in found if one["decision"]["name"] == "dropout"]
    assert dropout["switched"]["time_ns"] == -round(small_plan().extra_time_s * 1e9)


def test_explain_of_a_plan_that_writes_in_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storages = tuple(Storage(name, MIB) for name in ("a", "b", "loss", "grad", "grad_a"))
    operations = (
        Operation("a", (), (0,), 5, recompute_inputs=(), recompute_outputs=(0,), module_path="x"),
        Operation("b", (0,), (1,), 5, over=(0,), module_path="x"),
        Operation("loss", (1,), (2,), 5),
        Operation("grad", (1, 2), (3,), 5, module_path="x"),
        Operation("grad_a", (3,), (4,), 5, over=(3,), module_path="x"),
    )
    problem = Problem(
        storages, operations, 3, live_at_barrier=frozenset({2}), live_at_end=frozenset({2, 4})
    )
    steps = (Compute(0), Compute(1, 0), Compute(2), BARRIER, Compute(3), Free(1), Compute(4, 3))
    saved = tmp_path / "plan.json"
    plan_of(problem, Schedule(steps)).save(saved)
    assert main(["explain", str(saved), "x"]) == 0
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines()[::3]] == ["a", "b", "grad_a"]
    assert said.endswith("no other way: it belongs to the backward\n")


def test_explain_of_what_is_not_there(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(saved), "blocks.7"]) == 2
    assert "'blocks.7' matches no module" in capsys.readouterr().err


# -------------------------------------------------------------------- sweep


def test_sweep_of_a_saved_plan(
    saved: Path, capsys: pytest.CaptureFixture[str], golden: Callable[[str, str], None]
) -> None:
    assert main(["sweep", str(saved), "--points", "4"]) == 0
    golden("sweep.txt", capsys.readouterr().out)
    assert main(["sweep", str(saved), "--budgets", "131MiB,110MiB", "--json"]) == 0
    points = json.loads(capsys.readouterr().out)
    assert [point["budget_bytes"] for point in points] == [131 << 20, 110 << 20]
    assert all(point["peak_bytes"] <= point["budget_bytes"] for point in points)
    assert points[0]["overhead"] == 0 < points[1]["overhead"]


@pytest.mark.usefixtures("module")
def test_sweep_of_a_model_plans_without_a_budget_and_draws(calls: Calls, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "frontier.png"
    command = ["sweep", "user_model:both", "--points", "2", "--device", "a gpu"]
    assert main([*command, "--plot", str(picture)]) == 0
    (call,) = calls
    assert (call["budget"], call["inputs"], call["device"]) == (None, (1,), "a gpu")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main([*command, "--plot", str(tmp_path / "none" / "x.png")]) == 2
    assert len(calls) == 1


@pytest.mark.parametrize("wrong", [["--budgets", "2XB"], ["--budgets", "none"], ["--points", "1"]])
def test_sweep_refuses_budgets_that_are_none(saved: Path, wrong: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["sweep", str(saved), *wrong])


# -------------------------------------------------------------------- report


def test_report_writes_markdown(
    saved: Path, tmp_path: Path, golden: Callable[[str, str], None]
) -> None:
    output = tmp_path / "report.md"
    assert main(["report", str(saved), "-o", str(output), "--no-picture"]) == 0
    golden("report.md", output.read_text(encoding="utf-8"))


def test_report_writes_one_html_file(saved: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    output = tmp_path / "report.html"
    assert main(["report", str(saved), "-o", str(output)]) == 0
    text = output.read_text(encoding="utf-8")
    assert 'src="data:image/png;base64,' in text
    assert all(f"<td>{decision.name}</td>" in text for decision in small_plan().decisions)
    # The pin's quotes, escaped.
    assert "pinned by keep=&#x27;blocks.1.*&#x27;" in text


def test_report_of_another_kind_is_refused(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(saved), "-o", str(tmp_path / "report.pdf")]) == 2
    assert "neither a .md nor a .html" in capsys.readouterr().err


# -------------------------------------------------------------------- as a process


def test_the_module_runs_as_a_command(saved: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "autockpt", "inspect"]
    done = subprocess.run([*command, str(saved)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, report_text(small_plan()))
    missing = str(tmp_path / "missing.json")
    failed = subprocess.run([*command, missing], capture_output=True, text=True, check=False)
    assert failed.returncode == 2
    assert failed.stderr.startswith("autockpt: error: ")
    assert "Traceback" not in failed.stderr


def test_a_reader_that_goes_away_is_no_error(saved: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "autockpt", "inspect", str(saved)]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_real_model_is_planned_and_inspected(tmp_path: Path) -> None:
    (tmp_path / "small_model.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "def make():\n"
        "    layers = [m for _ in range(4) for m in (nn.Linear(64, 64), nn.Tanh())]\n"
        "    return nn.Sequential(*layers), (torch.randn(256, 64),)\n"
    )

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "autockpt", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)

    free = run("plan", "small_model:make", "--budget", "none", "-o", "free.json")
    assert free.returncode == 0, free.stderr
    assert free.stderr  # progress
    baseline = Plan.load(tmp_path / "free.json")
    assert baseline.overhead == 0
    tight_bytes = baseline.peak_bytes - 4 * 256 * 64
    tight = run("plan", "small_model:make", "--budget", str(tight_bytes), "-o", "tight.json")
    assert tight.returncode == 0, tight.stderr
    plan = Plan.load(tmp_path / "tight.json")
    assert plan.peak_bytes <= tight_bytes == plan.budget_bytes
    assert plan.overhead > 0
    assert run("inspect", "tight.json").stdout == tight.stdout == report_text(plan)
    failed = run("plan", "small_model:make", "--budget", "1kB", "-o", "none.json")
    assert failed.returncode == 2
    assert "the smallest feasible budget is" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert not (tmp_path / "none.json").exists()
