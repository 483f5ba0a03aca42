"""Accumulate: a backward graph that adds gradients where it makes them, into those that are there.

Autograd collects all gradients that a backward graph returns before it adds the first, so that two
full sets are alive at once. Here each is added to its parameter's gradient right behind the
operation that makes it and dies there; a matrix product adds its result itself (``addmm_``)
and makes no tensor at all. A parameter without a gradient gets the result, as from the plain graph.

That goes past autograd's own accumulation and the hooks on it, so it is done only inside a step
that has made sure that there are none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from autockpt import _torch
from autockpt.capture import Capture

__all__ = ["Accumulating", "accumulating", "is_leaf", "products"]

aten = torch.ops.aten


def is_leaf(primal: fx.Node) -> bool:
    """Return whether an input of the graph is a leaf, whose gradient autograd accumulates."""
    value = primal.meta.get("val")
    return isinstance(value, Tensor) and value.is_leaf


# ------------------------------------------------------------------ matrix products


def products(capture: Capture) -> dict[fx.Node, bool]:
    """Return the matrix products that may add to a gradient themselves.

    These are the products that are nothing but one parameter's gradient, in its precision;
    the value says whether the gradient is the product's transpose.
    """
    times: dict[fx.Node, int] = {}
    for value, _, _ in capture.gradients:
        times[value] = times.get(value, 0) + 1
    found: dict[fx.Node, bool] = {}
    for value, _, primal in capture.gradients:
        if primal is None or not is_leaf(primal) or times[value] > 1:
            continue
        node, transposed = value, False
        while _only_use(capture, node) and capture.is_view(node):
            turns = _turns(node)
            if turns is None:
                break
            transposed ^= turns
            node = node.all_input_nodes[0]
        precise = node.op == "call_function" and node.meta["val"].dtype == primal.meta["val"].dtype
        if precise and node.target is aten.mm.default and _only_use(capture, node):
            found[node] = transposed
    return found


def _only_use(capture: Capture, node: fx.Node) -> bool:
    users = [u for u in node.users if u.op == "output" or u in capture.lives_in]
    return len(users) == 1


def _turns(view: fx.Node) -> bool | None:
    """Whether a view of a matrix is its transpose (True) or the same (False); None: neither."""
    old, new = view.all_input_nodes[0].meta.get("val"), view.meta.get("val")
    if not isinstance(old, Tensor) or not isinstance(new, Tensor) or old.dim() != 2:
        return None
    if view.target is aten.t.default:
        return True
    if view.target is aten.permute.default:
        return [d % 2 for d in view.args[1]] == [1, 0]  # type: ignore[union-attr,operator]
    if view.target is aten.transpose.int:
        return view.args[1] % 2 != view.args[2] % 2  # type: ignore[operator]
    if view.target in (aten.view.default, aten._unsafe_view.default, aten.detach.default):
        return None if old.shape != new.shape else False
    return None


# ------------------------------------------------------------------ the graph


def _add(gradient: Tensor | None, value: Tensor) -> Tensor | None:
    """Add a value to the gradient that is there; hand it on where there is none."""
    if gradient is None:
        return value
    gradient.add_(value)
    return None


def _add_product(
    gradient: Tensor | None, left: Tensor, right: Tensor, transposed: bool
) -> Tensor | None:
    """The same with a matrix product, which need not be made."""
    if gradient is None:
        product = torch.mm(left, right)
        return product.t() if transposed else product
    (gradient.t() if transposed else gradient).addmm_(left, right)
    return None


def accumulating(backward: fx.GraphModule, capture: Capture) -> tuple[fx.GraphModule, list[int]]:
    """Return the graph that accumulates, and the positions of the primals it does so for.

    It takes what ``backward`` takes and then one argument for each of these primals, its gradient
    or None, and returns None in the place of what it has added.

    Args:
        backward: as :func:`autockpt.rewrite.rewrite` makes it; left as it is.
        capture: the step it is of.
    """
    joint = capture.joint
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    copied = graph.graph_copy(backward.graph, copies)
    outputs = list(copied) if isinstance(copied, (tuple, list)) else [copied]
    for old, new in copies.items():
        new.meta = dict(old.meta)
    own_products = {node.name: turned for node, turned in products(capture).items()}
    primals = joint.differentiated
    positions = [
        position
        for position, (value, primal) in enumerate(zip(outputs, primals, strict=False))
        if isinstance(value, fx.Node) and is_leaf(primal)
    ]
    last = graph.find_nodes(op="placeholder")[-1]
    for position in positions:
        with graph.inserting_after(last):
            last = graph.placeholder(f"gradient_of_{primals[position].name}")
        value = outputs[position]
        assert isinstance(value, fx.Node)
        outputs[position] = _accumulated(graph, value, last, own_products)
    graph.output(tuple(outputs))
    graph.lint()
    return fx.GraphModule(backward, graph), positions


def _accumulated(
    graph: fx.Graph, value: fx.Node, gradient: fx.Node, own_products: Mapping[str, bool]
) -> fx.Node:
    views, base = _views(value)
    product = own_products.get(base.meta.get("autockpt", {}).get("origin", ""))
    if product is not None:
        with graph.inserting_after(base):
            made = graph.call_function(_add_product, (gradient, *base.args, product))
        for node in (*views, base):
            graph.erase_node(node)
        return made
    if base.op == "placeholder":
        base = graph.find_nodes(op="placeholder")[-1]
    # A view stands where it is first needed; that is right behind what it looks at, now.
    for view in reversed(views):
        base.append(view)
        base = view
    with graph.inserting_after(base):
        return graph.call_function(_add, (gradient, value))


def _views(value: fx.Node) -> tuple[list[fx.Node], fx.Node]:
    """The views between a value and what was computed, the value's side first."""
    views: list[fx.Node] = []
    node = value
    while (
        node.op == "call_function"
        and "autockpt" not in node.meta
        and len(node.all_input_nodes) == 1
    ):
        views.append(node)
        node = node.all_input_nodes[0]
    return views, node


