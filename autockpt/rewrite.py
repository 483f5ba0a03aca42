"""Rewrite: the forward and backward graphs that execute a schedule exactly.

Requires a schedule that frees every copy at its last use (``free_early``): the generated code
drops each name after its last use, so that the order of runs is all there is to write down.
Ensures that every run stands at its place, that a name always means the newest copy, and that a
further run is named after its origin: ``addmm_3_again_1``. A run that the schedule writes in place
stands there as such, with the proof as a comment; nothing reads what it has overwritten.

A view is taken anew from the newest copy of its base, right where it is first needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from autockpt import _torch
from autockpt.capture import BATCH_NORM_BACKWARD, Capture
from autockpt.formulate import Formulation, Role, again
from autockpt.inplace import in_place_call
from autockpt.replay import generator_state, replay, state_bytes
from autockpt.tangents import tensors
from autockpt_solvers.decisions import why_in_place
from autockpt_solvers.errors import ScheduleError
from autockpt_solvers.schedule import Compute, Schedule, Step, free_early

__all__ = ["backward_needs", "rewrite", "rewrite_backward"]

aten = torch.ops.aten
_BATCH_NORMS = (
    aten._native_batch_norm_legit_functional.default,
    aten._batch_norm_with_update_functional.default,
)

_NUMBERS = {torch.SymFloat: torch.float64, torch.SymInt: torch.int64, torch.SymBool: torch.bool}


def rewrite(
    formulation: Formulation, schedule: Schedule, also_save: Sequence[str] = ()
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the forward and the backward graph that execute a schedule.

    The forward returns what the joint graph's forward returns, then what it saves; the backward
    takes what was saved, then the outputs' gradients, as AOTAutograd lays down.

    Args:
        formulation: the step.
        schedule: what to execute.
        also_save: names of forward nodes to save although this backward does not read them.

    Raises:
        ScheduleError: the schedule does not free at last uses, which generated code cannot do.
    """
    problem = formulation.problem
    canonical = free_early(problem, schedule.forward_computes, schedule.backward_computes)
    if canonical != schedule:
        raise ScheduleError("the schedule frees a storage later than at its last use")
    joint = formulation.capture.joint
    forward = _Writer(formulation)
    forward.also_save = frozenset(also_save)
    forward.order(
        [forward.placeholder(n, n.name, n.meta) for n in (*joint.primals, *joint.forward_seeds)]
    )
    barrier = schedule.barrier
    forward.run_all(schedule.steps[:barrier])

    # What the backward asks for while it is written is what the forward saves.
    backward = _Writer(formulation, forward)
    backward.run_all(schedule.steps[barrier:])
    gradients = [_value(backward, x) for x in joint.backward_outputs]
    for node in joint.module.graph.nodes:
        for key in (node, ("state", node), ("old_value", node), ("number", node)):
            if _key_name(key) in forward.also_save:
                backward.stored(key)
    saved = _in_saving_order(list(backward.asked))
    backward.order(
        [
            *(backward.asked[key] for key in saved),
            *(backward.placeholder(n, n.name, n.meta) for n in joint.tangents),
            *(backward.placeholder(n, n.name, n.meta) for n in joint.backward_seeds),
        ]
    )
    results = [_value(forward, x) for x in joint.forward_outputs]
    stored = [forward.stored(key) for key in saved]
    forward.write(joint.written, joint.new_values)
    descriptors = _torch.saved_descriptors([_meta_node(key) for key in saved])
    return (
        forward.output(
            [*results, *stored],
            [*joint.forward_descriptors, *descriptors],
        ),
        backward.output(gradients, list(joint.backward_descriptors)),
    )


def backward_needs(formulation: Formulation, backward: Sequence[Compute]) -> list[str]:
    """Return the names of what a forward must save for a backward of these runs."""
    forward = _Generous(())
    writer = _Writer(formulation, forward)
    writer.run_all(backward)
    for output in formulation.capture.joint.backward_outputs:
        _value(writer, output)
    return list(forward.saved)


def rewrite_backward(
    formulation: Formulation, backward: Sequence[Compute], saved: Sequence[fx.Node]
) -> fx.GraphModule:
    """Return another backward graph behind a forward that is there already.

    Args:
        formulation: the step whose backward it is; its forward's nodes have the names of the
            forward that is there.
        backward: what to run, in order.
        saved: placeholders of what that forward saves, in its order.

    Raises:
        ScheduleError: the operations read what was not saved.
    """
    joint = formulation.capture.joint
    writer = _Writer(formulation, _Saved(saved))
    writer.run_all(backward)
    gradients = [_value(writer, x) for x in joint.backward_outputs]
    by_name = {placeholder.name: placeholder for placeholder in writer.asked.values()}
    writer.order(
        [
            *(by_name.get(n.name) or writer.placeholder(n, n.name, n.meta) for n in saved),
            *(writer.placeholder(n, n.name, n.meta) for n in joint.tangents),
            *(writer.placeholder(n, n.name, n.meta) for n in joint.backward_seeds),
        ]
    )
    return writer.output(gradients, list(joint.backward_descriptors))


