"""Dynamo and AOTAutograd: from a module to a callable that runs our graphs."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch.compiler.config as compiler_config
from torch import fx, nn
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy
from torch._dynamo import trace_rules
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.types import ConvertFrameReturn
from torch._dynamo.utils import CleanupManager, orig_code_map
from torch._guards import TracingContext
from torch.nn.modules import module as modules

from autockpt._torch.generated import boxed
from autockpt._torch.joint import Partition, Watch, joint_graph, mark_state
from autockpt._torch.kernels import kernels_stay_whole
from autockpt._torch.numbers import Floats, Integers
from autockpt._torch.refused import refuse_what_is_traced_wrongly

__all__ = [
    "SIGNATURES",
    "compile_forward",
    "compile_pieces",
    "has_lazy_parameters",
    "opaque",
    "unguarded",
    "while_tracing",
]


# Kinds of input one model is captured for before it runs plainly on further ones.
SIGNATURES = 64

# The same for a frame that a graph broke in.
_RESUMED = 3

_GLOBAL_HOOKS = re.compile("_global_(forward|backward).*hooks$")


def compile_forward(
    model: nn.Module,
    partition: Partition,
    floats: Floats | None = None,
    integers: Integers | None = None,
) -> Callable[..., Any]:
    """Return a callable that runs ``model`` like ``model(...)``, through ``partition``'s graphs.

    Dynamo traces the call (hooks included) at its first run and again when its guards fail. For
    each graph that needs gradients ``partition`` is called once with the joint graph; a graph
    without gradients runs as it was traced.

    ``floats`` and ``integers`` are those that its traces have read. A trace holds for any value of
    those that vary, where otherwise it is made anew for each.

    The traced function gets a code object of its own: Dynamo keeps its cache and its recompile
    limit per code object, so that models do not share them and dropping the callable drops them.
    """

    def autockpt_forward(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)

    entry = types.FunctionType(
        autockpt_forward.__code__.replace(),
        autockpt_forward.__globals__,
        autockpt_forward.__name__,
        None,
        autockpt_forward.__closure__,
    )
    entry.__kwdefaults__ = autockpt_forward.__kwdefaults__

    backend = _Backend(partition)
    context: Any = torch._dynamo.optimize(backend.for_dynamo, nopython=True, dynamic=False)
    context.callback = tracer = _Configured(context.callback, floats or Floats(), integers=integers)
    return _held(context(entry), backend, tracer)


def compile_pieces(
    model: nn.Module,
    partition: Partition,
    given_up: set[str],
    skipped: Callable[[bool], None],
    floats: Floats,
    *,
    numbers: bool,
) -> Callable[..., Any]:
    """Return a callable that runs ``model.forward`` as several graphs, with plain Python between.

    Where Dynamo cannot trace on, a graph ends; what it cannot trace runs plainly, and so does
    everything called from there. ``partition`` is called with each graph in turn. Where nothing of
    a frame can be traced (a loop with a break inside), it runs plainly, and ``skipped`` is called
    with whether that is one behind a break.

    ``numbers`` says whether a number read from a tensor is traced, so that it may be any. Not where
    a size depends on it: then it ends a graph, and the next one holds for its value alone.

    ``given_up`` takes the names of frames behind a break that cannot be traced any more, such as
    those behind a number that changes with every step. They run plainly from then on, also where
    the same set is passed again; so the graphs stay the same.

    Hooks of the model itself are not run: for a model without them.
    """
    # The user's own code object would be shared with other models and with torch.compile.
    own = getattr(model.forward, "__func__", None)
    if own is None or not isinstance(own, types.FunctionType):
        skipped(False)
        return model._call_impl
    entry = types.FunctionType(
        own.__code__.replace(), own.__globals__, own.__name__, own.__defaults__, own.__closure__
    )
    entry.__kwdefaults__ = own.__kwdefaults__
    backend = _Backend(partition)
    context: Any = torch._dynamo.optimize(backend.for_dynamo, nopython=False, dynamic=False)
    tracer = _Configured(context.callback, floats, limit=_RESUMED, numbers=numbers)
    context.callback = _OwnFrames(tracer, entry.__code__, given_up, skipped)
    return _held(functools.partial(context(entry), model), backend, tracer)


class _OwnFrames:
    """Dynamo's callback for new frames, kept to one function and what is resumed of it."""

    def __init__(
        self,
        inner: _Configured,
        code: types.CodeType,
        given_up: set[str],
        skipped: Callable[[bool], None],
    ) -> None:
        self._torchdynamo_orig_backend = self.inner = inner
        self.code = code
        self.given_up = given_up
        self.skipped = skipped

    def __call__(self, frame: Any, cache_entry: Any, state: Any) -> ConvertFrameReturn:
        code = frame.f_code
        resumed = code.co_name.startswith("torch_dynamo_resume_in")
        if code is self.code or (resumed and code.co_name not in self.given_up):
            # What has run of the step cannot run again: a frame that fails to trace runs plainly.
            with contextlib.suppress(Exception), _recurrent_layers_end_graphs():
                result = self.inner(frame, cache_entry, state)
                if result.guarded_code is not None:
                    return result
            if resumed:
                self.given_up.add(code.co_name)
            self.skipped(resumed)
        # Not for good: the code object is the user's, and others may trace it.
        return ConvertFrameReturn(
            frame_exec_strategy=_FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP),
            apply_to_code=False,
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the tracer from advice to those who compile: what it cannot trace is told otherwise.

    Nor does it print the operators that refuse their inputs: they end in an error that says so.
    """
    quieted = (("torch._dynamo", logging.ERROR), ("torch._subclasses", logging.CRITICAL))
    with contextlib.ExitStack() as stack:
        for name, level in quieted:
            stack.enter_context(_at_least(logging.getLogger(name), level))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Dynamo does not know how to trace the builtin")
        # It looks at the gradients of inputs, which may be no leaves.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
        # It differentiates with autograd's anomaly mode on; what fails there is told by us.
        warnings.filterwarnings("ignore", "Error detected in ")
        yield


@contextlib.contextmanager
def _at_least(log: logging.Logger, level: int) -> Iterator[None]:
    """Let a logger print less than by default; what the user has set otherwise stays."""
    before = log.level
    if before in (logging.NOTSET, logging.WARNING):
        log.setLevel(level)
    try:
        yield
    finally:
        log.setLevel(before)


@contextlib.contextmanager
def _recurrent_layers_end_graphs() -> Iterator[None]:
    """Let a trace break where a recurrent layer is called; by itself it gives the frame up."""
    refused = trace_rules._disallowed_callable_ids
    layers = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
    added = [id(layer) for layer in layers if id(layer) not in refused()]
    refused().update(added)
    try:
        with dynamo_config.patch(allow_rnn=True):
            yield
    finally:
        refused().difference_update(added)


def while_tracing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of constants that a trace calls as it meets it, and takes no part of."""
    called: Callable[..., Any] = torch.compiler.assume_constant_result(function)
    return called


