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
from autockpt.capture import Capture, capture, read_joint, traced
from autockpt.choose import Choice, add_time_s, choose
from autockpt.device import device_of, placement
from autockpt.eager_errors import raise_as_eager
from autockpt.flights import memory_of
from autockpt.graphs import Graph, Known, graph_key, saved_placeholders
from autockpt.losses import Weight
from autockpt.out_of_memory import OutOfMemory
from autockpt.planner import Planner
from autockpt.planning import (
    Made,
    Options,
    no_limit,
    options_of,
)
from autockpt.pool import InPool, Pool
from autockpt.resident import distinct_bytes, missing_gradient_bytes
from autockpt.several import Several
from autockpt.split import Batch, Split, cut, shares
from autockpt.step import AUTO, Stepper, check_accumulate
from autockpt_solvers.errors import (
    AutockptError,
    CaptureError,
    InfeasibleBudget,
    InputError,
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
            once, as far as their operators can write there; on CUDA the rest comes from a pool of
            its own, reserved once. None is False. A model of several graphs has none.
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
    if optimizer is not None:
        _check_optimizer(model, optimizer)
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


def _check_optimizer(model: nn.Module, optimizer: Any) -> None:
    if not hasattr(optimizer, "param_groups"):
        raise InputError(f"optimizer={optimizer!r} must be a torch.optim.Optimizer.")
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if held and held.isdisjoint(map(id, model.parameters())):
        raise InputError(
            f"the {type(optimizer).__name__} has none of the model's parameters: it would train "
            "nothing of it. Make it of model.parameters()."
        )


def restore(model: nn.Module) -> nn.Module:
    """Undo :func:`optimize`: the model runs as it did before. Returns the model."""
    handle = vars(model).get("autockpt")
    if isinstance(handle, Handle):
        if handle.model is model:
            handle.detach()
        else:  # a shallow copy of an optimised model, which stays optimised
            handle.take_off(model)
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
        *,
        loss_fn: Callable[..., Any] | None = None,
        accumulate: int | str = 1,
    ) -> None:
        self.model = model
        self.planner = Planner(model, options, optimizer, progress)
        self.plan: Plan | None = None
        self._steps_with(loss_fn, accumulate)
        self._forget()

    def _steps_with(self, loss_fn: Callable[..., Any] | None, accumulate: int | str) -> None:
        self._stepper = Stepper(
            self.model,
            self.planner.optimizer,
            loss_fn,
            accumulate,
            self._micro_batch,
            self._choose,
        )
        self._choices: dict[Any, Choice] = {}  # by the batch's shapes
        self._choice: Choice | None = None

    def _forget(self) -> None:
        self._compiled: Callable[..., Any] | None = None
        self._several: Several | None = None
        self.planner.forget()
        self._floats, self._integers = _torch.Floats(), _torch.Integers()
        self._begun, self._captures = False, 0
        self._ran: set[str] = set()  # keys of the graphs that this step has run
        self._unguarded: Callable[[], list[Any]] = list
        self._taken_for_granted: list[Any] = []
        self._memory: Memory | None = None
        self._pool: Pool | None = None

    # -------------------------------------------------------------- on and off the model

    def attach(self) -> None:
        """Set this handle behind the model's call."""
        self.model.__dict__["_compiled_call_impl"] = self
        self.model.__dict__["autockpt"] = self
        self._show(self.plan)
        for name in _STEPS:
            if _may_show(self.model, name):
                self.model.__dict__[name] = getattr(self, name)

    def detach(self) -> None:
        """Take this handle off the model."""
        self._stepper.reset()
        for graph in self.planner.graphs:
            graph.stop_watching()
        if self._several is not None:
            self._several.end()
        for reserved in (self._memory, self._pool):
            if reserved is not None:
                reserved.release()
        self.take_off(self.model)
        self._forget()

    def take_off(self, model: nn.Module) -> None:
        """Remove what :meth:`attach` has set, from the model or from a shallow copy of it."""
        for name in ("_compiled_call_impl", "autockpt", *_SHORT_CUTS):
            if name not in _SHORT_CUTS or _may_show(model, name):
                model.__dict__.pop(name, None)

    def _explained(self, plan: Plan) -> Plan:
        """The plan with what it is one of, and the choice of the micro-batches it is for."""
        if self.planner.graphs:
            captures = f"{len(self.planner.graphs)} of at most {_torch.SIGNATURES}"
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
        if _may_show(self.model, "plan"):
            self.model.__dict__["plan"] = plan

    def _takes_off(self, graph: Graph, node: Any, inputs: Any, output: Any) -> None:
        """Note that a forward stands open until its backward has run."""
        device = self.planner.device
        taken, made = (memory_of(_torch.tensors_anywhere(v), device) for v in (inputs, output))
        self.planner.flights.begin(graph.key, node, taken, made)

    def _show_again(self, plan: Plan) -> None:
        """Show the plan of the graph that ran, where that of another one is shown."""
        shown = self.plan
        if shown is None or shown.problem is not plan.problem:
            self._show(plan)

    def bytes_before(self) -> int:
        """What the plan says is there throughout, less its gradients that are not there now."""
        if self.plan is None:
            return 0
        found = [g.around for g in self.planner.graphs if g.made.plan.problem is self.plan.problem]
        if self._several is not None:
            found = [self._several.recorded]
        resident = self.plan.problem.resident_bytes - sum(g.beside_bytes for g in found[:1])
        if not any(around.gradients_exist or around.accumulates for around in found):
            return resident
        return resident - missing_gradient_bytes(self.model, self.planner.device)

    def __getstate__(self) -> dict[str, Any]:
        # Not the optimizer, which is for this model's parameters, nor the loss that goes with it.
        accumulate = self._stepper.accumulate
        return {
            "model": self.model,
            "options": self.planner.options,
            "plan": self.plan,
            "accumulate": accumulate,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        # The model is being rebuilt around this handle; nn.Module drops its compiled callable
        # when it is pickled or copied.
        self.model = state["model"]
        self.planner = Planner(self.model, state["options"])
        self.plan = state["plan"]
        self._steps_with(None, state["accumulate"])
        self._forget()
        self.model.__dict__["_compiled_call_impl"] = self

    # -------------------------------------------------------------- calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward: under its plan where it trains, plainly elsewhere."""
        model = self.model
        plain = not (model.training and torch.is_grad_enabled())
        if not plain and _torch.is_traced():
            plain = _traced_by_others(type(model).__name__)
        if plain or _torch.runs_elsewhere() or self._awaits_shapes():
            return model._call_impl(*args, **kwargs)
        _torch.leave_what_is_left_behind()
        self._trace_anew_where_code_has_changed()
        if self._several is not None:
            return self._run_several(args, kwargs)
        for graph in self.planner.graphs:
            graph.stop_watching()
        begun = self.planner.under_way
        failure = ""
        try:
            self.planner.inputs = (args, kwargs)
            if not _torch.in_backward():  # the second run of a checkpoint has to be as the first
                self._revise()
            output = self._traced(args, kwargs)
        except OutOfMemory:
            raise  # of the step, not of its planning
        except AutockptError as error:
            if not begun:
                raise_as_eager(model, args, kwargs, error)
                in_trace = isinstance(error, CaptureError) or _fails_in_trace_alone(error)
                if not (in_trace and self._may_divide()):
                    # Nothing fails silently, and no failure leaves the model changed.
                    self.detach()
                    raise
            failure = str(error)
        finally:
            self.planner.inputs = None
        # Outside the handler: what fails from here on has nothing to do with that error.
        if failure and not begun:
            self.planner.accumulates = False  # gradients of several graphs are autograd's to add
            planner = self.planner
            here = device_of(placement(model))
            self._several = Several(model, planner.options, here, planner.around)
            self._several.begin(failure)
            return self._run_several(args, kwargs)
        if failure:
            # A run that has begun is not broken off: either eager has an error of its own for
            # these inputs, or it trains on them, without a plan.
            output = model._call_impl(*args, **kwargs)
            self.planner.warn("these inputs run without a plan, and without a budget: %s", failure)
            return output
        nodes = _torch.compiled_nodes(output)
        for graph in self.planner.graphs:
            if graph.ran:
                self._ran.add(graph.key)
                self._show_again(graph.made.plan)
                if nodes:
                    self._takes_off(graph, nodes[0], (args, kwargs), output)
        for node in nodes:
            _torch.keep_missing_gradients(node)
            guard_backward(
                model, node, [one for graph in self.planner.graphs for one in graph.read]
            )
            for graph in self.planner.graphs:
                graph.watch_loss(node)
        for graph in self.planner.graphs:
            graph.ran, graph.read = False, []
        return output

    def _awaits_shapes(self) -> bool:
        """Whether this forward is the one in which parameters get their shapes."""
        return not self._begun and _torch.has_lazy_parameters(self.model)

    def _trace_anew_where_code_has_changed(self) -> None:
        if self._begun and self._unguarded() != self._taken_for_granted:
            self._renew()
            self.planner.graphs, self.planner.begun = [], False
            if self._several is not None:
                self._several.forget()
        captures = len(self.planner.graphs) + (self._several.captures if self._several else 0)
        if not self._begun or captures != self._captures:  # the model may have new modules
            self._unguarded = _torch.unguarded(self.model)
            self.planner.look_again()
        self._begun, self._captures = True, captures
        self._taken_for_granted = self._unguarded()

    def _traced(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the compiled forward, and compile it first where that is to be done.

        A number of Python's that another trace finds changed is traced as one that varies; where
        that cannot be planned, it is traced for each value.
        """
        traces = len(self.planner.graphs)
        if self._compiled is None:
            self._compiled = _torch.compile_forward(
                self.model, self._partition, self._floats, self._integers
            )
        self.planner.started = time.perf_counter()
        try:
            return traced(self.model, self._compiled, args, kwargs)
        except OutOfMemory:
            raise
        except AutockptError:
            if self._integers.varying:
                self._integers.stay_constant()
            elif self._floats.found:
                self._floats.stay_constant()
            else:
                raise
            self._compiled = None
            del self.planner.graphs[traces:]
            return self._traced(args, kwargs)

    def _renew(self) -> None:
        """Have the forward compiled again; what is known of each graph spares the rest."""
        self.planner.note_graphs()
        self._compiled = None

    def _revise(self) -> None:
        """Put the plans right that a watched step has shown to be other than guessed."""
        changed = False
        for graph, anew in self.planner.revisions():
            changed = changed or anew
            self._show(graph.made.plan)
        if changed:
            self._renew()
            self.planner.graphs = []
            self.planner.begun = True

    def _may_divide(self) -> bool:
        """Whether a model that cannot be captured whole may run as several graphs."""
        options = self.planner.options
        return not options.fullgraph and options.given is None and not options.pins

    def _run_several(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._several is not None
        if _torch.in_checkpoint():
            self.planner.warn(
                "a model of several graphs runs without a plan inside torch.utils.checkpoint, "
                "which computes all of it again. Call it outside of one, or without autockpt."
            )
            return self.model._call_impl(*args, **kwargs)
        self.planner.inputs = (args, kwargs)
        try:
            output = self._several(args, kwargs)
        except InfeasibleBudget:
            self.detach()
            raise
        finally:
            self.planner.inputs = None
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
        self.plan = plan = self._explained(self.planner.plan_now(args, kwargs))
        return plan

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
        self._ran.clear()
        loss = self._stepper.step(*args, target=target, weight=weight, **kwargs)
        plans = [graph.made.plan for graph in self.planner.graphs if graph.key in self._ran]
        if plans:
            # Micro-batches of two sizes have two plans; the step's peak is that of one of them.
            self._show(max(plans, key=lambda plan: plan.peak_bytes))
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
        self.planner.accumulates, self.planner.beside = (
            accumulates and self._several is None,
            beside,
        )
        try:
            yield
        finally:
            self.planner.accumulates, self.planner.beside = False, None

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

    def _chosen(self, batch: Batch, split: Split, samples: int, *, over: bool = False) -> Choice:
        """Choose; a training that has begun goes on ``over`` its budget where nothing fits."""
        captured: dict[int, tuple[str, Capture]] = {}  # by the number of micro-batches
        known: dict[int, Known] = {}

        def planned(parts: int, options: Options) -> Plan:
            part = next(cut(self.model.forward, batch, split, shares(samples, parts)))
            with (
                self._micro_batch(self._stepper.fuses(parts), batch.target),
                self.planner.asked(options, part.args, part.kwargs),
            ):
                if parts not in captured:
                    captured[parts] = capture(self.model, part.args, part.kwargs, _read)
                found = captured[parts][1]
                known[parts], made = self.planner.guess(found, over=over)
                known[parts] = replace(known[parts], absent=found.absent, plan=made.plan)
                return made.plan

        def unlimited(size: int, parts: int) -> Plan:
            return planned(parts, no_limit(self.planner.options))

        def limited(size: int, parts: int, seconds: float) -> Plan:
            return planned(parts, replace(self.planner.options, time_limit_s=seconds))

        device = self.planner.device
        gradients = distinct_bytes([p for p in self.model.parameters() if p.requires_grad], device)
        try:
            choice = choose(
                samples,
                unlimited,
                limited,
                self.planner.budget_bytes,
                add_time_s(gradients, device),
                self.planner.options.time_limit_s,
            )
        except AutockptError as error:
            begun = self.planner.under_way
            if isinstance(error, InfeasibleBudget) and begun and not over:
                return self._chosen(batch, split, samples, over=True)
            if not begun:
                self.detach()
            if isinstance(error, CaptureError):
                raise CaptureError(
                    "accumulate='auto' compares plans before a step has run, which needs a model "
                    f"that is captured as one graph. Give a number of micro-batches. {error}"
                ) from error
            raise
        parts = len(choice.sizes)
        self.planner.known[captured[parts][0]] = replace(known[parts], plan=choice.plan)
        return choice

    # -------------------------------------------------------------- planning

    def _partition(
        self, joint: _torch.JointGraph
    ) -> tuple[fx.GraphModule, fx.GraphModule, _torch.Watch]:
        key = graph_key(joint)
        captured, known, made = self.planner.plan(joint, key)
        started = time.perf_counter()
        known, made, forward, backward = self.planner.write(joint, captured, known, made)
        lent, origin = None, made.plan.origin
        if self.planner.options.arena:
            plan = made.plan
            self._memory = self._memory or Memory(placement(self.model))
            parts = (forward, backward, made.formulation, plan.schedule)
            lent, said = in_arena(*parts, self._memory, plan.budget_bytes)
            origin = {**origin, "arena": said}
        stages = {**made.plan.stages_s, "rewrite": time.perf_counter() - started}
        made = Made(replace(made.plan, stages_s=stages, origin=origin), made.formulation)
        _LOG.info(
            "captured %d of at most %d kinds of input; planned in %.1f s, the plan %s",
            len(self.planner.graphs) + 1,
            _torch.SIGNATURES,
            sum(stages.values()),
            made.plan.origin.get("plan", "solved"),
        )
        graph = Graph(key, joint, captured, known, made, self.planner.device)
        graph.saved = saved_placeholders(backward, captured)
        self.planner.graphs.append(graph)
        self._show(made.plan)
        watch: _torch.Watch = Accumulating(graph, backward, captured, self._asks_to_add())
        if lent is not None:
            lent.inner, watch = watch, lent
        return forward, backward, self._pooled(watch, made.plan)

    def _pooled(self, watch: _torch.Watch, plan: Plan) -> _torch.Watch:
        """With an arena, what lies beside it has a pool of its own, on devices that have pools."""
        device = placement(self.model)
        if not self.planner.options.arena or device.type != "cuda":
            return watch
        self._pool = self._pool or Pool(device)
        return InPool(watch, self._pool, plan.peak_bytes - plan.problem.resident_bytes)

    def _asks_to_add(self) -> Callable[[], bool]:
        """Whether a step asks for gradients to be added in the graph: for compiled code, which
        torch keeps as long as there is this handle, so that it must not keep the handle.
        """
        here = weakref.ref(self.planner)

        def asked() -> bool:
            there = here()
            return there is not None and there.accumulates

        return asked

    # -------------------------------------------------------------- after the first step


# ------------------------------------------------------------------ small questions to a model


def _may_show(model: nn.Module, name: str) -> bool:
    """A short cut never hides what the model's class or the user defines by that name."""
    taken = hasattr(type(model), name) or name in model._modules
    taken = taken or name in model._parameters or name in model._buffers
    value = model.__dict__.get(name)
    owner = getattr(value, "__self__", None)
    return not taken and (value is None or isinstance(value, Plan) or isinstance(owner, Handle))


def _fails_in_trace_alone(error: AutockptError) -> bool:
    """Whether an operator has refused its inputs, in a forward that runs: the model catches it."""
    cause = error.__cause__
    return isinstance(error, InputError) and cause is not None and _torch.is_operator_error(cause)


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
