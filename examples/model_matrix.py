"""Every architecture there is a small configuration for, trained under a budget: one row each.

    python examples/model_matrix.py                 # all, and writes examples/MODEL_MATRIX.md
    python examples/model_matrix.py bert "conv: u-net"   # some, and prints their rows
    python examples/model_matrix.py --rows rows.jsonl    # in slices: rows there are not run again

Each model runs in a process of its own with a time limit, so that one failure is one row. Weights
are random, nothing is downloaded. A row holds:

- graphs: how many graphs its training step runs as, by its plan; what stands in the way of one;
- equal: whether eight steps at half the baseline's activations leave eager's loss, gradients,
  buffers and random state (to 1e-4 of the largest value);
- peak: the measured peak over the budget's (at most 1.000), and over the prediction;
- saved: the part of the baseline's activations that is gone at that budget, or at the smallest
  feasible one where half is not;
- overhead: extra computation predicted for it, in percent of the baseline's step.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import re
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TABLE = HERE / "MODEL_MATRIX.md"
# Enough for a model of several graphs to be planned and to run under that plan.
STEPS = 8
HEADER = ("model", "graphs", "equal", "peak / budget", "predicted", "saved", "overhead", "note")

# ------------------------------------------------------------------ one model, in its own process


def measured_row(name: str) -> dict[str, Any]:
    """The figures of one model; an exception is turned into a row by the caller."""
    import numpy
    import torch

    import autockpt
    from autockpt import InfeasibleBudget
    from benchmarks.measure import loss_of, measure_peak, resident_bytes
    from model_zoo import MODELS

    torch.set_num_threads(1)

    def built() -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        torch.manual_seed(0)
        model, args, kwargs = MODELS[name]()
        return model.train(), args, kwargs

    def step(model: Any, args: Any, kwargs: Any) -> list[Any]:
        torch.manual_seed(1)
        numpy.random.seed(1)  # masks of speech models
        random.seed(1)
        loss = loss_of(model(*args, **kwargs))
        loss.backward()
        left = [loss.detach(), torch.rand(1), *(b.clone() for b in model.buffers())]
        left += [p.grad for p in model.parameters()]
        model.zero_grad(set_to_none=True)
        return left

    model, args, kwargs = built()
    expected = [step(model, args, kwargs) for _ in range(STEPS)]
    model, args, kwargs = built()
    autockpt.optimize(model, None)
    for _ in range(STEPS):
        step(model, args, kwargs)
    baseline = model.plan
    resident = baseline.problem.resident_bytes
    added = baseline.baseline_peak_bytes - resident
    budget = resident + added // 2
    for _ in range(3):
        model, args, kwargs = built()
        autockpt.optimize(model, budget, time_limit=20)
        try:
            found = [step(model, args, kwargs) for _ in range(STEPS)]
            break
        except InfeasibleBudget as error:
            budget = error.minimum_bytes
    wrong = differences(model, found, expected)
    plan = model.plan
    peak = measure_peak(lambda: step(model, args, kwargs) and None)
    measured = resident_bytes(model, (args, kwargs)) + peak.delta_bytes
    return {
        "graphs": plan.origin.get("graphs", "1"),
        "equal": "yes" if not wrong else "no",
        "peak": measured / max(budget, plan.peak_bytes if plan.solver == "minimum" else 0),
        "predicted": plan.peak_bytes / measured,
        "saved": 1 - (plan.peak_bytes - resident) / added,
        "overhead": plan.overhead,
        "note": wrong or " ".join(plan.origin.get("unoptimised", "").split())[:160],
    }


def differences(model: Any, found: list[list[Any]], expected: list[list[Any]]) -> str:
    """What differs between the steps, in a few words; empty where nothing does."""
    names = ["loss", "random state"]
    names += [f"buffer {n}" for n, _ in model.named_buffers()]
    names += [f"gradient of {n}" for n, _ in model.named_parameters()]
    largest = 0.0
    for one in expected[-1][2:]:
        if one is not None and one.is_floating_point() and one.numel():
            largest = max(largest, float(one.detach().abs().max()))
    for mine, theirs in zip(found, expected, strict=True):
        for name, one, other in zip(names, mine, theirs, strict=True):
            if (one is None) != (other is None):
                return f"{name} is {'None' if one is None else 'a tensor'}"
            if one is None:
                continue
            one, other = one.double(), other.double()
            scale = max(float(other.abs().max()) if other.numel() else 0.0, 1e-3 * largest)
            error = float((one - other).abs().max()) if other.numel() else 0.0
            if not error <= 1e-4 * scale + 1e-12:
                return f"{name} differs by {error:.2g} of {scale:.2g}"
    return ""


def child(name: str) -> None:
    """Print one model's row as JSON on the last line."""
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    from autockpt import AutockptError

    try:
        row = measured_row(name)
    except AutockptError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        row = {"graphs": "-", "note": f"{type(error).__name__}: {' '.join(lines[:2])[:160]}"}
    except Exception as error:  # whatever goes wrong in one model is that model's row
        traceback.print_exc()
        text = " ".join(str(error).split())
        row = {"graphs": "!", "note": f"{type(error).__name__}: {text[:160]}"}
    print(json.dumps(row))


