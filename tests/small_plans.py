"""A hand-made training step that has one of everything, and plans of it. No torch."""

from __future__ import annotations

from dataclasses import replace

from autockpt_solvers.plan import Plan
from autockpt_solvers.problem import Operation, Problem, Storage
from autockpt_solvers.schedule import Schedule, free_early

__all__ = ["MIB", "many_blocks", "plan_of", "recomputing", "small_plan", "small_problem"]

MIB = 1 << 20
MS = 1_000_000

# Positions of what the tests name.
SAVE_RNG, EMBED, LINEAR, DROPOUT, PINNED, MAX, LOSS = range(7)


def small_problem() -> Problem:
    """Return a step with an embedding, a linear layer, dropout, a pinned layer, a max and a loss.

    The generator's state is an optional operation that dropout's further runs read; the pinned
    layer may not run again; ``max`` makes two storages, one of which nothing needs later.
    """
    sizes = {
        "rng_state": 5_120,
        "embed": 8 * MIB,
        "linear": 32 * MIB,
        "dropout": 32 * MIB,
        "pinned": 8 * MIB,
        "values": 8 * MIB,
        "indices": 64 * MIB,
        "loss": 512,
        "grad_pinned": 8 * MIB,
        "weight_1": MIB,
        "grad_dropout": 32 * MIB,
        "grad_linear": 32 * MIB,
        "weight_0": MIB,
        "grad_embed": 8 * MIB,
        "weight_e": MIB,
    }
    at = {name: index for index, name in enumerate(sizes)}

    def op(
        name: str, inputs: str, outputs: str, ms: int, *, again: str | None = None, **more: object
    ) -> Operation:
        made = tuple(at[s] for s in outputs.split())
        return Operation(
            name,
            tuple(at[s] for s in inputs.split()),
            made,
            ms * MS,
            recompute_inputs=None if again is None else tuple(at[s] for s in again.split()),
            recompute_outputs=() if again is None else made,
            **more,  # type: ignore[arg-type]
        )

    mlp = {"module_path": "blocks.0.mlp"}
    operations = (
        op("rng_state", "", "rng_state", 1, fixed="saves the generator's state", optional=True),
        op("embed", "", "embed", 1, again="", module_path="embed", source="model.py:10"),
        op(
            "linear", "embed", "linear", 4, again="embed", source="model.py:21",
            workspace_bytes=2 * MIB, **mlp,
        ),
        op(
            "dropout", "linear", "dropout", 1, again="linear rng_state", source="model.py:22",
            **mlp,
        ),
        op(
            "pinned", "dropout", "pinned", 4, fixed="pinned by keep='blocks.1.*'",
            module_path="blocks.1.mlp", source="model.py:21",
        ),
        op(
            "max", "pinned", "values indices", 2, fixed="it counts its calls",
            module_path="head", source="model.py:30",
        ),
        op("loss", "values", "loss", 1, fixed="the user holds its output", source="train.py:5"),
        op("max_backward", "pinned indices loss", "grad_pinned", 2),
        op("pinned_backward", "grad_pinned dropout", "weight_1 grad_dropout", 8),
        op("dropout_backward", "grad_dropout dropout", "grad_linear", 2),
        op("linear_backward", "grad_linear embed", "weight_0 grad_embed", 8),
        op("embed_backward", "grad_embed", "weight_e", 2),
    )  # fmt: skip
    return Problem(
        storages=tuple(Storage(name, size) for name, size in sizes.items()),
        operations=operations,
        barrier=7,
        resident_bytes=10 * MIB,
        live_at_barrier=frozenset({at["loss"]}),
        live_at_end=frozenset(at[s] for s in ("loss", "weight_0", "weight_1", "weight_e")),
        name="small",
    )


def recomputing(problem: Problem) -> Schedule:
    """Return the schedule of the small problem that recomputes ``linear`` and ``dropout``."""
    first, *rest = problem.backward
    return free_early(problem, range(problem.barrier), [first, LINEAR, DROPOUT, *rest])


def small_plan() -> Plan:
    """Return a plan of the small problem that spends 6 ms on recomputation, beside 35 ms."""
    problem = small_problem()
    return replace(
        plan_of(problem, recomputing(problem)),
        budget_bytes=120 * MIB,
        lower_bound_s=0.004,
        minimum_bytes=115 * MIB + 512,
        stages_s={"capture": 1.25, "profile": 0.5, "solve": 0.0625, "rewrite": 0.125},
        origin={"model": "Small", "device": "cpu", "torch": "2.13.0"},
    )


def plan_of(problem: Problem, schedule: Schedule) -> Plan:
    """Return a bare plan without a budget."""
    return Plan(
        problem=problem,
        schedule=schedule,
        budget_bytes=None,
        solver="greedy",
        solve_time_s=0.0625,
        lower_bound_s=0.0,
    )


def many_blocks(blocks: int, recomputed: int) -> Plan:
    """Return a plan of a chain of blocks, ``attn`` and ``mlp`` each; the first ones recompute."""
    storages, operations = [], []
    for block in range(blocks):
        for part, size in (("attn", 8), ("mlp", 32)):
            index = len(storages)
            inputs = (index - 1,) if index else ()
            storages.append(Storage(f"{part}_{block}", size * MIB))
            operations.append(
                Operation(
                    f"{part}_{block}",
                    inputs,
                    (index,),
                    3 * MS,
                    recompute_inputs=inputs,
                    recompute_outputs=(index,),
                    module_path=f"blocks.{block}.{part}",
                )
            )
    forward = len(operations)
    for index in reversed(range(forward)):
        storages.append(Storage(f"grad_{index}", MIB))
        gradient = (len(storages) - 2,) if index < forward - 1 else ()
        operations.append(
            Operation(f"grad_{index}", (index, *gradient), (len(storages) - 1,), 3 * MS)
        )
    problem = Problem(
        tuple(storages), tuple(operations), forward, live_at_end=frozenset({len(storages) - 1})
    )
    backward = []
    for position, operation in enumerate(problem.backward):
        block, is_attn = divmod(forward - 1 - position, 2)
        if block < recomputed and is_attn:  # the block's mlp is due, its attn is needed first
            backward += [2 * block, 2 * block + 1] if block else [0, 1]
        backward.append(operation)
    return plan_of(problem, free_early(problem, range(forward), backward))
