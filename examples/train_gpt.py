"""Train a GPT on the Python standard library's own sources, within a memory budget.

    python examples/train_gpt.py                    # half of the activation memory
    python examples/train_gpt.py --budget 200MiB --layers 12 --steps 200

Prints the loss, the measured and the predicted peak beside the budget, and the step time with and
without the budget; writes the plan (plan.json) and a picture of the memory over one step
(timeline.png) to --out. Exit status: 0 within the budget, 1 above it, 2 on bad arguments or a
budget that cannot be met, 130 on Ctrl-C.
"""

from __future__ import annotations

import argparse
import math
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

import autockpt
from autockpt.budget import format_bytes
from autockpt.picture import draw_timeline
from autockpt_solvers.errors import AutockptError
from autockpt_solvers.plan import Plan
from benchmarks.measure import (
    ensure_allocator,
    measure_times,
    pair_ratio,
    step_function,
    whole_step_peak,
)
from models import GPT

VOCAB = 256  # a token is a byte


# ---------------------------------------------------------------------------------------------
# Data
# ---------------------------------------------------------------------------------------------


def load_corpus(limit_bytes: int = 8_000_000) -> tuple[Tensor, Tensor]:
    """The standard library's sources as bytes: (training, validation), 1-d uint8.

    Files are taken in the order of their names up to ``limit_bytes``; every tenth is held out.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    total = 0
    for index, path in enumerate(sorted(root.rglob("*.py"))):
        if skipped & set(path.relative_to(root).parts):
            continue
        source = path.read_bytes()
        parts[1 if index % 10 == 9 else 0].append(source)
        total += len(source)
        if total >= limit_bytes:
            break
    train, held_out = (
        torch.frombuffer(bytearray(b"\n".join(files)), dtype=torch.uint8) if files else None
        for files in parts
    )
    if train is None or held_out is None:
        raise FileNotFoundError(f"no Python sources under {root} to train on")
    return train, held_out


def batches(corpus: Tensor, batch: int, seq: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless random windows of ``corpus``: (ids, targets), each (batch, seq) of int64."""
    if len(corpus) < seq + 2:
        raise ValueError(f"--seq {seq} is longer than the text of {len(corpus)} bytes")
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(corpus) - seq - 1, (batch,), generator=generator)
        windows = torch.stack([corpus[s : s + seq + 1] for s in starts.tolist()]).long()
        yield windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


# ---------------------------------------------------------------------------------------------
# The job
# ---------------------------------------------------------------------------------------------


def make_optimizer(model: torch.nn.Module, name: str, lr: float) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1, fused=True)


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Iterator[tuple[Tensor, Tensor]],
    steps: int,
    device: torch.device,
) -> tuple[float, float]:
    """Train, showing progress; mean loss of the first and of the last tenth of the steps."""
    losses: list[float] = []
    few = max(1, steps // 10)
    base_lr = optimizer.param_groups[0]["lr"]
    start = time.perf_counter()
    for step in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = base_lr * min(1.0, step / few)
        ids, targets = (t.to(device) for t in next(data))
        loss = model(ids, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            raise FloatingPointError(f"the loss is {losses[-1]} at step {step}; try a lower --lr")
        if step == 1 or step % few == 0 or step == steps:
            speed = (time.perf_counter() - start) / step
            print(
                f"  step {step:>4}/{steps}  loss {losses[-1]:.3f}  {speed:.2f} s/step", flush=True
            )
    return sum(losses[:few]) / few, sum(losses[-few:]) / few


def run(args: argparse.Namespace) -> int:
    device = torch.device(args.device)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    corpus, held_out = load_corpus()
    data = batches(corpus, args.batch, args.seq, args.seed)
    ids, targets = (t.to(device) for t in next(data))

    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[], None]]:
        model = GPT(
            layers=args.layers,
            dim=args.dim,
            heads=args.heads,
            vocab=VOCAB,
            seq=args.seq,
            dropout=args.dropout,
        ).to(device)
        optimizer = make_optimizer(model, args.optimizer, args.lr)
        return model, optimizer, step_function(model, (ids, targets), optimizer=optimizer)

    model, optimizer, step = build()
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"GPT of {parameters / 1e6:.1f} M parameters, batch {args.batch} x {args.seq} bytes, "
        f"{len(corpus) / 1e6:.1f} MB of text, {device}"
    )
    budget = args.budget
    if budget is None:
        print("planning without a limit, to learn what half of the activations is", flush=True)
        unlimited = autockpt.plan(model, (ids, targets), None, optimizer=optimizer)
        resident = unlimited.problem.resident_bytes
        budget = resident + (unlimited.baseline_peak_bytes - resident) // 2
    print("planning", flush=True)
    start = time.perf_counter()
    autockpt.optimize(
        model,
        budget,
        example_inputs=(ids, targets),
        optimizer=optimizer,
        time_limit=args.time_limit,
    )
    planning_s = time.perf_counter() - start
    plan: Plan = model.plan
    stages = ", ".join(f"{name} {seconds:.1f}" for name, seconds in plan.stages_s.items())
    print(
        f"planned in {planning_s:.1f} s ({stages}): {plan.overhead:.1%} extra compute, proved "
        f"within {plan.gap:.2%} of a step of the optimum ({plan.solver})"
    )
    first, last = train(model, optimizer, data, args.steps, device)
    with torch.no_grad():
        model.eval()
        check, answers = (t.to(device) for t in next(batches(held_out, 8, args.seq, 0)))
        validation = model(check, answers).item()
        model.train()

    # Weights and optimizer state go on changing below, which is of no matter any more.
    measured = whole_step_peak(model, step, (ids, targets), optimizer, device=device)
    plan.save(out / "plan.json")
    plain, plain_optimizer, plain_step = build()
    plain_step()  # the optimizer makes its state in the first step
    print("measuring", flush=True)
    plain_measured = whole_step_peak(
        plain, plain_step, (ids, targets), plain_optimizer, device=device
    )
    times = measure_times({"plain": plain_step, "ours": step}, rounds=args.pairs, device=device)
    ratio, spread = pair_ratio(times["ours"], times["plain"])

    within = plan.budget_bytes is None or measured <= plan.budget_bytes
    limit = "none" if plan.budget_bytes is None else format_bytes(plan.budget_bytes)
    difference = (plan.peak_bytes - measured) / measured
    print(f"\nloss             {first:.3f} -> {last:.3f}, on held-out text {validation:.3f}")
    print(f"budget           {limit}")
    print(
        f"measured peak    {format_bytes(measured)}, {'within' if within else 'ABOVE'} the budget"
    )
    print(f"predicted peak   {format_bytes(plan.peak_bytes)} ({difference:+.2%})")
    print(f"without autockpt {format_bytes(plain_measured)} measured")
    print(
        f"step time        {times['ours'].median_s:.3f} s with, {times['plain'].median_s:.3f} s "
        f"without: x{ratio:.3f} ± {spread:.3f} (predicted x{1 + plan.overhead:.3f})"
    )
    picture = out / "timeline.png"
    draw_timeline(plan, picture, measured=measured)
    print(f"written          {out / 'plan.json'}, {picture}")
    return 0 if within else 1


