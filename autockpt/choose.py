"""Choose: the size of the micro-batches that trains a batch fastest within the budget.

A large micro-batch uses the processor better and may need recomputation to fit; a small one needs
none and adds to all gradients more often. Sizes a factor of two apart are compared first, then some
between the best one and its neighbours. Each is captured and measured for itself. What it takes
without recomputation bounds its time from below, and none is solved that cannot be the fastest
any more. Those left share the time limit of one plan; the better half of them share it again, and
so on (successive halving): a choice takes the time of a few plans, not of one for each size.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from autockpt.device import Device
from autockpt.roofline import Modelled
from autockpt.split import shares
from autockpt_solvers.errors import InfeasibleBudget, InputError
from autockpt_solvers.plan import Plan

__all__ = ["Choice", "add_time_s", "candidates", "choose"]

# Sizes that are tried between the best and its neighbour, on either side.
_BETWEEN = 3
# A plan proved so close to the optimum gets no more of the solver's time.
_CLOSE = 0.001


@dataclass(frozen=True)
class Choice:
    """The micro-batches of one step.

    Attributes:
        sizes: samples in each.
        plan: the plan of one of the largest.
        why: what was compared, for people.
    """

    sizes: tuple[int, ...]
    plan: Plan
    why: str


def candidates(samples: int) -> list[int]:
    """Return the numbers of micro-batches to choose from: sizes that divide, and powers of two.

    >>> candidates(12)  # of 12, 6, 4, 3, 2 and 1 samples; those of 8 are two of 6 as well
    [1, 2, 3, 4, 6, 12]

    None has a single sample beside larger parts: a model that needs two would fail on it alone.
    """
    sizes = {d for d in range(1, samples + 1) if samples % d == 0}
    sizes |= {1 << power for power in range(samples.bit_length())}
    found = {-(-samples // size) for size in sizes}
    return sorted(n for n in found if n == samples or shares(samples, n)[-1] > 1 or samples == 1)


def choose(
    samples: int,
    unlimited: Callable[[int, int], Plan],
    limited: Callable[[int, int, float], Plan],
    budget_bytes: int | None,
    add_s: float,
    time_limit_s: float,
) -> Choice:
    """Return the micro-batches with the shortest predicted step within the budget.

    Args:
        samples: size of the batch.
        unlimited: returns the plan without a budget for micro-batches of some size, of which
            there are some number.
        limited: the same within the budget, found in some seconds.
        budget_bytes: the budget; None for no limit.
        add_s: time to add one set of gradients to another, in seconds.
        time_limit_s: time for a plan.

    Raises:
        InfeasibleBudget: not even one sample fits.
        InputError, OutOfMemoryError: the model runs on no size.
    """
    race = _Race(samples, unlimited, limited, budget_bytes, add_s, time_limit_s)
    every = candidates(samples)
    coarse = _spread(every)
    race.run(coarse)
    if race.best is not None:
        best = race.best
        for low, high in itertools.pairwise(coarse):
            if best in (low, high):
                inside = [parts for parts in every if low < parts < high]
                race.run(inside[:: max(1, -(-len(inside) // _BETWEEN))])
    return race.choice()


def _spread(parts: Sequence[int]) -> list[int]:
    """Numbers a factor of two apart at least, and the last."""
    found = [parts[0]]
    for number in parts[1:-1]:
        if number >= 2 * found[-1]:
            found.append(number)
    return found if found[-1] == parts[-1] else [*found, parts[-1]]


class _Race:
    """What is known of each number of micro-batches, and the best so far."""

    def __init__(
        self,
        samples: int,
        unlimited: Callable[[int, int], Plan],
        limited: Callable[[int, int, float], Plan],
        budget_bytes: int | None,
        add_s: float,
        time_limit_s: float,
    ) -> None:
        self.samples = samples
        self.unlimited = unlimited
        self.limited = limited
        self.budget_bytes = budget_bytes
        self.add_s = add_s
        self.time_limit_s = time_limit_s
        self.best: int | None = None
        self.may_fit: tuple[int, Plan] | None = None
        self.found_s: dict[int, float] = {}
        self.least_s: dict[int, float] = {}  # proved lower bound on the step's time
        self.plans: dict[int, Plan] = {}
        self.said: dict[int, str] = {}
        self.too_small: InfeasibleBudget | None = None
        self.failure: BaseException | None = None

    def run(self, numbers: Sequence[int]) -> None:
        """Let these numbers of micro-batches take part."""
        for parts in numbers:
            self._enter(parts)
        rivals = [p for p in numbers if p in self.least_s and p not in self.plans]
        if self.best is None and self.samples in rivals:
            # Where one sample does not fit, more do not.
            self._solve(self.samples, self.time_limit_s / len(rivals))
            rivals = [p for p in rivals if self.best is not None and p != self.samples]
        while rivals:
            rivals.sort(key=lambda p: (self.found_s.get(p, self.least_s[p]), p))
            seconds = self.time_limit_s / len(rivals)
            for parts in rivals:
                if parts == self.best or not self._excluded(parts):
                    self._solve(parts, seconds)
            half = rivals[: len(rivals) // 2]
            rivals = [p for p in half if p in self.plans and not self._finished(p)]

    def choice(self) -> Choice:
        """Return the best.

        Raises:
            InfeasibleBudget: nothing fits.
        InputError, OutOfMemoryError: nothing runs.
        """
        if self.best is None and self.may_fit is not None:
            self._has(*self.may_fit)
        if self.best is None and self.too_small is None:
            assert self.failure is not None
            raise self.failure
        if self.best is None:
            assert self.too_small is not None
            raise InfeasibleBudget(
                self.too_small.budget_bytes,
                self.too_small.minimum_bytes,
                self.too_small.tensors,
                "That is with micro-batches of the size that needs least.",
                self.too_small.bound_bytes,
            )
        why = "; ".join(
            f"{parts} of {self._size(parts)}: {self._of(parts)}" for parts in sorted(self.said)
        )
        return Choice(shares(self.samples, self.best), self.plans[self.best], why)

    def _enter(self, parts: int) -> None:
        try:
            plan = self.unlimited(self._size(parts), parts)
        except (torch.OutOfMemoryError, InputError) as error:
            # One operation alone needs too much, or does not take so few samples.
            self.failure = error
            self.said[parts] = "an operation fails on it"
            return
        self.least_s[parts] = self._total_s(plan, parts)
        self.said[parts] = ""
        if self.budget_bytes is None or plan.peak_bytes <= self.budget_bytes:
            self._has(parts, plan)

    def _solve(self, parts: int, seconds: float) -> None:
        try:
            plan = self.limited(self._size(parts), parts, seconds)
        except InfeasibleBudget as error:
            self.said[parts] = f"needs {error.minimum_bytes:,} bytes"
            if self.too_small is None or error.minimum_bytes < self.too_small.minimum_bytes:
                self.too_small = error
            return
        if self.budget_bytes is not None and plan.peak_bytes > self.budget_bytes:
            # It fits only where the loss takes less than one has to fear: better one that does.
            self.said[parts] = f"may need {plan.peak_bytes:,} bytes"
            if self.may_fit is None or plan.peak_bytes < self.may_fit[1].peak_bytes:
                self.may_fit = parts, plan
            return
        # What no schedule can save is no reason to look on.
        least = self._total_s(plan, parts) - self._scaled(plan.gap * plan.baseline_time_s, parts)
        self.least_s[parts] = max(self.least_s[parts], least)
        self._has(parts, plan)

    def _has(self, parts: int, plan: Plan) -> None:
        total = self._total_s(plan, parts)
        if parts in self.found_s and self.found_s[parts] <= total:
            return
        self.found_s[parts], self.plans[parts] = total, plan
        if self.best is None or total < self.found_s[self.best]:
            self.best = parts

    def _excluded(self, parts: int) -> bool:
        return self.best is not None and self.least_s[parts] >= self.found_s[self.best]

    def _finished(self, parts: int) -> bool:
        close = self.found_s[parts] - self.least_s[parts] <= _CLOSE * self.found_s[parts]
        return close or (parts != self.best and self._excluded(parts))

    def _size(self, parts: int) -> int:
        return shares(self.samples, parts)[0]

    def _scaled(self, seconds: float, parts: int) -> float:
        # Smaller parts of an uneven batch are taken to run at the speed of the larger.
        return seconds * self.samples / self._size(parts)

    def _total_s(self, plan: Plan, parts: int) -> float:
        return self._scaled(plan.step_time_s, parts) + (parts - 1) * self.add_s

    def _of(self, parts: int) -> str:
        if self.said[parts]:
            return self.said[parts]
        if parts not in self.plans:
            return f"at least {self._per_sample(self.least_s[parts])}"
        plan = self.plans[parts]
        recomputed = f", {plan.overhead:.1%} of it recomputed" if plan.extra_time_s else ""
        return self._per_sample(self.found_s[parts]) + recomputed

    def _per_sample(self, seconds: float) -> str:
        return f"{seconds / self.samples * 1e3:.3g} ms a sample"


def add_time_s(size_bytes: int, device: Device | Modelled) -> float:
    """Return the time to add ``size_bytes`` of single-precision numbers to as many others.

    Measured on a piece of them; for a GPU that is not here it is taken as nothing.
    """
    if isinstance(device, Modelled) or not size_bytes:
        return 0.0
    count = max(1, min(size_bytes, 2 * device.cache_bytes, 64 << 20) // 4)
    there, more = (torch.ones(count, device=device.kind) for _ in range(2))
    times = [device.time_ns(lambda: there.add_(more)) for _ in range(5)]
    return statistics.median(times) / 1e9 * size_bytes / (4 * count)
