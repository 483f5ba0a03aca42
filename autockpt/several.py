"""Several: a model of several graphs, trained under one budget.

The first steps run every graph with nothing kept that can be computed again, or with its smallest
peak where that does not fit; a step in which nothing was captured is recorded. Its graphs and what
ran between them then make one problem (:mod:`autockpt.joined`), whose schedule is handed back to
the graphs; they are compiled again where theirs has changed.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import fx, nn

from autockpt import _torch
from autockpt.accumulate import is_leaf
from autockpt.backwards import refuse_double_backward
from autockpt.capture import Capture, read_joint
from autockpt.device import Device
from autockpt.formulate import Around, Formulation
from autockpt.graphs import Graph, Known, graph_key, saved_placeholders
from autockpt.joined import Joined, Member, join
from autockpt.out_of_memory import Place
from autockpt.parts import Mode, Part, own_children
from autockpt.planning import Made, Options, budget_of, formulated, origin_of, solved
from autockpt.profile import profile
from autockpt.record import Kind, Record, Recorder
from autockpt.resident import distinct_bytes, gradient_of, missing_gradient_bytes
from autockpt.rewrite import rewrite
from autockpt.tangents import tensors
from autockpt.unforeseen import lacking
from autockpt_solvers.errors import InfeasibleBudget
from autockpt_solvers.memory import simulate
from autockpt_solvers.minimum import minimum
from autockpt_solvers.on_demand import Demand, on_demand, stage_schedule
from autockpt_solvers.plan import Plan
from autockpt_solvers.problem import Problem
from autockpt_solvers.schedule import Schedule, free_early

__all__ = ["Several"]

_LOG = logging.getLogger("autockpt")
# Orders of graphs a model is planned for; further ones run with the least kept.
_SEQUENCES = 8
# Steps in which something was captured that are not learned from.
_DISCARDED = 4

Key = tuple[str, int, str]


@dataclass(frozen=True)
class _Decided:
    """What is decided about one graph, for compiling it again."""

    absent: frozenset[int]
    schedule: Schedule | None


@dataclass(frozen=True)
class _Weight:
    """What one graph takes of the memory under a schedule."""

    peak_bytes: int
    held_bytes: int  # between its forward and its backward
    gradient_bytes: int

    @classmethod
    def of(cls, problem: Problem, schedule: Schedule) -> _Weight:
        """Return what a graph takes under a schedule."""
        trace = simulate(problem, schedule)
        return cls(trace.peak_bytes, trace.held_bytes, _gradient_bytes(problem))


def _gradient_bytes(problem: Problem) -> int:
    made = problem.live_at_end - problem.live_at_barrier
    return sum(problem.storages[storage].size_bytes for storage in made)


class Several:
    """The parts of one model and their common plan.

    Attributes:
        model: the model.
        parts: its modules that are captured on their own.
        inside: whether a training forward of the model is running.
        plan: the plan of the whole step; None until one step was recorded.
        captures: the number of graphs captured so far.
        places: for each graph of that plan: its own operation -> the plan's.
    """

    def __init__(
        self, model: nn.Module, options: Options, device: Device, around: Callable[[], Around]
    ) -> None:
        self.model = model
        self.options = options
        self.device = device
        self.around = around
        self.parts: dict[nn.Module, Part] = {}
        self.inside = False
        self._told_of_gradients = False
        self.plan: Plan | None = None
        self.captures = 0
        self.places: dict[Key, dict[int, int]] = {}
        self._decided: dict[Key, _Decided] = {}
        self._seen: set[tuple[bool, tuple[Key, ...]]] = set()
        self._running: list[Key] = []
        self._weights: dict[Key, _Weight] = {}
        self._reads: dict[Key, int] = {}  # bytes of what a graph's backward reads of its inputs
        self.recorded = Around()  # what is there during the step that is recorded
        self._capture_s = 0.0
        self.recorder: Recorder | None = None
        self._discarded = 0
        self._root: Part | None = None

    def begin(self, reason: str) -> None:
        """Divide the model, which cannot be captured whole for this reason."""
        self._root = Part(self, self.model, "", reason)

    def end(self) -> None:
        """Take all parts off the model."""
        self._stop_recording()
        for part in self.parts.values():
            part.detach()
        self.parts = {}

    def forget(self) -> None:
        """Drop all graphs: they are traced anew, and planned under what is decided about them."""
        for part in self._all_parts():
            part.forget()

    # -------------------------------------------------------------- what parts ask for

    def part(self, module: nn.Module, path: str) -> Part:
        """Return the part of a module, a new one where it has none."""
        if module not in self.parts:
            self.parts[module] = Part(self, module, path)
            self.parts[module].attach()
        return self.parts[module]

    def adopt(self, parent: Part) -> None:
        """Make the modules that a part calls parts in their turn."""
        for path, child in own_children(parent.module, parent.path):
            self.part(child, path)

    def partition(
        self, part: Part, call: int, joint: _torch.JointGraph
    ) -> tuple[fx.GraphModule, fx.GraphModule, _torch.Watch]:
        """Return the forward and the backward of one graph, as decided or with the least kept."""
        started = time.perf_counter()
        key = (part.path, call, graph_key(joint))
        decided = self._decided.get(key, _Decided(frozenset(), None))
        captured = read_joint(joint, decided.absent)
        in_case: tuple[str, ...] = ()
        while True:
            formulation = self._formulated(captured, type(part.module).__name__, in_case)
            problem = formulation.problem
            schedule, chosen = self._scheduled(problem, decided.schedule)
            forward, backward = rewrite(formulation, schedule, in_case)
            if not captured.absent:
                break  # any other backward needs no more than this one
            lacks = lacking(joint, saved_placeholders(backward, captured))
            if set(lacks) <= set(in_case):
                break
            in_case = tuple(sorted({*in_case, *lacks}))
        plan = Plan(
            formulation.problem,
            schedule,
            None,
            solver=chosen,
            solve_time_s=0.0,
            lower_bound_s=0.0,
        )
        made = Made(plan, formulation)
        piece = _Piece(self, key, part, joint, captured, made)
        piece.saved = saved_placeholders(backward, captured)
        self._weights[key] = _Weight.of(problem, schedule)
        saved = {placeholder.name for placeholder in piece.saved}
        read = [p for p in joint.primals if p.name in saved and not is_leaf(p)]
        self._reads[key] = distinct_bytes((t for p in read for t in tensors(p)), self.device)
        self.captures += 1
        self._capture_s = time.perf_counter() - started
        return forward, backward, piece

    def _scheduled(self, problem: Problem, decided: Schedule | None) -> tuple[Schedule, str]:
        """Return how one graph runs, and who says so.

        Before there is a plan, graphs to come want room as well: nothing is kept that can be
        computed again. But where a graph's backward makes too much of it at once, what has the
        smallest peak runs.
        """
        if decided is not None:
            order = decided.forward_computes, decided.backward_computes
            return free_early(problem, *order), "decided"
        least = stage_schedule(problem, on_demand(Demand(problem), frozenset()))
        weight, room_bytes = _Weight.of(problem, least), self._room_bytes(problem)
        if room_bytes is not None and weight.peak_bytes > room_bytes:
            smallest = minimum(problem, time_limit_s=self.options.time_limit_s).schedule
            other = _Weight.of(problem, smallest)
            # What it holds is missing to the others.
            if weight.peak_bytes - other.peak_bytes > other.held_bytes - weight.held_bytes:
                return smallest, "smallest peak"
        return least, "least kept"

    def _room_bytes(self, problem: Problem) -> int | None:
        """Return what the budget leaves to the graph that is captured now; None without one.

        Its backward runs beside what the graphs before it keep, and the gradients of those to come.
        """
        budget_bytes = budget_of(self.options, self.device)
        if budget_bytes is None:
            return None
        before = [self._weights[key] for key in self._running if key in self._weights]
        to_come = missing_gradient_bytes(self.model, self.device) - _gradient_bytes(problem)
        to_come -= sum(weight.gradient_bytes for weight in before)
        held = sum(weight.held_bytes for weight in before)
        there = self.recorded if self.recorder is not None else self.around()
        return budget_bytes - there.resident_bytes - held - max(0, to_come)

    # -------------------------------------------------------------- a training forward

    def ran(self, place: Key) -> None:
        """A graph's forward runs."""
        self._running.append(place)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model's training forward."""
        assert self._root is not None
        self._after_step()
        if self.recorder is None and self._wanted():
            self.recorded = self.around()
            self.recorder = Recorder(self.device)
        self._running = []
        captures = self.captures
        for part in self._all_parts():
            part.calls = 0
        self.inside = True
        try:
            output = self._root.run(args, kwargs)
        finally:
            self.inside = False
        changing = (part for part in self._all_parts() if part.calls and part.is_to_change)
        if self._reach_past() or any(changing):
            self._stop_recording()  # the coming steps will have other graphs
        if self.captures > captures and self._discarded < _DISCARDED:
            # Tracing holds on to tensors that a step without it lets go of.
            self._discarded += 1
            self._stop_recording()
        nodes = _torch.compiled_behind(output)
        for node in nodes:
            _torch.keep_missing_gradients(node)
            refuse_double_backward(node)
        if self.recorder is not None:
            for node in _torch.nodes_of(output):
                _torch.before_backward(node, self.recorder.backward_begins)
            if nodes:
                _torch.when_released(nodes[-1], self.recorder.leave)  # of this step alone
        return output

    def _reach_past(self) -> bool:
        """Make parts of the children of modules that are not called themselves, if there are any.

        A model that runs plainly may loop over its encoder's layers, past the encoder.
        """
        reached = False
        for part in self._all_parts():
            if part.mode is not Mode.PLAIN and not part.passed_by:
                continue
            for _, child in own_children(part.module, part.path):
                inner = self.parts.get(child)
                if inner is not None and not (inner.called or inner.passed_by):
                    inner.passed_by = True
                    self.adopt(inner)
                    reached = True
        return reached

    def unoptimised(self) -> str:
        """Return what runs plainly, or in pieces, and why: a line for each part of the model."""
        lines = [
            f"{part.path or type(self.model).__name__}: {_in_short(part.reason)}"
            for part in self._all_parts()
            if part.reason and part.mode is not Mode.WHOLE
        ]
        return "\n".join(dict.fromkeys(lines))

    def _all_parts(self) -> list[Part]:
        found = [*self.parts.values()]
        if self._root is not None:
            found.append(self._root)
        waiting = list(found)
        while waiting:
            halves = [half for half in waiting.pop().halves if half not in found]
            found += halves
            waiting += halves
        return found

    def _wanted(self) -> bool:
        """Whether the coming step is to be recorded: the last one was of an order not seen yet.

        One that adds to gradients of an earlier backward needs more than one that makes them, so
        that a plan for it holds for both; and one with graphs left out needs no more.
        """
        last = Counter(self._running)
        piles_up = any(gradient_of(p) is not None for p in self.model.parameters())
        known = any(
            more >= piles_up and last <= Counter(keys)
            for more, keys in self._seen
            if last or not keys
        )
        return len(self._seen) < _SEQUENCES and not known

    def _stop_recording(self) -> None:
        if self.recorder is not None:
            self.recorder.leave()

    def _after_step(self) -> None:
        """Learn from the step that was recorded, if one was."""
        recorder, self.recorder = self.recorder, None
        if recorder is None:
            return
        recorder.leave()
        record = recorder.record
        keys = tuple(piece.key_in_step for piece in record.sequence)
        if not record.complete:
            return
        self._seen.add((self.recorded.gradients_exist, keys))
        if record.within and not self._told_of_gradients:
            self._told_of_gradients = True
            _LOG.warning(
                "%s takes gradients inside its forward, which is not traced: it runs without a "
                "plan, and may take more than the budget.",
                type(self.model).__name__,
            )
        elif record.regular:
            self._learn(record)

    # -------------------------------------------------------------- planning the whole step

    def _learn(self, record: Record) -> None:
        """Plan a recorded step, and let the graphs follow where their part of it has changed."""
        absent = {
            e.graph.key_in_step: e.graph.arrived for e in record.events if e.kind is Kind.BACKWARD
        }
        members = [self._member(piece, absent.get(piece.key_in_step)) for piece in record.sequence]
        around = self.recorded
        joined = join(
            record,
            members,
            resident_bytes=around.resident_bytes,
            optimizer_bytes=around.optimizer_bytes,
            name=type(self.model).__name__,
        )
        plan = self._planned(joined, self._missing_bytes(record))
        if self.plan is None:
            _LOG.warning(
                "%s runs as %s under one budget. Not optimised: %s",
                type(self.model).__name__,
                "1 graph" if len(members) == 1 else f"{len(members)} graphs",
                plan.origin["unoptimised"],
            )
        self.plan = plan
        self.places = dict(
            zip((p.key_in_step for p in record.sequence), joined.places, strict=True)
        )
        stale: set[Part | None] = set()
        for number, (piece, member) in enumerate(zip(record.sequence, members, strict=True)):
            if piece.key_in_step not in absent:
                continue  # its backward did not run: it stays ready for one
            schedule = joined.own(plan.schedule, number, member.formulation)
            decided = self._with_less(piece.key_in_step, member.formulation, schedule)
            self._decided[piece.key_in_step] = decided
            if (piece.captured.absent, piece.made.plan.schedule) != (
                decided.absent,
                decided.schedule,
            ):
                stale.add(piece.part())
        for part in stale:
            if part is not None:
                part.forget()

    def _with_less(self, key: Key, formulation: Formulation, schedule: Schedule) -> _Decided:
        """Return what is decided about a graph: it may run in other orders, some with less room."""
        absent, problem = formulation.capture.absent, formulation.problem
        before = self._decided.get(key)
        if before is not None and before.schedule is not None and before.absent == absent:
            schedule = min(
                (schedule, before.schedule), key=lambda one: _Weight.of(problem, one).held_bytes
            )
        return _Decided(absent, schedule)

    def _member(self, piece: _Piece, absent: frozenset[int] | None) -> Member:
        if absent is None or absent == piece.captured.absent:
            return Member(piece.made.formulation, piece.key_in_step[0])
        captured = read_joint(piece.joint, absent)
        formulation = self._formulated(captured, piece.made.formulation.problem.name)
        return Member(formulation, piece.key_in_step[0])

    def _formulated(
        self, captured: Capture, name: str, in_case: tuple[str, ...] = ()
    ) -> Formulation:
        figures, around = profile(captured, self.device), Around(in_case=in_case)
        return formulated(captured, figures, around, self.options, self.device, name)

    def _missing_bytes(self, record: Record) -> int:
        """Return what parts of the model hold that run in other steps, and may run beside these."""
        here = {piece.key_in_step[:2] for piece in record.sequence}
        held: dict[tuple[str, int], int] = {}
        for key, weight in self._weights.items():
            if key[:2] not in here:
                own = weight.held_bytes + weight.gradient_bytes + self._reads[key]
                held[key[:2]] = max(own, held.get(key[:2], 0))
        return sum(held.values())

    def _planned(self, joined: Joined, missing_bytes: int) -> Plan:
        """Return a plan of the step that leaves room for what it lacks, where there is some."""
        budget_bytes = budget_of(self.options, self.device)
        stages = {"capture": self._capture_s}
        origin = {
            **origin_of(type(self.model).__name__, self.device.name),
            "graphs": str(len(joined.places)),
            "unoptimised": self.unoptimised(),
        }
        plan = None
        if budget_bytes is not None and missing_bytes:
            with contextlib.suppress(InfeasibleBudget):
                left = max(1, budget_bytes - missing_bytes)
                plan = solved(joined.problem, self.options, left, stages, origin)
                # What was proved was proved for less room.
                plan = replace(plan, budget_bytes=budget_bytes, lower_bound_s=0.0)
        if plan is None:
            plan = solved(joined.problem, self.options, budget_bytes, stages, origin)
        return replace(plan, schedule=joined.orderly(plan.schedule))


