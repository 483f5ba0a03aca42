"""The methods: one file each, one signature, one table.

``solve(problem, budget_bytes, *, time_limit_s) -> Solution``; a method that finds nothing within
the budget raises ``SolverError``.
"""

from __future__ import annotations

from autockpt_solvers.methods import (
    chen,
    eviction,
    exhaustive,
    greedy,
    ilp,
    keep_all,
    mincut,
    revolve,
    rotor,
    snapshot,
)

__all__ = ["METHODS"]

METHODS = {
    "keep_all": keep_all.solve,
    "chen": chen.solve,
    "revolve": revolve.solve,
    "rotor": rotor.solve,
    "mincut": mincut.solve,
    "eviction": eviction.solve,
    "greedy": greedy.solve,
    "ilp": ilp.solve,
    "snapshot": snapshot.solve,
    "exhaustive": exhaustive.solve,
}
