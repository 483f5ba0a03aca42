"""The command line: ``plan`` makes a plan; ``inspect``, ``explain`` and ``report`` read one;
``sweep`` compares budgets, ``devices`` lists the GPUs that are known.

It parses, calls and prints. Reports go to standard output; progress and errors to standard error.
Exit codes: 0 success, 2 a request that cannot be met (one message, no traceback), 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from autockpt import cache
from autockpt.budget import parse_budget
from autockpt.document import FORMATS, document
from autockpt.explain import explain, explain_text
from autockpt.frontier import draw_frontier, frontier, frontier_text
from autockpt.picture import draw_timeline
from autockpt.report import report_dict, report_text
from autockpt_solvers.errors import AutockptError
from autockpt_solvers.plan import Plan
from autockpt_solvers.units import format_bytes

__all__ = ["main"]

_N = TypeVar("_N", int, float)

_TARGET = """\
PACKAGE.MODULE:FUNCTION names a function without arguments that returns the model and the inputs
of one training forward, in one of these forms:

  (model, args)          args: a tuple or list of positional inputs, or a single tensor
  (model, kwargs)        kwargs: a dict of keyword inputs
  (model, args, kwargs)
  (model, x, y, ...)     each further item is a positional input

The module is looked up from the current folder on. No training step is run.
"""


class _UsageError(Exception):
    """A request of the command line that cannot be met; the message is for the user."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        argv: the arguments behind the program's name; those of this process where None.

    Raises:
        SystemExit: for ``--help`` and for arguments that do not parse (code 2), as argparse does.
    """
    arguments = _parser().parse_args(argv)
    try:
        arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader went away (`| head`); what is still buffered must not fail at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (AutockptError, _UsageError, OSError) as error:
        print(f"autockpt: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("autockpt: interrupted", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="autockpt",
        description="Fit one training step of a PyTorch model into a memory budget.",
    )
    parser.add_argument("--version", action="version", version=f"autockpt {_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    plan = commands.add_parser(
        "plan",
        help="make a plan and print its report",
        description="Make a plan for a model and a budget, print its report and save it.",
        epilog=_TARGET,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    plan.add_argument("target", metavar="PACKAGE.MODULE:FUNCTION", help="see below")
    plan.add_argument(
        "--budget",
        required=True,
        type=_budget,
        help="bytes, a size as 2GB or 1.5GiB, a share of the device's memory as 80%%, or none",
    )
    plan.add_argument("-o", "--output", type=Path, metavar="FILE", help="save the plan here")
    plan.add_argument("--solver", default="auto", help="the method to use (default: %(default)s)")
    plan.add_argument(
        "--time-limit",
        default=60.0,
        type=_positive,
        metavar="SECONDS",
        help="time for the solver (default: %(default)s)",
    )
    plan.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="PATTERN",
        help="keep the tensors of modules of this path, as 'blocks.*.attn'; may be repeated",
    )
    plan.add_argument(
        "--recompute",
        action="append",
        default=[],
        metavar="PATTERN",
        help="recompute the tensors of modules of this path; may be repeated",
    )
    plan.add_argument(
        "--device",
        metavar="GPU",
        help="model this GPU, see `autockpt devices` (default: measure on the model's device)",
    )
    plan.set_defaults(run=_run_plan)

    devices = commands.add_parser(
        "devices",
        help="list the GPUs that can be planned for without having one",
        description="List the GPUs that --device knows, with the figures their model rests on.",
    )
    devices.set_defaults(run=_run_devices)

    cached = commands.add_parser(
        "cache",
        help="list or clear what earlier runs left for later ones",
        description="List or clear the measurements and schedules that earlier runs left for later "
        "ones. AUTOCKPT_CACHE names another folder; AUTOCKPT_CACHE=0 turns the cache off.",
    )
    cached.add_argument("action", choices=("list", "clear"))
    cached.set_defaults(run=_run_cache)

    inspect = commands.add_parser(
        "inspect", help="print the report of a saved plan", description="Report a saved plan."
    )
    inspect.add_argument("plan", type=Path, metavar="PLAN.json")
    inspect.add_argument(
        "--tensors",
        type=_count,
        default=8,
        metavar="N",
        help="how many tensors the lists show (default: %(default)s)",
    )
    inspect.add_argument(
        "--plot", type=Path, metavar="OUT.png", help="draw the memory timeline into this file"
    )
    inspect.add_argument(
        "--trace", type=Path, metavar="OUT.json", help="write the timeline for chrome://tracing"
    )
    inspect.add_argument("--json", action="store_true", help="print JSON instead of text")
    inspect.set_defaults(run=_run_inspect)
    _add_explain(commands)
    _add_sweep(commands)
    _add_report(commands)
    return parser


def _add_explain(commands: Any) -> None:
    explain = commands.add_parser(
        "explain",
        help="say why tensors are kept or recomputed",
        description="Say why tensors of a saved plan are kept or recomputed, and what it would "
        "cost to have each the other way.",
    )
    explain.add_argument("plan", type=Path, metavar="PLAN.json")
    explain.add_argument(
        "pattern", metavar="PATTERN", help="a module path as 'blocks.*.attn', or a tensor's name"
    )
    explain.add_argument(
        "--tensors",
        type=_count,
        default=8,
        metavar="N",
        help="how many tensors are shown, the largest first (default: %(default)s)",
    )
    explain.add_argument("--json", action="store_true", help="print JSON, of all tensors")
    explain.set_defaults(run=_run_explain)


def _add_sweep(commands: Any) -> None:
    sweep = commands.add_parser(
        "sweep",
        help="show what each of several budgets costs",
        description="Show the extra time of a model's step at several budgets.",
        epilog=_TARGET,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sweep.add_argument(
        "target", metavar="PACKAGE.MODULE:FUNCTION", help="see below; or the file of a saved plan"
    )
    sweep.add_argument(
        "--budgets", metavar="SIZE,...", type=_budgets, help="the budgets, as 2GB,3GB,1.5GiB"
    )
    sweep.add_argument(
        "--points",
        type=_points,
        default=8,
        metavar="N",
        help="where --budgets is not given: how many, from the smallest that is possible to the "
        "peak with nothing recomputed (default: %(default)s)",
    )
    sweep.add_argument(
        "--time-limit",
        default=60.0,
        type=_positive,
        metavar="SECONDS",
        help="time for the solver, for all budgets together (default: %(default)s)",
    )
    sweep.add_argument("--device", metavar="GPU", help="model this GPU, as for `autockpt plan`")
    sweep.add_argument("--plot", type=Path, metavar="OUT.png", help="draw it into this file")
    sweep.add_argument("--json", action="store_true", help="print JSON instead of a table")
    sweep.set_defaults(run=_run_sweep)


def _add_report(commands: Any) -> None:
    report = commands.add_parser(
        "report",
        help="write a saved plan as a document",
        description="Write a saved plan as one Markdown or HTML file: figures, tensors by module, "
        "the memory timeline, and every decision.",
    )
    report.add_argument("plan", type=Path, metavar="PLAN.json")
    report.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="a .md or .html file"
    )
    report.add_argument(
        "--no-picture", action="store_true", help="leave the picture out, which needs matplotlib"
    )
    report.set_defaults(run=_run_report)


# -------------------------------------------------------------------- commands


def _run_plan(arguments: argparse.Namespace) -> None:
    output: Path | None = arguments.output
    _check_folder(output)
    model, args, kwargs = _load(arguments.target)
    # Only here: reading a plan needs nothing of the capture.
    from autockpt.ahead import plan as make_plan

    plan = make_plan(
        model,
        args,
        arguments.budget,
        example_kwargs=kwargs,
        device=arguments.device,
        solver=arguments.solver,
        time_limit=arguments.time_limit,
        keep=tuple(arguments.keep),
        recompute=tuple(arguments.recompute),
        progress=_progress(),
    )
    if output is not None:
        plan.save(output)
    print(report_text(plan), end="")
    if output is not None:
        print(f"saved to {output}", file=sys.stderr)


def _run_devices(arguments: argparse.Namespace) -> None:
    from autockpt.roofline import GPUS

    print(f"{'name':<12} {'memory':>10} {'bandwidth':>10} {'16-bit':>12} {'32-bit':>12}")
    for name, gpu in GPUS.items():
        print(
            f"{name:<12} {format_bytes(gpu.memory_bytes):>10} {gpu.bandwidth / 1e12:>5.2f} TB/s "
            f"{gpu.half / 1e12:>6.0f} TFLOPS {gpu.single / 1e12:>6.1f} TFLOPS"
        )


def _run_cache(arguments: argparse.Namespace) -> None:
    where = cache.folder()
    if where is None:
        print("the cache is turned off")
    elif arguments.action == "clear":
        print(f"deleted {cache.clear()} files in {where}")
    else:
        found = cache.entries()
        total = format_bytes(sum(entry.size_bytes for entry in found))
        print(f"{len(found)} entries, {total}, in {where}")
        for entry in found:
            when = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used_s))
            name, what = entry.about.get("name", ""), entry.about.get("what", "")
            size = format_bytes(entry.size_bytes)
            print(f"{when}  {entry.kind:<8} {size:>10}  {name}: {what}")


def _run_inspect(arguments: argparse.Namespace) -> None:
    _check_folder(arguments.plot)
    _check_folder(arguments.trace)
    plan = Plan.load(arguments.plan)
    if arguments.plot is not None:
        draw_timeline(plan, arguments.plot)
    if arguments.trace is not None:
        plan.save_chrome_trace(arguments.trace)
    if arguments.json:
        print(json.dumps(report_dict(plan), indent=1))
    else:
        print(report_text(plan, tensors=arguments.tensors), end="")


def _run_explain(arguments: argparse.Namespace) -> None:
    found = explain(Plan.load(arguments.plan), arguments.pattern)
    if arguments.json:
        print(json.dumps([asdict(one) for one in found], indent=1))
    else:
        print(explain_text(found, tensors=arguments.tensors), end="")


def _run_sweep(arguments: argparse.Namespace) -> None:
    _check_folder(arguments.plot)
    if arguments.target.endswith(".json") or Path(arguments.target).is_file():
        plan = Plan.load(arguments.target)
    else:
        model, args, kwargs = _load(arguments.target)
        from autockpt.ahead import plan as make_plan

        plan = make_plan(
            model,
            args,
            None,
            example_kwargs=kwargs,
            device=arguments.device,
            progress=_progress(),
        )
    points = frontier(
        plan,
        arguments.budgets or arguments.points,
        time_limit_s=arguments.time_limit,
        progress=_progress(),
    )
    if arguments.plot is not None:
        draw_frontier(points, arguments.plot)
    if arguments.json:
        print(json.dumps([asdict(point) for point in points], indent=1))
    else:
        print(frontier_text(points), end="")


def _run_report(arguments: argparse.Namespace) -> None:
    output: Path = arguments.output
    kind = output.suffix.removeprefix(".").lower()
    if kind not in FORMATS:
        raise _UsageError(f"{output} is neither a .md nor a .html file")
    _check_folder(output)
    text = document(Plan.load(arguments.plan), kind, picture=not arguments.no_picture)
    output.write_text(text, encoding="utf-8")
    print(f"saved to {output}", file=sys.stderr)


def _check_folder(output: Path | None) -> None:
    """Find out now, not after minutes of planning."""
    if output is not None and not output.parent.is_dir():
        raise _UsageError(f"cannot write {output}: there is no folder {output.parent}")


def _progress() -> Callable[[str], None]:
    start_s = time.monotonic()

    def report(line: str) -> None:
        elapsed_s = time.monotonic() - start_s
        print(f"[{elapsed_s:6.1f} s] {line}", file=sys.stderr, flush=True)

    return report


# -------------------------------------------------------------------- the user's function


def _load(target: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return the model, positional and keyword inputs that the target's function returns."""
    module_name, colon, function_name = target.partition(":")
    if not (module_name and colon and function_name):
        raise _UsageError(
            f"{target!r} is not of the form PACKAGE.MODULE:FUNCTION: models.gpt:small is the "
            "function small in models/gpt.py"
        )
    if module_name.endswith(".py") or os.sep in module_name:
        name = ".".join(Path(module_name).with_suffix("").parts).strip("./")
        raise _UsageError(
            f"{module_name} is a file: name the module as Python imports it from the current "
            f"folder, {name}:{function_name}"
        )
    # An installed command starts without the current folder, `python -m` with it.
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise _UsageError(f"cannot import {module_name}: {_line(error)}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise _UsageError(f"{module_name} has no function {function_name}")
    try:
        result = function()
    except Exception as error:
        raise _UsageError(f"{target} failed: {_line(error)}") from error
    return _split(target, result)


def _split(target: str, result: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    if not isinstance(result, tuple) or len(result) < 2 or not hasattr(result[0], "parameters"):
        raise _UsageError(
            f"{target} returned {type(result).__name__}; expected (model, args), "
            "(model, kwargs), (model, args, kwargs) or (model, x, y, ...)"
        )
    model, *inputs = result
    if len(inputs) == 1 and isinstance(inputs[0], Mapping):
        return model, (), dict(inputs[0])
    if len(inputs) == 1 and isinstance(inputs[0], tuple | list):
        return model, tuple(inputs[0]), {}
    pair = len(inputs) == 2 and isinstance(inputs[1], Mapping)
    if pair and isinstance(inputs[0], tuple | list):
        return model, tuple(inputs[0]), dict(inputs[1])
    return model, tuple(inputs), {}


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


# -------------------------------------------------------------------- argument types


def _budget(text: str) -> int | str | None:
    # What a shell can only write as text; the budget itself is parsed where it is used.
    if text.strip().lower() == "none":
        return None
    return int(text) if text.strip().isdecimal() and len(text) < 30 else text


def _number(kind: Callable[[str], _N], text: str) -> _N:
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _positive(text: str) -> float:
    value = _number(float, text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a time above 0 seconds")
    return value


def _budgets(text: str) -> list[int]:
    sizes = []
    for part in text.split(","):
        try:
            size = parse_budget(_budget(part), total_bytes=None)
        except AutockptError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        if size is None:
            raise argparse.ArgumentTypeError(f"{part!r} is not a size")
        sizes.append(size)
    return sizes


def _points(text: str) -> int:
    value = _number(int, text)
    if value < 2:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 2 on")
    return value


def _count(text: str) -> int:
    value = _number(int, text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 on")
    return value


def _version() -> str:
    try:
        return version("autockpt")
    except PackageNotFoundError:
        return "(not installed)"
