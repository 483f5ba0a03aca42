"""Steps over micro-batches: their peak, their time, and the micro-batch that "auto" chooses.

    python examples/benchmarks/accumulate.py --parts memory,time
    python examples/benchmarks/accumulate.py --parts auto,seed --models gpt

``memory``: the measured peak of batch 32 as 8 x 4 beside that of batch 4 alone, and loops written
by hand. ``time``: time of ``step`` over the hand-written loop's on the same samples. ``auto``: the
choice under three budgets beside every choice. ``seed``: effective batch 32 in the budget that
batch 4 fills. Contenders run in turn, in the same rounds; ratios are medians over the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time as clocks
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import autockpt
from autockpt.choose import candidates
from autockpt_solvers.errors import InfeasibleBudget
from benchmarks.measure import (
    MIB,
    ensure_allocator,
    measure_peak,
    measure_times,
    pair_ratio,
    resident_bytes,
    whole_step_peak,
)
from models import GPT, ResNet

BATCH, MICRO = 32, 4


def gpt() -> tuple[nn.Module, Tensor, Tensor]:
    """A small GPT and a batch of tokens."""
    torch.manual_seed(0)
    model = GPT(layers=4, dim=192, heads=6, vocab=1024, seq=96)
    ids = torch.randint(1024, (BATCH, 97))
    return model, ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def resnet() -> tuple[nn.Module, Tensor, Tensor]:
    """A ResNet-50 of half its width, and a batch of images."""
    torch.manual_seed(0)
    model = ResNet(width=32, classes=10)
    return model, torch.randn(BATCH, 3, 96, 96), torch.randint(10, (BATCH,))


MODELS = {"gpt": gpt, "resnet": resnet}


# ------------------------------------------------------------------ contenders


def looped(model: nn.Module, optimizer: Optimizer, parts: int, x: Tensor, y: Tensor) -> None:
    """The loop by hand: equal micro-batches, autograd's own accumulation."""
    total = torch.zeros(())
    for some, targets in zip(x.chunk(parts), y.chunk(parts), strict=True):
        loss = model(some, targets) / parts
        loss.backward()
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def hand_written(
    build: Callable[[], Any], parts: int, *, planned: bool = False
) -> tuple[nn.Module, Any, Any]:
    """The model, its optimizer and a step of the loop by hand; in eager or over our graphs."""
    model, x, y = build()
    optimizer = AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        looped(model, optimizer, parts, x, y)

    if planned:
        autockpt.optimize(model, None, optimizer=optimizer)
        for _ in range(3):
            step()
    return model, optimizer, step


def stepped(
    build: Callable[[], Any], accumulate: int | str, budget: int | None, seconds: float
) -> tuple[nn.Module, Any, Any]:
    """The same under autockpt."""
    model, x, y = build()
    optimizer = AdamW(model.parameters(), lr=1e-4)
    autockpt.optimize(model, budget, optimizer=optimizer, accumulate=accumulate, time_limit=seconds)

    def step() -> Tensor:
        return model.step(x, y)

    for _ in range(3):
        step()
    return model, optimizer, step


def peak_of(made: tuple[nn.Module, Any, Any], inputs: Any) -> int:
    """The measured peak of a contender's whole step."""
    model, optimizer, step = made
    step()
    return whole_step_peak(model, step, inputs, optimizer)


# ------------------------------------------------------------------ parts


def memory(name: str, options: argparse.Namespace) -> None:
    """Peaks of batch 32 as 8 x 4."""
    build = MODELS[name]
    model, x, y = build()
    few = (x[:MICRO].clone(), y[:MICRO].clone())

    def alone() -> None:
        model(*few).backward()
        model.zero_grad(set_to_none=True)

    alone()
    # The batch of 32 lies there in all cases; its eighth is counted with it.
    small = resident_bytes(model, (x, y)) + measure_peak(alone).delta_bytes
    gradients = sum(p.numel() * p.element_size() for p in model.parameters())
    parts = BATCH // MICRO
    loop = hand_written(build, parts)
    loop_peak = peak_of(loop, (x, y))
    state = resident_bytes(nn.Module(), (), loop[1]) - resident_bytes(loop[0])
    bound = small + gradients + state
    ours = stepped(build, parts, None, options.time_limit)
    ours_peak = peak_of(ours, (x, y))
    graph_peak = peak_of(hand_written(build, parts, planned=True), (x, y))
    print(
        f"memory {name:<7} batch 4 {small / MIB:.1f} + gradients {gradients / MIB:.1f} + state "
        f"{state / MIB:.1f} = {bound / MIB:.1f} MiB; step 8 x 4 {ours_peak / MIB:.1f} "
        f"({ours_peak / bound:.3f}, predicted {ours[0].plan.peak_bytes / MIB:.1f}); loop by hand: "
        f"eager {loop_peak / MIB:.1f} ({loop_peak / bound:.3f}), "
        f"same graph {graph_peak / MIB:.1f} ({graph_peak / bound:.3f})",
        flush=True,
    )


