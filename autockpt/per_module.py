"""Per module: what a plan keeps and recomputes, summed to as many rows as people read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass

from autockpt_solvers.plan import Plan

__all__ = ["ModuleShare", "per_module"]


@dataclass(frozen=True, slots=True)
class ModuleShare:
    """What a plan does with the forward tensors of one or several modules.

    Attributes:
        module: the module path, ``blocks.3``, or a range of equal ones, ``blocks.3-7``.
        kept_bytes: kept from forward to backward.
        recomputed_bytes: computed again, each tensor counted once.
        freed_bytes: not needed once the forward is over.
        extra_ns: time spent on running operations again, in nanoseconds.
    """

    module: str
    kept_bytes: int
    recomputed_bytes: int
    freed_bytes: int
    extra_ns: int


def per_module(plan: Plan, max_rows: int = 24) -> tuple[ModuleShare, ...]:
    """Return the plan's shares by module, in the order of the forward.

    The rows are as deep in the module tree as ``max_rows`` allows, neighbours treated alike are
    one row, and what does not fit even at the top level is summed in a last row. The columns add
    up to the plan's totals.
    """
    tensors = _by_path(plan)
    deepest = max((_depth(path) for path in tensors), default=1)
    rows: list[ModuleShare] = []
    for depth in range(deepest, 0, -1):
        rows = _join_alike(_cut(tensors, depth))
        if len(rows) <= max_rows:
            return tuple(rows)
    rest = rows[max_rows - 1 :]
    return (*rows[: max_rows - 1], _sum(f"({len(rest)} more)", rest))


def _by_path(plan: Plan) -> dict[str, ModuleShare]:
    """Return the shares of every module path that makes a tensor."""
    shares: dict[str, list[int]] = {}
    column = {"kept": 0, "recomputed": 1, "freed": 2}
    for decision in plan.decisions:
        if decision.action == "in place":
            continue
        share = shares.setdefault(decision.module_path, [0, 0, 0, 0])
        share[column[decision.action]] += decision.size_bytes
    for operation, runs in plan.schedule.runs.items():
        op = plan.problem.operations[operation]
        again = runs if op.optional else runs - 1
        if again:
            shares.setdefault(op.module_path, [0, 0, 0, 0])[3] += again * op.cost_ns
    return {path: ModuleShare(path, *share) for path, share in shares.items()}


def _depth(path: str) -> int:
    return path.count(".") + 1


def _cut(tensors: Mapping[str, ModuleShare], depth: int) -> list[ModuleShare]:
    """Return the shares summed by the first ``depth`` names of their path."""
    groups: dict[str, list[ModuleShare]] = {}
    for path, share in tensors.items():
        groups.setdefault(".".join(path.split(".")[:depth]), []).append(share)
    return [_sum(path or "(model)", shares) for path, shares in groups.items()]


def _sum(module: str, shares: list[ModuleShare]) -> ModuleShare:
    columns = zip(*(astuple(share)[1:] for share in shares), strict=True)
    return ModuleShare(module, *(sum(column) for column in columns))


def _join_alike(rows: list[ModuleShare]) -> list[ModuleShare]:
    """Return the rows with each run of consecutively numbered, equally treated modules as one."""
    return [
        run[0] if len(run) == 1 else _sum(_span(run[0].module, run[-1].module), run)
        for run in _runs(rows)
    ]


def _runs(rows: list[ModuleShare]) -> Iterator[list[ModuleShare]]:
    run: list[ModuleShare] = []
    for row in rows:
        if run and not (_follows(run[-1].module, row.module) and _alike(run[-1], row)):
            yield run
            run = []
        run.append(row)
    if run:
        yield run


def _alike(one: ModuleShare, other: ModuleShare) -> bool:
    # Equal operations may cost a little more or less in another place: only bytes decide.
    def treated(share: ModuleShare) -> tuple[int, int, int]:
        return share.kept_bytes, share.recomputed_bytes, share.freed_bytes

    return treated(one) == treated(other)


def _follows(one: str, other: str) -> bool:
    """Return whether ``blocks.4`` stands right before ``blocks.5``."""
    start, end = re.fullmatch(r"(.*\.)?(\d+)", one), re.fullmatch(r"(.*\.)?(\d+)", other)
    return bool(start and end and start[1] == end[1] and int(start[2]) + 1 == int(end[2]))


def _span(first: str, last: str) -> str:
    return f"{first}-{last.rpartition('.')[2]}"
