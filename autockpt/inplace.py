"""In place: which operations may be written over one of their inputs, proved from the graph.

An overwrite is right when nobody reads the old value afterwards and the operator itself reads each
element before it writes it. The proof has two halves. This file is the static one: what the
operator reads and writes, and whose memory it is. The other half, that the memory dies at the
operation, depends on the schedule and is checked where schedules are
(:func:`autockpt_solvers.memory.simulate`).

In a joint graph the backward formulas are nodes like others. What one of them reads of the
forward it reads as an input, so "no backward formula reads what is overwritten" is no rule of its
own: it is part of the fact that the memory dies. What the forward saves is never overwritten, not
even by its last reader: the user may run the backward twice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autockpt import _torch
from autockpt.capture import Capture

__all__ = [
    "CLAUSES",
    "FORMS",
    "Case",
    "Form",
    "candidates",
    "in_place_call",
    "is_dense",
    "reads_rows",
]

aten = torch.ops.aten


# ------------------------------------------------------------------ what operators allow


@dataclass(frozen=True)
class Form:
    """How an operator is written over an argument.

    Attributes:
        target: the overload that writes.
        over: positions of the arguments it may be written over.
        keyword: the parameter that takes the memory to write; empty where the overload writes its
            first argument.
        last_dim: position of the dimension along which it reads a whole row before it writes any
            of it, which must be the last one; None where it works element by element.
    """

    target: Any
    over: tuple[int, ...] = (0,)
    keyword: str = "out"
    last_dim: int | None = None


def _by_rows(write: Any, operator: Any, keyword: str) -> Callable[..., torch.Tensor]:
    """Return the overload that writes, and the one that does not where rows lie in pieces.

    The softmaxes' kernels fill what they are given as if it were contiguous. The traced layout says
    it is; should the real one differ, the result gets memory of its own.
    """

    def by_rows(*args: Any, **kwargs: Any) -> torch.Tensor:
        memory = kwargs[keyword]
        if memory.is_contiguous():
            return write(*args, **kwargs)  # type: ignore[no-any-return]
        return operator(*args)  # type: ignore[no-any-return]

    by_rows.__name__ = f"{operator.__name__.partition('.')[0].strip('_')}_by_rows"
    return by_rows


def _part(view: Any, operator: Any) -> Callable[..., torch.Tensor]:
    """Return what writes into a part of its first argument, where ``operator`` copies the rest."""

    def written(base: torch.Tensor, part: torch.Tensor, *place: Any, **named: Any) -> torch.Tensor:
        view(base, *place, **named).copy_(part)
        return base

    written.__name__ = f"{operator.__name__.partition('.')[0]}_"
    return written


_GRADIENT = "grad_input"

# What writes to a part of memory, in a trace a copy of all of it. The indices and what is written
# are other tensors, or the memory is read in another way, which a clause refuses.
_PARTS = {
    aten.slice_scatter.default: _part(aten.slice.Tensor, aten.slice_scatter.default),
    aten.select_scatter.default: _part(aten.select.int, aten.select_scatter.default),
    aten.index_put.default: aten.index_put_.default,
    aten.index_add.default: aten.index_add_.default,
}

# Operators that read each element (the softmaxes: each row) before they write it. Not here: matrix
# products and convolutions, which read what they have written; operators whose ``out=`` form
# allocates a result and copies it (``native_layer_norm``, ``embedding``, ``native_dropout``).
FORMS: dict[Any, Form] = {
    aten.add.Tensor: Form(aten.add.out, (0, 1)),
    aten.sub.Tensor: Form(aten.sub.out, (0, 1)),
    aten.mul.Tensor: Form(aten.mul.out, (0, 1)),
    aten.div.Tensor: Form(aten.div.out, (0, 1)),
    aten.add.Scalar: Form(aten.add_.Scalar, keyword=""),
    aten.sub.Scalar: Form(aten.sub_.Scalar, keyword=""),
    aten.mul.Scalar: Form(aten.mul_.Scalar, keyword=""),
    aten.div.Scalar: Form(aten.div_.Scalar, keyword=""),
    aten.maximum.default: Form(aten.maximum.out, (0, 1)),
    aten.minimum.default: Form(aten.minimum.out, (0, 1)),
    aten.pow.Tensor_Scalar: Form(aten.pow.Tensor_Scalar_out),
    aten.addcmul.default: Form(aten.addcmul.out, (0, 1, 2)),
    aten.addcdiv.default: Form(aten.addcdiv.out, (0, 1, 2)),
    aten.where.self: Form(aten.where.self_out, (1, 2)),
    aten.masked_fill.Scalar: Form(aten.masked_fill_.Scalar, keyword=""),
    aten.abs.default: Form(aten.abs.out),
    aten.neg.default: Form(aten.neg.out),
    aten.exp.default: Form(aten.exp.out),
    aten.expm1.default: Form(aten.expm1.out),
    aten.log.default: Form(aten.log.out),
    aten.log1p.default: Form(aten.log1p.out),
    aten.sqrt.default: Form(aten.sqrt.out),
    aten.rsqrt.default: Form(aten.rsqrt.out),
    aten.reciprocal.default: Form(aten.reciprocal.out),
    aten.sin.default: Form(aten.sin.out),
    aten.cos.default: Form(aten.cos.out),
    aten.erf.default: Form(aten.erf.out),
    aten.tanh.default: Form(aten.tanh.out),
    aten.sigmoid.default: Form(aten.sigmoid.out),
    aten.clamp.default: Form(aten.clamp.out),
    aten.clamp_min.default: Form(aten.clamp_min.out),
    aten.clamp_max.default: Form(aten.clamp_max.out),
    aten.relu.default: Form(aten.relu_.default, keyword=""),
    aten.gelu.default: Form(aten.gelu.out),
    aten.silu.default: Form(aten.silu.out),
    aten.elu.default: Form(aten.elu.out),
    aten.softplus.default: Form(aten.softplus.out),
    aten.hardtanh.default: Form(aten.hardtanh.out),
    aten.leaky_relu.default: Form(aten.leaky_relu.out),
    aten._softmax.default: Form(
        _by_rows(aten._softmax.out, aten._softmax.default, "out"), last_dim=1
    ),
    aten._log_softmax.default: Form(
        _by_rows(aten._log_softmax.out, aten._log_softmax.default, "out"), last_dim=1
    ),
    aten._softmax_backward_data.default: Form(
        _by_rows(aten._softmax_backward_data.out, aten._softmax_backward_data.default, _GRADIENT),
        (0, 1),
        _GRADIENT,
        last_dim=2,
    ),
    aten._log_softmax_backward_data.default: Form(
        _by_rows(
            aten._log_softmax_backward_data.out, aten._log_softmax_backward_data.default, "out"
        ),
        (0, 1),
        last_dim=2,
    ),
    aten.gelu_backward.default: Form(aten.gelu_backward.grad_input, (0, 1), _GRADIENT),
    aten.silu_backward.default: Form(aten.silu_backward.grad_input, (0, 1), _GRADIENT),
    aten.tanh_backward.default: Form(aten.tanh_backward.grad_input, (0, 1), _GRADIENT),
    aten.sigmoid_backward.default: Form(aten.sigmoid_backward.grad_input, (0, 1), _GRADIENT),
    aten.threshold_backward.default: Form(aten.threshold_backward.grad_input, (0, 1), _GRADIENT),
    aten.leaky_relu_backward.default: Form(aten.leaky_relu_backward.grad_input, (0, 1), _GRADIENT),
    aten.hardtanh_backward.default: Form(aten.hardtanh_backward.grad_input, (0, 1), _GRADIENT),
    aten.softplus_backward.default: Form(aten.softplus_backward.grad_input, (0, 1), _GRADIENT),
    aten.elu_backward.default: Form(aten.elu_backward.grad_input, (0,), _GRADIENT),
    **{operator: Form(write, keyword="") for operator, write in _PARTS.items()},
}


# ------------------------------------------------------------------ the clauses


@dataclass(frozen=True)
class Case:
    """One operation and one of its arguments, asked about.

    Attributes:
        capture: the step.
        sizes: bytes of each storage as measured.
        visible: storages that somebody outside the graph may hold.
        index: the operation.
        argument: the argument it would be written over.
    """

    capture: Capture
    sizes: Sequence[int]
    visible: Collection[int]
    index: int
    argument: fx.Node

    @property
    def node(self) -> fx.Node:
        """The operation's node."""
        return self.capture.operations[self.index]

    @property
    def storage(self) -> int:
        """The memory the argument lives in; -1 for memory from outside."""
        return self.capture.lives_in[self.argument][0]


