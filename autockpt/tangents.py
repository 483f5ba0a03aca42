"""Tangents: the gradients a backward starts from, and the graph without those that never arrive.

A language model returns a loss and logits; the user's ``loss.backward()`` starts from the loss. The
joint graph has a tangent for both, and AOTAutograd would fill the missing one with zeros: memory
and time that eager does not spend, and zero gradients where eager leaves None.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from autockpt._torch import JointGraph, fake_mode_of, getitem_index, storage_key

__all__ = ["assumed_absent", "evaluate_anew", "look_anew", "tensors", "without_tangents"]

aten = torch.ops.aten


def tensors(node: fx.Node) -> list[torch.Tensor]:
    """Return the (fake) tensors a node's value holds, in order."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [v for v in value if isinstance(v, torch.Tensor)]
    return []


def assumed_absent(joint: JointGraph) -> frozenset[int]:
    """Return the positions of the tangents that a step is taken not to start from.

    Where exactly one differentiable output is a single number, that is the loss.
    """
    scalars = [i for i, t in enumerate(joint.tangents) if tensors(t)[0].numel() == 1]
    if len(scalars) != 1:
        return frozenset()
    return frozenset(range(len(joint.tangents))) - set(scalars)


def without_tangents(joint: JointGraph, absent: Collection[int]) -> JointGraph:
    """Return a copy of the joint graph in which the absent tangents are taken as nothing.

    A backward is linear in its tangents, so a node all of whose gradients are nothing is
    nothing too, and a sum with nothing is its other part. Where another operator joins nothing with
    something, nothing becomes zeros.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(joint.module.graph, copies, return_output_node=True)
    assert isinstance(result, tuple)
    values, old_output = result
    output = graph.output(values)
    output.meta = dict(old_output.meta)
    for old, new in copies.items():
        new.meta = dict(old.meta)
    module = fx.GraphModule(joint.module, graph)

    def moved(items: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(copies[i] if isinstance(i, fx.Node) else i for i in items)

    tangents = moved(joint.tangents)
    nothing = {tangents[i] for i in absent}
    gradients = set(tangents)
    replaced: dict[fx.Node, fx.Node] = {}
    gone: set[int] = set()  # memory of sums that are no more: their views look at something else
    for node in list(graph.nodes):
        if gone and node.op == "call_function" and gone & {storage_key(t) for t in tensors(node)}:
            evaluate_anew(module, node)
        inputs = node.all_input_nodes
        if node.op != "call_function" or not any(i in gradients for i in inputs):
            continue
        gradients.add(node)
        empty = [i for i in inputs if i in nothing]
        if not empty:
            continue
        there = [i for i in inputs if i in gradients and i not in nothing]
        if not there:
            nothing.add(node)
        elif _is_plain_sum(node) and len(there) == 1 and _same_kind(node, there[0]):
            node.replace_all_uses_with(there[0])
            replaced[node] = there[0]
            gone |= {storage_key(t) for t in tensors(node)}
        else:
            for old in empty:
                node.replace_input_with(old, _zeros(graph, module, node, old))

    def there_or_none(value: Any) -> Any:
        while isinstance(value, fx.Node) and value in replaced:
            value = replaced[value]
        return None if isinstance(value, fx.Node) and value in nothing else value

    backward = tuple(there_or_none(v) for v in moved(joint.backward_outputs))
    return dataclasses.replace(
        joint,
        module=module,
        primals=moved(joint.primals),
        tangents=tangents,
        forward_seeds=moved(joint.forward_seeds),
        backward_seeds=moved(joint.backward_seeds),
        forward_outputs=moved(joint.forward_outputs),
        backward_outputs=backward,
        backward_descriptors=tuple(joint.backward_descriptors),
        mutated=moved(joint.mutated),
        written=moved(joint.written),
        new_values=moved(joint.new_values),
    )


def _is_plain_sum(node: fx.Node) -> bool:
    return node.target is aten.add.Tensor and not node.kwargs


def _same_kind(one: fx.Node, other: fx.Node) -> bool:
    """Whether the second may stand for the first: in shape, type and layout."""
    a, b = one.meta["val"], other.meta["val"]
    return (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def evaluate_anew(module: fx.GraphModule, node: fx.Node) -> None:
    """Make a node's fake value from its inputs' once more, where they have been exchanged."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with fake_mode_of(module):
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]


def look_anew(module: fx.GraphModule) -> None:
    """Have each view's fake value look at its input's memory.

    Torch exchanges what computes with a number that varies, and leaves the views as they were.
    """
    for node in module.graph.nodes:
        if node.op == "call_function" and (getitem_index(node) is not None or _is_view(node)):
            there = {storage_key(t) for source in node.all_input_nodes for t in tensors(source)}
            if not there.issuperset(storage_key(t) for t in tensors(node)):
                evaluate_anew(module, node)


def _is_view(node: fx.Node) -> bool:
    """Whether what the operator returns is memory of its inputs'."""
    schema = getattr(node.target, "_schema", None)
    returns = schema.returns if schema is not None else ()
    looks = any(result.alias_info is not None for result in returns)
    return looks or node.target is aten._unsafe_view.default


def _zeros(graph: fx.Graph, module: fx.GraphModule, before: fx.Node, like: fx.Node) -> fx.Node:
    value = like.meta["val"]
    with graph.inserting_before(before):
        zeros = graph.call_function(
            aten.zeros.default,
            (list(value.shape),),
            {"dtype": value.dtype, "device": value.device},
        )
    with fake_mode_of(module):
        zeros.meta["val"] = torch.zeros(value.shape, dtype=value.dtype, device=value.device)
    zeros.meta["partitioner_tag"] = "is_backward"
    return zeros
