"""The module: a model whose training forwards run under a plan, and otherwise is as it was.

``optimize`` works as ``torch.nn.Module.compile`` does: it sets the callable behind the model's
call. Class, parameters, keys and hooks stay as they are; what is added hangs on one handle,
``model.autockpt``.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.optim import Optimizer

from autockpt import _torch
from autockpt.accumulate import Accumulating
from autockpt.arena import Memory, in_arena
from autockpt.backwards import guard_backward
from autockpt.capture import Capture, capture, read_joint, traced, training
from autockpt.choose import Choice, add_time_s, choose
from autockpt.device import Device, device_of, placement
from autockpt.eager_errors import raise_as_eager
from autockpt.formulate import Around
from autockpt.given import OF_A_LARGER
from autockpt.graphs import Graph, Known, graph_key, guessed, saved_placeholders, shape_free_key
from autockpt.losses import Weight
from autockpt.out_of_memory import OutOfMemory
from autockpt.planning import (
    Made,
    Options,
    budget_of,
    make_plan,
    make_smaller,
    no_limit,
    options_of,
    smallest,
)
from autockpt.resident import OptimizerMemory, distinct_bytes, optimizer_memory, resident_bytes
from autockpt.rewrite import rewrite
from autockpt.roofline import Modelled
from autockpt.several import Several
from autockpt.split import Batch, Split, cut, shares
from autockpt.step import AUTO, Stepper, check_accumulate
from autockpt.unforeseen import lacking
from autockpt_solvers.errors import (
    AutockptError,
    CaptureError,
    InfeasibleBudget,
    InputError,
    PlanMismatch,
)
from autockpt_solvers.plan import Plan

__all__ = ["Handle", "as_tuple", "optimize", "require_trainable", "restore"]

_STEPS = ("step", "micro_step", "flush")
_SHORT_CUTS = ("plan", *_STEPS)
_LOG = logging.getLogger("autockpt")


def optimize(
    model: nn.Module,
    budget: int | str | None,
    *,
    example_inputs: tuple[Any, ...] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    optimizer: Optimizer | None = None,
    loss_fn: Callable[..., Any] | None = None,
    accumulate: int | str = 1,
    solver: str = "auto",
    time_limit: float = 60.0,
    backend: str = "eager",
    keep: Sequence[str] = (),
    recompute: Sequence[str] = (),
    inplace: bool = True,
    arena: bool | None = None,
    fullgraph: bool = False,
    plan: str | Path | Plan | None = None,
    progress: Callable[[str], None] | None = None,
) -> nn.Module:
    """Fit the training of ``model`` into a memory budget and return the same model.

    The model is planned at its first training forward, or now where ``example_inputs`` are given,
    and again when a forward's inputs have new shapes. Its forwards in ``eval()`` or under
    ``no_grad`` run as before.

    Args:
        model: the model to train; it stays the same object, of the same class.
        budget: bound on the peak of bytes allocated on the device during a training step:
            parameters, buffers, inputs, activations, temporaries, gradients, and the optimizer's
            state and step where ``optimizer`` is given. An int in bytes, ``"40GB"`` (10^9),
            ``"40GiB"`` (2^30), ``"80%"`` of the device's memory, or None for no limit.
        example_inputs: positional arguments of a forward, to plan now.
        example_kwargs: keyword arguments of a forward, to plan now.
        optimizer: the optimizer of the training loop: what it allocates is counted, and
            ``model.step`` steps it.
        loss_fn: for ``model.step``: called with the model's output and the ``target=`` of the step
            (with the output alone where there is none), returns the mean loss. None: the model
            returns its loss, as a scalar, as ``.loss`` or as ``["loss"]``.
        accumulate: for ``model.step``: the number of micro-batches of an optimizer step, or
            ``"auto"`` for the size that trains fastest within the budget. Where it is not 1,
            ``example_inputs`` are those of a ``step``: the whole batch.
        solver: ``"auto"`` or the name of a method.
        time_limit: seconds to search for a schedule.
        backend: what runs the operations; ``"eager"`` is the one there is.
        keep: patterns of module paths (``"blocks.*.attn"``) whose results are not recomputed.
        recompute: patterns of module paths whose inner results are not kept.
        inplace: whether an operation may be written over a tensor that dies there, where that is
            proved to change nothing.
        arena: whether the step's tensors have fixed places in one block of memory that is allocated
            once, as far as their operators can write there; None is False. A model of several
            graphs has none.
        fullgraph: a model that does not capture as one graph is an error; else it runs as several
            graphs under the one budget, planned when a first step has shown them.
        plan: a plan, or the file of one, to use instead of searching.
        progress: called with a line of text now and then while planning.

    Raises:
        BudgetError: the budget is none of the accepted forms.
        InfeasibleBudget: no schedule fits (at once with ``example_inputs``, else from the first
            training forward); it says which budget is met.
        CaptureError: the forward cannot be captured as one graph.
        InputError: the inputs do not fit the forward.
        PlanMismatch: ``plan`` was made for another model or other shapes.
        PinError: a pattern matches nothing.
    """
    require_trainable(model)
    device_of(placement(model))
    if backend != "eager":
        raise InputError(f"backend={backend!r} is unknown; there is 'eager'.")
    if loss_fn is not None and not callable(loss_fn):
        raise InputError(f"loss_fn is called with output and target; {loss_fn!r} cannot be.")
    accumulate = check_accumulate(accumulate)
    if accumulate == AUTO and plan is not None:
        raise InputError("accumulate='auto' makes the plan: with plan=, give a number.")
    options = options_of(
        budget,
        solver=solver,
        time_limit=time_limit,
        keep=keep,
        recompute=recompute,
        given=plan,
        fullgraph=fullgraph,
        inplace=inplace,
        arena=bool(arena),
    )
    handle = Handle(model, options, optimizer, progress, loss_fn=loss_fn, accumulate=accumulate)
    if example_inputs is not None or example_kwargs is not None:
        handle.plan_ahead(as_tuple(example_inputs), dict(example_kwargs or {}))
    restore(model)
    handle.attach()
    return model


def restore(model: nn.Module) -> nn.Module:
    """Undo :func:`optimize`: the model runs as it did before. Returns the model."""
    handle = vars(model).get("autockpt")
    if isinstance(handle, Handle):
        handle.detach()
    return model


class Handle:
    """What ``optimize`` adds to a model; it stands at ``model.autockpt``.

    It is called in the place of the model's forward. A copy or a pickle of the model takes its
    handle along, with the options and without the compiled graphs: it plans again.

    Attributes:
        plan: the plan of the graph that ran or was planned last; None before.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        optimizer: Optimizer | None,
        progress: Callable[[str], None] | None = None,
        device: Modelled | None = None,
        *,
        loss_fn: Callable[..., Any] | None = None,
        accumulate: int | str = 1,
    ) -> None:
        self.model = model
        self.options = options
        self.optimizer = optimizer
        self.progress = progress
        self.modelled = device
        self.plan: Plan | None = None
        self._steps_with(loss_fn, accumulate)
        self._forget()

    def _steps_with(self, loss_fn: Callable[..., Any] | None, accumulate: int | str) -> None:
        self._stepper = Stepper(
            self.model, self.optimizer, loss_fn, accumulate, self._micro_batch, self._choose
        )
        self._accumulates = False  # whether a backward adds to the gradients in its graph
        self._beside: Any = None  # what a step holds beside the model's inputs
        self._choices: dict[Any, Choice] = {}  # by the batch's shapes
        self._choice: Choice | None = None

    def _forget(self) -> None:
        self._compiled: Callable[..., Any] | None = None
        self._several: Several | None = None
        self._known: dict[str, Known] = {}
        self._like: dict[str, dict[str, None]] = {}  # graphs that differ in their sizes alone
        self._graphs: list[Graph] = []
        self._inputs: Any = None
        self._started = 0.0
        self._warned = False
        self._counters: frozenset[str] = frozenset()
        self._counts = True
        self._begun, self._captures = False, 0
        self._unguarded: Callable[[], list[Any]] = list
        self._taken_for_granted: list[Any] = []
        self._memory: Memory | None = None

    # -------------------------------------------------------------- on and off the model

    def attach(self) -> None:
        """Set this handle behind the model's call."""
        self.model.__dict__["_compiled_call_impl"] = self
        self.model.__dict__["autockpt"] = self
        self._show(self.plan)
        for name in _STEPS:
            if self._may_show(name):
                self.model.__dict__[name] = getattr(self, name)

    def detach(self) -> None:
        """Take this handle off the model."""
        self._stepper.reset()
        for graph in self._graphs:
            graph.stop_watching()
        if self._several is not None:
            self._several.end()
        if self._memory is not None:
            self._memory.release()
        for name in ("_compiled_call_impl", "autockpt", *_SHORT_CUTS):
            if name in _SHORT_CUTS and not self._may_show(name):
                continue
            self.model.__dict__.pop(name, None)
        self._forget()

    def _may_show(self, name: str) -> bool:
        """A short cut never hides what the model's class or the user defines by that name."""
        taken = hasattr(type(self.model), name) or name in self.model._modules
        taken = taken or name in self.model._parameters or name in self.model._buffers
        value = self.model.__dict__.get(name)
        owner = getattr(value, "__self__", None)
        return not taken and (value is None or isinstance(value, Plan) or isinstance(owner, Handle))

    def _explained(self, plan: Plan) -> Plan:
        """The plan with what it is one of, and the choice of the micro-batches it is for."""
        if self._graphs:
            captures = f"{len(self._graphs)} of at most {_torch.SIGNATURES}"
            plan = replace(plan, origin={**plan.origin, "captures": captures})
        if self._choice is None:
            return plan
        sizes = self._choice.sizes
        said = {
            "micro-batches": f"{len(sizes)} of at most {sizes[0]} samples",
            "compared": self._choice.why,
        }
        return replace(plan, origin={**plan.origin, **said})

    def _show(self, plan: Plan | None) -> None:
        plan = None if plan is None else self._explained(plan)
        self.plan = plan
        if self._may_show("plan"):
            self.model.__dict__["plan"] = plan

    def __getstate__(self) -> dict[str, Any]:
        # Not the optimizer, which is for this model's parameters, nor the loss that goes with it.
        accumulate = self._stepper.accumulate
        return {
            "model": self.model,
            "options": self.options,
            "plan": self.plan,
            "accumulate": accumulate,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        # The model is being rebuilt around this handle; nn.Module drops its compiled callable
        # when it is pickled or copied.
        self.model = state["model"]
        self.options = state["options"]
        self.optimizer = None
        self.progress = None
        self.modelled = None
        self.plan = state["plan"]
        self._steps_with(None, state["accumulate"])
        self._forget()
        self.model.__dict__["_compiled_call_impl"] = self

    # -------------------------------------------------------------- calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward: under its plan where it trains, plainly elsewhere."""
        model = self.model
        plain = not (model.training and torch.is_grad_enabled())
        if not plain and torch.compiler.is_compiling():
            plain = _traced_by_others(type(model).__name__)
        if plain or _torch.runs_elsewhere() or self._awaits_shapes():
            return model._call_impl(*args, **kwargs)
        _torch.leave_what_is_left_behind()
        self._trace_anew_where_code_has_changed()
        if self._several is not None:
            return self._run_several(args, kwargs)
        for graph in self._graphs:
            graph.stop_watching()
        begun = bool(self._graphs)
        failure = ""
        try:
            self._inputs = (args, kwargs)
            self._revise()
            output = self._traced(args, kwargs)
        except OutOfMemory:
            raise  # of the step, not of its planning
        except AutockptError as error:
            if not begun:
                raise_as_eager(model, args, kwargs, error)
                if not (isinstance(error, CaptureError) and self._may_divide()):
                    # Nothing fails silently, and no failure leaves the model changed.
                    self.detach()
                    raise
            failure = str(error)
        finally:
            self._inputs = None
        # Outside the handler: what fails from here on has nothing to do with that error.
        if failure and not begun:
            self._accumulates = False  # gradients of several graphs are autograd's to add
            self._several = Several(model, self.options, device_of(placement(model)), self._around)
            self._several.begin(failure)
            return self._run_several(args, kwargs)
        if failure:
            # A run that has begun is not broken off: either eager has an error of its own for
            # these inputs, or it trains on them, without a plan.
            output = model._call_impl(*args, **kwargs)
            self._warn("these inputs run without a plan, and without a budget: %s", failure)
            return output
        for node in _torch.compiled_nodes(output):
            _torch.keep_missing_gradients(node)
            guard_backward(model, node, [one for graph in self._graphs for one in graph.read])
            for graph in self._graphs:
                graph.watch_loss(node)
        for graph in self._graphs:
            graph.read = []
        return output

    def _awaits_shapes(self) -> bool:
        """Whether this forward is the one in which parameters get their shapes."""
        return not self._begun and _torch.has_lazy_parameters(self.model)

    def _trace_anew_where_code_has_changed(self) -> None:
        if self._begun and self._unguarded() != self._taken_for_granted:
            self._renew()
            self._graphs = []
            if self._several is not None:
                self._several.forget()
        captures = len(self._graphs) + (self._several.captures if self._several else 0)
        if not self._begun or captures != self._captures:  # the model may have new modules
            self._unguarded = _torch.unguarded(self.model)
        self._begun, self._captures = True, captures
        self._taken_for_granted = self._unguarded()

    def _traced(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the compiled forward, and compile it first where that is to be done.

        A forward that counts its calls in Python would be traced anew at each of them. What a
        forward has changed is taken for such a counter, and traced as a number that varies;
        where that cannot be planned, it is traced for each value after all.
        """
        traces = len(self._graphs)
        before = _torch.counters_of(self.model) if self._compiled is None else {}
        if self._compiled is None:
            self._compiled = _torch.compile_forward(self.model, self._partition, self._counters)
        self._started = time.perf_counter()
        try:
            output = traced(self.model, self._compiled, args, kwargs)
        except OutOfMemory:
            raise
        except AutockptError:
            if not self._counters:
                raise
            self._counters, self._counts, self._compiled = frozenset(), False, None
            del self._graphs[traces:]
            return self._traced(args, kwargs)
        after = _torch.counters_of(self.model) if before and self._counts else {}
        changed = {name for name, value in after.items() if before.get(name, value) != value}
        if changed - self._counters:
            self._counters |= changed
            self._renew()
        return output

    def _renew(self) -> None:
        """Have the forward compiled again; what is known of each graph spares the rest."""
        for graph in self._graphs:
            self._known.setdefault(graph.key, graph.known())
        self._compiled = None

    def _may_divide(self) -> bool:
        """Whether a model that cannot be captured whole may run as several graphs."""
        options = self.options
        return not options.fullgraph and options.given is None and not options.pins

    def _run_several(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._several is not None
        self._inputs = (args, kwargs)
        try:
            output = self._several(args, kwargs)
        except InfeasibleBudget:
            self.detach()
            raise
        finally:
            self._inputs = None
        self._show(self._several.plan)
        return output

    def plan_ahead(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Plan now, where that is possible: several graphs show themselves only in a step."""
        try:
            self.plan_step_now(args, kwargs)
        except CaptureError as error:
            if not self._may_divide():
                raise
            _LOG.info("planned when the first step has run: %s", error)

    def plan_now(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Plan:
        """Plan a training forward with these inputs, without running the model."""

        def use(joint: _torch.JointGraph) -> Plan:
            key = graph_key(joint)
            captured, known, made = self._planned(joint, key)
            self._known[key] = replace(known, absent=captured.absent, plan=made.plan)
            return made.plan

        with self._asked(self.options, args, kwargs):
            found: Plan = capture(self.model, args, kwargs, use)
        self.plan = found = self._explained(found)
        return found

    @contextlib.contextmanager
    def _asked(
        self, options: Options, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Iterator[None]:
        """Plan for these options and these inputs of a training forward in this context."""
        self._inputs = (args, kwargs)
        self._started = time.perf_counter()
        asked, self.options = self.options, options
        try:
            with training(self.model):
                yield
        finally:
            self._inputs = None
            self.options = asked

    # -------------------------------------------------------------- steps

    def step(
        self, *args: Any, target: Any = None, weight: Weight = None, **kwargs: Any
    ) -> torch.Tensor:
        """Take one optimizer step on a whole batch, and return its mean loss, detached.

        The batch is split into ``accumulate`` micro-batches, as equal as they can be; their
        gradients are weighted so that their sum is the gradient of the full batch's mean loss.
        Then the optimizer steps and the gradients are set to None. When it raises, no gradient of
        the step is left and the optimizer has not stepped.

        Args:
            *args: the model's positional arguments, for the whole batch.
            target: the second argument of ``loss_fn``, split with the batch; without a
                ``loss_fn`` an argument of the model.
            weight: how much of the mean each micro-batch is. None: by its samples, for a loss
                that is a mean over samples. A tensor with one weight per sample, or per token
                (a mask of labels that count), summed over each micro-batch. A sequence of one
                number per micro-batch. A function of a micro-batch, called as ``step`` was, that
                returns a number or a tensor to sum. A micro-batch of weight 0 adds nothing.
            **kwargs: the model's keyword arguments, and these options (an argument of the model
                with such a name is passed by position):

                - ``scaler``: a ``torch.amp.GradScaler``; updated once.
                - ``max_grad_norm``: the norm the whole gradient is clipped to.
                - ``batch_dim``: the dimension of the samples, 0 where not given. The first tensor
                  among the arguments that has it says how many there are; every tensor of that
                  size there is split, all else goes to each micro-batch as it is.
                - ``split``: the same said for single arguments, by name or position:
                  ``split={"mask": None, "boxes": "items", "x": 1}`` (not split; a list with an
                  item per sample; along dimension 1), or ``split=["x"]`` for only these.
                - ``through``: what to call in the model's place: a wrapper around it. A
                  ``DistributedDataParallel`` around the model is found by itself.

        Raises:
            StepError: there is no optimizer, or one that needs a closure; gradients are switched
                off; a window of micro-steps is open.
            InputError: the batch cannot be split, the loss is no loss, or a weight no weight.
            InfeasibleBudget, CaptureError: as a first training forward, see :func:`optimize`.
        """
        loss = self._stepper.step(*args, target=target, weight=weight, **kwargs)
        if self._graphs:
            # Micro-batches of two sizes have two plans; the step's peak is that of one of them.
            self._show(max((g.made.plan for g in self._graphs), key=lambda plan: plan.peak_bytes))
        return loss

    def micro_step(
        self, *args: Any, target: Any = None, weight: Weight = None, **kwargs: Any
    ) -> torch.Tensor:
        """Take one loader batch, and return its mean loss, detached.

        The optimizer steps at every ``accumulate``-th call, with the gradient of the mean over all
        the window's samples (or weights). When a forward or a loss raises, the window is as it was
        before the call. When a backward or the optimizer raises, the window is lost: ``reset()``
        drops it.

        Args: as :meth:`step`; ``weight`` may also be a number, the number of samples or tokens
            that the loss is a mean over. ``scaler``, ``max_grad_norm`` and ``through`` are the
            same for all micro-steps of a window.

        Raises:
            StepError: as :meth:`step`; a window that failed has not been reset; ``accumulate``
                is ``"auto"``.
            InputError, InfeasibleBudget, CaptureError: as :meth:`step`.
        """
        return self._stepper.micro_step(*args, target=target, weight=weight, **kwargs)

    def flush(self) -> torch.Tensor | None:
        """Step on the micro-steps since the last optimizer step, and return their mean loss.

        The gradient is that of the mean over what has been taken; None where there is nothing.
        Under ``DistributedDataParallel`` every rank has to call it.

        Raises:
            StepError: the window has failed.
        """
        return self._stepper.flush()

    def reset(self) -> None:
        """Drop the open window: gradients are again what they were before its first micro-step.

        Where the optimizer's own step has failed they are None: it had been given their sum.
        """
        self._stepper.reset()

    @property
    def open_micro_steps(self) -> int:
        """The number of micro-steps since the last optimizer step."""
        window = self._stepper.window
        return 0 if window is None else window.done

    @contextlib.contextmanager
    def _micro_batch(self, accumulates: bool, beside: Any) -> Iterator[None]:
        """Run a micro-batch of a step in this context."""
        self._accumulates, self._beside = accumulates and self._several is None, beside
        try:
            yield
        finally:
            self._accumulates, self._beside = False, None

    def plan_step_now(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Plan:
        """Plan a step with these inputs, without running the model: its largest micro-batch."""
        batch = Batch(args, kwargs)
        parts, _ = self._stepper.parts(batch, Split())
        with self._micro_batch(self._stepper.fuses(len(parts)), None):
            return self.plan_now(parts[0].args, parts[0].kwargs)

    def _choose(self, batch: Batch, split: Split, samples: int) -> Sequence[int]:
        """The sizes of a batch's micro-batches that train it fastest."""
        shapes = [
            (tuple(t.shape), t.dtype)
            for t in _torch.tensor_leaves((batch.args, dict(batch.kwargs), batch.target))
        ]
        key = (samples, split.batch_dim, str(shapes))
        if key not in self._choices:
            self._choices[key] = self._chosen(batch, split, samples)
        self._choice = self._choices[key]
        return self._choice.sizes

    def _chosen(self, batch: Batch, split: Split, samples: int) -> Choice:
        captured: dict[int, tuple[str, Capture]] = {}  # by the number of micro-batches
        known: dict[int, Known] = {}

        def planned(parts: int, options: Options) -> Plan:
            part = next(cut(self.model.forward, batch, split, shares(samples, parts)))
            with (
                self._micro_batch(self._stepper.fuses(parts), batch.target),
                self._asked(options, part.args, part.kwargs),
            ):
                if parts not in captured:
                    captured[parts] = capture(self.model, part.args, part.kwargs, _read)
                found = captured[parts][1]
                known[parts], made = self._guessed(found)
                known[parts] = replace(known[parts], absent=found.absent, plan=made.plan)
                return made.plan

        def unlimited(size: int, parts: int) -> Plan:
            return planned(parts, no_limit(self.options))

        def limited(size: int, parts: int, seconds: float) -> Plan:
            return planned(parts, replace(self.options, time_limit_s=seconds))

        device = self._device()
        gradients = distinct_bytes([p for p in self.model.parameters() if p.requires_grad], device)
        try:
            choice = choose(
                samples,
                unlimited,
                limited,
                budget_of(self.options, device),
                add_time_s(gradients, device),
                self.options.time_limit_s,
            )
        except AutockptError as error:
            if not self._graphs:
                self.detach()
            if isinstance(error, CaptureError):
                raise CaptureError(
                    "accumulate='auto' compares plans before a step has run, which needs a model "
                    f"that is captured as one graph. Give a number of micro-batches. {error}"
                ) from error
            raise
        parts = len(choice.sizes)
        self._known[captured[parts][0]] = replace(known[parts], plan=choice.plan)
        return choice

    # -------------------------------------------------------------- planning

    def _partition(
        self, joint: _torch.JointGraph
    ) -> tuple[fx.GraphModule, fx.GraphModule, _torch.Watch]:
        key = graph_key(joint)
        captured, known, made = self._from_a_larger(joint, key) or self._planned(joint, key)
        self._like.setdefault(shape_free_key(joint), {})[key] = None
        started = time.perf_counter()
        known, made, forward, backward = self._written(joint, captured, known, made)
        lent, origin = None, made.plan.origin
        if self.options.arena:
            plan = made.plan
            self._memory = self._memory or Memory(placement(self.model))
            parts = (forward, backward, made.formulation, plan.schedule)
            lent, said = in_arena(*parts, self._memory, plan.budget_bytes)
            origin = {**origin, "arena": said}
        stages = {**made.plan.stages_s, "rewrite": time.perf_counter() - started}
        made = Made(replace(made.plan, stages_s=stages, origin=origin), made.formulation)
        _LOG.info(
            "captured %d of at most %d kinds of input; planned in %.1f s, the plan %s",
            len(self._graphs) + 1,
            _torch.SIGNATURES,
            sum(stages.values()),
            made.plan.origin.get("plan", "solved"),
        )
        graph = Graph(key, joint, captured, known, made, self._device())
        graph.saved = saved_placeholders(backward, captured)
        self._graphs.append(graph)
        self._show(made.plan)
        watch = Accumulating(graph, backward, captured, self._asks_to_add())
        if lent is None:
            return forward, backward, watch
        lent.inner = watch
        return forward, backward, lent

    def _asks_to_add(self) -> Callable[[], bool]:
        """Whether a step asks for gradients to be added in the graph: for compiled code, which
        torch keeps as long as there is this handle, so that it must not keep the handle.
        """
        here = weakref.ref(self)

        def asked() -> bool:
            there = here()
            return there is not None and there._accumulates

        return asked

    def _written(
        self, joint: _torch.JointGraph, captured: Capture, known: Known, made: Made
    ) -> tuple[Known, Made, fx.GraphModule, fx.GraphModule]:
        """Write a plan's graphs; where the plan must change for it, return the one written.

        Should the backward start from other outputs than assumed, it must be possible. What is
        saved for that alone takes memory as well, so the plan has to know of it.
        """
        while True:
            in_case = known.around.in_case
            forward, backward = rewrite(made.formulation, made.plan.schedule, in_case)
            if not captured.absent:  # any other backward needs no more than this one
                return known, made, forward, backward
            lacks = lacking(joint, saved_placeholders(backward, captured))
            if set(lacks) <= set(in_case):
                return known, made, forward, backward
            around = replace(known.around, in_case=tuple(sorted({*in_case, *lacks})))
            known = replace(known, around=around)
            same = self._unchanged(captured, around, made.plan)
            if same is None or not self._within_budget(same.plan):
                same = self._settled(captured, around)
            made = same

    def _planned(self, joint: _torch.JointGraph, key: str) -> tuple[Capture, Known, Made]:
        """Plan a joint graph with what is known of it, or with a guess at what is not."""
        known = self._known.get(key)
        captured = read_joint(joint, known.absent if known is not None else None)
        if known is None:
            known, made = self._guessed(captured)
            return captured, known, made
        again = None
        if known.plan is not None:
            again = self._unchanged(captured, known.around, known.plan)
        return captured, known, again or self._settled(captured, known.around)

    def _from_a_larger(
        self, joint: _torch.JointGraph, key: str
    ) -> tuple[Capture, Known, Made] | None:
        """Plan a graph that differs in its sizes alone from a larger one as that is planned."""
        if key in self._known or self.options.given is not None:
            return None
        known = {graph.key: graph.known() for graph in self._graphs}
        candidates = [
            (found, found.plan)
            for other in self._like.get(shape_free_key(joint), {})
            if (found := known.get(other) or self._known.get(other)) and found.plan is not None
        ]
        for larger, plan in sorted(candidates, key=lambda one: one[1].baseline_peak_bytes):
            captured = read_joint(joint, larger.absent)
            now = self._around()
            around = replace(
                larger.around,  # the loss takes no more than there; the first step shows how much
                resident_bytes=now.resident_bytes,
                gradients_exist=now.gradients_exist,
                accumulates=now.accumulates,
            )
            made = make_smaller(
                captured,
                around,
                self.options,
                self._device(),
                plan,
                capture_s=time.perf_counter() - self._started,
            )
            if made is not None:
                return captured, Known(around, captured.absent), made
        return None

    def _guessed(self, captured: Capture) -> tuple[Known, Made]:
        around = self._around()
        most = guessed(captured, around, self._device().round_up)
        try:
            return Known(most), self._make(captured, most)
        except InfeasibleBudget:
            if not self._within_budget(self._smallest(captured, around).plan):
                if not self._graphs:
                    raise
                return Known(most), self._settled(captured, most)
        # It may fit, depending on what the user's loss allocates. The first step shows it; until
        # then the smallest peak there is.
        return Known(most), self._smallest(captured, most)

    def _make(self, captured: Capture, around: Around, options: Options | None = None) -> Made:
        options = options or self.options
        if options.given is not None and self._graphs:
            # The user's plan is for one input shape; others are planned within its budget.
            budget = options.budget if options.budget is not None else options.given.budget_bytes
            options = replace(options, given=None, budget=budget)
        return make_plan(
            captured,
            around,
            options,
            self._device(),
            model_name=type(self.model).__name__,
            capture_s=time.perf_counter() - self._started,
            progress=self.progress,
        )

    def _device(self) -> Device | Modelled:
        return self.modelled or device_of(placement(self.model))

    def _around(self) -> Around:
        """What is there during the step that is about to run."""
        device = self._device()
        optimizer = OptimizerMemory()
        if self.optimizer is not None:
            optimizer = optimizer_memory(self.optimizer, device)
        inputs = (self._inputs, self._beside)
        resident = resident_bytes(self.model, inputs, device, gradients=not self._accumulates)
        return Around(
            resident_bytes=resident + optimizer.state_bytes,
            gradients_exist=_has_gradients(self.model) and not self._accumulates,
            accumulates=self._accumulates,
            optimizer_bytes=optimizer.step_bytes,
        )

    # -------------------------------------------------------------- after the first step

    def _revise(self) -> None:
        """Plan again what turned out to be other than guessed."""
        gradients_exist = _has_gradients(self.model) and not self._accumulates
        for graph in self._graphs:
            found = graph.found
            if found is None:
                continue
            around, absent = found
            if self._accumulates and not (around.accumulates or around.gradients_exist):
                resident = max(around.resident_bytes, self._around().resident_bytes)
                around = replace(around, accumulates=True, resident_bytes=resident)
            elif gradients_exist and not around.gradients_exist:
                # The loop accumulates: they count among what is there all the time.
                gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
                there = distinct_bytes(gradients, self._device())
                around = replace(
                    around, gradients_exist=True, resident_bytes=around.resident_bytes + there
                )
            elif graph.settled:
                continue
            graph.settled, graph.found = True, (around, absent)
            if self._revised(graph, around, absent):
                self._renew()
                self._graphs = []
                return

    def _revised(self, graph: Graph, around: Around, absent: frozenset[int]) -> bool:
        """Make a graph's plan true to a watched step; return whether its code must change."""
        self._started = time.perf_counter()
        if absent != graph.captured.absent:
            self._known[graph.key] = graph.known_as(replace(around, in_case=()), absent)
            return True
        if graph.guessed_well(around) and self._within_budget(graph.made.plan):
            return False
        same = self._unchanged(graph.captured, around, graph.made.plan)
        made = same
        # A plan of the user's stays; one of ours may be able to do better now.
        better = (
            self.options.given is None
            and graph.made.plan.extra_time_s > 0
            and graph.made.plan.origin.get("plan") != OF_A_LARGER
        )
        if made is None or better or not self._within_budget(made.plan):
            made = self._settled(graph.captured, around)
        if same is not None and made.plan.schedule == same.plan.schedule:
            graph.around, graph.made = around, made
            self._show(made.plan)
            return False
        self._known[graph.key] = replace(graph.known_as(around, absent), plan=made.plan)
        return True

    def _unchanged(self, captured: Capture, around: Around, plan: Plan) -> Made | None:
        """The plan's schedule on the step as it is known now; None where it is not possible."""
        free, device = no_limit(self.options), self._device()
        capture_s = plan.stages_s.get("capture", 0.0)
        made: Made | None
        if plan.origin.get("plan") == OF_A_LARGER:
            made = make_smaller(
                captured, around, free, device, plan, capture_s=capture_s, again=True
            )
            if made is None:
                return None
        else:
            try:
                made = make_plan(
                    captured,
                    around,
                    replace(free, given=plan),
                    device,
                    model_name=type(self.model).__name__,
                    capture_s=capture_s,
                    progress=self.progress,
                )
            except PlanMismatch:  # it relied on what the user turned out not to hold
                return None
        budget_bytes = budget_of(self.options, self._device())
        return Made(replace(made.plan, budget_bytes=budget_bytes), made.formulation)

    def _settled(self, captured: Capture, around: Around) -> Made:
        """Plan a step that is known. Training goes on where the budget turns out too small.

        A budget that is too small whatever the user does around the graph has been refused at the
        first forward. What is left is the user's loss or accumulated gradients, and a run that has
        begun is not broken off for them: the smallest peak there is, and a warning.
        """
        try:
            return self._make(captured, around)
        except InfeasibleBudget as error:
            self._warn(
                "the budget of %s bytes cannot be kept: with what the training loop allocates "
                "around the model (its loss, gradients kept from before) a step needs at least "
                "%s bytes. It runs with that peak.",
                f"{error.budget_bytes:,}",
                f"{error.minimum_bytes:,}",
            )
            return self._smallest(captured, around)

    def _warn(self, message: str, *args: object) -> None:
        """Say it once for a model; again only to who asks for details."""
        _LOG.log(logging.DEBUG if self._warned else logging.WARNING, message, *args)
        self._warned = True

    def _smallest(self, captured: Capture, around: Around) -> Made:
        """The plan with the smallest peak there is."""
        made = self._make(captured, around, no_limit(self.options))
        return smallest(made, budget_of(self.options, self._device()))

    def _within_budget(self, plan: Plan) -> bool:
        budget_bytes = budget_of(self.options, self._device())
        return budget_bytes is None or plan.peak_bytes <= budget_bytes


# ------------------------------------------------------------------ small questions to a model


def _read(joint: _torch.JointGraph) -> tuple[str, Capture]:
    return graph_key(joint), read_joint(joint)


@_torch.while_tracing
def _traced_by_others(name: str) -> bool:
    """Say that a model runs as part of what somebody else compiles. Returns True."""
    _LOG.warning(
        "%s is traced by torch.compile, or within another optimised model: it runs without a plan "
        "of its own. Optimise the outermost module, and do not compile around it.",
        name,
    )
    return True


def _has_gradients(model: nn.Module) -> bool:
    return any(p.grad is not None for p in model.parameters())


def require_trainable(model: nn.Module) -> None:
    """Check that there is something to train.

    Raises:
        InputError: ``model`` is no module.
        CaptureError: nothing in it requires a gradient.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"a torch.nn.Module is needed, not a {type(model).__name__}.")
    if not any(p.requires_grad for p in model.parameters()):
        raise CaptureError(
            f"{type(model).__name__} has no parameter that requires a gradient, so there is "
            "nothing to train. Set requires_grad on the parameters to be trained."
        )


def as_tuple(inputs: Any) -> tuple[Any, ...]:
    """Return example inputs as the tuple of positional arguments.

    Raises:
        InputError: they are none.
    """
    if inputs is None:
        return ()
    if isinstance(inputs, torch.Tensor):
        return (inputs,)
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs)
    raise InputError(
        f"example_inputs is the tuple of positional arguments, not {type(inputs).__name__}; "
        "pass keyword arguments as example_kwargs."
    )
