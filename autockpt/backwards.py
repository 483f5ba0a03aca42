"""Backwards that cannot be right, refused in words that say what to do.

A plan reads in its backward what eager may not have saved: an input, from which it computes again.
Autograd notices when one is overwritten in between; it cannot say why it was needed. And a planned
backward has no backward of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from autockpt import _torch
from autockpt_solvers.errors import DoubleBackward, StaleInput

__all__ = ["Versions", "guard_backward", "refuse_double_backward", "versions"]

Versions = list[tuple[weakref.ref[torch.Tensor], int]]


def versions(tensors: Sequence[Any]) -> Versions:
    """Return the tensors, weakly held, with the number of writes each has seen."""
    return [
        (weakref.ref(t), t._version)
        for t in tensors
        if isinstance(t, torch.Tensor) and not t.is_inference()
    ]


def guard_backward(model: nn.Module, node: Any, read: Versions) -> None:
    """Let the backward of ``node`` raise our own errors.

    Args:
        model: whose forward has just run.
        node: the autograd node behind its outputs.
        read: what the backward reads that the user can write to.

    The backward then raises:
        StaleInput: one of them has been overwritten since the forward.
        DoubleBackward: it is differentiated itself.
    """
    # The node lives in the user's graph: it must not keep the model alive.
    owner = weakref.ref(model)
    _torch.before_backward(node, _check(owner, read))
    refuse_double_backward(node)


def refuse_double_backward(node: Any) -> None:
    """Let the backward of ``node`` raise ``DoubleBackward`` where it is differentiated itself."""
    _torch.on_double_backward(node, _refuse)


def _check(owner: weakref.ref[nn.Module], read: Versions) -> Callable[[], None]:
    def check() -> None:
        for ref, version in read:
            tensor = ref()
            if tensor is not None and tensor._version != version:
                raise StaleInput(
                    f"{_named(owner(), tensor)} was written in place between the forward and its "
                    "backward, which reads it: under the plan values are computed again from it. "
                    "Write after the backward, or write to a copy (x = x.clone()). To keep what "
                    "is made of it instead, name the modules that read it in keep=[...]."
                )

    return check


def _named(model: nn.Module | None, tensor: torch.Tensor) -> str:
    if model is not None:
        for kind, named in (
            ("parameter", model.named_parameters()),
            ("buffer", model.named_buffers()),
        ):
            for name, value in named:
                if value is tensor:
                    return f"the {kind} {name!r}"
    return f"an input of shape {tuple(tensor.shape)}"


def _refuse() -> None:
    raise DoubleBackward(
        "a planned step has no double backward: this one differentiates its gradients "
        "(create_graph=True). Run such steps on the plain model: autockpt.restore(model) undoes "
        "optimize, and a forward inside model.eval() is plain as well."
    )
