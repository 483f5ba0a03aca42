"""Formulate: a capture and its profile as a problem for the solvers.

This is the bridge between the two halves. It decides which operations may run again and what a
further run reads:

- a random operation draws once; a further run replays the generator's saved state;
- an operation that reads a buffer which the forward's end overwrites reads a copy of the old value,
  as does a further run of batch-norm in ``eval()``, whose statistics another forward may overwrite;
- batch-norm runs again without its running statistics;
- what the user holds, what the user pinned with ``keep``, and a copy that the model makes of its
  own buffer, to which it may write before the backward, runs once.

The saved states and old values are optional operations of the problem: a schedule that does not
use them does not make them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import fx

from autockpt import _torch
from autockpt.accumulate import is_leaf, products
from autockpt.capture import Capture
from autockpt.copies import copies_of_state
from autockpt.inplace import candidates, is_dense
from autockpt.pins import Pins
from autockpt.profile import Profile
from autockpt.tangents import tensors
from autockpt_solvers.problem import Operation, Problem, Storage

__all__ = ["Around", "Formulation", "Origin", "Role", "again", "formulate"]

aten = torch.ops.aten

# A saved state is worth it only where it frees much more than itself. So large a share also keeps
# the copy of the current state that a replay makes from mattering where it is not made.
_STATE_WORTH = 128


class Role(Enum):
    """What an operation of the problem stands for."""

    NODE = "a node of the captured graph"
    STATE = "saves the generator's state for a random node"
    OLD_VALUE = "copies an input that is overwritten before the backward"
    AROUND = "happens outside the captured graph"


@dataclass(frozen=True)
class Origin:
    """Where an operation of the problem comes from; ``node`` is None for what lies outside."""

    role: Role
    node: fx.Node | None = None


@dataclass(frozen=True)
class Around:
    """What a training step allocates around the captured graph.

    Attributes:
        resident_bytes: parameters, buffers, inputs, optimizer state, gradients there before.
        loss_bytes: peak allocated between the forward's return and the backward's begin, beyond
            the user's outputs and their gradients.
        loss_held_bytes: the part of it that lives on to the end of the backward.
        released: for each forward output whether the user lets go of it before the step ends.
        gone: for each forward output whether the user lets go of it before the backward begins;
            ``loss_bytes`` counts it then.
        gradients_exist: gradients are accumulated into existing ones after the backward graph.
        accumulates: they are added to existing ones inside it, each where it is made; no
            gradient is among ``resident_bytes`` then.
        optimizer_bytes: peak allocated inside the optimizer's step, beyond its state.
        tangents_held: for each output's gradient whether somebody holds it to the end of the
            backward; None where it is not known.
        in_case: names of forward nodes that are saved for a backward that starts from other
            outputs than the expected ones; this one does not read them.
        beside_bytes: what other forwards of the model hold whose backward has not run either.
    """

    resident_bytes: int = 0
    loss_bytes: int = 0
    loss_held_bytes: int = 0
    released: tuple[bool, ...] | None = None
    gone: tuple[bool, ...] | None = None
    gradients_exist: bool = False
    accumulates: bool = False
    optimizer_bytes: int = 0
    tangents_held: tuple[bool, ...] | None = None
    in_case: tuple[str, ...] = ()
    beside_bytes: int = 0


@dataclass(frozen=True)
class Formulation:
    """A problem and how its parts map to the capture.

    Attributes:
        problem: what the solvers see.
        capture: what it was made from.
        origins: for each operation of the problem where it comes from.
        states: random node -> storage of its saved generator state.
        old_values: primal that is overwritten, or may be -> storage of the copy of its old value.
        number_bytes: what numbers of Python's take that the backward may need.
    """

    problem: Problem
    capture: Capture
    origins: tuple[Origin, ...]
    states: dict[fx.Node, int]
    old_values: dict[fx.Node, int]
    number_bytes: int = 0


# The operator a further run uses in the place of the first, the positions of the arguments it takes
# over, and the number of outputs it has: the first ones.
_AGAIN: dict[Any, tuple[Any, tuple[int, ...], int]] = {
    aten._native_batch_norm_legit_functional.default: (
        aten._native_batch_norm_legit.no_stats,
        (0, 1, 2, 5, 6, 7),
        3,
    ),
}


_NUMBER_BYTES = 8

_EVALUATING_BATCH_NORMS = (
    aten._native_batch_norm_legit_no_training.default,
    aten._batch_norm_no_update.default,
)


def again(node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return the operator, the arguments and the keywords of a further run of a node."""
    if node.target in _AGAIN and node.args[5] is True:
        target, positions, _ = _AGAIN[node.target]
        return target, tuple(node.args[i] for i in positions), {}
    return node.target, node.args, dict(node.kwargs)


