"""Unforeseen: a backward that the plan did not expect, behind a forward that has already run.

The user's backward may start from other outputs than the plan took for granted. The gradients
must be right all the same. This backward runs what the plan's runs, in its order, without what only
the plan's needs: where it starts from fewer outputs, it needs no more memory. Values that the plan
has no use for are recomputed from what the forward saved, each once, without regard to memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import fx

from autockpt._torch import JointGraph
from autockpt.capture import read_joint
from autockpt.formulate import Around, Formulation, Origin, Role, formulate
from autockpt.profile import unmeasured
from autockpt.rewrite import backward_needs, rewrite_backward
from autockpt_solvers.errors import CaptureError
from autockpt_solvers.schedule import Compute, Schedule

__all__ = ["lacking", "unforeseen_backward"]


def unforeseen_backward(
    joint: JointGraph,
    absent: frozenset[int],
    saved: Sequence[fx.Node],
    planned: tuple[Formulation, Schedule] | None,
) -> fx.GraphModule:
    """Return a backward for exactly these absent tangents, from these saved values.

    Args:
        joint: the joint graph.
        absent: positions of the tangents that do not arrive.
        saved: placeholders of what the forward saves, in its order.
        planned: the step and the schedule that were planned; None to recompute at need and to
            write over nothing.

    Raises:
        CaptureError: it needs a value that was neither saved nor may be computed again.
    """
    names = {node.name for node in saved}
    backward = _Backward(joint, absent, names)
    runs = backward.on_demand() if planned is None else backward.as_planned(*planned)
    lacks = [n for n in backward_needs(backward.formulation, runs) if n not in names]
    if lacks:
        raise CaptureError(
            f"this backward starts from other outputs than the one before it, and needs "
            f"{', '.join(lacks)}, which was not saved and may not be computed again. "
            "Call autockpt.restore(model) to train without a plan, or detach the outputs that "
            "the loss does not use."
        )
    return rewrite_backward(backward.formulation, runs, saved)


def lacking(joint: JointGraph, saved: Sequence[fx.Node]) -> list[str]:
    """Return what must be saved beside ``saved`` for every backward to be possible."""
    names = {node.name for node in saved}
    backward = _Backward(joint, frozenset(), names)
    needs = backward_needs(backward.formulation, backward.on_demand())
    return [name for name in needs if name not in names]


class _Backward:
    """The backward of a step for some absent tangents, from what a forward has saved."""

    def __init__(self, joint: JointGraph, absent: frozenset[int], names: set[str]) -> None:
        captured = read_joint(joint, absent)
        self.formulation = formulate(captured, unmeasured(captured), Around(), inplace=True)
        self.problem = self.formulation.problem
        self.saved = {
            number
            for number, storage in enumerate(captured.storages)
            if storage.roots and all(root.name in names for root in storage.roots)
        }
        self.saved |= {
            storage
            for primal, storage in self.formulation.old_values.items()
            if f"old_value_of_{primal.name}" in names
        }

    def on_demand(self) -> list[Compute]:
        """Return the runs that recompute each value right where it is first needed."""
        return self._complete([Compute(index) for index in self.problem.backward])

    def as_planned(self, formulation: Formulation, schedule: Schedule) -> list[Compute]:
        """Return the runs in the order of a schedule, as far as this backward needs them.

        Args:
            formulation: the step that the schedule is of.
            schedule: of a backward that starts from other outputs.
        """
        return self._complete(self._needed(self._ordered_as(formulation, schedule)))

    def _ordered_as(self, formulation: Formulation, schedule: Schedule) -> list[Compute]:
        own = {_key(o): i for i, o in enumerate(self.formulation.origins) if o.node is not None}
        storages = {s.name: number for number, s in enumerate(self.problem.storages)}
        backward = list(self.problem.backward)
        place = {index: position for position, index in enumerate(backward)}
        runs: list[Compute] = []
        done = 0
        for step in schedule.steps[schedule.barrier :]:
            if not isinstance(step, Compute):
                continue
            index = own.get(_key(formulation.origins[step.operation]))
            if index is None or place.get(index, done) < done:
                continue
            if index in place:  # with what only this backward runs: zeros in place of nothing
                runs += map(Compute, backward[done : place[index]])
                done = place[index] + 1
            over = None
            if step.over is not None:
                over = storages.get(formulation.problem.storages[step.over].name)
            runs.append(Compute(index, over))
        return [*runs, *map(Compute, backward[done:])]

    def _needed(self, runs: Sequence[Compute]) -> list[Compute]:
        """Leave out the recomputations that nothing reads, and write over nothing that is read."""
        capture = self.formulation.capture
        outputs = [n for n in capture.joint.backward_outputs if isinstance(n, fx.Node)]
        needed = {*self.problem.live_at_end, *(s for n in outputs for s in capture.lives_in[n])}
        found: list[Compute] = []
        for run in reversed(runs):
            operation = self.problem.operations[run.operation]
            if run.operation < self.problem.barrier:
                made = operation.recompute_outputs
                if operation.recompute_inputs is None or needed.isdisjoint(made):
                    continue
                needed -= set(made)
                needed.update(operation.recompute_inputs)
                found.append(Compute(run.operation))
            else:
                over = run.over if run.over in operation.over and run.over not in needed else None
                needed -= set(operation.outputs)
                needed.update(operation.inputs)
                found.append(Compute(run.operation, over))
        return found[::-1]

    def _complete(self, runs: Sequence[Compute]) -> list[Compute]:
        """Add what the runs read and nothing has made, each right before its first use."""
        problem, have = self.problem, set(self.saved)
        complete: list[Compute] = []

        def provide(storages: Iterable[int]) -> None:
            for storage in storages:
                index = problem.producer[storage]
                operation = problem.operations[index]
                if storage in have or index >= problem.barrier:
                    continue
                have.add(storage)
                if operation.recompute_inputs is not None:
                    provide(operation.recompute_inputs)
                    complete.append(Compute(index))
                    have.update(operation.recompute_outputs)

        for run in runs:
            operation = problem.operations[run.operation]
            if run.operation < problem.barrier:
                provide(operation.recompute_inputs or ())
                have.update(operation.recompute_outputs)
            else:
                provide(operation.inputs)
            if self.formulation.origins[run.operation].role is Role.NODE:
                complete.append(run)
        return complete


def _key(origin: Origin) -> tuple[Role, str]:
    return origin.role, "" if origin.node is None else origin.node.name
