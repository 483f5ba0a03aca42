"""Pieces: the gradient of a tensor that is read in pieces, put together at once.

``q, k, v = qkv`` reads a tensor piece by piece, as do halves that change places and loops over
steps. In the trace the gradient of each piece is one of the whole tensor that is zero elsewhere,
and they are summed up: for n pieces n whole tensors are filled and n - 1 sums taken. Where the
pieces make up the whole, this is one stack or one concatenation of their gradients, which is what
eager does behind ``unbind`` and ``split``; apart from the sign of zeros nothing else comes out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autockpt._torch import JointGraph
from autockpt.tangents import evaluate_anew

__all__ = ["join_pieces"]

aten = torch.ops.aten

_PIECES = (aten.select_backward.default, aten.slice_backward.default)


def join_pieces(joint: JointGraph) -> None:
    """Write sums of such gradients as stacks and concatenations, in the graph itself."""
    nodes = list(joint.module.graph.nodes)
    inner = {one for node in nodes if _is_sum(node) for one in node.args if _is_inner(one, node)}
    for node in nodes:
        if _is_sum(node) and node not in inner:
            _join(joint.module, node, inner)


def _is_sum(node: fx.Node) -> bool:
    return (
        node.target is aten.add.Tensor
        and not node.kwargs
        and all(isinstance(arg, fx.Node) and _alike(arg, node) for arg in node.args)
    )


def _alike(one: fx.Node, other: fx.Node) -> bool:
    a, b = one.meta["val"], other.meta["val"]
    return isinstance(a, torch.Tensor) and (a.shape, a.dtype) == (b.shape, b.dtype)


def _is_inner(one: Any, node: fx.Node) -> bool:
    """Whether a sum is there for another sum alone."""
    return _is_sum(one) and one.args[0] is not one.args[1] and set(one.users) == {node}


def _is_piece(node: fx.Node) -> bool:
    known = all(isinstance(place, int) for place in node.args[2:])
    return node.target in _PIECES and known and len(node.users) == 1 and not node.kwargs


def _join(module: fx.GraphModule, root: fx.Node, inner: set[fx.Node]) -> None:
    pieces: dict[tuple[Any, ...], list[fx.Node]] = {}
    others: list[fx.Node] = []
    sums: list[fx.Node] = []
    waiting: list[Any] = [root]
    while waiting:
        node = waiting.pop()
        if node is root or node in inner:
            sums.append(node)
            waiting += reversed(node.args)
        elif _is_piece(node):
            pieces.setdefault((node.target, node.args[2]), []).append(node)
        else:
            others.append(node)
    if len(pieces) != 1 or len(others) > 1 or not root.meta["val"].is_contiguous():
        return
    ((target, dim),) = pieces
    (found,) = pieces.values()
    found.sort(key=lambda piece: piece.args[3])  # type: ignore[arg-type, return-value]
    if len(found) < 2 or not _makes_up(target, found, dim, root):
        return
    joined = aten.stack.default if target is _PIECES[0] else aten.cat.default
    parts = [piece.args[0] for piece in found]
    if others:
        with module.graph.inserting_before(root):
            whole = module.graph.create_node("call_function", joined, (parts, dim))
        whole.meta = {key: value for key, value in root.meta.items() if key != "val"}
        evaluate_anew(module, whole)
        root.args = (others[0], whole)
    else:
        # The fake value stays the same: views of it look at its memory.
        root.target, root.args = joined, (parts, dim)
    for node in (*sums[1:], *found):
        module.graph.erase_node(node)


def _makes_up(target: Any, found: list[fx.Node], dim: Any, root: fx.Node) -> bool:
    """Whether pieces in their order are all there is along the dimension, each of it once."""
    size = root.meta["val"].shape[dim]
    if any(piece.args[0].meta["val"].dtype != root.meta["val"].dtype for piece in found):  # type: ignore[union-attr]
        return False
    if target is _PIECES[0]:
        return [piece.args[3] for piece in found] == list(range(size))
    end: Any = 0
    for piece in found:
        first, step = piece.args[3], piece.args[5]
        if first != end or step != 1:
            return False
        end = first + piece.args[0].meta["val"].shape[dim]  # type: ignore[union-attr]
    return bool(end == size)
