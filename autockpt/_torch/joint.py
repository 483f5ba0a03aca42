"""The joint graph as AOTAutograd hands it over, and who watches the graphs made of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import (
    ForwardTokenAOTInput,
    InputMutationAOTOutput,
    PlainAOTInput,
    SavedForBackwardsAOTOutput,
    SavedForBackwardsNoVcCheckAOTOutput,
)
from torch._functorch.partitioners import _extract_fwd_bwd_outputs
from torch.fx.experimental.symbolic_shapes import free_symbols, guard_scalar

from autockpt._torch.numbers import Number

__all__ = [
    "JointGraph",
    "Partition",
    "Watch",
    "WatchAround",
    "is_state",
    "joint_graph",
    "mark_state",
    "saved_descriptors",
]


@dataclass(frozen=True)
class JointGraph:
    """The joint forward and backward graph as AOTAutograd hands it to a partition function.

    Attributes:
        module: the joint graph; nodes carry ``meta["val"]`` (fake tensors).
        primals: placeholders of parameters, buffers and inputs.
        tangents: placeholders of the outputs' gradients.
        seeds: placeholders of random seeds and offsets, forward and backward.
        forward_outputs: what the forward returns (nodes or constants), then what ``backward_*``
            says the same way of the backward.
        mutated: for each forward output the primal whose new value it is, or None.
        written: primals that the forward itself writes when all else is done.
        new_values: what it writes there.
    """

    module: fx.GraphModule
    primals: tuple[fx.Node, ...]
    tangents: tuple[fx.Node, ...]
    forward_seeds: tuple[fx.Node, ...]
    backward_seeds: tuple[fx.Node, ...]
    forward_outputs: tuple[Any, ...]
    backward_outputs: tuple[Any, ...]
    forward_descriptors: tuple[Any, ...]
    backward_descriptors: tuple[Any, ...]
    mutated: tuple[fx.Node | None, ...]
    written: tuple[fx.Node, ...] = ()
    new_values: tuple[fx.Node, ...] = ()

    @property
    def differentiated(self) -> tuple[fx.Node, ...]:
        """The primals that the backward's outputs are the gradients of, in their order.

        All but the tokens that keep operators with effects (checks, prints) in their order.
        """
        return tuple(
            p for p in self.primals if not isinstance(p.meta.get("desc"), ForwardTokenAOTInput)
        )


class Watch:
    """What wants to know when a compiled graph runs; this one wants to know nothing."""

    def forward_begins(self, inputs: Sequence[Any]) -> None:
        """The forward graph is about to run on ``inputs``, in the order of its placeholders."""

    def run_forward(self, run: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        """Run the forward graph on its inputs, and return what it returns and saves."""
        return run(args)

    def forward_ends(self, outputs: Sequence[Any]) -> None:
        """The forward graph has returned; ``outputs`` are what it returns and saves."""

    def run_backward(self, run: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        """Run the backward graph on saved tensors and tangents, and return the gradients."""
        return run(args)


class WatchAround(Watch):
    """A watch around another one, which is told everything as well.

    Args:
        inner: the other one.
    """

    def __init__(self, inner: Watch) -> None:
        self.inner = inner

    def forward_begins(self, inputs: Sequence[Any]) -> None:
        """Pass on."""
        self.inner.forward_begins(inputs)

    def run_forward(self, run: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        """Pass on."""
        return self.inner.run_forward(run, args)

    def forward_ends(self, outputs: Sequence[Any]) -> None:
        """Pass on."""
        self.inner.forward_ends(outputs)

    def run_backward(self, run: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        """Pass on."""
        return self.inner.run_backward(run, args)


Partition = Callable[[JointGraph], tuple[fx.GraphModule, fx.GraphModule, Watch]]


def joint_graph(module: fx.GraphModule, num_fwd_outputs: int) -> JointGraph:
    """Read a traced joint graph, of whose outputs the first are the forward's."""
    _write_numbers_out(module.graph)
    forward, backward, forward_desc, backward_desc = _extract_fwd_bwd_outputs(
        module, num_fwd_outputs=num_fwd_outputs
    )
    placeholders = module.graph.find_nodes(op="placeholder")
    # The same naming rules that torch's own partitioners read.
    seeds_f = [n for n in placeholders if "fwd_seed_offset" in n.name or "fwd_base" in n.name]
    seeds_b = [n for n in placeholders if "bwd_seed_offset" in n.name or "bwd_base" in n.name]
    tangents = [n for n in placeholders if "tangents" in n.name]
    others = set(seeds_f) | set(seeds_b) | set(tangents)
    primals = [n for n in placeholders if n not in others]
    by_position = {n.meta["desc"]: n for n in primals if "desc" in n.meta}
    mutated = tuple(
        by_position.get(d.mutated_input) if isinstance(d, InputMutationAOTOutput) else None
        for d in forward_desc
    )
    writes = _take_writes(module.graph, primals)
    return JointGraph(
        module,
        tuple(primals),
        tuple(tangents),
        tuple(seeds_f),
        tuple(seeds_b),
        tuple(forward),
        tuple(backward),
        tuple(forward_desc),
        tuple(backward_desc),
        mutated,
        tuple(written for written, _ in writes),
        tuple(value for _, value in writes),
    )


def mark_state(primals: Sequence[fx.Node], positions: Collection[int]) -> None:
    """Note which primals are tensors of the model's modules, by their positions as inputs."""
    for primal in primals:
        described = primal.meta.get("desc")
        if isinstance(described, PlainAOTInput) and described.idx in positions:
            primal.meta["autockpt_state"] = True


def is_state(primal: fx.Node) -> bool:
    """Return whether an input of the graph is a tensor of a module's that does not train."""
    return "autockpt_state" in primal.meta


def _write_numbers_out(graph: fx.Graph) -> None:
    """Have the graph read constants for numbers that the trace holds for one value of.

    Torch leaves those among its nodes that it has found to be constant before it looks for them.
    """
    for node in reversed(graph.nodes):
        value = node.meta.get("val") if node.op == "call_function" else None
        if isinstance(value, Number) and not free_symbols(value):
            node.replace_all_uses_with(guard_scalar(value))
            graph.erase_node(node)


def _take_writes(graph: fx.Graph, primals: Sequence[fx.Node]) -> list[tuple[fx.Node, fx.Node]]:
    """Take the forward's writes to its inputs out of the graph, which computes and nothing else.

    Torch's trace puts them behind everything else; those of the backward stay.
    """
    writes = []
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        written, value = node.args[:2]
        in_backward = "backward" in (node.meta.get("partitioner_tag") or "")
        if written in primals and isinstance(value, fx.Node) and not node.users and not in_backward:
            writes.append((written, value))
            graph.erase_node(node)
    return writes


def saved_descriptors(saved: Sequence[fx.Node]) -> list[Any]:
    """Return AOTAutograd's descriptors for the tensors a forward saves, in their order."""
    return [
        SavedForBackwardsNoVcCheckAOTOutput(index)
        if node.meta.get("saved_tensor_with_no_vc_check")
        else SavedForBackwardsAOTOutput(index)
        for index, node in enumerate(saved)
    ]
