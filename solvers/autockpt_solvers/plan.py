"""The plan: a problem, a schedule of it and its figures, as one file on disk.

The file holds the problem and the schedule; every figure of memory is simulated from them, so a
plan cannot state a peak that its schedule does not have.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from autockpt_solvers.chrome import Point, write_chrome_trace
from autockpt_solvers.decisions import Decision, decide
from autockpt_solvers.errors import PlanFormatError, ScheduleError
from autockpt_solvers.memory import Trace, live_storages, simulate
from autockpt_solvers.placement import Placement, blocks_of, place
from autockpt_solvers.problem import Problem
from autockpt_solvers.schedule import Compute, Free, Schedule, free_early
from autockpt_solvers.timeline import TimelinePoint, trace_timeline

__all__ = ["PeakTensor", "Plan"]

_FORMAT = "autockpt-plan"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class PeakTensor:
    """A tensor alive at the predicted peak.

    Attributes:
        name: the graph's name of the tensor.
        module_path: the module it comes from.
        source: the user's line.
        size_bytes: its size as the device's allocator rounds it.
    """

    name: str
    module_path: str
    source: str
    size_bytes: int


@dataclass(frozen=True)
class Plan:
    """How one training step runs within its budget.

    Attributes:
        problem: the step as data.
        schedule: the order of its computations and frees.
        budget_bytes: the budget on the step's peak; None for no limit.
        solver: the method that found the schedule.
        solve_time_s: how long it took, in seconds.
        lower_bound_s: proved lower bound on the extra time of any schedule within the budget.
        minimum_bytes: the smallest budget a schedule was found for, where known.
        stages_s: planning time of each stage, in seconds, in the order they ran.
        origin: what the plan was made by and for: versions, device, model class.
    """

    problem: Problem
    schedule: Schedule
    budget_bytes: int | None
    solver: str
    solve_time_s: float
    lower_bound_s: float
    minimum_bytes: int | None = None
    stages_s: Mapping[str, float] = field(default_factory=dict)
    origin: Mapping[str, str] = field(default_factory=dict)

    # ---------------------------------------------------------------- memory

    @cached_property
    def trace(self) -> Trace:
        """The simulation of the schedule."""
        return simulate(self.problem, self.schedule)

    @cached_property
    def baseline_trace(self) -> Trace:
        """The simulation of the same step with nothing recomputed."""
        return simulate(*self._baseline)

    @property
    def peak_bytes(self) -> int:
        """The predicted peak of the step."""
        return self.trace.peak_bytes

    @property
    def baseline_peak_bytes(self) -> int:
        """The predicted peak with nothing recomputed and nothing in place."""
        return self.baseline_trace.peak_bytes

    @cached_property
    def peak_operation(self) -> str:
        """The name of the operation that runs at the predicted peak; empty in an empty step."""
        step = self.schedule.steps[self.trace.peak_step]
        return self.problem.operations[step.operation].name if isinstance(step, Compute) else ""

    @cached_property
    def peak_workspace_bytes(self) -> int:
        """Workspace of the operation that runs at the predicted peak."""
        step = self.schedule.steps[self.trace.peak_step]
        if not isinstance(step, Compute):
            return 0
        return self.problem.operations[step.operation].workspace_bytes

    def at_peak(self) -> tuple[PeakTensor, ...]:
        """Return the tensors alive at the predicted peak, largest first.

        Their bytes, the problem's resident bytes and the workspace at the peak add up to
        ``peak_bytes``.
        """
        tensors = []
        for index in live_storages(self.problem, self.schedule, self.trace.peak_step):
            storage = self.problem.storages[index]
            op = self.problem.operations[self.problem.producer[index]]
            tensors.append(PeakTensor(storage.name, op.module_path, op.source, storage.size_bytes))
        return tuple(tensors)

    @cached_property
    def placement(self) -> Placement:
        """Where the step's blocks of memory would lie in one arena, without what the user sees."""
        return place(blocks_of(self.problem, self.schedule))

    # ---------------------------------------------------------------- time

    @property
    def baseline_time_s(self) -> float:
        """Predicted time of the step with nothing recomputed."""
        return self.problem.baseline_cost_ns / 1e9

    @property
    def step_time_s(self) -> float:
        """Predicted time of the step."""
        return self.trace.cost_ns / 1e9

    @property
    def extra_time_s(self) -> float:
        """Predicted time spent on recomputation."""
        return self.trace.extra_ns / 1e9

    @property
    def overhead(self) -> float:
        """Extra time over the baseline's time: 0.05 is a step 5 % longer."""
        return self._of_baseline(self.extra_time_s)

    @property
    def gap(self) -> float:
        """Proved distance from the optimum, as a part of the baseline's time.

        0.003: no schedule of this problem within the budget saves more than 0.3 % of a step.
        """
        return self._of_baseline(max(0.0, self.extra_time_s - self.lower_bound_s))

    # ---------------------------------------------------------------- for people

    @cached_property
    def decisions(self) -> tuple[Decision, ...]:
        """What happens to each tensor of the forward, and why."""
        return decide(self.problem, self.schedule)

    @cached_property
    def timeline(self) -> tuple[TimelinePoint, ...]:
        """Live bytes over the time of the step."""
        return trace_timeline(self.problem, self.schedule, self.trace)

    @property
    def points(self) -> tuple[Point, ...]:
        """The timeline as plain points: time in seconds, live bytes, operation."""
        return tuple((p.time_s, p.live_bytes, p.operation) for p in self.timeline)

    def save_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the predicted timeline for chrome://tracing or Perfetto.

        Raises:
            OSError: where the file cannot be written.
        """
        write_chrome_trace(path, {"predicted": self.points})

    @cached_property
    def baseline_timeline(self) -> tuple[TimelinePoint, ...]:
        """Live bytes over the time of the step with nothing recomputed."""
        return trace_timeline(*self._baseline, self.baseline_trace)

    # ---------------------------------------------------------------- file

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON; a reader sees the old file or the whole new one.

        Raises:
            OSError: where the file cannot be written.
        """
        target = Path(path).resolve()
        text = "".join(_dump(self.to_dict()))
        if target.exists() and not target.is_file():
            target.write_text(text, encoding="utf-8")  # a pipe or device must not be replaced
            return
        draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
        try:
            draft.write_text(text, encoding="utf-8")
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Return the plan a file holds.

        Raises:
            OSError: where the file cannot be read.
            PlanFormatError: where it is not a plan this release reads.
        """
        try:
            data = json.loads(Path(path).read_bytes().decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise PlanFormatError(
                f"{os.fspath(path)} is not a plan: it is not JSON ({error}). "
                "Plans are written by `autockpt plan` or `Plan.save`."
            ) from error
        try:
            return Plan.from_dict(data)
        except PlanFormatError as error:
            raise PlanFormatError(f"{os.fspath(path)}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain JSON data."""
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "budget_bytes": self.budget_bytes,
            "minimum_bytes": self.minimum_bytes,
            "solver": self.solver,
            "solve_time_s": self.solve_time_s,
            "lower_bound_s": self.lower_bound_s,
            "stages_s": dict(self.stages_s),
            "origin": dict(self.origin),
            "figures": self._figures,
            "problem": self.problem.to_dict(),
            "schedule": self.schedule.to_list(),
        }

    @staticmethod
    def from_dict(data: Any) -> Plan:
        """Return the plan that :meth:`to_dict` described, after simulating its schedule.

        Raises:
            PlanFormatError: where the data is of another format or version, damaged, or its
                schedule breaks the problem's rules, the budget or the stated figures.
        """
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            raise PlanFormatError(f'this is not a plan: it lacks "format": "{_FORMAT}".')
        if data.get("version") != _VERSION or isinstance(data["version"], bool):
            raise PlanFormatError(
                f"the plan is of version {data.get('version')!r}; this release reads version "
                f"{_VERSION}. Make the plan again with this release."
            )
        try:
            plan = _read(data)
            figures = plan._figures
        except ScheduleError as error:
            raise PlanFormatError(f"the plan's schedule is not valid: {error}") from error
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise PlanFormatError(
                f"the plan is damaged: {type(error).__name__}: {error}. Make the plan again."
            ) from error
        for name, value in figures.items():
            if data["figures"].get(name) != value:
                raise PlanFormatError(
                    f"the plan states {name} = {data['figures'].get(name)!r}, its schedule gives "
                    f"{value!r}: the file was changed. Make the plan again."
                )
        if plan.budget_bytes is not None and plan.peak_bytes > plan.budget_bytes:
            raise PlanFormatError(
                f"the plan's schedule peaks at {plan.peak_bytes:,} bytes, over its budget of "
                f"{plan.budget_bytes:,} bytes: the file was changed. Make the plan again."
            )
        return plan

    # ---------------------------------------------------------------- inside

    @cached_property
    def _baseline(self) -> tuple[Problem, Schedule]:
        # The baseline keeps what is pinned to be recomputed, too, and writes nothing in place.
        problem = replace(
            self.problem,
            storages=tuple(replace(s, keepable=True) for s in self.problem.storages),
            operations=tuple(replace(op, over=()) for op in self.problem.operations),
        )
        return problem, free_early(problem, problem.required, problem.backward)

    @property
    def _figures(self) -> dict[str, Any]:
        """What the file states beside the data it follows from: for readers, and as a check."""
        return {
            "peak_bytes": self.peak_bytes,
            "baseline_peak_bytes": self.baseline_peak_bytes,
            "extra_ns": self.trace.extra_ns,
            "baseline_ns": self.problem.baseline_cost_ns,
            "fingerprint": self.problem.fingerprint,
        }

    def _of_baseline(self, time_s: float) -> float:
        return time_s / self.baseline_time_s if self.baseline_time_s > 0 else 0.0