def opaque(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function as one that no trace looks into."""
    hidden: Callable[..., Any] = torch._dynamo.disable(function)
    return hidden


def _held(
    compiled: Callable[..., Any], backend: _Backend, tracer: _Configured
) -> Callable[..., Any]:
    """Return the callable as one that keeps its backend alive, and nothing once it is dropped."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled(*args, **kwargs)

    call.backend = backend  # type: ignore[attr-defined]
    weakref.finalize(call, _drop, tracer.made).atexit = False
    return call


def _drop(made: list[weakref.ref[types.CodeType]]) -> None:
    """Let go of code that Dynamo has made.

    Dynamo keeps what such code calls, our graphs, among the globals until the code is gone; it
    maps it to the code it was made from, which holds on to it, and the graphs remember that one:
    none of them would ever go.
    """
    for ref in made:
        code = ref()
        if code is not None:
            orig_code_map._remove_id(id(code))
            if code in CleanupManager.instance:
                CleanupManager.instance._remove_id(id(code))


class _Configured:
    """Dynamo's callback for new frames, under the settings that our traces are made with.

    They matter while a frame is traced; a forward that was traced before does without them.

    Attributes:
        made: the code it has made so far.
    """

    def __init__(
        self,
        inner: Callable[..., Any],
        floats: Floats,
        *,
        limit: int | None = None,
        integers: Integers | None = None,
        numbers: bool = True,
    ) -> None:
        self._torchdynamo_orig_backend = self.inner = inner
        self.floats = floats
        self.integers = integers  # of a frame whose variables are a model and its arguments
        self.settings: dict[str, Any] = {
            # Hooks that come and go after the capture are guarded on.
            "skip_nnmodule_hook_guards": False,
            # It overlooks that a parameter was frozen or its data replaced (torch before 2.13).
            "skip_tensor_guards_with_matching_dict_tags": False,
            # A gradient taken inside the forward is part of the graph.
            "trace_autograd_ops": True,
            # NumPy's draws are NumPy's: traced, they would be torch's.
            "use_numpy_random_stream": True,
            "recompile_limit": limit or SIGNATURES,
            "capture_scalar_outputs": numbers,
        }
        self.made: list[weakref.ref[types.CodeType]] = []

    def __call__(self, frame: Any, cache_entry: Any, state: Any) -> ConvertFrameReturn:
        varying: set[str] = set()
        if self.integers is not None:
            self.integers.look(**frame.f_locals)
            varying = self.integers.varying
        sources: Any = compiler_config
        refuse_what_is_traced_wrongly()
        with (
            dynamo_config.patch(
                ignore_logging_functions=_said_once(),
                allow_unspec_int_on_nn_module=bool(varying),
                **self.settings,
            ),
            sources.patch(dynamic_sources=",".join(sorted(varying))),
            self.floats.watched(),
            _quiet(),
        ):
            result: ConvertFrameReturn = self.inner(frame, cache_entry, state)
        if result.guarded_code is not None:
            self.made.append(weakref.ref(result.guarded_code.code))
        return result


class _Backend:
    """A Dynamo backend that runs ``partition``'s graphs.

    Dynamo keeps every backend it has met, and AOTAutograd's graphs the function that divided them;
    they get :attr:`for_dynamo` and another such, which keep nothing alive.
    """

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        self.watches: list[Watch] = []
        self.state: frozenset[int] = frozenset()
        self.for_dynamo = _held_weakly(self.compile)

    def compile(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Return what runs a graph that Dynamo has traced."""
        self.state = _state_of_modules(module)
        # donated_buffer: freeing saved tensors early breaks retain_graph. The cache would skip
        # the partition function.
        # backward_pass_autocast: users leave the autocast context before the backward.
        # fallback_random: a draw that nobody uses moves the generator all the same.
        with (
            functorch_config.patch(
                donated_buffer=False, enable_autograd_cache=False, backward_pass_autocast="off"
            ),
            inductor_config.patch(fallback_random=True),
            kernels_stay_whole(),
        ):
            # AOTAutograd keeps the compiler with the graph: of the watches alone, not of this.
            compiler = functools.partial(_runnable, self.watches)
            compiled: Callable[..., Any] = aot_autograd(
                fw_compiler=compiler,
                bw_compiler=compiler,
                partition_fn=_held_weakly(self._partition_fn),
                keep_inference_input_mutations=True,
            )(module, inputs)
        return compiled

    def _partition_fn(
        self, joint: fx.GraphModule, _inputs: Any, *, num_fwd_outputs: int, **_: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        graph = joint_graph(joint, num_fwd_outputs)
        mark_state(graph.primals, self.state)
        forward, backward, watch = self.partition(graph)
        # Torch copies graph modules before it compiles them; a number in their meta survives.
        forward.meta["autockpt_forward"] = backward.meta["autockpt_backward"] = len(self.watches)
        self.watches.append(watch)
        forward.meta["autockpt_outputs"] = num_fwd_outputs
        return forward, backward


def _state_of_modules(module: fx.GraphModule) -> frozenset[int]:
    """Return the positions of a graph's inputs that are tensors of modules and do not train."""
    found = set()
    for position, node in enumerate(module.graph.find_nodes(op="placeholder")):
        source = getattr(node.meta.get("grapharg"), "source", None)
        value = node.meta.get("example_value")
        if source is None or not isinstance(value, torch.Tensor) or value.requires_grad:
            continue
        kind = source.guard_source
        if kind.is_unspecialized_nn_module() or kind.is_specialized_nn_module():
            found.add(position)
    return frozenset(found)


def _held_weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a method, and does not keep its owner alive."""
    here = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        there = here()
        assert there is not None, "a callable is traced whose backend is gone"
        return there(*args, **kwargs)

    return call


def _runnable(
    watches: Sequence[Watch], module: fx.GraphModule, _inputs: Any
) -> Callable[[list[Any]], Any]:
    """Return a graph as what AOTAutograd calls, with its watch in between where it has one."""
    _give_no_buffer_away()
    run = boxed(module)
    if "autockpt_forward" in module.meta:
        _count_no_writes()
        watch = watches[module.meta["autockpt_forward"]]
        return _watched_forward(run, watch, module.meta["autockpt_outputs"], _outputs_cut_loose())
    if "autockpt_backward" in module.meta:
        return _watched_backward(run, watches[module.meta["autockpt_backward"]])
    return run


def _metadata() -> Any:
    """What torch has noted of the graph that is compiled, and reads when it runs; None of none."""
    context = TracingContext.try_get()
    return context.fw_metadata if context is not None else None


def _give_no_buffer_away() -> None:
    """Keep torch from refusing retain_graph.

    It refuses where saved tensors may be donated to the backward. That is switched off here, but
    the None it leaves behind counts as donated; an empty list does not.
    """
    metadata = _metadata()
    if metadata is not None and hasattr(metadata, "bw_donated_idxs"):
        metadata.bw_donated_idxs = []


def _count_no_writes() -> None:
    """Keep torch from raising the versions of inputs that a forward of ours writes: it does so."""
    metadata = _metadata()
    if metadata is not None:
        metadata.mutated_graph_handled_indices_seen_by_autograd = []


def _outputs_cut_loose() -> list[int]:
    """Keep torch from giving outputs that are views versions of their own; return which those are.

    A user who writes to one writes to what the backward may read: as in eager, their versions must
    tell.
    """
    metadata = _metadata()
    if metadata is None or not metadata.num_unsafe_view_outputs:
        return []
    metadata.num_unsafe_view_outputs = 0
    first = metadata.num_mutated_inp_runtime_indices
    return [first + index for index in metadata.unsafe_view_out_indices]


def _said_once() -> set[Callable[..., Any]]:
    """Logger methods such as ``warning_once``, which a trace may skip: they say a thing once."""
    methods = {f for name, f in vars(logging.Logger).items() if name.endswith("_once")}
    return dynamo_config.ignore_logging_functions | methods


def _watched_forward(
    run: Callable[[list[Any]], Any], watch: Watch, count: int, views: Sequence[int]
) -> Callable[[list[Any]], Any]:
    def call(args: list[Any]) -> Any:
        watch.forward_begins(args)
        if not _PLAIN.issuperset(map(type, args)):
            args[:] = map(_as_it_is_traced, args)
        inputs = set(map(id, args))
        outputs = watch.run_forward(run, args)
        watch.forward_ends(outputs)
        # Autograd saves an input as the tensor object it is: after ``p.data = ...`` the backward
        # would read the new memory. A detached alias goes on to mean the memory of this forward.
        saved = [
            o.detach() if id(o) in inputs and isinstance(o, torch.Tensor) else o
            for o in outputs[count:]
        ]
        user = list(outputs[:count])
        for position in views:
            user[position] = user[position].detach()  # no view to autograd, of the same version
        return (*user, *saved)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


_PLAIN = {torch.Tensor, nn.Parameter}


def _as_it_is_traced(value: Any) -> Any:
    """Return a tensor of a class that only says what functions do with it as a plain one.

    Torch watches the first run for what operators return, and refuses classes it does not know.
    """
    if not isinstance(value, torch.Tensor):
        return value
    acts = type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return value if acts else value.as_subclass(torch.Tensor)


def _watched_backward(run: Callable[[list[Any]], Any], watch: Watch) -> Callable[[list[Any]], Any]:
    def call(args: list[Any]) -> Any:
        return watch.run_backward(run, args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def unguarded(model: nn.Module) -> Callable[[], list[Any]]:
    """Return a function for what a trace of the model takes for granted and does not guard on.

    These are the forwards of its modules' classes and the hooks of all modules. The function is
    called before each forward: it is cheap.
    """
    classes = list({type(module) for module in model.modules()})
    hooks = [value for name, value in vars(modules).items() if _GLOBAL_HOOKS.match(name)]

    def now() -> list[Any]:
        # That of a scripted module's class is not to be had without a module.
        forwards = (getattr(cls, "forward", None) for cls in classes)
        return [*forwards, *(h for one in hooks for h in one.values())]

    return now


def has_lazy_parameters(model: nn.Module) -> bool:
    """Return whether some of the model's parameters get their shape at its first forward."""
    return any(nn.parameter.is_lazy(parameter) for parameter in model.parameters())