def time(name: str, options: argparse.Namespace) -> None:
    """Time per sample of ``step`` against the loop by hand."""
    build = MODELS[name]
    for parts in (1, 2, 4, 8):
        contenders = {
            "loop": hand_written(build, parts)[2],
            "graph": hand_written(build, parts, planned=True)[2],
            "step": stepped(build, parts, None, 1.0)[2],
        }
        times = measure_times(contenders, rounds=options.rounds, clock=options.clock)
        ratio, spread = pair_ratio(times["step"], times["loop"])
        graph, graph_spread = pair_ratio(times["step"], times["graph"])
        print(
            f"time   {name:<7} k={parts}: loop {times['loop'].median_s / BATCH * 1e3:.2f} ms a "
            f"sample, step {ratio:.3f} ± {spread:.3f} of it; of the loop over the same graph "
            f"{graph:.3f} ± {graph_spread:.3f}",
            flush=True,
        )


def auto(name: str, options: argparse.Namespace) -> None:
    """The choice of "auto" at three budgets, beside every choice."""
    build = MODELS[name]
    made, x, y = build()
    full = autockpt.plan(made, (x, y), None, optimizer=AdamW(made.parameters()))
    resident = full.problem.resident_bytes + sum(4 * p.numel() for p in made.parameters())
    for share in options.shares:
        budget = resident + int(share * (full.baseline_peak_bytes - full.problem.resident_bytes))
        contenders: dict[str, Any] = {}
        for parts in candidates(BATCH):
            with contextlib.suppress(InfeasibleBudget):
                contenders[str(parts)] = stepped(build, parts, budget, options.time_limit)[2]
        try:
            chosen, _, step = stepped(build, "auto", budget, options.time_limit)
        except InfeasibleBudget as error:
            print(f"auto   {name:<7} {share:.2f}: needs {error.minimum_bytes / MIB:.1f} MiB")
            continue
        times = measure_times(
            {**contenders, "auto": step}, rounds=options.rounds, clock=options.clock
        )
        best = min(contenders, key=lambda parts: times[parts].median_s)
        ratio, spread = pair_ratio(times["auto"], times[best])
        each = ", ".join(f"{p}: {times[p].median_s / BATCH * 1e3:.2f}" for p in contenders)
        print(
            f"auto   {name:<7} {budget / MIB:.1f} MiB: {chosen.plan.origin['micro-batches']}, "
            f"{ratio:.3f} ± {spread:.3f} of the best ({best}); ms a sample: {each}",
            flush=True,
        )


def seed(name: str, options: argparse.Namespace) -> None:
    """Effective batch 32 in the memory that a plain step on batch 4 takes."""
    build = MODELS[name]
    model, x, y = build()
    optimizer = AdamW(model.parameters(), lr=1e-4)
    few = (x[:MICRO].clone(), y[:MICRO].clone())

    def plain() -> None:
        for _ in range(BATCH // MICRO):
            looped(model, optimizer, 1, *few)

    plain()
    # The larger batch itself has to lie somewhere.
    more = resident_bytes(nn.Module(), (x, y)) - resident_bytes(nn.Module(), few)
    filled = whole_step_peak(model, lambda: looped(model, optimizer, 1, *few), few, optimizer)
    budget = filled + more
    ours, own, step = stepped(build, "auto", budget, options.time_limit)
    peak = peak_of((ours, own, step), (x, y))
    loop = hand_written(build, BATCH // MICRO)
    loop_peak = peak_of(loop, (x, y))
    times = measure_times(
        {"batch 4": plain, "loop": loop[2], "step": step},
        rounds=options.rounds,
        clock=options.clock,
    )
    against, spread = pair_ratio(times["batch 4"], times["step"])
    beside, beside_spread = pair_ratio(times["loop"], times["step"])
    print(
        f"seed   {name:<7} budget {budget / MIB:.1f} MiB; step peak {peak / MIB:.1f}, "
        f"{ours.plan.origin['micro-batches']}, {ours.plan.overhead:.1%} recomputed; throughput "
        f"{against:.3f} ± {spread:.3f} of batch 4 with an optimizer step each, {beside:.3f} ± "
        f"{beside_spread:.3f} of the loop 8 x 4 (whose peak is {loop_peak / MIB:.1f})",
        flush=True,
    )


PARTS = {"memory": memory, "time": time, "auto": auto, "seed": seed}


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The options."""

    def among(known: dict[str, Any]) -> Callable[[str], list[str]]:
        def parse(text: str) -> list[str]:
            unknown = [name for name in text.split(",") if name not in known]
            if unknown:
                raise argparse.ArgumentTypeError(f"{unknown} not among {', '.join(known)}")
            return text.split(",")

        return parse

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=among(MODELS), default=list(MODELS))
    parser.add_argument("--parts", type=among(PARTS), default=list(PARTS))
    parser.add_argument(
        "--shares",
        type=lambda text: [float(share) for share in text.split(",")],
        default=[0.8, 0.4, 0.2],
        help="budgets of auto: shares of what the whole batch at once adds to resident memory",
    )
    parser.add_argument("--rounds", type=int, default=7, help="timing rounds")
    parser.add_argument(
        "--cpu-time",
        dest="clock",
        action="store_const",
        const=clocks.process_time,
        default=clocks.perf_counter,
        help="count this process's own time, on a machine that others use as well",
    )
    parser.add_argument("--time-limit", type=float, default=3.0, help="for the solver, seconds")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the parts and print a line for each result."""
    options = parse_arguments(argv)
    if argv is None:  # on the command line: this process is ours to replace
        ensure_allocator()
    for part in options.parts:
        for name in options.models:
            torch._dynamo.reset()
            PARTS[part](name, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
