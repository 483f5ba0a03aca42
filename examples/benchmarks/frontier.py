"""The frontier: autockpt against what else fits the step, each at the peer's own measured peak.

    python examples/benchmarks/frontier.py --models gpt,unet --ratios 0.8,0.5

For every model and peer (torch.utils.checkpoint on every block, whole and with two selective
policies, and torch's budget partitioner at eight ratios) the peer's whole-step peak is measured
from the allocator's events and given to ``autockpt.optimize`` as the budget. Eager, the peer and
ours are then timed in turn; step times are medians of ratios within a round. One table, then how
much extra time ours takes over theirs.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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
from benchmarks.peers import RATIOS, checkpoint_blocks, checkpoint_selectively, torch_budget
from models import EXAMPLES, Example, Size, gpt_example

MODELS = ("gpt", "resnet", "unet", "bert")
MORE = ("vit", "mixer", "densenet", "t5", "llama", "gpt_dropout")
NOISE = 0.005  # extra time below half a percent of a step cannot be told from nothing


@dataclass(frozen=True)
class Point:
    """One peer on one model: peaks in bytes, times as multiples of eager's."""

    model: str
    peer: str
    eager_peak_bytes: int
    peak_bytes: int
    peer_time: float
    peer_spread: float
    our_peak_bytes: int | None = None
    our_time: float | None = None
    our_spread: float | None = None
    versus_peer: float | None = None  # median ratio of our step to the peer's, within rounds
    predicted: float | None = None
    gap: float | None = None
    problem: str = ""

    @property
    def extra_ratio(self) -> float | None:
        """Our extra time over the peer's; both are taken as at least ``NOISE`` of a step."""
        if self.our_time is None:
            return None
        return max(self.our_time - 1, NOISE) / max(self.peer_time - 1, NOISE)


def build(name: str, size: Size) -> Example:
    """A fresh example; without dropout, which torch's partitioner gets wrong, but for one."""
    if name == "gpt_dropout":
        return gpt_example(size, dropout=0.1)
    if name in EXAMPLES:
        return EXAMPLES[name](size)
    import hf_models  # transformers is needed for these alone

    if name in ("bert", "t5"):
        example = {"bert": hf_models.bert_example, "t5": hf_models.t5_example}[name]
        return example(size, dropout=0.0)
    return hf_models.HF_EXAMPLES[name](size)


def measure_point(
    name: str, size: Size, peer: str, apply: Callable[[torch.nn.Module], Any], options: Any
) -> Point:
    """Measure one peer, then autockpt at the peer's peak, then the times of both and eager."""
    import autockpt
    from autockpt_solvers.errors import AutockptError

    torch._dynamo.reset()
    model, args, kwargs = build(name, size)
    eager = step_function(model, args, kwargs)
    eager()
    eager_peak = whole_step_peak(model, eager, (args, kwargs))

    peer_model, _, _ = build(name, size)
    forward = apply(peer_model)
    peer_step = step_function(peer_model, args, kwargs, forward=forward)
    peer_step()
    peer_peak = whole_step_peak(peer_model, peer_step, (args, kwargs))

    steps = {"eager": eager, "peer": peer_step}
    our_model, _, _ = build(name, size)
    ours: dict[str, Any] = {}
    try:
        autockpt.optimize(our_model, budget=peer_peak, time_limit=options.time_limit)
        our_step = step_function(our_model, args, kwargs)
        our_step()
        peak = whole_step_peak(our_model, our_step, (args, kwargs))
        plan = our_model.plan
        ours = {"our_peak_bytes": peak, "predicted": 1 + plan.overhead, "gap": plan.gap}
        steps["ours"] = our_step
    except AutockptError as error:
        ours = {"problem": f"{type(error).__name__}: {str(error).splitlines()[0]}"}

    times = measure_times(steps, rounds=options.pairs, clock=step_clock())
    peer_time, peer_spread = pair_ratio(times["peer"], times["eager"])
    if "ours" in times:
        our_time, our_spread = pair_ratio(times["ours"], times["eager"])
        versus_peer, _ = pair_ratio(times["ours"], times["peer"])
        ours |= {"our_time": our_time, "our_spread": our_spread, "versus_peer": versus_peer}
    return Point(name, peer, eager_peak, peer_peak, peer_time, peer_spread, **ours)