# ------------------------------------------------------------------ running it


class Accumulating(_torch.WatchAround):
    """Runs a backward graph, or inside a step the one that accumulates.

    Args:
        inner: who watches the graph beside.
        backward: the backward graph.
        capture: the step it is of.
        asked: whether gradients are to be added in the graph now.
    """

    def __init__(
        self,
        inner: _torch.Watch,
        backward: fx.GraphModule,
        capture: Capture,
        asked: Callable[[], bool],
    ) -> None:
        super().__init__(inner)
        self.asked = asked
        self._parts: tuple[fx.GraphModule, Capture] | None = (backward, capture)
        self._run: Callable[[list[Any]], Any] | None = None
        self._positions: list[int] = []
        self._count = len(capture.joint.differentiated)

    def run_backward(self, run: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        """Run the backward, and return the gradients that are not added yet."""
        gradients = self._gradients() if self.asked() and not torch.is_grad_enabled() else None
        if gradients is None:
            return self.inner.run_backward(run, args)
        there: list[Tensor | None] = gradients

        def added(own: list[Any]) -> Any:
            own.extend(there)  # the very list, which is emptied as its tensors die
            there.clear()
            assert self._run is not None
            return self._run(own)

        return self.inner.run_backward(added, args)

    def _gradients(self) -> list[Tensor | None] | None:
        """The gradients that are there; None where there is nothing to add to."""
        leaves = _torch.leaves_of_running_node()
        if len(leaves) != self._count or all(p is None or p.grad is None for p in leaves):
            return None
        if self._parts is not None:
            module, self._positions = accumulating(*self._parts)
            self._run, self._parts = _torch.boxed(module), None
        return [_addable(leaves[position]) for position in self._positions]


def _addable(parameter: Tensor | None) -> Tensor | None:
    """The parameter's gradient where it may be added to in place."""
    gradient = None if parameter is None else parameter.grad
    if gradient is None or gradient.layout is not torch.strided or gradient.requires_grad:
        return None
    return gradient
