"""The problem: what one training step computes, what each result weighs, and what must survive.

A problem is an ordered list of operations over storages. The operations before ``barrier`` are
the *forward* ones; those from it on are the *backward* ones (the user's loss outside the graph,
the gradient operations and the optimizer included). Backward operations run once, in order, after
the barrier. Forward operations run at least once before the barrier and, where allowed, again
at any later point. Views cost nothing and are folded into their storage.

The formulation follows Checkmate (Jain et al. 2020, arXiv:1910.02653) with memory counted per
storage, not per node, and with workspace.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

__all__ = ["Operation", "Problem", "Storage"]


@dataclass(frozen=True, slots=True)
class Storage:
    """One block of memory that an operation allocates; all views of it share it.

    Attributes:
        name: the graph's name of the tensor it was allocated for.
        size_bytes: its size as the device's allocator rounds it.
        keepable: whether it may be resident at the barrier; False where the user pinned the
            module to ``recompute``.
    """

    name: str
    size_bytes: int
    keepable: bool = True


@dataclass(frozen=True, slots=True)
class Operation:
    """One computation: reads storages, allocates storages.

    Attributes:
        name: the graph's name of the node.
        kind: the operator, for people: ``aten.mm.default``.
        cost_ns: time of one run, in nanoseconds.
        workspace_bytes: allocated and freed inside the run, on top of the outputs.
        inputs: storages its first run reads. Parameters and the step's inputs are always there
            and not listed.
        outputs: storages its first run allocates.
        recompute_inputs: storages a further run reads (a replayed random operation also reads the
            saved generator state); None where it may not run again.
        recompute_outputs: storages a further run allocates: ``outputs``, or a subset where the
            further run leaves a side effect out (batch-norm's statistics).
        fixed: why it may not run again; empty where it may.
        outside: it happens outside the captured graph: the user's loss, the optimizer.
        optional: a forward operation that only recomputation needs (saving the generator's
            state); a schedule may leave it out.
        over: inputs that its first run may write its one output over, where they die there; what
            the operator does allows it, the first of them is preferred.
        kept_out: why an operator that could write in place has nothing to write over; empty where
            it has, or where it cannot.
        module_path: the module the tensor comes from, ``blocks.3.attn``.
        source: the user's line, ``model.py:41``.
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    cost_ns: int = 0
    workspace_bytes: int = 0
    recompute_inputs: tuple[int, ...] | None = None
    recompute_outputs: tuple[int, ...] = ()
    fixed: str = ""
    optional: bool = False
    outside: bool = False
    over: tuple[int, ...] = ()
    kept_out: str = ""
    kind: str = ""
    module_path: str = ""
    source: str = ""

    @property
    def recomputable(self) -> bool:
        """Whether it may run more than once."""
        return self.recompute_inputs is not None


@dataclass(frozen=True)
class Problem:
    """One training step as data.

    Attributes:
        storages: every block of memory the operations allocate.
        operations: forward operations, then backward ones, each in the graph's order.
        barrier: number of forward operations.
        resident_bytes: what is allocated throughout the step: parameters, buffers, the step's
            inputs, optimizer state.
        live_at_barrier: forward storages that must be resident when the forward returns (the
            user's outputs, new values of buffers).
        live_at_end: storages that must be resident at the end of the step (gradients, outputs
            the user holds on to). One that is also in ``live_at_barrier`` is never freed: the
            user holds that very copy, so its operation must not be recomputable.
        name: what it was made from, for people.

    >>> problem = Problem(
    ...     storages=(Storage("x", 8), Storage("loss", 4), Storage("grad", 8)),
    ...     operations=(
    ...         Operation("x", (), (0,), cost_ns=5, recompute_inputs=(), recompute_outputs=(0,)),
    ...         Operation("loss", (0,), (1,), cost_ns=5, fixed="the user holds its output"),
    ...         Operation("grad", (0, 1), (2,), cost_ns=5),
    ...     ),
    ...     barrier=2,
    ...     live_at_barrier=frozenset({1}),
    ...     live_at_end=frozenset({1, 2}),
    ... )
    >>> problem.producer
    (0, 1, 2)
    >>> problem.baseline_cost_ns
    15
    """

    storages: tuple[Storage, ...]
    operations: tuple[Operation, ...]
    barrier: int
    resident_bytes: int = 0
    live_at_barrier: frozenset[int] = field(default_factory=frozenset)
    live_at_end: frozenset[int] = field(default_factory=frozenset)
    name: str = ""

    def __post_init__(self) -> None:
        self._check()

    # ---------------------------------------------------------------- derived, computed once

    @property
    def forward(self) -> range:
        """Indices of the forward operations."""
        return range(self.barrier)

    @property
    def backward(self) -> range:
        """Indices of the backward operations."""
        return range(self.barrier, len(self.operations))

    @cached_property
    def producer(self) -> tuple[int, ...]:
        """For each storage the operation whose first run allocates it."""
        producer = [-1] * len(self.storages)
        for index, operation in enumerate(self.operations):
            for storage in operation.outputs:
                producer[storage] = index
        return tuple(producer)

    @cached_property
    def required(self) -> tuple[int, ...]:
        """The forward operations a schedule must run before the barrier, in order."""
        return tuple(i for i in self.forward if not self.operations[i].optional)

    @cached_property
    def overwrites(self) -> tuple[tuple[int, ...], ...]:
        """For each operation the storages of ``over`` that no later first run of its half reads.

        In the backward they die there whatever the schedule; in the forward unless they are kept.
        """
        last: dict[tuple[bool, int], int] = {}
        for index, op in enumerate(self.operations):
            last.update(((index < self.barrier, storage), index) for storage in op.inputs)
        return tuple(
            tuple(s for s in op.over if last[index < self.barrier, s] == index)
            for index, op in enumerate(self.operations)
        )

    @cached_property
    def baseline_cost_ns(self) -> int:
        """Time of the step with nothing recomputed, in nanoseconds."""
        return sum(op.cost_ns for op in self.operations if not op.optional)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the captured graph: operators, sizes of the forward, connections.

        Names, costs, what may run again and what happens outside the graph are left out: two
        captures of one model with equal shapes agree in it. So are the sizes of the backward, which
        follow from the forward's; a gradient that is added where it is made has none.
        """
        inside = [op for op in self.operations if not op.outside]
        made = [s for op in inside[: self.barrier] for s in op.outputs]
        shape: dict[str, Any] = {
            "sizes": [(s, self.storages[s].size_bytes) for s in made],
            "operations": [(op.kind, op.inputs, op.outputs, op.optional) for op in inside],
        }
        text = json.dumps(shape, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    # ---------------------------------------------------------------- JSON

    def to_dict(self) -> dict[str, Any]:
        """Return the problem as plain JSON data."""
        return {
            "name": self.name,
            "barrier": self.barrier,
            "resident_bytes": self.resident_bytes,
            "live_at_barrier": sorted(self.live_at_barrier),
            "live_at_end": sorted(self.live_at_end),
            "storages": [asdict(s) for s in self.storages],
            "operations": [asdict(op) for op in self.operations],
        }

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Problem:
        """Return the problem that :meth:`to_dict` described."""

        def operation(fields: dict[str, Any]) -> Operation:
            for key in ("inputs", "outputs", "recompute_inputs", "recompute_outputs", "over"):
                if fields.get(key) is not None:
                    fields = {**fields, key: tuple(fields[key])}
            return Operation(**fields)

        return Problem(
            storages=tuple(Storage(**s) for s in data["storages"]),
            operations=tuple(operation(op) for op in data["operations"]),
            barrier=data["barrier"],
            resident_bytes=data["resident_bytes"],
            live_at_barrier=frozenset(data["live_at_barrier"]),
            live_at_end=frozenset(data["live_at_end"]),
            name=data["name"],
        )

    # ---------------------------------------------------------------- what makes a problem valid

    def _check(self) -> None:
        made: set[int] = set()
        maker: dict[int, int] = {}

        def need(condition: bool, message: str) -> None:
            if not condition:
                raise ValueError(f"invalid problem: {message}")

        def known(storages: Iterable[int], name: str) -> None:
            for storage in storages:
                need(storage in made, f"{name} reads storage {storage} before it is made")

        need(0 <= self.barrier <= len(self.operations), "the barrier lies outside the operations")
        for index, op in enumerate(self.operations):
            forward = index < self.barrier
            known(op.inputs, op.name)
            need(made.isdisjoint(op.outputs), f"{op.name} makes a storage made before")
            need(op.cost_ns >= 0 and op.workspace_bytes >= 0, f"{op.name} has a negative cost")
            need(forward or not op.optional, f"{op.name} is optional but not forward")
            if op.recompute_inputs is not None:
                need(forward, f"{op.name} runs after the barrier and may not run again")
                known(op.recompute_inputs, op.name)
                need(
                    set(op.recompute_outputs) <= set(op.outputs),
                    f"{op.name} makes other storages when it runs again",
                )
                held = self.live_at_barrier & self.live_at_end & set(op.recompute_outputs)
                need(not held, f"{op.name} may run again but the user holds its output")
            for storage in op.over:
                why = self._may_not_overwrite(index, storage, maker)
                need(not why, f"{op.name} may write over storage {storage}, but {why}")
            made.update(op.outputs)
            maker.update(dict.fromkeys(op.outputs, index))
        need(made <= set(range(len(self.storages))), "an operation makes an unknown storage")
        need(len(made) == len(self.storages), "a storage is made by no operation")
        forward_made = {s for i in self.forward for s in self.operations[i].outputs}
        need(self.live_at_barrier <= forward_made, "live_at_barrier names a backward storage")
        need(self.live_at_end <= made, "live_at_end names an unknown storage")
        need(
            self.live_at_end & forward_made <= self.live_at_barrier,
            "a forward storage lives at the end but not at the barrier",
        )
        optional = {
            s
            for i in self.forward
            if self.operations[i].optional
            for s in self.operations[i].outputs
        }
        for op in self.operations:
            need(
                optional.isdisjoint(op.inputs) or op.optional,
                f"{op.name} needs an optional operation in its first run",
            )

    def _may_not_overwrite(self, index: int, storage: int, maker: Mapping[int, int]) -> str:
        """Return why an operation must not be written over a storage; empty where it may be."""
        op = self.operations[index]
        if storage not in op.inputs:
            return "does not read it"
        if len(op.outputs) != 1 or op.optional:
            return "does not make exactly one storage in every schedule"
        if self.storages[storage].size_bytes != self.storages[op.outputs[0]].size_bytes:
            return "its output has another size"
        if self.operations[maker[storage]].outside:
            return "it was made outside the graph"
        if (maker[storage] < self.barrier) != (index < self.barrier):
            return "it is saved for the backward, which may run twice"
        if storage in self.live_at_barrier | self.live_at_end:
            return "it must survive"
        return ""
