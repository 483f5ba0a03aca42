"""Methods x budgets on joint graphs stored as data: overhead, proved gap, time.

    python examples/benchmarks/solvers.py FOLDER_OR_FILE.json.gz ... [--methods auto,greedy]
        [--fractions .3,.5,.7] [--time-limit 60]

A file is gzip'd JSON: ``storage_MiB[s]``; ``forward`` and ``backward``: operations in order with
``op``, ``cost_ms``, ``in`` and ``out`` (storage numbers); ``alive_at_end``: storages that survive
the step. A budget is given as its position between the floor (the largest needs of one backward
operation) and the peak with nothing recomputed. Overhead and gap are shares of the step's time.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path

from autockpt_solvers import AutockptError, Operation, Problem, Storage, solve

MIB = 2**20


def read_problem(path: Path) -> Problem:
    """Return the problem a file describes: a problem as it is saved, or the format above."""
    with gzip.open(path, "rt") as file:
        data = json.load(file)
    if "operations" in data:
        return Problem.from_dict(data)

    def operation(index: int, fields: dict, forward: bool) -> Operation:
        alive = set(data["alive_at_end"]) & set(fields["out"])
        return Operation(
            name=f"{fields['op']}:{index}",
            kind=fields["op"],
            inputs=tuple(fields["in"]),
            outputs=tuple(fields["out"]),
            cost_ns=round(fields["cost_ms"] * 1e6),
            recompute_inputs=tuple(fields["in"]) if forward else None,
            recompute_outputs=tuple(s for s in fields["out"] if s not in alive) if forward else (),
            fixed="" if forward else "a backward operation",
        )

    forward = [operation(i, f, True) for i, f in enumerate(data["forward"])]
    backward = [operation(i + len(forward), f, False) for i, f in enumerate(data["backward"])]
    made = {s for op in forward for s in op.outputs}
    end = frozenset(data["alive_at_end"])
    return Problem(
        storages=tuple(
            Storage(f"s{i}", round(size * MIB)) for i, size in enumerate(data["storage_MiB"])
        ),
        operations=tuple(forward + backward),
        barrier=len(forward),
        live_at_barrier=end & made,
        live_at_end=end,
        name=data["name"],
    )


def floor_bytes(problem: Problem) -> int:
    """Return the largest memory that one backward operation needs for itself alone."""
    last = {s: i for i, op in enumerate(problem.operations) for s in (*op.inputs, *op.outputs)}
    floor = 0
    live: set[int] = set()
    for index in problem.backward:
        op = problem.operations[index]
        live.update(op.outputs)
        floor = max(floor, sum(problem.storages[s].size_bytes for s in live | set(op.inputs)))
        live = {s for s in live if s in problem.live_at_end or last[s] > index}
    return floor + problem.resident_bytes


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--methods", default="auto")
    parser.add_argument("--fractions", default=".3,.5,.7")
    parser.add_argument("--time-limit", type=float, default=60.0)
    options = parser.parse_args()
    files = [f for p in options.paths for f in (sorted(p.glob("*.json.gz")) if p.is_dir() else [p])]
    print(f"{'graph':<12} {'f':>4} {'method':<12} {'overhead %':>10} {'gap %':>7} {'seconds':>8}")
    for path in files:
        problem = read_problem(path)
        floor, peak = floor_bytes(problem), solve(problem, None).peak_bytes
        for fraction in (float(f) for f in options.fractions.split(",")):
            budget = int(floor + fraction * (peak - floor))
            for method in options.methods.split(","):
                head = f"{problem.name:<12} {fraction:>4.2f} {method:<12}"
                try:
                    found = solve(problem, budget, method=method, time_limit_s=options.time_limit)
                except AutockptError as error:
                    print(head, str(error).splitlines()[0], flush=True)
                    continue
                step = problem.baseline_cost_ns / 100
                gap = (found.extra_ns - found.lower_bound_ns) / step
                print(
                    f"{head} {found.extra_ns / step:>10.3f} {gap:>7.3f} {found.solve_time_s:>8.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
