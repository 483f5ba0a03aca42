"""Graphs: the compiled steps of one model, what was learned about each, and its plan.

The first step of a graph runs under a plan made from a guess of what the user does around it: what
the loss allocates, which outputs are kept, which of them the backward starts from. The step is
watched, and where it differs from the guess the plan is made again before the next one.
"""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autockpt import _torch
from autockpt.backwards import Versions, versions
from autockpt.capture import Capture
from autockpt.device import Device
from autockpt.formulate import Around
from autockpt.out_of_memory import Place, explained
from autockpt.planning import Made
from autockpt.roofline import Modelled
from autockpt.tangents import tensors
from autockpt.unforeseen import unforeseen_backward
from autockpt_solvers.plan import Plan

__all__ = [
    "Graph",
    "Known",
    "graph_key",
    "guessed",
    "letting_go",
    "saved_placeholders",
    "shape_free_key",
]


@dataclass(frozen=True)
class Known:
    """What is known of a graph before it is compiled.

    Attributes:
        around: what the step allocates outside it.
        absent: tangents that do not arrive; None where it is not known.
        plan: a plan made before, to be used again; None where one is to be made.
        settled: whether a step was watched, so that nothing is guessed.
        watched: the number of steps watched so far.
    """

    around: Around
    absent: frozenset[int] | None = None
    plan: Plan | None = None
    settled: bool = False
    watched: int = 0


def graph_key(joint: _torch.JointGraph) -> str:
    """Return a digest of a joint graph: equal graphs of one model agree in it."""
    digest = hashlib.sha256()
    for node in joint.module.graph.nodes:
        shapes = [(tuple(t.shape), tuple(t.stride()), str(t.dtype)) for t in tensors(node)]
        digest.update(repr((node.name, str(node.target), shapes)).encode())
    digest.update(repr((joint.written, joint.new_values)).encode())
    return digest.hexdigest()


def shape_free_key(joint: _torch.JointGraph) -> str:
    """Return a digest in which graphs of one model that differ in sizes alone agree."""
    digest = hashlib.sha256()
    for node in joint.module.graph.nodes:
        digest.update(repr((node.name, str(node.target))).encode())
    return digest.hexdigest()


def guessed(captured: Capture, around: Around, round_up: Callable[[int], int]) -> Around:
    """Return ``around`` with what the user's loss costs at most, as far as one can guess.

    A cross entropy makes two more tensors of the outputs' size beside their gradients; a mean
    squared error three, one of which its result holds on to. A scaled loss is a number, and
    its backward starts from another.
    """
    outside = 0
    for position, tangent in enumerate(captured.joint.tangents):
        value = tensors(tangent)[0]
        if position not in captured.absent and value.numel() > 1:
            outside += value.untyped_storage().nbytes()
    numbers = 2 * round_up(4)
    return replace(around, loss_bytes=3 * outside + numbers, loss_held_bytes=outside + numbers)


def letting_go(captured: Capture) -> tuple[bool, ...]:
    """Return for each forward output whether a user may let go of it before the backward begins.

    None of them where one is a number: that is the loss, and the others are handed out with it.
    """
    returns_loss = any(
        isinstance(value, fx.Node) and own and all(t.numel() == 1 for t in tensors(value))
        for value, own in zip(captured.joint.forward_outputs, captured.outputs, strict=True)
    )
    return (not returns_loss,) * len(captured.outputs)


def saved_placeholders(backward: fx.GraphModule, captured: Capture) -> tuple[fx.Node, ...]:
    """Return a backward graph's placeholders of saved values: those before the tangents."""
    joint = captured.joint
    placeholders = backward.graph.find_nodes(op="placeholder")
    return tuple(
        placeholders[: len(placeholders) - len(joint.tangents) - len(joint.backward_seeds)]
    )


