"""Arena: one block of memory, allocated once, in which a step's tensors have fixed places.

Operators with an ``out=`` form that allocates nothing write straight into their places. What has
none, what outlives the step and what the user can see is allocated as always. The arena is lent to
one forward and its backward at a time; whoever finds it in use (two steps in flight, tensors held
by an exception) or may have to run twice (``retain_graph``) allocates as always, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autockpt import _torch
from autockpt.formulate import Formulation, Role
from autockpt.inplace import FORMS, reads_rows
from autockpt_solvers.memory import simulate
from autockpt_solvers.placement import Block, Placement, blocks_of, place
from autockpt_solvers.problem import Problem
from autockpt_solvers.schedule import Compute, Schedule

__all__ = ["InArena", "Layout", "Memory", "in_arena", "lay_out", "layout_of"]

aten = torch.ops.aten

# The ``out=`` forms that give the same bits and allocate nothing, and the parameter to write to.
OUT: dict[Any, tuple[Any, str]] = {
    **{target: (form.target, form.keyword) for target, form in FORMS.items() if form.keyword},
    aten.mm.default: (aten.mm.out, "out"),
    aten.bmm.default: (aten.bmm.out, "out"),
    aten.addmm.default: (aten.addmm.out, "out"),
    aten.cat.default: (aten.cat.out, "out"),
    aten.sum.dim_IntList: (aten.sum.IntList_out, "out"),
    aten.mean.dim: (aten.mean.out, "out"),
}
# On CUDA the caching allocator hands out multiples of 512 bytes.
_ALIGN = 512


@dataclass(frozen=True)
class Layout:
    """Which runs of a schedule write into the arena, and where.

    Attributes:
        blocks: the memory they take, by the step that allocates it.
        placement: where it lies.
        peak_bytes: the step's peak with the arena allocated throughout.
        outside: operators that make tensors which could lie in the arena but for their lack of an
            ``out=`` form that allocates nothing.
    """

    blocks: tuple[Block, ...]
    placement: Placement
    peak_bytes: int
    outside: tuple[str, ...]


def layout_of(formulation: Formulation, schedule: Schedule) -> Layout:
    """Return the layout of a step's memory in an arena."""
    problem = formulation.problem

    def has_out(operation: int) -> bool:
        origin = formulation.origins[operation]
        node = origin.node
        if origin.role is not Role.NODE or node is None or node.target not in OUT:
            return False
        form = FORMS.get(node.target)
        return form is None or reads_rows(node, form)

    # Gradients that are added to those there are freed at once, but the first are handed on.
    gradients = {storage for _, storage, _ in formulation.capture.gradients}
    blocks = blocks_of(problem, schedule, has_out, gradients)
    others = blocks_of(problem, schedule, lambda operation: not has_out(operation), gradients)
    placement = place(blocks, align_bytes=_ALIGN)
    made = {problem.producer[block.storages[0]] for block in others}
    return Layout(
        blocks,
        placement,
        _peak_bytes(problem, schedule, blocks, placement),
        tuple(sorted({problem.operations[index].kind for index in made})),
    )


def _peak_bytes(
    problem: Problem, schedule: Schedule, blocks: Sequence[Block], placement: Placement
) -> int:
    inside = [0] * (len(schedule.steps) + 1)
    for block in blocks:
        inside[block.start] += block.size_bytes
        inside[block.end] -= block.size_bytes
    alive = peak = 0
    for live, change in zip(simulate(problem, schedule).live_bytes, inside, strict=False):
        alive += change
        peak = max(peak, live - alive)
    return peak + placement.arena_bytes


# ------------------------------------------------------------------ the memory


