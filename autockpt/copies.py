"""Copies: a joint graph without those that only take time and memory.

A trace turns ``dropout`` with a probability of 0 into a copy, where eager returns its input. In a
graph in which nothing is written in place a copy is as good as what it was made from, unless
somebody outside the graph has hold of either, or it frees a part of a larger memory.
"""

from __future__ import annotations

import torch
from torch import fx

from autockpt._torch import JointGraph, storage_key
from autockpt.tangents import evaluate_anew, tensors

__all__ = ["drop_copies"]

aten = torch.ops.aten


def drop_copies(joint: JointGraph) -> None:
    """Let what reads a copy read the original, in the graph itself."""
    graph = joint.module.graph
    inputs = [*graph.find_nodes(op="placeholder"), *graph.find_nodes(op="get_attr")]
    held = {
        storage_key(tensor)
        for node in (*inputs, *joint.forward_outputs, *joint.backward_outputs)
        if isinstance(node, fx.Node)
        for tensor in tensors(node)
    }
    gone: set[int] = set()  # memory of copies that are no more: their views look at the original
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if gone & {storage_key(tensor) for tensor in tensors(node)}:
            evaluate_anew(joint.module, node)
        if not _is_copy(node):
            continue
        original, copy = node.args[0].meta["val"], node.meta["val"]
        if not held & {storage_key(original), storage_key(copy)} and _alike(original, copy):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
            gone.add(storage_key(copy))


def _is_copy(node: fx.Node) -> bool:
    layout = node.kwargs.get("memory_format")
    return node.target is aten.clone.default and layout in (None, torch.preserve_format)


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors look in the same way at memory of the same size."""

    def look(tensor: torch.Tensor) -> tuple[object, ...]:
        size = tensor.untyped_storage().nbytes()
        flags = tensor.is_conj(), tensor.is_neg()  # a copy of a conjugate is the conjugate, made
        return tensor.shape, tensor.stride(), tensor.storage_offset(), size, *flags

    return look(one) == look(other)