def _is_of_the_step(case: Case) -> str:
    return "" if case.storage >= 0 else "it is a parameter, a buffer or an input"


def _is_made_by_torch(case: Case) -> str:
    made = case.capture.storages[case.storage].operation
    if made < 0:
        return "it comes from outside the graph, where it may be held"
    if not _torch.is_operator(case.capture.operations[made]):
        return "a user's operator made it, and may hold it"
    return ""


def _is_unseen(case: Case) -> str:
    return "the user gets it" if case.storage in case.visible else ""


def _is_not_saved(case: Case) -> str:
    made, barrier = case.capture.storages[case.storage].operation, case.capture.barrier
    saved = made < barrier <= case.index
    return "it is saved for the backward, which may run twice" if saved else ""


def _has_the_same_layout(case: Case) -> str:
    old, new = case.argument.meta["val"], case.node.meta["val"]
    if old.dtype != new.dtype or old.device != new.device:
        return "its type differs"
    if old.shape != new.shape or _strides(old) != _strides(new):
        return "its layout differs"
    return ""


def _is_the_whole_memory(case: Case) -> str:
    old, node = case.argument.meta["val"], case.node
    (fresh,) = case.capture.lives_in[node]
    own = old.numel() * old.element_size()
    if not is_dense(old) or own != old.untyped_storage().nbytes():
        return "it is a part of its memory"
    if case.sizes[case.storage] != case.sizes[fresh]:
        return "its memory is of another size"
    return ""