class Memory:
    """The block itself, shared by all graphs of one model; the largest layout decides its size.

    Attributes:
        allocations: how often it was allocated.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.allocations = 0
        self._block: Tensor | None = None
        self._count = 0

    def lend(self, size_bytes: int) -> bool:
        """Return whether nobody uses the block; then it has at least this size."""
        if self._block is not None and self._users() > 0:
            return False
        if self._block is None or self._block.numel() < size_bytes:
            self._block = None
            self._block = torch.empty(size_bytes, dtype=torch.uint8, device=self.device)
            self._count = 0
            self._count = self._users()
            self.allocations += 1
        return True

    def _users(self) -> int:
        assert self._block is not None
        return _torch.storage_uses(self._block) - self._count

    def holds(self, value: Any) -> bool:
        """Return whether a value lies in the block."""
        return (
            isinstance(value, Tensor)
            and self._block is not None
            and value.device == self._block.device
            and _torch.storage_key(value) == _torch.storage_key(self._block)
        )

    def tensor(
        self, size: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, start: int
    ) -> Tensor:
        """Return a place in the block as a tensor, which is no view of it to autograd.

        ``start`` counts elements.
        """
        assert self._block is not None
        empty = torch.empty(0, dtype=dtype, device=self.device)
        return empty.set_(self._block.untyped_storage(), start, size, strides)

    def release(self) -> None:
        """Let the block go."""
        self._block = None


# ------------------------------------------------------------------ the graphs


def in_arena(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    formulation: Formulation,
    schedule: Schedule,
    memory: Memory,
    budget_bytes: int | None,
) -> tuple[InArena | None, str]:
    """Let two graphs write into an arena; return what runs them in it, and what to say of it.

    Nothing is changed where the budget is too small for the arena and what lies beside it.
    """
    layout = layout_of(formulation, schedule)
    size, peak = layout.placement.arena_bytes, layout.peak_bytes
    if not layout.blocks or (budget_bytes is not None and peak > budget_bytes):
        return None, f"not used: the step would peak at {peak:,} bytes"
    run = InArena(memory, size)
    lay_out(forward, backward, formulation, schedule, layout, run)
    said = f"{size:,} bytes for {len(layout.blocks)} tensors; with it the step peaks at {peak:,}"
    if layout.outside:
        said += f"; allocated as always: what {', '.join(layout.outside)} make"
    return run, said


def lay_out(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    formulation: Formulation,
    schedule: Schedule,
    layout: Layout,
    run: InArena,
) -> None:
    """Let the runs of two graphs write into their places.

    Args:
        forward: as :func:`autockpt.rewrite.rewrite` makes it; it is changed.
        backward: the same.
        formulation: the step.
        schedule: what the graphs execute.
        layout: its layout.
        run: what lends the memory.
    """
    offsets = {
        block.start: offset
        for block, offset in zip(layout.blocks, layout.placement.offsets, strict=True)
    }
    written = [
        node
        for module in (forward, backward)
        for node in module.graph.nodes
        if node.op == "call_function" and "autockpt" in node.meta
    ]
    positions = [
        position
        for position, step in enumerate(schedule.steps)
        if isinstance(step, Compute) and formulation.origins[step.operation].role is Role.NODE
    ]
    for node, position in zip(written, positions, strict=True):
        if position in offsets:
            target, keyword = OUT[node.target]
            with node.graph.inserting_before(node):
                slot = node.graph.call_function(run.slot(node.meta["val"], offsets[position]))
                slot.meta["val"] = node.meta["val"]
            node.target, node.kwargs = target, {**node.kwargs, keyword: slot}
    for module in (forward, backward):
        module.graph.lint()
        module.recompile()


class InArena(_torch.WatchAround):
    """Runs a forward and its backward in the arena, where it is free.

    Args:
        inner: who watches the graph beside.
        memory: the arena.
        size_bytes: what the layout takes of it.
    """

    def __init__(self, memory: Memory, size_bytes: int) -> None:
        super().__init__(_torch.Watch())
        self.memory = memory
        self.size_bytes = size_bytes
        self._lent = False

    def slot(self, fake: Tensor, offset_bytes: int) -> Callable[[], Tensor]:
        """Return a function that returns memory for one run: its place, or memory of its own."""
        size, strides, dtype = tuple(fake.shape), tuple(fake.stride()), fake.dtype
        start = offset_bytes // fake.element_size()

        def place_in_arena() -> Tensor:
            if self._lent:
                return self.memory.tensor(size, strides, dtype, start)
            return torch.empty_strided(size, strides, dtype=dtype, device=self.memory.device)

        return place_in_arena

    def run_forward(self, run: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        """Run the forward, in the arena if that is free."""
        self._lent = self.memory.lend(self.size_bytes)
        try:
            return self.inner.run_forward(run, args)
        finally:
            self._lent = False

    def run_backward(self, run: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        """Run the backward, in the arena if its forward had it or if it is free."""
        own = any(self.memory.holds(value) for value in args)
        self._lent = not _torch.keeps_graph() and (own or self.memory.lend(self.size_bytes))
        try:
            return self.inner.run_backward(run, args)
        finally:
            self._lent = False