# -------------------------------------------------------------------- reading


def _read(data: Mapping[str, Any]) -> Plan:
    """Return the plan of data that is one in its outline; any built-in error where it is not."""
    _outline(data["problem"])
    problem = Problem.from_dict(data["problem"])
    schedule = Schedule.from_list(data["schedule"])
    for step in schedule.steps:
        if isinstance(step, Compute):
            _index(step.operation, len(problem.operations), "operation")
            if step.over is not None:
                _index(step.over, len(problem.storages), "storage")
        elif isinstance(step, Free):
            _index(step.storage, len(problem.storages), "storage")
    if not isinstance(data["figures"], dict):
        raise TypeError("figures must be an object")
    return Plan(
        problem=problem,
        schedule=schedule,
        budget_bytes=_optional_bytes(data, "budget_bytes"),
        solver=_text(data["solver"], "solver"),
        solve_time_s=_seconds(data["solve_time_s"], "solve_time_s"),
        lower_bound_s=_seconds(data["lower_bound_s"], "lower_bound_s"),
        minimum_bytes=_optional_bytes(data, "minimum_bytes"),
        stages_s={name: _seconds(value, name) for name, value in data["stages_s"].items()},
        origin={name: _text(value, name) for name, value in data["origin"].items()},
    )


def _outline(problem: Mapping[str, Any]) -> None:
    """Check the types JSON leaves open; the problem itself checks how its parts fit together."""
    _whole(problem["barrier"], "barrier")
    _whole(problem["resident_bytes"], "resident_bytes")
    _text(problem["name"], "name")
    count = len(problem["storages"])
    for key in ("live_at_barrier", "live_at_end"):
        for storage in problem[key]:
            _index(storage, count, key)
    for storage in problem["storages"]:
        _text(storage["name"], "name")
        _whole(storage["size_bytes"], "size_bytes")
        _flag(storage["keepable"], "keepable")
    for op in problem["operations"]:
        for key in ("name", "fixed", "kind", "module_path", "source"):
            _text(op[key], key)
        _text(op.get("kept_out", ""), "kept_out")
        for key in ("cost_ns", "workspace_bytes"):
            _whole(op[key], key)
        _flag(op["optional"], "optional")
        for key in ("inputs", "outputs", "recompute_inputs", "recompute_outputs"):
            for storage in (op[key] or ()) if key == "recompute_inputs" else op[key]:
                _index(storage, count, key)
        for storage in op.get("over", ()):
            _index(storage, count, "over")