def formulate(
    capture: Capture,
    profile: Profile,
    around: Around,
    *,
    pins: Pins | None = None,
    state_bytes: int = 0,
    name: str = "",
    inplace: bool = False,
) -> Formulation:
    """Return the problem of one training step.

    Args:
        capture: the step's operations.
        profile: their figures.
        around: what else the step allocates.
        pins: the user's word on what to keep and to recompute.
        state_bytes: bytes of one saved generator state on the device.
        name: the model's name.
        inplace: whether operations may be written over what dies there.

    Raises:
        PinError: a pin matches nothing, or two contradict.
    """
    builder = _Builder(capture, profile, around, pins or Pins(), state_bytes, name)
    return builder.build(inplace)


class _Builder:
    def __init__(
        self,
        capture: Capture,
        profile: Profile,
        around: Around,
        pins: Pins,
        state_bytes: int,
        name: str,
    ) -> None:
        self.capture = capture
        self.profile = profile
        self.around = around
        self.pins = pins
        self.state_bytes = state_bytes
        self.name = name
        self.operations: list[Operation] = []
        self.origins: list[Origin] = []
        self.states: dict[fx.Node, int] = {}
        self.old_values: dict[fx.Node, int] = {}
        self.paths = [_torch.module_path(node) for node in capture.operations]
        self.sizes = self._sizes()
        self.in_graph = around.accumulates and not around.gradients_exist
        self.gradient_bytes = self._gradient_bytes() if self.in_graph else 0
        for product in products(capture) if self.in_graph else ():
            self.sizes[capture.lives_in[product][0]] = 0
        self.storages = [
            Storage(s.name, size) for s, size in zip(capture.storages, self.sizes, strict=True)
        ]
        stale = {_torch.storage_key(t) for p in capture.stale for t in tensors(p)}
        self.stale = {
            p
            for p in capture.joint.primals
            if any(_torch.storage_key(t) in stale for t in tensors(p))
        }
        self.held = self._held()
        self.meant = copies_of_state(capture.joint)
        self.loss_storage = -1

    def build(self, inplace: bool) -> Formulation:
        capture = self.capture
        self.pins.check(self.paths[: capture.barrier])
        backward_reads = {
            primal
            for node in capture.operations[capture.barrier :]
            for primal in self._stale_inputs(node.all_input_nodes)
        }
        for index in range(capture.barrier):
            node = capture.operations[index]
            recomputable, reason, reads, outputs = self._further_run(index)
            if recomputable and _torch.is_random(node):
                self.states[node] = self._optional(
                    f"state_of_{node.name}", self.state_bytes, Origin(Role.STATE, node)
                )
                reads = (*reads, self.states[node])
            stale = (
                self._stale_inputs(again(node)[1:]) | _statistics(node) if recomputable else set()
            )
            for primal in sorted(
                stale | self._stale_inputs(node.all_input_nodes), key=lambda p: p.name
            ):
                if primal in stale or primal in backward_reads:
                    self._old_value(primal, primal in backward_reads)
            for primal in sorted(stale, key=lambda p: p.name):
                reads = (*reads, self.old_values[primal])
            self._node(index, reason, reads if recomputable else None, outputs)
        for primal in sorted(backward_reads, key=lambda p: p.name):
            self._old_value(primal, True)
        barrier = len(self.operations)
        self._loss()
        for index in range(capture.barrier, len(capture.operations)):
            node = capture.operations[index]
            olds = tuple(
                self.old_values[p]
                for p in sorted(self._stale_inputs(node.all_input_nodes), key=lambda p: p.name)
            )
            self._node(index, "", None, (), extra_inputs=olds)
        end = self._accumulate()
        forward_made = {s for own in capture.outputs for s in own if self._forward(s)}
        end |= self._held_tangents()
        at_barrier = frozenset(forward_made | self.held | set(capture.new_buffers))
        at_end = frozenset((end | self.held | {self.loss_storage}) - {-1})
        if inplace:
            self._write_in_place(at_barrier | at_end)
        number_bytes = self._number_bytes()
        problem = Problem(
            storages=tuple(self.storages),
            operations=tuple(self.operations),
            barrier=barrier,
            resident_bytes=self.around.resident_bytes
            + self.around.beside_bytes
            + number_bytes
            + self._state_bytes_in_case()
            + self.gradient_bytes,
            live_at_barrier=at_barrier,
            live_at_end=at_end,
            name=self.name,
        )
        return Formulation(
            self._pinned(problem),
            capture,
            tuple(self.origins),
            self.states,
            self.old_values,
            number_bytes,
        )

    # -------------------------------------------------------------- parts

    def _number_bytes(self) -> int:
        """What they take as tensors, on the CPU."""
        operations = self.capture.operations
        if not all(t.device.type == "cpu" for node in operations for t in tensors(node)):
            return 0
        read = {arg for node in operations if tensors(node) for arg in node.all_input_nodes}
        numbers = [node for node in read if isinstance(node.meta.get("val"), _torch.Number)]
        return _NUMBER_BYTES * len(numbers)

    def _state_bytes_in_case(self) -> int:
        """What saved states of the generator take that no schedule asks for."""
        in_case = set(self.around.in_case)
        random = (n for n in self.capture.operations if f"state_of_{n.name}" in in_case)
        return self.state_bytes * sum(1 for _ in random)

    def _held_tangents(self) -> set[int]:
        """Gradients of outputs that live on: loss.backward() keeps the one it starts from.

        As a guess, that is one of these where nothing of the user's stands between.
        """
        tangents = self.capture.joint.tangents
        held = self.around.tangents_held or tuple(
            tensors(tangent)[0].dim() == 0 and self.loss_storage < 0 for tangent in tangents
        )
        return {
            s
            for tangent, lives_on in zip(tangents, held, strict=True)
            if lives_on
            for s in self.capture.lives_in[tangent]
            if s >= 0
        }

    def _sizes(self) -> list[int]:
        sizes = [s.size_bytes for s in self.capture.storages]
        for node, measured in zip(self.capture.operations, self.profile.measured, strict=True):
            found = self.capture.lives_in[node]
            if len(found) == len(measured.output_bytes):
                for storage, size in zip(found, measured.output_bytes, strict=True):
                    if (
                        storage >= 0
                        and self.capture.storages[storage].operation >= 0
                        and (
                            self.capture.operations[self.capture.storages[storage].operation]
                            is node
                        )
                    ):
                        sizes[storage] = size
        return sizes

    def _forward(self, storage: int) -> bool:
        return 0 <= self.capture.storages[storage].operation < self.capture.barrier

    def _held(self) -> set[int]:
        """Forward storages that the user holds to the end of the step, as output or gradient."""
        released = self.around.released or (False,) * len(self.capture.outputs)
        held = {
            s
            for own, gone in zip(self.capture.outputs, released, strict=True)
            if not gone
            for s in own
        }
        held |= {storage for _, storage, _ in self.capture.gradients}
        in_case = set(self.around.in_case)
        held |= {
            s for node, own in self.capture.lives_in.items() if node.name in in_case for s in own
        }
        return {s for s in held if self._forward(s)}

    def _stale_inputs(self, arguments: Any) -> set[fx.Node]:
        """Overwritten primals that the arguments read, directly or through views."""
        found: set[fx.Node] = set()
        nodes: list[fx.Node] = []
        fx.node.map_arg(tuple(arguments), nodes.append)
        while nodes:
            node = nodes.pop()
            if node in self.stale:
                found.add(node)
            elif self.capture.is_view(node):
                nodes += node.all_input_nodes
        return found

    def _further_run(self, index: int) -> tuple[bool, str, tuple[int, ...], tuple[int, ...]]:
        """Whether a forward operation may run again, why not, and what it then reads and makes."""
        capture, node = self.capture, self.capture.operations[index]
        outputs = self._outputs(index)
        keep = self.pins.kept(self.paths[index])
        if not outputs:
            return False, "it only checks", (), ()
        if self.held & set(outputs):
            return False, "the user holds its output", (), ()
        if set(outputs) <= set(capture.new_buffers):
            return False, "it makes a buffer's new value", (), ()
        if keep:
            return False, f"pinned by keep={keep!r}", (), ()
        if node in self.meant:
            return False, "it copies a buffer that may be written before the backward", (), ()
        if not _torch.is_operator(node):
            return False, f"{node.target} is none of torch's own operators", (), ()
        if not self.profile.measured[index].alone:
            return False, "it cannot be run alone, so its cost is not known", (), ()
        if _torch.is_random(node):
            freed = sum(self.sizes[s] for s in outputs)
            if freed < _STATE_WORTH * self.state_bytes:
                return False, "it draws random numbers", (), ()
        arguments: list[fx.Node] = []
        target, args, kwargs = again(node)
        fx.node.map_arg((args, kwargs), arguments.append)
        if target is node.target:
            made = outputs
        else:
            count = _AGAIN[node.target][2]
            first = set(capture.lives_in[node][:count])
            made = tuple(s for s in outputs if s in first)
        reads = tuple(
            dict.fromkeys(s for arg in arguments for s in capture.lives_in[arg] if s >= 0)
        )
        return True, "", reads, made

    def _outputs(self, index: int) -> tuple[int, ...]:
        node = self.capture.operations[index]
        return tuple(
            dict.fromkeys(
                s
                for s in self.capture.lives_in[node]
                if s >= 0 and self.capture.storages[s].operation == index
            )
        )

    def _node(
        self,
        index: int,
        fixed: str,
        recompute_inputs: tuple[int, ...] | None,
        recompute_outputs: tuple[int, ...],
        extra_inputs: tuple[int, ...] = (),
    ) -> None:
        node, measured = self.capture.operations[index], self.profile.measured[index]
        self.operations.append(
            Operation(
                name=node.name,
                inputs=(*self.capture.reads(node), *extra_inputs),
                outputs=self._outputs(index),
                cost_ns=measured.cost_ns,
                workspace_bytes=measured.workspace_bytes
                + (self.state_bytes if node in self.states else 0),
                recompute_inputs=recompute_inputs,
                recompute_outputs=recompute_outputs,
                fixed=fixed,
                kind=str(node.target),
                module_path=self.paths[index],
                source=_torch.source_line(node),
            )
        )
        self.origins.append(Origin(Role.NODE, node))

    def _optional(
        self, name: str, size_bytes: int, origin: Origin, *, required: bool = False
    ) -> int:
        storage = len(self.storages)
        self.storages.append(Storage(name, size_bytes))
        self.operations.append(
            Operation(
                name=name,
                inputs=(),
                outputs=(storage,),
                cost_ns=2_000,
                fixed=origin.role.value,
                optional=not required,
                kind=origin.role.name.lower(),
            )
        )
        self.origins.append(origin)
        return storage

    def _old_value(self, primal: fx.Node, required: bool) -> None:
        if primal not in self.old_values:
            size = sum(int(t.untyped_storage().nbytes()) for t in tensors(primal))
            self.old_values[primal] = self._optional(
                f"old_value_of_{primal.name}",
                size,
                Origin(Role.OLD_VALUE, primal),
                required=required,
            )

    def _loss(self) -> None:
        """The user's loss: reads the outputs, makes their gradients."""
        tangents = tuple(
            s
            for tangent in self.capture.joint.tangents
            for s in self.capture.lives_in[tangent]
            if s >= 0
        )
        gone = self.around.gone or (False,) * len(self.capture.outputs)
        outputs = {
            s
            for own, early in zip(self.capture.outputs, gone, strict=True)
            if not early
            for s in own
            if self._forward(s)
        }
        held = self.around.loss_held_bytes
        if held:
            self.loss_storage = len(self.storages)
            self.storages.append(Storage("held_by_the_loss", held))
            tangents = (*tangents, self.loss_storage)
        self.operations.append(
            Operation(
                name="loss_outside_the_graph",
                inputs=tuple(sorted(outputs)),
                outputs=tangents,
                workspace_bytes=self.around.loss_bytes - held,
                kind="loss",
                outside=True,
            )
        )
        self.origins.append(Origin(Role.AROUND))

    def _accumulate(self) -> set[int]:
        """Hand the gradients to ``.grad``; return the storages that live to the end.

        A gradient is taken over as it is where nobody else has it and its layout is the
        parameter's; else it is copied (torch/csrc/autograd/functions/accumulate_grad.h).
        """
        end: set[int] = set()
        times: dict[fx.Node, int] = {}
        for node, _, _ in self.capture.gradients:
            times[node] = times.get(node, 0) + 1
        copied_bytes = 0
        for node, storage, primal in self.capture.gradients:
            if primal is None or not is_leaf(primal):
                end.add(storage)
            elif self.around.gradients_exist:
                self._take_over(node, storage, ())
            elif self.in_graph:
                if self._is_copied(node, storage, primal):
                    copied_bytes = max(copied_bytes, _own_bytes(node))
            elif times[node] > 1 or not _same_layout(tensors(node)[0], tensors(primal)[0]):
                copy = len(self.storages)
                self.storages.append(Storage(f"{node.name}_copied", _own_bytes(node)))
                self._take_over(node, storage, (copy,))
                end.add(copy)
            else:
                end.add(storage)
        if copied_bytes:
            # The first backward of a window returns its gradients, and some are copied.
            self.operations.append(
                Operation(
                    "copy_gradients", (), (), 0, copied_bytes, kind="accumulate", outside=True
                )
            )
            self.origins.append(Origin(Role.AROUND))
        if self.around.optimizer_bytes:
            self.operations.append(
                Operation(
                    name="optimizer_step",
                    inputs=tuple(sorted(s for s in end if s >= 0)),
                    outputs=(),
                    workspace_bytes=self.around.optimizer_bytes,
                    kind="optimizer",
                    outside=True,
                )
            )
            self.origins.append(Origin(Role.AROUND))
        return end

    def _gradient_bytes(self) -> int:
        """The bytes of one set of gradients, in the memory that the first backward made them in."""
        held: set[int] = set()
        copied = 0
        for node, storage, primal in self.capture.gradients:
            if primal is not None and is_leaf(primal):
                if self._is_copied(node, storage, primal):
                    copied += _own_bytes(node)
                else:
                    held.add(storage)
        return copied + sum(self.sizes[s] for s in held)

    def _is_copied(self, node: fx.Node, storage: int, primal: fx.Node) -> bool:
        times = sum(node is other for other, _, _ in self.capture.gradients)
        return storage < 0 or times > 1 or not _same_layout(tensors(node)[0], tensors(primal)[0])

    def _take_over(self, node: fx.Node, storage: int, outputs: tuple[int, ...]) -> None:
        # Outside memory (a gradient that is an input itself) is nothing to read.
        inputs = (storage,) if storage >= 0 else ()
        self.operations.append(
            Operation(f"accumulate_{node.name}", inputs, outputs, kind="accumulate", outside=True)
        )
        self.origins.append(Origin(Role.AROUND))

    # -------------------------------------------------------------- in place

    def _write_in_place(self, visible: frozenset[int]) -> None:
        """Say of each operation what it may be written over, or why nothing."""
        sizes = [storage.size_bytes for storage in self.storages]
        visible |= {storage for _, storage, _ in self.capture.gradients}
        for index, measured in enumerate(self.profile.measured):
            if measured.shares or not measured.alone:
                # Its output may be its input's memory, whatever the graph says.
                reads = self.capture.reads(self.capture.operations[index])
                visible |= {*self._outputs(index), *reads}
        number = {node: index for index, node in enumerate(self.capture.operations)}
        for place, (op, origin) in enumerate(zip(self.operations, self.origins, strict=True)):
            if origin.role is Role.NODE and origin.node is not None:
                over, why = candidates(self.capture, sizes, visible, number[origin.node])
                self.operations[place] = replace(op, over=over, kept_out=why)

    # -------------------------------------------------------------- pins

    def _pinned(self, problem: Problem) -> Problem:
        """Mark what the recompute pins forbid to keep: what is read inside its module only."""
        if not self.pins.recompute:
            return problem
        readers: dict[int, list[int]] = {}
        module = {}
        for index in problem.forward:
            op = problem.operations[index]
            module[index] = self.pins.recomputed(op.module_path) if op.module_path else ""
            for storage in op.inputs:
                readers.setdefault(storage, []).append(index)
        storages = list(problem.storages)
        for index in problem.forward:
            op = problem.operations[index]
            if not module[index] or not op.recomputable:
                continue
            for storage in op.outputs:
                inside = all(module[r] == module[index] for r in readers.get(storage, ()))
                if inside and storage not in problem.live_at_barrier:
                    old = storages[storage]
                    storages[storage] = Storage(old.name, old.size_bytes, keepable=False)
        return Problem(
            tuple(storages),
            problem.operations,
            problem.barrier,
            problem.resident_bytes,
            problem.live_at_barrier,
            problem.live_at_end,
            problem.name,
        )


def _own_bytes(node: fx.Node) -> int:
    value = tensors(node)[0]
    return value.numel() * value.element_size()


def _same_layout(gradient: torch.Tensor, parameter: torch.Tensor) -> bool:
    if is_dense(parameter):
        return all(
            size == 1 or mine == theirs
            for size, mine, theirs in zip(
                gradient.shape, gradient.stride(), parameter.stride(), strict=True
            )
        )
    return gradient.is_contiguous()


def _statistics(node: fx.Node) -> set[fx.Node]:
    """The running statistics that a batch-norm in ``eval()`` normalises with.

    A training forward writes new ones behind autograd's back: no write to them is ever refused.
    """
    read = node.args[3:5] if node.target in _EVALUATING_BATCH_NORMS else ()
    return {primal for primal in read if isinstance(primal, fx.Node) and primal.op == "placeholder"}
