"""Methods x graphs x budgets: overhead, proved gap, time. Graphs are data; no torch is needed.

    python examples/benchmarks/solvers.py FOLDER_OR_FILE.json.gz ... [--methods auto,greedy]
        [--budgets .3,.5,.7,x1.05] [--from floor] [--time-limit 60] [--sweep 20]

A file is a gzip'd JSON of ``Problem.to_dict()``, as examples/benchmarks/graphs.py writes it, or
of this format: ``storage_MiB[s]``; ``forward`` and ``backward``: operations in order with ``op``,
``cost_ms``, ``in`` and ``out`` (storage numbers); ``alive_at_end``: storages that survive the step.

A budget is a position between the smallest peak and the peak with nothing recomputed, or a multiple
of the smallest peak: x1.05. ``--from floor`` takes the largest needs of one backward operation for
the smallest peak, a bound that may not be reached. ``--sweep N`` solves N budgets from 0.05 to
0.95 together instead. Overhead and gap are shares of the step's time.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from pathlib import Path

from autockpt_solvers import (
    AutockptError,
    Operation,
    Problem,
    Solution,
    Storage,
    minimum,
    solve,
    sweep,
)

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


def budget_bytes(word: str, smallest: int, largest: int) -> int:
    """Return the budget that a word of the command line stands for."""
    if word.startswith("x"):
        return int(smallest * float(word[1:]))
    return int(smallest + float(word) * (largest - smallest))


def line(problem: Problem, word: str, method: str, found: Solution) -> str:
    """Return a line of the table."""
    step = problem.baseline_cost_ns / 100
    gap = (found.extra_ns - found.lower_bound_ns) / step
    return (
        f"{problem.name:<12} {word:>5} {method:<12} {found.extra_ns / step:>10.3f} {gap:>7.3f} "
        f"{found.solve_time_s:>8.1f}"
    )


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--methods", default="auto")
    parser.add_argument("--budgets", default=".3,.5,.7")
    parser.add_argument("--from", dest="origin", choices=("minimum", "floor"), default="minimum")
    parser.add_argument("--time-limit", type=float, default=60.0)
    parser.add_argument("--sweep", type=int, default=0)
    options = parser.parse_args()
    files = [f for p in options.paths for f in (sorted(p.glob("*.json.gz")) if p.is_dir() else [p])]
    print(f"{'graph':<12} {'at':>5} {'method':<12} {'overhead %':>10} {'gap %':>7} {'seconds':>8}")
    for path in files:
        problem = read_problem(path)
        largest = solve(problem, None).peak_bytes
        started = time.perf_counter()
        if options.origin == "floor":
            smallest = floor_bytes(problem)
        else:
            smallest = minimum(problem).peak_bytes
            took_s = time.perf_counter() - started
            print(f"{problem.name:<12}   min {smallest / MIB:>12,.1f} MiB {took_s:>29.1f}")
        if options.sweep:
            words = [f"{0.05 + 0.9 * n / (options.sweep - 1):.3f}" for n in range(options.sweep)]
            budgets = [budget_bytes(word, smallest, largest) for word in words]
            started = time.perf_counter()
            answers = sweep(problem, budgets, time_limit_s=options.time_limit)
            for word, found in zip(words, answers, strict=True):
                print(line(problem, word, "sweep", found))
            print(f"{problem.name:<12}   all {time.perf_counter() - started:>46.1f}", flush=True)
            continue
        for word in options.budgets.split(","):
            budget = budget_bytes(word, smallest, largest)
            for method in options.methods.split(","):
                try:
                    found = solve(problem, budget, method=method, time_limit_s=options.time_limit)
                except AutockptError as error:
                    print(f"{problem.name:<12} {word:>5} {method:<12}", str(error).splitlines()[0])
                    continue
                print(line(problem, word, method, found), flush=True)


if __name__ == "__main__":
    main()