class Graph(_torch.Watch):
    """One compiled graph of a model: its plan, and the watch over its first step.

    Attributes:
        key: what it is known by.
        joint: the joint graph as torch handed it over.
        captured: the step as captured.
        around: what the plan takes to happen outside the graph.
        made: its plan.
        saved: placeholders of what the forward saves, in order.
        settled: whether a step has been watched.
        watched: the number of steps watched under earlier plans of this graph.
        unsure: whether the user may have let go of an output that the forward saves itself, which
            looks as if he held it.
        read: what the backward of the last forward reads of its inputs.
        ran: whether its forward ran in the model's last one.
        found: after a watched step, what was found: the ``Around`` and the absent tangents.
    """

    def __init__(
        self,
        key: str,
        joint: _torch.JointGraph,
        captured: Capture,
        known: Known,
        made: Made,
        device: Device | Modelled,
    ) -> None:
        self.key = key
        self.joint = joint
        self.captured = captured
        self.around = known.around
        self.made = made
        self.device = device
        self.saved: tuple[fx.Node, ...] = ()
        self.settled = known.settled
        self.watched = known.watched
        self.unsure = False
        self.found: tuple[Around, frozenset[int]] | None = None
        self._before: tuple[Around, frozenset[int]] | None = None
        self._again = False
        self._tracker: _torch.AllocationTracker | None = None
        self._outputs: list[_torch.StorageWeakRef | None] = []
        self._tangents: list[_torch.StorageWeakRef | None] = []
        self._own: list[bool] = []
        self._sizes: list[int] = []
        self.ran = False
        self.read: Versions = []
        self._reads: list[int] | None = None  # the inputs among what is saved
        self._others: dict[tuple[frozenset[int], bool], Callable[[list[Any]], Any]] = {}

    def known(self) -> Known:
        """Return what is known of this graph, for compiling it again."""
        return Known(self.around, self.captured.absent, self.made.plan, self.settled, self.watched)

    def known_as(self, around: Around, absent: frozenset[int]) -> Known:
        """Return what is known after a watched step; it is watched again where it left doubts."""
        settled = not self.unsure or self.watched > 0
        return Known(around, absent, None, settled, self.watched + 1)

    def guessed_well(self, around: Around) -> bool:
        """Return whether what a step was found to do fits the guess closely enough to keep it.

        It takes no more, and at most half a percent of the peak less.
        """
        guess = self.around
        if around == guess:
            return True
        less = max(
            guess.loss_bytes - around.loss_bytes, guess.loss_held_bytes - around.loss_held_bytes
        )
        no_more = (
            around.loss_bytes <= guess.loss_bytes
            and around.loss_held_bytes <= guess.loss_held_bytes
        )
        rest = replace(around, loss_bytes=guess.loss_bytes, loss_held_bytes=guess.loss_held_bytes)
        if guess.tangents_held is None and not self._holds_large_tangents(around):
            rest = replace(rest, tangents_held=None)
        return no_more and rest == guess and less <= self.made.plan.peak_bytes // 200

    def _holds_large_tangents(self, around: Around) -> bool:
        held = zip(self.captured.joint.tangents, around.tangents_held or (), strict=False)
        return any(lives_on and tensors(tangent)[0].numel() > 1 for tangent, lives_on in held)

    # -------------------------------------------------------------- running

    def forward_begins(self, inputs: Sequence[Any]) -> None:
        """Remember what the backward reads of the forward's inputs, and their versions."""
        if self._reads is None:
            saved = {placeholder.name for placeholder in self.saved}
            primals = enumerate(self.captured.joint.primals)
            self._reads = [i for i, primal in primals if primal.name in saved]
        self.read = versions([inputs[i] for i in self._reads])

    def forward_ends(self, outputs: Sequence[Any]) -> None:
        """Remember the user's outputs by weak references."""
        self.ran = True
        if self.settled:
            return
        user = outputs[: len(self.captured.outputs)]
        self._outputs = [
            _torch.StorageWeakRef(value.untyped_storage())
            if isinstance(value, torch.Tensor) and own
            else None
            for value, own in zip(user, self.captured.outputs, strict=True)
        ]
        saved = {
            _torch.storage_key(value)
            for value in outputs[len(self.captured.outputs) :]
            if isinstance(value, torch.Tensor)
        }
        self._own = [
            ref is not None and _torch.storage_key(value) in saved
            for value, ref in zip(user, self._outputs, strict=True)
        ]
        self._sizes = [
            self.device.round_up(value.untyped_storage().nbytes()) if ref is not None else 0
            for value, ref in zip(user, self._outputs, strict=True)
        ]

    def place(self, operation: int) -> Place:
        """Return where one of this graph's operations stands in the plan of the whole step."""
        return self.made.plan, operation

    def run_forward(self, run: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        """Run the forward graph."""
        return self._run(run, args)

    def _run(self, run: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        """Run generated code; where memory is not enough, say so in the plan's terms."""
        try:
            return run(args)
        except RuntimeError as error:
            operations = self.made.formulation.problem.operations
            told = explained(error, {op.name: i for i, op in enumerate(operations)}, self.place)
            if told is None:
                raise
            raise told from error

    def run_backward(self, run: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        """Run the backward that fits the tangents that have arrived."""
        count = len(self.captured.joint.tangents)
        end = len(args) - len(self.captured.joint.backward_seeds)
        absent = frozenset(i for i in range(count) if args[end - count + i] is None)
        if any(map(_torch.is_batched, args[end - count : end])):
            return self._run(self._other(absent, batched=True), args)
        # A backward that keeps its graph is followed by another, after a loss of its own.
        watched = not self.settled and (self.found is None or self._again)
        if watched:
            self._read_counter(args[end - count : end], absent)
        if absent == self.captured.absent:
            gradients = self._run(run, args)
        else:
            gradients = self._run(self._other(absent), args)
        if watched:
            self._see_what_is_left()
        return gradients

    def _other(
        self, absent: frozenset[int], *, batched: bool = False
    ) -> Callable[[list[Any]], Any]:
        """Return a backward that no plan has foreseen; with batched tangents nothing is written."""
        if (absent, batched) not in self._others:
            planned = None if batched else (self.made.formulation, self.made.plan.schedule)
            self._others[absent, batched] = _torch.boxed(
                unforeseen_backward(self.joint, absent, self.saved, planned)
            )
        return self._others[absent, batched]

    # -------------------------------------------------------------- watching the first step

    def watch_loss(self, node: Any) -> None:
        """Begin to count what the user's loss allocates, where this graph's forward just ran.

        Counting ends when the backward begins. The counting mode is left at the next forward or,
        where that comes first, when the autograd graph behind ``node`` is released: inside the
        backward it cannot be, since autograd puts the modes back when it returns.

        """
        if self.settled or not self.ran:
            return
        if not _torch.in_backward() and self._tracker is None and self.found is None:
            self._tracker = _torch.AllocationTracker(self.device.round_up)
            for ref, size in zip(self._outputs, self._sizes, strict=True):
                if ref is not None:
                    self._tracker.include(ref, size)
            self._tracker.enter_for(self)
            _torch.when_released(node, functools.partial(self.stop_watching, self._tracker))

    def stop_watching(self, tracker: _torch.AllocationTracker | None = None) -> None:
        """Leave the counting mode; where it cannot be left now, only turn it off.

        With ``tracker`` only where it is this one: an earlier forward's graph may go late.
        """
        if self._tracker is None or tracker not in (None, self._tracker):
            return
        self._tracker.active = False
        if self._tracker.leave():
            self._tracker = None

    def _read_counter(self, tangents: list[Any], absent: frozenset[int]) -> None:
        self._tangents = [
            None if t is None else _torch.StorageWeakRef(t.untyped_storage()) for t in tangents
        ]
        gone = tuple(ref is not None and ref.expired() for ref in self._outputs)
        self.unsure = any(own and not early for own, early in zip(self._own, gone, strict=True))
        if self.around.gone is not None:
            # Seen under another plan, which did not save them.
            gone = tuple(
                early or (own and before)
                for early, own, before in zip(gone, self._own, self.around.gone, strict=True)
            )
        loss_bytes = held = 0
        if self._tracker is not None:
            self._tracker.active = False
            self._tracker.count_now()
            # The gradients that have arrived and the outputs that are there count by themselves.
            there = sum(
                self.device.round_up(t.untyped_storage().nbytes())
                for t in tangents
                if t is not None
            )
            distinct = {
                ref.cdata: size
                for ref, size in zip(self._outputs, self._sizes, strict=True)
                if ref is not None and not ref.expired()
            }
            there += sum(distinct.values())
            held = max(0, self._tracker.live_bytes - there)
            loss_bytes = max(held, self._tracker.peak_bytes - there)
        around = replace(
            self.around,
            loss_bytes=loss_bytes,
            loss_held_bytes=held,
            released=None,
            gone=gone if any(gone) else None,
        )
        self._before = self.found
        self.found = (around, absent)

    def _see_what_is_left(self) -> None:
        assert self.found is not None
        around, absent = self.found
        tangents = tuple(ref is not None and not ref.expired() for ref in self._tangents)
        around = replace(around, tangents_held=tangents)
        released = tuple(ref is not None and ref.expired() for ref in self._outputs)
        if any(released):
            around = replace(around, released=released)
        if self._before is not None:
            around, absent = _most(self._before[0], around), self._before[1] & absent
        self.found = (around, absent)
        self._tangents = []
        self._again = self._tracker is not None and _torch.keeps_graph()
        if self._tracker is not None and self._again:
            self._tracker.active = True
        else:
            self._outputs = []


def _most(one: Around, other: Around) -> Around:
    """What two backwards of one forward need, whichever of them runs."""

    def joined(
        by: Callable[[bool, bool], bool], a: tuple[bool, ...] | None, b: tuple[bool, ...] | None
    ) -> tuple[bool, ...] | None:
        return None if a is None or b is None else tuple(map(by, a, b))

    return replace(
        other,
        loss_bytes=max(one.loss_bytes, other.loss_bytes),
        loss_held_bytes=max(one.loss_held_bytes, other.loss_held_bytes),
        released=joined(operator.and_, one.released, other.released),
        gone=joined(operator.and_, one.gone, other.gone),
        tangents_held=joined(operator.or_, one.tangents_held, other.tangents_held),
    )