# ------------------------------------------------------------------ all of them


def row_of(name: str, limit_s: float) -> dict[str, Any]:
    """Run one model in a process of its own."""
    began = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--child", name],
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"graphs": "!", "note": f"took longer than {limit_s:.0f} s"}
    lines = done.stdout.strip().splitlines()
    try:
        row: dict[str, Any] = json.loads(lines[-1])
    except (IndexError, json.JSONDecodeError):
        row = {"graphs": "!", "note": f"exit {done.returncode}: {done.stderr.strip()[-160:]}"}
    row["seconds"] = time.perf_counter() - began
    return row


def cells(name: str, row: dict[str, Any]) -> list[str]:
    def figure(key: str, form: str) -> str:
        return form.format(row[key]) if row.get(key) is not None else ""

    return [
        name,
        row["graphs"],
        row.get("equal", ""),
        figure("peak", "{:.3f}"),
        figure("predicted", "{:.3f}"),
        figure("saved", "{:.0%}"),
        figure("overhead", "{:.1%}"),
        re.sub(r"\S*/site-packages/", "", row.get("note", "").replace("|", "/")).replace(
            str(HERE.parent), "."
        ),
    ]


def table(rows: dict[str, dict[str, Any]]) -> str:
    import torch
    import transformers

    kinds = Counter(
        "wrong" if r.get("equal") == "no" else "optimised" if r.get("equal") else "not optimised"
        for r in rows.values()
    )
    lines = [
        "# Model matrix",
        "",
        "Written by `python examples/model_matrix.py`; what the columns mean stands there.",
        f"torch {torch.__version__}, transformers {transformers.__version__}, CPU, one thread.",
        "",
        f"{len(rows)} models: " + ", ".join(f"{n} {kind}" for kind, n in kinds.most_common()) + ".",
        "",
        "| " + " | ".join(HEADER) + " |",
        "|" + "---|" * len(HEADER),
    ]
    lines += ["| " + " | ".join(cells(name, row)) + " |" for name, row in rows.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help="names; all of them without")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for one model")
    parser.add_argument("--child", metavar="MODEL", help=argparse.SUPPRESS)
    parser.add_argument("--rows", metavar="FILE", type=Path, help="keeps rows from run to run")
    asked = parser.parse_args()
    if asked.child:
        child(asked.child)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from model_zoo import MODELS

    rows: dict[str, dict[str, Any]] = {}
    if asked.rows and asked.rows.exists():
        rows = dict(map(json.loads, asked.rows.read_text(encoding="utf-8").splitlines()))
    for name in asked.models or MODELS:
        if name in rows:
            continue
        rows[name] = row_of(name, asked.limit)
        print(" | ".join(cells(name, rows[name])), f"({rows[name].get('seconds', 0):.0f} s)")
        sys.stdout.flush()
        if asked.rows:
            with asked.rows.open("a", encoding="utf-8") as file:
                file.write(json.dumps([name, rows[name]]) + "\n")
    if not asked.models and set(rows) >= set(MODELS):
        TABLE.write_text(table({name: rows[name] for name in MODELS}), encoding="utf-8")
        print(f"wrote {TABLE}")


if __name__ == "__main__":
    main()
