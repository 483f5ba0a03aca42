"""Capture: one training step of a model as operations over storages.

Dynamo traces the model's call, AOTAutograd differentiates it; what arrives here is their joint
graph. This file says which nodes compute, which only view, which memory each value lives in, and
what the user sees of it. It measures nothing and decides nothing.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from autockpt import _torch
from autockpt._torch import JointGraph
from autockpt.copies import drop_copies
from autockpt.out_of_memory import OutOfMemory
from autockpt.pieces import join_pieces
from autockpt.tangents import assumed_absent, look_anew, tensors, without_tangents
from autockpt_solvers.errors import CaptureError, InputError

__all__ = [
    "BATCH_NORM_BACKWARD",
    "Capture",
    "CapturedStorage",
    "capture",
    "read_joint",
    "traced",
    "training",
]

aten = torch.ops.aten

BATCH_NORM_BACKWARD = (aten.native_batch_norm_backward.default, aten.batch_norm_backward.default)


@dataclass(frozen=True)
class CapturedStorage:
    """One block of memory of the step.

    Attributes:
        name: the node it was allocated for.
        size_bytes: its size by shape, unrounded; the profile knows better.
        operation: index of the operation that allocates it; -1 for a tangent, which the part of
            the step outside the graph allocates.
        roots: nodes that hand it out (the operation's node or picks of it), never views.
    """

    name: str
    size_bytes: int
    operation: int
    roots: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Capture:
    """The joint graph, read.

    Attributes:
        joint: the graph itself.
        operations: the nodes that compute, forward ones first, in the graph's order. Views
            and picks from tuples ride along with what they look at.
        barrier: number of forward operations.
        storages: all memory the step allocates, tangents included.
        lives_in: for each node the storages of its tensors, in the order of :func:`tensors`;
            -1 for memory from outside (parameters, buffers, inputs).
        outputs: storages of what the user gets, one tuple per forward output; empty for
            constants, outside memory and new values of buffers.
        new_buffers: storages of new values of mutated inputs, copied over when the forward ends.
        stale: primals whose memory the forward's end overwrites.
        gradients: for each backward output its storage and its primal, where it is a tensor.
        absent: positions of the tangents that are taken not to arrive.
    """

    joint: JointGraph
    operations: tuple[fx.Node, ...]
    barrier: int
    storages: tuple[CapturedStorage, ...]
    lives_in: Mapping[fx.Node, tuple[int, ...]]
    outputs: tuple[tuple[int, ...], ...]
    new_buffers: tuple[int, ...]
    stale: frozenset[fx.Node]
    gradients: tuple[tuple[fx.Node, int, fx.Node | None], ...]
    absent: frozenset[int]

    def reads(self, node: fx.Node) -> tuple[int, ...]:
        """Return the storages of the step that the node's arguments live in, each once."""
        found = (s for arg in node.all_input_nodes for s in self.lives_in[arg] if s >= 0)
        return tuple(dict.fromkeys(found))

    def is_view(self, node: fx.Node) -> bool:
        """Return whether the node only looks at memory: a view, or a pick from a tuple."""
        return node.op == "call_function" and node not in self._computing

    @property
    def _computing(self) -> frozenset[fx.Node]:
        cached: frozenset[fx.Node] | None = self.__dict__.get("_computing_nodes")
        if cached is None:
            cached = frozenset(self.operations)
            object.__setattr__(self, "_computing_nodes", cached)
        return cached


# ------------------------------------------------------------------ reading a joint graph


def read_joint(joint: JointGraph, absent: Collection[int] | None = None) -> Capture:
    """Return what a joint graph computes.

    Args:
        joint: the graph; it is left as it is.
        absent: positions of the tangents that no backward starts from: the user's loss does not
            depend on these outputs. None: assume it of all but a single scalar output, if
            there is one.

    Raises:
        CaptureError: where the graph writes into memory in a way that cannot be repeated safely.
    """
    for node in joint.module.graph.nodes:
        _refuse_layout(node)
    absent = assumed_absent(joint) if absent is None else frozenset(absent)
    joint = without_tangents(joint, absent)
    look_anew(joint.module)
    _drop_false_dependences(joint)
    drop_copies(joint)
    join_pieces(joint)
    nodes = list(joint.module.graph.nodes)
    backward = _backward_nodes(joint, nodes)
    needed = _needed_nodes(joint, nodes)
    lives_in: dict[fx.Node, tuple[int, ...]] = {}
    storages: list[CapturedStorage] = []
    known: dict[int, int] = {}  # key of the memory -> storage
    for placeholder in (*joint.primals, *joint.forward_seeds, *joint.backward_seeds):
        for tensor in tensors(placeholder):
            known[_torch.storage_key(tensor)] = -1
    for position, tangent in enumerate(joint.tangents):
        if position in absent:
            lives_in[tangent] = (-1,)
            continue
        # Fake tangents of two views share memory; real ones come one by one.
        tensor = tensors(tangent)[0]
        known[_torch.storage_key(tensor)] = len(storages)
        lives_in[tangent] = (len(storages),)
        storages.append(CapturedStorage(tangent.name, _span_bytes(tensor), -1, (tangent,)))
    order = [n for n in nodes if n in needed and n not in backward]
    order += [n for n in nodes if n in needed and n in backward]
    operations: list[fx.Node] = []
    barrier = 0
    for node in nodes:
        if node.op in ("placeholder", "get_attr") and node not in lives_in:
            lives_in[node] = tuple(known.get(_torch.storage_key(t), -1) for t in tensors(node))
    for node in order:
        if node.op != "call_function":
            continue
        _refuse(node)
        index = len(operations)
        fresh: dict[int, list[torch.Tensor]] = {}
        for tensor in tensors(node):
            key = _torch.storage_key(tensor)
            if key not in known:
                fresh.setdefault(key, []).append(tensor)
        if not _rides_along(node, fresh):
            operations.append(node)
            barrier += node not in backward
            for key, owners in fresh.items():
                known[key] = len(storages)
                name, roots = _roots(node, owners)
                storages.append(CapturedStorage(name, _nbytes(owners[0]), index, roots))
        lives_in[node] = tuple(known[_torch.storage_key(t)] for t in tensors(node))
        looked_at = {s for arg in node.all_input_nodes for s in lives_in[arg]}
        if not fresh and len(looked_at) == 1:
            # Where tangents share fake memory, what a view looks at says which one it is.
            lives_in[node] = (*looked_at,) * len(lives_in[node])
    new_buffers = [s for value in joint.new_values for s in lives_in[value] if s >= 0]
    outputs: list[tuple[int, ...]] = []
    for value, mutated in zip(joint.forward_outputs, joint.mutated, strict=True):
        own = tuple(s for s in lives_in[value] if s >= 0) if isinstance(value, fx.Node) else ()
        if mutated is not None:
            new_buffers += own
            own = ()
        outputs.append(own)
    gradients = tuple(
        (value, lives_in[value][0], _gradient_of(joint, position))
        for position, value in enumerate(joint.backward_outputs)
        if isinstance(value, fx.Node) and len(lives_in[value]) == 1
    )
    return Capture(
        joint,
        tuple(operations),
        barrier,
        tuple(storages),
        lives_in,
        tuple(outputs),
        tuple(dict.fromkeys(new_buffers)),
        frozenset(m for m in (*joint.mutated, *joint.written) if m is not None),
        gradients,
        absent,
    )


def _nbytes(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().nbytes())


def _span_bytes(tensor: torch.Tensor) -> int:
    """What a tensor of these strides takes: torch gives a tangent those of its output."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.element_size()


def _rides_along(node: fx.Node, fresh: Mapping[int, Any]) -> bool:
    """A pick, or a node whose every tensor lies in memory that was there before it."""
    if _torch.getitem_index(node) is not None:
        return True
    return bool(tensors(node)) and not fresh


def _roots(node: fx.Node, owners: list[torch.Tensor]) -> tuple[str, tuple[fx.Node, ...]]:
    """The nodes that hand out a fresh storage, and the name to call it by."""
    if isinstance(node.meta.get("val"), torch.Tensor):
        return node.name, (node,)
    keys = {_torch.storage_key(t) for t in owners}
    picks = tuple(
        user
        for user in node.users
        if _torch.getitem_index(user) is not None
        and any(_torch.storage_key(t) in keys for t in tensors(user))
    )
    position = next(
        i
        for i, t in enumerate(node.meta["val"])
        if isinstance(t, torch.Tensor) and _torch.storage_key(t) in keys
    )
    return (picks[0].name if picks else f"{node.name}[{position}]"), picks


def _gradient_of(joint: JointGraph, position: int) -> fx.Node | None:
    primals = joint.differentiated
    return primals[position] if position < len(primals) else None


def _backward_nodes(joint: JointGraph, nodes: Iterable[fx.Node]) -> set[fx.Node]:
    backward = set(joint.tangents) | set(joint.backward_seeds)
    for node in nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        tag = node.meta.get("partitioner_tag") or ""
        if "backward" in tag or any(a in backward for a in node.all_input_nodes):
            backward.add(node)
    return backward


def _needed_nodes(joint: JointGraph, nodes: list[fx.Node]) -> set[fx.Node]:
    """What the outputs need, and what has an effect: draws move the generator, checks raise."""
    outputs = (*joint.forward_outputs, *joint.new_values, *joint.backward_outputs)
    needed = {n for n in outputs if isinstance(n, fx.Node)}
    for node in reversed(nodes):
        if node.op == "call_function" and (_torch.is_random(node) or node.is_impure()):
            needed.add(node)
        if node in needed:
            needed.update(node.all_input_nodes)
            if not isinstance(node.meta.get("val"), torch.Tensor):
                needed.update(u for u in node.users if _torch.getitem_index(u) is not None)
    return needed


def _drop_false_dependences(joint: JointGraph) -> None:
    """Let batch-norm's backward not read the running statistics, which it ignores in training.

    In the traced graph it names their *updated* values; those would have to be kept. The trace
    has it return a gradient of its input where none is asked for, too.
    """
    for node in joint.module.graph.nodes:
        if node.target in BATCH_NORM_BACKWARD:
            if node.args[7] is True:
                node.args = (*node.args[:3], None, None, *node.args[5:])
            returned = zip(node.meta["val"], node.args[9], strict=True)
            node.meta["val"] = tuple(value if asked else None for value, asked in returned)
            for pick in node.users:
                pick.meta["val"] = node.meta["val"][pick.args[1]]


def _refuse_layout(node: fx.Node) -> None:
    """Raise for memory that cannot be looked at."""
    for tensor in tensors(node):
        if tensor.layout is not torch.strided:
            raise CaptureError(
                f"{_torch.source_line(node) or node.name}: {node.target} makes a {tensor.layout} "
                "tensor, whose memory cannot be planned. Use dense tensors here (for nn.Embedding: "
                "sparse=False)."
            )


def _refuse(node: fx.Node) -> None:
    """Raise for what cannot be planned: unknown sizes, writes in place."""
    where = _torch.source_line(node) or node.name
    for tensor in tensors(node):
        if not all(isinstance(size, int) for size in tensor.shape):
            raise CaptureError(
                f"{where}: the size of what {node.target} makes depends on data, so its memory "
                "cannot be planned. Replace it by an operation of fixed size "
                "(torch.where instead of a boolean index, for instance)."
            )
    if tensors(node) and not _torch.computes_with_its_integers(node):
        raise CaptureError(
            f"{where}: {node.target} reads a number that varies from call to call, which is not "
            "planned for. Give it as a tensor."
        )
    schema = getattr(node.target, "_schema", None)
    if schema is not None and schema.is_mutable:
        raise CaptureError(
            f"{where}: the captured graph writes in place with "
            f"{node.target}, which cannot be repeated safely. Move this write out of forward."
        )


# ------------------------------------------------------------------ tracing a model


class _Captured(Exception):
    """Not an error: it ends a trace that must not run."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    use: Callable[[JointGraph], Any],
) -> Any:
    """Trace ``model(*args, **kwargs)``, hand the joint graph to ``use``, return what it returns.

    Nothing of the model is run; ``use`` is called inside the trace, where torch's tracing state is
    still alive.

    Raises:
        CaptureError, InputError: see :func:`traced`.
    """

    def partition(joint: JointGraph) -> Any:
        raise _Captured(use(joint))

    compiled = _torch.compile_forward(model, partition)
    try:
        with torch.enable_grad():
            traced(model, compiled, args, kwargs)
    except _Captured as done:
        return done.result
    raise CaptureError(
        "the model's forward needs no gradient: no parameter or input requires one. "
        "Set requires_grad on the parameters to be trained."
    )


