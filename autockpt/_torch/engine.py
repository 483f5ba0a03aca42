"""Autograd's nodes and the backward that is running."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from autockpt._torch.values import tensors_anywhere

__all__ = [
    "at_backward_end",
    "before_backward",
    "compiled_behind",
    "compiled_nodes",
    "has_gradient_hooks",
    "in_backward",
    "in_checkpoint",
    "keep_missing_gradients",
    "keeps_graph",
    "leaves_of_running_node",
    "nodes_of",
    "on_double_backward",
    "when_released",
]


def compiled_nodes(output: Any) -> list[Any]:
    """Return the autograd nodes of the compiled functions that made a forward's output.

    Views that AOTAutograd takes again outside the graph stand on top of them.
    """
    found: list[Any] = []
    for leaf in tensors_anywhere(output):
        node: Any = leaf.grad_fn
        while node is not None and not hasattr(node, "set_materialize_grads"):
            node = node.next_functions[0][0] if node.next_functions else None
        if node is not None and not any(node is other for other in found):
            found.append(node)
    return found


def compiled_behind(output: Any) -> list[Any]:
    """Return the autograd nodes of all compiled functions that a forward's output depends on."""
    found: list[Any] = []
    seen: set[Any] = set()
    waiting = [leaf.grad_fn for leaf in tensors_anywhere(output)]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__.startswith("CompiledFunction"):
            found.append(node)
        waiting += [inner for inner, _ in node.next_functions]
    return found


def nodes_of(output: Any) -> list[Any]:
    """Return the autograd nodes that made the tensors of a forward's output."""
    nodes = (leaf.grad_fn for leaf in tensors_anywhere(output))
    return list(dict.fromkeys(node for node in nodes if node is not None))


def at_backward_end(call: Callable[[], None]) -> None:
    """From inside a backward: call ``call`` when all of it is done."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(call)


def keep_missing_gradients(node: Any) -> None:
    """Let a compiled function's backward get None for gradients that do not arrive.

    Autograd fills them with zeros unless the function object is told otherwise.
    """
    node.set_materialize_grads(False)


def before_backward(node: Any, call: Callable[[], None]) -> None:
    """Call ``call`` before the node's backward runs; what it raises comes out of the backward."""

    def hook(gradients: Any) -> None:
        call()

    node.register_prehook(hook)


def on_double_backward(node: Any, call: Callable[[], None]) -> None:
    """Call ``call`` before anybody's backward goes through the backward of ``node``."""

    def forbidden(gradients: Any) -> None:
        call()

    def ran(inputs: Any, outputs: Any) -> Any:
        made: set[Any] = {g.grad_fn for g in inputs if isinstance(g, torch.Tensor)}
        for inner in made - {None}:
            inner.register_prehook(forbidden)
        # Torch 2.11 lets gradients go without a graph where nothing saved requires one.
        if made == {None}:
            return _Forbidden.apply(call, torch.ones((), requires_grad=True), *inputs)
        return None

    here = weakref.ref(node)  # the hook lives on the node: no cycle

    def begins() -> None:
        # A hook behind the backward keeps the tangents alive through it: only where it is needed.
        there = here()
        if torch.is_grad_enabled() and there is not None:  # create_graph=True
            there.register_hook(ran)

    before_backward(node, begins)


class _Forbidden(torch.autograd.Function):
    """Hands gradients on as they are, and calls ``call`` where somebody differentiates them."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], anchor: torch.Tensor, *values: Any) -> Any:
        ctx.call = call
        return tuple(v.view_as(v) if isinstance(v, torch.Tensor) else v for v in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.call()
        raise AssertionError("a call for a forbidden backward raises")


class _Farewell:
    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call

    def __del__(self) -> None:
        self.call()


def when_released(node: Any, call: Callable[[], Any]) -> None:
    """Call ``call`` once the autograd node is released: its graph is gone."""
    node.autockpt_farewell = _Farewell(call)


def in_backward() -> bool:
    """Return whether autograd is running a backward in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def in_checkpoint() -> bool:
    """Return whether this is a forward, or its second run, in a ``torch.utils.checkpoint``.

    Of those that are not reentrant: they demand that the second run saves what the first did.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


def keeps_graph() -> bool:
    """Return whether the running backward keeps its graph, so that it may run again."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def leaves_of_running_node() -> list[torch.Tensor | None]:
    """Return the leaves that the autograd node running in this thread has gradients for.

    One entry for each tensor the node's function took; None where that was no leaf, or needs no
    gradient.
    """
    node: Any = torch._C._current_autograd_node()
    if node is None:
        return []
    return [getattr(accumulate, "variable", None) for accumulate, _ in node.next_functions]


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Return whether the user wants to see or change this tensor's gradient as it arrives."""
    return bool(tensor._backward_hooks) or bool(
        getattr(tensor, "_post_accumulate_grad_hooks", None)
    )
