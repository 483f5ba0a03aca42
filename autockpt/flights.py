"""Flights: forwards of one model whose backward has not run yet, and what they hold meanwhile.

A loss over two views of a sample, a judge called on what is real and what is made, a cell called in
a loop: several forwards stand open when the backward begins. Each holds what its plan keeps until
its own backward has run, and the others run beside that. A backward that keeps its graph leaves the
forward open, and all of what it has saved with it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from autockpt import _torch
from autockpt.device import Device
from autockpt.roofline import Modelled

__all__ = ["Beside", "Flights", "memory_of"]

# Memory of tensors by its key: a weak reference and bytes.
Memory = dict[int, tuple[_torch.StorageWeakRef, int]]

# Mixtures of open forwards that are remembered for a graph; further ones are not planned for.
_MIXTURES = 16


@dataclass(frozen=True)
class Beside:
    """What is there beside a forward or its backward.

    Attributes:
        others: the graphs of the other open forwards, by key, sorted.
        gradients: whether one of them has had its backward, whose gradients are there as well.
        extra_bytes: their inputs that are none of this one's, and what is still there of those
            that have had their backward; less the inputs of this one that they hold as outputs.
        keeps_graph: whether its backward may run again, so that what was saved stays.
    """

    others: tuple[str, ...] = ()
    gradients: bool = False
    extra_bytes: int = 0
    keeps_graph: bool = False

    def covers(self, other: Beside) -> bool:
        """Return whether no more is there in ``other``."""
        fewer = Counter(other.others) <= Counter(self.others)
        more = self.extra_bytes >= other.extra_bytes
        as_long = self.gradients >= other.gradients and self.keeps_graph >= other.keeps_graph
        return fewer and more and as_long

    def bytes(self, held: Mapping[str, int], gradient_bytes: int, kept_bytes: int) -> int:
        """Return what it comes to, where each graph's open forward holds so much.

        Args:
            held: graph -> what its open forward holds.
            gradient_bytes: the gradients that a backward makes.
            kept_bytes: by how much a backward that keeps its graph raises the peak.
        """
        forwards = sum(held.get(key, 0) for key in self.others) + self.extra_bytes
        gradients = gradient_bytes if self.gradients else 0
        return forwards + gradients + (kept_bytes if self.keeps_graph else 0)


class _Flight:
    """One forward between its begin and the begin of its backward."""

    def __init__(self, key: str, node: Any, inputs: Memory, outputs: Memory) -> None:
        self.key = key
        self.inputs = inputs
        self.outputs = outputs
        self.landed = False
        self.times = 0  # that its backward has begun
        self.landed_meanwhile: list[_Flight] = []
        self._node = weakref.ref(node)

    def is_open(self) -> bool:
        return not self.landed and self._node() is not None


class Flights:
    """The open forwards of one model.

    Attributes:
        seen: graph -> what has been there beside it, so far as a backward has followed.
        news: whether something has been seen since this was last set to False.
    """

    def __init__(self) -> None:
        self.seen: dict[str, list[Beside]] = {}
        self.news = False
        self._open: list[_Flight] = []

    def begin(self, key: str, node: Any, inputs: Memory, outputs: Memory) -> None:
        """A forward of this graph has run; ``node`` stands for it in autograd's graph."""
        self._forget_landed()
        flight = _Flight(key, node, inputs, outputs)
        before = self._beside(flight)
        self._open.append(flight)
        _torch.before_backward(node, lambda: self._backward_begins(flight, before))

    def open_keys(self) -> tuple[str, ...]:
        """Return the graphs of the open forwards."""
        self._forget_landed()
        return tuple(sorted(flight.key for flight in self._open))

    def _forget_landed(self) -> None:
        self._open = [flight for flight in self._open if flight.is_open()]

    def _beside(self, flight: _Flight) -> Beside:
        others = [other for other in self._open if other is not flight and other.is_open()]
        made = {key for other in others for key in other.outputs}
        there: Memory = {}
        for other in (*others, *flight.landed_meanwhile):
            there |= other.inputs
        for other in flight.landed_meanwhile:
            there |= other.outputs
        extra = sum(
            size
            for key, (ref, size) in there.items()
            if key not in flight.inputs and key not in made and not ref.expired()
        )
        extra -= sum(size for key, (_, size) in flight.inputs.items() if key in made)
        keys = tuple(sorted(other.key for other in others))
        return Beside(keys, bool(flight.landed_meanwhile or flight.times), extra)

    def _backward_begins(self, flight: _Flight, before: Beside) -> None:
        keeps_graph = _torch.keeps_graph()
        for beside in (before, replace(self._beside(flight), keeps_graph=keeps_graph)):
            self._note(flight.key, beside)
        flight.times += 1
        flight.landed_meanwhile = []
        for other in self._open:
            if other is not flight and other.is_open():
                other.landed_meanwhile.append(flight)
        flight.landed = not keeps_graph

    def _note(self, key: str, beside: Beside) -> None:
        if not (beside.others or beside.gradients or beside.keeps_graph):
            return
        known = self.seen.setdefault(key, [])
        if any(other.covers(beside) for other in known):
            return
        known[:] = [other for other in known if not beside.covers(other)]
        if len(known) < _MIXTURES:
            known.append(beside)
            self.news = True

    def bytes_beside(
        self, key: str, held: Mapping[str, int], gradient_bytes: int, kept_bytes: int
    ) -> int:
        """Return the most that has been there beside a graph; see :meth:`Beside.bytes`."""
        mixtures = self.seen.get(key, ())
        return max((one.bytes(held, gradient_bytes, kept_bytes) for one in mixtures), default=0)


def memory_of(found: Iterable[torch.Tensor], device: Device | Modelled) -> Memory:
    """Return the memory on ``device`` that tensors live in."""
    memory: Memory = {}
    for tensor in found:
        if tensor.device.type == device.kind.type and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            ref = _torch.StorageWeakRef(storage)
            memory[ref.cdata] = (ref, device.round_up(storage.nbytes()))
    return memory
