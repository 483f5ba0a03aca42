"""Stages split in two, so that recomputations may interleave and repeat inside them.

The program runs a stage's operations in the forward's order, each at most once. A backward
operation that does nothing, put before the one that ends the stage, ends a stage of its own: what
it takes to free one branch before the next is made, or to run an operation twice for one reader.
With enough of them every schedule that runs the forward once is a point of the program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from autockpt_solvers.problem import Operation, Problem

__all__ = ["Split", "split"]


@dataclass(frozen=True)
class Split:
    """A problem with operations that do nothing.

    Attributes:
        problem: the problem.
        idle: its operations that do nothing, counted from the barrier.
        origin: for each of its operations the one it stands for; -1 where it does nothing.
    """

    problem: Problem
    idle: frozenset[int]
    origin: tuple[int, ...]

    def there(self, order: Sequence[int]) -> list[int]:
        """Return a backward order of the original problem, idle operations behind the runs."""
        number = {origin: index for index, origin in enumerate(self.origin)}
        barrier = self.problem.barrier
        result: list[int] = []
        for index in order:
            if index >= barrier:
                first = number[index]
                while first > barrier and self.origin[first - 1] < 0:
                    first -= 1
                result.extend(range(first, number[index]))
            result.append(number[index])
        return result

    def back(self, order: Sequence[int]) -> list[int]:
        """Return a backward order of this problem without the idle operations."""
        return [self.origin[index] for index in order if self.origin[index] >= 0]


def split(problem: Problem, offsets: Iterable[int]) -> Split:
    """Return the problem with an idle operation before each of these backward operations.

    Args:
        problem: the problem.
        offsets: backward operations, counted from the barrier; one for each time they come.
    """
    times = Counter(offsets)
    operations = list(problem.operations[: problem.barrier])
    origin = list(problem.forward)
    for index in problem.backward:
        for _ in range(times[index - problem.barrier]):
            name = f"idle.{len(operations)}"
            operations.append(Operation(name, (), (), fixed="it only ends a stage"))
            origin.append(-1)
        operations.append(problem.operations[index])
        origin.append(index)
    idle = frozenset(n - problem.barrier for n, old in enumerate(origin) if old < 0)
    return Split(replace(problem, operations=tuple(operations)), idle, tuple(origin))
