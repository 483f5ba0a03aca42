"""The one door to torch's private modules.

Everything autockpt needs of ``torch._dynamo``, ``torch._functorch``, ``torch._subclasses``,
``torch._C`` and of undocumented behaviour goes through here, so that a change in torch is met in
one file. Nothing here knows about plans or budgets.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import logging
import operator
import re
import threading
import traceback
import types
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
import torch._dynamo.convert_frame
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch.compiler.config as compiler_config
from torch import fx, nn
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy
from torch._dynamo import trace_rules
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import (
    BackendCompilerFailed,
    FailOnRecompileLimitHit,
    ObservedException,
    TorchDynamoException,
    TorchRuntimeError,
    Unsupported,
)
from torch._dynamo.types import ConvertFrameReturn
from torch._functorch._aot_autograd.descriptors import (
    InputMutationAOTOutput,
    SavedForBackwardsAOTOutput,
    SavedForBackwardsNoVcCheckAOTOutput,
)
from torch._functorch.partitioners import _extract_fwd_bwd_outputs
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.autograd import forward_ad
from torch.fx.graph import _BoxedCodeGen
from torch.fx.graph_module import _forward_from_src
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as modules
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = [
    "SIGNATURES",
    "AllocationTracker",
    "AllocatorEvent",
    "FakeTensor",
    "FakeTensorMode",
    "JointGraph",
    "NamedRange",
    "OperatorMode",
    "StorageWeakRef",
    "Watch",
    "allocation_events",
    "at_backward_end",
    "autograd_refusal",
    "before_backward",
    "boxed",
    "capture_failure",
    "compile_forward",
    "compile_pieces",
    "compiled_behind",
    "compiled_nodes",
    "counters_of",
    "cuda_history",
    "failed_run",
    "fake_mode_of",
    "forget_context",
    "getitem_index",
    "has_gradient_hooks",
    "has_lazy_parameters",
    "in_backward",
    "is_fake",
    "is_operator",
    "is_operator_error",
    "is_out_of_memory",
    "is_profiled",
    "is_random",
    "keep_missing_gradients",
    "keeps_graph",
    "leave_what_is_left_behind",
    "leaves_of_running_node",
    "map_tensors",
    "may_be_eagers",
    "module_path",
    "named_range",
    "nodes_of",
    "on_double_backward",
    "opaque",
    "outside_tracing",
    "queue_delay",
    "raised_in_trace",
    "runs_elsewhere",
    "saved_descriptors",
    "source_line",
    "storage_key",
    "storage_uses",
    "tensor_leaves",
    "unguarded",
    "user_error",
    "watched_step",
    "when_released",
    "while_tracing",
]

# Kinds of input one model is captured for before it runs plainly on further ones.
SIGNATURES = 64
# The same for a frame that a graph broke in.
_RESUMED = 3
# A line of generated code: addmm_3_again_1 = torch.ops.aten.addmm.default(...)
_MADE = re.compile(r"\s*(\w+?)(?:_again_(\d+))?(?:\s*:[^=]*)?\s=\s")
_GLOBAL_HOOKS = re.compile("_global_(forward|backward).*hooks$")
_USER_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>\S+)', re.M)


# ------------------------------------------------------------------ what AOTAutograd hands over


@dataclass(frozen=True)
class JointGraph:
    """The joint forward and backward graph as AOTAutograd hands it to a partition function.

    Attributes:
        module: the joint graph; nodes carry ``meta["val"]`` (fake tensors).
        primals: placeholders of parameters, buffers and inputs.
        tangents: placeholders of the outputs' gradients.
        seeds: placeholders of random seeds and offsets, forward and backward.
        forward_outputs: what the forward returns (nodes or constants), then what ``backward_*``
            says the same way of the backward.
        mutated: for each forward output the primal whose new value it is, or None.
    """

    module: fx.GraphModule
    primals: tuple[fx.Node, ...]
    tangents: tuple[fx.Node, ...]
    forward_seeds: tuple[fx.Node, ...]
    backward_seeds: tuple[fx.Node, ...]
    forward_outputs: tuple[Any, ...]
    backward_outputs: tuple[Any, ...]
    forward_descriptors: tuple[Any, ...]
    backward_descriptors: tuple[Any, ...]
    mutated: tuple[fx.Node | None, ...]


class Watch:
    """What wants to know when a compiled graph runs; this one wants to know nothing."""

    def forward_begins(self, inputs: Sequence[Any]) -> None:
        """The forward graph is about to run on ``inputs``, in the order of its placeholders."""

    def run_forward(self, run: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        """Run the forward graph on its inputs, and return what it returns and saves."""
        return run(args)

    def forward_ends(self, outputs: Sequence[Any]) -> None:
        """The forward graph has returned; ``outputs`` are what it returns and saves."""

    def run_backward(self, run: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        """Run the backward graph on saved tensors and tangents, and return the gradients."""
        return run(args)


Partition = Callable[[JointGraph], tuple[fx.GraphModule, fx.GraphModule, Watch]]


def _joint_graph(module: fx.GraphModule, num_fwd_outputs: int) -> JointGraph:
    forward, backward, forward_desc, backward_desc = _extract_fwd_bwd_outputs(
        module, num_fwd_outputs=num_fwd_outputs
    )
    placeholders = module.graph.find_nodes(op="placeholder")
    # The same naming rules that torch's own partitioners read.
    seeds_f = [n for n in placeholders if "fwd_seed_offset" in n.name or "fwd_base" in n.name]
    seeds_b = [n for n in placeholders if "bwd_seed_offset" in n.name or "bwd_base" in n.name]
    tangents = [n for n in placeholders if "tangents" in n.name]
    others = set(seeds_f) | set(seeds_b) | set(tangents)
    primals = [n for n in placeholders if n not in others]
    by_position = {n.meta["desc"]: n for n in primals if "desc" in n.meta}
    mutated = tuple(
        by_position.get(d.mutated_input) if isinstance(d, InputMutationAOTOutput) else None
        for d in forward_desc
    )
    return JointGraph(
        module,
        tuple(primals),
        tuple(tangents),
        tuple(seeds_f),
        tuple(seeds_b),
        tuple(forward),
        tuple(backward),
        tuple(forward_desc),
        tuple(backward_desc),
        mutated,
    )


def saved_descriptors(saved: Sequence[fx.Node]) -> list[Any]:
    """Return AOTAutograd's descriptors for the tensors a forward saves, in their order."""
    return [
        SavedForBackwardsNoVcCheckAOTOutput(index)
        if node.meta.get("saved_tensor_with_no_vc_check")
        else SavedForBackwardsAOTOutput(index)
        for index, node in enumerate(saved)
    ]