HEADER = (
    f"{'model':<8} {'peer':<12} {'peak MiB':>8} {'of eager':>8} {'peer time':>14} "
    f"{'our time':>14} {'predicted':>9} {'our MiB':>8} {'extra, ours/theirs':>18}"
)


def row(point: Point) -> str:
    """The point as a line of the table."""
    start = (
        f"{point.model:<8} {point.peer:<12} {point.peak_bytes / MIB:>8.1f} "
        f"{point.peak_bytes / point.eager_peak_bytes:>8.2f} "
        f"{point.peer_time:>7.3f} ±{point.peer_spread:.3f} "
    )
    if point.our_time is None:
        return f"{start} {point.problem}"
    above = " ABOVE BUDGET" if point.our_peak_bytes > point.peak_bytes else ""
    slower = " slower" if point.versus_peer > 1 else ""
    return (
        f"{start} {point.our_time:>6.3f} ±{point.our_spread:.3f} {point.predicted:>9.3f} "
        f"{point.our_peak_bytes / MIB:>8.1f} {point.extra_ratio:>18.2f}{slower}{above}"
    )


def summary(points: list[Point]) -> str:
    """The last line: geometric mean of the extra times' ratio, and where we lose."""
    measured = [p for p in points if p.our_time is not None]
    failed = len(points) - len(measured)
    if not measured:
        return f"no point was measured; {failed} failed"
    mean = math.exp(sum(math.log(p.extra_ratio) for p in measured) / len(measured))
    slower = sum(p.versus_peer > 1 for p in measured)
    clearly = sum(p.versus_peer > 1.01 for p in measured)
    above = sum(p.our_peak_bytes > p.peak_bytes for p in measured)
    return (
        f"extra time, ours over theirs: geometric mean {mean:.2f} of {len(measured)} points "
        f"(each at least {NOISE:.1%} of a step); slower at {slower}, by more than 1 % at "
        f"{clearly}; above the budget at {above}; no plan at {failed}"
    )


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    known = (*EXAMPLES, "gpt_dropout", "gpt2", "hf_llama", "bert", "vit", "t5")

    def models(text: str) -> list[str]:
        unknown = [name for name in text.split(",") if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown} not among {', '.join(known)}")
        return text.split(",")

    def ratios(text: str) -> list[float]:
        values = [float(part) for part in text.split(",") if part]
        if any(not 0 <= value <= 1 for value in values):
            raise argparse.ArgumentTypeError("ratios lie between 0 and 1")
        return values

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--models", type=models, default=list(MODELS), help=",".join((*MODELS, *MORE))
    )
    parser.add_argument("--ratios", type=ratios, default=list(RATIOS), help="of the partitioner")
    parser.add_argument("--no-checkpoint", action="store_true", help="leave out block checkpoints")
    parser.add_argument("--pairs", type=int, default=9, help="timing rounds per point")
    parser.add_argument("--time-limit", type=float, default=60.0, help="for the solver, seconds")
    parser.add_argument("--size", choices=("bench", "test"), default="bench")
    parser.add_argument(
        "--threads",
        type=int,
        help="default: torch's choice; with 1, processor time is compared, which a busy machine "
        "disturbs less",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the points here as well")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse_arguments(argv)
    if argv is None:  # on the command line: this process is ours to replace
        ensure_allocator()
    if options.threads:
        torch.set_num_threads(options.threads)
    points: list[Point] = []
    print(HEADER, flush=True)
    try:
        for name in options.models:
            peers: list[tuple[str, Callable[[torch.nn.Module], Any]]] = []
            if not options.no_checkpoint:
                peers += [
                    ("checkpoint", checkpoint_blocks),
                    ("selective", checkpoint_selectively),
                    ("selective/2", lambda model: checkpoint_selectively(model, every=2)),
                ]
            if name != "gpt_dropout":  # the partitioner draws other masks when it recomputes
                peers += [
                    (f"budget {ratio:g}", lambda model, ratio=ratio: torch_budget(model, ratio))
                    for ratio in options.ratios
                ]
            for peer, apply in peers:
                points.append(measure_point(name, options.size, peer, apply, options))
                print(row(points[-1]), flush=True)
                if options.json:  # at every point: what an interrupted run found is kept
                    options.json.write_text(json.dumps([asdict(p) for p in points], indent=1))
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    print(summary(points))
    return 0


if __name__ == "__main__":
    sys.exit(main())
