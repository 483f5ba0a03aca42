"""What a plan costs in truth: with no budget pressure, and beside its prediction under pressure.

    python examples/benchmarks/overhead.py --models gpt,unet

Each model runs as eager, optimised without a limit, and at five budgets (shares of the baseline's
activation peak), all timed in turn in the same rounds. ``predicted`` is the plan's overhead;
``measured`` is the step's extra time over the same graph without recomputation, which isolates
what the plan decided; ``over eager`` is what a user sees.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.measure import (
    MIB,
    ensure_allocator,
    measure_times,
    pair_ratio,
    step_clock,
    step_function,
    whole_step_peak,
)
from models import EXAMPLES

MODELS = ("gpt", "resnet", "unet")
SHARES = (0.5, 0.45, 0.4, 0.35, 0.3)


@dataclass(frozen=True)
class Row:
    """One budget on one model; times as parts of a step, ``share`` None for no limit."""

    model: str
    share: float | None
    budget_bytes: int | None
    peak_bytes: int
    predicted_peak_bytes: int
    predicted: float
    measured: float
    spread: float
    over_eager: float
    over_eager_spread: float


def measure_model(name: str, options: argparse.Namespace) -> tuple[list[Row], list[str]]:
    """The rows of one model, and what could not be planned."""
    import autockpt
    from autockpt_solvers.errors import AutockptError

    torch._dynamo.reset()
    build = EXAMPLES[name]
    model, args, kwargs = build(options.size)
    eager = step_function(model, args, kwargs)
    steps = {"eager": eager, "no limit": eager}
    planned: dict[str, tuple[float | None, torch.nn.Module]] = {}
    problems: list[str] = []
    resident = activations = 0
    for share in (None, *options.shares):
        label = "no limit" if share is None else f"{share:.0%}"
        budget = None if share is None else resident + int(share * activations)
        ours, _, _ = build(options.size)
        try:
            autockpt.optimize(ours, budget=budget, time_limit=options.time_limit)
            step = step_function(ours, args, kwargs)
            step()
        except AutockptError as error:
            if share is None:
                raise
            problems.append(f"{name} {label}: {str(error).splitlines()[0]}")
            continue
        if share is None:
            resident = ours.plan.problem.resident_bytes
            activations = ours.plan.baseline_peak_bytes - resident
        steps[label] = step
        planned[label] = (share, ours)
    peaks = {
        label: whole_step_peak(ours, steps[label], (args, kwargs))
        for label, (_, ours) in planned.items()
    }
    times = measure_times(steps, rounds=options.pairs, clock=step_clock())
    rows = []
    for label, (share, ours) in planned.items():
        ratio, spread = pair_ratio(times[label], times["no limit"])
        over_eager, over_eager_spread = pair_ratio(times[label], times["eager"])
        plan = ours.plan
        rows.append(
            Row(
                name,
                share,
                plan.budget_bytes,
                peaks[label],
                plan.peak_bytes,
                plan.overhead,
                ratio - 1,
                spread,
                over_eager - 1,
                over_eager_spread,
            )
        )
    return rows, problems


HEADER = (
    f"{'model':<8} {'budget':>8} {'MiB':>8} {'peak MiB':>9} {'predicted':>10} {'measured':>16} "
    f"{'ratio':>6} {'over eager':>16}"
)


def line(row: Row) -> str:
    """The row as a line of the table."""
    share = "no limit" if row.share is None else f"{row.share:.0%}"
    budget = "" if row.budget_bytes is None else f"{row.budget_bytes / MIB:.1f}"
    ratio = "" if row.predicted < 0.002 else f"{row.measured / row.predicted:.2f}"
    return (
        f"{row.model:<8} {share:>8} {budget:>8} {row.peak_bytes / MIB:>9.1f} "
        f"{row.predicted:>10.2%} {row.measured:>8.2%} ±{row.spread:>6.2%} {ratio:>6} "
        f"{row.over_eager:>8.2%} ±{row.over_eager_spread:>6.2%}"
    )


def summary(rows: list[Row]) -> str:
    """The last lines: the worst unpressured step, and how far predictions were off."""
    free = [r for r in rows if r.share is None]
    ratios = [
        r.measured / r.predicted for r in rows if r.share is not None and r.predicted >= 0.002
    ]
    text = f"no budget pressure: at most {max(r.over_eager for r in free):+.2%} over eager"
    if ratios:
        near = sum(abs(ratio - 1) <= 0.15 for ratio in ratios)
        text += (
            f"\nmeasured over predicted extra time: {min(ratios):.2f} to {max(ratios):.2f}, "
            f"within 15 % at {near} of {len(ratios)} budgets"
        )
    return text


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    def models(text: str) -> list[str]:
        unknown = [name for name in text.split(",") if name not in EXAMPLES]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown} not among {', '.join(EXAMPLES)}")
        return text.split(",")

    def shares(text: str) -> list[float]:
        return [float(part) / 100 for part in text.split(",") if part]

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=models, default=list(MODELS), help=",".join(MODELS))
    parser.add_argument(
        "--shares", type=shares, default=list(SHARES), help="budgets in percent: 50,45,40,35,30"
    )
    parser.add_argument("--pairs", type=int, default=15, help="timing rounds per model")
    parser.add_argument("--time-limit", type=float, default=60.0, help="for the solver, seconds")
    parser.add_argument("--size", choices=("bench", "test"), default="bench")
    parser.add_argument(
        "--threads",
        type=int,
        help="default: torch's choice; with 1, processor time is compared, which a busy machine "
        "disturbs less",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here as well")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse_arguments(argv)
    if argv is None:  # on the command line: this process is ours to replace
        ensure_allocator()
    if options.threads:
        torch.set_num_threads(options.threads)
    rows: list[Row] = []
    print(HEADER, flush=True)
    try:
        for name in options.models:
            found, problems = measure_model(name, options)
            rows += found
            print("\n".join([*map(line, found), *problems]), flush=True)
            if options.json:  # at every model: what an interrupted run found is kept
                options.json.write_text(json.dumps([asdict(r) for r in rows], indent=1))
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    if rows:
        print(summary(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
