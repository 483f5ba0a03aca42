"""The arena beside the allocator: what lies in it, how much it wastes, and what a step takes.

    python examples/benchmarks/arena.py --models gpt,resnet,unet,llama --rounds 15
    python examples/benchmarks/arena.py --plain-malloc

With ``--plain-malloc`` the C library gives large blocks back to the kernel at each free, as it does
unless told otherwise; without, it keeps them (``benchmarks.measure.ALLOCATOR_ENVIRONMENT``).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import autockpt
from autockpt.arena import layout_of
from benchmarks.measure import (
    MIB,
    ensure_allocator,
    measure_times,
    pair_ratio,
    step_function,
)
from models import EXAMPLES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="gpt,resnet,unet,llama")
    parser.add_argument("--size", choices=["tiny", "bench"], default="bench")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--plain-malloc", action="store_true")
    asked = parser.parse_args()
    if not asked.plain_malloc:
        ensure_allocator()
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
                made = model.autockpt._graphs[0].made
                layout = layout_of(made.formulation, made.plan.schedule)
        times = measure_times(steps, rounds=asked.rounds)
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