def _in_short(reason: str) -> str:
    """The user's line and the first sentence of what is wrong there."""
    lines = [line.strip() for line in reason.splitlines()[1:] if line.strip()]
    return lines[0] if lines else reason


class _Piece(Graph):
    """One compiled graph among several: it tells the recorder when it runs."""

    def __init__(
        self,
        owner: Several,
        key: Key,
        part: Part,
        joint: _torch.JointGraph,
        captured: Capture,
        made: Made,
    ) -> None:
        known = Known(Around(), captured.absent, settled=True)
        super().__init__(key[2], joint, captured, known, made, owner.device)
        # Torch keeps compiled code as long as there are the parts: it must not keep them.
        self._owner, self._part = weakref.ref(owner), weakref.ref(part)
        self.key_in_step = key
        self.arrived: frozenset[int] = captured.absent

    def part(self) -> Part | None:
        """Return the part that it belongs to; None where that is gone."""
        return self._part()

    def place(self, operation: int) -> Place:
        """Return where it stands in the plan of all graphs, once there is one."""
        owner = self._owner()
        places = {} if owner is None else owner.places.get(self.key_in_step, {})
        if owner is None or owner.plan is None or operation not in places:
            return super().place(operation)
        return owner.plan, places[operation]

    def run_forward(self, run: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        """Run the forward, under the eyes of the recorder where there is one."""
        owner = self._owner()
        if owner is not None:
            owner.ran(self.key_in_step)
        if owner is None or owner.recorder is None:
            return super().run_forward(run, args)

        def run_it(args: list[Any]) -> Any:
            return super(_Piece, self).run_forward(run, args)

        saved = {placeholder.name for placeholder in self.saved}
        primals = enumerate(self.captured.joint.primals)
        own = [position for position, primal in primals if primal.name in saved]
        return owner.recorder.forward(self, run_it, args, len(self.captured.outputs), own)

    def run_backward(self, run: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        """Run the backward, under the eyes of the recorder where there is one."""
        end = len(args) - len(self.captured.joint.backward_seeds)
        tangents = slice(end - len(self.captured.joint.tangents), end)
        self.arrived = frozenset(i for i, t in enumerate(args[tangents]) if t is None)
        owner = self._owner()
        batched = any(map(_torch.is_batched, args[tangents]))
        if owner is None or owner.recorder is None or batched:
            return super().run_backward(run, args)
        owner.recorder.record.within |= owner.inside

        def run_it(args: list[Any]) -> Any:
            return super(_Piece, self).run_backward(run, args)

        return owner.recorder.backward(self, run_it, args, tangents)
