"""The arena beside the allocator: what lies in it, how much it wastes, and what a step takes.

    python examples/benchmarks/arena.py --models gpt,resnet,unet,llama --rounds 15
    python examples/benchmarks/arena.py --plain-malloc
    python examples/benchmarks/arena.py --plain-malloc --varying arena
    python examples/benchmarks/arena.py --inplace --models gpt,resnet,unet,vit

With ``--plain-malloc`` the C library gives large blocks back to the kernel at each free, as it does
unless told otherwise; without, it keeps them (``benchmarks.measure.ALLOCATOR_ENVIRONMENT``).
``--varying`` trains a GPT for 50 steps on batches of 2 to 8 and prints what the C library reserves
for them, beside the largest number of bytes alive at once. ``--inplace`` prints each model's
measured peak with and without operations in place, and with nothing of autockpt's, at no limit and
at half of the activations.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import autockpt
from autockpt.arena import layout_of
from benchmarks.measure import (
    MIB,
    ensure_allocator,
    measure_peak,
    measure_times,
    pair_ratio,
    resident_bytes,
    step_clock,
    step_function,
)
from hf_models import HF_EXAMPLES
from models import EXAMPLES as OWN
from models import Example

EXAMPLES: dict[str, Callable[..., Example]] = {**HF_EXAMPLES, **OWN}


class _Mallinfo(ctypes.Structure):
    """What glibc's ``mallinfo2`` returns."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def reserved_bytes() -> int:
    """Bytes the C library has taken from the kernel for this process."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Mallinfo
    info = libc.mallinfo2()
    return int(info.arena + info.hblkhd)


def varying(arena: bool) -> None:
    """Train on batches of changing size."""
    model, _, _ = EXAMPLES["gpt"]("test")
    autockpt.optimize(model.train(), None, arena=arena)
    pick = random.Random(0)
    generator = torch.Generator().manual_seed(0)

    def step(batch: int) -> int:
        ids = torch.randint(512, (batch, 65), generator=generator)
        step_function(model, (ids[:, :-1].contiguous(), ids[:, 1:].contiguous()))()
        return int(model.plan.peak_bytes)

    for batch in range(8, 1, -1):  # plan them all, and forget what that took
        step(batch)
        step(batch)
    ctypes.CDLL(None).malloc_trim(0)
    before = reserved_bytes()
    live = max(step(pick.randint(2, 8)) for _ in range(50))
    after = reserved_bytes()
    kept = "in the arena" if arena else "by the allocator"
    print(
        f"{kept}: reserved {before / MIB:.1f} MiB before, {after / MIB:.1f} MiB after 50 steps; "
        f"the largest step has {live / MIB:.1f} MiB alive"
    )


def whole_peak(name: str, size: str, budget: int | None, inplace: bool | None) -> int:
    """The measured peak of a model's step; ``inplace`` None is the model as it is."""
    model, args, kwargs = EXAMPLES[name](size)
    model.train()
    if inplace is not None:
        autockpt.optimize(model, budget, inplace=inplace, time_limit=5)
    step = step_function(model, args, kwargs)
    for _ in range(3):
        step()
    return resident_bytes(model, (args, kwargs)) + measure_peak(step).delta_bytes


def inplace(name: str, size: str) -> None:
    """Peaks of a model's step with and without operations in place."""
    model, args, kwargs = EXAMPLES[name](size)
    plan = autockpt.plan(model.train(), args, None, example_kwargs=kwargs, inplace=False)
    resident = plan.problem.resident_bytes
    half = resident + (plan.baseline_peak_bytes - resident) // 2
    eager = whole_peak(name, size, None, None)
    on, off = (whole_peak(name, size, None, allowed) for allowed in (True, False))
    costs = [
        autockpt.plan(
            model, args, half, example_kwargs=kwargs, inplace=allowed, time_limit=10
        ).overhead
        for allowed in (True, False)
    ]
    print(
        f"{name:<9} no limit: eager {eager / MIB:.1f} MiB, out of place {off / MIB:.1f}, in place "
        f"{on / MIB:.1f} ({on / off - 1:+.1%}); half the activations: {costs[1]:.2%} recomputed "
        f"out of place, {costs[0]:.2%} in place",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="gpt,resnet,unet,llama")
    parser.add_argument("--size", choices=["test", "bench"], default="bench")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--plain-malloc", action="store_true")
    parser.add_argument("--varying", choices=["arena", "allocator"])
    parser.add_argument("--inplace", action="store_true")
    parser.add_argument("--threads", type=int, help="1: in processor time, others may run")
    asked = parser.parse_args()
    if not asked.plain_malloc:
        ensure_allocator()
    if asked.threads:
        torch.set_num_threads(asked.threads)
    if asked.inplace:
        for name in asked.models.split(","):
            inplace(name, asked.size)
        return
    if asked.varying:
        varying(asked.varying == "arena")
        return
    print("model     in arena   arena  waste  peak with  without    step time, arena / allocator")
    for name in asked.models.split(","):
        steps = {}
        for arena in (True, False):
            model, args, kwargs = EXAMPLES[name](asked.size)
            autockpt.optimize(
                model.train(), None, example_inputs=args, example_kwargs=kwargs, arena=arena
            )
            step = steps["arena" if arena else "allocator"] = step_function(model, args, kwargs)
            for _ in range(2):
                step()
            if arena:
                made = model.autockpt.planner.graphs[0].made
                layout = layout_of(made.formulation, made.plan.schedule)
        times = measure_times(steps, rounds=asked.rounds, clock=step_clock())
        ratio, spread = pair_ratio(times["arena"], times["allocator"])
        placed = layout.placement
        print(
            f"{name:<9} {len(layout.blocks):>8} {placed.arena_bytes / MIB:>7.1f} "
            f"{placed.fragmentation:>6.3f} {layout.peak_bytes / MIB:>10.1f} "
            f"{made.plan.peak_bytes / MIB:>8.1f}    {ratio:.3f} +- {spread:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
