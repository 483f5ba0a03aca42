"""Unforeseen: a backward that the plan did not expect, behind a forward that has already run.

The user's backward may start from other outputs than the plan took for granted. The gradients
must be right all the same: this backward recomputes what it needs from what the forward saved,
each value once, without regard to memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from autockpt._torch import JointGraph
from autockpt.capture import read_joint
from autockpt.formulate import Around, Formulation, Role, formulate
from autockpt.profile import unmeasured
from autockpt.rewrite import backward_needs, rewrite_backward
from autockpt_solvers.errors import CaptureError

__all__ = ["lacking", "unforeseen_backward"]


def unforeseen_backward(
    joint: JointGraph, absent: frozenset[int], saved: Sequence[fx.Node]
) -> fx.GraphModule:
    """Return a backward for exactly these absent tangents, from these saved values.

    Raises:
        CaptureError: it needs a value that was neither saved nor may be computed again.
    """
    names = {node.name for node in saved}
    formulation, order = _on_demand(joint, absent, names)
    lacks = [name for name in backward_needs(formulation, order) if name not in names]
    if lacks:
        raise CaptureError(
            f"this backward starts from other outputs than the one before it, and needs "
            f"{', '.join(lacks)}, which was not saved and may not be computed again. "
            "Call autockpt.restore(model) to train without a plan, or detach the outputs that "
            "the loss does not use."
        )
    return rewrite_backward(formulation, order, saved)


def lacking(joint: JointGraph, saved: Sequence[fx.Node]) -> list[str]:
    """Return what must be saved beside ``saved`` for every backward to be possible."""
    names = {node.name for node in saved}
    needs = backward_needs(*_on_demand(joint, frozenset(), names))
    return [name for name in needs if name not in names]


def _on_demand(
    joint: JointGraph, absent: frozenset[int], names: set[str]
) -> tuple[Formulation, list[int]]:
    """The step, and its backward with every value recomputed at need that may be."""
    captured = read_joint(joint, absent)
    formulation = formulate(captured, unmeasured(captured), Around())
    problem = formulation.problem
    have = {
        number
        for number, storage in enumerate(captured.storages)
        if storage.roots and all(root.name in names for root in storage.roots)
    }
    have |= {s for p, s in formulation.old_values.items() if f"old_value_of_{p.name}" in names}
    order: list[int] = []

    def provide(storage: int) -> None:
        if storage in have or problem.producer[storage] >= problem.barrier:
            return
        index = problem.producer[storage]
        op = problem.operations[index]
        have.add(storage)
        if op.recompute_inputs is None:
            return
        for needed in op.recompute_inputs:
            provide(needed)
        order.append(index)
        have.update(op.recompute_outputs)

    for index in problem.backward:
        for storage in problem.operations[index].inputs:
            provide(storage)
        if formulation.origins[index].role is Role.NODE:
            order.append(index)
    return formulation, order