# What the backward can ask the forward for: a node of the joint graph, or ("state", node), the
# generator's state before a random node, ("old_value", primal), or ("number", node), a number of
# Python's as a tensor.
_Key = fx.Node | tuple[str, fx.Node]


def _value(writer: _Writer, output: Any) -> Any:
    return writer.value(output) if isinstance(output, fx.Node) else output


def _meta_node(key: _Key) -> fx.Node:
    return key if isinstance(key, fx.Node) else key[1]


def _in_saving_order(keys: list[_Key]) -> list[_Key]:
    """AOTAutograd wants tensors checked for later writes first, then the unchecked ones."""
    return sorted(keys, key=lambda k: bool(_meta_node(k).meta.get("saved_tensor_with_no_vc_check")))


class _Saved:
    """Stands for a forward that is there already: it hands out what that one saves."""

    def __init__(self, saved: Sequence[fx.Node]) -> None:
        self.saved = {node.name: node for node in saved}
        self.runs: dict[int, int] = {}

    def stored(self, key: _Key) -> fx.Node:
        name = _key_name(key)
        if name not in self.saved:
            raise ScheduleError(f"the forward has not saved {name}")
        return self.saved[name]


class _Generous(_Saved):
    """Stands for a forward that saves whatever it is asked for."""

    def stored(self, key: _Key) -> fx.Node:
        return self.saved.setdefault(_key_name(key), _meta_node(key))


def _key_name(key: _Key) -> str:
    return key.name if isinstance(key, fx.Node) else f"{key[0]}_of_{key[1].name}"


