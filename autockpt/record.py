"""Record: one training step of several graphs as it happened, with what runs plainly between them.

Every operator outside the graphs is seen as it is dispatched: what memory it allocates, its
workspace, and when that memory is released. Of the graphs it is seen when they run and which memory
they are given and hand out; what they do inside is known from their capture.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from autockpt import _torch
from autockpt.device import Device
from autockpt.inplace import is_dense

__all__ = ["Event", "Kind", "Record", "Recorder"]

# Memory from before the step: parameters, buffers, inputs.
OUTSIDE = -1


class Kind(Enum):
    """What happened."""

    OPERATOR = "an operator outside the graphs"
    FORWARD = "a graph's forward"
    BACKWARD = "a graph's backward"


@dataclass(frozen=True)
class Event:
    """One thing that happened during the step.

    Attributes:
        kind: what.
        name: the operator's name.
        graph: whose forward or backward ran.
        inputs: for each tensor a graph was given its memory; ``OUTSIDE`` where it is older than
            the step. For an operator what it read.
        outputs: for each tensor a graph handed out its memory; for an operator what it allocated.
        held: of what a graph's backward was given, what still lay there as it ended.
        workspace_bytes: allocated and freed inside an operator.
    """

    kind: Kind
    name: str = ""
    graph: Any = None
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    workspace_bytes: int = 0


@dataclass
class Record:
    """The events of a step, and the life of each block of memory seen outside the graphs.

    Attributes:
        events: in order.
        size_bytes: of each block, by its number.
        died: the event during or after which a block was released; not for what still lives.
        complete: whether the backward came to its end.
        within: whether a backward ran inside the forward, which took gradients itself.
    """

    events: list[Event] = field(default_factory=list)
    size_bytes: list[int] = field(default_factory=list)
    died: dict[int, int] = field(default_factory=dict)
    complete: bool = False
    within: bool = False

    @property
    def sequence(self) -> tuple[Any, ...]:
        """The graphs whose forwards ran, in order."""
        return tuple(e.graph for e in self.events if e.kind is Kind.FORWARD)

    @property
    def regular(self) -> bool:
        """Whether each graph ran forward once and then backward at most once."""
        if self.within:
            return False
        forward = self.sequence
        backward = [e.graph for e in self.events if e.kind is Kind.BACKWARD]
        kinds = [e.kind for e in self.events if e.kind is not Kind.OPERATOR]
        ordered = kinds == [Kind.FORWARD] * len(forward) + [Kind.BACKWARD] * len(backward)
        return ordered and len(set(forward)) == len(forward) and len(set(backward)) == len(backward)


class Recorder:
    """Records the step that is running. Enter it before the forward, leave it after the step."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.record = Record()
        self.active = True
        self._alive: dict[int, tuple[_torch.StorageWeakRef, int]] = {}
        self._outside: dict[int, _torch.StorageWeakRef] = {}
        self._workspace: dict[Any, int] = {}
        self._mode = _torch.OperatorMode(self._operator)
        self._ends = False
        self._mode.enter_for(self)

    def leave(self) -> bool:
        """Stop recording; return whether the mode could be left here."""
        self.active = False
        return self._mode.leave()

    # -------------------------------------------------------------- what the graphs tell

    def forward(
        self,
        graph: Any,
        run: Callable[[list[Any]], Any],
        args: list[Any],
        count: int,
        saved: Collection[int],
    ) -> Any:
        """Run a graph's forward, whose first ``count`` outputs are the user's.

        What it saves of them and of its inputs (those at ``saved``) it saves as copies, so that
        the memory is seen to live as long as others hold it: under a plan it may not be saved.
        """
        if not self.active:
            return run(args)
        inputs = self._given(args)
        with self._paused():
            for position in saved:
                if inputs[position] != OUTSIDE:
                    args[position] = _copy(args[position])
            outputs = run(args)
            users = {_torch.storage_key(v) for v in outputs[:count] if _is_plain(v)}
            own = [
                _copy(v) if _is_plain(v) and _torch.storage_key(v) in users else v
                for v in outputs[count:]
            ]
            outputs = (*outputs[:count], *own)
        handed_out = tuple(self._born(value) for value in outputs[:count])
        self.record.events.append(Event(Kind.FORWARD, "", graph, inputs, handed_out))
        return outputs

    def backward(
        self, graph: Any, run: Callable[[list[Any]], Any], args: list[Any], tangents: slice
    ) -> Any:
        """Run a graph's backward on saved values and tangents."""
        if not self.active:
            return run(args)
        self.backward_begins()
        inputs = self._given(args[tangents])
        with self._paused():
            gradients = run(args)
        there = {number for ref, number in self._alive.values() if not ref.expired()}
        held = tuple(number for number in inputs if number in there)
        handed_out = tuple(self._born(value) for value in gradients)
        self.record.events.append(Event(Kind.BACKWARD, "", graph, inputs, handed_out, held))
        return gradients

    def backward_begins(self) -> None:
        """From inside the step's backward: the record ends with it."""
        if self.active and not self._ends:
            self._ends = True
            _torch.at_backward_end(self._finish)

    def _finish(self) -> None:
        if self.active:
            self._collect()
            self.record.complete = True
            self.active = False

    # -------------------------------------------------------------- operators

    def _operator(self, name: str, run: Callable[[], Any], inputs: Sequence[torch.Tensor]) -> Any:
        if not self.active:
            return run()
        self._collect()
        if name == "aten.clone.default" and len(inputs) > 1:
            # Torch copies a sparse gradient only where somebody looks on.
            copied = run()
            self._same(_torch.strided_parts(copied), inputs)
            return copied
        read = tuple(dict.fromkeys(self._number(tensor) for tensor in inputs))
        key = (name, *((tuple(t.shape), tuple(t.stride()), t.dtype) for t in inputs))
        measure = key not in self._workspace and not _torch.is_profiled()
        if not measure:
            result, peak = run(), 0
        else:
            results: list[Any] = []
            with self._paused():
                peak = self.device.peak_of(lambda: results.append(run()))
            (result,) = results
        leaves = _torch.strided_parts(result)
        count = len(self.record.size_bytes)
        for leaf in leaves:
            self._born(leaf)
        fresh = tuple(range(count, len(self.record.size_bytes)))
        if measure:
            own = sum(self.record.size_bytes[number] for number in fresh)
            self._workspace[key] = max(0, peak - own)
        workspace_bytes = self._workspace.get(key, 0)
        if fresh or workspace_bytes or any(number != OUTSIDE for number in read):
            self.record.events.append(
                Event(Kind.OPERATOR, name, None, read, fresh, workspace_bytes=workspace_bytes)
            )
        return result

    # -------------------------------------------------------------- memory

    @contextmanager
    def _paused(self) -> Iterator[None]:
        self._collect()
        self.active = False
        try:
            yield
        finally:
            self.active = True

    def _given(self, values: Sequence[Any]) -> tuple[int, ...]:
        return tuple(self._number(v) if _is_plain(v) else OUTSIDE for v in values)

    def _number(self, tensor: torch.Tensor) -> int:
        """Return the number of a tensor's memory; what is not known is older than the step."""
        storage = tensor.untyped_storage()
        known = self._alive.get(storage._cdata)
        if known is not None:
            return known[1]
        self._outside[storage._cdata] = _torch.StorageWeakRef(storage)
        return OUTSIDE

    def _born(self, value: Any) -> int:
        """Return the number of a result's memory, a new one where it was not there before."""
        if not _is_plain(value):
            return OUTSIDE
        storage = value.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return self._alive[key][1]
        if key in self._outside:
            return OUTSIDE
        number = len(self.record.size_bytes)
        self.record.size_bytes.append(self.device.round_up(storage.nbytes()))
        self._alive[key] = (_torch.StorageWeakRef(storage), number)
        return number

    def _same(self, copies: Sequence[torch.Tensor], originals: Sequence[torch.Tensor]) -> None:
        """Take copies for what they were made from."""
        for copy, original in zip(copies, originals, strict=True):
            ref, number = _torch.StorageWeakRef(copy.untyped_storage()), self._number(original)
            if number == OUTSIDE:
                self._outside[ref.cdata] = ref
            else:
                self._alive[ref.cdata] = ref, number

    def _collect(self) -> None:
        last = len(self.record.events) - 1
        gone = [k for k, (ref, _) in self._alive.items() if ref.expired()]
        numbers = [self._alive.pop(key)[1] for key in gone]
        alive = {number for _, number in self._alive.values()} if numbers else set()
        self.record.died.update((number, last) for number in numbers if number not in alive)
        for key in [k for k, ref in self._outside.items() if ref.expired()]:
            del self._outside[key]


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that is laid out in the same way; the tensor itself where there is none."""
    return tensor.clone() if is_dense(tensor) else tensor


def _is_plain(value: Any) -> bool:
    """Whether a value is a tensor with memory of its own that can be looked at."""
    kinds = (torch.Tensor, torch.nn.Parameter)
    return type(value) in kinds and value.layout is torch.strided
