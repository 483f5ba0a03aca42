"""The plans of a model's graphs: made from what is known of each, and again after a watched step.

A graph is planned at its first capture with a guess at what the user does around it. What a watched
step showed, what a larger graph of the same operations has for a plan, and what had to be written
for backwards that may come, each change what is known and with it the plan.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx, nn
from torch.optim import Optimizer

from autockpt import _torch
from autockpt.capture import Capture, capture, read_joint, training
from autockpt.device import Device, device_of, placement
from autockpt.flights import Flights
from autockpt.formulate import Around
from autockpt.given import OF_A_LARGER
from autockpt.graphs import (
    Graph,
    Known,
    graph_key,
    guessed,
    letting_go,
    saved_placeholders,
    shape_free_key,
)
from autockpt.planning import (
    Made,
    Options,
    budget_of,
    make_plan,
    make_smaller,
    no_limit,
    smallest,
)
from autockpt.resident import (
    OptimizerMemory,
    distinct_bytes,
    gradient_of,
    optimizer_memory,
    resident_bytes,
)
from autockpt.rewrite import rewrite
from autockpt.roofline import Modelled
from autockpt.together import Member, gradient_bytes, kept_bytes, plan_together
from autockpt.unforeseen import lacking
from autockpt_solvers.errors import InfeasibleBudget, PlanMismatch
from autockpt_solvers.plan import Plan

__all__ = ["Planner"]

_LOG = logging.getLogger("autockpt")
Found = tuple[Graph, Around, frozenset[int]]  # what a watched step has shown of a graph


class Planner:
    """Plans the graphs of one model under one set of options.

    Attributes:
        model: the model.
        options: what the user asked for.
        optimizer: the optimizer whose memory counts; None for none.
        progress: told now and then what is being done.
        modelled: the device to plan for where it is not the model's own.
        graphs: the compiled graphs of the model, in the order of their capture.
        known: what is known of graphs before they are compiled, by their key.
        inputs: arguments of the forward that is planned or runs; None outside it.
        beside: what a step holds beside the model's inputs.
        accumulates: whether the coming backward adds to the gradients in its graph.
        flights: forwards whose backward has not run.
        started: when the capture of the coming graph began, on time's ``perf_counter``.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        optimizer: Optimizer | None = None,
        progress: Callable[[str], None] | None = None,
        modelled: Modelled | None = None,
    ) -> None:
        self.model = model
        self.options = options
        self.optimizer = optimizer
        self.progress = progress
        self.modelled = modelled
        self.inputs: Any = None
        self.beside: Any = None
        self.accumulates = False
        self.forget()

    def forget(self) -> None:
        """Forget every graph, and what was learned."""
        self.graphs: list[Graph] = []
        self.begun = False  # a run whose graphs are to be made again
        self.known: dict[str, Known] = {}
        self.flights = Flights()
        self._holds: dict[str, int] = {}  # by graph: what an open forward of it holds
        self._like: dict[str, dict[str, None]] = {}  # graphs that differ in their sizes alone
        # What a forward looks through each time: to walk the model takes longer than an operator.
        self._parameters: list[Mapping[str, nn.Parameter | None]] | None = None
        self.started = 0.0
        self._warned = False

    def note_graphs(self) -> None:
        """Note what is known of the compiled graphs, for when they are compiled again."""
        for graph in self.graphs:
            self.known.setdefault(graph.key, graph.known())

    def look_again(self) -> None:
        """Forget what was looked up in the model, which may have new modules."""
        self._parameters = None

    # -------------------------------------------------------------- what is there

    @property
    def device(self) -> Device | Modelled:
        """The device the plans are for."""
        return self.modelled or device_of(placement(self.model))

    @property
    def budget_bytes(self) -> int | None:
        """The budget on that device, None for no limit."""
        return budget_of(self.options, self.device)

    def around(self) -> Around:
        """Return what is there during the step that is about to run."""
        device = self.device
        optimizer = OptimizerMemory()
        if self.optimizer is not None:
            optimizer = optimizer_memory(self.optimizer, device)
        inputs = (self.inputs, self.beside)
        resident = resident_bytes(self.model, inputs, device, gradients=not self.accumulates)
        return Around(
            resident_bytes=resident + optimizer.state_bytes,
            gradients_exist=self._has_gradients() and not self.accumulates,
            accumulates=self.accumulates,
            optimizer_bytes=optimizer.step_bytes,
        )

    def _has_gradients(self) -> bool:
        if self._parameters is None:
            self._parameters = [module._parameters for module in self.model.modules()]
        return any(
            parameter is not None and gradient_of(parameter) is not None
            for own in self._parameters
            for parameter in own.values()
        )

    @contextlib.contextmanager
    def asked(
        self, options: Options, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Iterator[None]:
        """Plan for these options and these inputs of a training forward in this context."""
        self.inputs = (args, kwargs)
        self.started = time.perf_counter()
        asked, self.options = self.options, options
        try:
            with training(self.model):
                yield
        finally:
            self.inputs = None
            self.options = asked

    def warn(self, message: str, *args: object) -> None:
        """Say it once for a model; again only to who asks for details."""
        _LOG.log(logging.DEBUG if self._warned else logging.WARNING, message, *args)
        self._warned = True

    # -------------------------------------------------------------- a graph's first plan

    def plan_now(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Plan:
        """Plan a training forward with these inputs, without running the model.

        Raises:
            InfeasibleBudget, CaptureError, InputError, PlanMismatch, PinError: as ``optimize``.
        """

        def use(joint: _torch.JointGraph) -> Plan:
            key = graph_key(joint)
            captured, known, made = self._planned(joint, key)
            self.known[key] = replace(known, absent=captured.absent, plan=made.plan)
            return made.plan

        with self.asked(self.options, args, kwargs):
            found: Plan = capture(self.model, args, kwargs, use)
        return found

    def plan(self, joint: _torch.JointGraph, key: str) -> tuple[Capture, Known, Made]:
        """Plan a joint graph: as a larger one is planned where there is one, else on its own."""
        self.look_again()
        found = self._from_a_larger(joint, key) or self._planned(joint, key)
        self._like.setdefault(shape_free_key(joint), {})[key] = None
        return found

    def _planned(self, joint: _torch.JointGraph, key: str) -> tuple[Capture, Known, Made]:
        """Plan a joint graph with what is known of it, or with a guess at what is not."""
        known = self.known.get(key)
        captured = read_joint(joint, known.absent if known is not None else None)
        if known is None:
            known, made = self.guess(captured)
            return captured, known, made
        again = None
        if known.plan is not None:
            again = self._unchanged(captured, known.around, known.plan)
        return captured, known, again or self._settled(captured, known.around)

    def _from_a_larger(
        self, joint: _torch.JointGraph, key: str
    ) -> tuple[Capture, Known, Made] | None:
        """Plan a graph that differs in its sizes alone from a larger one as that is planned."""
        if key in self.known or self.options.given is not None:
            return None
        known = {graph.key: graph.known() for graph in self.graphs}
        candidates = [
            (found, found.plan)
            for other in self._like.get(shape_free_key(joint), {})
            if (found := known.get(other) or self.known.get(other)) and found.plan is not None
        ]
        for larger, plan in sorted(candidates, key=lambda one: one[1].baseline_peak_bytes):
            captured = read_joint(joint, larger.absent)
            now = self.around()
            around = replace(
                larger.around,  # the loss takes no more than there; the first step shows how much
                resident_bytes=now.resident_bytes,
                gradients_exist=now.gradients_exist,
                accumulates=now.accumulates,
            )
            made = make_smaller(
                captured,
                around,
                self.options,
                self.device,
                plan,
                capture_s=time.perf_counter() - self.started,
            )
            if made is not None:
                return captured, Known(around, captured.absent), made
        return None

    @property
    def under_way(self) -> bool:
        """Whether a training has begun, be it that its graphs are to be made again."""
        return bool(self.graphs) or self.begun

    def guess(self, captured: Capture, *, over: bool = True) -> tuple[Known, Made]:
        """Plan a captured step of which nothing is known but what one can guess.

        Args:
            captured: the step.
            over: whether a training that has begun may go on over its budget with this one.

        Raises:
            InfeasibleBudget: it cannot fit.
        """
        around = self.around()
        most = guessed(captured, around, self.device.round_up)
        most = replace(most, beside_bytes=self._held_now())
        try:
            return Known(most), self._make(captured, most)
        except InfeasibleBudget as error:
            outputs = letting_go(captured)
            least = replace(around, gone=outputs, released=outputs)
            needed = self._smallest(captured, least).plan
            if not self._within_budget(needed):
                if not (over and self.under_way):
                    raise _of_a_guess(error, needed.peak_bytes) from None
                return Known(most), self._settled(captured, most)
        # It may fit, depending on what the user's loss allocates and which outputs are held. The
        # first step shows it; until then the smallest peak there is.
        return Known(most), self._smallest(captured, most)

    def _make(self, captured: Capture, around: Around, options: Options | None = None) -> Made:
        options = options or self.options
        if options.given is not None and self.graphs:
            # The user's plan is for one input shape; others are planned within its budget.
            budget = options.budget if options.budget is not None else options.given.budget_bytes
            options = replace(options, given=None, budget=budget)
        return make_plan(
            captured,
            around,
            options,
            self.device,
            model_name=type(self.model).__name__,
            capture_s=time.perf_counter() - self.started,
            progress=self.progress,
        )

    def write(
        self, joint: _torch.JointGraph, captured: Capture, known: Known, made: Made
    ) -> tuple[Known, Made, fx.GraphModule, fx.GraphModule]:
        """Write a plan's graphs; where the plan must change for it, return the one written.

        Should the backward start from other outputs than assumed, it must be possible. What is
        saved for that alone takes memory as well, so the plan has to know of it.
        """
        while True:
            in_case = known.around.in_case
            forward, backward = rewrite(made.formulation, made.plan.schedule, in_case)
            if not captured.absent:  # any other backward needs no more than this one
                return known, made, forward, backward
            lacks = lacking(joint, saved_placeholders(backward, captured))
            if set(lacks) <= set(in_case):
                return known, made, forward, backward
            around = replace(known.around, in_case=tuple(sorted({*in_case, *lacks})))
            known = replace(known, around=around)
            same = self._unchanged(captured, around, made.plan)
            if same is None or not self._within_budget(same.plan):
                same = self._settled(captured, around)
            made = same

    # -------------------------------------------------------------- after a watched step

    def revisions(self) -> Iterator[tuple[Graph, bool]]:
        """Plan again what turned out to be other than guessed, a graph at a time.

        Yields each graph of which a watched step has shown something, and whether its code must
        change. Where it must, what is known of it has been noted for its next capture.
        """
        found = list(self._found())
        if self.flights.news or any(graph.key in self.flights.seen for graph, _, _ in found):
            yield from self._revised_together(found)
            found = [one for one in found if one[0].key not in self.flights.seen]
        for graph, around, absent in found:
            graph.settled, graph.found = True, (around, absent)
            yield graph, self._revised(graph, around, absent)

    def _found(self) -> Iterator[Found]:
        """What watched steps have shown that the plans do not know."""
        gradients_exist = self._has_gradients() and not self.accumulates
        for graph in self.graphs:
            if graph.found is None:
                continue
            around, absent = graph.found
            if self.accumulates and not (around.accumulates or around.gradients_exist):
                resident = max(around.resident_bytes, self.around().resident_bytes)
                around = replace(around, accumulates=True, resident_bytes=resident)
            elif gradients_exist and not around.gradients_exist:
                # The loop accumulates: they count among what is there all the time.
                gradients = map(gradient_of, self.model.parameters())
                there = distinct_bytes((g for g in gradients if g is not None), self.device)
                around = replace(
                    around, gradients_exist=True, resident_bytes=around.resident_bytes + there
                )
            elif graph.settled:
                continue
            yield graph, around, absent

    def _revised(self, graph: Graph, around: Around, absent: frozenset[int]) -> bool:
        """Make a graph's plan true to a watched step; return whether its code must change."""
        self.started = time.perf_counter()
        if absent != graph.captured.absent:
            self.known[graph.key] = graph.known_as(replace(around, in_case=()), absent)
            return True
        if graph.guessed_well(around) and self._within_budget(graph.made.plan):
            return False
        same = self._unchanged(graph.captured, around, graph.made.plan)
        made = same
        # A plan of the user's stays; one of ours may be able to do better now.
        better = (
            self.options.given is None
            and graph.made.plan.extra_time_s > 0
            and graph.made.plan.origin.get("plan") != OF_A_LARGER
        )
        if made is None or better or not self._within_budget(made.plan):
            made = self._settled(graph.captured, around)
        if same is not None and made.plan.schedule == same.plan.schedule:
            graph.around, graph.made = around, made
            return False
        self.known[graph.key] = replace(graph.known_as(around, absent), plan=made.plan)
        return True

    # -------------------------------------------------------------- several forwards at once

    def _held(self) -> dict[str, int]:
        """What an open forward of each graph holds."""
        self._holds.update({graph.key: graph.made.plan.trace.held_bytes for graph in self.graphs})
        return self._holds

    def _held_now(self) -> int:
        """What the forwards hold that are open now."""
        keys = self.flights.open_keys()
        held = self._held() if keys else {}
        return sum(held.get(key, 0) for key in keys)

    def _revised_together(self, found: Sequence[Found]) -> Iterator[tuple[Graph, bool]]:
        """Plan the graphs again whose forwards were open beside others."""
        self.flights.news = False
        self.started = time.perf_counter()
        shown = {graph.key: (around, absent) for graph, around, absent in found}
        graphs = {graph.key: graph for graph in self.graphs if graph.key in self.flights.seen}
        members = {key: self._member(graph, shown.get(key)) for key, graph in graphs.items()}
        planned = self._planned_together(graphs, members, anew=any(key in shown for key in graphs))
        for key, (around, made) in planned.items():
            graph, absent = graphs[key], members[key].captured.absent
            known = graph.known()
            if key in shown:
                graph.settled, graph.found = True, (around, absent)
                known = graph.known_as(around, absent)
            same = absent == graph.captured.absent
            if same and made.plan.schedule == graph.made.plan.schedule:
                graph.around, graph.made = around, made
                yield graph, False
            else:
                self.known[key] = replace(known, around=around, absent=absent, plan=made.plan)
                yield graph, True

    def _member(self, graph: Graph, shown: tuple[Around, frozenset[int]] | None) -> Member:
        captured, around = graph.captured, graph.around
        if shown is not None:
            around, absent = shown
            if absent != captured.absent:
                captured = read_joint(graph.joint, absent)
                around = replace(around, in_case=())
        made = 0  # where gradients are there before the step, they count as such
        if not around.gradients_exist:
            made = gradient_bytes(captured, self.device.round_up)

        def beside(held: Mapping[str, int], kept: int) -> int:
            return self.flights.bytes_beside(graph.key, held, made, kept)

        return Member(captured, replace(around, beside_bytes=0), beside)

    def _planned_together(
        self, graphs: Mapping[str, Graph], members: Mapping[str, Member], *, anew: bool
    ) -> dict[str, tuple[Around, Made]]:
        """Plan them as they are planned already, where that is the user's word or still right."""
        held = dict(self._held())
        arounds = {
            key: replace(
                member.around,
                beside_bytes=member.beside(held, kept_bytes(graphs[key].made.plan)),
            )
            for key, member in members.items()
        }
        if self.options.given is not None or not anew:
            same = {
                key: self._unchanged(members[key].captured, around, graphs[key].made.plan)
                for key, around in arounds.items()
            }
            kept = {key: (arounds[key], made) for key, made in same.items() if made is not None}
            fit = all(self._within_budget(made.plan) for _, made in kept.values())
            if self.options.given is not None or (fit and len(kept) == len(members)):
                return kept

        asked_s = self.options.time_limit_s
        end = time.perf_counter() + asked_s

        def share_s() -> float:
            """Many are solved: each takes a part of what is left, and the last ones a little."""
            return max((end - time.perf_counter()) / 4, asked_s / 100)

        def make(captured: Capture, around: Around, bounded: bool) -> Made:
            options = self.options if bounded else no_limit(self.options)
            return self._make(captured, around, replace(options, time_limit_s=share_s()))

        elsewhere = {key: size for key, size in held.items() if key not in members}
        planned = plan_together(members, elsewhere, make, self.budget_bytes, share_s)
        highest = max((made.plan.peak_bytes for _, made in planned.values()), default=0)
        if self.budget_bytes is not None and highest > self.budget_bytes:
            self._warn_of_the_smallest(self.budget_bytes, highest)
        return planned

    # -------------------------------------------------------------- with what is known

    def _unchanged(self, captured: Capture, around: Around, plan: Plan) -> Made | None:
        """The plan's schedule on the step as it is known now; None where it is not possible."""
        free, device = no_limit(self.options), self.device
        capture_s = plan.stages_s.get("capture", 0.0)
        made: Made | None
        if plan.origin.get("plan") == OF_A_LARGER:
            made = make_smaller(
                captured, around, free, device, plan, capture_s=capture_s, again=True
            )
            if made is None:
                return None
        else:
            try:
                made = make_plan(
                    captured,
                    around,
                    replace(free, given=plan),
                    device,
                    model_name=type(self.model).__name__,
                    capture_s=capture_s,
                    progress=self.progress,
                )
            except PlanMismatch:  # it relied on what the user turned out not to hold
                return None
        return Made(replace(made.plan, budget_bytes=self.budget_bytes), made.formulation)

    def _settled(self, captured: Capture, around: Around) -> Made:
        """Plan a step that is known. Training goes on where the budget turns out too small.

        A budget that is too small whatever the user does around the graph has been refused at the
        first forward. What is left is the user's loss or accumulated gradients, and a run that has
        begun is not broken off for them: the smallest peak there is, and a warning.
        """
        try:
            return self._make(captured, around)
        except InfeasibleBudget as error:
            self._warn_of_the_smallest(error.budget_bytes, error.minimum_bytes)
            return self._smallest(captured, around)

    def _warn_of_the_smallest(self, budget_bytes: int, needed_bytes: int) -> None:
        self.warn(
            "the budget of %s bytes cannot be kept: with what the training loop allocates "
            "around the model (its loss, gradients kept from before, other forwards before the "
            "backward) a step needs at least %s bytes. It runs with that peak.",
            f"{budget_bytes:,}",
            f"{needed_bytes:,}",
        )

    def _smallest(self, captured: Capture, around: Around) -> Made:
        """The plan with the smallest peak there is."""
        made = self._make(captured, around, no_limit(self.options))
        return smallest(made, self.budget_bytes, self.options.time_limit_s)

    def _within_budget(self, plan: Plan) -> bool:
        budget_bytes = self.budget_bytes
        return budget_bytes is None or plan.peak_bytes <= budget_bytes


def _of_a_guess(error: InfeasibleBudget, needed_bytes: int) -> InfeasibleBudget:
    """The error of a step of which it is not known what the loop holds: what holds without that."""
    if needed_bytes >= error.minimum_bytes:
        return error
    hint = (
        "That lets the training loop hold the outputs, and its loss save as much again. A loop "
        f"that lets go of them before the backward needs little more than {needed_bytes:,} bytes."
    )
    return InfeasibleBudget(
        error.budget_bytes,
        error.minimum_bytes,
        error.tensors,
        f"{error.hint}\n{hint}" if error.hint else hint,
        error.bound_bytes,
    )
