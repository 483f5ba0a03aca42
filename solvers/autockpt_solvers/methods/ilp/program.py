"""The stage-indexed integer program with closure cuts.

Checkmate (Jain et al. 2020, arXiv:1910.02653) on the joint graph. Binaries: ``S[g, k]``, group g
is resident right behind the operation that ends stage k - 1 (k = 0: at the barrier); ``R[i, k]``,
operation i runs again in stage k. Minimise the time of the runs subject to

1. ``S[g, k] <= S[g, k-1] + R[maker(g), k-1]``: what is resident was resident or made;
2. ``R[i, k] <= S[g, k] + R[maker(g), k]`` for each input g of i;
3. ``S[g, k] + R[maker(g), k] >= 1`` where stage k reads g;
4. memory while the end of each stage runs, and during the forward.

Stages may be longer than from one reading operation to the next: fewer rows, a weaker bound, for
larger graphs (the snapshots of :mod:`autockpt_solvers.bounds`).

**What its bound covers.** Each schedule that runs every forward operation once before the barrier,
recomputes at any position behind it, in any order and any number of times, gives a point of this
program that costs no more: ``R`` says whether an operation runs at all in a stage, ``S`` what is
truly resident and not made again in the stage. Backward operations inside a stage have no memory
row, and recomputations have none (:mod:`autockpt_solvers.methods.ilp.instage` adds those lazily,
for schedules in the forward's order only; a bound from before that holds for all schedules).
Where an answer breaks the budget at an operation inside a stage, that operation is *promoted* to
end a stage of its own.

**Closure cuts.** With ``T[i] = 1`` if i runs again in stage k0 or later: ``T[i] <= sum R[i, k]``,
``T[maker(g)] + S[g, k0] >= 1`` if stage k0 or later reads g, and ``T[i] <= S[g, k0] + T[maker(g)]``
for each input. Without them the relaxation recomputes in slices of a few per cent.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence

from autockpt_solvers.highs import INFINITY, LpResult, Program, solve_lp
from autockpt_solvers.methods.ilp.stages import Stages
from autockpt_solvers.on_demand import optional_operations

__all__ = ["RUNS_BYTES", "StageProgram"]

# Where the peak is minimised, what all possible runs together weigh, in bytes.
RUNS_BYTES = 0.2


class StageProgram:
    """The program of one problem at one budget, growing by cuts.

    Args:
        stages: the index sets.
        budget_bytes: the budget.
        least_bytes: minimise the peak instead, between these bytes and the budget.

    Attributes:
        program: the rows and columns.
        runs: column of ``R[i, k]``.
        resident: column of ``S[g, k]``.
        saved: column of the units by which the peak stays below the budget, where that is
            maximised.
        optional: column that says whether an optional operation is run, where that costs.
        later: for each stage with closure cuts the columns ``T[i]``.
        alive: columns of the in-stage rows; see :mod:`autockpt_solvers.methods.ilp.instage`.
        memory_stage: for each memory row the stage start whose residents it bounds.
        cost_unit: nanoseconds per unit of the objective.
        byte_unit: bytes per unit of the memory rows.
        bounded_inside: whether it has rows for the backward operations inside stages.
    """

    def __init__(
        self,
        stages: Stages,
        budget_bytes: int,
        *,
        least_bytes: int | None = None,
    ) -> None:
        self.stages = stages
        self.budget_bytes = budget_bytes
        problem = stages.problem
        self.program = Program("recompute")
        self.tensor = _labels(problem.storages[group.storages[0]].name for group in stages.groups)
        self.operation = _labels(op.name for op in problem.operations[: problem.barrier])
        # Unscaled nanoseconds and bytes gave false optima: tolerances are absolute.
        candidates = set().union(*stages.runs) if stages.runs else set()
        total = sum(problem.operations[i].cost_ns for i in candidates)
        self.cost_unit = max(total, 1) / 1000
        self.byte_unit = max(budget_bytes - problem.resident_bytes, 1) / 1000
        self.saved: int | None = None
        if least_bytes is not None:
            room = (budget_bytes - least_bytes) / self.byte_unit
            self.saved = self.program.variable("saved", -1.0, upper=room, integer=False)
            # Runs cost next to nothing, so that none is made in vain: all of them together less
            # than a byte where that is above the solver's tolerances.
            every = sum(problem.operations[i].cost_ns for runs in stages.runs for i in runs)
            every += sum(op.cost_ns for op in problem.operations if op.optional)
            self.cost_unit = max(every, 1) / min(max(RUNS_BYTES / self.byte_unit, 1e-3), 1.0)
        self.runs: dict[tuple[int, int], int] = {}
        self.resident: dict[tuple[int, int], int] = {}
        self.optional: dict[int, int] = {}
        self.later: dict[int, dict[int, int]] = {}
        self.alive: dict[tuple[int, int, int], int] = {}
        self.memory_stage: dict[int, int] = {}
        self.bounded_inside = False
        self._columns()
        self._dependencies()
        self._memory()

    # ---------------------------------------------------------------- the basic program

    def _columns(self) -> None:
        stages, problem, program = self.stages, self.stages.problem, self.program
        for k, runs in enumerate(stages.runs):
            for index in sorted(runs):
                cost = problem.operations[index].cost_ns / self.cost_unit
                name = f"R({self.operation[index]},{k})"
                self.runs[index, k] = program.variable(name, cost)
        for g, group in enumerate(stages.groups):
            forced = stages.forced(g)
            for k in range(stages.last_stage[g] + 1):
                column = program.variable(f"S({self.tensor[g]},{k})")
                self.resident[g, k] = column
                if k < forced:
                    program.bound(column, lower=1.0)
                elif k == 0 and not group.may_keep:
                    program.bound(column, upper=0.0)
        for g, group in enumerate(stages.groups):
            if not problem.operations[group.producer].optional or (g, 0) not in self.resident:
                continue
            for index in sorted(optional_operations(problem, group.storages)):
                cost = problem.operations[index].cost_ns / self.cost_unit
                if cost == 0:
                    continue
                if index not in self.optional:
                    name = f"O({self.operation[index]})"
                    self.optional[index] = program.variable(name, cost)
                terms = [(self.resident[g, 0], 1), (self.optional[index], -1)]
                program.row(f"optional({self.tensor[g]},{self.operation[index]})", terms, upper=0)

    def _made(self, g: int, k: int) -> list[tuple[int, float]]:
        """Return ``-R[maker(g), k]`` where that may be run."""
        group = self.stages.groups[g]
        column = self.runs.get((group.producer, k)) if group.again else None
        return [] if column is None else [(column, -1.0)]

    def _had(self, g: int, k: int) -> list[tuple[int, float]]:
        """Return ``-S[g, k]`` where that exists."""
        column = self.resident.get((g, k))
        return [] if column is None else [(column, -1.0)]

    def _dependencies(self) -> None:
        stages, program, tensor = self.stages, self.program, self.tensor
        for (g, k), column in self.resident.items():
            if k:
                terms = [(column, 1.0), *self._had(g, k - 1), *self._made(g, k - 1)]
                program.row(f"had({tensor[g]},{k})", terms, upper=0)
            made = self._made(g, k)
            if made:  # S = 0 meets every row where R = 1, so both are never needed
                terms = [(column, 1.0), (made[0][0], 1.0)]
                program.row(f"either({tensor[g]},{k})", terms, upper=1)
        for (index, k), column in self.runs.items():
            for g in stages.inputs[index]:
                terms = [(column, 1.0), *self._had(g, k), *self._made(g, k)]
                program.row(f"input({self.operation[index]},{tensor[g]},{k})", terms, upper=0)
        for k, wanted in enumerate(stages.uses):
            for g in wanted:
                terms = [(c, -v) for c, v in (*self._had(g, k), *self._made(g, k))]
                program.row(f"read({tensor[g]},{k})", terms, lower=1)

    def memory_row(self, name: str, constant: int, terms: dict[int, int]) -> int:
        """Add ``constant + terms <= budget``, in bytes."""
        row = [(column, size / self.byte_unit) for column, size in terms.items() if size]
        if self.saved is not None:
            row.append((self.saved, 1.0))
        return self.program.row(
            name,
            row,
            upper=(self.budget_bytes - constant) / self.byte_unit,
        )

    def _memory(self) -> None:
        stages, liveness = self.stages, self.stages.liveness
        problem, groups = stages.problem, stages.groups
        during, _ = liveness.backward_bytes
        for k, end in enumerate(stages.ends):
            wanted = set(stages.at_end[k])
            constant = during[end] + sum(groups[g].size_bytes for g in wanted)
            terms = {
                self.resident[g, k + 1]: group.size_bytes
                for g, group in enumerate(groups)
                if g not in wanted and (g, k + 1) in self.resident
            }
            name = f"memory({k})"
            self.memory_stage[self.memory_row(name, constant, terms)] = k + 1
        # Forward: rows whose constant no later row exceeds; a later row has more terms.
        highest = -1
        forward = liveness.forward_bytes
        for index in reversed(problem.forward):
            op = problem.operations[index]
            if op.optional:
                continue
            if int(forward[index]) <= highest:
                continue
            highest = int(forward[index])
            terms = {
                self.resident[g, 0]: group.size_bytes
                for g, group in enumerate(groups)
                if group.forward_end < index and not group.at_barrier and (g, 0) in self.resident
            }
            over, saved_bytes = liveness.in_place.get(index, ((), 0))
            if len(over) == 1 and over[0] in stages.group_of:
                # Kept, it cannot be written over. Where several could, one is taken to be left.
                kept = self.resident.get((stages.group_of[over[0]], 0))
                if kept is not None:
                    terms[kept] = saved_bytes
            name = f"forward({self.operation[index]})"
            self.memory_stage[self.memory_row(name, highest, terms)] = 0

    # ---------------------------------------------------------------- cuts

    def close(self, k0: int) -> None:
        """Add the closure cuts for the stages from ``k0`` on."""
        if k0 in self.later:
            return
        stages, program = self.stages, self.program
        columns: dict[int, list[int]] = {}
        for (index, k), column in self.runs.items():
            if k >= k0:
                columns.setdefault(index, []).append(column)
        operation, tensor = self.operation, self.tensor
        later = {
            index: program.variable(f"T({operation[index]},{k0})", integer=False)
            for index in sorted(columns)
        }
        self.later[k0] = later
        read = {g for wanted in stages.uses[k0:] for g in wanted}
        for index, column in later.items():
            terms = [(column, 1.0), *((c, -1.0) for c in columns[index])]
            program.row(f"later({operation[index]},{k0})", terms, upper=0)
            for g in stages.outputs[index]:
                if g in read and (g, k0) in self.resident:
                    terms = [(column, 1.0), (self.resident[g, k0], 1.0)]
                    program.row(f"laterread({tensor[g]},{k0})", terms, lower=1)
            for g in stages.inputs[index]:
                terms = [(column, 1.0), *self._had(g, k0)]
                maker = stages.groups[g].producer
                if stages.groups[g].again and maker in later:
                    terms.append((later[maker], -1.0))
                name = f"laterinput({operation[index]},{tensor[g]},{k0})"
                program.row(name, terms, upper=0)

    def relax(self, *, deadline: float, rounds: int = 4, per_round: int = 3) -> LpResult:
        """Return the relaxation, with closure cuts added where the memory rows bind.

        Args:
            deadline: ``time.perf_counter()`` at which to stop.
            rounds: solves, each but the last followed by cuts.
            per_round: stage starts that get cuts in a round.
        """
        self.close(0)
        best = LpResult("stopped", None, None, -INFINITY)
        for number in range(rounds):
            left = deadline - time.perf_counter()
            if left <= 0:
                break
            result = solve_lp(self.program, time_limit_s=left)
            if result.status == "infeasible":
                return result
            if result.bound > best.bound or result.values is not None:
                best = LpResult(
                    result.status, result.values, result.duals, max(result.bound, best.bound)
                )
            if result.duals is None or number == rounds - 1:
                break
            weight: dict[int, float] = {}
            for row, k in self.memory_stage.items():
                dual = abs(float(result.duals[row]))
                if dual > 1e-7 and k not in self.later and k < len(self.stages.ends):
                    weight[k] = weight.get(k, 0.0) + dual
            if not weight:
                break
            for k in sorted(weight, key=lambda stage: -weight[stage])[:per_round]:
                self.close(k)
        return best

    # ---------------------------------------------------------------- between points and schedules

    def order(self, values: Sequence[float]) -> list[int]:
        """Return the backward order of an integer point, without runs that nobody needs."""
        problem, stages = self.stages.problem, self.stages
        barrier = problem.barrier
        chosen: dict[int, list[int]] = {}
        for (index, k), column in self.runs.items():
            if values[column] > 0.5:
                chosen.setdefault(stages.ends[k], []).append(index)
        order: list[int] = []
        for offset in range(len(problem.operations) - barrier):
            order.extend(sorted(chosen.get(offset, ())))
            order.append(barrier + offset)
        return needed_runs(stages, order)

    def point(self, order: Sequence[int]) -> list[float] | None:
        """Return the values of the columns for a backward order; None where it has none.

        An order that runs an operation twice in one stage is not a point of the program.
        """
        stages, barrier = self.stages, self.stages.problem.barrier
        values = [variable.lowBound for variable in self.program.variables]
        stage_of: dict[int, int] = {}
        k = 0
        for offset in range(len(stages.liveness.demand.reads)):
            stage_of[offset] = k
            if k < len(stages.ends) and stages.ends[k] == offset:
                k += 1
        pending: list[int] = []
        seen: set[tuple[int, int]] = set()
        for index in order:
            if index < barrier:
                pending.append(index)
                continue
            for run in pending:
                key = (run, stage_of[index - barrier])
                if key not in self.runs or key in seen:
                    return None
                seen.add(key)
                values[self.runs[key]] = 1.0
            pending.clear()
        need: set[int] = set()
        starts = {end: k + 1 for k, end in enumerate(stages.ends)}
        for index in reversed(order):
            start = starts.get(index - barrier) if index >= barrier else None
            if start is not None:
                self._set_resident(values, need, start)
            for g in stages.outputs.get(index, ()) if index < barrier else ():
                need.discard(g)
            if index < barrier:
                need.update(stages.inputs[index])
            else:
                reads = stages.liveness.demand.reads[index - barrier]
                need.update(stages.group_of[s] for s in reads if s in stages.group_of)
        self._set_resident(values, need, 0)
        for g, group in enumerate(stages.groups):
            if g in need and stages.problem.operations[group.producer].optional:
                for index in optional_operations(stages.problem, group.storages):
                    if index in self.optional:
                        values[self.optional[index]] = 1.0
        for k0, later in self.later.items():
            for (index, stage), column in self.runs.items():
                if stage >= k0 and values[column] > 0.5:
                    values[later[index]] = 1.0
        for (g, k, reader), column in self.alive.items():
            columns = [
                self.runs[index, k]
                for index in stages.groups[g].readers
                if index >= reader and (index, k) in self.runs
            ]
            if (g, k + 1) in self.resident:
                columns.append(self.resident[g, k + 1])
            values[column] = max(values[c] for c in columns)
        return values

    def _set_resident(self, values: list[float], need: set[int], start: int) -> None:
        for g in need:
            column = self.resident.get((g, start))
            if column is not None:
                values[column] = 1.0


def _labels(names: Iterable[str]) -> list[str]:
    """Return different labels that LP and MPS files take, close to the names."""
    labels: list[str] = []
    seen: set[str] = set()
    for number, name in enumerate(names):
        label = re.sub(r"[^A-Za-z0-9_.]", "_", name)[:60]
        while label in seen:
            label = f"{label}.{number}"
        seen.add(label)
        labels.append(label)
    return labels


def needed_runs(stages: Stages, order: Sequence[int]) -> list[int]:
    """Return a backward order without the recomputations whose outputs nobody reads."""
    barrier = stages.problem.barrier
    need: set[int] = set()
    kept: list[int] = []
    for index in reversed(order):
        if index < barrier:
            outputs = stages.outputs[index]
            if need.isdisjoint(outputs):
                continue
            need.difference_update(outputs)
            need.update(stages.inputs[index])
        else:
            reads = stages.liveness.demand.reads[index - barrier]
            need.update(stages.group_of[s] for s in reads if s in stages.group_of)
        kept.append(index)
    return kept[::-1]