class _Writer:
    """Writes one of the two graphs: binds nodes of the joint graph to their newest copies.

    Attributes:
        asked: for the backward, what it took from the forward -> its placeholder.
        also_save: for the forward, names of what is saved although no schedule says so.
    """

    def __init__(self, formulation: Formulation, forward: _Writer | _Saved | None = None) -> None:
        self.formulation = formulation
        self.capture: Capture = formulation.capture
        self.forward = forward
        self.graph = fx.Graph()
        self.asked: dict[_Key, fx.Node] = {}
        self.also_save: frozenset[str] = frozenset()
        self.bound: dict[_Key, fx.Node] = {}
        self.viewed: dict[fx.Node, tuple[fx.Node, tuple[int, ...]]] = {}
        self.copies: dict[int, int] = {}  # storage -> number of the copy that names mean
        self.runs: dict[int, int] = dict(forward.runs) if forward is not None else {}
        self.overwritten: dict[int, str] = {}  # storage -> the run that is written over it
        self.proofs: dict[str, str] = {}  # run -> why it may write in place
        # A kernel may make a dense result where the trace foresees its input's permuted layout, as
        # that of batch-norm does; what is computed from it follows.
        self.permuted = any(
            t.layout is torch.strided and not t.is_contiguous()
            for node in self.capture.operations
            for t in tensors(node)
        )

    # -------------------------------------------------------------- placeholders

    def placeholder(self, key: _Key, name: str, meta: dict[str, Any]) -> fx.Node:
        """Return the placeholder bound to a key, made where there is none yet."""
        if key not in self.bound:
            anchor = next(iter(self.graph.nodes), self.graph._root)
            with self.graph.inserting_before(anchor):
                placeholder = self.graph.placeholder(name)
            placeholder.meta = dict(meta)
            self.bound[key] = placeholder
        return self.bound[key]

    def order(self, placeholders: list[fx.Node]) -> None:
        """Put the placeholders in front, in this order: the one arguments are passed in."""
        for placeholder in reversed(placeholders):
            next(iter(self.graph.nodes)).prepend(placeholder)

    # -------------------------------------------------------------- runs

    def run_all(self, steps: Sequence[Step]) -> None:
        """Write the runs among the steps of a schedule."""
        for step in steps:
            if isinstance(step, Compute):
                self.run(step.operation, step.over)

    def run(self, index: int, over: int | None = None) -> None:
        """Write one run of an operation of the problem, where asked over a storage."""
        origin = self.formulation.origins[index]
        if origin.node is None:
            return
        if origin.role is Role.STATE:
            self._state(origin.node)
        elif origin.role is Role.OLD_VALUE:
            self._old_value(origin.node)
        else:
            self._node(origin.node, index, over)

    def _node(self, node: fx.Node, index: int, over: int | None) -> None:
        operation = self.formulation.problem.operations[index]
        # A forward operation has run once before any backward begins.
        before = isinstance(self.forward, _Saved) and index < self.formulation.problem.barrier
        count = self.runs.get(index, int(before))
        self.runs[index] = count + 1
        state: _Key = ("state", node)
        if state not in self.bound and _key_name(state) in self.also_save:
            self._state(node)
        target: Any = node.target
        args: Any = node.args
        kwargs: Any = node.kwargs
        made = operation.outputs
        if count:
            target, args, kwargs = again(node)
            made = operation.recompute_outputs
        read = self._as_it_is if target in BATCH_NORM_BACKWARD else self.value
        args = fx.node.map_arg(args, read)
        kwargs = fx.node.map_arg(kwargs, self.value)
        if count and node in self.formulation.states:
            args = (self.stored(state), tensors(node)[0].device, target, *args)
            target = replay
        if over is not None:
            target, argument, keyword = in_place_call(self.capture, node, over)
            kwargs = {**kwargs, keyword: self.value(argument)} if keyword else kwargs
            proof = why_in_place(self.formulation.problem, index, over)
            self.proofs[_name(node, count)] = proof
            self.overwritten[over] = node.name
        copy = self.graph.create_node(
            "call_function", target, args, kwargs, name=_name(node, count)
        )
        copy.meta = {**node.meta, "autockpt": {"origin": node.name, "run": count + 1}}
        if self.forward is not None:
            copy.meta["autograd_backward"] = True
        self.bound[node] = copy
        for storage in made:
            self.copies[storage] = self.copies.get(storage, 0) + 1
            self.overwritten.pop(storage, None)
        if not isinstance(node.meta.get("val"), torch.Tensor):
            self._pick(node, copy, count, set(made))

    def _pick(self, node: fx.Node, copy: fx.Node, count: int, made: set[int]) -> None:
        """Take the outputs out of the tuple at once: the tuple holds all of them."""
        for user in sorted(node.users, key=lambda u: _torch.getitem_index(u) or 0):
            lives_in = self.capture.lives_in.get(user)
            if _torch.getitem_index(user) is None or lives_in is None:
                continue
            if count and not made.issuperset(s for s in lives_in if s >= 0):
                continue  # a further run leaves this output out
            pick = self.graph.create_node(
                "call_function", user.target, (copy, user.args[1]), name=_name(user, count)
            )
            pick.meta = dict(user.meta)
            self.bound[user] = pick

    def _state(self, node: fx.Node) -> None:
        state = self.graph.create_node(
            "call_function",
            generator_state,
            (tensors(node)[0].device,),
            name=f"state_of_{node.name}",
        )
        with _torch.fake_mode_of(self.capture.joint.module):
            size = state_bytes(tensors(node)[0].device)
            state.meta["val"] = torch.empty(size, dtype=torch.uint8)
        self.bound["state", node] = state

    def _old_value(self, primal: fx.Node) -> fx.Node:
        copy = self.graph.create_node(
            "call_function",
            torch.ops.aten.clone.default,
            (self.bound[primal],),
            name=f"old_value_of_{primal.name}",
        )
        with _torch.fake_mode_of(self.capture.joint.module):
            copy.meta["val"] = primal.meta["val"].clone()
        self.bound["old_value", primal] = copy
        return copy

    def _number_to_save(self, node: fx.Node) -> fx.Node:
        """Return a number as a tensor: autograd saves nothing else."""
        dtype = _number_type(node)
        copy = self.graph.create_node(
            "call_function",
            aten.scalar_tensor.default,
            (self.bound[node],),
            {"dtype": dtype},
            name=_key_name(("number", node)),
        )
        with _torch.fake_mode_of(self.capture.joint.module):
            copy.meta["val"] = torch.empty((), dtype=dtype)
        self.bound["number", node] = copy
        return copy

    def _saved_number(self, node: fx.Node) -> fx.Node:
        saved = self.stored(("number", node))
        number = self.graph.create_node(
            "call_function", aten._local_scalar_dense.default, (saved,), name=node.name
        )
        number.meta = dict(node.meta)
        self.bound[node] = number
        return number

    def write(self, written: Sequence[fx.Node], values: Sequence[fx.Node]) -> None:
        """Write new values into inputs.

        Eager's batch-norm writes its statistics behind autograd's back: a backward that waits, as
        that of a forward in ``eval()``, reads the new ones there.
        """
        pairs = list(zip(written, values, strict=True))
        self._copy(aten._foreach_copy_.default, [p for p in pairs if not _is_statistic(p[1])])
        self._copy(_torch.copy_unnoticed, [p for p in pairs if _is_statistic(p[1])])

    def _copy(self, by: Callable[..., Any], pairs: list[tuple[fx.Node, fx.Node]]) -> None:
        if pairs:
            there = [self.bound[primal] for primal, _ in pairs]
            self.graph.create_node(
                "call_function", by, (there, [self.value(value) for _, value in pairs])
            )

    # -------------------------------------------------------------- values

    def value(self, node: fx.Node) -> fx.Node:
        """Return what the joint graph's node means here and now.

        Raises:
            ScheduleError: it has been overwritten.
        """
        self._check_there(node)
        if node.op == "get_attr":
            if node not in self.bound:
                self.bound[node] = self.graph.create_node("get_attr", node.target, name=node.name)
                self.bound[node].meta = dict(node.meta)
            return self.bound[node]
        if self.forward is not None and node in self.formulation.old_values:
            return self.stored(("old_value", node))
        if self._looks_at_memory(node):
            return self._view(node)
        return self.stored(node)

    def _as_it_is(self, node: fx.Node) -> fx.Node:
        """Return an input that others may have written to by now; of the rest, :meth:`value`.

        So eager's backward of a batch-norm in ``eval()`` reads the running statistics.
        """
        given = node in self.capture.joint.primals and node not in self.capture.stale
        return self.stored(node) if given else self.value(node)

    def _check_there(self, node: fx.Node) -> None:
        for storage in self.capture.lives_in.get(node, ()):
            if storage in self.overwritten:
                by = self.overwritten[storage]
                raise ScheduleError(f"{node.name} is read after {by} was written over it")

    def stored(self, key: _Key) -> fx.Node:
        """Return a value bound here, or ask the forward for it."""
        if isinstance(key, fx.Node):
            self._check_there(key)
        if key in self.bound:
            return self.bound[key]
        node = _meta_node(key)
        if isinstance(key, fx.Node) and _number_type(key) and self.forward is not None:
            return self._saved_number(key)
        if self.forward is None and key == ("number", node):
            return self._number_to_save(node)
        if self.forward is None and key == ("old_value", node):
            return self._old_value(node)
        if node in self.capture.joint.tangents or node in self.capture.joint.backward_seeds:
            return self.placeholder(key, node.name, node.meta)
        if self.forward is None:
            raise ScheduleError(f"{node.name} is read before it is computed")
        source = self.forward.stored(key)
        self.asked[key] = self.placeholder(key, source.name, source.meta)
        return self.asked[key]

    def _looks_at_memory(self, node: fx.Node) -> bool:
        """A view; also a pick from a view's tuple. Picks from operations are bound as they run."""
        if node.op != "call_function" or not self.capture.is_view(node):
            return False
        if _torch.getitem_index(node) is None:
            return True
        producer = node.all_input_nodes[0]
        return producer.op == "call_function" and self.capture.is_view(producer)

    def _view(self, node: fx.Node) -> fx.Node:
        version = tuple(self.copies.get(s, 0) for s in self.capture.lives_in[node])
        known = self.viewed.get(node)
        if known is not None and known[1] == version:
            return known[0]
        args = fx.node.map_arg(node.args, self.value)
        kwargs = fx.node.map_arg(node.kwargs, self.value)
        name = _name(node, 0 if known is None else max(version, default=1))
        target: Any = node.target
        if target is aten.view.default and self.permuted:
            target = aten.reshape.default  # a view where that is possible, else a copy
        view = self.graph.create_node("call_function", target, args, kwargs, name=name)
        view.meta = dict(node.meta)
        self.viewed[node] = (view, version)
        return view

    def output(self, values: list[Any], descriptors: list[Any]) -> fx.GraphModule:
        """Close the graph and return it as a module."""
        node = self.graph.output(tuple(values))
        node.meta["desc"] = descriptors
        node.meta["output_stack_traces"] = [
            v.meta.get("stack_trace") if isinstance(v, fx.Node) else None for v in values
        ]
        self.graph.lint()
        if self.proofs:
            self.graph.on_generate_code(lambda _: partial(_commented, self.proofs))
        return fx.GraphModule(self.capture.joint.module, self.graph)


def _number_type(node: fx.Node) -> torch.dtype | None:
    """The type of a tensor for the node's value; None where that is no number of Python's."""
    value = node.meta.get("val")
    return next((kind for number, kind in _NUMBERS.items() if isinstance(value, number)), None)


def _is_statistic(value: fx.Node) -> bool:
    """Whether it is a new statistic of batch-norm's."""
    picked = _torch.getitem_index(value) is not None
    return picked and value.all_input_nodes[0].target in _BATCH_NORMS


def _commented(proofs: Mapping[str, str], body: list[str]) -> list[str]:
    """The lines of a graph's code with a comment before each run that writes in place."""
    lines: list[str] = []
    for line in body:
        name = line.partition(" = ")[0].partition(":")[0].strip()
        if name in proofs:
            lines.append(f"# in place {proofs[name]}\n")
        lines.append(line)
    return lines


def _name(node: fx.Node, count: int) -> str:
    return f"{node.name}_again_{count}" if count else node.name
