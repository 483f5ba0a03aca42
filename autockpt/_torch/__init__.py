"""The one door to torch's private modules.

Everything autockpt needs of ``torch._dynamo``, ``torch._functorch``, ``torch._subclasses``,
``torch._C`` and of undocumented behaviour goes through here, so that a change in torch is met in
one place. Nothing here knows about plans or budgets.
"""

from __future__ import annotations

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

from autockpt._torch.allocator import (
    AllocatorEvent,
    NamedRange,
    allocation_events,
    cuda_history,
    is_profiled,
    named_range,
    queue_delay,
    watched_step,
)
from autockpt._torch.engine import (
    at_backward_end,
    before_backward,
    compiled_behind,
    compiled_nodes,
    has_gradient_hooks,
    in_backward,
    in_checkpoint,
    keep_missing_gradients,
    keeps_graph,
    leaves_of_running_node,
    nodes_of,
    on_double_backward,
    when_released,
)
from autockpt._torch.failures import (
    autograd_refusal,
    capture_failure,
    failed_run,
    forget_context,
    is_operator_error,
    is_out_of_memory,
    may_be_eagers,
    raised_in_trace,
    user_error,
)
from autockpt._torch.generated import (
    boxed,
)
from autockpt._torch.joint import (
    JointGraph,
    Watch,
    WatchAround,
    saved_descriptors,
)
from autockpt._torch.modes import (
    AllocationTracker,
    OperatorMode,
    is_traced,
    leave_what_is_left_behind,
    outside_tracing,
    runs_elsewhere,
)
from autockpt._torch.nodes import (
    computes_with_its_integers,
    fake_mode_of,
    getitem_index,
    is_operator,
    is_random,
    module_path,
    source_line,
)
from autockpt._torch.numbers import (
    Floats,
    Integers,
    Number,
    value_of,
)
from autockpt._torch.tracing import (
    SIGNATURES,
    compile_forward,
    compile_pieces,
    has_lazy_parameters,
    opaque,
    unguarded,
    while_tracing,
)
from autockpt._torch.values import (
    copy_unnoticed,
    is_batched,
    is_fake,
    map_tensors,
    storage_key,
    storage_uses,
    strided_parts,
    tensor_leaves,
    tensors_anywhere,
)

__all__ = [
    "SIGNATURES",
    "AllocationTracker",
    "AllocatorEvent",
    "FakeTensor",
    "FakeTensorMode",
    "Floats",
    "Integers",
    "JointGraph",
    "NamedRange",
    "Number",
    "OperatorMode",
    "StorageWeakRef",
    "Watch",
    "WatchAround",
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
    "computes_with_its_integers",
    "copy_unnoticed",
    "cuda_history",
    "failed_run",
    "fake_mode_of",
    "forget_context",
    "getitem_index",
    "has_gradient_hooks",
    "has_lazy_parameters",
    "in_backward",
    "in_checkpoint",
    "is_batched",
    "is_fake",
    "is_operator",
    "is_operator_error",
    "is_out_of_memory",
    "is_profiled",
    "is_random",
    "is_traced",
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
    "strided_parts",
    "tensor_leaves",
    "tensors_anywhere",
    "unguarded",
    "user_error",
    "value_of",
    "watched_step",
    "when_released",
    "while_tracing",
]