def _is_read_in_one_way(case: Case) -> str:
    value = case.argument.meta["val"]
    for other in case.node.all_input_nodes:
        if case.storage in case.capture.lives_in[other]:
            seen = other.meta["val"]
            if not isinstance(seen, torch.Tensor) or (
                (seen.shape, _strides(seen), seen.storage_offset(), seen.dtype)
                != (value.shape, _strides(value), value.storage_offset(), value.dtype)
            ):
                return "it is also read through another view"
    return ""


def _shows_no_view(case: Case) -> str:
    (fresh,) = case.capture.lives_in[case.node]
    # What may itself be written in place may lie in a view.
    view = case.capture.is_view(case.argument) or case.argument.target in FORMS
    if fresh in case.visible and view:
        return "the user would get a view of it"
    return ""


# Each says why an argument must not be overwritten, or nothing. The later ones rely on the earlier.
CLAUSES: dict[str, Callable[[Case], str]] = {
    "of the step": _is_of_the_step,
    "made by torch": _is_made_by_torch,
    "unseen": _is_unseen,
    "not saved": _is_not_saved,
    "same layout": _has_the_same_layout,
    "whole memory": _is_the_whole_memory,
    "read in one way": _is_read_in_one_way,
    "no view shown": _shows_no_view,
}


def _strides(tensor: torch.Tensor) -> list[int]:
    """The strides that matter."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor covers its memory without gaps or overlaps."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


# ------------------------------------------------------------------ answers


def candidates(
    capture: Capture, sizes: Sequence[int], visible: Collection[int], index: int
) -> tuple[tuple[int, ...], str]:
    """Return the storages an operation may be written over if they die there, or why none.

    Args:
        capture: the step.
        sizes: bytes of each storage as measured.
        visible: storages that somebody outside the graph may hold.
        index: the operation.
    """
    node = capture.operations[index]
    form = FORMS.get(node.target)
    if form is None or not reads_rows(node, form):
        return (), ""
    found: list[int] = []
    refusal = ""
    for position in form.over:
        argument = node.args[position] if position < len(node.args) else None
        if not isinstance(argument, fx.Node) or not capture.lives_in[argument]:
            continue  # a number
        case = Case(capture, sizes, visible, index, argument)
        why = next(filter(None, (clause(case) for clause in CLAUSES.values())), "")
        if not why and case.storage not in found:
            found.append(case.storage)
        elif why and not refusal:
            refusal = f"{argument.name}: {why}"
    return tuple(found), "" if found else refusal


def reads_rows(node: fx.Node, form: Form) -> bool:
    """Return whether an operator works element by element, or on rows that lie in one piece.

    The softmaxes' kernels fill what they are given as if it were contiguous, whatever it is.
    """
    if form.last_dim is None:
        return True
    value = node.meta["val"]
    if not value.is_contiguous():
        return False
    last = value.dim() - 1
    return node.args[form.last_dim] in (last, -1)


def in_place_call(capture: Capture, node: fx.Node, storage: int) -> tuple[Any, fx.Node, str]:
    """Return how a node is written over a storage: the overload, the argument, the keyword."""
    form = FORMS[node.target]
    for position in form.over:
        argument = node.args[position] if position < len(node.args) else None
        if isinstance(argument, fx.Node) and capture.lives_in[argument] == (storage,):
            return form.target, argument, form.keyword
    raise AssertionError(f"{node.name} has no argument in storage {storage}")