@contextlib.contextmanager
def training(model: nn.Module) -> Iterator[None]:
    """Put a model that is in eval mode into training mode for a while.

    A model in training mode is left alone: its parts may be in eval mode on purpose.
    """
    if model.training:
        yield
        return
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def traced(
    model: nn.Module,
    compiled: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Call a compiled forward, and turn what a trace may raise into one readable error.

    Raises:
        CaptureError: the forward cannot be captured; the message names the user's line.
        InputError: the inputs do not fit the forward.
        RuntimeError: autograd's own, where the model overwrites what its backward needs.
    """
    ambient = sys.exc_info()[1]
    try:
        return compiled(*args, **kwargs)
    except Exception as error:
        _torch.forget_context(error, ambient)
        own = _torch.user_error(error)
        if isinstance(own, OutOfMemory):
            raise
        if own is not None:
            raise own.with_traceback(None) from None
        refusal = _torch.autograd_refusal(error)
        if refusal is not None:
            raise refusal from None
        reason = _torch.capture_failure(error)
        if reason is None:
            if isinstance(error, torch.OutOfMemoryError) or not _torch.raised_in_trace(error):
                raise
            reason = f"torch's tracer failed: {type(error).__name__}: {error}"
        _refuse_inputs(model, args, kwargs, error)
        name = type(model).__name__
        if _torch.is_operator_error(error):
            raise InputError(f"an operation of {name} fails on these inputs.\n{reason}") from error
        raise CaptureError(
            f"the forward of {name} cannot be captured as one graph.\n{reason}"
        ) from error


def _refuse_inputs(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], cause: Exception
) -> None:
    """Raise what calling the model plainly would raise about its inputs, if it does."""
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(
            f"the inputs do not fit {type(model).__name__}.forward: {error}. "
            "Pass what the training loop passes to the model."
        ) from cause