# ---------------------------------------------------------------------------------------------
# The command line
# ---------------------------------------------------------------------------------------------


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    def at_least(minimum: int) -> Callable[[str], int]:
        def integer(text: str) -> int:
            value = int(text)
            if value < minimum:
                raise argparse.ArgumentTypeError(f"{text} is below {minimum}")
            return value

        return integer

    def fraction(text: str) -> float:
        value = float(text)
        if not 0.0 <= value < 1.0:
            raise argparse.ArgumentTypeError(f"{text} is not in [0, 1)")
        return value

    def positive(text: str) -> float:
        value = float(text)
        if not (value > 0.0 and math.isfinite(value)):
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    def budget(text: str) -> int | str:
        return int(text) if text.isdecimal() else text

    parser = argparse.ArgumentParser(
        description="Train a GPT on the standard library's sources within a memory budget."
    )
    parser.add_argument("--budget", type=budget, help="200MiB, 40GB, 80%% (of the device) or bytes")
    parser.add_argument("--steps", type=at_least(1), default=60)
    parser.add_argument("--layers", type=at_least(1), default=8)
    parser.add_argument("--dim", type=at_least(1), default=256)
    parser.add_argument("--heads", type=at_least(1), default=8)
    parser.add_argument("--batch", type=at_least(1), default=8)
    parser.add_argument("--seq", type=at_least(1), default=128)
    parser.add_argument("--dropout", type=fraction, default=0.1)
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    parser.add_argument("--lr", type=positive, help="default: 1e-3 (adamw), 0.1 (sgd)")
    parser.add_argument("--pairs", type=at_least(1), default=7, help="timed pairs of steps")
    parser.add_argument("--time-limit", type=positive, default=30.0, help="for the solver, seconds")
    parser.add_argument("--threads", type=at_least(1), help="CPU threads; default: torch's choice")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="train_gpt_out", metavar="DIR")
    args = parser.parse_args(argv)
    if args.dim % args.heads:
        parser.error(f"--dim {args.dim} is not a multiple of --heads {args.heads}")
    try:
        torch.empty(0, device=args.device)
    except (RuntimeError, AssertionError) as error:
        parser.error(f"--device {args.device}: {str(error).splitlines()[0]}")
    if args.lr is None:
        args.lr = 1e-3 if args.optimizer == "adamw" else 0.1
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    if argv is None:  # on the command line: this process is ours to replace
        ensure_allocator()
    if args.threads:
        torch.set_num_threads(args.threads)
    try:
        return run(args)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    except (AutockptError, FloatingPointError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
