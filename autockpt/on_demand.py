"""On demand: a backward that no plan foresaw, behind a forward that has already run.

The user's backward may start from other outputs than the plan took for granted. The gradients
must be right all the same: this backward recomputes what it needs from what the forward saved,
each value once, without regard to memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from autockpt._torch import JointGraph
from autockpt.capture import read_joint
from autockpt.formulate import Around, Role, formulate
from autockpt.profile import unmeasured
from autockpt.rewrite import rewrite_backward
from autockpt_solvers.errors import CaptureError

__all__ = ["backward_on_demand"]


def backward_on_demand(
    joint: JointGraph, absent: frozenset[int], saved: Sequence[fx.Node]
) -> fx.GraphModule:
    """Return a backward for exactly these absent tangents, from these saved values.

    Raises:
        CaptureError: it needs a value that was neither saved nor may be computed again.
    """
    captured = read_joint(joint, absent)
    formulation = formulate(captured, unmeasured(captured), Around())
    problem = formulation.problem
    names = {node.name for node in saved}
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
        if op.recompute_inputs is None:
            raise CaptureError(
                f"this backward needs {problem.storages[storage].name}, which was not saved "
                f"and may not be computed again ({op.fixed}). Run the step once more: "
                "the next plan knows from which outputs the backward starts."
            )
        for needed in op.recompute_inputs:
            provide(needed)
        order.append(index)
        have.update(op.recompute_outputs)

    for index in problem.backward:
        for storage in problem.operations[index].inputs:
            provide(storage)
        if formulation.origins[index].role is Role.NODE:
            order.append(index)
    return rewrite_backward(formulation, order, saved)