def _whole(value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} must be a whole number from 0 on, not {value!r}")
    return value


def _index(value: Any, count: int, name: str) -> None:
    if _whole(value, name) >= count:
        raise IndexError(f"{name} {value} of {count}")


def _optional_bytes(data: Mapping[str, Any], name: str) -> int | None:
    return None if data[name] is None else _whole(data[name], name)


def _seconds(value: Any, name: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, not {value!r}")
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} must be a time in seconds, not {value!r}")
    return float(value)


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be text, not {value!r}")
    return value


def _flag(value: Any, name: str) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be true or false, not {value!r}")


# -------------------------------------------------------------------- writing


def _dump(data: Mapping[str, Any]) -> Iterator[str]:
    """Yield JSON text with a line per storage and operation: small, and still read by people."""
    yield "{\n"
    for key, value in data.items():
        if key not in ("problem", "schedule"):
            yield f" {_json(key)}: {_json(value)},\n"
    yield ' "problem": {\n'
    problem = data["problem"]
    for key, value in problem.items():
        if key not in ("storages", "operations"):
            yield f"  {_json(key)}: {_json(value)},\n"
    yield '  "storages": [\n' + _lines(map(_json, problem["storages"])) + "  ],\n"
    yield '  "operations": [\n' + _lines(map(_json, problem["operations"])) + "  ]\n },\n"
    steps = data["schedule"]
    rows = (steps[i : i + 12] for i in range(0, len(steps), 12))
    yield ' "schedule": [\n' + _lines(", ".join(map(_json, row)) for row in rows) + " ]\n}\n"


def _lines(items: Iterator[str]) -> str:
    text = ",\n   ".join(items)
    return f"   {text}\n" if text else ""


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False)
