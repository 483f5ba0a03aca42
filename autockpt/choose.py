"""Choose: the size of the micro-batches that trains a batch fastest within the budget.

A large micro-batch uses the processor better and may need recomputation to fit; a small one needs
none and adds to all gradients more often. Each size is captured and measured for itself. Without
recomputation its time bounds its time within the budget from below, so that sizes are solved
in the order of that bound, and none is that cannot be the fastest any more.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from autockpt.device import Device
from autockpt.roofline import Modelled
from autockpt.split import shares
from autockpt_solvers.errors import InfeasibleBudget
from autockpt_solvers.plan import Plan

__all__ = ["Choice", "add_time_s", "candidates", "choose"]


@dataclass(frozen=True)
class Choice:
    """The micro-batches of one step.

    Attributes:
        sizes: samples in each.
        why: what was compared, for people.
    """

    sizes: tuple[int, ...]
    why: str


def candidates(samples: int) -> list[int]:
    """Return the numbers of micro-batches to compare: sizes that divide, and powers of two.

    >>> candidates(12)  # of 12, 6, 4, 3, 2 and 1 samples; those of 8 are two of 6 as well
    [1, 2, 3, 4, 6, 12]
    """
    sizes = {d for d in range(1, samples + 1) if samples % d == 0}
    sizes |= {1 << power for power in range(samples.bit_length())}
    return sorted({-(-samples // size) for size in sizes})


def choose(
    samples: int,
    unlimited: Callable[[int, int], Plan],
    limited: Callable[[int, int], Plan],
    budget_bytes: int | None,
    add_s: float,
) -> Choice:
    """Return the micro-batches with the shortest predicted step within the budget.

    Args:
        samples: size of the batch.
        unlimited: returns the plan without a budget for micro-batches of some size, of which
            there are some number.
        limited: the same within the budget.
        budget_bytes: the budget; None for no limit.
        add_s: time to add one set of gradients to another, in seconds.

    Raises:
        InfeasibleBudget: not even one sample fits.
    """
    least: dict[int, float] = {}  # parts -> time without recomputation
    plans: dict[int, Plan] = {}
    for parts in candidates(samples):
        size = shares(samples, parts)[0]
        plan = unlimited(size, parts)
        least[parts] = _total_s(plan, samples, parts, add_s)
        if budget_bytes is None or plan.peak_bytes <= budget_bytes:
            plans[parts] = plan
    best, best_s = 0, float("inf")
    said: dict[int, str] = {}
    too_small: InfeasibleBudget | None = None
    for parts in sorted(least, key=lambda parts: (least[parts], parts)):
        if least[parts] >= best_s:
            said[parts] = f"at least {_per_sample(least[parts], samples)}"
            continue
        try:
            plan = plans[parts] if parts in plans else limited(shares(samples, parts)[0], parts)
        except InfeasibleBudget as error:
            said[parts] = f"needs {error.minimum_bytes:,} bytes"
            if too_small is None or error.minimum_bytes < too_small.minimum_bytes:
                too_small = error
            continue
        total = _total_s(plan, samples, parts, add_s)
        recomputed = f", {plan.overhead:.1%} of it recomputed" if plan.extra_time_s else ""
        said[parts] = _per_sample(total, samples) + recomputed
        if total < best_s:
            best, best_s = parts, total
    if not best:
        assert too_small is not None
        raise InfeasibleBudget(
            too_small.budget_bytes,
            too_small.minimum_bytes,
            too_small.tensors,
            "That is with micro-batches of the size that needs least.",
        )
    why = "; ".join(f"{parts} of {shares(samples, parts)[0]}: {said[parts]}" for parts in least)
    return Choice(shares(samples, best), why)


def _total_s(plan: Plan, samples: int, parts: int, add_s: float) -> float:
    sizes = shares(samples, parts)
    # Smaller parts of an uneven batch are taken to run at the speed of the larger.
    return plan.step_time_s * sum(sizes) / sizes[0] + (parts - 1) * add_s


def _per_sample(seconds: float, samples: int) -> str:
    return f"{seconds / samples * 1e3:.3g} ms a sample"


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
