"""Copies: a joint graph without those that only take time and memory.

A trace turns ``dropout`` with a probability of 0 into a copy, where eager returns its input, and a
write to a part of a tensor into a copy of what is written and one of the whole. In a graph in which
nothing is written in place a copy is as good as what it was made from, unless somebody outside the
graph has hold of either, or it frees a part of a larger memory.
"""

from __future__ import annotations

import torch
from torch import fx

from autockpt._torch import JointGraph, is_state, storage_key
from autockpt.tangents import evaluate_anew, tensors

__all__ = ["copies_of_state", "drop_copies"]

aten = torch.ops.aten

_WRITES = (aten.slice_scatter.default, aten.select_scatter.default)


def drop_copies(joint: JointGraph) -> None:
    """Let what reads a copy read the original, in the graph itself."""
    graph = joint.module.graph
    inputs = [*graph.find_nodes(op="placeholder"), *graph.find_nodes(op="get_attr")]
    held = {
        storage_key(tensor)
        for node in (
            *inputs,
            *joint.forward_outputs,
            *joint.new_values,
            *joint.backward_outputs,
        )
        if isinstance(node, fx.Node)
        for tensor in tensors(node)
    }
    meant = copies_of_state(joint)
    gone: set[int] = set()  # memory of copies that are no more: their views look at the original
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if gone & {storage_key(tensor) for tensor in tensors(node)}:
            evaluate_anew(joint.module, node)
        source = _copied(node)
        if source is None or node in meant:
            continue
        original, copy = source.meta["val"], node.meta["val"]
        seen = held & {storage_key(original), storage_key(copy)}
        if _is_only_written(node, source) or (not seen and _alike(original, copy)):
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            gone.add(storage_key(copy))


def copies_of_state(joint: JointGraph) -> frozenset[fx.Node]:
    """Return the copies that the model makes of tensors of its own that do not train."""
    state = {storage_key(t) for p in joint.primals if is_state(p) for t in tensors(p)}
    clones = joint.module.graph.find_nodes(op="call_function", target=aten.clone.default)
    return frozenset(
        node
        for node in clones
        if (source := _copied(node)) is not None
        and any(storage_key(tensor) in state for tensor in tensors(source))
    )


def _copied(node: fx.Node) -> fx.Node | None:
    """What the node is a copy of, and nothing else; None where it is no copy."""
    layout = node.kwargs.get("memory_format")
    if node.target is aten.clone.default and layout in (None, torch.preserve_format):
        source = node.args[0]
    elif node.target is aten.copy.default:  # a write, of which the old value is no part
        source = node.args[1]
    else:
        return None
    return source if isinstance(source, fx.Node) else None


def _is_only_written(node: fx.Node, source: fx.Node) -> bool:
    """Whether a copy is made only to be written into parts of other memory."""
    original, copy = source.meta["val"], node.meta["val"]
    if (original.shape, original.dtype) != (copy.shape, copy.dtype):
        return False
    return bool(node.users) and all(
        user.target in _WRITES and user.args[1] is node and user.args[0] is not node
        for user in node.users
    )


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors look in the same way at memory of the same size."""

    def look(tensor: torch.Tensor) -> tuple[object, ...]:
        size = tensor.untyped_storage().nbytes()
        flags = tensor.is_conj(), tensor.is_neg()  # a copy of a conjugate is the conjugate, made
        kind = tensor.dtype, tensor.device
        return tensor.shape, tensor.stride(), tensor.storage_offset(), size, *kind, *flags

    return look(one) == look(other)
