"""From a fractional point of the snapshot program to backward orders."""

from __future__ import annotations

from autockpt_solvers.highs import Floats
from autockpt_solvers.methods.snapshot.program import SnapshotProgram

__all__ = ["rounded"]


def rounded(program: SnapshotProgram, values: Floats, threshold: float) -> list[int]:
    """Return the backward order that holds what the point holds beyond a threshold.

    At the barrier it keeps the groups whose first ``S`` is above the threshold; at each later
    snapshot it drops those whose ``S`` there is not. What a backward operation misses is
    recomputed right before it.
    """
    stages = program.stages
    groups, barrier = stages.groups, stages.problem.barrier
    drops: dict[int, list[int]] = {}
    resident: set[int] = set()
    seen: set[int] = set()
    for (g, k), column in program.resident.items():
        above = float(values[column]) > threshold
        if g not in seen:
            seen.add(g)
            if above and groups[g].may_keep:
                resident.add(g)
        elif not above and groups[g].again:
            drops.setdefault(k, []).append(g)
    for g, group in enumerate(groups):
        if not group.again or (group.may_keep and not group.size_bytes):
            resident.add(g)
    order: list[int] = []
    k = 0
    for offset, reads in enumerate(stages.liveness.demand.reads):
        todo = [stages.group_of[s] for s in reads if s in stages.group_of]
        block: set[int] = set()
        while todo:
            g = todo.pop()
            maker = groups[g].producer
            if g in resident or maker in block:
                continue
            block.add(maker)
            todo.extend(stages.inputs[maker])
        for index in block:
            resident.update(stages.outputs[index])
        order += sorted(block)
        order.append(barrier + offset)
        if k < len(stages.ends) and stages.ends[k] == offset:
            k += 1
            resident.difference_update(drops.get(k, ()))
    return order
