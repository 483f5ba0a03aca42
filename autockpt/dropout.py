"""Dropout as eager computes it on the CPU: a factor that is made once and multiplied with twice.

A trace has one operator for it, with a mask of bools that it converts to the tensor's type in the
forward and again in the backward. Eager multiplies with a factor of that type both times, and
keeps that. Here the mask is drawn, the factor is made of it and the two products are operations of
their own: the factor is there for the backward where the budget allows, and is made again from the
mask, which takes less memory, where it does not. Masks and results are eager's, bit by bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autockpt._torch import JointGraph, fake_mode_of, getitem_index
from autockpt.tangents import tensors

__all__ = ["spell_dropout_out"]

aten = torch.ops.aten


def spell_dropout_out(joint: JointGraph) -> None:
    """Write what drops out as draw, factor and products, in the graph itself.

    Where the input is not contiguous the operator stays: the draw makes contiguous masks.
    """
    graph = joint.module.graph
    for node in list(graph.find_nodes(op="call_function", target=aten.native_dropout.default)):
        if _is_plain(node):
            _spell_out(joint.module, node)


def _is_plain(node: fx.Node) -> bool:
    source, probability, training = node.args
    if not (isinstance(source, fx.Node) and training and isinstance(probability, float)):
        return False
    value = source.meta["val"]
    kind = value.device.type == "cpu" and value.is_contiguous() and value.is_floating_point()
    return kind and value.numel() > 0 and 0.0 < probability < 1.0 and not node.kwargs


def _spell_out(module: fx.GraphModule, node: fx.Node) -> None:
    source: Any
    probability: Any
    source, probability, _ = node.args
    kept = 1.0 - probability
    value = source.meta["val"]
    writer = _Before(module, node)
    one = writer.call("one", aten.full.default, ([], False), dtype=torch.bool, device=value.device)
    alike = writer.call("alike", aten.expand.default, (one, list(value.shape)))
    mask = writer.call("mask", aten.bernoulli.p, (alike, kept))
    number = writer.call("number", aten._to_copy.default, (mask,), dtype=value.dtype)
    factor = writer.call("factor", aten.div.Tensor, (number, kept))
    for pick in list(node.users):
        if getitem_index(pick) == 0:
            # The fake value stays the same: views of it look at its memory.
            pick.target, pick.args = aten.mul.Tensor, (source, factor)
            continue
        for user in list(pick.users):
            if user.target is aten.native_dropout_backward.default and _undoes(user, pick, kept):
                user.target, user.args = aten.mul.Tensor, (user.args[0], factor)
        pick.replace_all_uses_with(mask)
        module.graph.erase_node(pick)
    module.graph.erase_node(node)


def _undoes(user: fx.Node, mask: fx.Node, kept: float) -> bool:
    """Whether a node multiplies a gradient with the factor of this mask."""
    gradient: Any
    gradient, read, scale = user.args
    alike: bool = tensors(gradient)[0].dtype == tensors(user)[0].dtype
    return alike and read is mask and gradient is not mask and bool(scale == 1.0 / kept)


class _Before:
    """Writes nodes before another one, as part of what that one does."""

    def __init__(self, module: fx.GraphModule, node: fx.Node) -> None:
        self.module = module
        self.node = node

    def call(self, name: str, target: Any, args: tuple[Any, ...], **kwargs: Any) -> fx.Node:
        """Return a new node, with its fake value."""
        with self.module.graph.inserting_before(self.node):
            new = self.module.graph.create_node(
                "call_function", target, args, kwargs, name=f"{self.node.name}_{name}"
            )
        new.meta = {k: v for k, v in self.node.meta.items() if k != "val"}
        values = fx.node.map_arg(args, lambda n: n.meta["val"])
        with fake_mode_of(self.module):
            new.meta["val"] = target(*values, **kwargs)
        return new