# ------------------------------------------------------------------ compiling a module's forward


def counters_of(model: nn.Module) -> dict[str, int]:
    """Return the integers among the attributes of the model's modules, by Dynamo's name for them.

    The name is a regular expression, since Dynamo writes submodules in several ways:
    ``L['model'].__dict__['_modules']['blocks']._modules['0'].calls``.
    """
    found = {}
    for path, module in model.named_modules():
        parts = [rf"\W+(__dict__\W+)?(_modules\W+)?{part}" for part in path.split(".") if part]
        for name, value in vars(module).items():
            if type(value) is int:
                found[rf"L\['model'\]{''.join(parts)}\W+{name}$"] = value
    return found


def compile_forward(
    model: nn.Module, partition: Partition, counters: Collection[str] = ()
) -> Callable[..., Any]:
    """Return a callable that runs ``model`` like ``model(...)``, through ``partition``'s graphs.

    Dynamo traces the call (hooks included) at its first run and again when its guards fail. For
    each graph that needs gradients ``partition`` is called once with the joint graph; a graph
    without gradients runs as it was traced.

    ``counters`` are names as :func:`counters_of` gives them: a trace holds for any value of theirs,
    where otherwise it is made anew for each.

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
    compiled = torch.compile(entry, backend=backend.for_dynamo, fullgraph=True, dynamic=False)
    return _patched(compiled, backend, counters=counters)


def compile_pieces(
    model: nn.Module,
    partition: Partition,
    given_up: set[str],
    skipped: Callable[[bool], None],
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
    context.callback = _OwnFrames(context.callback, entry.__code__, given_up, skipped)
    compiled = context(entry)

    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled(model, *args, **kwargs)

    return _patched(call, backend, limit=_RESUMED, numbers=numbers)


class _OwnFrames:
    """Dynamo's callback for new frames, kept to one function and what is resumed of it."""

    def __init__(
        self,
        inner: Callable[..., Any],
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
                result: ConvertFrameReturn = self.inner(frame, cache_entry, state)
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
def _recurrent_layers_end_graphs() -> Iterator[None]:
    """Let a trace break where a recurrent layer is called; by itself it gives the frame up."""
    refused = trace_rules._disallowed_callable_ids
    layers = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
    added = [id(layer) for layer in layers if id(layer) not in refused()]
    refused().update(added)
    try:
        with dynamo_config.patch(allow_rnn=True), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Dynamo does not know how to trace the builtin")
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


def _patched(
    compiled: Callable[..., Any],
    backend: _Backend,
    limit: int | None = None,
    counters: Collection[str] = (),
    numbers: bool = True,
) -> Callable[..., Any]:
    """Return the callable as it is to be called; it keeps its backend alive."""
    varying: Any = compiler_config

    def call(*args: Any, **kwargs: Any) -> Any:
        # Hooks that come and go after the capture are guarded on.
        with (
            dynamo_config.patch(
                ignore_logging_functions=_said_once(),
                skip_nnmodule_hook_guards=False,
                # A gradient taken inside the forward is part of the graph.
                trace_autograd_ops=True,
                # NumPy's draws are NumPy's: traced, they would be torch's.
                use_numpy_random_stream=True,
                recompile_limit=limit or SIGNATURES,
                capture_scalar_outputs=numbers,
                allow_unspec_int_on_nn_module=bool(counters),
            ),
            varying.patch(dynamic_sources=",".join(sorted(counters))),
        ):
            return compiled(*args, **kwargs)

    call.backend = backend  # type: ignore[attr-defined]
    return call


class _Backend:
    """A Dynamo backend that runs ``partition``'s graphs.

    Dynamo keeps every backend it has met; it gets :attr:`for_dynamo`, which keeps nothing alive.
    """

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        self.watches: list[Watch] = []
        here = weakref.ref(self)

        def for_dynamo(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            there = here()
            assert there is not None, "a callable is traced whose backend is gone"
            return there.compile(module, inputs)

        self.for_dynamo = for_dynamo

    def compile(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Return what runs a graph that Dynamo has traced."""
        # donated_buffer: freeing saved tensors early breaks retain_graph. The cache would skip
        # the partition function.
        # backward_pass_autocast: users leave the autocast context before the backward.
        # fallback_random: a draw that nobody uses moves the generator all the same.
        with (
            functorch_config.patch(
                donated_buffer=False, enable_autograd_cache=False, backward_pass_autocast="off"
            ),
            inductor_config.patch(fallback_random=True),
        ):
            # AOTAutograd keeps the compiler with the graph: of the watches alone, not of this.
            compiler = functools.partial(_runnable, self.watches)
            compiled: Callable[..., Any] = aot_autograd(
                fw_compiler=compiler,
                bw_compiler=compiler,
                partition_fn=self._partition_fn,
            )(module, inputs)
        return compiled

    def _partition_fn(
        self, joint: fx.GraphModule, _inputs: Any, *, num_fwd_outputs: int, **_: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        forward, backward, watch = self.partition(_joint_graph(joint, num_fwd_outputs))
        # Torch copies graph modules before it compiles them; a number in their meta survives.
        forward.meta["autockpt_forward"] = backward.meta["autockpt_backward"] = len(self.watches)
        self.watches.append(watch)
        forward.meta["autockpt_outputs"] = num_fwd_outputs
        return forward, backward


def _runnable(
    watches: Sequence[Watch], module: fx.GraphModule, _inputs: Any
) -> Callable[[list[Any]], Any]:
    """Return a graph as what AOTAutograd calls, with its watch in between where it has one."""
    _give_no_buffer_away()
    run = boxed(module)
    if "autockpt_forward" in module.meta:
        watch = watches[module.meta["autockpt_forward"]]
        return _watched_forward(run, watch, module.meta["autockpt_outputs"])
    if "autockpt_backward" in module.meta:
        return _watched_backward(run, watches[module.meta["autockpt_backward"]])
    return run


def _give_no_buffer_away() -> None:
    """Keep torch from refusing retain_graph.

    It refuses where saved tensors may be donated to the backward. That is switched off here, but
    the None it leaves behind counts as donated; an empty list does not.
    """
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    if metadata is not None and hasattr(metadata, "bw_donated_idxs"):
        metadata.bw_donated_idxs = []


def _said_once() -> set[Callable[..., Any]]:
    """Logger methods such as ``warning_once``, which a trace may skip: they say a thing once."""
    methods = {f for name, f in vars(logging.Logger).items() if name.endswith("_once")}
    return dynamo_config.ignore_logging_functions | methods


def boxed(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Return the graph as a function of one list, which it empties: inputs die at last use."""
    codegen = _BoxedCodeGen()
    codegen._body_transformer = module.graph._codegen._body_transformer  # writes comments
    module.graph.set_codegen(codegen)
    module.recompile()
    function = types.MethodType(_with_operators_at_hand(module), module)

    def call(args: list[Any]) -> Any:
        return function(args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def _with_operators_at_hand(module: fx.GraphModule) -> Callable[..., Any]:
    """Return the graph's function with each operator's own binding among its names.

    As generated it finds ``torch.ops.aten.mm.default`` by four look-ups at every call, and that
    is one more call in Python: a quarter of what it takes beyond the operator's own time.
    """
    code = module.graph.python_code("self")
    names = dict(code.globals)

    def at_hand(written: re.Match[str]) -> str:
        namespace, name, overload = written.groups()
        operator = getattr(getattr(getattr(torch.ops, namespace), name), overload)
        if type(operator) is not torch._ops.OpOverload:
            return written[0]
        here = f"_operator_{namespace}_{name}_{overload}"
        names[here] = operator._op
        return f"{here}("

    source = re.sub(r"\btorch\.ops\.(\w+)\.(\w+)\.(\w+)\(", at_hand, code.src)
    return _forward_from_src(source, names)


def _watched_forward(
    run: Callable[[list[Any]], Any], watch: Watch, count: int
) -> Callable[[list[Any]], Any]:
    def call(args: list[Any]) -> Any:
        watch.forward_begins(args)
        inputs = {id(arg) for arg in args if isinstance(arg, torch.Tensor)}
        outputs = watch.run_forward(run, args)
        watch.forward_ends(outputs)
        # Autograd saves an input as the tensor object it is: after ``p.data = ...`` the backward
        # would read the new memory. A detached alias goes on to mean the memory of this forward.
        saved = [o.detach() if id(o) in inputs else o for o in outputs[count:]]
        return (*outputs[:count], *saved)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def _watched_backward(run: Callable[[list[Any]], Any], watch: Watch) -> Callable[[list[Any]], Any]:
    def call(args: list[Any]) -> Any:
        return watch.run_backward(run, args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def compiled_nodes(output: Any) -> list[Any]:
    """Return the autograd nodes of the compiled functions that made a forward's output.

    Views that AOTAutograd takes again outside the graph stand on top of them.
    """
    found: list[Any] = []
    for leaf in _tensors_anywhere(output):
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
    waiting = [leaf.grad_fn for leaf in _tensors_anywhere(output)]
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
    nodes = (leaf.grad_fn for leaf in _tensors_anywhere(output))
    return list(dict.fromkeys(node for node in nodes if node is not None))


def at_backward_end(call: Callable[[], None]) -> None:
    """From inside a backward: call ``call`` when all of it is done."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(call)


def _tensors_anywhere(value: Any, depth: int = 6) -> Iterator[torch.Tensor]:
    """Yield the tensors in a model's output, of whatever classes it is made."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and not isinstance(value, (str, bytes, int, float, nn.Module)):
        if isinstance(value, Mapping):
            inner: Iterable[Any] = value.values()
        elif isinstance(value, (list, tuple, set)):
            inner = value
        elif hasattr(value, "__slots__") or hasattr(value, "__dict__"):
            names = [*getattr(value, "__slots__", ()), *getattr(value, "__dict__", ())]
            inner = [getattr(value, name, None) for name in names]
        else:
            inner = ()
        for item in inner:
            yield from _tensors_anywhere(item, depth - 1)


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

    def ran(inputs: Any, outputs: Any) -> None:
        made: set[Any] = {g.grad_fn for g in inputs if isinstance(g, torch.Tensor)}
        for inner in made - {None}:
            inner.register_prehook(forbidden)

    here = weakref.ref(node)  # the hook lives on the node: no cycle

    def begins() -> None:
        # A hook behind the backward keeps the tangents alive through it: only where it is needed.
        there = here()
        if torch.is_grad_enabled() and there is not None:  # create_graph=True
            there.register_hook(ran)

    before_backward(node, begins)


class _Farewell:
    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call

    def __del__(self) -> None:
        self.call()


def when_released(node: Any, call: Callable[[], Any]) -> None:
    """Call ``call`` once the autograd node is released: its graph is gone."""
    node.autockpt_farewell = _Farewell(call)


@contextlib.contextmanager
def outside_tracing() -> Iterator[None]:
    """Run real operations although a trace is in progress; the generators are put back."""
    with (
        _disable_current_modes(),
        unset_fake_temporarily(),
        torch.no_grad(),
        torch.random.fork_rng(devices=range(torch.cuda.device_count())),
    ):
        yield


# ------------------------------------------------------------------ errors of a trace


def forget_context(error: BaseException, ambient: BaseException | None) -> None:
    """Cut off of an error what was being handled already where its call began.

    Python hangs it on as context; it has nothing to do with why the call failed.
    """
    seen: BaseException | None = error
    while seen is not None and ambient is not None:
        if seen.__context__ is ambient:
            seen.__context__ = None
        seen = seen.__cause__ or seen.__context__


def user_error(error: BaseException) -> BaseException | None:
    """Return the error that our own code raised inside a trace, or None."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, BackendCompilerFailed):
            seen = seen.inner_exception
            continue
        if type(seen).__module__.split(".")[0] in ("autockpt", "autockpt_solvers"):
            return seen
        seen = seen.__cause__ or seen.__context__
    return None


def capture_failure(error: BaseException) -> str | None:
    """Return why Dynamo could not trace, with the user's line, or None for another error."""
    if isinstance(error, FailOnRecompileLimitHit):
        return f"it has been captured for {SIGNATURES} kinds of input, which is the limit"
    if not isinstance(error, TorchDynamoException):
        return None
    text = str(error)
    reason = getattr(error, "msg", None) if isinstance(error, Unsupported) else None
    lines = [line for line in (reason or text).splitlines() if line.strip()]
    head = "\n".join(lines[:6]) if lines else type(error).__name__
    frames = _user_frames(text) or _user_frames(str(getattr(error, "real_stack", "") or ""))
    where = f"{frames[-1][0]}, line {frames[-1][1]}, in {frames[-1][2]}" if frames else ""
    return f"{where}: {head}" if where else head


def autograd_refusal(error: BaseException) -> RuntimeError | None:
    """Return autograd's own refusal of a model that overwrites what its backward needs, or None.

    Differentiating meets it while it traces; eager meets it in its backward.
    """
    seen: BaseException | None = error
    while seen is not None:
        inner = seen.inner_exception if isinstance(seen, BackendCompilerFailed) else seen
        if type(inner) is RuntimeError and "modified by an inplace operation" in str(inner):
            return inner
        seen = inner.__cause__ or inner.__context__
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a device's allocator could not serve a request."""
    refused = type(error) is RuntimeError and "DefaultCPUAllocator: " in str(error)
    return refused or isinstance(error, torch.OutOfMemoryError)


def failed_run(error: BaseException, names: Collection[str]) -> tuple[str, int] | None:
    """Return which run of an operation failed in generated code, or the last before it that is
    known: its name, and how often it had run before. None where the error comes from elsewhere.
    """
    found: tuple[types.FrameType, int] | None = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename.startswith("<eval_with_key>"):
            found = frame, line
    if found is None:
        return None
    frame, line = found
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    for text in reversed(lines[:line]):
        made = _MADE.match(text)
        if made is None:
            continue
        name, again = made.groups()
        if name in names:
            return name, int(again or 0)
    return None


def may_be_eagers(error: BaseException) -> bool:
    """Return whether a trace ended by something that may end a plain run as well.

    An operator refused its inputs, or the user's code raised.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, (TorchRuntimeError, ObservedException)):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def raised_in_trace(error: BaseException) -> bool:
    """Return whether an error came out of Dynamo's tracing, not out of running what it traced."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == torch._dynamo.convert_frame.__file__:
            return True
        trace = trace.tb_next
    return False


def is_operator_error(error: BaseException) -> bool:
    """Return whether a trace ended because an operator refused its inputs."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, TorchRuntimeError):
        seen = seen.__cause__ or seen.__context__
    return seen is not None


def runs_elsewhere() -> bool:
    """Return whether a call must run plainly: under the user's own mode, under functorch, or where
    gradients go forward.
    """
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or any(not mode.is_infra_mode() for mode in _get_current_dispatch_mode_stack())
    )


def unguarded(model: nn.Module) -> Callable[[], list[Any]]:
    """Return a function for what a trace of the model takes for granted and does not guard on.

    These are the forwards of its modules' classes and the hooks of all modules. The function is
    called before each forward: it is cheap.
    """
    classes = list({type(module) for module in model.modules()})
    hooks = [value for name, value in vars(modules).items() if _GLOBAL_HOOKS.match(name)]

    def now() -> list[Any]:
        return [*(cls.forward for cls in classes), *(h for one in hooks for h in one.values())]

    return now


def has_lazy_parameters(model: nn.Module) -> bool:
    """Return whether some of the model's parameters get their shape at its first forward."""
    return any(nn.parameter.is_lazy(parameter) for parameter in model.parameters())


def in_backward() -> bool:
    """Return whether autograd is running a backward in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def keeps_graph() -> bool:
    """Return whether the running backward keeps its graph, so that it may run again."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def storage_uses(tensor: torch.Tensor) -> int:
    """Return how many tensors and Python objects hold a tensor's memory."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


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


def _user_frames(text: str) -> list[tuple[str, str, str]]:
    return [
        (m["file"], m["line"], m["name"])
        for m in _USER_FRAME.finditer(text)
        if not _is_library(m["file"])
    ]


def _is_library(file: str) -> bool:
    normal = file.replace("\\", "/")
    return normal == __file__.replace("\\", "/") or "/torch/" in normal


# ------------------------------------------------------------------ reading nodes


def fake_mode_of(module: fx.GraphModule) -> FakeTensorMode:
    """Return the mode whose fake tensors a traced graph carries."""
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, FakeTensor):
            return value.fake_mode
    raise AssertionError("a traced graph without tensors")


def is_random(node: fx.Node) -> bool:
    """Return whether the node draws from a generator."""
    target: Any = node.target
    seeded = torch.Tag.nondeterministic_seeded
    return isinstance(target, torch._ops.OpOverload) and seeded in target.tags


def is_operator(node: fx.Node) -> bool:
    """Return whether the node calls one of torch's own operators.

    Other operators are the user's; what they do beside computing is not known.
    """
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in (
        "aten",
        "prims",
    )


def getitem_index(node: fx.Node) -> int | None:
    """Return which output of its producer the node picks, or None if it is no pick."""
    if node.op == "call_function" and node.target is operator.getitem:
        return int(node.args[1])  # type: ignore[arg-type]
    return None


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number equal for two (fake) tensors exactly when they share memory."""
    return int(tensor.untyped_storage()._cdata)


def module_path(node: fx.Node) -> str:
    """Return the path of the module the node comes from, ``blocks.3.attn``; empty for the root."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path = str(next(reversed(stack.values()))[0])
    path = re.sub(r"^L\['\w+'\]", "", path)
    path = re.sub(r"\._modules\['([^']*)'\]", r".\1", path)
    path = re.sub(r"\['?([^'\]]*)'?\]", r".\1", path)
    return path.strip(".")


def source_line(node: fx.Node) -> str:
    """Return the user's line the node comes from, ``model.py:41``, or an empty string."""
    frames = _user_frames(node.meta.get("stack_trace") or "")
    if not frames:
        return ""
    file, line, _ = frames[-1]
    return f"{file.replace(chr(92), '/').rsplit('/', 1)[-1]}:{line}"


# ------------------------------------------------------------------ the CPU allocator


def allocation_events(run: Callable[[], Any]) -> list[int]:
    """Return the CPU allocator's events while ``run()`` runs: bytes, negative for a free.

    A thread can hold one profiler only. Where the user is profiling this one, the run takes place
    in a thread of its own.
    """
    if not is_profiled():
        return _legacy_events(run)
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(_without_gradients, run).result()


def is_profiled() -> bool:
    """Return whether the user is profiling this thread: the allocator's events go there."""
    return bool(torch._C._autograd._profiler_enabled())


def _without_gradients(run: Callable[[], Any]) -> list[int]:
    # Grad mode belongs to a thread.
    with torch.no_grad():
        return _legacy_events(run)


def _legacy_events(run: Callable[[], Any]) -> list[int]:
    autograd: Any = torch.autograd
    config = autograd.ProfilerConfig(
        autograd.ProfilerState.CPU,
        False,
        True,
        False,
        False,
        False,
        torch._C._profiler._ExperimentalConfig(),
    )
    autograd._enable_profiler_legacy(config)
    try:
        run()
    finally:
        records: Any = autograd._disable_profiler_legacy()
    return [
        event.cpu_memory_usage()
        for thread in records
        for event in thread
        if event.kind() == "memory_alloc" and event.cpu_memory_usage()
    ]


@dataclass(frozen=True, slots=True)
class AllocatorEvent:
    """One allocation, or one free where the bytes are negative.

    Attributes:
        time_ns: when, on the profiler's clock.
        address: of the memory.
        size_bytes: what was allocated or freed.
        scope: the innermost range around it that :func:`named_range` opened, else the operator's.
    """

    time_ns: int
    address: int
    size_bytes: int
    scope: str


@dataclass(frozen=True, slots=True)
class NamedRange:
    """One range that :func:`named_range` opened.

    Attributes:
        name: its name.
        compiled: whether it lies inside a compiled graph.
        first_event: the number of the allocator's events before it.
        last_event: the number of them by its end.
    """

    name: str
    compiled: bool
    first_event: int
    last_event: int


_RANGE = "autockpt/"


def named_range(name: str) -> contextlib.AbstractContextManager[Any]:
    """Open a range that :func:`watched_step` reports."""
    return torch.profiler.record_function(_RANGE + name)


def watched_step(run: Callable[[], Any]) -> tuple[list[AllocatorEvent], list[NamedRange]]:
    """Run a step; return the CPU allocator's events and the named ranges, in their order."""
    profiler = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    )
    profiler.start()
    try:
        run()
    finally:
        profiler.stop()
    inner: Any = profiler.profiler
    roots = inner.kineto_results.experimental_event_tree()
    events: list[AllocatorEvent] = []
    ranges: list[NamedRange] = []

    def walk(nodes: Iterable[Any], scope: str, compiled: bool) -> None:
        for node in sorted(nodes, key=lambda n: n.start_time_ns):
            fields = node.extra_fields
            if hasattr(fields, "alloc_size"):
                if fields.device.type == "cpu":
                    events.append(
                        AllocatorEvent(node.start_time_ns, fields.ptr, fields.alloc_size, scope)
                    )
                continue
            inside = compiled or "CompiledFunction" in node.name
            if not node.name.startswith(_RANGE):
                own = scope if scope.startswith(_RANGE) else node.name
                walk(node.children, own, inside)
                continue
            position, first = len(ranges), len(events)
            ranges.append(NamedRange("", False, 0, 0))
            walk(node.children, node.name, inside)
            name = node.name.removeprefix(_RANGE)
            ranges[position] = NamedRange(name, compiled, first, len(events))

    walk(roots, "", False)
    return [replace(e, scope=e.scope.removeprefix(_RANGE)) for e in events], ranges


# ------------------------------------------------------------------ CUDA


def cuda_history(run: Callable[[], Any], device: torch.device) -> Any:
    """Run a step; return torch's snapshot of the allocator with the step's history."""
    torch.cuda.memory._record_memory_history(max_entries=1_000_000, device=device)
    try:
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.memory._snapshot(device)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None, device=device)


def queue_delay(cycles: int) -> None:
    """Let the current CUDA stream wait, so that launches after it queue up."""
    torch.cuda._sleep(cycles)


# ------------------------------------------------------------------ memory, operator by operator


class _Onlooker(TorchDispatchMode):
    """A dispatch mode that sees operators and changes nothing that they do."""

    thread = 0  # that entered it

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Compiling under it is safe."""
        return True

    def leave(self) -> bool:
        """Leave it wherever on this thread's stack it is; return whether that was possible.

        Modes that the user has entered since stay. Inside a backward nothing can be left for good:
        autograd puts the stack back when it returns.
        """
        stack = _get_current_dispatch_mode_stack()
        if in_backward() or not any(mode is self for mode in stack):
            return False
        above = stack[[mode is self for mode in stack].index(True) + 1 :]
        # Of the base class: the user's own enter and exit are not to run.
        for mode in (*reversed(above), self):
            TorchDispatchMode.__exit__(mode, None, None, None)
        for mode in above:
            TorchDispatchMode.__enter__(mode)
        return True

    def enter_for(self, owner: object) -> None:
        """Enter it. Where ``owner``, which it must not hold, goes without having left it,
        :func:`leave_what_is_left_behind` does.
        """
        self.thread = threading.get_ident()
        self.__enter__()
        weakref.finalize(owner, _LEFT_BEHIND.append, self).atexit = False


# Modes whose owners are gone. The garbage collector runs at any moment, in the middle of an
# operator's dispatch too, where the stack of modes must stay as it is.
_LEFT_BEHIND: list[_Onlooker] = []


def leave_what_is_left_behind() -> None:
    """Leave the modes whose owners are gone: between operators, in the thread that entered them."""
    if in_backward():
        return
    for _ in range(len(_LEFT_BEHIND)):
        mode = _LEFT_BEHIND.pop(0)
        if not mode.leave() and mode.thread != threading.get_ident():
            _LEFT_BEHIND.append(mode)


class AllocationTracker(_Onlooker):
    """While entered, counts the bytes that operators allocate and have not freed.

    Workspace inside an operator is not seen. Works on real and on fake tensors.

    Attributes:
        live_bytes: allocated since the start and still alive.
        peak_bytes: the largest number of them so far.
        active: turned off, it lets everything through uncounted.
    """

    def __init__(self, round_up: Callable[[int], int]) -> None:
        super().__init__()
        self.round_up = round_up
        self.active = True
        self.live_bytes = 0
        self.peak_bytes = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._outside: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.active:
            self._count((args, kwargs), result)
        return result

    def _count(self, inputs: Any, result: Any) -> None:
        self._collect()
        for tensor in _strided(inputs):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._alive:
                self._outside[storage._cdata] = StorageWeakRef(storage)
        for tensor in _strided(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._alive and storage._cdata not in self._outside:
                size = self.round_up(storage.nbytes())
                self._alive[storage._cdata] = (StorageWeakRef(storage), size)
                self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def include(self, ref: StorageWeakRef, size_bytes: int) -> None:
        """Count memory that is there already, as long as it is."""
        if ref.cdata not in self._alive:
            self._alive[ref.cdata] = (ref, size_bytes)
            self.live_bytes += size_bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def count_now(self) -> None:
        """Take what has been freed since the last operator off the count."""
        self._collect()

    def _collect(self) -> None:
        for key in [k for k, (ref, _) in self._alive.items() if ref.expired()]:
            self.live_bytes -= self._alive.pop(key)[1]
        for key in [k for k, ref in self._outside.items() if ref.expired()]:
            del self._outside[key]


class OperatorMode(_Onlooker):
    """While entered, hands every operator to a method that runs it: ``see(name, run, inputs)``.

    Not views, which read nothing and of which no backward needs a value. The method's owner is
    held weakly.
    """

    def __init__(self, see: Callable[[str, Callable[[], Any], list[torch.Tensor]], Any]) -> None:
        super().__init__()
        self.see = weakref.WeakMethod(see)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def run() -> Any:
            return func(*args, **(kwargs or {}))

        see = self.see()
        if see is None or func.is_view:
            return run()
        return see(str(func), run, _strided((args, kwargs)))


def _strided(value: Any) -> list[torch.Tensor]:
    return [
        leaf
        for leaf in tree_leaves(value)
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
    ]


def is_fake(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has shape and dtype but no data."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return a nested structure with ``function`` applied to each tensor in it."""
    return tree_map_only(torch.Tensor, function, value)


def tensor_leaves(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a nested structure of tuples, lists, dicts and registered classes."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
